"""The journey of one sequence: its table, its retries, and that it ends exactly once whatever happens."""

import itertools
import random

import pytest

from headrace.core import errors
from headrace.core.sampling import FinishReason, SamplingParams
from headrace.router import journey as j
from headrace.router.placement import Fetch, LocalPlan, PairPlan, WorkerRef

P1, P2 = (WorkerRef(f"p{i}:1", f"prefill-{i}", i, f"p{i}:2") for i in (1, 2))
D1, D2 = (WorkerRef(f"d{i}:1", f"decode-{i}", 10 + i, f"d{i}:2") for i in (1, 2))
EOS = 1


def make_journey(max_tokens=5, seeds=(), **limits) -> j.Journey:
    return j.Journey(
        prompt=(7, 8, 9),
        sampling=SamplingParams(max_tokens=max_tokens, eos_token_ids=(EOS,), stop_token_ids=(2,), min_tokens=2),
        deadline_s=100.0,
        limits=j.JourneyLimits(**limits),
        new_leg=itertools.count(1).__next__,
        new_transfer=lambda: b"t" * 16,
        seeds=seeds,
    )


def tokens(*pairs):
    return j.LegReport(tokens=tuple(j.OutToken(index, token) for index, token in pairs))


def opened(actions, kind):
    return next(action for action in actions if isinstance(action, j.OpenLeg) and action.kind is kind)


def of_kind(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def delivered(actions):
    return [token.id for action in of_kind(actions, j.Deliver) for token in action.tokens]


def place(journey, plan=None, now_s=0.0):
    """(generate leg, prefill leg)"""
    actions = journey.handle(j.Placed(plan or PairPlan(P1, D1)), now_s)
    return opened(actions, j.LegKind.GENERATE), opened(actions, j.LegKind.PREFILL)


def said(leg, report):
    return j.LegSaid(leg.leg, report)


def fail(leg, error):
    return j.LegSaid(leg.leg, j.LegReport(failed=error))


# ---- the table ----


def reachable(start):
    seen, todo = {start}, [start]
    while todo:
        for following in j.NEXT[todo.pop()].values():
            if following not in seen:
                seen.add(following)
                todo.append(following)
    return seen


def test_every_state_is_in_the_table_and_can_be_reached():
    """No state is missing and none is dead."""
    assert set(j.NEXT) == set(j.State)
    assert reachable(j.State.PLANNED) == set(j.State)


@pytest.mark.parametrize("state", j.State)
def test_every_state_can_be_cancelled_and_reaches_an_end(state):
    """A client may leave at any time, and nothing waits for ever."""
    assert j.NEXT[state][j.Move.CANCEL] in {j.State.CANCELLED, *j.ENDS}
    assert reachable(state) & j.ENDS


@pytest.mark.parametrize("state", sorted(j.ENDS, key=lambda state: state.value))
def test_ends_are_final(state):
    """What comes later is a loop."""
    assert set(j.NEXT[state]) == set(j.Move)
    assert set(j.NEXT[state].values()) == {state}


# ---- one good run ----


def test_pair_opens_both_legs_with_one_transfer_and_streams_in_order():
    """First token from the prefill, the rest from the decode, one end."""
    journey = make_journey(max_tokens=3)
    assert of_kind(journey.start(0.0), j.Place)
    generate, prefill = place(journey)
    assert generate.holder == P1
    assert prefill.holder is None
    assert generate.transfer_id == prefill.transfer_id
    assert generate.prompt == (7, 8, 9)
    journey.handle(said(generate, j.LegReport(reserved_tokens=0)), 0.1)
    assert journey.state is j.State.PREFILLING
    assert delivered(journey.handle(said(prefill, tokens((0, 50))), 0.2)) == [50]
    assert journey.state is j.State.STREAMING
    journey.handle(said(prefill, j.LegReport(finished=j.LegFinished(None, prefill_s=0.1))), 0.3)
    actions = journey.handle(said(generate, tokens((1, 51), (2, 52))), 0.4)
    assert delivered(actions) == [51, 52]
    end = of_kind(actions, j.End)[0]
    assert (end.state, end.reason, end.error) == (j.State.DONE, FinishReason.LENGTH, None)
    assert journey.handle(said(generate, tokens((3, 53))), 0.5) == []
    assert journey.stats.prefill_s == 0.1


def test_token_of_the_decode_may_overtake_the_first():
    """They travel over different sessions; what came early waits."""
    journey = make_journey(max_tokens=3)
    journey.start(0.0)
    generate, prefill = place(journey)
    assert delivered(journey.handle(said(generate, tokens((1, 51), (2, 52))), 0.1)) == []
    actions = journey.handle(said(prefill, tokens((0, 50))), 0.2)
    assert delivered(actions) == [50, 51, 52]
    assert of_kind(actions, j.End)


def test_first_token_that_ends_the_request_ends_both_legs():
    """EOS from the prefill: the decode leg is aborted, nothing else is awaited."""
    journey = make_journey()
    journey.start(0.0)
    generate, prefill = place(journey)
    actions = journey.handle(said(prefill, tokens((0, EOS))), 0.1)
    assert of_kind(actions, j.End)[0].reason is FinishReason.STOP
    assert of_kind(actions, j.End)[0].stop_token_id is None
    assert {action.leg for action in of_kind(actions, j.AbortLeg)} == {generate.leg, prefill.leg}


def test_decode_leg_may_hear_of_an_early_end_first():
    """It says that the request has ended before the router has the token that ended it."""
    journey = make_journey()
    journey.start(0.0)
    generate, prefill = place(journey)
    journey.handle(said(generate, j.LegReport(finished=j.LegFinished(FinishReason.STOP))), 0.1)
    assert not journey.is_over
    actions = journey.handle(said(prefill, tokens((0, EOS))), 0.2)
    assert delivered(actions) == [EOS]
    assert of_kind(actions, j.End)[0].reason is FinishReason.STOP


def test_stop_token_id_is_named():
    """A stop id of the request, unlike EOS."""
    journey = make_journey()
    journey.start(0.0)
    _, prefill = place(journey)
    end = of_kind(journey.handle(said(prefill, tokens((0, 2))), 0.1), j.End)[0]
    assert end.stop_token_id == 2


# ---- fetching a prefix ----

FETCHED = PairPlan(P1, D1, Fetch(P2, 2))


def begin_fetch(journey, now_s=0.0):
    """(share leg, fetch leg)"""
    actions = journey.handle(j.Placed(FETCHED), now_s)
    return opened(actions, j.LegKind.SHARE), opened(actions, j.LegKind.FETCH)


def test_prefix_is_fetched_before_the_pair_opens():
    """One transfer of its own between its holder and the prefill worker; then all goes as ever."""
    journey = make_journey(max_tokens=2)
    journey.start(0.0)
    share, fetch = begin_fetch(journey)
    assert journey.state is j.State.FETCHING
    assert (share.worker, fetch.worker, fetch.holder) == (P2, P1, P2)
    assert share.prompt == fetch.prompt == (7, 8)
    assert share.transfer_id == fetch.transfer_id
    assert journey.handle(said(fetch, j.LegReport(reserved_tokens=0)), 0.1) == []
    actions = journey.handle(said(fetch, j.LegReport(finished=j.LegFinished(None))), 0.2)
    assert of_kind(actions, j.AbortLeg) == []
    assert opened(actions, j.LegKind.PREFILL).prompt == (7, 8, 9)
    assert journey.state is j.State.RESERVING
    assert journey.stats.fetches == ["fetched"]
    # The holder hears of it later than the prefill begins.
    assert journey.handle(said(share, j.LegReport(finished=j.LegFinished(None))), 0.3) == []
    generate, prefill = (opened(actions, kind) for kind in (j.LegKind.GENERATE, j.LegKind.PREFILL))
    assert delivered(journey.handle(said(prefill, tokens((0, 50))), 0.4)) == [50]
    assert delivered(journey.handle(said(generate, tokens((1, 51))), 0.5)) == [51]
    assert journey.state is j.State.DONE


@pytest.mark.parametrize("how", ["share fails", "fetch fails", "share lost", "fetch lost", "late"])
def test_prefix_that_does_not_come_is_computed(how):
    """It costs no attempt, and what is left of the two legs is aborted."""
    journey = make_journey()
    journey.start(0.0)
    legs = dict(zip(("share", "fetch"), begin_fetch(journey), strict=True))
    leg = legs.get(how.split()[0])
    if how == "late":
        actions = journey.handle(j.Timer(), journey.due_s)
    elif how.endswith("lost"):
        actions = journey.handle(j.LegLost(leg.leg, errors.PeerLost("gone")), 0.1)
    else:
        actions = journey.handle(fail(leg, errors.TransferFailed("not kept here")), 0.1)
    others = {other.leg for other in legs.values() if other is not leg}
    assert {action.leg for action in of_kind(actions, j.AbortLeg)} == others
    assert opened(actions, j.LegKind.PREFILL).worker == P1
    assert journey.attempt == 0
    assert journey.stats.fetches == ["late" if how == "late" else "failed"]


def test_cancel_while_fetching_aborts_both():
    """The client may leave at any time."""
    journey = make_journey()
    journey.start(0.0)
    share, fetch = begin_fetch(journey)
    actions = journey.handle(j.Cancel(), 0.1)
    assert {action.leg for action in of_kind(actions, j.AbortLeg)} == {share.leg, fetch.leg}
    assert of_kind(actions, j.End)[0].state is j.State.CANCELLED


def test_resumed_stream_does_not_fetch():
    """Its user waits in mid-sentence: it goes on at once."""
    journey = make_journey()
    journey.start(0.0)
    generate, prefill = place(journey)
    journey.handle(said(prefill, tokens((0, 50))), 0.1)
    journey.handle(j.LegLost(generate.leg, errors.PeerLost("gone")), 0.2)
    assert journey.state is j.State.MIGRATING
    actions = journey.handle(j.Placed(FETCHED), 0.3)
    assert {action.kind for action in of_kind(actions, j.OpenLeg)} == {j.LegKind.GENERATE, j.LegKind.PREFILL}


def test_local_plan_has_one_leg():
    """A worker of both roles."""
    journey = make_journey(max_tokens=2)
    journey.start(0.0)
    leg = opened(journey.handle(j.Placed(LocalPlan(D1)), 0.0), j.LegKind.LOCAL)
    report = j.LegReport(
        reserved_tokens=0,
        started=(2, 0.5),
        tokens=(j.OutToken(0, 50), j.OutToken(1, 51)),
        finished=j.LegFinished(FinishReason.LENGTH, prefill_s=0.2),
    )
    actions = journey.handle(said(leg, report), 0.1)
    assert delivered(actions) == [50, 51]
    assert journey.stats.cached_tokens == 2
    assert of_kind(actions, j.End)[0].reason is FinishReason.LENGTH


# ---- what goes wrong before the first token ----


@pytest.mark.parametrize("which", ["generate", "prefill"])
def test_lost_leg_before_output_is_tried_elsewhere(which):
    """The other leg is aborted, the attempt counts, the worker is avoided."""
    journey = make_journey()
    journey.start(0.0)
    legs = dict(zip(("generate", "prefill"), place(journey), strict=True))
    lost = legs.pop(which)
    (other,) = legs.values()
    actions = journey.handle(j.LegLost(lost.leg, errors.PeerLost("gone")), 0.1)
    assert of_kind(actions, j.AbortLeg) == [j.AbortLeg(other.leg)]
    assert of_kind(actions, j.Place)[0].avoid == {lost.worker.life}
    assert journey.attempt == 1
    generate, _ = place(journey, PairPlan(P2, D2))
    assert generate.attempt == 1
    # The old attempt's words are stale.
    assert delivered(journey.handle(said(other, tokens((0, 99))), 0.2)) == []


@pytest.mark.parametrize("error", [errors.PeerLost("stream removed"), errors.TransferFailed("corrupt")])
def test_what_one_worker_says_of_the_other_casts_doubt_on_both(error):
    """The peer of one that is killed may say so first: the next attempt is not for the dead one."""
    journey = make_journey()
    journey.start(0.0)
    generate, prefill = place(journey)
    actions = journey.handle(fail(generate, error), 0.1)
    assert of_kind(actions, j.Place)[0].avoid == {generate.worker.life, prefill.worker.life}


def test_attempts_run_out():
    """Three tries, then the worker's error."""
    journey = make_journey()
    journey.start(0.0)
    for _ in range(3):
        _, prefill = place(journey)
        actions = journey.handle(fail(prefill, errors.TransferFailed("corrupt")), 0.1)
    end = of_kind(actions, j.End)[0]
    assert end.state is j.State.FAILED
    assert end.error.reason == "transfer_failed"


def test_refusal_for_want_of_room_costs_no_attempt_but_time():
    """The queue's patience rules, and does not begin anew."""
    journey = make_journey(queue_s=5.0)
    journey.start(0.0)
    for step in range(10):
        generate, _ = place(journey, now_s=step * 0.1)
        actions = journey.handle(fail(generate, errors.NoFreePages("full")), step * 0.1)
        assert of_kind(actions, j.CloseLeg) == [j.CloseLeg(generate.leg, refused=True)]
        assert journey.state is j.State.PLANNED
    end = of_kind(journey.handle(j.Timer(), 5.0), j.End)[0]
    assert (end.state, end.error.reason) == (j.State.SHED, "queue_full")


def test_bad_request_is_not_repeated():
    """What a worker refuses for good is the client's to know."""
    journey = make_journey()
    journey.start(0.0)
    generate, prefill = place(journey)
    actions = journey.handle(fail(generate, errors.PromptTooLong("too long")), 0.1)
    assert of_kind(actions, j.End)[0].error.reason == "context_length_exceeded"
    assert of_kind(actions, j.AbortLeg) == [j.AbortLeg(prefill.leg)]


def test_prefill_without_a_token_is_a_failure():
    """Pages taken, but no token said."""
    journey = make_journey()
    journey.start(0.0)
    _, prefill = place(journey)
    journey.handle(said(prefill, j.LegReport(finished=j.LegFinished(None))), 0.1)
    assert journey.attempt == 1


def test_no_reservation_in_time_goes_back_to_the_queue():
    """A worker that neither takes nor refuses."""
    journey = make_journey(reserve_s=2.0, queue_s=30.0)
    journey.start(0.0)
    place(journey)
    assert journey.due_s == 2.0
    assert journey.handle(j.Timer(), 1.9) == []
    assert of_kind(journey.handle(j.Timer(), 2.0), j.Place)


def test_nobody_to_serve_is_told_from_a_full_house():
    """503 or 429."""
    journey = make_journey(queue_s=1.0)
    journey.start(0.0)
    assert of_kind(journey.handle(j.Timer(can_serve=False), 1.0), j.End)[0].error.reason == "no_workers"


# ---- what goes wrong after it ----


def stream_two(journey):
    journey.start(0.0)
    generate, prefill = place(journey)
    journey.handle(said(prefill, tokens((0, 50))), 0.1)
    journey.handle(said(generate, tokens((1, 51))), 0.2)
    return generate, prefill


def test_lost_decode_worker_is_replaced_in_mid_stream():
    """Prompt and journal go to another pair; indices go on; limits count what is left."""
    journey = make_journey(max_tokens=4)
    generate, _ = stream_two(journey)
    actions = journey.handle(j.LegLost(generate.leg, errors.PeerLost("gone")), 0.3)
    assert journey.state is j.State.MIGRATING
    assert of_kind(actions, j.Place)
    generate, prefill = place(journey, PairPlan(P2, D2))
    assert prefill.prompt == (7, 8, 9, 50, 51)
    assert prefill.num_output_tokens == 2
    assert (prefill.sampling.max_tokens, prefill.sampling.min_tokens) == (2, 0)
    assert delivered(journey.handle(said(prefill, tokens((2, 52))), 0.4)) == [52]
    assert journey.state is j.State.STREAMING
    actions = journey.handle(said(generate, tokens((3, 53))), 0.5)
    assert delivered(actions) == [53]
    assert of_kind(actions, j.End)[0].reason is FinishReason.LENGTH


def test_failed_prefill_after_its_token_is_no_matter():
    """The decode worker alone knows whether it has all."""
    journey = make_journey()
    journey.start(0.0)
    generate, prefill = place(journey)
    journey.handle(said(prefill, tokens((0, 50))), 0.1)
    assert journey.handle(fail(prefill, errors.PeerLost("gone")), 0.2) == [j.CloseLeg(prefill.leg)]
    assert delivered(journey.handle(said(generate, tokens((1, 51))), 0.3)) == [51]


def test_migrations_run_out():
    """Two resumptions, then an error after the first byte."""
    journey = make_journey(max_tokens=50)
    generate, _ = stream_two(journey)
    for _ in range(2):
        journey.handle(j.LegLost(generate.leg, errors.PeerLost("gone")), 0.3)
        generate, _ = place(journey)
    end = of_kind(journey.handle(j.LegLost(generate.leg, errors.PeerLost("gone")), 0.4), j.End)[0]
    assert (end.state, end.error.reason) == (j.State.FAILED, "worker_failed")


def test_gap_within_a_leg_is_a_fault_and_a_double_is_not():
    """A worker that skips an index is left; one that repeats itself is heard once."""
    journey = make_journey()
    generate, _ = stream_two(journey)
    assert delivered(journey.handle(said(generate, tokens((1, 51), (2, 52))), 0.3)) == [52]
    assert journey.stats.stale_tokens == 1
    actions = journey.handle(said(generate, tokens((4, 54))), 0.4)
    assert delivered(actions) == []
    assert j.AbortLeg(generate.leg) in actions
    assert journey.state is j.State.MIGRATING


def test_stalled_stream_is_migrated():
    """No token for too long, though the session lives."""
    journey = make_journey(stall_s=10.0)
    stream_two(journey)
    assert journey.due_s == pytest.approx(10.2)
    assert of_kind(journey.handle(j.Timer(), 10.3), j.Place)
    assert journey.state is j.State.MIGRATING


def test_deadline_ends_everything():
    """In any phase, with the legs aborted."""
    journey = make_journey(stall_s=1000.0)
    generate, prefill = stream_two(journey)
    actions = journey.handle(j.Timer(), 100.0)
    assert of_kind(actions, j.End)[0].error.reason == "deadline_exceeded"
    assert {action.leg for action in of_kind(actions, j.AbortLeg)} == {generate.leg, prefill.leg}


def test_stop_string_ends_well():
    """The router has enough: no more tokens, no failure."""
    journey = make_journey()
    generate, _ = stream_two(journey)
    actions = journey.handle(j.Enough(), 0.3)
    assert of_kind(actions, j.End)[0].state is j.State.DONE
    assert j.AbortLeg(generate.leg) in actions


# ---- several choices ----


def of_choices(index, *ids):
    """One token of each choice, at one index."""
    return j.LegReport(tokens=tuple(j.OutToken(index, id_, None, choice) for choice, id_ in enumerate(ids)))


def stream_three(**limits):
    """Three choices with two tokens each."""
    journey = make_journey(max_tokens=4, seeds=(30, 31, 32), **limits)
    journey.start(0.0)
    generate, prefill = place(journey)
    assert generate.seeds == prefill.seeds == (30, 31, 32)
    journey.handle(said(prefill, of_choices(0, 50, 60, 70)), 0.1)
    actions = journey.handle(said(generate, of_choices(1, 51, 61, 71)), 0.2)
    assert {a.choice: [t.id for t in a.tokens] for a in of_kind(actions, j.Deliver)} == {0: [51], 1: [61], 2: [71]}
    return journey, generate, prefill


def test_choices_share_their_legs_and_end_one_by_one():
    """One pair of legs; each choice ends for its own reason, the last one ends the journey."""
    journey, generate, _ = stream_three()
    actions = journey.handle(said(generate, of_choices(2, 52, 2, 72)), 0.3)
    assert of_kind(actions, j.End) == [j.End(j.State.DONE, FinishReason.STOP, 2, None, 1, last=False)]
    actions = journey.handle(said(generate, j.LegReport(ended_choices=(1,))), 0.3)
    assert actions == []
    report = j.LegReport(
        tokens=(j.OutToken(3, EOS, None, 0), j.OutToken(3, 73, None, 2)),
        ended_choices=(0,),
        finished=j.LegFinished(FinishReason.LENGTH),
    )
    actions = journey.handle(said(generate, report), 0.4)
    assert of_kind(actions, j.End) == [
        j.End(j.State.DONE, FinishReason.STOP, None, None, 0, last=False),
        j.End(j.State.DONE, FinishReason.LENGTH, None, None, 2),
    ]
    assert of_kind(actions, j.CloseLeg) == [j.CloseLeg(generate.leg)]


def test_stop_string_ends_its_choice_alone():
    """The decode worker is told to drop it; the last one ends the legs."""
    journey, generate, prefill = stream_three()
    actions = journey.handle(j.Enough(1), 0.3)
    assert of_kind(actions, j.AbortChoice) == [j.AbortChoice(generate.leg, 1)]
    assert of_kind(actions, j.End) == [j.End(j.State.DONE, FinishReason.STOP, None, None, 1, last=False)]
    assert journey.handle(j.Enough(1), 0.3) == []
    # Tokens that were under way are nobody's any more.
    actions = journey.handle(said(generate, of_choices(2, 52, 62, 72)), 0.4)
    assert [action.choice for action in of_kind(actions, j.Deliver)] == [0, 2]
    journey.handle(said(generate, j.LegReport(ended_choices=(1,))), 0.5)
    assert journey.state is j.State.STREAMING
    journey.handle(j.Enough(0), 0.6)
    actions = journey.handle(j.Enough(2), 0.6)
    assert of_kind(actions, j.End) == [j.End(j.State.DONE, FinishReason.STOP, None, None, 2)]
    assert {action.leg for action in of_kind(actions, j.AbortLeg)} == {generate.leg, prefill.leg}


def test_choices_that_nothing_was_delivered_of_are_tried_again_as_one():
    """A pair lost before the first token: one new attempt, the same seeds."""
    journey = make_journey(seeds=(30, 31))
    journey.start(0.0)
    generate, prefill = place(journey)
    journey.handle(said(generate, of_choices(1, 51, 61)), 0.1)
    actions = journey.handle(j.LegLost(prefill.leg, errors.PeerLost("gone")), 0.2)
    assert of_kind(actions, j.Place)
    assert not of_kind(actions, j.Split)
    generate, prefill = place(journey, PairPlan(P2, D2))
    assert (prefill.attempt, prefill.seeds, prefill.prompt) == (1, (30, 31), (7, 8, 9))
    journey.handle(said(prefill, of_choices(0, 50, 60)), 0.3)
    actions = journey.handle(said(generate, of_choices(1, 51, 61)), 0.4)
    assert delivered(actions) == [51, 61]


def test_choices_of_a_lost_worker_go_on_by_themselves():
    """Each that has not ended becomes a journey of one: its own journal, seed and limits, avoiding the dead."""
    journey, generate, _ = stream_three()
    journey.handle(j.Enough(1), 0.3)
    actions = journey.handle(j.LegLost(generate.leg, errors.PeerLost("gone")), 0.4)
    assert journey.state is j.State.SPLIT
    assert journey.is_over
    assert of_kind(actions, j.End) == []
    (split,) = of_kind(actions, j.Split)
    assert [choice for choice, _ in split.parts] == [0, 2]
    for choice, part in split.parts:
        assert of_kind(part.start(0.4), j.Place)[0].avoid == {D1.life}
        assert part.state is j.State.MIGRATING
        new_generate, prefill = place(part, PairPlan(P2, D2), 0.5)
        assert prefill.prompt == (7, 8, 9, 50 + 10 * choice, 51 + 10 * choice)
        assert (prefill.num_output_tokens, prefill.seeds, prefill.sampling.seed) == (2, (), 30 + choice)
        assert (prefill.attempt, prefill.sampling.max_tokens) == (1, 2)
        part.handle(said(prefill, tokens((2, 99))), 0.6)
        end = of_kind(part.handle(said(new_generate, tokens((3, 98))), 0.7), j.End)[0]
        assert (end.reason, end.choice, end.last) == (FinishReason.LENGTH, 0, True)
    assert journey.handle(said(generate, of_choices(2, 52, 62, 72)), 0.8) == []


def test_choice_that_ended_in_the_same_breath_does_not_go_on():
    """Its last token and the failure come in one report: it ends well, the others go on."""
    journey, generate, _ = stream_three()
    report = j.LegReport(tokens=(j.OutToken(2, EOS, None, 1),), failed=errors.NoFreePages("outgrown"))
    actions = journey.handle(said(generate, report), 0.3)
    assert of_kind(actions, j.End) == [j.End(j.State.DONE, FinishReason.STOP, None, None, 1, last=False)]
    assert [choice for choice, _ in of_kind(actions, j.Split)[0].parts] == [0, 2]


def test_migrations_of_choices_run_out_together():
    """The budget goes on in the parts."""
    journey, generate, _ = stream_three(migrations=1)
    actions = journey.handle(j.LegLost(generate.leg, errors.PeerLost("gone")), 0.3)
    for _, part in of_kind(actions, j.Split)[0].parts:
        part.start(0.3)
        generate, _ = place(part)
        end = of_kind(part.handle(j.LegLost(generate.leg, errors.PeerLost("gone")), 0.4), j.End)[0]
        assert (end.state, end.error.reason) == (j.State.FAILED, "worker_failed")
    journey, generate, _ = stream_three(migrations=0)
    end = of_kind(journey.handle(j.LegLost(generate.leg, errors.PeerLost("gone")), 0.3), j.End)[0]
    assert (end.state, end.last) == (j.State.FAILED, True)


@pytest.mark.parametrize(
    "report",
    [
        j.LegReport(tokens=(j.OutToken(2, 5, None, 3),)),
        j.LegReport(tokens=(j.OutToken(3, 5, None, 1),)),
        j.LegReport(ended_choices=(3,)),
        j.LegReport(ended_choices=(1,)),
        j.LegReport(finished=j.LegFinished(FinishReason.STOP)),
    ],
    ids=["token of no choice", "gap", "end of no choice", "end without a last token", "end of all"],
)
def test_worker_that_says_what_cannot_be_of_its_choices_is_left(report):
    """No choice is lost by it."""
    journey, generate, _ = stream_three()
    actions = journey.handle(said(generate, report), 0.3)
    assert [choice for choice, _ in of_kind(actions, j.Split)[0].parts] == [0, 1, 2]
    closed = [*of_kind(actions, j.AbortLeg), *of_kind(actions, j.CloseLeg)]
    assert generate.leg in {action.leg for action in closed}


def test_first_tokens_that_do_not_all_come_are_a_failure():
    """The prefill said it was done after two of three."""
    journey = make_journey(seeds=(30, 31, 32))
    journey.start(0.0)
    _, prefill = place(journey)
    journey.handle(said(prefill, of_choices(0, 50, 60)), 0.1)
    actions = journey.handle(said(prefill, j.LegReport(finished=j.LegFinished(None))), 0.2)
    parts = dict(of_kind(actions, j.Split)[0].parts)
    assert [part.state for part in parts.values()] == [j.State.MIGRATING, j.State.MIGRATING, j.State.PLANNED]


# ---- seeded chaos ----


class Chaos:
    """Two fake pairs and one local worker around a request: answers late, doubled, out of order, lost, dead."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.num_choices = self.random.choice([1, 1, 2, 3])
        self.new_leg = itertools.count(1).__next__
        seeds = tuple(range(self.num_choices)) if self.num_choices > 1 else ()
        limits = {"queue_s": 5.0, "reserve_s": 5.0, "stall_s": 5.0}
        self.first = make_journey(max_tokens=self.random.randint(1, 12), seeds=seeds, **limits)
        self.first._new_leg = self.new_leg
        self.going: dict[int, j.Journey] = {0: self.first}
        """Journeys by the first of their choices; after a split the first one is gone."""
        self.journey_of: dict[int, tuple[int, j.Journey]] = {}
        self.outbox: list[tuple[int, j.LegReport]] = []
        """(leg, report), in order for each leg"""
        self.waiting: set[int] = set()
        self.open: set[int] = set()
        self.outputs: list[list[int]] = [[] for _ in range(self.num_choices)]
        self.ends: dict[int, j.End] = {}
        self.enough: set[int] = set()

    @staticmethod
    def token(choice: int, index: int) -> int:
        return EOS if index == 9 - choice else 100 * (1 + choice) + index

    def do(self, base: int, journey: j.Journey, actions: list[j.Action]) -> None:
        for action in actions:
            if isinstance(action, j.Place):
                self.waiting.add(base)
            elif isinstance(action, j.OpenLeg):
                self.journey_of[action.leg] = base, journey
                assert action.prompt == (7, 8, 9, *self.outputs[base])
                assert action.num_output_tokens == len(self.outputs[base])
                self.open.add(action.leg)
                self.plan_leg(base, action)
            elif isinstance(action, (j.AbortLeg, j.CloseLeg)):
                self.open.discard(action.leg)
            elif isinstance(action, j.Deliver):
                assert base + action.choice not in self.ends, "nothing follows the end"
                self.outputs[base + action.choice] += [token.id for token in action.tokens]
            elif isinstance(action, j.Split):
                assert journey.is_over
                del self.going[base]
                self.waiting.discard(base)
                for choice, part in action.parts:
                    self.going[choice] = part
                    self.do(choice, part, part.start(self.now_s))
            elif isinstance(action, j.End):
                assert journey.is_over or not action.last
                choices = [action.choice] if action.error is None else range(journey.num_choices)
                for choice in choices:
                    assert action.error is not None or base + choice not in self.ends, "one end"
                    self.ends.setdefault(base + choice, action)

    def handle(self, base: int, journey: j.Journey, event: j.Event) -> None:
        self.do(base, journey, journey.handle(event, self.now_s))

    def plan_leg(self, base: int, action: j.OpenLeg) -> None:
        """What this leg will say, if nothing comes between."""
        fate = self.random.random()
        done = action.num_output_tokens
        end = done + (1 if action.kind is j.LegKind.PREFILL else action.sampling.max_tokens)
        say = [j.LegReport(reserved_tokens=0)] if action.kind is not j.LegKind.PREFILL else []
        first = done + (action.kind is j.LegKind.GENERATE)
        going = list(range(len(action.seeds) or 1))
        if action.kind is j.LegKind.GENERATE:
            going = [c for c in going if self.token(base + c, done) != EOS and action.sampling.max_tokens > 1]
        for index in range(first, end):
            said = tuple(j.OutToken(index, self.token(base + choice, index), None, choice) for choice in going)
            if fate < 0.05 and index == first + 1:
                said = said[1:]
            say.append(j.LegReport(tokens=said))
            if fate > 0.9:
                say.append(j.LegReport(tokens=said))
            over = [choice for choice in going if self.token(base + choice, index) == EOS or index == end - 1]
            going = [choice for choice in going if choice not in over]
            if going and over and action.kind is not j.LegKind.PREFILL:
                say.append(j.LegReport(ended_choices=tuple(over)))
            if not going:
                break
        reason = None if action.kind is j.LegKind.PREFILL else FinishReason.LENGTH
        say.append(j.LegReport(finished=j.LegFinished(reason)))
        if 0.05 < fate < 0.35:
            error = self.random.choice(
                [errors.PeerLost("x"), errors.NoFreePages("x"), errors.TransferFailed("x"), errors.StaleEpoch("x")]
            )
            say[self.random.randrange(len(say)) :] = [j.LegReport(failed=error)]
        elif 0.35 < fate < 0.45:
            say = say[: self.random.randrange(len(say) + 1)]
        self.outbox += [(action.leg, report) for report in say]

    def step(self) -> None:
        self.now_s += self.random.random() * 0.2
        draw = self.random.random()
        waiting = sorted(base for base in self.waiting if not self.going[base].is_over)
        if waiting and draw < 0.5:
            base = self.random.choice(waiting)
            self.waiting.discard(base)
            plan = self.random.choice([PairPlan(P1, D1), LocalPlan(D2)])
            self.handle(base, self.going[base], j.Placed(plan))
        elif self.outbox and draw < 0.95:
            leg = self.random.choice(sorted({leg for leg, _ in self.outbox}))
            index = next(i for i, (number, _) in enumerate(self.outbox) if number == leg)
            _, report = self.outbox.pop(index)
            self.handle(*self.journey_of[leg], j.LegSaid(leg, report))
        elif draw < 0.97 and self.open:
            leg = self.random.choice(sorted(self.open))
            self.handle(*self.journey_of[leg], j.LegLost(leg, errors.PeerLost("session over")))
        elif 0.97 < draw < 0.98:
            self._enough(self.random.randrange(self.num_choices))
        elif draw > 0.999:
            for base, journey in list(self.going.items()):
                self.handle(base, journey, j.Cancel())
        living = {base: journey for base, journey in self.going.items() if not journey.is_over}
        if living and not self.outbox and not self.waiting & set(living):
            self.now_s = max(self.now_s, min(journey.due_s for journey in living.values()))
        for base, journey in living.items():
            if not journey.is_over and self.now_s >= journey.due_s:
                self.handle(base, journey, j.Timer())

    def _enough(self, choice: int) -> None:
        """A stop string, found in what was delivered of a choice."""
        if self.outputs[choice] and choice not in self.ends:
            self.enough.add(choice)
            base = choice if choice in self.going and self.first.state is j.State.SPLIT else 0
            journey = self.first if self.first.state is not j.State.SPLIT else self.going[base]
            self.handle(base, journey, j.Enough(choice - base))


@pytest.mark.parametrize("block", range(20))
def test_every_choice_ends_once_whatever_happens(block):
    """Delayed, doubled, reordered, lost, refused, dead: in order, nothing twice, one end, no leg left open."""
    outcomes = set()
    for seed in range(block * 100, block * 100 + 100):
        chaos = Chaos(seed)
        chaos.do(0, chaos.first, chaos.first.start(0.0))
        for _ in range(4000):
            if all(journey.is_over for journey in chaos.going.values()):
                break
            chaos.step()
        assert sorted(chaos.ends) == list(range(chaos.num_choices)), f"seed {seed}"
        for choice, end in chaos.ends.items():
            output = chaos.outputs[choice]
            assert output == [chaos.token(choice, index) for index in range(len(output))], f"seed {seed}"
            if end.reason is None:
                assert end.error is not None, f"seed {seed}"
            elif choice not in chaos.enough:
                assert output[-1] == EOS or len(output) == chaos.first.sampling.max_tokens, f"seed {seed}"
        left = chaos.open - {
            number
            for journey in (chaos.first, *chaos.going.values())
            for number, leg in journey._legs.items()
            if leg.kind is j.LegKind.PREFILL and leg.is_open
        }
        assert not left, f"seed {seed}"
        outcomes |= {end.state for end in chaos.ends.values()} | {chaos.first.state}
    assert {j.State.DONE, j.State.SPLIT} <= outcomes
