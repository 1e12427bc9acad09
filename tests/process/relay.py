"""A relay before the ports of real workers: passes every gRPC message on, and keeps one back while a test acts.

A router is told the relay's addresses instead of the workers', and each worker's own word of where its peers find it is
changed on the way, so that both hops pass through here; the bytes of pages do not, they are read with NIXL. Kept back
is one message with all that follows it in its direction of its stream; the other direction goes on. A stream that ends
on one side ends on the other. Nothing in the processes knows of it. One thread with an event loop of its own; tests
call from theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import grpc
import grpc.aio

from headrace.proto.internal.v1 import engine_pb2, peer_pb2
from headrace.worker.channels import channel_options, server_options

T = TypeVar("T")

MAX_MESSAGE_BYTES = 64 << 20


class Way(Enum):
    """From whom to whom."""

    TO_WORKER = "router to worker"
    FROM_WORKER = "worker to router"
    TO_HOLDER = "taker to holder"
    FROM_HOLDER = "holder to taker"


_PEERS = (Way.TO_HOLDER, Way.FROM_HOLDER)


@dataclass(frozen=True)
class Seen:
    """A message that passes."""

    worker: str
    """Before whose ports; of two peers the holder."""
    way: Way
    message: Any


@dataclass(frozen=True)
class _Sides:
    """How to read both directions of a stream."""

    there: tuple[Way, Any]
    back: tuple[Way, Any]


_READ = {
    "/headrace.internal.v1.Engine/Session": _Sides(
        (Way.TO_WORKER, engine_pb2.RouterMessage), (Way.FROM_WORKER, engine_pb2.WorkerMessage)
    ),
    "/headrace.internal.v1.KvPeer/Link": _Sides(
        (Way.TO_HOLDER, peer_pb2.TakerMessages), (Way.FROM_HOLDER, peer_pb2.HolderMessages)
    ),
}
"""All other calls pass unread."""

_OVER = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError)
"""How grpc.aio says that a call is over."""


class Hold:
    """One message that is kept back from when it comes until `release`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, matches: Callable[[Seen], bool], nth: int) -> None:
        self._loop = loop
        self._matches = matches
        self._to_come = nth
        self._come = threading.Event()
        self._go = asyncio.Event()

    def wait(self, limit_s: float = 30.0) -> None:
        """Until the message is here."""
        assert self._come.wait(limit_s), "the message that a test waits for has not come"

    @property
    def has_come(self) -> bool:
        return self._come.is_set()

    def release(self) -> None:
        """Let it go on; or, before it has come, do not keep it."""
        self._loop.call_soon_threadsafe(self._go.set)

    async def look(self, seen: Seen) -> None:
        """In the relay's thread: keep the message if it is the one."""
        if self._come.is_set() or self._go.is_set() or not self._matches(seen):
            return
        self._to_come -= 1
        if self._to_come == 0:
            self._come.set()
            await self._go.wait()


class Relay:
    """Stands before any number of workers. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="relay", daemon=True)
        self._thread.start()
        self._servers: list[grpc.aio.Server] = []
        self._holds: list[Hold] = []

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *failed: object) -> None:
        self._do(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)
        self._loop.close()

    def stand_before(self, worker: str, engine: str, peer: str) -> str:
        """Relay to a worker's two services, whether or not it listens there yet; the address for routers."""
        return self._do(self._stand_before(worker, engine, peer))

    @contextlib.contextmanager
    def hold(self, matches: Callable[[Seen], bool], nth: int = 1) -> Iterator[Hold]:
        """Keep the nth message that `matches` from now on; let go at the end of the block at the latest."""
        hold = Hold(self._loop, matches, nth)
        self._holds.append(hold)
        try:
            yield hold
        finally:
            hold.release()
            self._holds.remove(hold)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30.0)

    # ---- in the relay's thread ----

    async def _stand_before(self, worker: str, engine: str, peer: str) -> str:
        peer_address = await self._listen(worker, peer, "")
        return await self._listen(worker, engine, peer_address)

    async def _listen(self, worker: str, target: str, peer_address: str) -> str:
        server = grpc.aio.server(options=server_options(MAX_MESSAGE_BYTES))
        server.add_generic_rpc_handlers((_Handler(partial(self._pass, worker, target, peer_address)),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._servers.append(server)
        return f"127.0.0.1:{port}"

    async def _stop(self) -> None:
        for hold in self._holds:
            hold.release()
        await asyncio.gather(*(server.stop(0.2) for server in self._servers))
        rest = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    async def _pass(self, worker: str, target: str, peer_address: str, method: str, context: Any) -> None:
        """One call from its beginning to its end. A connection of its own, as workers and routers have them."""
        sides = _READ.get(method)

        async def look(side: tuple[Way, Any] | None, data: bytes) -> AsyncIterator[bytes]:
            if side is None:
                yield data
                return
            way, kind = side
            whole = kind.FromString(data)
            if way is Way.FROM_WORKER and whole.HasField("welcome"):
                whole.welcome.peer_address = peer_address
            # Peers send what waited together; one of those may have to be kept back.
            parts = [kind(messages=[message]) for message in whole.messages] if way in _PEERS else [whole]
            for part in parts:
                message = part.messages[0] if way in _PEERS else part
                for hold in tuple(self._holds):
                    await hold.look(Seen(worker, way, message))
                yield part.SerializeToString()

        async with grpc.aio.insecure_channel(target, options=channel_options(MAX_MESSAGE_BYTES)) as channel:
            call: Any = channel.stream_stream(method)()
            there = asyncio.create_task(self._there(context, call, partial(look, sides.there if sides else None)))
            try:
                metadata = await call.initial_metadata()
                if not call.done():
                    # A taker takes these for the word that the stream stands.
                    await context.send_initial_metadata(metadata)
                while (data := await call.read()) is not grpc.aio.EOF:
                    async for part in look(sides.back if sides else None, data):
                        await context.write(part)
                code, details = await call.code(), await call.details()
            except grpc.aio.AioRpcError as error:
                code, details = error.code(), error.details()
            finally:
                there.cancel()
                call.cancel()
            if code is not grpc.StatusCode.OK:
                await context.abort(code, details or "")

    async def _there(self, context: Any, call: Any, look: Callable[[bytes], AsyncIterator[bytes]]) -> None:
        with contextlib.suppress(*_OVER):
            while (data := await context.read()) is not grpc.aio.EOF:
                async for part in look(data):
                    await call.write(part)
            await call.done_writing()


class _Handler(grpc.GenericRpcHandler):
    """Every method, as a stream of bytes both ways: on the wire a single message is one too."""

    def __init__(self, relay: Callable[[str, Any], Awaitable[None]]) -> None:
        self._relay = relay

    def service(self, handler_call_details: Any) -> Any:
        method = handler_call_details.method

        async def relay(requests: Any, context: Any) -> None:
            await self._relay(method, context)

        return grpc.stream_stream_rpc_method_handler(relay)
