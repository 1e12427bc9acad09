"""Products of a few wide layers [BI]: y = x W^T with bf16 factors and fp32 sums, in Triton.

A row's sum runs over the depth in one order, whatever tile it lies in, so its bits do not depend on how many rows there
are. `split` cuts the depth into equal parts that are summed apart; it is part of what a weight is, never of the batch.
Shape letters: T rows, K depth, N columns, G groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """How a product is cut; no bit depends on it."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


def tile_of(rows: int, columns: int, depth: int) -> Tile:
    """Few rows are bound by the weights' bytes: narrow tiles, so that all multiprocessors read."""
    if depth < 128:
        return Tile(64, 32, 32, 4, 3)
    if rows <= 64:
        return FEW_ROWS.get((columns, depth), Tile(64, 32, 128, 4, 4))
    if rows <= 256:
        return Tile(64, 64, 128, 4, 4)
    if rows <= 1024:
        return Tile(128, 128, 64, 8, 3)
    return MANY_ROWS


FEW_ROWS: dict[tuple[int, int], Tile] = {}
"""By columns and depth: V4-Flash's shapes, as measured by `benchmarks/layers.py --tune`."""
MANY_ROWS = Tile(128, 256, 64, 8, 3)


def split_of(columns: int, depth: int) -> int:
    """Parts of a product with so few columns that tiles of them would leave most of the card idle."""
    return 8 if columns <= 512 and depth >= 2048 else 1


def linear(x_TK: Tensor, w_NK: Tensor, out: torch.dtype, *, split: int = 1, tile: Tile | None = None) -> Tensor:
    """Launches on the current stream.

    Args:
        x_TK: stride(1) = 1. w_NK: contiguous, of x's dtype.
    Returns:
        [T, N] of `out`; with a split [split, T, N], to be summed in order by whoever reads it.
    """
    assert x_TK.stride(1) == 1
    assert w_NK.is_contiguous()
    (t, k), n = x_TK.shape, w_NK.shape[0]
    y = torch.empty((split, t, n) if split > 1 else (t, n), dtype=out, device=x_TK.device)
    _launch(x_TK, w_NK, y, t, n, k, 1, split, (x_TK.stride(0), 0, 0, n, 0, t * n), tile)
    return y


def linear_groups(x_TGK: Tensor, w_GNK: Tensor, out: torch.dtype, *, tile: Tile | None = None) -> Tensor:
    """Each group's columns by its own weight -> [T, G * N]. x_TGK: stride(2) = 1; w_GNK: contiguous."""
    assert x_TGK.stride(2) == 1
    assert w_GNK.is_contiguous()
    t, g, k = x_TGK.shape
    n = w_GNK.shape[1]
    y = torch.empty(t, g * n, dtype=out, device=x_TGK.device)
    _launch(x_TGK, w_GNK, y, t, n, k, g, 1, (x_TGK.stride(0), x_TGK.stride(1), n * k, g * n, n, 0), tile)
    return y


def _launch(
    x: Tensor, w: Tensor, y: Tensor, t: int, n: int, k: int, groups: int, split: int, strides: tuple[int, ...],
    tile: Tile | None,
) -> None:  # fmt: skip
    from . import triton_source

    assert x.dtype == w.dtype
    if t == 0:
        return
    own = tile or tile_of(t, n, k)
    grid = (-(-t // own.m) * -(-n // own.n), groups * split)
    triton_source.linear[grid](
        x, w, y, t, n, k, *strides,
        BLOCK_M=own.m, BLOCK_N=own.n, BLOCK_K=own.k, SPLIT=split, EVEN_K=k % (own.k * split) == 0, GROUP_M=8,
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
