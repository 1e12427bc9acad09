"""The tiny models that parity is shown on: every layer class, alone and together, and what else a config can vary."""

from __future__ import annotations

import pytest

from .builder import Variant

VARIANTS = (
    Variant("every_kind", 0, (0, 128, 4, 128, 4, 0)),
    Variant("pro_like", 1, (128, 128, 4, 128), heads=8, groups=4, hash_layers=3, index_topk=8, routed_scaling=2.5),
    Variant("flash_like", 2, (0, 0, 4, 128, 4), heads=2, groups=1, hash_layers=3, experts=16, chosen=6, width=32),
    Variant("two_c4a", 3, (4, 4), heads=4, groups=4, hash_layers=0, index_topk=8),
    Variant("one_c128a", 4, (128,), heads=2, groups=2, hash_layers=0),
    Variant("one_window", 5, (0,), heads=4, groups=1, hash_layers=1, vocab=300),
    Variant("one_c4a", 6, (4,), heads=8, groups=8, hash_layers=1, index_topk=8),
    Variant("all_hashed", 7, (4, 128), hash_layers=2, experts=4, chosen=1),
    Variant(
        "released_limit", 8, (0, 4, 128), heads=8, groups=2, hash_layers=1, experts=12, chosen=3, swiglu_limit=10.0
    ),
    # No matrix but the heads' divides by 128: partial fp8 blocks everywhere.
    Variant("odd_sizes", 9, (128, 4), hidden=160, query_rank=48, group_rank=40, width=96, hash_layers=0, vocab=333),
    Variant("released_yarn", 10, (4, 128, 0), hash_layers=1, yarn_original=65536, index_topk=12),
    Variant("short_yarn", 11, (128, 4), hash_layers=0, yarn_factor=4.0, yarn_original=64, index_heads=32),
    Variant("few_rounds", 12, (4, 0, 4), heads=2, groups=2, hash_layers=1, iterations=3, index_topk=32),
    Variant("without_mtp", 13, (128, 4, 4), hash_layers=0, mtp=0, hidden=256, query_rank=64, index_topk=10),
)
BY_NAME = {v.name: v for v in VARIANTS}

NIGHTLY = ("without_mtp", "all_hashed", "few_rounds", "short_yarn", "released_limit")
"""Variants that run nightly, as all long prompts do: each differs in one thing from one that always runs."""

each_variant = pytest.mark.parametrize(
    "v",
    [pytest.param(v, marks=pytest.mark.slow) if v.name in NIGHTLY else v for v in VARIANTS],
    ids=lambda v: v.name,
)
