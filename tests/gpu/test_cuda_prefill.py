"""Prefill attention and hyper-connections on Hopper against float64: odd strides, jumps, holes, other cuts."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.kernels.cuda import build
from headrace.kernels.cuda import compressor as k1
from headrace.kernels.cuda import mhc as k7
from headrace.kernels.cuda import prefill_attention as k6
from headrace.kernels.cuda.decode_attention import read_entries

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and build.compiler() is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvcc")]
DEV = "cuda"


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||, NaN if anything is."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def ints(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEV)


def make_rows(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randn(number, 512, device=DEV).to(torch.bfloat16)
    return rows, k6.pack_octets(rows).contiguous()


def make_q(tokens: int, heads: int) -> torch.Tensor:
    return torch.randn(tokens, heads + 3, 520, device=DEV).to(torch.bfloat16)[:, 1 : heads + 1, :512]


def window_places(row: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    place = torch.arange(128, device=DEV)
    return torch.where(place < length[:, None], row[:, None] - length[:, None] + 1 + place, -1)


def test_gathered_rows_are_the_entries() -> None:
    """Any page size; -1 gives zeros, slots that there are not NaN; rows lie where `pack_octets` puts them."""
    torch.manual_seed(1)
    for entries in (64, 2):
        stride = -(-entries * 584 // 576) * 576
        pages = torch.full((160 // entries, stride), 255, dtype=torch.uint8, device=DEV)
        raw = k1.quantise_entries(
            torch.randn(160, 512, device=DEV) * torch.exp2(torch.randint(-9, 9, (160, 1), device=DEV))
        )
        at = torch.arange(pages.shape[0] * entries, device=DEV)
        pages[:, : entries * 576].unflatten(1, (entries, 576))[at // entries, at % entries] = raw[at, :576]
        pages[:, entries * 576 : entries * 584].unflatten(1, (entries, 8))[at // entries, at % entries] = raw[at, 576:]
        slots = at[torch.randperm(at.numel(), device=DEV)[:88]].int()
        slots[5], slots[17], slots[80], slots[3] = -1, at.numel(), 2**31 - 1, -2
        known = (slots >= 0) & (slots < at.numel())
        octets = torch.full((11, 8, 8, 64), math.nan, dtype=torch.bfloat16, device=DEV)
        k6.gather_rows(pages, entries, slots, octets)
        want = read_entries(pages, entries, torch.where(known, slots, 0).long(), torch.float32) * known[:, None]
        got = k6.unpack_octets(octets)
        assert got[[17, 80, 3]].isnan().all()
        got[[17, 80, 3]] = 0
        assert torch.equal(got, want.to(torch.bfloat16))


@pytest.mark.parametrize("heads", [64, 128, 8])
def test_window_matches_float64(heads: int) -> None:
    """Sequences that begin and go on, of one token and of hundreds, a query without a window, rows far apart."""
    torch.manual_seed(heads)
    row, length = [], []
    for first, tokens, held in ((0, 300, 0), (1000, 1, 127), (2000, 700, 127), (3000, 1, 0), (900, 40, 60)):
        for i in range(tokens):
            row.append(first + i)
            length.append(min(128, held + i + 1))
    length[310] = 0
    rows, octets = make_rows(3200)
    row_T, length_T = ints(row), ints(length)
    q, sink = make_q(len(row), heads), torch.randn(heads, device=DEV) * 2
    out = torch.full(q.shape, math.nan, dtype=torch.bfloat16, device=DEV)
    lse = torch.full(q.shape[:2], math.nan, device=DEV)
    k6.prefill_window(q, octets, row_T, length_T, sink_H=sink, out_THD=out, lse_TH=lse)
    want, want_lse = k6.prefill_reference(q, rows, window_places(row_T, length_T), sink_H=sink)
    assert error(out, want) < 5e-3
    some = torch.isfinite(want_lse)
    assert (torch.isfinite(lse) == some).all()
    assert (lse[some].double() - want_lse[some]).abs().max() < 1e-4
    assert (out[310] == 0).all()


@pytest.mark.parametrize("heads", [64, 8])
@pytest.mark.parametrize("dense", [False, True])
def test_rows_match_float64(heads: int, dense: bool) -> None:
    """Windows and second lists of any length, none at all, holes in a list, rows that nobody names poisoned."""
    torch.manual_seed(heads + dense)
    t = 400
    rows, octets = make_rows(1024)
    second, second_octets = make_rows(2048)
    row = torch.randint(127, 1024, (t,), device=DEV, dtype=torch.int32)
    length = torch.randint(1, 129, (t,), device=DEV, dtype=torch.int32)
    count = torch.randint(0, 520, (t,), device=DEV, dtype=torch.int32)
    length[3], count[3], length[4], count[4], length[5] = 0, 0, 0, 100, 128
    count[6:9] = 0
    place = torch.arange(520, device=DEV)
    if dense:
        chosen, first = None, (torch.randint(0, 180, (t,), device=DEV) * 8).int()
        places = first[:, None] + place
    else:
        chosen, first = torch.randint(0, 2048, (t, 520), device=DEV, dtype=torch.int32), None
        chosen[torch.rand(t, 520, device=DEV) < 0.05] = -1
        places = chosen
    places = torch.where((place < count[:, None]) & (places >= 0), places + 1024, -1)
    q, sink = make_q(t, heads), torch.randn(heads, device=DEV) * 2
    out = torch.full(q.shape, math.nan, dtype=torch.bfloat16, device=DEV)
    lse = torch.full(q.shape[:2], math.nan, device=DEV)
    if chosen is not None:
        chosen = torch.where(place < count[:, None], chosen, 2**30)  # never read
    k6.prefill_rows(
        q,
        octets,
        row,
        length,
        second_octets,
        count,
        list_TW=chosen,
        first_T=first,
        sink_H=sink,
        out_THD=out,
        lse_TH=lse,
    )
    want, want_lse = k6.prefill_reference(
        q, torch.cat([rows, second]), torch.cat([window_places(row, length), places], 1), sink_H=sink
    )
    assert error(out, want) < 5e-3
    some = torch.isfinite(want_lse)
    assert (torch.isfinite(lse) == some).all()
    assert (lse[some].double() - want_lse[some]).abs().max() < 1e-4
    assert (out[3] == 0).all()


def test_dense_lists_of_neighbours_match_float64() -> None:
    """Neighbours share tiles: beginnings, a place far on, single queries; each span has the same bits alone."""
    torch.manual_seed(11)
    row, length, count, first, spans = [], [], [], [], []
    near = far = 0
    for start, tokens in ((0, 700), (24000, 900), (5, 1), (8064, 131), (130, 3)):
        low = max(0, start - 127)
        near += (low - near) % k6.RING
        for position in range(start, start + tokens):
            row.append(near + position - low)
            length.append(min(128, position + 1))
            count.append((position + 1) // 128)
            first.append(far)
        spans.append((len(row) - tokens, len(row)))
        near += start - low + tokens
        far += -(-count[-1] // 8) * 8
    rows, octets = make_rows(-(-near // 8) * 8)
    second, second_octets = make_rows(far + 8)
    row_T, length_T, count_T, first_T = ints(row), ints(length), ints(count), ints(first)
    q, sink = make_q(len(row), 64), torch.randn(64, device=DEV) * 2

    def run(a: int, b: int) -> tuple[torch.Tensor, torch.Tensor]:
        out = torch.full((b - a, 64, 512), math.nan, dtype=torch.bfloat16, device=DEV)
        lse = torch.full((b - a, 64), math.nan, device=DEV)
        lists = row_T[a:b], length_T[a:b], second_octets, count_T[a:b]
        k6.prefill_rows(q[a:b], octets, *lists, first_T=first_T[a:b], sink_H=sink, out_THD=out, lse_TH=lse)
        return out, lse

    out, lse = run(0, len(row))
    for a, b in spans:
        alone = run(a, b)
        assert torch.equal(alone[0], out[a:b])
        assert torch.equal(alone[1], lse[a:b])
        some = torch.arange(a, b, device=DEV) if b - a < 40 else torch.randint(a, b, (40,), device=DEV)
        place = torch.arange(256, device=DEV)
        places = torch.where(place < count_T[some, None], first_T[some, None] + place + rows.shape[0], -1)
        places = torch.cat([window_places(row_T[some], length_T[some]), places], 1)
        want, want_lse = k6.prefill_reference(q[some], torch.cat([rows, second]), places, sink_H=sink)
        assert error(out[some], want) < 5e-3
        assert (lse[some].double() - want_lse).abs().max() < 1e-4


def test_dense_lists_of_many_tiles_match_float64() -> None:
    """Lists of more tiles than are planned at once (16), shorter ones between them; windows of some lengths."""
    torch.manual_seed(14)
    t = 300
    rows, octets = make_rows(1024)
    second, second_octets = make_rows(4096)
    row = 400 + torch.arange(t, device=DEV, dtype=torch.int32)
    length = torch.where(row % 7 == 0, row % 128 + 1, 128).int()
    count = torch.where(row % 3 == 0, row % 1000, row * 4).int()
    count[50:90] = torch.arange(40, device=DEV) + 877  # 14 tiles and the window's two, then 15
    first = torch.zeros_like(row)
    q, sink = make_q(t, 64), torch.randn(64, device=DEV) * 2
    out = torch.full(q.shape, math.nan, dtype=torch.bfloat16, device=DEV)
    lse = torch.full(q.shape[:2], math.nan, device=DEV)
    k6.prefill_rows(q, octets, row, length, second_octets, count, first_T=first, sink_H=sink, out_THD=out, lse_TH=lse)
    place = torch.arange(4096, device=DEV)
    places = torch.where(place < count[:, None], place + 1024, -1)
    places = torch.cat([window_places(row, length), places], 1)
    for a in range(0, t, 20):
        want, want_lse = k6.prefill_reference(q[a : a + 20], torch.cat([rows, second]), places[a : a + 20], sink_H=sink)
        assert error(out[a : a + 20], want) < 5e-3
        assert (lse[a : a + 20].double() - want_lse).abs().max() < 1e-4


def test_a_spoilt_query_is_loud_and_alone() -> None:
    """A NaN in a query spoils that head of that query only, though q lies where others' rows lie."""
    torch.manual_seed(12)
    t = 300
    position = torch.arange(1000, 1000 + t, device=DEV)
    base = 873 // k6.RING * k6.RING
    _, octets = make_rows(-(-(1000 + t - base) // 8) * 8)
    _, second = make_rows(64)
    row, count = (position - base).int(), (position // 128).int()
    length, zero = torch.full_like(count, 128), torch.zeros_like(count)

    def run(q: torch.Tensor) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=DEV)
        k6.prefill_rows(q, octets, row, length, second, count, first_T=zero, sink_H=None, out_THD=out)
        return out

    q = make_q(t, 64).clone()
    spoilt = q.clone()
    spoilt[50, 3, 7], spoilt[51, 3, 500] = math.nan, math.inf
    whole, got = run(q), run(spoilt)
    assert got[50, 3].isnan().all()
    assert got[51, 3].isnan().any()
    others = torch.ones(t, 64, dtype=torch.bool, device=DEV)
    others[50:52, 3] = False
    assert torch.equal(got[others], whole[others])
    assert run(q * 1e30).isfinite().all()


@pytest.mark.parametrize("kind", ["window", "list", "dense"])
def test_a_broken_query_is_nan_and_alone(kind: str) -> None:
    """What does not lie in the workspaces is not read: such a query is NaN, and its neighbours have their bits."""
    torch.manual_seed(13)
    t, far, width = 400, 2**31 - 1, 100
    _, octets = make_rows(512)
    _, second = make_rows(256)
    position = torch.arange(t, device=DEV)
    row, length = position.int() + 7, (position + 1).clamp_max(128).int()
    count, first = (position % (width + 1)).int(), torch.full((t,), 64, dtype=torch.int32, device=DEV)
    chosen = torch.randint(0, 256, (t, width), device=DEV, dtype=torch.int32)
    q = make_q(t, 64)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.zeros(t, 64, 512, dtype=torch.bfloat16, device=DEV), torch.zeros(t, 64, device=DEV)
        ends = {"sink_H": None, "out_THD": out, "lse_TH": lse}
        if kind == "window":
            k6.prefill_window(q, octets, row, length, **ends)
        else:
            lists = {"list_TW": chosen} if kind == "list" else {"first_T": first}
            k6.prefill_rows(q, octets, row, length, second, count, **lists, **ends)
        return out, lse

    whole, whole_lse = run()
    assert whole.isfinite().all()
    breaks = [(length, -1), (length, 129), (length, far), (length, -far - 1), (row, 512), (row, far), (row, -3)]
    breaks += [(row, 126)]  # of 128 rows
    if kind != "window":
        breaks += [(count, -1), (count, 257), (count, far), (count, -far - 1)]
    if kind == "list":
        breaks += [(count, width + 1), (chosen[:, 0], 256), (chosen[:, 3], far), (chosen[:, 9], -2)]
        chosen[:, 5] = -1  # none
    if kind == "dense":
        breaks += [(first, 65), (first, -8), (first, 256), (first, far), (first, -far - 1)]
    at = [300 + 3 * i for i in range(len(breaks))]  # of windows of 128, and none with fewer than four others
    at[1], at[3] = at[0] + 1, at[2] + 1  # and neighbours
    count[at] = 50
    first[200], count[200], first[201], count[201] = 192, 64, 0, 0  # to the last row; none
    whole, whole_lse = run()
    for i, (what, value) in zip(at, breaks, strict=True):
        what[i] = value
    out, lse = run()
    broken = torch.zeros(t, dtype=torch.bool, device=DEV)
    broken[at] = True
    assert out[broken].isnan().all()
    assert lse[broken].isnan().all()
    assert torch.equal(out[~broken], whole[~broken])
    assert torch.equal(lse[~broken], whole_lse[~broken])


def test_no_queries_are_no_error() -> None:
    """Launches of nothing, for each kind of layer."""
    _, octets = make_rows(8)
    q, none = make_q(0, 64), torch.zeros(0, dtype=torch.int32, device=DEV)
    ends = {"sink_H": None, "out_THD": torch.empty_like(q)}
    k6.prefill_window(q, octets, none, none, **ends)
    k6.prefill_rows(q, octets, none, none, octets, none, list_TW=none.view(0, 1), **ends)
    k6.prefill_rows(q, octets, none, none, octets, none, first_T=none, **ends)
    torch.cuda.synchronize()
    q, none = make_q(3, 64), torch.zeros(3, dtype=torch.int32, device=DEV)  # and of no rows at all
    for lists in ({"list_TW": none.view(3, 1)[:, :0]}, {"first_T": none}):
        out = torch.full(q.shape, math.nan, dtype=torch.bfloat16, device=DEV)
        k6.prefill_rows(q, octets, none, none, octets[:0], none, **lists, sink_H=None, out_THD=out)
        assert (out == 0).all()


def test_a_row_of_nan_does_not_leave_its_sequence() -> None:
    """A sequence that begins elsewhere has its bits whatever the one before had in its window."""
    torch.manual_seed(14)
    rows, _ = make_rows(4096)
    row = torch.cat([torch.arange(200), torch.arange(2000, 2150)]).int().to(DEV).repeat(100)
    length = torch.cat([torch.arange(200), torch.arange(150)]).add(1).clamp_max(128).int().to(DEV).repeat(100)
    q = make_q(row.numel(), 64)
    outs = []
    for spoilt in (False, True):
        if spoilt:
            rows[60:200] = math.nan
        out = torch.empty(q.shape, dtype=torch.bfloat16, device=DEV)
        k6.prefill_window(q, k6.pack_octets(rows).contiguous(), row, length, sink_H=None, out_THD=out)
        outs.append(out[row >= 2000])
        assert out[row == 100].isnan().any() == spoilt
    assert torch.equal(*outs)


def test_prefill_does_not_depend_on_the_cut() -> None:
    """A prompt at once, and in chunks whose workspaces begin elsewhere: the same bits, for each kind of layer."""
    torch.manual_seed(3)
    t = 700
    rows, _ = make_rows(t + 4)
    _, second = make_rows(256)
    q = make_q(t, 64)
    position = torch.arange(t, device=DEV)
    length = (position + 1).clamp_max(128).int()
    chosen = torch.randint(0, 256, (t, 100), device=DEV, dtype=torch.int32)
    count, zero = (position % 101).int(), torch.zeros(t, dtype=torch.int32, device=DEV)

    def run(a: int, b: int, kind: int) -> torch.Tensor:
        base = max(0, a - 127) // k6.RING * k6.RING
        octets = k6.pack_octets(rows[base : base + (b - base + 7) // 8 * 8]).contiguous()
        out, row = torch.empty(b - a, 64, 512, dtype=torch.bfloat16, device=DEV), (position[a:b] - base).int()
        if kind == 0:
            k6.prefill_window(q[a:b], octets, row, length[a:b], sink_H=None, out_THD=out)
        else:
            lists = {"list_TW": chosen[a:b]} if kind == 1 else {"first_T": zero[a:b]}
            k6.prefill_rows(q[a:b], octets, row, length[a:b], second, count[a:b], **lists, sink_H=None, out_THD=out)
        return out

    for kind in range(3):
        whole = run(0, t, kind)
        for a, b in ((0, 1), (1, 130), (130, 131), (131, 500), (500, t)):
            assert torch.equal(run(a, b, kind), whole[a:b])


def make_streams(tokens: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
    """Streams, weights of the next sub-layer, ends of the one before."""
    rand = lambda *shape: torch.randn(*shape, device=DEV)  # noqa: E731
    streams = (rand(tokens, 4, 4096) * torch.exp2(torch.randint(-3, 4, (tokens, 1, 1), device=DEV))).to(torch.bfloat16)
    fixed = (rand(24, 16384) / 128, rand(24), rand(3).abs(), rand(4096).to(torch.bfloat16))
    return (
        streams,
        fixed,
        (rand(tokens, 4096).to(torch.bfloat16), 2 * rand(tokens, 4).sigmoid(), rand(tokens, 4, 4).softmax(-1)),
    )


def hyper_connect(
    streams: torch.Tensor, fixed: tuple[torch.Tensor, ...], after: tuple[torch.Tensor, ...] | None, *, rounds: int = 20
) -> tuple[torch.Tensor, ...]:
    t = streams.shape[0]
    packed = k7.pack_weights(fixed[0])  # before other kernels, since the launch does not wait for it
    out = torch.full_like(streams, math.nan)
    layer_in = torch.full((t, 4096), math.nan, dtype=torch.bfloat16, device=DEV)
    post, comb = torch.full((t, 4), math.nan, device=DEV), torch.full((t, 4, 4), math.nan, device=DEV)
    ends = {} if after is None else {"after": after, "streams_out_TND": out}
    k7.hyper_connect(streams, packed, *fixed[1:], layer_in, post, comb, rounds=rounds, **ends)
    return streams if after is None else out, layer_in, post, comb


@pytest.mark.parametrize("tokens", [1, 8, 37, 300, 1700])
@pytest.mark.parametrize("with_after", [False, True])
def test_hyper_connect_matches_float64(tokens: int, with_after: bool) -> None:
    """Streams, layer input, post and comb, with and without a sub-layer that ends; comb's rows and columns sum to 1."""
    torch.manual_seed(tokens)
    streams, fixed, after = make_streams(tokens)
    ends = after if with_after else None
    got = hyper_connect(streams, fixed, ends)
    want = k7.hyper_connect_reference(streams, *fixed, after=ends)
    for name, g, w, most in zip(("streams", "in", "post", "comb"), got, want, (1e-3, 3e-3, 3e-5, 3e-5), strict=True):
        assert error(g, w) < most, name
    assert (got[3].sum(-2) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("with_after", [False, True])
@pytest.mark.parametrize(
    ("tokens", "rounds"),
    [(3590, 20), (3600, 20), (3850, 20), (4200, 20), (7169, 20), (8192, 20), (7300, 3000), (16384, 3000)],
)
def test_hyper_connect_of_many_tokens_waits_for_each(tokens: int, rounds: int, *, with_after: bool) -> None:
    """The bits of launches of 64, again and again.

    As many tokens as leave a last group of one or two to each block, or more groups than wait at once, whose Sinkhorns
    take longer than all else.
    """
    torch.manual_seed(tokens)
    streams, fixed, after = make_streams(tokens)

    def run(first: int, last: int) -> tuple[torch.Tensor, ...]:
        ends = tuple(x[first:last].contiguous() for x in after) if with_after else None
        return hyper_connect(streams[first:last].contiguous(), fixed, ends, rounds=rounds)

    parts = [run(i, min(i + 64, tokens)) for i in range(0, tokens, 64)]
    want = [torch.cat(part) for part in zip(*parts, strict=True)]
    for _ in range(20 if rounds == 20 else 3):
        assert all(torch.equal(g, w) for g, w in zip(run(0, tokens), want, strict=True))


def test_hyper_connect_does_not_depend_on_the_batch() -> None:
    """A token's bits are the same alone, in another order, beside a token of NaN; streams may be mixed in place."""
    torch.manual_seed(5)
    streams, fixed, after = make_streams(200)
    whole = hyper_connect(streams, fixed, after)

    def same(rows: torch.Tensor) -> bool:
        part = tuple(x[rows].contiguous() for x in after)
        got = hyper_connect(streams[rows].contiguous(), fixed, part)
        return all(torch.equal(g, w[rows]) for g, w in zip(got, whole, strict=True))

    assert same(torch.randperm(200, device=DEV))
    assert same(torch.arange(60, device=DEV))
    assert same(torch.tensor([7], device=DEV))
    spoilt, others = streams.clone(), torch.arange(200, device=DEV) != 50
    spoilt[50, 2, 77], spoilt[50, 3, 4000] = math.nan, math.inf
    got = hyper_connect(spoilt, fixed, after)
    assert all(torch.equal(g[others], w[others]) for g, w in zip(got, whole, strict=True))
    assert got[1][50].isnan().all()
    place = streams.clone()
    t = place.shape[0]
    layer_in = torch.empty(t, 4096, dtype=torch.bfloat16, device=DEV)
    post, comb = torch.empty(t, 4, device=DEV), torch.empty(t, 4, 4, device=DEV)
    packed = k7.pack_weights(fixed[0])
    k7.hyper_connect(place, packed, *fixed[1:], layer_in, post, comb, after=after, streams_out_TND=place)
    assert torch.equal(place, whole[0])
    assert torch.equal(layer_in, whole[1])


def test_layer_in_where_streams_cancel() -> None:
    """Streams that cancel to a hundredth of themselves in the layer's input still give its norm."""
    torch.manual_seed(6)
    streams, fixed, _ = make_streams(24)
    scale = torch.zeros(3, device=DEV)  # so that pre follows from base alone
    streams[:, 1] = -streams[:, 0]
    streams[:, 3] = -streams[:, 2]
    base = fixed[1].clone()
    base[:4] = torch.tensor([0.0, 0.04, 0.0, 0.04], device=DEV)
    got = hyper_connect(streams, (fixed[0], base, scale, fixed[3]), None)
    want = k7.hyper_connect_reference(streams, fixed[0], base, scale, fixed[3])
    assert error(got[1], want[1]) < 4e-3
