"""The bit and index tricks of the Hopper kernels, mirrored on the CPU: they need neither a GPU nor nvcc nor triton."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from headrace.kernels.cuda import arguments, build, compressor, decode_attention, indexer, page_move

E4M3 = torch.arange(256, dtype=torch.uint8)


def test_e4m3_bits_shift_into_bf16() -> None:
    """Sign, exponent and mantissa moved into a bf16 are 2^-120 times the value, subnormals too; only NaN codes
    differ."""
    code = E4M3.to(torch.int32)
    bits = ((code & 0x80) << 8) | ((code & 0x7F) << 4)
    moved = bits.to(torch.uint16).view(torch.bfloat16).double() * 2.0**120
    value = E4M3.view(torch.float8_e4m3fn).double()
    number = ~torch.isnan(value)
    assert torch.equal(moved[number], value[number])
    assert number.sum() == 254


def test_two_codes_become_bf16_in_order() -> None:
    """Two codes a byte apart, times 16, the sign carried from bit 11 to bit 15, as decode4 does: the bits of each code
    alone."""
    for low in range(256):
        for high in range(256):
            got = ((high << 16 | low) * 16 + 0x78007800) & 0xFFFFFFFF & 0x87F087F0
            want = [((c & 0x80) << 8) | ((c & 0x7F) << 4) for c in (low, high)]
            assert got == want[1] << 16 | want[0]


def test_folded_key_codes_are_exact() -> None:
    """The table in indexer.cu holds e4m3 codes of every e2m1 magnitude times 2^(6 - d), for every d from 0 to 14."""
    source = (build.SOURCES / "indexer.cu").read_text()
    table = re.search(r"kCodes\[15\] = \{(.*?)\};", source, re.S)
    assert table is not None
    words = [int(x, 16) for x in re.findall(r"0x([0-9a-f]{16})ull", table.group(1))]
    assert len(words) == indexer.MAX_FOLD + 1
    for d, word in enumerate(words):
        codes = torch.tensor([(word >> (8 * i)) & 255 for i in range(8)], dtype=torch.uint8)
        want = [x * 2.0 ** (6 - d) for x in indexer.E2M1]
        assert codes.view(torch.float8_e4m3fn).double().tolist() == want


def prmt(low: int, high: int, select: int) -> int:
    """The instruction: four selectors, each an index into eight bytes, or with its fourth bit the byte's sign."""
    table, out = (low | high << 32).to_bytes(8, "little"), 0
    for i in range(4):
        one = select >> (4 * i) & 15
        byte = table[one & 7]
        out |= ((0xFF if byte & 0x80 else 0) if one & 8 else byte) << (8 * i)
    return out


def test_key_codes_are_unpacked_with_the_opposite_sign() -> None:
    """Magnitudes from the table, twice the signs' 0x40: what `unpack` of indexer.cu adds is the e4m3 code of minus the
    value, for every code and every step."""
    source = (build.SOURCES / "indexer.cu").read_text()
    words = [int(x, 16) for x in re.findall(r"0x([0-9a-f]{16})ull", source)]
    for d, table in enumerate(words):
        for word in (0x76543210, 0xFEDCBA98, 0x8F1E2D3C):
            magnitude, got = word & 0x77777777, b""
            for shift in (0, 16):
                looked_up = prmt(table & 0xFFFFFFFF, table >> 32, magnitude >> shift)
                got += (looked_up + 2 * prmt(0x40404040, 0x40404040, word >> shift)).to_bytes(4, "little")
            codes = [word >> (4 * i) & 15 for i in range(8)]
            want = [-indexer.E2M1[c & 7] * (-1) ** (c >> 3) * 2.0 ** (6 - d) for c in codes]
            assert torch.tensor(list(got), dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist() == want


def test_scales_of_a_key_find_table_and_power() -> None:
    """The largest of four scale bytes by halves, eight bytes of table for each step below it, and the power of two that
    takes back what the codes and the shrinking changed."""
    torch.manual_seed(12)
    for scales in [*torch.randint(0, 256, (200, 4)).tolist(), [0, 0, 0, 0], [255, 0, 255, 254], [1, 2, 3, 3]]:
        word = int.from_bytes(bytes(scales), "little")
        shifted = word << 8 & 0xFFFFFFFF
        halves = [max(word >> s & 0xFFFF, shifted >> s & 0xFFFF) for s in (0, 16)]
        top = max(halves[0] | halves[1] << 16, halves[0] << 16)
        assert top >> 24 == max(scales)
        for quad in range(4):
            assert 8 * (top >> 24) - 8 * scales[quad] == 8 * (max(scales) - scales[quad])
        bits = torch.tensor([min((top >> 24) + 19, 255) << 23], dtype=torch.int32)
        power = 2.0 ** (max(scales) - 127 - 6 + 25)
        assert float(bits.view(torch.float32)) == (power if power < 2.0**128 else float("inf"))


@pytest.mark.parametrize("blocks", [1, 3, 528])
def test_pages_are_dealt_out_once(blocks: int) -> None:
    """Laid end to end with places for the switch before each token's, every page falls to one block, whatever their
    number."""
    switch = int((re.search(r"kSwitch = (\d+);", (build.SOURCES / "indexer.cu").read_text()) or [0, 0])[1])
    for pages in ([31, 0, 1, 2, 200], [0, 0, 5], [1] * 40, [0], list(range(60))):
        line = [p + switch if p else 0 for p in pages]
        share, more = divmod(sum(line), blocks)
        dealt: list[tuple[int, int]] = []
        for me in range(blocks):
            at = share * me + min(me, more)
            end = at + share + (me < more)
            token, base = 0, 0
            while at < end and base + line[token] <= at:
                base += line[token]
                token += 1
            while at < end:
                first = max(at - base - switch, 0)
                at = base + switch + first
                base += line[token]
                if at < min(end, base):
                    dealt += [(token, first + i) for i in range(min(end, base) - at)]
                    at = min(end, base)
                token += 1
        assert dealt == [(t, i) for t, p in enumerate(pages) for i in range(p)]


@pytest.mark.parametrize(("octets", "k"), [(128, 512), (128, 1024), (64, 512), (64, 1024), (128, 3)])
def test_the_floor_of_top_k_is_reached_by_k_keys(octets: int, k: int) -> None:
    """At least k of a row's keys reach the least of the rank-th largest values over top_k_row's sets of eight lanes."""
    torch.manual_seed(k + octets)
    key = torch.randn(octets, 8, 16)  # octet of lanes, lane, its keys
    key[:, :, 5:] = torch.where(torch.rand(octets, 8, 11) < 0.3, float("-inf"), key[:, :, 5:])
    sets = 2 if k > 4 * octets else 1
    rank = -(-k // (sets * octets))
    best = key.view(octets, 8, 8, 2).amax(2) if sets == 2 else key.amax(2)[..., None]
    floor = best.sort(1, descending=True).values[:, rank - 1].min()
    assert rank <= 8
    assert (key >= floor).sum() >= k


def test_query_words_meet_the_keys_channels() -> None:
    """Word P = s*8 + half*4 + quad of the permuted q holds the four channels that the key operand has at that place."""
    seen = set()
    for word in range(32):
        to = ((word >> 1) & 3) * 8 + (word & 1) * 4 + (word >> 3)
        step, half, quad = to >> 3, (to >> 2) & 1, to & 3
        assert word * 4 == 32 * quad + 8 * step + 4 * half
        seen.add(to)
    assert len(seen) == 32


def test_more_tiles_are_never_fewer_blocks() -> None:
    """So a launch with blocks for its longest list has enough for every token; and it is a split that is built."""
    parts = [decode_attention.parts_of(tiles) for tiles in range(200)]
    assert parts == sorted(parts)
    assert set(parts) <= set(decode_attention.SPLITS)
    assert decode_attention.parts_of(2 + 512 // 64) == 2  # c4a, once it chooses


@pytest.mark.parametrize("split", decode_attention.SPLITS)
def test_runs_cover_all_tiles_once(split: int) -> None:
    """The cut of a token's tiles among the blocks of a cluster loses none, and depends on the token's own lengths
    only."""
    for tiles in range(140):
        per = -(-tiles // split)
        taken = []
        for rank in range(split):
            first = min(tiles, rank * per)
            taken += range(first, min(tiles, first + per))
        assert taken == list(range(tiles))


def test_pieces_of_a_tile_fill_it_once() -> None:
    """The 16-byte pieces that a warp of decode_attention.cu loads are its 8 rows, each byte once, and the chunks of 8
    channels that they become are each written once, at the place where the swizzle wants them."""
    read, written = set(), set()
    for lane in range(32):
        part, parity, quarter = lane & 3, lane >> 2 & 1, lane >> 3
        first = parity * 128 + quarter * 8192 + ((2 * part ^ parity) << 4)
        rotary = quarter == 3
        second = parity * 128 + quarter * 8192 + 32768 + (((part if rotary else 2 * part) ^ parity) << 4)
        for piece in range(8):
            i, half = piece >> 1, piece & 1
            read.add((2 * i + parity, 256 * half + quarter * 64 + part * 16))
            line = ((second if half else first) ^ (i << 5)) + i * 256
            row, group = 2 * i + parity, 4 * half + quarter
            chunks = [part] if half and rotary else [2 * part, 2 * part + 1]
            for n, chunk in enumerate(chunks):
                assert line ^ (16 * n) == group * 8192 + row * 128 + ((chunk ^ row) << 4)
                written.add((row, group * 8 + chunk))
        read.add((lane >> 2, 512 + part * 16))
        written.add((lane >> 2, 7 * 8 + 4 + part))
    assert read == {(row, byte) for row in range(8) for byte in range(0, 576, 16)}
    assert written == {(row, chunk) for row in range(8) for chunk in range(64)}


def test_factors_come_from_the_lane_that_has_them() -> None:
    """A lane of decode_attention.cu knows the scales of row lane % 8, groups lane / 8 and 4 + lane / 8; a piece's rows
    have the parity of the lane that converts it."""
    for lane in range(32):
        parity, quarter = lane >> 2 & 1, lane >> 3
        for i in range(4):
            source = (lane & 24) + 2 * i + parity
            assert (source & 7, source >> 3) == (2 * i + parity, quarter)


@pytest.mark.parametrize("tiles", [1, 2, 3, 8, 17])
def test_pieces_are_waited_for_before_they_are_read(tiles: int) -> None:
    """Nine pieces of a tile pass a ring of seven in decode_attention.cu; the first tile is asked for whole. Of the
    groups of copies that a thread has asked for, all but the youngest n are complete after a wait for n."""
    pieces, ring = 9, 7
    asked: list[object] = []
    place: dict[object, object] = {}

    def ask(what: object, at: object = None) -> None:
        asked.append(what)
        if at is not None:
            place[at] = what

    def complete(newer: int) -> set[object]:
        return set(asked[: len(asked) - newer])

    ask("scales 0")
    for k in range(pieces):
        ask((0, k), k if k < ring else f"beside {k}")
    turn = 0
    for it in range(tiles):
        first = it == 0
        ahead = pieces if first else ring
        here = complete(ahead - 1)
        assert {f"scales {it}", (it, 0)} <= here
        for k in range(pieces):
            if k == pieces - ahead:
                ask(f"scales {it + 1}")
            at = f"beside {k}" if first and k >= ring else turn
            assert place[at] == (it, k)
            if not first or k < ring:
                turn = (turn + 1) % ring
            assert (it, k) in here
            if k + 1 < pieces:
                here = complete(ahead - 2 if k < pieces - ahead else ahead - 1)
            if not first or k < ring:
                after = k + ahead
                ask((it + after // pieces, after % pieces), at)


@pytest.mark.parametrize("split", [n for n in decode_attention.SPLITS if n > 1])
def test_heads_are_shared_among_blocks_once(split: int) -> None:
    """Each block of a cluster ends its heads; what it is sent fits where q and the ring were, notes in their place."""
    heads = -(-64 // split)
    assert [row // heads for row in range(64)] == sorted(row // heads for row in range(64))
    assert max(row // heads for row in range(64)) == split - 1
    assert split * heads * 1024 <= 7 * 8192 + 7 * 4096
    assert split * heads <= 72


@pytest.mark.parametrize("tiles", [1, 3, 4, 9, 23])
def test_slots_are_read_before_they_are_replaced(tiles: int) -> None:
    """The ring of decode_attention.cu that holds the slots of eight tiles gives each tile its own."""
    ring = [t if t < tiles else -1 for t in range(8)]  # the first four tiles, then the next four
    seen = [ring[0], ring[1]]
    for it in range(tiles):
        seen.append(ring[(it + 2) & 7])
        if (it + 2) & 3 == 0:
            for quarter in range(4):
                t = it + 6 + quarter
                ring[((it + 6) & 4) + quarter] = t if t < tiles else -1
    assert seen == [t if t < tiles else -1 for t in range(tiles + 2)]


def test_weights_meet_their_heads() -> None:
    """Weight 2 * j + i of quad q in indexer.cu is head 8 * j + 2 * q + i, the columns that the quad's thread sums."""
    place = {head: ((head >> 1 & 3), (head >> 3) * 2 + (head & 1)) for head in range(64)}
    assert sorted(place.values()) == [(quad, n) for quad in range(4) for n in range(16)]
    for quad in range(4):
        for j in range(8):
            for i in range(2):
                assert place[8 * j + 2 * quad + i] == (quad, 2 * j + i)


def test_scale_exponent_rule_matches_the_reference() -> None:
    """ceil(log2(a / 448)) from the bits of a, at and around every power of two, as the kernels take it."""
    edges = torch.exp2(torch.arange(-20.0, 20.0)) * 448
    a = torch.cat([edges, torch.nextafter(edges, edges * 2), torch.nextafter(edges, edges * 0), edges * 1.3]).float()
    bits = a.view(torch.int32)
    e = (bits >> 23) - 127 - 8 + ((bits & 0x7FFFFF) > 0x600000).int()
    assert (a.double() <= 448 * torch.exp2(e.double())).all()
    assert (a.double() > 448 * torch.exp2(e.double() - 1)).all()


def test_fp4_keys_round_trip() -> None:
    """Codes pack and read back; every representable key is exact, and rounding is to nearest even."""
    torch.manual_seed(3)
    values = torch.tensor(indexer.E2M1)[torch.randint(0, 8, (64, 128))] * (1 - 2 * torch.randint(0, 2, (64, 128)))
    values[:, ::32] = 6.0  # so that each group's scale is the one it was made with
    scale = torch.exp2(torch.randint(-5, 5, (64, 4)).float()).repeat_interleave(32, 1)
    codes, exponents = indexer.pack_keys(values * scale)
    page = torch.cat([codes.flatten(), exponents.flatten()])[None]
    assert torch.equal(indexer.read_keys(page, torch.tensor([0])), (values * scale).double())
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(16)[None]
    page = torch.cat([*(x.flatten() for x in indexer.pack_keys(ties.repeat(64, 1)))])[None]
    assert indexer.read_keys(page, torch.tensor([0]))[0, :8].tolist() == [0, 1, 1, 2, 2, 4, 4, 6]


def test_top_k_reference_is_stable() -> None:
    """Ties go to the lower place, output ascends, rows shorter than k are padded with -1."""
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, 3.0, -0.0, 0.0]])
    out, count = indexer.top_k_reference(x, torch.tensor([7]), 2)
    assert out.tolist() == [[1, 2]]
    out, count = indexer.top_k_reference(x, torch.tensor([3]), 5)
    assert out.tolist() == [[0, 1, 2, -1, -1]]
    assert count.tolist() == [3]


def test_blocks_a_row_hold_the_row() -> None:
    """The default number of blocks can hold the longest row of a million tokens' context."""
    for rows in (1, 16, 64, 256):
        for longest in (600, 16384, 32769, 262144):
            assert longest <= 32768 * indexer.top_k_blocks(rows, longest)


def test_digest_depends_on_position_and_splits() -> None:
    """A payload's digest is the sum of its parts' digests at their offsets, and swapping two words changes it."""
    torch.manual_seed(4)
    payload = torch.randint(0, 256, (4096,), dtype=torch.uint8)
    whole = page_move.digest_reference(payload)
    parts = [page_move.digest_reference(payload[a:b], a) for a, b in ((0, 16), (16, 1040), (1040, 4096))]
    assert sum(parts) % 2**64 == whole
    swapped = payload.clone()
    swapped[:8], swapped[8:16] = payload[8:16], payload[:8]
    assert page_move.digest_reference(swapped) != whole
    mask, word, x = 2**64 - 1, int.from_bytes(payload[:8].tolist(), "little"), 0
    x = (word + page_move.K) & mask
    x = ((x ^ (x >> 30)) * page_move.M1) & mask
    x = ((x ^ (x >> 27)) * page_move.M2) & mask
    assert page_move.digest_reference(payload[:8]) == x ^ (x >> 31)


def test_compressor_reference_does_not_depend_on_chunks() -> None:
    """Twenty tokens at once or one by one through the ring: the same entries and the same state."""
    torch.manual_seed(6)
    x, ape = torch.randn(20, 2048), torch.randn(4, 1024)
    weight, table = torch.rand(512).to(torch.bfloat16), torch.rand(64, 64)
    results = []
    for size in (20, 1):
        state, entries = torch.zeros(1, 8, 2048), []
        for a in range(0, 20, size):
            n = min(size, 20 - a)
            step = compressor.Step(
                positions_T=torch.arange(a, a + n),
                first_row_T=torch.zeros(n, dtype=torch.int32),
                last_row_T=torch.full((n,), n - 1, dtype=torch.int32),
                ring_T=torch.zeros(n, dtype=torch.int64),
                slots_T=torch.arange(a, a + n),
            )
            _, made, state = compressor.compress_reference(x[a : a + n], ape, weight, step, state, table, ratio=4)
            entries.append(made)
        results.append((torch.cat(entries), state))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert compressor.quantise_entries(results[0][0]).shape == (5, 584)


def test_the_copy_engine_is_asked_for_what_it_takes() -> None:
    """Rows at multiples of 16 bytes; of a dimension of one the stride does not matter; all else is an error."""
    x = torch.zeros(4 * 11 * 520 + 8, dtype=torch.bfloat16)
    whole = x[: 4 * 11 * 520].view(4, 11, 520)
    assert arguments.box_strides(whole[:, 1:9, :512], "q") == (11 * 520, 520)
    assert arguments.box_strides(whole[:, :, :512].transpose(0, 1), "q") == (520, 11 * 520)
    assert arguments.box_strides(x.as_strided((1, 8, 512), (1, 520, 1)), "q") == (8, 520)
    assert arguments.box_strides(x.as_strided((3, 1, 512), (1024, 3, 1)), "q") == (1024, 8)
    for wrong in (
        x[1:].as_strided((2, 8, 512), (8 * 520, 520, 1), 1),
        x.as_strided((2, 8, 512), (8 * 516, 516, 1)),
        x.as_strided((2, 8, 512), (8 * 520 + 4, 520, 1)),
        x.as_strided((2, 8, 512), (8 * 520, 1, 8)),
    ):
        with pytest.raises(ValueError, match=r"^q: base 0x[0-9a-f]+, strides .* multiples of 16 bytes$"):
            arguments.box_strides(wrong, "q")


def test_a_kernel_that_the_compiler_made_slow_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What ptxas says of serialised products is logged; what else it says is not."""
    monkeypatch.setenv("HEADRACE_KERNEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    for said in ("(C7517) warpgroup.wait is injected", "(C7511) wgmma.mma_async instructions are serialized"):
        nvcc.write_text(f'#!/bin/sh\necho "ptxas info : {said}"\nwhile [ "$1" != -o ]; do shift; done; touch "$2"\n')
        nvcc.chmod(0o755)
        caplog.clear()
        build.build("page_move.cu").unlink()
        assert ("kernel.slow source=page_move.cu" in caplog.text) == ("C7511" in said)
