"""The forward pass on Hopper: near the CPU's, and the same bits whatever the cuts, the company and the graph."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle.builder import Variant, random_weights
from support.device_views import feed, pages_for, views_on
from tokenizers import Tokenizer

from headrace.engine.plan import Slice, plan_batch
from headrace.kernels.cuda import build, dense, experts, rows
from headrace.kernels.cuda import decode_attention as k5
from headrace.kernels.cuda.hopper import FastHopperOps, HopperOps
from headrace.kernels.device import ExpertWeights, HeadWeights, HyperWeights, PlainOps
from headrace.model.checkpoint import load_weights
from headrace.model.config import ModelConfig
from headrace.model.demo import ensure_demo
from headrace.model.device import DeviceTransformer
from headrace.model.device_graphs import GraphedTransformer
from headrace.model.transformer import Transformer

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and build.compiler() is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvcc")]
BF16, DEV = torch.bfloat16, "cuda"
PLAIN = PlainOps(BF16)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize(("depth", "columns"), [(4096, 1536), (1024, 4096), (256, 96), (128, 3072), (32, 4096)])
@pytest.mark.parametrize("out", [BF16, torch.float32])
def test_a_product_s_bits_do_not_depend_on_its_rows(depth: int, columns: int, out: torch.dtype) -> None:
    """Every tile size, whole and cut anywhere: the same bits, and the product's."""
    torch.manual_seed(depth)
    x, w = torch.randn(2100, depth, device=DEV).to(BF16), torch.randn(columns, depth, device=DEV).to(BF16)
    whole = dense.linear(x, w, out)
    assert error(whole, x.float() @ w.float().t()) < (2e-3 if out == BF16 else 1e-5)
    for size in (1, 3, 64, 65, 256, 257, 1024, 1025):
        assert torch.equal(dense.linear(x[:size], w, out), whole[:size])
    assert torch.equal(dense.linear(x[700:764], w, out), whole[700:764])
    if depth == 4096:
        parts = dense.linear(x, w[:256].contiguous(), torch.float32, split=8)
        for size in (1, 64, 65, 257, 1025):
            assert torch.equal(dense.linear(x[:size], w[:256].contiguous(), torch.float32, split=8), parts[:, :size])


@pytest.mark.parametrize(("depth", "columns"), [(4096, 1536), (1024, 4096), (8192, 512)])
@pytest.mark.parametrize("out", [BF16, torch.float32])
def test_the_library_changes_no_bit(depth: int, columns: int, out: torch.dtype) -> None:
    """Many rows in pieces, what is left over by our own kernel, strided rows, groups of columns."""
    torch.manual_seed(depth)
    x, w = (
        torch.randn(9001, depth + 64, device=DEV).to(BF16)[:, :depth],
        torch.randn(columns, depth, device=DEV).to(BF16),
    )
    whole = dense.linear(x, w, out)
    for size in (1, 511, 512, 1025, 5000, 9001):
        assert torch.equal(dense.product(x[:size], w, out), whole[:size])
    x, w = torch.randn(3000, 2, depth, device=DEV).to(BF16), w.view(2, columns // 2, depth)
    whole = dense.linear_groups(x, w, out)
    for size in (1, 700, 3000):
        assert torch.equal(dense.product_groups(x[:size], w, out), whole[:size])


@pytest.mark.parametrize("depth", [1024, 4096])
def test_no_tile_changes_a_bit(depth: int) -> None:
    """Every tile that is, or may be, chosen for a product gives the same bits."""
    torch.manual_seed(depth)
    x, w = torch.randn(600, depth, device=DEV).to(BF16), torch.randn(512, depth, device=DEV).to(BF16)
    want = dense.linear(x, w, torch.float32, tile=dense.Tile(64, 32, 128, 4, 4))
    for m, n, k, warps, stages in (
        (64, 32, 256, 4, 4), (64, 16, 256, 4, 4), (64, 64, 64, 4, 6), (64, 64, 128, 4, 4), (64, 32, 64, 4, 8),
        (64, 16, 128, 4, 8), (64, 16, 512, 4, 2), (128, 128, 64, 8, 4), (128, 256, 64, 8, 3), (256, 128, 64, 8, 3),
    ):  # fmt: skip
        assert torch.equal(dense.linear(x, w, torch.float32, tile=dense.Tile(m, n, k, warps, stages)), want)


def test_grouped_columns_have_their_own_weights() -> None:
    """The output projection's groups: right, and the same bits for any number of rows."""
    torch.manual_seed(1)
    x, w = torch.randn(1100, 8, 4096, device=DEV).to(BF16), (torch.randn(8, 1024, 4096, device=DEV) / 64).to(BF16)
    whole = dense.linear_groups(x, w, BF16)
    assert error(whole, PLAIN.linear_groups(x, w)) < 2e-3
    for size in (1, 64, 65, 257):
        assert torch.equal(dense.linear_groups(x[:size], w, BF16), whole[:size])


@pytest.mark.parametrize(("number", "d", "f", "choices"), [(32, 512, 256, 6), (8, 256, 128, 2)])
def test_experts_do_not_depend_on_the_batch(number: int, d: int, f: int, choices: int) -> None:
    """Both tile sizes, any company: the same bits, and the plain result."""
    torch.manual_seed(number)
    tokens = 3000
    weights = ExpertWeights(
        gate=(torch.randn(number, d, device=DEV) / 16).to(BF16), bias=torch.randn(number, device=DEV) * 0.1, table=None,
        w13=(torch.randn(number + 1, 2 * f, d, device=DEV) / 16).to(BF16),
        w2=(torch.randn(number + 1, d, f, device=DEV) / 16).to(BF16),
        choices=choices, limit=10.0, scaling=1.5, normalise=True,
    )  # fmt: skip
    x, ids = torch.randn(tokens, d, device=DEV).to(BF16), torch.zeros(tokens, dtype=torch.int64, device=DEV)
    ops = HopperOps()
    whole = ops.experts(x, weights, ids)
    assert error(whole[:300], PLAIN.experts(x[:300], weights, ids[:300])) < 2e-3
    for size in (1, 7, 64, 300, 2049):
        assert torch.equal(ops.experts(x[:size], weights, ids[:size]), whole[:size])
    assert torch.equal(ops.experts(x[900:1000], weights, ids[:100]), whole[900:1000])
    logits = torch.randn(100, number, device=DEV) * 5
    logits[0] = 1.0
    chosen, shares = experts.gate(logits, weights.bias, None, ids, choices, 1.5, normalise=True)
    want_ids, want = PLAIN.gate(logits, weights, ids)
    assert torch.equal(chosen, want_ids)
    assert error(shares, want) < 1e-6


@pytest.mark.parametrize("d", [128, 256, 4096])
def test_streams_of_any_width_are_the_plain_ones(d: int) -> None:
    torch.manual_seed(d)
    streams, norm = torch.randn(9, 4, d, device=DEV).to(BF16), torch.rand(d, device=DEV).to(BF16)
    hyper = HyperWeights(
        torch.randn(24, 4 * d, device=DEV) / 40, torch.randn(24, device=DEV), torch.rand(3, device=DEV)
    )
    after = (torch.randn(9, d, device=DEV).to(BF16), torch.rand(9, 4, device=DEV), torch.rand(9, 4, 4, device=DEV))
    for before in (None, after):
        got = HopperOps().hyper_connect(streams.clone(), hyper, norm, before, rounds=20, eps=1e-6, norm_eps=1e-6)
        want = PLAIN.hyper_connect(streams, hyper, norm, before, rounds=20, eps=1e-6, norm_eps=1e-6)
        assert all(error(a, b) < 1e-3 for a, b in zip(got, want, strict=True))
    head = HeadWeights(torch.randn(4, 4 * d, device=DEV) / 40, torch.randn(4, device=DEV), torch.rand(1, device=DEV))
    wanted = torch.tensor([2, 0], device=DEV)
    got = HopperOps().head_input(streams, after, wanted, head, norm, eps=1e-6, norm_eps=1e-6)
    assert error(got, PLAIN.head_input(streams, after, wanted, head, norm, eps=1e-6, norm_eps=1e-6)) < 1e-3


@pytest.mark.parametrize("split", k5.SPLITS)
def test_an_output_that_is_turned_back_is_that_of_two_steps(split: int) -> None:
    """K5 with turn_out: the bits of attention, then a rotation back."""
    torch.manual_seed(split)
    pages = torch.randint(0, 120, (8, 37440), dtype=torch.uint8, device=DEV)
    slots = torch.randperm(512, device=DEV).int().view(4, 128)
    lists = k5.EntryList(
        pages=pages, page_entries=64, slots_BW=slots, lengths_B=torch.tensor([128, 5, 0, 77], device=DEV).int()
    )
    q, table = torch.randn(4, 64, 512, device=DEV).to(BF16), torch.randn(4096, 64, device=DEV)
    positions = torch.randint(0, 4096, (4,), device=DEV)
    plain, turned = torch.empty_like(q), torch.empty_like(q)
    k5.decode_attention(q, lists, None, sink_H=None, split=split, out_BHD=plain)
    k5.decode_attention(
        q, lists, None, sink_H=None, split=split, out_BHD=turned, positions_B=positions, cos_sin=table, turn_out=True
    )
    rows.turn_back(plain, positions, table)
    assert torch.equal(plain, turned)


# ---- whole models ----

TINY = Variant(name="t", seed=3, ratios=(0, 128, 4, 128, 4, 0), hash_layers=1, index_topk=8)


def make_model(which: str) -> tuple[Transformer, DeviceTransformer, Sequence[int]]:
    """The CPU's, the device's and a prompt."""
    if which == "demo":
        config = ModelConfig.load(ensure_demo())
        weights = load_weights(ensure_demo(), config)
        tokenizer = Tokenizer.from_file(str(ensure_demo() / "tokenizer.json"))
        text = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text()
        ids = tokenizer.encode(text, add_special_tokens=False).ids[:700]
    else:
        config = ModelConfig.from_dict(TINY.config())
        weights = {k: v if v.dtype == torch.int64 else v.float() for k, v in random_weights(TINY).items()}
        ids = torch.randint(2, TINY.vocab, (301,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = Transformer(config, weights, bf16=True, max_positions=4096)
    device = DeviceTransformer(config, weights, HopperOps(), max_positions=4096, device=torch.device("cuda", 0))
    return reference, device, ids


@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_logits_are_near_the_cpu_s(which: str) -> None:
    """Mean and 99th percentile of the differences in units of the logits' spread, and how often the best token differs.

    Single choices of an entry or an expert fall otherwise where two are nearly equal; the CPU's bf16 differs from its
    fp32 as much.
    """
    reference, device, ids = make_model(which)
    want = feed(reference, views_on("cpu", device.config.ratios), ids, [len(ids)])
    got = feed(device, views_on(DEV, device.config.ratios), ids, [len(ids)])
    spread, difference = float(want.std()), (got - want).abs()
    assert float(difference.mean()) < 0.06 * spread
    assert float(difference.flatten().kthvalue(int(0.99 * difference.numel())).values) < 0.8 * spread
    assert float((got.argmax(1) != want.argmax(1)).float().mean()) < 0.08


@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_the_batch_dependent_form_is_near_the_other(which: str) -> None:
    """K6 from workspaces and the library's products, whole and in pieces; decode beside it."""
    _, device, ids = make_model(which)
    want = feed(device, views_on(DEV, device.config.ratios), ids, [len(ids)])
    device.ops = FastHopperOps()
    for sizes in ([len(ids)], [130, 1, 70]):
        difference = (feed(device, views_on(DEV, device.config.ratios), ids, sizes) - want).abs()
        assert float(difference.mean()) < 0.06 * float(want.std())
        assert float(difference.median()) < 0.02 * float(want.std())


@pytest.mark.parametrize("which", ["tiny", "demo"])
def test_the_bits_do_not_depend_on_cuts_company_or_graphs(which: str) -> None:
    """Whole, in pieces, token by token, in a graph, beside another sequence: the same bits at every position."""
    _, device, ids = make_model(which)
    ratios = device.config.ratios
    whole = feed(device, views_on(DEV, ratios), ids, [len(ids)])
    assert not whole.isnan().any()
    for sizes in ([128], [7, 1, 122, 37], [255, 1]):
        assert torch.equal(feed(device, views_on(DEV, ratios), ids, sizes), whole)
    graphed = GraphedTransformer(device, max_tokens=4, max_blocks=16)
    assert torch.equal(feed(graphed, views_on(DEV, ratios), ids, [len(ids) - 40, 1]), whole)
    views, other = views_on(DEV, ratios), list(reversed(ids))[:250]
    alone = feed(device, views_on(DEV, ratios), other, [len(other)], turn=1)
    own, second = pages_for(len(ids), 0), pages_for(len(other), 1)
    for first, last in ((0, 249), (249, 250)):
        batch = plan_batch(
            [
                Slice(ids[first:last], first, own, range(first, last)),
                Slice(other[first:last], first, second, range(first, last)),
            ]
        )
        got = (graphed if last - first == 1 else device).forward(batch, views).cpu()
        assert torch.equal(got[: last - first], whole[first:last])
        assert torch.equal(got[last - first :], alone[first:last])
