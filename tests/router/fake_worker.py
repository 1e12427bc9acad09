"""Workers that speak the real session protocol and know no model: their tokens follow from prompt, seed and index."""

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
import grpc.aio

from headrace.core.ids import new_incarnation
from headrace.core.kv_events import BlockRemoved, BlockStored, CacheCleared
from headrace.core.sampling import SamplingParams, TokenLogprobs
from headrace.proto import engine_convert as convert
from headrace.proto.internal.v1 import engine_pb2 as pb
from headrace.proto.internal.v1 import engine_pb2_grpc
from headrace.proto.kv_convert import change_to_message

#: (prompt without what was generated earlier, sampling, output index) to token id.
Script = Callable[[tuple[int, ...], SamplingParams, int], int]


def letters(prompt: tuple[int, ...], sampling: SamplingParams, index: int) -> int:
    """Some byte token of a letter; the vocabulary starts with specials and the byte alphabet."""
    mixed = (sum(prompt) * 31 + sampling.seed * 7 + index * 11) % 26
    return 3 + ord("a") - ord("!") + mixed


@dataclass
class Faults:
    """What goes wrong; counts are used up one by one."""

    refuse: int = 0
    """Legs refused for want of room."""
    fail: list[str] = field(default_factory=list)
    """Reasons with which the next legs fail at once."""
    die_at: int | None = None
    """The worker is gone when it is about to say the token of this index; those before it have been heard."""
    gap_at: int | None = None
    """This output index is left out."""
    hold_at: int | None = None
    """Before the token of this index the leg waits until it is aborted."""
    repeat: bool = False
    """Every token is said twice."""
    step_s: float = 0.0
    silent: bool = False
    """No beats."""
    no_events: bool = False
    """No word of the prefix cache, as of a worker of another release."""
    drop_messages: int = 0
    """Messages about the prefix cache that are lost on their way."""
    break_events: int = 0
    """Streams of them that end after the next batch."""


@dataclass
class Cluster:
    """What workers of one test share: pulls that were made, and who computes what."""

    script: Script = letters
    pulled: dict[bytes, asyncio.Event] = field(default_factory=dict)
    served: dict[bytes, asyncio.Future] = field(default_factory=dict)

    def pull(self, transfer: bytes) -> asyncio.Event:
        return self.pulled.setdefault(transfer, asyncio.Event())

    def first_token(self, transfer: bytes) -> asyncio.Future:
        """What the holder tells the taker: for each choice why its token ended it, or None."""
        return self.served.setdefault(transfer, asyncio.get_running_loop().create_future())


class FakeWorker(engine_pb2_grpc.EngineServicer):
    """One worker; `start` and `kill` may be called in turn, each start is a new life."""

    def __init__(
        self, cluster: Cluster, role: str, worker_id: str, *, max_num_seqs: int = 256, max_model_len: int = 4096
    ) -> None:
        self.cluster = cluster
        self.role = role
        self.worker_id = worker_id
        self.faults = Faults()
        self.state = "ready"
        self.fingerprint = b"\x01" * 32
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.max_prompt_tokens = max_model_len
        self.port = 0
        self.submits: list[pb.Submit] = []
        self.aborts: list[int] = []
        self.choice_aborts: list[tuple[int, int]] = []
        """(leg, choice)"""
        self.num_running = 0
        self._server = None
        self._legs: dict[int, asyncio.Task] = {}
        self._unwanted: set[tuple[int, int]] = set()
        self._incarnation = 0
        self._outboxes: set[asyncio.Queue] = set()
        self.blocks: dict[bytes, bool] = {}
        """Block hashes to whether a check-point is at their end."""
        self.messages: list[list] = []
        """Changes of the prefix cache; number 1 is the first."""
        self.num_kept = 1000
        self.cached_tokens = lambda prompt: len(prompt) // 2
        self.num_snapshots = 0
        self._news = asyncio.Event()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._incarnation = new_incarnation()
        self.blocks, self.messages = {}, []
        self._server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        engine_pb2_grpc.add_EngineServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port(self.address)
        await self._server.start()

    async def kill(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            for task in self._legs.values():
                task.cancel()
            self._legs.clear()
            for outbox in self._outboxes:
                outbox.put_nowait(None)
            await server.stop(0)

    async def _die(self) -> None:
        """Gone, but not before what was said has arrived: a server that stops takes along what it has not sent."""
        for _ in range(20):  # nothing tells when the router, on the same loop, has read it: many turns, a long while
            await asyncio.sleep(0.01)
        await self.kill()

    def say_load(self) -> None:
        """A load report to every router, now."""
        for outbox in self._outboxes:
            outbox.put_nowait(pb.WorkerMessage(beat=pb.Beat(load=self._load())))

    def _load(self) -> pb.LoadReport:
        return pb.LoadReport(running=self.num_running, state=self.state, kv_seq=len(self.messages))

    def cache(self, *changes) -> None:
        """Change the prefix cache and say so."""
        for change in changes:
            match change:
                case BlockStored(block, _, has_checkpoint):
                    self.blocks[block] = has_checkpoint
                case BlockRemoved(block):
                    del self.blocks[block]
                case _:
                    self.blocks.clear()
        self.messages.append(list(changes))
        self._news.set()
        self._news = asyncio.Event()

    async def ClearCache(self, request, context):
        self.cache(CacheCleared())
        return pb.ClearCacheReply()

    async def KvSnapshot(self, request, context):
        await self._check(request, context)
        self.num_snapshots += 1
        root = bytes(16)
        blocks = [pb.KvStored(block=block, parent=root, has_checkpoint=flag) for block, flag in self.blocks.items()]
        as_of_seq = len(self.messages)
        await context.write(pb.KvSnapshotPart(as_of_seq=as_of_seq, blocks=blocks[:3]))
        await context.write(pb.KvSnapshotPart(as_of_seq=as_of_seq, blocks=blocks[3:], is_last=True))

    async def KvEvents(self, request, context):
        await self._check(request, context)
        seq = request.after_seq
        if not len(self.messages) - self.num_kept <= seq <= len(self.messages):
            await context.abort(grpc.StatusCode.OUT_OF_RANGE, "gone")
        while True:
            news, last_seq, messages = self._news, len(self.messages), []
            for number in range(seq + 1, last_seq + 1):
                if self.faults.drop_messages:
                    self.faults.drop_messages -= 1
                    continue
                changes = [change_to_message(change) for change in self.messages[number - 1]]
                messages.append(pb.KvMessage(seq=number, changes=changes))
            await context.write(pb.KvEventBatch(last_seq=last_seq, messages=messages))
            if messages and self.faults.break_events:
                self.faults.break_events -= 1
                return
            seq = last_seq
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.2):
                    await news.wait()

    async def _check(self, request, context) -> None:
        if self.faults.no_events:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        if request.incarnation != self._incarnation:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another life")

    async def Session(self, request_iterator, context):
        outbox: asyncio.Queue = asyncio.Queue()
        self._outboxes.add(outbox)
        legs: set[int] = set()
        reader = asyncio.create_task(self._read(request_iterator, outbox, legs))
        try:
            while True:
                message = await outbox.get()
                if message is None:
                    return
                items = [message] if isinstance(message, pb.LegItem) else []
                while items and not outbox.empty():
                    following = outbox.get_nowait()
                    if isinstance(following, pb.LegItem):
                        items.append(following)
                        continue
                    await context.write(pb.WorkerMessage(step=pb.Step(items=items)))
                    items, message = [], following
                    if message is None:
                        return
                    break
                if items:
                    message = pb.WorkerMessage(step=pb.Step(items=items))
                await context.write(message)
        finally:
            self._outboxes.discard(outbox)
            reader.cancel()
            for leg in legs:
                if leg in self._legs:
                    self._legs.pop(leg).cancel()

    async def _read(self, request_iterator, outbox, legs) -> None:
        async for message in request_iterator:
            kind = message.WhichOneof("kind")
            if kind == "hello":
                outbox.put_nowait(pb.WorkerMessage(welcome=self._description()))
            elif kind == "submit":
                self.submits.append(message.submit)
                legs.add(message.submit.leg)
                self._legs[message.submit.leg] = asyncio.create_task(self._run(message.submit, outbox))
            elif kind == "abort" and message.abort.HasField("choice"):
                self.choice_aborts.append((message.abort.leg, message.abort.choice))
                self._unwanted.add(self.choice_aborts[-1])
            elif kind == "abort":
                self.aborts.append(message.abort.leg)
                task = self._legs.pop(message.abort.leg, None)
                if task is not None:
                    task.cancel()
            elif kind == "beat" and not self.faults.silent:
                outbox.put_nowait(pb.WorkerMessage(beat=pb.Beat(load=self._load())))

    def _description(self) -> pb.WorkerDescription:
        return pb.WorkerDescription(
            worker_id=self.worker_id,
            incarnation=self._incarnation,
            role=self.role,
            state=self.state,
            fingerprint=self.fingerprint,
            model="fake",
            max_model_len=self.max_model_len,
            vocab_size=500,
            peer_address=f"peer-of-{self.worker_id}:1",
            block_tokens=256,
            max_prompt_tokens=self.max_prompt_tokens,
            device="cpu",
            protocol=convert.PROTOCOL,
            max_num_seqs=self.max_num_seqs,
            replay_tokens=1024,
        )

    async def _run(self, submit: pb.Submit, outbox: asyncio.Queue) -> None:
        self.num_running += 1
        try:
            await self._leg(submit, outbox)
        finally:
            self.num_running -= 1
            self._legs.pop(submit.leg, None)

    async def _leg(self, submit: pb.Submit, outbox: asyncio.Queue) -> None:
        def say(**parts) -> None:
            outbox.put_nowait(pb.LegItem(leg=submit.leg, **parts))

        if self.faults.refuse:
            self.faults.refuse -= 1
            say(failed=pb.Failed(reason="queue_full", message="no room"))
            return
        if self.faults.fail:
            say(failed=pb.Failed(reason=self.faults.fail.pop(0), message="as told"))
            return
        sampling = convert.sampling_from_message(submit.sampling)
        choices = [dataclasses.replace(sampling, seed=seed) for seed in submit.seeds] or [sampling]
        done = submit.num_output_tokens
        prompt = tuple(submit.prompt)
        original = prompt[: len(prompt) - done]
        if submit.kind == pb.LEG_KIND_PREFILL:
            async with asyncio.timeout(10):
                await self.cluster.pull(submit.transfer_id).wait()
        if submit.kind != pb.LEG_KIND_GENERATE:
            say(started=pb.Started(cached_tokens=self.cached_tokens(prompt), queued_s=0.001))
            if sampling.prompt_logprobs is not None:
                scored = [
                    convert.token_to_message(i, prompt[i], self._logprobs(prompt[i], sampling.prompt_logprobs))
                    for i in range(1, len(prompt))
                ]
                say(prompt_logprobs=pb.PromptLogprobs(first_position=1, tokens=scored))
        if submit.kind == pb.LEG_KIND_PREFILL:
            ended = await self._say_tokens(submit, choices, range(len(choices)), original, done, say)
            over = all(reason is not None for reason in ended)
            say(finished=pb.Finished(reason=convert.finish_to_message(ended[0] if over else None), prefill_s=0.01))
            self.cluster.first_token(submit.transfer_id).set_result(ended)
            return
        say(reserved=pb.Reserved(held_tokens=0))
        going = list(range(len(choices)))
        index = done
        if submit.kind == pb.LEG_KIND_GENERATE:
            self.cluster.pull(submit.transfer_id).set()
            async with asyncio.timeout(10):
                ended = await self.cluster.first_token(submit.transfer_id)
            if any(reason is None for reason in ended):
                say(
                    transferred=pb.Transferred(
                        num_bytes=1000, num_segments=2, num_pages=3, seconds=0.01, tail_seconds=0.001, transport="fake"
                    )
                )
            self._say_ended(dict(enumerate(ended)), going, say)
            index = done + 1
        while going:
            for choice in [choice for choice in going if (submit.leg, choice) in self._unwanted]:
                self._say_end(choice, None, going, say)
            ended = await self._say_tokens(submit, choices, list(going), original, index, say)
            self._say_ended(dict(zip(list(going), ended, strict=True)), going, say)
            index += 1

    def _say_ended(self, ended, going, say) -> None:
        for choice, reason in ended.items():
            if reason is not None:
                self._say_end(choice, reason, going, say)

    @staticmethod
    def _say_end(choice, reason, going, say) -> None:
        going.remove(choice)
        number = convert.finish_to_message(reason)
        if going:
            say(choices=[pb.ChoiceFinished(choice=choice, reason=number)])
        else:
            say(finished=pb.Finished(choice=choice, reason=number, prefill_s=0.01))

    async def _say_tokens(self, submit, choices, going, original, index, say):
        """Say one token of each choice that goes on; the finish reasons of those whose last it is."""
        await asyncio.sleep(self.faults.step_s)
        if self.faults.die_at is not None and index >= self.faults.die_at:
            self.faults.die_at = None
            # Not from within: killing the worker cancels this very task.
            self._suicide = asyncio.get_running_loop().create_task(self._die())
            await asyncio.sleep(10)
        if self.faults.hold_at is not None and index >= self.faults.hold_at:
            await asyncio.sleep(1000)
        return [self._say_token(submit, choices[choice], choice, original, index, say) for choice in going]

    def _say_token(self, submit, sampling, choice, original, index, say):
        token = self.cluster.script(original, sampling, index)
        logprobs = None if sampling.logprobs is None else self._logprobs(token, sampling.logprobs)
        if index != self.faults.gap_at:
            for _ in range(2 if self.faults.repeat else 1):
                say(tokens=[convert.token_to_message(index, token, logprobs, choice)])
        reason = convert.FinishReason
        if token in sampling.stop_token_ids or (token in sampling.eos_token_ids and not sampling.ignore_eos):
            return reason.STOP
        return reason.LENGTH if index - submit.num_output_tokens + 1 >= sampling.max_tokens else None

    @staticmethod
    def _logprobs(token: int, count: int) -> TokenLogprobs:
        top = tuple((token + offset, -0.5 - offset) for offset in range(count))
        return TokenLogprobs(-0.5, 1, top)


@contextlib.asynccontextmanager
async def running(*workers: FakeWorker):
    """Start workers, and kill them in the end."""
    for worker in workers:
        await worker.start()
    try:
        yield
    finally:
        for worker in workers:
            await worker.kill()
