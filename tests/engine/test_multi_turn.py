"""A conversation of ten turns and about 8,000 tokens: each turn computes what is new, and says the truth about it."""

import dataclasses

import pytest
from support.side import LARGE, REPLAY, SAMPLED, Side, leg, local, make_model, ship, words

from headrace.core.pools import PoolKind
from headrace.engine import api
from headrace.model.transformer import Transformer

LONGEST = 9000
PAGES = {**LARGE, PoolKind.HISTORY: 80}
SAMPLING = dataclasses.replace(SAMPLED, max_tokens=30)
BLOCK = 256


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model(LONGEST)


def questions() -> list[tuple[int, ...]]:
    """What the user adds each turn: long at first, some turns short."""
    return [words(turn, length) for turn, length in enumerate([2200, 900, 40, 1100, 700, 3, 900, 800, 256, 1000])]


def computed(side: Side, key: int, prompt: tuple[int, ...]) -> int:
    """Positions of the prompt that were computed; the same as both of the engine's words for it say."""
    num = len(prompt) - side.cached_tokens(key)
    (ended,) = side.of(key, api.SequenceFinished)
    assert ended.computed_tokens == num
    return num


@pytest.mark.slow
def test_monolithic_turns_compute_what_is_new(model):
    """Question, and at most one block besides: the answer is prefix already."""
    side, text = Side(model, pages=PAGES, longest=LONGEST), ()
    before = 0
    for key, question in enumerate(questions(), 1):
        prompt = text + question
        side.turns(api.Submit(local(key, prompt, SAMPLING)))
        assert computed(side, key, prompt) <= len(prompt) - before + BLOCK + REPLAY
        output = tuple(token for _, token, _ in side.output(key))
        before, text = len(prompt) + len(output), prompt + output
    assert len(text) > 8000


def test_disaggregated_turns_compute_and_ship_what_is_new(model):
    """The prefill side has not seen the answer; what it lacks of it is new to it, and no more."""
    p, d = Side(model, pages=PAGES, longest=LONGEST), Side(model, pages=PAGES, longest=LONGEST)
    text, seen, held = (), 0, 0
    for key, question in enumerate(questions(), 1):
        prompt = text + question
        p.turns(
            api.Submit(dataclasses.replace(leg(key, api.LegKind.PREFILL, prompt), sampling=SAMPLING)), api.Start(key)
        )
        d.turns(api.Submit(dataclasses.replace(leg(key, api.LegKind.GENERATE, prompt), sampling=SAMPLING)))
        assert computed(p, key, prompt) <= len(prompt) - seen + BLOCK + REPLAY
        assert ship(p, d, key, len(prompt)) <= len(prompt) // BLOCK - held // BLOCK
        first = p.one(key, api.TokenSampled)
        p.turns(api.Release(key))
        d.turns(api.Admit(key, first.token, first.index))
        output = tuple(token for _, token, _ in p.output(key) + d.output(key))
        seen, text = len(prompt), prompt + output
        held = len(text) - 1
    assert len(text) > 8000
