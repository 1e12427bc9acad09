"""The published cases of the chat format, run where the file of cases is at hand (HEADRACE_CASES, or beside us)."""

import json
import os
import random
from pathlib import Path

import pytest

from headrace.core.errors import RequestError
from headrace.core.sampling import FinishReason
from headrace.router import dialect
from headrace.router.chat_format import render
from headrace.router.fields import Fields
from headrace.router.messages import read_chat
from headrace.router.output_parser import CallArguments, CallOpened, MarkerIds, OutputParser, TextPiece
from headrace.router.stops import StopMatcher

DEFAULT = Path(__file__).resolve().parents[3] / "shared" / "cases" / "chat_format.json"
PATH = Path(os.environ.get("HEADRACE_CASES", DEFAULT))
CASES = json.loads(PATH.read_text(encoding="utf-8")) if PATH.exists() else {}

pytestmark = pytest.mark.skipif(not CASES, reason="no file of published cases")


def cases(section, key="id"):
    return [pytest.param(case, id=case[key]) for case in CASES.get(section, [])]


def rendered(case, form):
    fields = dict(case["input"])
    profile = fields.pop("effort_profile", "official")
    return render(read_chat(Fields(fields), form), form, profile)


@pytest.mark.parametrize("case", cases("encode"))
def test_prompt_is_as_published(case, tokenizer):
    """Text and parse start; and the ids spell that text, with a marker wherever the published ids have one."""
    result = rendered(case, dialect.V4)
    assert result.text == case["expected"]["prompt"]
    assert result.parse_start == case["expected"]["parse_start"]
    names = {number: name for name, number in CASES["constants"]["special_token_ids"].items()}
    published = [names[token] for token in case["expected"]["token_ids"] if token in names]
    assert [segment.text for segment in result.segments if segment.is_marker] == published
    assert tokenizer.decode(tokenizer.encode_segments(result.segments)) == result.text


@pytest.mark.parametrize("case", cases("encode_v41"))
def test_prompt_of_the_next_dialect_is_as_published(case):
    """V4.1 is data: the same renderer with another table."""
    assert rendered(case, dialect.V41).text == case["expected"]["prompt"]


@pytest.mark.parametrize("case", cases("errors"))
def test_refusal_is_as_published(case):
    """The same field is named; we write list positions in brackets, as OpenAI does."""
    with pytest.raises(RequestError) as caught:
        rendered(case, dialect.V4)
    assert caught.value.param.replace("[", ".").replace("]", "") == case["expected"]["param"]


def parse(case, tokenizer, cuts):
    wanted = case["input"]
    parser = OutputParser(
        tokenizer,
        MarkerIds.of(tokenizer),
        dialect.V4,
        wanted["parse_start"],
        parse_tools=wanted["parse_tool_calls"],
        stops=StopMatcher(wanted.get("stop", ())),
    )
    # The raw encoder finds markers by their spelling.
    ids = [token for piece in cuts(wanted["text"]) for token in tokenizer.encode_raw(piece)]
    pieces = []
    for token in ids:
        if parser.is_complete:
            break
        pieces += parser.feed(token)
    reason = FinishReason(wanted["engine_finish_reason"])
    pieces += parser.finish(reason)
    text = {"reasoning": "", "content": ""}
    calls = []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            text[piece.kind] += piece.text
        elif isinstance(piece, CallOpened):
            calls.append({"name": piece.name, "arguments": ""})
        else:
            assert isinstance(piece, CallArguments)
            calls[piece.index]["arguments"] += piece.text
    finish = "tool_calls" if calls and reason is FinishReason.STOP else reason.value
    return {**text, "tool_calls": calls, "finish_reason": finish}


@pytest.mark.parametrize("case", cases("parse"))
def test_output_is_parsed_as_published(case, tokenizer):
    """For the tokenizer's own cut and for random ones (markers kept whole)."""
    expected = case["expected"]
    draw = random.Random(case["id"])
    markers = list(CASES["constants"]["special_token_ids"])

    def random_cut(text):
        while text:
            marker = next((name for name in markers if text.startswith(name)), None)
            ahead = min([len(text), *(text.find(name) for name in markers if text.find(name) > 0)])
            size = len(marker) if marker else draw.randint(1, max(1, min(ahead, 6)))
            yield text[:size]
            text = text[size:]

    for cuts in (lambda text: [text], *[random_cut] * 20):
        got = parse(case, tokenizer, cuts)
        if got["finish_reason"] != "length":
            for call in (*got["tool_calls"], *expected["tool_calls"]):
                if isinstance(call["arguments"], str):
                    call["arguments"] = json.loads(call["arguments"])
        assert got == expected


@pytest.mark.parametrize("case", cases("stops", "name"))
def test_stop_strings_are_as_published(case):
    """Deltas, text, reason and the count of tokens."""
    matcher = StopMatcher(case["stop"], case["include_stop_str_in_output"])
    deltas = []
    for index, piece in enumerate(case["pieces"]):
        deltas.append(matcher.feed(piece, searched=index >= case["min_tokens"]))
        if matcher.matched is not None:
            break
    num_tokens = len(deltas)
    if matcher.matched is None:
        deltas.append(matcher.flush())
    assert deltas == case["deltas"]
    assert "".join(deltas) == case["text"]
    assert matcher.matched == case["stop_reason"]
    assert num_tokens == case["num_tokens"]
