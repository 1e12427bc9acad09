"""Segments of pools on a GPU: buffers there, and the copies between pages and buffers by one kernel each.

Gathers and scatters have a stream and a staging area each, so that one thread may gather while another scatters. A call
returns when its copy has ended on the device and the digest is known; the GIL is free while it waits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ..core.errors import LayoutError
from ..core.segments import SegmentRange
from ..kernels import segment_copy
from ..kernels.cuda.page_move import GRAIN_BYTES, move_pieces
from .layout import CacheLayout
from .pools import CachePools
from .segments import Int64Array, SegmentRuns

DIGEST_MASK = (1 << 64) - 1


class DeviceMemory:
    """Transfer buffers in a GPU's memory (`transfer.buffers.BufferMemory`): one plain allocation, zeroed."""

    def __init__(self, num_buffers: int, stride: int, device: torch.device) -> None:
        self.num_buffers = num_buffers
        self.stride = stride
        self.device = f"cuda:{device.index or 0}"
        self.descriptor: int | None = None
        self._storage = torch.zeros(num_buffers * stride, dtype=torch.uint8, device=device)
        self._stream = torch.cuda.Stream(device)
        self.base_address = self._storage.data_ptr()
        torch.cuda.synchronize(device)

    def read(self, index: int, offset: int, num_bytes: int) -> bytes:
        assert 0 <= offset <= self.stride - num_bytes
        start = index * self.stride + offset
        with torch.cuda.stream(self._stream):
            return self._storage[start : start + num_bytes].cpu().numpy().tobytes()

    def write(self, index: int, offset: int, data: bytes) -> None:
        assert 0 <= offset <= self.stride - len(data)
        start = index * self.stride + offset
        with torch.cuda.stream(self._stream):
            self._storage[start : start + len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            # Whoever hears of it next reads it from another process.
            self._stream.synchronize()


class DeviceMover:
    """Copies segments between the pages of this process's pools and buffers on the same GPU
    (`core.segments.SegmentMover`). Digests equal those of the CPU's mover."""

    def __init__(self, layout: CacheLayout, pools: CachePools) -> None:
        if pools.device.type != "cuda":
            raise LayoutError("pools on the CPU have the CPU's mover")
        self.segments = SegmentRuns(layout, pools.specs())
        self.geometry = self.segments.geometry
        self._gathers, self._scatters = _Lane(pools.device), _Lane(pools.device)

    def gather(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        """Copy from pages into the buffer; digest of index and payload.

        Raises:
            LayoutError: a range that the sequence does not have, or without a page.
        """
        addresses, lengths = self.segments.resolve(pages, ranges, length)
        offsets = _offsets(lengths)
        payload = self._gathers.move(addresses, buffer_address + offsets, offsets, lengths)
        return segment_copy.segment_digest(segment_copy.mix_index(ranges, length), payload)

    def scatter(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        """Copy from the buffer into pages; digest of index and the very bytes stored. Raises as `gather`."""
        addresses, lengths = self.segments.resolve(pages, ranges, length)
        offsets = _offsets(lengths)
        payload = self._scatters.move(buffer_address + offsets, addresses, offsets, lengths)
        return segment_copy.segment_digest(segment_copy.mix_index(ranges, length), payload)


class _Lane:
    """A stream, a table of pieces that the kernel reads from pinned memory, and the way back for digests."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pieces = torch.empty(64, 4, dtype=torch.int64, pin_memory=True)
        self._digest = torch.zeros(1, dtype=torch.int64, device=device)
        self._told = torch.zeros(1, dtype=torch.int64, pin_memory=True)

    def move(self, source: Int64Array, target: Int64Array, offsets: Int64Array, lengths: Int64Array) -> int:
        """Copy all runs; the payload's digest."""
        count = len(lengths)
        if count > len(self._pieces):
            self._pieces = torch.empty(2 * count, 4, dtype=torch.int64, pin_memory=True)
        table = self._pieces[:count].numpy()
        table[:, 0], table[:, 1], table[:, 2], table[:, 3] = source, target, offsets, lengths
        assert not (table % GRAIN_BYTES).any(), "pages and buffers are aligned to what one load takes"
        before = int(self._told)
        with torch.cuda.stream(self._stream):
            move_pieces(self._pieces[:count], self._digest, max_bytes=int(lengths.max()))
            self._told.copy_(self._digest, non_blocking=True)
            self._stream.synchronize()
        # The kernel adds to what earlier payloads left: one launch less than beginning at zero.
        return (int(self._told) - before) & DIGEST_MASK


def _offsets(lengths: Int64Array) -> Int64Array:
    """Where each run begins in the payload."""
    return np.cumsum(lengths) - lengths
