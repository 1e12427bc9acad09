"""What a worker says of its prefix cache: which blocks it holds, told as changes, in order.

The engine makes the events, the worker numbers and keeps them, routers index them. A block is named by its chain hash
(`core.blocks`), so an event says nothing of tokens, and two tenants never see an equal name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from .blocks import BlockHash


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block may be hit from now on; or what is said of one known before has changed."""

    block: BlockHash
    parent: BlockHash
    """The block before it; of a first block the root."""
    has_checkpoint: bool
    """Window and compressor rows at its end are kept too: a hit that ends here computes nothing again."""


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Evicted. A block is removed after all blocks that follow it."""

    block: BlockHash


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing is held any more."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | CacheCleared
