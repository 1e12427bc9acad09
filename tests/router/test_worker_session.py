"""A session's own calls end in the project's errors, however gRPC ends them."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.core.clock import MonotonicClock
from headrace.core.errors import PeerLost
from headrace.core.ids import Incarnation
from headrace.router.session import SessionTimes, WorkerSession


def session_with(clear_cache: Any) -> WorkerSession:
    session = WorkerSession(
        "w:1", SimpleNamespace(), router_id="r", router_incarnation=Incarnation(1), times=SessionTimes(),
        clock=MonotonicClock(),
    )  # type: ignore[arg-type]  # fmt: skip
    session._stub = SimpleNamespace(ClearCache=clear_cache)
    return session


def test_a_call_that_its_channels_end_cancels_is_a_lost_peer() -> None:
    """grpc.aio says so with a bare CancelledError, which no handler of errors would see."""

    async def cancelled(request: Any, **options: Any) -> None:
        raise asyncio.CancelledError

    with pytest.raises(PeerLost, match="session ended"):
        asyncio.run(session_with(cancelled).clear_cache())


def test_a_caller_that_is_cancelled_stays_cancelled() -> None:
    """The client has left: nothing is lost."""

    async def hanging(request: Any, **options: Any) -> None:
        await asyncio.sleep(60.0)

    async def main() -> None:
        task = asyncio.create_task(session_with(hanging).clear_cache())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
