"""What a taker still lacks: one cell for each finest range of the sequence, from the geometry that both ends compute.

A cell goes WANTED -> IN_FLIGHT -> STORED, or back to WANTED when its bytes were refused. STORED is for good: a stored
range is never stored again. Knows ranges; not buffers, messages, addresses.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import LayoutError
from ..core.peer import MAX_INDEX_RANGES, PeerFault
from ..core.segments import RangeKind, SegmentGeometry, SegmentRange

WINDOW_PAGE_TOKENS = 64
MAX_LAYERS = 1024


class Cell(IntEnum):
    WANTED = 0
    IN_FLIGHT = 1
    STORED = 2


_WANTED_RUN = re.compile(bytes([Cell.WANTED]) + b"+")

Places: TypeAlias = tuple[tuple[int, int], ...]
"""Cells as runs [start, stop), ascending, none touching the next."""


@dataclass
class _Row:
    """The cells of one kind and layer: units from `first` on, one cell each; of STATE all positions in one cell."""

    kind: RangeKind
    layer: int
    first: int
    count: int
    base: int
    unit_bytes: int
    num_cells: int = 1


class Coverage:
    """The cells of one transfer."""

    def __init__(self, geometry: SegmentGeometry, length: int, held_blocks: int) -> None:
        self._geometry = geometry
        self._length = length
        self._rows: dict[tuple[RangeKind, int], _Row] = {}
        num_cells = 0
        rows = geometry.expected(length, held_blocks)
        for whole in rows:
            state = whole.kind is RangeKind.STATE
            unit = whole if state else SegmentRange(whole.kind, whole.layer_first, 1, whole.first, 1)
            unit_bytes = geometry.payload_bytes((unit,), length)
            row = _Row(whole.kind, whole.layer_first, whole.first, whole.count, num_cells, unit_bytes)
            row.num_cells = 1 if state else whole.count
            assert (row.kind, row.layer) not in self._rows
            self._rows[row.kind, row.layer] = row
            num_cells += row.num_cells
        self._cells = bytearray(num_cells)
        self._asked = bytearray(num_cells)
        self._stored_bytes = 0
        self._wanted_bytes = payload_bytes(geometry, rows, length)

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def num_stored(self) -> int:
        return self._cells.count(Cell.STORED)

    @property
    def full(self) -> bool:
        """Every cell is stored, and the bytes stored are those that the length implies."""
        return self.num_stored == len(self._cells) and self._stored_bytes == self._wanted_bytes

    @property
    def stored_bytes(self) -> int:
        return self._stored_bytes

    def places(self, index: Sequence[SegmentRange], payload: int) -> Places:
        """The cells that an announced index of so many payload bytes names.

        Raises:
            PeerFault: something that was never asked for, twice the same, or bytes of another number.
        """
        check_bounds(index, self._length, MAX_INDEX_RANGES)
        runs: list[tuple[int, int]] = []
        cell_bytes = 0
        for piece in index:
            for layer in range(piece.layer_first, piece.layer_first + piece.layer_count):
                row = self._rows.get((piece.kind, layer))
                if row is None:
                    # A layer that holds nothing of this kind, or a kind that is not wanted: the bytes tell.
                    continue
                start = row.base + self._offset(row, piece)
                stop = start + (1 if row.kind is RangeKind.STATE else piece.count)
                runs.append((start, stop))
                cell_bytes += (stop - start) * row.unit_bytes
        try:
            index_bytes = self._geometry.payload_bytes(index, self._length)
        except LayoutError as error:
            raise PeerFault(f"index cannot exist: {error}") from error
        if not index_bytes == cell_bytes == payload:
            raise PeerFault(f"{payload} bytes announced for {index_bytes}, of which {cell_bytes} are wanted")
        return _join_runs(runs)

    def _offset(self, row: _Row, piece: SegmentRange) -> int:
        """Of the piece's first cell in its row."""
        if row.kind is RangeKind.STATE:
            if piece.first > row.first or piece.first + piece.count != row.first + row.count:
                raise PeerFault(f"never asked for {piece}")
            return 0
        if piece.first < row.first or piece.first + piece.count > row.first + row.count:
            raise PeerFault(f"never asked for {piece}")
        return piece.first - row.first

    def wanted(self, places: Places) -> bool:
        """None of these cells is stored or in flight."""
        return not any(any(self._cells[start:stop]) for start, stop in places)

    def take_off(self, places: Places) -> None:
        """A READ for these cells is queued or runs."""
        self._set(places, Cell.WANTED, Cell.IN_FLIGHT)

    def store(self, places: Places, stored_bytes: int) -> None:
        """Bytes with the announced digest lie in the pages."""
        self._set(places, Cell.IN_FLIGHT, Cell.STORED)
        self._stored_bytes += stored_bytes

    def put_back(self, places: Places) -> None:
        """The bytes were refused: wanted again."""
        self._set(places, Cell.IN_FLIGHT, Cell.WANTED)

    def _set(self, places: Places, before: Cell, after: Cell) -> None:
        for start, stop in places:
            assert self._cells[start:stop].count(before) == stop - start
            self._cells[start:stop] = bytes([after]) * (stop - start)

    def ask(self, places: Places) -> int:
        """Count that these cells are asked for again; how often the most asked one has been."""
        most = 0
        for start, stop in places:
            for place in range(start, stop):
                self._asked[place] = min(self._asked[place] + 1, 255)
            most = max(most, *self._asked[start:stop])
        return most

    def missing(self) -> Places:
        """Cells that are neither stored nor in flight."""
        return tuple(found.span() for found in _WANTED_RUN.finditer(self._cells))

    def ranges(self, places: Places) -> tuple[SegmentRange, ...]:
        """These cells as ranges of one layer each."""
        found: list[SegmentRange] = []
        for row in self._rows.values():
            for start, stop in places:
                first, end = max(start, row.base), min(stop, row.base + row.num_cells)
                if first >= end:
                    continue
                if row.kind is RangeKind.STATE:
                    found.append(SegmentRange(row.kind, row.layer, 1, row.first, row.count))
                else:
                    found.append(SegmentRange(row.kind, row.layer, 1, row.first + first - row.base, end - first))
        return tuple(found)


def _join_runs(runs: list[tuple[int, int]]) -> Places:
    """Ascending and joined.

    Raises:
        PeerFault: two of them overlap.
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(runs):
        if joined and start < joined[-1][1]:
            raise PeerFault("index names a range twice")
        if joined and start == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)


def payload_bytes(geometry: SegmentGeometry, ranges: Sequence[SegmentRange], length: int) -> int:
    """Bytes of any number of ranges; a geometry counts no more at once than a segment may have."""
    return sum(geometry.payload_bytes(ranges[first : first + 32], length) for first in range(0, len(ranges), 32))


def num_finest(rows: Sequence[SegmentRange]) -> int:
    """Finest ranges in what a geometry expects."""
    return sum(1 if row.kind is RangeKind.STATE else row.count for row in rows)


def check_bounds(ranges: Sequence[SegmentRange], length: int, max_ranges: int) -> None:
    """Bound what ranges from a peer may name before anything is computed from them (I10).

    Raises:
        PeerFault: too many, empty, or beyond the sequence.
    """
    if not 0 < len(ranges) <= max_ranges:
        raise PeerFault(f"{len(ranges)} ranges")
    for piece in ranges:
        unit = {RangeKind.HISTORY: BLOCK_TOKENS, RangeKind.WINDOW: WINDOW_PAGE_TOKENS, RangeKind.STATE: 1}[piece.kind]
        if piece.count < 1 or piece.layer_count < 1 or piece.first < 0 or piece.layer_first < 0:
            raise PeerFault(f"empty range {piece}")
        if piece.layer_first + piece.layer_count > MAX_LAYERS or (piece.first + piece.count - 1) * unit >= length:
            raise PeerFault(f"range beyond the sequence: {piece}")


def join_units(fine: Sequence[SegmentRange]) -> tuple[SegmentRange, ...]:
    """Join sorted ranges of one kind and layer whose units follow each other."""
    joined: list[SegmentRange] = []
    for piece in fine:
        last = joined[-1] if joined else None
        if (
            last is not None
            and piece.kind is not RangeKind.STATE
            and (last.kind, last.layer_first, last.layer_count) == (piece.kind, piece.layer_first, piece.layer_count)
            and last.first + last.count == piece.first
        ):
            joined[-1] = SegmentRange(
                last.kind, last.layer_first, last.layer_count, last.first, last.count + piece.count
            )
        else:
            joined.append(piece)
    return tuple(joined)
