"""The transfer thread: one thread that owns the driver, the buffers and every decision about transfers of this worker.

How a worker uses it:

- `TransferThread(...)`, `start()`, then `post(command)` from any thread; commands are applied in order; last
  `stop(timeout_s)`. Nothing here waits for the caller, and `post` never blocks.
- `deliver(event)` and `send(link_id, message)` are called in the transfer thread and must only hand over
  (`loop.call_soon_threadsafe`). `send` for a link that is closed already is dropped by the shell in silence.

Links. The shell owns the gRPC streams, the thread owns what they mean:

- Taking: post `PeerFound(worker id, address, incarnation)` when a holder becomes known, at the latest before
  `OpenPull`. The thread delivers `Dial(link_id, peer, address)`, now and after each loss, with back-off. The shell
  opens `KvPeer.Link` there and posts `LinkOpened(link_id, OUT)` as soon as the call stands, or `LinkClosed(link_id,
  why)`. `Hello` comes from the thread through `send`.
- Holding: for a stream that a peer opened, draw `link_id = thread.new_link_id()`, post `LinkOpened(link_id, IN)`.
- Both: each incoming proto message goes through `proto/peer_convert.py` and in as `LinkMessage(link_id, message)`;
  `PeerFault` from the conversion: close the stream. When a stream ends for whatever reason post
  `LinkClosed(link_id, why)` once. On the event `CloseLink(link_id, why)` end the stream; no answer is needed.

Holder: `Offer` -> `Wanted` (let the engine compute) -> `BlocksFinal`* -> `PrefillDone` -> `Ended` (release the pages).
`Ended` may come at any time after `Offer`, exactly once, and only when no gather reads the pages any more.
Taker: `OpenPull` -> `Arrived` | `NotNeeded` | `PullFailed`, exactly once; after either no scatter writes the pages.
"""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable

from ..config.tree import TransferSection
from ..core.clock import Clock
from ..core.ids import Incarnation, WorkerId
from ..core.peer import PeerMessage
from ..core.segments import SegmentGeometry, SegmentMover
from .api import Command, LinkClosed, LinkMessage, ThreadFailed, TransferCounts, TransferEvent
from .driver import Driver
from .node import TransferNode

NAP_MIN_S = 0.0002
NAP_MAX_S = 0.003
NAP_HELD_S = 0.05
"""Between looks at READs that nobody waits for any more."""
IDLE_MAX_S = 1.0
MAX_BATCH = 256
"""Commands applied before READs are looked at again."""
MAX_INBOX = 1 << 16
"""Unread commands; beyond that a peer's messages end its link instead of filling the memory."""
COUNTS_EVERY_S = 0.05

_MAPPED: list[TransferNode] = []
"""Every node of this process: a peer may read its buffers for as long as the process lives."""

logger = logging.getLogger(__name__)


class TransferThread:
    """One thread for all transfers of this worker."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        driver: Driver,
        geometry: SegmentGeometry,
        mover: SegmentMover,
        fingerprint: bytes,
        document: str,
        section: TransferSection,
        clock: Clock,
        deliver: Callable[[TransferEvent], None],
        send: Callable[[int, PeerMessage], None],
    ) -> None:
        self._driver = driver
        self._clock = clock
        self._deliver = deliver
        self._link_ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._flooding: set[int] = set()
        self._stopping = False
        self._node = TransferNode(
            worker_id=worker_id,
            incarnation=incarnation,
            driver=driver,
            geometry=geometry,
            mover=mover,
            fingerprint=fingerprint,
            document=document,
            section=section,
            deliver=deliver,
            send=send,
            new_link_id=self._link_ids,
            rng=random.Random(incarnation),
        )
        _MAPPED.append(self._node)
        self._counts = self._node.counts(clock.now_s())
        self._counted_s = clock.now_s()
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread; open transfers end with the streams. The buffers stay mapped: a peer may still read them."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._driver.close()

    def post(self, command: Command) -> None:
        """Hand a command over; from any thread, never waits."""
        if isinstance(command, LinkMessage):
            if command.link_id in self._flooding:
                return
            if self._inbox.qsize() >= MAX_INBOX:
                self._flooding.add(command.link_id)
                return
        elif isinstance(command, LinkClosed):
            self._flooding.discard(command.link_id)
        self._inbox.put(command)

    def new_link_id(self) -> int:
        """An id for a stream that a peer has opened."""
        return next(self._link_ids)

    def counts(self) -> TransferCounts:
        """The latest snapshot, at most 0.1 s old while anything happens; from any thread."""
        return self._counts

    # ---- the thread ----

    def _main(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            logger.exception("transfer.thread_failed")
            self._deliver(ThreadFailed(error))

    def _loop(self) -> None:
        node, clock = self._node, self._clock
        nap_s = NAP_MIN_S
        dirty = True
        while not self._stopping:
            if dirty and clock.now_s() - self._counted_s >= COUNTS_EVERY_S:
                self._count()
                dirty = False
            wait_s = self._wait_s(nap_s, dirty)
            happened = self._take(wait_s)
            happened = node.step(clock.now_s()) or happened
            nap_s = NAP_MIN_S if happened else min(nap_s * 1.5, NAP_MAX_S)
            dirty = dirty or happened
        self._count()

    def _wait_s(self, nap_s: float, dirty: bool) -> float:
        """How long nothing needs to be looked at, unless a command comes."""
        node = self._node
        if node.awaits_bytes:
            return nap_s
        wait_s = COUNTS_EVERY_S if dirty else NAP_HELD_S if node.holds_overdue else IDLE_MAX_S
        due_s = node.next_s()
        return wait_s if due_s is None else min(wait_s, max(0.0, due_s - self._clock.now_s()))

    def _take(self, wait_s: float) -> bool:
        """Wait for commands and apply what is there."""
        taken = 0
        try:
            command = self._inbox.get(timeout=wait_s) if wait_s > 0 else self._inbox.get_nowait()
            while True:
                if command is not None:
                    self._node.handle(command, self._clock.now_s())
                taken += 1
                if taken == MAX_BATCH:
                    return True
                command = self._inbox.get_nowait()
        except queue.Empty:
            pass
        for link_id in tuple(self._flooding):
            self._node.flooded(link_id, self._clock.now_s())
            self._flooding.discard(link_id)
        return taken > 0

    def _count(self) -> None:
        now_s = self._clock.now_s()
        self._counts = self._node.counts(now_s)
        self._counted_s = now_s
