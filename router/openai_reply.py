"""Answers in OpenAI's shapes: whole bodies, stream chunks, usage, log-probabilities, errors.

Chunks are built as plain dicts and dumped by orjson: a model object a token would be the router's largest cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import orjson

from ..core.errors import HeadraceError, RequestError
from ..core.sampling import TokenLogprobs
from ..proto.engine_convert import error_code, status_of
from .answer import Finish, calls_of
from .generation import Generation, Update, Usage
from .journey import OutToken
from .output_parser import CallOpened, Piece, TextPiece
from .served_model import ServedModel
from .tokenizer import Detokeniser

MINUS_INFINITY = -9999.0

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


def error_body(error: BaseException) -> dict[str, Any]:
    """The error object; what is none of ours says nothing of itself."""
    known = isinstance(error, HeadraceError) and error_code(error) != "internal_error"
    return {
        "error": {
            "message": str(error) if known else "internal error",
            "type": status_of(error).type,
            "param": error.param if isinstance(error, RequestError) else None,
            "code": error_code(error),
        }
    }


def error_headers(error: BaseException) -> list[tuple[bytes, bytes]]:
    """What tells a client whether and when to try again."""
    code, status = error_code(error), status_of(error)
    headers: list[tuple[bytes, bytes]] = []
    if status.retry_after_s is not None:
        headers.append((b"retry-after", str(math.ceil(status.retry_after_s)).encode()))
        headers.append((b"retry-after-ms", str(int(status.retry_after_s * 1000)).encode()))
    if code == "invalid_api_key":
        headers.append((b"www-authenticate", b"Bearer"))
    if code in ("worker_failed", "transfer_failed"):
        # Our own attempts are used up: the same request may well be what kills workers.
        headers.append((b"x-should-retry", b"false"))
    return headers


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "prompt_cache_hit_tokens": usage.cached_tokens,
        "prompt_cache_miss_tokens": usage.prompt_tokens - usage.cached_tokens,
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else MINUS_INFINITY


@dataclass
class _Choice:
    """What a reply remembers of one choice."""

    offsets: Detokeniser
    position: int = 0
    """Characters before the next token; for text_offset."""
    started: bool = False
    untold: list[OutToken] = field(default_factory=list)
    """Tokens whose log-probabilities or ids ride on the next chunk."""
    pieces: list[Piece] = field(default_factory=list)
    tokens: list[OutToken] = field(default_factory=list)


class Reply:
    """What chat and completions share."""

    prefix = ""
    whole = ""
    chunk = ""

    def __init__(self, generation: Generation, model: ServedModel, created: int, fingerprint: str) -> None:
        self._generation = generation
        self._request = generation.request
        self._model = model
        self._tokenizer = model.tokenizer
        self._head = {
            "id": self.prefix + self._request.request_id,
            "object": "",
            "created": created,
            "model": self._request.model,
            "system_fingerprint": fingerprint,
        }
        self._choices = [
            _Choice(
                Detokeniser(
                    model.tokenizer,
                    skip_special=self._request.skip_special,
                    prompt=self._request.prompts[index // self._request.n].ids,
                )
            )
            for index in range(self._request.num_choices)
        ]
        self._tells_tokens = self._request.logprobs is not None or self._request.return_token_ids

    # ---- whole ----

    def collect(self, update: Update) -> None:
        choice = self._choices[update.choice]
        choice.pieces += update.delta.pieces
        choice.tokens += update.delta.tokens

    def body(self) -> dict[str, Any]:
        """The whole answer, after every update was collected."""
        body = {**self._head, "object": self.whole}
        body["choices"] = [self._whole_choice(index) for index in range(len(self._choices))]
        body["usage"] = usage_body(self._generation.usage())
        return body

    def _whole_choice(self, index: int) -> dict[str, Any]:
        raise NotImplementedError

    # ---- stream ----

    def chunks(self, update: Update) -> list[bytes]:
        """The events of one update."""
        raise NotImplementedError

    def last_chunks(self) -> list[bytes]:
        """What closes a good stream."""
        out = []
        if self._request.include_usage:
            out.append(event({**self._head, "object": self.chunk, "choices": [], "usage": self._usage()}))
        out.append(DONE)
        return out

    def _event(self, choice: dict[str, Any], **extra: Any) -> bytes:
        body = {**self._head, "object": self.chunk, "choices": [choice], **extra}
        if self._request.continuous_usage:
            body["usage"] = self._usage()
        elif self._request.include_usage:
            body["usage"] = None
        return event(body)

    def _usage(self) -> dict[str, Any]:
        return usage_body(self._generation.usage())

    # ---- parts ----

    def _finish(self, index: int) -> Finish:
        finish = self._generation.answers[index].finish
        assert finish is not None
        return finish

    def _token_text(self, token: int) -> str:
        return f"token_id:{token}" if self._request.tokens_as_ids else self._tokenizer.text_of(token)

    def _prompt_logprobs(self, prompt: int) -> list[dict[str, Any] | None]:
        """By position; the first has none.

        Raises:
            HeadraceError: a worker left some out.
        """
        scored = self._generation.prompt_logprobs[prompt]
        out: list[dict[str, Any] | None] = [None]
        for position, token in enumerate(self._request.prompts[prompt].ids[1:], start=1):
            found = scored.get(position)
            if found is None:
                raise HeadraceError(f"no log-probability came for prompt position {position}")
            logprobs = found[1]
            entry = {
                str(other): {"logprob": _finite(value), "rank": rank, "decoded_token": self._token_text(other)}
                for rank, (other, value) in enumerate(logprobs.top, start=1)
            }
            entry[str(token)] = {
                "logprob": _finite(logprobs.logprob),
                "rank": logprobs.rank,
                "decoded_token": self._token_text(token),
            }
            out.append(entry)
        return out


class ChatReply(Reply):
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def body(self) -> dict[str, Any]:
        body = super().body()
        if self._request.return_token_ids:
            body["prompt_token_ids"] = self._request.prompts[0].ids
        if self._request.show_prompt_logprobs:
            body["prompt_logprobs"] = self._prompt_logprobs(0)
        return body

    def _whole_choice(self, index: int) -> dict[str, Any]:
        chat = self._request.chat
        assert chat is not None
        opening = self._generation.answers[index].opening()
        choice = self._choices[index]
        pieces = [*opening.pieces, *choice.pieces]
        content = "".join(p.text for p in pieces if isinstance(p, TextPiece) and p.kind == "content")
        reasoning = "".join(p.text for p in pieces if isinstance(p, TextPiece) and p.kind == "reasoning")
        calls = calls_of(choice.pieces)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if calls and not content else content,
            "refusal": None,
        }
        thinks = chat.start in ("reasoning", "reasoning_continued")
        if chat.include_reasoning and (thinks or reasoning):
            message["reasoning_content"] = message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}
                for call, arguments in calls
            ]
        finish = self._finish(index)
        out = {
            "index": index,
            "message": message,
            "finish_reason": finish.reason,
            "stop_reason": finish.stop,
            "logprobs": self._logprobs(choice.tokens),
        }
        if self._request.return_token_ids:
            out["token_ids"] = [token.id for token in choice.tokens]
        return out

    def chunks(self, update: Update) -> list[bytes]:
        index = update.choice
        choice = self._choices[index]
        out: list[bytes] = []
        pieces = list(update.delta.pieces)
        if self._tells_tokens:
            choice.untold += update.delta.tokens
            if self._request.return_token_ids and choice.untold and not pieces and not update.finished:
                pieces.append(TextPiece("content", ""))
        if not choice.started and (pieces or update.finished):
            choice.started = True
            role = {"role": "assistant", "content": ""}
            extra = {}
            if self._request.return_token_ids:
                extra["prompt_token_ids"] = self._request.prompts[0].ids
            out.append(self._event({"index": index, "delta": role, "logprobs": None, "finish_reason": None}, **extra))
            pieces = [*self._generation.answers[index].opening().pieces, *pieces]
        for piece in pieces:
            out.append(self._event(self._told(choice, {"index": index, "delta": _delta(piece)}, None)))
        if update.finished:
            finish = self._finish(index)
            last = self._told(choice, {"index": index, "delta": {}}, finish.reason)
            last["stop_reason"] = finish.stop
            out.append(self._event(last))
        return out

    def _told(self, choice: _Choice, chunk: dict[str, Any], finish: str | None) -> dict[str, Any]:
        """Add what is to be told of tokens since the last chunk."""
        tokens, choice.untold = choice.untold, []
        chunk["logprobs"] = self._logprobs(tokens) if tokens else None
        chunk["finish_reason"] = finish
        if self._request.return_token_ids:
            chunk["token_ids"] = [token.id for token in tokens]
        return chunk

    def _logprobs(self, tokens: list[OutToken]) -> dict[str, Any] | None:
        wanted = self._request.logprobs
        if wanted is None:
            return None
        return {"content": [self._logprob(token, wanted) for token in tokens], "refusal": None}

    def _logprob(self, token: OutToken, wanted: int) -> dict[str, Any]:
        if token.logprobs is None:
            raise HeadraceError("a token came without its log-probability")
        item = self._token_item(token.id, token.logprobs.logprob)
        item["top_logprobs"] = [self._token_item(other, value) for other, value in token.logprobs.top[:wanted]]
        return item

    def _token_item(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._token_text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._tokenizer.bytes_of(token)),
        }


def _delta(piece: Piece) -> dict[str, Any]:
    if isinstance(piece, TextPiece):
        if piece.kind == "content":
            return {"content": piece.text}
        return {"reasoning_content": piece.text, "reasoning": piece.text}
    if isinstance(piece, CallOpened):
        function = {"name": piece.name, "arguments": ""}
        return {"tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


class CompletionReply(Reply):
    """/v1/completions."""

    prefix = "cmpl-"
    whole = "text_completion"
    chunk = "text_completion"

    def _whole_choice(self, index: int) -> dict[str, Any]:
        choice = self._choices[index]
        text = "".join(piece.text for piece in choice.pieces if isinstance(piece, TextPiece))
        finish = self._finish(index)
        out: dict[str, Any] = {
            "index": index,
            "text": self._echo_text(index) + text,
            "logprobs": self._logprobs(index, choice.tokens, first=True),
            "finish_reason": finish.reason,
            "stop_reason": finish.stop,
        }
        prompt = index // self._request.n
        if self._request.show_prompt_logprobs:
            out["prompt_logprobs"] = self._prompt_logprobs(prompt)
        if self._request.return_token_ids:
            out["token_ids"] = [token.id for token in choice.tokens]
            out["prompt_token_ids"] = self._request.prompts[prompt].ids
        return out

    def chunks(self, update: Update) -> list[bytes]:
        index = update.choice
        choice = self._choices[index]
        text = update.delta.text
        if self._tells_tokens:
            choice.untold += update.delta.tokens
        shows_ids = self._request.return_token_ids and bool(choice.untold)
        if not (text or update.finished or shows_ids):
            return []
        first, choice.started = not choice.started, True
        tokens, choice.untold = choice.untold, []
        finish = self._finish(index) if update.finished else None
        chunk: dict[str, Any] = {
            "index": index,
            "text": (self._echo_text(index) if first else "") + text,
            "logprobs": self._logprobs(index, tokens, first=first),
            "finish_reason": finish.reason if finish is not None else None,
            "stop_reason": finish.stop if finish is not None else None,
        }
        if self._request.return_token_ids:
            chunk["token_ids"] = [token.id for token in tokens]
            if first:
                chunk["prompt_token_ids"] = self._request.prompts[index // self._request.n].ids
        return [self._event(chunk)]

    def _echo_text(self, index: int) -> str:
        if not self._request.echo:
            return ""
        prompt = self._request.prompts[index // self._request.n]
        if prompt.text is not None:
            return prompt.text
        # An unfinished character at the end comes with the output that completes it.
        decoder = Detokeniser(self._tokenizer, skip_special=self._request.skip_special)
        text = "".join(map(decoder.feed, prompt.ids))
        return text + decoder.flush() if self._request.score_only else text

    def _logprobs(self, index: int, tokens: list[OutToken], *, first: bool) -> dict[str, Any] | None:
        wanted = self._request.logprobs
        if wanted is None:
            return None
        out: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        choice = self._choices[index]
        if first and self._request.echo:
            self._echo_logprobs(index, choice, wanted, out)
        for token in tokens:
            if token.logprobs is None:
                raise HeadraceError("a token came without its log-probability")
            self._add(out, choice.position, token.id, token.logprobs, wanted)
            choice.position += len(choice.offsets.feed(token.id))
        return out

    def _echo_logprobs(self, index: int, choice: _Choice, wanted: int, out: dict[str, list[Any]]) -> None:
        prompt = index // self._request.n
        scored = self._generation.prompt_logprobs[prompt]
        decoder = Detokeniser(self._tokenizer, skip_special=self._request.skip_special)
        for position, token in enumerate(self._request.prompts[prompt].ids):
            found = scored.get(position)
            if found is None and position > 0:
                raise HeadraceError(f"no log-probability came for prompt position {position}")
            self._add(out, choice.position, token, found[1] if found is not None else None, wanted)
            choice.position += len(decoder.feed(token))

    def _add(
        self, out: dict[str, list[Any]], offset: int, token: int, logprobs: TokenLogprobs | None, wanted: int
    ) -> None:
        out["tokens"].append(self._token_text(token))
        out["text_offset"].append(offset)
        if logprobs is None:
            out["token_logprobs"].append(None)
            out["top_logprobs"].append(None)
            return
        out["token_logprobs"].append(_finite(logprobs.logprob))
        top = {self._token_text(other): _finite(value) for other, value in logprobs.top[:wanted]}
        top.setdefault(self._token_text(token), _finite(logprobs.logprob))
        out["top_logprobs"].append(top)
