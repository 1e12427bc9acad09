"""A leg as spans: itself, and below it what it waited for and did.

Made from the words that the leg says to its router, when the last one is said. Times are the event loop's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import HeadraceError
from ..traces.spans import Attributes, Context, Span, Traces
from .desk import Witness
from .leg import Failed, Finished, LegOrder, SaidReserved, SaidStarted, SaidToken, SaidTransferred, Word


@dataclass
class _Course:
    """What a leg has said so far, and when."""

    context: Context
    opened_s: float
    reserved_s: float | None = None
    held_tokens: int = 0
    started_s: float | None = None
    cached_tokens: int = 0
    first_token_s: float | None = None
    num_tokens: int = 0
    transferred_s: float | None = None
    transferred: SaidTransferred | None = None


class LegTraces:
    """The desk's witness: another one that counts, and spans beside it."""

    def __init__(self, counting: Witness, traces: Traces, worker_id: str, now_s: Callable[[], float]) -> None:
        self._counting, self._traces, self._worker_id, self._now_s = counting, traces, worker_id, now_s
        self._courses: dict[int, _Course] = {}
        """By the order's identity: it lives as long as its leg."""

    def leg_refused(self, error: HeadraceError) -> None:
        self._counting.leg_refused(error)

    def alarm(self, order: LegOrder, what: str) -> None:
        self._counting.alarm(order, what)

    def leg_opened(self, order: LegOrder) -> None:
        self._counting.leg_opened(order)
        context = self._traces.begin(order.traceparent)
        if context.sampled:
            self._courses[id(order)] = _Course(context, self._now_s())

    def leg_said(self, order: LegOrder, word: Word) -> None:
        self._counting.leg_said(order, word)
        course = self._courses.get(id(order))
        if course is None:
            return
        now_s = self._now_s()
        match word:
            case SaidReserved(held_tokens):
                course.reserved_s, course.held_tokens = now_s, held_tokens
            case SaidStarted(cached_tokens, _):
                course.started_s, course.cached_tokens = now_s, cached_tokens
            case SaidToken():
                course.first_token_s = course.first_token_s or now_s
                course.num_tokens += 1
            case SaidTransferred():
                course.transferred_s, course.transferred = now_s, word
            case Finished() | Failed():
                del self._courses[id(order)]
                self._end(order, course, now_s, str(word.error) if isinstance(word, Failed) else "")

    def _end(self, order: LegOrder, course: _Course, end_s: float, error: str) -> None:
        attributes: dict[str, str | int | float] = {
            "headrace.worker": self._worker_id,
            "headrace.request_id": order.request_id,
            "headrace.attempt": order.attempt,
            "headrace.prompt_tokens": len(order.prompt),
        }
        if course.num_tokens:
            attributes["headrace.output_tokens"] = course.num_tokens
        events = () if course.first_token_s is None else (("first_token", course.first_token_s),)
        self._traces.end(
            Span(
                name=order.kind.value, context=course.context, start_s=course.opened_s, end_s=end_s,
                attributes=attributes, events=events, error=error,
            )
        )  # fmt: skip
        self._below(course, "reserve", course.opened_s, course.reserved_s, {"headrace.held_tokens": course.held_tokens})
        if order.kind.computes:
            begin_s = course.reserved_s or course.opened_s
            self._below(course, "queue", begin_s, course.started_s, {})
            cached = {"headrace.cached_tokens": course.cached_tokens}
            self._below(course, "compute", course.started_s, course.first_token_s, cached)
        if course.transferred is not None:
            stats = course.transferred.stats
            moved: Attributes = {
                "headrace.payload_bytes": stats.payload_bytes,
                "headrace.segments": stats.num_segments,
                "headrace.asked_again": stats.num_missing,
                "headrace.tail_s": stats.tail_seconds,
                "headrace.transport": stats.transport,
            }
            self._below(course, "transfer", course.reserved_s, course.transferred_s, moved)
            if course.num_tokens:
                self._below(course, "decode", course.transferred_s, end_s, {})

    def _below(
        self, course: _Course, name: str, start_s: float | None, end_s: float | None, attributes: Attributes
    ) -> None:
        if start_s is not None and end_s is not None:
            context = self._traces.begin(course.context.traceparent)
            self._traces.end(Span(name=name, context=context, start_s=start_s, end_s=end_s, attributes=attributes))
