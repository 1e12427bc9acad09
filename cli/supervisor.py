"""The decisions of `headrace serve`: when a child is started, started again, told to leave, and killed.

An object without I/O: `handle(event, now_s)` gives actions, `next_wake_s` says when a `Tick` is due. Knows children by
name and their exit statuses; not processes, ports, or what they do. `serve.py` is its shell.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

EXIT_CONFIG = 2
"""A child that ends so would do it again."""


class ChildState(Enum):
    """Where one child stands."""

    WAITING = "waiting"
    """No process; one is started when its pause is over."""
    STARTING = "starting"
    READY = "ready"
    UNREADY = "unready"
    """It was ready and says that it is not, or does not answer."""
    STOPPING = "stopping"
    """Told to drain and leave."""
    KILLED = "killed"
    """SIGKILL sent; the kernel has not reported its end yet."""
    ENDED = "ended"


class ChildEvent(Enum):
    """What happens to one child."""

    DUE = "due"
    READY = "ready"
    NOT_READY = "not_ready"
    EXITED = "exited"
    STOP = "stop"
    KILL = "kill"


_S, _E = ChildState, ChildEvent

NEXT: dict[ChildState, dict[ChildEvent, ChildState]] = {
    # A probe's answer may come after its process went: hence the loops of READY and NOT_READY.
    _S.WAITING: {
        _E.DUE: _S.STARTING, _E.READY: _S.WAITING, _E.NOT_READY: _S.WAITING, _E.STOP: _S.ENDED, _E.KILL: _S.ENDED,
    },
    _S.STARTING: {
        _E.READY: _S.READY, _E.NOT_READY: _S.STARTING, _E.EXITED: _S.WAITING, _E.STOP: _S.STOPPING, _E.KILL: _S.KILLED,
    },
    _S.READY: {
        _E.READY: _S.READY, _E.NOT_READY: _S.UNREADY, _E.EXITED: _S.WAITING, _E.STOP: _S.STOPPING, _E.KILL: _S.KILLED,
    },
    _S.UNREADY: {
        _E.READY: _S.READY, _E.NOT_READY: _S.UNREADY, _E.EXITED: _S.WAITING, _E.STOP: _S.STOPPING, _E.KILL: _S.KILLED,
    },
    _S.STOPPING: {
        _E.READY: _S.STOPPING, _E.NOT_READY: _S.STOPPING, _E.EXITED: _S.ENDED, _E.STOP: _S.STOPPING,
        _E.KILL: _S.KILLED,
    },
    _S.KILLED: {
        _E.READY: _S.KILLED, _E.NOT_READY: _S.KILLED, _E.EXITED: _S.ENDED, _E.STOP: _S.KILLED, _E.KILL: _S.KILLED,
    },
    _S.ENDED: {
        _E.READY: _S.ENDED, _E.NOT_READY: _S.ENDED, _E.STOP: _S.ENDED, _E.KILL: _S.ENDED,
    },
}  # fmt: skip

ALIVE = frozenset({_S.STARTING, _S.READY, _S.UNREADY, _S.STOPPING, _S.KILLED})
"""States with a process."""


@dataclass(frozen=True, kw_only=True)
class ChildSpec:
    """One child that should run."""

    name: str
    stop_rank: int
    """Children of a lower rank are told to leave first; the next rank waits until they have ended."""
    drain_s: float
    """After this long a child that was told to leave is killed."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How patient the supervisor is."""

    restart: bool = True
    ready_timeout_s: float = 300.0
    """From a process's start to its readiness."""
    first_pause_s: float = 0.5
    max_pause_s: float = 30.0
    settled_s: float = 60.0
    """Ready for this long, a child's earlier deaths are forgotten."""
    early_deaths: int = 3
    """A child that dies this often without ever having been ready will not get there."""
    give_up_s: float = 5.0
    """Patience with the others once one has been given up."""


# ---- events ----


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Exited:
    """A child's process has ended, or could not be made."""

    name: str
    status: int
    """As subprocess has it: negative for a signal."""


@dataclass(frozen=True)
class Probed:
    """What a child says of its readiness."""

    name: str
    ready: bool


@dataclass(frozen=True)
class StopAsked:
    """Someone wants the whole to end: the first time by draining, again at once."""


Event: TypeAlias = Tick | Exited | Probed | StopAsked

# ---- actions ----


@dataclass(frozen=True)
class Spawn:
    """Start a process for this child."""

    name: str


@dataclass(frozen=True)
class Signal:
    """Send a signal to this child's process."""

    name: str
    signum: signal.Signals


@dataclass(frozen=True)
class Tell:
    """Something a person may want to know."""

    text: str


@dataclass(frozen=True)
class AllReady:
    """Every child is ready, for the first time."""


@dataclass(frozen=True)
class Finish:
    """No process is left; end with this status."""

    status: int


Action: TypeAlias = Spawn | Signal | Tell | AllReady | Finish


@dataclass
class _Child:
    spec: ChildSpec
    state: ChildState = ChildState.WAITING
    deadline_s: float = 0.0
    """WAITING: when to start. STARTING: when to lose patience. STOPPING: when to kill. Else infinite."""
    started_s: float = 0.0
    ready_s: float | None = None
    """Since when; None while it is not."""
    deaths: int = 0
    """Since it was last settled."""
    was_ready: bool = False


@dataclass
class Supervisor:
    """One host's children. A death is answered with a new process after a pause that doubles with each death."""

    specs: Sequence[ChildSpec]
    policy: Policy
    status: int = 0
    _children: dict[str, _Child] = field(init=False)
    _stopping: bool = False
    _told_ready: bool = False
    _finished: bool = False

    def __post_init__(self) -> None:
        self._children = {spec.name: _Child(spec) for spec in self.specs}
        assert len(self._children) == len(self.specs)

    def state(self, name: str) -> ChildState:
        """Where a child stands."""
        return self._children[name].state

    @property
    def all_ready(self) -> bool:
        """Whether every child is ready now."""
        return all(child.state is ChildState.READY for child in self._children.values())

    def next_wake_s(self) -> float:
        """When the next `Tick` is due; infinite if only events matter."""
        return min(child.deadline_s for child in self._children.values())

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Take one event; what is to be done, in order."""
        actions: list[Action] = []
        if isinstance(event, Exited):
            self._exited(self._children[event.name], event.status, now_s, actions)
        elif isinstance(event, Probed):
            self._probed(self._children[event.name], event.ready, now_s, actions)
        elif isinstance(event, StopAsked):
            if self._stopping:
                actions.append(Tell("asked again: killing what is left"))
                for child in self._children.values():
                    self._kill(child, actions)
            else:
                self._stopping = True
                actions.append(Tell("draining (asked again: ends at once)"))
        for child in self._children.values():
            if child.deadline_s <= now_s:
                self._overdue(child, now_s, actions)
        if self._stopping:
            self._stop_next_rank(now_s, actions)
        elif self.all_ready and not self._told_ready:
            self._told_ready = True
            actions.append(AllReady())
        if self._stopping and not self._finished and not self._living():
            self._finished = True
            actions.append(Finish(self.status))
        return actions

    def _move(self, child: _Child, event: ChildEvent) -> None:
        child.state = NEXT[child.state][event]

    def _living(self) -> list[_Child]:
        return [child for child in self._children.values() if child.state in ALIVE]

    def _exited(self, child: _Child, status: int, now_s: float, actions: list[Action]) -> None:
        expected = child.state in (ChildState.STOPPING, ChildState.KILLED)
        self._move(child, ChildEvent.EXITED)
        child.deadline_s = float("inf")
        child.ready_s = None
        if expected:
            return
        ending = f"signal {-status}" if status < 0 else f"status {status}"
        child.deaths += 1
        # Settings that worked once work again: what is wrong now is the host's, a port that another took meanwhile.
        hopeless = not child.was_ready and (status == EXIT_CONFIG or child.deaths >= self.policy.early_deaths)
        if self._stopping or not self.policy.restart or hopeless:
            self._move(child, ChildEvent.STOP)
            if not self._stopping:
                actions.append(Tell(f"{child.spec.name} ended with {ending}: giving up"))
                self.status, self._stopping = 1, True
            return
        pause_s = min(self.policy.first_pause_s * 2 ** (child.deaths - 1), self.policy.max_pause_s)
        child.deadline_s = now_s + pause_s
        actions.append(Tell(f"{child.spec.name} ended with {ending}: starting it again in {pause_s:g} s"))

    def _probed(self, child: _Child, ready: bool, now_s: float, actions: list[Action]) -> None:
        before = child.state
        self._move(child, ChildEvent.READY if ready else ChildEvent.NOT_READY)
        if child.state is before:
            if child.ready_s is not None and now_s - child.ready_s >= self.policy.settled_s:
                child.deaths = 0
            return
        if child.state is ChildState.READY:
            child.ready_s, child.was_ready, child.deadline_s = now_s, True, float("inf")
            took = f" after {now_s - child.started_s:.1f} s" if before is ChildState.STARTING else " again"
            actions.append(Tell(f"{child.spec.name} ready{took}"))
        else:
            child.ready_s = None
            actions.append(Tell(f"{child.spec.name} not ready"))

    def _overdue(self, child: _Child, now_s: float, actions: list[Action]) -> None:
        if child.state is ChildState.WAITING and not self._stopping:
            self._move(child, ChildEvent.DUE)
            child.started_s, child.deadline_s = now_s, now_s + self.policy.ready_timeout_s
            actions.append(Spawn(child.spec.name))
        elif child.state is ChildState.STARTING:
            # Its end is reported as a death, with the pause or the giving up that follows.
            child.deadline_s = float("inf")
            actions.append(Tell(f"{child.spec.name} not ready after {self.policy.ready_timeout_s:g} s: killing it"))
            actions.append(Signal(child.spec.name, signal.SIGKILL))
            if not child.was_ready:
                child.deaths = self.policy.early_deaths
        elif child.state is ChildState.STOPPING:
            actions.append(Tell(f"{child.spec.name} has not left: killing it"))
            self._kill(child, actions)

    def _stop_next_rank(self, now_s: float, actions: list[Action]) -> None:
        for child in self._children.values():
            if child.state is ChildState.WAITING:
                self._move(child, ChildEvent.STOP)
                child.deadline_s = float("inf")
        rank = min((child.spec.stop_rank for child in self._living()), default=0)
        for child in self._living():
            if child.spec.stop_rank == rank and child.state not in (ChildState.STOPPING, ChildState.KILLED):
                self._move(child, ChildEvent.STOP)
                child.deadline_s = now_s + (self.policy.give_up_s if self.status else child.spec.drain_s)
                actions.append(Signal(child.spec.name, signal.SIGTERM))

    def _kill(self, child: _Child, actions: list[Action]) -> None:
        if child.state in ALIVE and child.state is not ChildState.KILLED:
            actions.append(Signal(child.spec.name, signal.SIGKILL))
        self._move(child, ChildEvent.KILL)
        child.deadline_s = float("inf")
