"""What the cache costs, as `headrace layout` shows it: bytes of entries, pages, blocks, tokens, requests, transfers.

Everything is computed from the offset table that the pools are built with. "Unpadded" figures count entries only, as
published figures do; "page" figures are what pools and segments really hold. MiB and GiB are binary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..core.blocks import BLOCK_TOKENS
from ..core.pools import PoolKind
from .layout import (
    HEAD_DIM,
    PRECISIONS,
    WINDOW_TOKENS,
    CacheLayout,
    CacheShape,
    Stream,
)
from .segments import CacheGeometry

MIB, GIB = 1 << 20, 1 << 30
RATIOS = {Stream.C4A: 4, Stream.INDEX: 4, Stream.C128A: 128}
ONLINE_ROW_BYTES = 3 * HEAD_DIM * 4
"""What c128a would keep if it folded its rows into a running maximum, sum and weighted sum."""

V32_LAYERS, V32_ENTRY_BYTES = 61, (576 + 128) * 2
"""DeepSeek-V3.2 in bf16: latent and indexer key of each token in each layer, nothing compressed."""


def cache_table(shape: CacheShape, tokens: int, gib: float | None = None) -> dict[str, Any]:
    """Everything there is to say of one shape, ready for JSON.

    Args:
        tokens: length of the sequence that totals and transfers are of.
        gib: memory whose capacity in history tokens is wanted.
    """
    return {
        "layers": {
            "window_only": len(shape.layers(0)),
            "c4a": len(shape.layers(4)),
            "c128a": len(shape.layers(128)),
            "mtp": shape.mtp_layers,
        },
        "tokens": tokens,
        "precisions": {name: _precision(CacheLayout(shape, name), tokens, gib) for name in PRECISIONS},
        "v3.2_bf16": {
            "total_bytes": V32_LAYERS * tokens * V32_ENTRY_BYTES,
            "total_gib": V32_LAYERS * tokens * V32_ENTRY_BYTES / GIB,
        },
    }


def _precision(layout: CacheLayout, tokens: int, gib: float | None) -> dict[str, Any]:
    shape, history = layout.shape, layout.pools[PoolKind.HISTORY]
    entry_bytes = layout.kv_entry.num_bytes
    window_tokens = min(tokens, WINDOW_TOKENS)
    compressed = _history_bytes(layout, tokens)
    # The published figures count the window of the main layers once, no compressor rows, no draft layer, no padding.
    total = compressed + len(shape.ratios) * window_tokens * entry_bytes
    table: dict[str, Any] = {
        "streams": {stream.value: _stream(layout, stream) for stream in (Stream.WINDOW, *RATIOS)},
        "pages": {
            kind.value: {"page_bytes": pool.page_bytes, "unpadded_bytes": pool.used_bytes}
            for kind, pool in layout.pools.items()
        },
        "history_bytes_per_token": history.used_bytes / BLOCK_TOKENS,
        "history_page_bytes_per_token": history.page_bytes / BLOCK_TOKENS,
        "total_bytes": total,
        "total_gib": total / GIB,
        "history_pages_gib": -(-tokens // BLOCK_TOKENS) * history.page_bytes / GIB,
        "ship": _ship(layout, tokens, compressed, shape.num_layers * window_tokens * entry_bytes),
        "live_request": _live_request(layout),
    }
    if gib is not None:
        pages = int(gib * GIB) // history.page_bytes if history.page_bytes else 0
        table["capacity"] = {"gib": gib, "history_pages": pages, "tokens": pages * BLOCK_TOKENS}
    return table


def _history_bytes(layout: CacheLayout, tokens: int) -> int:
    return sum(
        len(layout.shape.layers(ratio)) * (tokens // ratio) * layout.entry(stream).num_bytes
        for stream, ratio in RATIOS.items()
    )


def _stream(layout: CacheLayout, stream: Stream) -> dict[str, Any]:
    regions = [region for pool in layout.pools.values() for region in pool.regions if region.stream is stream]
    entry, ratio = layout.entry(stream), RATIOS.get(stream, 1)
    return {
        "layers": len(regions),
        "format": entry.name,
        "entry_bytes": entry.num_bytes,
        "entries_per_page": regions[0].rows if regions else 0,
        "layer_page_bytes": regions[0].length if regions else 0,
        "layer_page_unpadded_bytes": regions[0].rows * regions[0].row_bytes if regions else 0,
        "block_page_bytes": sum(r.length for r in regions)
        * (BLOCK_TOKENS // ratio)
        // (regions[0].rows if regions else 1),
        "bytes_per_token": len(regions) * entry.num_bytes / ratio,
    }


def _ship(layout: CacheLayout, tokens: int, compressed: int, window: int) -> dict[str, Any]:
    """What a prompt of `tokens` costs to move, and what its segments hold: whole pages, rows as they are kept."""
    geometry = CacheGeometry(layout)
    state = sum(geometry.state_bytes(layer, tokens) for layer in range(layout.shape.num_layers))
    segments = geometry.history_segments(0, tokens // BLOCK_TOKENS, MIB * 8) + geometry.tail_segments(tokens, MIB * 8)
    total = compressed + window + state
    return {
        "history_bytes": compressed,
        "window_bytes": window,
        "state_bytes": state,
        "total_bytes": total,
        "total_mib": total / MIB,
        "segments": len(segments),
        "segment_bytes": sum(geometry.payload_bytes(ranges, tokens) for ranges in segments),
    }


def _live_request(layout: CacheLayout) -> dict[str, Any]:
    """What one running sequence holds beside its history."""
    rings = {
        stream: sum(r.length for r in layout.pools[PoolKind.STATE].regions if r.stream is stream)
        for stream in (Stream.C4A_STATE, Stream.INDEX_STATE, Stream.C128A_STATE)
    }
    window = 3 * layout.pools[PoolKind.WINDOW].page_bytes
    c4a = rings[Stream.C4A_STATE] + rings[Stream.INDEX_STATE]
    online = len(layout.shape.layers(128)) * ONLINE_ROW_BYTES
    return {
        "window_bytes": window,
        "c4a_and_index_state_bytes": c4a,
        "c128a_state_bytes": rings[Stream.C128A_STATE],
        "total_bytes": window + c4a + rings[Stream.C128A_STATE],
        "c128a_state_bytes_online": online,
        "total_bytes_online": window + c4a + online,
    }


def format_table(name: str, table: dict[str, Any]) -> str:
    """The same for reading."""
    layers, tokens, precisions = table["layers"], table["tokens"], table["precisions"]
    lines = [
        f"{name}: {layers['window_only']} window-only, {layers['c4a']} c4a, {layers['c128a']} c128a layers, "
        f"{layers['mtp']} draft",
        "",
    ]
    rows: list[list[str]] = []
    for precision, one in precisions.items():
        for stream, entry in one["streams"].items():
            rows.append(
                [
                    precision,
                    stream,
                    str(entry["layers"]),
                    f"{entry['entry_bytes']:,}",
                    f"{entry['layer_page_unpadded_bytes']:,}",
                    f"{entry['layer_page_bytes']:,}",
                    f"{entry['block_page_bytes']:,}",
                    f"{entry['bytes_per_token']:,.2f}",
                ]
            )
    head = ["precision", "stream", "layers", "entry B", "layer page B", "padded", "block B, all layers", "token B"]
    lines += [
        *_aligned([head, *rows]),
        "",
        "Pages in bytes: history 256 tokens, window 64, state one request, snapshot one border",
    ]
    kinds = [kind.value for kind in PoolKind]
    rows = [[p, *(f"{one['pages'][kind]['page_bytes']:,}" for kind in kinds)] for p, one in precisions.items()]
    lines += [*_aligned([["precision", *kinds], *rows]), "", f"A sequence of {tokens:,} tokens"]
    rows = [
        [
            precision,
            f"{one['total_gib']:.4f}",
            f"{one['history_pages_gib']:.4f}",
            f"{one['ship']['total_mib']:,.1f}",
            f"{one['ship']['segment_bytes'] / MIB:,.1f}",
            f"{one['history_bytes_per_token']:,.2f}",
        ]
        for precision, one in precisions.items()
    ]
    head = ["precision", "GiB unpadded", "GiB history pages", "MiB to ship", "MiB in segments", "history B a token"]
    lines += _aligned([head, *rows])
    first = precisions["bf16"]["total_bytes"]
    lines += [
        f"DeepSeek-V3.2 in bf16 beside it: {table['v3.2_bf16']['total_gib']:.2f} GiB"
        + (f", {table['v3.2_bf16']['total_bytes'] / first:.2f} times this model in bf16" if first else ""),
        "",
        "MiB of a running request beside its history",
    ]
    rows = [[p, *(f"{one['live_request'][key] / MIB:.2f}" for key in _LIVE)] for p, one in precisions.items()]
    lines += _aligned([["precision", *_LIVE.values()], *rows])
    if any("capacity" in one for one in precisions.values()):
        rows = [
            [p, f"{one['capacity']['history_pages']:,}", f"{one['capacity']['tokens']:,}"]
            for p, one in precisions.items()
        ]
        gib = precisions["bf16"]["capacity"]["gib"]
        lines += ["", f"History that {gib:g} GiB hold", *_aligned([["precision", "pages", "tokens"], *rows])]
    return "\n".join(lines)


_LIVE = {
    "window_bytes": "window, 3 pages",
    "c4a_and_index_state_bytes": "c4a + index state",
    "c128a_state_bytes": "c128a state",
    "total_bytes": "sum",
    "total_bytes_online": "sum if c128a were online",
}


def _aligned(rows: Sequence[Iterable[str]]) -> list[str]:
    cells = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]
