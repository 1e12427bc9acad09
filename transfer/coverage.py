"""What a taker still lacks: one cell for each finest range of the sequence, from the geometry that both ends compute.

A cell goes WANTED -> IN_FLIGHT -> STORED, or back to WANTED when its bytes were refused. STORED is for good: a stored
range is never stored again. Knows ranges; not buffers, messages, addresses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import IntEnum

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import LayoutError
from ..core.peer import MAX_INDEX_RANGES, PeerFault
from ..core.segments import RangeKind, SegmentGeometry, SegmentRange

WINDOW_PAGE_TOKENS = 64
MAX_LAYERS = 4096


class Cell(IntEnum):
    WANTED = 0
    IN_FLIGHT = 1
    STORED = 2


class Coverage:
    """The cells of one transfer."""

    def __init__(self, geometry: SegmentGeometry, length: int, held_blocks: int) -> None:
        self._geometry = geometry
        self._length = length
        self._order = tuple(sorted(geometry.expected(length, held_blocks)))
        self._place = {fine: place for place, fine in enumerate(self._order)}
        self._cells = bytearray(len(self._order))
        self._asked = bytearray(len(self._order))
        self._stored_bytes = 0
        self._wanted_bytes = geometry.payload_bytes(self._order, length) if self._order else 0

    def __len__(self) -> int:
        return len(self._order)

    @property
    def num_stored(self) -> int:
        return self._cells.count(Cell.STORED)

    @property
    def full(self) -> bool:
        """Every cell is stored, and the bytes stored are those that the length implies."""
        return self.num_stored == len(self._order) and self._stored_bytes == self._wanted_bytes

    @property
    def stored_bytes(self) -> int:
        return self._stored_bytes

    def places(self, index: Sequence[SegmentRange]) -> tuple[int, ...]:
        """The cells that an announced index names.

        Raises:
            PeerFault: no such cells, or one of them twice.
        """
        check_bounds(index, self._length, MAX_INDEX_RANGES)
        try:
            fine = self._geometry.split(index)
            cells = sum(len(self._geometry.split((single,))) for single in index) if len(index) > 1 else len(fine)
        except LayoutError as error:
            raise PeerFault(f"index cannot exist: {error}") from error
        if cells != len(fine):
            raise PeerFault("index names a range twice")
        try:
            return tuple(sorted(self._place[single] for single in fine))
        except KeyError as error:
            raise PeerFault(f"never asked for {error.args[0]}") from error

    def wanted(self, places: Iterable[int]) -> bool:
        """None of these cells is stored or in flight."""
        return all(self._cells[place] == Cell.WANTED for place in places)

    def take_off(self, places: Iterable[int]) -> None:
        """A READ for these cells is queued or runs."""
        for place in places:
            assert self._cells[place] == Cell.WANTED
            self._cells[place] = Cell.IN_FLIGHT

    def store(self, places: Iterable[int], payload_bytes: int) -> None:
        """Bytes with the announced digest lie in the pages."""
        for place in places:
            assert self._cells[place] == Cell.IN_FLIGHT
            self._cells[place] = Cell.STORED
        self._stored_bytes += payload_bytes

    def put_back(self, places: Iterable[int]) -> None:
        """The bytes were refused: wanted again."""
        for place in places:
            assert self._cells[place] == Cell.IN_FLIGHT
            self._cells[place] = Cell.WANTED

    def ask(self, places: Iterable[int]) -> int:
        """Count that these cells are asked for again; how often the most asked one has been."""
        most = 0
        for place in places:
            self._asked[place] = min(self._asked[place] + 1, 255)
            most = max(most, self._asked[place])
        return most

    def missing(self) -> tuple[int, ...]:
        """Cells that are neither stored nor in flight."""
        return tuple(place for place, cell in enumerate(self._cells) if cell == Cell.WANTED)

    def ranges(self, places: Iterable[int]) -> tuple[SegmentRange, ...]:
        """These cells as ranges, neighbouring units of one layer joined."""
        return join_units([self._order[place] for place in sorted(places)])


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
