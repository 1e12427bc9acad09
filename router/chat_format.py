"""What a chat request becomes: a list of segments, and the state in which its output is to be parsed.

Source: the published chat format of DeepSeek-V4; where its references differ, what this project decided. Knows messages
and the dialect; not tokens, not HTTP.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from . import dialect as d
from .messages import ChatPrompt, Message, ToolCall
from .tokenizer import Segment

ParseStart = Literal["reasoning", "reasoning_continued", "content", "content_continued", "tool_calls"]


@dataclass(frozen=True)
class Rendered:
    """A prompt, and how its output begins."""

    segments: tuple[Segment, ...]
    parse_start: ParseStart
    parse_tools: bool

    @property
    def text(self) -> str:
        """The prompt as one string; markers spelled out."""
        return "".join(segment.text for segment in self.segments)


def dump_json(value: Any) -> str:
    """JSON as the model was trained to read it: `", "`, `": "`, key order kept, non-ASCII raw."""
    return json.dumps(value, ensure_ascii=False)


class _Writer:
    """Collects segments; neighbouring texts become one, since they are encoded together."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self._texts: list[str] = []

    def marker(self, name: str) -> None:
        self._close()
        self.segments.append(Segment(name, is_marker=True))

    def text(self, text: str) -> None:
        self._texts.append(text)

    def template(self, text: str, markers: re.Pattern[str]) -> None:
        """Fixed text of ours, in which spelled markers are markers."""
        for piece in markers.split(text):
            if markers.fullmatch(piece):
                self.marker(piece)
            else:
                self.text(piece)

    def finish(self) -> tuple[Segment, ...]:
        self._close()
        return tuple(self.segments)

    def _close(self) -> None:
        text = "".join(self._texts)
        self._texts.clear()
        if text:
            self.segments.append(Segment(text))


_TEMPLATE_MARKERS = re.compile(f"({re.escape(d.DSML)}|{re.escape(d.THINK)}|{re.escape(d.END_THINK)})")
_URL_MARKER = re.compile(f"({re.escape(d.EXTRACTED_URL)})")


def render(chat: ChatPrompt, dialect: d.Dialect, profile: d.EffortProfile) -> Rendered:
    """The prompt of a chat request. `chat` has passed `read_chat`, so nothing is refused here."""
    return _Renderer(chat, dialect, profile).run()


def fill_in_the_middle(prompt: str, suffix: str) -> tuple[tuple[str, bool], ...]:
    """(text, is marker) pieces of a completion between two texts; the texts are raw prompts."""
    return ((d.FIM_BEGIN, True), (prompt, False), (d.FIM_HOLE, True), (suffix, False), (d.FIM_END, True))


class _Renderer:
    def __init__(self, chat: ChatPrompt, dialect: d.Dialect, profile: d.EffortProfile) -> None:
        self._chat = chat
        self._dialect = dialect
        self._profile = profile
        self._out = _Writer()
        self._keeps_reasoning = chat.thinking and chat.tools_active

    def run(self) -> Rendered:
        chat = self._chat
        self._out.marker(d.BOS)
        turns = self._system_section()
        continued = turns.pop() if chat.continued else None
        self._turns(turns)
        if continued is not None:
            start = self._open_turn(continued)
        else:
            start = self._header()
        return Rendered(self._out.finish(), start, chat.tools_active and chat.task is None)

    # ---- system ----

    def _system_section(self) -> list[Message]:
        """Write what stands before the first turn; the messages that are turns."""
        chat, dialect = self._chat, self._dialect
        preamble = dialect.preamble(self._profile, chat.tier, chat.budget) if chat.thinking else ""
        if not dialect.system_in_place:
            self._out.text(preamble)
            self._out.text("\n\n".join(m.text for m in chat.messages if _is_system(m) and m.text))
            self._tools_and_format()
            return [m for m in chat.messages if not _is_system(m)]
        first = chat.messages[0].text if _is_system(chat.messages[0]) else ""
        if preamble or first or chat.tools_active or chat.schema is not None or chat.json_object:
            self._out.marker(d.SYSTEM)
            self._out.text(preamble + first)
            self._tools_and_format()
        return list(chat.messages[1:] if _is_system(chat.messages[0]) else chat.messages)

    def _tools_and_format(self) -> None:
        chat = self._chat
        if chat.tools_active:
            schemas = "\n".join(
                dump_json({"name": tool.name, "description": tool.description, "parameters": tool.parameters})
                for tool in chat.tools
            )
            before, middle, after = self._dialect.tools_section(schemas)
            self._out.template(before, _TEMPLATE_MARKERS)
            self._out.text(middle)
            self._out.template(after, _TEMPLATE_MARKERS)
        if chat.schema is not None:
            self._out.text(d.JSON_SCHEMA_SECTION.replace("{schema}", dump_json(chat.schema)))
        elif chat.json_object:
            self._out.text(d.JSON_OBJECT_SECTION)

    # ---- turns ----

    def _turns(self, messages: Sequence[Message]) -> None:
        calls: tuple[ToolCall, ...] = ()
        run: list[Message] = []
        last_user = max((i for i, m in enumerate(messages) if m.role in ("user", "tool")), default=-1)
        for index, message in enumerate(messages):
            if message.role in ("user", "tool"):
                run.append(message)
                following = messages[index + 1].role if index + 1 < len(messages) else ""
                if following not in ("user", "tool"):
                    self._user_turn(run, calls, is_last=index == last_user)
                    run = []
            elif message.role == "assistant":
                self._assistant_turn(message)
                calls = message.calls
            elif message.role == "latest_reminder":
                self._out.marker(d.REMINDER)
                self._out.text(message.text)
            elif message.text:
                self._out.marker(d.SYSTEM)
                self._out.text(message.text)

    def _user_turn(self, run: Sequence[Message], calls: tuple[ToolCall, ...], is_last: bool) -> None:
        order = {call.id: index for index, call in enumerate(calls)}
        results = iter(sorted((m for m in run if m.role == "tool"), key=lambda message: order.get(message.call_id, 0)))
        blocks = [
            f"<tool_result>{next(results).text}</tool_result>" if message.role == "tool" else message.text
            for message in run
        ]
        self._out.marker(d.USER)
        text = "\n\n".join(blocks)
        if is_last and self._chat.task == "read_url":
            self._out.template(text, _URL_MARKER)
        else:
            self._out.text(text)

    def _assistant_turn(self, message: Message) -> None:
        self._out.marker(d.ASSISTANT)
        if self._keeps_reasoning:
            self._out.marker(d.THINK)
            self._out.text(message.reasoning)
        self._out.marker(d.END_THINK)
        self._out.text(message.text)
        if message.calls:
            self._calls(message.calls)
        self._out.marker(d.EOS)

    def _calls(self, calls: Sequence[ToolCall]) -> None:
        dialect, out = self._dialect, self._out
        self._open_block()
        for index, call in enumerate(calls):
            out.text("\n<" if index else "<")
            out.marker(d.DSML)
            out.text(f'{dialect.invoke} name="{call.name}">\n')
            parameters = _parameters(call.arguments)
            for key, is_string, value in parameters:
                out.text("<")
                out.marker(d.DSML)
                out.text(f'{dialect.parameter} name="{key}" string="{"true" if is_string else "false"}">{value}</')
                out.marker(d.DSML)
                out.text(f"{dialect.parameter}>\n")
            if not parameters and dialect.empty_invoke_line:
                out.text("\n")
            out.text("</")
            out.marker(d.DSML)
            out.text(f"{dialect.invoke}>")
        out.text("\n</")
        out.marker(d.DSML)
        out.text(f"{dialect.block}>")

    def _open_block(self) -> None:
        self._out.text("\n\n<")
        self._out.marker(d.DSML)
        self._out.text(f"{self._dialect.block}>\n")

    # ---- the end of the prompt ----

    def _open_turn(self, message: Message) -> ParseStart:
        self._out.marker(d.ASSISTANT)
        if not self._chat.thinking:
            self._out.marker(d.END_THINK)
            self._out.text(message.text)
            return "content_continued"
        self._out.marker(d.THINK)
        self._out.text(message.reasoning)
        if not message.text:
            return "reasoning_continued"
        self._out.marker(d.END_THINK)
        self._out.text(message.text)
        return "content_continued"

    def _header(self) -> ParseStart:
        chat = self._chat
        if not chat.generation_header:
            return "content"
        if chat.task is not None and chat.task != "action":
            self._out.marker(d.TASKS[chat.task])
            return "content"
        self._out.marker(d.ASSISTANT)
        self._out.marker(d.THINK if chat.thinking else d.END_THINK)
        if chat.task is not None:
            self._out.marker(d.TASKS[chat.task])
        elif chat.tools_active and chat.tool_choice in ("required", "named") and not chat.thinking:
            self._open_block()
            return "tool_calls"
        return "reasoning" if chat.thinking else "content"


def _is_system(message: Message) -> bool:
    return message.role in ("system", "developer")


def _parameters(arguments: str) -> list[tuple[str, bool, str]]:
    """(name, is a string, value as text) of a call; arguments that are no JSON object are one string parameter."""
    try:
        value = json.loads(arguments, parse_constant=_refuse_constant)
        if isinstance(value, dict):
            found = [
                (key, isinstance(item, str), item if isinstance(item, str) else dump_json(item))
                for key, item in value.items()
            ]
            # A lone surrogate can be written in JSON but not in UTF-8.
            for key, _, text in found:
                (key + text).encode()
            return found
    except (ValueError, RecursionError):
        pass
    return [("arguments", True, arguments)]


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
