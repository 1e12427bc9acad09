"""K1 for the indexer [BI], in Triton: its keys pooled, normed, rotated, turned by Hadamard, packed to fp4 and inserted;
and its queries rotated, turned, rounded to fp4 and given out in e4m3, as `indexer.index_logits` takes both.

A query's groups of 32 channels have scales of their own; the largest goes into the head's weight, the others are folded
into the codes, exact while they differ by at most 14 steps. Shape letters: T tokens, J heads, P pages of 64 keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .compressor import Step

POOLED, COLUMNS = 8, 256


def compress_keys(
    x_TC: Tensor, ape: Tensor, weight: Tensor, step: Step, state: Tensor, pages: Tensor, cos_sin: Tensor, *,
    max_tokens_a_sequence: int, eps: float,
) -> None:  # fmt: skip
    """Writes the keys that end in this step, and the state rows that later steps need; as `compressor.compress`.

    Args:
        x_TC: fp32 [T, 512], stride(1) = 1: values, then scores, 256 each. ape: fp32 [4, 256]. weight: [128].
        state: fp32 [R, ring rows, 512], contiguous from dimension 1 on. pages: uint8 [P, page stride]. cos_sin: fp32
            [positions, 64].
    """
    from . import triton_source

    together = max_tokens_a_sequence + POOLED - 1 <= state.shape[1]
    for pool, save in ((True, True),) if together else ((True, False), (False, True)):
        triton_source.index_keys[(x_TC.shape[0],)](
            x_TC, x_TC.stride(0), ape, weight, step.positions_T, step.first_row_T, step.last_row_T, step.ring_T,
            state, state.stride(0), state.shape[1], step.slots_T, pages, pages.stride(0), cos_sin, eps,
            POOL=pool, SAVE=save, num_warps=4,
        )  # fmt: skip


def quantise_queries(q_TC: Tensor, w_TJ: Tensor, positions_T: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """Queries for `index_logits`.

    Args:
        q_TC: bf16 [T, J * 128], stride(1) = 1, not rotated. w_TJ: fp32, stride(1) = 1, not scaled.
    Returns:
        e4m3 [T, 64, 128] and fp32 weights [T, 64]; heads past J are zero.
    """
    from . import triton_source

    (t, heads), device = w_TJ.shape, q_TC.device
    codes = torch.empty(t, 64, 128, dtype=torch.uint8, device=device)
    weights = torch.empty(t, 64, device=device)
    triton_source.index_queries[(t, 4)](
        q_TC, q_TC.stride(0), w_TJ, w_TJ.stride(0), positions_T, cos_sin, codes, weights, heads,
        128**-0.5 * heads**-0.5, HEADS=16, num_warps=4,
    )  # fmt: skip
    return codes.view(torch.float8_e4m3fn), weights
