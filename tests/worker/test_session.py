"""The session service over real gRPC, before engine and transfer threads that only record."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from headrace.core.clock import MonotonicClock
from headrace.core.errors import Draining, RequestError
from headrace.core.ids import Incarnation, WorkerId
from headrace.core.sampling import FinishReason, SamplingParams, TokenLogprobs
from headrace.engine import api as engine
from headrace.engine.api import LegKind
from headrace.kvcache.sequence import SequencePages
from headrace.proto.engine_convert import PROTOCOL, sampling_to_message
from headrace.proto.internal.v1 import engine_pb2 as pb
from headrace.proto.internal.v1 import engine_pb2_grpc
from headrace.transfer import api as transfer
from headrace.worker.channels import channel_options, server_options
from headrace.worker.intake import Intake
from headrace.worker.kv_events import KvLog
from headrace.worker.kv_streams import KvStreams
from headrace.worker.session import MAX_MESSAGE_BYTES, EngineService

VOCAB = 1000


def submit(leg: int, kind: int = pb.LEG_KIND_LOCAL, **changes: Any) -> pb.RouterMessage:
    message = pb.Submit(
        leg=leg,
        kind=kind,
        request_id=f"r{leg}",
        attempt=1,
        prompt=range(1, 11),
        sampling=sampling_to_message(SamplingParams(max_tokens=5)),
        transfer_id=leg.to_bytes(16, "big"),
        holder=pb.Endpoint(worker_id="prefill-0", incarnation=5, peer_address="127.0.0.1:7101"),
    )
    message.MergeFrom(pb.Submit(**changes))
    return pb.RouterMessage(submit=message)


class Router:
    """A scripted router: one session, what it hears in order."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def say(self, message: pb.RouterMessage) -> None:
        await self.call.write(message)

    async def hear(self) -> pb.WorkerMessage | None:
        """The next message that is no beat; None at the end of the stream."""
        async with asyncio.timeout(10):
            while True:
                message = await self.call.read()
                if not isinstance(message, pb.WorkerMessage):
                    return None
                if message.WhichOneof("kind") != "beat":
                    return message

    async def step(self) -> dict[int, pb.LegItem]:
        message = await self.hear()
        assert message is not None
        assert message.WhichOneof("kind") == "step"
        return {item.leg: item for item in message.step.items}

    async def end(self) -> grpc.StatusCode:
        """The status, after everything before it was read."""
        async with asyncio.timeout(10):
            with contextlib.suppress(grpc.aio.AioRpcError):
                while isinstance(await self.call.read(), pb.WorkerMessage):
                    pass
            return await self.call.code()


class Server:
    """One EngineService on a port of its own."""

    def __init__(self, rig: Any, beat_s: float, silence_s: float) -> None:
        self.rig = rig
        self.drained: list[float] = []
        self.cleared: list[bool] = []
        self.faults: list[BaseException] = []
        self.kv = KvStreams(Incarnation(77), KvLog(max_messages=4), beat_s=beat_s)
        self.service = EngineService(
            desk=rig.desk,
            intake=Intake(
                worker_id=WorkerId("decode-0"),
                kinds=frozenset(LegKind),
                vocab_size=VOCAB,
                max_model_len=100,
                max_prompt_tokens=90,
            ),
            kv=self.kv,
            describe=lambda: pb.WorkerDescription(worker_id="decode-0", protocol=PROTOCOL, state="ready"),
            load=lambda: pb.LoadReport(running=3, state="ready"),
            drain=self.drained.append,
            clear_cache=lambda: self.cleared.append(True),
            fatal=self.faults.append,
            clock=MonotonicClock(),
            beat_s=beat_s,
            silence_s=silence_s,
        )
        self.server = grpc.aio.server(options=server_options(MAX_MESSAGE_BYTES))
        engine_pb2_grpc.add_EngineServicer_to_server(self.service, self.server)
        self.port = self.server.add_insecure_port("127.0.0.1:0")

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[engine_pb2_grpc.EngineStub]:
        options = channel_options(MAX_MESSAGE_BYTES)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.port}", options=options) as channel:
            yield engine_pb2_grpc.EngineStub(channel)

    @asynccontextmanager
    async def router(self, name: str = "router-0") -> AsyncIterator[Router]:
        async with self.stub() as stub:
            router = Router(stub.Session())
            hello = pb.Hello(protocol=PROTOCOL, router_id=name, router_incarnation=1)
            await router.say(pb.RouterMessage(hello=hello))
            first = await router.hear()
            assert first is not None
            assert first.welcome.worker_id == "decode-0"
            yield router
            router.call.cancel()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Let the loop run until a fact holds."""
        async with asyncio.timeout(10):
            while not holds():  # noqa: ASYNC110 (it is the other end of a socket that changes it)
                await asyncio.sleep(0.001)

    def keys(self) -> list[int]:
        return [command.request.key for command in self.rig.engine if isinstance(command, engine.Submit)]


@pytest.fixture
def serve(make_desk: Any) -> Callable[..., None]:
    def run(script: Callable[[Server], Awaitable[None]], beat_s: float = 2.0, silence_s: float = 60.0) -> None:
        async def main() -> None:
            server = Server(make_desk(), beat_s, silence_s)
            await server.server.start()
            try:
                await script(server)
            finally:
                await server.server.stop(0)
            assert server.faults == []

        asyncio.run(main())

    return run


def test_all_that_an_engine_step_says_leaves_in_one_message(serve: Callable[..., None]) -> None:
    """An item a leg, several words in one item, one message for all."""

    async def script(server: Server) -> None:
        async with server.router() as router:
            for leg in (1, 2, 3):
                await router.say(submit(leg))
            await server.until(lambda: server.rig.desk.num_legs == 3)
            one, two, three = server.keys()
            pages = SequencePages()
            top = TokenLogprobs(-0.5, 1, ((7, -0.5), (8, -1.5)))
            server.rig.desk.on_engine(
                [
                    engine.Reserved(one, 0, pages),
                    engine.Started(one, 0),
                    engine.PromptScored(one, 1, (5, 6), (top, top)),
                    engine.TokenSampled(one, 0, 7, top),
                    engine.TokenSampled(one, 1, 9, None),
                    engine.Reserved(two, 0, pages),
                    engine.TokenSampled(two, 0, 4, None),
                    engine.SequenceFinished(two, FinishReason.STOP, 4, 10, 0.5, None),
                    engine.Reserved(three, 0, pages),
                ],
                1.0,
            )
            items = await router.step()
            assert set(items) == {1, 2, 3}
            assert [(token.index, token.id) for token in items[1].tokens] == [(0, 7), (1, 9)]
            assert list(items[1].tokens[0].top_ids) == [7, 8]
            assert not items[1].tokens[1].HasField("logprob")
            assert [token.index for token in items[1].prompt_logprobs.tokens] == [1, 2]
            assert items[1].HasField("reserved")
            assert items[1].HasField("started")
            assert items[2].finished.reason == pb.Finished.REASON_STOP
            assert items[2].finished.stop_token_id == 4
            assert not items[3].HasField("finished")

    serve(script)


def test_the_transfer_of_a_generate_leg_is_told(serve: Callable[..., None]) -> None:
    """Reserved, transferred, tokens: the numbers that the router shows its user."""

    async def script(server: Server) -> None:
        async with server.router() as router:
            await router.say(submit(1, pb.LEG_KIND_GENERATE))
            await server.until(lambda: server.rig.desk.num_legs == 1)
            (key,) = server.keys()
            found = server.rig.transfer[0]
            assert found == transfer.PeerFound("prefill-0", "127.0.0.1:7101", 5)
            server.rig.desk.on_engine([engine.Reserved(key, 0, SequencePages((1,), ((0, 1),), 0))], 1.0)
            stats = transfer.TransferStats(payload_bytes=77, num_segments=2, seconds=0.5, transport="memory")
            server.rig.desk.on_transfer(transfer.Arrived((1).to_bytes(16, "big"), 9, 0, 10, 0, stats), 1.0)
            item = (await router.step())[1]
            assert item.transferred == pb.Transferred(
                num_bytes=77, num_segments=2, num_pages=3, seconds=0.5, transport="memory"
            )

    serve(script)


def test_a_router_that_leaves_takes_its_legs_along_and_no_others(serve: Callable[..., None]) -> None:
    """Two routers: the end of one session aborts its own legs, leg numbers do not meet."""

    async def script(server: Server) -> None:
        async with server.router("router-0") as one, server.router("router-1") as two:
            await one.say(submit(1))
            await server.until(lambda: server.rig.desk.num_legs == 1)
            await two.say(submit(1))
            await server.until(lambda: server.rig.desk.num_legs == 2)
            first, second = server.keys()
            one.call.cancel()
            await server.until(lambda: server.rig.desk.num_legs == 1)
            assert engine.AbortSequence(first) in server.rig.engine
            assert engine.AbortSequence(second) not in server.rig.engine
            server.rig.desk.on_engine([engine.Reserved(second, 0, SequencePages())], 1.0)
            assert (await two.step())[1].HasField("reserved")

    serve(script)


def test_a_router_silent_for_three_beats_loses_its_session(serve: Callable[..., None]) -> None:
    """Its legs are aborted, and it is told why if it still listens."""

    async def script(server: Server) -> None:
        async with server.router() as router:
            await router.say(submit(1))
            await server.until(lambda: server.rig.desk.num_legs == 1)
            assert await router.end() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert server.rig.desk.num_legs == 0

    serve(script, silence_s=1.0)


def test_beats_go_both_ways_and_carry_the_load(serve: Callable[..., None]) -> None:
    """The worker's first comes at once, then one each interval."""

    async def script(server: Server) -> None:
        async with server.router() as router:
            loads = []
            async with asyncio.timeout(10):
                while len(loads) < 8:
                    message = await router.call.read()
                    assert message.WhichOneof("kind") == "beat"
                    loads.append(message.beat.load.running)
                    await router.say(pb.RouterMessage(beat=pb.Beat()))
            assert loads == [3] * 8

    serve(script, beat_s=0.05)


BAD = {
    "unknown kind": {"kind": 9},
    "no kind": {"kind": 0},
    "token beyond the vocabulary": {"prompt": [VOCAB]},
    "transfer id too long": {"kind": pb.LEG_KIND_PREFILL, "transfer_id": b"x" * 17},
    "no holder address": {"kind": pb.LEG_KIND_GENERATE, "holder": pb.Endpoint(peer_address="nowhere")},
    "holder is this worker": {"kind": pb.LEG_KIND_GENERATE, "holder": pb.Endpoint(worker_id="decode-0")},
    "prompt longer than the pools": {"prompt": [1] * 81},
    "prompt and output longer than the model": {"sampling": pb.Sampling(max_tokens=91)},
    "NaN temperature": {"sampling": pb.Sampling(temperature=math.nan)},
    "infinite penalty": {"sampling": pb.Sampling(presence_penalty=math.inf)},
    "negative top_p": {"sampling": pb.Sampling(top_p=-1.0)},
    "stop id beyond the vocabulary": {"sampling": pb.Sampling(stop_token_ids=[VOCAB])},
    "bias beyond the vocabulary": {"sampling": pb.Sampling(logit_bias={VOCAB: 1.0})},
    "more output than prompt": {"num_output_tokens": 10},
    "NaN timeout": {"timeout_s": math.nan},
    "negative timeout": {"timeout_s": -1.0},
    "long salt": {"cache_salt": "x" * 1000},
    "too many choices": {"seeds": range(129)},
}


def test_bad_orders_fail_and_allocate_nothing(serve: Callable[..., None]) -> None:
    """Each gets one Failed item with a reason; neither engine nor transfer hears of it; the session goes on."""

    async def script(server: Server) -> None:
        async with server.router() as router:
            for leg, changes in enumerate(BAD.values(), start=1):
                await router.say(submit(leg, **{"kind": pb.LEG_KIND_LOCAL, **changes}))
            empty = submit(100)
            empty.submit.ClearField("prompt")
            await router.say(empty)
            items: dict[int, pb.LegItem] = {}
            while len(items) < len(BAD) + 1:
                items.update(await router.step())
            for name, leg in zip([*BAD, "empty prompt"], [*range(1, len(BAD) + 1), 100], strict=True):
                assert items[leg].failed.reason in ("invalid_value", "context_length_exceeded"), name
            assert server.rig.took() == ([], [])
            assert server.rig.desk.num_legs == 0
            await router.say(submit(200))
            await server.until(lambda: server.rig.desk.num_legs == 1)

    serve(script)


@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([submit(1)], grpc.StatusCode.INVALID_ARGUMENT),
        ([pb.RouterMessage()], grpc.StatusCode.INVALID_ARGUMENT),
        ([pb.RouterMessage(hello=pb.Hello(protocol=99, router_id="r"))], grpc.StatusCode.FAILED_PRECONDITION),
        ([pb.RouterMessage(hello=pb.Hello(protocol=PROTOCOL))], grpc.StatusCode.INVALID_ARGUMENT),
        (
            [pb.RouterMessage(hello=pb.Hello(protocol=PROTOCOL, router_id="r")), pb.RouterMessage()],
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            [pb.RouterMessage(hello=pb.Hello(protocol=PROTOCOL, router_id="r")), submit(1), submit(1)],
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
    ],
)
def test_speech_out_of_turn_ends_the_session(
    serve: Callable[..., None], messages: list[pb.RouterMessage], code: grpc.StatusCode
) -> None:
    """No Hello, another protocol, empty messages, one leg twice: the status says why, and nothing stays."""

    async def script(server: Server) -> None:
        async with server.stub() as stub:
            router = Router(stub.Session())
            for message in messages:
                await router.say(message)
            assert await router.end() is code
            await server.until(lambda: server.rig.desk.num_legs == 0 and server.service.num_sessions == 0)

    serve(script)


def test_a_worker_takes_only_the_legs_of_its_role() -> None:
    """A prefill worker pulls nothing."""
    door = Intake(
        worker_id=WorkerId("prefill-0"),
        kinds=frozenset({LegKind.PREFILL}),
        vocab_size=VOCAB,
        max_model_len=100,
        max_prompt_tokens=90,
    )
    order = door.order(submit(1, pb.LEG_KIND_PREFILL).submit)
    assert order.transfer_id == (1).to_bytes(16, "big")
    assert order.holder is None
    for kind in (pb.LEG_KIND_GENERATE, pb.LEG_KIND_LOCAL):
        with pytest.raises(RequestError, match="kind"):
            door.order(submit(1, kind).submit)


def test_bytes_that_are_no_message_end_the_stream(serve: Callable[..., None]) -> None:
    """Garbage on the wire reaches no code of ours."""

    async def script(server: Server) -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            call = channel.stream_stream("/headrace.internal.v1.Engine/Session")()
            await call.write(b"\xff" * 100)
            async with asyncio.timeout(10):
                assert await call.code() is not grpc.StatusCode.OK
            await server.until(lambda: server.service.num_sessions == 0)

    serve(script)


def test_an_abort_is_confirmed_once(serve: Callable[..., None]) -> None:
    """Aborting twice, or what is unknown, says nothing more."""

    async def script(server: Server) -> None:
        async with server.router() as router:
            await router.say(submit(1))
            for leg in (1, 1, 77):
                await router.say(pb.RouterMessage(abort=pb.Abort(leg=leg)))
            assert (await router.step())[1].failed.reason == "cancelled"
            await router.say(submit(2))
            await server.until(lambda: server.rig.desk.num_legs == 1)
            server.rig.desk.on_engine([engine.Reserved(server.keys()[1], 0, SequencePages())], 1.0)
            assert set(await router.step()) == {2}

    serve(script)


def test_choices_of_a_leg_are_told_apart_and_ended_apart(serve: Callable[..., None]) -> None:
    """Seeds in; tokens and ends by choice out; an abort that names a choice ends no other."""

    async def script(server: Server) -> None:
        async with server.router() as router:
            await router.say(submit(1, kind=pb.LEG_KIND_LOCAL, seeds=[-(1 << 63), 0, 5]))
            await server.until(lambda: server.rig.desk.num_legs == 1)
            (key,) = server.keys()
            (command,) = server.rig.took()[0]
            assert command.request.seeds == (-(1 << 63), 0, 5)
            tokens = [engine.TokenSampled(key, 0, 4 + choice, None, choice) for choice in range(3)]
            server.rig.desk.on_engine([engine.Reserved(key, 0, SequencePages()), *tokens], 1.0)
            item = (await router.step())[1]
            assert [(token.choice, token.id) for token in item.tokens] == [(0, 4), (1, 5), (2, 6)]
            for choice in (1, 9):
                await router.say(pb.RouterMessage(abort=pb.Abort(leg=1, choice=choice)))
            await router.say(submit(2))
            await server.until(lambda: server.rig.desk.num_legs == 2)
            assert engine.AbortChoice(key, 1) in server.rig.took()[0]
            ends = [(1, None, None), (0, FinishReason.STOP, 4), (2, FinishReason.LENGTH, None)]
            for choice, reason, stop_token_id in ends:
                finished = engine.SequenceFinished(key, reason, stop_token_id, 10, 0.5, None, choice, choice == 2)
                server.rig.desk.on_engine([finished], 1.0)
            item = (await router.step())[1]
            none, stop, length = pb.Finished.REASON_NONE, pb.Finished.REASON_STOP, pb.Finished.REASON_LENGTH
            assert [(end.choice, end.reason) for end in item.choices] == [(1, none), (0, stop)]
            assert (item.finished.choice, item.finished.reason) == (2, length)
            assert item.choices[1].stop_token_id == 4
            assert not item.choices[0].HasField("stop_token_id")

    serve(script)


def test_a_router_that_does_not_read_loses_its_session(
    serve: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for it is bounded; its legs end, another router's go on."""
    monkeypatch.setattr("headrace.worker.session.MAX_WORDS", 20_000)

    async def script(server: Server) -> None:
        async with server.router("stuck") as stuck, server.router("well") as well:
            await stuck.say(submit(1))
            await server.until(lambda: server.rig.desk.num_legs == 1)
            await well.say(submit(1))
            await server.until(lambda: server.rig.desk.num_legs == 2)
            first, second = server.keys()
            server.rig.desk.on_engine([engine.Reserved(key, 0, SequencePages()) for key in (first, second)], 1.0)
            wide = TokenLogprobs(-1.0, 1, ((900, -1.0),) * 500)
            for _ in range(2000):
                server.rig.desk.on_engine([engine.TokenSampled(first, 1, 5, wide)] * 10, 1.0)
                await asyncio.sleep(0)
                if server.rig.desk.num_legs == 1:
                    break
            await server.until(lambda: server.rig.desk.num_legs == 1)
            assert engine.AbortSequence(first) in server.rig.engine
            assert (await well.step())[1].HasField("reserved")
            stuck.call.cancel()

    serve(script)


def test_describe_load_and_drain_answer_beside_sessions(serve: Callable[..., None]) -> None:
    """Unary calls of operators; a budget that is no number of seconds is refused."""

    async def script(server: Server) -> None:
        async with server.stub() as stub:
            assert (await stub.Describe(pb.DescribeRequest())).worker_id == "decode-0"
            assert (await stub.Load(pb.LoadRequest())).running == 3
            await stub.Drain(pb.DrainRequest(budget_s=3.0))
            assert server.drained == [3.0]
            await stub.ClearCache(pb.ClearCacheRequest(), timeout=5)
            assert server.cleared == [True]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Drain(pb.DrainRequest(budget_s=math.nan))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert server.drained == [3.0]

    serve(script)


def test_last_words_leave_before_the_session_is_ended(serve: Callable[..., None]) -> None:
    """A worker that leaves says what became of each leg first."""

    async def script(server: Server) -> None:
        async with server.router() as router:
            await router.say(submit(1))
            await server.until(lambda: server.rig.desk.num_legs == 1)
            server.rig.desk.abort_all(Draining("leaving"), 1.0)
            server.service.finish_sessions("leaving")
            assert (await router.step())[1].failed.reason == "draining"
            assert await router.end() is grpc.StatusCode.UNAVAILABLE

    serve(script)
