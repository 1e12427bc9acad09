"""Deliberate mistakes in the deciders of `transfer`, by monkeypatch: its simulation and its explorer must see them."""

from __future__ import annotations

import pytest

from headrace.transfer import simulator, taker
from headrace.transfer.buffers import LandingBuffers, SendBuffer, SendBuffers, SendEvent, SendPhase
from headrace.transfer.coverage import Coverage
from headrace.transfer.decisions import Deliver
from headrace.transfer.holder import Holder, HolderPhase, Subscription
from headrace.transfer.taker import Taker, Transfer


def reuse_landing_while_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    """A landing buffer is free as soon as nobody waits for its READ."""
    give_up = LandingBuffers.give_up

    def give_up_and_free(self: LandingBuffers, index: int, now_s: float) -> object:
        give_up(self, index, now_s)
        return self.lost(index)

    monkeypatch.setattr(LandingBuffers, "give_up", give_up_and_free)
    monkeypatch.setattr(LandingBuffers, "overdue", lambda self, index: None)
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
