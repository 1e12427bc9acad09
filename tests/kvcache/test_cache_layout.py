"""The offset table against the published figures, and against itself."""

from __future__ import annotations

import pytest

from headrace.core.errors import LayoutError
from headrace.core.pools import PoolKind
from headrace.kvcache.layout import PRECISIONS, CacheLayout, CacheShape, Stream, kept_rows, live_window
from headrace.kvcache.presets import PRESETS

FLASH, PRO = PRESETS["deepseek-v4-flash"], PRESETS["deepseek-v4-pro"]


def test_presets_have_the_released_layer_classes():
    """43 and 61 main layers and one draft layer each."""
    assert (len(FLASH.ratios), len(FLASH.layers(0)), len(FLASH.layers(4)), len(FLASH.layers(128))) == (43, 2, 21, 20)
    assert (len(PRO.ratios), len(PRO.layers(0)), len(PRO.layers(4)), len(PRO.layers(128))) == (61, 0, 30, 31)
    assert FLASH.layers(4)[0] == 2
    assert FLASH.layers(4)[-1] == 42
    assert FLASH.mtp_layers == PRO.mtp_layers == 1


@pytest.mark.parametrize(
    ("shape", "kv_dtype", "page", "unpadded"),
    [
        (FLASH, "fp8+fp8", 1_002_240, 985_664),
        (FLASH, "fp8", 917_568, 899_648),
        (PRO, "fp8+fp8", 1_435_968, 1_410_928),
        (PRO, "fp8", 1_315_008, 1_288_048),
        (FLASH, "bf16", 1_761_280, 1_761_280),
        (PRO, "bf16", 2_521_088, 2_521_088),
        (FLASH, "fp32", 2 * 1_761_280, 2 * 1_761_280),
    ],
)
def test_history_pages_have_the_published_sizes(shape, kv_dtype, page, unpadded):
    """A block of 256 tokens of all layers, with and without padding."""
    history = CacheLayout(shape, kv_dtype).pools[PoolKind.HISTORY]
    assert (history.page_bytes, history.used_bytes) == (page, unpadded)


@pytest.mark.parametrize(
    ("kv_dtype", "c4a", "index", "c128a"),
    [
        ("fp8", 37_440, 4_608, 1_728),
        ("fp8+fp8", 37_440, 8_640, 1_728),
        ("bf16", 65_536, 16_384, 2_048),
        ("fp32", 131_072, 32_768, 4_096),
    ],
)
def test_layer_pages_have_the_published_sizes(kv_dtype, c4a, index, c128a):
    """Padded to 576 for fp8, to 512 else."""
    layout = CacheLayout(FLASH, kv_dtype)
    assert layout.region(Stream.C4A, 2).length == layout.region(Stream.WINDOW, 0).length == c4a
    assert layout.region(Stream.INDEX, 2).length == index
    assert layout.region(Stream.C128A, 3).length == c128a


@pytest.mark.parametrize(
    ("shape", "window", "snapshot", "c4a_state", "c128a_state"),
    [(FLASH, 1_647_360, 430_080, 21 * 160 << 10, 10 << 20), (PRO, 2_321_280, 614_400, 30 * 160 << 10, 31 << 19)],
)
def test_tail_pages_have_the_published_sizes(shape, window, snapshot, c4a_state, c128a_state):
    """Window pages with the draft layer, half-rows of a border, rings of 16 and of 128 rows."""
    pools = CacheLayout(shape, "fp8").pools
    assert pools[PoolKind.WINDOW].page_bytes == window
    assert pools[PoolKind.SNAPSHOT].page_bytes == snapshot
    assert pools[PoolKind.STATE].page_bytes == c4a_state + c128a_state


@pytest.mark.parametrize("kv_dtype", PRECISIONS)
@pytest.mark.parametrize("shape", [FLASH, PRO, CacheShape((0,)), CacheShape((4, 128, 0, 4), mtp_layers=2)])
def test_regions_fill_each_page_without_gap_or_overlap(kv_dtype, shape):
    """The sum of the lengths is the page; every region is aligned for the kernels and holds its rows."""
    for pool in CacheLayout(shape, kv_dtype).pools.values():
        end = 0
        for region in pool.regions:
            assert region.offset == end
            assert region.rows * region.row_bytes <= region.length
            assert region.offset % 64 == 0
            end += region.length
        assert end == pool.page_bytes


def test_rings_leave_room_for_drafts():
    """A rejected draft must not have replaced a row that is still needed."""
    for extra, c4a, c128a in ((0, 16, 128), (8, 16, 136), (9, 32, 137)):
        layout = CacheLayout(CacheShape((4, 128)), "fp8", extra)
        assert layout.region(Stream.C4A_STATE, 0).rows == layout.region(Stream.INDEX_STATE, 0).rows == c4a
        assert layout.region(Stream.C128A_STATE, 1).rows == c128a


def test_layer_classes_come_from_the_ratios_not_from_parity():
    """A layer has exactly the streams of its class."""
    layout = CacheLayout(CacheShape((128, 4, 4, 0), mtp_layers=1), "bf16")
    have = {layer: {s for s in Stream if layout.has(s, layer)} for layer in range(5)}
    c4a = {Stream.WINDOW, Stream.C4A, Stream.INDEX, Stream.C4A_STATE, Stream.INDEX_STATE}
    c4a |= {Stream.C4A_OVERLAP, Stream.INDEX_OVERLAP}
    assert have == {
        0: {Stream.WINDOW, Stream.C128A, Stream.C128A_STATE},
        1: c4a,
        2: c4a,
        3: {Stream.WINDOW},
        4: {Stream.WINDOW},
    }
    with pytest.raises(LayoutError):
        layout.region(Stream.C4A, 0)


def test_what_the_byte_formats_do_not_fit_is_refused():
    """Another ratio, width, window or precision."""
    for arguments in (
        {"ratios": (0, 2)},
        {"ratios": ()},
        {"ratios": (4,), "head_dim": 256},
        {"ratios": (4,), "window": 64},
    ):
        with pytest.raises(LayoutError):
            CacheShape(**arguments)
    with pytest.raises(LayoutError):
        CacheLayout(CacheShape((4,)), "int8")


@pytest.mark.parametrize("length", range(1, 400))
def test_live_window_pages_cover_the_last_127_positions_and_no_page_more(length):
    """The next query sees itself and 127 positions before it."""
    wanted = {position // 64 for position in range(max(0, length - 127), length)}
    assert set(live_window(length)) == wanted
    assert len(wanted) <= 3


@pytest.mark.parametrize("length", range(300))
def test_kept_rows_are_those_that_later_entries_pool(length):
    """c4a entry j pools tokens 4j-4 to 4j+3, c128a entry j tokens 128j to 128j+127."""
    entry = length // 4
    assert set(kept_rows(4, length)) == {t for t in range(length) if t >= 4 * entry - 4}
    assert set(kept_rows(128, length)) == {t for t in range(length) if t >= length // 128 * 128}
    assert not kept_rows(0, length)
