"""PREFILL legs: compute the prompt once a taker wants it, send the first tokens, serve the pages, give them back.

The taker's Pull and this leg's credits come in either order. How long an offer waits for its Pull, and a Pull for its
turn, the transfer thread bounds (`offer_wait_s`, `queue_budget_s`); the whole leg is bounded here. Pages go
back to the engine only after the transfer thread has said that no gather reads them any more; what is said to the
router does not wait for that. No I/O; time is passed in.
"""

from __future__ import annotations

from enum import Enum

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import HeadraceError, TransferFailed
from ..core.ids import TransferId
from ..engine import api as engine
from ..kvcache.sequence import SequencePages
from ..transfer import api as transfer
from ..worker.leg import (
    RELEASE_S,
    Abort,
    AbortChoice,
    Action,
    Alarm,
    Due,
    Failed,
    Finished,
    LegEvent,
    LegFactories,
    LegOrder,
    SaidPrompt,
    SaidStarted,
    SaidToken,
    Say,
    ToEngine,
    ToTransfer,
    overdue,
)
from ..worker.prefix_legs import PREFIX_LEGS


class Phase(Enum):
    QUEUED = "queued"
    """Offered to takers; the engine has not taken credits yet."""
    READY = "ready"
    """Credits taken; no taker yet."""
    WANTED = "wanted"
    """A taker waits; no credits yet."""
    COMPUTING = "computing"
    """Credits and taker are here: the engine was told to start."""
    SERVING = "serving"
    """Computed, first token sent; the taker reads the rest."""
    CLOSING = "closing"
    """The terminal word is said; a gather may still read the pages."""
    ENDED = "ended"


class Event(Enum):
    RESERVED = "reserved"
    REFUSED = "refused"
    WANTED = "wanted"
    STARTED = "started"
    CHUNK = "chunk"
    SCORED = "scored"
    TOKEN = "token"
    PREFILLED = "prefilled"
    FINISHED = "finished"
    """The first token, of every choice, ended the request."""
    BROKEN = "broken"
    """The engine failed it."""
    SERVED = "served"
    """The transfer thread is done with it, and all is well."""
    GONE = "gone"
    """The transfer thread is done with it, and the taker has not got it."""
    ABORT = "abort"
    ABORT_CHOICE = "abort_choice"
    """The first tokens are sampled together: the decode worker's business alone."""
    DUE = "due"


P, E = Phase, Event

NEXT: dict[Phase, dict[Event, Phase]] = {
    P.QUEUED: {
        E.ABORT_CHOICE: P.QUEUED,
        E.RESERVED: P.READY,
        E.WANTED: P.WANTED,
        E.REFUSED: P.CLOSING,
        E.BROKEN: P.CLOSING,
        E.GONE: P.ENDED,
        E.ABORT: P.CLOSING,
        E.DUE: P.CLOSING,
    },
    P.WANTED: {
        E.ABORT_CHOICE: P.WANTED,
        E.RESERVED: P.COMPUTING,
        E.REFUSED: P.CLOSING,
        E.BROKEN: P.CLOSING,
        E.GONE: P.ENDED,
        E.ABORT: P.CLOSING,
        E.DUE: P.CLOSING,
    },
    P.READY: {
        E.ABORT_CHOICE: P.READY,
        E.WANTED: P.COMPUTING,
        E.BROKEN: P.CLOSING,
        E.GONE: P.ENDED,
        E.ABORT: P.CLOSING,
        E.DUE: P.CLOSING,
    },
    P.COMPUTING: {
        E.ABORT_CHOICE: P.COMPUTING,
        E.STARTED: P.COMPUTING,
        E.CHUNK: P.COMPUTING,
        E.SCORED: P.COMPUTING,
        E.TOKEN: P.COMPUTING,
        E.PREFILLED: P.SERVING,
        E.FINISHED: P.CLOSING,
        E.BROKEN: P.CLOSING,
        E.GONE: P.ENDED,
        E.ABORT: P.CLOSING,
        E.DUE: P.CLOSING,
    },
    P.SERVING: {
        E.ABORT_CHOICE: P.SERVING,
        E.SERVED: P.ENDED,
        E.GONE: P.ENDED,
        E.ABORT: P.CLOSING,
        E.DUE: P.CLOSING,
    },
    # Both threads may have spoken before they heard of the end.
    P.CLOSING: {
        **{event: P.CLOSING for event in Event if event not in (E.SERVED, E.GONE)},
        E.SERVED: P.ENDED,
        E.GONE: P.ENDED,
    },
    P.ENDED: {},
}


class PrefillLeg:
    """See the module; a `worker.leg.Leg`."""

    def __init__(self, key: int, order: LegOrder, now_s: float) -> None:
        assert order.transfer_id is not None
        self.phase = P.QUEUED
        self._key = key
        self._order = order
        self._transfer_id: TransferId = order.transfer_id
        self._begun_s = now_s
        self._end_s = now_s + order.timeout_s
        self._close_s: float | None = None
        """CLOSING: when the alarm is due."""
        self._in_engine = True
        self._cached_tokens = 0
        self._held = engine.Reserved(key, 0, SequencePages())
        """What the engine had already when it took credits."""
        self._first: dict[int, engine.TokenSampled] = {}
        """By choice."""
        self._done: Finished | None = None

    @property
    def due_s(self) -> float | None:
        return self._close_s if self.phase is P.CLOSING else self._end_s

    @property
    def ended(self) -> bool:
        return self.phase is P.ENDED

    def begin(self, now_s: float) -> list[Action]:
        # Offered before the engine has credits: a Pull that waits for a full pool is then not alone.
        return [
            ToEngine(engine.Submit(self._order.engine_request(self._key))),
            ToTransfer(
                transfer.Offer(
                    transfer_id=self._transfer_id,
                    attempt=self._order.attempt,
                    length=len(self._order.prompt),
                    pages=SequencePages(),
                )
            ),
        ]

    def handle(self, event: LegEvent, now_s: float) -> list[Action]:
        kind = _kind(event)
        before, self.phase = self.phase, NEXT[self.phase][kind]
        if before is P.CLOSING:
            return self._closing(event, kind)
        match event:
            case engine.Reserved() | transfer.Wanted():
                if isinstance(event, engine.Reserved):
                    self._held = event
                return [ToEngine(engine.Start(self._key))] if self.phase is P.COMPUTING else []
            case engine.Started(_, cached_tokens):
                self._cached_tokens = cached_tokens
                return [
                    Say(SaidStarted(cached_tokens, now_s - self._begun_s)),
                    # What the taker lacks of the blocks that are here flows while the rest is computed.
                    ToTransfer(
                        transfer.BlocksFinal(
                            transfer_id=self._transfer_id,
                            num_blocks=self._held.held_tokens // BLOCK_TOKENS,
                            pages=self._held.pages,
                            computed_tokens=cached_tokens,
                        )
                    ),
                ]
            case engine.ChunkDone(_, computed, pages):
                return [
                    ToTransfer(
                        transfer.BlocksFinal(
                            transfer_id=self._transfer_id,
                            num_blocks=computed // BLOCK_TOKENS,
                            pages=pages,
                            computed_tokens=computed,
                        )
                    )
                ]
            case engine.PromptScored(_, first_position, tokens, logprobs):
                return [Say(SaidPrompt(first_position, tokens, logprobs))]
            case engine.TokenSampled(_, index, token, logprobs_of, choice):
                self._first[choice] = event
                return [Say(SaidToken(index, token, logprobs_of, choice))]
            case AbortChoice():
                return []
            case engine.SequenceFinished():
                return self._prefilled(event, now_s)
            case transfer.Ended(_, outcome, reason):
                release: list[Action] = [ToEngine(engine.Release(self._key))]
                if outcome is transfer.Outcome.ENDED:
                    stop: list[Action] = [] if before is P.SERVING else [ToEngine(engine.AbortSequence(self._key))]
                    return [*stop, *release, Say(Failed(TransferFailed(f"not taken: {reason}")))]
                assert self._done is not None
                return [*release, Say(self._done)]
            case engine.Refused(_, error):
                self._in_engine = False
                return self._close(error, now_s)
            case engine.SequenceFailed(_, error):
                return self._close(error, now_s)
            case Abort(error):
                return [ToEngine(engine.AbortSequence(self._key)), *self._close(error, now_s)]
            case Due():
                return [ToEngine(engine.AbortSequence(self._key)), *self._close(overdue(self._order), now_s)]
            case _:
                raise AssertionError(event)

    def _prefilled(self, event: engine.SequenceFinished, now_s: float) -> list[Action]:
        first, *more = (self._first[choice] for choice in range(self._order.num_choices))
        self._done = Finished(event.reason, event.stop_token_id, event.prefill_s, event.computed_tokens)
        served = ToTransfer(
            transfer.PrefillDone(
                transfer_id=self._transfer_id,
                pages=event.pages,
                first_token=first.token,
                first_index=first.index,
                computed=event.computed_tokens,
                cached=self._cached_tokens,
                ended=event.reason is not None,
                more_first_tokens=tuple(token.token for token in more),
            )
        )
        if event.reason is None:
            return [served]
        self._close_s = now_s + RELEASE_S
        return [served, Say(self._done)]

    def _close(self, error: HeadraceError, now_s: float) -> list[Action]:
        self._close_s = now_s + RELEASE_S
        return [ToTransfer(transfer.Withdraw(self._transfer_id, error.reason)), Say(Failed(error))]

    def _closing(self, event: LegEvent, kind: Event) -> list[Action]:
        if self.phase is P.ENDED:
            return [ToEngine(engine.Release(self._key))] if self._in_engine else []
        if kind is E.REFUSED:
            self._in_engine = False
        if isinstance(event, Due):
            self._close_s = None
            return [Alarm("the transfer thread does not let go of a prefill leg's pages")]
        return []


def _kind(event: LegEvent) -> Event:
    match event:
        case transfer.Ended(_, outcome):
            return E.GONE if outcome is transfer.Outcome.ENDED else E.SERVED
        case engine.SequenceFinished(_, reason):
            return E.PREFILLED if reason is None else E.FINISHED
        case _:
            return _KINDS[type(event)]


_KINDS: dict[type, Event] = {
    engine.Reserved: E.RESERVED,
    engine.Refused: E.REFUSED,
    engine.Started: E.STARTED,
    engine.ChunkDone: E.CHUNK,
    engine.PromptScored: E.SCORED,
    engine.TokenSampled: E.TOKEN,
    engine.SequenceFailed: E.BROKEN,
    transfer.Wanted: E.WANTED,
    Abort: E.ABORT,
    AbortChoice: E.ABORT_CHOICE,
    Due: E.DUE,
}

LEGS: LegFactories = {engine.LegKind.PREFILL: PrefillLeg, **PREFIX_LEGS}
"""The kinds of leg that a prefill worker takes."""
