"""The block hash chain: which tokens, under which policy, a block of the cache stands for.

A block is 256 tokens. Its hash covers every token up to its end, the layout fingerprint and the tenant's namespace, so
that equal hashes mean equal bytes, incompatible workers never meet and tenants never share.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from array import array
from collections.abc import Sequence
from typing import NewType

BLOCK_TOKENS = 256
"""Tokens of one block: twice the least common multiple of the compression ratios 4 and 128."""

HASH_BYTES = 16

BlockHash = NewType("BlockHash", bytes)
"""16 bytes; identifies a chain of full blocks by its last block."""


def root_hash(fingerprint: bytes, namespace: str = "") -> BlockHash:
    """The parent of every first block: layout fingerprint and tenant namespace (cache salt)."""
    digest = hashlib.sha256(b"kv1|" + struct.pack("<I", len(fingerprint)) + fingerprint + namespace.encode())
    return BlockHash(digest.digest()[:HASH_BYTES])


def child_hash(parent: BlockHash, tokens: Sequence[int], extras: bytes = b"") -> BlockHash:
    """Hash of the block that follows `parent` and holds `tokens` (exactly 256 ids, u32 little-endian)."""
    if len(tokens) != BLOCK_TOKENS:
        raise ValueError(f"a block has {BLOCK_TOKENS} tokens, not {len(tokens)}")
    return _link(parent, token_bytes(tokens), extras)


def block_hashes(root: BlockHash, tokens: Sequence[int], extras: bytes = b"") -> list[BlockHash]:
    """Hashes of all full blocks of `tokens`, in order; a partial last block has none."""
    hashes: list[BlockHash] = []
    parent = root
    # All at once: packing is most of the time, and a prompt of a million tokens is hashed where others wait.
    raw = token_bytes(tokens)
    for start in range(0, (len(tokens) - BLOCK_TOKENS) * 4 + 1, BLOCK_TOKENS * 4):
        parent = _link(parent, raw[start : start + BLOCK_TOKENS * 4], extras)
        hashes.append(parent)
    return hashes


def token_bytes(tokens: Sequence[int]) -> bytes:
    """u32 little-endian of each id."""
    packed = array("I", tokens)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _link(parent: BlockHash, raw: bytes, extras: bytes) -> BlockHash:
    return BlockHash(hashlib.sha256(parent + raw + extras).digest()[:HASH_BYTES])
