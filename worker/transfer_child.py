"""The transfer process: pools mapped, transfers run, until the worker says so or is gone.

It needs no torch: sizes and places come from the offset table, bytes are moved by the C copies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
from dataclasses import replace

import uvloop

from ..core.errors import ConfigError
from ..kvcache.segments import CacheMover
from ..kvcache.shared_memory import SharedMemory
from ..transfer import api as transfer
from .pipe import LENGTH, Pipe
from .transfer_process import MAX_POOLS, Began, Begin, Refused, Stop
from .transfers import LocalTransfers

MAX_BEGIN_BYTES = 4 << 20
"""A layout document is at most 1 MiB."""

logger = logging.getLogger(__name__)


def run(descriptor: int) -> int:
    """Serve the worker at the other end of this socket; the exit status."""
    # A terminal's Ctrl-C and a service manager's SIGTERM reach all processes; the worker says when this one may go.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection = socket.socket(fileno=descriptor)
    received = _receive(connection)
    if received is None:
        return 0
    return uvloop.run(_Child(connection, *received).run())


def _receive(connection: socket.socket) -> tuple[Begin, list[SharedMemory]] | None:
    """What to do, and the pools; None: the worker has ended before it knew."""
    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, MAX_POOLS)
    if not data:
        return None
    (size,) = LENGTH.unpack_from(data)
    assert size <= MAX_BEGIN_BYTES
    while len(data) < LENGTH.size + size:
        more = connection.recv(LENGTH.size + size - len(data))
        if not more:
            return None
        data += more
    begin = pickle.loads(data[LENGTH.size :])
    memories = [
        SharedMemory(pool.page_bytes * pool.num_pages, number)
        for pool, number in zip(begin.pools, descriptors, strict=True)
    ]
    return begin, memories


class _Child:
    def __init__(self, connection: socket.socket, begin: Begin, memories: list[SharedMemory]) -> None:
        self._connection, self._begin, self._memories = connection, begin, memories
        self._leaving = asyncio.Event()
        self._transfers: LocalTransfers | None = None
        self._pipe = Pipe(self._heard, self._leaving.set)

    async def run(self) -> int:
        pools = [
            replace(pool, base_address=memory.address)
            for pool, memory in zip(self._begin.pools, self._memories, strict=True)
        ]
        mover = CacheMover(self._begin.setup.layout(), pools)
        await asyncio.get_running_loop().create_unix_connection(lambda: self._pipe, sock=self._connection)
        transfers = LocalTransfers(
            self._begin.setup, geometry=mover.geometry, mover=mover, deliver=self._deliver, reported=self._pipe.send
        )
        try:
            port = await transfers.start()
        except ConfigError as error:
            self._pipe.send(Refused(error))
            self._pipe.close()
            await self._leaving.wait()
            return 1
        self._transfers = transfers
        self._pipe.send(Began(port, transfers.report()))
        await self._leaving.wait()
        with contextlib.suppress(Exception):
            await transfers.stop()
        self._pipe.close()
        return 0

    def _heard(self, value: object) -> None:
        if isinstance(value, Stop):
            self._leaving.set()
        elif self._transfers is not None:
            self._transfers.post(value)  # type: ignore[arg-type]

    def _deliver(self, event: transfer.WorkerEvent) -> None:
        if isinstance(event, transfer.ThreadFailed):
            # Any class of error; only its text is sure to travel.
            logger.critical("transfer.broken error=%r", event.error, exc_info=event.error)
            logging.shutdown()
            os._exit(70)
        self._pipe.send(event)
