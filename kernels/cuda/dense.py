"""Products of a few wide layers [BI]: y = x W^T with bf16 factors and fp32 sums, in Triton.

A row's sum runs over the depth in one order, whatever tile it lies in, so its bits do not depend on how many rows there
are. `split` cuts the depth into equal parts that are summed apart; it is part of what a weight is, never of the batch.
The library's kernels for many rows sum in that same order, unless they cut the depth: so rows go to it in pieces of few
sizes, each of which has been seen to give the same bits (`agrees`).
Shape letters: T rows, K depth, N columns, G groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
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
    """Few rows are bound by the bytes of the weights: tiles so narrow that all multiprocessors read, if they can.

    columns: of all groups.
    """
    if depth < 256:
        return Tile(64, 32, 32, 4, 3)
    if rows <= 64:
        if (columns, depth) in FEW_ROWS:
            return FEW_ROWS[columns, depth]
        if columns <= 32 * MULTIPROCESSORS:
            return Tile(64, 16 if columns <= 16 * MULTIPROCESSORS else 32, 256, 4, 4)
        return Tile(64, 64, 64, 4, 6)
    if rows <= 256:
        return Tile(64, 64, 128, 4, 4)
    if rows <= 1024:
        return Tile(128, 128, 64, 8, 4)
    return MANY_ROWS


MULTIPROCESSORS = 132
"""An H200's."""
FEW_ROWS: dict[tuple[int, int], Tile] = {}
"""By columns and depth, for who has measured better ones (`benchmarks/layers.py --tune`)."""
MANY_ROWS = Tile(256, 128, 64, 8, 3)


def split_of(columns: int, depth: int) -> int:
    """Parts of a product with so few columns that tiles of them would leave most of the card idle."""
    return 8 if columns <= 512 and depth >= 2048 else 1


PIECES = (8192, 4096, 2048, 1024, 512)
"""Of rows, that the library is given."""


@functools.cache
def agrees(rows: int, columns: int, depth: int, x_row: int, y_row: int, dtype: torch.dtype, out: torch.dtype) -> bool:
    """Whether the library's product of this shape, with these strides of rows, has the bits of `linear`.

    Waits for the device, once for each shape: `DeviceTransformer.warm` has the usual ones asked beforehand. What the
    library does depends on shapes and alignment alone, and millions of sums in another order would not all agree.
    """
    random = torch.Generator("cuda").manual_seed(rows)
    x = torch.empty(rows, x_row, dtype=dtype, device="cuda").normal_(generator=random)[:, :depth]
    w = torch.empty(columns, depth, dtype=dtype, device="cuda").normal_(generator=random)
    y = torch.empty(rows, y_row, dtype=out, device="cuda")[:, :columns]
    _library(x, w, y)
    return torch.equal(y, linear(x, w, out))


def _library(x_TK: Tensor, w_NK: Tensor, y_TN: Tensor) -> None:
    if y_TN.dtype == x_TK.dtype:
        torch.mm(x_TK, w_NK.t(), out=y_TN)
    else:
        torch.mm(x_TK, w_NK.t(), out_dtype=y_TN.dtype, out=y_TN)


def pieces_of(rows: int) -> Iterator[slice]:
    """Largest first; what is left over is for nobody."""
    row = 0
    for piece in PIECES:
        while rows - row >= piece:
            yield slice(row, row + piece)
            row += piece


def _by_library(x_TK: Tensor, w_NK: Tensor, y_TN: Tensor) -> int:
    """Computes as many of the first rows as may be, into y; how many."""
    done = 0
    if not x_TK.is_cuda or x_TK.dtype != torch.bfloat16 or any(a.data_ptr() % 256 for a in (x_TK, w_NK, y_TN)):
        return done
    (n, k), strides = w_NK.shape, (x_TK.stride(0), y_TN.stride(0))
    for at in pieces_of(x_TK.shape[0]):
        if not agrees(at.stop - at.start, n, k, *strides, x_TK.dtype, y_TN.dtype):
            break
        _library(x_TK[at], w_NK, y_TN[at])
        done = at.stop
    return done


def _by_either(x_TK: Tensor, w_NK: Tensor, y_TN: Tensor) -> None:
    """By the library as far as may be, what is left by our own kernel."""
    done = _by_library(x_TK, w_NK, y_TN)
    (t, k), n = x_TK[done:].shape, w_NK.shape[0]
    _launch(x_TK[done:], w_NK, y_TN[done:], t, n, k, 1, 1, (x_TK.stride(0), 0, 0, y_TN.stride(0), 0, 0), None)


def product(x_TK: Tensor, w_NK: Tensor, out: torch.dtype) -> Tensor:
    """`linear`, bit for bit, by whatever is faster."""
    assert x_TK.stride(1) == 1
    assert w_NK.is_contiguous()
    y = torch.empty(x_TK.shape[0], w_NK.shape[0], dtype=out, device=x_TK.device)
    _by_either(x_TK, w_NK, y)
    return y


def product_groups(x_TGK: Tensor, w_GNK: Tensor, out: torch.dtype) -> Tensor:
    """`linear_groups`, bit for bit, by whatever is faster."""
    assert x_TGK.stride(2) == 1
    assert w_GNK.is_contiguous()
    t, g, _ = x_TGK.shape
    n = w_GNK.shape[1]
    if t < PIECES[-1]:  # nothing for the library, so all groups at once
        return linear_groups(x_TGK, w_GNK, out)
    y = torch.empty(t, g * n, dtype=out, device=x_TGK.device)
    for group in range(g):
        _by_either(x_TGK[:, group], w_GNK[group], y[:, group * n : (group + 1) * n])
    return y


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
    own = tile or tile_of(t, n * groups, k)
    grid = (-(-t // own.m) * -(-n // own.n), groups * split)
    triton_source.linear[grid](
        x, w, y, t, n, k, *strides,
        BLOCK_M=own.m, BLOCK_N=own.n, BLOCK_K=own.k, SPLIT=split, EVEN_K=k % (own.k * split) == 0, GROUP_M=8,
        num_warps=own.warps, num_stages=own.stages,
    )  # fmt: skip
