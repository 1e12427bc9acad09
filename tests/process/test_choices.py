"""Several choices of one prompt over real workers: one prefill, one transfer, and the bits of as many requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process.cluster import Cluster

from headrace.router.request import choice_seed

pytestmark = pytest.mark.process

N = 3
FIRST_ID, LAST_ID = 19, 511
BORDERS = (1, 3, 127, 128, 129, 255, 256, 257, 511, 513, 1025)


def draw_requests(rng: random.Random) -> list[dict[str, Any]]:
    """Sampled, with prompts on both sides of every border."""
    return [
        {
            "model": "demo",
            "prompt": [rng.randint(FIRST_ID, LAST_ID) for _ in range(length)],
            "max_tokens": rng.choice([1, 2, 9, 20]),
            "n": N,
            "logprobs": rng.choice([0, 3]),
            "return_token_ids": True,
            "ignore_eos": rng.random() < 0.7,
            "seed": rng.getrandbits(40),
            "temperature": rng.choice([0.7, 1.0, 1.7]),
            "frequency_penalty": rng.choice([0.0, 0.4]),
            "cache_salt": str(length),
        }
        for length in BORDERS
    ]


def bits(answer: dict[str, Any]) -> list[Any]:
    """By choice: tokens, log-probabilities and the end."""
    return [
        (choice["token_ids"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"],
         choice["text"], choice["finish_reason"])
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
    ]  # fmt: skip


def work_of(cluster: Cluster) -> tuple[float, float, float]:
    """(prefill legs, generate legs, transfers taken) so far."""
    return (
        cluster.count("prefill-0", "headrace:legs_opened_total", kind="prefill"),
        cluster.count("decode-0", "headrace:legs_opened_total", kind="generate"),
        cluster.count("decode-0", "headrace:kv_transfers_total", direction="in"),
    )


def test_choices_are_the_bits_of_as_many_requests(pair: Cluster, one: Cluster, rng: random.Random):
    """Disaggregated, monolithic, and each choice as a request of its own with that choice's seed: all the same."""
    requests = draw_requests(rng)
    found = []
    for request in requests:
        before = work_of(pair)
        answer = pair.complete(**request)
        found.append(bits(answer))
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(request["prompt"])
        assert usage["completion_tokens"] == sum(len(choice[0]) for choice in found[-1])
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        # With every choice ended by its first token there is nothing to take.
        transfers = int(request["max_tokens"] > 1 and any(len(choice[0]) > 1 for choice in found[-1]))
        expected = tuple(a + b for a, b in zip(before, (1, 1, transfers), strict=True))
        # Transfers are counted in another process, which tells of it a little later.
        pair.until(lambda: work_of(pair) == expected, 5.0, f"{expected} counted")  # noqa: B023
    assert any(len({tuple(choice[0]) for choice in choices}) == N for choices in found), "the choices differ"
    for request, choices in zip(requests, found, strict=True):
        for choice in range(N):
            alone = {**request, "n": 1, "seed": choice_seed(request["seed"], choice)}
            assert bits(pair.complete(**alone)) == [choices[choice]], (choice, request)
    for request, choices in zip(requests, found, strict=True):
        assert bits(one.complete(**request)) == choices, request
    one.until_clean()
    pair.until_clean()


def streamed(cluster: Cluster, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Events of a stream as they come, the closing word last, as an empty document."""
    with cluster.http.stream("POST", "/v1/completions", json={**request, "stream": True}, timeout=120.0) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                yield {}
            elif line.startswith("data: "):
                yield json.loads(line.removeprefix("data: "))


def long_request(rng: random.Random, **changes: Any) -> dict[str, Any]:
    return {
        "model": "demo",
        "prompt": [rng.randint(FIRST_ID, LAST_ID) for _ in range(300)],
        "max_tokens": 300,
        "n": N,
        "seed": rng.getrandbits(40),
        "temperature": 1.0,
        "ignore_eos": True,
        "return_token_ids": True,
        **changes,
    }


def test_stop_string_ends_one_choice_early(pair: Cluster, rng: random.Random):
    """The others come to their ends; the decode worker computes no more of the one."""
    request = long_request(rng)
    whole = [choice["text"] for choice in pair.complete(**request)["choices"]]
    stop = next(
        whole[1][at : at + 6]
        for at in range(8, len(whole[1]))
        if all(whole[1][at : at + 6] not in text for text in (whole[0], whole[2]))
    )
    before = pair.count("decode-0", "headrace:generation_tokens_total")
    answer = pair.complete(**request, stop=stop)
    assert [choice["text"] for choice in answer["choices"]] == [whole[0], whole[1][: whole[1].index(stop)], whole[2]]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "stop", "length"]
    assert answer["choices"][1]["stop_reason"] == stop
    made = pair.count("decode-0", "headrace:generation_tokens_total") - before
    assert made < N * (request["max_tokens"] - 1)
    pair.until_clean()


def test_client_that_leaves_leaves_nothing(pair: Cluster, rng: random.Random):
    """Before, at and after the first tokens."""
    for num_events in (0, 1, 10):
        events = streamed(pair, long_request(rng, max_tokens=700, prompt=[rng.randint(FIRST_ID, LAST_ID)] * 900))
        for _ in range(num_events):
            next(events)
        events.close()
        pair.until_clean()


def test_more_choices_than_a_worker_can_ever_hold_are_refused(pair: Cluster, rng: random.Random):
    """At once, as the client's to change; and at the edge beyond the bound of the API."""
    for n in (128, 129):
        answer = pair.http.post("/v1/completions", json=long_request(rng, n=n, max_tokens=2))
        assert answer.status_code == 400, answer.text
    pair.until_clean()


@pytest.mark.slow
def test_choices_outlive_a_killed_decode_worker(demo_checkpoint: Path, rng: random.Random):
    """SIGKILL in mid-stream: every choice comes to the end of an undisturbed one, or the stream to an error."""
    words = ("--served-model-name", "demo", "--decode", "2")
    num_good = 0
    with Cluster(demo_checkpoint, *words) as cluster:
        cluster.wait_ready()
        for _ in range(2):
            request = long_request(rng)
            whole = cluster.complete(**request)["choices"]
            events = streamed(cluster, request)
            ids: list[list[int]] = [[] for _ in range(N)]
            reasons: list[str | None] = [None] * N
            last: dict[str, Any] = {"nothing": "yet"}
            victim = None
            for last in events:
                if "choices" not in last:
                    break
                (chunk,) = last["choices"]
                ids[chunk["index"]] += chunk["token_ids"]
                reasons[chunk["index"]] = chunk["finish_reason"] or reasons[chunk["index"]]
                if victim is None and min(map(len, ids)) >= 5:
                    decoders = [name for name in cluster.workers() if name.startswith("decode")]
                    victim = next(name for name in decoders if cluster.state(name)["legs"])
                    cluster.kill(victim)
            assert victim is not None
            for choice in range(N):
                assert ids[choice] == whole[choice]["token_ids"][: len(ids[choice])]
            if last:
                assert "error" in last, last
            else:
                assert reasons == ["length"] * N
                assert ids == [choice["token_ids"] for choice in whole]
                num_good += 1
            cluster.until(lambda: len(cluster.workers()) == 3 and cluster.is_ready(), 60.0, "both decoders are back")
            cluster.until_clean()
    assert num_good, "no stream went on elsewhere"
