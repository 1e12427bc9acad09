"""Who is chosen, who is avoided, and what the table says of itself."""

import dataclasses

from descriptions import describe

from headrace.core.ids import Role
from headrace.router.placement import Load, LocalPlan, PairPlan, Placement, Want


def pick(table, avoid=frozenset(), now_s=0.0, **want):
    """The plan alone."""
    decision = table.decide(Want(avoid=avoid, **want), now_s)
    return None if decision is None else decision.plan


def make_table(*descriptions):
    table = Placement(seed=3)
    for description in descriptions:
        table.up(description)
    return table


def test_pair_needs_both_roles_and_equal_fingerprints():
    """Workers whose bytes differ never meet."""
    table = make_table(describe("p", Role.PREFILL))
    assert pick(table) is None
    assert "no decode worker is ready" in table.not_ready_reasons()
    table.up(describe("d", Role.DECODE, fingerprint=b"other"))
    assert pick(table) is None
    assert table.not_ready_reasons() == ["no prefill and decode workers have equal fingerprints"]
    table.up(describe("d2", Role.DECODE))
    plan = pick(table)
    assert isinstance(plan, PairPlan)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p", "d2")
    assert table.can_serve


def test_worker_of_both_roles_serves_alone():
    """Monolithic: a local plan."""
    table = make_table(describe("b", Role.BOTH))
    assert pick(table) == LocalPlan(table.workers[0].ref)


def test_least_loaded_is_chosen():
    """Queued tokens for the prefill, sequences for the decode; own sendings count before any report."""
    table = make_table(*(describe(f"p{i}", Role.PREFILL) for i in range(2)), describe("d0", Role.DECODE))
    table.up(describe("d1", Role.DECODE))
    table.report("p0:1", Load(queued_tokens=1000, state="ready"), 0.0)
    table.report("d1:1", Load(running=3, state="ready"), 0.0)
    plan = pick(table)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p1", "d0")
    table.opened("p1:1", 5000)
    for _ in range(4):
        table.opened("d0:1", 0)
    plan = pick(table)
    assert (plan.prefill.worker_id, plan.decode.worker_id) == ("p0", "d1")
    table.computed("p1:1", 5000)
    table.closed("p1:1")
    assert pick(table).prefill.worker_id == "p1"


def test_stale_report_does_not_count_what_this_router_knows_better():
    """What it sent and heard of since counts; of the report only what others had sent."""
    table = make_table(*(describe(f"p{i}", Role.PREFILL) for i in range(2)), describe("d", Role.DECODE))
    table.opened("p0:1", 4000)
    table.report("p0:1", Load(queued_tokens=4000, running=1, state="ready"), 0.0)
    table.computed("p0:1", 4000)
    table.closed("p0:1")
    table.opened("p1:1", 100)
    assert pick(table).prefill.worker_id == "p0", "its queue was this router's own, and is done"
    table.report("p0:1", Load(queued_tokens=300, state="ready"), 0.0)
    assert pick(table).prefill.worker_id == "p1", "somebody else's"


def test_full_worker_is_left_alone_until_a_leg_closes():
    """Capacity is the worker's promise; more would only be refused."""
    table = make_table(describe("b", Role.BOTH, max_num_seqs=1))
    table.opened("b:1", 10)
    assert pick(table) is None
    assert table.can_serve
    table.closed("b:1")
    assert pick(table) is not None


def test_avoided_worker_is_used_only_when_nobody_else_could_be():
    """A failed worker may be all there is; and a full house of others is worth the wait."""
    table = make_table(describe("a", Role.BOTH, max_num_seqs=1), describe("b", Role.BOTH))
    assert pick(table, frozenset({("b", 1)})).worker.worker_id == "a"
    table.opened("a:1", 0)
    assert pick(table, frozenset({("b", 1)})) is None
    assert pick(table, frozenset({("a", 1), ("b", 1)})).worker.worker_id == "b"
    # Another life is another worker.
    table.up(describe("b", Role.BOTH, incarnation=2))
    assert pick(table, frozenset({("b", 1)})).worker.incarnation == 2


def test_refusal_pauses_and_success_forgives():
    """Pauses double, and end by themselves."""
    table = make_table(describe("b", Role.BOTH))
    assert table.refused("b:1", 10.0) == 10.05
    assert pick(table, now_s=10.04) is None
    assert pick(table, now_s=10.06) is not None
    assert table.refused("b:1", 10.1) > 10.19
    table.accepted("b:1")
    assert table.refused("b:1", 20.0) == 20.05


def test_worker_that_is_called_lost_gets_nothing_for_a_moment():
    """Others are chosen meanwhile; if it was not lost, it is asked again."""
    table = make_table(describe("a", Role.BOTH), describe("b", Role.BOTH))
    table.doubted("b:1", 10.0)
    assert {pick(table, now_s=10.1).worker.worker_id for _ in range(20)} == {"a"}
    table.down("a:1")
    assert pick(table, now_s=10.2) is None
    assert pick(table, now_s=10.3).worker.worker_id == "b"
    table.doubted("nobody:1", 10.0)


def test_worker_that_leaves_is_not_chosen():
    """Its own word counts before its session ends."""
    table = make_table(describe("b", Role.BOTH))
    table.report("b:1", Load(state="draining"), 0.0)
    assert pick(table) is None
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
