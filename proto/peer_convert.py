"""Between peer.proto and `core/peer.py`. What arrives is bounded here: a message out of bounds is no message.

`from_taker` and `from_holder` raise PeerFault; the stream that carried such a message is closed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ..core.ids import TransferId
from ..core.peer import (
    MAX_ALIVE,
    MAX_DOCUMENT_BYTES,
    MAX_HASHES,
    MAX_INDEX_RANGES,
    MAX_METADATA_BYTES,
    MAX_MISSING_RANGES,
    MAX_MORE_FIRST_TOKENS,
    MAX_REASON_CHARS,
    Beat,
    Cancel,
    Complete,
    Gone,
    Hello,
    HolderMessage,
    LinkUp,
    Missing,
    PeerFault,
    PeerMessage,
    Probe,
    Pull,
    Refusal,
    Release,
    SegmentReady,
    Serving,
    Taken,
    TakerMessage,
    Welcome,
)
from ..core.segments import RangeKind, SegmentRange
from .internal.v1 import peer_pb2 as pb

TRANSFER_ID_BYTES = 16
HASH_BYTES = 16
MAX_NAME_CHARS = 256
MAX_FINGERPRINT_BYTES = 64
MAX_DIFFERING = 64

# ---- out ----


def to_taker(message: PeerMessage) -> pb.TakerMessage:
    """What a taker says."""
    match message:
        case Hello():
            return pb.TakerMessage(
                hello=pb.PeerHello(
                    protocol=message.protocol,
                    worker_id=message.worker_id,
                    incarnation=message.incarnation,
                    fingerprint=message.fingerprint,
                    layout_document=message.document,
                    max_segment_bytes=message.max_segment_bytes,
                    window=message.window,
                    holder_incarnation=message.holder_incarnation,
                )
            )
        case LinkUp(gigabytes_per_s, transport):
            return pb.TakerMessage(link_up=pb.LinkUp(gigabytes_per_s=gigabytes_per_s, transport=transport))
        case Pull():
            return pb.TakerMessage(
                pull=pb.Pull(
                    transfer_id=message.transfer_id,
                    attempt=message.attempt,
                    holder_incarnation=message.holder_incarnation,
                    held_blocks=message.held_blocks,
                    block_hashes=message.block_hashes,
                )
            )
        case Release(transfer_id, buffer, buffer_gen):
            return pb.TakerMessage(release=pb.Release(transfer_id=transfer_id, buffer=buffer, buffer_gen=buffer_gen))
        case Missing(transfer_id, ranges):
            return pb.TakerMessage(missing=pb.Missing(transfer_id=transfer_id, ranges=_ranges_out(ranges)))
        case Taken(transfer_id):
            return pb.TakerMessage(taken=pb.Taken(transfer_id=transfer_id))
        case Cancel(transfer_id):
            return pb.TakerMessage(cancel=pb.Cancel(transfer_id=transfer_id))
        case Beat():
            return pb.TakerMessage(beat=_beat_out(message))
        case _:
            raise AssertionError(f"a taker does not say {type(message).__name__}")


def to_holder(message: PeerMessage) -> pb.HolderMessage:
    """What a holder says."""
    match message:
        case Welcome():
            probe = message.probe
            return pb.HolderMessage(
                welcome=pb.PeerWelcome(
                    worker_id=message.worker_id,
                    incarnation=message.incarnation,
                    segment_bytes=message.segment_bytes,
                    window=message.window,
                    agent_name=message.agent_name,
                    agent_metadata=message.agent_metadata,
                    buffer_base=message.buffer_base,
                    buffer_bytes=message.buffer_bytes,
                    num_buffers=message.num_buffers,
                    device=message.device,
                    probe=pb.Probe(
                        buffer=probe.buffer,
                        buffer_gen=probe.buffer_gen,
                        payload_bytes=probe.payload_bytes,
                        digest=probe.digest,
                    ),
                )
            )
        case Refusal(reason, differing):
            return pb.HolderMessage(refusal=pb.Refusal(reason=reason, differing=differing))
        case Serving(transfer_id, length):
            return pb.HolderMessage(serving=pb.Serving(transfer_id=transfer_id, length=length))
        case SegmentReady():
            return pb.HolderMessage(
                segment_ready=pb.SegmentReady(
                    transfer_id=message.transfer_id,
                    attempt=message.attempt,
                    seq=message.seq,
                    buffer=message.buffer,
                    buffer_gen=message.buffer_gen,
                    payload_bytes=message.payload_bytes,
                    digest=message.digest,
                    index=_ranges_out(message.index),
                )
            )
        case Complete():
            return pb.HolderMessage(
                complete=pb.Complete(
                    transfer_id=message.transfer_id,
                    length=message.length,
                    num_segments=message.num_segments,
                    payload_bytes=message.payload_bytes,
                    first_token=message.first_token,
                    first_index=message.first_index,
                    computed_tokens=message.computed_tokens,
                    cached_tokens=message.cached_tokens,
                    ended=message.ended,
                    more_first_tokens=message.more_first_tokens,
                )
            )
        case Gone(transfer_id, reason):
            return pb.HolderMessage(gone=pb.Gone(transfer_id=transfer_id, reason=reason[:MAX_REASON_CHARS]))
        case Beat():
            return pb.HolderMessage(beat=_beat_out(message))
        case _:
            raise AssertionError(f"a holder does not say {type(message).__name__}")


def _ranges_out(ranges: Sequence[SegmentRange]) -> list[pb.Range]:
    return [
        pb.Range(
            kind=int(piece.kind),
            layer_first=piece.layer_first,
            layer_count=piece.layer_count,
            first=piece.first,
            count=piece.count,
        )
        for piece in ranges
    ]


def _beat_out(beat: Beat) -> pb.PeerBeat:
    return pb.PeerBeat(
        alive=beat.alive,
        progress=[pb.Progress(transfer_id=name, computed_tokens=computed) for name, computed in beat.progress],
    )


# ---- in ----


def from_taker(message: pb.TakerMessage) -> TakerMessage:
    """What a taker said.

    Raises:
        PeerFault: out of bounds, or of a kind that this release does not know.
    """
    match message.WhichOneof("kind"):
        case "hello":
            hello = message.hello
            _at_most(len(hello.layout_document), MAX_DOCUMENT_BYTES, "characters of layout document")
            _at_most(len(hello.fingerprint), MAX_FINGERPRINT_BYTES, "bytes of fingerprint")
            return Hello(
                protocol=hello.protocol,
                worker_id=_name(hello.worker_id),
                incarnation=hello.incarnation,
                fingerprint=hello.fingerprint,
                document=hello.layout_document,
                max_segment_bytes=hello.max_segment_bytes,
                window=hello.window,
                holder_incarnation=hello.holder_incarnation,
            )
        case "link_up":
            rate = message.link_up.gigabytes_per_s
            if not math.isfinite(rate) or rate < 0:
                raise PeerFault(f"a rate of {rate} GB/s")
            return LinkUp(rate, message.link_up.transport[:MAX_NAME_CHARS])
        case "pull":
            pull = message.pull
            _at_most(len(pull.block_hashes), MAX_HASHES, "block hashes")
            if any(len(block) != HASH_BYTES for block in pull.block_hashes):
                raise PeerFault("a block hash of another length")
            return Pull(
                transfer_id=_transfer(pull.transfer_id),
                attempt=pull.attempt,
                holder_incarnation=pull.holder_incarnation,
                held_blocks=pull.held_blocks,
                block_hashes=tuple(pull.block_hashes),
            )
        case "release":
            release = message.release
            return Release(_transfer(release.transfer_id), release.buffer, release.buffer_gen)
        case "missing":
            ranges = _ranges_in(message.missing.ranges, MAX_MISSING_RANGES)
            return Missing(_transfer(message.missing.transfer_id), ranges)
        case "taken":
            return Taken(_transfer(message.taken.transfer_id))
        case "cancel":
            return Cancel(_transfer(message.cancel.transfer_id))
        case "beat":
            return _beat_in(message.beat)
        case kind:
            raise PeerFault(f"unknown message of a taker: {kind}")


def from_holder(message: pb.HolderMessage) -> HolderMessage:
    """What a holder said.

    Raises:
        PeerFault: out of bounds, or of a kind that this release does not know.
    """
    match message.WhichOneof("kind"):
        case "welcome":
            welcome = message.welcome
            _at_most(len(welcome.agent_metadata), MAX_METADATA_BYTES, "bytes of agent metadata")
            return Welcome(
                worker_id=_name(welcome.worker_id),
                incarnation=welcome.incarnation,
                segment_bytes=welcome.segment_bytes,
                window=welcome.window,
                agent_name=_name(welcome.agent_name),
                agent_metadata=welcome.agent_metadata,
                buffer_base=welcome.buffer_base,
                buffer_bytes=welcome.buffer_bytes,
                num_buffers=welcome.num_buffers,
                device=_name(welcome.device),
                probe=Probe(
                    welcome.probe.buffer,
                    welcome.probe.buffer_gen,
                    welcome.probe.payload_bytes,
                    welcome.probe.digest,
                ),
            )
        case "refusal":
            differing = tuple(field[:MAX_REASON_CHARS] for field in message.refusal.differing[:MAX_DIFFERING])
            return Refusal(message.refusal.reason[:MAX_REASON_CHARS], differing)
        case "serving":
            return Serving(_transfer(message.serving.transfer_id), message.serving.length)
        case "segment_ready":
            ready = message.segment_ready
            return SegmentReady(
                transfer_id=_transfer(ready.transfer_id),
                attempt=ready.attempt,
                seq=ready.seq,
                buffer=ready.buffer,
                buffer_gen=ready.buffer_gen,
                payload_bytes=ready.payload_bytes,
                digest=ready.digest,
                index=_ranges_in(ready.index, MAX_INDEX_RANGES),
            )
        case "complete":
            complete = message.complete
            _at_most(len(complete.more_first_tokens), MAX_MORE_FIRST_TOKENS, "further first tokens")
            return Complete(
                transfer_id=_transfer(complete.transfer_id),
                length=complete.length,
                num_segments=complete.num_segments,
                payload_bytes=complete.payload_bytes,
                first_token=complete.first_token,
                first_index=complete.first_index,
                computed_tokens=complete.computed_tokens,
                cached_tokens=complete.cached_tokens,
                ended=complete.ended,
                more_first_tokens=tuple(complete.more_first_tokens),
            )
        case "gone":
            return Gone(_transfer(message.gone.transfer_id), message.gone.reason[:MAX_REASON_CHARS])
        case "beat":
            return _beat_in(message.beat)
        case kind:
            raise PeerFault(f"unknown message of a holder: {kind}")


def _at_most(number: int, bound: int, what: str) -> None:
    if number > bound:
        raise PeerFault(f"{number} {what}, at most {bound}")


def _name(name: str) -> str:
    _at_most(len(name), MAX_NAME_CHARS, "characters of a name")
    if not name:
        raise PeerFault("an empty name")
    return name


def _transfer(transfer_id: bytes) -> TransferId:
    if len(transfer_id) != TRANSFER_ID_BYTES:
        raise PeerFault(f"a transfer id of {len(transfer_id)} bytes")
    return TransferId(transfer_id)


def _ranges_in(ranges: Iterable[pb.Range], bound: int) -> tuple[SegmentRange, ...]:
    pieces = list(ranges)
    _at_most(len(pieces), bound, "ranges")
    try:
        return tuple(
            SegmentRange(RangeKind(piece.kind), piece.layer_first, piece.layer_count, piece.first, piece.count)
            for piece in pieces
        )
    except ValueError as error:
        raise PeerFault(f"unknown kind of range: {error}") from error


def _beat_in(beat: pb.PeerBeat) -> Beat:
    _at_most(len(beat.alive), MAX_ALIVE, "transfers in a beat")
    _at_most(len(beat.progress), MAX_ALIVE, "transfers in a beat")
    return Beat(
        tuple(_transfer(name) for name in beat.alive),
        tuple((_transfer(item.transfer_id), item.computed_tokens) for item in beat.progress),
    )
