"""Real workers on one Hopper GPU, shipping pages over NIXL from GPU memory to GPU memory."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from process.cluster import Cluster
from process.test_same_bits import check_same_bits

from headrace.kernels.cuda import build
from headrace.model.demo import ensure_demo

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and build.compiler() is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvcc")]


@pytest.mark.timeout(280)
def test_disaggregated_equals_monolithic_on_one_card(rng: random.Random) -> None:
    """Three workers share the card: other chunks, order, company and process for the first token, the same bits."""
    checkpoint: Path = ensure_demo()
    # A fifth of the card each; the pair finds the GPU by itself.
    words = ("--kv-dtype", "fp8", "--gpu-memory-utilization", "0.2", "--served-model-name", "demo")
    environment = {"UCX_TLS": os.environ.get("UCX_TLS", "all")}
    with (
        Cluster(checkpoint, *words, "--device", "cuda", "--monolithic", environment=environment) as one,
        Cluster(checkpoint, *words, "--max-num-batched-tokens", "320", environment=environment) as pair,
    ):
        one.wait_ready(150.0)
        pair.wait_ready(150.0)
        check_same_bits(one, pair, rng, 25)
