"""Who is chosen for a prompt of which some workers hold a part."""

import random

import pytest
from descriptions import describe

from headrace.core.blocks import BLOCK_TOKENS
from headrace.core.ids import Role
from headrace.core.kv_events import BlockStored
from headrace.router.block_chains import MAX_ADDED_BLOCKS, hash_prompt, is_short
from headrace.router.placement import Load, LocalPlan, PairPlan, Placement, Reason, Want
from headrace.router.prefix_index import IndexState

PROMPT = tuple(range(10 * BLOCK_TOKENS + 100))
REPLAY_TOKENS = 4 * BLOCK_TOKENS


class Table(Placement):
    """Three prefill and three decode workers whose caches a test fills."""

    def __init__(self, *, local_prefill_tokens=512, fetch_min_tokens=0, seed=5, num=3):
        super().__init__(seed, local_prefill_tokens=local_prefill_tokens, fetch_min_tokens=fetch_min_tokens)
        for role in (Role.PREFILL, Role.DECODE):
            for number in range(num):
                self.start(f"{role.value[0]}{number}", role)

    def start(self, name, role, **changes):
        index = self.up(describe(name, role, replay_tokens=REPLAY_TOKENS, max_num_seqs=64, **changes))
        index.subscribed()
        index.snapshot_part(0, [], is_first=True, is_last=True)
        index.heard(0, [], 0.0)
        return index

    def index(self, name):
        return next(worker.index for worker in self.workers if worker.ref.worker_id == name)

    def fill(self, name, num_blocks, *checkpoints, prompt=PROMPT, salt=""):
        """A worker stores the first blocks of a prompt; check-points at these borders."""
        chain = hash_prompt(prompt, [b"f"], salt).of(b"f")
        index = self.index(name)
        changes = [BlockStored(chain[n], chain[n - 1], n + 1 in checkpoints) for n in range(num_blocks)]
        index.heard(index.seq + 1, [(index.seq + 1, changes)], 0.0)

    def choose(self, prompt=PROMPT, salt="", **want):
        chains = hash_prompt(prompt, self.fingerprints, salt)
        return self.decide(Want(num_tokens=len(prompt), chains=chains, **want), 0.0)


def names(decision):
    plan = decision.plan
    if isinstance(plan, LocalPlan):
        return (plan.worker.worker_id,)
    return plan.prefill.worker_id, plan.decode.worker_id


def test_holder_of_the_prefix_computes_and_the_one_with_the_blocks_decodes():
    """Both legs by what they lack."""
    table = Table()
    table.fill("p1", 8, 8)
    table.fill("d2", 6)
    decision = table.choose()
    assert names(decision) == ("p1", "d2")
    assert (decision.reason, decision.state) == (Reason.HIT, IndexState.EXACT)
    assert (decision.hit_tokens, decision.computed_tokens) == (8 * 256, 2 * 256 + 100)


@pytest.mark.parametrize(
    ("num_blocks", "checkpoints", "hit_blocks"),
    [
        (8, (8,), 8),
        (8, (7,), 7),
        (8, (2,), 4),  # exact replay of four blocks is shorter
        (8, (), 4),
        (3, (), 0),  # the replay would begin before the prompt
        (10, (10,), 10),
    ],
)
def test_border_without_check_point_costs_a_replay(num_blocks, checkpoints, hit_blocks):
    """From the last check-point or from the replay's length before the border, whichever is later."""
    table = Table(num=1)
    table.fill("p0", num_blocks, *checkpoints)
    assert table.choose().hit_tokens == hit_blocks * 256


def test_last_token_is_always_computed():
    """A resend of an aligned prompt hits one block less."""
    table = Table(num=1)
    prompt = PROMPT[: 8 * BLOCK_TOKENS]
    table.fill("p0", 8, 7, 8)
    assert table.choose(prompt).hit_tokens == 7 * 256
    assert table.choose(PROMPT[: 8 * BLOCK_TOKENS + 1]).hit_tokens == 8 * 256


def test_busy_holder_becomes_dear_and_the_prefix_spreads():
    """By its queue, reported or sent; and it is counted as what it is."""
    table = Table()
    table.fill("p1", 8, 8)
    table.report("p1:1", Load(queued_tokens=2000, state="ready"), 0.0)
    assert names(table.choose())[0] == "p1"
    table.opened("p1:1", 2600)
    decision = table.choose()
    assert names(decision)[0] != "p1"
    assert (decision.reason, decision.hit_tokens) == (Reason.SPREAD, 0)


def test_decode_worker_that_holds_nearly_all_computes_the_rest_itself():
    """The second turn of a conversation: it has the answer's blocks, which no prefill worker has."""
    table = Table()
    table.fill("p1", 8, 8)
    table.fill("d2", 10, 10)
    decision = table.choose()
    assert names(decision) == ("d2",)
    assert (decision.reason, decision.computed_tokens) == (Reason.LOCAL, 100)
    # Not when a prefill worker has as much, and the decode worker has others to serve.
    table.fill("p1", 10, 10)
    table.report("d2:1", Load(running=9, state="ready"), 0.0)
    assert isinstance(table.choose().plan, PairPlan)


@pytest.mark.parametrize(("limit", "num_blocks"), [(512, 8), (0, 10), (99, 10)])
def test_decode_worker_does_not_compute_what_is_long(limit, num_blocks):
    """The setting is the bound; 0 turns it off."""
    table = Table(local_prefill_tokens=limit)
    table.fill("d2", num_blocks, num_blocks)
    decision = table.choose()
    assert isinstance(decision.plan, PairPlan)
    assert decision.plan.decode.worker_id == "d2"


def test_cold_prompt_goes_to_a_pair_however_short():
    """Disaggregated is what it says: without a hit nothing is computed by a decode worker."""
    table = Table()
    decision = table.choose(tuple(range(20)))
    assert isinstance(decision.plan, PairPlan)
    assert (decision.reason, decision.hit_tokens, decision.computed_tokens) == (Reason.LOAD, 0, 20)
    table.fill("d0", 10, prompt=PROMPT[::-1])
    assert isinstance(table.choose().plan, PairPlan)


def test_salts_share_nothing():
    """The same prompt of another tenant is another prompt."""
    table = Table()
    table.fill("p1", 10, 10, salt="a")
    table.fill("d1", 10, 10, salt="a")
    assert table.choose(salt="b").reason is Reason.LOAD
    assert table.choose().reason is Reason.LOAD
    assert table.choose(salt="a").hit_tokens == 2560


def test_workers_of_another_layout_have_other_chains():
    """An upgrade under load: each cohort by its own hashes."""
    table = Table(num=1)
    table.start("p9", Role.PREFILL, fingerprint=b"g")
    table.start("d9", Role.DECODE, fingerprint=b"g")
    table.fill("p9", 8, 8)
    assert table.choose().hit_tokens == 0, "stored under the hashes of the other layout"
    table.fill("p0", 8, 8)
    assert names(table.choose()) == ("p0", "d0")


def test_dispatched_prompt_is_expected_where_it_was_sent():
    """Before any event; a leg that fails takes it back, one that went well leaves it."""
    table = Table()
    chains = hash_prompt(PROMPT, [b"f"], "")
    table.opened("p1:1", 0)
    table.predict("p1:1", 1, chains, computes=True, now_s=0.0)
    assert names(table.choose())[0] == "p1"
    assert table.choose().hit_tokens == 2560
    table.settle("p1:1", 1, went_well=False)
    assert table.choose().hit_tokens == 0
    table.predict("p2:1", 2, chains, computes=True, now_s=0.0)
    table.settle("p2:1", 2, went_well=True)
    assert names(table.choose())[0] == "p2"


def test_decode_legs_are_expected_to_leave_blocks_but_no_check_points():
    """So nothing is computed there by expectation alone; but the blocks need not travel again."""
    table = Table()
    table.predict("d1:1", 1, hash_prompt(PROMPT[: 3 * 256], [b"f"], ""), computes=False, now_s=0.0)
    decision = table.choose(PROMPT[: 3 * 256 + 50])
    assert isinstance(decision.plan, PairPlan)
    assert decision.plan.decode.worker_id == "d1"


def test_next_life_of_a_worker_is_credited_with_nothing():
    """Nor is one whose index is not exact yet; one without a channel counts half."""
    table = Table()
    table.fill("p1", 10, 10)
    table.predict("p1:1", 1, hash_prompt(PROMPT, [b"f"], ""), computes=True, now_s=0.0)
    table.down("p1:1")
    assert table.choose().reason is Reason.LOAD
    index = table.up(describe("p1", Role.PREFILL, incarnation=2, replay_tokens=REPLAY_TOKENS))
    assert table.choose().reason is Reason.LOAD
    index.no_channel()
    table.predict("p1:1", 2, hash_prompt(PROMPT, [b"f"], ""), computes=True, now_s=0.0)
    decision = table.choose()
    assert names(decision)[0] == "p1"
    assert (decision.state, decision.hit_tokens) == (IndexState.DEGRADED, 1280)


def test_equals_are_drawn_by_the_seed():
    """All of them come up, and the same seed draws the same."""
    drawn = [{names(table.choose()) for _ in range(60)} for table in (Table(seed=1), Table(seed=1), Table(seed=2))]
    assert drawn[0] == drawn[1]
    assert all(len(found) == 9 for found in drawn)


def test_chains_are_those_of_the_whole_prompt(rng: random.Random):
    """Hashed in pieces; a resumed stream's tokens are added, within bounds; long ones leave the event loop."""
    tokens = [rng.randrange(1000) for _ in range(130 * BLOCK_TOKENS + 7)]
    whole = hash_prompt(tokens, [b"f", b"g"], "salt")
    assert len(whole.of(b"f")) == 130
    assert whole.of(b"h") == ()
    for length in (0, 100, 256, 64 * 256, 65 * 256 + 1):
        part = hash_prompt(tokens[:length], [b"f", b"g"], "salt")
        assert part.of(b"g") == whole.of(b"g")[: length // 256]
        assert part.extended(tokens).of(b"f") == whole.of(b"f")[: length // 256 + MAX_ADDED_BLOCKS]
    assert is_short(16 * 256, 1)
    assert not is_short(16 * 256, 2)


# ---- fetching ----


def test_busy_holder_gives_its_prefix_to_another():
    """Instead of computing it again elsewhere; the decision says what is computed then."""
    table = Table(fetch_min_tokens=512)
    table.fill("p1", 8, 8)
    table.opened("p1:1", 2600)
    decision = table.choose()
    assert names(decision)[0] != "p1"
    assert decision.reason is Reason.FETCH
    assert decision.plan.fetch.holder.worker_id == "p1"
    assert decision.plan.fetch.num_tokens == 8 * 256
    assert (decision.hit_tokens, decision.computed_tokens) == (8 * 256, 2 * 256 + 100)


def test_idle_holder_computes_itself():
    """A fetch costs something."""
    table = Table(fetch_min_tokens=512)
    table.fill("p1", 8, 8)
    decision = table.choose()
    assert names(decision)[0] == "p1"
    assert decision.plan.fetch is None


def test_decode_worker_gives_what_no_prefill_worker_has():
    """The answer's blocks, when too much is new for it to compute alone."""
    table = Table(fetch_min_tokens=512)
    table.fill("d1", 6, 6)
    decision = table.choose()
    assert decision.plan.fetch.holder.worker_id == "d1"
    assert names(decision)[1] == "d1"


@pytest.mark.parametrize(
    ("least", "num_blocks", "checkpoints"),
    [(0, 8, (8,)), (8 * 256 + 1, 8, (8,)), (512, 1, (1,)), (512, 8, ())],
    ids=["never", "too little is spared", "a block", "no check-point"],
)
def test_what_is_not_worth_it_is_not_fetched(least, num_blocks, checkpoints):
    """By the setting, by length, and without a check-point there is nothing to go on from."""
    table = Table(fetch_min_tokens=least)
    table.fill("d1", num_blocks, *checkpoints)
    assert table.choose().plan.fetch is None


def test_only_what_the_holder_itself_told_of_is_fetched():
    """Blocks that are merely expected may not be there yet, and a gap in the events makes all doubtful."""
    table = Table(fetch_min_tokens=512, local_prefill_tokens=0)
    chains = hash_prompt(PROMPT, table.fingerprints, "")
    table.predict("d1:1", 5, chains, computes=True, now_s=0.0)
    assert table.choose().plan.fetch is None
    table = Table(fetch_min_tokens=512, local_prefill_tokens=0)
    table.fill("d1", 8, 8)
    table.index("d1").broken(0.0)
    assert table.choose().plan.fetch is None
