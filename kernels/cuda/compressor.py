"""K1: the compressor's pooling straight from the projection's output, with norm, rotary, quantisation and insert [BI];
and K2's kv side, the window's entries, in the same launch.

Shape letters: T tokens of a step, C = 2 * width columns (values, then scores; width 1024 for ratio 4, 512 for 128),
R rings, P pages. Mathematics, the softmax over the pooled tokens and for each channel by itself, rotary position of the
group's first token: entry = quantise(rotate(rms_norm(sum_t softmax_t(score + ape) * value) * weight)).

A sequence's tokens stand in neighbouring rows of the step, in order of position. A token that pools reads the rows of
the step for the sequence's tokens in it, and the ring for earlier ones; the sum is taken in order of position either
way, so cutting a prompt elsewhere changes no bit.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from . import build
from .arguments import is_dense
from .decode_attention import ENTRY_BYTES, ROW_BYTES, entry_slots, rotate

WIDTH = {4: 1024, 128: 512}
POOLED = {4: 8, 128: 128}


@dataclass(frozen=True, kw_only=True)
class Step:
    """Where the tokens of a step stand."""

    positions_T: Tensor
    """int64 [T]."""
    first_row_T: Tensor
    """int32 [T]: the row of the first token of the same sequence in this step."""
    last_row_T: Tensor
    """int32 [T]: and of the last."""
    ring_T: Tensor
    """int64 [T]: the sequence's ring; -1 marks padding, which writes nothing."""
    slots_T: Tensor
    """int64 [T]: where the entry that ends at this token goes; -1 where none does."""


@dataclass(frozen=True, kw_only=True)
class WindowRows:
    """Rows that become entries of the window pool: rotated by their position, quantised, written at their slot."""

    kv_TD: Tensor
    """bf16 [T, 512], normed, not rotated; stride(1) = 1, stride(0) a multiple of 4."""
    positions_T: Tensor
    """int64 [T]."""
    slots_T: Tensor
    """int64 [T], page * N + position; -1 marks padding, which writes nothing."""
    pages: Tensor
    """uint8 [P, page stride], pages of 584-byte entries."""
    page_entries: int
    """N, a power of two."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_stride", ctypes.c_int64),
        ("ape", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("first_row", ctypes.c_void_p),
        ("last_row", ctypes.c_void_p),
        ("ring", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("ring_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("cos_sin", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("ring_rows", ctypes.c_int32),
        ("keep", ctypes.c_int32),
        ("log2_entries", ctypes.c_int32),
        ("tokens", ctypes.c_int32),
        ("pool", ctypes.c_int32),
        ("save", ctypes.c_int32),
        ("window_tokens", ctypes.c_int32),
        ("window_log2_entries", ctypes.c_int32),
        ("num_positions", ctypes.c_int64),
        ("num_rings", ctypes.c_int64),
        ("num_slots", ctypes.c_int64),
        ("num_window_slots", ctypes.c_int64),
        ("kv", ctypes.c_void_p),
        ("kv_stride", ctypes.c_int64),
        ("window_positions", ctypes.c_void_p),
        ("window_slots", ctypes.c_void_p),
        ("window_pages", ctypes.c_void_p),
        ("window_page_stride", ctypes.c_int64),
    )


def _set_window(params: _Params, window: WindowRows) -> None:
    tokens, n = window.kv_TD.shape[0], window.page_entries
    assert window.kv_TD.dtype == torch.bfloat16
    assert window.kv_TD.shape[1:] == (512,)
    assert window.kv_TD.stride(1) == 1
    assert window.kv_TD.stride(0) % 4 == 0
    assert is_dense(window.positions_T, torch.int64, tokens)
    assert is_dense(window.slots_T, torch.int64, tokens)
    params.window_tokens, params.window_log2_entries = tokens, n.bit_length() - 1
    params.kv, params.kv_stride = window.kv_TD.data_ptr(), window.kv_TD.stride(0)
    params.window_positions, params.window_slots = window.positions_T.data_ptr(), window.slots_T.data_ptr()
    params.window_pages, params.window_page_stride = window.pages.data_ptr(), window.pages.stride(0)
    params.num_window_slots = entry_slots(window.pages, n)


def insert_window(window: WindowRows, cos_sin: Tensor) -> None:
    """K2's kv side alone, for layers without a compressor. cos_sin: [positions, 64] fp32.

    A slot or a position that does not exist ends the process' use of the device: a CUDA error, and nothing is written.
    """
    params = _Params(cos_sin=cos_sin.data_ptr(), num_positions=cos_sin.shape[0])
    _set_window(params, window)
    status = build.load("compressor.cu").hr_compress(ctypes.byref(params), 4, ctypes.c_void_p(build.current_stream()))
    build.check(status, "insert_window")


def compress(
    x_TC: Tensor,
    ape: Tensor,
    weight: Tensor,
    step: Step,
    state: Tensor,
    pages: Tensor,
    page_entries: int,
    cos_sin: Tensor,
    *,
    ratio: int,
    max_tokens_a_sequence: int,
    eps: float = 1e-6,
    window: WindowRows | None = None,
) -> None:
    """Writes the entries that end in this step, and the state rows that later steps need.

    Args:
        x_TC: [T, C] fp32, stride(1) = 1. ape: [ratio, C/2] fp32. weight: [512] bf16. cos_sin: [positions, 64] fp32.
        state: [R, ring rows, C] fp32, contiguous from dimension 1 on; a row is values, then scores with ape added.
        pages: uint8 [P, page stride], pages of `page_entries` 584-byte entries.
        max_tokens_a_sequence: in this step. One launch does for few (decode, drafts); otherwise saving must wait until
            all have pooled, as a chunk's last rows may land on ring rows that its first entries read.
        window: entries of the window pool to be written by the same launch, rotated by the same table; or None.

    A slot, ring or position that does not exist is as for `insert_window`.
    """
    tokens, keep = x_TC.shape[0], POOLED[ratio]
    assert x_TC.dtype == state.dtype == torch.float32
    assert x_TC.shape[1] == state.shape[2] == 2 * WIDTH[ratio]
    assert state.shape[1] >= keep
    assert all(is_dense(x, torch.int64, tokens) for x in (step.positions_T, step.ring_T, step.slots_T))
    assert all(is_dense(x, torch.int32, tokens) for x in (step.first_row_T, step.last_row_T))
    params = _Params(
        x=x_TC.data_ptr(),
        x_stride=x_TC.stride(0),
        ape=ape.data_ptr(),
        weight=weight.data_ptr(),
        positions=step.positions_T.data_ptr(),
        first_row=step.first_row_T.data_ptr(),
        last_row=step.last_row_T.data_ptr(),
        ring=step.ring_T.data_ptr(),
        state=state.data_ptr(),
        ring_stride=state.stride(0),
        slots=step.slots_T.data_ptr(),
        pages=pages.data_ptr(),
        page_stride=pages.stride(0),
        cos_sin=cos_sin.data_ptr(),
        eps=eps,
        ring_rows=state.shape[1],
        keep=keep,
        log2_entries=page_entries.bit_length() - 1,
        tokens=tokens,
        num_positions=cos_sin.shape[0],
        num_rings=state.shape[0],
        num_slots=entry_slots(pages, page_entries),
    )
    if window is not None:
        _set_window(params, window)
    together = max_tokens_a_sequence + keep - 1 <= state.shape[1]
    for pool, save in ((1, 1),) if together else ((1, 0), (0, 1)):
        params.pool, params.save = pool, save
        library = build.load("compressor.cu")
        status = library.hr_compress(ctypes.byref(params), ratio, ctypes.c_void_p(build.current_stream()))
        build.check(status, "compress")
        params.window_tokens = 0


def quantise_entries(entries: Tensor) -> Tensor:
    """Entries [n, 512] of any float type as bytes [n, 584]: the row of 576, then the scale row of 8.

    Source: `docs` of the page format: bf16 first, scale 2^ceil(log2(max(amax, 1e-4) / 448)) for 64 channels,
    rotary as is.
    """
    x = entries.to(torch.bfloat16)
    nope = x[:, :448].float().unflatten(1, (7, 64))
    fraction, exponent = torch.frexp(nope.abs().amax(-1).clamp_min(1e-4))
    power = exponent - 9 + (fraction > 0.875).int()  # 448 = 0.875 * 2^9
    codes = (nope / torch.exp2(power.float())[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = torch.cat([power + 127, torch.zeros_like(power[:, :1])], 1).to(torch.uint8)
    rope = x[:, 448:].contiguous().view(torch.uint8)
    return torch.cat([codes.flatten(1).view(torch.uint8), rope, scales], 1)


def compress_reference(
    x_TC: Tensor,
    ape: Tensor,
    weight: Tensor,
    step: Step,
    state: Tensor,
    cos_sin: Tensor,
    *,
    ratio: int,
    eps: float = 1e-6,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries before quantisation, and the new state.

    Returns:
        tokens [n] int64 that end a group; their entries [n, 512] of dtype; state, a changed copy.
    """
    width, pooled = WIDTH[ratio], POOLED[ratio]
    new_state = state.clone()
    tokens, entries = [], []
    for t in range(x_TC.shape[0]):
        position, ring = int(step.positions_T[t]), int(step.ring_T[t])
        first, last = int(step.first_row_T[t]), int(step.last_row_T[t])
        if ring < 0:
            continue
        biased = torch.cat([x_TC[t, :width], x_TC[t, width:] + ape[position % ratio]])
        if t > last - pooled:
            new_state[ring, position % state.shape[1]] = biased
        if (position + 1) % ratio or int(step.slots_T[t]) < 0:
            continue
        values, scores = [], []
        for place in range(pooled):
            at = position - pooled + 1 + place
            column = slice(512, 1024) if ratio == 4 and place >= 4 else slice(0, 512)
            if at < 0:
                continue
            row = first + at - (position - (t - first))
            if row >= first:
                value, score = x_TC[row, :width], x_TC[row, width:] + ape[at % ratio]
            else:
                value, score = state[ring, at % state.shape[1]].split(width)
            values.append(value[column])
            scores.append(score[column])
        weights = torch.stack(scores).to(dtype).softmax(0)
        pool = (weights * torch.stack(values).to(dtype)).sum(0)
        normed = pool * torch.rsqrt((pool * pool).mean() + eps) * weight.to(dtype)
        tokens.append(t)
        entries.append(rotate(normed, cos_sin[position - position % ratio].to(dtype)))
    done = torch.tensor(tokens, dtype=torch.int64, device=x_TC.device)
    return done, torch.stack(entries) if entries else x_TC.new_zeros(0, 512, dtype=dtype), new_state


def entry_bytes(pages: Tensor, page_entries: int, slots: Tensor) -> Tensor:
    """The 584 bytes of entries at slots (int64 [n]) as [n, 584], in the order of `quantise_entries`."""
    page, at = slots // page_entries, slots % page_entries
    rows = pages[:, : page_entries * ROW_BYTES].unflatten(1, (page_entries, ROW_BYTES))[page, at]
    scales = pages[:, page_entries * ROW_BYTES : page_entries * ENTRY_BYTES].unflatten(1, (page_entries, 8))[page, at]
    return torch.cat([rows, scales], 1)
