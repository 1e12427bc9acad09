"""Header, digest, notes, buffers, coverage, deadlines: each on its own."""

from __future__ import annotations

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.ids import TransferId
from headrace.core.peer import PeerFault, SegmentReady
from headrace.core.segments import RangeKind, SegmentRange
from headrace.transfer.buffers import (
    HostMemory,
    LandingBuffers,
    LandingPhase,
    SendBuffers,
    SendPhase,
    buffer_address,
    buffer_stride,
    payload_address,
)
from headrace.transfer.coverage import Coverage, check_bounds
from headrace.transfer.cuts import cut_history
from headrace.transfer.header import HEADER_BYTES, announced_header, pack_note, segment_digest, unpack_note
from headrace.transfer.lease import DeadlineHeap
from headrace.transfer.plain_cache import PlainGeometry, PlainMover, PlainPages

ID = TransferId(bytes(range(16)))
INDEX = (SegmentRange(RangeKind.HISTORY, 0, 3, 0, 2), SegmentRange(RangeKind.WINDOW, 1, 1, 4, 1))
READY = SegmentReady(
    transfer_id=ID, attempt=3, seq=4, buffer=5, buffer_gen=6, payload_bytes=700, digest=0x0123456789ABCDEF, index=INDEX
)

# ---- header ----


def test_header_has_the_fields_of_the_specification_in_64_little_endian_bytes():
    """As listed in section 7: magic to padding, nothing shifted."""
    header = announced_header(READY)
    assert len(header) == HEADER_BYTES == 64
    fields = struct.unpack("<4sHH16sIIIIIIQII", header)
    assert fields[:3] == (b"HRSG", 1, 0)
    assert fields[3:11] == (ID, 3, 4, 5, 6, 2, 700, 0x0123456789ABCDEF)
    assert fields[12] == 0


@pytest.mark.parametrize("field", ["attempt", "seq", "buffer", "buffer_gen", "payload_bytes", "digest"])
def test_any_other_announcement_has_another_header(field):
    """So a refilled buffer shows, whatever it was refilled for."""
    other = dataclasses.replace(READY, **{field: getattr(READY, field) + 1})
    assert announced_header(other) != announced_header(READY)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_digest_of_one_index_loses_nothing_of_the_payloads(one, other):
    """For a fixed index, different payload digests give different segment digests."""
    assert (segment_digest(INDEX, one) == segment_digest(INDEX, other)) == (one == other)


def test_digest_binds_the_index_and_its_order():
    """The same bytes under another index are other bytes."""
    assert segment_digest(INDEX, 1) != segment_digest(INDEX[::-1], 1)
    assert segment_digest(INDEX, 1) != segment_digest(INDEX[:1], 1)


@given(st.binary(max_size=64))
def test_foreign_notes_are_no_notes(note):
    """Notes are unauthenticated: anything may come."""
    parts = unpack_note(note)
    assert parts is None or pack_note(*parts) == note


def test_note_says_which_filling_was_read():
    """Transfer, buffer and generation."""
    assert unpack_note(pack_note(ID, 7, 8)) == (ID, 7, 8)


# ---- buffers ----


def test_send_buffer_is_freed_once_for_each_filling():
    """A note counts for its own transfer and generation only, and only once."""
    buffers = SendBuffers(2, max_per_link=2)
    first = buffers.fill(ID, 1)
    assert not buffers.read(ID, first.index, first.generation)
    buffers.gathered(first.index, first.generation)
    assert not buffers.read(TransferId(bytes(16)), first.index, first.generation)
    assert not buffers.read(ID, first.index, first.generation + 1)
    assert not buffers.read(ID, 99, first.generation)
    assert buffers.read(ID, first.index, first.generation)
    assert not buffers.read(ID, first.index, first.generation)
    assert buffers.audit() == []
    assert buffers.counts() == {"free": 2, "filling": 0, "announced": 0, "draining": 0}


def test_send_buffer_of_an_ended_subscription_waits_for_its_gather_only():
    """DRAINING while the copy runs, free after it, with a new generation next time."""
    buffers = SendBuffers(1, max_per_link=1)
    buffer = buffers.fill(ID, 1)
    buffers.over(buffer.index)
    assert buffer.phase is SendPhase.DRAINING
    assert not buffers.may_fill(1)
    buffers.gathered(buffer.index, 1)
    assert buffers.fill(ID, 1).generation == 2


def test_one_taker_gets_no_more_send_buffers_than_its_share():
    """The others are left for other takers."""
    buffers = SendBuffers(4, max_per_link=2)
    for _ in range(2):
        buffers.fill(ID, 1)
    assert not buffers.may_fill(1)
    assert buffers.may_fill(2)


def test_held_landing_buffers_count_against_the_peers_share():
    """One sick peer cannot take them all; its HELD ones are free with their own READ's end."""
    buffers = LandingBuffers(4, max_per_agent=2, max_reads=2)
    for _ in range(2):
        buffers.give_up(buffers.post(ID, 1, "p.1").index, 0.0)
    assert not buffers.may_post("p.1")
    assert buffers.may_post("p.2")
    assert buffers.num_held == 2
    assert buffers.open_reads("p.1") == 2
    assert buffers.oldest_held_s(3.0) == 3.0
    assert buffers.done(0) is LandingPhase.FREE
    assert buffers.lost(1) is LandingPhase.FREE
    assert buffers.oldest_held_s(3.0) == 0.0
    assert buffers.audit() == []


def test_reads_of_one_peer_that_run_at_once_are_bounded():
    """Whatever ends one lets the next begin: its bytes, its failure, and its being given up."""
    buffers = LandingBuffers(8, max_per_agent=8, max_reads=2)
    one, two = (buffers.post(ID, 1, "p.1").index for _ in range(2))
    assert not buffers.may_post("p.1")
    assert buffers.may_post("p.2")
    buffers.done(one)
    three = buffers.post(ID, 1, "p.1").index
    assert not buffers.may_post("p.1")
    buffers.lost(two)
    four = buffers.post(ID, 1, "p.1").index
    assert not buffers.may_post("p.1")
    buffers.give_up(three, 0.0)
    assert buffers.may_post("p.1")
    buffers.done(four)
    assert buffers.audit() == []
    buffers._reading["p.1"] += 1
    assert buffers.audit() != []


def test_landed_buffer_is_not_read_into_again_before_it_is_settled():
    """The table has no way back from LANDED but through the scatter's end."""
    buffers = LandingBuffers(1, max_per_agent=1, max_reads=1)
    index = buffers.post(ID, 1, "p").index
    assert buffers.done(index) is LandingPhase.LANDED
    with pytest.raises(KeyError):
        buffers.give_up(index, 0.0)
    assert not buffers.may_post("p")


def test_audit_sees_a_lost_buffer_and_a_wrong_share():
    """The free list and the counters are checked against the buffers themselves."""
    buffers = SendBuffers(2, max_per_link=2)
    buffers._free.pop()
    assert buffers.audit() != []
    landing = LandingBuffers(2, max_per_agent=2, max_reads=2)
    landing.post(ID, 1, "p")
    landing._by_agent["p"] = 2
    assert landing.audit() != []


def test_buffer_memory_is_aligned_and_apart():
    """Header then payload in each buffer; buffers start at pages and do not touch."""
    memory = HostMemory(3, buffer_stride(5000))
    assert memory.base_address % 4096 == 0
    assert memory.stride == 8192
    assert payload_address(memory, 1) == buffer_address(memory, 1) + 64
    memory.write(1, 0, b"abc")
    assert memory.read(1, 0, 3) == b"abc"
    assert memory.read(0, 0, 8192) == bytes(8192)
    with pytest.raises(AssertionError):
        buffer_address(memory, 3)
    with pytest.raises(AssertionError):
        memory.write(0, 8190, b"abc")


# ---- coverage ----

GEOMETRY = PlainGeometry()


def covered(length: int, held: int = 0) -> Coverage:
    return Coverage(GEOMETRY, length, held)


def index_bytes(index, length):
    return GEOMETRY.payload_bytes(index, length)


@pytest.mark.parametrize("length", [1, 255, 256, 257, 700, 1300])
@pytest.mark.parametrize("max_bytes", [96, 300, 100_000])
def test_coverage_is_full_after_every_segment_and_not_before(length, max_bytes):
    """History and tail segments of a sequence are exactly what its taker needs."""
    cells = covered(length)
    segments = GEOMETRY.history_segments(0, length // 256, max_bytes) + GEOMETRY.tail_segments(length, max_bytes)
    for segment in segments:
        assert not cells.full
        size = index_bytes(segment, length)
        places = cells.places(segment, size)
        assert cells.wanted(places)
        cells.take_off(places)
        assert not cells.wanted(places)
        cells.store(places, size)
        assert not cells.wanted(places)
    assert cells.full
    assert cells.missing() == ()


def test_coverage_can_be_restored_from_what_is_missing():
    """`ranges` of the missing cells, split again, are those cells."""
    cells = covered(1300, 2)
    segment = GEOMETRY.history_segments(3, 1, 10_000)[0]
    places = cells.places(segment, index_bytes(segment, 1300))
    cells.take_off(places)
    cells.put_back(places)
    assert cells.ranges(places) == tuple(SegmentRange(RangeKind.HISTORY, layer, 1, 3, 1) for layer in range(3))
    assert GEOMETRY.split(cells.ranges(cells.missing())) == GEOMETRY.split(GEOMETRY.expected(1300, 2))


def test_coverage_needs_the_bytes_that_the_length_implies():
    """Cells alone do not make it full."""
    cells = covered(1)
    segment = GEOMETRY.tail_segments(1, 10_000)[0]
    places = cells.places(segment, index_bytes(segment, 1))
    cells.take_off(places)
    cells.store(places, 1)
    assert cells.num_stored == len(cells)
    assert not cells.full


HISTORY, WINDOW, STATE = RangeKind.HISTORY, RangeKind.WINDOW, RangeKind.STATE


@pytest.mark.parametrize(
    "index",
    [
        (),
        (SegmentRange(HISTORY, 0, 1, 0, 1),) * 300,
        (SegmentRange(HISTORY, 0, 1, 0, 1),) * 2,
        (SegmentRange(HISTORY, 0, 1, 0, 0),),
        (SegmentRange(HISTORY, 0, 0, 0, 1),),
        (SegmentRange(HISTORY, 0, 1, -1, 1),),
        (SegmentRange(HISTORY, 0, 1, 3, 1),),
        (SegmentRange(HISTORY, 0, 1, 0, 1 << 31),),
        (SegmentRange(HISTORY, 0, 1 << 31, 0, 1),),
        (SegmentRange(HISTORY, 3, 1, 2, 1),),
        (SegmentRange(WINDOW, 0, 1, 0, 1),),
        (SegmentRange(WINDOW, 0, 1, 11, 1),),
        (SegmentRange(STATE, 0, 1, 0, 1),),
        (SegmentRange(STATE, 0, 1, 692, 9),),
        (SegmentRange(STATE, 0, 1, 0, 700), SegmentRange(STATE, 0, 1, 692, 8)),
    ],
)
def test_coverage_refuses_what_was_never_asked_for(index):
    """Nothing outside the sequence, nothing twice, nothing unbounded: before anything is computed from it."""
    with pytest.raises(PeerFault):
        covered(700).places(index, 1)


def test_coverage_refuses_bytes_for_blocks_that_the_taker_holds():
    """A segment may not write over held blocks, not even beside wanted ranges."""
    cells = covered(700, 2)
    held = SegmentRange(HISTORY, 0, 3, 1, 1)
    wanted = SegmentRange(WINDOW, 0, 3, 8, 3)
    with pytest.raises(PeerFault):
        cells.places((held, wanted), index_bytes((held, wanted), 700))
    full = covered(512, 2)
    held = SegmentRange(HISTORY, 0, 3, 0, 1)
    wanted = SegmentRange(WINDOW, 0, 3, 6, 2)
    with pytest.raises(PeerFault):
        full.places((held, wanted), index_bytes((held, wanted), 512))


def test_coverage_refuses_an_index_that_names_a_range_twice():
    """The bytes would add up, and some other range would never come."""
    cells = covered(700, 0)
    for twice in (
        (SegmentRange(HISTORY, 0, 1, 0, 1), SegmentRange(HISTORY, 0, 1, 0, 1)),
        (SegmentRange(HISTORY, 0, 1, 0, 2), SegmentRange(HISTORY, 0, 1, 1, 1)),
        (SegmentRange(WINDOW, 0, 2, 9, 1), SegmentRange(WINDOW, 1, 1, 9, 2)),
    ):
        with pytest.raises(PeerFault, match="twice"):
            cells.places(twice, index_bytes(twice, 700))


def test_coverage_refuses_another_number_of_bytes():
    """payload_bytes must be what the index implies."""
    segment = GEOMETRY.history_segments(0, 1, 10_000)[0]
    with pytest.raises(PeerFault):
        covered(700).places(segment, index_bytes(segment, 700) + 1)


def test_coverage_counts_how_often_a_cell_was_asked_for():
    """The most asked one of a set rules."""
    cells = covered(700)
    assert cells.ask(((0, 2),)) == 1
    assert cells.ask(((1, 3),)) == 2
    assert cells.ask(((2, 3),)) == 2


@given(
    st.lists(
        st.builds(
            SegmentRange,
            st.sampled_from(RangeKind),
            st.integers(-2, 1 << 32),
            st.integers(-2, 1 << 32),
            st.integers(-2, 1 << 32),
            st.integers(-2, 1 << 32),
        ),
        max_size=5,
    )
)
def test_wild_ranges_are_faults_and_nothing_else(index):
    """Whatever numbers a peer sends: a fault, at once, or cells that exist."""
    try:
        places = covered(700).places(index, 1)
    except PeerFault:
        return
    assert all(0 <= start < stop <= len(covered(700)) for start, stop in places)


def test_bounds_hold_before_anything_is_computed():
    """The last unit of each kind is inside, the next one is not."""
    check_bounds([SegmentRange(HISTORY, 0, 1, 2, 1), SegmentRange(WINDOW, 0, 1, 10, 1)], 700, 2)
    with pytest.raises(PeerFault):
        check_bounds([SegmentRange(WINDOW, 0, 1, 11, 1)], 700, 2)


# ---- plain cache ----


@pytest.mark.parametrize("length", [1, 256, 700])
def test_plain_pages_travel_whole(length, rng):
    """Gather, scatter, compare: and the digest of what was read is that of what was stored."""
    source, target = PlainPages(GEOMETRY, length), PlainPages(GEOMETRY, length)
    source.data[:] = rng.randbytes(len(source.data))
    memory, mover = HostMemory(1, buffer_stride(4000)), PlainMover()
    for segment in GEOMETRY.history_segments(0, length // 256, 4000) + GEOMETRY.tail_segments(length, 4000):
        gathered = mover.gather(source, segment, length, payload_address(memory, 0))
        assert mover.scatter(target, segment, length, payload_address(memory, 0)) == gathered
    assert target.data == source.data


# ---- deadlines ----


@given(st.lists(st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(0, 50))), max_size=300))
def test_deadline_heap_agrees_with_a_dictionary(steps):
    """Set, move, drop, in any order: what is due is what a plain dictionary says, earliest first."""
    heap: DeadlineHeap[int] = DeadlineHeap()
    plain: dict[int, float] = {}
    for key, due_s in steps:
        if due_s is None:
            heap.drop(key)
            plain.pop(key, None)
        else:
            heap.set(key, due_s)
            plain[key] = due_s
        assert heap.next_s() == min(plain.values(), default=None)
        assert len(heap) == len(plain)
    due = list(heap.pop_due(25))
    assert sorted(due) == sorted(key for key, due_s in plain.items() if due_s <= 25)
    assert [plain[key] for key in due] == sorted(plain[key] for key in due)
    assert all(key not in heap for key in due)


# ---- cuts ----


@pytest.mark.parametrize("segment_bytes", [96, 300, 1000, 4000, 20_000])
def test_cuts_cover_every_block_once_however_it_becomes_final(segment_bytes, rng):
    """In one go or chunk by chunk, from any block that the taker lacks on; no segment is larger than a buffer."""
    for _ in range(50):
        num_blocks = rng.randint(1, 60)
        length = num_blocks * 256 + rng.randint(0, 255)
        travelling = range(rng.randint(0, num_blocks), num_blocks)
        found, first = [], travelling.start
        while first < num_blocks:
            final = rng.randint(first + 1, num_blocks)
            found += cut_history(GEOMETRY, length, range(first, final), travelling, segment_bytes)
            first = final
        assert all(GEOMETRY.payload_bytes(segment, length) <= segment_bytes for segment in found)
        fine = [piece for segment in found for piece in GEOMETRY.split(segment)]
        assert len(fine) == len(set(fine))
        whole = (SegmentRange(RangeKind.HISTORY, 0, GEOMETRY.num_layers, travelling.start, len(travelling)),)
        assert set(fine) == (GEOMETRY.split(whole) if travelling else set())


def test_first_and_last_segments_are_small():
    """They grow to a full one and shrink again; a sequence of a few blocks is not cut to shreds."""
    block = GEOMETRY.num_layers * GEOMETRY.block_bytes
    blocks = range(2, 100)
    cut = cut_history(GEOMETRY, 100 * 256, blocks, blocks, 8 * block)
    sizes = [GEOMETRY.payload_bytes(segment, 100 * 256) // block for segment in cut]
    assert sizes[:5] == [2, 2, 4, 8, 8]
    assert sizes[-3] <= 4
    assert max(sizes[-2:]) <= 2
    assert max(sizes) == 8
    assert len(sizes) <= 98 // 8 + 6
    few = range(3)
    assert len(cut_history(GEOMETRY, 3 * 256, few, few, 64 * block)) == 1
