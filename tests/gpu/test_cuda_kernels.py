"""The Hopper kernels against their references in float64: poisoned pages, wild slots, odd strides, far pages,
other batches."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from headrace.kernels.cuda import build
from headrace.kernels.cuda import compressor as k1
from headrace.kernels.cuda import decode_attention as k5
from headrace.kernels.cuda import indexer as k4
from headrace.kernels.cuda import page_move as move

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and build.compiler() is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvcc")]
DEV = "cuda"


def error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """||out - ref|| / ||ref||, NaN if anything is."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def turns(n: int) -> torch.Tensor:
    """[n, 64] fp32: cosines and sines of positions at base 10000."""
    inverse = 1.0 / 10000 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angle = torch.arange(n, dtype=torch.float64)[:, None] * inverse
    return torch.cat([angle.cos(), angle.sin()], 1).float().to(DEV)


def page_stride(entries: int) -> int:
    return -(-entries * 584 // 576) * 576


def make_pages(pages: int, entries: int, slots: torch.Tensor) -> torch.Tensor:
    """A pool all 0xFF but for random entries at `slots`, their magnitudes spread over 2^-20 .. 2^20."""
    pool = torch.full((pages, page_stride(entries)), 255, dtype=torch.uint8, device=DEV)
    spread = torch.exp2(torch.randint(-20, 21, (slots.numel(), 8), device=DEV).float()).repeat_interleave(64, 1)
    spread = torch.where(torch.rand(slots.numel(), 1, device=DEV) < 0.9, 1.0, spread)
    raw = k1.quantise_entries(torch.randn(slots.numel(), 512, device=DEV) * spread)
    page, at = slots // entries, slots % entries
    pool[:, : entries * 576].unflatten(1, (entries, 576))[page, at] = raw[:, :576]
    pool[:, entries * 576 : entries * 584].unflatten(1, (entries, 8))[page, at] = raw[:, 576:]
    return pool


def make_case(
    batch: int, heads: int, widths: tuple[int, int], entries: tuple[int, int], *, whole: bool = False
) -> dict[str, object]:
    """Ragged lists, or whole ones, into two poisoned pools; entries that no list names stay poison, and slots past a
    length are none."""
    lists = []
    for width, n in zip(widths, entries, strict=True):
        pages = batch * width // n + 3
        order = torch.randperm(pages * n, device=DEV)
        slots = order[: batch * width].view(batch, width).to(torch.int32)
        lengths = torch.randint(0, width + 1, (batch,), device=DEV, dtype=torch.int32)
        lengths[0], lengths[-1] = width, 0
        if whole:
            lengths[:] = width
        used = torch.arange(width, device=DEV)[None] < lengths[:, None]
        hole = torch.rand(batch, width, device=DEV) < 0.05
        pool = make_pages(pages, n, slots[used & ~hole].long())
        slots[hole] = -1
        slots[~used] = torch.where(torch.rand(int((~used).sum()), device=DEV) < 0.5, pages * n, 2**31 - 1).int()
        lists.append(k5.EntryList(pages=pool, page_entries=n, slots_BW=slots, lengths_B=lengths))
    q = torch.randn(batch, heads + 3, 520, device=DEV).to(torch.bfloat16)[:, 1 : heads + 1, :512]  # odd strides
    return {"q": q, "window": lists[0], "second": lists[1], "sink": torch.randn(heads, device=DEV) * 2}


@pytest.mark.parametrize("split", k5.SPLITS)
@pytest.mark.parametrize(("heads", "entries"), [(64, (64, 64)), (128, (64, 2)), (16, (256, 32)), (8, (64, 64))])
def test_decode_attention_matches_float64(split: int, heads: int, entries: tuple[int, int]) -> None:
    """Whatever the pages hold besides, only listed entries count; a token without entries gets zeros and -inf."""
    torch.manual_seed(heads + split)
    case = make_case(9, heads, (128, 512), entries)
    out = torch.full((9, heads, 512), float("nan"), device=DEV, dtype=torch.bfloat16)
    lse = torch.full((9, heads), float("nan"), device=DEV)
    k5.decode_attention(
        case["q"], case["window"], case["second"], sink_H=case["sink"], split=split, out_BHD=out, lse_BH=lse
    )
    want, want_lse = k5.decode_attention_reference(case["q"], case["window"], case["second"], sink_H=case["sink"])
    assert error(out, want) < 5e-3
    some = torch.isfinite(want_lse)
    assert (torch.isfinite(lse) == some).all()
    # fp32 logits: an error of their last bits, and they reach 1e6 where the magnitudes of entries are far apart.
    assert ((lse[some].double() - want_lse[some]).abs() / want_lse[some].abs().clamp_min(1)).max() < 1e-5
    assert (out[-1] == 0).all()


@pytest.mark.parametrize("split", k5.SPLITS)
def test_decode_attention_does_not_depend_on_the_batch(split: int) -> None:
    """The bits of a token are the same alone, in another order, and twice over."""
    torch.manual_seed(5)
    case = make_case(33, 64, (128, 512), (64, 64))

    def run(rows: torch.Tensor) -> torch.Tensor:
        lists = [
            k5.EntryList(
                pages=x.pages, page_entries=x.page_entries, slots_BW=x.slots_BW[rows], lengths_B=x.lengths_B[rows]
            )
            for x in (case["window"], case["second"])
        ]
        out = torch.empty(rows.numel(), 64, 512, device=DEV, dtype=torch.bfloat16)
        k5.decode_attention(case["q"][rows], lists[0], lists[1], sink_H=case["sink"], split=split, out_BHD=out)
        return out

    whole = run(torch.arange(33, device=DEV))
    turned = torch.randperm(33, device=DEV)
    assert torch.equal(run(turned), whole[turned])
    for row in (0, 7, 32):
        assert torch.equal(run(torch.tensor([row], device=DEV))[0], whole[row])


def test_tiles_alone_decide_how_a_token_is_cut() -> None:
    """Without a split: right, and the bits of a token are the same in launches of one, two and four blocks a token."""
    torch.manual_seed(6)
    lengths = [0, 1, 200, 256, 257, 600, 640, 641, 1100, 3000]
    case = make_case(len(lengths), 64, (128, 3000), (64, 64), whole=True)
    second = case["second"]
    second.pages[:] = make_pages(second.pages.shape[0], 64, torch.arange(second.pages.shape[0] * 64, device=DEV))
    second.lengths_B[:] = torch.tensor(lengths, device=DEV)
    case["window"].pages[:] = make_pages(
        case["window"].pages.shape[0], 64, torch.arange(case["window"].pages.shape[0] * 64, device=DEV)
    )
    want, _ = k5.decode_attention_reference(case["q"], case["window"], second, sink_H=case["sink"])

    def run(rows: list[int], width: int) -> torch.Tensor:
        lists = [
            k5.EntryList(pages=x.pages, page_entries=64, slots_BW=x.slots_BW[rows, :w], lengths_B=x.lengths_B[rows])
            for x, w in ((case["window"], 128), (second, width))
        ]
        out = torch.empty(len(rows), 64, 512, device=DEV, dtype=torch.bfloat16)
        k5.decode_attention(case["q"][rows], *lists, sink_H=case["sink"], out_BHD=out)
        return out

    whole = run(list(range(len(lengths))), 3000)
    assert error(whole, want) < 5e-3
    blocks = set()
    for width in (256, 640, 1100, 3000):
        rows = [t for t, n in enumerate(lengths) if n <= width]
        blocks.add(k5.parts_of(2 + -(-width // 64)))
        assert torch.equal(run(rows, width), whole[rows])
    assert blocks == {1, 2, 4}


@pytest.mark.parametrize("heads", [64, 24])
@pytest.mark.parametrize("raw_q", [False, True])
@pytest.mark.parametrize("width", [0, 64, 200])
def test_two_blocks_of_a_token_give_the_bits_of_one(heads: int, raw_q: bool, width: int) -> None:
    """A batch of more than half of the multiprocessors has one block a token; in parts of it each token has two."""
    torch.manual_seed(11 + width)
    processors = torch.cuda.get_device_properties(DEV).multi_processor_count
    batch = processors // 2 + 5
    case = make_case(batch, heads, (128, max(width, 1)), (64, 2))
    case["window"].lengths_B[3] = -1  # broken: NaN
    table, positions = turns(4096), torch.randint(0, 4096, (batch,), device=DEV)

    def run(first: int, last: int, end: str) -> list[torch.Tensor]:
        rows, n = slice(first, last), last - first
        lists = [
            k5.EntryList(
                pages=x.pages, page_entries=x.page_entries, slots_BW=x.slots_BW[rows], lengths_B=x.lengths_B[rows]
            )
            for x in (case["window"], case["second"])
        ]
        out = torch.full((n, heads, 512), 7.0, device=DEV, dtype=torch.bfloat16)
        lse = torch.full((n, heads), 7.0, device=DEV)
        codes = torch.full((heads // 8, n, 4096), 7.0, device=DEV).to(torch.float8_e4m3fn)
        scales = torch.full((heads // 8, 32, n), 7.0, device=DEV).transpose(1, 2)
        k5.decode_attention(
            case["q"][rows],
            lists[0],
            lists[1] if width else None,
            sink_H=case["sink"],
            out_BHD=out,
            lse_BH=lse,
            positions_B=positions[rows],
            cos_sin=table,
            raw_q=raw_q,
            turn_out=end == "turned",
            quantised=(codes, scales) if end == "quantised" else None,
        )
        return [
            out.view(torch.int16),
            lse.view(torch.int32),
            *(x.transpose(0, 1) for x in (codes.view(torch.uint8), scales.view(torch.int32))),
        ]

    for end in ("plain", "turned", "quantised"):
        whole = run(0, batch, end)
        for first, last in ((0, processors // 2), (batch - 9, batch), (3, 4)):
            for one, two in zip(whole, run(first, last, end), strict=True):
                assert torch.equal(one[first:last], two), end


@pytest.mark.parametrize("split", [None, *k5.SPLITS])
def test_a_broken_list_breaks_its_token(split: int | None) -> None:
    """A length that cannot be, or a slot past the pool, gives NaN in every channel, and nothing else sees it."""
    torch.manual_seed(10)
    case = make_case(5, 64, (128, 512), (64, 64), whole=True)

    positions, table = torch.randint(0, 4096, (5,), device=DEV), turns(4096)

    def run(sink: torch.Tensor | None = case["sink"], **ends: object) -> torch.Tensor:
        out, lse = torch.empty(5, 64, 512, device=DEV, dtype=torch.bfloat16), torch.empty(5, 64, device=DEV)
        lists = case["window"], case["second"]
        k5.decode_attention(case["q"], *lists, sink_H=sink, split=split, out_BHD=out, lse_BH=lse, **ends)
        assert torch.equal(lse.isnan(), out.isnan().any(2) if "quantised" not in ends else lse.isnan())
        return out

    whole = run()
    assert whole.isfinite().all()
    for name, width in (("window", 128), ("second", 512)):
        entries = case[name]
        slots, lengths, past = entries.slots_BW, entries.lengths_B, entries.pages.shape[0] * 64
        breaks = [(lengths, 2, n) for n in (-1, -(2**31), width + 1, 2**31 - 1)]
        breaks += [(slots[2], at, slot) for at in (0, 77, width - 1) for slot in (past, 2**31 - 1, -2, -(2**31))]
        for what, at, value in breaks:
            kept = int(what[at])
            what[at] = value
            out = run()
            assert out[2].isnan().all(), (name, at, value)
            assert torch.equal(out[[0, 1, 3, 4]], whole[[0, 1, 3, 4]]), (name, at, value)
            assert run(None)[2].isnan().all()
            fused = {"positions_B": positions, "cos_sin": table, "raw_q": True}
            assert run(**fused, turn_out=True)[2].isnan().all()
            codes = torch.zeros(8, 5, 4096, device=DEV).to(torch.float8_e4m3fn)
            run(**fused, quantised=(codes, torch.zeros(8, 32, 5, device=DEV).transpose(1, 2)))
            assert torch.equal(codes.float().isnan().all(2).all(0), torch.arange(5, device=DEV) == 2)
            what[at] = kept
    assert torch.equal(run(), whole)
    case["second"].lengths_B[2], case["window"].lengths_B[2] = -1, 0  # nothing else to attend to
    assert run(None)[2].isnan().all()


def test_no_tokens_are_no_error() -> None:
    """Launches of nothing leave everything as it is."""
    case = make_case(3, 64, (128, 512), (64, 64))
    none = [
        k5.EntryList(pages=x.pages, page_entries=64, slots_BW=x.slots_BW[:0], lengths_B=x.lengths_B[:0])
        for x in (case["window"], case["second"])
    ]
    k5.decode_attention(case["q"][:0], *none, sink_H=None, out_BHD=torch.empty_like(case["q"][:0]))
    pages, table = torch.zeros(2, 4352, dtype=torch.uint8, device=DEV), torch.zeros(0, 4, dtype=torch.int32, device=DEV)
    lengths, logits = torch.zeros(0, dtype=torch.int32, device=DEV), torch.zeros(0, 256, device=DEV)
    q, w = torch.zeros(0, 64, 128, device=DEV).to(torch.float8_e4m3fn), torch.zeros(0, 64, device=DEV)
    k4.index_logits(q, w, pages, table, lengths, logits)
    k4.top_k(logits, lengths, torch.zeros(0, 64, dtype=torch.int32, device=DEV), lengths, table)
    torch.cuda.synchronize()


@pytest.mark.parametrize("split", k5.SPLITS)
def test_decode_attention_is_finite_however_large_the_logits(split: int) -> None:
    """Entries near 2^110: the largest logit still weighs exactly one."""
    torch.manual_seed(9)
    raw = torch.randint(0, 120, (2, page_stride(64)), dtype=torch.uint8, device=DEV)  # finite bf16, scales below one
    slots = torch.randperm(128, device=DEV)[None].to(torch.int32)
    entries = k5.EntryList(
        pages=raw, page_entries=64, slots_BW=slots, lengths_B=torch.tensor([128], device=DEV, dtype=torch.int32)
    )
    q = torch.randn(1, 64, 512, device=DEV).to(torch.bfloat16)
    out = torch.empty_like(q)
    k5.decode_attention(q, entries, None, sink_H=None, split=split, out_BHD=out)
    want, _ = k5.decode_attention_reference(q, entries, None, sink_H=None)
    assert error(out, want) < 5e-3


@pytest.mark.parametrize("split", k5.SPLITS)
def test_fused_ends_give_the_bytes_of_the_separate_steps(split: int) -> None:
    """Raw q in and e4m3 out equal norm + rotary before and inverse rotary + quantisation after, up to rare rounding."""
    torch.manual_seed(7)
    case = make_case(7, 64, (128, 512), (64, 64))
    table, positions = turns(4096), torch.randint(0, 4096, (7,), device=DEV)
    q = (case["q"].float() * 3).to(torch.bfloat16)
    lists = (case["window"], case["second"])
    plain = torch.empty(7, 64, 512, device=DEV, dtype=torch.bfloat16)
    k5.decode_attention(k5.norm_rope_q(q, positions, table), *lists, sink_H=case["sink"], split=split, out_BHD=plain)
    codes = torch.full((8, 7, 4096), float("nan"), device=DEV).to(torch.float8_e4m3fn)
    scales = torch.full((8 * 32 * 8,), float("nan"), device=DEV).as_strided((8, 7, 32), (256, 1, 8))
    k5.decode_attention(
        q,
        *lists,
        sink_H=case["sink"],
        split=split,
        positions_B=positions,
        cos_sin=table,
        raw_q=True,
        quantised=(codes, scales),
    )
    want, want_scale = k5.quantise_output(plain, positions, table)
    assert (scales != want_scale).float().mean() < 5e-3
    assert (codes.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 2e-2


def test_decode_attention_reads_pages_beyond_two_gigabytes() -> None:
    """Byte offsets are 64-bit: the last page of a pool of over 4 GiB."""
    torch.manual_seed(8)
    pages = (9 << 29) // page_stride(64)
    pool = torch.empty(pages, page_stride(64), dtype=torch.uint8, device=DEV)
    slots = (pages - 1) * 64 + torch.randperm(64, device=DEV)[None].to(torch.int32)
    small = make_pages(1, 64, torch.arange(64, device=DEV))
    pool[-1] = small[0]
    near = k5.EntryList(
        pages=small, page_entries=64, slots_BW=slots % 64, lengths_B=torch.tensor([64], device=DEV, dtype=torch.int32)
    )
    far = k5.EntryList(pages=pool, page_entries=64, slots_BW=slots, lengths_B=near.lengths_B)
    q = torch.randn(1, 64, 512, device=DEV).to(torch.bfloat16)
    outs = [torch.empty_like(q) for _ in range(2)]
    for entries, out in zip((near, far), outs, strict=True):
        k5.decode_attention(q, entries, None, sink_H=None, split=1, out_BHD=out)
    assert torch.equal(outs[0], outs[1])


def test_index_logits_match_float64() -> None:
    """Ragged lengths, scales of a key far apart, an unknown page, untouched places past a length."""
    torch.manual_seed(9)
    spread = torch.exp2(torch.randint(-9, 6, (40 * 64, 4), device=DEV).float()).repeat_interleave(32, 1)
    codes, scales = k4.pack_keys(torch.randn(40 * 64, 128, device=DEV) * spread)
    pages = torch.full((40, 4400), 255, dtype=torch.uint8, device=DEV)[:, : 4352 + 16]
    pages[:, :4096], pages[:, 4096:4352] = codes.view(40, -1), scales.view(40, -1)
    lengths = torch.tensor([2000, 1, 64, 65, 0, 1999, 900], device=DEV, dtype=torch.int32)
    table = torch.stack([torch.randperm(40, device=DEV)[:32] for _ in range(7)]).to(torch.int32)
    q = torch.randn(7, 64, 128, device=DEV).to(torch.float8_e4m3fn)
    w = torch.randn(7, 64, device=DEV)
    want = k4.index_logits_reference(q, w, pages, table, lengths)
    out, first = torch.empty(7, 2048, device=DEV), None
    for blocks in (1, 5, 528):
        out = torch.full((7, 2048), 7.0, device=DEV)
        k4.index_logits(q, w, pages, table, lengths, out, blocks=blocks)
        first = out if first is None else first
        assert torch.equal(out, first)
        for t, n in enumerate(lengths.tolist()):
            assert (out[t, n:] == 7.0).all()
            assert n == 0 or error(out[t, :n], want[t, :n]) < 1e-3
    alone = torch.full((1, 2048), 7.0, device=DEV)
    k4.index_logits(q[5:6], w[5:6], pages, table[5:6], lengths[5:6], alone)
    assert torch.equal(alone[0], out[5])
    table[0, 3] = 4000
    k4.index_logits(q, w, pages, table, lengths, out, blocks=64, skip=100)
    assert torch.isneginf(out[0, 192:256]).all()
    assert torch.isfinite(out[0, :192]).all()
    kept, lengths[5], lengths[6], lengths[1] = out.clone(), 1900, 2**31 - 1, -5  # no row is written past its end
    k4.index_logits(q, w, pages, table, lengths, out[:, :1800])
    assert torch.equal(out[:, 1800:], kept[:, 1800:])
    assert torch.equal(out[1], kept[1])
    want = k4.index_logits_reference(q[5:], w[5:], pages, table[5:], lengths[5:].clamp_max(1800))
    for t in (0, 1):
        assert error(out[5 + t, :1800], want[t]) < 1e-3


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("k", [512, 1024])
def test_top_k_equals_a_stable_sort(size: int, k: int) -> None:
    """Ties, zeros of both signs, infinities, one outlier, all equal: the places of a stable descending sort."""
    torch.manual_seed(size)
    for n in (1100, 3001, 5003, 12000, 30000):
        x = torch.randn(9, n, device=DEV)
        x[1] = 0.0 * x[1]
        x[2] = torch.randint(0, 30, (n,), device=DEV).float()
        x[3, 5], x[4, 7], x[5] = 3e38, float("inf"), 1.5
        x[6, ::3] = float("-inf")
        x[7, ::2] = float("nan")  # broken keys: they lose, the search still ends, and the count says so
        x[7, 1::6] = -float("nan")
        lengths = torch.tensor([n, n, n - 1, n, n, k + 1, n, n - 3, k], dtype=torch.int32, device=DEV)
        out = torch.full((9, k), -9, dtype=torch.int32, device=DEV)
        count = torch.empty(9, dtype=torch.int32, device=DEV)
        k4.top_k(x, lengths, out, count, blocks_a_row=size)
        numbers = torch.where(x.isnan(), float("-inf"), x + 0.0)
        want, want_count = k4.top_k_reference(numbers, lengths, k)
        assert torch.equal(out, want)
        for t, length in enumerate(lengths.tolist()):
            if length > k and not x[t, :length].isfinite().all():
                want_count[t] = -1
        assert (want_count == -1).sum() == 3
        assert torch.equal(count, want_count)
        lengths[1], lengths[3], lengths[5], lengths[8] = -1, n + 1, 2**31 - 1, -(2**31)  # broken: nothing is chosen
        k4.top_k(x, lengths, out, count, blocks_a_row=size)
        for t in range(9):
            if t in (1, 3, 5, 8):
                want[t], want_count[t] = -1, -1
        assert torch.equal(out, want)
        assert torch.equal(count, want_count)


def test_index_choice_follows_lengths_that_change_under_a_graph() -> None:
    """Kernels look at lengths before the launch ahead has ended; replays still choose by the lengths that it gives."""
    torch.manual_seed(10)
    rows, longest, k = 64, 16384, 512
    codes, scales = k4.pack_keys(torch.randn(300 * 64, 128, device=DEV))
    pages = torch.cat([codes.view(300, -1), scales.view(300, -1)], 1).contiguous()
    table = torch.randint(0, 300, (rows, longest // 64), device=DEV, dtype=torch.int32)
    q = torch.randn(rows, 64, 128, device=DEV).to(torch.float8_e4m3fn)
    w = torch.randn(rows, 64, device=DEV)
    given, lengths = (torch.zeros(rows, dtype=torch.int32, device=DEV) for _ in range(2))
    logits = torch.empty(rows, longest, device=DEV)
    out = torch.empty(2, rows, k, dtype=torch.int32, device=DEV)
    count = torch.empty(2, rows, dtype=torch.int32, device=DEV)

    def choose(turn: int) -> None:
        lengths.copy_(given if turn == 0 else given.flip(0))
        k4.index_logits(q, w, pages, table, lengths, logits, skip=k)
        k4.top_k(logits, lengths, out[turn], count[turn], table)

    choose(0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        choose(0)
        choose(1)
    for most in (longest, 700, 5000, longest, 0, longest):
        given.copy_(torch.randint(0, most + 1, (rows,), device=DEV))
        graph.replay()
        got = out.clone(), count.clone()
        for turn in range(2):
            choose(turn)
            torch.cuda.synchronize()
            want, want_count = k4.top_k_reference(logits, lengths, k)
            slots = torch.where(want < 0, want, table.gather(1, (want.clamp(0) >> 6).long()) * 64 + (want & 63))
            assert torch.equal(got[0][turn], slots)
            assert torch.equal(out[turn], slots)
            assert torch.equal(got[1][turn], want_count)


def test_pages_that_no_slot_could_name_break_the_choice() -> None:
    """They become slots of no pool, not somebody's, and not the -1 that attention skips."""
    for n in (40, 700):  # all of them, or the best
        table = torch.zeros(1, 16, dtype=torch.int32, device=DEV)
        for page in (-1, -3, 2**25, 2**26 + 5, 2**31 - 1, -(2**31)):
            table[0, 0] = page
            out, logits = torch.empty(1, 64, dtype=torch.int32, device=DEV), torch.zeros(1, 1024, device=DEV)
            lengths = torch.tensor([n], dtype=torch.int32, device=DEV)
            k4.top_k(logits, lengths, out, None, table)
            assert (out[0, : min(n, 64)] < -1).all()


@pytest.mark.parametrize("broken", ["window slot", "window position", "slot", "ring", "position", "late position"])
def test_nothing_is_written_outside_of_the_pools(broken: str) -> None:
    """A place that does not exist is a CUDA error: the process that asked for it is done."""
    program = f"""
import torch
from headrace.kernels.cuda import compressor as k1
z = lambda *s, dtype=torch.float32: torch.zeros(*s, dtype=dtype, device="cuda")
broken, one = {broken!r}, lambda name, x, wrong: torch.tensor([x, wrong if broken == name else x], device="cuda")
pages = z(4, 37440, dtype=torch.uint8)
window = k1.WindowRows(kv_TD=z(2, 512, dtype=torch.bfloat16), positions_T=one("window position", 3, 100),
    slots_T=one("window slot", 5, 256), pages=z(4, 37440, dtype=torch.uint8), page_entries=64)
step = k1.Step(positions_T=one("position", 3, -1) if broken == "position" else one("late position", 3, 103),
    first_row_T=torch.arange(2, dtype=torch.int32, device="cuda"), last_row_T=torch.arange(2, dtype=torch.int32,
    device="cuda"), ring_T=one("ring", 1, 2), slots_T=one("slot", 7, 256))
k1.compress(z(2, 2048), z(4, 1024), z(512, dtype=torch.bfloat16), step, z(2, 16, 2048), pages, 64, z(100, 64),
    ratio=4, max_tokens_a_sequence=2, window=window)
torch.cuda.synchronize()
print("written")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "written" not in done.stdout
    assert "CUDA error" in done.stderr or "AcceleratorError" in done.stderr, done.stderr[-2000:]


def make_step(first: list[int], tokens: list[int], entries: int) -> k1.Step:
    """Sequences whose tokens of this step begin at position first[i]; every token has a slot of its own."""
    positions, begin, end, ring = [], [], [], []
    for i, (p, n) in enumerate(zip(first, tokens, strict=True)):
        begin += [len(positions)] * n
        end += [len(positions) + n - 1] * n
        positions += range(p, p + n)
        ring += [i] * n
    number = len(positions)
    assert number <= entries
    pick = lambda x, dtype: torch.tensor(x, dtype=dtype, device=DEV)  # noqa: E731
    return k1.Step(
        positions_T=pick(positions, torch.int64),
        first_row_T=pick(begin, torch.int32),
        last_row_T=pick(end, torch.int32),
        ring_T=pick(ring, torch.int64),
        slots_T=torch.randperm(entries, device=DEV)[:number],
    )


@pytest.mark.parametrize(
    ("ratio", "rows", "first", "tokens"),
    [
        (4, 8, [3, 7, 11, 100, 0], [1, 1, 1, 1, 1]),
        (4, 16, [0, 13, 3], [50, 37, 5]),
        (4, 16, [255, 6], [3, 2]),
        (128, 128, [127, 255, 126], [1, 1, 1]),
        (128, 144, [0, 100, 127], [300, 60, 2]),
    ],
)
def test_compress_matches_float64(ratio: int, rows: int, first: list[int], tokens: list[int]) -> None:
    """Entries from rows and ring alike; state rows exact; nothing else is written, padding writes nothing."""
    torch.manual_seed(ratio)
    page_entries = 64 if ratio == 4 else 2
    step = make_step(first, tokens, 512)
    step.ring_T[-1] = -1
    width = k1.WIDTH[ratio]
    x = torch.randn(len(step.ring_T), 2 * width + 4, device=DEV)[:, : 2 * width]
    ape, weight = torch.randn(ratio, width, device=DEV), torch.rand(512, device=DEV).to(torch.bfloat16)
    state = torch.randn(len(first), rows, 2 * width, device=DEV)
    table = turns(1024)
    pages = torch.full((512 // page_entries, page_stride(page_entries)), 255, dtype=torch.uint8, device=DEV)
    done, want, want_state = k1.compress_reference(x, ape, weight, step, state, table, ratio=ratio)
    k1.compress(x, ape, weight, step, state, pages, page_entries, table, ratio=ratio, max_tokens_a_sequence=max(tokens))
    assert torch.equal(state, want_state)
    slots = step.slots_T[done]
    got = k1.entry_bytes(pages, page_entries, slots)
    assert (got != k1.quantise_entries(want)).float().mean() < 1e-2
    assert error(k5.read_entries(pages, page_entries, slots), want) < 3e-2
    other = torch.ones(512, dtype=torch.bool, device=DEV)
    other[slots] = False
    assert (k1.entry_bytes(pages, page_entries, other.nonzero()[:, 0]) == 255).all()


@pytest.mark.parametrize("ratio", [4, 128])
def test_compress_does_not_depend_on_chunks(ratio: int) -> None:
    """A prompt of 300 tokens at once, and the same cut in five: the same bytes."""
    torch.manual_seed(11)
    width, n, entries = k1.WIDTH[ratio], 300, 64 if ratio == 4 else 2
    x = torch.randn(n, 2 * width, device=DEV)
    ape, weight = torch.randn(ratio, width, device=DEV), torch.rand(512, device=DEV).to(torch.bfloat16)
    table = turns(512)
    results = []
    for cuts in ((0, 300), (0, 1, 130, 131, 200, 300)):
        pages = torch.full((512 // entries, page_stride(entries)), 255, dtype=torch.uint8, device=DEV)
        state = torch.full((1, 144, 2 * width), float("nan"), device=DEV)
        for a, b in itertools.pairwise(cuts):
            step = make_step([a], [b - a], 512)
            step.slots_T.copy_(torch.arange(a, b, device=DEV))
            k1.compress(
                x[a:b], ape, weight, step, state, pages, entries, table, ratio=ratio, max_tokens_a_sequence=b - a
            )
        results.append(pages)
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize(("ratio", "tokens"), [(4, 1), (4, 21), (128, 21), (None, 21)])
def test_window_rows_become_the_reference_bytes(ratio: int | None, tokens: int) -> None:
    """With a compressor's launch and alone: entries at their slots, padding and all other bytes untouched."""
    torch.manual_seed(13)
    kv = (torch.randn(tokens, 520, device=DEV) * torch.exp2(torch.randint(-9, 9, (tokens, 1), device=DEV).float())).to(
        torch.bfloat16
    )[:, :512]
    slots = torch.randperm(256, device=DEV)[:tokens]
    slots[tokens // 2 + 1 :: 7] = -1
    positions, table = torch.randint(0, 512, (tokens,), device=DEV), turns(512)
    pages = torch.full((4, page_stride(64)), 255, dtype=torch.uint8, device=DEV)
    window = k1.WindowRows(kv_TD=kv, positions_T=positions, slots_T=slots, pages=pages, page_entries=64)
    if ratio is None:
        k1.insert_window(window, table)
    else:
        width, step = k1.WIDTH[ratio], make_step([0], [5], 64)
        k1.compress(
            torch.randn(5, 2 * width, device=DEV),
            torch.zeros(ratio, width, device=DEV),
            torch.ones(512, dtype=torch.bfloat16, device=DEV),
            step,
            torch.zeros(1, 144, 2 * width, device=DEV),
            torch.empty(64, page_stride(64), dtype=torch.uint8, device=DEV),
            64,
            table,
            ratio=ratio,
            max_tokens_a_sequence=5,
            window=window,
        )
    real = slots >= 0
    want = k1.quantise_entries(k5.rotate(kv.float(), table[positions]))[real]
    assert (k1.entry_bytes(pages, 64, slots[real]) != want).float().mean() < 1e-3  # a rotation's last bit
    other = torch.ones(256, dtype=torch.bool, device=DEV)
    other[slots[real]] = False
    assert (k1.entry_bytes(pages, 64, other.nonzero()[:, 0]) == 255).all()


def test_move_pieces_copies_and_digests() -> None:
    """Pages gathered and scattered again keep their bytes; both digests are the payload's; one changed bit changes
    it."""
    torch.manual_seed(12)
    pool = torch.randint(0, 256, (50, 37440), dtype=torch.uint8, device=DEV)
    back = torch.zeros_like(pool)
    payload = torch.zeros(20 * 37376, dtype=torch.uint8, device=DEV)
    chosen = torch.randperm(50, device=DEV)[:20]
    at = torch.arange(20, device=DEV) * 37376
    rows = chosen * 37440
    length = torch.full_like(at, 37376)
    digests = torch.zeros(3, dtype=torch.int64, device=DEV)
    out = torch.stack([pool.data_ptr() + rows, payload.data_ptr() + at, at, length], 1).contiguous()
    into = torch.stack([payload.data_ptr() + at, back.data_ptr() + rows, at, length], 1).contiguous()
    move.move_pieces(out, digests[0:1], max_bytes=37376)
    move.move_pieces(into, digests[1:2], max_bytes=37376)
    assert torch.equal(back[chosen, :37376], pool[chosen, :37376])
    assert (back[:, 37376:] == 0).all()
    want = move.digest_reference(payload)
    assert int(digests[0]) & (2**64 - 1) == want == int(digests[1]) & (2**64 - 1)
    payload[12345] ^= 4
    move.move_pieces(into, digests[2:3], max_bytes=37376)
    assert int(digests[2]) & (2**64 - 1) == move.digest_reference(payload) != want
