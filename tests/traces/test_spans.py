"""Contexts and spans: what a header says, what an exporter gets, and that nothing is sent when nothing is wanted."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from headrace.traces.spans import OFF, Context, OtlpTraces, Span, open_traces, parse

ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def opened() -> tuple[OtlpTraces, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    return OtlpTraces(SimpleSpanProcessor(exporter), "headrace-test", "test-0"), exporter


@pytest.mark.parametrize(
    "header",
    ["", "00", ABOVE[:-1], "00-" + "0" * 32 + ABOVE[35:], ABOVE[:36] + "0" * 16 + "-01", "01" + ABOVE[2:], "x" * 64],
)
def test_what_is_no_header_begins_a_trace(header: str) -> None:
    """Bad input costs the parent, not the request."""
    traces, _ = opened()
    assert parse(header) is None
    context = traces.begin(header)
    assert context.parent_id == 0
    assert context.sampled
    assert parse(context.traceparent) == Context(context.trace_id, context.span_id)


def test_a_span_lies_below_the_one_that_the_header_names() -> None:
    """Ids, times, attributes, events and errors arrive as they were."""
    traces, exporter = opened()
    context = traces.begin(ABOVE)
    below = traces.begin(context.traceparent)
    traces.end(Span(name="below", context=below, start_s=2.0, end_s=2.5, attributes={"n": 3}, events=(("e", 2.25),)))
    traces.end(Span(name="it", context=context, start_s=1.0, end_s=3.0, attributes={"list": ["a"]}, error="lost"))
    inner, outer = exporter.get_finished_spans()
    assert f"{outer.context.trace_id:032x}" == ABOVE.split("-")[1]
    assert f"{outer.parent.span_id:016x}" == ABOVE.split("-")[2]
    assert inner.parent.span_id == outer.context.span_id
    assert inner.context.trace_id == outer.context.trace_id
    assert inner.end_time - inner.start_time == 500_000_000
    assert inner.start_time - outer.start_time == 1_000_000_000
    assert (inner.attributes["n"], list(outer.attributes["list"])) == (3, ["a"])
    assert inner.events[0].timestamp - inner.start_time == 250_000_000
    assert outer.status.description == "lost"
    assert outer.resource.attributes["service.name"] == "headrace-test"


def test_what_the_client_does_not_want_sampled_is_not() -> None:
    """The flag goes on to all below."""
    traces, exporter = opened()
    context = traces.begin(ABOVE[:-2] + "00")
    assert context.traceparent.endswith("-00")
    traces.end(Span(name="it", context=context, start_s=1.0, end_s=3.0, attributes={}))
    assert exporter.get_finished_spans() == ()


def test_no_endpoint_is_off() -> None:
    """Nothing is imported, begun or sent."""
    assert open_traces("", "s", "i") is OFF
    assert not OFF.is_on
    assert not OFF.begin("").sampled
    OFF.end(Span(name="it", context=OFF.begin(ABOVE), start_s=0.0, end_s=1.0, attributes={}))
    OFF.close()
