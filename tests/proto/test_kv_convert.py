"""Changes of the prefix cache cross the wire as they are, and nothing of another shape gets in."""

import pytest

from headrace.core.blocks import root_hash
from headrace.core.errors import PeerLost
from headrace.core.kv_events import BlockRemoved, BlockStored, CacheCleared
from headrace.proto import kv_convert as convert
from headrace.proto.internal.v1 import engine_pb2 as pb

A, B = root_hash(b"a"), root_hash(b"b")


@pytest.mark.parametrize("change", [BlockStored(A, B, True), BlockStored(A, B, False), BlockRemoved(B), CacheCleared()])
def test_a_change_comes_back_equal(change):
    """Serialised and parsed."""
    sent = convert.change_to_message(change).SerializeToString()
    assert convert.change_from_message(pb.KvChange.FromString(sent)) == change


@pytest.mark.parametrize(
    "message",
    [
        pb.KvChange(),
        pb.KvChange(removed=b"short"),
        pb.KvChange(stored=pb.KvStored(block=A, parent=B + b"x")),
        pb.KvChange(stored=pb.KvStored(parent=B)),
    ],
)
def test_what_is_no_change_is_refused(message):
    """A hash has 16 bytes; a kind must be known."""
    with pytest.raises(PeerLost):
        convert.change_from_message(message)
