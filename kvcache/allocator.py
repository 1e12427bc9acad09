"""Who owns which page, and who was promised how many: exact accounting of the four pools, hits included.

A sequence is admitted when every pool can promise what it needs, or not at all. A promise is a number of credits;
pages are taken from them when positions grow. So growth within the promise never meets a full pool, and free and
cached pages are always at least the credits. Blocks that are complete are published: the prefix index knows them, any
sequence may read them, and they outlive the one that computed them. Knows counts, page ids and logical positions; no
bytes, no time. One thread owns it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.blocks import BLOCK_TOKENS, BlockHash
from ..core.errors import NoFreePages
from ..core.kv_events import KvEvent
from ..core.pools import PoolKind
from .layout import WINDOW_PAGE_TOKENS, WINDOW_TOKENS, live_window
from .pages import PagePool, PageState, PoolCounts
from .prefix import OnFree, PrefixIndex
from .sequence import SequencePages

HISTORY, WINDOW, STATE, SNAPSHOT = PoolKind.HISTORY, PoolKind.WINDOW, PoolKind.STATE, PoolKind.SNAPSHOT


@dataclass(frozen=True)
class Hit:
    """What a sequence found here when it was admitted."""

    num_blocks: int = 0
    """Leading blocks that it reads from published pages, and never writes."""
    start: int = 0
    """First position to be computed."""
    snapshot_row: int = -1
    """To be copied into the state row at once: the rows that go before `start`."""
    blank_window: tuple[int, ...] = ()
    """Window pages before `start` whose true entries are gone: to be filled with zeros at once, as the state row."""


@dataclass
class _Sequence:
    """Books of one sequence."""

    credits: dict[PoolKind, int]
    window_quota: int
    """Window pages and credits that it keeps while its window moves on."""
    root: BlockHash | None = None
    """Parent of its first block; None: it takes no part in the prefix cache."""
    landing: bool = False
    exact_from: int = 0
    """Positions from here on are computed from true windows and rows; those before it are a replay's."""
    length: int = 0
    """Positions below it have pages, or had."""
    window_floor: int = 0
    """Window pages below it are gone."""
    history: list[int] = field(default_factory=list)
    num_shared: int = 0
    """Leading pages of history that are PINNED, not its own."""
    hashes: list[BlockHash] = field(default_factory=list)
    """Of those of them that are published."""
    window: dict[int, int] = field(default_factory=dict)
    """By position // 64, ascending."""
    shared_window: set[int] = field(default_factory=set)
    """Numbers of window pages that are PINNED, not its own."""
    state_row: int = -1
    snapshot: SequencePages | None = None

    @property
    def state(self) -> PageState:
        """Of all its pages."""
        return PageState.LANDING if self.landing else PageState.ACTIVE

    def owned(self, kind: PoolKind) -> list[int]:
        """Pages that nobody else reads."""
        match kind:
            case PoolKind.HISTORY:
                return self.history[self.num_shared :]
            case PoolKind.WINDOW:
                return [page for number, page in self.window.items() if number not in self.shared_window]
            case PoolKind.STATE:
                return [] if self.state_row < 0 else [self.state_row]
            case PoolKind.SNAPSHOT:
                return []

    def pinned(self, kind: PoolKind) -> list[int]:
        """Pages that others may read as well."""
        match kind:
            case PoolKind.HISTORY:
                return self.history[: self.num_shared]
            case PoolKind.WINDOW:
                return [page for number, page in self.window.items() if number in self.shared_window]
            case PoolKind.STATE | PoolKind.SNAPSHOT:
                return []

    def num_pages(self, kind: PoolKind) -> tuple[int, int]:
        """How many `owned` and `pinned` have, without making the lists."""
        match kind:
            case PoolKind.HISTORY:
                return len(self.history) - self.num_shared, self.num_shared
            case PoolKind.WINDOW:
                return len(self.window) - len(self.shared_window), len(self.shared_window)
            case PoolKind.STATE:
                return int(self.state_row >= 0), 0
            case PoolKind.SNAPSHOT:
                return 0, 0

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

    def __init__(
        self, num_pages: Mapping[PoolKind, int], on_free: OnFree | None = None, *, replay_tokens: int = 1 << 40
    ) -> None:
        """
        Args:
            on_free: told of pages the moment they are free, before anyone else can get them (poison).
            replay_tokens: positions after which a window that began empty is exact in every layer; a multiple of 256.
        """
        assert replay_tokens % BLOCK_TOKENS == 0
        self._pools = {
            kind: PagePool(kind, num_pages.get(kind, 0), charges_sharers=kind is WINDOW) for kind in PoolKind
        }
        self._sequences: dict[int, _Sequence] = {}
        self._on_free: OnFree = on_free or (lambda kind, pages: None)
        self._index = PrefixIndex(self._pools, self._on_free)
        self._replay_tokens = replay_tokens

    # ---- admission ----

    def can_ever_fit(self, prompt_tokens: int, max_tokens: int, chunk_tokens: int = 1, num_choices: int = 1) -> bool:
        """Whether empty pools would hold the sequence, and its forks, to their longest; if not, waiting can't help."""
        tokens, forks = prompt_tokens + max_tokens, num_choices - 1
        shared = prompt_tokens // BLOCK_TOKENS
        history = history_pages(tokens) + forks * (history_pages(tokens) - shared)
        window = window_pages(chunk_tokens, tokens) + forks * window_pages(1, tokens)
        return (
            history <= self._pools[HISTORY].num_pages
            and window <= self._pools[WINDOW].num_pages
            and num_choices <= self._pools[STATE].num_pages
        )

    def max_tokens(self) -> int:
        """Longest sequence that empty pools hold."""
        return self._pools[HISTORY].num_pages * BLOCK_TOKENS

    def reserve(
        self,
        key: int,
        prompt_tokens: int,
        *,
        reserve_tokens: int,
        chunk_tokens: int,
        root: BlockHash | None = None,
        hashes: Sequence[BlockHash] = (),
        whole: bool = False,
    ) -> Hit:
        """Promise a sequence that is computed here all that its prompt and `reserve_tokens` of output need.

        Args:
            root: parent of its first block; None keeps it out of the prefix cache.
            hashes: of the prompt's full blocks.
            whole: nothing will be computed, so the last token need not be.
        Returns:
            what of it is here already. With a `start` above 0 the sequence has a state row, to be filled at once.
        Raises:
            NoFreePages: some pool is short; nothing was promised in any.
        """
        tokens = prompt_tokens + reserve_tokens
        # The last token is computed again, for its logits.
        num, border, start = self._look_up(hashes[: (prompt_tokens - (not whole)) // BLOCK_TOKENS])
        window = window_pages(min(chunk_tokens, prompt_tokens), tokens)
        check_point = self._index.check_point(hashes[border - 1]) if start and start == border * BLOCK_TOKENS else None
        pages = check_point.window if check_point is not None else ()
        sequence = self._open(
            key,
            {HISTORY: history_pages(tokens) - num, WINDOW: window - len(pages), STATE: 1},
            hashes[:num],
            pages,
            root,
        )
        sequence.window_quota = window
        sequence.length, sequence.window_floor = start, live_window(start).start
        # A replay that begins at the very start is no replay: nothing goes before it.
        sequence.exact_from = num * BLOCK_TOKENS if start and check_point is None else start
        if not start:
            return Hit(num)
        live = live_window(start)
        if check_point is not None:
            self._index.pin_check_point(hashes[border - 1])
            sequence.window.update(zip(live, check_point.window, strict=True))
            sequence.shared_window.update(live)
            self._take(sequence, 0, (), PageState.ACTIVE)
            return Hit(num, start, snapshot_row=check_point.snapshot_row)
        self._take(sequence, 0, live, PageState.ACTIVE)
        return Hit(num, start, blank_window=tuple(sequence.window.values()))

    def reserve_landing(
        self,
        key: int,
        prompt_tokens: int,
        *,
        reserve_tokens: int,
        root: BlockHash | None = None,
        hashes: Sequence[BlockHash] = (),
    ) -> tuple[SequencePages, int]:
        """Pages for a prompt that arrives from elsewhere, and credits for `reserve_tokens` of output.

        Returns:
            all its pages: whole history, the window that is alive at its end, a state row; and how many leading blocks
            are here already and need not arrive. The others are LANDING: `admit` makes them readable.
        Raises:
            NoFreePages: some pool is short; nothing was taken in any.
        """
        assert prompt_tokens > 0
        tokens = prompt_tokens + reserve_tokens
        num = self._index.match(hashes)
        live = live_window(prompt_tokens)
        window = max(window_pages(1, tokens), len(live))
        needed = {HISTORY: history_pages(tokens) - num, WINDOW: window, STATE: 1}
        sequence = self._open(key, needed, hashes[:num], (), root)
        sequence.landing = True
        sequence.length = prompt_tokens
        sequence.window_floor = live.start
        self._take(sequence, history_pages(prompt_tokens) - num, live, PageState.LANDING)
        return sequence.pages(), num

    def admit(self, key: int) -> SequencePages:
        """Everything of a landing sequence has arrived and was verified: it may be read and grow."""
        sequence = self._sequences[key]
        assert sequence.landing
        for kind, pool in self._pools.items():
            pool.activate(sequence.owned(kind))
        sequence.landing = False
        return sequence.pages()

    # ---- forks ----

    def reserve_forks(self, key: int, forks: Sequence[int], prompt_tokens: int, *, reserve_tokens: int) -> None:
        """Promise what sequences need that will go on from the end of another's prompt, each in its own way.

        Raises:
            NoFreePages: some pool is short; nothing was promised, and `key` is released as well.
        """
        tokens = prompt_tokens + reserve_tokens
        needed = {
            HISTORY: history_pages(tokens) - prompt_tokens // BLOCK_TOKENS,
            WINDOW: max(window_pages(1, tokens), len(live_window(prompt_tokens))),
            STATE: 1,
        }
        for at, fork in enumerate(forks):
            try:
                self._open(fork, needed, (), (), self._sequences[key].root)
            except NoFreePages:
                for opened in (*forks[:at], key):
                    self.release(opened)
                raise

    def fork(self, key: int, fork: int, length: int) -> list[tuple[PoolKind, int, int]]:
        """Let a reserved fork go on where `key` stands, all positions below `length` computed.

        Complete pages are read by both; partial ones and the state row become copies.

        Returns:
            (pool, page to copy from, page to copy into), at once.
        """
        source, target = self._sequences[key], self._sequences[fork]
        assert not source.landing
        assert source.length == length
        assert not target.history
        assert length >= source.num_shared * BLOCK_TOKENS, "a replay is no place to fork"
        blocks, live = length // BLOCK_TOKENS, live_window(length)
        for page in source.history[source.num_shared : blocks]:
            self._pools[HISTORY].share(page)
        source.num_shared = max(source.num_shared, blocks)
        self._pools[HISTORY].pin(source.history[:blocks])
        target.history, target.hashes, target.num_shared = source.history[:blocks], source.hashes[:blocks], blocks
        for number in live:
            if (number + 1) * WINDOW_PAGE_TOKENS > length:
                continue
            if number not in source.shared_window:
                self._pools[WINDOW].share(source.window[number])
                source.shared_window.add(number)
            # A reader is charged for what it shares; its credits pay.
            self._pools[WINDOW].forgo(1)
            target.credits[WINDOW] -= 1
            self._pools[WINDOW].pin((source.window[number],))
            target.window[number] = source.window[number]
            target.shared_window.add(number)
        partial = [number for number in live if number not in target.window]
        self._take(target, history_pages(length) - blocks, partial, PageState.ACTIVE)
        target.length, target.window_floor, target.exact_from = length, live.start, source.exact_from
        return [
            *((HISTORY, source.history[at], target.history[at]) for at in range(blocks, history_pages(length))),
            *((WINDOW, source.window[number], target.window[number]) for number in partial),
            (STATE, source.state_row, target.state_row),
        ]

    # ---- growth ----

    def extend(self, key: int, new_length: int) -> SequencePages:
        """Pages for all positions below `new_length`, from the credits; beyond these from what is unpromised.

        Raises:
            NoFreePages: the credits are used up and a pool is short; nothing changed.
        """
        sequence = self._sequences[key]
        assert not sequence.landing
        assert new_length >= sequence.length
        blocks = max(0, history_pages(new_length) - len(sequence.history))
        first = max(sequence.length // WINDOW_PAGE_TOKENS, sequence.window_floor)
        window = [p for p in range(first, -(-new_length // WINDOW_PAGE_TOKENS)) if p not in sequence.window]
        row = int(sequence.state_row < 0)
        if blocks or window or row:
            needed = {HISTORY: blocks, WINDOW: len(window), STATE: row}
            short = {kind: max(0, num - sequence.credits[kind]) for kind, num in needed.items()}
            self._promise(short)
            for kind, num in short.items():
                sequence.credits[kind] += num
            self._take(sequence, blocks, window, PageState.ACTIVE)
        sequence.length = new_length
        return sequence.pages()

    def trim_window(self, key: int, length: int) -> None:
        """Let go of the window pages that no query at or after position `length` can see; their credits stay."""
        sequence = self._sequences[key]
        assert not sequence.landing
        assert length <= sequence.length
        floor = live_window(length).start
        if floor <= sequence.window_floor:
            return
        sequence.window_floor = floor
        gone = [number for number in sequence.window if number < floor]
        if gone:
            own = [number for number in gone if number not in sequence.shared_window]
            self._unpin_window([sequence.window[number] for number in gone if number in sequence.shared_window])
            self._give(WINDOW, [sequence.window[number] for number in own], sequence.state)
            sequence.shared_window.difference_update(gone)
            for number in gone:
                del sequence.window[number]
            sequence.snapshot = None
            self._settle_window(sequence)

    def shrink(self, key: int, chunk_tokens: int) -> None:
        """From now on at most `chunk_tokens` are computed at a time; 0: nothing more. Credits not needed go back."""
        sequence = self._sequences[key]
        assert not sequence.landing
        if chunk_tokens == 0:
            sequence.window_quota = 0
            for kind in (HISTORY, STATE):
                self._pools[kind].forgo(sequence.credits[kind])
                sequence.credits[kind] = 0
        else:
            sequence.window_quota = min(sequence.window_quota, window_pages(chunk_tokens, 1 << 62))
        self._settle_window(sequence)

    def release(self, key: int) -> None:
        """Everything of a sequence goes back. Nobody reads or writes its pages any more; what it published stays."""
        assert key in self._sequences, f"sequence {key} is not here, or was released before"
        sequence = self._sequences.pop(key)
        for kind, pool in self._pools.items():
            self._give(kind, sequence.owned(kind), sequence.state)
            pool.forgo(sequence.credits.get(kind, 0))
        self._unpin_window(sequence.pinned(WINDOW))
        freed = self._index.unpin(sequence.pinned(HISTORY))
        if freed:
            self._on_free(HISTORY, freed)

    # ---- the prefix cache ----

    def publish(self, key: int, hashes: Sequence[BlockHash]) -> SequencePages:
        """Every position of these leading blocks is final in its pages, on the device too: others may read them.

        Args:
            hashes: of the sequence's blocks from the first on; those published before are passed over.
        Returns:
            its pages, which may be others than before: where an equal block was here first, that one is read.
        """
        sequence = self._sequences[key]
        assert not sequence.landing
        if sequence.root is None or len(hashes) <= len(sequence.hashes):
            return sequence.pages()
        for at in range(len(sequence.hashes), len(hashes)):
            parent = hashes[at - 1] if at else sequence.root
            sequence.history[at] = self._index.publish(hashes[at], parent, sequence.history[at])
            sequence.hashes.append(hashes[at])
        sequence.num_shared = len(sequence.hashes)
        sequence.snapshot = None
        return sequence.pages()

    def check_point(self, key: int, border: int, *, evict: bool) -> int:
        """Keep the border that a sequence stands at, with all blocks before it published.

        Args:
            evict: give up the oldest check-point if there is no room; else do without.
        Returns:
            snapshot row that is to be filled at once; -1: kept already, or no room, or forks of one prompt share a
            window page, and the first of them to come to this border keeps it.
        """
        sequence = self._sequences[key]
        num = border // BLOCK_TOKENS
        assert border == num * BLOCK_TOKENS > 0
        if num > len(sequence.hashes) or border < sequence.exact_from:
            return -1
        block = sequence.hashes[num - 1]
        if not self._index.can_check_point(block, evict=evict):
            return -1
        numbers = live_window(border)
        if any(self._pools[WINDOW].is_indexed(sequence.window[number]) for number in numbers):
            return -1
        for number in numbers:
            if number not in sequence.shared_window:
                self._pools[WINDOW].share(sequence.window[number])
                sequence.shared_window.add(number)
        first, second = (sequence.window[number] for number in numbers)
        return self._index.add_check_point(block, (first, second))

    def has_room_for_check_point(self) -> bool:
        """Whether one more would cost nobody anything: a row is free, and half of the window pages are."""
        window = self._pools[WINDOW].counts()
        return self._pools[SNAPSHOT].counts().free > 0 and 2 * (window.free - window.reserved) >= window.total

    def drop_check_point(self, block: BlockHash) -> None:
        """A border that is of no more use than others."""
        self._index.drop_check_point(block)

    def clear_cache(self) -> None:
        """Forget what no sequence reads."""
        self._index.clear()

    def drain_events(self) -> tuple[KvEvent, ...]:
        """What may be hit has changed so since the last call."""
        return self._index.drain_events()

    # ---- questions ----

    def pages(self, key: int) -> SequencePages:
        return self._sequences[key].pages()

    def __contains__(self, key: int) -> bool:
        return key in self._sequences

    def counts(self) -> dict[PoolKind, PoolCounts]:
        return {kind: pool.counts() for kind, pool in self._pools.items()}

    @property
    def num_cached_blocks(self) -> int:
        """Published blocks, read by somebody or not."""
        return len(self._index)

    def check(self) -> list[str]:
        """`audit` of the counts alone, for after each step: its time grows with the sequences, not with the pools."""
        wrong: list[str] = []
        for kind, pool in self._pools.items():
            num_owned = num_pins = reserved = 0
            for sequence in self._sequences.values():
                owned, pins = sequence.num_pages(kind)
                num_owned, num_pins = num_owned + owned, num_pins + pins
                reserved += sequence.credits.get(kind, 0)
            wrong += pool.check(num_owned, num_pins, self._index.num_indexed(kind), reserved)
        return wrong

    def audit(self) -> list[str]:
        """What does not add up, page by page, in words; empty when all is well. Takes milliseconds for large pools."""
        wrong: list[str] = []
        sequences = self._sequences.values()
        for kind, pool in self._pools.items():
            owned = [page for sequence in sequences for page in sequence.owned(kind)]
            pins = [page for sequence in sequences for page in sequence.pinned(kind)]
            reserved = sum(sequence.credits.get(kind, 0) for sequence in sequences)
            wrong += pool.audit(owned, pins, self._index.indexed(kind), reserved)
        for key, sequence in self._sequences.items():
            for kind, pool in self._pools.items():
                state = sequence.state
                if any(pool.state(page) is not state for page in sequence.owned(kind)):
                    wrong.append(f"{kind.value}: sequence {key} has a page that is not {state.name}")
            if self._index.match(sequence.hashes) != len(sequence.hashes):
                wrong.append(f"prefix: sequence {key} reads a block that the index has lost")
        return wrong + self._index.audit()

    # ---- within ----

    def _look_up(self, hashes: Sequence[BlockHash]) -> tuple[int, int, int]:
        """Leading blocks that are here; of them those up to the last check-point; where computing has to begin."""
        num = self._index.match(hashes)
        border = self._index.last_border(hashes[:num])
        return num, border, max(border * BLOCK_TOKENS, num * BLOCK_TOKENS - self._replay_tokens, 0)

    def _open(
        self,
        key: int,
        needed: dict[PoolKind, int],
        hashes: Sequence[BlockHash],
        window: Sequence[int],
        root: BlockHash | None,
    ) -> _Sequence:
        """Promise what is needed and pin the blocks; the window pages' pins are counted, and left to the caller."""
        assert key not in self._sequences, f"sequence {key} is here already"
        pins = {HISTORY: self._index.pages(hashes), WINDOW: window}
        costs = {kind: self._pools[kind].pin_cost(pages) for kind, pages in pins.items()}
        self._promise(needed, costs)
        sequence = self._sequences[key] = _Sequence(dict(needed), window_quota=needed[WINDOW], root=root)
        sequence.history += self._index.pin(hashes)
        sequence.hashes += hashes
        sequence.num_shared = len(hashes)
        return sequence

    def _promise(self, needed: Mapping[PoolKind, int], beside: Mapping[PoolKind, int] | None = None) -> None:
        """All or none; `beside` is taken from the same pools at once."""
        for kind, num in needed.items():
            pool, wanted = self._pools[kind], num + (beside or {}).get(kind, 0)
            if wanted > pool.available:
                raise NoFreePages(
                    f"{wanted} {kind.value} pages wanted, {pool.available} of {pool.num_pages} unpromised"
                )
        for kind, num in needed.items():
            self._pools[kind].promise(num)

    def _take(self, sequence: _Sequence, blocks: int, window: Iterable[int], state: PageState) -> None:
        numbers = list(window)
        sequence.history += self._pools[HISTORY].take(blocks, state)
        sequence.window.update(zip(numbers, self._pools[WINDOW].take(len(numbers), state), strict=True))
        sequence.credits[HISTORY] -= blocks
        sequence.credits[WINDOW] -= len(numbers)
        if sequence.state_row < 0:
            (sequence.state_row,) = self._pools[STATE].take(1, state)
            sequence.credits[STATE] -= 1
        sequence.snapshot = None

    def _give(self, kind: PoolKind, pages: list[int], state: PageState) -> None:
        if pages:
            self._pools[kind].free(pages, state)
            self._on_free(kind, pages)

    def _unpin_window(self, pages: Sequence[int]) -> None:
        _, freed = self._pools[WINDOW].unpin(pages)
        if freed:
            self._on_free(WINDOW, freed)

    def _settle_window(self, sequence: _Sequence) -> None:
        """Make the window credits what the quota leaves beside the pages read."""
        wanted = max(0, sequence.window_quota - len(sequence.window))
        pool, have = self._pools[WINDOW], sequence.credits[WINDOW]
        if wanted > have:
            pool.promise(wanted - have)
        else:
            pool.forgo(have - wanted)
        sequence.credits[WINDOW] = wanted
