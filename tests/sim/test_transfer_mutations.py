"""Deliberate mistakes, put in one by one, are each caught by the simulation: proof that its checks can see.

Each mutation runs in worlds whose faults bring it out; one of a few seeds must break a rule, and the same worlds
without the mutation must not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from headrace.transfer import simulator, taker
from headrace.transfer.buffers import LandingBuffers, SendBuffer, SendBuffers, SendEvent, SendPhase
from headrace.transfer.coverage import Coverage
from headrace.transfer.decisions import Deliver
from headrace.transfer.holder import Holder, HolderPhase, Subscription
from headrace.transfer.memory_driver import MemoryFaults
from headrace.transfer.simulator import SIMULATED, Broken, WorldFaults, run_world
from headrace.transfer.taker import Taker, Transfer

SEEDS = range(8)
TRANSFERS = 25
FEW_BUFFERS = dataclasses.replace(SIMULATED, num_send_buffers=2, segment_bytes=150)
"""So that one buffer is filled by one transfer again and again."""

SLOW_READS = WorldFaults(
    reads=MemoryFaults(read_s=(0.05, 0.5), max_pieces=6, hangs=0.05), taker_cancels=0.4, stops_per_s=0.5
)
CORRUPT = WorldFaults(reads=MemoryFaults(read_s=(0.001, 0.01), corrupts=0.2))
LOST_READS = WorldFaults(reads=MemoryFaults(read_s=(0.05, 0.5), max_pieces=6, lost=0.2))
DOUBLED_NOTES = WorldFaults(reads=MemoryFaults(read_s=(0.001, 0.01), note_s=(0.0, 0.3), note_doubled=0.8))
SLOW_COPIES = WorldFaults(copy_s=(0.05, 0.2), taker_cancels=0.5, holder_withdraws=0.5)
LOST_MESSAGES = WorldFaults(message_lost=0.05)


def reuse_landing_while_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landing buffer is free as soon as nobody waits for its READ."""
    give_up = LandingBuffers.give_up

    def give_up_and_free(self: LandingBuffers, index: int, now_s: float) -> object:
        give_up(self, index, now_s)
        return self.lost(index)

    monkeypatch.setattr(LandingBuffers, "give_up", give_up_and_free)
    # The READ's end is then ignored, as a timer-driven implementation would.
    node_read_ended = simulator.TransferNode._read_ended

    def read_ended(self: simulator.TransferNode, read: object, state: object, now_s: float) -> None:
        if self.landing_buffers.buffers[read.landing].agent is not None:  # type: ignore[attr-defined]
            node_read_ended(self, read, state, now_s)  # type: ignore[arg-type]

    monkeypatch.setattr(simulator.TransferNode, "_read_ended", read_ended)
    monkeypatch.setattr(simulator.TransferNode, "audit", lambda self: [])
    monkeypatch.setattr(taker.Taker, "audit", lambda self: [])


def skip_the_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    """What landed is taken for what was announced."""
    scattered = Taker._scattered

    def trusting(self: Taker, event: object) -> None:
        owner = self._buffers.buffers[event.landing].owner  # type: ignore[attr-defined]
        announced = self._open[owner].scattering[event.landing]  # type: ignore[index, attr-defined]
        monkeypatch.setattr(taker, "segment_digest", lambda ranges, digest: announced.message.digest)
        scattered(self, event)  # type: ignore[arg-type]

    monkeypatch.setattr(Taker, "_scattered", trusting)


def ignore_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any note that names the buffer frees it, whichever filling it speaks of."""

    def read(self: SendBuffers, owner: bytes, index: int, generation: int) -> bool:
        buffer = self.buffers[index]
        if buffer.phase is not SendPhase.ANNOUNCED or buffer.owner != owner:
            return False
        self._move(buffer, SendEvent.READ)
        return True

    monkeypatch.setattr(SendBuffers, "read", read)


def forget_a_coverage_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """One cell of each segment is counted as stored before its bytes are."""
    take_off = Coverage.take_off

    def hasty(self: Coverage, places: tuple[int, ...]) -> None:
        take_off(self, places)
        self._early = getattr(self, "_early", set()) | {places[0]}  # type: ignore[attr-defined]

    monkeypatch.setattr(Coverage, "take_off", hasty)
    monkeypatch.setattr(Coverage, "missing", lambda self: ())
    monkeypatch.setattr(
        Coverage, "full", property(lambda self: self.num_stored >= len(self) - len(getattr(self, "_early", ())))
    )
    # The mutant has to be let through the taker's own assertions to show itself to the outside.
    monkeypatch.setattr(Taker, "_maybe_taken", _maybe_taken_without_assertions)


def _maybe_taken_without_assertions(self: Taker, transfer: Transfer) -> None:
    if transfer.complete is None or not transfer.coverage.full or transfer.reading or transfer.scattering:
        return
    transfer.pending.clear()
    original(self, transfer)


original = Taker._maybe_taken


def release_pages_before_the_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    """The subscription is over, so the pages go, though a gather still reads them."""
    finish = Holder._finish

    def eager(self: Holder, subscription: Subscription, *arguments: object) -> None:
        running = subscription.num_gathering
        finish(self, subscription, *arguments)  # type: ignore[arg-type]
        if running and subscription.offer is not None:
            stats = simulator.Ended(subscription.transfer_id, subscription.outcome, "early", None)  # type: ignore[arg-type]
            self._actions.append(Deliver(stats))

    monkeypatch.setattr(Holder, "_finish", eager)


def free_pages_under_a_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    """ABORTED is reported at once, though a scatter still writes the pages."""

    def at_once(self: Taker, transfer: Transfer) -> None:
        scattering, transfer.scattering = transfer.scattering, {}
        settled(self, transfer)
        transfer.scattering = scattering

    settled = Taker._maybe_settled
    monkeypatch.setattr(Taker, "_maybe_settled", at_once)
    monkeypatch.setattr(Taker, "audit", lambda self: [])


def remove_an_agent_under_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lost link's agent goes, whatever still reads from it."""
    monkeypatch.setattr(LandingBuffers, "open_reads", lambda self, agent: 0)


def forget_to_free_a_send_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers of an ended subscription are waited for instead of taken back."""

    def over(self: SendBuffers, index: int) -> None:
        buffer: SendBuffer = self.buffers[index]
        if buffer.phase is not SendPhase.ANNOUNCED:
            self._move(buffer, SendEvent.OVER)

    monkeypatch.setattr(SendBuffers, "over", over)


def announce_before_the_block_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are planned one ahead of what the engine said is final."""
    serve = Holder._serve

    def ahead(self: Holder, subscription: Subscription) -> None:
        if subscription.phase in (HolderPhase.QUEUED, HolderPhase.SERVING) and subscription.scheduled:
            subscription.num_final = min(subscription.num_final + 1, subscription.length // 256)
        serve(self, subscription)

    monkeypatch.setattr(Holder, "_serve", ahead)


def let_deadlines_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The taker's deadlines come and nobody acts."""
    monkeypatch.setattr(Taker, "_due", lambda self: None)


def say_ended_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder reports each end twice."""
    deliver = Holder._deliver_ended

    def twice(self: Holder, *arguments: object) -> None:
        deliver(self, *arguments)  # type: ignore[arg-type]
        deliver(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Holder, "_deliver_ended", twice)


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], WorldFaults, str]] = [
    (reuse_landing_while_reading, SLOW_READS, "I1"),
    (skip_the_digest, CORRUPT, "I2"),
    (ignore_the_generation, DOUBLED_NOTES, "I8"),
    (forget_a_coverage_bit, LOST_MESSAGES, "I2"),
    (release_pages_before_the_gather, SLOW_COPIES, "I8"),
    (free_pages_under_a_scatter, SLOW_COPIES, "I8"),
    (remove_an_agent_under_a_read, LOST_READS, ""),
    (forget_to_free_a_send_buffer, SLOW_READS, "I8"),
    (announce_before_the_block_is_final, WorldFaults(), "I2"),
    (let_deadlines_pass, SLOW_READS, "I4"),
    (say_ended_twice, WorldFaults(), "I3"),
]


@pytest.mark.parametrize(("mutate", "faults", "rule"), MUTATIONS, ids=[row[0].__name__ for row in MUTATIONS])
def test_mutation_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], faults: WorldFaults, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation breaks, with the rule that the mistake breaks."""
    mutate(monkeypatch)
    section = FEW_BUFFERS if faults is DOUBLED_NOTES else SIMULATED
    broken = None
    for seed in SEEDS:
        try:
            run_world(seed, faults, TRANSFERS, section=section)
        except AssertionError as error:
            broken = error
            break
    # Where the driver's own assertion is faster than the checker, no rule is named.
    assert broken is not None, "the simulation saw nothing"
    assert isinstance(broken, Broken) == bool(rule)
    assert str(broken).startswith(rule)


@pytest.mark.parametrize("faults", list({id(row[1]): row[1] for row in MUTATIONS}.values()), ids=lambda _: "")
def test_the_same_worlds_are_sound_without_mutation(faults: WorldFaults) -> None:
    """What the mutations break holds without them."""
    for seed in list(SEEDS)[:2]:
        run_world(seed, faults, TRANSFERS)
