"""Tokens of a step whose logits lie on a device: those that the sampler gives of the same rows on the host."""

import dataclasses

import pytest
import torch

from headrace.core.sampling import SamplingParams
from headrace.engine.sampler import BrokenLogits, History, sample
from headrace.engine.step_logits import StepLogits, is_plain_greedy
from headrace.kernels.device import PlainOps

GREEDY = SamplingParams(temperature=0.0)
OTHERS = [
    {"temperature": 1.0, "seed": 7}, {"logprobs": 2}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.5},
    {"frequency_penalty": 0.5}, {"logit_bias": {3: 9.0}}, {"allowed_token_ids": (4, 9)},
    {"min_tokens": 9, "stop_token_ids": (1, 2)},
]  # fmt: skip


def make_logits(seed: int) -> torch.Tensor:
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(seed))
    logits[1, 7] = logits[1, 50] = 9.0  # a tie goes to the lower id
    return logits


@pytest.mark.parametrize("changes", [{}, *OTHERS])
def test_rows_on_a_device_give_the_sampler_s_tokens(changes: dict) -> None:
    params, logits = dataclasses.replace(GREEDY, **changes), make_logits(3)
    assert is_plain_greedy(params, 2) == (not changes)
    seen = StepLogits(logits, PlainOps(torch.float32).likeliest(logits))
    for row in range(5):
        for index in (0, 4):
            history = History.of([5, 6, 7], 2)
            assert seen.sample(row, params, history, index, 2) == sample(logits[row], params, history, index, 2)


def test_a_row_that_is_no_number_gives_no_token() -> None:
    """Its neighbours do."""
    logits = make_logits(4)
    logits[2, 11] = float("nan")
    seen = StepLogits(logits, PlainOps(torch.float32).likeliest(logits))
    for params in (GREEDY, dataclasses.replace(GREEDY, logprobs=0)):
        with pytest.raises(BrokenLogits):
            seen.sample(2, params, History(), 0, 0)
        assert seen.sample(1, params, History(), 0, 0)[0] == 7


def test_a_step_without_logits_samples_nothing() -> None:
    nothing = torch.empty(0, 60)
    StepLogits(nothing, PlainOps(torch.float32).likeliest(nothing))
    StepLogits(nothing, None)
