"""The log of the prefix cache's changes: numbered within this incarnation, the latest kept, and what they add up to.

A message has a number and a bounded list of changes. Readers are cursors into the log, so a slow one costs no memory:
when its next message is kept no more it is told so, and starts from a snapshot again. No I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.blocks import BlockHash
from ..core.errors import StaleError
from ..core.kv_events import BlockRemoved, BlockStored, CacheCleared, KvEvent

MAX_MESSAGES = 10_000
MAX_CHANGES_KEPT = 1 << 18
"""Of all kept messages together, in the order of 50 MB."""
MAX_CHANGES = 1024
"""Of one message."""


class ReplayGone(StaleError):
    """The messages after this number are kept no more, or were never sent: start from a snapshot."""


@dataclass(frozen=True, slots=True)
class KvMessage:
    """Changes in order; applied together or not at all."""

    seq: int
    changes: tuple[KvEvent, ...]


@dataclass(frozen=True, slots=True)
class KvSnapshot:
    """What is held after the message `as_of_seq`; parents come before their children."""

    as_of_seq: int
    blocks: tuple[BlockStored, ...]


class KvLog:
    """See the module."""

    def __init__(
        self,
        *,
        max_messages: int = MAX_MESSAGES,
        max_changes_kept: int = MAX_CHANGES_KEPT,
        max_changes: int = MAX_CHANGES,
    ) -> None:
        self._max_messages = max_messages
        self._max_changes_kept = max_changes_kept
        self._max_changes = max_changes
        self._held: dict[BlockHash, BlockStored] = {}
        self._messages: deque[KvMessage] = deque()
        self._num_changes_kept = 0
        self._last_seq = 0

    @property
    def last_seq(self) -> int:
        """Number of the latest message; 0 before the first."""
        return self._last_seq

    @property
    def num_blocks(self) -> int:
        """Blocks held now."""
        return len(self._held)

    def append(self, changes: Sequence[KvEvent]) -> None:
        """Take in what changed, as one message or as several if it is much."""
        for start in range(0, len(changes), self._max_changes):
            self._append(tuple(changes[start : start + self._max_changes]))

    def after(self, seq: int, max_changes: int) -> list[KvMessage]:
        """The messages that follow `seq`, about `max_changes` of changes at a time; empty: nothing is new.

        Raises:
            ReplayGone: see there.
        """
        first = self._last_seq - len(self._messages) + 1
        if not first - 1 <= seq <= self._last_seq:
            raise ReplayGone(f"messages {first} to {self._last_seq} are kept, not what follows {seq}")
        found: list[KvMessage] = []
        num_changes = 0
        # By index: a reader is near the end, and a deque finds that in one step.
        for index in range(seq + 1 - first, len(self._messages)):
            message = self._messages[index]
            if found and num_changes + len(message.changes) > max_changes:
                break
            found.append(message)
            num_changes += len(message.changes)
        return found

    def snapshot(self) -> KvSnapshot:
        """All that is held, as one value: what changes later does not change it."""
        return KvSnapshot(self._last_seq, tuple(self._held.values()))

    def _append(self, changes: tuple[KvEvent, ...]) -> None:
        for change in changes:
            match change:
                case BlockStored(block):
                    self._held[block] = change
                case BlockRemoved(block):
                    # The engine says what it does: a block that was never stored is a defect there.
                    del self._held[block]
                case CacheCleared():
                    self._held.clear()
        self._last_seq += 1
        self._messages.append(KvMessage(self._last_seq, changes))
        self._num_changes_kept += len(changes)
        while len(self._messages) > self._max_messages or self._num_changes_kept > self._max_changes_kept:
            self._num_changes_kept -= len(self._messages.popleft().changes)
