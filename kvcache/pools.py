"""The bytes of the four pools on one device, and the views of them that kernels read and write.

Every view comes from the offset table and spans the whole pool, so a page id means the same in all layers. Pages are
found at base + id * page_bytes in 64-bit arithmetic. Knows storage; not who owns which page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..core.errors import LayoutError
from ..core.pools import PoolKind, PoolSpec
from ..kernels.entry_format import EntryFormat
from ..kernels.paged import PagedEntries, StateRing
from .layout import CacheLayout, Stream
from .shared_memory import SharedMemory

POISON = 0xFF
"""NaN in e4m3, bf16 and fp32: a stale read is loud."""

STATE_STREAMS = (Stream.C4A_STATE, Stream.C128A_STATE, Stream.INDEX_STATE)
ENTRY_STREAMS = (Stream.WINDOW, Stream.C4A, Stream.C128A, Stream.INDEX)


class CachePools:
    """Storage of all pools; sizes never change."""

    def __init__(
        self, layout: CacheLayout, num_pages: Mapping[PoolKind, int], device: str = "cpu", *, poison: bool = False
    ) -> None:
        """
        Args:
            poison: fill pages with 0xFF at the start and whenever `poison_pages` is told of them.
        """
        self.layout = layout
        self.device = torch.device(device)
        self.poison = poison
        self._storage: dict[PoolKind, Tensor] = {}
        self._shared: dict[PoolKind, SharedMemory] = {}
        for kind, pool in layout.pools.items():
            shape = (num_pages.get(kind, 0), pool.page_bytes)
            if self.device.type == "cpu":
                memory = self._shared[kind] = SharedMemory(shape[0] * shape[1])
                self._storage[kind] = torch.from_numpy(memory.bytes).view(shape)
            else:
                self._storage[kind] = torch.empty(shape, dtype=torch.uint8, device=self.device)
        if poison:
            for storage in self._storage.values():
                storage.fill_(POISON)

    def storage(self, kind: PoolKind) -> Tensor:
        """uint8 [num_pages, page_bytes]."""
        return self._storage[kind]

    def view(self, stream: Stream, layer: int) -> PagedEntries | StateRing:
        """One stream of one layer.

        Raises:
            LayoutError: the layer has no such stream, or no kernel knows its format.
        """
        return self.ring(stream, layer) if stream in STATE_STREAMS else self.entries(stream, layer)

    def entries(self, stream: Stream, layer: int) -> PagedEntries:
        """A window, c4a, c128a or index stream of one layer."""
        if stream not in ENTRY_STREAMS:
            raise LayoutError(f"{stream.value} holds no entries")
        region, name = self.layout.region(stream, layer), self.layout.entry(stream).name.upper()
        if name not in EntryFormat.__members__:
            raise LayoutError(f"no kernel writes {name} entries")
        return PagedEntries(self._storage[region.pool], region.offset, region.rows, EntryFormat[name])

    def ring(self, stream: Stream, layer: int) -> StateRing:
        """The compressor rows of one layer."""
        if stream not in STATE_STREAMS:
            raise LayoutError(f"{stream.value} is no ring")
        region = self.layout.region(stream, layer)
        return StateRing(self._storage[region.pool], region.offset, region.rows, self.layout.columns(stream))

    def specs(self) -> list[PoolSpec]:
        """The pools told without tensors."""
        return [
            PoolSpec(kind, storage.data_ptr(), self.layout.pools[kind].page_bytes, storage.shape[0], str(self.device))
            for kind, storage in self._storage.items()
        ]

    def descriptors(self) -> dict[PoolKind, int]:
        """File descriptors under which another process can map pools that lie in the CPU's memory. They stay ours."""
        return {kind: memory.descriptor for kind, memory in self._shared.items()}

    def poison_pages(self, kind: PoolKind, pages: Sequence[int]) -> None:
        """Make freed pages unreadable, if poisoning is on. The allocator's `on_free`."""
        if self.poison and pages:
            self._storage[kind][torch.tensor(pages, device=self.device)] = POISON
