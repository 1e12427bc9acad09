"""A prefix goes from one cache to another: what is computed behind it does not differ by a bit, and nothing leaks."""

from __future__ import annotations

import pytest
from support.side import LARGE, Side, leg, make_model, ship, words

from headrace.core.pools import PoolKind
from headrace.core.segments import RangeKind
from headrace.engine import api
from headrace.engine.api import LegKind
from headrace.model.transformer import Transformer

PROMPT = words(41, 1100)
BORDER = 1024
"""The last one of the prompt, where its prefill leaves a check-point."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


def fetch(holder: Side, taker: Side, key: int, prefix: tuple[int, ...], skip: RangeKind | None = None) -> int:
    """A SHARE there, a FETCH here, and the bytes between; blocks that travelled."""
    holder.turns(api.Submit(leg(key, LegKind.SHARE, prefix)), api.Start(key))
    taker.turns(api.Submit(leg(key, LegKind.FETCH, prefix)))
    blocks = ship(holder, taker, key, len(prefix), skip)
    taker.turns(api.Store(key))
    holder.turns(api.Release(key))
    return blocks


def is_idle(side: Side) -> bool:
    """No sequence is here; all that is not free is cached."""
    return all(c.active == c.landing == c.reserved == c.pinned == 0 for c in side.manager.counts().values())


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_what_follows_a_fetched_prefix_is_that_of_a_cold_run(model: Transformer, kv_dtype: str) -> None:
    """Tokens and log-probabilities; nothing before the border is computed, and no replay is needed."""
    cold = Side(model, kv_dtype, cached=False).run(1, PROMPT)
    holder, taker = Side(model, kv_dtype), Side(model, kv_dtype, budget=96)
    holder.run(1, PROMPT)
    taker.run(7, words(3, 300))  # others were here: page ids differ
    assert fetch(holder, taker, 2, PROMPT[:BORDER]) == BORDER // 256
    assert is_idle(holder)
    assert is_idle(taker)
    assert taker.run(3, PROMPT) == cold
    assert taker.cached_tokens(3) == BORDER


def test_blocks_that_the_taker_has_do_not_travel(model: Transformer) -> None:
    """Another prompt left the first two; even with all of them here the check-point is worth fetching."""
    cold = Side(model, cached=False).run(1, PROMPT)
    holder, taker = Side(model), Side(model)
    holder.run(1, PROMPT)
    taker.run(7, PROMPT[:600])
    assert fetch(holder, taker, 2, PROMPT[:BORDER]) == 2
    assert fetch(holder, taker, 4, PROMPT[:BORDER]) == 0
    assert taker.run(5, PROMPT) == cold
    assert is_idle(taker)


def test_a_fetched_prefix_can_be_shared_again(model: Transformer) -> None:
    """Holder and taker are roles: it goes on to a third one, and back."""
    sides = [Side(model) for _ in range(3)]
    cold = sides[0].run(1, PROMPT)
    fetch(sides[0], sides[1], 2, PROMPT[:BORDER])
    fetch(sides[1], sides[2], 3, PROMPT[:BORDER])
    sides[0].turns(api.ClearCache())
    fetch(sides[2], sides[0], 4, PROMPT[:BORDER])
    for side in sides:
        assert side.run(9, PROMPT) == cold
        assert side.cached_tokens(9) == BORDER


@pytest.mark.parametrize(
    "prefix",
    [PROMPT[:256], words(5, 512), PROMPT[:1024] + words(6, 256)],
    ids=["no check-point there", "another text", "beyond what is here"],
)
def test_a_prefix_that_is_not_kept_up_to_its_border_is_refused(model: Transformer, prefix: tuple[int, ...]) -> None:
    """At once, and nothing stays promised."""
    holder = Side(model)
    holder.run(1, PROMPT)
    holder.turns(api.Submit(leg(2, LegKind.SHARE, prefix)), api.Start(2))
    assert holder.one(2, api.Refused).error.reason == "transfer_failed"
    assert not holder.of(2, api.Reserved)
    assert is_idle(holder)


def test_a_fetch_that_fails_leaves_nothing(model: Transformer) -> None:
    """Aborted while bytes land: pages wait for the last scatter, then they are free, and nothing was published."""
    taker = Side(model)
    taker.turns(api.Submit(leg(2, LegKind.FETCH, PROMPT[:BORDER])))
    taker.turns(api.AbortSequence(2))
    assert taker.manager.counts()[PoolKind.HISTORY].landing == 4
    taker.turns(api.Release(2))
    assert all(c.free == c.total for c in taker.manager.counts().values())
    assert not taker.stored


def test_a_shared_prefix_outlives_the_wish_to_forget_it(model: Transformer) -> None:
    """Its pages are pinned until the last gather: clearing the cache under it takes nothing away."""
    holder, taker = Side(model), Side(model)
    cold = holder.run(1, PROMPT)
    holder.turns(api.Submit(leg(2, LegKind.SHARE, PROMPT[:BORDER])), api.Start(2))
    holder.turns(api.ClearCache())
    taker.turns(api.Submit(leg(2, LegKind.FETCH, PROMPT[:BORDER])))
    ship(holder, taker, 2, BORDER)
    taker.turns(api.Store(2))
    holder.turns(api.Release(2), api.ClearCache())
    assert all(c.free == c.total for c in holder.manager.counts().values())
    assert taker.run(3, PROMPT) == cold


@pytest.mark.parametrize("skip", list(RangeKind))
def test_a_part_that_does_not_come_is_never_silent(model: Transformer, skip: RangeKind) -> None:
    """Without history, window or compressor rows what follows breaks; the pages were poisoned."""
    holder, taker = Side(model), Side(model)
    holder.run(1, PROMPT)
    fetch(holder, taker, 2, PROMPT[:BORDER], skip)
    taker.turns(api.Submit(leg(3, LegKind.LOCAL, PROMPT)))
    assert taker.of(3, api.SequenceFailed)


def test_a_full_pool_keeps_both_waiting_not_failing(model: Transformer) -> None:
    """Credits come when somebody ends."""
    pages = {**LARGE, PoolKind.STATE: 1}
    holder = Side(model, pages=pages)
    holder.run(1, PROMPT)
    holder.turns(api.Submit(leg(5, LegKind.FETCH, words(8, 256))))  # takes the only row
    holder.turns(api.Submit(leg(2, LegKind.SHARE, PROMPT[:BORDER])), api.Start(2))
    assert not holder.of(2, api.Reserved)
    holder.turns(api.AbortSequence(5), api.Release(5))
    assert holder.one(2, api.Reserved).held_tokens == BORDER
    holder.turns(api.Release(2))
    assert is_idle(holder)
