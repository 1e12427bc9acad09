"""Storage and views: no byte belongs to two, and the formats are the kernels' own."""

from __future__ import annotations

import pytest
import torch

from headrace.core.errors import LayoutError
from headrace.core.pools import PoolKind
from headrace.kernels.entry_format import EntryFormat, insert_entries, read_entries
from headrace.kvcache.layout import PRECISIONS, CacheLayout, CacheShape, Stream
from headrace.kvcache.pools import ENTRY_STREAMS, STATE_STREAMS, CachePools

SHAPE = CacheShape((0, 4, 128, 4, 128), mtp_layers=1)
PAGES = {PoolKind.HISTORY: 3, PoolKind.WINDOW: 4, PoolKind.STATE: 2, PoolKind.SNAPSHOT: 1}
SERVED = ("fp32", "bf16", "fp8")


def make_pools(kv_dtype: str, **options: object) -> CachePools:
    return CachePools(CacheLayout(SHAPE, kv_dtype), PAGES, **options)


@pytest.mark.parametrize("kv_dtype", SERVED)
def test_the_table_has_the_kernels_entry_sizes(kv_dtype):
    """The layout repeats the kernels' byte counts, so that it needs no torch; here they are held together."""
    for entry in PRECISIONS[kv_dtype]:
        entry_format = EntryFormat[entry.name.upper()]
        assert (entry.data_bytes, entry.scale_bytes) == (entry_format.data_bytes, entry_format.scale_bytes)


@pytest.mark.parametrize("kv_dtype", SERVED)
def test_real_pools_hold_exactly_the_tables_bytes(kv_dtype):
    """Specs, storage and table agree; pages are aligned."""
    pools = make_pools(kv_dtype)
    for spec in pools.specs():
        storage = pools.storage(spec.kind)
        assert spec.num_pages == PAGES[spec.kind]
        assert spec.page_bytes == pools.layout.pools[spec.kind].page_bytes == storage.stride(0)
        assert storage.numel() == spec.total_bytes
        assert spec.base_address == storage.data_ptr()
        assert spec.base_address % 64 == 0


@pytest.mark.parametrize("kv_dtype", SERVED)
def test_every_layer_stream_and_page_has_bytes_of_its_own(kv_dtype):
    """Another value in every (stream, layer, slot): all of them read back, so none lies on another."""
    pools = make_pools(kv_dtype)
    views, value = [], 0
    for stream in ENTRY_STREAMS:
        for layer in range(SHAPE.num_layers):
            if pools.layout.has(stream, layer):
                views.append(pools.view(stream, layer))
    written = []
    for view in views:
        num = view.entries_per_page * view.storage.shape[0]
        width = EntryFormat(view.format).width
        # Powers of two, in another channel for each entry, are exact in every format.
        rows = torch.zeros(num, width)
        for row in range(num):
            value += 1
            rows[row, value % 120] = 1.0
            rows[row, (value // 120) % 120 + 1] = -2.0 if value // 14400 else -4.0
        insert_entries(view, torch.arange(num), rows)
        written.append(rows)
    rings = []
    for stream in STATE_STREAMS:
        for layer in range(SHAPE.num_layers):
            if pools.layout.has(stream, layer):
                ring = pools.view(stream, layer)
                size = ring.ring_rows * ring.row_bytes
                part = ring.storage[:, ring.offset : ring.offset + size].view(torch.float32)
                part.copy_(torch.arange(part.numel()).view(part.shape) + 1e6 * len(rings))
                rings.append((part, part.clone()))
    for view, rows in zip(views, written, strict=True):
        assert torch.equal(read_entries(view, torch.arange(len(rows))), rows)
    for part, copy in rings:
        assert torch.equal(part, copy)


def test_freed_pages_read_as_nan_when_poisoned():
    """All pages at the start, and each page again when it is freed; only these."""
    pools = make_pools("bf16", poison=True)
    view = pools.entries(Stream.WINDOW, 0)
    assert read_entries(view, torch.tensor([70])).isnan().all()
    insert_entries(view, torch.tensor([70, 130]), torch.ones(2, 512))
    pools.poison_pages(PoolKind.WINDOW, [1])
    assert read_entries(view, torch.tensor([70])).isnan().all()
    assert (read_entries(view, torch.tensor([130])) == 1).all()
    assert (pools.storage(PoolKind.STATE) == 0xFF).all()


def test_poisoning_is_off_unless_asked_for():
    """It costs a write of each freed page."""
    pools = make_pools("bf16")
    insert_entries(pools.entries(Stream.WINDOW, 0), torch.tensor([70]), torch.ones(1, 512))
    pools.poison_pages(PoolKind.WINDOW, [1])
    assert (read_entries(pools.entries(Stream.WINDOW, 0), torch.tensor([70])) == 1).all()


def test_views_that_do_not_exist_are_refused():
    """A stream that the layer lacks, a ring asked for as entries, a format that no kernel writes."""
    pools = make_pools("fp8")
    for ask in (
        lambda: pools.view(Stream.C4A, 0),
        lambda: pools.entries(Stream.C4A_STATE, 1),
        lambda: pools.ring(Stream.C4A, 1),
        lambda: CachePools(CacheLayout(SHAPE, "fp8+fp8"), PAGES).view(Stream.INDEX, 1),
    ):
        with pytest.raises(LayoutError):
            ask()


def test_pools_beyond_two_gigabytes_are_addressed_right():
    """The last page of a pool of more than 2^31 bytes; the memory between is never touched."""
    layout = CacheLayout(CacheShape((4,)), "fp32")
    num = (1 << 31) // layout.pools[PoolKind.HISTORY].page_bytes + 10
    pools = CachePools(layout, {PoolKind.HISTORY: num})
    view = pools.entries(Stream.C4A, 0)
    slot = torch.tensor([(num - 1) * 64 + 63])
    insert_entries(view, slot, torch.full((1, 512), 3.0))
    assert (read_entries(view, slot) == 3).all()
    assert (pools.storage(PoolKind.HISTORY)[num - 1] != 0).any()
    assert not (pools.storage(PoolKind.HISTORY)[:2] != 0).any()
