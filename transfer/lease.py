"""Deadlines by key on one heap: set, moved or dropped at will, found in order of time. Time is passed in (I4)."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class DeadlineHeap(Generic[Key]):
    """Each key has at most one deadline. A moved deadline leaves its old entry in the heap, which is skipped later."""

    def __init__(self) -> None:
        self._due_s: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._due_s)

    def __contains__(self, key: Key) -> bool:
        return key in self._due_s

    def set(self, key: Key, due_s: float) -> None:
        """Give `key` this deadline instead of any it had."""
        if self._due_s.get(key) == due_s:
            return
        self._due_s[key] = due_s
        # The serial keeps equal times in order of setting and spares keys from being compared.
        self._serial += 1
        heapq.heappush(self._heap, (due_s, self._serial, key))
        if len(self._heap) > 64 and len(self._heap) > 4 * len(self._due_s):
            self._rebuild()

    def drop(self, key: Key) -> None:
        """Forget the key's deadline, if it has one."""
        self._due_s.pop(key, None)

    def next_s(self) -> float | None:
        """The earliest deadline."""
        while self._heap and self._due_s.get(self._heap[0][2]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def pop_due(self, now_s: float) -> Iterator[Key]:
        """Take out all keys whose deadline is not later than now, earliest first, one by one: what is done about one
        may move or drop the next."""
        while (first_s := self.next_s()) is not None and first_s <= now_s:
            key = heapq.heappop(self._heap)[2]
            del self._due_s[key]
            yield key

    def _rebuild(self) -> None:
        live = [entry for entry in self._heap if self._due_s.get(entry[2]) == entry[0]]
        heapq.heapify(live)
        self._heap = live
