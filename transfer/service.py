"""The transfer thread: one thread that owns the driver, the buffers and every decision about transfers of this worker.

Bytes are moved between pages and buffers by two more threads, one for gathers and one for scatters, so that a copy, a
READ and the next decision run side by side; they are told what to move, and decide nothing.

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
from dataclasses import dataclass

from ..config.tree import TransferSection
from ..core.clock import Clock
from ..core.ids import Incarnation, WorkerId
from ..core.peer import PeerMessage
from ..core.segments import SegmentGeometry, SegmentMover
from .api import Command, LinkClosed, LinkMessage, ThreadFailed, TransferCounts, TransferEvent
from .buffers import AllocateBuffers, HostMemory
from .decisions import Gather
from .driver import Driver
from .node import Copy, TransferNode

NAP_MIN_S = 0.0001
NAP_MAX_S = 0.001
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


@dataclass(frozen=True)
class _Copied:
    """A copy thread's report."""

    copy: Copy
    digest: int | None


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
        allocate: AllocateBuffers = HostMemory,
    ) -> None:
        """`allocate` makes the buffers where `mover` moves bytes."""
        self._driver = driver
        self._clock = clock
        self._deliver = deliver
        self._link_ids = itertools.count(1)
        self._inbox: queue.SimpleQueue[Command | _Copied | None] = queue.SimpleQueue()
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
            defer=self._defer,
            allocate=allocate,
        )
        driver.on_progress(self._wake)
        _MAPPED.append(self._node)
        self._counts = self._node.counts(clock.now_s())
        self._counted_s = clock.now_s()
        self.turned_s = 0.0
        """When the thread last went through its loop: a second ago at most, if it lives. From any thread."""
        self._thread = threading.Thread(target=self._main, name="transfer", daemon=True)
        self._gathers: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._scatters: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._copiers = [
            threading.Thread(target=self._copy_all, args=(copies,), name=f"transfer-{name}", daemon=True)
            for name, copies in (("gather", self._gathers), ("scatter", self._scatters))
        ]

    def start(self) -> None:
        for thread in (self._thread, *self._copiers):
            thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread; open transfers end with the streams. The buffers stay mapped: a peer may still read them."""
        self._stopping = True
        end_s = self._clock.now_s() + timeout_s
        self._inbox.put(None)
        for copies in (self._gathers, self._scatters):
            copies.put(None)
        for thread in (self._thread, *self._copiers):
            if thread.ident is not None:
                thread.join(max(0.0, end_s - self._clock.now_s()))
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

    # ---- the copy threads ----

    def _defer(self, copy: Copy) -> bool:
        (self._gathers if isinstance(copy, Gather) else self._scatters).put(copy)
        return True

    def _copy_all(self, copies: queue.SimpleQueue[Copy | None]) -> None:
        try:
            while (copy := copies.get()) is not None and not self._stopping:
                self._inbox.put(_Copied(copy, self._node.move(copy)))
        except BaseException as error:
            self._failed(error)

    # ---- the thread ----

    def _wake(self) -> None:
        self._inbox.put(None)

    def _failed(self, error: BaseException) -> None:
        logger.error("transfer.thread_failed", exc_info=error)
        self._deliver(ThreadFailed(error))

    def _main(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            self._failed(error)

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
            self.turned_s = clock.now_s()
            happened = node.step(self.turned_s) or happened
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
                if isinstance(command, _Copied):
                    self._node.copied(command.copy, command.digest, self._clock.now_s())
                elif command is not None:
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
