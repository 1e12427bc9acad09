"""Index logic of prefill attention and hyper-connections on Hopper, mirrored on the CPU: no GPU, no nvcc."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator

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
    """Four warps, four groups of four rows each, cover a tile; a thread has the same row of each of its octets."""
    rows = [(g * 4 + loader) * 4 + sub for loader in range(4) for g in range(4) for sub in range(4)]
    assert sorted(rows) == list(range(64))
    for loader in range(4):
        for g in range(4):
            for sub in range(4):
                r = (g * 4 + loader) * 4 + sub
                assert (r >> 3, r & 7) == (g * 2 + (loader >> 1), (loader & 1) * 4 + sub)


class Ring:
    """As in prefill_window.cu."""

    def __init__(self) -> None:
        self.first, self.last, self.row, self.run, self.fresh = 0, -1, -2, 0, False

    def step(self, now: int, length: int) -> tuple[int, int]:
        self.run = self.run + 1 if now == self.row + 1 else 0
        self.row, self.fresh = now, False
        if length <= 0:
            return 0, 0
        a, b = (now - length + 1) >> 3, now >> 3
        if self.last < 0 or a < self.first or a > self.last + 1 or b < self.first:
            self.run, self.first, self.last, self.fresh = 0, a, b, True
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
        ring, content, since = Ring(), {}, set()
        for i, (row, length) in enumerate(queries):
            more, begin = ring.step(row if length else 0, length)
            done = i - (9 if more == 1 and ring.run >= 10 else 0)  # queries that are done before the load
            for octet in range(begin, begin + more):
                replaced = content.get(octet % OCTETS)
                for later_row, later_length in queries[done:i]:
                    needed = range((later_row - later_length + 1) >> 3, (later_row >> 3) + 1) if later_length else ()
                    assert replaced not in needed
                content[octet % OCTETS] = octet
            if ring.fresh:  # what another sequence left is replaced, too, by copies that nobody asks for
                for octet in range(begin + more, begin + OCTETS):
                    content[octet % OCTETS] = -1
                since = {-1}
            since |= set(range(begin, begin + more))
            assert not length or set(content.values()) <= since
            if length:
                for octet in range((row - length + 1) >> 3, (row >> 3) + 1):
                    assert content[octet % OCTETS] == octet


@pytest.mark.parametrize("length", [0, 1, 17, 128])
def test_the_mask_picks_the_window(length: int) -> None:
    """Of the 144 places of the ring exactly those of the window's rows count."""
    for row in range(127, 500):
        own = row % 144
        oldest = own - length + 1
        turned = oldest < 0
        first, number = (own + 1, 144 - length) if turned else (oldest, length)
        kept = {i for i in range(144) if ((i - first) % 2**32 < number) != turned}
        assert kept == {r % 144 for r in range(row - length + 1, row + 1)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tile:
    """As in prefill_dense.cu: octets in a row, of the second list (far) or the window, then maybe the query's own."""

    first: int = 0
    octets: int = 0
    far: bool = False
    own: bool = False
    merged: bool = False
    place: int = 0
    own_at: int = 0
    mask: int = 0

    def same(self, other: Tile) -> bool:
        lies = (self.first, self.octets, self.far) == (other.first, other.octets, other.far)
        return lies and not self.own and not other.own

    @property
    def places(self) -> int:
        """Octets that are loaded and multiplied: pairs of them."""
        number = self.octets + self.own
        return 2 * max(1, (number + 1) >> 1) if number else 0


def ones(n: int) -> int:
    return (1 << min(64, max(0, n))) - 1


def dense_tiles(row: int, length: int, count: int, first: int) -> list[Tile]:
    """As in prefill_dense.cu, in the query's order."""
    start = row - length + 1
    near = (row >> 3) - (start >> 3) + 1 if length > 0 else 0
    far = (count + 7) >> 3
    number = max(1, ((far + 7) >> 3) + (near > 0) + (near > 1))
    others = min(near, 16) - 1
    last = min(8, others)
    tiles = []
    for u in range(number):
        if 8 * u < far:
            tiles.append(
                Tile(first=(first >> 3) + 8 * u, octets=min(8, far - 8 * u), far=True, mask=ones(count - 64 * u))
            )
        elif near > 0:
            own = u == 0 or 8 * (u - 1) < far
            octets = others - last if own else last
            at = (row >> 3) - (others if own else last)
            mask = ones(8 * octets) & ~ones(start - 8 * at)
            rows, place = ones((row & 7) + 1), row & 7
            if near > 16:
                rows |= 255 & ~ones(start & 7)
            if near == 1:
                rows &= ~ones(start & 7)
            if own:
                mask |= rows << 8 * octets
                tiles.append(
                    Tile(first=at, octets=octets, own=True, merged=near > 16, place=place, own_at=others, mask=mask)
                )
            else:
                tiles.append(Tile(first=at, octets=octets, mask=mask))
        else:
            tiles.append(Tile())
    return tiles[::-1] if row & 1 else tiles


def dense_loads(x: Tile) -> list[int]:
    """Rows of the workspace in the places of a tile, as the loaders of prefill_dense.cu bring them."""
    rows: list[int] = []
    for place in range(7 if x.merged else x.places):
        own = x.own and (place == x.octets or x.octets == 0)
        octet = x.first + (x.own_at if own else place if place < x.octets else 0)
        rows += range(8 * octet, 8 * octet + 8)
    if x.merged:
        assert x.octets == 7
        later = x.place + 1
        rows += [8 * (x.first + 15) + r for r in range(later)] + [8 * (x.first - 1) + r for r in range(later, 8)]
    return rows


def test_dense_tiles_hold_every_row_once(rng: random.Random) -> None:
    """Each row of the window and of the second list counts once, where it was loaded; what lies beside it is near."""
    merged = 0
    for _ in range(5000):
        row, count = rng.randint(128, 900), rng.choice([0, rng.randint(0, 300)])
        length, first = rng.choice([rng.randint(0, 128), rng.randint(120, 128)]), rng.randint(0, 40) * 8
        counted: dict[bool, list[int]] = {False: [], True: []}
        for x in dense_tiles(row, length, count, first):
            rows = dense_loads(x)
            assert len(rows) == 8 * x.places <= 64
            assert x.mask >> len(rows) == 0
            counted[x.far] += [r for i, r in enumerate(rows) if x.mask >> i & 1]
            lowest, highest = (first, first + count) if x.far else (row - length + 1, row + 1)
            assert all(lowest & ~7 <= r < highest + 7 & ~7 for r in rows)
            merged += x.merged
        assert sorted(counted[True]) == list(range(first, first + count))
        assert sorted(counted[False]) == list(range(row - length + 1, row + 1))
    assert merged > 1000


def test_runs_are_dealt_once() -> None:
    """Whatever the launch, each query is one block's, and of 8,192 no block has more than 63."""
    for queries, blocks in ((1, 132), (131, 132), (700, 132), (8192, 132), (8191, 114), (300, 7)):
        chunk, most = 1, queries
        for n in range(1, 10):
            runs = (queries + n - 1) // n
            own_most = (runs + blocks - 1) // blocks * n
            if own_most <= most:
                most, chunk = own_most, n
        grid, seen = min(queries, blocks), []
        for block in range(grid):
            i, mine = block * chunk, 0
            while i < queries:
                seen.append(i)
                mine += 1
                run = i // chunk
                i = i + 1 if (i + 1) % chunk else (2 * grid * (run // grid + 1) - 1 - run) * chunk
            assert mine <= (63 if (queries, blocks) == (8192, 132) else queries)
        assert sorted(seen) == list(range(queries))


def lies_in(row: int, length: int, count: int, first: int, window_octets: int, second_octets: int) -> bool:
    """Whether a query is not broken: the conditions of prefill.cuh and prefill_dense.cu, in 32-bit integers."""
    far = (max(count, 0) >> 3) + ((count & 7) != 0)
    window = length == 0 or (0 < length <= 128 and row >= length - 1 and row >> 3 < window_octets)
    assert abs(second_octets - far) < 2**31
    second = count == 0 or (count > 0 and first & 7 == 0 and first >= 0 and first >> 3 <= second_octets - far)
    return window and second


def test_what_does_not_lie_in_the_workspaces_is_broken(rng: random.Random) -> None:
    """Numbers of every size: a query is broken exactly if it has a row that there is not, and no sum overflows."""
    ends = [-(2**31), -(2**31) + 1, -9, -8, -1, 0, 1, 7, 8, 127, 128, 129, 511, 512, 2**31 - 8, 2**31 - 1]
    seen = set()
    for _ in range(20000):
        row, first = (rng.choice([*ends, rng.randint(0, 520), rng.randint(0, 70) * 8]) for _ in range(2))
        length, count = rng.choice([*ends, rng.randint(0, 130)]), rng.choice([*ends, rng.randint(0, 520)])
        octets = rng.choice([0, 1, 16, 64]), rng.choice([0, 1, 16, 64])
        rows = range(row - length + 1, row + 1) if length > 0 else ()
        whole = 0 <= length <= 128 and count >= 0 and (count == 0 or first % 8 == 0)
        whole = whole and (not rows or (rows[0] >= 0 and rows[-1] < 8 * octets[0]))
        whole = whole and (count == 0 or (first >= 0 and first + -(-count // 8) * 8 <= 8 * octets[1]))
        assert lies_in(row, length, count, first, *octets) == whole
        seen.add(whole)
        if whole:
            for x in dense_tiles(row, length, count, first):
                assert all(0 <= r < 8 * octets[x.far] for r in dense_loads(x))
    assert seen == {False, True}


def test_neighbours_meet_in_a_tile() -> None:
    """Late in a sequence a query of an even row ends as the next one begins, and that one nearly always, too."""
    met = 0
    for row in range(400, 1400):
        one, two = (dense_tiles(r, 128, r // 8, 0) for r in (row, row + 1))
        same = one[-1].same(two[0])
        assert same or row & 1
        met += same
    assert met > 900


@dataclasses.dataclass(kw_only=True)
class Item:
    """What the loader of prefill_dense.cu tells of; query: its number, or the content is a tile of it."""

    slot: int
    content: Tile | int
    query: int
    loaded: bool = True
    stays: bool = False
    takes_output: bool = False


def dense_items(queries: list[list[Tile]]) -> list[Item]:
    """As the loader tells them, in the order in which they are multiplied: each query, then its tiles."""
    slots, items, there, one = [0, 1, 2], [], False, False
    for number, tiles in enumerate(queries):
        after = queries[number + 1] if number + 1 < len(queries) else []
        items.append(Item(slot=slots[0], content=number, query=number))
        slots = [slots[1], slots[0], slots[2]] if one else [slots[2], slots[0], slots[1]]
        stays = bool(after) and len(tiles) > 1 and after[0].same(tiles[-1])
        for t, tile in enumerate(tiles):
            items.append(
                Item(
                    slot=slots[0],
                    content=tile,
                    query=number,
                    loaded=t > 0 or not there,
                    stays=stays and t + 1 == len(tiles),
                    takes_output=t == max(0, len(tiles) - 2),
                )
            )
            slots = [*slots[1:], slots[0]]
        there, one = stays, len(tiles) == 1
    return items


def test_three_slots_hold_what_is_needed(rng: random.Random) -> None:
    """No load replaces what is still needed, and none waits for what comes after it."""
    reused = 0
    for _ in range(100):
        queries = []
        for _ in range(rng.randint(1, 6)):
            start, first = rng.randint(0, 300), rng.randint(0, 9) * 8
            ratio = rng.choice([8, 16, 128])
            for i in range(start, start + rng.choice([1, 2, 30])):
                queries.append(dense_tiles(i, min(128, i + 1), (i + 1) // ratio, first))
                if rng.random() < 0.1:
                    queries.append(dense_tiles(i, 0, 0, first))  # of no rows
        items = dense_items(queries)
        used: dict[int, int] = {}  # the item that used a slot last
        for at, item in enumerate(items):
            if not item.loaded:
                held = items[used[item.slot]]
                assert held.stays
                assert isinstance(held.content, Tile)
                assert isinstance(item.content, Tile)
                assert held.content.same(item.content)
                reused += 1
            elif item.slot in used:
                before = used[item.slot]
                old = items[before]
                assert not old.stays
                if isinstance(old.content, Tile):
                    # Given back when the tile behind it has logits, if it is of the same query, and where the output
                    # lay, when the next query has weights: neither may wait for this load.
                    behind = items[before + 1]
                    last = behind.query != old.query
                    assert last or before + 1 < at
                    if old.takes_output:
                        later = (i for i, x in enumerate(items) if x.query > old.query and isinstance(x.content, Tile))
                        assert next(later) < at
                # Notes are overwritten after eight; of two in a row one at least waits for its load.
                assert at - before <= 5
            assert item.loaded or items[at - 1].loaded
            used[item.slot] = at
    assert reused > 500


def test_output_takes_a_slot_of_its_query(rng: random.Random) -> None:
    """The slot that takes a query's output is neither the next query's nor that of a tile that stays."""
    for _ in range(100):
        queries = [[Tile(first=k, octets=8) for k in range(rng.choice([1, 2, 3, 6]))] for _ in range(30)]
        items = dense_items(queries)
        for number in range(29):
            own = [x for x in items if x.query == number and isinstance(x.content, Tile)]
            (out,) = (x for x in own if x.takes_output)
            following = next(x for x in items if x.query == number + 1)
            assert following.slot != out.slot
            assert not out.stays
            assert out is own[-1] or out.slot != own[-1].slot


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


def test_packed_weights_are_the_operands() -> None:
    """Lane, word and half of a piece find fn's row and the channel whose stream the lane loads in the same place."""
    fn = torch.randn(24, 16384)
    hi = fn.to(torch.bfloat16)
    stacked = torch.cat([hi, (fn - hi.float()).to(torch.bfloat16)])
    packed = mhc.pack_weights(fn)
    rng = random.Random(3)
    for _ in range(500):
        block, warp, tile, step, lane, word, half = (rng.randrange(n) for n in (16, 8, 3, 8, 32, 4, 2))
        row = tile * 16 + (lane >> 2) + 8 * (word & 1)
        # Of the lane's eight channels the first four are half 0: words x and y of the load, in fragments 0 and 1.
        place = (step & 1) * 4 + (word >> 1) * 2 + half
        column = (step >> 1) * 4096 + block * 256 + warp * 32 + (lane & 3) * 8 + place
        assert packed[block, warp, tile * 8 + step, lane, word * 2 + half] == stacked[row, column]


def token_of(group: int) -> int:
    """As in mhc.cu."""
    return (group >> 1) | (group & 1) << 2


def test_eight_lanes_load_from_all_banks() -> None:
    """Every eight lanes of a warp read 128 different bytes modulo 128, for either half of a swizzled row."""
    assert sorted(map(token_of, range(8))) == list(range(8))
    for half in range(2):
        for first in range(0, 32, 8):
            tokens = [(token_of(lane >> 2), lane & 3) for lane in range(first, first + 8)]
            assert len({(half * 4 + quad) ^ token for token, quad in tokens}) == 8
    for c in range(2):  # sums: rows of 40 floats, columns of groups 2 * quad + c
        assert len({(token_of(2 * (lane & 3) + c) * 40 + (lane >> 2)) % 32 for lane in range(32)}) == 32


def test_gram_gives_the_norm() -> None:
    """Sums of the kernel's ten products of streams are the square of the weighted sum."""
    pairs = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3), (1, 3)]
    torch.manual_seed(5)
    x, pre = torch.randn(4, 4096, dtype=torch.float64), torch.rand(4, dtype=torch.float64)
    squares = sum((1 + (i != j)) * pre[i] * pre[j] * (x[i] @ x[j]) for i, j in pairs)
    torch.testing.assert_close(squares, (pre @ x).square().sum())


def reciprocal_sinkhorn(m_44: torch.Tensor, rounds: int, eps: float) -> torch.Tensor:
    """As in mhc.cu: the matrix stands, factors of rows and columns and their inverses go on."""
    m = torch.softmax(m_44, -1) + eps
    row, column, inverse_row, inverse_column = (torch.ones(4, dtype=m.dtype) for _ in range(4))
    for i in range(rounds):
        if i > 0:
            inverse_row = m @ column + eps * inverse_row
            row = 1 / inverse_row
        inverse_column = row @ m + eps * inverse_column
        column = 1 / inverse_column
    return row[:, None] * m * column


def test_sinkhorn_by_factors_is_sinkhorn() -> None:
    torch.manual_seed(6)
    for eps in (1e-6, 1e-2):
        m = torch.randn(4, 4, dtype=torch.float64) * 3
        torch.testing.assert_close(reciprocal_sinkhorn(m, 20, eps), mhc.sinkhorn(m, 20, eps))


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


Step = tuple[str, int]


def own_warp(first: int, own: int, waits: Callable[[int], bool]) -> Iterator[Step]:
    """What one of two warps of mhc.cu that end tokens does with the 64 places from which the Sinkhorns are made."""
    for n in range(first, own, 2):
        yield "write", n
        if n % 32 >= 30 or n + 2 >= own:
            yield ("sync" if waits(n) else "arrive"), 3 + (n >> 5 & 1)
    if first == 1 and own % 32 == 1:
        yield "arrive", 3 + (own >> 5 & 1)


def sinkhorn_warp(own: int) -> Iterator[Step]:
    for n in range(0, own, 32):
        yield "sync", 3 + (n >> 5 & 1)
        for m in range(n, min(n + 32, own)):
            yield "read", m


def run_warps(own: int, waits: Callable[[int], bool], rng: random.Random) -> str | None:
    """What goes wrong when the three run as they like, one of them seldom; None: nothing.

    A barrier of three warps ends when three have come, whichever they are; only those that sync wait for it.
    """
    warps = [own_warp(0, own, waits), own_warp(1, own, waits), sinkhorn_warp(own)]
    slow = rng.randrange(4)
    ring: dict[int, int] = {}
    read = -1
    come: dict[int, list[int]] = {3: [], 4: []}
    asleep: dict[int, int] = {}
    left = {0, 1, 2}
    while left:
        awake = sorted(left - asleep.keys())
        if not awake:
            return "all wait"
        who = rng.choice([w for w in awake for _ in range(1 if w == slow else 50)])
        step = next(warps[who], None)
        if step is None:
            left.remove(who)
        elif step[0] == "write":
            if ring.get(step[1] & 63, -1) > read:
                return "written before it was read"
            ring[step[1] & 63] = step[1]
        elif step[0] == "read":
            if ring.get(step[1] & 63) != step[1]:
                return "read before it was written"
            read = step[1]
        else:
            here = come[step[1]]
            if who in here:
                return "told twice"
            here.append(who)
            if step[0] == "sync":
                asleep[who] = step[1]
            if len(here) == 3:
                asleep = {w: b for w, b in asleep.items() if b != step[1]}
                here.clear()
    return None


def test_the_ring_of_waiting_tokens_holds_whoever_is_slow(rng: random.Random) -> None:
    """Nothing is overwritten unread and no barrier is told twice; without the waits both are found."""
    wrong = set()
    for own in [*range(1, 70), 95, 96, 97, 98, 127, 128, 129, 130, 160, 161, 193, 300]:
        for _ in range(4):
            assert run_warps(own, lambda n, own=own: n >= 32 and n >> 5 != (own - 1) >> 5, rng) is None, own
            wrong.add(run_warps(own, lambda _: False, rng))
    assert wrong >= {None, "written before it was read", "told twice"}
