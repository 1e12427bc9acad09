"""Legs: their tables, and what each phase does when something ends it."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest

from headrace.core.errors import Cancelled, NoFreePages, TransferFailed
from headrace.core.sampling import FinishReason
from headrace.decode import legs as decode
from headrace.engine import api as engine
from headrace.engine.api import LegKind
from headrace.kvcache.sequence import SequencePages
from headrace.prefill import legs as prefill
from headrace.transfer import api as transfer
from headrace.worker import prefix_legs
from headrace.worker.leg import RELEASE_S, RESERVE_S, ChoiceFinished, Failed, Finished, SaidToken, SaidTransferred

TABLES = {
    "prefill": (prefill.NEXT, prefill.Phase, prefill.Event),
    "generate": (decode.GENERATE_NEXT, decode.Phase, decode.Event),
    "local": (decode.LOCAL_NEXT, decode.Phase, decode.Event),
    "share": (prefix_legs.SHARE_NEXT, prefix_legs.Phase, prefix_legs.Event),
    "fetch": (prefix_legs.FETCH_NEXT, prefix_legs.Phase, prefix_legs.Event),
}

PAGES = SequencePages(history=(4, 5, 6), window=((7, 1), (8, 2), (9, 3)), state_row=2)
STATS = transfer.TransferStats(payload_bytes=1000, num_segments=3, seconds=0.5, tail_seconds=0.01, transport="memory")


@pytest.mark.parametrize("name", TABLES)
def test_every_phase_can_be_aborted(name: str) -> None:
    """ABORT stands in the table for every phase but the last."""
    table, phases, events = TABLES[name]
    for phase in table:
        assert phase is phases.ENDED or events.ABORT in table[phase]
        assert phase is phases.ENDED or events.DUE in table[phase]
        assert phase is phases.ENDED or events.ABORT_CHOICE in table[phase]


@pytest.mark.parametrize("name", TABLES)
def test_every_phase_reaches_the_end(name: str) -> None:
    """From each phase of the table some events lead to ENDED, and no event leads out of the table."""
    table, phases, _ = TABLES[name]
    reached: set[Enum] = {phases.ENDED}
    for _ in table:
        reached |= {phase for phase, moves in table.items() if reached & set(moves.values())}
    assert reached == set(table)
    assert {after for moves in table.values() for after in moves.values()} <= set(table)


def done(key: int, reason: FinishReason | None = None) -> engine.SequenceFinished:
    return engine.SequenceFinished(key, reason, None, 600, 0.25, PAGES)


class Walk:
    """One leg at a desk, brought to a phase step by step."""

    def __init__(self, rig: Any, order: Any) -> None:
        self.rig = rig
        self.order = order
        rig.desk.submit(rig.ear, 1, order, 0.0)
        commands, _ = rig.engine, rig.transfer
        self.key = commands[0].request.key
        rig.took()

    def engine(self, *events: engine.Event, now_s: float = 1.0) -> None:
        self.rig.desk.on_engine(events, now_s)

    def transfer(self, event: Any, now_s: float = 1.0) -> None:
        self.rig.desk.on_transfer(event, now_s)

    @property
    def words(self) -> list[Any]:
        return self.rig.ear.words.get(1, [])

    def to(self, phase: str) -> Walk:
        key, tid = self.key, self.order.transfer_id
        path: dict[str, list[Callable[[], None]]] = {
            "reserved": [lambda: self.engine(engine.Reserved(key, 0, PAGES))],
            "wanted": [lambda: self.transfer(transfer.Wanted(tid, 0))],
            "serving": [
                lambda: self.engine(engine.Started(key, 0), engine.ChunkDone(key, 600, PAGES)),
                lambda: self.engine(engine.TokenSampled(key, 0, 11, None), done(key)),
            ],
            "arrived": [lambda: self.transfer(transfer.Arrived(tid, 11, 0, 600, 0, STATS))],
        }
        routes = {
            "queued": [],
            "ready": ["reserved"],
            "wanted": ["wanted"],
            "computing": ["reserved", "wanted"],
            "serving": ["reserved", "wanted", "serving"],
            "pulling": ["reserved"],
            "decoding": ["reserved", "arrived"],
        }
        for stage in routes[phase]:
            for act in path[stage]:
                act()
        self.rig.took()
        return self


@pytest.fixture
def walk(make_desk: Any, make_order: Any) -> Callable[..., Walk]:
    return lambda kind, **changes: Walk(make_desk(), make_order(kind, **changes))


def test_prefill_computes_only_once_it_is_wanted(walk: Callable[..., Walk]) -> None:
    """Credits alone start nothing; the taker's pull does, and each chunk is offered on."""
    leg = walk(LegKind.PREFILL).to("ready")
    tid = leg.order.transfer_id
    leg.transfer(transfer.Wanted(tid, 0))
    assert leg.rig.took() == ([engine.Start(leg.key)], [])
    leg.engine(engine.Started(leg.key, 0))
    leg.engine(engine.ChunkDone(leg.key, 512, PAGES))
    _, told = leg.rig.took()
    assert [(c.num_blocks, c.computed_tokens) for c in told] == [(0, 0), (2, 512)]
    leg.engine(engine.ChunkDone(leg.key, 600, PAGES), engine.TokenSampled(leg.key, 0, 11, None), done(leg.key))
    assert leg.words[-1] == SaidToken(0, 11, None), "the first token does not wait for the taker"
    commands, told = leg.rig.took()
    assert commands == []
    assert told[-1] == transfer.PrefillDone(
        transfer_id=tid, pages=PAGES, first_token=11, first_index=0, computed=600, cached=0, ended=False
    )
    leg.transfer(transfer.Ended(tid, transfer.Outcome.TAKEN, "", STATS))
    assert leg.rig.took()[0] == [engine.Release(leg.key)]
    assert leg.words[-1] == Finished(None, None, 0.25, 600)
    assert leg.rig.desk.num_legs == 0


def test_prefill_whose_pull_was_first_starts_with_its_credits(walk: Callable[..., Walk]) -> None:
    """The engine knows no Start before its own Reserved, so the leg keeps the pull in mind."""
    leg = walk(LegKind.PREFILL)
    leg.transfer(transfer.Wanted(leg.order.transfer_id, 0))
    assert leg.rig.took() == ([], [])
    leg.engine(engine.Reserved(leg.key, 0, PAGES))
    assert leg.rig.took() == ([engine.Start(leg.key)], [])


def test_prefill_whose_first_token_ends_the_request_is_finished_at_once(walk: Callable[..., Walk]) -> None:
    """The router hears the true reason with the token; pages go back when the transfer thread agrees."""
    leg = walk(LegKind.PREFILL).to("computing")
    finished = engine.SequenceFinished(leg.key, FinishReason.STOP, 7, 600, 0.25, PAGES)
    leg.engine(engine.TokenSampled(leg.key, 0, 7, None), finished)
    assert leg.words[-1] == Finished(FinishReason.STOP, 7, 0.25, 600)
    commands, told = leg.rig.took()
    assert commands == []
    assert told[-1].ended
    leg.transfer(transfer.Ended(leg.order.transfer_id, transfer.Outcome.NOT_NEEDED, "", STATS))
    assert leg.rig.took()[0] == [engine.Release(leg.key)]
    assert leg.rig.desk.num_legs == 0


@pytest.mark.parametrize("phase", ["queued", "ready", "wanted", "computing", "serving"])
def test_prefill_aborted_gives_its_pages_back_after_the_last_gather(walk: Callable[..., Walk], phase: str) -> None:
    """In any phase: one Failed at once, the offer withdrawn, and Release only after Ended."""
    leg = walk(LegKind.PREFILL).to(phase)
    leg.rig.desk.abort(leg.rig.ear, 1, Cancelled("gone"), 2.0)
    commands, told = leg.rig.took()
    assert commands == [engine.AbortSequence(leg.key)]
    assert [type(command) for command in told] == [transfer.Withdraw]
    assert isinstance(leg.rig.ear.terminals(1)[0], Failed)
    # What both threads said before they heard of it changes nothing.
    leg.engine(engine.Reserved(leg.key, 0, PAGES), engine.Started(leg.key, 0), engine.ChunkDone(leg.key, 600, PAGES))
    leg.engine(engine.TokenSampled(leg.key, 0, 11, None), done(leg.key))
    leg.engine(engine.SequenceFailed(leg.key, Cancelled("gone")))
    leg.transfer(transfer.Wanted(leg.order.transfer_id, 0))
    leg.rig.desk.abort(leg.rig.ear, 1, Cancelled("again"), 2.0)
    assert leg.rig.took() == ([], [])
    leg.transfer(transfer.Ended(leg.order.transfer_id, transfer.Outcome.ENDED, "withdrawn", STATS))
    assert leg.rig.took() == ([engine.Release(leg.key)], [])
    assert len(leg.rig.ear.terminals(1)) == 1
    assert leg.rig.desk.num_legs == 0


@pytest.mark.parametrize("phase", ["queued", "ready", "wanted", "computing", "serving"])
def test_prefill_whose_taker_is_lost_fails_and_gives_back_at_once(walk: Callable[..., Walk], phase: str) -> None:
    """The transfer thread is done with the pages already: nothing is waited for."""
    leg = walk(LegKind.PREFILL).to(phase)
    leg.transfer(transfer.Ended(leg.order.transfer_id, transfer.Outcome.ENDED, "nobody pulls", STATS))
    commands, told = leg.rig.took()
    assert told == []
    assert commands[-1] == engine.Release(leg.key)
    assert (engine.AbortSequence(leg.key) in commands) == (phase != "serving")
    (failed,) = leg.rig.ear.terminals(1)
    assert isinstance(failed.error, TransferFailed)
    assert leg.rig.desk.num_legs == 0


def test_prefill_refused_by_the_engine_releases_nothing(walk: Callable[..., Walk]) -> None:
    """A refusal kept nothing, so nothing is given back."""
    leg = walk(LegKind.PREFILL)
    leg.engine(engine.Refused(leg.key, NoFreePages("full")))
    leg.transfer(transfer.Ended(leg.order.transfer_id, transfer.Outcome.ENDED, "withdrawn", STATS))
    commands, _ = leg.rig.took()
    assert commands == []
    assert leg.rig.desk.num_legs == 0


def test_generate_pulls_after_its_credits_and_decodes_after_the_last_byte(walk: Callable[..., Walk]) -> None:
    """Reserve, pull, admit, tokens, finish; the link is asked for first."""
    leg = walk(LegKind.GENERATE)
    tid = leg.order.transfer_id
    leg.engine(engine.Reserved(leg.key, 256, PAGES))
    commands, told = leg.rig.took()
    assert commands == []
    assert told[-1] == transfer.OpenPull(
        transfer_id=tid, attempt=1, holder="prefill-0", holder_incarnation=9, pages=PAGES, length=600, held_blocks=1
    )
    leg.transfer(transfer.Arrived(tid, 11, 0, 344, 256, STATS))
    assert leg.rig.took() == ([engine.Admit(leg.key, 11, 0)], [])
    assert leg.words[-1] == SaidTransferred(STATS, 2 + 3 + 1, 256)
    leg.engine(engine.TokenSampled(leg.key, 1, 12, None), engine.TokenSampled(leg.key, 2, 13, None))
    leg.engine(engine.SequenceFinished(leg.key, FinishReason.LENGTH, None, 0, 0.0, None))
    assert leg.words[-1] == Finished(FinishReason.LENGTH, None, 0.0, 0)
    assert leg.rig.took() == ([], [])
    assert leg.rig.desk.num_legs == 0


@pytest.mark.parametrize("answer", ["arrived", "failed", "not_needed"])
def test_generate_aborted_while_pulling_keeps_its_pages_until_the_pull_answers(
    walk: Callable[..., Walk], answer: str
) -> None:
    """A scatter may still run: Release waits for whichever answer comes, and a late arrival is not admitted."""
    leg = walk(LegKind.GENERATE).to("pulling")
    tid = leg.order.transfer_id
    leg.rig.desk.abort(leg.rig.ear, 1, Cancelled("gone"), 2.0)
    assert leg.rig.took() == ([engine.AbortSequence(leg.key)], [transfer.CancelPull(tid, "cancelled")])
    leg.engine(engine.SequenceFailed(leg.key, Cancelled("gone")))
    assert leg.rig.took() == ([], [])
    answers = {
        "arrived": transfer.Arrived(tid, 11, 0, 600, 0, STATS),
        "failed": transfer.PullFailed(tid, TransferFailed("cancelled"), STATS),
        "not_needed": transfer.NotNeeded(tid, 2, 0),
    }
    leg.transfer(answers[answer])
    assert leg.rig.took() == ([engine.Release(leg.key)], [])
    assert len(leg.rig.ear.terminals(1)) == 1
    assert leg.rig.desk.num_legs == 0


def test_generate_aborted_while_reserving_gives_back_at_once(walk: Callable[..., Walk]) -> None:
    """Nobody writes pages that nobody was told of."""
    leg = walk(LegKind.GENERATE)
    leg.rig.desk.abort(leg.rig.ear, 1, Cancelled("gone"), 2.0)
    assert leg.rig.took()[0] == [engine.AbortSequence(leg.key), engine.Release(leg.key)]
    assert leg.rig.desk.num_legs == 0


def test_generate_aborted_while_decoding_leaves_the_pages_to_the_engine(walk: Callable[..., Walk]) -> None:
    """An admitted sequence's pages go back with the abort itself."""
    leg = walk(LegKind.GENERATE).to("decoding")
    leg.rig.desk.abort(leg.rig.ear, 1, Cancelled("gone"), 2.0)
    assert leg.rig.took() == ([engine.AbortSequence(leg.key)], [])
    assert leg.rig.desk.num_legs == 0


def test_generate_reports_a_failed_pull_as_its_end(walk: Callable[..., Walk]) -> None:
    """The transfer's own error reaches the router, and everything reserved goes back."""
    leg = walk(LegKind.GENERATE).to("pulling")
    error = TransferFailed("digest")
    leg.transfer(transfer.PullFailed(leg.order.transfer_id, error, STATS))
    assert leg.rig.took()[0] == [engine.AbortSequence(leg.key), engine.Release(leg.key)]
    assert leg.words[-1] == Failed(error)


@pytest.mark.parametrize(
    ("token", "expected"),
    [
        (2, Finished(FinishReason.STOP)),
        (7, Finished(FinishReason.STOP, stop_token_id=7)),
        (9, Finished(FinishReason.LENGTH)),
    ],
)
def test_generate_that_is_not_needed_finishes_for_the_first_tokens_reason(
    walk: Callable[..., Walk], token: int, expected: Finished
) -> None:
    """Nothing was taken, and the reason is the one that the prefill worker gave."""
    leg = walk(LegKind.GENERATE).to("pulling")
    leg.transfer(transfer.NotNeeded(leg.order.transfer_id, token, 0))
    assert leg.words[-1] == expected
    assert leg.rig.took()[0] == [engine.AbortSequence(leg.key), engine.Release(leg.key)]


def test_generate_without_an_answer_about_credits_ends(walk: Callable[..., Walk]) -> None:
    """The router can try another worker long before the request's own end."""
    leg = walk(LegKind.GENERATE)
    leg.rig.desk.on_time(RESERVE_S)
    (failed,) = leg.rig.ear.terminals(1)
    assert failed.error.reason == "queue_full"


@pytest.mark.parametrize("kind", list(LegKind))
def test_no_leg_outlives_its_timeout(walk: Callable[..., Walk], kind: LegKind) -> None:
    """The whole leg has a deadline of its own, whatever waits inside it."""
    leg = walk(kind, timeout_s=30.0)
    leg.engine(engine.Reserved(leg.key, 0, PAGES))
    if kind is LegKind.PREFILL:
        leg.transfer(transfer.Wanted(leg.order.transfer_id, 0))
    leg.rig.desk.on_time(29.9)
    assert leg.rig.ear.terminals(1) == []
    leg.rig.desk.on_time(30.0)
    (failed,) = leg.rig.ear.terminals(1)
    assert failed.error.reason == "deadline_exceeded"
    assert engine.AbortSequence(leg.key) in leg.rig.took()[0]


def test_pages_that_are_not_let_go_raise_one_alarm(walk: Callable[..., Walk]) -> None:
    """A defect is told once, and the pages stay bound: reuse would be worse than a leak."""
    leg = walk(LegKind.GENERATE).to("pulling")
    leg.rig.desk.abort(leg.rig.ear, 1, Cancelled("gone"), 2.0)
    for now_s in (2.0 + RELEASE_S, 100.0, 1000.0):
        leg.rig.desk.on_time(now_s)
    assert len(leg.rig.witness.alarms) == 1
    assert leg.rig.desk.num_legs == 1


def test_local_runs_both_phases(walk: Callable[..., Walk]) -> None:
    """Reserved, started, tokens, finished; transfer never hears of it."""
    leg = walk(LegKind.LOCAL)
    leg.engine(engine.Reserved(leg.key, 0, SequencePages()), engine.Started(leg.key, 0))
    leg.engine(engine.ChunkDone(leg.key, 600, PAGES), engine.TokenSampled(leg.key, 0, 3, None))
    leg.engine(engine.SequenceFinished(leg.key, FinishReason.STOP, None, 600, 0.1, None))
    assert [type(word).__name__ for word in leg.words] == ["SaidReserved", "SaidStarted", "SaidToken", "Finished"]
    assert leg.rig.transfer == []
    assert leg.rig.desk.num_legs == 0


def test_a_transfer_id_in_use_is_refused(make_desk: Any, make_order: Any) -> None:
    """The second leg under one id fails, the first goes on."""
    rig = make_desk()
    order = make_order(LegKind.PREFILL)
    rig.desk.submit(rig.ear, 1, order, 0.0)
    rig.desk.submit(rig.ear, 2, order, 0.0)
    assert [word.error.reason for word in rig.ear.words[2]] == ["stale"]
    assert rig.desk.num_legs == 1


def test_a_router_that_left_hears_nothing_and_keeps_nothing(make_desk: Any, make_order: Any, make_ear: Any) -> None:
    """All its legs end; those of another router go on."""
    rig = make_desk()
    other = make_ear()
    rig.desk.submit(rig.ear, 1, make_order(LegKind.LOCAL), 0.0)
    rig.desk.submit(rig.ear, 2, make_order(LegKind.GENERATE, 2), 0.0)
    rig.desk.submit(other, 1, make_order(LegKind.LOCAL), 0.0)
    assert rig.desk.leave(rig.ear, Cancelled("left"), 1.0) == 2
    assert rig.ear.words == {}
    assert rig.desk.num_legs == 1
    assert rig.desk.leave(rig.ear, Cancelled("left"), 1.0) == 0


def test_a_desk_that_does_not_accept_refuses_new_legs(make_desk: Any, make_order: Any) -> None:
    """While draining, open legs go on and new ones are told why."""
    rig = make_desk()
    rig.desk.submit(rig.ear, 1, make_order(LegKind.LOCAL), 0.0)
    rig.desk.accepting = False
    rig.desk.submit(rig.ear, 2, make_order(LegKind.LOCAL), 0.0)
    assert [word.error.reason for word in rig.ear.words[2]] == ["draining"]
    assert 1 not in rig.ear.words


def test_timers_of_legs_that_ended_do_not_pile_up(make_desk: Any, make_order: Any) -> None:
    """Ten thousand short legs with long timeouts; those that live keep theirs."""
    rig = make_desk()
    rig.desk.submit(rig.ear, 0, make_order(LegKind.LOCAL, timeout_s=50.0), 0.0)
    for leg in range(1, 10_000):
        rig.desk.submit(rig.ear, leg, make_order(LegKind.LOCAL, timeout_s=1000.0), 0.0)
        rig.desk.abort(rig.ear, leg, Cancelled("gone"), 0.0)
    assert len(rig.desk._timers) < 2000
    rig.desk.on_time(50.0)
    assert rig.desk.num_legs == 0


def test_a_full_desk_refuses(make_desk: Any, make_order: Any) -> None:
    """The number of open legs is bounded."""
    rig = make_desk(max_legs=1)
    rig.desk.submit(rig.ear, 1, make_order(LegKind.LOCAL), 0.0)
    rig.desk.submit(rig.ear, 2, make_order(LegKind.LOCAL), 0.0)
    assert [word.error.reason for word in rig.ear.words[2]] == ["queue_full"]


def test_blocks_that_are_here_are_offered_before_anything_is_computed(walk: Callable[..., Walk]) -> None:
    """The holder's hit: its pages go to the transfer thread with the first chunk's scheduling, not after it."""
    leg = walk(LegKind.PREFILL)
    leg.engine(engine.Reserved(leg.key, 512, PAGES))
    leg.transfer(transfer.Wanted(leg.order.transfer_id, 1))
    leg.rig.took()
    leg.engine(engine.Started(leg.key, 256))
    _, (told,) = leg.rig.took()
    assert (told.num_blocks, told.pages, told.computed_tokens) == (2, PAGES, 256)
    leg.engine(engine.TokenSampled(leg.key, 0, 11, None), done(leg.key))
    assert leg.rig.took()[1][-1].cached == 256


def test_a_taker_pulls_only_what_it_lacks(walk: Callable[..., Walk]) -> None:
    """The decode side's hit: the blocks it holds are named in the pull."""
    leg = walk(LegKind.GENERATE)
    leg.rig.took()
    leg.engine(engine.Reserved(leg.key, 512, PAGES))
    assert leg.words[-1].held_tokens == 512
    (pull,) = (c for c in leg.rig.took()[1] if isinstance(c, transfer.OpenPull))
    assert pull.held_blocks == 2


# ---- several choices ----

SEEDS = (5, 6, 7)


def test_a_prefill_of_several_choices_says_each_first_token_and_serves_once(walk: Callable[..., Walk]) -> None:
    """One offer, one end; the transfer carries all first tokens in the order of choices."""
    leg = walk(LegKind.PREFILL, seeds=SEEDS).to("computing")
    leg.engine(engine.Started(leg.key, 0), engine.ChunkDone(leg.key, 600, PAGES))
    leg.engine(*(engine.TokenSampled(leg.key, 0, 11 + choice, None, choice) for choice in (0, 2, 1)))
    leg.rig.desk.abort_choice(leg.rig.ear, 1, 1, 1.0)
    leg.engine(done(leg.key))
    assert leg.words[-3:] == [SaidToken(0, 11, None, 0), SaidToken(0, 13, None, 2), SaidToken(0, 12, None, 1)]
    commands, told = leg.rig.took()
    assert commands == []
    assert (told[-1].first_token, told[-1].more_first_tokens, told[-1].ended) == (11, (12, 13), False)
    leg.transfer(transfer.Ended(leg.order.transfer_id, transfer.Outcome.TAKEN, "", STATS))
    assert leg.words[-1] == Finished(None, None, 0.25, 600)
    assert leg.rig.desk.num_legs == 0


def test_a_generate_leg_forks_when_all_has_arrived(walk: Callable[..., Walk]) -> None:
    """One pull, one admission; each choice ends by itself, the last one ends the leg."""
    leg = walk(LegKind.GENERATE, seeds=SEEDS)
    assert leg.order.engine_request(1).seeds == SEEDS
    leg.engine(engine.Reserved(leg.key, 0, PAGES))
    assert leg.rig.took()[1][-1].num_choices == 3
    leg.transfer(transfer.Arrived(leg.order.transfer_id, 11, 0, 600, 0, STATS, (12, 13)))
    assert leg.rig.took() == ([engine.Admit(leg.key, 11, 0, (12, 13))], [])
    leg.engine(
        engine.SequenceFinished(leg.key, FinishReason.STOP, 7, 0, 0.0, None, 1, False),
        engine.TokenSampled(leg.key, 1, 21, None, 0),
        engine.TokenSampled(leg.key, 1, 23, None, 2),
        engine.SequenceFinished(leg.key, FinishReason.LENGTH, None, 0, 0.0, None, 2, False),
        engine.SequenceFinished(leg.key, FinishReason.STOP, None, 0, 0.0, None, 0, True),
    )
    assert leg.words[-5:] == [
        ChoiceFinished(1, FinishReason.STOP, 7),
        SaidToken(1, 21, None, 0),
        SaidToken(1, 23, None, 2),
        ChoiceFinished(2, FinishReason.LENGTH),
        Finished(FinishReason.STOP, choice=0),
    ]
    assert leg.rig.desk.num_legs == 0


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("kind", [LegKind.GENERATE, LegKind.LOCAL])
def test_a_choice_needed_no_more_ends_alone(walk: Callable[..., Walk], kind: LegKind, early: bool) -> None:
    """Said before there are choices, it is told to the engine once there are; one that never was is nothing."""
    leg = walk(kind, seeds=SEEDS)
    leg.engine(engine.Reserved(leg.key, 0, PAGES))
    leg.rig.took()

    def abort() -> None:
        for choice in (1, 3, 1 << 31):
            leg.rig.desk.abort_choice(leg.rig.ear, 1, choice, 1.0)

    if early:
        abort()
        abort()
        assert leg.rig.took() == ([], [])
    if kind is LegKind.GENERATE:
        leg.transfer(transfer.Arrived(leg.order.transfer_id, 11, 0, 600, 0, STATS, (12, 13)))
    else:
        leg.engine(engine.Started(leg.key, 0), engine.ChunkDone(leg.key, 600, PAGES))
        leg.engine(*(engine.TokenSampled(leg.key, 0, 11 + choice, None, choice) for choice in range(3)))
    if not early:
        abort()
    commands, _ = leg.rig.took()
    assert [c for c in commands if not isinstance(c, engine.Admit)] == [engine.AbortChoice(leg.key, 1)]
    leg.engine(engine.SequenceFinished(leg.key, None, None, 0, 0.0, None, 1, False))
    assert leg.words[-1] == ChoiceFinished(1, None)
    assert leg.rig.desk.num_legs == 1
    leg.rig.desk.abort(leg.rig.ear, 1, Cancelled("gone"), 2.0)
    assert leg.rig.took() == ([engine.AbortSequence(leg.key)], [])
    assert leg.rig.desk.num_legs == 0


def test_choices_that_their_first_tokens_ended_are_all_told(walk: Callable[..., Walk]) -> None:
    """Nothing was taken; each choice has its own reason, the last word is terminal."""
    leg = walk(LegKind.GENERATE, seeds=SEEDS).to("pulling")
    leg.transfer(transfer.NotNeeded(leg.order.transfer_id, 2, 0, (7, 9)))
    assert leg.words[-3:] == [
        ChoiceFinished(0, FinishReason.STOP),
        ChoiceFinished(1, FinishReason.STOP, 7),
        Finished(FinishReason.LENGTH, choice=2),
    ]
    assert leg.rig.desk.num_legs == 0


# ---- prefixes ----


def test_share_offers_at_once_and_serves_when_pinned_and_wanted(walk: Callable[..., Walk]) -> None:
    """Credits and pull in either order; pages go back when they were taken, and only then."""
    for order in (("reserved", "wanted"), ("wanted", "reserved")):
        share = walk(LegKind.SHARE)
        steps = {
            "reserved": lambda share=share: share.engine(engine.Reserved(share.key, 512, PAGES)),
            "wanted": lambda share=share: share.transfer(transfer.Wanted(share.order.transfer_id, 0)),
        }
        steps[order[0]]()
        assert share.rig.took() == ([], [])
        steps[order[1]]()
        assert share.rig.took() == ([engine.Start(share.key)], [])
        share.engine(engine.Started(share.key, 512), done(share.key))
        _, (final, finished) = share.rig.took()
        assert final.num_blocks == 600 // 256
        assert (finished.cached, finished.computed, finished.ended) == (600, 0, False)
        assert not share.rig.ear.terminals(1)
        share.transfer(transfer.Ended(share.order.transfer_id, transfer.Outcome.TAKEN, "taken", STATS))
        assert share.rig.took() == ([engine.Release(share.key)], [])
        assert share.words == [Finished(None, None)]


def test_share_that_the_cache_refuses_withdraws_its_offer(walk: Callable[..., Walk]) -> None:
    """The taker hears of it at once, and nothing is released that was never taken."""
    share = walk(LegKind.SHARE)
    share.engine(engine.Refused(share.key, TransferFailed("not kept here")))
    assert share.rig.took() == ([], [transfer.Withdraw(share.order.transfer_id, "over")])
    assert isinstance(share.words[-1], Failed)
    share.transfer(transfer.Ended(share.order.transfer_id, transfer.Outcome.ENDED, "withdrawn", STATS))
    assert share.rig.took() == ([], [])


def test_fetch_pulls_what_it_lacks_and_stores_it(walk: Callable[..., Walk]) -> None:
    """Stored before it is told, so that the next leg finds it."""
    fetch = walk(LegKind.FETCH)
    fetch.engine(engine.Reserved(fetch.key, 256, PAGES))
    _, (_, pull) = fetch.rig.took()
    assert (pull.held_blocks, pull.length, pull.pages) == (1, 600, PAGES)
    fetch.transfer(transfer.Arrived(fetch.order.transfer_id, 0, 0, 0, 600, STATS))
    assert fetch.rig.took() == ([engine.Store(fetch.key)], [])
    assert [type(word) for word in fetch.words[1:]] == [SaidTransferred, Finished]


@pytest.mark.parametrize("early", [True, False])
def test_fetch_aborted_keeps_its_pages_until_the_pull_answers(walk: Callable[..., Walk], early: bool) -> None:
    """A scatter may still write them; before the pull there is none."""
    fetch = walk(LegKind.FETCH)
    if not early:
        fetch.engine(engine.Reserved(fetch.key, 0, PAGES))
        fetch.rig.took()
    fetch.rig.desk.abort(fetch.rig.ear, 1, Cancelled("over"), 2.0)
    commands, transfers = fetch.rig.took()
    assert commands[0] == engine.AbortSequence(fetch.key)
    assert (engine.Release(fetch.key) in commands) is early
    assert isinstance(fetch.words[-1], Failed)
    if early:
        return
    assert transfers == [transfer.CancelPull(fetch.order.transfer_id, "over")]
    fetch.engine(engine.SequenceFailed(fetch.key, Cancelled("aborted")))
    fetch.transfer(transfer.PullFailed(fetch.order.transfer_id, Cancelled("over"), STATS))
    assert fetch.rig.took() == ([engine.Release(fetch.key)], [])


def test_fetch_that_fails_says_why(walk: Callable[..., Walk]) -> None:
    """The prefix is computed then; that is the router's business."""
    fetch = walk(LegKind.FETCH)
    fetch.engine(engine.Reserved(fetch.key, 0, PAGES))
    fetch.rig.took()
    fetch.transfer(transfer.PullFailed(fetch.order.transfer_id, TransferFailed("stale"), STATS))
    assert fetch.rig.took() == ([engine.AbortSequence(fetch.key), engine.Release(fetch.key)], [])
    assert fetch.words[-1].error.reason == "transfer_failed"
