"""Bytes of cache entries: how 512 latent channels, or 128 of an indexer key, lie in a page.

A page of N entries holds N data rows, then N scale rows; the other formats have no scales. The functions here are the
plain PyTorch reference, on any device; `cpu.py` has the same formats in C, bit for bit.

    KV_FP32, KV_BF16        512 values
    KV_FP8    576 + 8 B     448 e4m3 codes, 64 bf16; 7 e8m0 scales (one per 64 codes) and a spare 0
    INDEX_FP32, INDEX_BF16  128 values
    INDEX_FP4  64 + 4 B     128 e2m1 codes, two a byte, low nibble first; 4 e8m0 scales (one per 32 codes)

Scales are powers of two: 2^ceil(log2(amax / largest code)), from the bits of the fp32 quotient, never from a log2.
Source: FlashMLA's sparse fp8 page format; OCP MXFP4 for the keys.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from .paged import PagedEntries

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BROKEN = 255
"""Scale byte of a group that reads as NaN: it was stored from something that is no finite number, or is poison."""


class EntryFormat(IntEnum):
    """The numbers are shared with csrc/cpu.c."""

    KV_FP32 = 0
    KV_BF16 = 1
    KV_FP8 = 2
    INDEX_FP32 = 3
    INDEX_BF16 = 4
    INDEX_FP4 = 5

    @property
    def data_bytes(self) -> int:
        """Bytes of one entry's data row."""
        return (2048, 1024, 576, 512, 256, 64)[self]

    @property
    def scale_bytes(self) -> int:
        """Bytes of one entry's scale row."""
        return (0, 0, 8, 0, 0, 4)[self]

    @property
    def width(self) -> int:
        """Channels of one entry."""
        return 128 if self >= EntryFormat.INDEX_FP32 else 512

    @property
    def quantised(self) -> bool:
        """Whether storing changes a bf16 value."""
        return self in (EntryFormat.KV_FP8, EntryFormat.INDEX_FP4)


def page_bytes(entry_format: EntryFormat, entries: int) -> int:
    """Bytes of a layer page of `entries` entries, without padding."""
    return entries * (entry_format.data_bytes + entry_format.scale_bytes)


def exponent_at_least(x: Tensor) -> Tensor:
    """ceil(log2(x)) of positive normal fp32 values, exact, int32."""
    mantissa, exponent = torch.frexp(x)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _scale_bytes(exponents_NG: Tensor, groups_NGC: Tensor) -> Tensor:
    """e8m0 bytes; BROKEN where a group holds what is no finite number, for its codes may not tell."""
    return torch.where(groups_NGC.isfinite().all(-1), exponents_NG + 127, BROKEN).to(torch.uint8)


def _scales(scale_NG: Tensor) -> Tensor:
    """What e8m0 bytes stand for [N, G, 1]."""
    power = torch.ldexp(torch.ones(scale_NG.shape, device=scale_NG.device), scale_NG.int() - 127)
    return torch.where(scale_NG == BROKEN, torch.nan, power)[..., None]


def pack_entries(entry_format: EntryFormat, values_NK: Tensor) -> tuple[Tensor, Tensor]:
    """[N, width] fp32 -> data rows [N, data_bytes] and scale rows [N, scale_bytes], uint8."""
    n = values_NK.shape[0]
    none = torch.empty(n, 0, dtype=torch.uint8, device=values_NK.device)
    match entry_format:
        case EntryFormat.KV_FP32 | EntryFormat.INDEX_FP32:
            return values_NK.float().contiguous().view(torch.uint8), none
        case EntryFormat.KV_BF16 | EntryFormat.INDEX_BF16:
            return values_NK.bfloat16().contiguous().view(torch.uint8), none
        case EntryFormat.KV_FP8:
            rounded = values_NK.bfloat16()
            groups = rounded[:, :448].float().view(-1, 7, 64)
            exponents = exponent_at_least(groups.abs().amax(-1).clamp_min(1e-4) / 448)
            scaled = torch.ldexp(groups, -exponents[..., None]).clamp(-448, 448)
            codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(1)
            scales = torch.nn.functional.pad(_scale_bytes(exponents, groups), (0, 1))
            return torch.cat([codes, rounded[:, 448:].contiguous().view(torch.uint8)], 1), scales
        case EntryFormat.INDEX_FP4:
            groups = values_NK.float().view(-1, 4, 32)
            exponents = exponent_at_least(groups.abs().amax(-1).clamp_min(6 * 2.0**-126) / 6)
            scaled = (groups.double() / torch.exp2(exponents[..., None].double())).flatten(1).clamp(-6, 6)
            table = torch.tensor(E2M1, dtype=torch.float64, device=values_NK.device)
            middle = (table[1:] + table[:-1]) / 2
            magnitude = scaled.abs()[..., None]
            up_on_tie = torch.arange(7, device=values_NK.device) % 2 == 1  # a tie goes to the even code
            code = ((magnitude > middle) | ((magnitude == middle) & up_on_tie)).sum(-1)
            code = code + 8 * ((scaled < 0) & (code > 0))
            return (code[:, 0::2] | code[:, 1::2] << 4).to(torch.uint8), _scale_bytes(exponents, groups)


def unpack_entries(entry_format: EntryFormat, data: Tensor, scale: Tensor) -> Tensor:
    """Data and scale rows as `pack_entries` makes them -> [N, width] fp32."""
    match entry_format:
        case EntryFormat.KV_FP32 | EntryFormat.INDEX_FP32:
            return data.contiguous().view(torch.float32)
        case EntryFormat.KV_BF16 | EntryFormat.INDEX_BF16:
            return data.contiguous().view(torch.bfloat16).float()
        case EntryFormat.KV_FP8:
            codes = data[:, :448].contiguous().view(torch.float8_e4m3fn).float().view(-1, 7, 64)
            plain = (codes * _scales(scale[:, :7])).flatten(1)
            return torch.cat([plain, data[:, 448:].contiguous().view(torch.bfloat16).float()], 1)
        case EntryFormat.INDEX_FP4:
            code = torch.stack([data & 15, data >> 4], -1).flatten(1).long()
            value = torch.tensor(E2M1, device=data.device)[code & 7] * torch.where(code >= 8, -1.0, 1.0)
            return (value.view(-1, 4, 32) * _scales(scale)).flatten(1)


def _rows(view: PagedEntries, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Byte indices into the pool's flat storage of the data and scale rows of `slots`."""
    entry_format, n = EntryFormat(view.format), view.entries_per_page
    page, i = slots // n, slots % n
    start = page * view.storage.stride(0) + view.offset
    data = start + i * entry_format.data_bytes
    scale = start + n * entry_format.data_bytes + i * entry_format.scale_bytes
    return (
        data[:, None] + torch.arange(entry_format.data_bytes, device=slots.device),
        scale[:, None] + torch.arange(entry_format.scale_bytes, device=slots.device),
    )


def insert_entries(view: PagedEntries, slots: Tensor, values_NK: Tensor) -> None:
    """Write entries at int64 `slots` (page * entries_per_page + i); slot -1 writes nothing."""
    keep = slots >= 0
    data, scale = pack_entries(EntryFormat(view.format), values_NK[keep])
    data_at, scale_at = _rows(view, slots[keep])
    flat = view.storage.view(-1)
    flat[data_at] = data
    flat[scale_at] = scale


def read_entries(view: PagedEntries, slots: Tensor) -> Tensor:
    """Entries at int64 `slots` -> [N, width] fp32."""
    data_at, scale_at = _rows(view, slots)
    flat = view.storage.view(-1)
    return unpack_entries(EntryFormat(view.format), flat[data_at], flat[scale_at])
