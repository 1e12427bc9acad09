"""Our own model over our own pages, as the parity tests drive it: any cut of the prompt, then token by token.

Pages come from the cache manager, which frees the window behind the sequence and poisons what it frees, out of pools
that start poisoned and are no larger than one sequence needs; so a stale or early read is a NaN in the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace.core.pools import PoolKind
from headrace.engine.build import layer_views
from headrace.engine.plan import Slice, plan_batch
from headrace.kvcache.allocator import CacheManager, history_pages, window_pages
from headrace.kvcache.layout import CacheLayout, CacheShape
from headrace.kvcache.pools import CachePools
from headrace.model.checkpoint import load_weights
from headrace.model.config import ModelConfig
from headrace.model.transformer import Transformer

MAX_POSITIONS = 4096


def pieces(total: int, sizes: Sequence[int]) -> Iterator[int]:
    """Lengths of the pieces of a prompt: `sizes` in turn, the last one repeating."""
    left, turn = total, 0
    while left:
        size = min(left, sizes[min(turn, len(sizes) - 1)])
        yield size
        left, turn = left - size, turn + 1


class Ours:
    """One checkpoint, loaded once; every call starts a sequence of its own in fresh pools."""

    def __init__(
        self, path: Path, dtype: str = "fp32", kv_dtype: str = "fp32", max_positions: int = MAX_POSITIONS
    ) -> None:
        config = ModelConfig.load(path)
        self._set(config, load_weights(path, config), dtype, kv_dtype, max_positions)

    @classmethod
    def of(
        cls, config: ModelConfig, weights: Mapping[str, Tensor], dtype: str = "fp32", kv_dtype: str = "fp32"
    ) -> Ours:
        """From values that are not, or not exactly, in a file."""
        ours = cls.__new__(cls)
        ours._set(config, weights, dtype, kv_dtype, MAX_POSITIONS)
        return ours

    def _set(
        self, config: ModelConfig, weights: Mapping[str, Tensor], dtype: str, kv_dtype: str, max_positions: int
    ) -> None:
        self.config, self.weights = config, weights
        self.model = Transformer(config, weights, bf16=dtype == "bf16", max_positions=max_positions)
        self.layout = CacheLayout(CacheShape(config.ratios), kv_dtype)

    def _feed(self, prompt: Sequence[int], chunks: Sequence[int]) -> tuple[list[Tensor], _Sequence]:
        sequence = _Sequence(self, len(prompt), min(len(prompt), max(chunks)))
        rows, at = [], 0
        for size in pieces(len(prompt), chunks):
            rows.append(sequence.feed(prompt[at : at + size]))
            at += size
        return rows, sequence

    def logits(self, prompt: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """[T, V] fp32 at every position, fed in pieces of `chunks` tokens, the last size repeating."""
        rows, sequence = self._feed(prompt, chunks)
        sequence.end()
        return torch.cat(rows)

    def greedy(self, prompt: Sequence[int], count: int, chunks: Sequence[int]) -> list[int]:
        """The next `count` tokens."""
        rows, sequence = self._feed(prompt, chunks)
        tokens = [int(rows[-1][-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(sequence.feed(tokens[-1:])[-1].argmax()))
        sequence.end()
        return tokens


class _Sequence:
    """One sequence and the pools that hold nothing else."""

    def __init__(self, ours: Ours, prompt_tokens: int, chunk: int) -> None:
        longest = prompt_tokens + 64
        # One more of each than is needed, so that a page's number is not its place.
        num_pages = {
            PoolKind.HISTORY: history_pages(longest) + 1,
            PoolKind.WINDOW: window_pages(chunk, longest) + 1,
            PoolKind.STATE: 2,
            PoolKind.SNAPSHOT: 0,
        }
        pools = CachePools(ours.layout, num_pages, poison=True)
        self.manager = CacheManager(num_pages, pools.poison_pages)
        self.manager.reserve(0, prompt_tokens, reserve_tokens=64, chunk_tokens=chunk)
        self.model, self.views, self.length = ours.model, layer_views(ours.layout, pools), 0

    def feed(self, ids: Sequence[int]) -> Tensor:
        start, end = self.length, self.length + len(ids)
        pages = self.manager.extend(0, end)
        logits = self.model.forward(plan_batch([Slice(list(ids), start, pages, range(start, end))]), self.views)
        self.manager.trim_window(0, end)
        self.length = end
        return logits

    def end(self) -> None:
        self.manager.release(0)
        assert self.manager.audit() == []
