"""Small operations on rows [BI], in Triton: norms, streams of any width, rotation back, the likeliest token.

`streams` is K7 for widths that `mhc.py` does not take, where the mathematics stands; `streams_head` is the streams' sum
before the last norm. Shape letters: T tokens, N = 4 streams, D hidden, Q query rank, H heads, R rows of logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..device import After
from .experts import power_of_two


def norm_pair(x_TC: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float, out: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two norms of one row: its first Q columns and the 512 after them, rounded to `out` before and after.

    Args:
        x_TC: fp32, stride(1) = 1. Weights: fp32.
    Returns:
        [T, Q] and [T, 512] of `out`.
    """
    from . import triton_source

    t, rank = x_TC.shape[0], q_weight.shape[0]
    qr = torch.empty(t, rank, dtype=out, device=x_TC.device)
    kv = torch.empty(t, 512, dtype=out, device=x_TC.device)
    triton_source.norm_pair[(t,)](
        x_TC, x_TC.stride(0), q_weight, kv_weight, qr, kv, rank, eps,
        ROUND=out == torch.bfloat16, RANK=power_of_two(rank), WIDTH=512, num_warps=4,
    )  # fmt: skip
    return qr, kv


def streams(
    streams_TND: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight_D: Tensor, after: After | None, *,
    rounds: int, eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As `mhc.hyper_connect`, for any D that fits a multiprocessor's registers; all tensors contiguous.

    Returns:
        streams (new ones, if `after` is given), layer input [T, D], post [T, 4], comb [T, 4, 4].
    """
    from . import triton_source

    t, _, d = streams_TND.shape
    device = streams_TND.device
    mixed = streams_TND if after is None else torch.empty_like(streams_TND)
    layer_in = torch.empty(t, d, dtype=streams_TND.dtype, device=device)
    post, comb = torch.empty(t, 4, device=device), torch.empty(t, 4, 4, device=device)
    triton_source.streams_any[(t,)](
        streams_TND, *(after or (streams_TND, post, comb)), fn, base, scale, weight_D, mixed, layer_in, post, comb,
        d, eps, norm_eps, rounds,
        AFTER=after is not None, ROUND=streams_TND.dtype == torch.bfloat16, BLOCK=power_of_two(d), num_warps=4,
    )  # fmt: skip
    return mixed, layer_in, post, comb


def streams_head(
    streams_TND: Tensor, after: After, rows_R: Tensor, fn: Tensor, base: Tensor, scale: Tensor, weight_D: Tensor, *,
    eps: float, norm_eps: float,
) -> Tensor:  # fmt: skip
    """Ends the last sub-layer for some rows, sums their streams and norms -> [R, D]."""
    from . import triton_source

    d = streams_TND.shape[2]
    out = torch.empty(rows_R.shape[0], d, dtype=streams_TND.dtype, device=streams_TND.device)
    triton_source.streams_head[(rows_R.shape[0],)](
        streams_TND, *after, rows_R, fn, base, scale, weight_D, out, d, eps, norm_eps,
        ROUND=streams_TND.dtype == torch.bfloat16, BLOCK=power_of_two(d), num_warps=8 if d > 1024 else 4,
    )  # fmt: skip
    return out


def turn_back(o_THD: Tensor, positions_T: Tensor, cos_sin: Tensor) -> None:
    """Rotates the last 64 channels of contiguous [T, H, 512] back by their position, in place."""
    from . import triton_source

    assert o_THD.is_contiguous()
    t, heads, _ = o_THD.shape
    block = min(16, power_of_two(heads))
    triton_source.turn_back[(t, -(-heads // block))](
        o_THD, positions_T, cos_sin, heads, BLOCK_H=block, num_warps=4
    )  # fmt: skip


def norm_rope_(q_THD: Tensor, positions_T: Tensor, cos_sin: Tensor, eps: float) -> None:
    """K2's q side in place: each head of [T, H, 512] normed without a weight, then rotated. stride(1) = 512."""
    from . import triton_source

    assert q_THD.stride()[1:] == (512, 1)
    t, heads, _ = q_THD.shape
    block = min(8, power_of_two(heads))
    triton_source.norm_rope[(t, -(-heads // block))](
        q_THD, q_THD.stride(0), positions_T, cos_sin, heads, eps, BLOCK_H=block, num_warps=4
    )


def likeliest(logits_RV: Tensor) -> Tensor:
    """The lowest id among the largest logits of each row, int32 [R]; -1 where one is NaN."""
    from . import triton_source

    found = torch.empty(logits_RV.shape[0], dtype=torch.int32, device=logits_RV.device)
    if found.numel():
        triton_source.likeliest[(found.numel(),)](
            logits_RV, logits_RV.stride(0), logits_RV.shape[1], found, BLOCK=4096, num_warps=8
        )
    return found
