"""Real transfers over NIXL between two processes, and what becomes of them when one is killed, stopped or resumed."""

from __future__ import annotations

import signal
import time

import pytest

from headrace.core.peer import SegmentReady
from headrace.transfer.api import Arrived, Ended, LinkChanged, LinkPhase, Outcome, PullFailed
from headrace.transfer.one_host_driver import TRANSPORT

pytestmark = pytest.mark.process

LENGTH = 2500


def clean(counts) -> bool:
    """Nothing open, nothing lost."""
    return (
        not counts.open_transfers
        and counts.landing_buffers["free"] == sum(counts.landing_buffers.values())
        and counts.send_buffers["free"] == sum(counts.send_buffers.values())
        and not counts.audit
    )


def up(middle, taker, holder) -> LinkChanged:
    middle.link(taker, holder)
    return middle.until(
        taker, "event", lambda said: isinstance(said[1], LinkChanged) and said[1].phase is LinkPhase.UP
    )[1]


def test_a_sequence_arrives_whole(middle):
    """Every byte of a sequence, over a link that was probed and whose transport was measured."""
    taker, holder = middle.start("d"), middle.start("p")
    link = up(middle, taker, holder)
    assert link.transport == "nixl/UCX tcp"
    assert link.gigabytes_per_s > 0
    transfer = middle.transfer(taker, holder, LENGTH)
    arrived = middle.event(taker, Arrived, transfer)
    assert arrived.first_token == 7
    assert middle.until(taker, "arrived_digest")[2] == middle.until(holder, "offered_digest")[2]
    assert middle.event(holder, Ended, transfer).outcome is Outcome.TAKEN
    taken = middle.until_counts(taker, lambda counts: clean(counts) and counts.transfers_taken == 1)
    served = middle.until_counts(holder, lambda counts: clean(counts) and counts.transfers_served == 1)
    assert taken.bytes_received == arrived.stats.payload_bytes == served.bytes_sent


def test_on_one_host_bytes_are_copied_from_mapped_buffers(middle):
    """Unless the settings forbid it. A stopped holder costs its transfer and no buffer, though probes still land."""
    shared = {"UCX_TLS": "all"}
    taker, holder = middle.start("d", environment=shared), middle.start("p", environment=shared)
    assert up(middle, taker, holder).transport == TRANSPORT
    up(middle, holder, taker)
    pulls = [(taker, middle.transfer(taker, holder, LENGTH, seed)) for seed in range(4)]
    pulls += [(holder, middle.transfer(holder, taker, LENGTH, seed)) for seed in range(4)]
    for end, transfer in pulls:
        assert middle.event(end, Arrived, transfer).stats.transport == TRANSPORT
    stop_at_first_segment(middle, holder)
    transfer = middle.transfer(taker, holder, LENGTH)
    middle.event(taker, PullFailed, transfer)
    middle.until_counts(taker, clean)
    middle.carry = lambda sender, link, message: True
    holder.signal(signal.SIGCONT)
    middle.until_counts(holder, clean)
    middle.event(taker, Arrived, middle.transfer(taker, holder, LENGTH))
    for end in (taker, holder):
        middle.until_counts(end, clean)


def test_both_directions_at_once(middle):
    """Holder and taker are roles of one worker: two workers pull from each other."""
    one, other = middle.start("a"), middle.start("b")
    up(middle, one, other)
    up(middle, other, one)
    pulls = [(one, middle.transfer(one, other, LENGTH, seed)) for seed in range(4)]
    pulls += [(other, middle.transfer(other, one, LENGTH, seed)) for seed in range(4)]
    for taker, transfer in pulls:
        middle.event(taker, Arrived, transfer)
    for peer in (one, other):
        middle.until_counts(peer, lambda counts: clean(counts) and counts.transfers_taken == 4)


def test_a_holder_killed_under_a_read_is_a_failed_pull_and_comes_back(middle):
    """The READ ends with the connection's error: the buffer is free, the pull has failed, the next life serves."""
    taker, holder = middle.start("d", section={"read_deadline_s": 20.0}), middle.start("p")
    up(middle, taker, holder)
    stop_at_first_segment(middle, holder)
    transfer = middle.transfer(taker, holder, LENGTH)
    middle.until_counts(taker, lambda counts: counts.landing_buffers["reading"] > 0)
    holder.signal(signal.SIGKILL)
    failed = middle.event(taker, PullFailed, transfer)
    assert failed.error.reason == "worker_failed"
    middle.until_counts(taker, clean)
    middle.carry = lambda sender, link, message: True
    reborn = middle.start("p")
    transfer = middle.transfer(taker, reborn, LENGTH)
    middle.event(taker, Arrived, transfer)
    middle.until_counts(taker, clean)


def test_a_stopped_holder_costs_held_buffers_until_it_resumes(middle):
    """The deadline ends the pull, not the READ: its buffer is HELD, and free when the peer's last byte has landed."""
    # Beats so slow that on a busy machine the link's silence does not end the pull first.
    taker, holder = (middle.start(role, section={"beat_s": 10.0}) for role in ("d", "p"))
    up(middle, taker, holder)
    stop_at_first_segment(middle, holder)
    transfer = middle.transfer(taker, holder, LENGTH)
    failed = middle.event(taker, PullFailed, transfer)
    assert failed.error.reason == "transfer_failed"
    counts = middle.until_counts(taker, lambda counts: counts.landing_held > 0)
    assert counts.failures["overdue"] == 1
    assert not counts.audit
    middle.carry = lambda sender, link, message: True
    holder.signal(signal.SIGCONT)
    middle.until_counts(taker, clean)
    middle.until_counts(holder, clean)
    transfer = middle.transfer(taker, holder, LENGTH)
    middle.event(taker, Arrived, transfer)


def test_a_stopped_taker_is_ended_by_the_holders_lease(middle):
    """The holder asks nobody: lease over, buffers free, other takers served; the taker wakes to a lost transfer."""
    taker, holder = middle.start("d"), middle.start("p", section={"lease_s": 1.0})
    up(middle, taker, holder)

    def stop_taker(sender, link, message):
        if isinstance(message, SegmentReady):
            taker.signal(signal.SIGSTOP)
        return True

    middle.carry = stop_taker
    transfer = middle.transfer(taker, holder, LENGTH)
    assert middle.event(holder, Ended, transfer).outcome is Outcome.ENDED
    middle.until_counts(holder, clean)
    middle.carry = lambda sender, link, message: True
    taker.signal(signal.SIGCONT)
    middle.event(taker, PullFailed, transfer)
    middle.until_counts(taker, clean)


def test_another_layout_is_refused_by_name(middle):
    """A link between different fingerprints never comes up, and the refusal names the field."""
    taker, holder = middle.start("d", fingerprint="bf16"), middle.start("p", fingerprint="fp8")
    middle.link(taker, holder)
    changed = middle.until(
        taker, "event", lambda said: isinstance(said[1], LinkChanged) and said[1].phase is LinkPhase.INCOMPATIBLE
    )[1]
    assert "layout" in changed.reason
    assert "bf16" in changed.reason


def test_a_required_transport_is_measured_and_missing_it_refuses_the_link(middle):
    """No silent fall-back: TCP where something else is required is an incompatible link."""
    taker = middle.start("d", section={"require_transport": "rc"})
    holder = middle.start("p")
    middle.link(taker, holder)
    changed = middle.until(
        taker, "event", lambda said: isinstance(said[1], LinkChanged) and said[1].phase is LinkPhase.INCOMPATIBLE
    )[1]
    assert "tcp" in changed.reason


def test_an_idle_pair_sleeps(middle):
    """The patched progress thread and the transfer thread together use less than a fifth of a core."""
    taker, holder = middle.start("d"), middle.start("p")
    up(middle, taker, holder)
    before = [middle.state(peer)[1] for peer in (taker, holder)]
    begun_s = time.monotonic()
    while time.monotonic() < begun_s + 3.0:
        middle.pump(0.5)
    wall_s = time.monotonic() - begun_s
    for peer, cpu_s in zip((taker, holder), before, strict=True):
        assert (middle.state(peer)[1] - cpu_s) / wall_s < 0.2


def test_transfers_leave_nothing_behind(middle):
    """After many transfers no file descriptor, buffer or handle is left over."""
    taker, holder = middle.start("d"), middle.start("p")
    up(middle, taker, holder)
    for seed in range(3):
        middle.event(taker, Arrived, middle.transfer(taker, holder, 300, seed))
    fds = middle.state(taker)[2], middle.state(holder)[2]
    for seed in range(60):
        middle.event(taker, Arrived, middle.transfer(taker, holder, 300, seed))
    middle.until_counts(taker, lambda counts: clean(counts) and counts.transfers_taken == 63)
    middle.until_counts(holder, clean)
    assert (middle.state(taker)[2], middle.state(holder)[2]) == fds


def test_a_thread_stops_in_order(middle):
    """`stop` ends the thread and the agent, and the process after it."""
    taker, holder = middle.start("d"), middle.start("p")
    up(middle, taker, holder)
    middle.event(taker, Arrived, middle.transfer(taker, holder, 300))
    for peer in (taker, holder):
        peer.tell("stop")
        middle.until(peer, "stopped")
        assert peer.child.wait(10) == 0


def stop_at_first_segment(middle, holder) -> None:
    """Stop the holder before the taker hears of its first segment: the READ of it can't end."""

    def carry(sender, link, message):
        if isinstance(message, SegmentReady):
            holder.signal(signal.SIGSTOP)
        return True

    middle.carry = carry
