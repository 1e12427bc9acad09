"""Segments on a GPU: the bytes and digests of the CPU mover, and buffers that a header can be put into."""

from __future__ import annotations

import pytest
import torch

from headrace.core.blocks import BLOCK_TOKENS
from headrace.core.pools import PoolKind
from headrace.kvcache.layout import CacheLayout, live_window
from headrace.kvcache.pools import CachePools
from headrace.kvcache.presets import PRESETS
from headrace.kvcache.segments import CacheMover
from headrace.kvcache.sequence import SequencePages

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

NUMBERS = {PoolKind.HISTORY: 12, PoolKind.WINDOW: 8, PoolKind.STATE: 2, PoolKind.SNAPSHOT: 1}


def make_pages(length: int) -> SequencePages:
    """Scattered page ids, so that a mistaken order shows."""
    blocks = -(-length // BLOCK_TOKENS)
    return SequencePages(
        tuple((7 * block + 3) % 12 for block in range(blocks)),
        tuple((page, (5 * page + 1) % 8) for page in live_window(length)),
        state_row=1,
    )


@pytest.mark.parametrize("kv_dtype", ["fp8", "bf16", "fp32"])
@pytest.mark.parametrize("length", [1, 255, 256, 700, 2561])
def test_device_segments_equal_those_of_the_cpu(kv_dtype: str, length: int) -> None:
    """Gather on both: one digest, one payload. Scatter into poisoned pools on the GPU: what a CPU scatter makes."""
    from headrace.kvcache.device_segments import DeviceMemory, DeviceMover

    layout = CacheLayout(PRESETS["deepseek-v4-flash"], kv_dtype)
    ours, theirs = CachePools(layout, NUMBERS, "cuda"), CachePools(layout, NUMBERS)
    for kind in NUMBERS:
        theirs.storage(kind).random_(0, 256)
        ours.storage(kind).copy_(theirs.storage(kind))
    device, host = DeviceMover(layout, ours), CacheMover(layout, theirs.specs())
    pages = make_pages(length)
    max_bytes = max(8 << 20, host.geometry.min_segment_bytes)
    segments = host.geometry.history_segments(0, length // BLOCK_TOKENS, max_bytes)
    segments += host.geometry.tail_segments(length, max_bytes)
    memory = DeviceMemory(2, max_bytes + 4096, torch.device("cuda", 0))
    copies = [CachePools(layout, NUMBERS, where, poison=True) for where in ("cuda", "cpu")]
    device_back, host_back = DeviceMover(layout, copies[0]), CacheMover(layout, copies[1].specs())
    for ranges in segments:
        size = host.geometry.payload_bytes(ranges, length)
        plain = torch.empty(size, dtype=torch.uint8)
        expected = host.gather(pages, ranges, length, plain.data_ptr())
        at = memory.base_address + memory.stride + 64
        assert device.gather(pages, ranges, length, at) == expected
        assert memory.read(1, 64, size) == plain.numpy().tobytes()
        assert device_back.scatter(pages, ranges, length, at) == expected
        assert host_back.scatter(pages, ranges, length, plain.data_ptr()) == expected
    for kind in NUMBERS:
        assert torch.equal(copies[0].storage(kind).cpu(), copies[1].storage(kind))


def test_device_memory_reads_what_was_written() -> None:
    """Headers go in and come out; buffers do not touch."""
    from headrace.kvcache.device_segments import DeviceMemory

    memory = DeviceMemory(3, 8192, torch.device("cuda", 0))
    assert memory.device == "cuda:0"
    assert memory.base_address % 256 == 0
    memory.write(1, 0, b"header")
    assert memory.read(1, 0, 6) == b"header"
    assert memory.read(0, 0, 8192) == memory.read(2, 0, 8192) == bytes(8192)
    with pytest.raises(AssertionError):
        memory.write(2, 8190, b"abc")
