"""A cache of plain bytes with the shape of the real one: what simulation, process tests and benchmarks here ship.

History pages, window pages and compressor rows, every layer alike. The real geometry and mover are in `kvcache`, which
this room does not know; both follow `core/segments.py`.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import LayoutError
from ..core.segments import RangeKind, SegmentRange
from .coverage import WINDOW_PAGE_TOKENS

WINDOW_TOKENS = 128
STATE_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class PlainGeometry:
    """Sizes of one layer's pieces."""

    num_layers: int = 3
    block_bytes: int = 96
    window_bytes: int = 40
    row_bytes: int = 16

    def payload_bytes(self, ranges: Sequence[SegmentRange], length: int) -> int:
        return sum(self._range_bytes(piece, length) for piece in ranges)

    def _range_bytes(self, piece: SegmentRange, length: int) -> int:
        first, end = self._units(piece.kind, length)
        inside = piece.first >= first and piece.first + piece.count <= end and piece.count > 0
        if not inside or piece.layer_count < 1 or piece.layer_first + piece.layer_count > self.num_layers:
            raise LayoutError(f"no such range in {length} tokens: {piece}")
        if piece.kind is RangeKind.STATE and (piece.first, piece.first + piece.count) != (first, end):
            raise LayoutError(f"rows travel whole: {piece}")
        return piece.layer_count * piece.count * self.unit_bytes(piece.kind)

    def unit_bytes(self, kind: RangeKind) -> int:
        return {
            RangeKind.HISTORY: self.block_bytes,
            RangeKind.WINDOW: self.window_bytes,
            RangeKind.STATE: self.row_bytes,
        }[kind]

    def total_bytes(self, length: int) -> int:
        """What a sequence's pages take."""
        units = {kind: self._units(kind, length) for kind in RangeKind}
        return sum(self.num_layers * (end - first) * self.unit_bytes(kind) for kind, (first, end) in units.items())

    def _units(self, kind: RangeKind, length: int) -> tuple[int, int]:
        if kind is RangeKind.HISTORY:
            return 0, -(-length // BLOCK_TOKENS)
        if kind is RangeKind.WINDOW:
            return max(0, length - WINDOW_TOKENS) // WINDOW_PAGE_TOKENS, -(-length // WINDOW_PAGE_TOKENS)
        return max(0, length - STATE_TOKENS), length

    def history_segments(self, first_block: int, num_blocks: int, max_bytes: int) -> list[tuple[SegmentRange, ...]]:
        layers = max(1, min(self.num_layers, max_bytes // self.block_bytes))
        blocks = max(1, max_bytes // (layers * self.block_bytes))
        return [
            (SegmentRange(RangeKind.HISTORY, layer, min(layers, self.num_layers - layer), block, count),)
            for block in range(first_block, first_block + num_blocks, blocks)
            for layer in range(0, self.num_layers, layers)
            if (count := min(blocks, first_block + num_blocks - block))
        ]

    def tail_segments(self, length: int, max_bytes: int) -> list[tuple[SegmentRange, ...]]:
        pieces: list[SegmentRange] = []
        if length % BLOCK_TOKENS:
            block = length // BLOCK_TOKENS
            pieces += [SegmentRange(RangeKind.HISTORY, layer, 1, block, 1) for layer in range(self.num_layers)]
        for kind in (RangeKind.WINDOW, RangeKind.STATE):
            first, end = self._units(kind, length)
            pieces += [SegmentRange(kind, layer, 1, first, end - first) for layer in range(self.num_layers)]
        segments: list[tuple[SegmentRange, ...]] = []
        current: list[SegmentRange] = []
        for piece in pieces:
            if current and self.payload_bytes([*current, piece], length) > max_bytes:
                segments.append(tuple(current))
                current = []
            current.append(piece)
        return [*segments, tuple(current)]

    def expected(self, length: int, held_blocks: int) -> tuple[SegmentRange, ...]:
        if length < 1 or not 0 <= held_blocks * BLOCK_TOKENS <= length:
            raise LayoutError(f"no sequence of {length} tokens has {held_blocks} whole blocks")
        layers = range(self.num_layers)
        units = {kind: self._units(kind, length) for kind in RangeKind}
        units[RangeKind.HISTORY] = (held_blocks, units[RangeKind.HISTORY][1])
        return tuple(
            SegmentRange(kind, layer, 1, first, end - first)
            for kind, (first, end) in units.items()
            if end > first
            for layer in layers
        )

    def split(self, ranges: Sequence[SegmentRange]) -> frozenset[SegmentRange]:
        fine: list[SegmentRange] = []
        for piece in ranges:
            layers = range(piece.layer_first, piece.layer_first + piece.layer_count)
            if piece.kind is RangeKind.STATE:
                fine += [SegmentRange(piece.kind, layer, 1, piece.first, piece.count) for layer in layers]
            else:
                units = range(piece.first, piece.first + piece.count)
                fine += [SegmentRange(piece.kind, layer, 1, unit, 1) for layer in layers for unit in units]
        return frozenset(fine)


class PlainPages:
    """One sequence's bytes, in one allocation."""

    def __init__(self, geometry: PlainGeometry, length: int) -> None:
        self._geometry = geometry
        self.length = length
        self._units = {kind: geometry._units(kind, length) for kind in RangeKind}
        self._base: dict[RangeKind, int] = {}
        total = 0
        for kind, (first, end) in self._units.items():
            self._base[kind] = total
            total += geometry.num_layers * (end - first) * geometry.unit_bytes(kind)
        assert total == geometry.total_bytes(length)
        self.data = bytearray(total)
        self._address = ctypes.addressof((ctypes.c_char * max(total, 1)).from_buffer(self.data)) if total else 0

    def place(self, kind: RangeKind, layer: int, unit: int) -> tuple[int, int]:
        """Offset and size of one unit of one layer. A layer's units are contiguous."""
        first, end = self._units[kind]
        size = self._geometry.unit_bytes(kind)
        assert first <= unit < end
        return self._base[kind] + (layer * (end - first) + unit - first) * size, size

    def runs(self, ranges: Sequence[SegmentRange]) -> list[tuple[int, int]]:
        """(address, size) of the ranges' bytes, in the order in which they lie in a payload."""
        found = []
        for piece in ranges:
            for layer in range(piece.layer_first, piece.layer_first + piece.layer_count):
                offset, size = self.place(piece.kind, layer, piece.first)
                found.append((self._address + offset, size * piece.count))
        return found


class PlainMover:
    """Copies between `PlainPages` and buffers. The digest is a crc over the very bytes where they were written."""

    def gather(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        return self._move(pages, ranges, length, buffer_address, into_buffer=True)

    def scatter(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        return self._move(pages, ranges, length, buffer_address, into_buffer=False)

    def _move(
        self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer: int, *, into_buffer: bool
    ) -> int:
        assert isinstance(pages, PlainPages)
        assert pages.length == length
        digest = 0
        for address, size in pages.runs(ranges):
            source, target = (address, buffer) if into_buffer else (buffer, address)
            ctypes.memmove(target, source, size)
            digest = zlib.crc32((ctypes.c_ubyte * size).from_address(target), digest)
            buffer += size
        return digest << 20 | 0x5A5A5
