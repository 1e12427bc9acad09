"""Sampling: what each setting does, and that nothing but row, history and index matters."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from headrace.core.sampling import SamplingParams
from headrace.engine.sampler import BrokenLogits, History, raw_logprobs, sample, uniform

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]))
PLAIN = SamplingParams(temperature=1.0, seed=7)


def frequencies(params: SamplingParams, draws: int = 4000) -> dict[int, float]:
    counts = Counter(sample(LOGITS, params, History(), i)[0] for i in range(draws))
    return {token: count / draws for token, count in counts.items()}


def test_draws_are_uniform_and_apart() -> None:
    """Neither neighbouring indices nor neighbouring seeds are tied."""
    draws = [uniform(seed, i) for seed in (-3, 0, 1, 2**63 - 1) for i in range(1000)]
    assert len(set(draws)) == len(draws)
    assert abs(sum(draws) / len(draws) - 0.5) < 0.02
    assert all(0.0 <= d < 1.0 for d in draws)


def test_temperature_one_draws_the_distribution() -> None:
    """Frequencies are the probabilities."""
    seen = frequencies(PLAIN)
    for token, p in enumerate([0.1, 0.4, 0.05, 0.25, 0.2]):
        assert abs(seen[token] - p) < 0.03


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ({"top_k": 2}, {1, 3}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"min_p": 0.45}, {1, 3, 4}),
        ({"allowed_token_ids": (0, 2)}, {0, 2}),
        ({"logit_bias": {1: -100.0}}, {0, 2, 3, 4}),
        ({"logit_bias": {2: 100.0}}, {2}),
        ({"temperature": 0.0}, {1}),
        ({"min_tokens": 9999, "eos_token_ids": (1,), "stop_token_ids": (3,)}, {0, 2, 4}),
    ],
)
def test_settings_keep_the_right_tokens(change: dict[str, object], kept: set[int]) -> None:
    """Each filter leaves exactly its tokens."""
    assert set(frequencies(replace(PLAIN, **change), 1500)) == kept


def test_penalties_count_what_they_say() -> None:
    """Repetition looks at prompt and output, presence and frequency at the output alone."""
    greedy = replace(PLAIN, temperature=0.0)
    history = History.of([1, 1, 3], 1)
    assert sample(LOGITS, greedy, history, 0)[0] == 1
    assert sample(LOGITS, replace(greedy, presence_penalty=2.0), history, 0)[0] == 1
    assert sample(LOGITS, replace(greedy, repetition_penalty=3.0), history, 0)[0] == 4
    history.add(1)
    assert sample(LOGITS, replace(greedy, frequency_penalty=1.0), history, 0)[0] == 4


def test_log_probabilities_are_of_the_raw_distribution() -> None:
    """Filters and bias do not move them; ranks count from 1."""
    token, got = sample(LOGITS, replace(PLAIN, logit_bias={2: 100.0}, logprobs=2), History(), 0)
    assert token == 2
    assert got is not None
    assert math.isclose(got.logprob, math.log(0.05), rel_tol=1e-6)
    assert got.rank == 5
    assert [t for t, _ in got.top] == [1, 3]
    assert raw_logprobs(torch.zeros(4), 3, 2).top[0][0] == 0


def test_no_token_is_made_of_nan() -> None:
    """A broken row is an error."""
    broken = LOGITS.clone()
    broken[3] = math.nan
    with pytest.raises(BrokenLogits):
        sample(broken, PLAIN, History(), 0)
