"""The supervisor's decisions, with processes that exist only as numbers."""

from __future__ import annotations

import random
import signal
from dataclasses import dataclass, field

import pytest

from headrace.cli.supervisor import (
    ALIVE,
    EXIT_CONFIG,
    NEXT,
    Action,
    AllReady,
    ChildEvent,
    ChildSpec,
    ChildState,
    Event,
    Exited,
    Finish,
    Policy,
    Probed,
    Signal,
    Spawn,
    StopAsked,
    Supervisor,
    Tell,
    Tick,
)
from headrace.core.clock import ManualClock

SPECS = [
    ChildSpec(name="router", stop_rank=0, drain_s=10.0),
    ChildSpec(name="prefill-0", stop_rank=1, drain_s=20.0),
    ChildSpec(name="decode-0", stop_rank=1, drain_s=20.0),
]


@dataclass
class Host:
    """Fake processes: a name is alive from its Spawn to its Exited."""

    policy: Policy = field(default_factory=Policy)
    clock: ManualClock = field(default_factory=ManualClock)
    alive: set[str] = field(default_factory=set)
    signals: list[tuple[str, signal.Signals]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    spawned: list[str] = field(default_factory=list)
    num_all_ready: int = 0
    finished: int | None = None

    def __post_init__(self) -> None:
        self.supervisor = Supervisor(SPECS, self.policy)

    def handle(self, event: Event) -> list[Action]:
        if isinstance(event, Exited):
            self.alive.discard(event.name)
        actions = self.supervisor.handle(event, self.clock.now_s())
        for action in actions:
            match action:
                case Spawn(name):
                    assert name not in self.alive
                    self.alive.add(name)
                    self.spawned.append(name)
                case Signal(name, signum):
                    assert name in self.alive
                    self.signals.append((name, signum))
                case Tell(text):
                    self.told.append(text)
                case AllReady():
                    self.num_all_ready += 1
                case Finish(status):
                    assert not self.alive
                    assert self.finished is None
                    self.finished = status
        return actions

    def wait_s(self, seconds: float) -> None:
        """Let time pass, with a tick whenever one is due."""
        end_s = self.clock.now_s() + seconds
        while (wake_s := self.supervisor.next_wake_s()) <= end_s:
            self.clock.advance(max(0.0, wake_s - self.clock.now_s()))
            self.handle(Tick())
        self.clock.advance(end_s - self.clock.now_s())

    def start(self) -> None:
        self.handle(Tick())
        for spec in SPECS:
            self.handle(Probed(spec.name, True))


@pytest.fixture
def host() -> Host:
    started = Host()
    started.start()
    return started


def test_table_is_closed():
    """Every state of the table is listed, and each leads only to states that are."""
    assert set(NEXT) == set(ChildState)
    assert {state for row in NEXT.values() for state in row.values()} <= set(ChildState)


def test_every_state_can_be_stopped_and_killed():
    """STOP and KILL are answered everywhere, and from everywhere the end can be reached."""
    for row in NEXT.values():
        assert {ChildEvent.STOP, ChildEvent.KILL} <= set(row)
    reaching = {ChildState.ENDED}
    while True:
        more = {state for state, row in NEXT.items() if reaching & set(row.values())}
        if more <= reaching:
            break
        reaching |= more
    assert reaching == set(ChildState)


def test_a_process_that_can_exit_is_reaped_in_every_state():
    """EXITED stands exactly where a process lives."""
    assert {state for state, row in NEXT.items() if ChildEvent.EXITED in row} == ALIVE


def test_all_children_start_together():
    """No child waits for another: readiness is theirs to tell."""
    host = Host()
    host.handle(Tick())
    assert host.spawned == ["router", "prefill-0", "decode-0"]
    assert not host.supervisor.all_ready


def test_ready_is_told_once_when_all_are(host: Host):
    """A later death and return is no second start."""
    assert host.num_all_ready == 1
    host.handle(Exited("decode-0", -9))
    host.wait_s(1.0)
    host.handle(Probed("decode-0", True))
    assert host.supervisor.all_ready
    assert host.num_all_ready == 1


def test_dead_worker_is_started_again_after_growing_pauses(host: Host):
    """0.5, 1, 2, ... seconds, at most 30."""
    pauses = []
    for _ in range(9):
        host.handle(Exited("prefill-0", -signal.SIGKILL))
        assert host.supervisor.state("prefill-0") is ChildState.WAITING
        died_s = host.clock.now_s()
        host.wait_s(30.0)
        pauses.append(host.supervisor._children["prefill-0"].started_s - died_s)
        host.handle(Probed("prefill-0", True))
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_deaths_are_forgotten_after_a_settled_minute(host: Host):
    """A worker that dies once a day is started as if for the first time."""
    for _ in range(3):
        host.handle(Exited("prefill-0", 1))
        host.wait_s(30.0)
        host.handle(Probed("prefill-0", True))
        host.wait_s(60.0)
        host.handle(Probed("prefill-0", True))
    host.handle(Exited("prefill-0", 1))
    assert host.told[-1].endswith("starting it again in 0.5 s")


def test_child_that_never_gets_ready_is_given_up():
    """Three early deaths: the rest is told to leave, and the whole ends with an error."""
    host = Host()
    host.handle(Tick())
    for pause_s in (0.0, 0.5, 1.0):
        host.wait_s(pause_s)
        host.handle(Exited("decode-0", 1))
    assert host.supervisor.state("decode-0") is ChildState.ENDED
    assert host.signals == [("router", signal.SIGTERM)]
    host.handle(Exited("router", 0))
    host.handle(Exited("prefill-0", 0))
    assert host.finished == 1


def test_configuration_error_is_not_repeated():
    """A child that ends with status 2 would say the same again."""
    host = Host()
    host.handle(Tick())
    host.handle(Exited("prefill-0", EXIT_CONFIG))
    assert host.supervisor.state("prefill-0") is ChildState.ENDED
    assert "giving up" in host.told[-1]


def test_what_worked_once_is_tried_again_whatever_it_says(host: Host):
    """Its port may be another's for a while."""
    host.handle(Exited("prefill-0", -9))
    for pause_s in (0.5, 1.0, 2.0, 4.0):
        host.wait_s(pause_s)
        host.handle(Exited("prefill-0", EXIT_CONFIG))
        assert "starting it again" in host.told[-1]
    host.wait_s(8.0)
    host.handle(Probed("prefill-0", True))
    assert host.supervisor.state("prefill-0") is ChildState.READY


def test_child_that_hangs_at_its_start_is_killed_and_given_up():
    """The deadline of readiness is the child's own, driven by a tick."""
    host = Host(Policy(ready_timeout_s=15.0))
    host.handle(Tick())
    host.handle(Probed("router", True))
    host.handle(Probed("decode-0", True))
    host.wait_s(15.0)
    assert ("prefill-0", signal.SIGKILL) in host.signals
    host.handle(Exited("prefill-0", -signal.SIGKILL))
    host.wait_s(20.0)
    for name in sorted(host.alive):
        host.handle(Exited(name, -signal.SIGKILL))
    assert host.finished == 1


def test_restarted_child_that_hangs_is_killed_and_tried_again(host: Host):
    """It was ready once, so it can be."""
    host.handle(Exited("decode-0", 1))
    host.wait_s(1.0 + host.policy.ready_timeout_s)
    assert host.signals == [("decode-0", signal.SIGKILL)]
    host.handle(Exited("decode-0", -signal.SIGKILL))
    assert host.supervisor.state("decode-0") is ChildState.WAITING


def test_without_restart_a_death_ends_the_whole(host: Host):
    """For those who have their own supervisor above."""
    host = Host(Policy(restart=False))
    host.start()
    host.handle(Exited("prefill-0", 0))
    assert host.signals == [("router", signal.SIGTERM)]


def test_stop_drains_the_router_before_the_workers(host: Host):
    """Running requests need their workers until the router has answered them."""
    host.handle(StopAsked())
    assert host.signals == [("router", signal.SIGTERM)]
    host.handle(Exited("router", 0))
    assert host.signals[1:] == [("prefill-0", signal.SIGTERM), ("decode-0", signal.SIGTERM)]
    host.handle(Exited("decode-0", 0))
    host.handle(Exited("prefill-0", 0))
    assert host.finished == 0


def test_stop_reaches_workers_when_the_router_has_no_process(host: Host):
    """A router between two lives is skipped, not waited for."""
    host.handle(Exited("router", 1))
    host.handle(StopAsked())
    assert host.signals == [("prefill-0", signal.SIGTERM), ("decode-0", signal.SIGTERM)]


def test_drain_is_bounded(host: Host):
    """A router that does not leave is killed after its own drain, the workers after theirs."""
    host.handle(StopAsked())
    host.wait_s(10.0)
    assert host.signals == [("router", signal.SIGTERM), ("router", signal.SIGKILL)]
    host.handle(Exited("router", -9))
    host.wait_s(20.0)
    assert host.signals[-2:] == [("prefill-0", signal.SIGKILL), ("decode-0", signal.SIGKILL)]


def test_second_stop_kills(host: Host):
    """Ctrl-C twice ends at once."""
    host.handle(StopAsked())
    host.handle(StopAsked())
    assert {name for name, signum in host.signals if signum is signal.SIGKILL} == {"router", "prefill-0", "decode-0"}
    for name in sorted(host.alive):
        host.handle(Exited(name, -9))
    assert host.finished == 0


def test_unready_is_told_and_not_punished(host: Host):
    """A router without workers says so; killing it would help nobody."""
    host.handle(Probed("router", False))
    host.wait_s(10_000.0)
    assert host.supervisor.state("router") is ChildState.UNREADY
    assert host.signals == []
    host.handle(Probed("router", True))
    assert host.told[-1] == "router ready again"


def test_any_order_of_events_ends_without_a_process(rng: random.Random):
    """Deaths, probes, stops and time in any order: no double start, no signal to nobody, and in the end an end."""
    for _ in range(200):
        host = Host()
        host.handle(Tick())
        for _ in range(rng.randrange(60)):
            match rng.randrange(10):
                case 0 | 1 | 2:
                    host.handle(Probed(rng.choice(SPECS).name, rng.random() < 0.7))
                case 3 | 4:
                    if host.alive:
                        host.handle(Exited(rng.choice(sorted(host.alive)), rng.choice([0, 1, -9, -15])))
                case 5:
                    if rng.random() < 0.1:
                        host.handle(StopAsked())
                case _:
                    host.wait_s(rng.expovariate(0.2))
        if host.finished is None:
            host.handle(StopAsked())
        for _ in range(3):
            if host.finished is None:
                host.wait_s(20.0)
                killed = {name for name, signum in host.signals if signum is signal.SIGKILL}
                for name in sorted(host.alive & killed):
                    host.handle(Exited(name, -9))
        assert host.finished is not None
        assert not host.alive
