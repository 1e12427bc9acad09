"""Decode steps as CUDA graphs: captured once for each bucket of batch and context, replayed by one copy, one launch.

A step is filled up to its bucket with rows that belong to nobody: they write nothing and see nothing, so a row's bits
are those of an uncaptured step wherever operations are batch-invariant. Pools and weights must stay where they were.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.device import expand_plan
from .batch import Batch, LayerViews
from .device import DeviceTransformer, Staging, StepArrays

LEAST_BLOCKS = 32
"""Of 256 tokens; buckets of context grow by four from here."""


@dataclass(frozen=True)
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: Tensor
    """int32, the step's arrays one after another."""
    logits: Tensor


def bucket_of(tokens: int, blocks: int, max_blocks: int) -> tuple[int, int]:
    """Rows and blocks of the graph that a step of so many runs in."""
    size = LEAST_BLOCKS
    while size < blocks:
        size *= 4
    return 1 << (tokens - 1).bit_length(), max(blocks, min(size, max_blocks))


class GraphedTransformer:
    """A `DeviceTransformer` whose decode steps of up to `max_tokens` rows are graphs."""

    def __init__(self, inner: DeviceTransformer, *, max_tokens: int, max_blocks: int) -> None:
        """max_blocks: of the longest sequence."""
        self.config, self.ops, self._inner = inner.config, inner.ops, inner
        self._max_tokens, self._max_blocks = max_tokens, max_blocks
        self._staging = Staging(inner.device)
        self._captured: dict[tuple[int, int], _Captured] = {}
        self._memory = torch.cuda.graph_pool_handle()

    def likeliest(self, logits_RV: Tensor) -> Tensor | None:
        return self._inner.likeliest(logits_RV)

    def settle(self) -> None:
        self._inner.settle()

    def warm(self, views: Sequence[LayerViews], max_tokens: int) -> None:
        """As `DeviceTransformer.warm`."""
        self._inner.warm(views, max_tokens)

    def forward(self, batch: Batch, views: Sequence[LayerViews]) -> Tensor:
        """As `DeviceTransformer.forward`; what a graph returns is overwritten by the next step."""
        step = StepArrays.of(batch)
        if not step.is_decode or step.num_tokens > self._max_tokens:
            return self._inner.compute(step, views)
        return self.replay(step, views)[: step.num_tokens]

    def replay(self, step: StepArrays, views: Sequence[LayerViews]) -> Tensor:
        """A decode step in its bucket's graph: logits of all its rows."""
        bucket = bucket_of(step.num_tokens, step.arrays["history_SB"].shape[1], self._max_blocks)
        if bucket not in self._captured:
            self._captured[bucket] = self._capture(*bucket, views)
        captured = self._captured[bucket]
        self._staging.stage(step.padded(*bucket).arrays, captured.inputs)
        captured.graph.replay()
        return captured.logits

    def _capture(self, tokens: int, blocks: int, views: Sequence[LayerViews]) -> _Captured:
        device = self._inner.device
        idle = StepArrays.idle().padded(tokens, blocks).arrays
        inputs = torch.empty(sum(-(-array.size // 4) * 4 for array in idle.values()), dtype=torch.int32, device=device)
        staged = self._staging.stage(idle, inputs)
        # Once without a graph: kernels are compiled and libraries made ready, and nothing is written.
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(aside):
            self._inner.run(expand_plan(staged, max_tokens_a_sequence=1), views)
        aside.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = self._inner.run(expand_plan(staged, max_tokens_a_sequence=1), views)
        return _Captured(graph, inputs, logits)
