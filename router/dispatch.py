"""The shell around the decisions: sessions, the waiting queue, timers, and the sequences in flight.

Turns what sessions hear into journey events and journey actions into messages. Everything runs on the event loop's
thread; nothing here waits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import itertools
import logging
from collections import defaultdict, deque
from dataclasses import dataclass, field

from ..config.tree import RouterSection
from ..core.clock import Clock
from ..core.errors import Draining, HeadraceError, NoWorkers, PeerError, PeerLost, QueueFull
from ..core.ids import new_incarnation
from ..core.sampling import SamplingParams
from ..proto.engine_convert import error_code
from ..proto.internal.v1 import engine_pb2 as pb
from . import journey as j
from .block_chains import BlockChains
from .metrics import RouterMetrics
from .placement import Decision, Description, Load, PairPlan, Placement, Want
from .prefix_index import IndexState, PrefixIndex
from .session import SessionTimes, WorkerSession, submit_message

log = logging.getLogger("headrace.router.dispatch")


@dataclass(frozen=True)
class Output:
    """News of one choice: tokens in order, scored prompt tokens, or the end."""

    index: int
    tokens: tuple[j.OutToken, ...] = ()
    scored: tuple[j.OutToken, ...] = ()
    end: j.End | None = None


class Inbox:
    """What has come for one request and was not taken yet. Bounded by the request's own max_tokens."""

    def __init__(self) -> None:
        self._items: deque[Output] = deque()
        self._wake = asyncio.Event()

    def put(self, item: Output) -> None:
        self._items.append(item)
        self._wake.set()

    async def take(self, timeout_s: float) -> list[Output]:
        """All that is here, at least one; empty after `timeout_s` of silence."""
        if not self._items:
            self._wake.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._wake.wait()
            except TimeoutError:
                return []
        items = list(self._items)
        self._items.clear()
        return items


@dataclass
class _Pace:
    """When one choice's tokens came."""

    last_token_s: float | None = None
    num_tokens: int = 0


@dataclass
class Sequence:
    """A journey, and who hears of it."""

    journey: j.Journey
    index: int
    """Under which its first choice is known; the others follow."""
    inbox: Inbox
    request_id: str
    cache_salt: str
    chains: BlockChains
    """Of the prompt, and of what was generated before the stream was resumed."""
    priority: int
    traceparent: str
    arrived_s: float
    order: tuple[int, int]
    """By arrival; then by choice, of the parts of a journey that split."""
    parts: dict[int, Sequence] = field(default_factory=dict)
    """By choice: what goes on after the journey split."""
    is_part: bool = False
    paces: defaultdict[int, _Pace] = field(default_factory=lambda: defaultdict(_Pace))
    """By choice."""
    decision: Decision | None = None
    """The last one."""
    is_waiting: bool = False
    timer: asyncio.TimerHandle | None = None
    armed_s: float = 0.0

    @property
    def num_tokens(self) -> int:
        return sum(pace.num_tokens for pace in self.paces.values())


@dataclass
class _OpenLeg:
    """A leg that a worker knows of."""

    sequence: Sequence
    address: str
    kind: j.LegKind
    queued_tokens: int
    """Prompt tokens counted at the worker until its first word of them."""
    hit_tokens: int | None = None
    """Expected by the placement; None if nothing is computed."""
    is_computed: bool = False
    """The prompt's blocks came to be there, whatever happens later."""


class Dispatcher:
    """All sequences of this process, and the sessions they travel over."""

    def __init__(
        self,
        section: RouterSection,
        *,
        clock: Clock,
        metrics: RouterMetrics,
        times: SessionTimes | None = None,
        seed: int | None = None,
    ) -> None:
        self.placement = Placement(
            seed, local_prefill_tokens=section.local_prefill_tokens, fetch_min_tokens=section.fetch_min_tokens
        )
        self.metrics = metrics
        self._section = section
        self._clock = clock
        self._limits = j.JourneyLimits(
            attempts=section.attempts, queue_s=section.queue_timeout_s, reserve_s=section.queue_timeout_s
        )
        incarnation = new_incarnation()
        self._sessions = {
            address: WorkerSession(
                address,
                self,
                router_id=f"router-{incarnation:016x}",
                router_incarnation=incarnation,
                times=times or SessionTimes(),
                clock=clock,
                seed=seed,
            )
            for address in section.workers
        }
        self._tasks: list[asyncio.Task[None]] = []
        self._leg_numbers = itertools.count(1)
        self._orders = itertools.count()
        self._legs: dict[int, _OpenLeg] = {}
        self._num_waiting = 0
        self._alive: dict[tuple[int, int], Sequence] = {}
        self._queue: list[tuple[int, tuple[int, int], Sequence, frozenset[tuple[str, int]]]] = []
        """Heap by priority and arrival; ended sequences are skipped when they come up."""
        self._pump_timer: asyncio.TimerHandle | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    # ---- life ----

    def start(self) -> None:
        self._tasks = [asyncio.create_task(session.run()) for session in self._sessions.values()]

    async def stop(self) -> None:
        """End all sequences, then all sessions."""
        self.end_all(Draining("the router is leaving"))
        # Aborts leave before the sessions do.
        await asyncio.sleep(0.05)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._pump_timer is not None:
            self._pump_timer.cancel()

    async def clear_caches(self) -> None:
        """Have every worker forget its prefix cache.

        Raises:
            PeerLost: one of them did not answer; the others have.
        """
        calls = (session.clear_cache() for session in self._sessions.values())
        for outcome in await asyncio.gather(*calls, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def wait_idle(self, budget_s: float) -> bool:
        """Until no sequence is alive; False if the budget was spent first."""
        try:
            async with asyncio.timeout(budget_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def end_all(self, error: HeadraceError) -> None:
        for sequence in list(self._alive.values()):
            self._handle(sequence, j.Cancel(error))

    # ---- counts ----

    @property
    def num_alive(self) -> int:
        return len(self._alive)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    # ---- from the edge ----

    def check_capacity(self, num_sequences: int) -> None:
        """Refuse before anything is allocated.

        Raises:
            NoWorkers: nothing could serve it.
            QueueFull: the queue has no place for so many.
        """
        if not self.placement.can_serve:
            self.metrics.rejections.labels("no_workers").inc()
            raise NoWorkers("no workers are ready: " + "; ".join(self.placement.not_ready_reasons()))
        if self.num_waiting + num_sequences > self._section.max_queue:
            self.metrics.rejections.labels("queue_full").inc()
            raise QueueFull("too many requests are waiting for a worker")

    def submit(
        self,
        *,
        index: int,
        inbox: Inbox,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        deadline_s: float,
        arrived_s: float,
        request_id: str,
        cache_salt: str = "",
        chains: BlockChains | None = None,
        priority: int = 0,
        traceparent: str = "",
        seeds: tuple[int, ...] = (),
    ) -> Sequence:
        """Send one prompt on its way. What comes of its choices, one for each of `seeds`, comes to `inbox` under
        `index` and the numbers after it; without seeds there is one."""
        journey = j.Journey(
            prompt=prompt,
            sampling=sampling,
            deadline_s=deadline_s,
            limits=self._limits,
            new_leg=lambda: next(self._leg_numbers),
            seeds=seeds,
        )
        sequence = Sequence(
            journey=journey,
            index=index,
            inbox=inbox,
            request_id=request_id,
            cache_salt=cache_salt,
            chains=chains if chains is not None else BlockChains(cache_salt),
            priority=priority,
            traceparent=traceparent,
            arrived_s=arrived_s,
            order=(next(self._orders), 0),
        )
        self._start(sequence)
        return sequence

    def _start(self, sequence: Sequence) -> None:
        self._alive[sequence.order] = sequence
        self._idle.clear()
        self._do(sequence, sequence.journey.start(self._clock.now_s()))

    def enough(self, sequence: Sequence, choice: int) -> None:
        """The edge found a stop string in a choice."""
        part = sequence.parts.get(choice)
        if part is not None:
            self._handle(part, j.Enough())
        else:
            self._handle(sequence, j.Enough(choice))
        self._pump()

    def cancel(self, sequence: Sequence, error: HeadraceError | None = None) -> None:
        """The client is gone."""
        for going in (sequence, *sequence.parts.values()):
            if not going.journey.is_over:
                self.metrics.cancellations.labels(going.journey.state.value).inc()
                self._handle(going, j.Cancel(error) if error is not None else j.Cancel())
                self._pump()

    # ---- from sessions ----

    def worker_up(self, description: Description) -> PrefixIndex:
        index = self.placement.up(description)
        self._pump()
        return index

    def worker_down(self, address: str, error: HeadraceError) -> None:
        self.placement.down(address)
        for number, leg in list(self._legs.items()):
            if leg.address == address and number in self._legs:
                self.metrics.leg_failures.labels(leg.kind.value, error_code(error)).inc()
                self._handle(leg.sequence, j.LegLost(number, error))
                self._forget(number)
        self._pump()

    def worker_load(self, address: str, load: Load) -> None:
        self.placement.report(address, load, self._clock.now_s())
        self._pump()

    def worker_said(self, address: str, reports: list[tuple[int, j.LegReport]]) -> None:
        for number, report in reports:
            leg = self._legs.get(number)
            if leg is None or leg.address != address:
                self.metrics.stale.inc(len(report.tokens))
                continue
            self._learn(leg, report)
            if report.reserved_tokens is not None or report.tokens:
                self.placement.accepted(address)
            if report.failed is not None:
                self.metrics.leg_failures.labels(leg.kind.value, error_code(report.failed)).inc()
                if isinstance(report.failed, PeerError):
                    self._doubt_peers(leg)
            if report.transferred is not None:
                self._count_transfer(report.transferred)
            self._handle(leg.sequence, j.LegSaid(number, report))
            if report.finished is not None or report.failed is not None:
                # A leg of an earlier attempt, or of a sequence that is over: the journey has no more to say of it.
                self._forget(number)
        self._pump()

    def _doubt_peers(self, failed: _OpenLeg) -> None:
        """A worker lives and speaks; whom it worked with may not, and its own session ends a moment later."""
        for leg in self._legs.values():
            if leg.sequence is failed.sequence and leg.address != failed.address:
                self.placement.doubted(leg.address, self._clock.now_s())

    # ---- decisions into deeds ----

    def _handle(self, sequence: Sequence, event: j.Event) -> None:
        journey = sequence.journey
        before = journey.attempt, journey.stats.num_migrations
        num_fetches = len(journey.stats.fetches)
        actions = journey.handle(event, self._clock.now_s())
        for outcome in journey.stats.fetches[num_fetches:]:
            self.metrics.fetches.labels(outcome).inc()
            log.debug("event=prefix_fetch request_id=%s outcome=%s", sequence.request_id, outcome)
        if before[0] != journey.attempt:
            self._count_retry(sequence, event, migrated=before[1] != journey.stats.num_migrations)
        self._do(sequence, actions)

    def _do(self, sequence: Sequence, actions: list[j.Action]) -> None:
        for action in actions:
            if isinstance(action, j.Deliver):
                self._deliver(sequence, action)
            elif isinstance(action, j.OpenLeg):
                self._open(sequence, action)
            elif isinstance(action, j.AbortLeg):
                self._abort(action.leg)
            elif isinstance(action, j.AbortChoice):
                self._abort_choice(action)
            elif isinstance(action, j.Split):
                self._split(sequence, action)
            elif isinstance(action, j.CloseLeg):
                self._close(action)
            elif isinstance(action, j.Score):
                sequence.inbox.put(Output(sequence.index, scored=action.tokens))
            elif isinstance(action, j.Place):
                self._enqueue(sequence, action)
            else:
                self._end(sequence, action)
        self._arm(sequence)

    def _enqueue(self, sequence: Sequence, action: j.Place) -> None:
        self._set_waiting(sequence, True)
        journey = sequence.journey
        if journey.emitted:
            sequence.chains = sequence.chains.extended((*journey.prompt, *journey.emitted))
        heapq.heappush(self._queue, (sequence.priority, sequence.order, sequence, action.avoid))
        # Not from here: the journey may have more to say in this very step.
        asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        """Place those who wait, in order, as long as there is room."""
        while self._queue:
            _, _, sequence, avoid = self._queue[0]
            if sequence.is_waiting:
                now_s = self._clock.now_s()
                journey = sequence.journey
                # Scores of a prompt need every position of it computed: what is held helps nobody.
                computes_all = journey.sampling.prompt_logprobs is not None and not journey.emitted
                want = Want(
                    num_tokens=len(journey.prompt) + len(journey.emitted),
                    chains=BlockChains() if computes_all else sequence.chains,
                    avoid=avoid,
                )
                decision = self.placement.decide(want, now_s)
                if decision is None:
                    self._pump_later(now_s)
                    return
            heapq.heappop(self._queue)
            if sequence.is_waiting:
                assert decision is not None
                self._set_waiting(sequence, False)
                sequence.decision = decision
                self._count_decision(sequence, decision)
                self._handle(sequence, j.Placed(decision.plan))

    def _pump_later(self, now_s: float) -> None:
        """A pause after a refusal ends by itself; all else that makes room is heard."""
        until_s = min((w.paused_until_s for w in self.placement.workers if w.paused_until_s > now_s), default=None)
        if until_s is None:
            return
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        self._pump_timer = asyncio.get_running_loop().call_later(until_s - now_s + 0.001, self._pump)

    def _set_waiting(self, sequence: Sequence, waiting: bool) -> None:
        self._num_waiting += waiting - sequence.is_waiting
        sequence.is_waiting = waiting

    def _open(self, sequence: Sequence, action: j.OpenLeg) -> None:
        address = action.worker.address
        decision = sequence.decision
        assert decision is not None
        leg = _OpenLeg(sequence, address, action.kind, 0)
        if action.kind.computes:
            leg.queued_tokens, leg.hit_tokens = decision.computed_tokens, decision.hit_tokens
        self._legs[action.leg] = leg
        self.placement.opened(address, leg.queued_tokens)
        if action.kind not in j.PREFIX_LEGS:
            self.placement.predict(
                address, action.leg, sequence.chains, computes=action.kind.computes, now_s=self._clock.now_s()
            )
        submit = submit_message(
            action,
            request_id=sequence.request_id,
            cache_salt=sequence.cache_salt,
            priority=sequence.priority,
            traceparent=sequence.traceparent,
        )
        if not self._sessions[address].send(pb.RouterMessage(submit=submit)):
            lost = j.LegLost(action.leg, PeerLost("the worker is not connected"))
            asyncio.get_running_loop().call_soon(self._lose, sequence, lost)

    def _lose(self, sequence: Sequence, lost: j.LegLost) -> None:
        self._handle(sequence, lost)
        self._forget(lost.leg)
        self._pump()

    def _abort(self, number: int) -> None:
        leg = self._legs.get(number)
        if leg is not None:
            self._sessions[leg.address].send(pb.RouterMessage(abort=pb.Abort(leg=number)))
            self._forget(number)

    def _abort_choice(self, action: j.AbortChoice) -> None:
        leg = self._legs.get(action.leg)
        if leg is not None:
            self._sessions[leg.address].send(pb.RouterMessage(abort=pb.Abort(leg=action.leg, choice=action.choice)))

    def _split(self, sequence: Sequence, action: j.Split) -> None:
        """The journey has ended; its choices go on, in its place in the queue."""
        for choice, journey in action.parts:
            part = dataclasses.replace(
                sequence,
                journey=journey,
                index=sequence.index + choice,
                order=(sequence.order[0], 1 + choice),
                is_part=True,
                paces=defaultdict(_Pace, {0: sequence.paces[choice]}),
                parts={},
                timer=None,
            )
            sequence.parts[choice] = part
            self._start(part)
        self._over(sequence)

    def _close(self, action: j.CloseLeg) -> None:
        leg = self._legs.get(action.leg)
        if leg is not None and action.refused:
            self.placement.refused(leg.address, self._clock.now_s())
        self._forget(action.leg)

    def _forget(self, number: int) -> None:
        leg = self._legs.pop(number, None)
        if leg is not None:
            self._computed(leg)
            self.placement.closed(leg.address)
            self.placement.settle(leg.address, number, went_well=leg.is_computed)

    def _learn(self, leg: _OpenLeg, report: j.LegReport) -> None:
        """What a report says of the worker, whoever hears of the leg."""
        if report.tokens:
            self._computed(leg)
        if report.started is not None and leg.hit_tokens is not None:
            actual = report.started[0]
            self.metrics.hit_error.observe(leg.hit_tokens - actual)
            self.metrics.hit_tokens.labels("predicted").inc(leg.hit_tokens)
            self.metrics.hit_tokens.labels("actual").inc(actual)
            if leg.hit_tokens > actual:
                log.debug(
                    "event=hit_missed worker=%s request_id=%s predicted=%d actual=%d",
                    leg.address, leg.sequence.request_id, leg.hit_tokens, actual,
                )  # fmt: skip
        if report.transferred is not None or (report.tokens and leg.kind.computes):
            leg.is_computed = True
        if report.finished is not None:
            self.placement.prefilled(leg.address, report.finished.prefill_s, report.finished.computed_tokens)

    def _computed(self, leg: _OpenLeg) -> None:
        if leg.queued_tokens:
            self.placement.computed(leg.address, leg.queued_tokens)
            leg.queued_tokens = 0

    def _deliver(self, sequence: Sequence, action: j.Deliver) -> None:
        now_s = self._clock.now_s()
        path = sequence.journey.stats.path
        count = len(action.tokens)
        gaps, gap_s = count, 0.0
        if not sequence.num_tokens:
            self.metrics.ttft.labels(path).observe(now_s - sequence.arrived_s)
        pace = sequence.paces[action.choice]
        if pace.last_token_s is None:
            gaps -= 1
        else:
            gap_s = (now_s - pace.last_token_s) / count
        if pace.num_tokens <= 1 < pace.num_tokens + count:
            self.metrics.second_token.labels(path).observe(gap_s)
        for _ in range(gaps):
            self.metrics.itl.labels(path).observe(gap_s)
        pace.last_token_s = now_s
        pace.num_tokens += count
        self.metrics.generation_tokens.inc(count)
        sequence.inbox.put(Output(sequence.index + action.choice, tokens=action.tokens))

    def _over(self, sequence: Sequence) -> None:
        """The journey has ended: what it costs is counted, that of the prompt with the journey that computed it."""
        self._set_waiting(sequence, False)
        self._alive.pop(sequence.order, None)
        if not self._alive:
            self._idle.set()
        stats = sequence.journey.stats
        self.metrics.stale.inc(stats.stale_tokens)
        if sequence.is_part:
            return
        if stats.placed_s is not None:
            self.metrics.queue_time.observe(stats.placed_s - sequence.arrived_s)
        if stats.prefill_s:
            self.metrics.prefill_time.labels(stats.path).observe(stats.prefill_s)
        self.metrics.cached_tokens.inc(stats.cached_tokens)

    def _end(self, sequence: Sequence, action: j.End) -> None:
        journey = sequence.journey
        if action.reason is not None:
            self.metrics.finished.labels(action.reason.value).inc()
        if not action.last:
            sequence.inbox.put(Output(sequence.index + action.choice, end=action))
            return
        self._over(sequence)
        now_s = self._clock.now_s()
        self.metrics.e2e.labels(journey.stats.path).observe(now_s - sequence.arrived_s)
        if action.state is j.State.SHED and action.error is not None:
            self.metrics.rejections.labels(error_code(action.error)).inc()
        log.debug(
            "event=sequence_end request_id=%s choice=%d state=%s tokens=%d attempts=%d error=%r",
            sequence.request_id, sequence.index, action.state.value, sequence.num_tokens, journey.attempt + 1,
            str(action.error) if action.error is not None else None,
        )  # fmt: skip
        # An error is told of every choice: those that have ended do not hear it.
        choices = range(journey.num_choices) if action.error is not None else (action.choice,)
        for choice in choices:
            sequence.inbox.put(Output(sequence.index + choice, end=action))

    # ---- time ----

    def _arm(self, sequence: Sequence) -> None:
        """Have a timer that fires no later than the journey needs; it may fire early and then does nothing."""
        journey = sequence.journey
        if journey.is_over:
            if sequence.timer is not None:
                sequence.timer.cancel()
                sequence.timer = None
            return
        if sequence.timer is not None:
            if sequence.armed_s <= journey.due_s:
                return
            sequence.timer.cancel()
        sequence.armed_s = journey.due_s
        delay_s = max(journey.due_s - self._clock.now_s(), 0.0)
        sequence.timer = asyncio.get_running_loop().call_later(delay_s, self._fire, sequence)

    def _fire(self, sequence: Sequence) -> None:
        sequence.timer = None
        self._handle(sequence, j.Timer(can_serve=self.placement.can_serve))
        self._pump()

    # ---- what is counted ----

    def refresh_gauges(self) -> None:
        """Bring the gauges up to date; called before they are read."""
        self.metrics.running.labels("router").set(self.num_alive - self.num_waiting)
        self.metrics.waiting.labels("router").set(self.num_waiting)
        self.metrics.workers.clear()
        for worker in self.placement.workers:
            self.metrics.workers.labels(worker.description.role.value, worker.state).inc()
        indexes = [worker.index for worker in self.placement.workers]
        for state in IndexState:
            self.metrics.index_state.labels(state.value).set(sum(index.state is state for index in indexes))
        self.metrics.index_blocks.labels("confirmed").set(sum(index.num_blocks for index in indexes))
        self.metrics.index_blocks.labels("predicted").set(sum(index.num_predicted for index in indexes))

    def _count_decision(self, sequence: Sequence, decision: Decision) -> None:
        path = "pair" if isinstance(decision.plan, PairPlan) else "local"
        self.metrics.decisions.labels(decision.reason.value, decision.state.value, path).inc()
        log.debug(
            "event=placed request_id=%s choice=%d attempt=%d path=%s reason=%s index=%s hit=%d compute=%d plan=%s",
            sequence.request_id, sequence.index, sequence.journey.attempt, path, decision.reason.value,
            decision.state.value, decision.hit_tokens, decision.computed_tokens, decision.plan.workers,
        )  # fmt: skip

    def _count_transfer(self, transferred: j.Transferred) -> None:
        transport = transferred.transport
        self.metrics.transfer_time.labels(transport).observe(transferred.seconds)
        self.metrics.transfer_tail.labels(transport).observe(transferred.tail_seconds)
        self.metrics.transfer_bytes.labels(transport).inc(transferred.num_bytes)
        self.metrics.transfer_pages.labels(transport).inc(transferred.num_pages)

    def _count_retry(self, sequence: Sequence, event: j.Event, migrated: bool) -> None:
        error: BaseException | None = None
        if isinstance(event, j.LegLost):
            error = event.error
        elif isinstance(event, j.LegSaid):
            error = event.report.failed
        reason = error_code(error) if error is not None else "stalled"
        (self.metrics.migrations if migrated else self.metrics.retries).labels(reason).inc()
        log.info(
            "event=%s request_id=%s choice=%d attempt=%d tokens=%d reason=%s",
            "migrate" if migrated else "retry", sequence.request_id, sequence.index, sequence.journey.attempt,
            sequence.num_tokens, reason,
        )  # fmt: skip
