"""The fingerprint: equal for equal bytes, different for any difference, and it can say which."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from headrace.core.errors import LayoutError
from headrace.kernels.entry_format import insert_entries
from headrace.kvcache.fingerprint import (
    canonical,
    differing_fields,
    document,
    fingerprint,
    golden_digests,
    golden_values,
    table_digest,
)
from headrace.kvcache.layout import CacheLayout, CacheShape

SHAPE = CacheShape((0, 4, 128, 4))
MODEL = {"model_id": "tiny", "weight_digest": "00", "rotary": {"main": "10000", "compress": "160000"}}


def make_document(shape: CacheShape = SHAPE, kv_dtype: str = "fp8", extra: int = 0, **model: object) -> str:
    return document(CacheLayout(shape, kv_dtype, extra), {**MODEL, **model}, {"c4a": "ab"})


def test_the_document_is_canonical_json_of_integers_and_strings():
    """Sorted keys, no spaces, one spelling."""
    text = make_document()
    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert len(fingerprint(text)) == 32
    assert text == make_document()
    for bad in ({"a": 1.0}, {"a": True}, {"a": None}, {"a": {1: 2}}, {"a": [0.5]}):
        with pytest.raises(LayoutError):
            canonical(bad)


def test_ring_lengths_are_not_part_of_it():
    """Rows travel by position."""
    assert make_document(extra=0) == make_document(extra=40)


def test_whatever_changes_bytes_changes_the_fingerprint():
    """Precision, layer classes, draft layers, model facts."""
    texts = [
        make_document(),
        make_document(kv_dtype="bf16"),
        make_document(kv_dtype="fp32"),
        make_document(kv_dtype="fp8+fp8"),
        make_document(CacheShape((0, 128, 4, 4))),
        make_document(CacheShape((0, 4, 128, 4), mtp_layers=1)),
        make_document(weight_digest="01"),
    ]
    assert len({fingerprint(text) for text in texts}) == len(texts)


def test_differences_are_named():
    """Paths of the fields, so that a refusal can be understood."""
    assert differing_fields(make_document(), make_document(weight_digest="01")) == ["model.weight_digest"]
    assert "layout.streams.index.entry_bytes" in differing_fields(make_document(), make_document(kv_dtype="bf16"))
    assert differing_fields(make_document(), make_document()) == []


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "7", '"x"', "null", "x" * (2 << 20)])
def test_a_peers_nonsense_is_no_document(text):
    """Bounded, and never an exception."""
    assert 1 <= len(differing_fields(make_document(), text)) <= 32


@pytest.mark.parametrize("kv_dtype", ["fp32", "bf16", "fp8"])
def test_golden_digests_are_of_the_bytes_that_insert_made(kv_dtype):
    """The same twice; another for each stream; one wrong byte of one layer shows."""
    layout = CacheLayout(SHAPE, kv_dtype)
    digests = golden_digests(layout, insert_entries)
    assert digests == golden_digests(layout, insert_entries)
    assert set(digests) == {"window", "c4a", "c128a", "index"}
    assert len(set(digests.values())) == 4
    calls = 0

    def wrong_once(view, slots, values):
        nonlocal calls
        calls += 1
        insert_entries(view, slots, values)
        if calls == 2:
            view.storage[0, view.offset] ^= 1

    def rounds_down(view, slots, values):
        insert_entries(view, slots, torch.from_numpy((values.numpy().view(np.int32) & ~0xFFFF).view(np.float32)))

    def other_order(view, slots, values):
        insert_entries(view, slots.flip(0), values)

    assert len([s for s, d in golden_digests(layout, wrong_once).items() if d != digests[s]]) == 1
    for insert in (rounds_down, other_order):
        assert all(d != digests[s] for s, d in golden_digests(layout, insert).items())


def test_the_cpu_kernels_make_the_references_bytes():
    """The insert path that runs is the one that is hashed; here it equals the plain reference."""
    from headrace.kernels import cpu

    for kv_dtype in ("fp32", "bf16", "fp8"):
        layout = CacheLayout(SHAPE, kv_dtype)
        assert golden_digests(layout, cpu.insert_entries) == golden_digests(layout, insert_entries)


def test_golden_values_have_what_rounding_can_get_wrong():
    """Both zeros, both signs, many exponents, ties of bf16, and they differ by layer."""
    values = golden_values(128, 512, 3)
    assert values.dtype == np.float32
    assert np.isfinite(values).all()
    bits = values.view(np.uint32)
    assert (bits == 0).any()
    assert (bits == 0x80000000).any()
    assert (values < 0).any()
    assert ((bits & 0xFFFF) == 0x8000).any(), "half way between two bf16"
    assert len(set(((bits >> 23) & 0xFF).ravel().tolist())) > 50
    assert not np.array_equal(values, golden_values(128, 512, 4))
    assert (values[64] == 0).all()


def test_table_rows_near_and_far_are_hashed():
    """Rows beyond the table are left out; a change in a hashed row shows."""
    table = torch.arange(5000 * 4, dtype=torch.float32).view(5000, 4)
    other = table.clone()
    other[4096, 3] += 1
    assert table_digest(table) != table_digest(other)
    assert table_digest(table) == table_digest(table[:5000].clone())
