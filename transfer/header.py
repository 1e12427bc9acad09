"""The 64 bytes before a segment's payload, and the digest that binds a payload to its index.

The taker builds the header it expects from the announcement and compares all 64 landed bytes: a buffer that was
refilled, for whatever, shows here. Nothing is ever read out of a landed header.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from ..core.ids import TransferId
from ..core.peer import SegmentReady
from ..core.segments import SegmentRange, index_digest

HEADER_BYTES = 64

_MAGIC = b"HRSG"
_VERSION = 1
_BODY = struct.Struct("<4sHH16sIIIIIIQ")
_MASK = (1 << 64) - 1

_NOTE = struct.Struct("<4s16sII")
_NOTE_MAGIC = b"HRN1"


def segment_digest(ranges: Sequence[SegmentRange], payload_digest: int) -> int:
    """64 bit digest over index and payload; for one index a bijection of the payload's digest, so nothing is lost."""
    mixed = (payload_digest ^ index_digest(ranges)) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)


def header_bytes(
    *,
    transfer_id: bytes,
    attempt: int,
    seq: int,
    buffer: int,
    buffer_gen: int,
    index_count: int,
    payload_bytes: int,
    digest: int,
) -> bytes:
    """Little-endian: magic, version, flags; transfer id; attempt, seq; buffer, generation; index count, payload bytes;
    digest; crc32 of all before; 4 spare bytes."""
    body = _BODY.pack(
        _MAGIC, _VERSION, 0, transfer_id, attempt, seq, buffer, buffer_gen, index_count, payload_bytes, digest
    )
    return body + struct.pack("<II", zlib.crc32(body), 0)


def announced_header(message: SegmentReady) -> bytes:
    """The header that must lie before the announced payload."""
    return header_bytes(
        transfer_id=message.transfer_id,
        attempt=message.attempt,
        seq=message.seq,
        buffer=message.buffer,
        buffer_gen=message.buffer_gen,
        index_count=len(message.index),
        payload_bytes=message.payload_bytes,
        digest=message.digest,
    )


def pack_note(transfer_id: TransferId, buffer: int, buffer_gen: int) -> bytes:
    """What a READ tells the holder when it has ended: this filling of this buffer was read."""
    return _NOTE.pack(_NOTE_MAGIC, transfer_id, buffer, buffer_gen)


def unpack_note(note: bytes) -> tuple[TransferId, int, int] | None:
    """(transfer, buffer, generation), or None for anything that is no note of ours."""
    if len(note) != _NOTE.size or not note.startswith(_NOTE_MAGIC):
        return None
    _, transfer_id, buffer, buffer_gen = _NOTE.unpack(note)
    return TransferId(transfer_id), buffer, buffer_gen
