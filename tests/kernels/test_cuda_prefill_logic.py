"""Index logic of prefill attention and hyper-connections on Hopper, mirrored on the CPU: no GPU, no nvcc."""

from __future__ import annotations

import random

import pytest
import torch

from headrace.kernels.cuda import mhc, prefill_attention

OCTETS = prefill_attention.RING // 8


def test_octets_round_trip_and_lie_as_the_loads_expect() -> None:
    """Chunk c of row r is where prefill_rows.cu fetches it, and an octet is 8 KB."""
    torch.manual_seed(1)
    rows = torch.randn(48, 512).to(torch.bfloat16)
    octets = prefill_attention.pack_octets(rows).contiguous()
    assert torch.equal(prefill_attention.unpack_octets(octets), rows)
    flat = octets.flatten()
    for r in range(48):
        for block in range(8):
            for chunk in range(8):
                at = (r >> 3) * 8192 + block * 1024 + (r & 7) * 128 + ((chunk ^ (r & 7)) << 4)
                assert torch.equal(flat[at // 2 : at // 2 + 8], rows[r, block * 64 + chunk * 8 :][:8])


def test_a_gathered_row_keeps_its_chunks() -> None:
    """Row r of a tile, filled from workspace row R, has chunk c at place c ^ r, whatever R."""
    for r in range(8):
        for source in range(8):
            for place in range(8):
                fetched = place ^ r ^ source  # the place in the workspace that the thread reads
                assert fetched ^ source == place ^ r


def test_loaders_fill_a_tile_once() -> None:
    """Three warps, six groups of four rows each, cover the 64 rows of a tile."""
    rows = [(g * 3 + loader) * 4 + sub for loader in range(3) for g in range(6) for sub in range(4)]
    assert sorted(r for r in rows if r < 64) == list(range(64))


class Ring:
    """As in prefill_window.cu."""

    def __init__(self) -> None:
        self.first, self.last, self.row, self.run = 0, -1, -2, 0

    def step(self, now: int, length: int) -> tuple[int, int]:
        self.run = self.run + 1 if now == self.row + 1 else 0
        self.row = now
        if length <= 0:
            return 0, 0
        a, b = (now - length + 1) >> 3, now >> 3
        if self.last < 0 or a < self.first or a > self.last + 1 or b < self.first:
            self.run, self.first, self.last = 0, a, b
            return b - a + 1, a
        begin, more = self.last + 1, max(0, b - self.last)
        self.last = max(self.last, b)
        self.first = max(self.first, self.last - OCTETS + 1)
        return more, begin


def test_the_ring_holds_every_window(rng: random.Random) -> None:
    """Whatever the sequences, a query's octets are in the ring, and no query still needs what a load replaces."""
    for _ in range(200):
        queries: list[tuple[int, int]] = []
        for _ in range(rng.randint(1, 6)):
            row, held = rng.randint(0, 2000), rng.choice([0, 3, 60, 127])
            held = min(held, row)
            for i in range(rng.choice([1, 2, 9, 40, 300])):
                queries.append((row + i, rng.choice([0] + 30 * [min(128, held + i + 1)])))
        ring, content = Ring(), {}
        for i, (row, length) in enumerate(queries):
            more, begin = ring.step(row, length)
            done = i - (9 if more == 1 and ring.run >= 10 else 0)  # queries that are done before the load
            for octet in range(begin, begin + more):
                replaced = content.get(octet % OCTETS)
                for later_row, later_length in queries[done:i]:
                    needed = range((later_row - later_length + 1) >> 3, (later_row >> 3) + 1) if later_length else ()
                    assert replaced not in needed
                content[octet % OCTETS] = octet
            if length:
                for octet in range((row - length + 1) >> 3, (row >> 3) + 1):
                    assert content[octet % OCTETS] == octet


@pytest.mark.parametrize("length", [1, 17, 128])
def test_the_mask_picks_the_window(length: int) -> None:
    """Of the 144 places of the ring exactly those of the window's rows count."""
    for row in range(127, 500):
        place = row % 144
        kept = {i for i in range(144) if (place - i + (144 if place < i else 0)) < length}
        assert kept == {r % 144 for r in range(row - length + 1, row + 1)}


def test_quads_turn_columns_into_chunks() -> None:
    """Two exchanges bring word i of lane l to word l of lane i."""
    words = [[(i, lane) for i in range(4)] for lane in range(4)]  # [lane][word]: word i of lane l
    for bit, pairs in ((1, ((0, 1), (2, 3))), (2, ((0, 2), (1, 3)))):
        sent = [[w[lo if lane & bit else hi] for lo, hi in pairs] for lane, w in enumerate(words)]
        for lane, w in enumerate(words):
            for n, (lo, hi) in enumerate(pairs):
                w[lo if lane & bit else hi] = sent[lane ^ bit][n]
    assert words == [[(lane, word) for word in range(4)] for lane in range(4)]


def test_weights_split_into_two_bf16() -> None:
    """fn = hi + lo up to 2^-17 of it."""
    torch.manual_seed(2)
    fn = torch.randn(100_000) * torch.exp2(torch.randint(-20, 20, (100_000,)))
    hi = fn.to(torch.bfloat16)
    lo = (fn - hi.float()).to(torch.bfloat16)
    assert ((fn.double() - hi.double() - lo.double()).abs() <= fn.double().abs() * 2.0**-17).all()


def test_product_rows_meet_again() -> None:
    """Rows of hi and lo stacked three times sixteen: the words that mhc.cu adds belong to one row and one token."""
    stacked = [("hi", r) for r in range(24)] + [("lo", r) for r in range(24)]
    seen = set()
    for lane in range(32):
        own, quad = lane >> 2, lane & 3

        def word(tile: int, i: int, own: int = own) -> tuple[str, int]:
            return stacked[tile * 16 + own + (8 if i >= 2 else 0)]

        for c in range(2):
            sums = ((word(0, c), word(1, 2 + c)), (word(0, 2 + c), word(2, c)), (word(1, c), word(2, 2 + c)))
            for third, (high, low) in enumerate(sums):
                assert (high, low) == (("hi", third * 8 + own), ("lo", third * 8 + own))
                seen.add((third * 8 + own, 2 * quad + c))
    assert len(seen) == 24 * 8


def test_sums_of_squares_lie_on_the_diagonal() -> None:
    """Of the products of eight tokens with each other, lane 4 * t + t // 2 has token t's with itself in word t % 2."""
    for lane in range(32):
        own, quad = lane >> 2, lane & 3
        if quad == own >> 1:
            assert 2 * quad + (own & 1) == own


def test_hyper_connect_reference_mixes_streams() -> None:
    """comb's row is the old stream and its column the new one; comb's columns sum to 1."""
    torch.manual_seed(4)
    streams, y = torch.randn(2, 4, 4096).to(torch.bfloat16), torch.randn(2, 4096).to(torch.bfloat16)
    post, comb = torch.zeros(2, 4), torch.zeros(2, 4, 4)
    comb[:, 1, 3], post[:, 2] = 1, 1
    fixed = (torch.randn(24, 16384) / 128, torch.randn(24), torch.ones(3), torch.ones(4096).to(torch.bfloat16))
    mixed, layer_in, _, made = mhc.hyper_connect_reference(streams, *fixed, after=(y, post, comb))
    assert torch.equal(mixed[:, 3], streams[:, 1])
    assert torch.equal(mixed[:, 2], y)
    assert (mixed[:, :2] == 0).all()
    assert torch.allclose(layer_in.square().mean(-1), torch.ones(2, dtype=torch.float64), atol=1e-4)
    assert torch.allclose(made.sum(-2), torch.ones(2, 4, dtype=torch.float64), atol=1e-5)
