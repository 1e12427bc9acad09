"""The thread itself, on the memory driver: commands from any thread, events out, a bounded inbox, an orderly end."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Iterator

import pytest

from headrace.config.tree import TransferSection
from headrace.core.clock import MonotonicClock
from headrace.core.ids import Incarnation, WorkerId, new_transfer_id
from headrace.core.peer import Beat
from headrace.transfer import service
from headrace.transfer.api import (
    Arrived,
    BlocksFinal,
    CloseLink,
    Dial,
    Ended,
    LinkDirection,
    LinkMessage,
    LinkOpened,
    Offer,
    OpenPull,
    PeerFound,
    PrefillDone,
    ThreadFailed,
    Wanted,
)
from headrace.transfer.memory_driver import MemoryNetwork
from headrace.transfer.plain_cache import PlainGeometry, PlainMover, PlainPages
from headrace.transfer.service import TransferThread

GEOMETRY = PlainGeometry()
SECTION = TransferSection(driver="memory", segment_bytes=400, num_send_buffers=4, num_landing_buffers=4)
PATIENCE_S = 20.0


class Pair:
    """A taker and a holder, joined in this process."""

    def __init__(self) -> None:
        self.clock = MonotonicClock()
        self.network = MemoryNetwork(self.clock)
        self.threads: dict[str, TransferThread] = {}
        self.events: dict[str, queue.SimpleQueue] = {}
        self.ends: dict[tuple[str, int], tuple[str, int]] = {}
        for name in ("d", "p"):
            self.events[name] = queue.SimpleQueue()
            self.threads[name] = TransferThread(
                worker_id=WorkerId(name),
                incarnation=Incarnation(7),
                driver=self.network.driver(name),
                geometry=GEOMETRY,
                mover=PlainMover(),
                fingerprint=b"plain",
                document="{}",
                section=SECTION,
                clock=self.clock,
                deliver=self.events[name].put,
                send=lambda link, message, name=name: self.carry(name, link, message),
            )

    def carry(self, name, link, message) -> None:
        other, back = self.ends[name, link]
        self.threads[other].post(LinkMessage(back, message))

    def hear(self, name, kind):
        """The next event of this class; others are dropped."""
        while True:
            event = self.events[name].get(timeout=PATIENCE_S)
            if isinstance(event, kind):
                return event

    def link(self) -> int:
        self.threads["d"].post(PeerFound(WorkerId("p"), "address"))
        link, back = self.hear("d", Dial).link_id, self.threads["p"].new_link_id()
        self.ends["d", link], self.ends["p", back] = ("p", back), ("d", link)
        self.threads["p"].post(LinkOpened(back, LinkDirection.IN))
        self.threads["d"].post(LinkOpened(link, LinkDirection.OUT))
        return link


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    for thread in made.threads.values():
        thread.start()
    yield made
    for thread in made.threads.values():
        thread.stop(5.0)


def test_a_sequence_travels_between_two_threads(pair):
    """Commands in, events out, nothing left."""
    pair.link()
    transfer_id, length = new_transfer_id(), 700
    source, target = PlainPages(GEOMETRY, length), PlainPages(GEOMETRY, length)
    source.data[:] = random.Random(1).randbytes(len(source.data))
    holder, taker = pair.threads["p"], pair.threads["d"]
    holder.post(Offer(transfer_id=transfer_id, attempt=1, length=length))
    taker.post(
        OpenPull(
            transfer_id=transfer_id,
            attempt=1,
            holder=WorkerId("p"),
            holder_incarnation=Incarnation(7),
            pages=target,
            length=length,
        )
    )
    pair.hear("p", Wanted)
    for blocks in range(3):
        holder.post(BlocksFinal(transfer_id=transfer_id, num_blocks=blocks, pages=source))
    holder.post(
        PrefillDone(
            transfer_id=transfer_id, pages=source, first_token=7, first_index=0, computed=length, cached=0, ended=False
        )
    )
    assert pair.hear("d", Arrived).first_token == 7
    pair.hear("p", Ended)
    assert target.data == source.data
    for name, thread in pair.threads.items():
        thread.stop(5.0)
        counts = thread.counts()
        assert counts.audit == ()
        assert counts.open_transfers == 0
        assert counts.landing_buffers["free"] == 4
        assert (counts.transfers_taken, counts.transfers_served) == ((1, 0) if name == "d" else (0, 1))


def test_link_ids_are_drawn_from_any_thread_once(pair):
    """Ids for incoming streams never meet those of dials."""
    drawn: list[int] = []
    threads = [
        threading.Thread(target=lambda: drawn.extend(pair.threads["p"].new_link_id() for _ in range(500)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(drawn)) == 2000


def test_a_flood_of_messages_ends_its_link_instead_of_filling_the_memory(monkeypatch):
    """Beyond the bound the link's messages are dropped, and the link with them; commands still pass."""
    pair = Pair()
    monkeypatch.setattr(service, "MAX_INBOX", 100)
    taker = pair.threads["d"]
    back = taker.new_link_id()
    taker.post(LinkOpened(back, LinkDirection.IN))
    for _ in range(1000):
        taker.post(LinkMessage(back, Beat()))
    taker.post(PeerFound(WorkerId("q"), "address"))
    assert taker._inbox.qsize() <= 102
    taker.start()
    assert pair.hear("d", CloseLink).link_id == back
    pair.hear("d", Dial)
    taker.stop(5.0)


def test_a_broken_invariant_is_told_and_ends_the_thread(pair, caplog):
    """The worker must not go on with a dead transfer thread."""

    def broken(now_s: float) -> bool:
        raise AssertionError("broken on purpose")

    pair.threads["d"]._node.step = broken
    pair.threads["d"].post(PeerFound(WorkerId("p"), "address"))
    failed = pair.hear("d", ThreadFailed)
    assert isinstance(failed.error, AssertionError)
    assert "transfer.thread_failed" in caplog.text


def test_stop_before_start_is_harmless():
    """A worker may fail between making and starting it."""
    pair = Pair()
    for thread in pair.threads.values():
        thread.stop(1.0)
