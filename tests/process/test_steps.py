"""At each of the 14 steps of a request's life its client leaves, a worker is killed, or a worker stops for a while.

The relay between the processes keeps the message back that makes the step, and the test acts on exactly that moment.
Whatever happens, an answer is the one that an undisturbed run gives, token by token, or an explicit error; afterwards
every pool and buffer is as it was at the start, and the process that was left alone is the same and serves on.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from process.relay import Seen, Way
from process.relayed import Asked, RelayedCluster

from headrace.proto.internal.v1.engine_pb2 import LEG_KIND_GENERATE, LEG_KIND_PREFILL

pytestmark = pytest.mark.process

PREFILL, DECODE = "prefill-0", "decode-0"
MAX_TOKENS = 8
LONG = (pytest.mark.slow, pytest.mark.timeout(1800))
IDLE_S = 60.0
"""For everything that a disturbed request held to come back: the longest deadline is the holder's lease."""

HASTY = {
    "transfer.read_deadline_s": "1.5",
    "transfer.progress_deadline_s": "1.5",
    "transfer.step_deadline_s": "10",
    "transfer.beat_s": "0.5",
    "transfer.lease_s": "2",
    # Less to make ready.
    "transfer.segment_bytes": str(1 << 20),
}
"""Deadlines that a stop of a few seconds outlasts."""
OVER_TCP = {"UCX_TLS": "tcp,self"}
"""A READ needs the process that holds, as between hosts without RDMA; by default one host's processes share memory."""
SETTINGS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "as_shipped": ({}, {}),
    "as_shipped_over_tcp": ({}, OVER_TCP),
    "hasty": (HASTY, OVER_TCP),
}
"""Settings and environment."""
COMMON = {
    # The prompt takes several chunks, and its pages several segments.
    "engine.max_num_batched_tokens": "256",
    # Every request takes the way over both workers.
    "router.local_prefill_tokens": "0",
    # The same in every life.
    "cache.memory_bytes": str(256 << 20),
}


@dataclass
class Stage:
    """A cluster, and what it answers undisturbed."""

    cluster: RelayedCluster
    prompts: list[list[int]]
    expected: list[list[int]] = field(default_factory=list)

    def ask(self, index: int = 0, *, stream: bool = True) -> Asked:
        return self.cluster.ask(self.prompts[index], MAX_TOKENS, stream=stream)

    def check_ended(self, asked: Asked, index: int = 0) -> None:
        """Right to the last token, or right as far as it went and an explicit error."""
        expected = self.expected[index]
        print(f"ended after {len(asked.ids)} tokens, error: {asked.error}")
        if asked.error is None:
            assert asked.ids == expected
        else:
            assert asked.ids == expected[: len(asked.ids)], asked.error

    def check_serves(self) -> None:
        """An undisturbed request is answered as ever."""
        asked = self.ask().read_all()
        assert asked.error is None, f"{asked.error}\n{self.cluster.log()}"
        assert asked.ids == self.expected[0]


@pytest.fixture(scope="module")
def on_stage(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Stage]]:
    """The stage with settings of this name, the same for all tests."""
    rng = random.Random(7)
    prompts = [[rng.randint(20, 500) for _ in range(length)] for length in (350, 270, 40)]
    stages: dict[str, Stage] = {}
    with contextlib.ExitStack() as open_ones:

        def on_stage(name: str) -> Stage:
            if name not in stages:
                settings, environment = SETTINGS[name]
                cluster = open_ones.enter_context(
                    RelayedCluster(demo_checkpoint, tmp_path_factory.mktemp(name), COMMON | settings, environment)
                )
                stage = Stage(cluster, prompts)
                for index in range(len(prompts)):
                    asked = stage.ask(index).read_all()
                    assert asked.error is None, asked.error
                    assert len(asked.ids) == MAX_TOKENS
                    stage.expected.append(asked.ids)
                cluster.until_as_at_start(IDLE_S)
                stages[name] = stage
            return stages[name]

        yield on_stage


# ---- the steps ----


@dataclass(frozen=True)
class Step:
    """A moment in a request's life: a message is on its way and has not come."""

    number: int
    worker: str
    way: Way
    is_it: Callable[[Seen], bool]
    nth: int = 1
    """Which of several."""
    after_first: bool = False
    """Only when the client has the first token."""
    of_tokens: bool = False
    """Which token of the output, not which message: a starved worker says several in one."""

    def matches(self, seen: Seen) -> bool:
        if seen.worker != self.worker or seen.way is not self.way or not self.is_it(seen):
            return False
        if not self.of_tokens:
            return True
        return any(token.index >= self.nth for item in seen.message.step.items for token in item.tokens)


def submits(kind: int) -> Callable[[Seen], bool]:
    return lambda seen: bool(seen.message.HasField("submit") and seen.message.submit.kind == kind)


def says(what: str) -> Callable[[Seen], bool]:
    """A leg says it to the router."""
    return lambda seen: any(
        len(item.tokens) if what == "tokens" else item.HasField(what) for item in seen.message.step.items
    )


def sends(kind: str) -> Callable[[Seen], bool]:
    """One peer to the other."""
    return lambda seen: bool(seen.message.HasField(kind))


STEPS = {
    step.number: step
    for step in (
        Step(3, DECODE, Way.TO_WORKER, submits(LEG_KIND_GENERATE)),
        Step(4, DECODE, Way.FROM_WORKER, says("reserved")),
        Step(5, PREFILL, Way.TO_WORKER, submits(LEG_KIND_PREFILL)),
        Step(6, PREFILL, Way.TO_HOLDER, sends("pull")),
        Step(7, PREFILL, Way.FROM_HOLDER, sends("serving")),
        Step(8, PREFILL, Way.FROM_HOLDER, sends("segment_ready"), nth=2),
        Step(9, PREFILL, Way.FROM_WORKER, says("tokens")),
        Step(10, PREFILL, Way.FROM_HOLDER, sends("complete"), after_first=True),
        Step(11, PREFILL, Way.TO_HOLDER, sends("taken")),
        Step(12, PREFILL, Way.FROM_WORKER, says("finished")),
        Step(13, DECODE, Way.FROM_WORKER, says("tokens"), nth=3, of_tokens=True),
        Step(14, DECODE, Way.FROM_WORKER, says("finished")),
    )
}
BEFORE_THE_FIRST_HOP = (1, 2)


def disturb(stage: Stage, step: Step, act: Callable[[Asked], None], *, stream: bool = True) -> Asked:
    """Ask, act when the request is at this step, and let it go on."""
    with stage.cluster.relay.hold(step.matches, 1 if step.of_tokens else step.nth) as hold:
        asked = stage.ask(stream=stream or step.after_first)
        hold.wait()
        if step.after_first:
            asked.read_first()
        act(asked)
    return asked


# ---- the client leaves ----


@pytest.mark.parametrize(
    ("settings", "times"),
    [pytest.param("hasty", 2, id="twice"), pytest.param("as_shipped", 50, id="50_times", marks=LONG)],
)
@pytest.mark.parametrize("number", [*BEFORE_THE_FIRST_HOP, *STEPS])
def test_client_leaves(on_stage: Callable[[str], Stage], settings: str, number: int, times: int, rng: random.Random):
    """Nothing is left of the request on either worker, and what it left in the caches is right."""
    stage = on_stage(settings)
    cluster = stage.cluster

    def leave(asked: Asked) -> None:
        asked.leave()
        cluster.until(lambda: not cluster.count("router", "headrace:num_requests_running"), 20.0, "left")

    for turn in range(times):
        stream = bool(turn % 2)
        if number in BEFORE_THE_FIRST_HOP:
            asked = stage.ask(stream=stream)
            time.sleep(rng.uniform(0.0, 0.01) * (number - 1))
            leave(asked)
        else:
            step = STEPS[number]
            asked = disturb(stage, replace(step, nth=1 + turn % step.nth), leave, stream=stream)
        assert asked.ids == stage.expected[0][: len(asked.ids)]
        if turn % 2:
            cluster.until_idle(IDLE_S)
            stage.check_serves()
        cluster.until_as_at_start(IDLE_S)


# ---- a worker dies ----


def kills() -> Iterator[object]:
    for number in STEPS:
        for victim in (PREFILL, DECODE):
            name = f"step_{number}_{victim.partition('-')[0]}"
            if (number, victim) in KILLED_IN_EVERY_RUN:
                yield pytest.param("hasty", number, victim, id=name)
            yield pytest.param("as_shipped", number, victim, id=f"{name}_as_shipped", marks=pytest.mark.slow)


KILLED_IN_EVERY_RUN = {(6, PREFILL), (8, PREFILL), (11, PREFILL), (4, DECODE), (8, DECODE), (13, DECODE)}


@pytest.mark.parametrize(("settings", "number", "victim"), list(kills()))
def test_worker_is_killed(on_stage: Callable[[str], Stage], settings: str, number: int, victim: str):
    """The other one and the router live on; the next life of the victim, on its own address, serves with them."""
    stage = on_stage(settings)
    cluster = stage.cluster
    pids = {name: cluster.pid(name) for name in (*cluster.names, "router") if name != victim}
    meanwhile: list[Asked] = []

    def kill(asked: Asked) -> None:
        cluster.kill(victim)
        meanwhile.append(stage.ask(1))

    asked = disturb(stage, STEPS[number], kill)
    cluster.start(victim)
    stage.check_ended(asked.read_all())
    stage.check_ended(meanwhile[0].read_all(), 1)
    cluster.wait_ready()
    stage.check_serves()
    cluster.until_as_at_start(IDLE_S)
    assert pids == {name: cluster.pid(name) for name in pids}


# ---- a worker stops ----


def stops() -> Iterator[object]:
    for number in (6, 8, 11, 13):
        for victim in (PREFILL, DECODE):
            name = f"step_{number}_{victim.partition('-')[0]}"
            if number == 8:
                yield pytest.param("hasty", number, victim, 3.0, id=name)
            yield pytest.param("as_shipped_over_tcp", number, victim, 60.0, id=f"{name}_for_a_minute", marks=LONG)


@pytest.mark.parametrize(("settings", "number", "victim", "for_s"), list(stops()))
def test_worker_stops_and_goes_on(
    on_stage: Callable[[str], Stage], settings: str, number: int, victim: str, for_s: float
):
    """Both workers and the router live on, and serve together again."""
    stage = on_stage(settings)
    cluster = stage.cluster
    pids = {name: cluster.pid(name) for name in (*cluster.names, "router")}
    meanwhile: list[Asked] = []

    def stop(asked: Asked) -> None:
        cluster.stop(victim)
        meanwhile.append(stage.ask(1))

    try:
        asked = disturb(stage, STEPS[number], stop)
        time.sleep(for_s)
    finally:
        cluster.resume(victim)
    stage.check_ended(asked.read_all())
    stage.check_ended(meanwhile[0].read_all(), 1)
    cluster.wait_ready()
    stage.check_serves()
    cluster.until_as_at_start(IDLE_S)
    assert pids == {name: cluster.pid(name) for name in pids}


# ---- a worker starts again and again ----


@pytest.mark.parametrize(
    ("settings", "victims"),
    [
        pytest.param("hasty", [PREFILL, DECODE, PREFILL], id="both"),
        pytest.param("as_shipped", [PREFILL] * 50, id="prefill_50_times", marks=LONG),
        pytest.param("as_shipped", [DECODE] * 50, id="decode_50_times", marks=LONG),
    ],
)
def test_worker_starts_again_under_load(on_stage: Callable[[str], Stage], settings: str, victims: list[str]):
    """Always on the same address, and the other one serves with each of its lives."""
    stage = on_stage(settings)
    cluster = stage.cluster
    pids = {name: cluster.pid(name) for name in (*cluster.names, "router") if name not in victims}
    over = threading.Event()
    good: list[int] = []
    faults: list[BaseException] = []

    def load(index: int) -> None:
        try:
            while not over.is_set():
                asked = stage.ask(index).read_all()
                stage.check_ended(asked, index)
                if asked.error is None:
                    good.append(index)
                else:
                    time.sleep(0.1)
        except BaseException as fault:
            faults.append(fault)

    clients = [threading.Thread(target=load, args=(index,)) for index in range(len(stage.prompts))]
    for client in clients:
        client.start()
    try:
        for victim in victims:
            cluster.kill(victim)
            cluster.start(victim)
            cluster.wait_ready()
            print({name: (cluster.resident_bytes(name) >> 20, cluster.num_files(name)) for name in pids})
            served = len(good)
            cluster.until(lambda: len(good) > served or bool(faults), 60.0, "an answer with its next life")  # noqa: B023
    finally:
        over.set()
        for client in clients:
            client.join()
    assert not faults, faults
    cluster.until_as_at_start(IDLE_S)
    assert pids == {name: cluster.pid(name) for name in pids}


# ---- many holders ----


@pytest.mark.slow
def test_eight_prefill_workers_to_one_decode_worker(demo_checkpoint: Path, tmp_path: Path, rng: random.Random):
    """All of them are pulled from at once; every answer is that of the same request alone."""
    prompts = [[rng.randint(20, 500) for _ in range(rng.choice((40, 300, 700)))] for _ in range(48)]
    settings = COMMON | {"serve.prefill": "8"}
    with RelayedCluster(demo_checkpoint, tmp_path, settings) as cluster:
        expected = [cluster.ask(prompt, MAX_TOKENS).read_all().ids for prompt in prompts]
        assert all(len(ids) == MAX_TOKENS for ids in expected)
        cluster.until_as_at_start(IDLE_S)
        for _ in range(3):
            asked = [cluster.ask(prompt, MAX_TOKENS, stream=rng.random() < 0.5) for prompt in prompts]
            assert [one.read_all().ids for one in asked] == expected
            cluster.until_as_at_start(IDLE_S)
        served = {name: cluster.state(name)["transfers"]["served"] for name in cluster.names if name != DECODE}
        assert len(served) == 8
        assert all(served.values()), served
        print({name: cluster.resident_bytes(name) >> 20 for name in cluster.names})
