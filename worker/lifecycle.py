"""What a worker process is, from start to exit, and whether it makes progress.

`Lifecycle` is the one state table; the event loop alone changes it, anyone may read it. `ProgressWatch` judges progress
from snapshots, never from a request that would queue behind real work. Neither does I/O; time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ..engine.api import EngineLoad

ASLEEP_S = 10.0
"""Between two looks, which are a second apart."""


class WorkerState(Enum):
    """Routers place work on READY alone."""

    STARTING = "starting"
    """Weights, golden pages, ports."""
    READY = "ready"
    CORDONED = "cordoned"
    """New legs are refused; routers are being told."""
    DRAINING = "draining"
    """Live legs run to their end, within the budget."""
    FLUSHED = "flushed"
    """Nothing is live; the process may end."""
    WEDGED = "wedged"
    """Work is present and no step ends."""


class Change(Enum):
    """What moves a worker from one state to the next."""

    BUILT = "built"
    DRAIN = "drain"
    TOLD = "told"
    EMPTY = "empty"
    BUDGET_OVER = "budget_over"
    STALLED = "stalled"
    PROGRESSED = "progressed"


S, C = WorkerState, Change

NEXT: dict[WorkerState, dict[Change, WorkerState]] = {
    S.STARTING: {C.BUILT: S.READY, C.DRAIN: S.FLUSHED, C.STALLED: S.STARTING, C.PROGRESSED: S.STARTING},
    S.READY: {C.DRAIN: S.CORDONED, C.STALLED: S.WEDGED, C.PROGRESSED: S.READY},
    # A worker that leaves is not ready whether or not it stalls; the budget ends it.
    S.CORDONED: {C.TOLD: S.DRAINING, C.DRAIN: S.CORDONED, C.STALLED: S.CORDONED, C.PROGRESSED: S.CORDONED},
    S.DRAINING: {
        C.EMPTY: S.FLUSHED,
        C.BUDGET_OVER: S.FLUSHED,
        C.DRAIN: S.DRAINING,
        C.STALLED: S.DRAINING,
        C.PROGRESSED: S.DRAINING,
    },
    S.FLUSHED: dict.fromkeys((C.DRAIN, C.STALLED, C.PROGRESSED, C.EMPTY, C.BUDGET_OVER), S.FLUSHED),
    # A stopped and resumed process finds its way back; a hung one is ended by `ProgressWatch`.
    S.WEDGED: {C.PROGRESSED: S.READY, C.STALLED: S.WEDGED, C.DRAIN: S.CORDONED},
}


class Lifecycle:
    """The state of this process. Only the event loop's thread calls `handle`."""

    def __init__(self, changed: Callable[[WorkerState, WorkerState, Change], None] | None = None) -> None:
        self._state = WorkerState.STARTING
        self._changed = changed

    @property
    def state(self) -> WorkerState:
        return self._state

    def handle(self, change: Change) -> WorkerState:
        """The state after `change`; a change that the table lacks is a bug."""
        before, after = self._state, NEXT[self._state][change]
        self._state = after
        if after is not before and self._changed is not None:
            self._changed(before, after, change)
        return after


class ProgressWatch:
    """How long the engine has not turned, or not stepped with sequences running, or nothing was seen of event loop or
    transfers.

    The engine makes a new snapshot at the end of each turn of its loop, with work or without: the same one for long is
    a step that hangs. One thread calls `observe` (the status thread, each second), the event loop calls the other two.
    Reads are of single attributes and need no lock.
    """

    def __init__(self, *, wedged_after_s: float, now_s: float) -> None:
        self._wedged_after_s = wedged_after_s
        self._load: EngineLoad | None = None
        self._observed_s = now_s
        self._turned_s = now_s
        self._stepped_s = now_s
        self._loop_seen_s = now_s
        self._transfers_seen_s = now_s
        self.stalled_s = 0.0

    def loop_alive(self, now_s: float) -> None:
        self._loop_seen_s = now_s

    def transfers_alive(self, now_s: float) -> None:
        """The transfer thread turns; said each second or so, by another process perhaps."""
        self._transfers_seen_s = now_s

    def observe(self, load: EngineLoad | None, now_s: float) -> None:
        """Take a look: `load` is None before the engine runs."""
        before, self._load = self._load, load
        asleep_s = now_s - self._observed_s
        self._observed_s = now_s
        if load is None or before is None or asleep_s > ASLEEP_S:
            # Whoever does not even look was stopped as a whole: that time says nothing about the engine.
            self._turned_s = self._stepped_s = self._loop_seen_s = self._transfers_seen_s = now_s
        if load is not before:
            self._turned_s = now_s
        if load is None or before is None or load.running == 0 or load.steps != before.steps:
            self._stepped_s = now_s
        self.stalled_s = max(
            0.0, now_s - min(self._turned_s, self._stepped_s, self._loop_seen_s, self._transfers_seen_s)
        )

    @property
    def wedged(self) -> bool:
        return self.stalled_s > self._wedged_after_s

    @property
    def hopeless(self) -> bool:
        """Twice the bound: nothing but a restart helps."""
        return self.stalled_s > 2.0 * self._wedged_after_s
