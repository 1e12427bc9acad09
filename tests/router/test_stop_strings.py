"""Where text ends: against a plain search, for random texts, cuts and stop strings."""

import random

import pytest

from headrace.router.stops import StopMatcher


def by_search(text, stops):
    """(where the earliest-ending match starts and ends, its stop), the first in the list on a tie."""
    best = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0 and (best is None or start + len(stop) < best[1]):
            best = start, start + len(stop), stop
    return best


@pytest.mark.parametrize("seed", range(300))
def test_any_cut_gives_what_a_search_of_the_whole_gives(seed):
    """Small alphabets make overlaps likely."""
    draw = random.Random(seed)
    text = "".join(draw.choice("abé") for _ in range(draw.randint(0, 60)))
    stops = ["".join(draw.choice("abé") for _ in range(draw.randint(1, 6))) for _ in range(draw.randint(1, 4))]
    include = draw.random() < 0.5
    matcher = StopMatcher(stops, include)
    shown = ""
    rest = text
    while rest and matcher.matched is None:
        size = draw.randint(1, 5)
        shown += matcher.feed(rest[:size])
        rest = rest[size:]
        if matcher.matched is None and not include:
            consumed = text[: len(text) - len(rest)]
            held = consumed[len(shown) :]
            # What is held is the longest tail that may become a match, and no more.
            tails = (consumed[i:] for i in range(len(consumed)))
            longest = next((tail for tail in tails if any(s.startswith(tail) for s in stops)), "")
            assert held == longest
    found = by_search(text, stops)
    if found is None:
        assert matcher.matched is None
        assert shown + matcher.flush() == text
    else:
        start, end, stop = found
        assert matcher.matched == stop
        assert shown == text[: end if include else start]


def test_unsearched_text_is_no_part_of_a_match():
    """The first min_tokens tokens."""
    matcher = StopMatcher(["ab"])
    assert matcher.feed("ab a", searched=False) == "ab a"
    assert matcher.feed("b") == "b"
    assert matcher.feed("ab") == ""
    assert matcher.matched == "ab"
