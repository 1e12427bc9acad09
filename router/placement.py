"""Who shall do a request: a pair of workers, or one that does both phases.

One decision without I/O, from what workers said last and what this router sent since. Its cost is in tokens of prefill:
those queued before the request and, by the weights below, those that the worker would have to compute (all but the
prefix that it holds), the blocks that must travel and the sequences that decode already. So a holder of the prefix is
cheap until it is busy, and then the prefix spreads. Knowledge may be stale; that costs time, never truth: capacity is
promised by the worker alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..core.blocks import BLOCK_TOKENS
from ..core.ids import Role
from .block_chains import BlockChains
from .prefix_index import IndexState, PrefixIndex

REFUSAL_PAUSE_S = 0.05
"""A worker that refused for want of room is left alone this long, doubled with each refusal in a row."""
MAX_REFUSAL_PAUSE_S = 1.0
DOUBT_PAUSE_S = 0.25
"""A worker that another one calls lost gets nothing new for this long: if it is, its session ends meanwhile."""

DEFAULT_MAX_SEQS = 64
"""Sequences of a worker that did not say how many it takes."""

COMPUTE_WEIGHT = 2
"""Tokens that the request itself computes count once for it and once for those behind it, whom they delay as much."""
SEQUENCE_TOKENS = 32
"""What one more sequence in a decode batch costs all others, as tokens of prefill."""
SHIP_TOKENS = 4
"""What one block costs to ship: a 64th of computing it, the link of a slow machine."""
FETCH_TOKENS = 128
"""What fetching a prefix costs before its first block has come, as tokens of prefill."""
PREFILL_LEG_TOKENS = 1
"""A leg whose prompt is computed still occupies its worker a little; decides among idle ones."""
PRIOR_S_PER_TOKEN = 1e-3
"""How long a token of prefill takes until the worker has shown it."""
CHECKPOINT_BORDERS = 2
"""At how many last borders of a prompt its prefill leaves a check-point."""


@dataclass(frozen=True)
class WorkerRef:
    """A worker in one of its lives."""

    address: str
    """host:port of its engine service: the key of its session."""
    worker_id: str
    incarnation: int
    peer_address: str

    @property
    def life(self) -> tuple[str, int]:
        return self.worker_id, self.incarnation


@dataclass(frozen=True)
class Fetch:
    """A prefix that another worker's cache holds."""

    holder: WorkerRef
    num_tokens: int
    """Up to a border with a check-point there."""


@dataclass(frozen=True)
class PairPlan:
    """Prefill here, decode there."""

    prefill: WorkerRef
    decode: WorkerRef
    fetch: Fetch | None = None
    """What the prefill worker takes from another one first, instead of computing it."""

    @property
    def workers(self) -> str:
        """For the log."""
        return f"{self.prefill.worker_id}+{self.decode.worker_id}"


@dataclass(frozen=True)
class LocalPlan:
    """Both phases on one worker."""

    worker: WorkerRef

    @property
    def workers(self) -> str:
        """For the log."""
        return self.worker.worker_id


Plan: TypeAlias = PairPlan | LocalPlan


@dataclass(frozen=True, kw_only=True)
class Want:
    """What is to be placed."""

    num_tokens: int = 0
    chains: BlockChains = field(default_factory=BlockChains)
    avoid: frozenset[tuple[str, int]] = frozenset()
    """Lives of workers that are used only when nobody else could be."""


class Reason(Enum):
    """Why it was these workers."""

    LOCAL = "local"
    """The decode worker holds so much of the prompt that it computes the rest itself."""
    HIT = "hit"
    """The worker that computes holds a part of the prompt."""
    FETCH = "fetch"
    """Another worker holds a part of the prompt, which goes to the one that computes."""
    SPREAD = "spread"
    """Another holds a block or more beyond, but would have been dearer."""
    LOAD = "load"
    """Nobody is known to hold anything."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A plan and why."""

    plan: Plan
    reason: Reason
    state: IndexState
    """How the index of the worker that computes stood."""
    hit_tokens: int
    """Prompt tokens that this worker is expected not to compute."""
    computed_tokens: int


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a worker says of itself when a session opens."""

    ref: WorkerRef
    role: Role
    state: str
    fingerprint: bytes
    model: str
    max_model_len: int
    max_prompt_tokens: int
    vocab_size: int
    max_num_seqs: int
    replay_tokens: int = 0
    """At most so many positions before a border are computed again when it has no check-point."""
    device: str = ""
    kv_dtype: str = ""
    version: str = ""


@dataclass(frozen=True, kw_only=True)
class PoolLoad:
    total: int
    free: int
    active: int
    cached: int
    reserved: int
    pinned: int = 0


@dataclass(frozen=True, kw_only=True)
class Load:
    """A worker's load report."""

    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0
    state: str = ""
    steps: int = 0
    landing_held: int = 0
    audit_mismatches: int = 0
    open_transfers: int = 0
    kv_seq: int = 0
    kv_blocks: int = 0
    pools: tuple[tuple[str, PoolLoad], ...] = ()


@dataclass
class Worker:
    """One worker as this router sees it."""

    description: Description
    state: str
    load: Load
    index: PrefixIndex
    own_legs: int = 0
    own_queued_tokens: int = 0
    """Prompt tokens to be computed that this router sent, and whose first token has not come."""
    foreign_tokens: int = 0
    """Queued there beyond what this router had sent, when the worker reported last: other routers' share."""
    foreign_seqs: int = 0
    s_per_token: float = PRIOR_S_PER_TOKEN
    """Of prefill, as of late."""
    refusals: int = 0
    paused_until_s: float = 0.0

    @property
    def ref(self) -> WorkerRef:
        return self.description.ref

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def has_room(self) -> bool:
        return self.own_legs < (self.description.max_num_seqs or DEFAULT_MAX_SEQS)

    @property
    def queued_tokens(self) -> int:
        """A report is up to two seconds old, what this router sent and heard since is not."""
        return self.own_queued_tokens + self.foreign_tokens

    @property
    def decode_tokens(self) -> int:
        """What decoding here costs, whoever decodes."""
        return SEQUENCE_TOKENS * (self.own_legs + self.foreign_seqs)


@dataclass(frozen=True, slots=True)
class _Share:
    """What one worker would have to do with a prompt."""

    num_tokens: int
    """Of the prompt."""
    computed_tokens: int
    """If it computes."""
    lacking_blocks: int
    """If it decodes only."""
    state: IndexState
    border_tokens: int
    """Up to the last check-point of what is here: what another worker could take. 0 unless it is certain."""
    held_blocks: int

    def cost_here(self, worker: Worker) -> int:
        return worker.queued_tokens + COMPUTE_WEIGHT * self.computed_tokens


class Placement:
    """The table of workers and the choice among them."""

    def __init__(self, seed: int | None = None, *, local_prefill_tokens: int = 0, fetch_min_tokens: int = 0) -> None:
        """
        Args:
            local_prefill_tokens: a decode worker that holds a part of a prompt and would compute at most this much of
                it may do so; 0: never.
            fetch_min_tokens: a prefill worker takes a prefix from another one's cache if that spares it at least so
                many tokens; 0: never.
        """
        self._workers: dict[str, Worker] = {}
        self._random = random.Random(seed)
        self._local_prefill_tokens = local_prefill_tokens
        self._fetch_min_tokens = fetch_min_tokens

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    @property
    def fingerprints(self) -> list[bytes]:
        """Of the workers that are ready: which hash chains a prompt needs."""
        return sorted({worker.description.fingerprint for worker in self._workers.values() if worker.is_ready})

    # ---- what is known ----

    def up(self, description: Description) -> PrefixIndex:
        """A session opened; what was known of an earlier life is gone. The index is to be fed by the caller."""
        index = PrefixIndex(description.ref.incarnation)
        load = Load(state=description.state)
        self._workers[description.ref.address] = Worker(description, description.state, load, index)
        return index

    def down(self, address: str) -> None:
        self._workers.pop(address, None)

    def report(self, address: str, load: Load, now_s: float) -> None:
        worker = self._workers.get(address)
        if worker is not None:
            worker.load = load
            worker.foreign_tokens = max(load.queued_tokens - worker.own_queued_tokens, 0)
            worker.foreign_seqs = max(load.running + load.waiting - worker.own_legs, 0)
            worker.state = load.state or worker.state
            worker.index.reported(load.kv_seq, now_s)

    def opened(self, address: str, queued_tokens: int) -> None:
        """A leg was opened; `queued_tokens` of prompt will be computed there."""
        worker = self._workers.get(address)
        if worker is not None:
            worker.own_legs += 1
            worker.own_queued_tokens += queued_tokens

    def computed(self, address: str, queued_tokens: int) -> None:
        """The first token of a leg has come, or will not."""
        worker = self._workers.get(address)
        if worker is not None:
            worker.own_queued_tokens = max(worker.own_queued_tokens - queued_tokens, 0)

    def closed(self, address: str) -> None:
        worker = self._workers.get(address)
        if worker is not None:
            worker.own_legs = max(worker.own_legs - 1, 0)

    def predict(self, address: str, leg: int, chains: BlockChains, *, computes: bool, now_s: float) -> None:
        """A leg that was opened will leave its prompt's blocks; count its tokens first."""
        worker = self._workers.get(address)
        if worker is not None:
            worker.index.predict(
                leg,
                chains.of(worker.description.fingerprint),
                num_checkpoints=CHECKPOINT_BORDERS if computes else 0,
                expected_s=worker.queued_tokens * worker.s_per_token,
                now_s=now_s,
            )

    def settle(self, address: str, leg: int, *, went_well: bool) -> None:
        """A leg is over; whether its prompt came to be there."""
        worker = self._workers.get(address)
        if worker is not None:
            worker.index.settle(leg, went_well=went_well)

    def prefilled(self, address: str, seconds: float, computed_tokens: int) -> None:
        """A leg told how long its prompt took."""
        worker = self._workers.get(address)
        if worker is not None and computed_tokens > 0:
            worker.s_per_token += 0.2 * (seconds / computed_tokens - worker.s_per_token)

    def refused(self, address: str, now_s: float) -> float:
        """A worker had no room; when it may be asked again."""
        worker = self._workers.get(address)
        if worker is None:
            return now_s
        pause = min(REFUSAL_PAUSE_S * 2**worker.refusals, MAX_REFUSAL_PAUSE_S)
        worker.refusals = min(worker.refusals + 1, 10)
        worker.paused_until_s = now_s + pause
        return worker.paused_until_s

    def doubted(self, address: str, now_s: float) -> None:
        """Another worker failed a leg because of its peer, which may be this one."""
        worker = self._workers.get(address)
        if worker is not None:
            worker.paused_until_s = max(worker.paused_until_s, now_s + DOUBT_PAUSE_S)

    def accepted(self, address: str) -> None:
        worker = self._workers.get(address)
        if worker is not None:
            worker.refusals = 0

    # ---- the choice ----

    def decide(self, want: Want, now_s: float) -> Decision | None:
        """The cheapest plan that has room now; None if there is none."""
        ready = [worker for worker in self._workers.values() if worker.is_ready]
        fresh = [worker for worker in ready if worker.ref.life not in want.avoid]
        for candidates in (fresh, ready) if want.avoid else (ready,):
            if self._possible(candidates):
                return self._cheapest(
                    [worker for worker in candidates if worker.has_room and worker.paused_until_s <= now_s],
                    want,
                    now_s,
                )
        return None

    def _possible(self, workers: list[Worker]) -> bool:
        """Whether these could serve a request, room aside."""
        prefills = {w.description.fingerprint for w in workers if w.description.role is not Role.DECODE}
        decodes = {w.description.fingerprint for w in workers if w.description.role is not Role.PREFILL}
        return bool(prefills & decodes)

    def _cheapest(self, workers: list[Worker], want: Want, now_s: float) -> Decision | None:
        decodes = [worker for worker in workers if worker.description.role is not Role.PREFILL]
        if not decodes:
            return None
        shares = {worker.ref.address: self._share(worker, want, now_s) for worker in workers}
        holders = self._holders(workers, shares)
        options: list[tuple[int, float, Plan, Worker]] = []
        for decode in decodes:
            share = shares[decode.ref.address]
            if self._may_compute(decode, share, want):
                cost = share.cost_here(decode) + decode.decode_tokens
                options.append((cost, self._random.random(), LocalPlan(decode.ref), decode))
            for prefill in workers:
                same = prefill.description.fingerprint == decode.description.fingerprint
                if prefill is decode or prefill.description.role is Role.DECODE or not same:
                    continue
                fetch = self._fetch(prefill, holders.get(prefill.description.fingerprint), shares)
                cost = (
                    shares[prefill.ref.address].cost_here(prefill)
                    - (fetch[0] if fetch is not None else 0)
                    + PREFILL_LEG_TOKENS * prefill.own_legs
                    + SHIP_TOKENS * share.lacking_blocks
                    + decode.decode_tokens
                )
                pair = PairPlan(prefill.ref, decode.ref, fetch[1] if fetch is not None else None)
                options.append((cost, self._random.random(), pair, prefill))
        if not options:
            return None
        _, _, plan, computing = min(options, key=_by_cost)
        share = shares[computing.ref.address]
        computed_tokens = share.computed_tokens
        if isinstance(plan, PairPlan) and plan.fetch is not None:
            computed_tokens = want.num_tokens - plan.fetch.num_tokens
        return Decision(
            plan=plan,
            reason=self._reason(workers, shares, plan, computing, want),
            state=share.state,
            hit_tokens=want.num_tokens - computed_tokens,
            computed_tokens=computed_tokens,
        )

    def _holders(self, workers: list[Worker], shares: dict[str, _Share]) -> dict[bytes, Worker]:
        """By fingerprint the worker that has most to give; nothing if nobody is to fetch."""
        found: dict[bytes, Worker] = {}
        for worker in workers if self._fetch_min_tokens else ():
            best = found.setdefault(worker.description.fingerprint, worker)
            if shares[worker.ref.address].border_tokens > shares[best.ref.address].border_tokens:
                found[worker.description.fingerprint] = worker
        return found

    def _fetch(self, worker: Worker, holder: Worker | None, shares: dict[str, _Share]) -> tuple[int, Fetch] | None:
        """What this worker had better take from the holder than compute; and what that spares. The holder itself
        begins at its own border, so that nothing would be spared."""
        if holder is None:
            return None
        own = shares[worker.ref.address]
        border_tokens = shares[holder.ref.address].border_tokens
        spared = own.computed_tokens - (own.num_tokens - border_tokens)
        if spared < self._fetch_min_tokens:
            return None
        ship_tokens = SHIP_TOKENS * max(border_tokens // BLOCK_TOKENS - own.held_blocks, 0)
        gain = COMPUTE_WEIGHT * spared - ship_tokens - FETCH_TOKENS
        return (gain, Fetch(holder.ref, border_tokens)) if gain > 0 else None

    def _share(self, worker: Worker, want: Want, now_s: float) -> _Share:
        """What a hit spares: one token is always computed, and the window behind it must be there or be redone."""
        chain = want.chains.of(worker.description.fingerprint)
        replay_tokens = worker.description.replay_tokens
        hit = worker.index.hit(
            chain, max(want.num_tokens - 1, 0) // BLOCK_TOKENS, now_s, depth=replay_tokens // BLOCK_TOKENS + 1
        )
        start = max(hit.checkpoint * BLOCK_TOKENS, hit.blocks * BLOCK_TOKENS - replay_tokens)
        lacking = -(-want.num_tokens // BLOCK_TOKENS) - int(hit.blocks * hit.credit)
        certain = hit.credit == 1.0 and hit.checkpoint <= hit.confirmed
        return _Share(
            num_tokens=want.num_tokens,
            computed_tokens=want.num_tokens - int(start * hit.credit),
            lacking_blocks=lacking,
            state=hit.state,
            border_tokens=hit.checkpoint * BLOCK_TOKENS if certain else 0,
            held_blocks=hit.blocks,
        )

    def _may_compute(self, decode: Worker, share: _Share, want: Want) -> bool:
        """A worker of both roles always; a decode worker only what is short, and goes on from what it holds."""
        if decode.description.role is Role.BOTH:
            return True
        return share.computed_tokens < want.num_tokens and share.computed_tokens <= self._local_prefill_tokens

    def _reason(
        self, workers: list[Worker], shares: dict[str, _Share], plan: Plan, computing: Worker, want: Want
    ) -> Reason:
        computed_tokens = shares[computing.ref.address].computed_tokens
        if isinstance(plan, LocalPlan) and computing.description.role is Role.DECODE:
            return Reason.LOCAL
        if isinstance(plan, PairPlan) and plan.fetch is not None:
            return Reason.FETCH
        least = min(
            shares[worker.ref.address].computed_tokens
            for worker in workers
            if worker.description.role is not Role.DECODE
        )
        if computed_tokens - least >= BLOCK_TOKENS:
            return Reason.SPREAD
        return Reason.HIT if computed_tokens < want.num_tokens else Reason.LOAD

    # ---- what the cluster can do ----

    @property
    def can_serve(self) -> bool:
        """Whether a request could be placed, room aside."""
        return not self.not_ready_reasons()

    def not_ready_reasons(self) -> list[str]:
        """Why nothing can be placed; empty when something can."""
        if not self._workers:
            return ["no worker is connected"]
        ready = [worker for worker in self._workers.values() if worker.is_ready]
        if self._possible(ready):
            return []
        reasons = [
            f"worker {worker.ref.worker_id} is {worker.state}"
            for worker in self._workers.values()
            if not worker.is_ready
        ]
        prefills = [worker for worker in ready if worker.description.role is not Role.DECODE]
        decodes = [worker for worker in ready if worker.description.role is not Role.PREFILL]
        if not prefills:
            reasons.append("no prefill worker is ready")
        if not decodes:
            reasons.append("no decode worker is ready")
        if prefills and decodes:
            reasons.append("no prefill and decode workers have equal fingerprints")
        return reasons

    @property
    def max_model_len(self) -> int:
        """The longest sequence that some worker takes; 0 when unknown."""
        return max((worker.description.max_model_len for worker in self._workers.values()), default=0)

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that some worker's pools can hold at all; 0 when unknown."""
        return max((worker.description.max_prompt_tokens for worker in self._workers.values()), default=0)


def _by_cost(option: tuple[int, float, Plan, Worker]) -> tuple[int, float]:
    """Chance among equals."""
    return option[0], option[1]
