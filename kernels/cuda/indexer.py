"""K4: indexer logits over paged fp4 keys, and the exact, stable top-k of each row [BI: every row stands alone].

    s[t, j] = sum_h w[t, h] * relu(q[t, h] . k[j])      fp32, relu before the sum

Shape letters: T query tokens, H = 64 heads, D = 128 channels, P pages of 64 keys, W pages a table row, K kept entries.

A key page is 64 x 64 bytes of codes (e2m1, channel 2i in the low nibble of byte i), then 64 x 4 scales (ue8m0, one for
32 channels). The product is taken in e4m3 with the key's largest scale pulled out; a group whose scale is d steps
smaller
is folded into its codes, exact for d up to 14. Larger d count as 14, here and in the reference.
"""

from __future__ import annotations

import ctypes
import itertools

import torch
from torch import Tensor

from . import build
from .arguments import is_dense

HEADS, CHANNELS, PAGE, CODE_BYTES, KEY_BYTES = 64, 128, 64, 64, 68
MAX_FOLD = 14
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class _Logits(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("q_stride_t", ctypes.c_int64),
        ("w", ctypes.c_void_p),
        ("w_stride_t", ctypes.c_int64),
        ("pages", ctypes.c_void_p),
        ("page_stride", ctypes.c_int64),
        ("num_pages", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("tokens", ctypes.c_int32),
        ("max_pages", ctypes.c_int32),
        ("skip", ctypes.c_int32),
        ("blocks", ctypes.c_int32),
        ("two", ctypes.c_int32),
        ("width", ctypes.c_int32),
    )


class _TopK(ctypes.Structure):
    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("logits_stride", ctypes.c_int64),
        ("lengths", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("out_stride", ctypes.c_int64),
        ("out_lengths", ctypes.c_void_p),
        ("tokens", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("max_length", ctypes.c_int32),
    )


def index_logits(
    q_THD: Tensor,
    w_TH: Tensor,
    pages: Tensor,
    table_TW: Tensor,
    lengths_T: Tensor,
    logits: Tensor,
    *,
    skip: int = 0,
    blocks: int = 528,
) -> None:
    """Writes logits[t, :lengths[t]]; the rest of the row stays as it was.

    Args:
        q_THD: [T, 64, 128] e4m3, contiguous but for stride(0). w_TH: [T, 64] fp32, the scale of q's row folded in.
        pages: uint8 [P, page stride], stride(1) = 1, aligned to 16 bytes. table_TW: [T, W] int32 page ids; keys of
        one that is no page get -inf. lengths_T: [T] int32.
        logits: [T, at least the largest length and at most 64 W] fp32; nothing is written past a row's end. skip: rows
        of at most so many keys are left out (top-k takes all).
        blocks: how many share the work, 4 for each multiprocessor; no result depends on it.
    """
    tokens = q_THD.shape[0]
    assert q_THD.shape[1:] == (HEADS, CHANNELS)
    assert w_TH.shape == (tokens, HEADS)
    assert table_TW.shape[0] == logits.shape[0] == tokens
    assert is_dense(lengths_T, torch.int32, tokens)
    assert table_TW.stride(1) == 1 or table_TW.shape[1] <= 1
    assert q_THD.stride()[1:] == (CHANNELS, 1)
    assert w_TH.dtype == torch.float32
    assert w_TH.stride(1) == 1
    assert w_TH.stride(0) % 2 == 0
    assert pages.dtype == torch.uint8
    assert pages.shape[0] > 0
    assert pages.shape[1] >= PAGE * KEY_BYTES
    assert pages.stride(1) == 1
    assert pages.stride(0) % 16 == pages.data_ptr() % 16 == 0
    assert q_THD.stride(0) % 4 == q_THD.data_ptr() % 4 == 0
    assert w_TH.data_ptr() % 8 == 0
    assert pages.shape[0] * pages.stride(0) < 16 << 32  # a page's place is 32 bits, in units of 16 bytes
    assert table_TW.dtype == torch.int32
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert logits.shape[1] <= PAGE * table_TW.shape[1]
    if not tokens:
        return
    params = _Logits(
        q=q_THD.data_ptr(),
        q_stride_t=q_THD.stride(0),
        w=w_TH.data_ptr(),
        w_stride_t=w_TH.stride(0),
        pages=pages.data_ptr(),
        page_stride=pages.stride(0),
        num_pages=pages.shape[0],
        table=table_TW.data_ptr(),
        table_stride=table_TW.stride(0),
        lengths=lengths_T.data_ptr(),
        logits=logits.data_ptr(),
        logits_stride=logits.stride(0),
        tokens=tokens,
        max_pages=table_TW.shape[1],
        skip=skip,
        blocks=blocks,
        two=2,  # a constant that the compiler does not see, or it would shift
        width=logits.shape[1],
    )
    library = build.load("indexer.cu")
    status = library.hr_index_logits(ctypes.byref(params), ctypes.c_void_p(build.current_stream()))
    build.check(status, "index_logits")


def top_k(
    logits: Tensor,
    lengths_T: Tensor,
    out_TK: Tensor,
    out_lengths_T: Tensor | None = None,
    table_TW: Tensor | None = None,
    *,
    max_length: int | None = None,
    blocks_a_row: int | None = None,
) -> None:
    """Writes the places of the K largest logits of each row, ascending; ties go to the lower place.

    Args:
        logits: [T, n] fp32, stride(1) = 1; a NaN counts as -inf. lengths_T: [T] int32.
        out_TK: [T, K] int32; -1 past the last.
        out_lengths_T: [T] int32, min(length, K), or -1 where a logit that was looked at is no finite number, as broken
            keys give, or where the length is negative or larger than max_length: such a choice is none. Or None.
            table_TW: page ids: places become slots page * 64 + offset.
        max_length: of any row, at most n (which it is by default) and 262,144. blocks_a_row: 1, 2, 4 or 8; no result
            depends on either.
    """
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert out_TK.stride(1) == 1
    tokens = logits.shape[0]
    assert out_TK.shape[0] == tokens
    assert is_dense(lengths_T, torch.int32, tokens)
    assert out_lengths_T is None or is_dense(out_lengths_T, torch.int32, tokens)
    assert out_TK.dtype == torch.int32
    assert table_TW is None or (table_TW.dtype == torch.int32 and table_TW.shape[0] == tokens)
    assert table_TW is None or table_TW.stride(1) == 1 or table_TW.shape[1] <= 1
    longest = logits.shape[1] if max_length is None else max_length
    assert longest <= logits.shape[1]
    assert table_TW is None or longest <= PAGE * table_TW.shape[1]
    if not tokens:
        return
    params = _TopK(
        logits=logits.data_ptr(),
        logits_stride=logits.stride(0),
        lengths=lengths_T.data_ptr(),
        table=build.address(table_TW),
        table_stride=0 if table_TW is None else table_TW.stride(0),
        out=out_TK.data_ptr(),
        out_stride=out_TK.stride(0),
        out_lengths=build.address(out_lengths_T),
        tokens=tokens,
        k=out_TK.shape[1],
        max_length=longest,
    )
    library = build.load("indexer.cu")
    size = blocks_a_row or top_k_blocks(tokens, longest)
    status = library.hr_top_k(ctypes.byref(params), size, ctypes.c_void_p(build.current_stream()))
    build.check(status, "top_k")


def top_k_blocks(rows: int, longest: int) -> int:
    """Blocks that share a row: one if it can hold it (32,768 logits); else enough, more while multiprocessors are
    free."""
    size = 1
    while size < 8 and (longest > 32768 * size or (size > 1 and rows * size * 2 <= 128 and longest > 16384 * size)):
        size *= 2
    return size


def read_keys(pages: Tensor, page_ids: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Keys of whole pages, dequantised with the fold rule: [n] page ids -> [n * 64, 128] of dtype."""
    page = pages[page_ids.long()]
    codes = page[:, : PAGE * CODE_BYTES].reshape(-1, CODE_BYTES)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    table = torch.tensor(E2M1, dtype=dtype, device=pages.device)
    value = table[nibbles & 7] * (1 - 2 * (nibbles >> 3)).to(dtype)
    exponent = page[:, PAGE * CODE_BYTES : PAGE * KEY_BYTES].reshape(-1, 4).long()
    exponent = torch.maximum(exponent, exponent.amax(1, keepdim=True) - MAX_FOLD)
    scaled: Tensor = value.view(-1, 4, 32) * torch.exp2(exponent.to(dtype) - 127)[..., None]
    return scaled.flatten(1)


def index_logits_reference(
    q_THD: Tensor, w_TH: Tensor, pages: Tensor, table_TW: Tensor, lengths_T: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Logits in `dtype`: [T, largest length], -inf past a row's length."""
    longest = int(lengths_T.max()) if lengths_T.numel() else 0
    out = torch.full((q_THD.shape[0], longest), float("-inf"), dtype=dtype, device=pages.device)
    for t in range(q_THD.shape[0]):
        n = int(lengths_T[t])
        keys = read_keys(pages, table_TW[t, : -(-n // PAGE)], dtype)[:n]
        dots = torch.relu(q_THD[t].float().to(dtype) @ keys.t())
        out[t, :n] = (dots * w_TH[t].to(dtype)[:, None]).sum(0)
    return out


def top_k_reference(logits: Tensor, lengths_T: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Places [T, k] int32 ascending, -1 past the last, and their number [T] int32; -1 for a length that cannot be."""
    out = torch.full((logits.shape[0], k), -1, dtype=torch.int32, device=logits.device)
    whole = (lengths_T >= 0) & (lengths_T <= logits.shape[1])
    count = torch.where(whole, lengths_T.clamp_max(k), -1).to(torch.int32)
    for t in whole.nonzero().flatten().tolist():
        order = torch.sort(logits[t, : int(lengths_T[t])], descending=True, stable=True).indices[:k]
        out[t, : order.numel()] = order.sort().values.to(torch.int32)
    return out, count


def pack_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds keys [n, 128] to e2m1 codes uint8 [n, 64] and scales uint8 [n, 4]: 2^ceil(log2(amax / 6)), ties to
    even."""
    x = keys.double().unflatten(1, (4, 32))
    fraction, exponent = torch.frexp(x.abs().amax(-1).clamp_min(6 * 2.0**-126))
    power = exponent - 3 + (fraction > 0.75).int()  # 6 = 0.75 * 2^3
    y = (x / torch.exp2(power.double())[..., None]).flatten(1)
    # The boundaries between neighbours; at a boundary the even code wins.
    magnitude = y.abs()
    code = torch.zeros_like(magnitude, dtype=torch.long)
    for i, (low, high) in enumerate(itertools.pairwise(E2M1)):
        middle = (low + high) / 2
        code += (magnitude > middle) if i % 2 == 0 else (magnitude >= middle)
    code += 8 * (torch.signbit(y)).long()
    return (code[:, 0::2] | (code[:, 1::2] << 4)).to(torch.uint8), (power + 127).to(torch.uint8)
