"""The doubly stochastic mix of hyper-connections, forward and backward, each in one launch on a GPU.

The plain version is the definition; the kernels keep a token's 4x4 in registers through all rounds, and go back
through them from the sums that the forward pass left (a round only divides, so it can be undone by multiplying).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 64


def plain(logits_TMM: Tensor, rounds: int, eps: float) -> Tensor:
    """[T, 4 old, 4 new] logits -> the mix: softmax of rows, then columns and rows normed in turn."""
    m = logits_TMM.softmax(-1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


if triton is not None:

    @triton.jit
    def _forward(x_ptr, y_ptr, sums_ptr, total, rounds, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
        """sums: [2 * rounds - 1, T, 4], each with eps added."""
        tokens = tl.program_id(0) * block + tl.arange(0, block)
        column = tl.arange(0, 4)
        mask = (tokens < total)[:, None]
        at = tokens[:, None] * 16 + column[None, :]
        a = tl.load(x_ptr + at, mask=mask, other=0.0)
        b = tl.load(x_ptr + at + 4, mask=mask, other=0.0)
        c = tl.load(x_ptr + at + 8, mask=mask, other=0.0)
        d = tl.load(x_ptr + at + 12, mask=mask, other=0.0)
        a = tl.exp(a - tl.max(a, 1)[:, None])
        b = tl.exp(b - tl.max(b, 1)[:, None])
        c = tl.exp(c - tl.max(c, 1)[:, None])
        d = tl.exp(d - tl.max(d, 1)[:, None])
        a = a / tl.sum(a, 1)[:, None] + eps
        b = b / tl.sum(b, 1)[:, None] + eps
        c = c / tl.sum(c, 1)[:, None] + eps
        d = d / tl.sum(d, 1)[:, None] + eps
        s = a + b + c + d + eps
        here = sums_ptr + tokens[:, None] * 4 + column[None, :]
        row = sums_ptr + tokens * 4
        flat = tokens < total
        tl.store(here, s, mask=mask)
        a, b, c, d = a / s, b / s, c / s, d / s
        for i in range(1, rounds):
            step = (2 * i - 1) * total * 4
            ra, rb = tl.sum(a, 1) + eps, tl.sum(b, 1) + eps
            rc, rd = tl.sum(c, 1) + eps, tl.sum(d, 1) + eps
            tl.store(row + step, ra, mask=flat)
            tl.store(row + step + 1, rb, mask=flat)
            tl.store(row + step + 2, rc, mask=flat)
            tl.store(row + step + 3, rd, mask=flat)
            a, b, c, d = a / ra[:, None], b / rb[:, None], c / rc[:, None], d / rd[:, None]
            s = a + b + c + d + eps
            tl.store(here + step + total * 4, s, mask=mask)
            a, b, c, d = a / s, b / s, c / s, d / s
        tl.store(y_ptr + at, a, mask=mask)
        tl.store(y_ptr + at + 4, b, mask=mask)
        tl.store(y_ptr + at + 8, c, mask=mask)
        tl.store(y_ptr + at + 12, d, mask=mask)

    @triton.jit
    def _backward(y_ptr, gy_ptr, sums_ptr, gx_ptr, total, rounds, eps, block: tl.constexpr):  # type: ignore[no-untyped-def]
        tokens = tl.program_id(0) * block + tl.arange(0, block)
        column = tl.arange(0, 4)
        flat = tokens < total
        mask = flat[:, None]
        at = tokens[:, None] * 16 + column[None, :]
        a = tl.load(y_ptr + at, mask=mask, other=0.25)
        b = tl.load(y_ptr + at + 4, mask=mask, other=0.25)
        c = tl.load(y_ptr + at + 8, mask=mask, other=0.25)
        d = tl.load(y_ptr + at + 12, mask=mask, other=0.25)
        ga = tl.load(gy_ptr + at, mask=mask, other=0.0)
        gb = tl.load(gy_ptr + at + 4, mask=mask, other=0.0)
        gc = tl.load(gy_ptr + at + 8, mask=mask, other=0.0)
        gd = tl.load(gy_ptr + at + 12, mask=mask, other=0.0)
        here = sums_ptr + tokens[:, None] * 4 + column[None, :]
        row = sums_ptr + tokens * 4
        for back in range(1, rounds):
            step = (2 * (rounds - back) - 1) * total * 4
            s = tl.load(here + step + total * 4, mask=mask, other=1.0)
            dot = ga * a + gb * b + gc * c + gd * d
            ga, gb, gc, gd = (ga - dot) / s, (gb - dot) / s, (gc - dot) / s, (gd - dot) / s
            a, b, c, d = a * s, b * s, c * s, d * s
            ra = tl.load(row + step, mask=flat, other=1.0)[:, None]
            rb = tl.load(row + step + 1, mask=flat, other=1.0)[:, None]
            rc = tl.load(row + step + 2, mask=flat, other=1.0)[:, None]
            rd = tl.load(row + step + 3, mask=flat, other=1.0)[:, None]
            ga = (ga - tl.sum(ga * a, 1)[:, None]) / ra
            gb = (gb - tl.sum(gb * b, 1)[:, None]) / rb
            gc = (gc - tl.sum(gc * c, 1)[:, None]) / rc
            gd = (gd - tl.sum(gd * d, 1)[:, None]) / rd
            a, b, c, d = a * ra, b * rb, c * rc, d * rd
        s = tl.load(here, mask=mask, other=1.0)
        dot = ga * a + gb * b + gc * c + gd * d
        ga, gb, gc, gd = (ga - dot) / s, (gb - dot) / s, (gc - dot) / s, (gd - dot) / s
        a, b, c, d = a * s - eps, b * s - eps, c * s - eps, d * s - eps
        tl.store(gx_ptr + at, a * (ga - tl.sum(ga * a, 1)[:, None]), mask=mask)
        tl.store(gx_ptr + at + 4, b * (gb - tl.sum(gb * b, 1)[:, None]), mask=mask)
        tl.store(gx_ptr + at + 8, c * (gc - tl.sum(gc * c, 1)[:, None]), mask=mask)
        tl.store(gx_ptr + at + 12, d * (gd - tl.sum(gd * d, 1)[:, None]), mask=mask)


class Sinkhorn(torch.autograd.Function):
    """`plain` by kernels."""

    @staticmethod
    def forward(ctx: Any, logits_TMM: Tensor, rounds: int, eps: float) -> Tensor:
        x = logits_TMM.contiguous()
        total = x.shape[0]
        y, sums = torch.empty_like(x), x.new_empty(2 * rounds - 1, total, 4)
        _forward[(triton.cdiv(total, BLOCK),)](x, y, sums, total, rounds, eps, block=BLOCK)
        ctx.save_for_backward(y, sums)
        ctx.rounds, ctx.eps = rounds, eps
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        y, sums = ctx.saved_tensors
        grad, total = grads[0].contiguous(), y.shape[0]
        out = torch.empty_like(y)
        _backward[(triton.cdiv(total, BLOCK),)](y, grad, sums, out, total, ctx.rounds, ctx.eps, block=BLOCK)
        return out, None, None


def sinkhorn(logits_TMM: Tensor, rounds: int, eps: float) -> Tensor:
    """By kernels where there is a GPU."""
    if triton is not None and logits_TMM.is_cuda:
        mixed: Tensor = Sinkhorn.apply(logits_TMM, rounds, eps)
        return mixed
    return plain(logits_TMM, rounds, eps)
