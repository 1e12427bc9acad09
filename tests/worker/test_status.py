"""The status thread: probes, metrics and state, over real HTTP from snapshots that the test holds."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from headrace.core.clock import ManualClock
from headrace.core.errors import ConfigError, Draining, TransferFailed
from headrace.engine.api import EngineLoad, LegKind
from headrace.kvcache.pages import PoolCounts
from headrace.transfer.api import LinkCount, LinkDirection, LinkPhase, TransferCounts, TransferStats
from headrace.worker.leg import Failed, Finished, SaidReserved, SaidStarted, SaidToken, SaidTransferred
from headrace.worker.lifecycle import ProgressWatch, WorkerState
from headrace.worker.metrics import Snapshots, WorkerMetrics
from headrace.worker.status import StatusServer, StatusSource, _listen

LOAD = EngineLoad(
    2, 3, 700, 41, 0.0, {"history": PoolCounts(18, 4, 5, 1, 2, 6, 2), "window": PoolCounts(20, 20, 0, 0, 0)}, 0
)
COUNTS = TransferCounts(
    send_buffers={"free": 3, "announced": 1},
    landing_buffers={"free": 2, "held": 1},
    subscriptions={"serving": 1},
    pulls={"taking": 2},
    links=(
        LinkCount(
            link_id=1,
            direction=LinkDirection.OUT,
            peer="prefill-0",
            phase=LinkPhase.UP,
            gigabytes_per_s=1.5,
            transport="nixl/UCX tcp",
        ),
        LinkCount(
            link_id=2,
            direction=LinkDirection.OUT,
            peer="prefill-0",
            phase=LinkPhase.DOWN,
            gigabytes_per_s=0.0,
            transport="",
        ),
    ),
    failures={"gone": 4},
    bytes_received=12345,
)


class Still(ProgressWatch):
    """Stalled for as long as the test says, whatever is seen."""

    def observe(self, load: EngineLoad | None, now_s: float) -> None:
        pass


class Status:
    """A status server whose worker is made of values."""

    def __init__(self) -> None:
        self.state = WorkerState.READY
        self.load: EngineLoad | None = LOAD
        self.counts: TransferCounts | None = COUNTS
        self.watch = Still(wedged_after_s=30.0, now_s=0.0)
        snapshots = Snapshots(
            state=lambda: self.state,
            engine=lambda: self.load,
            transfer=lambda: self.counts,
            num_legs=lambda: 7,
            stalled_s=lambda: self.watch.stalled_s,
            num_cached_blocks=lambda: 7,
        )
        self.metrics = WorkerMetrics(role="decode", snapshots=snapshots)
        self.source = StatusSource(
            snapshots=snapshots,
            describe=lambda: {"worker_id": "decode-0", "incarnation": "00000000000000ff"},
            registry=self.metrics.registry,
            watch=self.watch,
        )
        self.server = StatusServer(self.source, host="127.0.0.1", port=0, clock=ManualClock())
        self.port = self.server.start()

    def get(self, path: str, method: str = "GET") -> tuple[int, str]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def samples(self) -> dict[tuple[str, tuple[str, ...]], float]:
        _, text = self.get("/metrics")
        return {
            (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


@pytest.fixture
def status() -> Iterator[Status]:
    made = Status()
    yield made
    made.server.stop()


@pytest.mark.parametrize("state", list(WorkerState))
def test_ready_is_true_in_ready_alone(status: Status, state: WorkerState) -> None:
    """503 with the reason in every other state; alive once the start is over."""
    status.state = state
    code, body = status.get("/ready")
    assert json.loads(body)["ready"] is (state is WorkerState.READY)
    assert code == (200 if state is WorkerState.READY else 503)
    assert state is WorkerState.READY or state.value in json.loads(body)["reasons"][0]
    assert status.get("/live")[0] == (503 if state is WorkerState.STARTING else 200)


def test_a_stall_takes_readiness_first_and_life_later(status: Status) -> None:
    """Not ready beyond the bound, not alive beyond twice of it."""
    status.watch.stalled_s = 31.0
    code, body = status.get("/ready")
    assert code == 503
    assert "31.0 s" in json.loads(body)["reasons"][0]
    assert status.get("/live")[0] == 200
    status.watch.stalled_s = 61.0
    assert status.get("/live")[0] == 503


def test_metrics_carry_the_specified_names(status: Status, make_order: Callable[..., Any]) -> None:
    """Gauges of the moment and sums of what was said, parsed as Prometheus would."""
    order = make_order(LegKind.GENERATE)
    stats = TransferStats(payload_bytes=10, num_segments=1, seconds=0.2, tail_seconds=0.003)
    for word in (
        SaidToken(0, 1, None),
        SaidToken(1, 1, None),
        SaidReserved(256),
        SaidTransferred(stats, 4, 256),
        Finished(None, None, 0.3, 600),
        Failed(TransferFailed("digest")),
    ):
        status.metrics.leg_said(order, word)
    status.metrics.leg_said(make_order(LegKind.PREFILL), SaidStarted(512, 0.5))
    status.metrics.leg_said(make_order(LegKind.LOCAL), SaidReserved(0))
    status.metrics.leg_refused(Draining("leaving"))
    found = status.samples()
    assert found[("headrace:legs_refused_total", ("draining",))] == 1
    assert found[("headrace:num_requests_running", ("decode",))] == 2
    assert found[("headrace:num_requests_waiting", ("decode",))] == 3
    assert found[("headrace:kv_pages", ("history", "active"))] == 5
    assert found[("headrace:kv_pages", ("history", "cached"))] == 6
    assert found[("headrace:kv_pages", ("history", "pinned"))] == 2
    assert found[("headrace:kv_credits_reserved", ("history",))] == 2
    assert found[("headrace:kv_cache_usage_perc", ("history",))] == pytest.approx(8 / 18)
    assert found[("headrace:kv_audit_mismatch_total", ())] == 0
    assert found[("headrace:engine_steps_total", ())] == 41
    assert found[("headrace:kv_buffers", ("landing", "held"))] == 1
    assert found[("headrace:kv_transfer_bytes_total", ("in",))] == 12345
    assert found[("headrace:kv_transfer_failures_total", ("gone",))] == 4
    assert found[("headrace:link_state", ("in", "prefill-0"))] == 4
    assert found[("headrace:link_bandwidth_bytes_per_second", ("in", "prefill-0"))] == 1.5e9
    assert found[("headrace:worker_state", ("ready",))] == 1
    assert found[("headrace:worker_state", ("wedged",))] == 0
    assert found[("headrace:generation_tokens_total", ())] == 2
    assert found[("headrace:prompt_tokens_total", ())] == 600
    assert found[("headrace:legs_total", ("generate", "transfer_failed"))] == 1
    assert found[("headrace:kv_transfer_time_seconds_count", ("in",))] == 1
    assert found[("headrace:kv_transfer_tail_seconds_sum", ("in",))] == pytest.approx(0.003)
    assert found[("headrace:request_queue_time_seconds_count", ())] == 1
    assert found[("headrace:prefix_cache_blocks", ())] == 7
    assert found[("headrace:prefix_cache_queries_total", ("generate",))] == 600
    assert found[("headrace:prefix_cache_hits_total", ("generate",))] == 256
    assert found[("headrace:prefix_cache_hits_total", ("prefill",))] == 512
    assert ("headrace:prefix_cache_queries_total", ("local",)) not in found
    sources = {
        name: found[("headrace:prompt_tokens_by_source_total", (name,))] for name in ("computed", "local", "peer")
    }
    assert sources == {"computed": 88, "local": 256 + 512, "peer": 344}


def test_a_worker_that_loads_answers_already(status: Status) -> None:
    """No engine, no transfer thread: every page still answers."""
    status.state, status.load, status.counts = WorkerState.STARTING, None, None
    for path in ("/live", "/ready", "/metrics", "/state"):
        assert status.get(path)[0] in (200, 503)
    assert json.loads(status.get("/state")[1])["state"] == "starting"


def test_state_tells_pools_transfers_and_links(status: Status) -> None:
    """One JSON document for who debugs."""
    document = json.loads(status.get("/state")[1])
    assert document["worker_id"] == "decode-0"
    history = {"total": 18, "free": 4, "active": 5, "landing": 1, "reserved": 2, "cached": 6, "pinned": 2}
    assert document["pools"]["history"] == history
    assert document["transfers"]["pulls"] == {"taking": 2}
    assert document["links"][0]["transport"] == "nixl/UCX tcp"
    assert document["transfers"]["audit"] == []


def test_other_paths_and_methods_are_refused(status: Status) -> None:
    """404 and 405, and nothing is done."""
    assert status.get("/nothing")[0] == 404
    assert status.get("/live", "POST")[0] == 405


def test_a_taken_port_is_a_fault_of_the_settings(status: Status) -> None:
    """The key is named."""
    with pytest.raises(ConfigError, match="status_port"):
        StatusServer(status.source, host="127.0.0.1", port=status.port, clock=ManualClock()).start()


def test_an_answer_on_a_kept_connection_is_not_delayed() -> None:
    """Head and body leave at once: with Nagle's delay the body waits 40 ms for the head's acknowledgement."""

    async def accept() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            taken: socket.socket = writer.get_extra_info("socket")
            accepted.set_result(taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = _listen("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname())
            no_delay = await accepted
            writer.close()
            await writer.wait_closed()
        return no_delay

    assert asyncio.run(accept())


def test_a_hopeless_worker_is_ended_by_the_status_thread() -> None:
    """Nobody else may be able to."""
    status = Status()
    status.server.stop()
    status.watch.stalled_s = 61.0
    ended = threading.Event()
    server = StatusServer(status.source, host="127.0.0.1", port=0, clock=ManualClock(), hopeless=ended.set)
    server.start()
    assert ended.wait(10)
    server.stop()


def test_audit_mismatches_are_shown(status: Status) -> None:
    """What must stay 0 and does not is visible."""
    status.load = replace(LOAD, audit_mismatches=2)
    status.counts = replace(COUNTS, audit=("buffer 3 belongs to nobody",))
    assert status.samples()[("headrace:kv_audit_mismatch_total", ())] == 2
    assert status.samples()[("headrace:kv_transfer_audit_mismatches", ())] == 1
    assert json.loads(status.get("/state")[1])["transfers"]["audit"] == ["buffer 3 belongs to nobody"]
