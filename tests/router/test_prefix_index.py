"""What a router believes of one worker's prefix cache: the state table, gaps, lives, and predictions that end."""

import itertools

import pytest

from headrace.core.blocks import BLOCK_TOKENS, BlockHash, block_hashes, root_hash
from headrace.core.kv_events import BlockRemoved, BlockStored, CacheCleared
from headrace.router.prefix_index import CREDIT, GAP_S, NEXT, OVERDUE_S, IndexEvent, IndexState, PrefixIndex

ROOT = root_hash(b"layout")
CHAIN = tuple(block_hashes(ROOT, range(10 * BLOCK_TOKENS)))


def stored(number, checkpoint=False):
    return BlockStored(CHAIN[number], CHAIN[number - 1] if number else ROOT, checkpoint)


def make_exact(*blocks, seq=0, **bounds):
    """An index that has a snapshot of these blocks and is up to date."""
    index = PrefixIndex(1, **bounds)
    index.subscribed()
    index.snapshot_part(seq, blocks, is_first=True, is_last=True)
    assert index.heard(seq, [], 0.0)
    assert index.state is IndexState.EXACT
    return index


def blocks_of(index, now_s=0.0):
    return index.hit(CHAIN, len(CHAIN), now_s).blocks


def test_table_has_no_dead_end():
    """From every state a new subscription leads to an exact index, and any state can lose its channel."""
    for state, row in NEXT.items():
        assert row[IndexEvent.NO_CHANNEL] is IndexState.DEGRADED
        assert IndexEvent.RESET in row
        following = row[IndexEvent.SUBSCRIBED]
        assert NEXT[following][IndexEvent.CAUGHT_UP] is IndexState.EXACT, state
    assert set(NEXT) == set(IndexState) == set(CREDIT)
    reached = {IndexState.COLD}
    while more := {target for state in reached for target in NEXT[state].values()} - reached:
        reached |= more
    assert reached == set(IndexState)


def test_snapshot_then_what_follows_it_is_exact():
    """Nothing is credited before the worker's latest message is applied."""
    index = PrefixIndex(1)
    assert (index.state, index.needs_snapshot) == (IndexState.COLD, True)
    index.subscribed()
    index.snapshot_part(7, [stored(0), stored(1)], is_first=True, is_last=False)
    assert index.num_blocks == 0, "a part is no snapshot"
    index.snapshot_part(7, [stored(2, True)], is_first=False, is_last=True)
    assert (index.seq, index.num_blocks, blocks_of(index)) == (7, 3, 0)
    # Sent in two batches; the first one says that there is more.
    assert index.heard(9, [(8, [stored(3)])], 0.0)
    assert (index.state, blocks_of(index)) == (IndexState.SYNCING, 0)
    assert index.heard(9, [(9, [stored(4)])], 0.0)
    assert (index.state, blocks_of(index)) == (IndexState.EXACT, 5)


def test_doubles_are_dropped_and_a_snapshot_wins_over_older_messages():
    """What a message says that is older than the snapshot is in it."""
    index = make_exact(stored(0), stored(1), seq=5)
    assert index.heard(6, [(4, [BlockRemoved(CHAIN[0])]), (5, [CacheCleared()]), (6, [stored(2)])], 0.0)
    assert (index.state, blocks_of(index)) == (IndexState.EXACT, 3)


def test_snapshot_that_is_begun_again_starts_from_nothing():
    """Parts of a stream that broke are not mixed with another's."""
    index = PrefixIndex(1)
    index.subscribed()
    index.snapshot_part(1, [stored(0), stored(1)], is_first=True, is_last=False)
    index.broken(0.0)
    index.subscribed()
    index.snapshot_part(2, [stored(0)], is_first=True, is_last=True)
    assert index.held() == {CHAIN[0]: False}


def test_missing_number_halves_the_credit_until_the_replay_fills_it():
    """What came after the gap is not applied; the replay starts from the last good message."""
    index = make_exact(stored(0, True))
    assert not index.heard(3, [(1, [stored(1)]), (3, [stored(3)])], 1.0)
    hit = index.hit(CHAIN, 10, 1.0)
    assert (index.state, index.seq, hit.blocks, hit.credit) == (IndexState.GAP, 1, 2, 0.5)
    index.subscribed()
    assert index.heard(3, [(2, [stored(2)]), (3, [stored(3)])], 2.0)
    hit = index.hit(CHAIN, 10, 2.0)
    assert (index.state, hit.blocks, hit.credit, hit.checkpoint) == (IndexState.EXACT, 4, 1.0, 1)


@pytest.mark.parametrize("state", [IndexState.SYNCING, IndexState.EXACT])
def test_silence_that_claims_more_than_was_heard_is_a_gap(state):
    """A beat of the stream names the latest message: whoever lacks it has lost it."""
    index = make_exact(stored(0))
    if state is IndexState.SYNCING:
        index.replay_gone()
        index.snapshot_part(0, [stored(0)], is_first=True, is_last=True)
    assert not index.heard(1, [], 1.0)
    assert index.state is (IndexState.GAP if state is IndexState.EXACT else state)
    assert not index.needs_snapshot, "a replay will do"
    index.subscribed()
    assert index.heard(1, [(1, [stored(1)])], 1.0)
    assert (index.state, blocks_of(index)) == (IndexState.EXACT, 2)


@pytest.mark.parametrize("how", ["gone", "late"])
def test_replay_that_does_not_come_is_given_up_for_a_snapshot(how):
    """By the worker's word or after five seconds; nothing is credited meanwhile."""
    index = make_exact(stored(0))
    index.broken(10.0)
    assert index.state is IndexState.GAP
    index.broken(12.0)
    index.on_time(10.0 + GAP_S - 0.1)
    assert not index.needs_snapshot
    if how == "gone":
        index.replay_gone()
    else:
        index.on_time(10.0 + GAP_S)
    assert (index.state, index.needs_snapshot, blocks_of(index)) == (IndexState.SYNCING, True, 0)
    index.subscribed()
    index.snapshot_part(40, [stored(0), stored(1)], is_first=True, is_last=True)
    assert index.heard(40, [], 20.0)
    assert (index.state, blocks_of(index)) == (IndexState.EXACT, 2)


def test_load_report_ahead_of_silent_events_is_a_gap_after_ten_seconds():
    """Whichever way the messages were lost."""
    index = make_exact(stored(0))
    index.reported(0, 0.0)
    index.reported(4, 1.0)
    index.reported(6, 2.0)
    index.reported(9, 1.0 + OVERDUE_S - 0.1)
    assert index.state is IndexState.EXACT
    index.reported(9, 1.0 + OVERDUE_S)
    assert index.state is IndexState.GAP
    # In time: the messages only took a while.
    index = make_exact(stored(0))
    index.reported(1, 1.0)
    assert index.heard(1, [(1, [stored(1)])], 2.0)
    index.reported(1, 100.0)
    assert index.state is IndexState.EXACT


@pytest.mark.parametrize("how", ["cleared", "restarted"])
def test_everything_is_dropped_first_when_nothing_holds_any_more(how):
    """A cleared cache, another incarnation: no block and no prediction of the time before."""
    index = make_exact(stored(0), stored(1))
    index.predict(1, CHAIN[:4], num_checkpoints=2, expected_s=1.0, now_s=0.0)
    assert blocks_of(index) == 4
    if how == "cleared":
        assert not index.heard(1, [(1, [stored(2), CacheCleared(), stored(0)])], 1.0)
    else:
        index.reset()
    assert (index.state, index.needs_snapshot) == (IndexState.SYNCING, True)
    assert (index.num_blocks, index.num_predicted, blocks_of(index)) == (0, 0, 0)


def test_removed_block_ends_the_run_and_takes_its_prediction_along():
    """The worker knows better."""
    index = make_exact(stored(0), stored(1), stored(2))
    index.predict(1, CHAIN[:4], num_checkpoints=0, expected_s=1.0, now_s=0.0)
    assert blocks_of(index) == 4
    assert index.heard(1, [(1, [BlockRemoved(CHAIN[3]), BlockRemoved(CHAIN[2])])], 0.0)
    assert blocks_of(index) == 2


def test_check_points_are_told_of_again_when_they_go():
    """An upsert."""
    index = make_exact(stored(0, True), stored(1), stored(2, True))
    assert index.hit(CHAIN, 10, 0.0).checkpoint == 3
    assert index.hit(CHAIN, 2, 0.0).checkpoint == 1
    assert index.hit(CHAIN, 2, 0.0, depth=1).checkpoint == 0, "farther back than was asked for"
    assert index.hit(CHAIN, 2, 0.0, depth=2).checkpoint == 1
    assert index.heard(1, [(1, [stored(2, False), stored(1, True)])], 0.0)
    assert index.hit(CHAIN, 10, 0.0).checkpoint == 2


def test_prediction_lives_twice_as_long_as_its_prefill_is_expected_to_take():
    """Five seconds at least, two minutes at most; the last two borders get check-points."""
    for expected_s, life_s in ((0.1, 5.0), (10.0, 20.0), (1000.0, 120.0)):
        index = make_exact(stored(0))
        index.predict(1, CHAIN[:3], num_checkpoints=2, expected_s=expected_s, now_s=100.0)
        hit = index.hit(CHAIN, 10, 100.0 + life_s - 0.01)
        assert (hit.blocks, hit.checkpoint) == (3, 3)
        assert blocks_of(index, 100.0 + life_s) == 1
        index.reported(0, 100.0 + life_s)
        assert index.num_predicted == 0


def test_failed_leg_takes_its_predictions_back_and_no_others():
    """What the worker confirmed, and what another leg will leave as well, stays."""
    index = make_exact(stored(0))
    index.predict(1, CHAIN[:4], num_checkpoints=0, expected_s=1.0, now_s=0.0)
    index.predict(2, CHAIN[:3], num_checkpoints=0, expected_s=1.0, now_s=0.0)
    assert index.heard(1, [(1, [stored(1)])], 0.0)
    index.settle(1, went_well=False)
    assert blocks_of(index) == 3, "0 and 1 are held, 2 is the second leg's"
    index.settle(2, went_well=True)
    assert blocks_of(index) == 3
    index.settle(3, went_well=False)
    assert index.num_predicted == 1


def test_worker_without_events_is_known_by_predictions_at_half_credit():
    """They live two minutes; a channel that comes back is used."""
    index = make_exact(stored(0), stored(1))
    index.no_channel()
    assert blocks_of(index) == 0
    index.predict(1, CHAIN[:3], num_checkpoints=2, expected_s=0.1, now_s=0.0)
    hit = index.hit(CHAIN, 10, 119.0)
    assert (hit.blocks, hit.credit, hit.state) == (3, 0.5, IndexState.DEGRADED)
    assert blocks_of(index, 120.0) == 0
    index.subscribed()
    assert (index.state, index.needs_snapshot) == (IndexState.SYNCING, True)


def test_memory_is_bounded():
    """A worker that tells of more than is kept is placed by load; the oldest predictions go first."""
    index = make_exact(stored(0), max_blocks=2, max_predicted=3)
    index.predict(1, CHAIN[:8], num_checkpoints=0, expected_s=1.0, now_s=0.0)
    assert index.num_predicted == 3
    assert not index.heard(1, [(1, [stored(1), stored(2)])], 0.0)
    assert (index.state, index.num_blocks) == (IndexState.DEGRADED, 0)
    index.subscribed()
    for first in range(3):
        index.snapshot_part(1, [stored(first)], is_first=first == 0, is_last=False)
    assert index.state is IndexState.DEGRADED


def test_any_order_of_calls_is_in_the_table(rng):
    """Whatever the stream does, the index has a next step and never credits what it was told is gone."""
    index = PrefixIndex(1)
    clock = itertools.count()
    for _ in range(3000):
        now_s = next(clock) * 0.5
        match rng.randrange(10):
            case 0:
                index.subscribed()
            case 1:
                index.subscribed()
                index.snapshot_part(index.seq, [stored(0)], is_first=True, is_last=rng.random() < 0.7)
            case 2 | 3 | 4:
                index.subscribed()
                ahead = rng.choice((0, 1, 1, 1, 2))
                change = rng.choice((stored(rng.randrange(10)), BlockRemoved(rng.choice(CHAIN)), CacheCleared()))
                index.heard(index.seq + ahead, [(index.seq + ahead, [change])], now_s)
            case 5:
                index.broken(now_s)
            case 6:
                index.reported(index.seq + rng.randrange(3), now_s)
            case 7:
                rng.choice((index.reset, index.no_channel))()
            case 8:
                index.predict(1, CHAIN[: rng.randrange(11)], num_checkpoints=2, expected_s=1.0, now_s=now_s)
            case 9:
                index.settle(1, went_well=rng.random() < 0.5)
        if not CREDIT[index.state]:
            assert blocks_of(index, now_s) == 0
        assert all(isinstance(block, bytes) for block in index.held())


def test_hit_ends_where_the_prompt_differs():
    """One other token: another chain from there on."""
    index = make_exact(*(stored(number) for number in range(10)))
    tokens = list(range(10 * BLOCK_TOKENS))
    tokens[4 * BLOCK_TOKENS] += 1
    other = block_hashes(ROOT, tokens)
    assert index.hit(other, 10, 0.0).blocks == 4
    assert index.hit([BlockHash(bytes(16))], 10, 0.0).blocks == 0


def test_hit_is_the_same_by_halves_as_one_by_one(rng):
    """Held blocks without holes, predicted ones behind them, check-points anywhere."""
    for _ in range(300):
        num_held, num_all = sorted(rng.randrange(len(CHAIN) + 1) for _ in range(2))
        flags = [rng.random() < 0.3 for _ in range(len(CHAIN))]
        index = make_exact(*(stored(number, flags[number]) for number in range(num_held)))
        index.predict(1, CHAIN[:num_all], num_checkpoints=2, expected_s=1.0, now_s=0.0)
        flags[num_held:] = [number >= num_all - 2 for number in range(num_held, len(CHAIN))]
        limit, depth = rng.randrange(len(CHAIN) + 2), rng.randrange(1, len(CHAIN) + 2)
        blocks = min(limit, num_all)
        borders = [number + 1 for number in range(max(blocks - depth, 0), blocks) if flags[number]]
        hit = index.hit(CHAIN, limit, 0.0, depth=depth)
        assert (hit.blocks, hit.checkpoint) == (blocks, max(borders, default=0))
