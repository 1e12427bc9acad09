"""Between the messages of `KvEvents` and `KvSnapshot` and core types; checks what arrives."""

from __future__ import annotations

from ..core.blocks import HASH_BYTES, BlockHash
from ..core.errors import PeerLost
from ..core.kv_events import BlockRemoved, BlockStored, CacheCleared, KvEvent
from .internal.v1 import engine_pb2 as pb


def stored_to_message(stored: BlockStored) -> pb.KvStored:
    return pb.KvStored(block=stored.block, parent=stored.parent, has_checkpoint=stored.has_checkpoint)


def stored_from_message(message: pb.KvStored) -> BlockStored:
    """
    Raises:
        PeerLost: a hash of another length.
    """
    return BlockStored(_hash(message.block), _hash(message.parent), message.has_checkpoint)


def change_to_message(change: KvEvent) -> pb.KvChange:
    match change:
        case BlockStored():
            return pb.KvChange(stored=stored_to_message(change))
        case BlockRemoved(block):
            return pb.KvChange(removed=block)
        case CacheCleared():
            return pb.KvChange(cleared=pb.KvCleared())


def change_from_message(message: pb.KvChange) -> KvEvent:
    """
    Raises:
        PeerLost: no kind that this release knows, or a hash of another length.
    """
    match message.WhichOneof("kind"):
        case "stored":
            return stored_from_message(message.stored)
        case "removed":
            return BlockRemoved(_hash(message.removed))
        case "cleared":
            return CacheCleared()
        case _:
            raise PeerLost("a change of the cache of no known kind")


def _hash(found: bytes) -> BlockHash:
    if len(found) != HASH_BYTES:
        raise PeerLost(f"a block hash of {len(found)} bytes")
    return BlockHash(found)
