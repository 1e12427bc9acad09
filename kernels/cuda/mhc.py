"""K7: hyper-connections over four residual streams, "after" one sub-layer and "before" the next in one launch [BI].

    streams'[n] = post[n] * y + sum_m comb[m, n] * streams[m]                      rounded to bf16
    mix[24]     = (flat(streams') . fn^T) / sqrt(mean(flat(streams')^2) + norm_eps)
    pre = sigmoid(mix[0:4] * scale[0] + base) + eps;  post' = 2 * sigmoid(mix[4:8] * scale[1] + base)
    comb' = sinkhorn(mix[8:24] * scale[2] + base)   softmax of rows + eps, columns, then rounds - 1 times rows, columns
    layer_in    = rms(bf16(sum_n pre[n] * streams'[n]), weight)                    rounded to bf16

Shape letters: T tokens, N = 4 streams, D = 4096 channels (V4-Flash).

The product takes fn as the sum of two bf16 (relative error 2^-17 a weight) and accumulates in fp32: post and comb come
out within 2e-5 of float64 by norm. The norm of layer_in comes from the products of a token's streams with each other,
before layer_in is rounded: 2e-5 off by that. A token's bits do not depend on the other tokens of the launch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import build
from .arguments import is_dense

STREAMS, HIDDEN, MIXES = 4, 4096, 24
PACKED = (16, 8, MIXES, 32, 8)


class _Params(ctypes.Structure):
    _fields_ = (
        ("streams", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("post", ctypes.c_void_p),
        ("comb", ctypes.c_void_p),
        ("fn", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("streams_out", ctypes.c_void_p),
        ("layer_in", ctypes.c_void_p),
        ("post_out", ctypes.c_void_p),
        ("comb_out", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("norm_eps", ctypes.c_float),
        ("tokens", ctypes.c_int32),
        ("rounds", ctypes.c_int32),
        ("share", ctypes.c_int32),
        ("rest", ctypes.c_int32),
    )


def pack_weights(fn: Tensor) -> Tensor:
    """fn [24, 16384] fp32 as the kernel's operands, to be made once: [16, 8, 24, 32, 8] bf16.

    Rows are 24 of hi = bf16(fn), then 24 of lo = bf16(fn - hi). For each block (256 channels) and warp (32 channels of
    all streams) of it, 24 pieces (three tiles of 16 rows, each of four streams by two halves); of a piece each lane's
    16 bytes: rows lane // 4 and + 8, columns in the order in which the lane loads the streams.
    """
    hi = fn.to(torch.bfloat16)
    rows = torch.cat([hi, (fn - hi.float()).to(torch.bfloat16)])
    # tile, lower half, row | stream, block, warp, quarter of its channels, half of a quarter, pair of channels, channel
    parts = rows.view(3, 2, 8, STREAMS, 16, 8, 4, 2, 2, 2)
    return parts.permute(4, 5, 0, 3, 7, 2, 6, 8, 1, 9).reshape(PACKED).contiguous()


def hyper_connect(
    streams_TND: Tensor,
    fn_packed: Tensor,
    base: Tensor,
    scale: Tensor,
    weight_D: Tensor,
    layer_in_TD: Tensor,
    post_out_TN: Tensor,
    comb_out_TNN: Tensor,
    *,
    after: tuple[Tensor, Tensor, Tensor] | None = None,
    streams_out_TND: Tensor | None = None,
    rounds: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
) -> int:
    """Launches the kernel on the current stream; allocates nothing, never waits. All tensors contiguous.

    Args:
        streams_TND: [T, 4, 4096] bf16. fn_packed: by `pack_weights`. base [24], scale [3]: fp32. All three complete
            before the kernel ahead began. weight_D: [4096] bf16.
        layer_in_TD: [T, 4096] bf16, post_out_TN: [T, 4] fp32, comb_out_TNN: [T, 4, 4] fp32 (row: old stream): written.
        after: y [T, 4096] bf16, post [T, 4] fp32 and comb [T, 4, 4] fp32 of the sub-layer that ends here; None: the
            streams are taken as they are.
        streams_out_TND: as streams_TND, written if `after` is given; may be streams_TND itself.
    Returns:
        How many clusters of 16 blocks the card holds at once; 0 tokens launch nothing.
    """
    t = streams_TND.shape[0]
    bf16, fp32, mixes = torch.bfloat16, torch.float32, STREAMS * (STREAMS + 2)
    expected: list[tuple[Tensor, torch.dtype, tuple[int, ...]]] = [
        (streams_TND, bf16, (t, STREAMS, HIDDEN)),
        (fn_packed, bf16, PACKED),
        (base, fp32, (mixes,)),
        (scale, fp32, (3,)),
        (weight_D, bf16, (HIDDEN,)),
        (layer_in_TD, bf16, (t, HIDDEN)),
        (post_out_TN, fp32, (t, STREAMS)),
        (comb_out_TNN, fp32, (t, STREAMS, STREAMS)),
    ]
    assert (after is None) == (streams_out_TND is None)
    if after is not None and streams_out_TND is not None:
        shapes = (t, HIDDEN), (t, STREAMS), (t, STREAMS, STREAMS)
        expected += zip(after, (bf16, fp32, fp32), shapes, strict=True)
        expected.append((streams_out_TND, bf16, (t, STREAMS, HIDDEN)))
    y, post, comb = after or (None, None, None)
    for tensor, dtype, shape in expected:
        assert is_dense(tensor, dtype, *shape)
        assert tensor.device == streams_TND.device
        assert tensor.data_ptr() % 16 == 0 or tensor is scale
    assert rounds >= 1
    params = _Params(
        streams=build.address(streams_TND),
        y=build.address(y),
        post=build.address(post),
        comb=build.address(comb),
        fn=build.address(fn_packed),
        base=build.address(base),
        scale=build.address(scale),
        weight=build.address(weight_D),
        streams_out=build.address(streams_out_TND),
        layer_in=build.address(layer_in_TD),
        post_out=build.address(post_out_TN),
        comb_out=build.address(comb_out_TNN),
        eps=eps,
        norm_eps=norm_eps,
        tokens=t,
        rounds=rounds,
    )
    clusters = ctypes.c_int(0)
    status = build.load("mhc.cu").hr_mhc(
        ctypes.byref(params), ctypes.byref(clusters), ctypes.c_void_p(build.current_stream())
    )
    build.check(status, "mhc")
    return clusters.value


def sinkhorn(m_TNN: Tensor, rounds: int, eps: float) -> Tensor:
    """Softmax of rows plus eps, division by column sums, then rounds - 1 times by row and by column sums."""
    m = torch.softmax(m_TNN, -1) + eps
    m = m / (m.sum(-2, keepdim=True) + eps)
    for _ in range(rounds - 1):
        m = m / (m.sum(-1, keepdim=True) + eps)
        m = m / (m.sum(-2, keepdim=True) + eps)
    return m


def hyper_connect_reference(
    streams_TND: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    weight_D: Tensor,
    *,
    after: tuple[Tensor, Tensor, Tensor] | None = None,
    rounds: int = 20,
    eps: float = 1e-6,
    norm_eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same in plain PyTorch, in `dtype` but for the two roundings to bf16 (streams', and layer_in before its norm).

    Returns:
        streams' [T, 4, D] bf16; layer_in [T, D], post [T, 4], comb [T, 4, 4] of dtype.
    """
    if after is not None:
        y, post, comb = (x.to(dtype) for x in after)
        mixed = torch.einsum("tmn,tmd->tnd", comb, streams_TND.to(dtype))
        streams_TND = (post[..., None] * y[:, None] + mixed).to(torch.bfloat16)
    flat = streams_TND.flatten(1).to(dtype)
    mix = flat @ fn.to(dtype).t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    s, b = scale.to(dtype), base.to(dtype)
    pre = torch.sigmoid(mix[:, :4] * s[0] + b[:4]) + eps
    post = 2 * torch.sigmoid(mix[:, 4:8] * s[1] + b[4:8])
    comb = sinkhorn((mix[:, 8:] * s[2] + b[8:]).unflatten(1, (4, 4)), rounds, eps)
    x = torch.einsum("tn,tnd->td", pre, streams_TND.to(dtype)).to(torch.bfloat16).to(dtype)
    layer_in = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm_eps) * weight_D.to(dtype)
    return streams_TND, layer_in, post, comb
