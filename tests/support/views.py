"""Hand-made views: each layer's streams in poisoned memory of their own, without the offset table."""

import torch

from headrace.kernels.entry_format import EntryFormat, page_bytes
from headrace.kernels.paged import PagedEntries, StateRing
from headrace.model.batch import LayerViews

FORMATS = {
    "fp32": (EntryFormat.KV_FP32, EntryFormat.INDEX_FP32),
    "bf16": (EntryFormat.KV_BF16, EntryFormat.INDEX_BF16),
    "fp8": (EntryFormat.KV_FP8, EntryFormat.INDEX_FP4),
}
NUM_PAGES, NUM_WINDOW_PAGES, NUM_ROWS = 8, 24, 3


def poisoned(pages: int, size: int) -> torch.Tensor:
    """Free memory is loud: every stale read is a NaN."""
    return torch.full((pages, size), 0xFF, dtype=torch.uint8)


def make_views(ratios: tuple[int, ...], kv_dtype: str) -> list[LayerViews]:
    """Each layer's streams in memory of their own."""
    kv, index = FORMATS[kv_dtype]
    views = []
    for ratio in ratios:
        window = PagedEntries(poisoned(NUM_WINDOW_PAGES, page_bytes(kv, 64)), 0, 64, kv)
        if not ratio:
            views.append(LayerViews(window))
            continue
        per_page = 256 // ratio
        entries = PagedEntries(poisoned(NUM_PAGES, page_bytes(kv, per_page)), 0, per_page, kv)
        rows, columns = (16, 1024) if ratio == 4 else (128, 512)
        state = StateRing(poisoned(NUM_ROWS, rows * columns * 8), 0, rows, columns)
        keys = PagedEntries(poisoned(NUM_PAGES, page_bytes(index, 64)), 0, 64, index) if ratio == 4 else None
        ring = StateRing(poisoned(NUM_ROWS, 16 * 256 * 8), 0, 16, 256) if ratio == 4 else None
        views.append(LayerViews(window, entries, state, keys, ring))
    return views
