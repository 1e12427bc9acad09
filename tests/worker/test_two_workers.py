"""A prefill and a decode worker as real processes over NIXL; a scripted gRPC client is their router."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from support.processes import transfer_process, until_gone

from headrace.core.sampling import SamplingParams
from headrace.model.demo import ensure_demo
from headrace.proto.engine_convert import PROTOCOL, sampling_to_message
from headrace.proto.internal.v1 import engine_pb2 as pb
from headrace.proto.internal.v1 import engine_pb2_grpc
from headrace.worker.process import EXIT_BROKEN

pytestmark = pytest.mark.process

READY_S = 60.0
ANSWER_S = 60.0
SETTLE_S = 30.0
"""Within this all pools are whole again, whatever happened: longer than any wait below."""


class WorkerProcess:
    """One `headrace prefill` or `headrace decode`."""

    def __init__(self, model: Path, role: str, log: Path, *words: str) -> None:
        self.role = role
        self.log = log
        with log.open("ab") as sink:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "headrace", role, str(model), "--worker-id", f"{role}-0",
                    "--engine-port", "0", "--peer-port", "0", "--status-port", "0", "--device", "cpu",
                    "--set", "engine.num_threads=1", "--set", "engine.max_num_seqs=8",
                    "--set", "transfer.segment_bytes=1048576", "--set", "transfer.offer_wait_s=12",
                    "--set", "transfer.pull_wait_s=5", "--set", "transfer.step_deadline_s=8",
                    "--max-num-batched-tokens", "256", *words,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=sink,
                env={**os.environ, "UCX_NET_DEVICES": "lo", "OMP_NUM_THREADS": "1"},
                text=True,
            )  # fmt: skip
        self.where: dict[str, str] = {}

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("event=ready"):
                self.where = dict(word.split("=", 1) for word in line.split())
                return
        raise AssertionError(f"{self.role} ended with {self.process.wait()}:\n{self.log.read_text()[-4000:]}")

    def get(self, path: str) -> tuple[int, Any]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://{self.where['status']}{path}", timeout=10) as answer:
                body = answer.read()
                return answer.status, json.loads(body) if path != "/metrics" else body.decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.loads(error.read())

    def end(self) -> int:
        """SIGTERM, and the status within bounds."""
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


class Session:
    """One session of the scripted router: items of a leg are kept merged."""

    def __init__(self, worker: WorkerProcess) -> None:
        self.worker = worker
        self.items: dict[int, pb.LegItem] = {}
        self.num_steps = 0
        self.over = False
        self._news = asyncio.Condition()
        self._writing = asyncio.Lock()

    async def open(self) -> Session:
        self.channel = grpc.aio.insecure_channel(self.worker.where["engine"])
        self.stub = engine_pb2_grpc.EngineStub(self.channel)
        self.call = self.stub.Session()
        hello = pb.Hello(protocol=PROTOCOL, router_id="router-0", router_incarnation=1)
        await self.call.write(pb.RouterMessage(hello=hello))
        self.description = (await self.call.read()).welcome
        self.tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._beat())]
        return self

    async def say(self, message: pb.RouterMessage) -> None:
        async with self._writing:
            await self.call.write(message)

    async def submit(self, **fields: Any) -> None:
        await self.say(pb.RouterMessage(submit=pb.Submit(**fields)))

    async def abort(self, leg: int, choice: int | None = None) -> None:
        await self.say(pb.RouterMessage(abort=pb.Abort(leg=leg, choice=choice)))

    async def until(self, leg: int, holds: Callable[[pb.LegItem], bool]) -> pb.LegItem:
        async with asyncio.timeout(ANSWER_S), self._news:
            while not (leg in self.items and (holds(self.items[leg]) or ended(self.items[leg]))):
                assert not self.over, "the session has ended"
                await self._news.wait()
        return self.items[leg]

    async def end_of(self, leg: int) -> pb.LegItem:
        return await self.until(leg, ended)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.call.cancel()
        await self.channel.close()

    async def _read(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while isinstance(message := await self.call.read(), pb.WorkerMessage):
                async with self._news:
                    for item in message.step.items:
                        assert item.leg not in self.items or not ended(self.items[item.leg]), "a word after the last"
                        self.items.setdefault(item.leg, pb.LegItem(leg=item.leg)).MergeFrom(item)
                    self.num_steps += message.HasField("step")
                    self._news.notify_all()
        async with self._news:
            self.over = True
            self._news.notify_all()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self.say(pb.RouterMessage(beat=pb.Beat()))


def ended(item: pb.LegItem) -> bool:
    return item.HasField("finished") or item.HasField("failed")


def tokens(*items: pb.LegItem) -> list[tuple[int, int, float]]:
    """(index, id, log-probability) in order of arrival."""
    return [(token.index, token.id, token.logprob) for item in items for token in item.tokens]


def prompt_of(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(16, 500) for _ in range(length)]


class Pair:
    """The two processes, and a router's view of them."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model = model
        self.folder = folder
        self.prefill = WorkerProcess(model, "prefill", folder / "prefill.log")
        self.decode = WorkerProcess(model, "decode", folder / "decode.log")
        self.prefill.wait_ready()
        self.decode.wait_ready()

    @property
    def workers(self) -> list[WorkerProcess]:
        return [self.prefill, self.decode]

    def run(self, script: Callable[[Session, Session], Awaitable[None]]) -> None:
        """Run a script with a session to each; then everything must be free again."""

        async def main() -> None:
            prefill, decode = await asyncio.gather(Session(self.prefill).open(), Session(self.decode).open())
            try:
                await script(prefill, decode)
            finally:
                await asyncio.gather(prefill.close(), decode.close())

        asyncio.run(main())
        self.check_settled()

    def check_settled(self) -> None:
        """All pools whole, all audits clean, no transfer open, ready."""
        end_s = time.monotonic() + SETTLE_S
        while wrong := [f"{w.role}: {fault}" for w in self.workers if w.process.poll() is None for fault in faults(w)]:
            assert time.monotonic() < end_s, wrong
            time.sleep(0.05)

    async def both_legs(
        self,
        prefill: Session,
        decode: Session,
        leg: int,
        prompt: list[int],
        sampling: SamplingParams,
        seeds: tuple[int, ...] = (),
    ) -> None:
        shared: dict[str, Any] = {
            "leg": leg,
            "attempt": 1,
            "request_id": f"r{leg}",
            "transfer_id": secrets.token_bytes(16),
            "prompt": prompt,
            "sampling": sampling_to_message(sampling),
            "timeout_s": 60.0,
            "seeds": seeds,
        }
        said = prefill.description
        holder = pb.Endpoint(worker_id=said.worker_id, incarnation=said.incarnation, peer_address=said.peer_address)
        await decode.submit(kind=pb.LEG_KIND_GENERATE, holder=holder, **shared)
        await prefill.submit(kind=pb.LEG_KIND_PREFILL, **shared)


def faults(worker: WorkerProcess) -> list[str]:
    """What is not as an idle worker's should be."""
    _, state = worker.get("/state")
    pools = state["pools"].items()
    found = [f"{kind}: {pool}" for kind, pool in pools if pool["free"] + pool["cached"] != pool["total"]]
    if state["legs"] or state["engine"]["audit_mismatches"] or state["transfers"]["audit"]:
        found.append(str(state))
    found += [f"{side}: {counts}" for side, counts in state["transfers"].items() if side in ("subscriptions", "pulls")
              and any(counts.values())]  # fmt: skip
    if worker.get("/ready")[0] != 200:
        found.append("not ready")
    return found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(ensure_demo(), tmp_path_factory.mktemp("workers"))
    yield made
    for worker in made.workers:
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait()
        assert worker.process.stdout is not None
        worker.process.stdout.close()


@pytest.fixture(autouse=True)
def show_logs(request: pytest.FixtureRequest) -> Iterator[None]:
    """A failed test shows what its processes said."""
    yield
    made = request.getfixturevalue("pair")
    for worker in made.workers:
        print(f"---- {worker.role} ----\n{worker.log.read_text()[-6000:]}")


def test_a_pair_gives_the_tokens_of_one_worker_bit_for_bit(pair: Pair, rng: random.Random) -> None:
    """Lengths around every border, greedy and sampled, all at once: ids and log-probabilities are equal."""
    lengths = (1, 4, 127, 128, 129, 255, 256, 257, 511, 700)
    prompts = {leg: prompt_of(rng, length) for leg, length in enumerate(lengths, 1)}
    how = {
        leg: SamplingParams(max_tokens=8, temperature=0.0 if leg % 2 else 1.0, seed=leg, logprobs=2) for leg in prompts
    }

    async def script(prefill: Session, decode: Session) -> None:
        for leg, prompt in prompts.items():
            await pair.both_legs(prefill, decode, leg, prompt, how[leg])
        for leg in prompts:
            generated, prefilled = await decode.end_of(leg), await prefill.end_of(leg)
            assert prefilled.finished.reason in (pb.Finished.REASON_NONE, pb.Finished.REASON_STOP), prefilled
            assert prefilled.finished.computed_tokens == len(prompts[leg])
            assert generated.HasField("finished"), generated
            if prefilled.finished.reason == pb.Finished.REASON_NONE:
                assert generated.transferred.num_bytes > 0
                assert generated.transferred.transport == "shared memory"
        for leg, prompt in prompts.items():
            await decode.submit(
                leg=1000 + leg, kind=pb.LEG_KIND_LOCAL, prompt=prompt, sampling=sampling_to_message(how[leg])
            )
        for leg in prompts:
            alone = await decode.end_of(1000 + leg)
            paired = tokens(prefill.items[leg], decode.items[leg])
            assert paired == tokens(alone), f"{len(prompts[leg])} tokens"
            assert decode.items[leg].finished.reason == alone.finished.reason
            assert [index for index, _, _ in paired] == list(range(len(paired)))

    pair.run(script)


def of_choice(choice: int, *items: pb.LegItem) -> list[tuple[int, int, float]]:
    return [(token.index, token.id, token.logprob) for item in items for token in item.tokens if token.choice == choice]


def test_choices_of_a_pair_and_of_one_worker_are_those_of_single_legs(pair: Pair, rng: random.Random) -> None:
    """Three seeds in one leg, by one prefill and one transfer; one of them is ended by name while the others go on."""
    prompt, seeds = prompt_of(rng, 200), (11, -12, 13)
    sampling = SamplingParams(max_tokens=40, temperature=1.0, logprobs=1, ignore_eos=True)

    async def script(prefill: Session, decode: Session) -> None:
        await pair.both_legs(prefill, decode, 1, prompt, sampling, seeds)
        await decode.submit(
            leg=2, kind=pb.LEG_KIND_LOCAL, prompt=prompt, sampling=sampling_to_message(sampling), seeds=seeds
        )
        for number, seed in enumerate(seeds):
            alone = sampling_to_message(dataclasses.replace(sampling, seed=seed))
            await decode.submit(leg=10 + number, kind=pb.LEG_KIND_LOCAL, prompt=prompt, sampling=alone)
        await prefill.end_of(1)
        for leg in (1, 2):
            item = await decode.end_of(leg)
            ends = [*item.choices, item.finished]
            assert sorted(end.choice for end in ends) == [0, 1, 2]
            assert {end.reason for end in ends} == {pb.Finished.REASON_LENGTH}
        for number in range(3):
            expected = tokens(await decode.end_of(10 + number))
            assert of_choice(number, prefill.items[1], decode.items[1]) == expected
            assert of_choice(number, decode.items[2]) == expected
        long = dataclasses.replace(sampling, max_tokens=400)
        await pair.both_legs(prefill, decode, 3, prompt, long, seeds)
        await decode.until(3, lambda item: len(item.tokens) > 9)
        await decode.abort(3, 1)
        item = await decode.until(3, lambda item: len(item.choices) > 0)
        assert [(end.choice, end.reason) for end in item.choices] == [(1, pb.Finished.REASON_NONE)]
        item = await decode.end_of(3)
        assert item.HasField("finished"), item
        counts = [len(of_choice(choice, prefill.items[3], item)) for choice in range(3)]
        assert counts[0] == counts[2] == 400 > counts[1]

    pair.run(script)


@pytest.mark.parametrize("who", ["prefill", "decode"])
def test_aborted_legs_of_several_choices_leave_nothing_behind(pair: Pair, rng: random.Random, who: str) -> None:
    """While the decode worker forks and decodes, either leg."""

    async def script(prefill: Session, decode: Session) -> None:
        sampling = SamplingParams(max_tokens=400, temperature=1.0, ignore_eos=True)
        for leg, num_tokens in enumerate((0, 1, 30), 1):
            await pair.both_legs(prefill, decode, leg, prompt_of(rng, 300), sampling, (1, 2, 3))
            if num_tokens:
                await decode.until(leg, lambda item, least=num_tokens: len(item.tokens) >= least)
            await (prefill if who == "prefill" else decode).abort(leg)
            if who == "prefill":
                await decode.abort(leg)
        for leg in (1, 2, 3):
            assert (await decode.end_of(leg)).HasField("failed")

    pair.run(script)


def test_steps_of_several_requests_share_messages(pair: Pair, rng: random.Random) -> None:
    """With six requests decoding, far fewer messages than tokens come back."""

    async def script(prefill: Session, decode: Session) -> None:
        sampling = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
        before = decode.num_steps
        for leg in range(1, 7):
            await decode.submit(
                leg=leg, kind=pb.LEG_KIND_LOCAL, prompt=prompt_of(rng, 20), sampling=sampling_to_message(sampling)
            )
        for leg in range(1, 7):
            assert len((await decode.end_of(leg)).tokens) == 40
        assert decode.num_steps - before < 100

    pair.run(script)


PHASES: dict[str, Callable[[pb.LegItem], bool] | None] = {
    "at once": None,
    "reserved": lambda item: item.HasField("reserved"),
    "transferred": lambda item: item.HasField("transferred"),
    "decoding": lambda item: len(item.tokens) > 2,
}


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("who", ["both", "decode", "prefill"])
def test_aborted_legs_leave_nothing_behind(pair: Pair, rng: random.Random, phase: str, who: str) -> None:
    """In each phase, by either leg: one terminal item at each side, and every page comes back."""

    async def script(prefill: Session, decode: Session) -> None:
        for leg, length in enumerate((5, 300, 600), 1):
            sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
            await pair.both_legs(prefill, decode, leg, prompt_of(rng, length), sampling)
            until = PHASES[phase]
            if until is not None:
                await decode.until(leg, until)
            if who in ("both", "prefill"):
                await prefill.abort(leg)
            if who in ("both", "decode"):
                await decode.abort(leg)
            told = await decode.end_of(leg)
            assert told.failed.reason in ("cancelled", "transfer_failed") or told.HasField("finished")
            assert ended(await prefill.end_of(leg))

    pair.run(script)


def test_a_router_that_dies_takes_its_requests_along(pair: Pair, rng: random.Random) -> None:
    """Both connections go without a word while requests are in every phase."""

    async def script(prefill: Session, decode: Session) -> None:
        sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
        for leg, length in enumerate((5, 900, 300, 1200), 1):
            await pair.both_legs(prefill, decode, leg, prompt_of(rng, length), sampling)
        await decode.until(1, lambda item: len(item.tokens) > 2)

    pair.run(script)


def test_a_prefill_leg_that_nobody_pulls_and_a_pull_that_nobody_serves_end(pair: Pair, rng: random.Random) -> None:
    """Each waits for its other half within a bound of its own."""

    async def script(prefill: Session, decode: Session) -> None:
        said = prefill.description
        sampling = sampling_to_message(SamplingParams(max_tokens=5))
        shared: dict[str, Any] = {"attempt": 1, "prompt": prompt_of(rng, 50), "sampling": sampling, "timeout_s": 60.0}
        await prefill.submit(leg=1, kind=pb.LEG_KIND_PREFILL, transfer_id=secrets.token_bytes(16), **shared)
        holder = pb.Endpoint(worker_id=said.worker_id, incarnation=said.incarnation, peer_address=said.peer_address)
        await decode.submit(
            leg=2, kind=pb.LEG_KIND_GENERATE, transfer_id=secrets.token_bytes(16), holder=holder, **shared
        )
        assert (await decode.end_of(2)).failed.reason == "transfer_failed"
        assert (await prefill.end_of(1)).failed.reason == "transfer_failed"

    pair.run(script)


def test_a_holder_that_is_not_there_fails_the_leg(pair: Pair, rng: random.Random) -> None:
    """A dead address, and the right address with another incarnation."""

    async def script(prefill: Session, decode: Session) -> None:
        said = prefill.description
        for leg, holder in enumerate(
            (
                pb.Endpoint(worker_id="prefill-9", incarnation=5, peer_address="127.0.0.1:9"),
                pb.Endpoint(worker_id="prefill-8", incarnation=5, peer_address=said.peer_address),
            ),
            1,
        ):
            await decode.submit(
                leg=leg,
                kind=pb.LEG_KIND_GENERATE,
                attempt=1,
                transfer_id=secrets.token_bytes(16),
                prompt=prompt_of(rng, 50),
                sampling=sampling_to_message(SamplingParams(max_tokens=5)),
                holder=holder,
            )
        for leg in (1, 2):
            assert (await decode.end_of(leg)).failed.reason in ("transfer_failed", "worker_failed", "stale")

    pair.run(script)


def test_metrics_tell_of_the_transfers(pair: Pair) -> None:
    """What went over the link is counted at both ends."""
    _, sent = pair.prefill.get("/metrics")
    _, taken = pair.decode.get("/metrics")
    assert 'headrace:link_state{direction="in",peer="prefill-0"} 4.0' in taken
    assert 'headrace:kv_transfer_bytes_total{direction="in"}' in taken
    assert 'headrace:kv_transfers_total{direction="out"}' in sent
    assert "headrace:kv_audit_mismatch_total 0.0" in taken


@pytest.mark.parametrize(
    ("part", "status"),
    [
        pytest.param(lambda pid: pid, -signal.SIGKILL, id="its_engine"),
        pytest.param(transfer_process, EXIT_BROKEN, id="its_transfers"),
    ],
)
def test_a_killed_prefill_worker_fails_its_transfers_and_its_successor_serves(
    pair: Pair, rng: random.Random, part: Callable[[int], int], status: int
) -> None:
    """SIGKILL in mid-prefill, of either of its processes: the other one ends too, the decode leg fails, its pages come
    back; a new process under the old name serves."""

    async def killed(prefill: Session, decode: Session) -> None:
        sampling = SamplingParams(max_tokens=5, temperature=0.0)
        for leg in (1, 2, 3):
            await pair.both_legs(prefill, decode, leg, prompt_of(rng, 1500), sampling)
        await prefill.until(1, lambda item: item.HasField("started"))
        processes = [pair.prefill.process.pid, transfer_process(pair.prefill.process.pid)]
        os.kill(part(pair.prefill.process.pid), signal.SIGKILL)
        assert await asyncio.to_thread(pair.prefill.process.wait, 10) == status
        await asyncio.to_thread(until_gone, processes)
        for leg in (1, 2, 3):
            assert (await decode.end_of(leg)).failed.reason in ("transfer_failed", "worker_failed")

    async def served(prefill: Session, decode: Session) -> None:
        await pair.both_legs(prefill, decode, 1, prompt_of(rng, 600), SamplingParams(max_tokens=5, temperature=0.0))
        assert (await decode.end_of(1)).HasField("finished")
        await prefill.submit(
            leg=2, kind=pb.LEG_KIND_LOCAL, prompt=[20], sampling=sampling_to_message(SamplingParams(max_tokens=2))
        )
        assert (await prefill.end_of(2)).HasField("finished")

    pair.run(killed)
    assert pair.prefill.process.stdout is not None
    pair.prefill.process.stdout.close()
    # A worker of both roles is a prefill worker too.
    pair.prefill = WorkerProcess(pair.model, "prefill", pair.prefill.log, "--set", "worker.role=both")
    pair.prefill.wait_ready()
    pair.run(served)


def both(pid: int) -> list[int]:
    return [pid, transfer_process(pid)]


@pytest.mark.parametrize(
    "part",
    [
        pytest.param(both, id="all_of_it"),
        pytest.param(lambda pid: [pid], id="its_engine"),
        pytest.param(lambda pid: [transfer_process(pid)], id="its_transfers"),
    ],
)
def test_a_stopped_prefill_worker_is_given_up_and_taken_back(
    pair: Pair, rng: random.Random, part: Callable[[int], list[int]]
) -> None:
    """SIGSTOP in mid-prefill, of one or both of its processes: the decode leg ends by a deadline of its own; after
    SIGCONT everything is whole again."""

    async def script(prefill: Session, decode: Session) -> None:
        await pair.both_legs(prefill, decode, 1, prompt_of(rng, 2000), SamplingParams(max_tokens=5, temperature=0.0))
        await prefill.until(1, lambda item: item.HasField("started"))
        stopped = part(pair.prefill.process.pid)
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert (await decode.end_of(1)).failed.reason in ("transfer_failed", "worker_failed")
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)

    pair.run(script)


def test_a_drain_finishes_what_runs_and_the_processes_end_well(pair: Pair, rng: random.Random) -> None:
    """SIGTERM while tokens flow: the stream comes to its end, then both leave with status 0."""

    async def script(prefill: Session, decode: Session) -> None:
        sampling = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
        await pair.both_legs(prefill, decode, 1, prompt_of(rng, 100), sampling)
        await decode.until(1, lambda item: len(item.tokens) > 2)
        pair.decode.process.terminate()
        told = await decode.end_of(1)
        assert told.finished.reason == pb.Finished.REASON_LENGTH
        assert len(told.tokens) == 59
        assert await asyncio.to_thread(pair.decode.process.wait, 20) == 0

    pair.run(script)
    assert pair.prefill.end() == 0
