"""The log of the prefix cache's changes: numbers without holes, bounds, and snapshots that stand still."""

from __future__ import annotations

import random

import pytest

from headrace.core.blocks import BlockHash
from headrace.core.kv_events import BlockRemoved, BlockStored, CacheCleared, KvEvent
from headrace.worker.kv_events import KvLog, ReplayGone

ROOT = BlockHash(bytes(16))


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


def stored(number: int, *, parent: BlockHash = ROOT, checkpoint: bool = False) -> BlockStored:
    return BlockStored(name(number), parent, checkpoint)


def test_messages_are_numbered_from_one_and_found_after_any_number() -> None:
    """A reader names the last message that it has."""
    log = KvLog()
    assert (log.last_seq, log.after(0, 10)) == (0, [])
    log.append([stored(1), stored(2, parent=name(1))])
    log.append([])
    log.append([BlockRemoved(name(2))])
    assert [message.seq for message in log.after(0, 10)] == [1, 2]
    assert [message.changes for message in log.after(1, 10)] == [(BlockRemoved(name(2)),)]
    assert log.after(2, 10) == []
    assert (log.last_seq, log.num_blocks) == (2, 1)


def test_a_large_change_is_several_messages() -> None:
    """The size of a message is bounded, and so is what a reader takes at once."""
    log = KvLog(max_changes=3)
    log.append([stored(number) for number in range(8)])
    assert [len(message.changes) for message in log.after(0, 100)] == [3, 3, 2]
    assert [message.seq for message in log.after(0, 6)] == [1, 2]
    assert [message.seq for message in log.after(0, 1)] == [1], "one message at least, however large"


def test_what_is_kept_no_more_is_refused() -> None:
    """By the number of messages, by the number of changes; the future is not there either."""
    log = KvLog(max_messages=3, max_changes_kept=10)
    for number in range(5):
        log.append([stored(number)])
    assert [message.seq for message in log.after(2, 100)] == [3, 4, 5]
    for seq in (1, 6):
        with pytest.raises(ReplayGone):
            log.after(seq, 100)
    log.append([stored(number) for number in range(10, 19)])
    assert [message.seq for message in log.after(4, 100)] == [5, 6]
    with pytest.raises(ReplayGone):
        log.after(3, 100)


def test_a_change_larger_than_all_that_is_kept_leaves_snapshots_right() -> None:
    """Readers start again; nothing is lost but time."""
    log = KvLog(max_changes=4, max_changes_kept=4)
    log.append([stored(number) for number in range(20)])
    assert log.snapshot().as_of_seq == log.last_seq == 5
    assert len(log.snapshot().blocks) == 20
    assert len(log.after(4, 100)) == 1


def test_a_snapshot_does_not_change_afterwards() -> None:
    """It is of one moment, and says which."""
    log = KvLog()
    log.append([stored(1), stored(2, parent=name(1))])
    before = log.snapshot()
    log.append([stored(2, parent=name(1), checkpoint=True), BlockRemoved(name(2))])
    log.append([CacheCleared(), stored(9)])
    assert before.as_of_seq == 1
    assert before.blocks == (stored(1), stored(2, parent=name(1)))
    assert log.snapshot().blocks == (stored(9),)
    assert log.snapshot().as_of_seq == 3


def test_a_snapshot_and_what_follows_it_add_up(rng: random.Random) -> None:
    """From any snapshot, the messages after it give the set of any later moment."""
    log = KvLog(max_changes=5)
    held: dict[BlockHash, BlockStored] = {}
    old = log.snapshot()
    for _ in range(300):
        changes: list[KvEvent] = []
        for _ in range(rng.randrange(8)):
            kind = rng.random()
            if kind < 0.02:
                held.clear()
                changes.append(CacheCleared())
            elif kind < 0.3 and held:
                victim = rng.choice(list(held))
                del held[victim]
                changes.append(BlockRemoved(victim))
            else:
                change = stored(rng.randrange(60), checkpoint=rng.random() < 0.5)
                held[change.block] = change
                changes.append(change)
        log.append(changes)
        assert {entry.block: entry for entry in log.snapshot().blocks} == held
        if rng.random() < 0.1:
            rebuilt = {entry.block: entry for entry in old.blocks}
            for message in log.after(old.as_of_seq, 1 << 30):
                for change in message.changes:
                    match change:
                        case BlockStored(block):
                            rebuilt[block] = change
                        case BlockRemoved(block):
                            del rebuilt[block]
                        case CacheCleared():
                            rebuilt.clear()
            assert rebuilt == held
            old = log.snapshot()
