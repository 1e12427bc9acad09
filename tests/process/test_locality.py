"""Conversations find their prefix again: reused tokens by the workers' own count, before and after a death.

*Reusable* of a turn is its prompt up to the last full block that any worker held when it was sent, and that may be hit
at all: a worker holds a position once it has computed it, so of an answer all but the last token, and the last token of
a prompt is always computed.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from process.cluster import Cluster
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.process

BLOCK = 256
LEAST_REUSED = 0.95


@dataclass
class Turn:
    """What the client knows of one turn."""

    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int


@dataclass
class Conversation:
    """Token ids so far; everything it sends is new to all others."""

    rng: random.Random
    ids: list[int] = field(default_factory=list)
    held_tokens: int = 0
    """Positions that some worker has computed."""
    turns: list[Turn] = field(default_factory=list)

    async def say(self, client: httpx.AsyncClient, num_new: int, num_answer: int) -> Turn:
        self.ids += [self.rng.randint(20, 500) for _ in range(num_new)]
        reusable = min(self.held_tokens, len(self.ids) - 1) // BLOCK * BLOCK
        body = {
            "model": "demo",
            "prompt": self.ids,
            "max_tokens": num_answer,
            "ignore_eos": True,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        answer = await client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        document = answer.json()
        usage = document["usage"]
        assert usage["prompt_tokens"] == len(self.ids)
        turn = Turn(len(self.ids), usage["prompt_tokens_details"]["cached_tokens"], reusable)
        self.ids += document["choices"][0]["token_ids"]
        self.held_tokens = len(self.ids) - 1
        self.turns.append(turn)
        return turn


def samples(text: str) -> Counter[str]:
    """By name and label values, joined."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[" ".join([sample.name, *(value for _, value in sorted(sample.labels.items()))])] += sample.value
    return found


def of_router(cluster: Cluster) -> Counter[str]:
    return samples(cluster.http.get("/metrics").text)


def of_workers(cluster: Cluster) -> Counter[str]:
    """Summed over all of them."""
    found: Counter[str] = Counter()
    for child in cluster.children().values():
        if child.status_port is not None:
            url = f"http://127.0.0.1:{child.status_port}/metrics"
            found += samples(httpx.get(url, timeout=10.0, trust_env=False).text)
    return found


def indexes(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """What the router believes of each worker."""
    document = cluster.http.get("/server_info").json()
    return {worker["worker_id"]: worker for worker in document["workers"]}


def is_exact(cluster: Cluster) -> bool:
    """Every index is exact and has what its worker says that it holds."""
    known = indexes(cluster)
    for name in cluster.workers():
        state, index = cluster.state(name), known.get(name, {}).get("index", {})
        if index.get("state") != "exact" or known[name]["incarnation"] != state["incarnation"]:
            return False
        if index["blocks"] != state["prefix_cache"]["blocks"]:
            return False
    return len(known) == len(cluster.workers())


def over_predictions(metrics: Counter[str]) -> float:
    """Prefills of which more was believed to be cached than there was."""
    name = "headrace:router_predicted_vs_actual_hit_tokens"
    return metrics[f"{name}_count"] - metrics[f"{name}_bucket 0.0"]


async def talk(cluster: Cluster, conversations: list[Conversation], num_turns: int, first: int) -> None:
    """All at once, each one turn after the other."""

    async def one(conversation: Conversation, client: httpx.AsyncClient) -> None:
        rng = conversation.rng
        for _ in range(num_turns):
            num_new = rng.randint(60, 160) if conversation.turns else rng.randint(first // 2, first)
            await conversation.say(client, num_new, rng.randint(24, 48))

    limits = httpx.Limits(max_connections=100)
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=240.0, limits=limits) as client:
        await asyncio.gather(*(one(conversation, client) for conversation in conversations))


def told(conversations: list[Conversation], first_turn: int = 0) -> tuple[int, int]:
    """(reused, reusable) tokens by the usage of these turns."""
    turns = [turn for conversation in conversations for turn in conversation.turns[first_turn:]]
    return sum(turn.cached_tokens for turn in turns), sum(turn.reusable_tokens for turn in turns)


def check_locality(
    checkpoint: Path, rng: random.Random, *, prefill: int, decode: int, num: int, turns: int, first: int
) -> None:
    words = ("--prefill", str(prefill), "--decode", str(decode), "--served-model-name", "demo")
    with Cluster(checkpoint, *words) as cluster:
        cluster.wait_ready()
        cluster.until(lambda: is_exact(cluster), 10.0, "exact indexes")
        conversations = [Conversation(random.Random(rng.getrandbits(30))) for _ in range(num)]
        asyncio.run(asyncio.wait_for(talk(cluster, conversations, turns, first), 240.0))

        reused, reusable = told(conversations)
        counted = of_workers(cluster)
        decisions = {key: value for key, value in of_router(cluster).items() if "router_decisions_total " in key}
        print(f"reused {reused} of {reusable}; {decisions}")
        by_workers = sum(counted[f"headrace:prefix_cache_hits_total {kind}"] for kind in ("prefill", "local"))
        assert by_workers == reused, "usage says what the workers count"
        looked_up = sum(counted[f"headrace:prefix_cache_queries_total {kind}"] for kind in ("prefill", "local"))
        assert looked_up == sum(turn.prompt_tokens for c in conversations for turn in c.turns)
        assert counted["headrace:prompt_tokens_by_source_total computed"] == looked_up - reused
        assert reused >= LEAST_REUSED * reusable, f"{reused} of {reusable}; {decisions}"
        assert over_predictions(of_router(cluster)) == 0

        # Whoever holds most dies; its blocks are gone, the router knows, and the conversations go on.
        cluster.until(lambda: is_exact(cluster), 10.0, "exact indexes")
        for role in ("prefill", "decode"):
            names = [name for name in cluster.workers() if name.startswith(role)]
            victim = max(names, key=lambda name: cluster.state(name)["prefix_cache"]["blocks"])
            before = cluster.state(victim)["incarnation"]
            cluster.kill(victim)
            cluster.until(
                lambda victim=victim, before=before: (
                    indexes(cluster).get(victim, {}).get("incarnation", before) != before
                ),
                60.0,
                f"a new life of {victim}",
            )
            cluster.until(lambda: cluster.is_ready() and is_exact(cluster), 60.0, "exact indexes")
            assert cluster.state(victim)["prefix_cache"]["blocks"] == 0
            asyncio.run(asyncio.wait_for(talk(cluster, conversations, 1, first), 240.0))
            cluster.until(lambda: is_exact(cluster), 10.0, "exact indexes")
            assert over_predictions(of_router(cluster)) == 0
        reused_after, _ = told(conversations, turns)
        assert reused_after > 0


def test_salts_never_share_and_every_surface_tells_the_same(pair: Cluster, rng: random.Random):
    """Resent under its salt a prompt is cached up to its last full block, under another it is not at all."""
    prompt = [rng.randint(20, 500) for _ in range(3 * BLOCK + 40)]

    def cached(salt: str | None, **changes: Any) -> int:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 4, **({"cache_salt": salt} if salt else {}), **changes}
        if not body.get("stream"):
            return int(pair.complete(**body)["usage"]["prompt_tokens_details"]["cached_tokens"])
        answer = pair.http.post("/v1/completions", json={**body, "stream_options": {"include_usage": True}})
        last = [line for line in answer.text.splitlines() if line.startswith("data: {")][-1]
        return int(json.loads(last.removeprefix("data: "))["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached("red") == 0
    for changes in ({}, {"stream": True}, {"n": 2}):
        assert cached("red", **changes) == 3 * BLOCK
    assert cached("blue") == 0
    assert cached(None) == 0
    assert cached(None, stream=True) == 3 * BLOCK
    assert over_predictions(of_router(pair)) == 0


def test_conversations_find_their_prefix(demo_checkpoint: Path, rng: random.Random):
    """Four of them over one prefill and two decode workers."""
    check_locality(demo_checkpoint, rng, prefill=1, decode=2, num=3, turns=4, first=600)


@pytest.mark.slow
def test_twenty_conversations_find_their_prefix(demo_checkpoint: Path, rng: random.Random):
    """Six turns each over three prefill and three decode workers."""
    check_locality(demo_checkpoint, rng, prefill=3, decode=3, num=20, turns=6, first=1000)
