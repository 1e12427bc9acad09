"""One pool's pages: each in one state, some of the free ones promised, the cached ones given up when room is wanted.

A page that several may read is immutable. It is PINNED while any sequence reads it, else CACHED, as long as the prefix
index knows it; a pool whose cached pages are given up for others is never full of them. Knows counts and page ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from ..core.pools import PoolKind


class PageState(IntEnum):
    """What a page is used for."""

    FREE = 0
    ACTIVE = 1
    """One sequence computes into it, and reads it."""
    LANDING = 2
    """Bytes of another worker are scattered into it; nothing may read it."""
    CACHED = 3
    """Immutable, known to the prefix index, read by no sequence: may be evicted."""
    PINNED = 4
    """Immutable, read by one sequence or several."""


S = PageState

NEXT_STATES: Mapping[PageState, frozenset[PageState]] = {
    S.FREE: frozenset({S.ACTIVE, S.LANDING}),
    S.ACTIVE: frozenset({S.FREE, S.PINNED, S.CACHED}),
    S.LANDING: frozenset({S.ACTIVE, S.FREE}),
    S.CACHED: frozenset({S.PINNED, S.FREE}),
    S.PINNED: frozenset({S.CACHED, S.FREE}),
}


@dataclass(frozen=True)
class PoolCounts:
    """One pool's books: total = free + active + landing + cached + pinned, and reserved <= free + cached."""

    total: int
    free: int
    active: int
    landing: int
    reserved: int
    """Pages that are promised to sequences."""
    cached: int = 0
    pinned: int = 0


class PagePool:
    """See the module."""

    def __init__(self, kind: PoolKind, num_pages: int, *, charges_sharers: bool = False) -> None:
        """
        Args:
            charges_sharers: a page that several sequences pin counts once for each. Then whoever lets go of a shared
                page may always be promised another, as sequences do whose window moves on.
        """
        assert num_pages >= 0
        self.kind = kind
        self.num_pages = num_pages
        self.evict: Callable[[int], None] = _nothing_to_evict
        """Makes at least so many CACHED pages FREE; set by whoever keeps the prefix index."""
        self._charges_sharers = charges_sharers
        self._free = list(range(num_pages - 1, -1, -1))
        self._states = bytearray(num_pages)
        self._counts = [num_pages, 0, 0, 0, 0]
        self._refs: dict[int, int] = {}
        """Sequences that pin a page."""
        self._indexed: set[int] = set()
        """Pages that the prefix index knows."""
        self._extra = 0
        """Pins beyond the first of each page, where these are charged."""
        self._reserved = 0

    @property
    def available(self) -> int:
        """Pages that can still be promised or pinned; the cached ones are given up for it."""
        return len(self._free) + self._counts[S.CACHED] - self._reserved - self._extra

    def counts(self) -> PoolCounts:
        free, active, landing, cached, pinned = self._counts
        return PoolCounts(self.num_pages, free, active, landing, self._reserved, cached, pinned)

    def state(self, page: int) -> PageState:
        return PageState(self._states[page])

    def is_indexed(self, page: int) -> bool:
        """Whether the prefix index knows it."""
        return page in self._indexed

    # ---- promises ----

    def promise(self, num: int) -> None:
        """Set `num` pages aside, no matter which."""
        assert 0 <= num <= self.available
        self._reserved += num

    def forgo(self, num: int) -> None:
        """Give back a promise that is not used."""
        assert 0 <= num <= self._reserved
        self._reserved -= num

    # ---- pages of one owner ----

    def take(self, num: int, state: PageState) -> list[int]:
        """Turn `num` promised pages into owned ones."""
        self.forgo(num)
        if num > len(self._free):
            self.evict(num - len(self._free))
        pages = self._free[len(self._free) - num :]
        assert len(pages) == num
        pages.reverse()
        del self._free[len(self._free) - num :]
        self._move(pages, S.FREE, state)
        return pages

    def activate(self, pages: Sequence[int]) -> None:
        """LANDING pages have arrived whole."""
        self._move(pages, S.LANDING, S.ACTIVE)

    def free(self, pages: Sequence[int], state: PageState) -> None:
        """Pages owned in `state` go back."""
        assert state in (S.ACTIVE, S.LANDING)
        self._move(pages, state, S.FREE)
        self._free += pages

    # ---- pages that are shared ----
    # A long prompt has thousands of pages: these go over whole lists, with one look at each page.

    def share(self, page: int) -> None:
        """An ACTIVE page is complete: immutable from now on, its owner is its first reader."""
        self._move((page,), S.ACTIVE, S.PINNED)
        self._refs[page] = 1

    def pin_cost(self, pages: Sequence[int]) -> int:
        """What `pin` takes from `available`."""
        if self._charges_sharers:
            return len(pages)
        states, cached = self._states, int(S.CACHED)
        return sum([states[page] == cached for page in pages])

    def pin(self, pages: Sequence[int]) -> None:
        """One more sequence reads them."""
        states, refs, cached, pinned = self._states, self._refs, int(S.CACHED), int(S.PINNED)
        num_cached = 0
        for page in pages:
            if states[page] == cached:
                states[page] = pinned
                refs[page] = 1
                num_cached += 1
            else:
                refs[page] += 1
        self._counts[cached] -= num_cached
        self._counts[pinned] += num_cached
        if self._charges_sharers:
            self._extra += len(pages) - num_cached
        assert self.available >= 0

    def unpin(self, pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """One sequence less reads them. Those that are CACHED now, and those that are FREE, in the order given."""
        states, refs, indexed = self._states, self._refs, self._indexed
        at_rest: list[int] = []
        freed: list[int] = []
        for page in pages:
            num = refs[page]
            if num > 1:
                refs[page] = num - 1
                continue
            del refs[page]
            (at_rest if page in indexed else freed).append(page)
        for gone, state in ((at_rest, S.CACHED), (freed, S.FREE)):
            for page in gone:
                states[page] = state
            self._counts[state] += len(gone)
        self._counts[S.PINNED] -= len(at_rest) + len(freed)
        if self._charges_sharers:
            self._extra -= len(pages) - len(at_rest) - len(freed)
        self._free += freed
        return at_rest, freed

    def index(self, page: int) -> None:
        """The prefix index knows this page: a PINNED one, or an ACTIVE one that no sequence owns."""
        assert page not in self._indexed
        if self._states[page] == S.ACTIVE:
            self._move((page,), S.ACTIVE, S.CACHED)
        else:
            assert self._states[page] == S.PINNED
        self._indexed.add(page)

    def unindex(self, pages: Sequence[int]) -> list[int]:
        """The prefix index forgets them. Those that are FREE now: nobody reads them."""
        self._indexed.difference_update(pages)
        freed = [page for page in pages if self._states[page] != S.PINNED]
        self._move(freed, S.CACHED, S.FREE)
        self._free += freed
        return freed

    def _move(self, pages: Sequence[int], old: PageState, new: PageState) -> None:
        assert new in NEXT_STATES[old]
        states = self._states
        for page in pages:
            assert states[page] == old, f"{self.kind.value} page {page} is {PageState(states[page]).name}"
            states[page] = new
        self._counts[old] -= len(pages)
        self._counts[new] += len(pages)

    # ---- audits ----

    def check(self, num_owned: int, num_pins: int, num_indexed: int, reserved: int) -> list[str]:
        """Compare the counts with what the owners say; takes no time that grows with the pool."""
        name, wrong = self.kind.value, []
        free, active, landing, cached, pinned = self._counts
        if free != len(self._free) or active + landing != num_owned or sum(self._counts) != self.num_pages:
            wrong.append(
                f"{name}: {free} free, {active} active, {landing} landing, {cached} cached and {pinned} pinned of "
                f"{self.num_pages}, {num_owned} owned"
            )
        if num_indexed != len(self._indexed):
            wrong.append(f"{name}: the index knows {num_indexed} pages, the pool says {len(self._indexed)}")
        if self._charges_sharers and num_pins != pinned + self._extra:
            wrong.append(f"{name}: {num_pins} pins, {pinned} pages pinned and {self._extra} further pins charged")
        if reserved != self._reserved:
            wrong.append(f"{name}: sequences hold {reserved} credits, the pool promised {self._reserved}")
        if self.available < 0:
            wrong.append(f"{name}: {self._reserved} promised of {free} free and {cached} cached")
        return wrong

    def audit(self, owned: Sequence[int], pins: Sequence[int], indexed: Sequence[int], reserved: int) -> list[str]:
        """`check`, and every page by itself. `pins` names a page once for each sequence that reads it."""
        name, wrong = self.kind.value, self.check(len(owned), len(pins), len(indexed), reserved)
        refs: dict[int, int] = {}
        for page in pins:
            refs[page] = refs.get(page, 0) + 1
        if len(set(owned)) != len(owned):
            wrong.append(f"{name}: a page has two owners")
        if refs != self._refs:
            wrong.append(f"{name}: pins by page are not what sequences read")
        if set(indexed) != self._indexed or len(set(indexed)) != len(indexed):
            wrong.append(f"{name}: the index knows other pages, or one twice")
        cached = self._indexed - refs.keys()
        if sorted([*owned, *self._free, *refs, *cached]) != list(range(self.num_pages)):
            wrong.append(
                f"{name}: {len(owned)} owned, {len(self._free)} free, {len(refs)} pinned and {len(cached)} cached are "
                f"not {self.num_pages} pages"
            )
        for pages, states in (
            (self._free, (S.FREE,)),
            (owned, (S.ACTIVE, S.LANDING)),
            (refs, (S.PINNED,)),
            (cached, (S.CACHED,)),
        ):
            if any(self._states[page] not in states for page in pages):
                wrong.append(f"{name}: a page that should be {' or '.join(state.name for state in states)} is not")
        if [self._states.count(state) for state in PageState] != self._counts:
            wrong.append(f"{name}: counts by state {self._counts} are not the pages' states")
        return wrong


def _nothing_to_evict(num: int) -> None:
    raise AssertionError(f"{num} pages are to be evicted, but nothing is cached")
