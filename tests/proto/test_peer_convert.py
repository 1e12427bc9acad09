"""Peer messages survive the wire, and what is out of bounds does not become a message."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.ids import TransferId
from headrace.core.peer import (
    Beat,
    Cancel,
    Complete,
    Gone,
    Hello,
    LinkUp,
    Missing,
    PeerFault,
    Probe,
    Pull,
    Refusal,
    Release,
    SegmentReady,
    Serving,
    Taken,
    Welcome,
)
from headrace.core.segments import RangeKind, SegmentRange
from headrace.proto.internal.v1 import peer_pb2 as pb
from headrace.proto.peer_convert import from_holder, from_taker, to_holder, to_taker

ID = TransferId(bytes(range(16)))
INDEX = (SegmentRange(RangeKind.HISTORY, 0, 3, 0, 2), SegmentRange(RangeKind.STATE, 1, 1, 4, (1 << 32) - 1))

TAKER = [
    Hello(
        protocol=1, worker_id="d", incarnation=(1 << 64) - 1, fingerprint=b"f" * 32, document="{}",
        max_segment_bytes=1 << 20, window=4, holder_incarnation=0,
    ),
    LinkUp(1.5, "nixl/UCX tcp"),
    Pull(transfer_id=ID, attempt=1, holder_incarnation=5, held_blocks=2, block_hashes=(b"a" * 16, b"b" * 16)),
    Release(ID, 3, 4),
    Missing(ID, INDEX),
    Taken(ID),
    Cancel(ID),
    Beat((ID,), ()),
]  # fmt: skip
HOLDER = [
    Welcome(
        worker_id="p", incarnation=1, segment_bytes=2, window=3, agent_name="p.1", agent_metadata=b"m",
        buffer_base=(1 << 63) + 1, buffer_bytes=4, num_buffers=5, device="cpu", probe=Probe(4, 1, 2, (1 << 64) - 1),
    ),
    Refusal("fingerprint", ("a: 1 != 2",)),
    Serving(ID, 700),
    SegmentReady(
        transfer_id=ID, attempt=1, seq=2, buffer=3, buffer_gen=4, payload_bytes=5, digest=(1 << 64) - 1, index=INDEX
    ),
    Complete(
        transfer_id=ID, length=1, num_segments=2, payload_bytes=1 << 40, first_token=4, first_index=5,
        computed_tokens=6, cached_tokens=7, ended=True, more_first_tokens=tuple(range(127)),
    ),
    Gone(ID, "withdrawn"),
    Beat((ID,), ((ID, 100),)),
]  # fmt: skip


@pytest.mark.parametrize("message", TAKER, ids=lambda message: type(message).__name__)
def test_taker_message_survives_the_wire(message):
    """Every field, at the edges of its type."""
    assert from_taker(pb.TakerMessage.FromString(to_taker(message).SerializeToString())) == message


@pytest.mark.parametrize("message", HOLDER, ids=lambda message: type(message).__name__)
def test_holder_message_survives_the_wire(message):
    """Every field, at the edges of its type."""
    assert from_holder(pb.HolderMessage.FromString(to_holder(message).SerializeToString())) == message


@pytest.mark.parametrize(
    "message",
    [
        pb.TakerMessage(),
        pb.TakerMessage(taken=pb.Taken(transfer_id=b"short")),
        pb.TakerMessage(pull=pb.Pull(transfer_id=ID, block_hashes=[b"x"])),
        pb.TakerMessage(missing=pb.Missing(transfer_id=ID, ranges=[pb.Range(kind=9)])),
        pb.TakerMessage(missing=pb.Missing(transfer_id=ID, ranges=[pb.Range(kind=1)] * 5000)),
        pb.TakerMessage(beat=pb.PeerBeat(alive=[bytes(16)] * 5000)),
        pb.TakerMessage(link_up=pb.LinkUp(gigabytes_per_s=float("nan"))),
        pb.TakerMessage(link_up=pb.LinkUp(gigabytes_per_s=-1.0)),
        pb.TakerMessage(hello=pb.PeerHello(worker_id="")),
        pb.TakerMessage(hello=pb.PeerHello(worker_id="x" * 300)),
        pb.TakerMessage(hello=pb.PeerHello(worker_id="d", layout_document="x" * (2 << 20))),
    ],
)
def test_taker_message_out_of_bounds_is_a_fault(message):
    """Sizes, counts, kinds, numbers that are none."""
    with pytest.raises(PeerFault):
        from_taker(message)


@pytest.mark.parametrize(
    "message",
    [
        pb.HolderMessage(),
        pb.HolderMessage(gone=pb.Gone(transfer_id=b"")),
        pb.HolderMessage(complete=pb.Complete(transfer_id=ID, more_first_tokens=range(128))),
        pb.HolderMessage(welcome=pb.PeerWelcome(worker_id="p", agent_metadata=bytes(70_000))),
        pb.HolderMessage(segment_ready=pb.SegmentReady(transfer_id=ID, index=[pb.Range(kind=1)] * 257)),
        pb.HolderMessage(segment_ready=pb.SegmentReady(transfer_id=ID, index=[pb.Range(kind=0)])),
    ],
)
def test_holder_message_out_of_bounds_is_a_fault(message):
    """Sizes, counts, kinds."""
    with pytest.raises(PeerFault):
        from_holder(message)


@given(st.binary(max_size=200))
def test_wild_bytes_are_a_fault_or_a_message(data):
    """Whatever protobuf can parse ends in a message or in a fault, never in another error."""
    for kind, convert in ((pb.TakerMessage, from_taker), (pb.HolderMessage, from_holder)):
        try:
            message = kind.FromString(data)
        except Exception:
            continue
        with contextlib.suppress(PeerFault):
            convert(message)
