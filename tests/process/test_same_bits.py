"""Disaggregated output equals monolithic output bit for bit: tokens and log-probabilities, on real processes."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
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
OVER_CMA = {"UCX_TLS": "cma,tcp,self"}
"""By NIXL; other tests go over shared memory and, with deadlines that matter there, over TCP."""
NUM_REQUESTS, LONGEST = 50, 2500
IN_EVERY_RUN = 12
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


def num_taken(cluster: Cluster) -> int:
    """Transfers that came to their end so far."""
    return sum(cluster.state(name)["transfers"]["taken"] for name in cluster.workers() if name.startswith("decode"))


def check_same_bits(one: Cluster, pairs: Cluster, rng: random.Random, num_requests: int = NUM_REQUESTS) -> None:
    requests = draw_requests(rng, num_requests, LONGEST)
    expected = ask_all(one, requests, rng.sample(range(num_requests), num_requests))
    before = num_taken(pairs)
    found = ask_all(pairs, requests, rng.sample(range(num_requests), num_requests))
    travelling = sum(request["max_tokens"] > 1 for request in requests)
    # Another process counts them, and tells of it a little later.
    pairs.until(lambda: num_taken(pairs) - before >= travelling, 5.0, f"{travelling} transfers")
    for index, request in enumerate(requests):
        assert len(expected[index][0]) == len(expected[index][1]) == request["max_tokens"]
        assert found[index] == expected[index], f"request {index}: {len(request['prompt'])} tokens, {request}"


@contextlib.contextmanager
def started(checkpoint: Path, kv_dtype: str, num_pairs: int) -> Iterator[tuple[Cluster, Cluster]]:
    """(monolithic, disaggregated), with chunks of different sizes."""
    words = ("--served-model-name", "demo", "--kv-dtype", kv_dtype, "--max-num-batched-tokens")
    workers = ("--prefill", str(num_pairs), "--decode", str(num_pairs))
    with (
        Cluster(checkpoint, *words, "1024", "--monolithic") as one,
        Cluster(checkpoint, *words, "320", *workers, environment=OVER_CMA) as pairs,
    ):
        one.wait_ready()
        pairs.wait_ready()
        yield one, pairs


NUMBERS = [IN_EVERY_RUN, pytest.param(NUM_REQUESTS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]


@pytest.mark.parametrize("num_requests", NUMBERS)
def test_disaggregated_equals_monolithic(one: Cluster, pair: Cluster, num_requests: int, rng: random.Random):
    """Other chunk size, other order, other company, another process for the first token: the same bits."""
    check_same_bits(one, pair, rng, num_requests)


@pytest.mark.parametrize("num_requests", NUMBERS)
def test_disaggregated_equals_monolithic_in_bf16(demo_checkpoint: Path, num_requests: int, rng: random.Random):
    """The same with caches that are rounded otherwise."""
    with started(demo_checkpoint, "bf16", 1) as (one, pair):
        check_same_bits(one, pair, rng, num_requests)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", range(3))
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_two_pairs_equal_monolithic(demo_checkpoint: Path, kv_dtype: str, run: int, rng: random.Random):
    """More seeds, and requests that take any of four ways through two workers of each role."""
    with started(demo_checkpoint, kv_dtype, 2) as (one, pairs):
        check_same_bits(one, pairs, rng)
