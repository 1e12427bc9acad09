"""The journey of one sequence: its table, its retries, and that it ends exactly once whatever happens."""

import itertools
import random

import pytest

from headrace.core import errors
from headrace.core.sampling import FinishReason, SamplingParams
from headrace.router import journey as j
from headrace.router.placement import LocalPlan, PairPlan, WorkerRef

P1, P2 = (WorkerRef(f"p{i}:1", f"prefill-{i}", i, f"p{i}:2") for i in (1, 2))
D1, D2 = (WorkerRef(f"d{i}:1", f"decode-{i}", 10 + i, f"d{i}:2") for i in (1, 2))
EOS = 1


def make_journey(max_tokens=5, **limits) -> j.Journey:
    return j.Journey(
        prompt=(7, 8, 9),
        sampling=SamplingParams(max_tokens=max_tokens, eos_token_ids=(EOS,), stop_token_ids=(2,), min_tokens=2),
        deadline_s=100.0,
        limits=j.JourneyLimits(**limits),
        new_leg=itertools.count(1).__next__,
        new_transfer=lambda: b"t" * 16,
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


# ---- seeded chaos ----


class Chaos:
    """Two fake pairs and one local worker around a journey: answers late, doubled, out of order, lost, dead."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.journey = make_journey(max_tokens=self.random.randint(1, 12), queue_s=5.0, reserve_s=5.0, stall_s=5.0)
        self.outbox: list[tuple[int, j.Event]] = []
        """(leg, event), in order for each leg"""
        self.waiting = False
        self.open: set[int] = set()
        self.output: list[int] = []
        self.ends: list[j.End] = []

    @staticmethod
    def token(index: int) -> int:
        return EOS if index == 9 else 100 + index

    def do(self, actions: list[j.Action]) -> None:
        for action in actions:
            assert not self.ends, "nothing follows the end"
            if isinstance(action, j.Place):
                self.waiting = True
            elif isinstance(action, j.OpenLeg):
                assert action.prompt == (7, 8, 9, *self.output)
                assert action.num_output_tokens == len(self.output)
                self.open.add(action.leg)
                self.plan_leg(action)
            elif isinstance(action, (j.AbortLeg, j.CloseLeg)):
                self.open.discard(action.leg)
            elif isinstance(action, j.Deliver):
                self.output += [token.id for token in action.tokens]
            elif isinstance(action, j.End):
                self.ends.append(action)

    def plan_leg(self, action: j.OpenLeg) -> None:
        """What this leg will say, if nothing comes between."""
        fate = self.random.random()
        done = action.num_output_tokens
        left = action.sampling.max_tokens
        say = [j.LegReport(reserved_tokens=0)] if action.kind is not j.LegKind.PREFILL else []
        first = done + (action.kind is j.LegKind.GENERATE)
        last = done + 1 if action.kind is j.LegKind.PREFILL else done + left
        for index in range(first, last):
            if fate < 0.05 and index == first + 1:
                continue
            say.append(tokens((index, self.token(index))))
            if fate > 0.9:
                say.append(tokens((index, self.token(index))))
            if self.token(index) == EOS:
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
        self.outbox += [(action.leg, j.LegSaid(action.leg, report)) for report in say]

    def step(self) -> None:
        self.now_s += self.random.random() * 0.2
        draw = self.random.random()
        if self.waiting and draw < 0.5:
            self.waiting = False
            self.do(self.journey.handle(j.Placed(self.random.choice([PairPlan(P1, D1), LocalPlan(D2)])), self.now_s))
        elif self.outbox and draw < 0.95:
            leg = self.random.choice(sorted({leg for leg, _ in self.outbox}))
            index = next(i for i, (number, _) in enumerate(self.outbox) if number == leg)
            _, event = self.outbox.pop(index)
            self.do(self.journey.handle(event, self.now_s))
        elif draw < 0.97 and self.open:
            leg = self.random.choice(sorted(self.open))
            self.do(self.journey.handle(j.LegLost(leg, errors.PeerLost("session over")), self.now_s))
        elif draw > 0.999:
            self.do(self.journey.handle(j.Cancel(), self.now_s))
        if not self.outbox and not self.waiting:
            self.now_s = max(self.now_s, self.journey.due_s)
        if self.now_s >= self.journey.due_s:
            self.do(self.journey.handle(j.Timer(), self.now_s))


@pytest.mark.parametrize("block", range(20))
def test_every_sequence_ends_once_whatever_happens(block):
    """Delayed, doubled, reordered, lost, refused, dead: in order, nothing twice, one end, no leg left open."""
    outcomes = set()
    for seed in range(block * 100, block * 100 + 100):
        chaos = Chaos(seed)
        chaos.do(chaos.journey.start(0.0))
        for _ in range(2000):
            if chaos.journey.is_over:
                break
            chaos.step()
        assert len(chaos.ends) == 1, f"seed {seed}"
        end = chaos.ends[0]
        assert chaos.output == [chaos.token(index) for index in range(len(chaos.output))], f"seed {seed}"
        if end.reason is not None:
            complete = chaos.output[-1] == EOS or len(chaos.output) == chaos.journey.sampling.max_tokens
            assert complete, f"seed {seed}"
        else:
            assert end.error is not None, f"seed {seed}"
        left = chaos.open - {
            number for number, leg in chaos.journey._legs.items() if leg.kind is j.LegKind.PREFILL and leg.is_open
        }
        assert not left, f"seed {seed}"
        outcomes.add(end.state)
    assert j.State.DONE in outcomes
