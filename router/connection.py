"""One HTTP connection: uvicorn's, with a deadline and a bound for the request line and headers, which it has not.

Without them a silent client holds a file descriptor for ever, and one header without an end takes all memory.
Bodies have theirs in `middleware.py`. Knows bytes and the clock, not requests.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEAD_TIMEOUT_S = 60.0
"""From the connection, or from a later request's first byte, to the end of its headers."""
MAX_HEAD_BYTES = 256 << 10
"""Found exceeded after each read, so one read's size beyond it may be held."""


class EdgeConnection(HttpToolsProtocol):
    """What uvicorn makes for each connection."""

    _head_timer: asyncio.TimerHandle | None = None
    """Runs while a head is awaited."""
    _head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_ended()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        self._head_ended()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_timer is not None and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's headers are too large.")

    def _await_head(self) -> None:
        self._head_bytes = 0
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._head_is_late)

    def _head_ended(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # A pipelined head: its rest is not read while the answer before it runs, which a close would cut.
            self._await_head()
        else:
            self.transport.close()
