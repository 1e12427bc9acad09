"""K5: decode attention over two lists of paged 584-byte fp8 entries, with a sink [BI]; K2's and K3's ends fused on
request.

    z[h, i] = scale * q[h] . k[i]   over both lists, one softmax with maximum m
    out[h]  = sum_i exp(z - m) k[i] / (sum_i exp(z - m) + exp(sink[h] - m));   lse excludes the sink

Shape letters: B query tokens, H heads, W entries of a list, P pages, D = 512 channels (448 without position, 64
rotary).

A token's entries are cut into tiles of 64 and these dealt to the blocks of a cluster, whose sums are added in order. By
how many, its own number of tiles decides (`parts_of`), so a token's result does not depend on what else is in the batch
or the launch. Or `split` does, the same for all tokens; change it and the last bits change.

A launch of one block a token takes two where the card has room for both at once, each with half of the output's
channels: same bits, less time.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from . import build
from .arguments import box_strides, is_dense

NOPE, ROPE, GROUP, ROW_BYTES, ENTRY_BYTES = 448, 64, 64, 576, 584
SPLITS = (1, 2, 4, 5, 10)
TILE = 64
ONE_BLOCK, TWO_BLOCKS = 6, 12
"""Tiles that one block takes, and two; more are for four. c4a's ten are for two, which is best from 16 tokens on."""


@dataclass(frozen=True, kw_only=True)
class EntryList:
    """Entries that each token of the batch attends to, in one pool of pages."""

    pages: Tensor
    """uint8 [P, page stride], stride(1) = 1; a page is N rows of 576 bytes, then N scale rows of 8 (FlashMLA's
    MODEL1)."""
    page_entries: int
    """N, a power of two."""
    slots_BW: Tensor
    """int32 [B, W], page * N + position, stride(1) = 1; -1 is skipped, anything else that is no slot of the pool breaks
    its token."""
    lengths_B: Tensor
    """int32 [B]: how many of the W are in use; 0 is legal. Less than 0 or more than W: the list is broken. What a
    broken token gets is NaN."""


class _List(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("slots_stride", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("width", ctypes.c_int32),
        ("log2_entries", ctypes.c_int32),
    )


class _Params(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_stride_t", ctypes.c_int64),
        ("q_stride_h", ctypes.c_int64),
        ("list", _List * 2),
        ("sink", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride_t", ctypes.c_int64),
        ("out_stride_h", ctypes.c_int64),
        ("out8", ctypes.c_void_p),
        ("out8_stride_g", ctypes.c_int64),
        ("out8_stride_t", ctypes.c_int64),
        ("out8_scale", ctypes.c_void_p),
        ("scale_stride_g", ctypes.c_int64),
        ("scale_stride_c", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("heads", ctypes.c_int32),
        ("batch", ctypes.c_int32),
        ("raw_q", ctypes.c_int32),
        ("turn_out", ctypes.c_int32),
        ("by_tiles", ctypes.c_int32),
        ("tiles_of_one", ctypes.c_int32),
        ("tiles_of_two", ctypes.c_int32),
    )


def parts_of(tiles: int) -> int:
    """Blocks that share a token of so many tiles, where no split is given."""
    return 1 if tiles <= ONE_BLOCK else 2 if tiles <= TWO_BLOCKS else 4


def entry_slots(pages: Tensor, page_entries: int) -> int:
    """How many slots pages of 584-byte entries have; they are checked to be as `EntryList` says and kernels need."""
    assert page_entries & (page_entries - 1) == 0
    assert pages.dtype == torch.uint8
    assert pages.stride(1) == 1
    assert pages.stride(0) % 16 == pages.data_ptr() % 16 == 0
    assert pages.shape[1] >= page_entries * ENTRY_BYTES
    return pages.shape[0] * page_entries


def _list_of(entries: EntryList | None, tokens: int) -> _List:
    if entries is None:
        return _List()
    num_slots = entry_slots(entries.pages, entries.page_entries)
    assert entries.pages.shape[0] * entries.pages.stride(0) < 16 << 32  # places are 32 bits, in units of 16 bytes
    assert entries.slots_BW.dtype == torch.int32
    assert entries.slots_BW.shape[0] == tokens
    assert entries.slots_BW.stride(1) == 1 or entries.slots_BW.shape[1] <= 1
    assert is_dense(entries.lengths_B, torch.int32, tokens)
    return _List(
        pages=build.address(entries.pages),
        page_stride=entries.pages.stride(0),
        num_slots=num_slots,
        slots=build.address(entries.slots_BW),
        slots_stride=entries.slots_BW.stride(0),
        lengths=build.address(entries.lengths_B),
        width=entries.slots_BW.shape[1],
        log2_entries=entries.page_entries.bit_length() - 1,
    )


def decode_attention(
    q_BHD: Tensor,
    window: EntryList,
    second: EntryList | None,
    *,
    sink_H: Tensor | None,
    scale: float = 512**-0.5,
    split: int | None = None,
    out_BHD: Tensor | None = None,
    lse_BH: Tensor | None = None,
    positions_B: Tensor | None = None,
    cos_sin: Tensor | None = None,
    raw_q: bool = False,
    eps: float = 1e-6,
    quantised: tuple[Tensor, Tensor] | None = None,
    turn_out: bool = False,
) -> None:
    """Launches the kernel on the current stream; allocates nothing, never waits.

    Args:
        q_BHD: [B, H, 512] bf16, stride(2) = 1, rows at multiples of 16 bytes; any H, done 64 at a time.
        window, second: the two lists; a window of up to 128 entries first, then the selected or the 128:1 entries.
        sink_H: [H] fp32 or None. split: blocks that share each token, of SPLITS; None: by the token's own tiles.
        out_BHD: [B, H, 512] bf16, written unless `quantised` is given. lse_BH: [B, H] fp32, natural logarithm, or None.
        raw_q: q is not yet normed (per head, no weight, `eps`) and not yet rotated; needs positions_B, cos_sin.
        quantised: e4m3 [H/8, B, 4096] and fp32 scales [H/8, B, 32] with stride(1) = 1: the output is rounded to bf16,
            rotated back by its position and quantised per 128 channels with power-of-two scales; needs
            positions_B, cos_sin.
        turn_out: out_BHD is rounded, then rotated back by its position; needs positions_B, cos_sin.
        positions_B: [B] int64. cos_sin: [positions, 64] fp32, 32 cosines then 32 sines.
    """
    assert q_BHD.dtype == torch.bfloat16
    q_stride_t, q_stride_h = box_strides(q_BHD, "q")
    batch, heads, channels = q_BHD.shape
    blocks = split or parts_of(sum(-(-x.slots_BW.shape[1] // TILE) for x in (window, second) if x is not None))
    assert blocks in SPLITS
    assert scale > 0
    assert channels == NOPE + ROPE
    assert sink_H is None or is_dense(sink_H, torch.float32, heads)
    assert lse_BH is None or is_dense(lse_BH, torch.float32, batch, heads)
    fused = raw_q or turn_out or quantised is not None
    if fused:
        assert positions_B is not None
        assert is_dense(positions_B, torch.int64, batch)
        assert cos_sin is not None
        assert cos_sin.dtype == torch.float32
        assert cos_sin.is_contiguous()
    params = _Params(
        q=build.address(q_BHD),
        q_stride_t=q_stride_t,
        q_stride_h=q_stride_h,
        list=(_List * 2)(_list_of(window, batch), _list_of(second, batch)),
        sink=build.address(sink_H),
        positions=build.address(positions_B) if fused else None,
        cos_sin=build.address(cos_sin) if fused else None,
        lse=build.address(lse_BH),
        scale=scale,
        eps=eps,
        heads=heads,
        batch=batch,
        raw_q=int(raw_q),
        turn_out=int(turn_out),
        by_tiles=int(split is None),
        tiles_of_one=ONE_BLOCK,
        tiles_of_two=TWO_BLOCKS,
    )
    if quantised is not None:
        codes, scales = quantised
        assert codes.shape == (heads // 8, batch, 4096)
        assert scales.shape == (*codes.shape[:2], 32)
        assert codes.stride(2) == scales.stride(1) == 1
        assert codes.data_ptr() % 16 == codes.stride(0) % 16 == codes.stride(1) % 16 == 0
        params.out8, params.out8_stride_g, params.out8_stride_t = codes.data_ptr(), codes.stride(0), codes.stride(1)
        params.out8_scale, params.scale_stride_g, params.scale_stride_c = (
            scales.data_ptr(),
            scales.stride(0),
            scales.stride(2),
        )
    else:
        assert out_BHD is not None
        assert out_BHD.dtype == torch.bfloat16
        assert out_BHD.shape == q_BHD.shape
        params.out, (params.out_stride_t, params.out_stride_h) = out_BHD.data_ptr(), box_strides(out_BHD, "out")
    if not batch:
        return
    status = build.load("decode_attention.cu").hr_decode_attention(
        ctypes.byref(params), blocks, ctypes.c_void_p(build.current_stream())
    )
    build.check(status, "decode_attention")


def read_entries(pages: Tensor, page_entries: int, slots: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Entries at slots (int64, none negative), dequantised: [*slots.shape, 512] of dtype."""
    page, at = slots // page_entries, slots % page_entries
    rows = pages[:, : page_entries * ROW_BYTES].unflatten(1, (page_entries, ROW_BYTES))[page, at]
    tail = pages[:, page_entries * ROW_BYTES : page_entries * ENTRY_BYTES].unflatten(1, (page_entries, 8))
    scales = torch.exp2(tail[page, at][..., :7].to(dtype) - 127)
    codes = rows[..., :NOPE].contiguous().view(torch.float8_e4m3fn).float().to(dtype)
    nope = codes.unflatten(-1, (7, GROUP)) * scales[..., None]
    rope = rows[..., NOPE:].contiguous().view(torch.bfloat16).to(dtype)
    return torch.cat([nope.flatten(-2), rope], -1)


def norm_rope_q(q_BHD: Tensor, positions_B: Tensor, cos_sin: Tensor, eps: float = 1e-6) -> Tensor:
    """K2's q side: per head q / sqrt(mean(q^2) + eps), the last 64 channels rotated in adjacent pairs, rounded to
    bf16 once."""
    q = q_BHD.float()
    q = q * torch.rsqrt((q * q).mean(-1, keepdim=True) + eps)
    return rotate(q, cos_sin[positions_B][:, None]).to(torch.bfloat16)


def rotate(x: Tensor, cos_sin_row: Tensor, *, inverse: bool = False) -> Tensor:
    """Rotates adjacent pairs of the last 64 channels of x [..., 512]; rows of 32 cosines and 32 sines, broadcast
    against x."""
    cos, sin = cos_sin_row[..., :32], cos_sin_row[..., 32:]
    sin = -sin if inverse else sin
    even, odd = x[..., NOPE::2], x[..., NOPE + 1 :: 2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([x[..., :NOPE], turned.to(x.dtype)], -1)


def quantise_output(out_BHD: Tensor, positions_B: Tensor, cos_sin: Tensor) -> tuple[Tensor, Tensor]:
    """K3: inverse rotation in fp32, then e4m3 per 128 channels with the scale 2^ceil(log2(amax / 448)), amax at
    least 1e-10.

    Returns:
        e4m3 [H/8, B, 4096]; fp32 scales [H/8, B, 32].
    """
    x = rotate(out_BHD.float(), cos_sin[positions_B][:, None], inverse=True)
    b, h, _ = x.shape
    x = x.view(b, h // 8, 32, 128).transpose(0, 1)
    fraction, exponent = torch.frexp(
        x.abs().amax(-1).clamp_min(1e-10)
    )  # amax = fraction * 2^exponent, fraction in [.5, 1)
    power = exponent - 9 + (fraction > 0.875).int()  # 448 = 0.875 * 2^9
    scale = torch.exp2(power.float())
    codes = (x / scale[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(h // 8, b, 4096), scale


def decode_attention_reference(
    q_BHD: Tensor,
    window: EntryList,
    second: EntryList | None,
    *,
    sink_H: Tensor | None,
    scale: float = 512**-0.5,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The attention in plain PyTorch, in `dtype` throughout.

    Returns:
        out [B, H, 512] and lse [B, H] of dtype; a token without entries gets zeros and -inf, a broken one NaN.
    """
    keys, valid = [], []
    broken = torch.zeros(q_BHD.shape[0], dtype=torch.bool, device=q_BHD.device)
    for entries in (window, second):
        if entries is None or entries.slots_BW.shape[1] == 0:
            continue
        slots = entries.slots_BW.long()
        place = torch.arange(slots.shape[1], device=slots.device)
        ok = (slots != -1) & (place[None] < entries.lengths_B[:, None])
        lost = ok & ((slots < 0) | (slots >= entries.pages.shape[0] * entries.page_entries))
        broken |= lost.any(1) | (entries.lengths_B < 0) | (entries.lengths_B > slots.shape[1])
        ok &= ~lost
        read = read_entries(entries.pages, entries.page_entries, torch.where(ok, slots, 0), dtype)
        keys.append(torch.where(ok[..., None], read, 0))  # what is skipped may be poison
        valid.append(ok)
    k, ok = torch.cat(keys, 1), torch.cat(valid, 1)
    z = torch.einsum("bhd,bnd->bhn", q_BHD.to(dtype), k) * scale
    z = z.masked_fill(~ok[:, None], float("-inf"))
    lse = torch.logsumexp(z, -1)
    total = lse if sink_H is None else torch.logaddexp(lse, sink_H.to(dtype)[None])
    weights = torch.where(ok[:, None], torch.exp(z - total[..., None]), 0)
    out = torch.einsum("bhn,bnd->bhd", weights, k)
    nan = float("nan")
    return out.masked_fill(broken[:, None, None], nan), lse.masked_fill(broken[:, None], nan)
