"""The C copy and its digest against the plain references."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from headrace.core.segments import RangeKind, SegmentRange
from headrace.kernels import build, segment_copy
from headrace.kernels.cuda.page_move import digest_reference as gpu_digest


def bytes_of(seed: int, size: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def runs_of(memory: np.ndarray, offsets: list[int], lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    return memory.ctypes.data + np.array(offsets, dtype=np.int64), np.array(lengths, dtype=np.int64)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64, 65, 127, 128, 4096, 37440, 100_003])
@pytest.mark.parametrize("shift", [0, 1, 13])
def test_gather_copies_and_digests_any_size_and_alignment(size, shift):
    """One run of any length at any address is copied whole, nothing beside it is touched."""
    memory, payload = bytes_of(size, size + 64), np.full(size + 64, 0xAA, dtype=np.uint8)
    got = segment_copy.gather(*runs_of(memory, [shift], [size]), payload.ctypes.data + shift)
    assert (payload[shift : shift + size] == memory[shift : shift + size]).all()
    assert (payload[:shift] == 0xAA).all()
    assert (payload[shift + size :] == 0xAA).all()
    assert got == segment_copy.digest_reference(memory[shift : shift + size].tobytes())


def test_scatter_undoes_gather_with_the_same_digest():
    """Runs of many lengths, out of order in memory, come back to other places; both digests agree."""
    rng = np.random.default_rng(1)
    lengths = [8, 16, 512, 1024, 37440, 2048, 72, 4099]
    offsets = np.cumsum([0, *[size + 64 for size in lengths[:-1]]])[rng.permutation(len(lengths))]
    source = bytes_of(2, 200_000)
    spots = [int(offset) for offset in np.sort(offsets)]
    order = [*rng.permutation(len(lengths) - 1), len(lengths) - 1]
    picked = [spots[i] for i in order]
    picked_lengths = [lengths[i] for i in order]
    payload = np.zeros(sum(lengths), dtype=np.uint8)
    digest = segment_copy.gather(*runs_of(source, picked, picked_lengths), payload.ctypes.data)
    expected = b"".join(source[a : a + n].tobytes() for a, n in zip(picked, picked_lengths, strict=True))
    assert payload.tobytes() == expected
    target = np.zeros_like(source)
    assert segment_copy.scatter(payload.ctypes.data, *runs_of(target, picked, picked_lengths)) == digest
    assert digest == segment_copy.digest_reference(expected)
    for a, n in zip(picked, picked_lengths, strict=True):
        assert (target[a : a + n] == source[a : a + n]).all()
    assert int((target != 0).sum()) <= sum(lengths)


def test_the_gpu_kernels_digest_is_the_same_number():
    """A holder on a GPU and a taker on a CPU must agree."""
    payload = bytes_of(3, 16 * 1001)
    assert segment_copy.digest_reference(payload.tobytes()) == gpu_digest(torch.from_numpy(payload))


def test_every_flipped_bit_changes_the_digest():
    """Also in the padded tail word."""
    payload = bytes_of(4, 203)
    clean = segment_copy.digest_reference(payload.tobytes())
    seen = {clean}
    for bit in range(len(payload) * 8):
        payload[bit // 8] ^= 1 << bit % 8
        seen.add(segment_copy.digest_reference(payload.tobytes()))
        payload[bit // 8] ^= 1 << bit % 8
    assert len(seen) == len(payload) * 8 + 1


def test_swapped_doubled_dropped_and_shifted_words_change_the_digest():
    """The digest depends on where a word stands, also among equal and zero words."""
    words = np.arange(64, dtype=np.uint64)
    clean = segment_copy.digest_reference(words.tobytes())
    swapped, doubled = words.copy(), words.copy()
    swapped[[3, 17]] = swapped[[17, 3]]
    doubled[5] = doubled[4]
    others = [swapped, doubled, words[:-1], np.roll(words, 1), np.append(words, np.uint64(0)), words[::-1].copy()]
    assert len({clean, *(segment_copy.digest_reference(other.tobytes()) for other in others)}) == len(others) + 1
    zeros = {segment_copy.digest_reference(bytes(8 * n)) for n in range(64)}
    assert len(zeros) == 64


def test_index_and_length_are_part_of_a_segments_digest():
    """The same payload under another range, order or length is another segment."""
    a, b = SegmentRange(RangeKind.HISTORY, 0, 3, 1, 1), SegmentRange(RangeKind.WINDOW, 0, 3, 1, 1)
    indices = [[a], [b], [a, b], [b, a], [SegmentRange(RangeKind.HISTORY, 0, 3, 2, 1)]]
    digests = {segment_copy.mix_index(index, length) for index in indices for length in (300, 301)}
    assert len(digests) == 2 * len(indices)
    assert segment_copy.segment_digest(1, 2) != segment_copy.segment_digest(2, 1)


def test_runs_that_would_split_a_word_are_a_bug():
    """Only the last run may end inside a word, or the two ends would pad differently."""
    memory, payload = bytes_of(5, 64), np.zeros(64, dtype=np.uint8)
    with pytest.raises(AssertionError):
        segment_copy.gather(*runs_of(memory, [0, 16], [12, 8]), payload.ctypes.data)


def test_the_digest_is_of_the_bytes_stored_while_somebody_writes_to_the_source():
    """A READ that lands late mixes old and new bytes; what was stored is what was digested, whatever that is."""
    payload, target = bytes_of(6, 1 << 20), np.zeros(1 << 20, dtype=np.uint8)
    runs = runs_of(target, [0], [1 << 20])
    stop = threading.Event()

    def disturb() -> None:
        rng = np.random.default_rng(7)
        while not stop.is_set():
            payload[:] ^= rng.integers(0, 256, dtype=np.uint8)

    writer = threading.Thread(target=disturb)
    writer.start()
    try:
        for _ in range(50):
            digest = segment_copy.scatter(payload.ctypes.data, *runs)
            assert digest == segment_copy.digest_reference(target.tobytes())
    finally:
        stop.set()
        writer.join()


@pytest.mark.parametrize("march", ["x86-64", "haswell", "x86-64-v4"])
def test_every_vector_width_copies_and_digests_alike(march, tmp_path):
    """Two, four and eight words at a time; skipped where the compiler or the processor lacks the width."""
    if platform.machine() != "x86_64":
        pytest.skip("widths of another processor")
    needed = {"x86-64": set(), "haswell": {"avx2"}, "x86-64-v4": {"avx512dq", "avx512vl"}}[march]
    if not needed <= set(Path("/proc/cpuinfo").read_text().split()):
        pytest.skip(f"no {march} here")
    flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    source, library = build.SOURCES / "segment_copy.c", tmp_path / "copy.so"
    subprocess.run([*build.compiler(), *flags, f"-march={march}", "-o", library, source], check=True, timeout=60)
    gather = ctypes.CDLL(str(library)).hr_gather
    gather.argtypes, gather.restype = (
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p),
        ctypes.c_uint64,
    )
    memory, payload = bytes_of(8, 5000), np.zeros(5000, dtype=np.uint8)
    for lengths in ([4099], [64, 8, 1032, 77], [8, 8, 8, 3]):
        addresses, sizes = runs_of(memory, list(np.cumsum([1, *lengths[:-1]])), lengths)
        digest = gather(addresses.ctypes.data, sizes.ctypes.data, len(sizes), payload.ctypes.data)
        assert payload[: sum(lengths)].tobytes() == memory[1 : 1 + sum(lengths)].tobytes()
        assert digest == segment_copy.digest_reference(payload[: sum(lengths)].tobytes())
