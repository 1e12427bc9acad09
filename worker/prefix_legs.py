"""SHARE and FETCH legs: a cached prefix goes from one worker's cache to another's, so that it is computed once.

Any worker may hold, any may take. A SHARE offers the pages of a prefix that ends at a border with a check-point; a
FETCH pulls them, window and compressor rows included, and leaves them in the cache, where the next leg finds them. Both
serve no client: where one fails, what it was for is computed instead. Pages go back only after the transfer thread has
said that no copy touches them. No I/O; time is passed in.
"""

from __future__ import annotations

from enum import Enum

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import HeadraceError, TransferFailed
from ..engine import api as engine
from ..transfer import api as transfer
from .leg import (
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
    SaidReserved,
    SaidTransferred,
    Say,
    ToEngine,
    ToTransfer,
    overdue,
)

NO_TOKEN = 0
"""Where a prefill would say its first token."""


class Phase(Enum):
    QUEUED = "queued"
    """The engine looks for credits, and for the prefix."""
    READY = "ready"
    """SHARE: the pages are pinned, nobody has pulled yet."""
    WANTED = "wanted"
    """SHARE: a taker is here, the pages are not pinned yet."""
    MOVING = "moving"
    """SHARE: gathers read the pages. FETCH: scatters write them."""
    CLOSING = "closing"
    """The terminal word is said; a copy may still touch the pages."""
    ENDED = "ended"


class Event(Enum):
    RESERVED = "reserved"
    REFUSED = "refused"
    WANTED = "wanted"
    STARTED = "started"
    SERVED = "served"
    """SHARE: the engine has no more to say; the pages stay pinned."""
    BROKEN = "broken"
    MOVED = "moved"
    """SHARE: taken. FETCH: every byte is here and verified."""
    LOST = "lost"
    """The transfer thread gave up, or was told to: no copy touches the pages."""
    ABORT = "abort"
    DUE = "due"
    ABORT_CHOICE = "abort_choice"
    """There are no choices here."""


P, E = Phase, Event

_ENDING: dict[Event, Phase] = {E.BROKEN: P.CLOSING, E.ABORT: P.CLOSING, E.DUE: P.CLOSING}
_CLOSING: dict[Event, Phase] = {
    **{event: P.CLOSING for event in Event if event not in (E.MOVED, E.LOST)},
    E.MOVED: P.ENDED,
    E.LOST: P.ENDED,
}

SHARE_NEXT: dict[Phase, dict[Event, Phase]] = {
    P.QUEUED: {
        E.RESERVED: P.READY,
        E.WANTED: P.WANTED,
        E.REFUSED: P.CLOSING,
        E.LOST: P.ENDED,
        E.ABORT_CHOICE: P.QUEUED,
        **_ENDING,
    },
    P.READY: {E.WANTED: P.MOVING, E.LOST: P.ENDED, E.ABORT_CHOICE: P.READY, **_ENDING},
    P.WANTED: {
        E.RESERVED: P.MOVING,
        E.REFUSED: P.CLOSING,
        E.LOST: P.ENDED,
        E.ABORT_CHOICE: P.WANTED,
        **_ENDING,
    },
    P.MOVING: {
        E.STARTED: P.MOVING,
        E.SERVED: P.MOVING,
        E.MOVED: P.ENDED,
        E.LOST: P.ENDED,
        E.ABORT_CHOICE: P.MOVING,
        **_ENDING,
    },
    P.CLOSING: _CLOSING,
    P.ENDED: {},
}

FETCH_NEXT: dict[Phase, dict[Event, Phase]] = {
    # Before the pull nothing touches the pages, so nothing is waited for.
    P.QUEUED: {
        E.RESERVED: P.MOVING,
        E.REFUSED: P.ENDED,
        E.BROKEN: P.ENDED,
        E.ABORT: P.ENDED,
        E.DUE: P.ENDED,
        E.ABORT_CHOICE: P.QUEUED,
    },
    P.MOVING: {E.MOVED: P.ENDED, E.LOST: P.ENDED, E.ABORT_CHOICE: P.MOVING, **_ENDING},
    P.CLOSING: _CLOSING,
    P.ENDED: {},
}


class _PrefixLeg:
    """What both have in common."""

    next: dict[Phase, dict[Event, Phase]]

    def __init__(self, key: int, order: LegOrder, now_s: float) -> None:
        assert order.transfer_id is not None
        self.phase = P.QUEUED
        self._key = key
        self._order = order
        self._transfer_id = order.transfer_id
        self._end_s = now_s + order.timeout_s
        self._close_s: float | None = None
        """CLOSING: when the alarm is due."""
        self._in_engine = True

    @property
    def due_s(self) -> float | None:
        return self._close_s if self.phase is P.CLOSING else self._end_s

    @property
    def ended(self) -> bool:
        return self.phase is P.ENDED

    def handle(self, event: LegEvent, now_s: float) -> list[Action]:
        kind = _kind(event)
        before, self.phase = self.phase, self.next[self.phase][kind]
        if kind is E.ABORT_CHOICE:
            return []
        if kind is E.REFUSED:
            self._in_engine = False
        if before is P.CLOSING:
            return self._closing(event)
        match event:
            case engine.Refused(_, error) | engine.SequenceFailed(_, error):
                return self._end(error, now_s)
            case Abort(error):
                return self._end(error, now_s)
            case Due():
                return self._end(overdue(self._order), now_s)
            case _:
                return self._step(event)

    def _step(self, event: LegEvent) -> list[Action]:
        raise NotImplementedError

    def _let_go(self) -> transfer.Command:
        """Ask the transfer thread to end the transfer."""
        raise NotImplementedError

    def _back(self) -> list[Action]:
        """No copy touches the pages."""
        return [ToEngine(engine.Release(self._key))] if self._in_engine else []

    def _end(self, error: HeadraceError, now_s: float) -> list[Action]:
        stop: list[Action] = [ToEngine(engine.AbortSequence(self._key))] if self._in_engine else []
        if self.phase is P.ENDED:
            return [*stop, *self._back(), Say(Failed(error))]
        self._close_s = now_s + RELEASE_S
        return [*stop, ToTransfer(self._let_go()), Say(Failed(error))]

    def _closing(self, event: LegEvent) -> list[Action]:
        if self.phase is P.ENDED:
            return self._back()
        if isinstance(event, Due):
            self._close_s = None
            return [Alarm(f"the transfer thread does not let go of a {self._order.kind.value} leg's pages")]
        return []


class ShareLeg(_PrefixLeg):
    """Offer a cached prefix; a `worker.leg.Leg`."""

    next = SHARE_NEXT

    def begin(self, now_s: float) -> list[Action]:
        length = len(self._order.prompt)
        offer = transfer.Offer(transfer_id=self._transfer_id, attempt=self._order.attempt, length=length)
        return [ToEngine(engine.Submit(self._order.engine_request(self._key))), ToTransfer(offer)]

    def _step(self, event: LegEvent) -> list[Action]:
        length = len(self._order.prompt)
        match event:
            case engine.Reserved() | transfer.Wanted():
                return [ToEngine(engine.Start(self._key))] if self.phase is P.MOVING else []
            case engine.Started():
                return []
            case engine.SequenceFinished(pages=pages):
                final = transfer.BlocksFinal(
                    transfer_id=self._transfer_id,
                    num_blocks=length // BLOCK_TOKENS,
                    pages=pages,
                    computed_tokens=length,
                )
                done = transfer.PrefillDone(
                    transfer_id=self._transfer_id,
                    pages=pages,
                    first_token=NO_TOKEN,
                    first_index=0,
                    computed=0,
                    cached=length,
                    ended=False,
                )
                return [ToTransfer(final), ToTransfer(done)]
            case transfer.Ended(_, outcome, reason):
                if outcome is transfer.Outcome.TAKEN:
                    return [*self._back(), Say(Finished(None, None))]
                return [
                    ToEngine(engine.AbortSequence(self._key)),
                    *self._back(),
                    Say(Failed(TransferFailed(f"not taken: {reason}"))),
                ]
            case _:
                raise AssertionError(event)

    def _let_go(self) -> transfer.Command:
        return transfer.Withdraw(self._transfer_id, "over")


class FetchLeg(_PrefixLeg):
    """Pull a prefix into the cache; a `worker.leg.Leg`."""

    next = FETCH_NEXT

    def __init__(self, key: int, order: LegOrder, now_s: float) -> None:
        super().__init__(key, order, now_s)
        assert order.holder is not None
        self._holder = order.holder
        self._held_tokens = 0
        self._num_pages = 0

    def begin(self, now_s: float) -> list[Action]:
        return [self._know_holder(), ToEngine(engine.Submit(self._order.engine_request(self._key)))]

    def _know_holder(self) -> Action:
        holder = self._holder
        return ToTransfer(transfer.PeerFound(holder.worker_id, holder.address, holder.incarnation))

    def _step(self, event: LegEvent) -> list[Action]:
        match event:
            case engine.Reserved(_, held_tokens, pages):
                self._held_tokens = held_tokens
                held_blocks = held_tokens // BLOCK_TOKENS
                self._num_pages = len(pages.history) - held_blocks + len(pages.window) + 1
                pull = transfer.OpenPull(
                    transfer_id=self._transfer_id,
                    attempt=self._order.attempt,
                    holder=self._holder.worker_id,
                    holder_incarnation=self._holder.incarnation,
                    pages=pages,
                    length=len(self._order.prompt),
                    held_blocks=held_blocks,
                )
                # Said again: while the credits were waited for, the peer may have been forgotten.
                return [Say(SaidReserved(held_tokens)), self._know_holder(), ToTransfer(pull)]
            case transfer.Arrived(stats=stats):
                return [
                    ToEngine(engine.Store(self._key)),
                    Say(SaidTransferred(stats, self._num_pages, self._held_tokens)),
                    Say(Finished(None, None)),
                ]
            case transfer.NotNeeded():
                error: HeadraceError = TransferFailed("the holder of a prefix says that nothing is needed")
            case transfer.PullFailed(_, error):
                pass
            case _:
                raise AssertionError(event)
        return [ToEngine(engine.AbortSequence(self._key)), *self._back(), Say(Failed(error))]

    def _let_go(self) -> transfer.Command:
        return transfer.CancelPull(self._transfer_id, "over")


def _kind(event: LegEvent) -> Event:
    match event:
        case transfer.Ended(_, outcome):
            return E.MOVED if outcome is transfer.Outcome.TAKEN else E.LOST
        case _:
            return _KINDS[type(event)]


_KINDS: dict[type, Event] = {
    engine.Reserved: E.RESERVED,
    engine.Refused: E.REFUSED,
    engine.Started: E.STARTED,
    engine.SequenceFinished: E.SERVED,
    engine.SequenceFailed: E.BROKEN,
    transfer.Wanted: E.WANTED,
    transfer.Arrived: E.MOVED,
    transfer.NotNeeded: E.LOST,
    transfer.PullFailed: E.LOST,
    Abort: E.ABORT,
    AbortChoice: E.ABORT_CHOICE,
    Due: E.DUE,
}

PREFIX_LEGS: LegFactories = {engine.LegKind.SHARE: ShareLeg, engine.LegKind.FETCH: FetchLeg}
"""The kinds of leg that every worker takes."""
