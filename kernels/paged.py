"""Where one layer's stream lies inside a pool: all that a kernel needs to know of paging."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PagedEntries:
    """Entries of one stream of one layer; slot = page id * entries_per_page + index in the page."""

    storage: Tensor
    """uint8 [num_pages, page_bytes]: the whole pool."""
    offset: int
    """Of this layer's page inside a page, in bytes."""
    entries_per_page: int
    format: int
    """`entry_format.EntryFormat`."""

    @property
    def base_address(self) -> int:
        return self.storage.data_ptr() + self.offset


@dataclass(frozen=True)
class StateRing:
    """Rolling compressor rows of one layer, fp32 kv[columns] | score[columns]; the row of token t is t % ring_rows."""

    storage: Tensor
    """uint8 [num_rows, page_bytes]: the whole state pool."""
    offset: int
    ring_rows: int
    columns: int

    @property
    def base_address(self) -> int:
        return self.storage.data_ptr() + self.offset

    @property
    def row_bytes(self) -> int:
        return self.columns * 8
