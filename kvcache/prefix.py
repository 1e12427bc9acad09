"""The prefix index: which block hashes lie in which pages, which borders have a check-point, and what goes first.

Blocks form trees. Whoever reads a block reads all before it, and lets go of the last one first; so the order in which
blocks came to rest has every block before its parent, and evicting from its front never leaves a hole in a chain.
Check-points (two window pages and a snapshot row at a border) age by themselves: dropping one drops no block. Decides
without I/O; pages change state in the pools.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ..core.blocks import BlockHash
from ..core.kv_events import BlockRemoved, BlockStored, CacheCleared, KvEvent
from ..core.pools import PoolKind
from .pages import PagePool, PageState

OnFree = Callable[[PoolKind, Sequence[int]], None]


@dataclass(frozen=True)
class CheckPoint:
    """What continues a chain at a border without computing anything again."""

    window: tuple[int, int]
    """Pages of the last 128 positions, in order."""
    snapshot_row: int


@dataclass
class _Block:
    parent: BlockHash
    page: int
    num_children: int = 0


class PrefixIndex:
    """One engine's cached blocks."""

    def __init__(self, pools: Mapping[PoolKind, PagePool], on_free: OnFree) -> None:
        """
        Args:
            on_free: told of evicted pages the moment they are free.
        """
        self._history, self._window = pools[PoolKind.HISTORY], pools[PoolKind.WINDOW]
        self._snapshot = pools[PoolKind.SNAPSHOT]
        self._on_free = on_free
        self._blocks: dict[BlockHash, _Block] = {}
        self._by_page: dict[int, BlockHash] = {}
        self._resting: OrderedDict[BlockHash, None] = OrderedDict()
        """Blocks that no sequence reads, longest at rest first."""
        self._check_points: OrderedDict[BlockHash, CheckPoint] = OrderedDict()
        """Least recently made or used first."""
        self._events: list[KvEvent] = []
        self._history.evict = self._evict_blocks
        self._window.evict = self._evict_window
        self._snapshot.evict = self._evict_snapshots

    def __len__(self) -> int:
        return len(self._blocks)

    # ---- looking up ----

    def match(self, hashes: Sequence[BlockHash]) -> int:
        """How many leading blocks of a chain are here."""
        for num, block in enumerate(hashes):
            if block not in self._blocks:
                return num
        return len(hashes)

    def last_border(self, hashes: Sequence[BlockHash]) -> int:
        """Blocks up to the last border among these with a check-point; 0 if none has one."""
        for num in range(len(hashes), 0, -1):
            if hashes[num - 1] in self._check_points:
                return num
        return 0

    def pages(self, hashes: Sequence[BlockHash]) -> list[int]:
        blocks = self._blocks
        return [blocks[block].page for block in hashes]

    def check_point(self, block: BlockHash) -> CheckPoint | None:
        return self._check_points.get(block)

    # ---- reading ----

    def pin(self, hashes: Sequence[BlockHash]) -> list[int]:
        """One more sequence reads these blocks; their pages."""
        pages, resting = self.pages(hashes), self._resting
        for block in hashes:
            resting.pop(block, None)
        self._history.pin(pages)
        return pages

    def unpin(self, pages: Sequence[int]) -> list[int]:
        """A sequence lets go of pages, given in the order of its chain; those that nobody knows any more."""
        at_rest, freed = self._history.unpin(pages[::-1])
        by_page = self._by_page
        self._resting.update([(by_page[page], None) for page in at_rest])
        return freed

    def pin_check_point(self, block: BlockHash) -> CheckPoint:
        """A sequence begins at this border: it reads the two window pages from now on."""
        check_point = self._check_points[block]
        self._check_points.move_to_end(block)
        self._window.pin(check_point.window)
        return check_point

    # ---- storing ----

    def publish(self, block: BlockHash, parent: BlockHash, page: int) -> int:
        """A sequence that reads `parent` has completed `page`; the page that it reads from now on.

        Where the block is here already, the sequence's own page is given back: of two equal copies one is enough.
        """
        known = self._blocks.get(block)
        if known is not None:
            self._history.free((page,), PageState.ACTIVE)
            self._on_free(PoolKind.HISTORY, (page,))
            return self.pin((block,))[0]
        self._history.share(page)
        self._history.index(page)
        self._blocks[block] = _Block(parent, page)
        self._by_page[page] = block
        if parent in self._blocks:
            self._blocks[parent].num_children += 1
        self._tell(block)
        return page

    def can_check_point(self, block: BlockHash, *, evict: bool) -> bool:
        """Whether `add_check_point` would have a row: one that is free, or else another check-point's."""
        if block not in self._blocks or block in self._check_points or not self._snapshot.num_pages:
            return False
        return evict or self._snapshot.counts().free > 0

    def add_check_point(self, block: BlockHash, window: tuple[int, int]) -> int:
        """Keep the border at this block's end; the snapshot row that is to be filled at once.

        Args:
            window: PINNED pages that hold its last 128 positions.
        """
        self._snapshot.promise(1)
        (row,) = self._snapshot.take(1, PageState.ACTIVE)
        self._snapshot.index(row)
        for page in window:
            self._window.index(page)
        self._check_points[block] = CheckPoint(window, row)
        self._tell(block)
        return row

    def drop_check_point(self, block: BlockHash) -> None:
        """Forget a border, if it is kept. Whoever reads its window pages may go on."""
        check_point = self._forget_check_point(block)
        if check_point:
            self._tell(block)

    # ---- giving up ----

    def _evict_blocks(self, num: int) -> None:
        pages: list[int] = []
        for _ in range(num):
            block, _ = self._resting.popitem(last=False)
            self._forget_check_point(block)
            known = self._blocks.pop(block)
            assert not known.num_children
            del self._by_page[known.page]
            parent = self._blocks.get(known.parent)
            if parent is not None:
                parent.num_children -= 1
            pages.append(known.page)
            self._events.append(BlockRemoved(block))
        freed = self._history.unindex(pages)
        assert len(freed) == num
        self._on_free(PoolKind.HISTORY, freed)

    def clear(self) -> None:
        """Forget every block that no sequence reads. One word says so, if nothing is left."""
        told = len(self._events)
        self._evict_blocks(len(self._resting))
        if not self._blocks:
            del self._events[told:]
            self._events.append(CacheCleared())

    def _evict_window(self, num: int) -> None:
        """The oldest check-points one of whose pages nobody reads, until so many pages are free."""
        victims = []
        for block, check_point in self._check_points.items():
            if num <= 0:
                break
            at_rest = sum(self._window.state(page) is PageState.CACHED for page in check_point.window)
            if at_rest:
                victims.append(block)
                num -= at_rest
        assert num <= 0
        for block in victims:
            self.drop_check_point(block)

    def _evict_snapshots(self, num: int) -> None:
        for _ in range(num):
            self.drop_check_point(next(iter(self._check_points)))

    def _forget_check_point(self, block: BlockHash) -> CheckPoint | None:
        check_point = self._check_points.pop(block, None)
        if check_point is not None:
            freed = self._window.unindex(check_point.window)
            if freed:
                self._on_free(PoolKind.WINDOW, freed)
            self._on_free(PoolKind.SNAPSHOT, self._snapshot.unindex((check_point.snapshot_row,)))
        return check_point

    # ---- events and books ----

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What has changed since the last call, in order."""
        events, self._events = tuple(self._events), []
        return events

    def _tell(self, block: BlockHash) -> None:
        known = self._blocks[block]
        self._events.append(BlockStored(block, known.parent, block in self._check_points))

    def num_indexed(self, kind: PoolKind) -> int:
        match kind:
            case PoolKind.HISTORY:
                return len(self._blocks)
            case PoolKind.WINDOW:
                return 2 * len(self._check_points)
            case PoolKind.SNAPSHOT:
                return len(self._check_points)
            case PoolKind.STATE:
                return 0

    def indexed(self, kind: PoolKind) -> list[int]:
        """Every page that the index knows, for audits."""
        match kind:
            case PoolKind.HISTORY:
                return [block.page for block in self._blocks.values()]
            case PoolKind.WINDOW:
                return [page for check_point in self._check_points.values() for page in check_point.window]
            case PoolKind.SNAPSHOT:
                return [check_point.snapshot_row for check_point in self._check_points.values()]
            case PoolKind.STATE:
                return []

    def audit(self) -> list[str]:
        """Chains against blocks against resting order; [] is clean."""
        wrong = []
        children = dict.fromkeys(self._blocks, 0)
        for known in self._blocks.values():
            if known.parent in children:
                children[known.parent] += 1
        if any(self._blocks[block].num_children != num for block, num in children.items()):
            wrong.append("prefix: a block's children are not counted right")
        if {known.page: block for block, known in self._blocks.items()} != self._by_page:
            wrong.append("prefix: pages and blocks disagree")
        at_rest = {b for b, known in self._blocks.items() if self._history.state(known.page) is PageState.CACHED}
        if at_rest != self._resting.keys():
            wrong.append("prefix: the order of eviction is not over the blocks at rest")
        place = {block: at for at, block in enumerate(self._resting)}
        if any(place.get(self._blocks[b].parent, len(place)) < at for b, at in place.items()):
            wrong.append("prefix: a block would be evicted before one that follows it")
        if not self._check_points.keys() <= self._blocks.keys():
            wrong.append("prefix: a check-point has no block")
        return wrong
