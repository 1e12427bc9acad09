"""What the demo tells, from canned answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli.demo import Answer, Shipment, events, farewell, open_log, report, samples, shipment

BEFORE = """\
# HELP headrace:kv_transfer_bytes_total Bytes of pages shipped
# TYPE headrace:kv_transfer_bytes_total counter
headrace:kv_transfer_bytes_total{transport="nixl/UCX tcp"} 1000.0
headrace:kv_transfer_pages_total{transport="nixl/UCX tcp"} 4.0
headrace:kv_transfer_time_seconds_sum{transport="nixl/UCX tcp"} 0.5
headrace:kv_transfer_tail_seconds_sum{transport="nixl/UCX tcp"} 0.25
headrace:request_prefill_time_seconds_sum{path="pair"} 1.0
headrace:migrations_total 0.0
"""
AFTER = """\
headrace:kv_transfer_bytes_total{transport="nixl/UCX tcp"} 424576.0
headrace:kv_transfer_pages_total{transport="nixl/UCX tcp"} 13.0
headrace:kv_transfer_time_seconds_sum{transport="nixl/UCX tcp"} 0.512
headrace:kv_transfer_tail_seconds_sum{transport="nixl/UCX tcp"} 0.2525
headrace:request_prefill_time_seconds_sum{path="pair"} 1.031
headrace:migrations_total 0.0
"""


def test_a_second_demo_has_its_own_log_and_leaves_the_default_port(tmp_path: Path):
    """The first keeps both however soon the second comes; once it has ended, the next is first, with an empty log."""
    with open_log(tmp_path) as (first, is_first):
        first.write("of the first\n")
        first.flush()
        with open_log(tmp_path) as (second, is_first_too):
            assert (is_first, is_first_too) == (True, False)
            assert second.name != first.name
        assert Path(first.name).read_text() == "of the first\n"
    with open_log(tmp_path) as (third, is_first):
        assert is_first
        assert third.name == first.name
        assert Path(third.name).read_text() == ""


def test_samples_are_read_with_their_labels():
    """Comments are skipped, `_total` is not part of the name."""
    found = samples(BEFORE)
    assert found["kv_transfer_bytes", 'transport="nixl/UCX tcp"'] == 1000.0
    assert found["migrations", ""] == 0.0
    assert len(found) == 6


def test_shipment_is_what_one_request_added():
    """The difference of two looks; what was there before does not count."""
    found = shipment(BEFORE, AFTER)
    assert found is not None
    assert (found.num_bytes, found.num_pages, found.transport) == (423_576, 9, "nixl/UCX tcp")
    assert found.seconds == pytest.approx(0.012)
    assert found.tail_s == pytest.approx(0.0025)
    assert found.prefill_s == pytest.approx(0.031)
    assert shipment(AFTER, AFTER) is None


def test_report_names_what_a_newcomer_wants_to_know():
    """TTFT, ITL, tokens, pages, bytes, transport."""
    answer = Answer(
        text="x", prompt_tokens=14, output_tokens=4, finish_reason="length", asked_s=10.0,
        arrivals_s=[10.045, 10.053, 10.061, 10.075],
    )  # fmt: skip
    shipped = Shipment(
        num_bytes=423_576, num_pages=9, transport="nixl/UCX tcp", seconds=0.012, tail_s=0.0025, prefill_s=0.031
    )
    assert report(answer, shipped) == [
        "what happened",
        "  prompt       14 tokens, prefill 31 ms",
        "  answer       4 tokens, finish reason length",
        "  TTFT         45 ms from the request to the first text",
        "  ITL          8.0 ms median between two texts, 14 ms at most",
        "  shipped      9 pages, 413.6 KiB over nixl/UCX tcp",
        "               in 12 ms, of which 2.5 ms after the prefill had ended",
    ]
    assert "nothing" in report(answer, None)[-1]


def test_cut_stream_is_no_answer():
    """A stream without [DONE] may have lost its end."""
    lines = [b'data: {"a": 1}\n', b"\n", b": keep-alive\n", b'data: {"a": 2}\n']
    with pytest.raises(ValueError, match="DONE"):
        list(events(lines))
    assert list(events([*lines, b"data: [DONE]\n"])) == [{"a": 1}, {"a": 2}]


def test_curl_line_can_be_pasted():
    """Its body survives the shell's quoting and is JSON."""
    import shlex

    (line,) = [line for line in farewell("http://127.0.0.1:8000") if "curl" in line]
    words = shlex.split(line)
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8000/v1/chat/completions"]
    assert json.loads(words[-1])["stream"] is True
