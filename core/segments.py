"""Segments: the pieces in which a sequence's cache travels, named by logical position, never by address.

A range names what its bytes mean: kind, layers, and blocks, pages or token positions. Both ends derive addresses from
their own page tables, so nothing that arrived decides where anything is written.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class RangeKind(IntEnum):
    """What a range of a segment holds. The numbers are wire format."""

    HISTORY = 1
    """History layer pages of `count` blocks from block `first`."""
    WINDOW = 2
    """Window layer pages of `count` 64-token pages from page `first` (page = position // 64)."""
    STATE = 3
    """Compressor rows of `count` positions from position `first`, those of them that the layer's class keeps at the
    sequence's length."""


@dataclass(frozen=True, order=True)
class SegmentRange:
    """One range: `kind`, layers [layer_first, layer_first + layer_count), units [first, first + count)."""

    kind: RangeKind
    layer_first: int
    layer_count: int
    first: int
    count: int


def index_digest(ranges: Sequence[SegmentRange]) -> int:
    """64 bit digest of which ranges a segment holds, in order: what the payload's digest does not cover."""
    packed = b"".join(struct.pack("<5I", r.kind, r.layer_first, r.layer_count, r.first, r.count) for r in ranges)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little")


class SegmentGeometry(Protocol):
    """Sizes and duties of ranges, known from the cache layout alone. Both ends compute them for themselves."""

    def payload_bytes(self, ranges: Sequence[SegmentRange], length: int) -> int:
        """Bytes of these ranges for a sequence of `length` tokens; raises LayoutError if a range cannot exist."""
        ...

    def history_segments(self, first_block: int, num_blocks: int, max_bytes: int) -> list[tuple[SegmentRange, ...]]:
        """Cut whole blocks into segments of at most `max_bytes` by layer group and block, in order of announcement."""
        ...

    def tail_segments(self, length: int, max_bytes: int) -> list[tuple[SegmentRange, ...]]:
        """Partial last block (if any), window pages and compressor rows of a sequence of `length` tokens."""
        ...

    def expected(self, length: int, held_blocks: int) -> tuple[SegmentRange, ...]:
        """All of what must be stored before a taker that holds `held_blocks` may use the sequence: one range for each
        kind and layer that has any of it, ascending. Its finest parts are units of HISTORY and WINDOW, and a STATE
        range as a whole."""
        ...

    def split(self, ranges: Sequence[SegmentRange]) -> frozenset[SegmentRange]:
        """The finest ranges that `ranges` cover: one layer and one unit each (STATE: one layer, all its positions)."""
        ...


class SegmentMover(Protocol):
    """Moves segments between a sequence's pages and a buffer, digesting in the same pass. Releases the GIL."""

    def gather(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        """Copy from pages into the buffer; the 64 bit digest of what was written there."""
        ...

    def scatter(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        """Copy from the buffer into pages; the 64 bit digest of the very bytes stored."""
        ...
