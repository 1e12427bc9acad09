"""Deliberate mistakes, put in one by one, are each caught by the simulation: proof that its checks can see.

Each mutation runs in worlds whose faults bring it out; one of a few seeds must break a rule, and the same worlds
without the mutation must not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from support.mutations import (
    announce_before_the_block_is_final,
    forget_a_coverage_bit,
    forget_to_free_a_send_buffer,
    free_pages_under_a_scatter,
    ignore_the_generation,
    let_deadlines_pass,
    release_pages_before_the_gather,
    remove_an_agent_under_a_read,
    reuse_landing_while_reading,
    say_ended_twice,
    skip_the_digest,
)

from headrace.transfer.memory_driver import MemoryFaults
from headrace.transfer.simulator import SIMULATED, Broken, WorldFaults, run_world

SEEDS = range(8)
TRANSFERS = 25
FEW_BUFFERS = dataclasses.replace(SIMULATED, num_send_buffers=2, segment_bytes=150)
"""So that one buffer is filled by one transfer again and again."""

SLOW_READS = WorldFaults(
    reads=MemoryFaults(read_s=(0.05, 0.5), max_pieces=6, hangs=0.05), taker_cancels=0.4, stops_per_s=0.5
)
CORRUPT = WorldFaults(reads=MemoryFaults(read_s=(0.001, 0.01), corrupts=0.2))
LOST_READS = WorldFaults(reads=MemoryFaults(read_s=(0.05, 0.5), max_pieces=6, lost=0.2))
DOUBLED_NOTES = WorldFaults(reads=MemoryFaults(read_s=(0.001, 0.01), note_s=(0.0, 0.3), note_doubled=0.8))
SLOW_COPIES = WorldFaults(copy_s=(0.05, 0.2), taker_cancels=0.5, holder_withdraws=0.5)
LOST_MESSAGES = WorldFaults(message_lost=0.05)
WITHIN_SIGHT = WorldFaults(
    reads=MemoryFaults(within_sight=True, note_s=(0.0, 0.01), note_doubled=0.5),
    copy_s=(0.05, 0.3),
    breaks_per_s=0.5,
    close_s=(0.0, 0.5),
    taker_cancels=0.3,
    holder_withdraws=0.3,
)
"""Scatters from buffers that their holder may fill again meanwhile."""


MUTATIONS: list[tuple[Callable[[pytest.MonkeyPatch], None], WorldFaults, str]] = [
    (reuse_landing_while_reading, SLOW_READS, "I1"),
    (skip_the_digest, CORRUPT, "I2"),
    (skip_the_digest, WITHIN_SIGHT, "I2"),
    (ignore_the_generation, DOUBLED_NOTES, "I8"),
    (forget_a_coverage_bit, LOST_MESSAGES, "I2"),
    (release_pages_before_the_gather, SLOW_COPIES, "I8"),
    (free_pages_under_a_scatter, SLOW_COPIES, "I8"),
    (remove_an_agent_under_a_read, LOST_READS, ""),
    (forget_to_free_a_send_buffer, SLOW_READS, "I8"),
    (announce_before_the_block_is_final, WorldFaults(), "I2"),
    (let_deadlines_pass, SLOW_READS, "I4"),
    (say_ended_twice, WorldFaults(), "I3"),
]


@pytest.mark.parametrize(
    ("mutate", "faults", "rule"), MUTATIONS, ids=[f"{index}_{row[0].__name__}" for index, row in enumerate(MUTATIONS)]
)
def test_mutation_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None], faults: WorldFaults, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The simulation breaks, with the rule that the mistake breaks."""
    mutate(monkeypatch)
    section = FEW_BUFFERS if faults is DOUBLED_NOTES else SIMULATED
    broken = None
    for seed in SEEDS:
        try:
            run_world(seed, faults, TRANSFERS, section=section)
        except AssertionError as error:
            broken = error
            break
    # Where the driver's own assertion is faster than the checker, no rule is named.
    assert broken is not None, "the simulation saw nothing"
    assert isinstance(broken, Broken) == bool(rule)
    assert str(broken).startswith(rule)


@pytest.mark.parametrize("faults", list({id(row[1]): row[1] for row in MUTATIONS}.values()), ids=lambda _: "")
def test_the_same_worlds_are_sound_without_mutation(faults: WorldFaults) -> None:
    """What the mutations break holds without them."""
    for seed in list(SEEDS)[:2]:
        run_world(seed, faults, TRANSFERS)
