"""Several choices of one request: the prompt is computed once, arrives once, and each goes on as if it were alone."""

import dataclasses

import pytest
from support.side import LARGE, SAMPLED, TINY, Side, leg, local, make_model, ship, words

from headrace.core.errors import Cancelled
from headrace.core.pools import PoolKind
from headrace.core.sampling import FinishReason, SamplingParams
from headrace.engine import api
from headrace.model.transformer import Transformer

SEEDS = (5, 77, 123)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


def of_choice(side: Side, key: int, choice: int) -> list[tuple[int, int, float]]:
    sampled = [e for e in side.of(key, api.TokenSampled) if e.choice == choice]
    return [(e.index, e.token, e.logprobs.logprob) for e in sampled]


def alone(model: Transformer, prompt: tuple[int, ...], seed: int, sampling: SamplingParams = SAMPLED) -> list:
    return Side(model, cached=False).run(1, prompt, dataclasses.replace(sampling, seed=seed))


def several(request: api.EngineRequest, seeds: tuple[int, ...] = SEEDS) -> api.EngineRequest:
    return dataclasses.replace(request, seeds=seeds)


def all_back(side: Side) -> bool:
    return all(c.free + c.cached == c.total and not c.reserved for c in side.manager.counts().values())


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("length", [1, 5, 64, 129, 192, 255, 256, 300, 508, 515])
def test_each_choice_is_what_it_would_be_alone(model, length, cached):
    """At every kind of border: whole and partial blocks, window pages, rings."""
    prompt = words(length, length)
    side = Side(model, cached=cached)
    side.turns(api.Submit(several(local(1, prompt))))
    for choice, seed in enumerate(SEEDS):
        assert of_choice(side, 1, choice) == alone(model, prompt, seed)
    ends = side.of(1, api.SequenceFinished)
    assert sorted(e.choice for e in ends) == [0, 1, 2]
    assert [e.last for e in ends] == [False, False, True]
    assert len(side.of(1, api.Started)) == 1
    assert all_back(side)


@pytest.mark.parametrize("length", [3, 256, 519])
def test_one_transfer_serves_all(model, length):
    """Prefilled once, shipped once, forked where it arrives."""
    prompt = words(length, length)
    p, d = Side(model, budget=200), Side(model)
    p.turns(api.Submit(several(leg(1, api.LegKind.PREFILL, prompt))), api.Start(1))
    firsts = p.of(1, api.TokenSampled)
    assert [e.choice for e in firsts] == [0, 1, 2]
    assert p.one(1, api.SequenceFinished).reason is None
    d.turns(api.Submit(several(leg(1, api.LegKind.GENERATE, prompt))))
    ship(p, d, 1, length)
    p.turns(api.Release(1))
    d.turns(api.Admit(1, firsts[0].token, 0, tuple(e.token for e in firsts[1:])))
    for choice, seed in enumerate(SEEDS):
        assert of_choice(p, 1, choice) + of_choice(d, 1, choice) == alone(model, prompt, seed)
    assert all_back(p)
    assert all_back(d)


def test_whole_blocks_are_shared_and_partial_ones_copied(model):
    """600 positions: two blocks for all, a third for each."""
    side = Side(model)
    side.turns(api.Submit(several(local(1, words(1, 600)))), num=3)
    counts = side.manager.counts()
    assert (counts[PoolKind.HISTORY].pinned, counts[PoolKind.HISTORY].active) == (2, 3)
    assert counts[PoolKind.STATE].active == 3
    side.turns()
    assert all_back(side)


def test_one_choice_ends_early_and_the_others_go_on(model):
    """A stop token of its own, or an abort: nobody else notices."""
    prompt = words(4, 300)
    outputs = [alone(model, prompt, seed) for seed in SEEDS]
    stop = outputs[1][3][1]
    assert all(stop not in [token for _, token, _ in output] for output in (outputs[0], outputs[2]))
    side = Side(model)
    sampling = dataclasses.replace(SAMPLED, stop_token_ids=(stop,))
    side.turns(api.Submit(several(local(1, prompt, sampling))), num=6)
    side.turns(api.AbortChoice(1, 0), api.AbortChoice(1, 0))
    ends = {e.choice: e for e in side.of(1, api.SequenceFinished)}
    assert ends[0].reason is None
    assert (ends[1].reason, ends[1].stop_token_id) == (FinishReason.STOP, stop)
    assert (ends[2].reason, ends[2].last) == (FinishReason.LENGTH, True)
    assert of_choice(side, 1, 0) == outputs[0][: len(of_choice(side, 1, 0))]
    assert of_choice(side, 1, 1) == outputs[1][:4]
    assert of_choice(side, 1, 2) == outputs[2]
    assert all_back(side)


def test_an_abort_ends_all_with_one_word(model):
    """Queued, computing, decoding, landing: one failure, and every page and credit returns."""
    for turns in (0, 1, 4):
        side = Side(model, budget=128)
        side.turns(api.Submit(several(local(1, words(2, 300)))), num=turns)
        side.turns(api.AbortSequence(1), num=1)
        assert isinstance(side.one(1, api.SequenceFailed).error, Cancelled)
        side.turns(num=2)
        assert all_back(side)
    side = Side(model)
    side.turns(api.Submit(several(leg(1, api.LegKind.GENERATE, words(2, 300)))), num=1)
    side.turns(api.AbortSequence(1), num=1)
    assert not all_back(side)
    side.turns(api.Release(1), num=1)
    assert all_back(side)


def test_more_choices_than_rows_are_refused_and_fewer_wait(model):
    """What can never fit is said at once; what does not fit now waits with nothing taken."""
    side = Side(model, pages=TINY)
    side.turns(api.Submit(several(local(1, words(1, 20)), tuple(range(5)))), num=2)
    refused = side.one(1, api.Refused).error
    assert (refused.reason, refused.param) == ("invalid_value", "n")
    assert "at most 4 choices" in str(refused)
    side.turns(api.Submit(local(2, words(1, 20))), api.Submit(local(3, words(2, 20))), num=1)
    side.turns(api.Submit(several(local(4, words(3, 20)))), num=1)
    assert not side.of(4, api.Reserved)
    side.turns()
    assert len(side.of(4, api.SequenceFinished)) == 3
    assert all_back(side)


def test_choices_publish_what_they_generate(model):
    """Each output is a chain of its own behind the shared prompt."""
    sampling = dataclasses.replace(SAMPLED, max_tokens=300)
    prompt = words(6, 300)
    side = Side(model, pages=LARGE)
    side.turns(api.Submit(several(local(1, prompt, sampling), SEEDS[:2])))
    assert side.manager.num_cached_blocks == 1 + 2
    for choice, seed in enumerate(SEEDS[:2]):
        output = of_choice(side, 1, choice)
        assert output == alone(model, prompt, seed, sampling)
        longer = prompt + tuple(token for _, token, _ in output) + words(9, 20)
        assert side.run(10 + choice, longer) == Side(model, cached=False).run(1, longer)
        assert side.cached_tokens(10 + choice) == 512
