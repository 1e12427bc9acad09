"""Where the history of a transfer is cut into segments.

A segment is gathered before its READ begins and stored after it has ended, so nothing overlaps with the first gather
nor with the last scatter. Hence the first segments of a transfer are smaller than the others, and so are the last.
"""

from __future__ import annotations

from ..core.segments import SegmentGeometry, SegmentRange

LEAST_PART = 4
"""The smallest have one part in so many of a full segment: each costs a message and a READ, whatever its size."""


def cut_history(
    geometry: SegmentGeometry, length: int, blocks: range, travelling: range, segment_bytes: int
) -> list[tuple[SegmentRange, ...]]:
    """Segments of `blocks`, which are final now.

    Args:
        length: tokens of the sequence.
        travelling: all whole blocks of the transfer; `blocks` lies in it.
    """
    if not blocks:
        return []
    one = geometry.history_segments(blocks.start, 1, segment_bytes)
    full = segment_bytes // max(1, sum(geometry.payload_bytes(ranges, length) for ranges in one))
    least = full // LEAST_PART
    if least < 1:
        return geometry.history_segments(blocks.start, len(blocks), segment_bytes)
    segments: list[tuple[SegmentRange, ...]] = []
    first = blocks.start
    while first < blocks.stop:
        before, left = first - travelling.start, travelling.stop - first
        count = min(full, max(least, before), max(least, left // 2), blocks.stop - first)
        segments += geometry.history_segments(first, count, segment_bytes)
        first += count
    return segments
