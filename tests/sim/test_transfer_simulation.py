"""Seeded runs of whole transfers under faults; `transfer/simulator.py` checks every rule after every event.

HEADRACE_SIM_TRANSFERS sets how many transfers the long run has, `--seed N` replays one world; `make simulate` runs as
many as there is time for.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest

from headrace.transfer.api import Arrived, NotNeeded
from headrace.transfer.simulator import Journey, World, WorldFaults, run_world, swarm

PER_WORLD = 30
NUM_CHUNKS = 16
"""So that the runners share the work, and each test ends in a few seconds."""
NUM_TRANSFERS = int(os.environ.get("HEADRACE_SIM_TRANSFERS", "20000"))
WORLDS_PER_CHUNK = -(-NUM_TRANSFERS // (PER_WORLD * NUM_CHUNKS))


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("chunk", range(NUM_CHUNKS))
def test_no_rule_breaks_and_all_ends_under_faults(request: pytest.FixtureRequest, seed: int, chunk: int) -> None:
    """Whatever is delayed, lost, doubled, swapped, mangled, corrupted, stopped or killed: I1 to I10 hold after each
    event, and once the faults cease everything ends."""
    replayed = request.config.getoption("--seed") is not None
    if replayed and chunk:
        pytest.skip("one world is replayed once")
    num_worlds = 1 if replayed else WORLDS_PER_CHUNK
    ends: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    for world_seed in range(seed, seed + num_worlds):
        try:
            world = run_world(world_seed, swarm(world_seed), PER_WORLD)
        except BaseException as error:
            error.add_note(f"replay with --seed {world_seed}; {swarm(world_seed)}")
            raise
        ends.update(type(journey.taker_end).__name__ for journey in world.journeys.values())
        for worker in world.workers.values():
            refused.update(worker.node.taker.refused)
    if not replayed and num_worlds >= 40:
        # The run has seen what it is for: good ends, bad ends, refused bytes.
        assert ends["Arrived"] > ends.total() // 4
        assert ends["PullFailed"] > ends.total() // 10
        assert ends["NotNeeded"] > 0
        assert refused["digest"] > 0
        assert refused["stale"] > 0
        assert refused["bounds"] > 0


def test_everything_arrives_without_faults(seed: int) -> None:
    """No fault, no failure: each transfer is taken, or not needed since its first token ended it."""
    world = run_world(seed, WorldFaults(), 60)
    assert all(isinstance(journey.taker_end, Arrived | NotNeeded) for journey in world.journeys.values())
    ends = [journey.taker_end for journey in world.journeys.values() if isinstance(journey.taker_end, Arrived)]
    assert all(end.stats.num_missing == 0 for end in ends)
    assert sum(worker.node.taker.transfers_taken for worker in world.workers.values()) >= 50
    assert all(not worker.node.counts(world.now_s).failures for worker in world.workers.values())


def test_blocks_flow_while_the_engine_says_nothing(seed: int) -> None:
    """I9: when an engine comes back from a step of seconds, what it had finished before lies stored at the taker."""
    world = World(seed, WorldFaults(engine_s=(1.0, 2.0)))
    compute, steps = world._compute, 0

    def look_first(journey: Journey, done_blocks: int) -> None:
        nonlocal steps
        steps += 1
        taker = world.workers[journey.taker].node.taker
        geometry = world.geometry
        num_blocks = max(0, done_blocks - journey.held_blocks)
        assert taker.bytes_received - before == num_blocks * geometry.num_layers * geometry.block_bytes
        compute(journey, done_blocks)

    world._compute = look_first  # type: ignore[method-assign]
    while steps < 20:
        journey = world.start_transfer()
        before = world.workers[journey.taker].node.taker.bytes_received
        world.run(world.now_s + 1.0)
        assert world.run_until_idle(max_s=60.0)


def test_same_seed_does_the_same(seed: int) -> None:
    """A failing seed can be replayed: two runs of it are one run."""

    def story(world: World) -> list[tuple[str, str]]:
        return [(j.transfer_id.hex(), type(j.taker_end).__name__) for j in world.journeys.values()]

    first, second = (run_world(seed, swarm(seed), 20) for _ in range(2))
    assert story(first) == story(second)
    assert first.num_checks == second.num_checks


def test_corrupt_bytes_are_asked_for_again(seed: int) -> None:
    """With every fifth READ corrupted most transfers still arrive, whole."""
    faults = WorldFaults(reads=swarm(0).reads.__class__(read_s=(0.001, 0.002), corrupts=0.2))
    world = run_world(seed, faults, 40)
    refused = sum(
        worker.node.taker.refused["digest"] + worker.node.taker.refused["stale"] for worker in world.workers.values()
    )
    arrived = sum(isinstance(journey.taker_end, Arrived) for journey in world.journeys.values())
    assert refused > 10
    assert arrived > 25
