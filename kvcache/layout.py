"""The offset table: where each byte of the cache lies in the pages of four pools. Built once; everything asks it.

Seven streams. History (c4a, c128a, indexer keys) grows and never changes once written; the tail (window entries,
compressor rows) belongs to one position of one sequence. Pages are block outermost: all layers of a page are
neighbours, and no two regions overlap.

    history   256 tokens: c4a and index page of each c4a layer, then the page of each c128a layer
    window     64 tokens: one page of raw entries of each layer, draft layers last
    state     one live sequence: rings of c4a and index rows of each c4a layer, then the ring of each c128a layer
    snapshot  one block border: the four half-rows of c4a and index of each c4a layer

A layer page of N entries is N data rows, then N scale rows, then padding. Knows sizes and offsets; not tensors, not
page ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import LayoutError
from ..core.pools import PoolKind

FORMAT_VERSION = 1
"""Raised with every change of any byte's meaning."""

WINDOW_PAGE_TOKENS = 64
WINDOW_TOKENS = 128
"""Raw entries that a query sees, its own included."""

HEAD_DIM, INDEX_DIM, ROTARY_DIM = 512, 128, 64
OVERLAP_ROWS = 4
"""Rows of the previous group that the next c4a entry pools."""


class Stream(Enum):
    """What is stored; the names stand in the fingerprint."""

    WINDOW = "window"
    C4A = "c4a"
    C128A = "c128a"
    INDEX = "index"
    C4A_STATE = "c4a_state"
    C128A_STATE = "c128a_state"
    INDEX_STATE = "index_state"
    C4A_OVERLAP = "c4a_overlap"
    """What a snapshot keeps of C4A_STATE: the older half of four rows."""
    INDEX_OVERLAP = "index_overlap"


@dataclass(frozen=True)
class EntryBytes:
    """How one entry is stored."""

    name: str
    """Of the kernels' entry format, in lower case."""
    data_bytes: int
    scale_bytes: int
    dtype: str
    scale_dtype: str = "none"
    scale_group: int = 0
    scale_rule: str = "none"

    @property
    def num_bytes(self) -> int:
        return self.data_bytes + self.scale_bytes


_KV_FP8 = EntryBytes("kv_fp8", 576, 8, "e4m3x448+bf16x64", "e8m0x7+0", 64, "2^ceil(log2(max(amax,1e-4)/448)) of bf16")
_INDEX_FP8 = EntryBytes("index_fp8", 128, 4, "e4m3x128", "fp32x1", 128, "2^ceil(log2(amax/448))")
_INDEX_FP4 = EntryBytes("index_fp4", 64, 4, "e2m1x128", "e8m0x4", 32, "2^ceil(log2(max(amax,6*2^-126)/6))")

PRECISIONS: Mapping[str, tuple[EntryBytes, EntryBytes]] = {
    "fp32": (EntryBytes("kv_fp32", 2048, 0, "fp32x512"), EntryBytes("index_fp32", 512, 0, "fp32x128")),
    "bf16": (EntryBytes("kv_bf16", 1024, 0, "bf16x512"), EntryBytes("index_bf16", 256, 0, "bf16x128")),
    "fp8": (_KV_FP8, _INDEX_FP4),
    "fp8+fp8": (_KV_FP8, _INDEX_FP8),
}
"""KV entry and indexer key of each precision. "fp8+fp8" is for comparison with others; no kernel writes it."""


def layer_page_grain(kv_dtype: str) -> int:
    """Layer pages are padded to a multiple of this: 576 is the step of the peers' fp8 kernels."""
    return 576 if kv_dtype.startswith("fp8") else 512


@dataclass(frozen=True)
class CacheShape:
    """What the cache must know of a model."""

    ratios: tuple[int, ...]
    """One for each main layer: 0 window only, 4 with an indexer, 128."""
    mtp_layers: int = 0
    """Draft layers, numbered after the main ones; window only."""
    head_dim: int = HEAD_DIM
    index_dim: int = INDEX_DIM
    window: int = WINDOW_TOKENS

    def __post_init__(self) -> None:
        if not self.ratios or any(ratio not in (0, 4, 128) for ratio in self.ratios):
            raise LayoutError(f"layer ratios must be 0, 4 or 128: {self.ratios}")
        if (self.head_dim, self.index_dim, self.window) != (HEAD_DIM, INDEX_DIM, WINDOW_TOKENS):
            raise LayoutError("entries are laid out for head_dim 512, index_dim 128 and a window of 128 tokens")

    @property
    def num_layers(self) -> int:
        """Main and draft layers."""
        return len(self.ratios) + self.mtp_layers

    def ratio(self, layer: int) -> int:
        return self.ratios[layer] if layer < len(self.ratios) else 0

    def layers(self, ratio: int) -> tuple[int, ...]:
        """Main layers of one class."""
        return tuple(layer for layer, own in enumerate(self.ratios) if own == ratio)


@dataclass(frozen=True)
class Region:
    """One layer's part of every page of a pool."""

    pool: PoolKind
    stream: Stream
    layer: int
    offset: int
    length: int
    """With padding."""
    rows: int
    """Entries a page, or rows of a ring."""
    row_bytes: int
    """Data and scales of an entry; or one compressor row."""


@dataclass(frozen=True)
class PoolLayout:
    """One kind of page."""

    kind: PoolKind
    page_bytes: int
    """Also the distance of two pages."""
    regions: tuple[Region, ...]
    """By offset, without a gap."""

    @property
    def used_bytes(self) -> int:
        """Without the padding of layer pages."""
        return sum(region.rows * region.row_bytes for region in self.regions)


def live_window(length: int) -> range:
    """Window pages that queries at or after position `length` can see, of the positions below it."""
    return range(max(0, length - WINDOW_TOKENS + 1) // WINDOW_PAGE_TOKENS, -(-length // WINDOW_PAGE_TOKENS))


def kept_rows(ratio: int, length: int) -> range:
    """Positions whose compressor rows are needed once `length` tokens are computed."""
    if ratio == 4:
        return range(max(0, length - length % 4 - OVERLAP_ROWS), length)
    if ratio == 128:
        return range(length - length % 128, length)
    return range(length, length)


class CacheLayout:
    """The offset table of one shape and precision. Equal arguments give equal tables."""

    def __init__(self, shape: CacheShape, kv_dtype: str, extra_ring_rows: int = 0) -> None:
        """
        Args:
            kv_dtype: a key of `PRECISIONS`.
            extra_ring_rows: draft tokens that may be rejected; their rows must not have replaced one still needed.
        """
        if kv_dtype not in PRECISIONS:
            raise LayoutError(f"unknown cache precision {kv_dtype!r}; known are {', '.join(PRECISIONS)}")
        assert extra_ring_rows >= 0
        self.shape = shape
        self.kv_dtype = kv_dtype
        self.kv_entry, self.index_entry = PRECISIONS[kv_dtype]
        self.grain = layer_page_grain(kv_dtype)
        self.extra_ring_rows = extra_ring_rows
        self.pools: Mapping[PoolKind, PoolLayout] = self._build()
        self._regions = {(r.stream, r.layer): r for pool in self.pools.values() for r in pool.regions}

    def region(self, stream: Stream, layer: int) -> Region:
        """Raises LayoutError: the layer has no such stream."""
        try:
            return self._regions[stream, layer]
        except KeyError:
            raise LayoutError(f"layer {layer} has no stream {stream.value}") from None

    def has(self, stream: Stream, layer: int) -> bool:
        return (stream, layer) in self._regions

    def entry(self, stream: Stream) -> EntryBytes:
        """How entries of a window or history stream are stored."""
        return self.index_entry if stream is Stream.INDEX else self.kv_entry

    @staticmethod
    def columns(stream: Stream) -> int:
        """Channels of kv, and of score, in one compressor row."""
        return {
            Stream.C4A_STATE: 2 * HEAD_DIM,
            Stream.C128A_STATE: HEAD_DIM,
            Stream.INDEX_STATE: 2 * INDEX_DIM,
            Stream.C4A_OVERLAP: HEAD_DIM,
            Stream.INDEX_OVERLAP: INDEX_DIM,
        }[stream]

    def _build(self) -> dict[PoolKind, PoolLayout]:
        c4a, c128a = self.shape.layers(4), self.shape.layers(128)
        # Eight rows are alive before an entry completes; whole sixteens leave room for drafts.
        ring = -(-(2 * OVERLAP_ROWS + self.extra_ring_rows) // 16) * 16

        def entries(kind: PoolKind, stream: Stream, layer: int, rows: int) -> Region:
            row_bytes = self.entry(stream).num_bytes
            length = -(-rows * row_bytes // self.grain) * self.grain
            return Region(kind, stream, layer, 0, length, rows, row_bytes)

        def states(kind: PoolKind, stream: Stream, layer: int, rows: int) -> Region:
            row_bytes = self.columns(stream) * 2 * 4
            return Region(kind, stream, layer, 0, rows * row_bytes, rows, row_bytes)

        history, window, state, snapshot = PoolKind.HISTORY, PoolKind.WINDOW, PoolKind.STATE, PoolKind.SNAPSHOT
        table: dict[PoolKind, list[Region]] = {
            history: [
                entries(history, stream, layer, BLOCK_TOKENS // 4)
                for layer in c4a
                for stream in (Stream.C4A, Stream.INDEX)
            ]
            + [entries(history, Stream.C128A, layer, BLOCK_TOKENS // 128) for layer in c128a],
            window: [
                entries(window, Stream.WINDOW, layer, WINDOW_PAGE_TOKENS) for layer in range(self.shape.num_layers)
            ],
            state: [
                states(state, stream, layer, ring) for layer in c4a for stream in (Stream.C4A_STATE, Stream.INDEX_STATE)
            ]
            + [states(state, Stream.C128A_STATE, layer, 128 + self.extra_ring_rows) for layer in c128a],
            snapshot: [
                states(snapshot, stream, layer, OVERLAP_ROWS)
                for layer in c4a
                for stream in (Stream.C4A_OVERLAP, Stream.INDEX_OVERLAP)
            ],
        }
        return {kind: _place(kind, regions) for kind, regions in table.items()}

    def describe(self) -> dict[str, Any]:
        """What decides the meaning of shared bytes, as integers, strings, lists and objects of them.

        Ring lengths and the state pool's table are left out: rows travel by position, so the two ends may differ there.
        """
        shape = self.shape
        classes = {0: "window", 4: "c4a", 128: "c128a"}
        return {
            "format_version": FORMAT_VERSION,
            "layer_classes": [classes[ratio] for ratio in shape.ratios] + ["draft"] * shape.mtp_layers,
            "mtp_layers": shape.mtp_layers,
            "block_tokens": BLOCK_TOKENS,
            "window": shape.window,
            "window_page_tokens": WINDOW_PAGE_TOKENS,
            "streams": {
                **{s.value: self._describe_entries(s) for s in (Stream.WINDOW, Stream.C4A, Stream.C128A, Stream.INDEX)},
                **{
                    s.value: self._describe_states(s)
                    for s in (Stream.C4A_STATE, Stream.C128A_STATE, Stream.INDEX_STATE)
                },
            },
            "pools": {
                kind.value: {
                    "page_bytes": pool.page_bytes,
                    "regions": [[r.stream.value, r.layer, r.offset, r.length] for r in pool.regions],
                }
                for kind, pool in self.pools.items()
                if kind is not PoolKind.STATE
            },
        }

    def _layers(self, stream: Stream) -> list[int]:
        return [layer for own, layer in self._regions if own is stream]

    def _describe_entries(self, stream: Stream) -> dict[str, Any]:
        entry = self.entry(stream)
        ratio = {Stream.WINDOW: 1, Stream.C128A: 128}.get(stream, 4)
        return {
            "kind": "tail" if stream is Stream.WINDOW else "history",
            "layers": self._layers(stream),
            "entries_per_block": BLOCK_TOKENS // ratio,
            "entry_bytes": entry.num_bytes,
            "data_bytes": entry.data_bytes,
            "scale_bytes": entry.scale_bytes,
            "dtype": entry.dtype,
            "scale_dtype": entry.scale_dtype,
            "scale_group": entry.scale_group,
            "scale_rule": entry.scale_rule,
            "channel_order": "unrotated,rotary",
            "rotary": {"dims": ROTARY_DIM, "pairing": "adjacent", "position_rule": f"{ratio}*entry"},
            "rotation": "hadamard128" if entry.name == "index_fp4" else "none",
        }

    def _describe_states(self, stream: Stream) -> dict[str, Any]:
        overlap = 0 if stream is Stream.C128A_STATE else OVERLAP_ROWS
        return {
            "kind": "tail",
            "layers": self._layers(stream),
            "dtype": "fp32",
            "columns": self.columns(stream),
            "row": "kv,score",
            "overlap": overlap,
            "rows": 128 if stream is Stream.C128A_STATE else 2 * OVERLAP_ROWS,
            "ape_included": 1,
            "online": 0,
        }


def _place(kind: PoolKind, regions: list[Region]) -> PoolLayout:
    placed: list[Region] = []
    offset = 0
    for region in regions:
        placed.append(Region(kind, region.stream, region.layer, offset, region.length, region.rows, region.row_bytes))
        offset += region.length
    return PoolLayout(kind, offset, tuple(placed))
