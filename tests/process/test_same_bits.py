"""Disaggregated output equals monolithic output bit for bit: tokens and log-probabilities, on real processes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from process.cluster import Cluster

pytestmark = pytest.mark.process

FIRST_ID, LAST_ID = 19, 511
"""Ordinary ids of the demo tokenizer; its special tokens come before."""
BORDERS = (1, 3, 4, 5, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025)
CONCURRENCY = 8
NUM_REQUESTS, LONGEST = 50, 2500
IN_EVERY_RUN = 25
"""Of each cache format; nightly all of them."""


def draw_requests(rng: random.Random, count: int, longest: int) -> list[dict[str, Any]]:
    """Greedy and sampled, short and long, with lengths on both sides of every border."""
    requests = []
    for _ in range(count):
        if rng.random() < 0.4:
            length = rng.choice([border for border in BORDERS if border <= longest])
        else:
            length = round(longest ** rng.random())
        request: dict[str, Any] = {
            "model": "demo",
            "prompt": [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)],
            "max_tokens": rng.randint(1, 24),
            "logprobs": rng.choice([0, 1, 5]),
            "return_token_ids": True,
            "ignore_eos": True,
            "seed": rng.getrandbits(40),
            "temperature": 0.0,
        }
        if rng.random() < 0.5:
            request["temperature"] = rng.choice([0.3, 1.0, 1.7])
            request["top_p"] = rng.choice([1.0, 0.9, 0.5])
            request["top_k"] = rng.choice([0, 5, 40])
            request["min_p"] = rng.choice([0.0, 0.05])
        if rng.random() < 0.3:
            request["repetition_penalty"] = 1.2
            request["frequency_penalty"] = 0.4
        requests.append(request)
    return requests


def ask_all(cluster: Cluster, requests: Sequence[dict[str, Any]], order: Sequence[int]) -> dict[int, Any]:
    """Several at once, in this order of arrival; by index, what must be equal."""

    def ask(index: int) -> tuple[int, Any]:
        choice = cluster.complete(**requests[index])["choices"][0]
        return index, (choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"])

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        return dict(pool.map(ask, order))


def check_same_bits(
    checkpoint: Path, kv_dtype: str, rng: random.Random, pairs: int = 1, num_requests: int = NUM_REQUESTS
) -> None:
    requests = draw_requests(rng, num_requests, LONGEST)
    workers = ("--prefill", str(pairs), "--decode", str(pairs))
    runs: dict[str, dict[int, Any]] = {}
    for name, words in {
        "monolithic": ("--monolithic", "--max-num-batched-tokens", "1024"),
        "disaggregated": (*workers, "--max-num-batched-tokens", "320"),
    }.items():
        order = rng.sample(range(num_requests), num_requests)
        with Cluster(checkpoint, "--served-model-name", "demo", "--kv-dtype", kv_dtype, *words) as cluster:
            cluster.wait_ready()
            runs[name] = ask_all(cluster, requests, order)
            if name == "disaggregated":
                decoders = [worker for worker in cluster.workers() if worker.startswith("decode")]
                taken = sum(cluster.state(worker)["transfers"]["taken"] for worker in decoders)
                assert taken >= sum(request["max_tokens"] > 1 for request in requests)
    for index, request in enumerate(requests):
        expected, found = runs["monolithic"][index], runs["disaggregated"][index]
        assert len(expected[0]) == len(expected[1]) == request["max_tokens"]
        assert found == expected, f"request {index}: {len(request['prompt'])} tokens, {request}"


@pytest.mark.parametrize("num_requests", [IN_EVERY_RUN, pytest.param(NUM_REQUESTS, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_disaggregated_equals_monolithic(demo_checkpoint: Path, kv_dtype: str, num_requests: int, rng: random.Random):
    """Other chunk size, other order, other company, another process for the first token: the same bits."""
    check_same_bits(demo_checkpoint, kv_dtype, rng, num_requests=num_requests)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", range(3))
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_two_pairs_equal_monolithic(demo_checkpoint: Path, kv_dtype: str, run: int, rng: random.Random):
    """More seeds, and requests that take any of four ways through two workers of each role."""
    check_same_bits(demo_checkpoint, kv_dtype, rng, pairs=2)
