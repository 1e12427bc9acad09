"""Gather and scatter of byte runs on the CPU, with a 64-bit digest of the payload in the same pass.

Digest: sum modulo 2^64 over the payload's little-endian 8-byte words w[i] of mix(w[i] + (i + 1) * K), the tail padded
with zeros to a word; the same number that `cuda/page_move.py` computes on a GPU. It depends on every byte and its
position, and guards against accidents, not against a forger. Knows addresses and lengths, not pages or pools; the
caller answers for their bounds.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.segments import SegmentRange
from .build import load_library

Int64Array = npt.NDArray[np.int64]

K, M1, M2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
MASK = (1 << 64) - 1


@functools.cache
def _library() -> ctypes.CDLL:
    library = load_library("segment_copy")
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    library.hr_gather.argtypes = (pointer, pointer, size, pointer)
    library.hr_gather.restype = ctypes.c_uint64
    library.hr_scatter.argtypes = (pointer, pointer, pointer, size)
    library.hr_scatter.restype = ctypes.c_uint64
    return library


def gather(addresses: Int64Array, lengths: Int64Array, payload_address: int) -> int:
    """Copy runs, one after another, into the payload; the digest of what was written there.

    Args:
        addresses, lengths: int64 [N], contiguous. Every length but the last is a multiple of 8. No run overlaps the
            payload.
    """
    _check(addresses, lengths)
    result: Any = _library().hr_gather(addresses.ctypes.data, lengths.ctypes.data, len(lengths), payload_address)
    return int(result)


def scatter(payload_address: int, addresses: Int64Array, lengths: Int64Array) -> int:
    """Copy the payload into runs, one after another; the digest of the very bytes stored. Arguments as `gather`."""
    _check(addresses, lengths)
    result: Any = _library().hr_scatter(payload_address, addresses.ctypes.data, lengths.ctypes.data, len(lengths))
    return int(result)


def _check(addresses: Int64Array, lengths: Int64Array) -> None:
    for array in (addresses, lengths):
        assert array.dtype == np.int64
        assert array.ndim == 1
        assert array.flags.c_contiguous
    assert len(addresses) == len(lengths)
    assert not (lengths < 0).any()
    assert not (lengths[:-1] % 8).any()


def digest_reference(payload: bytes) -> int:
    """The digest of a whole payload, written for reading."""
    words = np.frombuffer(payload + bytes(-len(payload) % 8), dtype="<u8")
    x = words + np.arange(1, len(words) + 1, dtype=np.uint64) * np.uint64(K)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(M1)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(M2)
    return int((x ^ (x >> np.uint64(31))).sum(dtype=np.uint64))


def mix_index(ranges: Sequence[SegmentRange], length: int) -> int:
    """Digest of a segment's index, to be mixed with that of its payload by `segment_digest`.

    Taken over the ranges as little-endian u32 (kind, layer_first, layer_count, first, count each), their number and
    the sequence's length, which decides what rows a STATE range holds.
    """
    words = [len(ranges), length]
    for part in ranges:
        words += (int(part.kind), part.layer_first, part.layer_count, part.first, part.count)
    return digest_reference(np.array(words, dtype="<u4").tobytes())


def segment_digest(index: int, payload: int) -> int:
    """One number for index and payload: neither can change, nor the two be exchanged, unseen."""
    x = (index + _mix((payload + K) & MASK)) & MASK
    return _mix((x + K) & MASK)


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * M1) & MASK
    x = ((x ^ (x >> 27)) * M2) & MASK
    return x ^ (x >> 31)
