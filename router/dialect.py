"""What differs between chat dialects, as data: marker names, tag names, preambles, where system text goes.

The texts belong to the model's format (DeepSeek, MIT): a changed character is another prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

EffortProfile = Literal["official", "preview"]
Tier = Literal["low", "high", "max"]

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
SYSTEM = "<｜System｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
REMINDER = "<｜latest_reminder｜>"
EXTRACTED_URL = "<｜extracted_url｜>"
FIM_BEGIN = "<｜fim▁begin｜>"
FIM_HOLE = "<｜fim▁hole｜>"
FIM_END = "<｜fim▁end｜>"

TASKS: Mapping[str, str] = {
    "action": "<｜action｜>",
    "query": "<｜query｜>",
    "authority": "<｜authority｜>",
    "domain": "<｜domain｜>",
    "title": "<｜title｜>",
    "read_url": "<｜read_url｜>",
}

TIERS: Mapping[str, Tier] = {
    "low": "low",
    "minimal": "low",
    "medium": "high",
    "high": "high",
    "xhigh": "high",
    "max": "max",
    "ultra": "max",
}

_ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause,"
    " rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered"
    " alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)

_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose"
    " the problem into its most fundamental components, trace every causal chain to its root, and resolve the"
    " underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain"
    " that no assumption remains unchecked and no error remains undiscovered.\n\n"
)

_PREAMBLES: Mapping[EffortProfile, Mapping[Tier, str]] = {
    "official": {"low": "", "high": _ABSOLUTE_MAXIMUM, "max": _BEYOND_MAXIMUM},
    "preview": {"low": "", "high": "", "max": _ABSOLUTE_MAXIMUM},
}

JSON_SCHEMA_SECTION = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{schema}"

JSON_OBJECT_SECTION = (
    "\n\nYou are a helpful assistant designed to output JSON.\n## Response Format:\n\nReply with JSON object ONLY."
)

_TOOLS_SECTION = """

## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a \
"<｜DSML｜{block}>" block like the following:

<｜DSML｜{block}>
<｜DSML｜{invoke} name="$TOOL_NAME">
<｜DSML｜{parameter} name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜{parameter}>
...
</｜DSML｜{invoke}>
<｜DSML｜{invoke} name="$TOOL_NAME2">
...
</｜DSML｜{invoke}>
</｜DSML｜{block}>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

{schemas}

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""


@dataclass(frozen=True, kw_only=True)
class Dialect:
    """One chat format. Marker ids are looked up by name in the checkpoint's tokenizer."""

    name: str
    block: str
    """Name of the tool block's tag."""
    invoke: str
    parameter: str
    block_aliases: tuple[str, ...]
    """Other block names that the model may write."""
    empty_invoke_line: bool
    """A call without parameters has an empty line between its tags."""
    system_in_place: bool
    """System texts stay where they are, each behind its own marker; else all are joined in front."""
    preambles: Mapping[EffortProfile, Mapping[Tier, str]] | None = None
    effort_line: str = ""
    effort_budgets: Mapping[Tier, int] = field(default_factory=dict)

    def preamble(self, profile: EffortProfile, tier: Tier, budget: int | None = None) -> str:
        """The text that tells the model how hard to think; may be empty."""
        if self.preambles is not None:
            return self.preambles[profile][tier]
        return self.effort_line.format(budget=budget or self.effort_budgets[tier])

    def tools_section(self, schemas: str) -> tuple[str, str, str]:
        """What stands before the schemas (markers spelled out), the schemas, what stands behind."""
        filled = _TOOLS_SECTION.format(block=self.block, invoke=self.invoke, parameter=self.parameter, schemas="\0")
        before, after = filled.split("\0")
        return before, schemas, after

    @property
    def markers(self) -> tuple[str, ...]:
        """Names that the tokenizer must know before a chat request can be served."""
        names = (BOS, EOS, USER, ASSISTANT, THINK, END_THINK, DSML, REMINDER)
        return (*names, SYSTEM) if self.system_in_place else names


V4 = Dialect(
    name="deepseek_v4",
    block="tool_calls",
    invoke="invoke",
    parameter="parameter",
    block_aliases=("toolcalls", "tool", "function_calls"),
    empty_invoke_line=False,
    system_in_place=False,
    preambles=_PREAMBLES,
)

V41 = Dialect(
    name="deepseek_v41",
    block=" calls",
    invoke=" invoke",
    parameter=" parameter",
    block_aliases=(),
    empty_invoke_line=True,
    system_in_place=True,
    effort_line=("Reasoning Effort: {budget} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"),
    effort_budgets={"low": 50, "high": 75, "max": 100},
)

DIALECTS: Mapping[str, Dialect] = {V4.name: V4, V41.name: V41}
"""By the checkpoint's `model_type`."""
