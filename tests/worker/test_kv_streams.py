"""Snapshot and events of the prefix cache over real gRPC: what a subscriber sees, and how it is told to start again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from headrace.core.blocks import BlockHash
from headrace.core.ids import Incarnation
from headrace.core.kv_events import BlockRemoved, BlockStored
from headrace.proto.internal.v1 import engine_pb2 as pb
from headrace.proto.internal.v1 import engine_pb2_grpc
from headrace.proto.kv_convert import change_from_message
from headrace.worker import kv_streams
from headrace.worker.kv_events import KvLog
from headrace.worker.kv_streams import KvStreams

ROOT = BlockHash(bytes(16))


def stored(number: int) -> BlockStored:
    return BlockStored(BlockHash(number.to_bytes(16, "big")), ROOT, number % 2 == 0)


class Servicer(engine_pb2_grpc.EngineServicer):
    """The two calls alone."""

    def __init__(self, streams: KvStreams) -> None:
        self.KvEvents = streams.events
        self.KvSnapshot = streams.snapshot


class Rig:
    """Streams on a port of their own, and a client."""

    def __init__(self, max_messages: int = 100) -> None:
        self.streams = KvStreams(Incarnation(77), KvLog(max_messages=max_messages), beat_s=0.05)
        self.stub: Any = None

    def run(self, script: Callable[[Rig], Awaitable[None]]) -> None:
        async def main() -> None:
            server = grpc.aio.server()
            engine_pb2_grpc.add_EngineServicer_to_server(Servicer(self.streams), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                async with asyncio.timeout(20), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                    self.stub = engine_pb2_grpc.EngineStub(channel)
                    await script(self)
            finally:
                await server.stop(0)

        asyncio.run(main())

    def events(self, after_seq: int, incarnation: int = 77) -> Any:
        return self.stub.KvEvents(pb.KvEventsRequest(incarnation=incarnation, after_seq=after_seq))

    async def snapshot(self, incarnation: int = 77) -> list[pb.KvSnapshotPart]:
        return [part async for part in self.stub.KvSnapshot(pb.KvSnapshotRequest(incarnation=incarnation))]


def seqs(batch: pb.KvEventBatch) -> list[int]:
    return [message.seq for message in batch.messages]


def test_a_subscriber_hears_what_was_and_what_comes() -> None:
    """The first batch at once, even an empty one; each says how far the worker is."""

    async def script(rig: Rig) -> None:
        call = rig.events(0)
        first = await call.read()
        assert (first.last_seq, seqs(first)) == (0, [])
        rig.streams.changed([stored(1), stored(2)])
        rig.streams.changed([BlockRemoved(stored(2).block)])
        heard: list[pb.KvMessage] = []
        while len(heard) < 2:
            heard += (await call.read()).messages
        assert [message.seq for message in heard] == [1, 2]
        assert [change_from_message(change) for change in heard[0].changes] == [stored(1), stored(2)]
        late = rig.events(1)
        batch = await late.read()
        assert (batch.last_seq, seqs(batch)) == (2, [2])
        assert (await late.read()).messages == [], "a beat"
        call.cancel()
        late.cancel()

    Rig().run(script)


def test_a_snapshot_comes_in_parts_and_is_followed_without_a_hole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What changes while it is sent comes with the events after its number."""
    monkeypatch.setattr(kv_streams, "PART_BLOCKS", 3)

    async def script(rig: Rig) -> None:
        assert [(part.as_of_seq, len(part.blocks), part.is_last) for part in await rig.snapshot()] == [(0, 0, True)]
        rig.streams.changed([stored(number) for number in range(7)])
        call = rig.stub.KvSnapshot(pb.KvSnapshotRequest(incarnation=77))
        parts = [await call.read()]
        rig.streams.changed([stored(7)])
        while not parts[-1].is_last:
            parts.append(await call.read())
        assert [(part.as_of_seq, len(part.blocks), part.is_last) for part in parts] == [
            (1, 3, False),
            (1, 3, False),
            (1, 1, True),
        ]
        events = rig.events(1)
        assert seqs(await events.read()) == [2]
        events.cancel()

    Rig().run(script)


@pytest.mark.parametrize(
    ("after_seq", "incarnation", "code"),
    [
        (0, 77, grpc.StatusCode.OUT_OF_RANGE),
        (99, 77, grpc.StatusCode.OUT_OF_RANGE),
        (8, 78, grpc.StatusCode.FAILED_PRECONDITION),
    ],
)
def test_a_subscriber_that_cannot_be_served_is_told_why(
    after_seq: int, incarnation: int, code: grpc.StatusCode
) -> None:
    """Replay gone: snapshot again. Another life: everything again."""

    async def script(rig: Rig) -> None:
        for number in range(8):
            rig.streams.changed([stored(number)])
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in rig.events(after_seq, incarnation):
                pass
        assert caught.value.code() is code
        if incarnation != 77:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await rig.snapshot(incarnation)
            assert caught.value.code() is code

    Rig(max_messages=4).run(script)


class StuckContext:
    """A subscriber that takes one batch and then reads no more."""

    def __init__(self) -> None:
        self.batches: list[pb.KvEventBatch] = []
        self.stuck = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.end: tuple[grpc.StatusCode, str] | None = None

    async def write(self, batch: pb.KvEventBatch) -> None:
        self.batches.append(batch)
        if len(self.batches) == 2:
            self.stuck.set()
            await self.may_go_on.wait()

    async def abort(self, code: grpc.StatusCode, why: str) -> None:
        self.end = code, why


def test_a_slow_subscriber_costs_no_memory_and_is_told_to_start_again() -> None:
    """It is a cursor: when what it lacks is kept no more, its stream ends."""

    async def main() -> None:
        streams = KvStreams(Incarnation(77), KvLog(max_messages=4), beat_s=0.01)
        context = StuckContext()
        async with asyncio.timeout(10):
            task = asyncio.create_task(streams.events(pb.KvEventsRequest(incarnation=77), context))
            await context.stuck.wait()
            for number in range(9):
                streams.changed([stored(number)])
            context.may_go_on.set()
            await task
        assert context.end is not None
        assert context.end[0] is grpc.StatusCode.OUT_OF_RANGE
        assert streams.num_subscribers == 0

    asyncio.run(main())


def test_a_subscriber_that_does_not_read_at_all_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """A write has a deadline."""
    monkeypatch.setattr(kv_streams, "WRITE_S", 0.01)

    async def main() -> None:
        streams = KvStreams(Incarnation(77), KvLog(), beat_s=0.01)
        context = StuckContext()
        async with asyncio.timeout(10):
            await streams.events(pb.KvEventsRequest(incarnation=77), context)
        assert context.end is not None
        assert context.end[0] is grpc.StatusCode.RESOURCE_EXHAUSTED

    asyncio.run(main())


def test_streams_are_bounded_and_end_when_the_worker_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a stream that never ends by itself."""
    monkeypatch.setattr(kv_streams, "MAX_STREAMS", 1)

    async def script(rig: Rig) -> None:
        call = rig.events(0)
        await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await rig.snapshot()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        rig.streams.close()
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.UNAVAILABLE

    Rig().run(script)
