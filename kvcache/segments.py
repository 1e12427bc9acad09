"""Segments of a sequence: what each range holds, in which order, and the copies between pages and a buffer.

Order of bytes in a payload. Ranges follow one another as listed. Within a range:

    HISTORY   block by block; in a block whole layer pages in the order of the offset table: of each c4a layer its c4a
              and its index page, then the page of each c128a layer
    WINDOW    page by page; in a page whole layer pages, layers ascending
    STATE     layer by layer; of a c4a layer the main rows, then the index rows; rows by position. A row is
              kv | score in fp32; of the four rows before the current group of four only the older half of each, since
              nothing reads the rest again

A STATE range ends at the sequence's length and begins at or before the first row that any of its layers keeps, so that
it holds all of each layer. Rows are found by position modulo the ring's length, which may differ at the two ends.

Ranges come from another process: each is checked against the length before a size or an address is made from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import LayoutError
from ..core.pools import PoolKind, PoolSpec
from ..core.segments import RangeKind, SegmentRange
from ..kernels import segment_copy
from .layout import CacheLayout, Region, Stream, kept_rows, live_window
from .sequence import SequencePages

Int64Array = npt.NDArray[np.int64]

MAX_RANGES = 256
"""Of one segment."""
MAX_LENGTH = 1 << 26
"""Tokens; beyond it numbers from a peer are nonsense."""

HISTORY, WINDOW, STATE = RangeKind.HISTORY, RangeKind.WINDOW, RangeKind.STATE
RINGS: dict[int, tuple[Stream, ...]] = {
    0: (),
    4: (Stream.C4A_STATE, Stream.INDEX_STATE),
    128: (Stream.C128A_STATE,),
}


class CacheGeometry:
    """Sizes and duties of ranges (`core.segments.SegmentGeometry`), from the offset table alone."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._num_layers = layout.shape.num_layers
        self._history = [0] * self._num_layers
        self._window = [0] * self._num_layers
        for region in layout.pools[PoolKind.HISTORY].regions:
            self._history[region.layer] += region.length
        for region in layout.pools[PoolKind.WINDOW].regions:
            self._window[region.layer] += region.length

    @property
    def min_segment_bytes(self) -> int:
        """What `max_bytes` must be at least: the largest thing that is never cut."""
        # What the rings keep repeats with the longer one's period.
        one_of_each = {self.layout.shape.ratio(layer): layer for layer in range(self._num_layers)}.values()
        states = (self.state_bytes(layer, length) for layer in one_of_each for length in range(1, 513))
        return max(*self._history, *(3 * size for size in self._window), *states)

    def payload_bytes(self, ranges: Sequence[SegmentRange], length: int) -> int:
        """Bytes of these ranges for a sequence of `length` tokens.

        Raises:
            LayoutError: a range that such a sequence does not have, too many of them, or two that overlap.
        """
        if not 0 < length <= MAX_LENGTH:
            raise LayoutError(f"no sequence has {length} tokens")
        if not 0 < len(ranges) <= MAX_RANGES:
            raise LayoutError(f"a segment has 1 to {MAX_RANGES} ranges, not {len(ranges)}")
        for part, other in combinations(ranges, 2):
            if _overlap(part, other):
                raise LayoutError(f"{part} and {other} overlap")
        return sum(self._range_bytes(part, length) for part in ranges)

    def history_segments(self, first_block: int, num_blocks: int, max_bytes: int) -> list[tuple[SegmentRange, ...]]:
        """Whole blocks: several to a segment when small, else cut by groups of layers. Block by block."""
        block_bytes = sum(self._history)
        if block_bytes == 0 or num_blocks == 0:
            return []
        end = first_block + num_blocks
        if (step := max_bytes // block_bytes) > 0:
            return [
                (SegmentRange(HISTORY, 0, self._num_layers, block, min(step, end - block)),)
                for block in range(first_block, end, step)
            ]
        segments: list[tuple[SegmentRange, ...]] = []
        for block in range(first_block, end):
            packer = _Packer(max_bytes)
            packer.add(HISTORY, block, 1, self._history)
            segments += packer.segments()
        return segments

    def tail_segments(self, length: int, max_bytes: int) -> list[tuple[SegmentRange, ...]]:
        """The partial last block, the window pages and the compressor rows, packed tightly in this order."""
        packer = _Packer(max_bytes)
        if length % BLOCK_TOKENS:
            packer.add(HISTORY, length // BLOCK_TOKENS, 1, self._history)
        window = live_window(length)
        packer.add(WINDOW, window.start, len(window), [size * len(window) for size in self._window])
        first = min(self._first_row(layer, length) for layer in range(self._num_layers))
        sizes = [self.state_bytes(layer, length) for layer in range(self._num_layers)]
        packer.add(STATE, first, length - first, sizes)
        return packer.segments()

    def expected(self, length: int, held_blocks: int) -> tuple[SegmentRange, ...]:
        """Everything that a taker needs which holds the first `held_blocks` blocks: a range for each kind and layer."""
        if not 0 < length <= MAX_LENGTH or not 0 <= held_blocks * BLOCK_TOKENS <= length:
            raise LayoutError(f"no sequence of {length} tokens has {held_blocks} whole blocks")
        blocks, window = -(-length // BLOCK_TOKENS), live_window(length)
        ranges = [
            SegmentRange(HISTORY, layer, 1, held_blocks, blocks - held_blocks)
            for layer, size in enumerate(self._history)
            if size and blocks > held_blocks
        ]
        ranges += [
            SegmentRange(WINDOW, layer, 1, window.start, len(window)) for layer, size in enumerate(self._window) if size
        ]
        for layer in range(self._num_layers):
            if self.state_bytes(layer, length):
                first = self._first_row(layer, length)
                ranges.append(SegmentRange(STATE, layer, 1, first, length - first))
        return tuple(ranges)

    def split(self, ranges: Sequence[SegmentRange]) -> frozenset[SegmentRange]:
        """The finest ranges that `ranges` cover; layers that hold nothing of a kind drop out.

        Raises:
            LayoutError: layers or positions that no sequence has.
        """
        fine: list[SegmentRange] = []
        for part in ranges:
            self._check_layers(part)
            if part.first < 0 or part.count < 1 or part.first + part.count > MAX_LENGTH:
                raise LayoutError(f"{part} has positions that no sequence has")
            layers = range(part.layer_first, part.layer_first + part.layer_count)
            if part.kind == STATE:
                length = part.first + part.count
                for layer in layers:
                    if self.state_bytes(layer, length):
                        first = self._first_row(layer, length)
                        fine.append(SegmentRange(STATE, layer, 1, first, length - first))
                continue
            sizes = self._history if part.kind == HISTORY else self._window
            holding = [layer for layer in layers if sizes[layer]]
            if part.first + part.count > MAX_LENGTH // 64 or part.count * len(holding) > 1 << 22:
                raise LayoutError(f"{part} has positions that no sequence has")
            for unit in range(part.first, part.first + part.count):
                fine += [SegmentRange(part.kind, layer, 1, unit, 1) for layer in holding]
        return frozenset(fine)

    def state_bytes(self, layer: int, length: int) -> int:
        """Bytes of a layer's compressor rows that a sequence of `length` tokens keeps."""
        ratio = self.layout.shape.ratio(layer)
        older, full = _older_and_full(ratio, length)
        return sum(
            self.layout.region(stream, layer).row_bytes * (2 * len(full) + len(older)) // 2 for stream in RINGS[ratio]
        )

    # ---- within ----

    def _check_layers(self, part: SegmentRange) -> None:
        if part.kind not in (HISTORY, WINDOW, STATE):
            raise LayoutError(f"unknown kind of range {part.kind}")
        if part.layer_first < 0 or not 1 <= part.layer_count <= self._num_layers - part.layer_first:
            raise LayoutError(f"{part} has layers that the model has not")

    def _range_bytes(self, part: SegmentRange, length: int) -> int:
        self._check_layers(part)
        layers = range(part.layer_first, part.layer_first + part.layer_count)
        if part.kind == STATE:
            size = sum(self.state_bytes(layer, length) for layer in layers)
            wanted = min(self._first_row(layer, length) for layer in layers)
            fits = part.count > 0 and part.first + part.count == length and 0 <= part.first <= wanted
        else:
            sizes = self._history if part.kind == HISTORY else self._window
            units = range(-(-length // BLOCK_TOKENS)) if part.kind == HISTORY else live_window(length)
            size = part.count * sum(sizes[layer] for layer in layers)
            fits = part.count > 0 and units.start <= part.first and part.first + part.count <= units.stop
        if not fits or size == 0:
            raise LayoutError(f"{part} does not exist in a sequence of {length} tokens")
        return size

    def _first_row(self, layer: int, length: int) -> int:
        return kept_rows(self.layout.shape.ratio(layer), length).start


class SegmentRuns:
    """Where the bytes of a segment lie in this process's pools, in payload order."""

    def __init__(self, layout: CacheLayout, pools: Sequence[PoolSpec]) -> None:
        self.layout = layout
        self.geometry = CacheGeometry(layout)
        self._base = {pool.kind: pool.base_address for pool in pools}
        self._num_pages = {pool.kind: pool.num_pages for pool in pools}
        self._page_bytes = {pool.kind: pool.page_bytes for pool in pools}
        self._runs: dict[tuple[PoolKind, int, int], tuple[Int64Array, Int64Array]] = {}

    def resolve(self, pages: object, ranges: Sequence[SegmentRange], length: int) -> tuple[Int64Array, Int64Array]:
        """Addresses and lengths of all runs.

        Raises:
            LayoutError: a range that the sequence does not have, or without a page.
        """
        assert isinstance(pages, SequencePages)
        payload_bytes = self.geometry.payload_bytes(ranges, length)
        parts = [part for one in ranges for part in self._range_runs(pages, one, length)]
        addresses = np.concatenate([part[0] for part in parts])
        lengths = np.concatenate([part[1] for part in parts])
        assert int(lengths.sum()) == payload_bytes
        return addresses, lengths

    def _range_runs(
        self, pages: SequencePages, part: SegmentRange, length: int
    ) -> Iterator[tuple[Int64Array, Int64Array]]:
        if part.kind == STATE:
            row = self._page_address(PoolKind.STATE, [pages.state_row])
            for layer in range(part.layer_first, part.layer_first + part.layer_count):
                ratio = self.layout.shape.ratio(layer)
                older, full = _older_and_full(ratio, length)
                for stream in RINGS[ratio]:
                    offsets, sizes = _ring_runs(self.layout.region(stream, layer), older, full)
                    yield offsets + row, sizes
            return
        kind = PoolKind.HISTORY if part.kind == HISTORY else PoolKind.WINDOW
        units = range(part.first, part.first + part.count)
        if kind is PoolKind.HISTORY:
            ids = list(pages.history[part.first : part.first + part.count])
        else:
            ids = [pages.window_pages[unit] for unit in units if unit in pages.window_pages]
        if len(ids) != part.count:
            raise LayoutError(f"the sequence has no page for some of {part}")
        offsets, sizes = self._layer_runs(kind, part.layer_first, part.layer_count)
        starts = self._page_address(kind, ids)
        yield (starts[:, None] + offsets).reshape(-1), np.tile(sizes, len(ids))

    def _page_address(self, kind: PoolKind, ids: list[int]) -> Int64Array:
        if not all(0 <= page < self._num_pages[kind] for page in ids):
            raise LayoutError(f"no such {kind.value} page in {ids}")
        return np.array(ids, dtype=np.int64) * self._page_bytes[kind] + self._base[kind]

    def _layer_runs(self, kind: PoolKind, first: int, count: int) -> tuple[Int64Array, Int64Array]:
        """Offsets and lengths of the layers' regions in a page of `kind`, neighbours merged."""
        key = (kind, first, count)
        if key not in self._runs:
            runs: list[list[int]] = []
            for region in self.layout.pools[kind].regions:
                if not first <= region.layer < first + count:
                    continue
                if runs and sum(runs[-1]) == region.offset:
                    runs[-1][1] += region.length
                else:
                    runs.append([region.offset, region.length])
            table = np.array(runs, dtype=np.int64)
            self._runs[key] = table[:, 0].copy(), table[:, 1].copy()
        return self._runs[key]


class CacheMover:
    """Copies segments between buffers and pages of pools that this process maps, on the CPU
    (`core.segments.SegmentMover`).

    The digest is over index, length and payload: a payload under another index is another digest. The copy itself runs
    in C without the GIL.
    """

    def __init__(self, layout: CacheLayout, pools: Sequence[PoolSpec]) -> None:
        if any(pool.device != "cpu" for pool in pools):
            raise LayoutError("segments are copied by the CPU; pools on a GPU need the device's mover")
        self.segments = SegmentRuns(layout, pools)
        self.geometry = self.segments.geometry

    def gather(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        """Copy from pages into the buffer; digest of index and payload.

        Raises:
            LayoutError: a range that the sequence does not have, or without a page.
        """
        addresses, lengths = self.segments.resolve(pages, ranges, length)
        payload = segment_copy.gather(addresses, lengths, buffer_address)
        return segment_copy.segment_digest(segment_copy.mix_index(ranges, length), payload)

    def scatter(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        """Copy from the buffer into pages; digest of index and the very bytes stored. Raises as `gather`."""
        addresses, lengths = self.segments.resolve(pages, ranges, length)
        payload = segment_copy.scatter(buffer_address, addresses, lengths)
        return segment_copy.segment_digest(segment_copy.mix_index(ranges, length), payload)


class _Packer:
    """Fills segments of at most `max_bytes` with ranges of neighbouring layers, in order."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._done: list[tuple[SegmentRange, ...]] = []
        self._ranges: list[SegmentRange] = []
        self._left = max_bytes

    def add(self, kind: RangeKind, first: int, count: int, layer_bytes: Sequence[int]) -> None:
        """All layers that hold bytes; those between them that hold none are named along."""
        holding = [layer for layer, size in enumerate(layer_bytes) if size]
        begin = None
        for at, layer in enumerate(holding):
            size = layer_bytes[layer]
            if size > self._max_bytes:
                raise LayoutError(f"a segment of {self._max_bytes} bytes can't hold {size} bytes of one layer")
            if size > self._left:
                if begin is not None:
                    self._close(kind, first, count, begin, holding[at - 1])
                self._flush()
                begin = None
            begin = layer if begin is None else begin
            self._left -= size
        if begin is not None:
            self._close(kind, first, count, begin, holding[-1])

    def segments(self) -> list[tuple[SegmentRange, ...]]:
        self._flush()
        return self._done

    def _close(self, kind: RangeKind, first: int, count: int, begin: int, last: int) -> None:
        self._ranges.append(SegmentRange(kind, begin, last - begin + 1, first, count))

    def _flush(self) -> None:
        if self._ranges:
            self._done.append(tuple(self._ranges))
        self._ranges = []
        self._left = self._max_bytes


def _overlap(a: SegmentRange, b: SegmentRange) -> bool:
    if a.kind != b.kind:
        return False
    layers = a.layer_first < b.layer_first + b.layer_count and b.layer_first < a.layer_first + a.layer_count
    return layers and a.first < b.first + b.count and b.first < a.first + a.count


def _older_and_full(ratio: int, length: int) -> tuple[range, range]:
    """Kept positions of which only the older half of the columns is needed, and those of which all is."""
    kept = kept_rows(ratio, length)
    border = length - length % 4 if ratio == 4 else kept.start
    return range(kept.start, border), range(border, length)


def _ring_runs(region: Region, older: range, full: range) -> tuple[Int64Array, Int64Array]:
    """Runs of one ring in a state page: two for each older row (half of kv, half of score), then whole rows."""
    runs: list[tuple[int, int]] = []
    half = region.row_bytes // 4
    for position in older:
        start = region.offset + position % region.rows * region.row_bytes
        runs += [(start, half), (start + 2 * half, half)]
    position = full.start
    while position < full.stop:
        slot = position % region.rows
        num = min(full.stop - position, region.rows - slot)
        runs.append((region.offset + slot * region.row_bytes, num * region.row_bytes))
        position += num
    table = np.array(runs, dtype=np.int64).reshape(-1, 2)
    return table[:, 0].copy(), table[:, 1].copy()
