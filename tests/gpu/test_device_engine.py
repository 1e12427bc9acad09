"""Whole engines on Hopper: the same tokens and log-probabilities alone and in company, local and disaggregated."""

from __future__ import annotations

import pytest
import torch
from oracle.builder import random_weights
from support.side import LARGE, SAMPLED, VARIANT, Side, leg, local, ship, words

from headrace.core.sampling import SamplingParams
from headrace.core.segments import RangeKind
from headrace.engine import api
from headrace.kernels.cuda import build
from headrace.kernels.cuda.hopper import HopperOps
from headrace.model.config import ModelConfig
from headrace.model.device import DeviceTransformer
from headrace.model.device_graphs import GraphedTransformer

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and build.compiler() is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvcc")]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def inner() -> DeviceTransformer:
    weights = {k: v if v.dtype == torch.int64 else v.float() for k, v in random_weights(VARIANT).items()}
    config = ModelConfig.from_dict(VARIANT.config())
    return DeviceTransformer(config, weights, HopperOps(), max_positions=4096, device=torch.device("cuda", 0))


def make_side(inner: DeviceTransformer, **settings: object) -> Side:
    """Graphs belong to the pools that they were captured with."""
    return Side(GraphedTransformer(inner, max_tokens=8, max_blocks=16), device="cuda", **settings)


def tokens_of(side: Side, key: int) -> list[tuple[int, int]]:
    return [(event.index, event.token) for event in side.of(key, api.TokenSampled)]


def test_tokens_do_not_depend_on_chunks_or_company(inner: DeviceTransformer) -> None:
    """Six requests at once in small chunks, each alone in large ones; drawn with log-probabilities, and greedy."""
    prompts = {key: words(key, length) for key, length in enumerate((1, 5, 130, 257, 700, 1030), 1)}
    together, alone = make_side(inner, cached=False, budget=200), make_side(inner, cached=False)
    for turn, sampling in enumerate((SAMPLED, GREEDY)):
        keys = {10 * turn + key: prompt for key, prompt in prompts.items()}
        together.turns(*(api.Submit(local(key, prompt, sampling)) for key, prompt in keys.items()))
        for key, prompt in keys.items():
            alone.turns(api.Submit(local(key, prompt, sampling)))
            assert len(tokens_of(alone, key)) == sampling.max_tokens
            assert tokens_of(together, key) == tokens_of(alone, key)
            if sampling.logprobs is not None:
                assert together.output(key) == alone.output(key)


@pytest.mark.parametrize("length", [1, 4, 128, 257, 700])
def test_disaggregated_is_local_bit_for_bit(inner: DeviceTransformer, length: int) -> None:
    """Pages gathered and scattered on the device, between two engines of one process."""
    prompt = words(length, length)
    alone = make_side(inner, cached=False).run(1, prompt)
    assert len(alone) == 9
    p, d = (make_side(inner, cached=False, budget=budget) for budget in (96, 2048))
    d.turns(api.Submit(local(9, (2,) * 70, SamplingParams(max_tokens=1))), num=1)
    p.turns(api.Submit(leg(1, api.LegKind.PREFILL, prompt)), api.Start(1))
    d.turns(api.Submit(leg(1, api.LegKind.GENERATE, prompt)))
    first = p.one(1, api.TokenSampled)
    ship(p, d, 1, len(prompt))
    p.turns(api.Release(1))
    d.turns(api.Admit(1, first.token, first.index))
    for side in (p, d):
        assert all(c.free == c.total and not c.reserved for c in side.manager.counts().values())
    assert p.output(1) + d.output(1) == alone


@pytest.mark.parametrize("skip", list(RangeKind))
def test_a_missing_part_is_never_silent(inner: DeviceTransformer, skip: RangeKind) -> None:
    """Poisoned pages make the sequence fail here too."""
    prompt = words(518, 518)
    p, d = (make_side(inner, cached=False) for _ in range(2))
    p.turns(api.Submit(leg(1, api.LegKind.PREFILL, prompt)), api.Start(1))
    d.turns(api.Submit(leg(1, api.LegKind.GENERATE, prompt)))
    first = p.one(1, api.TokenSampled)
    ship(p, d, 1, len(prompt), skip)
    d.turns(api.Admit(1, first.token, first.index))
    assert len(d.output(1)) < 8


def test_a_prefix_hit_gives_the_bits_of_a_cold_run(inner: DeviceTransformer) -> None:
    """Check-points, replays at a border, pages that are read and never written."""
    shared = words(3, 900)
    warm = make_side(inner, pages=LARGE)
    warm.run(1, shared)
    for key, tail in enumerate((words(4, 5), words(5, 300)), 2):
        for cut in (900, 640):
            prompt = shared[:cut] + tail
            cold = make_side(inner, cached=False).run(key, prompt)
            assert warm.run(10 * key + cut, prompt) == cold
            assert warm.cached_tokens(10 * key + cut) > 0
