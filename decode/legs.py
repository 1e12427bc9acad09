"""GENERATE legs (reserve, pull, decode) and LOCAL legs (both phases here).

A GENERATE leg takes its credits first, then pulls; its pages stay bound until the transfer thread has said that no
scatter writes them any more, however early the leg ended. What is said to the router does not wait for that. Several
choices share one pull and one end: each that ends before the last is told by itself. No I/O; time is passed in.
"""

from __future__ import annotations

from enum import Enum

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import HeadraceError, QueueFull
from ..core.ids import TransferId
from ..core.sampling import FinishReason, SamplingParams, end_of
from ..engine import api as engine
from ..kvcache.sequence import SequencePages
from ..transfer import api as transfer
from ..worker.leg import (
    RELEASE_S,
    RESERVE_S,
    Abort,
    AbortChoice,
    Action,
    Alarm,
    ChoiceFinished,
    Due,
    Failed,
    Finished,
    Holder,
    LegEvent,
    LegFactories,
    LegOrder,
    SaidPrompt,
    SaidReserved,
    SaidStarted,
    SaidToken,
    SaidTransferred,
    Say,
    ToEngine,
    ToTransfer,
    overdue,
)
from ..worker.prefix_legs import PREFIX_LEGS


class Phase(Enum):
    RESERVING = "reserving"
    PULLING = "pulling"
    """Credits taken; the transfer thread writes the pages."""
    DECODING = "decoding"
    """Admitted: every byte was verified."""
    RUNNING = "running"
    """LOCAL: computing, then decoding."""
    CLOSING = "closing"
    """The terminal word is said; a scatter may still write the pages."""
    ENDED = "ended"


class Event(Enum):
    RESERVED = "reserved"
    REFUSED = "refused"
    STARTED = "started"
    CHUNK = "chunk"
    SCORED = "scored"
    TOKEN = "token"
    CHOICE_FINISHED = "choice_finished"
    """One of several choices; others go on."""
    FINISHED = "finished"
    BROKEN = "broken"
    """The engine failed it."""
    ARRIVED = "arrived"
    NOT_NEEDED = "not_needed"
    """The first token, of every choice, ended the request."""
    PULL_FAILED = "pull_failed"
    ABORT = "abort"
    ABORT_CHOICE = "abort_choice"
    """One of several choices is needed no more."""
    DUE = "due"


P, E = Phase, Event

GENERATE_NEXT: dict[Phase, dict[Event, Phase]] = {
    # A choice that is needed no more before it exists is kept in mind: what its first token holds is known early.
    P.RESERVING: {
        E.ABORT_CHOICE: P.RESERVING,
        E.RESERVED: P.PULLING,
        E.REFUSED: P.ENDED,
        E.BROKEN: P.ENDED,
        E.ABORT: P.ENDED,
        E.DUE: P.ENDED,
    },
    P.PULLING: {
        E.ABORT_CHOICE: P.PULLING,
        E.ARRIVED: P.DECODING,
        E.NOT_NEEDED: P.ENDED,
        E.PULL_FAILED: P.ENDED,
        E.BROKEN: P.CLOSING,
        E.ABORT: P.CLOSING,
        E.DUE: P.CLOSING,
    },
    P.DECODING: {
        E.TOKEN: P.DECODING,
        E.CHOICE_FINISHED: P.DECODING,
        E.ABORT_CHOICE: P.DECODING,
        E.FINISHED: P.ENDED,
        E.BROKEN: P.ENDED,
        E.ABORT: P.ENDED,
        E.DUE: P.ENDED,
    },
    # The client is gone, yet a scatter may still run: the pages stay bound until the pull has answered, either way.
    P.CLOSING: {
        E.ABORT_CHOICE: P.CLOSING,
        E.ARRIVED: P.ENDED,
        E.NOT_NEEDED: P.ENDED,
        E.PULL_FAILED: P.ENDED,
        E.BROKEN: P.CLOSING,
        E.ABORT: P.CLOSING,
        E.DUE: P.CLOSING,
    },
    P.ENDED: {},
}

LOCAL_NEXT: dict[Phase, dict[Event, Phase]] = {
    P.RESERVING: {
        E.ABORT_CHOICE: P.RESERVING,
        E.RESERVED: P.RUNNING,
        E.REFUSED: P.ENDED,
        E.BROKEN: P.ENDED,
        E.ABORT: P.ENDED,
        E.DUE: P.ENDED,
    },
    P.RUNNING: {
        E.STARTED: P.RUNNING,
        E.CHUNK: P.RUNNING,
        E.SCORED: P.RUNNING,
        E.TOKEN: P.RUNNING,
        E.CHOICE_FINISHED: P.RUNNING,
        E.ABORT_CHOICE: P.RUNNING,
        E.FINISHED: P.ENDED,
        E.BROKEN: P.ENDED,
        E.ABORT: P.ENDED,
        E.DUE: P.ENDED,
    },
    P.ENDED: {},
}


class GenerateLeg:
    """Reserve, pull, decode; a `worker.leg.Leg`."""

    def __init__(self, key: int, order: LegOrder, now_s: float) -> None:
        assert order.transfer_id is not None
        assert order.holder is not None
        self.phase = P.RESERVING
        self._key = key
        self._order = order
        self._transfer_id: TransferId = order.transfer_id
        self._holder: Holder = order.holder
        self._end_s = now_s + order.timeout_s
        self._wait_s: float | None = now_s + RESERVE_S
        self._num_pages = 0
        self._held_tokens = 0
        self._unwanted: list[int] = []
        """Choices that the router needs no more, until there are choices."""

    @property
    def due_s(self) -> float | None:
        if self.phase is P.CLOSING:
            return self._wait_s
        return self._end_s if self._wait_s is None else min(self._end_s, self._wait_s)

    @property
    def ended(self) -> bool:
        return self.phase is P.ENDED

    def begin(self, now_s: float) -> list[Action]:
        # The link comes up while the engine looks for credits.
        holder = self._holder
        return [
            ToTransfer(transfer.PeerFound(holder.worker_id, holder.address, holder.incarnation)),
            ToEngine(engine.Submit(self._order.engine_request(self._key))),
        ]

    def handle(self, event: LegEvent, now_s: float) -> list[Action]:
        before, self.phase = self.phase, GENERATE_NEXT[self.phase][_kind(event)]
        release: list[Action] = [ToEngine(engine.Release(self._key))]
        stop: list[Action] = [ToEngine(engine.AbortSequence(self._key))]
        if before is P.CLOSING:
            return self._closing(event)
        match event:
            case engine.Reserved(_, held_tokens, pages):
                self._wait_s = None
                return self._pull(held_tokens, pages)
            case transfer.Arrived(_, first_token, first_index, stats=stats, more_first_tokens=more):
                return [
                    Say(SaidTransferred(stats, self._num_pages, self._held_tokens)),
                    ToEngine(engine.Admit(self._key, first_token, first_index, more)),
                    *(ToEngine(engine.AbortChoice(self._key, choice)) for choice in self._unwanted),
                ]
            case transfer.NotNeeded(_, first_token, _, more):
                return [*stop, *release, *_all_ended_by((first_token, *more), self._order.sampling)]
            case transfer.PullFailed(_, error):
                return [*stop, *release, Say(Failed(error))]
            case engine.TokenSampled(_, index, token, logprobs, choice):
                return [Say(SaidToken(index, token, logprobs, choice))]
            case engine.SequenceFinished(last=True):
                # Nothing of the prompt was computed here.
                return [Say(Finished(event.reason, event.stop_token_id, choice=event.choice))]
            case engine.SequenceFinished():
                return [Say(ChoiceFinished(event.choice, event.reason, event.stop_token_id))]
            case AbortChoice(choice):
                if before is P.DECODING:
                    return [ToEngine(engine.AbortChoice(self._key, choice))]
                if choice not in self._unwanted:
                    self._unwanted.append(choice)
                return []
            case engine.Refused(_, error):
                return [Say(Failed(error))]
            case engine.SequenceFailed(_, error):
                return self._end(before, error, now_s)
            case Abort(error):
                return [*stop, *self._end(before, error, now_s)]
            case Due():
                late = before is P.RESERVING and now_s < self._end_s
                why: HeadraceError = QueueFull("no credits in time") if late else overdue(self._order)
                return [*stop, *self._end(before, why, now_s)]
            case _:
                raise AssertionError(event)

    def _pull(self, held_tokens: int, pages: SequencePages) -> list[Action]:
        self._held_tokens = held_tokens
        held_blocks = held_tokens // BLOCK_TOKENS
        self._num_pages = len(pages.history) - held_blocks + len(pages.window) + 1
        holder = self._holder
        return [
            Say(SaidReserved(held_tokens)),
            # Said again: while the credits were waited for, the peer may have been forgotten.
            ToTransfer(transfer.PeerFound(holder.worker_id, holder.address, holder.incarnation)),
            ToTransfer(
                transfer.OpenPull(
                    transfer_id=self._transfer_id,
                    attempt=self._order.attempt,
                    holder=holder.worker_id,
                    holder_incarnation=holder.incarnation,
                    pages=pages,
                    length=len(self._order.prompt),
                    held_blocks=held_blocks,
                    num_choices=self._order.num_choices,
                )
            ),
        ]

    def _end(self, before: Phase, error: HeadraceError, now_s: float) -> list[Action]:
        """The sequence is stopped: give back what is bound, or wait for the pull to let go of it."""
        failed = Say(Failed(error))
        if before is P.PULLING:
            self._wait_s = now_s + RELEASE_S
            return [ToTransfer(transfer.CancelPull(self._transfer_id, error.reason)), failed]
        if before is P.RESERVING:
            return [ToEngine(engine.Release(self._key)), failed]
        return [failed]

    def _closing(self, event: LegEvent) -> list[Action]:
        if self.phase is P.ENDED:
            return [ToEngine(engine.Release(self._key))]
        if isinstance(event, Due):
            self._wait_s = None
            return [Alarm("the transfer thread does not let go of a generate leg's pages")]
        return []


class LocalLeg:
    """Both phases here; a `worker.leg.Leg`."""

    def __init__(self, key: int, order: LegOrder, now_s: float) -> None:
        self.phase = P.RESERVING
        self._key = key
        self._order = order
        self._begun_s = now_s
        self._end_s = now_s + order.timeout_s
        self._has_choices = False
        """Their first tokens are sampled."""
        self._unwanted: list[int] = []
        """Choices that the router needs no more, until there are choices."""

    @property
    def due_s(self) -> float | None:
        return self._end_s

    @property
    def ended(self) -> bool:
        return self.phase is P.ENDED

    def begin(self, now_s: float) -> list[Action]:
        return [ToEngine(engine.Submit(self._order.engine_request(self._key)))]

    def handle(self, event: LegEvent, now_s: float) -> list[Action]:
        self.phase = LOCAL_NEXT[self.phase][_kind(event)]
        match event:
            case engine.Reserved(_, held_tokens):
                return [Say(SaidReserved(held_tokens))]
            case engine.Started(_, cached_tokens):
                return [Say(SaidStarted(cached_tokens, now_s - self._begun_s))]
            case engine.ChunkDone():
                return []
            case engine.PromptScored(_, first_position, tokens, several):
                return [Say(SaidPrompt(first_position, tokens, several))]
            case engine.TokenSampled(_, index, token, logprobs, choice):
                self._has_choices = True
                unwanted, self._unwanted = self._unwanted, []
                stop = [ToEngine(engine.AbortChoice(self._key, other)) for other in unwanted]
                return [Say(SaidToken(index, token, logprobs, choice)), *stop]
            case engine.SequenceFinished(last=True):
                finished = Finished(
                    event.reason, event.stop_token_id, event.prefill_s, event.computed_tokens, event.choice
                )
                return [Say(finished)]
            case engine.SequenceFinished():
                return [Say(ChoiceFinished(event.choice, event.reason, event.stop_token_id))]
            case AbortChoice(choice):
                if self._has_choices:
                    return [ToEngine(engine.AbortChoice(self._key, choice))]
                if choice not in self._unwanted:
                    self._unwanted.append(choice)
                return []
            case engine.Refused(_, error) | engine.SequenceFailed(_, error):
                return [Say(Failed(error))]
            case Abort(error):
                return [ToEngine(engine.AbortSequence(self._key)), Say(Failed(error))]
            case Due():
                return [ToEngine(engine.AbortSequence(self._key)), Say(Failed(overdue(self._order)))]
            case _:
                raise AssertionError(event)


def _all_ended_by(tokens: tuple[int, ...], sampling: SamplingParams) -> list[Action]:
    """Every choice was ended by its first token, the holder says; by which rule, both know."""
    ends = [end_of(sampling, token, 1) or (FinishReason.LENGTH, None) for token in tokens]
    *others, (reason, stop_token_id) = ends
    return [
        *(Say(ChoiceFinished(choice, *why)) for choice, why in enumerate(others)),
        Say(Finished(reason, stop_token_id, choice=len(others))),
    ]


def _kind(event: LegEvent) -> Event:
    if isinstance(event, engine.SequenceFinished) and not event.last:
        return E.CHOICE_FINISHED
    return _KINDS[type(event)]


_KINDS: dict[type, Event] = {
    engine.Reserved: E.RESERVED,
    engine.Refused: E.REFUSED,
    engine.Started: E.STARTED,
    engine.ChunkDone: E.CHUNK,
    engine.PromptScored: E.SCORED,
    engine.TokenSampled: E.TOKEN,
    engine.SequenceFinished: E.FINISHED,
    engine.SequenceFailed: E.BROKEN,
    transfer.Arrived: E.ARRIVED,
    transfer.NotNeeded: E.NOT_NEEDED,
    transfer.PullFailed: E.PULL_FAILED,
    Abort: E.ABORT,
    AbortChoice: E.ABORT_CHOICE,
    Due: E.DUE,
}

LEGS: LegFactories = {engine.LegKind.GENERATE: GenerateLeg, engine.LegKind.LOCAL: LocalLeg, **PREFIX_LEGS}
"""The kinds of leg that a decode worker takes."""
