"""What a leg is: one attempt's work on this worker, decided without I/O.

A leg hears engine events, transfer events, `Abort` and `Due`, and answers with actions. It says exactly one terminal
word (`Finished` or `Failed`), and it is `ended` only when its pages are back, which may be later: a gather or a scatter
may still touch them. Knows keys, phases, deadlines; not sessions, protobuf, threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from ..core.errors import DeadlineExceeded, HeadraceError
from ..core.ids import Incarnation, TransferId, WorkerId
from ..core.sampling import FinishReason, SamplingParams, TokenLogprobs
from ..engine import api as engine
from ..transfer import api as transfer

RESERVE_S = 25.0
"""GENERATE: until the engine has taken credits; less than the holder's patience with the offer meanwhile."""
RELEASE_S = 10.0
"""From the end of a leg until no gather or scatter touches its pages; beyond it the worker is broken."""


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Whom to pull from."""

    worker_id: WorkerId
    incarnation: Incarnation
    address: str


@dataclass(frozen=True, kw_only=True)
class LegOrder:
    """What a router asks for, checked."""

    kind: engine.LegKind
    request_id: str
    attempt: int
    prompt: tuple[int, ...]
    num_output_tokens: int
    sampling: SamplingParams
    namespace: str
    priority: int
    timeout_s: float
    transfer_id: TransferId | None = None
    """All kinds but LOCAL."""
    holder: Holder | None = None
    """GENERATE and FETCH."""
    seeds: tuple[int, ...] = ()
    """One choice for each; empty: one choice with the sampling's seed."""
    traceparent: str = ""
    """The span that this leg belongs to, as a W3C header."""

    @property
    def num_choices(self) -> int:
        return max(1, len(self.seeds))

    def engine_request(self, key: int) -> engine.EngineRequest:
        return engine.EngineRequest(
            key=key,
            kind=self.kind,
            prompt=self.prompt,
            num_output_tokens=self.num_output_tokens,
            sampling=self.sampling,
            namespace=self.namespace,
            priority=self.priority,
            seeds=self.seeds,
        )


# ---- what a leg hears, besides engine and transfer events ----


@dataclass(frozen=True)
class Abort:
    """The router, the end of its session or this worker's own end."""

    error: HeadraceError


@dataclass(frozen=True)
class AbortChoice:
    """The router needs no more of one choice; the others go on. GENERATE and LOCAL."""

    choice: int


@dataclass(frozen=True)
class Due:
    """`due_s` has passed."""


TransferLegEvent: TypeAlias = (
    transfer.Wanted | transfer.Ended | transfer.Arrived | transfer.NotNeeded | transfer.PullFailed
)
"""Of the transfer thread's events those that name a transfer; links are no leg's business."""

LegEvent: TypeAlias = engine.SequenceEvent | TransferLegEvent | Abort | AbortChoice | Due

# ---- what a leg says to its router ----


@dataclass(frozen=True)
class SaidReserved:
    held_tokens: int


@dataclass(frozen=True)
class SaidStarted:
    cached_tokens: int
    queued_s: float


@dataclass(frozen=True)
class SaidToken:
    index: int
    token: int
    logprobs: TokenLogprobs | None
    choice: int = 0


@dataclass(frozen=True)
class ChoiceFinished:
    """One of several choices has ended, others go on. `reason` None: the router ended it."""

    choice: int
    reason: FinishReason | None
    stop_token_id: int | None = None


@dataclass(frozen=True)
class SaidPrompt:
    first_position: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class SaidTransferred:
    stats: transfer.TransferStats
    num_pages: int
    held_tokens: int = 0
    """Leading tokens that were here already and did not travel."""


@dataclass(frozen=True)
class Finished:
    """Terminal, good. `reason` None: PREFILL, its pages were taken; the request goes on elsewhere. Or the router ended
    the last choice by name."""

    reason: FinishReason | None
    stop_token_id: int | None = None
    prefill_s: float = 0.0
    computed_tokens: int = 0
    choice: int = 0
    """The last one of several."""


@dataclass(frozen=True)
class Failed:
    """Terminal, bad: for all choices that go on."""

    error: HeadraceError


Word: TypeAlias = (
    SaidReserved | SaidStarted | SaidToken | SaidPrompt | SaidTransferred | ChoiceFinished | Finished | Failed
)

# ---- actions ----


@dataclass(frozen=True)
class Say:
    word: Word


@dataclass(frozen=True)
class ToEngine:
    command: engine.Command


@dataclass(frozen=True)
class ToTransfer:
    command: transfer.Command


@dataclass(frozen=True)
class Alarm:
    """A wait that only a defect can make this long; counted and logged, and the leg waits on."""

    what: str


Action: TypeAlias = Say | ToEngine | ToTransfer | Alarm


class Leg(Protocol):
    """One attempt's decisions. The maker has `begin` called once, first."""

    @property
    def due_s(self) -> float | None:
        """When `Due` is wanted; asked again after each event."""
        ...

    @property
    def ended(self) -> bool:
        """The last word is said and nothing here belongs to the leg any more."""
        ...

    def begin(self, now_s: float) -> list[Action]: ...

    def handle(self, event: LegEvent, now_s: float) -> list[Action]: ...


LegFactory: TypeAlias = Callable[[int, LegOrder, float], Leg]
"""(engine key, order, now_s) -> leg."""

LegFactories: TypeAlias = Mapping[engine.LegKind, LegFactory]


def overdue(order: LegOrder) -> DeadlineExceeded:
    """The whole leg took longer than its router gave it."""
    return DeadlineExceeded(f"not done within {order.timeout_s:.0f} s")
