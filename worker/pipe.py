"""Values between a worker and its transfer process, over a socket pair that nobody else holds.

They are pickled, each after its length: both ends are one program, started one by the other, and what came from a
network has been checked and converted before it gets here.
"""

from __future__ import annotations

import asyncio
import pickle
import struct
from collections.abc import Callable
from typing import cast

LENGTH = struct.Struct("<I")


def pack(value: object) -> bytes:
    """One value as it travels."""
    body = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class Pipe(asyncio.Protocol):
    """One end, on an event loop. What the other end does not read waits in memory; it is bounded by what is open."""

    def __init__(self, heard: Callable[[object], None], lost: Callable[[], None]) -> None:
        """
        Args:
            heard: called with each value, in order.
            lost: called once, when the other end is gone or this one was closed.
        """
        self._heard, self._lost = heard, lost
        self._buffer = bytearray()
        self._transport: asyncio.WriteTransport | None = None

    def send(self, value: object) -> None:
        """Never waits; lost when the other end is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(pack(value))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.Protocol ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, start)
            end = start + LENGTH.size + size
            if len(self._buffer) < end:
                break
            value = pickle.loads(memoryview(self._buffer)[start + LENGTH.size : end].tobytes())
            start = end
            self._heard(value)
        del self._buffer[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()
