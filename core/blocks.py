"""The block hash chain: which tokens, under which policy, a block of the cache stands for.

A block is 256 tokens. Its hash covers every token up to its end, the layout fingerprint and the tenant's namespace, so
that equal hashes mean equal bytes, incompatible workers never meet and tenants never share.
"""

from __future__ import annotations

import hashlib
import struct
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
    digest = hashlib.sha256(parent + struct.pack(f"<{BLOCK_TOKENS}I", *tokens) + extras)
    return BlockHash(digest.digest()[:HASH_BYTES])


def block_hashes(root: BlockHash, tokens: Sequence[int], extras: bytes = b"") -> list[BlockHash]:
    """Hashes of all full blocks of `tokens`, in order; a partial last block has none."""
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        parent = child_hash(parent, tokens[start : start + BLOCK_TOKENS], extras)
        hashes.append(parent)
    return hashes
