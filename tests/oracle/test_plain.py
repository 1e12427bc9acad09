"""The plain reference against transformers, and what the comparison is worth: every known mistake shows in it."""

import pytest
import torch
from oracle import oracle
from oracle.builder import Variant, oracle_model, random_weights
from oracle.faults import FAULTS
from oracle.judge import LONG, LONG_CUTS, SHORT, SHORT_CUTS, TOLERANCE, Checkpoints, worst
from oracle.plain import Plain
from oracle.variants import BY_NAME, VARIANTS, each_variant

from headrace.model.config import ModelConfig

names = pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)


def plain(v: Variant, kind: type[Plain] = Plain) -> Plain:
    return kind(ModelConfig.from_dict(v.config()), random_weights(v))


@each_variant
def test_the_plain_reference_agrees_with_transformers(v: Variant, checkpoints: Checkpoints):
    """Two implementations that share no code, at every position: their rounding noise apart, the same logits."""
    record = checkpoints.record(v, SHORT, SHORT_CUTS)
    assert worst(plain(v).logits(record.prompt), record)[0] <= 2e-5
    assert record.logits.std() > 0.5  # a difference has something to show in


@pytest.mark.slow
@names
def test_the_plain_reference_agrees_over_long_prompts(v: Variant, checkpoints: Checkpoints):
    record = checkpoints.record(v, LONG, LONG_CUTS)
    assert worst(plain(v).logits(record.prompt), record)[0] <= 2e-5


@pytest.mark.slow
@names
@torch.no_grad()
def test_transformers_agrees_with_itself(v: Variant, checkpoints: Checkpoints):
    """The record was made through its cache, piece by piece; one whole pass gives the same, so neither is chance."""
    record = checkpoints.record(v, LONG, LONG_CUTS)
    whole = oracle_model(checkpoints.plain(v))(torch.tensor([record.prompt]), use_cache=False).logits[0]
    assert worst(whole, record)[0] <= 1e-5


IN_EVERY_RUN = 3
"""One mistake in so many; nightly all of them."""


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if index % IN_EVERY_RUN == 0 else pytest.mark.slow)
        for index, fault in enumerate(FAULTS)
    ],
)
def test_every_known_mistake_shows(fault: str, checkpoints: Checkpoints):
    """Within 140 tokens of one model, by ten tolerances and more."""
    v = BY_NAME["every_kind"]
    record = checkpoints.record(v, SHORT, SHORT_CUTS)
    assert worst(plain(v, FAULTS[fault]).logits(record.prompt[:140]), record)[0] > 10 * TOLERANCE


@each_variant
def test_no_position_of_a_prompt_is_in_doubt(v: Variant, checkpoints: Checkpoints):
    """Near ties were drawn again, so nothing is left out; and few greedy tokens have to be."""
    record = checkpoints.record(v, SHORT, SHORT_CUTS)
    assert record.gaps.min() >= oracle.TIE
    assert [c.length for c in record.continuations] == sorted(SHORT_CUTS)
    assert all(len(c.tokens) == oracle.GREEDY for c in record.continuations)
    assert sum(c.num_certain for c in record.continuations) >= 0.8 * oracle.GREEDY * len(SHORT_CUTS)
