"""What a worker process is, from start to exit, and whether it makes progress.

`Lifecycle` is the one state table; the event loop alone changes it, anyone may read it. `ProgressWatch` judges progress
from snapshots, never from a request that would queue behind real work. Neither does I/O; time is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from ..engine.api import EngineLoad


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

    @property
    def accepts(self) -> bool:
        """New legs are taken."""
        return self._state is WorkerState.READY

    def handle(self, change: Change) -> WorkerState:
        """The state after `change`; a change that the table lacks is a bug."""
        before, after = self._state, NEXT[self._state][change]
        self._state = after
        if after is not before and self._changed is not None:
            self._changed(before, after, change)
        return after


class ProgressWatch:
    """How long work has been present without a step's end, and since when the event loop was not seen.

    One thread calls `observe` (the status thread, each second); `loop_alive` is called by the event loop. Reads are of
    single attributes and need no lock.
    """

    def __init__(self, *, wedged_after_s: float, now_s: float) -> None:
        self._wedged_after_s = wedged_after_s
        self._busy_since_s: float | None = None
        self._loop_seen_s = now_s
        self.stalled_s = 0.0

    def loop_alive(self, now_s: float) -> None:
        self._loop_seen_s = now_s

    def observe(self, load: EngineLoad | None, now_s: float) -> None:
        """Take a look: `load` is None before the engine runs."""
        engine_s = 0.0
        if load is None or load.running + load.waiting == 0:
            self._busy_since_s = None
        else:
            # The last step may lie long before the work came: idle time is no stall.
            self._busy_since_s = now_s if self._busy_since_s is None else self._busy_since_s
            engine_s = now_s - max(self._busy_since_s, load.last_progress_s)
        loop_s = now_s - self._loop_seen_s if load is not None else 0.0
        self.stalled_s = max(engine_s, loop_s, 0.0)

    @property
    def wedged(self) -> bool:
        return self.stalled_s > self._wedged_after_s

    @property
    def hopeless(self) -> bool:
        """Twice the bound: nothing but a restart helps."""
        return self.stalled_s > 2.0 * self._wedged_after_s
