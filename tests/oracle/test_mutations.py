"""The parity check is worth its name: every known mistake, put into our own model, fails it; the means alone do not."""

import pytest
import torch
from oracle.builder import random_weights
from oracle.faults import FAULTS
from oracle.judge import SHORT, SHORT_CUTS, TOLERANCE, Checkpoints, check, worst
from oracle.mutations import MUTATIONS, RIGHT, Bench
from oracle.oracle import Record
from oracle.variants import BY_NAME

from headrace.model.config import ModelConfig

V = BY_NAME["every_kind"]
TOKENS = 140
"""Beyond the window's end, and past twice the entries that are selected."""
CHUNKS = [TOKENS - 3, 1]
"""Most of it at once, so that a window of 129 finds its pages; then token by token, through the rolling rows."""


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return random_weights(V)


@pytest.fixture
def bench(weights: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A mistake may be put into the weights: each gets its own."""
    own = {name: tensor.clone() for name, tensor in weights.items()}
    return Bench(ModelConfig.from_dict(V.config()), own, monkeypatch)


@pytest.fixture
def record(checkpoints: Checkpoints) -> Record:
    return checkpoints.record(V, SHORT, SHORT_CUTS)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_in_our_model_fails_parity(name: str, bench: Bench, record: Record):
    """By ten tolerances or more, so that none hides below the border."""
    logits = MUTATIONS[name](bench).logits(record.prompt[:TOKENS], CHUNKS)
    with pytest.raises(AssertionError):
        check(logits, record)
    assert worst(logits, record)[0] > 10 * TOLERANCE


@pytest.mark.parametrize("name", RIGHT)
def test_the_means_alone_pass(name: str, bench: Bench, record: Record):
    """What a mutation replaces a step by is right but for the mistake in it."""
    check(RIGHT[name](bench).logits(record.prompt[:TOKENS], CHUNKS), record)


def test_our_model_is_tried_with_every_fault_of_the_reference():
    """Both lists grow together; ours has, besides, what only a cache can get wrong."""
    assert MUTATIONS.keys() - FAULTS.keys() == {"rolling_rows_lost"}
    assert not FAULTS.keys() - MUTATIONS.keys()
