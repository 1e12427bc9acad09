"""Gather and scatter of page ranges with a 64-bit digest in the same pass: what a transfer does on either side.

A piece says: `bytes` bytes at device address `from` go to `to`, and are the payload's bytes from offset `at` on.
Gathering,
`to` lies in a send buffer; scattering, `from` lies in a landing buffer; the digest of the same payload is the same both
ways, since it is taken over the bytes in registers between load and store.

Digest: sum modulo 2^64 over the payload's little-endian 8-byte words w[i] of mix(w[i] + (i + 1) * K). Knows
addresses and
lengths, not pages or pools; the caller answers for their bounds.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from . import build

GRAIN_BYTES = 16
K, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def move_pieces(pieces: Tensor, digest: Tensor, *, max_bytes: int) -> None:
    """Copies all pieces and adds their part of the digest to `digest`.

    Args:
        pieces: int64 [N, 4] on the device or in pinned memory: from, to, at, bytes, all multiples of 16; destinations
            do not overlap.
        digest: int64 [1] on the device, zero for a whole payload. max_bytes: no piece is longer.
    """
    assert pieces.dtype == torch.int64
    assert pieces.is_contiguous()
    assert digest.dtype == torch.int64
    blocks = max(1, min(-(-max_bytes // 16384), 64))
    library = build.load("page_move.cu")
    status = library.hr_move_pieces(
        ctypes.c_void_p(pieces.data_ptr()),
        ctypes.c_int64(pieces.shape[0]),
        blocks,
        ctypes.c_void_p(digest.data_ptr()),
        ctypes.c_void_p(build.current_stream()),
    )
    build.check(status, "move_pieces")


def digest_reference(payload: Tensor, at: int = 0) -> int:
    """Digest of uint8 bytes that begin at payload offset `at` (both multiples of 8), by torch's wrapping int64
    arithmetic.

    Returns:
        the digest as an unsigned 64-bit integer.
    """
    words = payload.contiguous().view(torch.int64)
    index = torch.arange(at // 8 + 1, at // 8 + 1 + words.numel(), device=payload.device)
    x = words + index * _signed(K)
    x = (x ^ _shift_right(x, 30)) * _signed(M1)
    x = (x ^ _shift_right(x, 27)) * _signed(M2)
    return int((x ^ _shift_right(x, 31)).sum()) & _MASK


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _shift_right(x: Tensor, by: int) -> Tensor:
    """Shift that brings in zeros: torch's shift of int64 brings in the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
