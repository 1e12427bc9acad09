"""Number formats of the released checkpoint and of the cache: to bytes, and what a value becomes by going through them.

Everything here that training uses passes gradients straight through.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8_BLOCK, FP4_GROUP, ENTRY_BLOCK, ENTRY_BODY = 128, 32, 64, 448

FP8_LEAVES = ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")
"""Of attention, outside compressors."""


def power_of_two_from(x: Tensor) -> Tensor:
    """The smallest power of two >= x > 0, from the bits."""
    bits = x.float().view(torch.int32)
    return ((bits + 0x7FFFFF) & 0x7F800000).view(torch.float32)


def to_e2m1(x: Tensor) -> Tensor:
    """fp32 within +-6 to the nearest e2m1 value, ties to the even code."""
    size = x.abs()
    near = torch.where(
        size < 2, (size * 2).round() / 2, torch.where(size < 4, size.round(), (size / 2).round() * 2)
    ).clamp(max=6)
    return torch.copysign(near, x)


def _straight(x: Tensor, rounded: Tensor) -> Tensor:
    return x + (rounded.to(x.dtype) - x).detach()


def through_entry_fp8(x: Tensor) -> Tensor:
    """[..., 512]: the first 448 values through e4m3 with a power of two for each 64."""
    body = x[..., :ENTRY_BODY].float().unflatten(-1, (-1, ENTRY_BLOCK))
    scale = power_of_two_from(body.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)
    codes = (body / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float()
    rounded = torch.cat([(codes * scale).flatten(-2).to(x.dtype), x[..., ENTRY_BODY:]], -1)
    return _straight(x, rounded)


def through_fp4(x: Tensor) -> Tensor:
    """[..., n * 32] through e2m1 with a power of two for each 32."""
    groups = x.float().unflatten(-1, (-1, FP4_GROUP))
    scale = power_of_two_from(groups.abs().amax(-1, keepdim=True).clamp_min(6 * 2.0**-126) / 6)
    return _straight(x, (to_e2m1((groups / scale).clamp(-6, 6)) * scale).flatten(-2))


def through_fp8(w: Tensor) -> Tensor:
    """[..., out, in] through e4m3 with a power of two for each block of 128 x 128."""
    rows, columns = w.shape[-2:]
    padded = torch.nn.functional.pad(w.detach(), (0, -columns % FP8_BLOCK, 0, -rows % FP8_BLOCK))
    blocks = padded.unflatten(-1, (-1, FP8_BLOCK)).unflatten(-3, (-1, FP8_BLOCK))
    scale = power_of_two_from(blocks.abs().amax((-3, -1), keepdim=True).clamp_min(1e-4) / 448)
    codes = (blocks / scale).to(torch.float8_e4m3fn).float() * scale
    return _straight(w, codes.flatten(-4, -3).flatten(-2)[..., :rows, :columns])


def through_packing(name: str, w: Tensor) -> Tensor:
    """A parameter as the checkpoint will hold it; `name` as in `Network`."""
    if ".ffn.experts." in name:
        return through_fp4(w)
    if ".shared_experts." in name:
        if name.endswith("w13"):  # w1 and w3 are packed apart
            return torch.cat([through_fp8(half) for half in w.chunk(2, -2)], -2)
        return through_fp8(w)
    stem, _, leaf = name.removesuffix(".weight").rpartition(".")
    if leaf in FP8_LEAVES and not stem.endswith("compressor"):
        return through_fp8(w)
    kept_whole = w.ndim == 1 and not name.endswith("norm.weight")
    return w if kept_whole or "hc_" in name or leaf == "ape" else _straight(w, w.bfloat16().float())


def hadamard_matrix(size: int) -> Tensor:
    """Sylvester's, orthonormal."""
    rows = torch.ones(1, 1)
    while len(rows) < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return rows * size**-0.5
