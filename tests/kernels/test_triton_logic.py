"""The Triton kernels of a step under Triton's interpreter, where triton is installed; what needs none, everywhere."""

from __future__ import annotations

import importlib.util
import os
import random
from collections import Counter

import pytest
import torch

from headrace.kernels import cpu, entry_format
from headrace.kernels.cuda import compressor, dense, experts, index_entries, rows
from headrace.kernels.device import (
    CompressorWeights,
    ExpertWeights,
    HeadWeights,
    HyperWeights,
    PlainOps,
    StepPlan,
    hadamard,
)
from headrace.kernels.entry_format import EntryFormat
from headrace.kernels.paged import PagedEntries, StateRing

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # the interpreter's own, of numpy
interpreted = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1",
    reason="needs triton's interpreter",
)
PLAIN = PlainOps(torch.float32)
"""The interpreter has no product of bf16."""


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def test_tiles_suffice_for_every_routing(rng: random.Random) -> None:
    """However the experts are chosen, no more tiles are needed than were made room for."""
    for _ in range(2000):
        tokens, choices, number, block = (
            rng.randint(1, 300),
            rng.randint(1, 6),
            rng.randint(6, 40),
            rng.choice([16, 64]),
        )
        popular = rng.sample(range(number), rng.randint(choices, number))
        counts = Counter(e for _ in range(tokens) for e in rng.sample(popular, choices))
        needed = sum(-(-n // block) for n in counts.values()) + -(-tokens // block)
        assert needed <= experts.max_tiles(tokens, choices, number, block)


def test_pieces_are_the_first_rows_in_order(rng: random.Random) -> None:
    """Nothing twice, nothing left out that a piece could hold."""
    for number in [0, 511, 512, 8191, 8192, 16896, *(rng.randint(1, 40000) for _ in range(50))]:
        pieces = list(dense.pieces_of(number))
        assert [p.start for p in pieces] == [0, *(p.stop for p in pieces)][: len(pieces)]
        assert number - (pieces[-1].stop if pieces else 0) < dense.PIECES[-1]
        assert all(p.stop - p.start in dense.PIECES for p in pieces)


def test_the_split_belongs_to_the_weight() -> None:
    """It depends on a weight's shape alone, and cuts its depth into equal parts."""
    for columns in (64, 256, 512, 1536):
        for depth in (128, 2048, 4096, 7168):
            assert depth % dense.split_of(columns, depth) == 0
    assert dense.split_of(256, 4096) == 8


@interpreted
@pytest.mark.parametrize(("t", "k", "n", "split"), [(5, 96, 40, 1), (70, 128, 130, 1), (3, 2048, 256, 8)])
def test_linear_is_the_product(t: int, k: int, n: int, split: int) -> None:
    """Rows, columns and depth that fill no tile."""
    torch.manual_seed(t)
    x, w = torch.randn(t, k), torch.randn(n, k)
    y = dense.linear(x, w, torch.float32, split=split)
    assert error(y.sum(0) if split > 1 else y, x @ w.t()) < 1e-6
    grouped = dense.linear_groups(x.view(t, 2, -1), w.view(2, n // 2, k)[..., : k // 2].contiguous(), torch.float32)
    assert error(grouped, PLAIN.linear_groups(x.view(t, 2, -1), w.view(2, n // 2, k)[..., : k // 2])) < 1e-6


@interpreted
def test_products_of_many_rows_are_the_same_without_a_library() -> None:
    """Rows with a gap between them, groups each into their own columns: what is left to our kernel, here all of it."""
    torch.manual_seed(4)
    x, w = torch.randn(dense.PIECES[-1] + 8, 2, 64), torch.randn(2, 16, 64)
    assert torch.equal(dense.product_groups(x, w, torch.float32), dense.linear_groups(x, w, torch.float32))
    assert torch.equal(dense.product(x[:, 1], w[1], torch.float32), dense.linear(x[:, 1], w[1], torch.float32))


@interpreted
def test_norms_streams_and_tokens_are_the_plain_ones() -> None:
    """With and without a sub-layer before; a width that is no power of two; NaN and ties among logits."""
    torch.manual_seed(2)
    x, q_weight, kv_weight = torch.randn(4, 700), torch.rand(32), torch.rand(512)
    got = rows.norm_pair(x, q_weight, kv_weight, 1e-6, torch.float32)
    for a, b in zip(got, PLAIN.norm_pair(x, q_weight, kv_weight, 1e-6), strict=True):
        assert error(a, b) < 1e-6
    streams, norm = torch.randn(3, 4, 96), torch.rand(96)
    hyper = HyperWeights(torch.randn(24, 384) / 10, torch.randn(24), torch.rand(3))
    after = (torch.randn(3, 96), torch.rand(3, 4), torch.rand(3, 4, 4))
    settings = {"eps": 1e-6, "norm_eps": 1e-6}
    for before in (None, after):
        got = rows.streams(streams, hyper.fn, hyper.base, hyper.scale, norm, before, rounds=20, **settings)
        want = PLAIN.hyper_connect(streams, hyper, norm, before, rounds=20, **settings)
        for a, b in zip(got, want, strict=True):
            assert error(a, b) < 1e-6
    head, wanted = HeadWeights(torch.randn(4, 384) / 10, torch.randn(4), torch.rand(1)), torch.tensor([2, 0])
    got = rows.streams_head(streams, after, wanted, head.fn, head.base, head.scale, norm, **settings)
    assert error(got, PLAIN.head_input(streams, after, wanted, head, norm, **settings)) < 1e-6
    logits = torch.randn(3, 9000)
    logits[0, 77] = logits[0, 8000] = 9
    logits[1, 3] = float("nan")
    assert torch.equal(rows.likeliest(logits), PLAIN.likeliest(logits))
    assert rows.likeliest(logits).tolist()[:2] == [77, -1]
    o, positions, table = torch.randn(3, 5, 512), torch.tensor([3, 9, 100]), torch.randn(128, 64)
    want = PLAIN._rotate(o, table[positions][:, None], inverse=True)
    rows.turn_back(o, positions, table)
    assert torch.equal(o, want)
    q = torch.randn(3, 6 * 512)[:, : 5 * 512].unflatten(1, (5, 512))
    want = PLAIN._rotate(PLAIN._rms(q, None, 1e-6), table[positions][:, None])
    rows.norm_rope_(q, positions, table, 1e-6)
    torch.testing.assert_close(q, want, rtol=1e-5, atol=1e-6)


@interpreted
@pytest.mark.parametrize("tokens", [1, 5, 90])
def test_experts_are_the_plain_ones(tokens: int) -> None:
    """Scored (with ties) and hashed gates, routing of all choices, the shared expert; more rows than one tile has."""
    torch.manual_seed(tokens)
    d, f, number, c = 96, 64, 6, 3
    logits, ids = torch.randn(tokens, number) * 6, torch.randint(0, 50, (tokens,))
    logits[0] = 1.0
    bias, table = torch.randn(number), torch.randint(0, number, (50, c)).int()
    w13, w2 = torch.randn(number + 1, 2 * f, d) / 8, torch.randn(number + 1, d, f) / 8
    x = torch.randn(tokens, d)
    for weights in (
        ExpertWeights(torch.empty(0), bias, None, w13, w2, c, 1.5, 1.5, True),
        ExpertWeights(torch.empty(0), None, table, w13, w2, c, 1.5, 1.5, False),
    ):
        chosen, shares = experts.gate(logits, weights.bias, weights.table, ids, c, 1.5, normalise=weights.normalise)
        want_ids, want_shares = PLAIN.gate(logits, weights, ids)
        assert torch.equal(chosen, want_ids)
        assert error(shares, want_shares) < 1e-6
        y = torch.zeros(tokens, d)
        for t in range(tokens):
            for e, share in zip(chosen[t].tolist(), shares[t], strict=True):
                y[t] += share * PLAIN._expert(x[t : t + 1], weights, e)[0]
        y += PLAIN._expert(x, weights, -1)
        assert error(experts.experts(x, chosen, shares, w13, w2, 1.5, torch.float32), y) < 1e-5


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about NaN
def test_nan_goes_through_every_operation() -> None:
    """A row that holds a NaN is NaN after it: no bound, no rounding makes a number of it. Others do not see it."""
    torch.manual_seed(3)
    nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)  # the GPU's own; its bits round to -0
    d, f = 96, 64

    def is_broken(y: torch.Tensor) -> None:
        assert y[1].isnan().any(), y[1]
        assert y[0].isfinite().all()
        assert y[2].isfinite().all()

    x = torch.randn(3, d)
    x[1, 5] = nan
    is_broken(dense.linear(x, torch.randn(40, d), torch.float32))
    w13, w2 = torch.randn(3, 2 * f, d), torch.randn(3, d, f)
    ids, shares = torch.tensor([[0], [1], [0]], dtype=torch.int32), torch.ones(3, 1)
    is_broken(experts.experts(x, ids, shares, w13, w2, 1.5, torch.float32))
    logits = torch.randn(3, 8)
    logits[1, 3] = nan
    table = torch.tensor([[0, 1]] * 3, dtype=torch.int32)
    for bias, fixed in ((torch.randn(8), None), (None, table)):
        is_broken(experts.gate(logits, bias, fixed, torch.arange(3), 2, 1.5, normalise=True)[1])
        is_broken(cpu.gate(logits, bias, None if fixed is None else fixed.long(), 2, 1.5, normalise=True)[1])
    for what in (nan, torch.tensor(float("inf"))):
        q = torch.randn(3, 8 * 128)
        q[1, 300] = what
        is_broken(index_entries.quantise_queries(q.bfloat16(), torch.rand(3, 8), torch.arange(3), torch.rand(8, 64))[1])
    for column in (5, 40):
        wide = torch.randn(3, 32 + 512)
        wide[1, column] = nan
        both = rows.norm_pair(wide, torch.rand(32), torch.rand(512), 1e-6, torch.bfloat16)
        is_broken(both[0 if column < 32 else 1])
    streams = torch.randn(3, 4, d).bfloat16()
    streams[1, 2, 5] = nan
    hyper = HyperWeights(torch.randn(24, 4 * d) / 10, torch.randn(24), torch.rand(3))
    norm = torch.rand(d).bfloat16()
    settings = {"eps": 1e-6, "norm_eps": 1e-6}
    mixed = rows.streams(streams, hyper.fn, hyper.base, hyper.scale, norm, None, rounds=20, **settings)
    for part in mixed[1:]:
        is_broken(part)
    after = (x.bfloat16(), torch.rand(3, 4), torch.rand(3, 4, 4))
    head = HeadWeights(torch.randn(4, 4 * d) / 10, torch.randn(4), torch.rand(1))
    is_broken(
        rows.streams_head(
            torch.randn(3, 4, d).bfloat16(), after, torch.arange(3), head.fn, head.base, head.scale, norm, **settings
        )
    )


@interpreted
@pytest.mark.parametrize("heads", [64, 8])
def test_index_queries_are_exact(heads: int) -> None:
    """Scales of a row's groups up to 12 steps apart: codes and folded weight give the value that was rounded to fp4."""
    torch.manual_seed(heads)
    table = torch.randn(512, 64)
    spread = torch.exp2(torch.randint(-6, 7, (3, heads * 4)).float()).repeat_interleave(32, 1)
    q, w = (torch.randn(3, heads * 128) * spread).to(torch.bfloat16), torch.randn(3, heads)
    positions = torch.tensor([3, 9, 400])
    codes, weights = index_entries.quantise_queries(q, w, positions, table)
    turned = PLAIN._rotate(q.view(3, heads, 128).float(), table[positions][:, None]).bfloat16().float()
    packed = entry_format.pack_entries(EntryFormat.INDEX_FP4, hadamard(turned).flatten(0, 1))
    value = entry_format.unpack_entries(EntryFormat.INDEX_FP4, *packed).view(3, heads, 128)
    got = codes.float() * weights[..., None]
    want = value * (w * (128**-0.5 * heads**-0.5))[..., None]
    torch.testing.assert_close(got[:, :heads], want, rtol=1e-6, atol=0)
    assert (codes.view(torch.uint8)[:, heads:] == 0).all()


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, about NaN
@pytest.mark.parametrize(("first", "tokens"), [([3, 7, 100, 0], [1, 1, 1, 1]), ([0, 13, 3], [21, 18, 5])])
def test_index_keys_are_the_plain_bytes(first: list[int], tokens: list[int]) -> None:
    """Pooled from rows and ring alike; padding writes nothing; the ring holds what the next key pools."""
    torch.manual_seed(len(tokens))
    places = [(i, f + j, sum(tokens[:i])) for i, (f, n) in enumerate(zip(first, tokens, strict=True)) for j in range(n)]
    ring, positions, begin = (torch.tensor(x) for x in zip(*places, strict=True))
    last = begin + torch.tensor(tokens)[ring] - 1
    slots = torch.where((positions + 1) % 4 == 0, torch.randperm(512)[: len(places)], -1)
    ring[-1] = -1
    step = compressor.Step(
        positions_T=positions, first_row_T=begin.int(), last_row_T=last.int(), ring_T=ring, slots_T=slots
    )
    x, ape, norm, table = (
        torch.randn(len(places), 520)[:, 4:516],
        torch.randn(4, 256),
        torch.rand(128),
        torch.randn(512, 64),
    )
    state = torch.randn(len(first), 16, 512)
    state[1, 2, 300] = float("nan")  # of the position 2
    pages = torch.full((8, 4608), 255, dtype=torch.uint8)
    other, other_state = pages.clone(), state.clone()
    norm = norm.to(torch.bfloat16)
    index_entries.compress_keys(x, ape, norm, step, state, pages, table, max_tokens_a_sequence=max(tokens), eps=1e-6)
    none = torch.empty(0)
    plan = StepPlan(
        token_ids_T=none, positions_T=positions, first_row_T=step.first_row_T, last_row_T=step.last_row_T, ring_T=ring,
        window_slots_T=none, slots_T={4: slots}, table_TB=none, window_list_TW=none, window_length_T=none,
        list128_TW=none, count_T={}, logit_rows_R=none, max_tokens_a_sequence=max(tokens), max_entries=64,
    )  # fmt: skip
    rings = StateRing(other_state.view(torch.uint8).view(len(first), -1), 0, 16, 256)
    keys = PagedEntries(other, 0, 64, EntryFormat.INDEX_FP4)
    PlainOps(torch.bfloat16).store_keys(plan, x, CompressorWeights(4, ape, norm), keys, rings, table, 1e-6)
    assert (pages != other).float().mean() < 1e-4  # a rounding's last bit
    scales = pages[:, 4096:4352].flatten().view(-1, 4)[slots.clamp(min=0)]
    assert (scales == 255).all(1)[(slots >= 0) & (ring >= 0)].any() == (
        len(first) == 4
    )  # the one key that pools the NaN
    for t in range(len(places) - 1):
        if t > last[t] - 8:
            assert torch.equal(state[ring[t], positions[t] % 16], other_state[ring[t], positions[t] % 16])
