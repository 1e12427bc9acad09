"""Words of legs as items of a Step message; words of one leg merge into one item."""

from __future__ import annotations

from ..proto.engine_convert import error_to_message, finish_to_message, token_to_message
from ..proto.internal.v1 import engine_pb2 as pb
from .leg import (
    ChoiceFinished,
    Failed,
    Finished,
    SaidPrompt,
    SaidReserved,
    SaidStarted,
    SaidToken,
    SaidTransferred,
    Word,
)


def weight(word: Word) -> int:
    """How much a word adds to a message, in tokens; bounds what waits for a slow router."""
    match word:
        case SaidToken(logprobs=logprobs):
            return 1 + (len(logprobs.top) if logprobs is not None else 0)
        case SaidPrompt(logprobs=several):
            return sum(1 + len(one.top) for one in several)
        case _:
            return 1


def merge(item: pb.LegItem, word: Word) -> None:
    """Add `word` to what `item` says already."""
    match word:
        case SaidToken(index, token, logprobs, choice):
            item.tokens.append(token_to_message(index, token, logprobs, choice))
        case ChoiceFinished(choice, reason, stop_token_id):
            item.choices.append(
                pb.ChoiceFinished(choice=choice, reason=finish_to_message(reason), stop_token_id=stop_token_id)
            )
        case SaidReserved(held_tokens):
            item.reserved.CopyFrom(pb.Reserved(held_tokens=held_tokens))
        case SaidStarted(cached_tokens, queued_s):
            item.started.CopyFrom(pb.Started(cached_tokens=cached_tokens, queued_s=queued_s))
        case SaidPrompt(first_position, tokens, several):
            if not item.HasField("prompt_logprobs"):
                item.prompt_logprobs.first_position = first_position
            item.prompt_logprobs.tokens.extend(
                token_to_message(first_position + offset, token, one)
                for offset, (token, one) in enumerate(zip(tokens, several, strict=True))
            )
        case SaidTransferred(stats, num_pages, _):
            item.transferred.CopyFrom(
                pb.Transferred(
                    num_bytes=stats.payload_bytes,
                    num_segments=stats.num_segments,
                    num_pages=num_pages,
                    seconds=stats.seconds,
                    tail_seconds=stats.tail_seconds,
                    transport=stats.transport,
                )
            )
        case Finished(reason, stop_token_id, prefill_s, computed_tokens, choice):
            item.finished.CopyFrom(
                pb.Finished(
                    reason=finish_to_message(reason),
                    stop_token_id=stop_token_id,
                    prefill_s=prefill_s,
                    computed_tokens=computed_tokens,
                    choice=choice,
                )
            )
        case Failed(error):
            item.failed.CopyFrom(error_to_message(error))
