"""The block hashes of a prompt, once for each layout fingerprint among the workers.

Long prompts are hashed off the event loop: a million tokens take 30 ms.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..core.blocks import BLOCK_TOKENS, BlockHash, block_hashes, root_hash

MAX_INLINE_BLOCKS = 16
"""Hashed on the event loop: 8 us each."""
MAX_ADDED_BLOCKS = 64
"""Of tokens that were generated before a stream was resumed; what follows them is not looked for."""
_BLOCKS_AT_ONCE = 64


@dataclass(frozen=True)
class BlockChains:
    """Hashes of one prompt's full blocks by fingerprint, under one tenant's salt."""

    salt: str = ""
    by_fingerprint: Mapping[bytes, tuple[BlockHash, ...]] = field(default_factory=dict)

    def of(self, fingerprint: bytes) -> tuple[BlockHash, ...]:
        """Empty for workers that came after the prompt."""
        return self.by_fingerprint.get(fingerprint, ())

    def extended(self, tokens: Sequence[int]) -> BlockChains:
        """The chains of `tokens`, which begin with the tokens of these."""
        return BlockChains(
            self.salt,
            {
                fingerprint: chain + tuple(self._more(fingerprint, chain, tokens))
                for fingerprint, chain in self.by_fingerprint.items()
            },
        )

    def _more(self, fingerprint: bytes, chain: tuple[BlockHash, ...], tokens: Sequence[int]) -> list[BlockHash]:
        start = len(chain) * BLOCK_TOKENS
        parent = chain[-1] if chain else root_hash(fingerprint, self.salt)
        return block_hashes(parent, tokens[start : start + MAX_ADDED_BLOCKS * BLOCK_TOKENS])


def is_short(num_tokens: int, num_fingerprints: int) -> bool:
    """Whether the hashes may be made on the event loop."""
    return num_tokens // BLOCK_TOKENS * num_fingerprints <= MAX_INLINE_BLOCKS


def hash_prompt(tokens: Sequence[int], fingerprints: Iterable[bytes], salt: str) -> BlockChains:
    """All chains of a prompt; in a thread, lets others have the interpreter every half millisecond."""
    chains: dict[bytes, tuple[BlockHash, ...]] = {}
    step = _BLOCKS_AT_ONCE * BLOCK_TOKENS
    for fingerprint in fingerprints:
        chain: list[BlockHash] = []
        for start in range(0, len(tokens), step):
            parent = chain[-1] if chain else root_hash(fingerprint, salt)
            chain += block_hashes(parent, tokens[start : start + step])
            if start + step < len(tokens):
                time.sleep(0)
        chains[fingerprint] = tuple(chain)
    return BlockChains(salt, chains)
