"""The process around a worker: start, ready line, drain, signals. Engine and transfer thread are fakes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from headrace.config.tree import Config, WorkerSection
from headrace.core.blocks import BlockHash
from headrace.core.errors import ConfigError
from headrace.core.kv_events import BlockRemoved, BlockStored
from headrace.core.sampling import FinishReason, SamplingParams
from headrace.decode.legs import LEGS
from headrace.engine import api as engine
from headrace.kvcache.pages import PoolCounts
from headrace.kvcache.sequence import SequencePages
from headrace.proto.engine_convert import PROTOCOL, sampling_to_message
from headrace.proto.internal.v1 import engine_pb2 as pb
from headrace.proto.internal.v1 import engine_pb2_grpc
from headrace.proto.kv_convert import stored_from_message
from headrace.transfer.api import Quarantined, TransferCounts
from headrace.worker.process import EXIT_AGAIN, Worker


class FakeEngine:
    """Answers each LOCAL leg with its credits; finishes it when told to."""

    def __init__(self, sink: Callable[[list[engine.Event]], None]) -> None:
        self.sink = sink
        self.commands: list[engine.Command] = []
        self.started = self.stopped = False

    def post(self, command: engine.Command) -> None:
        self.commands.append(command)
        if isinstance(command, engine.Submit):
            self.sink([engine.Reserved(command.request.key, 0, SequencePages())])

    def finish(self, key: int) -> None:
        self.sink([engine.SequenceFinished(key, FinishReason.STOP, None, 3, 0.1, None)])

    def start(self) -> None:
        self.started = True

    def stop(self, timeout_s: float) -> None:
        self.stopped = True

    def load(self) -> engine.EngineLoad:
        return engine.EngineLoad(0, 0, 0, 0, 0.0, {"history": PoolCounts(4, 4, 0, 0, 0)}, 0)


class FakeThread:
    """A transfer thread that does nothing."""

    turned_s = 0.0

    def __init__(self, **parts: Any) -> None:
        self.deliver = parts["deliver"]
        self.posted: list[Any] = []
        self.started = self.stopped = False

    def new_link_id(self) -> int:
        return 1

    def post(self, command: Any) -> None:
        self.posted.append(command)

    def start(self) -> None:
        self.started = True

    def stop(self, timeout_s: float) -> None:
        self.stopped = True

    def counts(self) -> TransferCounts:
        return TransferCounts()


class Geometry:
    """Sequences of which each piece has at least so many bytes."""

    def __init__(self, least_bytes: int) -> None:
        self.min_segment_bytes = least_bytes


class Rig:
    """A worker of fakes in this process, and what a script can reach of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], drain_s: float) -> None:
        self.capsys = capsys
        self.engine: FakeEngine | None = None
        self.thread: FakeThread | None = None
        self.may_load = threading.Event()
        self.may_load.set()
        self.load_fault: Exception | None = None
        self.least_segment_bytes = 0
        section = WorkerSection(
            worker_id="decode-0", role="decode", engine_port=0, peer_port=0, status_port=0, drain_s=drain_s
        )
        self.worker = Worker(Config(worker=section), LEGS)
        self.where: dict[str, str] = {}

        def build(config: Any, clock: Any, sink: Any, on_fatal: Any, progress: Any) -> Any:
            assert self.may_load.wait(10)
            if self.load_fault is not None:
                raise self.load_fault
            self.engine = FakeEngine(sink)
            return SimpleNamespace(
                engine=self.engine,
                config=SimpleNamespace(vocab_size=100, num_layers=3),
                geometry=Geometry(self.least_segment_bytes),
                layout=SimpleNamespace(shape=None),
                mover=None,
                allocate=None,
                document="{}",
                fingerprint=b"f" * 32,
                max_model_len=50,
                max_prompt_tokens=40,
            )

        def thread(**parts: Any) -> FakeThread:
            self.thread = FakeThread(**parts)
            return self.thread

        monkeypatch.setattr("headrace.worker.process.build_engine", build)
        monkeypatch.setattr("headrace.worker.transfers.TransferThread", thread)
        monkeypatch.setattr("headrace.worker.transfers.make_driver", lambda *_: None)

    def run(self, script: Callable[[Rig], Awaitable[None]]) -> int:
        async def main() -> int:
            life = asyncio.create_task(self.worker.run())
            scripted = asyncio.create_task(script(self))
            async with asyncio.timeout(20):
                await asyncio.wait((life, scripted), return_when=asyncio.FIRST_EXCEPTION)
                await scripted
                return await life

        return asyncio.run(main())

    async def ready(self) -> None:
        """Wait for the ready line."""
        out = ""
        async with asyncio.timeout(10):
            while "event=ready" not in out:
                out += self.capsys.readouterr().out
                await asyncio.sleep(0.001)
        self.where = dict(word.split("=", 1) for word in out.split())

    async def get(self, path: str) -> tuple[int, dict[str, Any]]:
        def fetch() -> tuple[int, dict[str, Any]]:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            try:
                with opener.open(f"http://{self.where['status']}{path}", timeout=10) as answer:
                    return answer.status, json.loads(answer.read())
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.loads(error.read())

        return await asyncio.to_thread(fetch)

    def signal(self, number: int = signal.SIGTERM) -> None:
        os.kill(os.getpid(), number)


@pytest.fixture
def make_rig(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Rig]:
    return lambda drain_s=10.0: Rig(monkeypatch, capsys, drain_s)


class Client:
    """A router with one LOCAL leg."""

    def __init__(self, rig: Rig) -> None:
        self.channel = grpc.aio.insecure_channel(rig.where["engine"])
        self.call = engine_pb2_grpc.EngineStub(self.channel).Session()
        self.states: list[str] = []

    async def open(self, leg: int = 1) -> None:
        if leg == 1:
            hello = pb.Hello(protocol=PROTOCOL, router_id="router-0", router_incarnation=1)
            await self.call.write(pb.RouterMessage(hello=hello))
        sampling = sampling_to_message(SamplingParams(max_tokens=5))
        submit = pb.Submit(leg=leg, kind=pb.LEG_KIND_LOCAL, prompt=[1, 2, 3], sampling=sampling)
        await self.call.write(pb.RouterMessage(submit=submit))

    async def item(self) -> pb.LegItem:
        """The next item of any leg; states of beats are noted on the way."""
        while True:
            message = await self.call.read()
            assert isinstance(message, pb.WorkerMessage)
            if message.WhichOneof("kind") == "beat":
                self.states.append(message.beat.load.state)
            elif message.WhichOneof("kind") == "step":
                return message.step.items[0]

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


def test_a_worker_says_where_it_is_and_answers_there(make_rig: Callable[..., Rig]) -> None:
    """The ready line names three ports that were free; a signal ends an idle worker at once, with status 0."""
    rig = make_rig()

    async def script(rig: Rig) -> None:
        await rig.ready()
        assert rig.where["worker_id"] == "decode-0"
        assert (await rig.get("/ready"))[0] == 200
        _, state = await rig.get("/state")
        assert state["role"] == "decode"
        async with grpc.aio.insecure_channel(rig.where["engine"]) as channel:
            told = await engine_pb2_grpc.EngineStub(channel).Describe(pb.DescribeRequest())
        assert told.peer_address == rig.where["peer"]
        assert (told.vocab_size, told.max_model_len, told.max_prompt_tokens) == (100, 50, 40)
        assert told.state == "ready"
        rig.signal()

    assert rig.run(script) == 0
    assert rig.engine is not None
    assert rig.thread is not None
    assert rig.engine.started
    assert rig.engine.stopped
    assert rig.thread.started
    assert rig.thread.stopped


def test_changes_of_the_prefix_cache_are_told_to_whoever_asks(make_rig: Callable[..., Rig]) -> None:
    """From the engine's thread to snapshot, stream, load report and state page; the stream ends with the worker."""
    rig = make_rig()
    blocks = [BlockStored(BlockHash(bytes([number]) * 16), BlockHash(bytes(16)), number == 2) for number in range(3)]

    async def script(rig: Rig) -> None:
        await rig.ready()
        assert rig.engine is not None
        rig.engine.sink([engine.CacheChanged(tuple(blocks)), engine.CacheChanged((BlockRemoved(blocks[1].block),))])
        async with grpc.aio.insecure_channel(rig.where["engine"]) as channel:
            stub = engine_pb2_grpc.EngineStub(channel)
            told = await stub.Describe(pb.DescribeRequest())
            assert told.replay_tokens == 512, "128 x 3 layers in whole blocks"
            events = stub.KvEvents(pb.KvEventsRequest(incarnation=told.incarnation))
            heard: list[int] = []
            while len(heard) < 2:
                heard += [message.seq for message in (await events.read()).messages]
            assert heard == [1, 2]
            snapshot = stub.KvSnapshot(pb.KvSnapshotRequest(incarnation=told.incarnation))
            parts = [part async for part in snapshot]
            assert [stored_from_message(block) for part in parts for block in part.blocks] == [blocks[0], blocks[2]]
            load = await stub.Load(pb.LoadRequest())
            assert (load.kv_seq, load.kv_blocks) == (2, 2)
            _, state = await rig.get("/state")
            assert state["prefix_cache"] == {"blocks": 2, "seq": 2, "subscribers": 1}
            rig.signal()
            with contextlib.suppress(grpc.aio.AioRpcError):
                while await events.read() is not grpc.aio.EOF:
                    pass
            assert await events.code() is grpc.StatusCode.UNAVAILABLE

    assert rig.run(script) == 0


def test_a_draining_worker_finishes_what_is_open_and_refuses_what_is_new(make_rig: Callable[..., Rig]) -> None:
    """Routers are told by a beat at once; readiness is gone; the process ends with its last leg."""
    rig = make_rig()

    async def script(rig: Rig) -> None:
        await rig.ready()
        client = Client(rig)
        await client.open()
        assert (await client.item()).HasField("reserved")
        rig.signal()
        while client.states[-1:] != ["cordoned"]:
            message = await client.call.read()
            client.states.append(message.beat.load.state)
        assert (await rig.get("/ready"))[0] == 503
        assert (await rig.get("/live"))[0] == 200
        await client.open(2)
        assert (await client.item()).failed.reason == "draining"
        assert rig.engine is not None
        rig.engine.finish(1)
        assert (await client.item()).finished.reason == pb.Finished.REASON_STOP
        await client.close()

    assert rig.run(script) == 0


def test_a_drain_over_its_budget_fails_what_is_left(make_rig: Callable[..., Rig]) -> None:
    """Each open leg is told, none is cut in silence."""
    rig = make_rig(drain_s=0.0)

    async def script(rig: Rig) -> None:
        await rig.ready()
        client = Client(rig)
        await client.open()
        assert (await client.item()).HasField("reserved")
        rig.signal()
        assert (await client.item()).failed.reason == "draining"
        await client.close()

    assert rig.run(script) == 0


def test_a_second_signal_ends_a_drain_at_once(make_rig: Callable[..., Rig]) -> None:
    """Whatever the budget; the leg is told."""
    rig = make_rig(drain_s=10_000.0)

    async def script(rig: Rig) -> None:
        await rig.ready()
        client = Client(rig)
        await client.open()
        assert (await client.item()).HasField("reserved")
        rig.signal()
        while "draining" not in client.states and "cordoned" not in client.states:
            client.states.append((await client.call.read()).beat.load.state)
        rig.signal(signal.SIGINT)
        assert (await client.item()).failed.reason == "draining"
        await client.close()

    assert rig.run(script) == 0


def test_the_drain_call_is_a_signal_with_a_budget(make_rig: Callable[..., Rig]) -> None:
    """Operators need no shell in the pod."""
    rig = make_rig(drain_s=10_000.0)

    async def script(rig: Rig) -> None:
        await rig.ready()
        client = Client(rig)
        await client.open()
        assert (await client.item()).HasField("reserved")
        await engine_pb2_grpc.EngineStub(client.channel).Drain(pb.DrainRequest(budget_s=0.0))
        assert (await client.item()).failed.reason == "draining"
        await client.close()

    assert rig.run(script) == 0


def test_a_worker_told_to_leave_while_it_loads_leaves(make_rig: Callable[..., Rig]) -> None:
    """Nothing stops a load, and nothing waits for it."""
    rig = make_rig()
    rig.may_load.clear()

    async def script(rig: Rig) -> None:
        await asyncio.sleep(0)
        rig.signal()

    assert rig.run(script) == 0
    rig.may_load.set()


def test_a_fault_of_the_load_is_the_callers(make_rig: Callable[..., Rig]) -> None:
    """The command line prints it; no port stays open."""
    rig = make_rig()
    rig.load_fault = ValueError("no such checkpoint")

    async def script(rig: Rig) -> None:
        await asyncio.sleep(0)

    with pytest.raises(ValueError, match="no such checkpoint"):
        rig.run(script)


def test_segments_too_small_for_the_model_are_a_fault_of_the_settings(make_rig: Callable[..., Rig]) -> None:
    """Said at the start, not by the first request of the wrong length; what is named is enough."""
    rig = make_rig()
    rig.least_segment_bytes = 9 << 20

    async def script(rig: Rig) -> None:
        await asyncio.sleep(0)

    with pytest.raises(ConfigError, match=f"segment_bytes is {8 << 20}; .* at least {9 << 20}"):
        rig.run(script)


def test_a_worker_with_half_its_buffers_held_asks_to_be_started_anew(make_rig: Callable[..., Rig]) -> None:
    """Only a process's end cancels a READ; the status says that it was no user's wish."""
    rig = make_rig()

    async def script(rig: Rig) -> None:
        await rig.ready()
        assert rig.thread is not None
        rig.thread.deliver(Quarantined(8, 16))

    assert rig.run(script) == EXIT_AGAIN


def test_two_workers_cannot_share_a_port(make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one says which setting is at fault."""
    rig = make_rig()

    async def script(rig: Rig) -> None:
        await rig.ready()
        port = int(rig.where["engine"].rpartition(":")[2])
        section = WorkerSection(worker_id="decode-1", engine_port=port, peer_port=0, status_port=0)
        with pytest.raises(ConfigError, match="engine_port"):
            await Worker(Config(worker=section), LEGS).run()
        # The second worker took the signals of this process; the first is ended by its own call.
        async with grpc.aio.insecure_channel(rig.where["engine"]) as channel:
            await engine_pb2_grpc.EngineStub(channel).Drain(pb.DrainRequest(budget_s=0.0))

    assert rig.run(script) == 0
