"""Clients leave and workers die; every request ends once, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from process.cluster import Cluster, unclean

pytestmark = pytest.mark.process

NUM_REQUESTS = 200
NUM_LEAVERS = 50
CLEAN_S = 10.0
STALE_S = 8.0
"""How long /ready may speak of a worker that is gone: three missed beats and a little."""


@dataclass
class Outcome:
    """How one request ended, as its client saw it."""

    left: bool = False
    status: int = 0
    ends: list[str] = field(default_factory=list)
    """Each terminal thing that was received: `done`, `error`, `body`."""
    text: str = ""


async def ask(client: httpx.AsyncClient, request: dict[str, Any], leave_after_s: float | None) -> Outcome:
    outcome = Outcome()
    try:
        async with asyncio.timeout(leave_after_s):
            await _read(client, request, outcome)
    except TimeoutError:
        outcome.left = True
    return outcome


async def _read(client: httpx.AsyncClient, request: dict[str, Any], outcome: Outcome) -> None:
    async with client.stream("POST", "/v1/completions", json=request) as answer:
        outcome.status = answer.status_code
        if answer.status_code != 200 or not request["stream"]:
            outcome.text = (await answer.aread()).decode()
            outcome.ends.append("error" if "error" in json.loads(outcome.text) else "body")
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                outcome.ends.append("done")
            elif line.startswith("data: "):
                document = json.loads(line.removeprefix("data: "))
                if "error" in document:
                    outcome.ends.append("error")
                    outcome.text = line


def num_inside(cluster: Cluster) -> float:
    """Requests that the router has, or has had."""
    counted = ("headrace:num_requests_running", "headrace:num_requests_waiting", "headrace:request_success_total")
    return sum(cluster.count("router", sample) for sample in counted)


async def watch_ready(cluster: Cluster, seen: list[tuple[float, bool, set[str]]], storm_over: asyncio.Event) -> None:
    """What /ready says, beside which processes live, ten times a second, until it is over and all is ready again."""
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=5.0) as client:
        while not (storm_over.is_set() and seen and seen[-1][1]):
            living = await asyncio.to_thread(lambda: set(cluster.children()))
            answer = await client.get("/ready")
            seen.append((time.monotonic(), answer.status_code == 200, living))
            await asyncio.sleep(0.1)


async def storm(cluster: Cluster, rng: random.Random) -> tuple[list[Outcome], list[tuple[float, bool, set[str]]]]:
    requests = [
        {
            "model": "demo",
            "prompt": [rng.randint(19, 511) for _ in range(round(400 ** rng.random()))],
            "max_tokens": rng.randint(1, 32),
            "stream": rng.random() < 0.7,
            "temperature": rng.choice([0.0, 1.0]),
            "seed": rng.getrandbits(30),
            "ignore_eos": True,
        }
        for _ in range(NUM_REQUESTS)
    ]
    leavers = set(rng.sample(range(NUM_REQUESTS), NUM_LEAVERS))
    seen: list[tuple[float, bool, set[str]]] = []
    storm_over = asyncio.Event()
    watcher = asyncio.create_task(watch_ready(cluster, seen, storm_over))
    limits = httpx.Limits(max_connections=NUM_REQUESTS, max_keepalive_connections=NUM_REQUESTS)
    async with httpx.AsyncClient(base_url=cluster.url, trust_env=False, timeout=240.0, limits=limits) as client:
        asked = [
            asyncio.create_task(ask(client, request, rng.uniform(0.0, 6.0) if index in leavers else None))
            for index, request in enumerate(requests)
        ]
        # Whoever comes while a worker is missing is sent away at once; this is about those that were let in.
        await asyncio.to_thread(cluster.until, lambda: num_inside(cluster) >= NUM_REQUESTS // 2, 30.0, "let in")
        for victim in rng.sample(["prefill-0", "decode-0"], 2):
            await asyncio.sleep(rng.uniform(0.5, 2.0))
            await asyncio.to_thread(cluster.kill, victim)
        outcomes = await asyncio.gather(*asked)
    storm_over.set()
    await watcher
    return outcomes, seen


def test_every_request_ends_once_and_nothing_is_lost(mortal: Cluster, rng: random.Random):
    """200 at once, 50 leave at random, one prefill and one decode worker are killed and come back."""
    before = {child.pid for child in mortal.children().values()}
    outcomes, seen = asyncio.run(asyncio.wait_for(storm(mortal, rng), 240.0))

    stayed = [outcome for outcome in outcomes if not outcome.left]
    assert len(stayed) >= NUM_REQUESTS - NUM_LEAVERS
    for outcome in stayed:
        assert len(outcome.ends) == 1, outcome
        assert outcome.status == 200 or outcome.ends == ["error"], outcome
        assert outcome.status in (200, 429, 502, 503, 504), outcome
    good = sum(outcome.ends in (["done"], ["body"]) for outcome in stayed)
    assert good >= len(stayed) // 2, f"only {good} of {len(stayed)} were answered"

    # /ready may be late by the time a silent session takes to be noticed; it is never wrong for longer.
    needed = {"prefill-0", "decode-0"}
    lacking_since: float | None = None
    for now_s, ready, living in seen:
        if needed <= living:
            lacking_since = None
        else:
            lacking_since = lacking_since if lacking_since is not None else now_s
            assert not ready or now_s - lacking_since < STALE_S, "ready without its workers"
    assert any(not ready for _, ready, _ in seen)
    assert mortal.is_ready()

    end_s = time.monotonic() + CLEAN_S
    while any(unclean(mortal.state(name)) for name in mortal.workers()) and time.monotonic() < end_s:
        time.sleep(0.1)
    assert {name: unclean(mortal.state(name)) for name in mortal.workers()} == {"decode-0": [], "prefill-0": []}
    assert len(before & {child.pid for child in mortal.children().values()}) == 1, "both workers are new"
    answer = mortal.complete(model="demo", prompt="After the storm", max_tokens=4)
    assert answer["usage"]["completion_tokens"] >= 1
