"""The states of a worker, and what counts as progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.engine.api import EngineLoad
from headrace.worker.lifecycle import NEXT, Change, Lifecycle, ProgressWatch, WorkerState

LOAD = EngineLoad(0, 0, 0, 0, 0.0, {}, 0)


def watching(load: EngineLoad | None, until_s: int, watch: ProgressWatch, start_s: int = 0) -> ProgressWatch:
    """Look once a second at the same snapshot; event loop and transfers are alive."""
    for now_s in range(start_s, until_s + 1):
        watch.loop_alive(now_s)
        watch.transfers_alive(now_s)
        watch.observe(load, now_s)
    return watch


def test_every_state_can_be_told_to_drain_and_reaches_flushed() -> None:
    """Whatever a worker is doing, DRAIN is in its table and leads to FLUSHED."""
    reached = {WorkerState.FLUSHED}
    for _ in NEXT:
        reached |= {state for state, moves in NEXT.items() if reached & set(moves.values())}
    assert reached == set(WorkerState)
    assert all(Change.DRAIN in moves for moves in NEXT.values())
    assert all({Change.STALLED, Change.PROGRESSED} <= set(moves) for moves in NEXT.values())


def test_ready_is_never_entered_again_after_a_drain() -> None:
    """A drain is one way."""
    assert [state for state in WorkerState if Change.BUILT in NEXT[state]] == [WorkerState.STARTING]
    lifecycle = Lifecycle()
    assert lifecycle.handle(Change.BUILT) is WorkerState.READY
    lifecycle.handle(Change.DRAIN)
    for change in (Change.PROGRESSED, Change.STALLED, Change.TOLD, Change.PROGRESSED, Change.EMPTY, Change.PROGRESSED):
        assert lifecycle.handle(change) is not WorkerState.READY
    assert lifecycle.state is WorkerState.FLUSHED


def test_a_change_that_the_table_lacks_is_a_bug() -> None:
    """Nothing is guessed."""
    with pytest.raises(KeyError):
        Lifecycle().handle(Change.TOLD)


def test_a_hanging_step_wedges_even_if_the_snapshot_before_it_was_idle() -> None:
    """The engine's snapshot is renewed each turn: an old one is a step that does not end."""
    watch = watching(LOAD, 30, ProgressWatch(wedged_after_s=30.0, now_s=0.0))
    assert not watch.wedged
    watching(LOAD, 31, watch, 31)
    assert watch.wedged
    assert not watch.hopeless
    watching(LOAD, 61, watch, 32)
    assert watch.hopeless


def test_an_idle_engine_that_turns_is_well_for_ever() -> None:
    """New snapshots, nothing running: waiting for a taker or for pages is no stall."""
    watch = ProgressWatch(wedged_after_s=30.0, now_s=0.0)
    for now_s in range(100):
        watching(replace(LOAD, waiting=3), now_s, watch, now_s)
    assert watch.stalled_s == 0.0


def test_turns_without_steps_while_something_runs_are_a_stall() -> None:
    """Sequences run, and no step ends."""
    watch = ProgressWatch(wedged_after_s=30.0, now_s=0.0)
    for now_s in range(40):
        watching(replace(LOAD, running=1), now_s, watch, now_s)
    assert watch.wedged
    watching(replace(LOAD, running=1, steps=1), 40, watch, 40)
    assert not watch.wedged


@pytest.mark.parametrize("alive", [ProgressWatch.loop_alive, ProgressWatch.transfers_alive])
def test_a_dead_event_loop_and_dead_transfers_wedge(alive: Callable[[ProgressWatch, float], None]) -> None:
    """The engine may be well; nobody would hear it, and nobody would get its pages."""
    watch = ProgressWatch(wedged_after_s=30.0, now_s=0.0)
    for now_s in range(40):
        alive(watch, now_s)
        watch.observe(replace(LOAD), now_s)
    assert watch.wedged


def test_loading_is_no_stall() -> None:
    """Weights take minutes; there is no engine yet."""
    watch = ProgressWatch(wedged_after_s=30.0, now_s=0.0)
    for now_s in range(1000):
        watch.observe(None, now_s)
    watch.observe(LOAD, 1000)
    assert watch.stalled_s == 0.0


def test_a_process_that_was_stopped_is_not_hopeless_when_it_wakes() -> None:
    """The watcher slept too: that time says nothing."""
    watch = watching(LOAD, 5, ProgressWatch(wedged_after_s=30.0, now_s=0.0))
    watch.observe(LOAD, 500)
    assert watch.stalled_s == 0.0
