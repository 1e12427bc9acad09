"""What this router knows of one life of a worker's prefix cache, and how far it may be believed.

Confirmed entries come from the worker: a snapshot, then numbered messages. Predicted ones are what this router's own
legs will leave there; they live for a while, until the worker confirms them or the leg fails. Nothing here outlives the
worker's session: another life begins with nothing. Decides without I/O; time is passed in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..core.blocks import BlockHash
from ..core.kv_events import BlockRemoved, BlockStored, KvEvent

MAX_BLOCKS = 1 << 20
"""Of one worker, in the order of 200 MB; one that holds more is placed by load and predictions."""
MAX_PREDICTED = 1 << 16
OVERDUE_S = 10.0
"""A load report may be ahead of the messages for this long."""
GAP_S = 5.0
"""A replay that takes longer is given up for a snapshot."""
PREDICTED_S = 5.0, 120.0
"""Shortest and longest life of a predicted entry."""


class IndexState(Enum):
    """How the entries came to be, and so what they are worth."""

    COLD = "cold"
    """Nothing was asked yet."""
    SYNCING = "syncing"
    """A snapshot is on its way, or the messages that follow it."""
    EXACT = "exact"
    """The worker's own set, as of its latest message."""
    GAP = "gap"
    """Something is missing; a replay was asked for."""
    DEGRADED = "degraded"
    """The worker has no event channel that works: predictions alone."""


class IndexEvent(Enum):
    """What moves an index from one state to the next."""

    SUBSCRIBED = "subscribed"
    CAUGHT_UP = "caught_up"
    """Every message that the worker had sent is applied."""
    GAP = "gap"
    """A number is missing, the stream broke, or a load report says that messages are overdue."""
    REPLAY_GONE = "replay_gone"
    """The worker keeps the missing messages no more, or the replay takes too long."""
    RESET = "reset"
    """Another incarnation, or the cache was cleared: nothing that was known holds."""
    NO_CHANNEL = "no_channel"


S, E = IndexState, IndexEvent

NEXT: Mapping[IndexState, Mapping[IndexEvent, IndexState]] = {
    S.COLD: {E.SUBSCRIBED: S.SYNCING, E.GAP: S.COLD, E.RESET: S.COLD, E.NO_CHANNEL: S.DEGRADED},
    # What is missing before the first exact moment is simply asked for again.
    S.SYNCING: {
        E.CAUGHT_UP: S.EXACT,
        E.SUBSCRIBED: S.SYNCING,
        E.GAP: S.SYNCING,
        E.REPLAY_GONE: S.SYNCING,
        E.RESET: S.SYNCING,
        E.NO_CHANNEL: S.DEGRADED,
    },
    S.EXACT: {
        E.CAUGHT_UP: S.EXACT,
        E.SUBSCRIBED: S.EXACT,
        E.GAP: S.GAP,
        E.REPLAY_GONE: S.SYNCING,
        E.RESET: S.SYNCING,
        E.NO_CHANNEL: S.DEGRADED,
    },
    S.GAP: {
        E.CAUGHT_UP: S.EXACT,
        E.SUBSCRIBED: S.GAP,
        E.GAP: S.GAP,
        E.REPLAY_GONE: S.SYNCING,
        E.RESET: S.SYNCING,
        E.NO_CHANNEL: S.DEGRADED,
    },
    S.DEGRADED: {E.SUBSCRIBED: S.SYNCING, E.GAP: S.DEGRADED, E.RESET: S.DEGRADED, E.NO_CHANNEL: S.DEGRADED},
}

CREDIT: Mapping[IndexState, float] = {S.COLD: 0.0, S.SYNCING: 0.0, S.EXACT: 1.0, S.GAP: 0.5, S.DEGRADED: 0.5}
"""How much of a hit is believed."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a worker is believed to hold of a prompt, in leading blocks."""

    blocks: int
    checkpoint: int
    """The last border of them with a check-point; 0, the beginning, needs none."""
    credit: float
    state: IndexState
    confirmed: int = 0
    """Blocks that the worker itself has told of; the others are expected."""


@dataclass(frozen=True, slots=True)
class _Predicted:
    leg: int
    until_s: float
    has_checkpoint: bool


class PrefixIndex:
    """See the module."""

    def __init__(self, incarnation: int, *, max_blocks: int = MAX_BLOCKS, max_predicted: int = MAX_PREDICTED) -> None:
        self.incarnation = incarnation
        self.state = S.COLD
        self.seq = 0
        """The latest message that is applied."""
        self.needs_snapshot = True
        self._max_blocks = max_blocks
        self._max_predicted = max_predicted
        self._held: dict[BlockHash, bool] = {}
        """Block to whether its end has a check-point."""
        self._staged: dict[BlockHash, bool] | None = None
        self._predicted: dict[BlockHash, _Predicted] = {}
        self._chains: dict[int, Sequence[BlockHash]] = {}
        """Of legs under way."""
        self._gap_s = 0.0
        self._overdue: tuple[int, float] | None = None
        """A number that a load report named, and when it did first."""

    @property
    def num_blocks(self) -> int:
        return len(self._held)

    @property
    def num_predicted(self) -> int:
        return len(self._predicted)

    def held(self) -> dict[BlockHash, bool]:
        """A copy of the confirmed entries."""
        return dict(self._held)

    # ---- from the worker ----

    def subscribed(self) -> None:
        """A snapshot or the events are asked for."""
        self._move(E.SUBSCRIBED)

    def snapshot_part(self, as_of_seq: int, blocks: Iterable[BlockStored], *, is_first: bool, is_last: bool) -> None:
        """One part of a snapshot; with the last one its blocks replace what was known."""
        if is_first or self._staged is None:
            self._staged = {}
        for stored in blocks:
            self._staged[stored.block] = stored.has_checkpoint
        if len(self._staged) > self._max_blocks:
            self.no_channel()
        elif is_last:
            self._held, self._staged = self._staged, None
            self.seq = as_of_seq
            self.needs_snapshot = False
            self._confirm(self._held)

    def heard(self, last_seq: int, messages: Sequence[tuple[int, Sequence[KvEvent]]], now_s: float) -> bool:
        """A batch of messages; False: the stream is of no more use, subscribe again.

        Args:
            last_seq: the worker's latest. A batch without messages has nothing left to send: one before it was lost.
        """
        if not messages and self.seq < last_seq:
            self._gap(now_s)
            return False
        for seq, changes in messages:
            if seq <= self.seq:
                continue
            if seq != self.seq + 1:
                self._gap(now_s)
                return False
            self.seq = seq
            if not self._apply(changes):
                return False
        if self.seq >= last_seq:
            self._move(E.CAUGHT_UP)
        self.on_time(now_s)
        return self.state is not S.GAP and not self.needs_snapshot

    def broken(self, now_s: float) -> None:
        """The stream ended or fell silent; what it said so far still holds."""
        self._gap(now_s)

    def replay_gone(self) -> None:
        """The messages that are missing cannot be had any more."""
        self._move(E.REPLAY_GONE)
        self.needs_snapshot = True

    def reset(self) -> None:
        """Nothing that was known holds."""
        self._forget()
        self._predicted.clear()
        self._move(E.RESET)

    def no_channel(self) -> None:
        """The worker tells nothing, or more than is kept here."""
        self._forget()
        self._move(E.NO_CHANNEL)

    def reported(self, kv_seq: int, now_s: float) -> None:
        """A load report named the worker's latest message; predictions whose time is over go too."""
        if kv_seq <= self.seq:
            self._overdue = None
        elif self._overdue is None:
            self._overdue = kv_seq, now_s
        self.on_time(now_s)
        if self._predicted:
            self._predicted = {block: p for block, p in self._predicted.items() if p.until_s > now_s}

    def on_time(self, now_s: float) -> None:
        """Notice what has taken too long."""
        if self._overdue is not None and self.seq >= self._overdue[0]:
            self._overdue = None
        if self.state is S.EXACT and self._overdue is not None and now_s - self._overdue[1] >= OVERDUE_S:
            self._overdue = None
            self._gap(now_s)
        elif self.state is S.GAP and now_s - self._gap_s >= GAP_S:
            self.replay_gone()

    # ---- from this router ----

    def predict(
        self, leg: int, chain: Sequence[BlockHash], *, num_checkpoints: int, expected_s: float, now_s: float
    ) -> None:
        """A leg will leave these blocks here.

        Args:
            num_checkpoints: how many of the last borders will have a check-point.
            expected_s: how long it will take, by what is known.
        """
        shortest_s, longest_s = PREDICTED_S
        life_s = longest_s if self.state is S.DEGRADED else min(max(2.0 * expected_s, shortest_s), longest_s)
        self._chains[leg] = chain
        for index, block in enumerate(chain):
            if block not in self._held:
                self._predicted.pop(block, None)
                has_checkpoint = index >= len(chain) - num_checkpoints
                self._predicted[block] = _Predicted(leg, now_s + life_s, has_checkpoint)
        while len(self._predicted) > self._max_predicted:
            del self._predicted[next(iter(self._predicted))]

    def settle(self, leg: int, *, went_well: bool) -> None:
        """A leg is over; if it failed, what was predicted of it will not come."""
        chain = self._chains.pop(leg, ())
        if went_well:
            return
        for block in chain:
            predicted = self._predicted.get(block)
            if predicted is not None and predicted.leg == leg:
                del self._predicted[block]

    # ---- the question ----

    def hit(self, chain: Sequence[BlockHash], max_blocks: int, now_s: float, *, depth: int | None = None) -> Hit:
        """The longest run of leading blocks that are here.

        Args:
            max_blocks: of them, at most.
            depth: among how many last borders a check-point is looked for; None: all. One that is farther from the end
                than an exact replay is long helps nobody.
        """
        credit = CREDIT[self.state]
        if not credit:
            return Hit(0, 0, credit, self.state)
        end = min(max_blocks, len(chain))
        blocks = confirmed = self._held_run(chain, end)
        while blocks < end and self._checkpoint_after(chain[blocks], now_s) is not None:
            blocks += 1
        checkpoint = blocks
        lowest = 0 if depth is None else max(blocks - depth, 0)
        while checkpoint > lowest and not self._checkpoint_after(chain[checkpoint - 1], now_s):
            checkpoint -= 1
        return Hit(blocks, checkpoint if checkpoint > lowest else 0, credit, self.state, confirmed)

    def _held_run(self, chain: Sequence[BlockHash], end: int) -> int:
        """By halves: a worker that holds a block holds all before it, after every change."""
        held = self._held
        low, high = 0, end if end and chain[0] in held else 0
        while low < high:
            middle = (low + high) // 2
            if chain[middle] in held:
                low = middle + 1
            else:
                high = middle
        return low

    def _checkpoint_after(self, block: BlockHash, now_s: float) -> bool | None:
        """Whether a check-point is at its end; None: the block is not here."""
        has_checkpoint = self._held.get(block)
        if has_checkpoint is None:
            predicted = self._predicted.get(block)
            if predicted is not None and predicted.until_s > now_s:
                return predicted.has_checkpoint
        return has_checkpoint

    # ---- inside ----

    def _move(self, event: IndexEvent) -> None:
        following = NEXT[self.state].get(event)
        assert following is not None, f"{event} in {self.state}"
        self.state = following

    def _gap(self, now_s: float) -> None:
        if self.state is not S.GAP:
            self._gap_s = now_s
        self._move(E.GAP)

    def _apply(self, changes: Sequence[KvEvent]) -> bool:
        """Take in one message; False if the entries are not the worker's any more."""
        for change in changes:
            match change:
                case BlockStored(block, _, has_checkpoint):
                    self._held[block] = has_checkpoint
                    self._predicted.pop(block, None)
                case BlockRemoved(block):
                    self._held.pop(block, None)
                    self._predicted.pop(block, None)
                case _:
                    self.reset()
                    return False
        if len(self._held) > self._max_blocks:
            self.no_channel()
            return False
        return True

    def _confirm(self, blocks: Iterable[BlockHash]) -> None:
        if self._predicted:
            for block in blocks:
                self._predicted.pop(block, None)

    def _forget(self) -> None:
        self._held = {}
        self._staged = None
        self._overdue = None
        self.needs_snapshot = True
