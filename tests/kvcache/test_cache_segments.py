"""Segments: everything arrives where it belongs, nothing else is touched, and every fault shows."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from headrace.core.errors import LayoutError
from headrace.core.pools import PoolKind
from headrace.core.segments import RangeKind, SegmentRange
from headrace.kvcache.layout import CacheLayout, CacheShape, Stream, live_window
from headrace.kvcache.pools import CachePools
from headrace.kvcache.presets import PRESETS
from headrace.kvcache.segments import CacheGeometry, CacheMover
from headrace.kvcache.sequence import SequencePages
from headrace.kvcache.table import cache_table

SHAPE = CacheShape((0, 4, 128, 4, 128), mtp_layers=1)
PAGES = {PoolKind.HISTORY: 8, PoolKind.WINDOW: 9, PoolKind.STATE: 3}
LIMIT = 8 << 20


class End:
    """One process's pools, with a sequence of `length` tokens on scattered pages."""

    def __init__(
        self, length: int, seed: int, *, kv_dtype: str = "fp8", extra: int = 0, shape: CacheShape = SHAPE
    ) -> None:
        rng = random.Random(seed)
        self.length = length
        self.layout = CacheLayout(shape, kv_dtype, extra)
        self.pools = CachePools(self.layout, PAGES, poison=True)
        self.mover = CacheMover(self.layout, self.pools.specs())
        window = live_window(length)
        self.pages = SequencePages(
            tuple(rng.sample(range(8), -(-length // 256))),
            tuple(zip(window, rng.sample(range(9), len(window)), strict=True)),
            rng.randrange(3),
        )

    def fill(self, seed: int) -> End:
        generator = torch.Generator().manual_seed(seed)
        for kind in PAGES:
            storage = self.pools.storage(kind)
            storage.copy_(torch.randint(0, 256, storage.shape, dtype=torch.uint8, generator=generator))
        return self

    def pieces(self) -> dict[tuple[object, ...], torch.Tensor]:
        """Every byte that must travel, by logical position, spelled out without the code under test."""
        found: dict[tuple[object, ...], torch.Tensor] = {}
        for region in self.layout.pools[PoolKind.HISTORY].regions:
            for block, page in enumerate(self.pages.history):
                part = self.pools.storage(PoolKind.HISTORY)[page, region.offset : region.offset + region.length]
                found["history", region.stream, region.layer, block] = part
        for region in self.layout.pools[PoolKind.WINDOW].regions:
            for number, page in self.pages.window:
                part = self.pools.storage(PoolKind.WINDOW)[page, region.offset : region.offset + region.length]
                found["window", region.layer, number] = part
        for region in self.layout.pools[PoolKind.STATE].regions:
            rows = self.pools.storage(PoolKind.STATE)[
                self.pages.state_row, region.offset : region.offset + region.rows * region.row_bytes
            ].view(region.rows, 2, region.row_bytes // 2)
            for t in range(self.length):
                row, half = rows[t % region.rows], region.row_bytes // 4
                if region.stream is Stream.C128A_STATE:
                    if t >= self.length // 128 * 128:
                        found["state", region.stream, region.layer, t] = row
                elif t >= self.length // 4 * 4:
                    found["state", region.stream, region.layer, t] = row
                elif t >= self.length // 4 * 4 - 4:
                    found["state", region.stream, region.layer, t] = row[:, :half]
        return found


def segments_of(geometry: CacheGeometry, length: int, limit: int, held: int = 0) -> list[tuple[SegmentRange, ...]]:
    return geometry.history_segments(held, length // 256 - held, limit) + geometry.tail_segments(length, limit)


def move(source: End, target: End, segments: Sequence[tuple[SegmentRange, ...]]) -> list[tuple[int, int]]:
    """Ship segments in any order through one buffer; both digests of each."""
    buffer = np.empty(LIMIT, dtype=np.uint8)
    digests = []
    for ranges in segments:
        buffer[:] = 0xEE
        sent = source.mover.gather(source.pages, ranges, source.length, buffer.ctypes.data)
        size = source.mover.geometry.payload_bytes(ranges, source.length)
        assert (buffer[size : size + 64] == 0xEE).all()
        digests.append((sent, target.mover.scatter(target.pages, ranges, target.length, buffer.ctypes.data)))
    return digests


def assert_equal_where_it_counts(source: End, target: End) -> None:
    wanted, got = source.pieces(), target.pieces()
    assert wanted.keys() == got.keys()
    for name, part in wanted.items():
        assert torch.equal(part, got[name]), name


@pytest.mark.parametrize("length", [*range(1, 265), 383, 384, 385, 511, 512, 513, 1023, 1024, 1025, 1300])
def test_a_sequence_arrives_whole_on_other_pages_and_other_rings(length):
    """All residues of 4 and 128: every live byte arrives, every other byte of the target stays poisoned."""
    source, target = End(length, 1, extra=length % 3 * 7).fill(length), End(length, 2, extra=length % 2 * 32)
    untouched = {kind: target.pools.storage(kind).clone() for kind in PAGES}
    segments = segments_of(source.mover.geometry, length, 600_000)
    random.Random(length).shuffle(segments)
    digests = move(source, target, segments)
    assert all(sent == stored for sent, stored in digests)
    assert len({sent for sent, _ in digests}) == len(digests)
    assert_equal_where_it_counts(source, target)
    for part in target.pieces().values():
        part.fill_(0xFF)
    for kind, before in untouched.items():
        assert torch.equal(target.pools.storage(kind), before)


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8"])
@pytest.mark.parametrize("limit", [600_000, 1_000_000, 8 << 20])
@pytest.mark.parametrize(
    ("length", "held"), [(1, 0), (255, 0), (256, 0), (256, 1), (700, 0), (700, 2), (1024, 3), (1025, 4)]
)
def test_segments_cover_what_is_expected_once(kv_dtype, limit, length, held):
    """Segments partition the expected ranges, stay within the bound, and count the same bytes."""
    geometry = CacheGeometry(CacheLayout(SHAPE, kv_dtype))
    segments = segments_of(geometry, length, limit, held)
    fine = [part for ranges in segments for part in geometry.split(ranges)]
    assert len(set(fine)) == len(fine)
    assert set(fine) == geometry.split(geometry.expected(length, held))
    sizes = [geometry.payload_bytes(ranges, length) for ranges in segments]
    assert max(sizes) <= limit
    assert sum(sizes) == sum(geometry.payload_bytes([part], length) for part in fine)
    assert all(1 <= len(ranges) <= 256 for ranges in segments)


def test_finest_ranges_can_be_moved_one_by_one():
    """What a taker asks for again comes alone."""
    source, target = End(700, 3).fill(3), End(700, 4, extra=20)
    move(
        source,
        target,
        [(part,) for part in sorted(source.mover.geometry.split(source.mover.geometry.expected(700, 0)))],
    )
    assert_equal_where_it_counts(source, target)


def test_small_things_share_a_segment_and_large_ones_are_cut_by_layers():
    """Released sizes: 9 blocks of Flash in 8 MiB; a block cut into layer groups where the bound is small."""
    geometry = CacheGeometry(CacheLayout(PRESETS["deepseek-v4-flash"], "fp8"))
    segments = geometry.history_segments(10, 20, 8 << 20)
    assert [ranges[0].count for ranges in segments] == [9, 9, 2]
    assert segments[0] == (SegmentRange(RangeKind.HISTORY, 0, 44, 10, 9),)
    cut = geometry.history_segments(5, 2, 600_000)
    assert [ranges[0].first for ranges in cut] == [5, 5, 6, 6]
    assert [(ranges[0].layer_first, ranges[0].layer_count) for ranges in cut[:2]] == [(2, 26), (28, 15)]
    assert len(geometry.tail_segments(131_072, 8 << 20)) == 1
    assert len(geometry.tail_segments(131_072 + 127, 8 << 20)) == 2
    assert geometry.history_segments(3, 0, 8 << 20) == []


def test_too_small_a_segment_is_refused_and_the_least_size_is_known():
    """A layer's part of a unit is never cut."""
    for kv_dtype in ("fp32", "bf16", "fp8"):
        geometry = CacheGeometry(CacheLayout(SHAPE, kv_dtype))
        least = geometry.min_segment_bytes
        cut_all(geometry, least)
        with pytest.raises(LayoutError):
            cut_all(geometry, least - 1)


def cut_all(geometry: CacheGeometry, limit: int) -> None:
    """Prompts of every length, into segments of at most this size."""
    for length in (*range(1, 600), 1000, 1023):
        segments_of(geometry, length, limit)


def test_window_only_models_have_no_history_and_no_rows():
    """Nothing but window pages travels."""
    shape = CacheShape((0, 0))
    source, target = End(300, 1, shape=shape).fill(1), End(300, 2, shape=shape)
    segments = segments_of(source.mover.geometry, 300, LIMIT)
    assert [part.kind for ranges in segments for part in ranges] == [RangeKind.WINDOW]
    move(source, target, segments)
    assert_equal_where_it_counts(source, target)


@pytest.mark.parametrize("tokens", [4096, 32768, 131072, 1 << 20])
def test_aligned_prompts_ship_no_c128a_row_and_half_rows_of_c4a(tokens):
    """The published state part of a transfer, 430,080 bytes for Flash, is what the segments hold."""
    table = cache_table(PRESETS["deepseek-v4-flash"], tokens)["precisions"]["bf16"]["ship"]
    assert table["state_bytes"] == 430_080
    assert table["segment_bytes"] == table["total_bytes"]


def broken(name: str, segments: list[tuple[SegmentRange, ...]]) -> list[tuple[SegmentRange, ...]]:
    return {
        "dropped": segments[:-1],
        "doubled": [*segments, segments[1]],
        "cut": [segments[0][:-1] or segments[1], *segments[1:]],
    }[name]


@pytest.mark.parametrize("name", ["dropped", "doubled", "cut"])
def test_a_lost_or_doubled_segment_shows_in_the_coverage(name):
    """The finest ranges of what came are not, once each, those expected."""
    geometry = CacheGeometry(CacheLayout(SHAPE, "fp8"))
    segments = broken(name, segments_of(geometry, 700, 300_000 + 320_000))
    fine = [part for ranges in segments for part in geometry.split(ranges)]
    assert sorted(fine) != sorted(geometry.split(geometry.expected(700, 0)))


def test_any_change_of_payload_or_index_shows_in_the_digest():
    """One bit, two runs exchanged, another block, another order, another length: each is refused."""
    source, target = End(700, 5).fill(5), End(700, 6)
    buffer = np.empty(LIMIT, dtype=np.uint8)
    ranges = source.mover.geometry.tail_segments(700, LIMIT)[0]
    size = source.mover.geometry.payload_bytes(ranges, 700)
    digest = source.mover.gather(source.pages, ranges, 700, buffer.ctypes.data)
    clean = buffer.copy()

    def stored(index: Sequence[SegmentRange] = ranges) -> int:
        return target.mover.scatter(target.pages, index, 700, buffer.ctypes.data)

    assert stored() == digest
    rng = random.Random(7)
    for bit in [rng.randrange(size * 8) for _ in range(50)]:
        buffer[bit // 8] ^= 1 << bit % 8
        assert stored() != digest
        buffer[:] = clean
    buffer[0:64], buffer[64:128] = clean[64:128], clean[0:64]
    assert stored() != digest
    buffer[:] = clean
    buffer[4096:8192] = clean[0:4096]
    assert stored() != digest
    buffer[:] = clean
    assert stored(ranges[::-1]) != digest
    one = [SegmentRange(RangeKind.HISTORY, 0, 6, 0, 1)]
    other = [SegmentRange(RangeKind.HISTORY, 0, 6, 1, 1)]
    first = source.mover.gather(source.pages, one, 700, buffer.ctypes.data)
    assert stored(other) != first
    assert stored(one) == first


H, W, S = RangeKind.HISTORY, RangeKind.WINDOW, RangeKind.STATE


@pytest.mark.parametrize(
    "ranges",
    [
        [],
        [SegmentRange(H, 0, 6, 3, 1)],
        [SegmentRange(H, 0, 6, 2, 2)],
        [SegmentRange(H, 0, 6, 0, 0)],
        [SegmentRange(H, 0, 6, -1, 1)],
        [SegmentRange(H, 0, 6, 0, 1 << 40)],
        [SegmentRange(H, 0, 7, 0, 1)],
        [SegmentRange(H, 6, 1, 0, 1)],
        [SegmentRange(H, -1, 3, 0, 1)],
        [SegmentRange(H, 0, 0, 0, 1)],
        [SegmentRange(H, 0, 1, 0, 1)],
        [SegmentRange(W, 0, 6, 7, 1)],
        [SegmentRange(W, 0, 6, 8, 4)],
        [SegmentRange(S, 0, 6, 640, 59)],
        [SegmentRange(S, 0, 6, 640, 61)],
        [SegmentRange(S, 0, 6, 641, 59)],
        [SegmentRange(S, 0, 6, -4, 704)],
        [SegmentRange(S, 0, 1, 640, 60)],
        [SegmentRange(9, 0, 6, 0, 1)],
        [SegmentRange(H, 0, 3, 0, 1), SegmentRange(H, 1, 3, 0, 1)],
        [SegmentRange(H, 0, 6, block, 1) for block in range(300)],
    ],
)
def test_ranges_that_the_sequence_does_not_have_are_refused(ranges):
    """700 tokens: blocks 0 to 2, window pages 8 to 10, rows up to 699, layers 0 to 5. Nothing is written."""
    target = End(700, 8)
    before = {kind: target.pools.storage(kind).clone() for kind in PAGES}
    buffer = np.zeros(LIMIT, dtype=np.uint8)
    with pytest.raises(LayoutError):
        target.mover.geometry.payload_bytes(ranges, 700)
    for copy in (target.mover.scatter, target.mover.gather):
        with pytest.raises(LayoutError):
            copy(target.pages, ranges, 700, buffer.ctypes.data)
    for kind, storage in before.items():
        assert torch.equal(target.pools.storage(kind), storage)


def test_pages_that_are_not_there_are_refused():
    """A block, a window page or a row that the sequence has not, or an id outside the pool."""
    end = End(700, 9)
    buffer = np.zeros(LIMIT, dtype=np.uint8)
    history, window, row = end.pages.history, end.pages.window, end.pages.state_row
    for pages, part in (
        (SequencePages(history[:2], window, row), SegmentRange(H, 0, 6, 2, 1)),
        (SequencePages((*history[:2], 8), window, row), SegmentRange(H, 0, 6, 2, 1)),
        (SequencePages((*history[:2], -1), window, row), SegmentRange(H, 0, 6, 2, 1)),
        (SequencePages(history, window[1:], row), SegmentRange(W, 0, 6, 8, 1)),
        (SequencePages(history, window, -1), SegmentRange(S, 0, 6, 640, 60)),
        (SequencePages(history, window, 3), SegmentRange(S, 0, 6, 640, 60)),
    ):
        with pytest.raises(LayoutError):
            end.mover.gather(pages, [part], 700, buffer.ctypes.data)


@pytest.mark.parametrize(
    "part", [SegmentRange(H, 0, 6, 0, 1 << 31), SegmentRange(W, 0, 6, 1 << 32, 1), SegmentRange(S, 0, 9, 0, 4)]
)
def test_splitting_nonsense_is_refused_before_it_costs_memory(part):
    """Numbers from a peer never decide how much is built."""
    with pytest.raises(LayoutError):
        CacheGeometry(CacheLayout(SHAPE, "fp8")).split([part])


def test_expected_refuses_blocks_that_the_sequence_has_not():
    """A taker can hold whole blocks only."""
    geometry = CacheGeometry(CacheLayout(SHAPE, "fp8"))
    for length, held in ((700, 3), (700, -1), (0, 0)):
        with pytest.raises(LayoutError):
            geometry.expected(length, held)
