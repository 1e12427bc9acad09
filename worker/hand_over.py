"""The way into an event loop from other threads, and what becomes of a defect there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any


class HandOver:
    """Calls what decides, in the loop's thread; that has no way to fail but by a defect, which `failed` is told of."""

    def __init__(self, loop: asyncio.AbstractEventLoop, failed: Callable[[Exception], None]) -> None:
        self._loop, self._failed = loop, failed

    def post(self, function: Callable[..., None], *arguments: Any) -> None:
        """From any thread; never waits."""
        # The loop is closed when the process is past its last word.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.call, function, *arguments)

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """In the loop's thread, now."""
        try:
            function(*arguments)
        except Exception as error:
            self._failed(error)
