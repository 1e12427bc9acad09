"""What the model writes, as message fields: reasoning, content, tool calls, token by token.

Works on ids: `<think>`, `</think>` and the tool marker count when they arrive as their ids, never as text. Every way of
cutting the output gives the same joined result. Knows the dialect; not HTTP, not workers.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..core.sampling import FinishReason
from . import dialect as d
from .chat_format import ParseStart
from .stops import StopMatcher
from .tokenizer import Detokeniser, Tokenizer

_CALL_ID_ALPHABET = string.ascii_letters + string.digits

MARK = "\udcff"
"""Stands for the tool marker's id inside buffered text. A lone surrogate never comes out of a UTF-8 decoder."""


@dataclass(frozen=True)
class TextPiece:
    """More reasoning or more content."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclass(frozen=True)
class CallOpened:
    """A new call: its name is whole, its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments object."""

    index: int
    text: str


Piece = TextPiece | CallOpened | CallArguments


def new_call_id() -> str:
    return "call_" + "".join(secrets.choice(_CALL_ID_ALPHABET) for _ in range(24))


@dataclass(frozen=True)
class MarkerIds:
    """The ids that the parser looks for."""

    think: int
    end_think: int
    dsml: int

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> MarkerIds:
        return cls(tokenizer.marker_id(d.THINK), tokenizer.marker_id(d.END_THINK), tokenizer.marker_id(d.DSML))


class OutputParser:
    """One choice of a chat request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        markers: MarkerIds,
        dialect: d.Dialect,
        start: ParseStart,
        *,
        parse_tools: bool,
        skip_special: bool = True,
        stops: StopMatcher | None = None,
        single_call: bool = False,
        prompt: Sequence[int] = (),
    ) -> None:
        self._markers = markers
        self._dialect = dialect
        self._parse_tools = parse_tools
        self._detokeniser = Detokeniser(tokenizer, skip_special=skip_special, prompt=prompt)
        self._stops = stops or StopMatcher(())
        self._state: Literal["reasoning", "content", "block"]
        self._state = "block" if start == "tool_calls" else "reasoning" if start.startswith("reasoning") else "content"
        self._strip = start in ("reasoning", "content")
        self._seen_reasoning = self._state == "reasoning"
        self._held = ""
        """Line breaks, and a `<` behind them, that may turn out not to be text."""
        self._opening: str | None = None
        """What follows a marker that may open a tool block."""
        self._block = _ToolBlock(dialect, single_call)
        self._out: list[Piece] = []
        blocks = (dialect.block, *dialect.block_aliases)
        self._openers = (*(name + ">" for name in blocks), dialect.invoke)
        self.num_tokens = 0
        self._reasoning_tokens: int | None = 0 if self._state != "reasoning" else None

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the content."""
        return self._stops.matched

    @property
    def is_complete(self) -> bool:
        """Nothing that comes now can change the message: the tool block is closed or a stop string was found."""
        return self._block.closed or self._stops.matched is not None

    @property
    def num_calls(self) -> int:
        return self._block.num_calls

    @property
    def reasoning_tokens(self) -> int:
        """Generated tokens up to and with the first `</think>`; all of them when none came."""
        return self.num_tokens if self._reasoning_tokens is None else self._reasoning_tokens

    def feed(self, token: int, *, searched: bool = True, silent: bool = False) -> list[Piece]:
        """What one more token makes certain.

        Args:
            searched: False for the first min_tokens tokens: their text is no part of a stop string.
            silent: a stop token, which is counted but has no text.
        """
        self.num_tokens += 1
        if self.is_complete or silent:
            return []
        if token == self._markers.end_think:
            self._text(self._detokeniser.flush(), searched)
            self._end_think()
        elif token == self._markers.think:
            self._text(self._detokeniser.flush(), searched)
            self._think()
        elif token == self._markers.dsml and self._parse_tools:
            self._text(self._detokeniser.flush(), searched)
            self._marker(searched)
        else:
            self._text(self._detokeniser.feed(token), searched)
        return self._take()

    def finish(self, reason: FinishReason) -> list[Piece]:
        """What was held back, when the output has ended."""
        if not self.is_complete:
            self._text(self._detokeniser.flush(), True)
            self._abandon_opening(True)
        if self._state == "block":
            self._out += self._block.finish(cut=reason is FinishReason.LENGTH)
        elif not self.is_complete:
            if self._state == "content":
                self._hold_stop_tail()
            self._release()
        return self._take()

    # ---- text outside the block ----

    def _text(self, text: str, searched: bool) -> None:
        if not text or self.is_complete:
            return
        if self._state == "block":
            self._out += self._block.feed(text)
        elif self._opening is not None:
            self._opening += text
            self._try_open(searched)
        elif self._state == "content":
            if self._strip:
                text = text.lstrip("\n")
                if not text:
                    return
                self._strip = False
            text = self._stops.feed(text, searched)
            if self._stops.matched is None:
                self._hold(text)
            else:
                self._release()
                self._emit(text)
        else:
            self._hold(text)

    def _hold(self, text: str) -> None:
        """Release all but line breaks (and a `<` if a tool block may open) at the end."""
        if self._strip:
            text = text.lstrip("\n")
            if not text:
                return
            self._strip = False
        text = self._held + text
        body = text[:-1] if self._parse_tools and text.endswith("<") else text
        certain = len(body.rstrip("\n"))
        self._held = text[certain:]
        self._emit(text[:certain])

    def _release(self) -> None:
        held, self._held = self._held, ""
        self._emit(held)

    def _emit(self, text: str) -> None:
        if not text:
            return
        kind: Literal["reasoning", "content"] = "reasoning" if self._state == "reasoning" else "content"
        if self._out and isinstance(self._out[-1], TextPiece) and self._out[-1].kind == kind:
            text = self._out.pop().text + text  # type: ignore[union-attr]
        self._out.append(TextPiece(kind, text))

    # ---- markers ----

    def _end_think(self) -> None:
        self._abandon_opening(True)
        if self._reasoning_tokens is None:
            self._reasoning_tokens = self.num_tokens
        if self._state == "reasoning":
            if self._held.endswith("<"):
                self._release()
            self._held = ""
            self._state, self._strip = "content", True
        else:
            self._drop_marker(d.END_THINK)

    def _think(self) -> None:
        self._abandon_opening(True)
        if self._state == "content" and not self._seen_reasoning:
            self._hold_stop_tail()
            self._release()
            self._state, self._strip, self._seen_reasoning = "reasoning", True, True
            if self._reasoning_tokens == 0:
                self._reasoning_tokens = None
        else:
            self._drop_marker(d.THINK)

    def _drop_marker(self, spelling: str) -> None:
        """A stray marker is no text, save inside a tool block; a `<` before it opens nothing."""
        if self._state == "block":
            self._out += self._block.feed(spelling)
        elif self._held.endswith("<"):
            self._release()

    def _marker(self, searched: bool) -> None:
        if self._state == "block":
            self._out += self._block.feed(MARK)
            return
        self._abandon_opening(searched)
        if self.is_complete:
            return
        if self._state == "content":
            self._hold_stop_tail()
        if self._held.endswith("<"):
            self._opening = ""
        else:
            self._text(d.DSML, searched)

    def _hold_stop_tail(self) -> None:
        """Text held for a stop string is content after all, as a marker or the end follows it."""
        rest = self._stops.flush()
        if rest:
            self._hold(rest)

    def _try_open(self, searched: bool) -> None:
        assert self._opening is not None
        for opener in self._openers:
            if self._opening.startswith(opener):
                rest = self._opening[len(opener) :]
                self._opening = None
                self._emit(self._held[:-1].rstrip("\n"))
                self._held = ""
                self._state = "block"
                if opener == self._dialect.invoke:
                    rest = "<" + MARK + opener + rest
                self._out += self._block.feed(rest)
                return
        if not any(opener.startswith(self._opening) for opener in self._openers):
            self._abandon_opening(searched)

    def _abandon_opening(self, searched: bool) -> None:
        """No tool block after all: the marker is text."""
        if self._opening is None:
            return
        text, self._opening = d.DSML + self._opening, None
        self._text(text, searched)

    def _take(self) -> list[Piece]:
        out, self._out = self._out, []
        return out


class _ToolBlock:
    """The inside of a tool block, from behind its opening tag."""

    def __init__(self, dialect: d.Dialect, single_call: bool) -> None:
        invoke, parameter = re.escape(dialect.invoke), re.escape(dialect.parameter)
        blocks = "|".join(re.escape(name) for name in (dialect.block, *dialect.block_aliases))
        self._tag = re.compile(
            f'(?P<open_invoke><{MARK}{invoke}\\s+name="(?P<call>[^"]*)"\\s*>)'
            f"|(?P<close_invoke></{MARK}{invoke}>)"
            f'|(?P<open_parameter><{MARK}{parameter}\\s+name="(?P<key>[^"]*)"(?:\\s+string="(?P<is_string>\\w*)")?\\s*>)'
            f"|(?P<close_parameter></{MARK}{parameter}>)"
            f"|(?P<close_block></{MARK}(?:{blocks})>)"
        )
        names = (dialect.invoke, dialect.parameter, dialect.block, *dialect.block_aliases)
        self._closers = tuple(f"</{MARK}{name}>" for name in names)
        self._openers = tuple(f"<{MARK}{name}" for name in (dialect.invoke, dialect.parameter))
        self._single_call = single_call
        self._buffer = ""
        self._in_call = False
        self._in_value = False
        self._is_string = False
        self._value: list[str] = []
        """Pieces of a value that is no string: written when it is whole."""
        self._object: list[str] | None = None
        """Pieces of an arguments object that the model wrote as JSON."""
        self._num_parameters = 0
        self._call = -1
        self._out: list[Piece] = []
        self.closed = False

    @property
    def num_calls(self) -> int:
        return self._call + 1

    def feed(self, text: str) -> list[Piece]:
        if not self.closed:
            self._buffer += text
            while not self.closed and self._step():
                pass
        out, self._out = self._out, []
        return out

    def finish(self, cut: bool) -> list[Piece]:
        """The output has ended inside the block. When it was cut by length, so are the arguments; else they are made
        whole."""
        if self._in_call:
            rest = self._buffer
            tail = self._tag_prefix(rest)
            rest = _plain(rest[: len(rest) - tail])
            if cut:
                if self._in_value:
                    self._arguments(_escaped(rest) if self._is_string else "".join(self._value) + rest)
                elif self._object is not None:
                    self._arguments("".join(self._object) + rest)
            else:
                if self._in_value:
                    self._close_value(rest)
                elif self._object is not None:
                    self._object.append(rest)
                self._close_call()
        self._buffer = ""
        out, self._out = self._out, []
        return out

    # ---- one tag, or the text before it ----

    def _step(self) -> bool:
        """Use up what the buffer makes certain; whether anything was."""
        match = self._tag.search(self._buffer)
        if match is None:
            return self._drain_text()
        kind = match.lastgroup
        before = self._buffer[: match.start()]
        if self._in_value:
            implied = kind != "close_parameter"
            self._close_value(_plain(before.removesuffix("\n") if implied else before))
        elif self._object is not None and kind not in ("close_invoke", "close_block", "open_invoke"):
            self._object.append(_plain(self._buffer[: match.end()]))
            self._buffer = self._buffer[match.end() :]
            return True
        elif self._in_call:
            self._between(before)
        self._buffer = self._buffer[match.end() :]
        if kind == "open_invoke":
            self._close_call()
            self._open_call(match["call"])
        elif kind == "close_invoke":
            self._close_call()
        elif kind == "open_parameter" and self._in_call:
            self._open_value(match["key"], match["is_string"])
        elif kind == "close_block":
            self._close_call()
            self.closed = True
        return True

    def _drain_text(self) -> bool:
        """No whole tag in sight: pass on what cannot be part of one."""
        keep = self._tag_prefix(self._buffer)
        text = self._buffer[: len(self._buffer) - keep]
        if self._in_value:
            # A line break before an implied close is layout, not value.
            text = text.removesuffix("\n")
        if not text:
            return False
        self._buffer = self._buffer[len(text) :]
        if self._in_value and self._is_string:
            self._arguments(_escaped(_plain(text)))
        elif self._in_value:
            self._value.append(_plain(text))
        elif self._in_call:
            self._between(text)
        return False

    def _between(self, text: str) -> None:
        """Text inside a call, outside parameters: the arguments themselves if it starts with a brace, else layout."""
        if self._object is not None:
            self._object.append(_plain(text))
        elif self._num_parameters == 0 and text.lstrip().startswith("{"):
            self._object = [_plain(text.lstrip())]

    def _tag_prefix(self, text: str) -> int:
        """Length of the tail that may be the beginning of a tag."""
        start = text.rfind("<")
        if start < 0:
            return 0
        tail = text[start:]
        for closer in self._closers:
            if closer.startswith(tail):
                return len(tail)
        for opener in self._openers:
            if opener.startswith(tail) or (tail.startswith(opener) and ">" not in tail):
                return len(tail)
        return 0

    # ---- arguments ----

    def _arguments(self, text: str) -> None:
        if not text:
            return
        if self._out and isinstance(self._out[-1], CallArguments):
            text = self._out.pop().text + text  # type: ignore[union-attr]
        self._out.append(CallArguments(self._call, text))

    def _open_call(self, name: str) -> None:
        self._call += 1
        self._in_call, self._in_value, self._object, self._num_parameters = True, False, None, 0
        self._out.append(CallOpened(self._call, new_call_id(), _plain(name)))

    def _open_value(self, key: str, is_string: str | None) -> None:
        self._arguments(("{" if self._num_parameters == 0 else ", ") + f'"{_escaped(_plain(key))}": ')
        self._num_parameters += 1
        self._in_value = True
        self._is_string = is_string == "true"
        self._value.clear()
        if self._is_string:
            self._arguments('"')

    def _close_value(self, rest: str) -> None:
        self._in_value = False
        if self._is_string:
            self._arguments(_escaped(rest) + '"')
        else:
            value = "".join(self._value) + rest
            self._arguments(value if _is_json(value) else f'"{_escaped(value)}"')

    def _close_call(self) -> None:
        if not self._in_call:
            return
        if self._object is not None:
            text = "".join(self._object).rstrip()
            self._arguments(text if _is_json(text, dict) else f'{{"arguments": "{_escaped(text)}"}}')
        else:
            self._arguments("}" if self._num_parameters else "{}")
        self._in_call, self._in_value, self._object = False, False, None
        if self._single_call:
            self.closed = True


def _plain(text: str) -> str:
    """Markers that were no part of a tag, as the text they spell."""
    return text.replace(MARK, d.DSML)


def _escaped(text: str) -> str:
    """The inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_json(text: str, kind: type = object) -> bool:
    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        return isinstance(json.loads(text, parse_constant=refuse), kind)
    except (ValueError, RecursionError):
        return False
