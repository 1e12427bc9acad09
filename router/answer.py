"""One choice's tokens as what the client reads: text or message pieces, ids, log-probabilities, and how it ended.

Every surface uses it, so that stop strings, special tokens and tool calls mean the same everywhere. Knows tokens and
text; not JSON, not protobuf.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..core.sampling import FinishReason
from .journey import End, OutToken
from .output_parser import CallOpened, OutputParser, Piece, TextPiece
from .request import Request
from .served_model import ServedModel
from .stops import StopMatcher
from .tokenizer import Detokeniser


@dataclass(frozen=True)
class Finish:
    """How a choice ended well."""

    reason: Literal["stop", "length", "tool_calls"]
    stop: str | int | None = None
    """The stop string or id; None for EOS."""


@dataclass
class Delta:
    """What some tokens added to a choice."""

    pieces: list[Piece] = field(default_factory=list)
    tokens: list[OutToken] = field(default_factory=list)

    def add(self, piece: Piece) -> None:
        """Append, joining text with text of its kind; no text is nothing."""
        if isinstance(piece, TextPiece) and not piece.text:
            return
        last = self.pieces[-1] if self.pieces else None
        if isinstance(piece, TextPiece) and isinstance(last, TextPiece) and last.kind == piece.kind:
            self.pieces[-1] = TextPiece(piece.kind, last.text + piece.text)
        else:
            self.pieces.append(piece)

    @property
    def text(self) -> str:
        """All text; of plain completions this is the output."""
        return "".join(piece.text for piece in self.pieces if isinstance(piece, TextPiece))


class ChoiceAnswer:
    """The state of one choice on its way to the client."""

    def __init__(self, request: Request, model: ServedModel, choice: int) -> None:
        prompt = request.prompts[choice // request.n].ids
        self._request = request
        self._eos = frozenset(request.sampling.eos_token_ids) if not request.sampling.ignore_eos else frozenset[int]()
        self._stop_ids = frozenset(request.sampling.stop_token_ids)
        self._matcher = StopMatcher(request.stop, request.include_stop)
        self._parser: OutputParser | None = None
        if request.chat is not None:
            self._parser = OutputParser(
                model.tokenizer,
                model.markers,
                model.dialect,
                request.chat.start,
                parse_tools=request.chat.parse_tools,
                skip_special=request.skip_special,
                stops=self._matcher,
                single_call=request.chat.single_call,
                prompt=prompt,
            )
        self._detokeniser = Detokeniser(model.tokenizer, skip_special=request.skip_special, prompt=prompt)
        self.num_tokens = 0
        self.finish: Finish | None = None

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens if self._parser is not None else 0

    def opening(self) -> Delta:
        """What stands before the first token: the text that a continued answer echoes."""
        delta = Delta()
        chat = self._request.chat
        if chat is not None and self._request.echo:
            if chat.given_reasoning and chat.include_reasoning:
                delta.add(TextPiece("reasoning", chat.given_reasoning))
            if chat.given_text:
                delta.add(TextPiece("content", chat.given_text))
        return delta

    def feed(self, tokens: Iterable[OutToken]) -> Delta:
        """Take tokens in order. When `finish` is set afterwards, the request needs no more of this choice."""
        delta = Delta()
        if self._request.score_only:
            return delta
        for token in tokens:
            if self.finish is not None:
                break
            self.num_tokens += 1
            delta.tokens.append(token)
            searched = self.num_tokens > self._request.sampling.min_tokens
            self._feed_one(token.id, searched, delta)
        return delta

    def end(self, end: End) -> Delta:
        """The workers have ended the sequence well: release what was held back."""
        assert end.reason is not None
        delta = Delta()
        if self.finish is not None:
            return delta
        reason = FinishReason.LENGTH if self._request.score_only else end.reason
        if self._parser is not None:
            for piece in self._parser.finish(reason):
                self._show(piece, delta)
        else:
            rest = self._detokeniser.flush()
            delta.add(TextPiece("content", self._matcher.feed(rest) if rest else ""))
            if self._matcher.matched is None:
                delta.add(TextPiece("content", self._matcher.flush()))
        stop = self._matcher.matched if self._matcher.matched is not None else end.stop_token_id
        self._finish(FinishReason.STOP if self._matcher.matched is not None else reason, stop)
        return delta

    def _feed_one(self, token: int, searched: bool, delta: Delta) -> None:
        # The token that ends the request has no text, unless special tokens are to be seen.
        ends = token in self._stop_ids or (token in self._eos and self._request.skip_special)
        if self._parser is not None:
            for piece in self._parser.feed(token, searched=searched, silent=ends):
                self._show(piece, delta)
            if self._parser.is_complete:
                self._finish(FinishReason.STOP, self._parser.stop_string)
            return
        if ends:
            return
        text = self._detokeniser.feed(token)
        if text:
            certain = self._matcher.feed(text, searched)
            if certain:
                delta.add(TextPiece("content", certain))
            if self._matcher.matched is not None:
                self._finish(FinishReason.STOP, self._matcher.matched)

    def _show(self, piece: Piece, delta: Delta) -> None:
        chat = self._request.chat
        hidden = (
            chat is not None
            and not chat.include_reasoning
            and isinstance(piece, TextPiece)
            and piece.kind == "reasoning"
        )
        if not hidden:
            delta.add(piece)

    def _finish(self, reason: FinishReason, stop: str | int | None) -> None:
        called = self._parser is not None and self._parser.num_calls > 0
        if reason is FinishReason.STOP and called:
            self.finish = Finish("tool_calls")
        else:
            self.finish = Finish(reason.value, stop if reason is FinishReason.STOP else None)


def calls_of(pieces: Iterable[Piece]) -> list[tuple[CallOpened, str]]:
    """Whole calls, from all pieces of a choice."""
    calls: list[tuple[CallOpened, str]] = []
    for piece in pieces:
        if isinstance(piece, CallOpened):
            calls.append((piece, ""))
        elif not isinstance(piece, TextPiece):
            opened, arguments = calls[piece.index]
            calls[piece.index] = opened, arguments + piece.text
    return calls
