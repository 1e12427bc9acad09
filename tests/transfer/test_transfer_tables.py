"""The state tables of the room, walked: every phase has a way out, and an end is an end."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import pytest

from headrace.transfer import holder, link, taker
from headrace.transfer.api import LinkPhase
from headrace.transfer.buffers import LANDING_NEXT, SEND_NEXT, LandingEvent, LandingPhase, SendEvent, SendPhase

H, T = holder.HolderPhase, taker.TakerPhase


def reachable(table: Mapping[Hashable, Mapping[Hashable, Hashable]], start: Hashable) -> set[Hashable]:
    """All phases that some run of steps leads to."""
    seen, todo = {start}, [start]
    while todo:
        for after in table[todo.pop()].values():
            if after not in seen:
                seen.add(after)
                todo.append(after)
    return seen


@pytest.mark.parametrize(
    ("table", "phases", "starts"),
    [
        (holder.NEXT, H, {H.OFFERED, H.PULLED}),
        (taker.NEXT, T, {T.LINKING}),
        (link.NEXT, LinkPhase, {LinkPhase.DOWN}),
        (SEND_NEXT, SendPhase, {SendPhase.FREE}),
        (LANDING_NEXT, LandingPhase, {LandingPhase.FREE}),
    ],
    ids=["holder", "taker", "link", "send", "landing"],
)
def test_table_knows_every_phase_and_reaches_each(table, phases, starts):
    """No phase is missing from the table, none stands in it that nothing leads to."""
    assert set(table) == set(phases)
    assert set().union(*(reachable(table, start) for start in starts)) == set(phases)


@pytest.mark.parametrize("phase", [phase for phase in H if phase not in holder.FINAL])
def test_a_subscription_can_be_ended_in_each_phase(phase):
    """A holder stops serving at once, whatever it was doing."""
    assert holder.NEXT[phase][holder.HolderStep.END] is H.ENDED


@pytest.mark.parametrize("phase", holder.FINAL)
def test_an_ended_subscription_stays_ended(phase):
    """Late steps are loops."""
    assert set(holder.NEXT[phase].values()) == {phase}


@pytest.mark.parametrize("phase", [T.LINKING, T.WAITING, T.TAKING, T.DRAINING])
def test_a_pull_can_be_aborted_in_each_phase(phase):
    """Through DRAINING, in which scatters end, to ABORTED."""
    draining = taker.NEXT[phase][taker.TakerStep.ABORT]
    assert draining is T.DRAINING
    assert taker.NEXT[draining][taker.TakerStep.SETTLED] is T.ABORTED


def test_a_pull_ends_once():
    """TAKEN and ABORTED lead nowhere else, and TAKEN only comes out of TAKING."""
    assert set(taker.NEXT[T.TAKEN].values()) == {T.TAKEN}
    assert set(taker.NEXT[T.ABORTED].values()) == {T.ABORTED}
    into_taken = [phase for phase, row in taker.NEXT.items() if T.TAKEN in row.values() and phase is not T.TAKEN]
    assert into_taken == [T.TAKING]


@pytest.mark.parametrize("phase", LinkPhase)
def test_a_link_can_break_in_each_phase(phase):
    """And is dialled again from DOWN only."""
    assert link.NEXT[phase][link.LinkStep.BREAK] is LinkPhase.DOWN


def test_an_incompatible_link_waits_for_another_life():
    """No retry helps, so nothing dials."""
    assert link.LinkStep.DIAL not in link.NEXT[LinkPhase.INCOMPATIBLE]
    assert link.NEXT[LinkPhase.INCOMPATIBLE][link.LinkStep.NEW_LIFE] is LinkPhase.DOWN


def test_time_never_frees_a_landing_buffer():
    """Out of READING and HELD lead only the READ's own ends; giving up leads to HELD."""
    assert LANDING_NEXT[LandingPhase.READING][LandingEvent.GIVEN_UP] is LandingPhase.HELD
    assert set(LANDING_NEXT[LandingPhase.HELD]) == {LandingEvent.DONE, LandingEvent.LOST}
    frees = {event for event, after in LANDING_NEXT[LandingPhase.READING].items() if after is LandingPhase.FREE}
    assert frees == {LandingEvent.LOST}


def test_a_send_buffer_is_taken_back_at_once_unless_it_is_being_filled():
    """OVER frees an announced buffer; a gather is waited for."""
    assert SEND_NEXT[SendPhase.ANNOUNCED][SendEvent.OVER] is SendPhase.FREE
    assert SEND_NEXT[SendPhase.FILLING][SendEvent.OVER] is SendPhase.DRAINING
    assert SEND_NEXT[SendPhase.DRAINING][SendEvent.GATHERED] is SendPhase.FREE
