"""What a pool of cache memory is, told without tensors: kinds, and where the bytes lie."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PoolKind(Enum):
    """The four pools; none overlays another."""

    HISTORY = "history"
    """A page is 256 tokens of compressed entries and indexer keys of every layer."""
    WINDOW = "window"
    """A page is 64 tokens of raw entries of every layer."""
    STATE = "state"
    """A page is one live request's compressor rings."""
    SNAPSHOT = "snapshot"
    """A page is the compressor overlap rows at one block border."""


@dataclass(frozen=True)
class PoolSpec:
    """One region of equal pages, for code that copies bytes and knows no tensors."""

    kind: PoolKind
    base_address: int
    page_bytes: int
    num_pages: int
    device: str

    @property
    def total_bytes(self) -> int:
        return self.page_bytes * self.num_pages
