"""Ids to text and back without a byte lost, and no other kind of tokenizer let in."""

import asyncio
import json
import random
import threading
import time

import pytest

from headrace.core.errors import ConfigError, QueueFull
from headrace.router import dialect
from headrace.router.tokenizer import Detokeniser, Segment, Tokenizer, TokenizerPool


def test_text_segments_hold_no_markers(tokenizer):
    """A written marker is text in a segment and a marker in a raw prompt; both decode to what was written."""
    written = f"a{dialect.ASSISTANT}{dialect.END_THINK}b"
    text = tokenizer.encode_segments([Segment(written)])
    raw = tokenizer.encode_raw(written)
    assert not set(text) & set(tokenizer.added_ids.values())
    assert tokenizer.marker_id(dialect.ASSISTANT) in raw
    assert tokenizer.decode(text) == tokenizer.decode(raw) == written


@pytest.mark.parametrize("seed", range(50))
def test_deltas_join_to_the_decoding_of_all(seed, tokenizer):
    """Random ids, broken bytes included: equal to decoding at once, and to the library's own."""
    draw = random.Random(seed)
    ids = [draw.randrange(tokenizer.vocab_size) for _ in range(200)]
    for skip in (False, True):
        decoder = Detokeniser(tokenizer, skip_special=skip)
        joined = "".join([*(decoder.feed(token) for token in ids), decoder.flush()])
        assert joined == tokenizer.decode(ids, skip_special=skip)
        assert joined == tokenizer._full.decode(ids, skip_special_tokens=skip)


def test_character_comes_whole_and_as_soon_as_it_can(tokenizer):
    """Four bytes, four tokens, one delta; an unfinished one is a single replacement at the end."""
    ids = tokenizer.encode_raw("🦦")
    assert len(ids) == 4
    decoder = Detokeniser(tokenizer)
    assert [decoder.feed(token) for token in ids] == ["", "", "", "🦦"]
    assert [decoder.feed(token) for token in ids[:3]] == ["", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.feed(ids[0]) == ""
    assert decoder.feed(tokenizer.encode_raw("b")[0]) == "\ufffdb"


def test_special_token_neither_shows_nor_breaks_a_character(tokenizer):
    """EOS between two bytes, unless special tokens are to be seen."""
    first, second = tokenizer.encode_raw("é")
    decoder = Detokeniser(tokenizer)
    assert [decoder.feed(token) for token in (first, 1, second)] == ["", "", "é"]
    shown = Detokeniser(tokenizer, skip_special=False)
    assert [shown.feed(token) for token in (1, second)] == [dialect.EOS, "\ufffd"]


def test_prompt_that_ends_inside_a_character_is_completed(tokenizer):
    """The unfinished bytes of a raw prompt prime the decoder."""
    first, second = tokenizer.encode_raw("é")
    decoder = Detokeniser(tokenizer, prompt=[*tokenizer.encode_raw("caf"), first])
    assert decoder.feed(second) == "é"


def test_id_without_spelling_is_no_text(tokenizer):
    """The embedding may have more rows than the tokenizer names."""
    assert tokenizer.bytes_of(tokenizer.vocab_size + 5) == b""
    assert Detokeniser(tokenizer).feed(tokenizer.vocab_size + 5) == ""


@pytest.mark.parametrize(
    "change",
    [
        {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}},
        {"decoder": None},
        {"normalizer": {"type": "NFC"}},
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
    ],
)
def test_other_tokenizers_are_refused(change, definition):
    """Rather no text than wrong text."""
    with pytest.raises(ConfigError):
        Tokenizer(json.dumps({**json.loads(definition), **change}))


def test_missing_marker_is_an_error_of_the_checkpoint(tokenizer):
    """Named, at start."""
    with pytest.raises(ConfigError, match="nope"):
        tokenizer.marker_id("nope")


@pytest.mark.parametrize("segments", [False, True], ids=["raw", "segments"])
def test_a_long_text_leaves_the_event_loop_alone(segments, tokenizer):
    """While a thread encodes, the loop's own thread runs on: streams, beats and probes go on."""

    async def scenario():
        pool = TokenizerPool(tokenizer, threads=1)
        text = "a " * 500_000
        work = asyncio.create_task(pool.encode_segments([Segment(text)]) if segments else pool.encode_raw([text]))
        started_s = last_s = time.monotonic()
        longest_s = 0.0
        while not work.done():
            await asyncio.sleep(0.002)
            longest_s = max(longest_s, time.monotonic() - last_s)
            last_s = time.monotonic()
        assert longest_s < (last_s - started_s) / 2
        assert tokenizer.decode(work.result() if segments else work.result()[0]) == text
        pool.close()

    asyncio.run(scenario())


def test_waiting_texts_are_bounded(tokenizer):
    """More work than the bound is refused, and later work is done again."""

    async def scenario():
        pool = TokenizerPool(tokenizer, threads=1, max_waiting=2)
        gate = threading.Event()
        blocked = [asyncio.create_task(pool.run(gate.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull):
            await pool.encode_raw(["x"])
        gate.set()
        await asyncio.gather(*blocked)
        assert await pool.encode_raw(["x", ""]) == [tokenizer.encode_raw("x"), []]
        pool.close()

    asyncio.run(scenario())
