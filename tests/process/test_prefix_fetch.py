"""A prefill worker that has lost its cache takes the prefix from the decode worker, and nothing changes by a bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from process.cluster import READY_LIMIT_S, Cluster

pytestmark = pytest.mark.process

FIRST_TOKENS = 2200
ANSWER_TOKENS = 120
BORDER = 2304
"""The answer passes it; the decode worker keeps a check-point there."""


def bits(answer: dict[str, Any]) -> Any:
    choice = answer["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def test_prefix_is_fetched_from_the_decode_worker(mortal: Cluster, one: Cluster, rng: random.Random) -> None:
    """The second turn of a conversation whose prefill worker died: fetched, computed from the border on, and equal to
    a monolithic worker's answer."""

    def ask(cluster: Cluster, ids: list[int], tokens: int) -> dict[str, Any]:
        return cluster.complete(
            model="demo", prompt=ids, max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=0,
            return_token_ids=True,
        )  # fmt: skip

    ids = [rng.randint(20, 500) for _ in range(FIRST_TOKENS)]
    first = ask(mortal, ids, ANSWER_TOKENS)
    ids += first["choices"][0]["token_ids"]
    pid = mortal.children()["prefill-0"].pid
    mortal.kill("prefill-0")

    def is_reborn() -> bool:
        child = mortal.children().get("prefill-0")
        return child is not None and child.pid != pid

    mortal.until(is_reborn, READY_LIMIT_S, "started again")
    mortal.until(mortal.is_ready, READY_LIMIT_S, "whole again")
    ids += [rng.randint(20, 500) for _ in range(700)]
    before = mortal.count("router", "headrace:prefix_fetches_total")
    second = ask(mortal, ids, 20)
    assert mortal.count("router", "headrace:prefix_fetches_total", outcome="fetched") == before + 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == BORDER
    assert bits(second) == bits(ask(one, ids, 20))
    mortal.until_clean()
