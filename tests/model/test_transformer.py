"""The forward pass over pages against the plain whole-sequence reference, however the prompt is cut."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle.builder import Variant, random_weights
from oracle.plain import Plain
from support.views import NUM_PAGES, NUM_WINDOW_PAGES, make_views

from headrace.engine.plan import Slice, plan_batch
from headrace.kernels import build as kernel_build
from headrace.kernels import cpu
from headrace.kvcache.sequence import SequencePages
from headrace.model.batch import LayerViews
from headrace.model.config import ModelConfig
from headrace.model.transformer import Transformer


def pages_for(length: int, turn: int) -> SequencePages:
    """Scattered page ids; `turn` keeps sequences apart."""
    blocks, windows = -(-length // 256), -(-length // 64)
    return SequencePages(
        tuple((3 * b + 5 * turn + 1) % NUM_PAGES for b in range(blocks)),
        tuple((p, (7 * p + 12 * turn + 2) % NUM_WINDOW_PAGES) for p in range(windows)),
        turn + 1,
    )


def run(model: Transformer, views: list[LayerViews], ids: list[int], sizes: list[int], turn: int = 0) -> torch.Tensor:
    """Logits of every position, fed in pieces of the given sizes, the last size repeating."""
    pages, at, rows, sizes = pages_for(len(ids), turn), 0, [], list(sizes)
    while at < len(ids):
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        piece = ids[at : at + size]
        batch = plan_batch([Slice(piece, at, pages, range(at, at + len(piece)))])
        rows.append(model.forward(batch, views))
        at += len(piece)
    return torch.cat(rows)


def build(ratios: tuple[int, ...], seed: int, bf16: bool) -> tuple[Variant, Transformer, dict[str, torch.Tensor]]:
    variant = Variant(name="t", seed=seed, ratios=ratios, hash_layers=1, index_topk=8)
    weights = {k: v if v.dtype == torch.int64 else v.float() for k, v in random_weights(variant).items()}
    config = ModelConfig.from_dict(variant.config())
    return variant, Transformer(config, weights, bf16=bf16, max_positions=4096), weights


@pytest.mark.parametrize("ratios", [(0,), (4,), (128,), (0, 128, 4, 128, 4, 0)])
def test_fp32_logits_are_the_references(ratios: tuple[int, ...]) -> None:
    """Within 5e-5 at every position of a prompt that crosses every border and selects among entries."""
    variant, model, weights = build(ratios, 3, bf16=False)
    ids = torch.randint(2, variant.vocab, (301,), generator=torch.Generator().manual_seed(1)).tolist()
    reference = Plain(model.config, weights).logits(ids)
    ours = run(model, make_views(ratios, "fp32"), ids, [len(ids)])
    torch.testing.assert_close(ours, reference, rtol=0, atol=5e-5)


@pytest.mark.parametrize(("bf16", "kv_dtype"), [(False, "fp32"), (True, "bf16"), (True, "fp8")])
def test_the_bits_do_not_depend_on_the_cuts(bf16: bool, kv_dtype: str) -> None:
    """Whole, in pieces, token by token: the same bits at every position."""
    ratios = (0, 128, 4, 128, 4)
    variant, model, _ = build(ratios, 4, bf16)
    ids = torch.randint(2, variant.vocab, (280,), generator=torch.Generator().manual_seed(2)).tolist()
    whole = run(model, make_views(ratios, kv_dtype), ids, [len(ids)])
    assert not whole.isnan().any()
    for sizes in ([1], [7, 1, 122, 37], [128], [255, 1]):
        assert torch.equal(run(model, make_views(ratios, kv_dtype), ids, sizes), whole)


def test_the_bits_do_not_depend_on_the_batch() -> None:
    """Two sequences in one step, one in its prompt and one decoding, give what each gives alone."""
    ratios = (0, 128, 4)
    variant, model, _ = build(ratios, 5, bf16=True)
    g = torch.Generator().manual_seed(3)
    a, b = (torch.randint(2, variant.vocab, (n,), generator=g).tolist() for n in (260, 150))
    alone = [run(model, make_views(ratios, "fp8"), ids, [len(ids)], turn) for turn, ids in enumerate((a, b))]
    views, pages = make_views(ratios, "fp8"), [pages_for(260, 0), pages_for(150, 1)]
    together: list[torch.Tensor] = []
    model.forward(plan_batch([Slice(b[:149], 0, pages[1], [])]), views)
    batch = plan_batch([Slice(a, 0, pages[0], range(260)), Slice(b[149:], 149, pages[1], [149])])
    together = list(model.forward(batch, views).split([260, 1]))
    assert torch.equal(together[0], alone[0])
    assert torch.equal(together[1], alone[1][149:])


@pytest.mark.parametrize("lanes", [4, 8, 16])
def test_no_bit_depends_on_the_width_of_vectors(monkeypatch: pytest.MonkeyPatch, lanes: int) -> None:
    """Compiled for narrower or wider registers than this processor has: the same logits, in products of whole tiles and
    single rows, attention over all kinds of entries and choices among keys."""
    ratios = (0, 128, 4)
    ids = torch.randint(2, 100, (301,), generator=torch.Generator().manual_seed(2)).tolist()

    def logits() -> torch.Tensor:
        _, model, _ = build(ratios, 4, bf16=True)
        return run(model, make_views(ratios, "fp8"), ids, [131, 1, 7])

    as_built = logits()
    monkeypatch.setattr(kernel_build, "FLAGS", (*kernel_build.FLAGS, f"-DHR_LANES={lanes}"))
    for cached in (kernel_build.load_library, cpu._library):
        cached.cache_clear()
    try:
        assert torch.equal(logits(), as_built)
    finally:
        for cached in (kernel_build.load_library, cpu._library):
            cached.cache_clear()
