"""Our engine against transformers in fp32: every prompt position, every greedy token, however the prompt is cut."""

import pytest
import torch
from oracle import oracle
from oracle.builder import Variant
from oracle.judge import LONG, LONG_CUTS, SHORT, SHORT_CUTS, Checkpoints, check
from oracle.ours import Ours
from oracle.variants import BY_NAME, VARIANTS, each_variant

from headrace.model.checkpoint import load_weights
from headrace.model.config import ModelConfig

CHUNKS = ([SHORT], [7, 1, 122, 37], [64], [3, 1, 124, 1, 127], [1])
"""Whole; across every border; page by page; up to each border; token by token."""
LONG_CHUNKS = ([LONG], [256], [1023, 1, 1, 100], [2047, 1])


def greedy_agrees(ours: Ours, record: oracle.Record) -> None:
    """All tokens that no near tie puts in doubt, from each recorded length, the prompt cut anew each time."""
    for turn, continuation in enumerate(record.continuations):
        chunks = (*CHUNKS[:-1], [256])[turn % len(CHUNKS)]
        tokens = ours.greedy(record.prompt[: continuation.length], oracle.GREEDY, chunks)
        certain = continuation.num_certain
        assert tokens[:certain] == continuation.tokens[:certain], f"after {continuation.length} tokens, cut as {chunks}"


@each_variant
def test_logits_and_greedy_tokens_are_those_of_transformers(v: Variant, checkpoints: Checkpoints):
    """Within 5e-5 at all positions; and the cuts change no bit."""
    record = checkpoints.record(v, SHORT, SHORT_CUTS)
    ours = Ours(checkpoints.packed(v))
    whole = ours.logits(record.prompt, CHUNKS[0])
    check(whole, record)
    for chunks in CHUNKS[1:]:
        assert torch.equal(ours.logits(record.prompt, chunks), whole), chunks
    greedy_agrees(ours, record)


@pytest.mark.slow
@pytest.mark.timeout(1200)  # the oracle itself is slow, and its record may have to be made
@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_long_prompts_are_those_of_transformers(v: Variant, checkpoints: Checkpoints):
    """2,500 tokens: many times more visible entries than are selected, every page and block border crossed."""
    record = checkpoints.record(v, LONG, LONG_CUTS)
    ours = Ours(checkpoints.plain(v))
    whole = ours.logits(record.prompt, LONG_CHUNKS[0])
    check(whole, record)
    for chunks in LONG_CHUNKS[1:]:
        assert torch.equal(ours.logits(record.prompt, chunks), whole), chunks
    greedy_agrees(ours, record)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_a_long_prompt_token_by_token(v: Variant, checkpoints: Checkpoints):
    """As decoding would: one token a step from the first on."""
    record = checkpoints.record(v, LONG, LONG_CUTS)
    check(Ours(checkpoints.plain(v)).logits(record.prompt, [1]), record)


@pytest.mark.parametrize("v", VARIANTS, ids=lambda v: v.name)
def test_all_dialects_are_the_same_model(v: Variant, checkpoints: Checkpoints):
    """Released bytes in shards, released names in plain floats, what transformers saved: equal configs and values."""
    paths = [checkpoints.plain(v), checkpoints.packed(v), checkpoints.transformers(v)]
    configs = [ModelConfig.load(path) for path in paths]
    plain, packed, saved = (load_weights(path, c) for path, c in zip(paths, configs, strict=True))
    assert {c.expert_dtype for c in configs} == {None, "fp4"}
    assert len({repr(c).partition("expert_dtype")[0] for c in configs}) == 1
    for name, value in plain.items():
        assert torch.equal(value, packed[name]), name
        assert torch.equal(value, saved[name]), name
    assert plain.keys() == packed.keys() == saved.keys()


def test_every_dialect_gives_the_oracle_s_logits(checkpoints: Checkpoints):
    """From each directory to logits, with nothing in between shared but the code under test."""
    v = BY_NAME["every_kind"]
    record = checkpoints.record(v, SHORT, SHORT_CUTS)
    for path in (checkpoints.plain(v), checkpoints.packed(v), checkpoints.transformers(v)):
        check(Ours(path).logits(record.prompt, [129, 64]), record)
