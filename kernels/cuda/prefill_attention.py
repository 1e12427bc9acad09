"""K6: prefill attention of one chunk, many queries of a few sequences, with a sink [BI].

    z[h, i] = scale * q[h] . k[i]   over the window's rows and the second list's, one softmax with maximum m
    out[h]  = sum_i exp(z - m) k[i] / (sum_i exp(z - m) + exp(sink[h] - m));   lse excludes the sink

Keys are read from a bf16 workspace, into which entries are dequantised once a layer (`gather_rows`): window rows of the
chunk and of the 127 positions before it, and compressed entries; those made in this chunk too, or else the result would
depend on the cut of the prompt. A workspace is made of octets, 8 rows as the kernels have them in shared memory.

Shape letters: T queries, H heads, R workspace rows, W places of a list, D = 512 channels.
"""

from __future__ import annotations

import ctypes
import functools

import torch
from torch import Tensor

from . import build
from .arguments import box_strides, is_dense
from .decode_attention import entry_slots

WINDOW, RING = 128, 144


class _GatherParams(ctypes.Structure):
    _fields_ = (
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("octets", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("log2_entries", ctypes.c_int32),
    )


class _RowsParams(ctypes.Structure):
    _fields_ = (
        ("window", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("second", ctypes.c_void_p),
        ("list", ctypes.c_void_p),
        ("list_stride", ctypes.c_int64),
        ("first", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride_t", ctypes.c_int64),
        ("out_stride_h", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("heads", ctypes.c_int32),
        ("queries", ctypes.c_int32),
        ("window_octets", ctypes.c_int32),
        ("second_octets", ctypes.c_int32),
        ("width", ctypes.c_int32),
    )


class _WindowParams(ctypes.Structure):
    _fields_ = (
        ("rows", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("length", ctypes.c_void_p),
        ("sink", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_stride_t", ctypes.c_int64),
        ("out_stride_h", ctypes.c_int64),
        ("lse", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("heads", ctypes.c_int32),
        ("queries", ctypes.c_int32),
        ("octets", ctypes.c_int32),
    )


def pack_octets(rows_RD: Tensor) -> Tensor:
    """Rows [R, 512] bf16, R a multiple of 8, as a workspace: [R / 8, 8 blocks of 64 channels, 8 rows, 64].

    In row r of an octet the 16-byte chunk c of a block lies at place c ^ r.
    """
    r = torch.arange(8, device=rows_RD.device)
    x = rows_RD.view(-1, 8, 8, 8, 8).transpose(1, 2)  # octet, block, row, chunk, channel
    return x[:, :, r[:, None], r[None] ^ r[:, None]].flatten(3)


def unpack_octets(octets: Tensor) -> Tensor:
    """The rows [R, 512] of a workspace."""
    r = torch.arange(8, device=octets.device)
    x: Tensor = octets.unflatten(3, (8, 8))[:, :, r[:, None], r[None] ^ r[:, None]]
    return x.transpose(1, 2).reshape(-1, 512)


def gather_rows(pages: Tensor, page_entries: int, slots_R: Tensor, octets: Tensor) -> None:
    """Dequantises entries into workspace rows 0 to R - 1. Launches on the current stream; allocates nothing.

    Args:
        pages: uint8 [P, page stride], stride(1) = 1, as `decode_attention.EntryList` has them; page_entries a power of
            two. slots_R: int32 [R], page * page_entries + position; -1 gives a row of zeros, anything else that is no
            slot of the pool a row of NaN.
        octets: bf16 workspace of at least R rows, written.
    """
    assert octets.dtype == torch.bfloat16
    assert octets.is_contiguous()
    assert octets.data_ptr() % 16 == 0
    assert octets.numel() >= slots_R.numel() * 512
    assert is_dense(slots_R, torch.int32, slots_R.numel())
    params = _GatherParams(
        pages=build.address(pages),
        page_stride=pages.stride(0),
        num_slots=entry_slots(pages, page_entries),
        slots=build.address(slots_R),
        octets=build.address(octets),
        rows=slots_R.numel(),
        log2_entries=page_entries.bit_length() - 1,
    )
    status = build.load("entry_rows.cu").hr_entry_rows(ctypes.byref(params), ctypes.c_void_p(build.current_stream()))
    build.check(status, "entry_rows")


def prefill_window(
    q_THD: Tensor,
    octets: Tensor,
    row_T: Tensor,
    length_T: Tensor,
    *,
    sink_H: Tensor | None,
    out_THD: Tensor,
    lse_TH: Tensor | None = None,
    scale: float = 512**-0.5,
) -> None:
    """Attention to the window alone. Launches on the current stream; allocates nothing, never waits.

    Args:
        q_THD: [T, H, 512] bf16, normed and rotated; out_THD: the same shape, written. stride(2) = 1, rows at
            multiples of 16 bytes.
        octets: workspace as `pack_octets` makes it; rows of an octet that belong to nobody must still be finite. A row
            that is NaN may make queries NaN whose windows have it behind them or in their last octet.
        row_T: int32 [T], the workspace row of the query's own entry, the last of its window. Queries that follow each
            other in a sequence should do so here. A row must equal its position modulo RING: then the bits do not
            depend on the chunk.
        length_T: int32 [T], rows of the window, 0 to 128; 0 gives zeros and an lse of -inf. A query whose rows do not
            all lie in the workspace is broken, as one of another length is: it gets NaN.
        sink_H: [H] fp32 or None. lse_TH: [T, H] fp32, natural logarithm, or None.
    """
    assert octets.dtype == torch.bfloat16
    assert octets.is_contiguous()
    assert octets.data_ptr() % 16 == 0
    _check(q_THD, (row_T, length_T), sink_H, out_THD, lse_TH)
    queries, heads, _ = q_THD.shape
    out_stride_t, out_stride_h = box_strides(out_THD, "out")
    params = _WindowParams(
        build.address(octets),
        build.address(row_T),
        build.address(length_T),
        build.address(sink_H),
        build.address(out_THD),
        out_stride_t,
        out_stride_h,
        build.address(lse_TH),
        scale,
        heads,
        queries,
        octets.numel() // 4096,
    )
    _launch("prefill_window", params, q_THD)


def prefill_rows(
    q_THD: Tensor,
    window: Tensor,
    row_T: Tensor,
    length_T: Tensor,
    second: Tensor,
    count_T: Tensor,
    *,
    list_TW: Tensor | None = None,
    first_T: Tensor | None = None,
    sink_H: Tensor | None,
    out_THD: Tensor,
    lse_TH: Tensor | None = None,
    scale: float = 512**-0.5,
) -> None:
    """Attention to the window and to a second list. Launches on the current stream; allocates nothing, never waits.

    Args:
        q_THD, window, row_T, length_T, sink_H, out_THD, lse_TH: as for `prefill_window`; with list_TW rows may lie
            anywhere and octets of the window may hold anything beside them.
        second: workspace of the second list's rows. count_T: int32 [T], how many of them a query has.
        list_TW: int32 [T, W], its rows (-1: none), stride(1) = 1: the form for selected entries. Without it they
            are rows first_T[t] (int32, multiple of 8) to first_T[t] + count_T[t] - 1; the last octet must be finite
            throughout. Neighbours in a sequence then share what they load. Broken, and so NaN, is a query whose rows do
            not all lie in the workspaces, or whose count is negative or larger than W.
    """
    assert window.dtype == second.dtype == torch.bfloat16
    assert window.is_contiguous()
    assert second.is_contiguous()
    assert (list_TW is None) != (first_T is None)
    assert window.data_ptr() % 16 == second.data_ptr() % 16 == 0
    per_query = (row_T, length_T, count_T) if first_T is None else (row_T, length_T, count_T, first_T)
    _check(q_THD, per_query, sink_H, out_THD, lse_TH)
    list_stride = width = 0
    if list_TW is not None:
        list_stride, width = list_TW.stride(0), list_TW.shape[1]
        assert list_TW.dtype == torch.int32
        assert list_TW.shape[0] == q_THD.shape[0]
        assert list_TW.stride(1) == 1 or width <= 1
    queries, heads, _ = q_THD.shape
    out_stride_t, out_stride_h = box_strides(out_THD, "out")
    params = _RowsParams(
        build.address(window),
        build.address(row_T),
        build.address(length_T),
        build.address(second),
        build.address(list_TW),
        list_stride,
        build.address(first_T),
        build.address(count_T),
        build.address(sink_H),
        build.address(out_THD),
        out_stride_t,
        out_stride_h,
        build.address(lse_TH),
        scale,
        heads,
        queries,
        window.numel() // 4096,
        second.numel() // 4096,
        width,
    )
    _launch("prefill_dense" if list_TW is None else "prefill_rows", params, q_THD)


def _check(
    q_THD: Tensor, per_query: tuple[Tensor, ...], sink_H: Tensor | None, out_THD: Tensor, lse_TH: Tensor | None
) -> None:
    queries, heads, channels = q_THD.shape
    assert q_THD.dtype == out_THD.dtype == torch.bfloat16
    assert q_THD.shape == out_THD.shape
    assert channels == 512
    assert all(is_dense(x, torch.int32, queries) for x in per_query)
    assert sink_H is None or is_dense(sink_H, torch.float32, heads)
    assert lse_TH is None or is_dense(lse_TH, torch.float32, queries, heads)


@functools.cache
def _blocks(device: torch.device) -> int:
    """Multiprocessors of a device: asking torch each time takes longer than the launch."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _launch(name: str, params: ctypes.Structure, q_THD: Tensor) -> None:
    stride_t, stride_h = box_strides(q_THD, "q")
    status = getattr(build.load(f"{name}.cu"), f"hr_{name}")(
        ctypes.byref(params),
        ctypes.c_void_p(q_THD.data_ptr()),
        ctypes.c_int64(stride_t),
        ctypes.c_int64(stride_h),
        _blocks(q_THD.device),
        ctypes.c_void_p(build.current_stream()),
    )
    build.check(status, name)


def prefill_reference(
    q_THD: Tensor,
    rows_RD: Tensor,
    places_TW: Tensor,
    *,
    sink_H: Tensor | None,
    scale: float = 512**-0.5,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The attention in plain PyTorch, in `dtype`; places_TW: rows of each query, window and all, -1 for none.

    Returns:
        out [T, H, 512] and lse [T, H] of dtype; a query without rows gets zeros and -inf.
    """
    ok = places_TW >= 0
    k = rows_RD[places_TW.clamp_min(0).long()].to(dtype)
    z = torch.einsum("thd,twd->thw", q_THD.to(dtype), k) * scale
    z = z.masked_fill(~ok[:, None], float("-inf"))
    lse = torch.logsumexp(z, -1)
    total = lse if sink_H is None else torch.logaddexp(lse, sink_H.to(dtype)[None])
    weights = torch.where(ok[:, None], torch.exp(z - total[..., None]), 0)
    return torch.einsum("thw,twd->thd", weights, k), lse
