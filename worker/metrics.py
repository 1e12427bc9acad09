"""What a worker counts, under the names of the specification. Snapshots are read when scraped; sums are kept here.

Written from the event loop, read from the status thread; prometheus_client locks each value.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..core.errors import HeadraceError
from ..engine.api import EngineLoad, LegKind
from ..transfer.api import LinkDirection, LinkPhase, TransferCounts, TransferStats
from .leg import Failed, Finished, LegOrder, SaidReserved, SaidStarted, SaidToken, SaidTransferred, Word
from .lifecycle import WorkerState

logger = logging.getLogger(__name__)

_TRANSFER_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_PHASE_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


@dataclass(frozen=True, kw_only=True)
class Snapshots:
    """Where the numbers of the moment come from; each may be called in any thread."""

    state: Callable[[], WorkerState]
    engine: Callable[[], EngineLoad | None]
    transfer: Callable[[], TransferCounts | None]
    num_legs: Callable[[], int]
    stalled_s: Callable[[], float]
    num_cached_blocks: Callable[[], int]


class WorkerMetrics:
    """The registry of one worker, and the desk's witness."""

    def __init__(self, *, role: str, snapshots: Snapshots) -> None:
        self.registry = CollectorRegistry()
        self._legs = Counter(
            "headrace:legs", "Legs that said their terminal word", ["kind", "outcome"], registry=self.registry
        )
        self._opened = Counter("headrace:legs_opened", "Legs opened", ["kind"], registry=self.registry)
        self._refused = Counter(
            "headrace:legs_refused", "Legs that were never opened", ["reason"], registry=self.registry
        )
        self._tokens = Counter("headrace:generation_tokens", "Output tokens sent", registry=self.registry)
        self._computed = Counter("headrace:prompt_tokens", "Prompt tokens computed", registry=self.registry)
        self._queries = Counter(
            "headrace:prefix_cache_queries", "Prompt tokens looked up", ["kind"], registry=self.registry
        )
        self._hits = Counter(
            "headrace:prefix_cache_hits", "Prompt tokens that were found", ["kind"], registry=self.registry
        )
        self._sources = Counter(
            "headrace:prompt_tokens_by_source",
            "Prompt tokens by where their cache entries came from",
            ["source"],
            registry=self.registry,
        )
        self._alarms = Counter(
            "headrace:leg_alarms", "Legs whose pages were not let go in time", registry=self.registry
        )
        self._queued = Histogram(
            "headrace:request_queue_time_seconds",
            "Leg opened to first chunk",
            registry=self.registry,
            buckets=_PHASE_S,
        )
        self._prefill = Histogram(
            "headrace:request_prefill_time_seconds",
            "First chunk to first token",
            registry=self.registry,
            buckets=_PHASE_S,
        )
        self._transfer = Histogram(
            "headrace:kv_transfer_time_seconds",
            "Pull to the end of a transfer",
            ["direction"],
            registry=self.registry,
            buckets=_TRANSFER_S,
        )
        self._tail = Histogram(
            "headrace:kv_transfer_tail_seconds",
            "Complete to the end of a transfer",
            ["direction"],
            registry=self.registry,
            buckets=_TRANSFER_S,
        )
        self.registry.register(_Moment(role, snapshots))

    # ---- the desk's witness ----

    def leg_refused(self, error: HeadraceError) -> None:
        self._refused.labels(error.reason).inc()

    def leg_opened(self, order: LegOrder) -> None:
        self._opened.labels(order.kind.value).inc()

    def leg_said(self, order: LegOrder, word: Word) -> None:
        match word:
            case SaidToken():
                self._tokens.inc()
            case SaidStarted(cached_tokens, queued_s):
                self._queued.observe(queued_s)
                self._looked_up(order, cached_tokens)
                self._sources.labels("local").inc(cached_tokens)
                self._sources.labels("computed").inc(len(order.prompt) - cached_tokens)
            case SaidReserved(held_tokens) if order.kind is LegKind.GENERATE:
                self._looked_up(order, held_tokens)
            case SaidTransferred(stats) if order.kind is LegKind.FETCH:
                # The prompt's own leg says where its tokens came from.
                self.transferred("in", stats)
            case SaidTransferred(stats, _, held_tokens):
                self.transferred("in", stats)
                self._sources.labels("local").inc(held_tokens)
                self._sources.labels("peer").inc(len(order.prompt) - held_tokens)
            case Finished():
                self._legs.labels(order.kind.value, "finished").inc()
                self._computed.inc(word.computed_tokens)
                if word.computed_tokens:
                    self._prefill.observe(word.prefill_s)
            case Failed(error):
                self._legs.labels(order.kind.value, error.reason).inc()
                logger.info(
                    "leg.failed kind=%s request=%s attempt=%d reason=%s text=%s",
                    order.kind.value, order.request_id, order.attempt, error.reason, error,
                )  # fmt: skip

    def _looked_up(self, order: LegOrder, hit_tokens: int) -> None:
        self._queries.labels(order.kind.value).inc(len(order.prompt))
        self._hits.labels(order.kind.value).inc(hit_tokens)

    def alarm(self, order: LegOrder, what: str) -> None:
        self._alarms.inc()
        logger.error("leg.alarm kind=%s request=%s what=%s", order.kind.value, order.request_id, what)

    # ---- the transfer thread's events ----

    def transferred(self, direction: str, stats: TransferStats) -> None:
        """One transfer came to a good end at this worker; `in`: taken here, `out`: served here."""
        self._transfer.labels(direction).observe(stats.seconds)
        self._tail.labels(direction).observe(stats.tail_seconds)


class _Moment(Collector):
    """The numbers of the moment, from the snapshots."""

    def __init__(self, role: str, snapshots: Snapshots) -> None:
        self._role = role
        self._from = snapshots

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return ()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        state = self._from.state()
        yield _gauge(
            "headrace:worker_state", "1 for the state that the worker is in", ["state"],
            [((other.value,), float(other is state)) for other in WorkerState],
        )  # fmt: skip
        yield _gauge("headrace:legs_open", "Legs of which anything is left", [], [((), self._from.num_legs())])
        yield _gauge("headrace:stalled_seconds", "Work present and no step ended", [], [((), self._from.stalled_s())])
        yield _gauge(
            "headrace:prefix_cache_blocks", "Blocks of 256 tokens that may be hit", [],
            [((), self._from.num_cached_blocks())],
        )  # fmt: skip
        load = self._from.engine()
        if load is not None:
            yield from self._engine(load)
        counts = self._from.transfer()
        if counts is not None:
            yield from self._transfers(counts)

    def _engine(self, load: EngineLoad) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        role = (self._role,)
        yield _gauge("headrace:num_requests_running", "Sequences in the batch", ["role"], [(role, load.running)])
        yield _gauge("headrace:num_requests_waiting", "Sequences in the queue", ["role"], [(role, load.waiting)])
        yield _gauge("headrace:queued_tokens", "Uncached prompt tokens not computed", [], [((), load.queued_tokens)])
        pages, credits, usage = [], [], []
        for kind, c in load.pools.items():
            states = (
                ("free", c.free), ("active", c.active), ("landing", c.landing), ("cached", c.cached),
                ("pinned", c.pinned),
            )  # fmt: skip
            pages += [((kind, state), count) for state, count in states]
            credits.append(((kind,), c.reserved))
            usage.append(((kind,), (c.active + c.landing + c.pinned) / c.total if c.total else 0.0))
        yield _gauge("headrace:kv_pages", "Pages by pool and state", ["pool", "state"], pages)
        yield _gauge("headrace:kv_credits_reserved", "Pages promised, not yet bound", ["pool"], credits)
        yield _gauge("headrace:kv_cache_usage_perc", "Share of pages that cannot be evicted, 0 to 1", ["pool"], usage)
        yield _count("headrace:kv_audit_mismatch", "Conservation audits that failed", [], [((), load.audit_mismatches)])
        yield _count("headrace:engine_steps", "Steps", [], [((), load.steps)])

    def _transfers(self, counts: TransferCounts) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        yield _gauge(
            "headrace:kv_buffers", "Registered buffers by kind and state", ["kind", "state"],
            [(("send", state), n) for state, n in counts.send_buffers.items()]
            + [(("landing", state), n) for state, n in counts.landing_buffers.items()],
        )  # fmt: skip
        yield _gauge(
            "headrace:kv_transfers_open", "Open transfers by direction and phase", ["direction", "phase"],
            [(("out", phase), n) for phase, n in counts.subscriptions.items()]
            + [(("in", phase), n) for phase, n in counts.pulls.items()],
        )  # fmt: skip
        yield _gauge(
            "headrace:kv_landing_held_seconds", "Age of the oldest held landing buffer", [],
            [((), counts.oldest_held_s)],
        )  # fmt: skip
        yield _count(
            "headrace:kv_transfer_bytes", "Payload bytes", ["direction"],
            [(("out",), counts.bytes_sent), (("in",), counts.bytes_received)],
        )  # fmt: skip
        yield _count(
            "headrace:kv_transfer_segments", "Segments", ["direction"],
            [(("out",), counts.segments_sent), (("in",), counts.segments_received)],
        )  # fmt: skip
        yield _count(
            "headrace:kv_transfers", "Transfers that ended well", ["direction"],
            [(("out",), counts.transfers_served), (("in",), counts.transfers_taken)],
        )  # fmt: skip
        yield _count(
            "headrace:kv_transfer_failures", "Transfers that ended badly", ["reason"],
            [((reason,), n) for reason, n in counts.failures.items()],
        )  # fmt: skip
        yield _count(
            "headrace:kv_segments_refused", "Segments not stored", ["reason"],
            [((reason,), n) for reason, n in counts.segments_refused.items()],
        )  # fmt: skip
        yield _count(
            "headrace:kv_stale_messages", "Messages about what is over", [], [((), counts.stale_messages)]
        )  # fmt: skip
        yield _gauge(
            "headrace:kv_transfer_audit_mismatches", "Mismatches of buffers and leases now", [],
            [((), len(counts.audit))],
        )  # fmt: skip
        # A peer that comes and goes has several links for a moment: the best one speaks for it.
        best: dict[tuple[str, str], tuple[int, float]] = {}
        for link in counts.links:
            name = (link.peer, "in" if link.direction is LinkDirection.OUT else "out")
            best[name] = max(best.get(name, (-1, 0.0)), (_LINK_RANK[link.phase], link.gigabytes_per_s))
        yield _gauge(
            "headrace:link_state", "0 down, 1 incompatible, 2 handshaking, 3 suspect, 4 up; direction of the bytes",
            ["peer", "direction"], [(name, rank) for name, (rank, _) in best.items()],
        )  # fmt: skip
        yield _gauge(
            "headrace:link_bandwidth_bytes_per_second", "As probed at link-up", ["peer", "direction"],
            [(name, rate * 1e9) for name, (_, rate) in best.items()],
        )  # fmt: skip


_LINK_RANK = {
    LinkPhase.DOWN: 0,
    LinkPhase.INCOMPATIBLE: 1,
    LinkPhase.HANDSHAKING: 2,
    LinkPhase.SUSPECT: 3,
    LinkPhase.UP: 4,
}

_Samples = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: list[str], samples: _Samples) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _count(name: str, text: str, labels: list[str], samples: _Samples) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family
