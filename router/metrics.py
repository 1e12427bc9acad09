"""What the router counts, in Prometheus form. Names follow vLLM's where one exists, under our own prefix."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import choose_encoder

_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0,
)  # fmt: skip
_HIT_ERRORS = (-65536, -8192, -1024, -256, -1, 0, 255, 1023, 8191, 65535)


class RouterMetrics:
    """One registry a process, so that several routers may live in one test."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Any:
            return Counter(f"headrace:{name}", text, labels, registry=self.registry)

        def gauge(name: str, text: str, *labels: str) -> Any:
            return Gauge(f"headrace:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, *labels: str) -> Any:
            return Histogram(f"headrace:{name}", text, labels, registry=self.registry, buckets=_SECONDS)

        self.running = gauge("num_requests_running", "Sequences that have workers", "role")
        self.waiting = gauge("num_requests_waiting", "Sequences in the router's queue", "role")
        self.workers = gauge("router_workers", "Connected workers", "role", "state")
        self.requests = counter("request_total", "Requests by end", "surface", "outcome")
        self.finished = counter("request_success", "Choices by finish reason", "finished_reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests")
        self.generation_tokens = counter("generation_tokens", "Generated tokens")
        self.cached_tokens = counter("prompt_tokens_cached", "Prompt tokens that were not computed")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token", "path")
        self.second_token = histogram("time_to_second_token_seconds", "First to second token: the hand-over", "path")
        self.itl = histogram("inter_token_latency_seconds", "Gap between two tokens", "path")
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to end", "path")
        self.queue_time = histogram("request_queue_time_seconds", "Arrival to placement")
        self.prefill_time = histogram("request_prefill_time_seconds", "Prefill as the worker measured it", "path")
        self.transfer_time = histogram("kv_transfer_time_seconds", "Pull to taken", "transport")
        self.transfer_tail = histogram("kv_transfer_tail_seconds", "Prefill's end to taken", "transport")
        self.transfer_bytes = counter("kv_transfer_bytes", "Bytes of pages shipped", "transport")
        self.transfer_pages = counter("kv_transfer_pages", "Pages shipped", "transport")
        self.leg_failures = counter("leg_failures", "Legs that ended badly", "kind", "reason")
        self.retries = counter("request_retries", "Attempts after the first, before any output", "reason")
        self.migrations = counter("migrations", "Streams resumed on other workers", "reason")
        self.stale = counter("stale_tokens", "Tokens dropped as doubles or late")
        self.cancellations = counter("request_cancellations", "Sequences ended by their client", "phase")
        self.fetches = counter(
            "prefix_fetches", "Prefixes wanted from another worker's cache, by how it went", "outcome"
        )
        self.decisions = counter(
            "router_decisions", "Placements by why, by how the index stood and by path", "reason", "mode", "path"
        )
        self.index_state = gauge("router_index_state", "Connected workers by the state of their index", "state")
        self.index_blocks = gauge("router_index_blocks", "Entries of all indexes", "kind")
        self.hit_tokens = counter("router_hit_tokens", "Prefix hits of prefills that began, in tokens", "kind")
        self.hit_error = Histogram(
            "headrace:router_predicted_vs_actual_hit_tokens",
            "Predicted less actual hit of a prefill that began; above 0: the worker held less than was believed",
            registry=self.registry,
            buckets=_HIT_ERRORS,
        )
        self.rejections = counter("admission_rejections", "Requests not taken", "reason")

    def render(self, accept: str) -> tuple[bytes, str]:
        """(body, content type) for an Accept header."""
        encoder, content_type = choose_encoder(accept)
        body: bytes = encoder(self.registry)
        return body, content_type
