"""Output token by token: the same message for every cut, and nothing shown that may yet turn out to be markup."""

import json
import random

import pytest

from headrace.core.sampling import FinishReason
from headrace.router import dialect
from headrace.router.output_parser import CallArguments, CallOpened, MarkerIds, OutputParser, TextPiece
from headrace.router.stops import StopMatcher

T, N, D = dialect.THINK, dialect.END_THINK, dialect.DSML


def pieces_of(tokenizer, text, start="content", cut=False, stop=(), **options):
    """Feed character by character (markers whole); the pieces, in order."""
    options.setdefault("parse_tools", True)
    parser = OutputParser(tokenizer, MarkerIds.of(tokenizer), dialect.V4, start, stops=StopMatcher(stop), **options)
    out = []
    position = 0
    while position < len(text) and not parser.is_complete:
        marker = next((name for name in (T, N, D) if text.startswith(name, position)), None)
        size = len(marker) if marker else 1
        for token in tokenizer.encode_raw(text[position : position + size]):
            out += parser.feed(token)
        position += size
    out += parser.finish(FinishReason.LENGTH if cut else FinishReason.STOP)
    return out, parser


def message(pieces):
    text = {"reasoning": "", "content": ""}
    calls = []
    for piece in pieces:
        if isinstance(piece, TextPiece):
            text[piece.kind] += piece.text
        elif isinstance(piece, CallOpened):
            calls.append([piece.name, ""])
        else:
            assert isinstance(piece, CallArguments)
            calls[piece.index][1] += piece.text
    return text["reasoning"], text["content"], [tuple(call) for call in calls]


OPEN = f'<{D}invoke name="a">\n'
CUT = f'<{D}tool_calls>\n{OPEN}<{D}parameter name="k" string="true">'


def block(body):
    return f"<{D}tool_calls>\n{body}\n</{D}tool_calls>"


def invoke(name, body=""):
    return f'<{D}invoke name="{name}">\n{body}</{D}invoke>'


def parameter(name, value, attribute=' string="true"'):
    return f'<{D}parameter name="{name}"{attribute}>{value}</{D}parameter>\n'


@pytest.mark.parametrize(
    ("text", "options", "expected"),
    [
        ("\n\nhi\n", {}, ("", "hi\n", [])),
        (f"a\n{N}\n\nb", {"start": "reasoning"}, ("a", "b", [])),
        ("\nmore", {"start": "reasoning_continued"}, ("\nmore", "", [])),
        (f"{T}late{N}b", {}, ("late", "b", [])),
        (f"a{N}b{T}c{N}d", {"start": "reasoning"}, ("a", "bcd", [])),
        (f"a <{N}{D}", {"start": "reasoning"}, ("a <", D, [])),
        (f"x <{D}y", {}, ("", f"x <{D}y", [])),
        (f"x <{D}tool_", {}, ("", f"x <{D}tool_", [])),
        (f"x <{D}<{D}tool>\n{invoke('a')}", {}, ("", f"x <{D}", [("a", "{}")])),
        (block(invoke("a")), {"parse_tools": False}, ("", block(invoke("a")), [])),
        (f"t\n\n{block(invoke('a') + invoke('b'))}", {}, ("", "t", [("a", "{}"), ("b", "{}")])),
        (block(invoke("a") + invoke("b")), {"single_call": True}, ("", "", [("a", "{}")])),
        (invoke("bare"), {}, ("", "", [("bare", "{}")])),
        (block(invoke("a", '{"x": [1]}\n')), {}, ("", "", [("a", '{"x": [1]}')])),
        (block(invoke("a", "{broken\n")), {}, ("", "", [("a", '{"arguments": "{broken"}')])),
        (block(invoke("a", parameter("k", 'v "q"\n'))), {}, ("", "", [("a", '{"k": "v \\"q\\"\\n"}')])),
        (block(invoke("a", parameter("k", "</b> <i"))), {}, ("", "", [("a", '{"k": "</b> <i"}')])),
        (block(invoke("a", parameter("k", f"{D} <{D}x>"))), {}, ("", "", [("a", f'{{"k": "{D} <{D}x>"}}')])),
        (block(invoke("a", parameter("k", f"a{N}b"))), {}, ("", "", [("a", f'{{"k": "a{N}b"}}')])),
        (block(invoke("a", parameter("k", "1e5", ' string="false"'))), {}, ("", "", [("a", '{"k": 1e5}')])),
        (block(invoke("a", parameter("k", "NaN", ' string="false"'))), {}, ("", "", [("a", '{"k": "NaN"}')])),
        (block(invoke("a", parameter("k", "true", ""))), {}, ("", "", [("a", '{"k": true}')])),
        # A close tag that is missing is implied by what follows.
        (
            block(OPEN + f'<{D}parameter name="k" string="true">v\n<{D}parameter name="l">2\n</{D}invoke>'),
            {},
            ("", "", [("a", '{"k": "v", "l": 2}')]),
        ),
        (block(f'<{D}invoke name="a">\n{invoke("b")}'), {}, ("", "", [("a", "{}"), ("b", "{}")])),
        # Cut by length the arguments stay as they are; ended by EOS they are made whole.
        (CUT + "v", {"cut": True}, ("", "", [("a", '{"k": "v')])),
        (CUT + "v</", {}, ("", "", [("a", '{"k": "v"}')])),
        (f'<{D}tool_calls>\n<{D}invoke name="half', {"cut": True}, ("", "", [])),
        ("ENDa\nEND b", {"start": "reasoning_continued", "stop": ("END",)}, ("ENDa\nEND b", "", [])),
        (f"END{N}one\n\nEND b", {"start": "reasoning", "stop": ("END",)}, ("END", "one\n\n", [])),
        (f"one EN<{D}tool>{invoke('a')}", {"stop": ("END",)}, ("", "one EN", [("a", "{}")])),
    ],
)
def test_output_becomes_a_message(text, options, expected, tokenizer):
    """Reasoning, content, calls."""
    pieces, _ = pieces_of(tokenizer, text, **options)
    assert message(pieces) == expected


def test_stop_string_ends_the_parse(tokenizer):
    """And is named; nothing of it was shown before."""
    pieces, parser = pieces_of(tokenizer, "go ENDED", stop=("ENDED",))
    assert [piece.text for piece in pieces if isinstance(piece, TextPiece)] == ["g", "o", " "]
    assert parser.stop_string == "ENDED"
    assert parser.is_complete


def test_reasoning_tokens_are_counted_to_the_end_of_thinking(tokenizer):
    """With the marker; all of them when it never came; none without thinking."""
    _, parser = pieces_of(tokenizer, f"ab{N}cd", start="reasoning")
    assert parser.reasoning_tokens == 3
    _, parser = pieces_of(tokenizer, "abcd", start="reasoning")
    assert parser.reasoning_tokens == 4
    _, parser = pieces_of(tokenizer, "abcd")
    assert parser.reasoning_tokens == 0


def test_call_ids_differ_and_closed_block_completes(tokenizer):
    """24 random characters; behind the block nothing matters."""
    pieces, parser = pieces_of(tokenizer, block(invoke("a") + invoke("a")) + "more text")
    ids = [piece.id for piece in pieces if isinstance(piece, CallOpened)]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 29 for call_id in ids)
    assert parser.is_complete


def test_broken_bytes_before_a_marker_become_a_replacement(tokenizer):
    """An unfinished character cannot wait behind a marker."""
    parser = OutputParser(tokenizer, MarkerIds.of(tokenizer), dialect.V4, "reasoning", parse_tools=True)
    first = tokenizer.encode_raw("é")[0]
    assert tokenizer.bytes_of(first) == b"\xc3"
    assert parser.feed(first) == []
    assert parser.feed(tokenizer.marker_id(N)) == [TextPiece("reasoning", "\ufffd")]


FRAGMENTS = [
    "a", "\n", "<", "</", ">", "é", "🫠", '"', "{", "}", "tool_calls>", "tool>", "invoke", ' name="f">', "parameter",
    ' name="k" string="true">', ' name="k" string="false">', "12", " ", "STOP", D, D, D, T, N, "\ufffd",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(300))
def test_any_output_is_parsed_without_loss_or_error(seed, tokenizer):
    """Random markup: arguments are JSON when the model has ended by itself, and a parse never raises."""
    draw = random.Random(seed)
    text = "".join(draw.choice(FRAGMENTS) for _ in range(draw.randint(1, 60)))
    if draw.random() < 0.5:
        text = f"<{D}tool_calls>\n" + text
    start = draw.choice(["content", "reasoning", "tool_calls", "content_continued"])
    pieces, _ = pieces_of(tokenizer, text, start=start, stop=("STOP",))
    for _, arguments in message(pieces)[2]:
        assert isinstance(json.loads(arguments), dict)
    # Plain text goes through untouched.
    plain = text.replace(D, "").replace(T, "").replace(N, "")
    pieces, _ = pieces_of(tokenizer, plain, start="content_continued")
    assert message(pieces) == ("", plain, [])
