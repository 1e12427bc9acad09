"""The prefix cache under any order of events: no page is lost, reused under a reader, or read for another text."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.blocks import BlockHash
from headrace.core.errors import NoFreePages
from headrace.core.kv_events import BlockRemoved, BlockStored
from headrace.core.pools import PoolKind
from headrace.kvcache.allocator import CacheManager, Hit
from headrace.kvcache.check_points import next_border, prompt_borders
from headrace.kvcache.layout import live_window

HISTORY, WINDOW, STATE, SNAPSHOT = PoolKind.HISTORY, PoolKind.WINDOW, PoolKind.STATE, PoolKind.SNAPSHOT
ROOT = BlockHash(b"r" * 16)
SIZES = {HISTORY: 14, WINDOW: 30, STATE: 4, SNAPSHOT: 3}


def chain(letters: str) -> list[BlockHash]:
    """A name for each block of a text, a letter a block: the whole text up to it, as real hashes say."""
    return [BlockHash(letters[: n + 1].encode().rjust(16, b".")) for n in range(len(letters))]


class Sequence:
    def __init__(self, letters: str, length: int, hit: Hit) -> None:
        self.letters = letters
        self.length = length
        self.computed = hit.start
        self.hit = hit
        self.landing = False
        self.held = False


class PrefixMachine(RuleBasedStateMachine):
    """A model of the bytes beside the books: each page knows what was written into it, or that it was freed."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[tuple[PoolKind, int], object] = {}
        self.manager = CacheManager(SIZES, self.poison, replay_tokens=512)
        self.open: dict[int, Sequence] = {}
        self.known: set[BlockHash] = set()
        self.next_key = 0

    def poison(self, kind: PoolKind, pages: list[int]) -> None:
        for page in pages:
            self.bytes[kind, page] = "free"

    def pick(self, number: int, *, landing: bool = False) -> tuple[int, Sequence] | None:
        some = [(k, s) for k, s in self.open.items() if s.landing is landing and not s.held]
        return some[number % len(some)] if some else None

    # ---- what happens ----

    @rule(letters=st.text("ab", min_size=0, max_size=5), rest=st.integers(1, 256), reserve=st.integers(0, 300),
          chunk=st.sampled_from([64, 256, 700]))  # fmt: skip
    def reserve(self, letters, rest, reserve, chunk):
        self.next_key += 1
        length = 256 * len(letters) + rest
        full = chain(letters + ("z" if rest == 256 else ""))
        before = self.manager.counts()
        try:
            hit = self.manager.reserve(
                self.next_key, length, reserve_tokens=reserve, chunk_tokens=chunk, root=ROOT, hashes=full
            )
        except NoFreePages:
            assert self.manager.counts() == before
            return
        text = letters + "z"
        assert hit.num_blocks <= (length - 1) // 256
        assert hit.start <= hit.num_blocks * 256
        sequence = self.open[self.next_key] = Sequence(text, length, hit)
        pages = self.manager.pages(self.next_key)
        for number in range(hit.num_blocks):
            assert self.bytes[HISTORY, pages.history[number]] == text[: number + 1]
        if hit.snapshot_row >= 0:
            assert self.bytes[SNAPSHOT, hit.snapshot_row] == (text[: hit.start // 256], hit.start)
            for number in live_window(hit.start):
                assert self.bytes[WINDOW, pages.window_pages[number]] == (text[: number // 4 + 1], number)
        for page in hit.blank_window:
            self.bytes[WINDOW, page] = "blank"
        assert sequence.computed in (0, hit.start)

    @rule(letters=st.text("ab", min_size=1, max_size=4), rest=st.integers(1, 256), reserve=st.integers(0, 300))
    def land(self, letters, rest, reserve):
        self.next_key += 1
        length = 256 * len(letters) + rest
        full = chain(letters + ("z" if rest == 256 else ""))
        try:
            pages, num = self.manager.reserve_landing(
                self.next_key, length, reserve_tokens=reserve, root=ROOT, hashes=full
            )
        except NoFreePages:
            return
        sequence = self.open[self.next_key] = Sequence(letters + "z", length, Hit(num, length))
        sequence.landing = True
        for number in range(num):
            assert self.bytes[HISTORY, pages.history[number]] == sequence.letters[: number + 1]
        self.write(sequence, pages, num * 256, length, window_from=0)

    @rule(number=st.integers(0, 99))
    def admit(self, number):
        found = self.pick(number, landing=True)
        if found:
            key, sequence = found
            sequence.landing = False
            self.manager.admit(key)
            self.publish(key, sequence, evict=True)

    @rule(number=st.integers(0, 99), by=st.integers(1, 700))
    def compute(self, number, by):
        found = self.pick(number)
        if not found:
            return
        key, sequence = found
        end = sequence.computed + by
        border = next_border(sequence.computed, prompt_borders(sequence.length, sequence.hit), spaced=by % 2 == 0)
        if border is not None:
            end = min(end, border)
        try:
            pages = self.manager.extend(key, end)
        except NoFreePages:
            return
        exact = sequence.hit.num_blocks * 256 if sequence.hit.blank_window else sequence.hit.start
        start, sequence.computed = sequence.computed, end
        while len(sequence.letters) * 256 < end:
            sequence.letters += "ab"[by % 2]
        self.write(sequence, pages, max(start, sequence.hit.num_blocks * 256), end, window_from=max(start, exact))
        for at in range(max(0, start - 127) // 64, (end - 1) // 64 + 1):
            assert at in pages.window_pages
        self.publish(key, sequence, evict=by % 3 == 0)
        self.manager.trim_window(key, end)

    def write(self, sequence: Sequence, pages, start: int, end: int, window_from: int | None = None) -> None:
        for block in range(start // 256, -(-end // 256)):
            self.bytes[HISTORY, pages.history[block]] = sequence.letters[: block + 1]
        for at, page in pages.window_pages.items():
            if at * 64 + 64 > (start if window_from is None else window_from) and at * 64 < end:
                self.bytes[WINDOW, page] = (sequence.letters[: at // 4 + 1], at)

    def publish(self, key: int, sequence: Sequence, *, evict: bool) -> None:
        end = sequence.computed
        blocks = end // 256
        self.manager.publish(key, chain(sequence.letters)[:blocks])
        if end and end % 256 == 0:
            row = self.manager.check_point(key, end, evict=evict)
            if row >= 0:
                self.bytes[SNAPSHOT, row] = (sequence.letters[:blocks], end)

    @rule(number=st.integers(0, 99), forks=st.integers(1, 2))
    def fork(self, number, forks):
        """Others go on from where one stands; what is partial is copied."""
        found = self.pick(number)
        if not found or not found[1].computed or self.manager._sequences[found[0]].length != found[1].computed:
            return
        key, sequence = found
        if sequence.computed < sequence.hit.num_blocks * 256:
            return  # in mid-replay: an engine forks at the prompt's end, behind what it hit
        ids = [self.next_key + at for at in range(1, forks + 1)]
        self.next_key += forks
        try:
            self.manager.reserve_forks(key, ids, sequence.computed, reserve_tokens=50)
        except NoFreePages:
            del self.open[key]
            assert key not in self.manager
            return
        for other in ids:
            for kind, source, target in self.manager.fork(key, other, sequence.computed):
                self.bytes[kind, target] = self.bytes.get((kind, source))
            twin = self.open[other] = Sequence(sequence.letters, sequence.length, sequence.hit)
            twin.computed = sequence.computed

    @rule(number=st.integers(0, 99))
    def hold(self, number):
        """A prefill is over; a taker still reads its pages."""
        found = self.pick(number)
        if found:
            self.manager.shrink(found[0], 0)
            found[1].held = True

    @rule(number=st.integers(0, 99))
    def one_at_a_time(self, number):
        found = self.pick(number)
        if found:
            self.manager.shrink(found[0], 1)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def release(self, number):
        """At its end, or aborted in any phase."""
        key = list(self.open)[number % len(self.open)]
        self.manager.release(key)
        del self.open[key]

    @precondition(lambda self: self.known)
    @rule(number=st.integers(0, 99))
    def drop_check_point(self, number):
        self.manager.drop_check_point(sorted(self.known)[number % len(self.known)])

    # ---- what must hold ----

    @invariant()
    def books_add_up(self):
        assert self.manager.audit() == []
        assert self.manager.check() == []
        for counts in self.manager.counts().values():
            parts = counts.free + counts.active + counts.landing + counts.cached + counts.pinned
            assert parts == counts.total
            assert 0 <= counts.reserved <= counts.free + counts.cached

    @invariant()
    def everyone_reads_its_own_text(self):
        for key, sequence in self.open.items():
            pages = self.manager.pages(key)
            end = sequence.computed
            for block in range(max(end // 256, sequence.hit.num_blocks)):
                assert self.bytes[HISTORY, pages.history[block]] == sequence.letters[: block + 1]
            exact = sequence.hit.num_blocks * 256 if sequence.hit.blank_window else 0
            for at, page in pages.window_pages.items():
                if exact <= at * 64 < end:
                    assert self.bytes[WINDOW, page] == (sequence.letters[: at // 4 + 1], at)

    @invariant()
    def events_tell_what_is_here(self):
        for event in self.manager.drain_events():
            match event:
                case BlockStored(block, parent, _):
                    assert parent in self.known or parent == ROOT
                    self.known.add(block)
                case BlockRemoved(block):
                    self.known.remove(block)
        assert len(self.known) == self.manager.num_cached_blocks

    def teardown(self):
        for key in list(self.open):
            self.manager.release(key)
        assert self.manager.audit() == []
        assert all(c.free + c.cached == c.total and c.reserved == 0 for c in self.manager.counts().values())
        # All of it can be had again by one sequence.
        self.manager.reserve(0, 256 * SIZES[HISTORY], reserve_tokens=0, chunk_tokens=64)
        assert self.manager.audit() == []


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=100, stateful_step_count=50, deadline=None)


# ---- single facts ----


def run(manager: CacheManager, key: int, letters: str, *, release: bool = True) -> Hit:
    """A sequence of whole blocks and one token more, computed and check-pointed at its borders."""
    length = 256 * len(letters) + 1
    hit = manager.reserve(key, length, reserve_tokens=0, chunk_tokens=256, root=ROOT, hashes=chain(letters))
    for end in [*range(hit.start + 256, length, 256), length]:
        manager.extend(key, end)
        manager.publish(key, chain(letters)[: end // 256])
        if end % 256 == 0 and end in prompt_borders(length, hit):
            manager.check_point(key, end, evict=True)
        manager.trim_window(key, end)
    if release:
        manager.release(key)
    assert manager.audit() == []
    return hit


def make(**sizes: int) -> CacheManager:
    return CacheManager({**SIZES, **{PoolKind[name.upper()]: size for name, size in sizes.items()}}, replay_tokens=512)


def test_leaves_go_first_and_the_longest_unused_of_them():
    """A chain never has a hole, and what was used last stays."""
    manager = make(history=7)
    run(manager, 1, "aaa")
    run(manager, 2, "b")
    run(manager, 3, "a")
    manager.drain_events()
    run(manager, 4, "cc")  # three pages are free, one of them for the token beyond the last border
    run(manager, 5, "dd")
    removed = [e.block for e in manager.drain_events() if isinstance(e, BlockRemoved)]
    assert removed == [chain("aaa")[2], chain("aaa")[1]]
    assert run(manager, 6, "a").num_blocks == 1


def test_a_check_point_goes_without_its_block_and_with_it():
    """Its own age decides; a block's eviction takes it along."""
    manager = make(snapshot=2)
    run(manager, 1, "aa")
    run(manager, 2, "b")
    assert run(manager, 3, "aa").start == 512
    assert manager.counts()[SNAPSHOT].cached == 2
    assert run(manager, 4, "b").start == 256
    run(manager, 5, "c")
    hit = run(manager, 6, "aa")
    assert (hit.num_blocks, hit.start) == (2, 0), "the block is here, its border is not kept any more"
    for _ in range(8):
        run(manager, 7, "dddddddddd")
    assert manager.counts()[SNAPSHOT].cached <= 2


def test_a_hit_that_does_not_fit_takes_nothing():
    """Pins and promises, all or none."""
    manager = make(history=4)
    run(manager, 1, "aaa")
    held = manager.reserve(2, 256, reserve_tokens=0, chunk_tokens=256)
    assert held == Hit()
    before = manager.counts()
    with pytest.raises(NoFreePages):
        manager.reserve(3, 1024, reserve_tokens=0, chunk_tokens=256, root=ROOT, hashes=chain("aaaa"))
    assert manager.counts() == before
    assert manager.audit() == []


def test_readers_of_one_window_page_may_all_be_promised_another():
    """However many share a check-point, each gets its own pages when its window moves on."""
    manager = make(window=40, state=8)
    run(manager, 1, "aa")
    keys = []
    for key in range(2, 9):
        try:
            hit = manager.reserve(key, 700, reserve_tokens=0, chunk_tokens=64, root=ROOT, hashes=chain("aa"))
        except NoFreePages:
            break
        assert hit.start == 512
        keys.append(key)
    assert len(keys) > 3
    for end in range(513, 701):
        for key in keys:
            manager.extend(key, end)
            manager.trim_window(key, end)
    assert manager.audit() == []


def test_random_order_of_release_keeps_chains_whole():
    """Forests of forks, released and evicted in any order."""
    draw = random.Random(3)
    manager = make(history=20, window=90, state=9)
    live: list[int] = []
    for key in range(300):
        letters = "".join(draw.choice("ab") for _ in range(draw.randint(1, 4)))
        try:
            run(manager, key, letters, release=False)
            live.append(key)
        except NoFreePages:
            if key in manager:
                manager.release(key)
        while len(live) > 3 or (live and draw.random() < 0.3):
            manager.release(live.pop(draw.randrange(len(live))))
        assert manager.audit() == []


def test_the_last_token_is_always_computed():
    """A prompt that ends at a border is hit one block lower."""
    manager = make()
    run(manager, 1, "aa")
    hit = manager.reserve(2, 512, reserve_tokens=1, chunk_tokens=512, root=ROOT, hashes=chain("aa"))
    assert hit.num_blocks == 1
    assert hit.start < 512


def test_no_border_is_kept_before_a_replay_has_become_exact():
    """Between its start and the end of the hit the window is not the sequence's."""
    manager = make(snapshot=4)
    run(manager, 1, "aaaa")
    manager.drop_check_point(chain("aaaa")[3])
    manager.drop_check_point(chain("aaaa")[2])
    hit = manager.reserve(2, 1300, reserve_tokens=0, chunk_tokens=256, root=ROOT, hashes=chain("aaaab"))
    assert (hit.num_blocks, hit.start) == (4, 512)
    assert prompt_borders(1300, hit) == (1024, 1280)
    manager.extend(2, 768)
    assert manager.check_point(2, 768, evict=True) == -1
    manager.trim_window(2, 768)
    manager.extend(2, 1024)
    assert manager.check_point(2, 1024, evict=True) >= 0
    assert manager.audit() == []
