"""Who is chosen, who is avoided, and what the table says of itself."""

import dataclasses

from headrace.core.ids import Role
from headrace.router.placement import Description, Load, LocalPlan, PairPlan, Placement, WorkerRef


def describe(name, role, *, fingerprint=b"f", state="ready", max_num_seqs=4, incarnation=1):
    return Description(
        ref=WorkerRef(f"{name}:1", name, incarnation, f"{name}:2"),
        role=role,
        state=state,
        fingerprint=fingerprint,
        model="m",
        max_model_len=100,
        max_prompt_tokens=90,
        vocab_size=500,
        max_num_seqs=max_num_seqs,
    )


def make_table(*descriptions):
    table = Placement(seed=3)
    for description in descriptions:
        table.up(description)
    return table


def test_pair_needs_both_roles_and_equal_fingerprints():
    """Workers whose bytes differ never meet."""
    table = make_table(describe("p", Role.PREFILL))
    assert table.pick(frozenset(), 0.0) is None
    assert "no decode worker is ready" in table.not_ready_reasons()
    table.up(describe("d", Role.DECODE, fingerprint=b"other"))
    assert table.pick(frozenset(), 0.0) is None
    assert table.not_ready_reasons() == ["no prefill and decode workers have equal fingerprints"]
    table.up(describe("d2", Role.DECODE))
    plan = table.pick(frozenset(), 0.0)
    assert isinstance(plan, PairPlan)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p", "d2")
    assert table.can_serve


def test_worker_of_both_roles_serves_alone():
    """Monolithic: a local plan."""
    table = make_table(describe("b", Role.BOTH))
    assert table.pick(frozenset(), 0.0) == LocalPlan(table.workers[0].ref)


def test_least_loaded_is_chosen():
    """Queued tokens for the prefill, sequences for the decode; own sendings count before any report."""
    table = make_table(*(describe(f"p{i}", Role.PREFILL) for i in range(2)), describe("d0", Role.DECODE))
    table.up(describe("d1", Role.DECODE))
    table.report("p0:1", Load(queued_tokens=1000, state="ready"))
    table.report("d1:1", Load(running=3, state="ready"))
    plan = table.pick(frozenset(), 0.0)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p1", "d0")
    table.opened("p1:1", 5000)
    for _ in range(4):
        table.opened("d0:1", 0)
    plan = table.pick(frozenset(), 0.0)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p0", "d1")
    table.computed("p1:1", 5000)
    table.closed("p1:1")
    assert table.pick(frozenset(), 0.0).prefill.worker_id == "p1"


def test_full_worker_is_left_alone_until_a_leg_closes():
    """Capacity is the worker's promise; more would only be refused."""
    table = make_table(describe("b", Role.BOTH, max_num_seqs=1))
    table.opened("b:1", 10)
    assert table.pick(frozenset(), 0.0) is None
    assert table.can_serve
    table.closed("b:1")
    assert table.pick(frozenset(), 0.0) is not None


def test_avoided_worker_is_used_only_when_nobody_else_could_be():
    """A failed worker may be all there is; and a full house of others is worth the wait."""
    table = make_table(describe("a", Role.BOTH, max_num_seqs=1), describe("b", Role.BOTH))
    assert table.pick(frozenset({("b", 1)}), 0.0).worker.worker_id == "a"
    table.opened("a:1", 0)
    assert table.pick(frozenset({("b", 1)}), 0.0) is None
    assert table.pick(frozenset({("a", 1), ("b", 1)}), 0.0).worker.worker_id == "b"
    # Another life is another worker.
    table.up(describe("b", Role.BOTH, incarnation=2))
    assert table.pick(frozenset({("b", 1)}), 0.0).worker.incarnation == 2


def test_refusal_pauses_and_success_forgives():
    """Pauses double, and end by themselves."""
    table = make_table(describe("b", Role.BOTH))
    assert table.refused("b:1", 10.0) == 10.05
    assert table.pick(frozenset(), 10.04) is None
    assert table.pick(frozenset(), 10.06) is not None
    assert table.refused("b:1", 10.1) > 10.19
    table.accepted("b:1")
    assert table.refused("b:1", 20.0) == 20.05


def test_worker_that_leaves_is_not_chosen():
    """Its own word counts before its session ends."""
    table = make_table(describe("b", Role.BOTH))
    table.report("b:1", Load(state="draining"))
    assert table.pick(frozenset(), 0.0) is None
    assert table.not_ready_reasons() == [
        "worker b is draining",
        "no prefill worker is ready",
        "no decode worker is ready",
    ]
    table.down("b:1")
    assert table.not_ready_reasons() == ["no worker is connected"]


def test_bounds_are_those_of_the_largest_worker():
    """Zero when nobody is known."""
    table = make_table()
    assert (table.max_model_len, table.max_prompt_tokens) == (0, 0)
    table.up(describe("b", Role.BOTH))
    table.up(dataclasses.replace(describe("c", Role.BOTH), max_model_len=300))
    assert (table.max_model_len, table.max_prompt_tokens) == (300, 90)
