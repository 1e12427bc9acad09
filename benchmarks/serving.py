"""Load over HTTP: TTFT, ITL and output tokens a second, disaggregated beside monolithic, on this machine.

    python benchmarks/serving.py [--url URL] [--requests 48] [--concurrency 4] [--json FILE]

Without --url it serves the demo checkpoint, once in each mode, one after the other in one sitting. Prompts are token
ids drawn from a seed, so both modes get the same work; output lengths are exact (`ignore_eos`). A tiny model says
nothing of real ones: what is measured here is the path (router, sessions, transfer), not the arithmetic.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

READY_LIMIT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is asked; everything that the result depends on, but the machine."""

    requests: int
    concurrency: int
    prompt_tokens: int
    output_tokens: int
    warmup: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request as its client saw it."""

    ttft_s: float
    gaps_s: tuple[float, ...]
    output_tokens: int


async def one(client: httpx.AsyncClient, body: dict[str, Any]) -> Sample:
    begin_s = time.perf_counter()
    arrivals: list[float] = []
    tokens = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise RuntimeError(line)
                if event.get("choices"):
                    arrivals.append(time.perf_counter())
                if event.get("usage"):
                    tokens = event["usage"]["completion_tokens"]
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(arrivals))
    return Sample(ttft_s=arrivals[0] - begin_s, gaps_s=gaps, output_tokens=tokens)


async def drive(url: str, load: Load) -> dict[str, float]:
    """A closed loop of `concurrency` clients; the figures of one run, warm-up not counted."""
    rng = random.Random(load.seed)
    async with httpx.AsyncClient(base_url=url, timeout=600.0, trust_env=False) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        bodies = [
            {
                "model": model,
                "prompt": [rng.randint(64, 500) for _ in range(load.prompt_tokens)],
                "max_tokens": load.output_tokens,
                "temperature": 1.0,
                "seed": index,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
            for index in range(load.warmup + load.requests)
        ]
        for body in bodies[: load.warmup]:
            await one(client, body)
        before = sums((await client.get("/metrics")).text, *SUMS)
        waiting = iter(bodies[load.warmup :])
        samples: list[Sample] = []

        async def client_loop() -> None:
            for body in waiting:
                samples.append(await one(client, body))

        begin_s = time.perf_counter()
        await asyncio.gather(*(client_loop() for _ in range(load.concurrency)))
        took_s = time.perf_counter() - begin_s
        after = sums((await client.get("/metrics")).text, *SUMS)
    tail_s, prefill_s = (later - earlier for later, earlier in zip(after, before, strict=True))
    ttft = sorted(sample.ttft_s for sample in samples)
    gaps = sorted(gap for sample in samples for gap in sample.gaps_s)
    return {
        "ttft_ms_median": statistics.median(ttft) * 1e3,
        "ttft_ms_p99": ttft[min(len(ttft) - 1, len(ttft) * 99 // 100)] * 1e3,
        "itl_ms_median": statistics.median(gaps) * 1e3,
        "itl_ms_p99": gaps[min(len(gaps) - 1, len(gaps) * 99 // 100)] * 1e3,
        "output_tokens_per_s": sum(sample.output_tokens for sample in samples) / took_s,
        # What a transfer adds after the prefill's end, as a share of the prefill: 0 where nothing travels.
        "tail_of_prefill": tail_s / prefill_s if prefill_s else 0.0,
    }


SUMS = ("headrace:kv_transfer_tail_seconds_sum", "headrace:request_prefill_time_seconds_sum")


def sums(metrics: str, *names: str) -> tuple[float, ...]:
    """Samples of a /metrics page, summed over their labels."""
    found = dict.fromkeys(names, 0.0)
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        name = name.partition("{")[0]
        if name in found:
            found[name] += float(value)
    return tuple(found.values())


def serve_and_drive(words: list[str], load: Load) -> dict[str, float]:
    """Start `headrace serve` on the demo checkpoint, drive it, end it."""
    from headrace.cli.ports import free_ports
    from headrace.model.demo import ensure_demo

    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-P", "-m", "headrace", "serve", str(ensure_demo()), "--port", str(port), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_ready(f"http://127.0.0.1:{port}", process)
            return asyncio.run(drive(f"http://127.0.0.1:{port}", load))
        finally:
            process.send_signal(signal.SIGTERM)


def wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + READY_LIMIT_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url} did not get ready")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="drive what serves there instead")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE")
    words = parser.parse_args()
    load = Load(
        requests=words.requests,
        concurrency=words.concurrency,
        prompt_tokens=words.prompt_tokens,
        output_tokens=words.output_tokens,
        warmup=words.warmup,
        seed=words.seed,
    )
    results: dict[str, dict[str, float]] = {}
    if words.url:
        results[words.url] = asyncio.run(drive(words.url, load))
    else:
        for name, flags in {"disaggregated": [], "monolithic": ["--monolithic"]}.items():
            results[name] = serve_and_drive(flags, load)
    print(f"{'':<16}{'TTFT ms':>16}{'ITL ms':>16}{'tokens/s':>12}{'tail/prefill':>14}    (median / p99)")
    for name, found in results.items():
        ttft = f"{found['ttft_ms_median']:.0f} / {found['ttft_ms_p99']:.0f}"
        itl = f"{found['itl_ms_median']:.1f} / {found['itl_ms_p99']:.1f}"
        rate, tail = found["output_tokens_per_s"], found["tail_of_prefill"]
        print(f"{name:<16}{ttft:>16}{itl:>16}{rate:>12.0f}{tail:>14.2%}")
    if words.json:
        document = {
            "load": asdict(load),
            "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
            "python": platform.python_version(),
            "results": results,
        }
        words.json.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
