"""What a prompt leaves in the cache does not depend on how it was cut: the bytes of every stream, by digest."""

import ctypes

import pytest
from support.side import Side, leg, make_model, words

from headrace.engine import api
from headrace.kvcache.segments import CacheGeometry
from headrace.model.transformer import Transformer

LENGTH = 390
"""Beyond a block, a window page, a group of 128 and a group of 4."""


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


def digests(side: Side, length: int) -> dict[tuple, int]:
    """Of every finest range: each layer's c4a, c128a and index entries by block, window pages, compressor rows."""
    side.turns(api.Submit(leg(1, api.LegKind.PREFILL, words(1, length))), api.Start(1), num=2000)
    pages, geometry = side.one(1, api.SequenceFinished).pages, CacheGeometry(side.layout)
    found = {}
    for piece in geometry.split(geometry.expected(length, 0)):
        buffer = ctypes.create_string_buffer(geometry.payload_bytes((piece,), length) + 64)
        key = (piece.kind, piece.layer_first, piece.first)
        found[key] = side.mover.gather(pages, (piece,), length, ctypes.addressof(buffer))
    return found


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_whole_chunked_and_token_by_token_leave_the_same_bytes(model, kv_dtype):
    """Chunks larger than the prompt, of odd sizes, of one page, of one token."""
    whole = digests(Side(model, kv_dtype, cached=False), LENGTH)
    geometry = CacheGeometry(Side(model, kv_dtype).layout)
    assert len(whole) == len(geometry.split(geometry.expected(LENGTH, 0)))
    for budget in (1, 5, 64, 131, 256):
        assert digests(Side(model, kv_dtype, cached=False, budget=budget), LENGTH) == whole, budget
    assert digests(Side(model, kv_dtype, cached=True, budget=300), LENGTH) == whole


def test_another_prompt_leaves_others(model):
    """The digests tell: a guard for the test above."""
    one, other = (digests(Side(model), length) for length in (LENGTH, LENGTH - 1))
    assert one != other
