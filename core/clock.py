"""Time as a value that is passed in: monotonic seconds, real or simulated. Nobody compares clocks of two processes."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where decisions' shells get `now_s` from."""

    def now_s(self) -> float:
        """Monotonic seconds; the zero point means nothing."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that stands until it is moved; tests and the simulator own one."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, by_s: float) -> None:
        """Move on by `by_s` seconds, never backwards."""
        assert by_s >= 0.0
        self._now_s += by_s
