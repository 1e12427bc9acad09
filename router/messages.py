"""The fields of a chat request, read strictly into what the chat format needs.

Every rule about the shape of messages, tools and thinking stands here; how they become a prompt is `chat_format.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from . import dialect as d
from .fields import (
    Fields,
    as_list,
    as_object,
    as_text,
    missing,
    unsupported,
    unsupported_value,
    wrong_type,
    wrong_value,
)

MAX_MESSAGES = 4096
MAX_TOOLS = 1024
MAX_PARTS = 4096
MAX_CALLS = 1024
MAX_NAME = 64

ROLES = ("system", "developer", "user", "assistant", "tool", "latest_reminder")
_NAME = re.compile(r"[a-zA-Z0-9_-]+\Z")

ToolChoice = Literal["none", "auto", "required", "named"]


@dataclass(frozen=True)
class ToolCall:
    """A call in an earlier assistant message."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One message, its text parts joined."""

    role: str
    text: str
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    call_id: str = ""
    prefix: bool = False


@dataclass(frozen=True)
class Tool:
    """One function that the model may call."""

    name: str
    description: str
    parameters: Any
    strict: bool = False


@dataclass(frozen=True, kw_only=True)
class ChatPrompt:
    """All that decides the prompt of a chat request."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice = "auto"
    tool_name: str = ""
    """The function that `tool_choice` names."""
    schema: Any = None
    """The bare JSON schema of `response_format`."""
    json_object: bool = False
    thinking: bool = True
    tier: d.Tier = "high"
    budget: int | None = None
    """Effort as a number; V4.1 only."""
    task: str | None = None
    continued: bool = False
    generation_header: bool = True

    @property
    def tools_active(self) -> bool:
        return bool(self.tools) and self.tool_choice != "none"


def read_chat(fields: Fields, dialect: d.Dialect) -> ChatPrompt:
    """The chat fields of a request body.

    Raises:
        RequestError: the first thing that is wrong; `param` is its path.
    """
    messages = _read_messages(fields)
    tools = _read_tools(fields)
    choice, name = _read_tool_choice(fields, tools)
    thinking, tier, budget = _read_thinking(fields, dialect)
    schema, json_object = _read_format(fields)
    task = fields.choice("task", tuple(d.TASKS))
    continued = fields.flag("continue_final_message", False)
    if continued and fields.maybe_flag("add_generation_prompt"):
        raise wrong_value("add_generation_prompt", "false together with continue_final_message", True)
    continued = continued or messages[-1].prefix
    if continued:
        last = messages[-1]
        if last.role != "assistant":
            raise wrong_value("continue_final_message", "used with a final assistant message", last.role)
        if tools:
            raise wrong_value("continue_final_message", "used without tools", True)
        if last.calls:
            raise wrong_value("continue_final_message", "used on a message without tool calls", True)
        if task is not None:
            raise wrong_value("task", "used without continue_final_message", task)
    if task is not None:
        wanted = ("assistant",) if task == "title" else ("user", "tool", "latest_reminder")
        if messages[-1].role not in wanted:
            raise wrong_value("task", f"a task that can follow a final {messages[-1].role} message", task)
    return ChatPrompt(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        tool_name=name,
        schema=schema,
        json_object=json_object,
        thinking=thinking,
        tier=tier,
        budget=budget,
        task=task,
        continued=continued,
        generation_header=fields.flag("add_generation_prompt", True),
    )


def _read_messages(fields: Fields) -> tuple[Message, ...]:
    raw = as_list(fields.require("messages"), fields.path("messages"), low=1, high=MAX_MESSAGES)
    messages = [_read_message(item, f"{fields.path('messages')}[{index}]") for index, item in enumerate(raw)]
    open_at: int | None = None
    answered: set[str] = set()
    last_calls: tuple[ToolCall, ...] = ()
    for index, message in enumerate(messages):
        path = f"{fields.path('messages')}[{index}]"
        if message.role == "tool":
            if not last_calls:
                raise wrong_value(f"{path}.role", "a role other than tool, as no call stands before it", "tool")
            answered.add(message.call_id)
            continue
        _require_results(fields, messages, open_at, answered)
        open_at = None
        if message.role == "assistant":
            ids = [call.id for call in message.calls]
            if len(set(ids)) != len(ids):
                raise wrong_value(f"{path}.tool_calls", "calls with different ids", ids)
            last_calls, open_at, answered = message.calls, index if ids else None, set()
    return tuple(messages)


def _require_results(fields: Fields, messages: list[Message], open_at: int | None, answered: set[str]) -> None:
    if open_at is not None and any(call.id not in answered for call in messages[open_at].calls):
        param = f"{fields.path('messages')}[{open_at}].tool_calls"
        raise wrong_value(param, "followed by a tool message for each call", "a call without result")


def _read_message(item: object, path: str) -> Message:
    fields = Fields(as_object(item, path), path)
    role = as_text(fields.require("role"), f"{path}.role")
    if role == "function":
        raise unsupported_value(f"{path}.role", "use tools and the role tool")
    if role not in ROLES:
        raise wrong_value(f"{path}.role", "one of " + ", ".join(ROLES), role)
    if fields.given("function_call"):
        raise unsupported(f"{path}.function_call", "use tool_calls")
    text = _read_content(fields, role)
    if role == "tool":
        return Message(role, text, call_id=as_text(fields.require("tool_call_id"), f"{path}.tool_call_id"))
    if role != "assistant":
        return Message(role, text)
    reasoning = fields.text("reasoning_content")
    if reasoning is None:
        reasoning = fields.text("reasoning")
    calls = tuple(
        _read_call(call, f"{path}.tool_calls[{index}]")
        for index, call in enumerate(fields.items("tool_calls", high=MAX_CALLS) or ())
    )
    return Message(role, text, reasoning=reasoning or "", calls=calls, prefix=fields.flag("prefix", False))


def _read_content(fields: Fields, role: str) -> str:
    value = fields.raw("content")
    path = fields.path("content")
    if value is None:
        if role != "assistant":
            raise missing(path)
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise wrong_type(path, "a string or a list of text parts", value)
    texts: list[str] = []
    for index, part in enumerate(as_list(value, path, high=MAX_PARTS)):
        inner = Fields(as_object(part, f"{path}[{index}]"), f"{path}[{index}]")
        kind = as_text(inner.require("type"), f"{path}[{index}].type")
        if kind != "text":
            raise unsupported_value(f"{path}[{index}]", f"parts of type {kind[:40]!r}; the model reads text only")
        texts.append(as_text(inner.require("text"), f"{path}[{index}].text"))
    return "\n\n".join(texts)


def _read_call(item: object, path: str) -> ToolCall:
    fields = Fields(as_object(item, path), path)
    if fields.choice("type", ("function",)) is None and not fields.given("function"):
        raise missing(f"{path}.function")
    function = Fields(as_object(fields.require("function"), f"{path}.function"), f"{path}.function")
    name = _read_name(function)
    arguments = function.text("arguments")
    return ToolCall(as_text(fields.require("id"), f"{path}.id"), name, "{}" if arguments is None else arguments)


def _read_name(function: Fields) -> str:
    name = as_text(function.require("name"), function.path("name"), low=1, high=MAX_NAME)
    if _NAME.match(name) is None:
        raise wrong_value(function.path("name"), "made of letters, digits, '_' and '-'", name)
    return name


def _read_tools(fields: Fields) -> tuple[Tool, ...]:
    tools: list[Tool] = []
    names: set[str] = set()
    for index, item in enumerate(fields.items("tools", high=MAX_TOOLS) or ()):
        path = f"{fields.path('tools')}[{index}]"
        tool = Fields(as_object(item, path), path)
        kind = as_text(tool.require("type"), f"{path}.type")
        if kind != "function":
            raise unsupported_value(f"{path}.type", "only functions can be called")
        function = Fields(as_object(tool.require("function"), f"{path}.function"), f"{path}.function")
        name = _read_name(function)
        if name in names:
            raise wrong_value(f"{path}.function.name", "different from those of the other tools", name)
        names.add(name)
        parameters = function.raw("parameters")
        if parameters is not None:
            as_object(parameters, function.path("parameters"))
        tools.append(
            Tool(
                name,
                function.text("description") or "",
                {} if parameters is None else parameters,
                function.flag("strict", False),
            )
        )
    return tuple(tools)


def _read_tool_choice(fields: Fields, tools: tuple[Tool, ...]) -> tuple[ToolChoice, str]:
    value = fields.raw("tool_choice")
    path = fields.path("tool_choice")
    if value is None or value == "auto":
        return "auto", ""
    if value == "none":
        return "none", ""
    if isinstance(value, str):
        if value != "required":
            raise wrong_value(path, "none, auto, required or a function", value)
        if not tools:
            raise wrong_value(path, "none or auto, as there are no tools", value)
        return "required", ""
    choice = Fields(as_object(value, path), path)
    kind = as_text(choice.require("type"), f"{path}.type")
    if kind == "allowed_tools":
        raise unsupported_value(path, "allowed_tools needs constrained output, which the workers do not offer yet")
    if kind != "function":
        raise wrong_value(f"{path}.type", "function or allowed_tools", kind)
    function = Fields(as_object(choice.require("function"), f"{path}.function"), f"{path}.function")
    name = as_text(function.require("name"), f"{path}.function.name")
    if name not in {tool.name for tool in tools}:
        raise wrong_value(path, "the name of one of the tools", name)
    return "named", name


def _read_thinking(fields: Fields, dialect: d.Dialect) -> tuple[bool, d.Tier, int | None]:
    """Whether to think, and how hard: the `thinking` object beats the template arguments, these beat the effort."""
    effort = fields.raw("reasoning_effort")
    budget: int | None = None
    tier: d.Tier = "high"
    path = fields.path("reasoning_effort")
    if isinstance(effort, int) and not isinstance(effort, bool) and dialect.effort_budgets:
        if not 1 <= effort <= 100:
            raise wrong_value(path, "from 1 to 100", effort)
        budget = effort
    elif effort is not None:
        as_text(effort, path)
        if effort != "none" and effort not in d.TIERS:
            raise wrong_value(path, "one of none, " + ", ".join(d.TIERS), effort)
        tier = d.TIERS.get(effort, "high")
    thinking = effort != "none"
    arguments = fields.members("chat_template_kwargs")
    if arguments is not None:
        for name in ("enable_thinking", "thinking"):
            wanted = arguments.maybe_flag(name)
            thinking = thinking if wanted is None else wanted
    explicit = fields.raw("thinking")
    if isinstance(explicit, bool):
        thinking = explicit
    elif explicit is not None:
        kind = Fields(as_object(explicit, fields.path("thinking")), fields.path("thinking"))
        kind.require("type")
        thinking = kind.choice("type", ("enabled", "disabled", "adaptive")) != "disabled"
    return thinking, tier, budget


def _read_format(fields: Fields) -> tuple[Any, bool]:
    """The schema of `response_format`, or that it asks for any JSON object."""
    wanted = fields.members("response_format")
    if wanted is None:
        return None, False
    wanted.require("type")
    kind = wanted.choice("type", ("text", "json_object", "json_schema", "structural_tag"))
    if kind != "json_schema":
        return None, kind == "json_object"
    inner = Fields(as_object(wanted.require("json_schema"), wanted.path("json_schema")), wanted.path("json_schema"))
    _read_name(inner)
    schema: Mapping[str, Any] = as_object(inner.require("schema"), inner.path("schema"))
    return schema, False
