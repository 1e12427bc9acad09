"""Pages and credits: nothing is lost, promised twice, or taken half."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.errors import NoFreePages
from headrace.core.pools import PoolKind
from headrace.kvcache.allocator import CacheManager, history_pages, window_pages
from headrace.kvcache.layout import live_window
from headrace.kvcache.pages import PagePool, PageState

HISTORY, WINDOW, STATE = PoolKind.HISTORY, PoolKind.WINDOW, PoolKind.STATE


def make_manager(history: int = 16, window: int = 24, state: int = 4, **options: object) -> CacheManager:
    return CacheManager({HISTORY: history, WINDOW: window, STATE: state}, **options)


def books(manager: CacheManager) -> dict[PoolKind, tuple[int, int, int, int]]:
    return {kind: (c.free, c.active, c.landing, c.reserved) for kind, c in manager.counts().items()}


def test_reserving_promises_without_taking():
    """Prompt and output reserve of history, the window of a chunk, a state row."""
    manager = make_manager()
    manager.reserve(1, 600, reserve_tokens=100, chunk_tokens=256)
    assert books(manager)[HISTORY] == (16, 0, 0, 3)
    assert books(manager)[WINDOW] == (24, 0, 0, 3 + 4 + 1)
    assert books(manager)[STATE] == (4, 0, 0, 1)
    assert manager.pages(1).state_row == -1


@pytest.mark.parametrize(
    ("history", "window", "state"),
    [(2, 24, 4), (16, 7, 4), (16, 24, 0)],
)
def test_a_short_pool_promises_nothing_in_any(history, window, state):
    """All pools or none, whichever is short."""
    manager = make_manager(history, window, state)
    before = books(manager)
    with pytest.raises(NoFreePages):
        manager.reserve(1, 600, reserve_tokens=100, chunk_tokens=256)
    assert books(manager) == before
    assert 1 not in manager
    with pytest.raises(NoFreePages):
        make_manager(history, min(window, 2), state).reserve_landing(1, 600, reserve_tokens=100)


def test_a_short_prompt_needs_few_window_pages():
    """No more than its own length can touch."""
    manager = make_manager()
    manager.reserve(1, 10, reserve_tokens=20, chunk_tokens=2048)
    assert books(manager)[WINDOW][3] == 1


@pytest.mark.parametrize("chunk", [1, 2, 63, 64, 65, 100, 256, 1000])
@pytest.mark.parametrize("start", [0, 1, 63, 126, 127, 128, 190, 1000])
def test_the_window_promise_covers_chunks_of_any_alignment(chunk, start):
    """A sequence that trims after each chunk stays within its promise, with one page left for a step ahead."""
    manager = make_manager(history=64, window=64)
    manager.reserve(1, 8000, reserve_tokens=0, chunk_tokens=max(chunk, start))
    length = start
    if start:
        manager.extend(1, start)
        manager.trim_window(1, start)
        manager.shrink(1, chunk)
    promised = books(manager)[WINDOW][1] + books(manager)[WINDOW][3]
    for _ in range(12):
        length += chunk
        manager.extend(1, length)
        assert books(manager)[WINDOW][1] <= promised - 1
        assert books(manager)[WINDOW][1] + books(manager)[WINDOW][3] == promised
        manager.trim_window(1, length)
        assert sorted(manager.pages(1).window_pages) == list(live_window(length))
    assert manager.audit() == []


def test_growth_takes_the_promised_pages_and_credits_stay_whole():
    """Pages appear by position; what is owned and what is still promised add up to the promise."""
    manager = make_manager()
    manager.reserve(1, 600, reserve_tokens=100, chunk_tokens=256)
    pages = manager.extend(1, 256)
    assert (len(pages.history), sorted(pages.window_pages), pages.state_row) == (1, [0, 1, 2, 3], 0)
    assert manager.extend(1, 256) is pages
    pages = manager.extend(1, 257)
    assert (len(pages.history), sorted(pages.window_pages)) == (2, [0, 1, 2, 3, 4])
    manager.trim_window(1, 257)
    assert sorted(manager.pages(1).window_pages) == [2, 3, 4]
    assert books(manager)[WINDOW] == (21, 3, 0, 5)
    assert books(manager)[HISTORY] == (14, 2, 0, 1)


def test_growth_past_the_promise_takes_what_is_free_or_nothing():
    """The engine decides what to do when the pool is full; until then nothing has changed."""
    manager = make_manager(history=4)
    manager.reserve(1, 256, reserve_tokens=0, chunk_tokens=256)
    manager.reserve(2, 256, reserve_tokens=256, chunk_tokens=256)
    manager.extend(1, 256)
    manager.extend(1, 257)
    before, pages = books(manager), manager.pages(1)
    with pytest.raises(NoFreePages):
        manager.extend(1, 513)
    assert books(manager) == before
    assert manager.pages(1) is pages
    manager.extend(2, 512)
    manager.release(2)
    assert len(manager.extend(1, 513).history) == 3
    assert manager.audit() == []


def test_a_landing_sequence_has_all_its_pages_at_once():
    """Whole history, the window alive at its end, a row; LANDING until it is admitted."""
    manager = make_manager()
    pages, _ = manager.reserve_landing(1, 600, reserve_tokens=512)
    assert len(pages.history) == 3
    assert sorted(pages.window_pages) == list(range(473 // 64, 10))
    assert books(manager)[HISTORY] == (13, 0, 3, 2)
    assert books(manager)[WINDOW] == (21, 0, 3, 1)
    assert books(manager)[STATE] == (3, 0, 1, 0)
    with pytest.raises(AssertionError):
        manager.extend(1, 601)
    assert manager.admit(1) == pages
    assert books(manager)[HISTORY] == (13, 3, 0, 2)
    grown = manager.extend(1, 641)
    assert grown.history == pages.history
    assert sorted(grown.window_pages) == [7, 8, 9, 10]
    with pytest.raises(AssertionError):
        manager.admit(1)


def test_a_landing_sequence_can_be_given_up():
    """Its pages are free once its scatters have ended, which is when the owner says release."""
    manager = make_manager()
    manager.reserve_landing(1, 600, reserve_tokens=512)
    manager.release(1)
    assert all(c.free == c.total and not c.reserved for c in manager.counts().values())


def test_a_finished_prefill_keeps_its_pages_and_no_credit():
    """What waits for its gathers must not hold others up."""
    manager = make_manager()
    manager.reserve(1, 600, reserve_tokens=300, chunk_tokens=600)
    manager.extend(1, 600)
    manager.trim_window(1, 600)
    manager.shrink(1, 0)
    assert [c.reserved for c in manager.counts().values()] == [0, 0, 0, 0]
    assert (books(manager)[HISTORY][1], books(manager)[WINDOW][1], books(manager)[STATE][1]) == (3, 3, 1)
    assert manager.audit() == []


def test_decoding_needs_fewer_window_pages_than_prefill():
    """Three and one of slack; the rest of the promise goes back when the prompt is done."""
    manager = make_manager()
    manager.reserve(1, 600, reserve_tokens=300, chunk_tokens=600)
    manager.extend(1, 600)
    manager.trim_window(1, 600)
    manager.shrink(1, 1)
    assert books(manager)[WINDOW] == (21, 3, 0, 1)


def test_double_release_and_double_reservation_are_bugs():
    """The worker dies of them rather than sharing a page."""
    manager = make_manager()
    manager.reserve(1, 10, reserve_tokens=0, chunk_tokens=10)
    with pytest.raises(AssertionError):
        manager.reserve(1, 10, reserve_tokens=0, chunk_tokens=10)
    manager.release(1)
    with pytest.raises(AssertionError):
        manager.release(1)


def test_a_page_changes_state_only_as_the_table_says():
    """Freed twice, freed by one who holds it otherwise, read before it has landed: each is a bug."""
    pool = PagePool(HISTORY, 4)
    pool.promise(2)
    (active,) = pool.take(1, PageState.ACTIVE)
    (landing,) = pool.take(1, PageState.LANDING)
    for wrong in (
        lambda: pool.free([landing], PageState.ACTIVE),
        lambda: pool.free([active], PageState.FREE),
        lambda: pool.free([active, active], PageState.ACTIVE),
        lambda: pool.activate([active]),
        lambda: pool.take(1, PageState.ACTIVE),
        lambda: pool.promise(3),
        lambda: pool.forgo(1),
    ):
        with pytest.raises(AssertionError):
            wrong()


def test_freed_pages_are_told_before_anyone_can_get_them():
    """Poison must be in place first."""
    freed: list[tuple[PoolKind, tuple[int, ...]]] = []
    manager = make_manager(on_free=lambda kind, pages: freed.append((kind, tuple(pages))))
    manager.reserve(1, 300, reserve_tokens=0, chunk_tokens=300)
    pages = manager.extend(1, 300)
    manager.trim_window(1, 300)
    assert freed == [(WINDOW, (pages.window_pages[0], pages.window_pages[1]))]
    manager.release(1)
    assert [(kind, len(ids)) for kind, ids in freed[1:]] == [(HISTORY, 2), (WINDOW, 3), (STATE, 1)]


def test_what_can_never_fit_is_known_at_once():
    """Against whole pools, not against what is free now; a window never caps a prompt that is cut into chunks."""
    manager = make_manager(history=16, window=8, state=1)
    assert manager.max_tokens() == 4096
    assert manager.can_ever_fit(4000, 96, chunk_tokens=256)
    assert not manager.can_ever_fit(4000, 97, chunk_tokens=256)
    assert not manager.can_ever_fit(4000, 96, chunk_tokens=512)
    manager.reserve(1, 4000, reserve_tokens=96, chunk_tokens=256)
    assert manager.can_ever_fit(4000, 96, chunk_tokens=256)
    assert not make_manager(state=0).can_ever_fit(1, 1)


def test_audit_names_what_does_not_add_up():
    """A page in two hands, a lost page, a lost credit."""
    manager = make_manager()
    manager.reserve(1, 300, reserve_tokens=300, chunk_tokens=300)
    manager.reserve(2, 300, reserve_tokens=0, chunk_tokens=300)
    manager.extend(1, 300)
    manager.extend(2, 300)
    first, second = (manager._sequences[key] for key in (1, 2))
    page = second.history[0]
    second.history[0] = first.history[0]
    assert any("two owners" in line for line in manager.audit())
    second.history[0] = page
    assert manager.audit() == []
    first.credits[HISTORY] -= 1
    assert any("credits" in line for line in manager.audit())
    assert any("credits" in line for line in manager.check())
    first.credits[HISTORY] += 1
    lost = first.history.pop()
    assert any("owned" in line for line in manager.check())
    assert any("owned" in line for line in manager.audit())
    first.history.append(lost)
    manager._pools[HISTORY]._states[lost] = PageState.LANDING
    assert any("not ACTIVE" in line for line in manager.audit())


def test_deciding_needs_no_torch():
    """The allocator's decisions run in the simulator too."""
    code = "import sys, headrace.kvcache.allocator, headrace.kvcache.table; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


class CacheMachine(RuleBasedStateMachine):
    """In any order of calls no page is lost or handed out twice, and no promise is broken."""

    def __init__(self) -> None:
        super().__init__()
        self.freed: list[int] = []
        self.manager = make_manager(12, 20, 3, on_free=lambda kind, pages: self.freed.extend(pages))
        self.length: dict[int, int] = {}
        self.promise: dict[int, int] = {}
        self.landing: set[int] = set()
        self.next_key = 0

    def active(self, pick: int) -> int | None:
        keys = [key for key in self.length if key not in self.landing]
        return keys[pick % len(keys)] if keys else None

    @rule(prompt=st.integers(1, 1500), reserve=st.integers(0, 600), chunk=st.integers(1, 700))
    def reserve(self, prompt, reserve, chunk):
        before, self.next_key = books(self.manager), self.next_key + 1
        try:
            self.manager.reserve(self.next_key, prompt, reserve_tokens=reserve, chunk_tokens=chunk)
        except NoFreePages:
            assert books(self.manager) == before
            return
        self.length[self.next_key] = 0
        self.promise[self.next_key] = prompt + reserve

    @rule(prompt=st.integers(1, 1500), reserve=st.integers(0, 600))
    def land(self, prompt, reserve):
        before, self.next_key = books(self.manager), self.next_key + 1
        try:
            pages, _ = self.manager.reserve_landing(self.next_key, prompt, reserve_tokens=reserve)
        except NoFreePages:
            assert books(self.manager) == before
            return
        assert len(pages.history) == history_pages(prompt)
        self.length[self.next_key] = prompt
        self.promise[self.next_key] = prompt + reserve
        self.landing.add(self.next_key)

    @precondition(lambda self: self.landing)
    @rule(pick=st.integers(0, 99))
    def admit(self, pick):
        key = sorted(self.landing)[pick % len(self.landing)]
        self.manager.admit(key)
        self.landing.remove(key)

    @rule(pick=st.integers(0, 99), by=st.integers(1, 400))
    def extend(self, pick, by):
        key = self.active(pick)
        if key is None:
            return
        before, pages, target = books(self.manager), self.manager.pages(key), self.length[key] + by
        try:
            pages = self.manager.extend(key, target)
        except NoFreePages:
            assert books(self.manager) == before
            assert self.manager.pages(key) == pages
            return
        self.length[key] = target
        assert len(pages.history) == history_pages(target)
        assert set(live_window(target)) <= set(pages.window_pages) or target - by == 0
        assert pages.state_row >= 0

    @rule(pick=st.integers(0, 99))
    def decode_within_the_promise(self, pick):
        """One token at a time, trimmed, never meets a full pool."""
        key = self.active(pick)
        if key is None or self.length[key] == 0 or self.length[key] >= self.promise[key]:
            return
        self.manager.trim_window(key, self.length[key])
        if len(self.manager.pages(key).window_pages) > 3 or self.manager._sequences[key].window_quota < 4:
            return
        self.manager.extend(key, self.length[key] + 1)
        self.length[key] += 1

    @rule(pick=st.integers(0, 99), back=st.integers(0, 50))
    def trim(self, pick, back):
        key = self.active(pick)
        if key is not None:
            self.manager.trim_window(key, max(0, self.length[key] - back))

    @rule(pick=st.integers(0, 99), chunk=st.integers(0, 100))
    def shrink(self, pick, chunk):
        key = self.active(pick)
        if key is not None:
            self.manager.shrink(key, chunk)
            if chunk == 0:
                self.promise[key] = 0

    @precondition(lambda self: self.length)
    @rule(pick=st.integers(0, 99))
    def release(self, pick):
        key = list(self.length)[pick % len(self.length)]
        self.manager.release(key)
        del self.length[key]
        self.landing.discard(key)

    @invariant()
    def books_add_up(self):
        assert self.manager.audit() == []
        assert self.manager.check() == []
        for counts in self.manager.counts().values():
            assert counts.free + counts.active + counts.landing == counts.total
            assert 0 <= counts.reserved <= counts.free

    @invariant()
    def no_page_is_in_two_hands(self):
        pages = [self.manager.pages(key) for key in self.length]
        for ids in (
            [page for p in pages for page in p.history],
            [page for p in pages for page in p.window_pages.values()],
            [p.state_row for p in pages if p.state_row >= 0],
        ):
            assert len(set(ids)) == len(ids)

    def teardown(self):
        for key in list(self.length):
            self.manager.release(key)
        assert all(c.free == c.total and c.reserved == 0 for c in self.manager.counts().values())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_window_promise_of_decoding_is_three_and_one_of_slack():
    """128 positions touch at most three pages of 64."""
    assert window_pages(1, 1 << 20) == 4
    assert window_pages(2048, 1 << 20) == 3 + 32 + 1
