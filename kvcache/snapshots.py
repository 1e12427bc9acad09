"""Copies between live compressor rows and snapshot rows, pages of forks, and blank pages for a replay.

At a block border a c4a layer needs the older half of its last four rows, of the main compressor and of the indexer's;
a c128a layer needs nothing. Knows bytes; which border, which row and why is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.pools import PoolKind
from .layout import OVERLAP_ROWS, CacheLayout, Region, Stream
from .pools import CachePools

PARTS = ((Stream.C4A_STATE, Stream.C4A_OVERLAP), (Stream.INDEX_STATE, Stream.INDEX_OVERLAP))
"""Ring, and what a snapshot keeps of it."""


class CheckPointCopier:
    """Over one engine's pools; in its thread, between two steps."""

    def __init__(self, layout: CacheLayout, pools: CachePools) -> None:
        self._pools = pools
        self._parts = [
            (layout.region(ring, layer), layout.region(overlap, layer), layout.columns(overlap))
            for layer in layout.shape.layers(4)
            for ring, overlap in PARTS
        ]

    def save(self, state_row: int, snapshot_row: int, border: int) -> None:
        """The rows that the next entry after `border` pools with its own."""
        for ring, overlap, half in self._parts:
            rows = _rows(self._pools, ring, state_row)
            _rows(self._pools, overlap, snapshot_row).copy_(rows[_slots(ring, border), :, :half])

    def restore(self, snapshot_row: int, state_row: int, border: int) -> None:
        """What `save` kept, into another sequence's rings; rows that nothing reads stay as they were."""
        for ring, overlap, half in self._parts:
            rows = _rows(self._pools, ring, state_row)
            rows[_slots(ring, border), :, :half] = _rows(self._pools, overlap, snapshot_row)

    def blank(self, state_row: int, window: Sequence[int]) -> None:
        """Zeros, which are finite in every format: a replay reads them where the truth is gone."""
        self._pools.storage(PoolKind.STATE)[state_row].zero_()
        for page in window:
            self._pools.storage(PoolKind.WINDOW)[page].zero_()

    def copy(self, kind: PoolKind, source: int, target: int) -> None:
        """A whole page, for a fork."""
        storage = self._pools.storage(kind)
        storage[target].copy_(storage[source])


def _rows(pools: CachePools, region: Region, page: int) -> Tensor:
    """fp32 [rows, 2 (kv, score), columns] of one page."""
    raw = pools.storage(region.pool)[page, region.offset : region.offset + region.rows * region.row_bytes]
    return raw.view(torch.float32).view(region.rows, 2, -1)


def _slots(ring: Region, border: int) -> list[int]:
    return [position % ring.rows for position in range(border - OVERLAP_ROWS, border)]
