"""Who shall do a request: a pair of workers, or one that does both phases.

Decides without I/O from what workers said last and what this router sent since: least queued prompt tokens for the
prefill, fewest sequences for the decode, chance among equals. Knowledge may be stale; that costs time, never truth,
since capacity is promised by the worker alone. The cost functions are the part that is meant to be replaced.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TypeAlias

from ..core.ids import Role

REFUSAL_PAUSE_S = 0.05
"""A worker that refused for want of room is left alone this long, doubled with each refusal in a row."""
MAX_REFUSAL_PAUSE_S = 1.0

DEFAULT_MAX_SEQS = 64
"""Sequences of a worker that did not say how many it takes."""


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
class PairPlan:
    """Prefill here, decode there."""

    prefill: WorkerRef
    decode: WorkerRef


@dataclass(frozen=True)
class LocalPlan:
    """Both phases on one worker."""

    worker: WorkerRef


Plan: TypeAlias = PairPlan | LocalPlan


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
    pools: tuple[tuple[str, PoolLoad], ...] = ()


@dataclass
class Worker:
    """One worker as this router sees it."""

    description: Description
    state: str
    load: Load
    own_legs: int = 0
    own_queued_tokens: int = 0
    """Prompt tokens sent to it by this router whose first token has not come."""
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
    def prefill_cost(self) -> tuple[float, float]:
        return max(self.load.queued_tokens, self.own_queued_tokens), self.own_legs

    @property
    def decode_cost(self) -> tuple[float, float]:
        return max(self.load.running + self.load.waiting, self.own_legs), self.own_queued_tokens


class Placement:
    """The table of workers and the choice among them."""

    def __init__(self, seed: int | None = None) -> None:
        self._workers: dict[str, Worker] = {}
        self._random = random.Random(seed)

    @property
    def workers(self) -> list[Worker]:
        return list(self._workers.values())

    # ---- what is known ----

    def up(self, description: Description) -> None:
        """A session opened; what was known of an earlier life is gone."""
        self._workers[description.ref.address] = Worker(description, description.state, Load(state=description.state))

    def down(self, address: str) -> None:
        self._workers.pop(address, None)

    def report(self, address: str, load: Load) -> None:
        worker = self._workers.get(address)
        if worker is not None:
            worker.load = load
            worker.state = load.state or worker.state

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

    def refused(self, address: str, now_s: float) -> float:
        """A worker had no room; when it may be asked again."""
        worker = self._workers.get(address)
        if worker is None:
            return now_s
        pause = min(REFUSAL_PAUSE_S * 2**worker.refusals, MAX_REFUSAL_PAUSE_S)
        worker.refusals = min(worker.refusals + 1, 10)
        worker.paused_until_s = now_s + pause
        return worker.paused_until_s

    def accepted(self, address: str) -> None:
        worker = self._workers.get(address)
        if worker is not None:
            worker.refusals = 0

    # ---- the choice ----

    def pick(self, avoid: frozenset[tuple[str, int]], now_s: float) -> Plan | None:
        """The cheapest plan that has room now; workers to avoid are used only when nobody else could be."""
        ready = [worker for worker in self._workers.values() if worker.is_ready]
        fresh = [worker for worker in ready if worker.ref.life not in avoid]
        for candidates in (fresh, ready) if avoid else (ready,):
            if self._possible(candidates):
                plan = self._cheapest(
                    [worker for worker in candidates if worker.has_room and worker.paused_until_s <= now_s]
                )
                return plan
        return None

    def _possible(self, workers: list[Worker]) -> bool:
        """Whether these could serve a request, room aside."""
        prefills = {w.description.fingerprint for w in workers if w.description.role is not Role.DECODE}
        decodes = {w.description.fingerprint for w in workers if w.description.role is not Role.PREFILL}
        return bool(prefills & decodes)

    def _cheapest(self, workers: list[Worker]) -> Plan | None:
        best: tuple[tuple[float, float, float, float, float], Plan] | None = None
        for decode in workers:
            if decode.description.role is Role.PREFILL:
                continue
            if decode.description.role is Role.BOTH:
                cost = (*decode.decode_cost, *decode.prefill_cost, self._random.random())
                if best is None or cost < best[0]:
                    best = cost, LocalPlan(decode.ref)
            for prefill in workers:
                same = prefill.description.fingerprint == decode.description.fingerprint
                if prefill is decode or prefill.description.role is Role.DECODE or not same:
                    continue
                cost = (*decode.decode_cost, *prefill.prefill_cost, self._random.random())
                if best is None or cost < best[0]:
                    best = cost, PairPlan(prefill.ref, decode.ref)
        return None if best is None else best[1]

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
