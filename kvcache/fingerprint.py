"""The layout fingerprint: what two workers must agree on, to the byte, before one may read the other's pages.

A canonical JSON document from the offset table in use, facts of the model beside it, and golden digests: hashes of the
bytes that this process's own insert path made from fixed values. These make the rest unnecessary to trust: workers that
round or place anything differently differ there, whatever they declare. Equal fingerprints may exchange pages and share
block hashes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..core.errors import LayoutError
from ..core.pools import PoolKind
from ..kernels.paged import PagedEntries
from .layout import CacheLayout, Stream
from .pools import ENTRY_STREAMS, CachePools

Insert = Callable[[PagedEntries, Tensor, Tensor], None]
"""`kernels.entry_format.insert_entries`, or a fast path that must make the same bytes: view, slots, values."""

MAX_DIFFERENCES = 32
MAX_DOCUMENT_BYTES = 1 << 20
GOLDEN_PAGES = 2
GOLDEN_TABLE_POSITIONS = (0, 1, 127, 4096, 65535, 1048575)
"""Rows of the rotary tables that `table_digest` covers, as far as the table goes."""


def document(layout: CacheLayout, model: Mapping[str, Any], golden: Mapping[str, str]) -> str:
    """The canonical document.

    Args:
        model: what the table does not know: model id, weight digest, rotary bases, tokenizer digest. Integers, strings,
            lists and objects of them; floats only as strings.
        golden: of `golden_digests`, and what else was hashed beside it.
    """
    return canonical({"layout": layout.describe(), "model": dict(model), "golden": dict(golden)})


def canonical(value: Mapping[str, Any]) -> str:
    """JSON with sorted keys and no spaces.

    Raises:
        LayoutError: something in it has more than one spelling.
    """
    _check(value, "")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def fingerprint(text: str) -> bytes:
    """SHA-256 of a document."""
    return hashlib.sha256(text.encode()).digest()


def differing_fields(a: str, b: str) -> list[str]:
    """Paths at which two documents differ, at most 32. One of them came from a peer and may be anything."""
    try:
        if len(a) > MAX_DOCUMENT_BYTES or len(b) > MAX_DOCUMENT_BYTES:
            return ["document too long"]
        left, right = json.loads(a), json.loads(b)
        found: list[str] = []
        _compare(left, right, "", found)
        return found
    except (ValueError, RecursionError):
        return ["not a document"]


def golden_digests(layout: CacheLayout, insert: Insert, device: str = "cpu") -> dict[str, str]:
    """Hash, for each entry stream, of the pages of all layers that `insert` makes from fixed values.

    Compressor rows are plain fp32 and need none. Padding counts as zeros.
    """
    pools = CachePools(layout, {PoolKind.HISTORY: GOLDEN_PAGES, PoolKind.WINDOW: GOLDEN_PAGES}, device)
    for kind in (PoolKind.HISTORY, PoolKind.WINDOW):
        pools.storage(kind).zero_()
    digests: dict[str, str] = {}
    for stream in ENTRY_STREAMS:
        digest, layers = hashlib.sha256(), 0
        for layer in range(layout.shape.num_layers):
            if not layout.has(stream, layer):
                continue
            region, view, layers = layout.region(stream, layer), pools.entries(stream, layer), layers + 1
            num = GOLDEN_PAGES * region.rows
            values = torch.from_numpy(golden_values(num, 128 if stream is Stream.INDEX else 512, layer))
            # Backwards, so that the digest also sees where a slot lies.
            slots = torch.arange(num - 1, -1, -1, dtype=torch.int64, device=device)
            insert(view, slots, values.to(device))
            pages = pools.storage(region.pool)[:, region.offset : region.offset + region.length]
            digest.update(pages.cpu().numpy().tobytes())
        if layers:
            digests[stream.value] = digest.hexdigest()
    return digests


def golden_values(num: int, width: int, layer: int) -> npt.NDArray[np.float32]:
    """fp32 [num, width] from an integer hash of layer, token and channel; the same on every machine.

    Signs, eight binary exponents within a row and eight between rows, short mantissas that make ties at every rounding,
    zeros, negative zeros, and one row of nothing but zero.
    """
    token, channel = np.meshgrid(np.arange(num, dtype=np.uint64), np.arange(width, dtype=np.uint64), indexing="ij")
    x = (np.uint64(layer) << np.uint64(40)) + (token << np.uint64(16)) + channel + np.uint64(1)
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    bits = np.where((x >> np.uint64(8)) & np.uint64(1), np.uint64(9), np.uint64(3))  # 9 fraction bits: ties of bf16
    fraction = (x >> np.uint64(16)) & ((np.uint64(1) << bits) - np.uint64(1))
    mantissa = 1.0 + fraction.astype(np.float64) / (np.uint64(1) << bits).astype(np.float64)
    row_exponent = np.array([0, -7, 5, -40, 40, -14, 1, -60])[np.arange(num) % 8]
    exponent = (x & np.uint64(7)).astype(np.int64) - 4 + row_exponent[:, None]
    values: npt.NDArray[np.float64] = np.ldexp(mantissa, exponent) * np.where(
        (x >> np.uint64(3)) & np.uint64(1), -1.0, 1.0
    )
    values[((x >> np.uint64(4)) & np.uint64(15)) == 0] = 0.0
    values[((x >> np.uint64(4)) & np.uint64(15)) == 1] = -0.0
    values[num // 2] = 0.0
    result: npt.NDArray[np.float32] = values.astype(np.float32)
    return result


def table_digest(table: Tensor) -> str:
    """Hash of a few rows of a rotary table, near and far: they decide the bytes of every rotated channel."""
    rows = [position for position in GOLDEN_TABLE_POSITIONS if position < table.shape[0]]
    return hashlib.sha256(table[rows].contiguous().cpu().view(torch.uint8).numpy().tobytes()).hexdigest()


def _check(value: Any, path: str) -> None:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise LayoutError(f"key {key!r} at {path or 'top'} is not a string")
            _check(inner, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            _check(inner, f"{path}[{index}]")
    elif isinstance(value, bool) or not isinstance(value, int | str):
        raise LayoutError(f"{path}: {value!r} is neither an integer nor a string")


def _compare(a: Any, b: Any, path: str, found: list[str]) -> None:
    if len(found) >= MAX_DIFFERENCES:
        return
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted(a.keys() | b.keys()):
            _compare(a.get(key), b.get(key), f"{path}.{key}".lstrip(".")[:200], found)
    elif a != b:
        found.append(path or "document")
