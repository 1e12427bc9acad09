"""One engine prefills, another decodes: pages gathered, scattered into other pages, and not a bit differs."""

import pytest
from support.side import Side, leg, local, make_model, ship, words

from headrace.core.pools import PoolKind
from headrace.core.sampling import SamplingParams
from headrace.core.segments import RangeKind
from headrace.engine import api
from headrace.model.transformer import Transformer

PAGES = {PoolKind.HISTORY: 12, PoolKind.WINDOW: 40, PoolKind.STATE: 4}


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


def disaggregated(model: Transformer, kv_dtype: str, prompt: tuple[int, ...], skip: RangeKind | None = None) -> list:
    p, d = (Side(model, kv_dtype, PAGES, cached=False, budget=budget) for budget in (96, 2048))
    # Others were here: page ids differ between the sides.
    d.turns(api.Submit(local(9, (2,) * 70, SamplingParams(max_tokens=1))), num=1)
    p.turns(api.Submit(leg(1, api.LegKind.PREFILL, prompt)), api.Start(1))
    d.turns(api.Submit(leg(1, api.LegKind.GENERATE, prompt)))
    first = p.one(1, api.TokenSampled)
    ship(p, d, 1, len(prompt), skip)
    p.turns(api.Release(1))
    d.turns(api.Admit(1, first.token, first.index))
    for side in (p, d):
        assert all(c.free == c.total and not c.reserved for c in side.manager.counts().values())
    return p.output(1) + d.output(1)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("length", [1, 3, 4, 127, 128, 129, 255, 256, 257, 518])
def test_disaggregated_is_local_bit_for_bit(model: Transformer, kv_dtype: str, length: int) -> None:
    """Tokens and log-probabilities, for prompts at every border."""
    prompt = words(length, length)
    alone = Side(model, kv_dtype, PAGES, cached=False).run(1, prompt)
    assert len(alone) == 9
    assert disaggregated(model, kv_dtype, prompt) == alone


@pytest.mark.parametrize("skip", list(RangeKind))
def test_a_missing_part_is_never_silent(model: Transformer, skip: RangeKind) -> None:
    """Without the history, the window or the compressor rows, poisoned pages make the sequence fail."""
    tokens = disaggregated(model, "fp8", words(518, 518), skip)
    assert len(tokens) < 9
