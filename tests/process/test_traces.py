"""A request over real processes is one trace at a real collector: router, both legs, the transfer between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from process.cluster import Cluster

pytestmark = pytest.mark.process

TRACE = "0af7651916cd43dd8448eb211c80319c"
ABOVE = f"00-{TRACE}-b7ad6b7169203331-01"


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any]] = []
        """(service, span)"""
        self.lock = threading.Lock()

    def Export(self, request: Any, context: Any) -> Any:
        with self.lock:
            for part in request.resource_spans:
                names = {item.key: item.value.string_value for item in part.resource.attributes}
                self.spans += [(names["service.name"], span) for scope in part.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, trace: str) -> dict[str, tuple[str, Any]]:
        """By name of the span."""
        with self.lock:
            return {span.name: (service, span) for service, span in self.spans if span.trace_id.hex() == trace}


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    kept = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(None)


def attributes(span: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in span.attributes}


def test_a_request_is_one_trace(demo_checkpoint: Path, collector: tuple[Collector, str]) -> None:
    """Each process sends its own spans; ids join them below the client's; a failed request says why."""
    kept, endpoint = collector
    with Cluster(demo_checkpoint, "--served-model-name", "demo", "--otlp-traces-endpoint", endpoint) as cluster:
        cluster.wait_ready()
        body = {"model": "demo", "prompt": list(range(20, 320)), "max_tokens": 6, "ignore_eos": True}
        answer = cluster.http.post("/v1/completions", json=body, headers={"traceparent": ABOVE}, timeout=60.0)
        assert answer.status_code == 200
        wanted = {"text_completion demo", "route", "prefill", "generate", "queue", "compute", "reserve", "transfer"}
        cluster.until(lambda: wanted <= set(kept.of(TRACE)), 20.0, "all spans")
    spans = kept.of(TRACE)
    service, root = spans["text_completion demo"]
    assert service == "headrace-router"
    assert root.parent_span_id.hex() == ABOVE.split("-")[2]
    for name, of in {"prefill": "headrace-prefill", "generate": "headrace-decode", "route": "headrace-router"}.items():
        assert spans[name][0] == of
        assert spans[name][1].parent_span_id == root.span_id
    assert spans["transfer"][1].parent_span_id == spans["generate"][1].span_id
    assert spans["compute"][1].parent_span_id == spans["prefill"][1].span_id
    for _, span in spans.values():
        assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
    said = attributes(root)
    assert (said["gen_ai.usage.input_tokens"], said["gen_ai.usage.output_tokens"]) == (300, 6)
    moved = attributes(spans["transfer"][1])
    assert moved["headrace.payload_bytes"] > 0
    assert moved["headrace.transport"] == "shared memory"
