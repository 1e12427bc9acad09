"""Views of `views.py` on another device, and sequences fed to a forward pass over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from support.views import NUM_PAGES, NUM_WINDOW_PAGES, make_views

from headrace.engine.plan import Slice, plan_batch
from headrace.kvcache.sequence import SequencePages
from headrace.model.batch import ForwardPass, LayerViews


def views_on(device: str, ratios: tuple[int, ...], kv_dtype: str = "fp8") -> list[LayerViews]:
    """Poisoned memory of each stream by itself."""

    def moved(view: LayerViews) -> LayerViews:
        parts = {}
        for field in dataclasses.fields(view):
            part = getattr(view, field.name)
            if part is not None:
                parts[field.name] = dataclasses.replace(part, storage=padded(part.storage).to(device))
        return LayerViews(**parts)

    return [moved(view) for view in make_views(ratios, kv_dtype)]


def padded(storage: torch.Tensor) -> torch.Tensor:
    """Pages as long as the offset table has them: kernels want a stride of whole 16 bytes."""
    size = -(-storage.shape[1] // 576) * 576
    return torch.nn.functional.pad(storage, (0, size - storage.shape[1]), value=255)


def pages_for(length: int, turn: int) -> SequencePages:
    """Scattered page ids; `turn` (0 or 1) keeps two sequences apart."""
    blocks, windows = -(-length // 256), -(-length // 64)
    return SequencePages(
        tuple((3 * b + 5 * turn + 1) % NUM_PAGES for b in range(blocks)),
        tuple((p, (7 * p + 12 * turn + 2) % NUM_WINDOW_PAGES) for p in range(windows)),
        turn + 1,
    )


def feed(
    model: ForwardPass, views: list[LayerViews], ids: Sequence[int], sizes: Sequence[int], turn: int = 0
) -> torch.Tensor:
    """Logits of every position on the host, fed in pieces of the given sizes, the last size repeating."""
    pages, at, rows, left = pages_for(len(ids), turn), 0, [], list(sizes)
    while at < len(ids):
        size = left.pop(0) if len(left) > 1 else left[0]
        piece = list(ids[at : at + size])
        batch = plan_batch([Slice(piece, at, pages, range(at, at + len(piece)))])
        rows.append(model.forward(batch, views).cpu())
        at += len(piece)
    return torch.cat(rows)
