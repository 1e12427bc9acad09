"""What transformers says is what comes out of HTTP: token ids in, token ids out, over two workers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from oracle import oracle
from oracle.builder import random_weights, write_released, write_transformers
from oracle.variants import BY_NAME
from process.cluster import Cluster

pytestmark = pytest.mark.process

CUTS = (1, 4, 5, 128, 129, 255, 256, 257, 300)
"""Prompt lengths on both sides of the borders that a page, a window, a block and a compressor have."""


@pytest.mark.parametrize("dialect", ["released", pytest.param("transformers", marks=pytest.mark.slow)])
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, demo_checkpoint: Path, dialect: str):
    """Every prompt's leading tokens that no near tie puts in doubt, in fp32, through the completions endpoint."""
    variant = BY_NAME["every_kind"]
    for name in ("released", "transformers"):
        (tmp_path / name).mkdir()
    released = write_released(tmp_path / "released", variant, random_weights(variant))
    record = oracle.record(variant, max(CUTS), CUTS, lambda: released)
    model = released if dialect == "released" else write_transformers(tmp_path / "transformers", released)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_checkpoint / name, model / name)
    with Cluster(model, "--served-model-name", "tiny", "--dtype", "fp32", "--kv-dtype", "fp32") as cluster:
        cluster.wait_ready()
        for continuation in record.continuations:
            asked = record.prompt[: continuation.length]
            answer = cluster.complete(
                model="tiny", prompt=asked, max_tokens=oracle.GREEDY, temperature=0, ignore_eos=True,
                return_token_ids=True,
            )  # fmt: skip
            choice = answer["choices"][0]
            assert choice["prompt_token_ids"] == asked
            certain = continuation.num_certain
            assert choice["token_ids"][:certain] == continuation.tokens[:certain], continuation.length
        assert sum(continuation.num_certain for continuation in record.continuations) > 8 * len(CUTS)
