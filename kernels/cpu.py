"""The CPU device's operations: typed doors to csrc/cpu.c.

Tensors are fp32 and contiguous unless said otherwise; results are new tensors. `bf16=True` rounds each result once to
bf16 (kept in fp32 memory) where the model rounds. No result of a row depends on the other rows: that is what makes
batches, chunk borders and disaggregation invisible in the bits.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from .build import load_library
from .paged import PagedEntries, StateRing


class _View(ctypes.Structure):
    _fields_ = (
        ("base", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("entries", ctypes.c_int32),
        ("format", ctypes.c_int32),
    )


_PTR, _I64, _INT, _F32, _VIEW = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float, ctypes.POINTER(_View)
_SIGNATURES = {
    "hr_pack": (_PTR, _I64, _I64, _PTR),
    "hr_linear": (_PTR, _I64, _I64, _I64, _PTR, _I64, _PTR, _I64, _INT),
    "hr_rms": (_PTR, _I64, _I64, _PTR, _F32, _PTR, _INT),
    "hr_rope": (_PTR, _I64, _I64, _I64, _PTR, _PTR, _F32, _INT),
    "hr_hc_mix": (_PTR, _PTR, _I64, _I64, _PTR, _PTR, _INT, _F32, _F32, _PTR, _PTR, _PTR),
    "hr_hc_head_mix": (_PTR, _PTR, _I64, _I64, _F32, _PTR, _F32, _F32, _PTR),
    "hr_hc_in": (_PTR, _PTR, _I64, _I64, _PTR, _INT),
    "hr_hc_out": (_PTR, _PTR, _PTR, _PTR, _I64, _I64, _PTR, _INT),
    "hr_pool": (_PTR, _I64, _INT, _INT, _INT, _INT, _PTR),
    "hr_copy_rows": (_PTR, _I64, _I64, _PTR),
    "hr_insert": (_VIEW, _PTR, _I64, _PTR),
    "hr_read": (_VIEW, _PTR, _I64, _PTR),
    "hr_round_trip": (_INT, _PTR, _I64, _PTR),
    "hr_hadamard": (_PTR, _I64),
    "hr_select": (_PTR, _PTR, _I64, _INT, _PTR, _PTR, _VIEW, _PTR, _I64, _I64, _PTR, _PTR),
    "hr_attend": (
        _PTR, _I64, _INT, _PTR, _PTR, _VIEW, _PTR, _PTR, _I64,
        _VIEW, _PTR, _I64, _INT, _PTR, _PTR, _I64, _PTR, _PTR, _INT,
    ),
    "hr_gate": (_PTR, _I64, _INT, _PTR, _PTR, _INT, _F32, _INT, _PTR, _PTR),
    "hr_swiglu": (_PTR, _I64, _I64, _F32, _PTR, _INT),
    "hr_add_rows": (_PTR, _I64, _PTR, _PTR, _I64, _PTR),
    "hr_round": (_PTR, _I64),
}  # fmt: skip


@functools.cache
def _library() -> ctypes.CDLL:
    library = load_library("cpu")
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes = arguments
        function.restype = ctypes.c_int if name in ("hr_select", "hr_attend") else None
    return library


def _p(tensor: Tensor | None) -> int | None:
    if tensor is None:
        return None
    assert tensor.is_contiguous()
    return tensor.data_ptr()


def _view(view: PagedEntries | None) -> _View | None:
    return (
        None
        if view is None
        else _View(view.base_address, view.storage.stride(0), view.entries_per_page, int(view.format))
    )


@dataclass(frozen=True)
class PackedWeight:
    """A weight [n, k] in panels of 16 outputs, as `linear` wants it."""

    panels: Tensor
    n: int
    k: int


def pack_weight(w_NK: Tensor) -> PackedWeight:
    """[n, k] fp32 -> panels; done once at load."""
    n, k = w_NK.shape
    w_NK = w_NK.float().contiguous()
    panels = torch.empty(-(-n // 16) * k * 16)
    _library().hr_pack(_p(w_NK), n, k, _p(panels))
    return PackedWeight(panels, n, k)


def linear(x_TK: Tensor, weight: PackedWeight, *, bf16: bool) -> Tensor:
    """x W^T: [T, k] (rows may be strided) -> [T, n]; each output summed over k in order."""
    t, k = x_TK.shape
    assert k == weight.k
    assert x_TK.stride(1) == 1
    y_TN = torch.empty(t, weight.n)
    _library().hr_linear(x_TK.data_ptr(), t, x_TK.stride(0), k, _p(weight.panels), weight.n, _p(y_TN), weight.n, bf16)
    return y_TN


def rms(x: Tensor, weight: Tensor | None, eps: float, *, bf16: bool) -> Tensor:
    """Root-mean-square norm over the last axis (a multiple of 16), weight multiplied in fp32."""
    k = x.shape[-1]
    assert k % 16 == 0
    y = torch.empty_like(x)
    _library().hr_rms(_p(x), x.numel() // k, k, _p(weight), eps, _p(y), bf16)
    return y


def rope_(x_THK: Tensor, positions_T: Tensor, cos_sin: Tensor, *, inverse: bool, bf16: bool) -> None:
    """Rotate the last 64 values of each vector in place, adjacent pairs; cos_sin [positions, 2, 32]."""
    t, heads, width = x_THK.shape
    assert t == 0 or int(positions_T.max()) < cos_sin.shape[0]
    _library().hr_rope(_p(x_THK), t, heads, width, _p(positions_T), _p(cos_sin), -1.0 if inverse else 1.0, bf16)


def hc_mix(
    streams_TND: Tensor, raw_TM: Tensor, scale: Tensor, base: Tensor, iterations: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [T, 4], post [T, 4], comb [T, 4 old, 4 new] from raw = flat(streams) fn^T [T, 24]."""
    t = streams_TND.shape[0]
    pre, post, comb = torch.empty(t, 4), torch.empty(t, 4), torch.empty(t, 4, 4)
    flat = streams_TND[0].numel() if t else 16
    _library().hr_hc_mix(
        _p(streams_TND),
        _p(raw_TM),
        t,
        flat,
        _p(scale),
        _p(base),
        iterations,
        eps,
        norm_eps,
        _p(pre),
        _p(post),
        _p(comb),
    )
    return pre, post, comb


def hc_head_mix(streams_TND: Tensor, raw_TN: Tensor, scale: float, base: Tensor, eps: float, norm_eps: float) -> Tensor:
    """Weights [T, 4] of the streams' sum before the last norm."""
    t = streams_TND.shape[0]
    pre = torch.empty(t, 4)
    _library().hr_hc_head_mix(
        _p(streams_TND), _p(raw_TN), t, streams_TND[0].numel(), scale, _p(base), eps, norm_eps, _p(pre)
    )
    return pre


def hc_in(streams_TND: Tensor, pre_TN: Tensor, *, bf16: bool) -> Tensor:
    """sum_n pre[n] * streams[n] -> [T, D]."""
    t, _, d = streams_TND.shape
    y_TD = torch.empty(t, d)
    _library().hr_hc_in(_p(streams_TND), _p(pre_TN), t, d, _p(y_TD), bf16)
    return y_TD


def hc_out(y_TD: Tensor, streams_TND: Tensor, post: Tensor, comb: Tensor, *, bf16: bool) -> Tensor:
    """post[k] * y + sum_j comb[j, k] * streams[j] -> [T, 4, D]."""
    t, _, d = streams_TND.shape
    out = torch.empty_like(streams_TND)
    _library().hr_hc_out(_p(y_TD), _p(streams_TND), _p(post), _p(comb), t, d, _p(out), bf16)
    return out


def pool_rows(row_addresses_EC: Tensor, width: int, columns: int, *, overlap: bool) -> Tensor:
    """Softmax-weighted sum over candidate rows, per channel -> [E, width] fp32.

    Args:
        row_addresses_EC: int64 [entries, candidates], addresses of fp32 rows kv[columns] | score[columns]; 0 is absent.
        overlap: the first half of the candidates uses channels [0, width), the second [width, 2 * width).
    """
    n, candidates = row_addresses_EC.shape
    out = torch.empty(n, width)
    _library().hr_pool(_p(row_addresses_EC), n, candidates, overlap, width, columns, _p(out))
    return out


def store_rows(rows_TC: Tensor, addresses_T: Tensor) -> None:
    """Copy whole fp32 rows to int64 addresses; 0 skips."""
    _library().hr_copy_rows(_p(rows_TC), rows_TC.shape[0], rows_TC.shape[1], _p(addresses_T))


def insert_entries(view: PagedEntries, slots: Tensor, values_NK: Tensor) -> None:
    """As `entry_format.insert_entries`."""
    _library().hr_insert(_view(view), _p(slots), slots.shape[0], _p(values_NK))


def read_entries(view: PagedEntries, slots: Tensor) -> Tensor:
    """As `entry_format.read_entries`."""
    out = torch.empty(slots.shape[0], 128 if view.format >= 3 else 512)
    _library().hr_read(_view(view), _p(slots), slots.shape[0], _p(out))
    return out


def round_trip(entry_format: int, values_NK: Tensor) -> Tensor:
    """What values become by being stored and read."""
    out = torch.empty_like(values_NK)
    _library().hr_round_trip(int(entry_format), _p(values_NK), values_NK.shape[0], _p(out))
    return out


def hadamard_(x_NI: Tensor) -> None:
    """Orthonormal 128-point Hadamard in place, from bf16 to bf16, fp32 inside."""
    assert x_NI.shape[-1] == 128
    _library().hr_hadamard(_p(x_NI), x_NI.numel() // 128)


def select_entries(
    q_TJI: Tensor, w_TJ: Tensor, positions_T: Tensor, seq_T: Tensor, keys: PagedEntries, history_SB: Tensor, topk: int
) -> tuple[Tensor, Tensor]:
    """The indexer's choice: int32 [T, topk] entry numbers, ascending, and how many of them count, int32 [T].

    Ties go to the lower entry; while at most topk are visible, all are chosen and no score is computed. The count is -1
    where a score is no finite number: attention then gives NaN.
    """
    t, heads, _ = q_TJI.shape
    chosen, count = torch.full((t, topk), -1, dtype=torch.int32), torch.zeros(t, dtype=torch.int32)
    status = _library().hr_select(
        _p(q_TJI), _p(w_TJ), t, heads, _p(positions_T), _p(seq_T), _view(keys),
        _p(history_SB), history_SB.shape[1], topk, _p(chosen), _p(count),
    )  # fmt: skip
    if status:
        raise MemoryError("indexer scratch")
    return chosen, count


def attend(
    q_THK: Tensor, positions_T: Tensor, seq_T: Tensor, window: PagedEntries, window_SW: Tensor, window_first_S: Tensor,
    entries: PagedEntries | None, history_SB: Tensor, ratio: int, chosen: tuple[Tensor, Tensor] | None,
    sink_H: Tensor, *, bf16: bool,
) -> Tensor:  # fmt: skip
    """Attention over the window (at most 128 raw entries) and the visible or chosen compressed ones -> [T, H, 512].

    One softmax over both lists and the sink, summed window first, then by entry number. Position -1 gives zeros.
    """
    t, heads, _ = q_THK.shape
    out = torch.empty_like(q_THK)
    picked, count = chosen if chosen is not None else (None, None)
    status = _library().hr_attend(
        _p(q_THK), t, heads, _p(positions_T), _p(seq_T),
        _view(window), _p(window_SW), _p(window_first_S), window_SW.shape[1],
        _view(entries), _p(history_SB), history_SB.shape[1],
        ratio, _p(picked), _p(count), 0 if picked is None else picked.shape[1], _p(sink_H), _p(out), bf16,
    )  # fmt: skip
    if status:
        raise MemoryError("attention scratch")
    return out


def gate(
    logits_TE: Tensor, bias_E: Tensor | None, fixed_TC: Tensor | None, k: int, scaling: float, *, normalise: bool
) -> tuple[Tensor, Tensor]:
    """Experts int32 [T, k] and their weights [T, k]: by score + bias, or `fixed` int64 ids weighted by the scores."""
    t, experts = logits_TE.shape
    ids, weights = torch.empty(t, k, dtype=torch.int32), torch.empty(t, k)
    _library().hr_gate(_p(logits_TE), t, experts, _p(bias_E), _p(fixed_TC), k, scaling, normalise, _p(ids), _p(weights))
    return ids, weights


def swiglu(ab_TF: Tensor, limit: float, *, bf16: bool) -> Tensor:
    """silu(min(a, limit)) * clamp(b, -limit, limit) from [T, 2F] -> [T, F]."""
    t, two_f = ab_TF.shape
    out = torch.empty(t, two_f // 2)
    _library().hr_swiglu(_p(ab_TF), t, two_f // 2, limit, _p(out), bf16)
    return out


def add_rows_(y_TD: Tensor, rows: Tensor, weights: Tensor, x_ND: Tensor) -> None:
    """y[rows[i]] += weights[i] * x[i], in order."""
    _library().hr_add_rows(_p(y_TD), y_TD.shape[1], _p(rows), _p(weights), rows.shape[0], _p(x_ND))


def round_bf16_(x: Tensor) -> None:
    """Round in place to bf16 values."""
    _library().hr_round(_p(x), x.numel())


def ring_address(ring: StateRing, rows: Tensor, positions: Tensor) -> Tensor:
    """int64 addresses of the ring rows that belong to token `positions` of state rows `rows`."""
    return ring.base_address + rows * ring.storage.stride(0) + (positions % ring.ring_rows) * ring.row_bytes
