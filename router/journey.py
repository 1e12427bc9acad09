"""One prompt's way through the cluster: legs, attempts, migration, and exactly one end of each of its choices.

Decides without I/O: `handle(event, now_s) -> actions`. The first token comes from the PREFILL (or LOCAL) leg, the
GENERATE leg continues behind it; tokens are delivered in order of their output index, doubles are dropped, a gap within
a leg is a fault of the worker. What was delivered is the journal: a lost decode worker is replaced by submitting prompt
and journal again, and since draws depend on the output index alone, the stream goes on as if nothing had happened.
Several choices share prompt, legs and attempts until something of them was delivered; if their workers are lost after
that, they share no prompt any more, and each goes on as a journey of its own. Knows legs and workers by name; not
sockets, not text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..core.errors import (
    Cancelled,
    DeadlineExceeded,
    HeadraceError,
    NoWorkers,
    PeerError,
    PeerLost,
    QueueFull,
    Remedy,
)
from ..core.ids import TransferId, new_transfer_id
from ..core.sampling import FinishReason, SamplingParams, TokenLogprobs
from .placement import Fetch, LocalPlan, PairPlan, Plan, WorkerRef


class State(Enum):
    """Where a sequence stands."""

    PLANNED = "planned"
    """Waiting for workers."""
    FETCHING = "fetching"
    """The prefill worker takes a prefix from another worker's cache; whatever comes of it, the legs open next."""
    RESERVING = "reserving"
    """Legs are open; the decode worker has not taken its credits yet."""
    PREFILLING = "prefilling"
    STREAMING = "streaming"
    MIGRATING = "migrating"
    """Some tokens were delivered, and the workers that made them are lost."""
    SPLIT = "split"
    """The same with several choices: each that has not ended goes on by itself."""
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SHED = "shed"


class Move(Enum):
    """What can happen to a sequence, as the table sees it."""

    FETCH = "fetch"
    PLACED = "placed"
    RESERVED = "reserved"
    TOKEN = "token"
    CHOICE_OVER = "choice_over"
    """One of several choices has ended, others go on."""
    DEFER = "defer"
    """A worker has no room now; costs no attempt."""
    RETRY = "retry"
    MIGRATE = "migrate"
    SPLIT = "split"
    FINISH = "finish"
    GIVE_UP = "give_up"
    SHED = "shed"
    CANCEL = "cancel"


S, M = State, Move

NEXT: Mapping[State, Mapping[Move, State]] = {
    S.PLANNED: {M.FETCH: S.FETCHING, M.PLACED: S.RESERVING, M.SHED: S.SHED, M.CANCEL: S.CANCELLED},
    S.FETCHING: {M.PLACED: S.RESERVING, M.CANCEL: S.CANCELLED},
    S.RESERVING: {
        M.RESERVED: S.PREFILLING,
        # The reservation and the first token travel over different sessions: the token may come first.
        M.TOKEN: S.STREAMING,
        M.DEFER: S.PLANNED,
        M.RETRY: S.PLANNED,
        M.GIVE_UP: S.FAILED,
        M.CANCEL: S.CANCELLED,
    },
    S.PREFILLING: {
        M.RESERVED: S.PREFILLING,
        M.TOKEN: S.STREAMING,
        M.DEFER: S.PLANNED,
        M.RETRY: S.PLANNED,
        M.GIVE_UP: S.FAILED,
        M.CANCEL: S.CANCELLED,
    },
    S.STREAMING: {
        M.RESERVED: S.STREAMING,
        M.TOKEN: S.STREAMING,
        M.CHOICE_OVER: S.STREAMING,
        M.MIGRATE: S.MIGRATING,
        M.SPLIT: S.SPLIT,
        M.FINISH: S.DONE,
        M.GIVE_UP: S.FAILED,
        M.CANCEL: S.CANCELLED,
    },
    S.MIGRATING: {
        M.PLACED: S.MIGRATING,
        M.RESERVED: S.MIGRATING,
        M.TOKEN: S.STREAMING,
        M.DEFER: S.MIGRATING,
        M.MIGRATE: S.MIGRATING,
        M.SHED: S.FAILED,
        # A stop string may be found in what was delivered before the loss.
        M.FINISH: S.DONE,
        M.GIVE_UP: S.FAILED,
        M.CANCEL: S.CANCELLED,
    },
    # After the end everything is late, and harmless.
    **{end: dict.fromkeys(Move, end) for end in (S.DONE, S.FAILED, S.CANCELLED, S.SHED, S.SPLIT)},
}

ENDS = frozenset({S.DONE, S.FAILED, S.CANCELLED, S.SHED, S.SPLIT})


class LegKind(Enum):
    """What a worker is asked for."""

    GENERATE = "generate"
    PREFILL = "prefill"
    LOCAL = "local"
    SHARE = "share"
    FETCH = "fetch"

    @property
    def computes(self) -> bool:
        """The prompt is computed by this leg."""
        return self in (LegKind.PREFILL, LegKind.LOCAL)


PREFIX_LEGS = (LegKind.SHARE, LegKind.FETCH)


@dataclass(frozen=True, slots=True)
class OutToken:
    """One output token as a worker said it."""

    index: int
    id: int
    logprobs: TokenLogprobs | None = None
    choice: int = 0


@dataclass(frozen=True)
class Transferred:
    """How the pages of one attempt travelled."""

    num_bytes: int
    num_segments: int
    num_pages: int
    seconds: float
    tail_seconds: float
    transport: str


@dataclass(frozen=True)
class LegFinished:
    """A leg ended well; `reason` None is a PREFILL whose pages were taken."""

    reason: FinishReason | None
    stop_token_id: int | None = None
    prefill_s: float = 0.0
    computed_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class LegReport:
    """What one step of a worker says about one leg."""

    reserved_tokens: int | None = None
    started: tuple[int, float] | None = None
    """(cached tokens, seconds in the worker's queue)"""
    tokens: tuple[OutToken, ...] = ()
    scored: tuple[OutToken, ...] = ()
    """Prompt tokens with log-probabilities; `index` is the prompt position."""
    transferred: Transferred | None = None
    ended_choices: tuple[int, ...] = ()
    """Choices that ended while others go on; why, their tokens tell."""
    finished: LegFinished | None = None
    failed: HeadraceError | None = None


# ---- events ----


@dataclass(frozen=True)
class Placed:
    """Workers were chosen."""

    plan: Plan


@dataclass(frozen=True)
class Unplaced:
    """No worker will be chosen."""

    error: HeadraceError


@dataclass(frozen=True)
class LegSaid:
    leg: int
    report: LegReport


@dataclass(frozen=True)
class LegLost:
    """The session of a leg's worker ended."""

    leg: int
    error: HeadraceError


@dataclass(frozen=True)
class Enough:
    """The router needs no more tokens of a choice: a stop string was found."""

    choice: int = 0


@dataclass(frozen=True)
class Cancel:
    """The client is gone, or this process leaves."""

    error: HeadraceError = field(default_factory=lambda: Cancelled("the client has left"))


@dataclass(frozen=True)
class Timer:
    """`due_s` has come."""

    can_serve: bool = True
    """Whether any workers could take a request if they had room."""


Event: TypeAlias = Placed | Unplaced | LegSaid | LegLost | Enough | Cancel | Timer

# ---- actions ----


@dataclass(frozen=True)
class Place:
    """Choose workers, now or when there is room; avoid these if others can do it."""

    avoid: frozenset[tuple[str, int]]


@dataclass(frozen=True, kw_only=True)
class OpenLeg:
    leg: int
    kind: LegKind
    worker: WorkerRef
    attempt: int
    transfer_id: TransferId
    holder: WorkerRef | None
    prompt: tuple[int, ...]
    num_output_tokens: int
    """How many ids at the end of `prompt` were delivered earlier."""
    sampling: SamplingParams
    """max_tokens and min_tokens count from here on."""
    seeds: tuple[int, ...]
    """Of several choices; empty: one choice."""
    timeout_s: float


@dataclass(frozen=True)
class AbortLeg:
    leg: int


@dataclass(frozen=True)
class AbortChoice:
    """One choice of a leg is needed no more."""

    leg: int
    choice: int


@dataclass(frozen=True)
class CloseLeg:
    """A leg has ended by itself; its worker has room again. `refused`: it had none for this leg."""

    leg: int
    refused: bool = False


@dataclass(frozen=True)
class Deliver:
    """Tokens of one choice in order, none twice."""

    tokens: tuple[OutToken, ...]
    choice: int = 0


@dataclass(frozen=True)
class Score:
    """Log-probabilities of prompt tokens."""

    tokens: tuple[OutToken, ...]


@dataclass(frozen=True)
class End:
    """The one terminal reply of a choice; with an error, of every choice that has none."""

    state: State
    reason: FinishReason | None
    stop_token_id: int | None
    error: HeadraceError | None
    choice: int = 0
    last: bool = True
    """No other choice goes on: the journey has ended."""


@dataclass(frozen=True)
class Split:
    """The journey has ended; these choices go on, each by a journey of its own that is to be started."""

    parts: tuple[tuple[int, Journey], ...]
    """(choice, journey)"""


Action: TypeAlias = "Place | OpenLeg | AbortLeg | AbortChoice | CloseLeg | Deliver | Score | End | Split"


@dataclass(frozen=True, kw_only=True)
class JourneyLimits:
    """Bounds on what one sequence may cost."""

    attempts: int = 3
    migrations: int = 2
    queue_s: float = 30.0
    reserve_s: float = 30.0
    """A decode worker has this long to take its credits; its own queue is part of it."""
    stall_s: float = 60.0
    """No token for this long while streaming: the worker is given up."""
    fetch_s: float = 5.0
    """A prefix that has not come from another cache after this long is computed."""


@dataclass
class JourneyStats:
    """What happened, for usage, metrics and the log."""

    cached_tokens: int = 0
    worker_queue_s: float = 0.0
    prefill_s: float = 0.0
    transferred: Transferred | None = None
    path: str = ""
    """pair or local, of the last attempt."""
    fetches: list[str] = field(default_factory=list)
    """How each try to fetch a prefix went: fetched, failed or late."""
    stale_tokens: int = 0
    num_migrations: int = 0
    placed_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None


@dataclass
class _Leg:
    kind: LegKind
    worker: WorkerRef
    next_index: dict[int, int] = field(default_factory=dict)
    """By choice: output index that this leg must say next; none before its first token."""
    is_open: bool = True


@dataclass
class _Choice:
    """One choice's journal."""

    seed: int
    emitted: list[int] = field(default_factory=list)
    pending: dict[int, OutToken] = field(default_factory=dict)
    """Tokens of the GENERATE leg that came before the first one, which comes over another session."""
    ended_by: _Leg | None = None
    """A leg that said its last token, some of which may have to wait for the prefill's."""
    is_over: bool = False


class Journey:
    """The state of one prompt and its choices."""

    def __init__(
        self,
        *,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        deadline_s: float,
        limits: JourneyLimits,
        new_leg: Callable[[], int],
        new_transfer: Callable[[], TransferId] = new_transfer_id,
        seeds: tuple[int, ...] = (),
    ) -> None:
        """
        Args:
            seeds: one choice for each, instead of the sampling's seed; empty: one choice.
            deadline_s: when the whole request must have ended, on the clock of `now_s`.
            new_leg: draws leg numbers; never the same twice in this process.
        """
        self.prompt = prompt
        self.sampling = sampling
        self.state = State.PLANNED
        self.stats = JourneyStats()
        self.attempt = 0
        self._choices = [_Choice(seed) for seed in seeds or (sampling.seed,)]
        self._deadline_s = deadline_s
        self._limits = limits
        self._new_leg = new_leg
        self._new_transfer = new_transfer
        self._legs: dict[int, _Leg] = {}
        self._fetching: PairPlan | None = None
        """What is opened once the prefix has come, or will not come."""
        self._base = 0
        """Tokens of each choice delivered before this attempt; of several choices none."""
        self._avoid: set[tuple[str, int]] = set()
        self._failures = 0
        self._due_s = deadline_s
        self._queue_until_s = deadline_s
        """Waiting for room ends here; a refusal does not begin it anew."""
        self._actions: list[Action] = []
        self._stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(sampling.eos_token_ids)
        )

    @property
    def due_s(self) -> float:
        """When `Timer` must be handled at the latest."""
        return self._due_s

    @property
    def is_over(self) -> bool:
        return self.state in ENDS

    @property
    def num_choices(self) -> int:
        return len(self._choices)

    @property
    def emitted(self) -> list[int]:
        """What is computed again with the prompt: a single choice's journal. Several have none when it counts."""
        return self._choices[0].emitted

    @property
    def open_legs(self) -> list[int]:
        return [number for number, leg in self._legs.items() if leg.is_open]

    def start(self, now_s: float) -> list[Action]:
        """The first actions."""
        self._queue_until_s = now_s + self._limits.queue_s
        self._set_due(self._queue_until_s)
        return [Place(frozenset(self._avoid))]

    def handle(self, event: Event, now_s: float) -> list[Action]:
        if self.is_over:
            return []
        if isinstance(event, LegSaid):
            self._leg_said(event, now_s)
        elif isinstance(event, LegLost):
            self._leg_lost(event, now_s)
        elif isinstance(event, Placed):
            self._placed(event.plan, now_s)
        elif isinstance(event, Unplaced):
            self._end(Move.SHED, error=event.error)
        elif isinstance(event, Enough):
            self._enough(event.choice)
        elif isinstance(event, Cancel):
            self._end(Move.CANCEL, error=event.error)
        else:
            self._timer(event, now_s)
        actions, self._actions = self._actions, []
        return actions

    # ---- opening legs ----

    def _placed(self, plan: Plan, now_s: float) -> None:
        self.stats.placed_s = self.stats.placed_s or now_s
        if isinstance(plan, PairPlan) and plan.fetch is not None and self.state is State.PLANNED:
            self._fetch(plan, plan.fetch, now_s)
        else:
            self._open_plan(plan, now_s)

    def _fetch(self, plan: PairPlan, fetch: Fetch, now_s: float) -> None:
        """Have the prefill worker take what another one holds, before anything is computed."""
        self._move(Move.FETCH)
        self._fetching = plan
        transfer = self._new_transfer()
        self._open(LegKind.SHARE, fetch.holder, transfer, None, now_s, num_tokens=fetch.num_tokens)
        self._open(LegKind.FETCH, plan.prefill, transfer, fetch.holder, now_s, num_tokens=fetch.num_tokens)
        self._set_due(now_s + self._limits.fetch_s)

    def _fetched(self, outcome: str, now_s: float) -> None:
        """The prefix is there, or it will be computed: either way the request goes on."""
        plan, self._fetching = self._fetching, None
        assert plan is not None
        self.stats.fetches.append(outcome)
        for number, leg in self._legs.items():
            # A holder whose pages were taken ends by itself a moment later.
            if leg.is_open and outcome != "fetched":
                self._actions.append(AbortLeg(number))
        self._legs.clear()
        self._open_plan(plan, now_s)

    def _prefix_said(self, number: int, leg: _Leg, report: LegReport, now_s: float) -> None:
        if report.finished is None and report.failed is None:
            return
        leg.is_open = False
        self._actions.append(CloseLeg(number))
        if report.failed is not None:
            self._fetched("failed", now_s)
        elif leg.kind is LegKind.FETCH:
            self._fetched("fetched", now_s)

    def _open_plan(self, plan: Plan, now_s: float) -> None:
        self._move(Move.PLACED)
        self._base = len(self.emitted)
        transfer = self._new_transfer()
        if isinstance(plan, PairPlan):
            self.stats.path = "pair"
            self._open(LegKind.GENERATE, plan.decode, transfer, plan.prefill, now_s)
            self._open(LegKind.PREFILL, plan.prefill, transfer, None, now_s)
        else:
            assert isinstance(plan, LocalPlan)
            self.stats.path = "local"
            self._open(LegKind.LOCAL, plan.worker, transfer, None, now_s)
        self._set_due(now_s + self._limits.reserve_s)

    def _open(
        self,
        kind: LegKind,
        worker: WorkerRef,
        transfer: TransferId,
        holder: WorkerRef | None,
        now_s: float,
        *,
        num_tokens: int | None = None,
    ) -> None:
        """`num_tokens`: of the prompt only so many, and none of what was generated: a prefix."""
        number = self._new_leg()
        self._legs[number] = _Leg(kind, worker)
        whole = num_tokens is None
        self._actions.append(
            OpenLeg(
                leg=number,
                kind=kind,
                worker=worker,
                attempt=self.attempt,
                transfer_id=transfer,
                holder=holder,
                prompt=(*self.prompt, *self.emitted) if whole else self.prompt[:num_tokens],
                num_output_tokens=len(self.emitted) if whole else 0,
                sampling=self._remaining_sampling() if whole else SamplingParams(max_tokens=1),
                seeds=tuple(choice.seed for choice in self._choices) if whole and self.num_choices > 1 else (),
                timeout_s=max(self._deadline_s - now_s - 0.05, 0.05),
            )
        )

    def _remaining_sampling(self) -> SamplingParams:
        done = len(self.emitted)
        if not done:
            return self.sampling
        return dataclasses.replace(
            self.sampling,
            max_tokens=self.sampling.max_tokens - done,
            min_tokens=max(self.sampling.min_tokens - done, 0),
            prompt_logprobs=None,
        )

    # ---- what legs say ----

    def _leg_said(self, event: LegSaid, now_s: float) -> None:
        leg = self._legs.get(event.leg)
        report = event.report
        if leg is None:
            self.stats.stale_tokens += len(report.tokens)
            return
        if leg.kind in PREFIX_LEGS:
            self._prefix_said(event.leg, leg, report, now_s)
            return
        if report.reserved_tokens is not None and leg.kind is not LegKind.PREFILL:
            self._move(Move.RESERVED)
            self._set_due(now_s + self._limits.stall_s if self.state is State.STREAMING else self._deadline_s)
        if report.started is not None and self._base == 0:
            cached_tokens, self.stats.worker_queue_s = report.started
            self.stats.cached_tokens = min(cached_tokens, len(self.prompt))
        if report.scored and self._base == 0:
            self._actions.append(Score(report.scored))
        if report.tokens and not self._tokens(event.leg, leg, report.tokens, now_s):
            return
        if report.transferred is not None:
            self.stats.transferred = report.transferred
        for number in report.ended_choices:
            if number >= self.num_choices:
                self._leg_failed(leg, PeerLost(f"choice {number} of {self.num_choices} has ended"), now_s)
                return
            if not self._worker_ended(leg, self._choices[number], now_s):
                return
        if report.finished is not None:
            self._leg_finished(event.leg, leg, report.finished, now_s)
        elif report.failed is not None:
            leg.is_open = False
            refused = report.failed.remedy is Remedy.LATER
            self._actions.append(CloseLeg(event.leg, refused=refused))
            self._leg_failed(leg, report.failed, now_s, told=True)
        self._check_ends(now_s)

    def _tokens(self, number: int, leg: _Leg, tokens: tuple[OutToken, ...], now_s: float) -> bool:
        """Take in a leg's tokens; False if it broke the rules and the attempt is over."""
        out: dict[int, list[OutToken]] = {}
        for token in tokens:
            wrong = self._token(leg, token, out)
            if wrong is not None:
                self._deliver(out, now_s)
                self._actions.append(AbortLeg(number))
                leg.is_open = False
                self._leg_failed(leg, PeerLost(wrong), now_s)
                return False
        self._deliver(out, now_s)
        return True

    def _token(self, leg: _Leg, token: OutToken, out: dict[int, list[OutToken]]) -> str | None:
        """Take in one token; what is wrong with it, if anything is."""
        if token.choice >= self.num_choices:
            return f"a token of choice {token.choice} of {self.num_choices}"
        choice = self._choices[token.choice]
        if choice.is_over or self._is_complete(choice):
            self.stats.stale_tokens += choice.is_over
            return None
        due = leg.next_index.get(token.choice)
        if due is None:
            first = self._base + 1 if leg.kind is LegKind.GENERATE else self._base
            in_order = token.index == first or (leg.kind is LegKind.GENERATE and token.index == self._base)
        else:
            in_order = token.index == due
        if not in_order:
            # Doubles within a leg are as wrong as gaps, but harmless.
            if due is not None and token.index < due:
                self.stats.stale_tokens += 1
                return None
            return f"output index {token.index} where another was due"
        leg.next_index[token.choice] = token.index + 1
        next_index = len(choice.emitted)
        if token.index < next_index:
            self.stats.stale_tokens += 1
        elif token.index > next_index:
            choice.pending[token.index] = token
        else:
            self._take(choice, token, out.setdefault(token.choice, []))
        return None

    def _take(self, choice: _Choice, token: OutToken | None, out: list[OutToken]) -> None:
        """Append `token` and all that waited for it, up to the one that ends the choice."""
        while token is not None and not self._is_complete(choice):
            out.append(token)
            choice.emitted.append(token.id)
            token = choice.pending.pop(len(choice.emitted), None)

    def _is_complete(self, choice: _Choice) -> bool:
        """Whether the journal itself says that the choice has ended."""
        emitted = choice.emitted
        return bool(emitted) and (emitted[-1] in self._stop_ids or len(emitted) >= self.sampling.max_tokens)

    @property
    def _going_on(self) -> list[_Choice]:
        """Choices of which more tokens must come."""
        return [choice for choice in self._choices if not choice.is_over and not self._is_complete(choice)]

    def _deliver(self, out: dict[int, list[OutToken]], now_s: float) -> None:
        for number, tokens in sorted(out.items()):
            self._move(Move.TOKEN)
            self.stats.first_token_s = self.stats.first_token_s or now_s
            self.stats.last_token_s = now_s
            self._actions.append(Deliver(tuple(tokens), number))
            self._set_due(now_s + self._limits.stall_s)

    def _leg_finished(self, number: int, leg: _Leg, finished: LegFinished, now_s: float) -> None:
        leg.is_open = False
        self._actions.append(CloseLeg(number))
        if leg.kind is not LegKind.GENERATE and self._base == 0:
            self.stats.prefill_s = finished.prefill_s
        if leg.kind is LegKind.PREFILL:
            if any(len(choice.emitted) == self._base for choice in self._going_on):
                self._leg_failed(leg, PeerLost("the prefill ended without its token"), now_s)
            return
        for choice in self._going_on:
            if not self._worker_ended(leg, choice, now_s):
                return

    def _worker_ended(self, leg: _Leg, choice: _Choice, now_s: float) -> bool:
        """A leg says that a choice has ended; False if it cannot have, and the attempt is over."""
        # A token of this attempt was said, or its prefill may still say it.
        said = len(choice.emitted) > self._base or bool(choice.pending)
        if not said and not any(other.kind is LegKind.PREFILL and other.is_open for other in self._legs.values()):
            self._leg_failed(leg, PeerLost("the worker ended the request without a token"), now_s)
            return False
        choice.ended_by = leg
        return True

    def _check_ends(self, now_s: float) -> None:
        """End what the journal says has ended. A worker that says so against the journal has lost tokens."""
        for number, choice in enumerate(self._choices):
            if self.is_over:
                return
            if choice.is_over:
                continue
            if self._is_complete(choice):
                self._complete(number)
            elif choice.ended_by is not None and not choice.pending and len(choice.emitted) > self._base:
                self._leg_failed(choice.ended_by, PeerLost("the worker ended the request too early"), now_s)
                return

    def _complete(self, number: int) -> None:
        """A choice's journal is complete."""
        last = self._choices[number].emitted[-1]
        if last not in self._stop_ids:
            self._choice_over(number, FinishReason.LENGTH)
            return
        eos = last in self.sampling.eos_token_ids and last not in self.sampling.stop_token_ids
        self._choice_over(number, FinishReason.STOP, None if eos else last)

    def _choice_over(self, number: int, reason: FinishReason, stop_token_id: int | None = None) -> None:
        choice = self._choices[number]
        choice.is_over = True
        choice.pending.clear()
        if all(other.is_over for other in self._choices):
            self._end(Move.FINISH, reason=reason, stop_token_id=stop_token_id, choice=number)
        else:
            self._move(Move.CHOICE_OVER)
            self._actions.append(End(State.DONE, reason, stop_token_id, None, number, last=False))

    def _enough(self, number: int) -> None:
        choice = self._choices[number]
        if choice.is_over:
            return
        self._choice_over(number, FinishReason.STOP)
        if self.is_over or choice.ended_by is not None:
            return
        for leg_number, leg in self._legs.items():
            if leg.is_open and leg.kind is not LegKind.PREFILL:
                self._actions.append(AbortChoice(leg_number, number))

    # ---- failure ----

    def _leg_lost(self, event: LegLost, now_s: float) -> None:
        leg = self._legs.get(event.leg)
        if leg is None or not leg.is_open:
            return
        leg.is_open = False
        self._actions.append(CloseLeg(event.leg))
        if leg.kind in PREFIX_LEGS:
            self._fetched("failed", now_s)
        else:
            self._leg_failed(leg, event.error, now_s)

    def _leg_failed(self, leg: _Leg, error: HeadraceError, now_s: float, *, told: bool = False) -> None:
        """One leg ended badly: ignore, try again, resume, or give up. `told`: by its worker, which thus lives."""
        going_on = self._going_on
        if leg.kind is LegKind.PREFILL and all(len(choice.emitted) > self._base for choice in going_on):
            # The decode worker alone knows whether it has all.
            return
        if not going_on:
            return
        if error.remedy in (Remedy.CHANGE_REQUEST, Remedy.FIX_CONFIG):
            self._end(Move.GIVE_UP, error=error)
            return
        self._avoid.add(leg.worker.life)
        if told and isinstance(error, PeerError):
            # Between the two of them, whosever fault it is: a dead peer's own session may end a moment later.
            self._avoid.update(other.worker.life for other in self._legs.values())
        for number, other in self._legs.items():
            if other.is_open:
                self._actions.append(AbortLeg(number))
        self._legs.clear()
        for choice in self._choices:
            choice.pending.clear()
            choice.ended_by = None
        self.attempt += 1
        if error.remedy is Remedy.LATER and self.state is not State.STREAMING:
            self._move(Move.DEFER)
            self._replan()
            return
        self._queue_until_s = now_s + self._limits.queue_s
        self._failures += 1
        if not any(choice.emitted for choice in self._choices):
            if self._failures >= self._limits.attempts:
                self._end(Move.GIVE_UP, error=_as_peer_error(error))
                return
            self._move(Move.RETRY)
        else:
            self.stats.num_migrations += 1
            if self.stats.num_migrations > self._limits.migrations:
                self._end(Move.GIVE_UP, error=_as_peer_error(error))
                return
            if self.num_choices > 1:
                self._split()
                return
            self._move(Move.MIGRATE)
        self._replan()

    def _split(self) -> None:
        """Each choice of which more must come goes on by itself."""
        parts = []
        for number, choice in enumerate(self._choices):
            if choice.is_over:
                continue
            if self._is_complete(choice):
                self._complete(number)
            else:
                parts.append((number, self._part(choice)))
        self._move(Move.SPLIT)
        self._actions.append(Split(tuple(parts)))

    def _part(self, choice: _Choice) -> Journey:
        part = Journey(
            prompt=self.prompt,
            # The prompt's scores came before its first token.
            sampling=dataclasses.replace(self.sampling, seed=choice.seed, prompt_logprobs=None),
            deadline_s=self._deadline_s,
            limits=self._limits,
            new_leg=self._new_leg,
            new_transfer=self._new_transfer,
        )
        part._choices[0].emitted = choice.emitted
        part.state = State.MIGRATING if choice.emitted else State.PLANNED
        part.attempt = self.attempt
        part._failures = self._failures
        part._avoid = set(self._avoid)
        part.stats.path = self.stats.path
        part.stats.num_migrations = self.stats.num_migrations
        return part

    def _replan(self) -> None:
        self._actions.append(Place(frozenset(self._avoid)))
        self._set_due(self._queue_until_s)

    # ---- time ----

    def _set_due(self, due_s: float) -> None:
        self._due_s = min(due_s, self._deadline_s)

    def _timer(self, event: Timer, now_s: float) -> None:
        if now_s >= self._deadline_s:
            self._end(Move.CANCEL, error=DeadlineExceeded("the request's deadline has passed"))
        elif now_s < self._due_s:
            return
        elif self._fetching is not None:
            self._fetched("late", now_s)
        elif not self._legs:
            error = QueueFull("no worker had room in time") if event.can_serve else NoWorkers("no worker is ready")
            self._end(Move.SHED, error=error)
        else:
            kind = {leg.kind: leg for leg in self._legs.values()}
            slow = kind.get(LegKind.GENERATE) or kind[LegKind.LOCAL]
            if self.state is State.STREAMING:
                self._leg_failed(slow, PeerLost("the worker makes no progress"), now_s)
            else:
                self._leg_failed(slow, QueueFull("no worker took the request in time"), now_s)

    # ---- the end ----

    def _move(self, move: Move) -> None:
        following = NEXT[self.state].get(move)
        assert following is not None, f"{move} in {self.state}"
        self.state = following

    def _end(
        self,
        move: Move,
        *,
        reason: FinishReason | None = None,
        stop_token_id: int | None = None,
        error: HeadraceError | None = None,
        choice: int = 0,
    ) -> None:
        assert not self.is_over
        self._move(move)
        for number, leg in self._legs.items():
            # A prefill whose pages are taken ends by itself a moment later.
            taken = leg.kind is LegKind.PREFILL and self.state is State.DONE and self.stats.transferred is not None
            if leg.is_open and not taken:
                leg.is_open = False
                self._actions.append(AbortLeg(number))
        self._actions.append(End(self.state, reason, stop_token_id, error, choice))


def _as_peer_error(error: HeadraceError) -> HeadraceError:
    """What is told when the attempts are used up."""
    if isinstance(error, PeerError):
        return error
    return PeerLost(str(error))
