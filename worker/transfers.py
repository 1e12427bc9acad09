"""Transfers of one worker: the transfer thread, the links that carry its messages, and the port where peers find it.

`LocalTransfers` runs them in this process. Where pools lie in the CPU's memory a worker gives them a process of their
own (`transfer_process.py`), in which this class runs just the same: an engine step then shares no interpreter lock with
the copies, messages and decisions of transfers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import grpc

from ..config.tree import TransferSection
from ..core.clock import Clock, MonotonicClock
from ..core.errors import ConfigError
from ..core.ids import Incarnation, WorkerId
from ..core.peer import PeerMessage
from ..core.segments import SegmentGeometry, SegmentMover
from ..kvcache.layout import CacheLayout, CacheShape
from ..proto.internal.v1 import peer_pb2_grpc
from ..transfer import api as transfer
from ..transfer.buffers import AllocateBuffers, HostMemory
from ..transfer.driver import Driver
from ..transfer.nixl_driver import NixlDriver, agent_name
from ..transfer.one_host_driver import OneHostDriver
from ..transfer.service import TransferThread
from . import links
from .channels import server_options
from .hand_over import HandOver
from .links import Links

logger = logging.getLogger(__name__)

GRACE_S = 1.0
"""For last words to leave, when everything is over."""
TICK_S = 0.05
"""How old counts may be that others are told."""
ALIVE_S = 1.0
"""Between two words of life when nothing happens."""


@dataclass(frozen=True, kw_only=True)
class TransferSetup:
    """What transfers know of their worker; values that another process can be given."""

    worker_id: WorkerId
    incarnation: Incarnation
    host: str
    peer_port: int
    """0: any free one."""
    section: TransferSection
    shape: CacheShape
    kv_dtype: str
    fingerprint: bytes
    document: str

    def layout(self) -> CacheLayout:
        return CacheLayout(self.shape, self.kv_dtype)


@dataclass(frozen=True)
class Report:
    """How transfers are doing."""

    counts: transfer.TransferCounts
    num_links: int


class Transfers(Protocol):
    """What a worker does with its transfers. One event loop calls all of it but `report`."""

    async def start(self) -> int:
        """Begin; the port on which peers find this worker.

        Raises:
            ConfigError: it cannot listen there.
            PeerLost: their process has ended, or does not begin.
        """
        ...

    def post(self, command: transfer.Command) -> None:
        """Hand a command over; never waits."""
        ...

    def report(self) -> Report:
        """The latest, from any thread; `start` has ended."""
        ...

    async def stop(self) -> None:
        """End links and threads, within a few seconds."""
        ...


Deliver: TypeAlias = Callable[[transfer.WorkerEvent], None]
"""Called in the event loop."""


class LocalTransfers:
    """`Transfers` in this process."""

    def __init__(
        self,
        setup: TransferSetup,
        *,
        geometry: SegmentGeometry,
        mover: SegmentMover,
        allocate: AllocateBuffers | None = None,
        deliver: Deliver,
        reported: Callable[[Report], None],
        clock: Clock | None = None,
    ) -> None:
        """
        Args:
            allocate: makes the buffers where `mover` moves bytes; None: in the CPU's memory.
            reported: called in the event loop with every new report, each second at the latest while the transfer
                thread turns.
        """
        self._setup, self._deliver, self._reported = setup, deliver, reported
        self._clock = clock or MonotonicClock()
        self._hand_over = HandOver(
            asyncio.get_running_loop(), lambda error: self._deliver(transfer.ThreadFailed(error))
        )
        self._thread = TransferThread(
            worker_id=setup.worker_id,
            incarnation=setup.incarnation,
            driver=make_driver(setup, self._clock),
            geometry=geometry,
            mover=mover,
            fingerprint=setup.fingerprint,
            document=setup.document,
            section=setup.section,
            clock=self._clock,
            deliver=self._from_thread,
            send=self._to_link,
            allocate=allocate or HostMemory,
        )
        self._links = Links(post=self._thread.post, new_link_id=self._thread.new_link_id)
        self._server = grpc.aio.server(options=server_options(links.MAX_MESSAGE_BYTES))
        peer_pb2_grpc.add_KvPeerServicer_to_server(self._links, self._server)
        self._ticking: asyncio.Task[None] | None = None

    async def start(self) -> int:
        port = bind(self._server, self._setup.host, self._setup.peer_port, "worker.peer_port")
        self._thread.start()
        await self._server.start()
        self._ticking = asyncio.create_task(self._tick())
        return port

    def post(self, command: transfer.Command) -> None:
        self._thread.post(command)

    def report(self) -> Report:
        return Report(self._thread.counts(), self._links.num_links)

    async def stop(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        await self._links.stop()
        await self._server.stop(GRACE_S)
        await asyncio.to_thread(self._thread.stop, GRACE_S)

    async def _tick(self) -> None:
        """Tell whoever wants to know, when there is news, and that there is none."""
        told: Report | None = None
        turn_s = told_s = 0.0
        while True:
            report, now_s = self.report(), self._clock.now_s()
            alive = self._thread.turned_s > turn_s and now_s - told_s >= ALIVE_S
            if told is None or alive or report.counts is not told.counts or report.num_links != told.num_links:
                turn_s, told, told_s = self._thread.turned_s, report, now_s
                self._reported(report)
            await asyncio.sleep(TICK_S)

    # ---- in the transfer thread ----

    def _from_thread(self, event: transfer.TransferEvent) -> None:
        self._hand_over.post(self._on_event, event)

    def _to_link(self, link_id: int, message: PeerMessage) -> None:
        self._hand_over.post(self._links.send, link_id, message)

    # ---- in the event loop ----

    def _on_event(self, event: transfer.TransferEvent) -> None:
        match event:
            case transfer.Dial(link_id, _, address):
                self._links.dial(link_id, address)
            case transfer.CloseLink(link_id, reason):
                self._links.close(link_id, reason)
            case transfer.LinkChanged():
                logger.info(
                    "link.changed link=%d direction=%s peer=%s phase=%s gigabytes_per_s=%.3f transport=%s reason=%s",
                    event.link_id, event.direction.value, event.peer, event.phase.value, event.gigabytes_per_s,
                    event.transport, event.reason,
                )  # fmt: skip
            case _:
                self._deliver(event)


def make_driver(setup: TransferSetup, clock: Clock) -> Driver:
    """The driver that the settings name; nixl is loaded here and not before."""
    name = agent_name(setup.worker_id, setup.incarnation)
    if setup.section.driver == "memory":
        from ..transfer.memory_driver import MemoryNetwork

        return MemoryNetwork(clock).driver(name)
    return OneHostDriver(NixlDriver(name))


def bind(server: grpc.aio.Server, host: str, port: int, key: str) -> int:
    """Let the server listen; the port.

    Raises:
        ConfigError: it cannot; `key` is the setting to change.
    """
    try:
        bound = server.add_insecure_port(f"{bracketed(host)}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"{key}: cannot listen on {host}:{port}") from error
    if bound == 0:
        raise ConfigError(f"{key}: cannot listen on {host}:{port}")
    return int(bound)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host
