"""Host work of the prefix cache: looking up and allocating a long prompt, and what each step costs a running request.

    python benchmarks/kvcache.py [--tokens 1048576] [--json FILE]

One core, no torch: decisions only. The bytes that a hit moves (one snapshot row) are not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

from headrace.core.blocks import BLOCK_TOKENS, block_hashes, root_hash
from headrace.core.pools import PoolKind
from headrace.kvcache.allocator import CacheManager

ROOT = root_hash(b"benchmark")


def best_ms(repeats: int, work: Callable[[], object], after: Callable[[], object] = lambda: None) -> float:
    """Least of several; `after` is not timed."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append((time.perf_counter() - begun) * 1e3)
        after()
    return min(times)


def make(blocks: int, sequences: int) -> CacheManager:
    pages = {
        PoolKind.HISTORY: 2 * blocks + 8 * sequences,
        PoolKind.WINDOW: 64 + 8 * sequences,
        PoolKind.STATE: sequences + 2,
        PoolKind.SNAPSHOT: 8,
    }
    return CacheManager(pages, replay_tokens=22 * BLOCK_TOKENS)


def long_prompt(tokens: int) -> dict[str, float]:
    """A prompt of `tokens`: nothing here, all of it here, and every page to be taken from another text.

    The decode side takes all pages when it admits (`land`), the prefill side promises them (`reserve`).
    """
    draw = random.Random(1)
    ids = tuple(draw.randrange(129_280) for _ in range(tokens))
    blocks = tokens // BLOCK_TOKENS
    texts = [block_hashes(ROOT, ids[shift:] + ids[:shift]) for shift in range(3)]
    manager = make(blocks, 1)

    def reserve() -> None:
        manager.reserve(1, tokens, reserve_tokens=1, chunk_tokens=BLOCK_TOKENS, root=ROOT, hashes=texts[0])

    def land(text: int) -> None:
        manager.reserve_landing(1, tokens, reserve_tokens=1, root=ROOT, hashes=texts[text])

    def release() -> None:
        manager.release(1)

    found = {
        "hash_chain_ms": best_ms(5, lambda: block_hashes(ROOT, ids)),
        "reserve_cold_ms": best_ms(5, reserve, release),
        "land_cold_ms": best_ms(5, lambda: land(0), release),
    }
    for text in (0, 1):
        land(text)
        manager.admit(1)
        publish_ms = best_ms(1, lambda text=text: manager.publish(1, texts[text]))
        release_ms = best_ms(1, release)
        found |= {"publish_all_ms": publish_ms, "release_ms": release_ms}
    found["reserve_hit_ms"] = best_ms(5, reserve, release)
    found["land_hit_ms"] = best_ms(5, lambda: land(0), release)
    manager.drain_events()
    found["land_by_eviction_ms"] = best_ms(1, lambda: land(2), release)
    assert not manager.audit()
    return found


def each_step(sequences: int, steps: int = 1024) -> dict[str, float]:
    """Growth by one token, publishing at borders, trimming: for each running request and step."""
    manager = make(0, sequences)
    hashes = {key: block_hashes(ROOT, [key] * 2048) for key in range(sequences)}
    for key in range(sequences):
        manager.reserve(key, 256, reserve_tokens=1024, chunk_tokens=256, root=ROOT)
        manager.extend(key, 256)
        manager.publish(key, hashes[key][:1])
        manager.shrink(key, 1)
        manager.trim_window(key, 256)
    begun = time.perf_counter()
    for length in range(257, 257 + steps):
        for key in range(sequences):
            manager.extend(key, length)
            manager.publish(key, hashes[key][: length // BLOCK_TOKENS])
            if length % BLOCK_TOKENS == 0:
                manager.check_point(key, length, evict=True)
            manager.trim_window(key, length)
    spent = time.perf_counter() - begun
    checked = best_ms(5, manager.check)
    return {
        "us_per_request_and_step": spent / steps / sequences * 1e6,
        "check_us_per_request": checked * 1e3 / sequences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = {"tokens": arguments.tokens, "prompt": long_prompt(arguments.tokens), "step_64": each_step(64)}
    text = json.dumps(results, indent=2)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
