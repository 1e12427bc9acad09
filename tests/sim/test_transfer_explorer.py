"""All interleavings of a few transfers at small bounds: every rule holds in each state, and whatever happens, all ends.

The larger bounds are `slow`; a broken rule names the choices that led to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from support.explorer import Broken, Explorer, Plan, Scenario
from support.mutations import (
    forget_a_coverage_bit,
    ignore_the_generation,
    let_deadlines_pass,
    release_pages_before_the_gather,
    reuse_landing_while_reading,
    skip_the_digest,
)

ONE = Scenario(plans=(Plan(0, 1),))
SAME_WAY = Scenario(plans=(Plan(0, 1), Plan(0, 1)), begun=True)
BOTH_WAYS = Scenario(plans=(Plan(0, 1), Plan(1, 0)), begun=True)
TWO_RANKS = Scenario(plans=(Plan(0, 1), Plan(0, 2)), num_nodes=3, begun=True)


def with_(scenario: Scenario, **changes: object) -> Scenario:
    return dataclasses.replace(scenario, **changes)  # type: ignore[arg-type]


SMALL = {
    "one transfer, two faults": (with_(ONE, max_faults=2), 15_000),
    "same way": (with_(SAME_WAY, faults=("message", "note", "read", "break")), 20_000),
    "both ways": (with_(BOTH_WAYS, faults=("message", "cancel")), 20_000),
    "two ranks": (with_(TWO_RANKS, faults=("read",)), 50_000),
}
LARGE = {
    "one transfer, three faults": (with_(ONE, max_faults=3), 100_000),
    "two blocks": (with_(ONE, plans=(Plan(0, 1, num_blocks=2),), num_send=2, num_landing=2, window=2), 40_000),
    "three blocks through one buffer": (with_(ONE, plans=(Plan(0, 1, num_blocks=3),)), 3_000),
    "same way": (with_(SAME_WAY, begun=False), 100_000),
    "both ways": (with_(BOTH_WAYS, begun=False), 100_000),
    "two ranks": (with_(TWO_RANKS, begun=False), 300_000),
    "one is not needed": (with_(SAME_WAY, plans=(Plan(0, 1), Plan(0, 1, ended=True))), 50_000),
    "two buffers": (with_(SAME_WAY, num_send=2, num_landing=2, window=2, max_faults=0), 10_000),
}


def explore(scenario: Scenario, least: int) -> Explorer:
    explorer = Explorer(scenario)
    explorer.run()
    print(f"{explorer.num_states} states, {explorer.num_choices} choices")
    assert explorer.num_states >= least
    # With the faults left unused, all arrives.
    assert any(all(taker in ("Arrived", "NotNeeded") for _, taker in ends) for ends in explorer.outcomes)
    return explorer


@pytest.mark.parametrize("name", SMALL)
def test_every_order_is_sound_and_ends(name: str) -> None:
    """One or two faults at any point."""
    explore(*SMALL[name])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", LARGE)
def test_every_order_is_sound_and_ends_at_larger_bounds(name: str) -> None:
    """More blocks, buffers, faults; offers and pulls in any order."""
    explore(*LARGE[name])


def test_without_faults_all_arrives() -> None:
    """Whatever the order: the only outcome is the good one."""
    for scenario in (SAME_WAY, BOTH_WAYS, TWO_RANKS):
        explorer = Explorer(with_(scenario, max_faults=0, begun=False))
        explorer.run()
        assert explorer.outcomes == {(("taken", "Arrived"), ("taken", "Arrived"))}


@pytest.mark.parametrize(
    ("mutate", "rule"),
    [
        (reuse_landing_while_reading, "I8"),  # seen before a byte lands: the READ's deadline outlives its buffer
        (skip_the_digest, "I2"),
        (ignore_the_generation, "I8"),
        (forget_a_coverage_bit, "I2"),
        (release_pages_before_the_gather, "I8"),
        (let_deadlines_pass, "I4"),
    ],
)
def test_mutation_is_found(
    mutate: Callable[[pytest.MonkeyPatch], None], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One transfer with one fault is enough to show each of them."""
    mutate(monkeypatch)
    with pytest.raises(Broken) as caught:
        Explorer(ONE).run()
    assert str(caught.value).startswith(rule)
    assert any(note.startswith("after ") for note in caught.value.__notes__)
