"""Who owns which page, and who was promised how many: exact accounting of the four pools.

A sequence is admitted when every pool can promise what it needs, or not at all. A promise is a number of credits;
pages are taken from them when positions grow. So growth within the promise never meets a full pool, and free pages are
always at least the credits. Knows counts, page ids and logical positions; no bytes, no time. One thread owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import NoFreePages
from ..core.pools import PoolKind
from .layout import WINDOW_PAGE_TOKENS, WINDOW_TOKENS, live_window
from .sequence import SequencePages

OnFree = Callable[[PoolKind, Sequence[int]], None]


class PageState(IntEnum):
    """What a page is used for."""

    FREE = 0
    ACTIVE = 1
    """A sequence computes into it or reads it."""
    LANDING = 2
    """Bytes of another worker are scattered into it; nothing may read it."""


NEXT_STATES: Mapping[PageState, frozenset[PageState]] = {
    PageState.FREE: frozenset({PageState.ACTIVE, PageState.LANDING}),
    PageState.ACTIVE: frozenset({PageState.FREE}),
    PageState.LANDING: frozenset({PageState.ACTIVE, PageState.FREE}),
}


@dataclass(frozen=True)
class PoolCounts:
    """One pool's books; total = free + active + landing, and reserved <= free."""

    total: int
    free: int
    active: int
    landing: int
    reserved: int
    """Free pages that are promised to sequences."""


class PagePool:
    """The pages of one pool: each in one state, some of the free ones promised."""

    def __init__(self, kind: PoolKind, num_pages: int) -> None:
        assert num_pages >= 0
        self.kind = kind
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._states = bytearray(num_pages)
        self._counts = [num_pages, 0, 0]
        self._reserved = 0

    @property
    def available(self) -> int:
        """Pages that can still be promised."""
        return len(self._free) - self._reserved

    def counts(self) -> PoolCounts:
        free, active, landing = self._counts
        return PoolCounts(self.num_pages, free, active, landing, self._reserved)

    def state(self, page: int) -> PageState:
        return PageState(self._states[page])

    def promise(self, num: int) -> None:
        """Set `num` free pages aside, no matter which."""
        assert 0 <= num <= self.available
        self._reserved += num

    def forgo(self, num: int) -> None:
        """Give back a promise that is not used."""
        assert 0 <= num <= self._reserved
        self._reserved -= num

    def take(self, num: int, state: PageState) -> list[int]:
        """Turn `num` promised pages into owned ones."""
        self.forgo(num)
        pages = self._free[len(self._free) - num :]
        pages.reverse()
        del self._free[len(self._free) - num :]
        self._move(pages, PageState.FREE, state)
        return pages

    def activate(self, pages: Sequence[int]) -> None:
        """LANDING pages have arrived whole."""
        self._move(pages, PageState.LANDING, PageState.ACTIVE)

    def free(self, pages: Sequence[int], state: PageState) -> None:
        """Pages owned in `state` go back."""
        self._move(pages, state, PageState.FREE)
        self._free += pages

    def _move(self, pages: Sequence[int], old: PageState, new: PageState) -> None:
        assert new in NEXT_STATES[old]
        states = self._states
        for page in pages:
            assert states[page] == old, f"{self.kind.value} page {page} is {PageState(states[page]).name}"
            states[page] = new
        self._counts[old] -= len(pages)
        self._counts[new] += len(pages)

    def check(self, num_owned: int, reserved: int) -> list[str]:
        """Compare the counts with what the owners say; takes no time that grows with the pool."""
        name, (free, active, landing), wrong = self.kind.value, self._counts, []
        if free != len(self._free) or active + landing != num_owned or free + active + landing != self.num_pages:
            wrong.append(
                f"{name}: {free} free, {active} active and {landing} landing of {self.num_pages}, {num_owned} owned"
            )
        if reserved != self._reserved:
            wrong.append(f"{name}: sequences hold {reserved} credits, the pool promised {self._reserved}")
        if self._reserved > len(self._free):
            wrong.append(f"{name}: {self._reserved} promised of {len(self._free)} free")
        return wrong

    def audit(self, owned: Sequence[int], reserved: int) -> list[str]:
        """`check`, and every page by itself."""
        name, wrong = self.kind.value, self.check(len(owned), reserved)
        if len(set(owned)) != len(owned):
            wrong.append(f"{name}: a page has two owners")
        if sorted([*owned, *self._free]) != list(range(self.num_pages)):
            wrong.append(f"{name}: {len(owned)} owned and {len(self._free)} free are not {self.num_pages} pages")
        if any(self._states[page] != PageState.FREE for page in self._free):
            wrong.append(f"{name}: a page on the free list is in use")
        if any(self._states[page] == PageState.FREE for page in owned):
            wrong.append(f"{name}: an owned page is free")
        if [self._states.count(state) for state in PageState] != self._counts:
            wrong.append(f"{name}: counts by state {self._counts} are not the pages' states")
        return wrong


@dataclass
class _Sequence:
    """Books of one sequence."""

    credits: dict[PoolKind, int]
    window_quota: int
    """Window pages and credits that it keeps while its window moves on."""
    landing: bool = False
    length: int = 0
    """Positions below it have pages, or had."""
    window_floor: int = 0
    """Window pages below it are gone."""
    history: list[int] = field(default_factory=list)
    window: dict[int, int] = field(default_factory=dict)
    """By position // 64, ascending."""
    state_row: int = -1
    snapshot: SequencePages | None = None

    @property
    def state(self) -> PageState:
        """Of all its pages."""
        return PageState.LANDING if self.landing else PageState.ACTIVE

    def owned(self, kind: PoolKind) -> list[int]:
        match kind:
            case PoolKind.HISTORY:
                return self.history
            case PoolKind.WINDOW:
                return list(self.window.values())
            case PoolKind.STATE:
                return [] if self.state_row < 0 else [self.state_row]
            case PoolKind.SNAPSHOT:
                return []

    def pages(self) -> SequencePages:
        if self.snapshot is None:
            self.snapshot = SequencePages(tuple(self.history), tuple(self.window.items()), self.state_row)
        return self.snapshot


def history_pages(tokens: int) -> int:
    """History pages of `tokens` positions."""
    return -(-tokens // BLOCK_TOKENS)


def window_pages(chunk_tokens: int, tokens: int) -> int:
    """Most window pages that a sequence of `tokens` positions owns while `chunk_tokens` are computed at a time.

    A chunk and the 127 positions before it touch at most 3 + ceil(chunk / 64) pages, one decoded token 3; one page more
    lets the next step be planned before the last one has let go.
    """
    span = WINDOW_TOKENS - 1 + chunk_tokens
    most = -(-(span - 1) // WINDOW_PAGE_TOKENS) + 1 + 1
    return min(most, -(-tokens // WINDOW_PAGE_TOKENS))


class CacheManager:
    """Pages and credits of all sequences of one engine, by the engine's key."""

    def __init__(self, num_pages: Mapping[PoolKind, int], on_free: OnFree | None = None) -> None:
        """
        Args:
            on_free: told of pages the moment they are free, before anyone else can get them (poison).
        """
        self._pools = {kind: PagePool(kind, num_pages.get(kind, 0)) for kind in PoolKind}
        self._sequences: dict[int, _Sequence] = {}
        self._on_free = on_free

    # ---- admission ----

    def can_ever_fit(self, prompt_tokens: int, max_tokens: int, chunk_tokens: int = 1) -> bool:
        """Whether empty pools would hold the sequence to its longest; if not, waiting can't help."""
        tokens = prompt_tokens + max_tokens
        return (
            history_pages(tokens) <= self._pools[PoolKind.HISTORY].num_pages
            and window_pages(chunk_tokens, tokens) <= self._pools[PoolKind.WINDOW].num_pages
            and self._pools[PoolKind.STATE].num_pages > 0
        )

    def max_tokens(self) -> int:
        """Longest sequence that empty pools hold."""
        return self._pools[PoolKind.HISTORY].num_pages * BLOCK_TOKENS

    def reserve(self, key: int, prompt_tokens: int, *, reserve_tokens: int, chunk_tokens: int) -> None:
        """Promise a sequence that is computed here all that its prompt and `reserve_tokens` of output need.

        Raises:
            NoFreePages: some pool is short; nothing was promised in any.
        """
        tokens = prompt_tokens + reserve_tokens
        window = window_pages(min(chunk_tokens, prompt_tokens), tokens)
        self._open(key, {PoolKind.HISTORY: history_pages(tokens), PoolKind.WINDOW: window, PoolKind.STATE: 1})

    def reserve_landing(self, key: int, prompt_tokens: int, *, reserve_tokens: int) -> SequencePages:
        """Pages for a prompt that arrives from elsewhere, and credits for `reserve_tokens` of output.

        Returns:
            all its pages: whole history, the window that is alive at its end, a state row. They are LANDING: `admit`
            makes them readable.
        Raises:
            NoFreePages: some pool is short; nothing was taken in any.
        """
        assert prompt_tokens > 0
        tokens = prompt_tokens + reserve_tokens
        live = live_window(prompt_tokens)
        window = max(window_pages(1, tokens), len(live))
        sequence = self._open(
            key, {PoolKind.HISTORY: history_pages(tokens), PoolKind.WINDOW: window, PoolKind.STATE: 1}
        )
        sequence.landing = True
        sequence.length = prompt_tokens
        sequence.window_floor = live.start
        self._take(sequence, history_pages(prompt_tokens), live, PageState.LANDING)
        return sequence.pages()

    def admit(self, key: int) -> SequencePages:
        """Everything of a landing sequence has arrived and was verified: it may be read and grow."""
        sequence = self._sequences[key]
        assert sequence.landing
        sequence.landing = False
        for kind, pool in self._pools.items():
            pool.activate(sequence.owned(kind))
        return sequence.pages()

    # ---- growth ----

    def extend(self, key: int, new_length: int) -> SequencePages:
        """Pages for all positions below `new_length`, from the credits; beyond these from what is unpromised.

        Raises:
            NoFreePages: the credits are used up and a pool is short; nothing changed.
        """
        sequence = self._sequences[key]
        assert not sequence.landing
        assert new_length >= sequence.length
        blocks = history_pages(new_length) - len(sequence.history)
        first = max(sequence.length // WINDOW_PAGE_TOKENS, sequence.window_floor)
        window = [p for p in range(first, -(-new_length // WINDOW_PAGE_TOKENS)) if p not in sequence.window]
        row = int(sequence.state_row < 0)
        if blocks or window or row:
            needed = {PoolKind.HISTORY: blocks, PoolKind.WINDOW: len(window), PoolKind.STATE: row}
            short = {kind: max(0, num - sequence.credits[kind]) for kind, num in needed.items()}
            self._promise(short)
            for kind, num in short.items():
                sequence.credits[kind] += num
            self._take(sequence, blocks, window, PageState.ACTIVE)
        sequence.length = new_length
        return sequence.pages()

    def trim_window(self, key: int, length: int) -> None:
        """Free the window pages that no query at or after position `length` can see; their credits stay for growth."""
        sequence = self._sequences[key]
        assert not sequence.landing
        assert length <= sequence.length
        floor = live_window(length).start
        if floor <= sequence.window_floor:
            return
        sequence.window_floor = floor
        gone = [number for number in sequence.window if number < floor]
        if gone:
            self._give(PoolKind.WINDOW, [sequence.window.pop(number) for number in gone], sequence.state)
            sequence.snapshot = None
            self._settle_window(sequence)

    def shrink(self, key: int, chunk_tokens: int) -> None:
        """From now on at most `chunk_tokens` are computed at a time; 0: nothing more. Credits not needed go back."""
        sequence = self._sequences[key]
        assert not sequence.landing
        if chunk_tokens == 0:
            sequence.window_quota = 0
            for kind in (PoolKind.HISTORY, PoolKind.STATE):
                self._pools[kind].forgo(sequence.credits[kind])
                sequence.credits[kind] = 0
        else:
            sequence.window_quota = min(sequence.window_quota, window_pages(chunk_tokens, 1 << 62))
        self._settle_window(sequence)

    def release(self, key: int) -> None:
        """Everything of a sequence goes back. Nobody reads or writes its pages any more."""
        assert key in self._sequences, f"sequence {key} is not here, or was released before"
        sequence = self._sequences.pop(key)
        for kind, pool in self._pools.items():
            self._give(kind, sequence.owned(kind), sequence.state)
            pool.forgo(sequence.credits.get(kind, 0))

    # ---- questions ----

    def pages(self, key: int) -> SequencePages:
        return self._sequences[key].pages()

    def __contains__(self, key: int) -> bool:
        return key in self._sequences

    def counts(self) -> dict[PoolKind, PoolCounts]:
        return {kind: pool.counts() for kind, pool in self._pools.items()}

    def check(self) -> list[str]:
        """`audit` of the counts alone, for after each step: its time grows with the sequences, not with the pools."""
        sequences = self._sequences.values()
        return [
            line
            for kind, pool in self._pools.items()
            for line in pool.check(
                sum(len(sequence.owned(kind)) for sequence in sequences),
                sum(sequence.credits.get(kind, 0) for sequence in sequences),
            )
        ]

    def audit(self) -> list[str]:
        """What does not add up, page by page, in words; empty when all is well. Takes milliseconds for large pools."""
        wrong: list[str] = []
        sequences = self._sequences.values()
        for kind, pool in self._pools.items():
            owned = [page for sequence in sequences for page in sequence.owned(kind)]
            wrong += pool.audit(owned, sum(sequence.credits.get(kind, 0) for sequence in sequences))
        for key, sequence in self._sequences.items():
            for kind, pool in self._pools.items():
                state = sequence.state
                if any(pool.state(page) is not state for page in sequence.owned(kind)):
                    wrong.append(f"{kind.value}: sequence {key} has a page that is not {state.name}")
        return wrong

    # ---- within ----

    def _open(self, key: int, needed: dict[PoolKind, int]) -> _Sequence:
        assert key not in self._sequences, f"sequence {key} is here already"
        self._promise(needed)
        sequence = self._sequences[key] = _Sequence(needed, window_quota=needed[PoolKind.WINDOW])
        return sequence

    def _promise(self, needed: Mapping[PoolKind, int]) -> None:
        for kind, num in needed.items():
            pool = self._pools[kind]
            if num > pool.available:
                raise NoFreePages(f"{num} {kind.value} pages wanted, {pool.available} of {pool.num_pages} unpromised")
        for kind, num in needed.items():
            self._pools[kind].promise(num)

    def _take(self, sequence: _Sequence, blocks: int, window: Sequence[int], state: PageState) -> None:
        sequence.history += self._pools[PoolKind.HISTORY].take(blocks, state)
        sequence.window.update(zip(window, self._pools[PoolKind.WINDOW].take(len(window), state), strict=True))
        sequence.credits[PoolKind.HISTORY] -= blocks
        sequence.credits[PoolKind.WINDOW] -= len(window)
        if sequence.state_row < 0:
            (sequence.state_row,) = self._pools[PoolKind.STATE].take(1, state)
            sequence.credits[PoolKind.STATE] -= 1
        sequence.snapshot = None

    def _give(self, kind: PoolKind, pages: list[int], state: PageState) -> None:
        if pages:
            self._pools[kind].free(pages, state)
            if self._on_free is not None:
                self._on_free(kind, pages)

    def _settle_window(self, sequence: _Sequence) -> None:
        """Make the window credits what the quota leaves beside the pages owned."""
        wanted = max(0, sequence.window_quota - len(sequence.window))
        pool, have = self._pools[PoolKind.WINDOW], sequence.credits[PoolKind.WINDOW]
        if wanted > have:
            pool.promise(wanted - have)
        else:
            pool.forgo(have - wanted)
        sequence.credits[PoolKind.WINDOW] = wanted
