"""Seeded worlds of transfers, as many as are asked for, on all cores: the long form of `tests/sim`.

The first seed is drawn from the clock unless it is given, so that each run sees other worlds. A broken rule prints its
seed; `pytest tests/sim/test_transfer_simulation.py --seed N` replays that world.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections import Counter

from headrace.transfer.simulator import run_world, swarm

PER_WORLD = 30


def one_world(seed: int) -> tuple[int, Counter[str], str]:
    """Seed, how its transfers ended, what broke."""
    try:
        world = run_world(seed, swarm(seed), PER_WORLD)
    except Exception as error:  # A world may break anything; its seed must come out.
        return seed, Counter(), f"{type(error).__name__}: {error}"
    return seed, Counter(type(journey.taker_end).__name__ for journey in world.journeys.values()), ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    wanted = int(os.environ.get("HEADRACE_SIM_TRANSFERS", "1000000"))
    parser.add_argument("--transfers", type=int, default=wanted, help="default: HEADRACE_SIM_TRANSFERS, or a million")
    parser.add_argument("--seed", type=int, default=None, help="the first world's seed; the next ones follow")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    first = int(time.time()) << 20 if arguments.seed is None else arguments.seed
    num_worlds = -(-arguments.transfers // PER_WORLD)
    print(f"{num_worlds} worlds of {PER_WORLD} transfers, seeds {first} to {first + num_worlds - 1}", flush=True)
    ends: Counter[str] = Counter()
    broken: list[int] = []
    began_s = told_s = time.monotonic()
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        worlds = pool.imap_unordered(one_world, range(first, first + num_worlds), chunksize=8)
        for number, (seed, ended, what) in enumerate(worlds, 1):
            ends += ended
            if what:
                broken.append(seed)
                print(f"seed {seed}: {what}", flush=True)
            now_s = time.monotonic()
            if now_s - told_s >= 10.0 or number == num_worlds:
                told_s = now_s
                rate = number * PER_WORLD / (now_s - began_s)
                print(f"{number * PER_WORLD} transfers, {rate:.0f}/s, {len(broken)} worlds broken", flush=True)
    print(", ".join(f"{name} {count}" for name, count in ends.most_common()))
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
