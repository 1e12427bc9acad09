"""Spans that are made when they are over, from times that were taken anyway, and sent in batches from a thread.

A process that is asked for no traces has `OFF`: spans go nowhere, and what a client sent passes on unchanged. Contexts
travel as W3C `traceparent` headers. Knows names, times and attributes; not requests or legs.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ..core.errors import ConfigError

Attributes: TypeAlias = Mapping[str, str | int | float | bool | Sequence[str]]

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
SAMPLED = 0x01
SCHEDULE_MS = 1000
"""A span waits at most this long for others."""
EXPORT_S = 5.0


@dataclass(frozen=True)
class Context:
    """One span's place in its trace."""

    trace_id: int
    span_id: int
    parent_id: int = 0
    """0: the trace begins here."""
    sampled: bool = True

    @property
    def traceparent(self) -> str:
        """As a header, for children of this span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{SAMPLED * self.sampled:02x}"


@dataclass(frozen=True, kw_only=True)
class Span:
    """One that is over. Times are readings of the monotonic clock, seconds."""

    name: str
    context: Context
    start_s: float
    end_s: float
    attributes: Attributes
    events: tuple[tuple[str, float], ...] = ()
    """(name, time)"""
    error: str = ""


class Traces(Protocol):
    """Where spans go."""

    @property
    def is_on(self) -> bool: ...

    def begin(self, traceparent: str) -> Context:
        """A new span's context, below the one that a header names; a trace of its own where there is none."""
        ...

    def end(self, span: Span) -> None:
        """Send it, some time. Never waits."""
        ...

    def close(self) -> None:
        """Send what waits, within a few seconds."""
        ...


def parse(traceparent: str) -> Context | None:
    """The context of a header; None if it is none."""
    match = _TRACEPARENT.fullmatch(traceparent.strip())
    if match is None:
        return None
    trace_id, span_id, flags = (int(part, 16) for part in match.groups())
    return Context(trace_id, span_id, sampled=bool(flags & SAMPLED)) if trace_id and span_id else None


class _Off:
    """No traces."""

    is_on = False

    def begin(self, traceparent: str) -> Context:
        return Context(0, 0, sampled=False)

    def end(self, span: Span) -> None:
        pass

    def close(self) -> None:
        pass


OFF: Traces = _Off()


class OtlpTraces:
    """To a collector that speaks OTLP over gRPC, by the OpenTelemetry SDK's exporter and batches."""

    is_on = True

    def __init__(self, processor: Any, service: str, instance: str) -> None:
        """
        Args:
            processor: an `opentelemetry.sdk.trace.SpanProcessor`.
            service: `service.name` of every span; `instance`: `service.instance.id`.
        """
        from opentelemetry.sdk.resources import Resource

        self._processor = processor
        self._resource = Resource.create({"service.name": service, "service.instance.id": instance})
        self._random = random.SystemRandom()
        self._wall_ns = time.time_ns() - time.monotonic_ns()

    def begin(self, traceparent: str) -> Context:
        above = parse(traceparent)
        span_id = self._random.getrandbits(64) or 1
        if above is None:
            return Context(self._random.getrandbits(128) or 1, span_id)
        return Context(above.trace_id, span_id, above.span_id, above.sampled)

    def end(self, span: Span) -> None:
        from opentelemetry.sdk.trace import Event, ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        place = span.context
        if not place.sampled:
            return
        flags = TraceFlags(TraceFlags.SAMPLED)
        parent = SpanContext(place.trace_id, place.parent_id, True, flags) if place.parent_id else None
        self._processor.on_end(
            ReadableSpan(
                name=span.name,
                context=SpanContext(place.trace_id, place.span_id, False, flags),
                parent=parent,
                resource=self._resource,
                attributes=dict(span.attributes),
                events=[Event(name, timestamp=self._ns(at_s)) for name, at_s in span.events],
                kind=SpanKind.SERVER if parent is None else SpanKind.INTERNAL,
                status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.OK),
                start_time=self._ns(span.start_s),
                end_time=self._ns(span.end_s),
            )
        )

    def close(self) -> None:
        self._processor.shutdown()

    def _ns(self, at_s: float) -> int:
        return int(at_s * 1e9) + self._wall_ns


def open_traces(endpoint: str, service: str, instance: str) -> Traces:
    """Traces to `endpoint` (`http://host:4317`); "" is `OFF`.

    Raises:
        ConfigError: the OpenTelemetry packages are not installed.
    """
    if not endpoint:
        return OFF
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"otlp_traces_endpoint needs packages: pip install 'headrace[otlp]' ({error})") from error
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https"), timeout=EXPORT_S)
    processor = BatchSpanProcessor(exporter, schedule_delay_millis=SCHEDULE_MS)
    return OtlpTraces(processor, service, instance)
