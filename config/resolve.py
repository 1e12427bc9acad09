"""Turns "auto" and 0 into values, in a new tree, and logs each.

Arithmetic over what was seen of the machine, which `cli/host.py` looks at. The router never resolves: what is "auto"
concerns workers only.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from ..core.errors import ConfigError
from ..core.pools import PoolKind
from .load import flatten, replace
from .tree import CacheSection, Config

logger = logging.getLogger(__name__)

HISTORY_PAGE_TOKENS = 256
WINDOW_PAGE_TOKENS = 64
WINDOW_TOKENS = 128

WINDOW_PAGES_KEPT = 2
"""Of one check-point."""
CHECK_POINT_PART = 8
"""One part in so many of the memory may hold check-points."""

CPU_POOL_BYTES = 1 << 30
"""The most that a CPU worker takes for its pools unasked: a laptop has other work, and several workers."""

GPU_MEMORY_UTILIZATION = 0.9
"""Of a GPU, unasked. The rest is for what nobody counts: contexts, libraries, the allocator's odd ends."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What resolving needs to know of the machine."""

    num_cores: int
    free_memory_bytes: int
    """Of host memory, what can be had without swapping."""
    has_gpu: bool = False
    """This process sees a GPU that the engine can compute on."""


def resolve(config: Config, host: Host) -> Config:
    """The tree without "auto": device, arithmetic, cache format, threads, memory of the pools."""
    model = config.model
    chosen: dict[str, object] = {}
    if model.device == "auto":
        # Other formats have no kernels there: slow, and bits that depend on the batch. Only who says cuda gets that.
        has_kernels = model.dtype in ("auto", "bf16") and model.kv_dtype in ("auto", "fp8")
        chosen["model.device"] = "cuda" if host.has_gpu and has_kernels else "cpu"
    device = chosen.get("model.device", model.device)
    if model.dtype == "auto":
        # The weights were trained so; fp32 is for the oracle.
        chosen["model.dtype"] = "bf16"
    if model.kv_dtype == "auto":
        # Half the bytes of bf16, and the format that the weights were trained with; fp32 arithmetic keeps fp32 pages.
        chosen["model.kv_dtype"] = "fp32" if model.dtype == "fp32" else "fp8"
    if config.transfer.process == "auto":
        # Two processes take turns on a GPU; in one the copies run beside the engine's kernels.
        chosen["transfer.process"] = "own" if device == "cpu" and config.transfer.driver == "nixl" else "worker"
    if config.engine.num_threads == 0:
        chosen["engine.num_threads"] = max(1, host.num_cores)
    if device == "cuda" and config.cache.gpu_memory_utilization == 0:
        chosen["cache.gpu_memory_utilization"] = GPU_MEMORY_UTILIZATION
    if device == "cpu" and config.cache.memory_bytes == 0:
        chosen["cache.memory_bytes"] = min(CPU_POOL_BYTES, host.free_memory_bytes // 8)
    resolved = replace(config, chosen)
    before = flatten(config)
    for key, value in chosen.items():
        logger.info("config.resolved key=%s from=%s value=%s", key, before[key], value)
    return resolved


def size_pools(
    cache: CacheSection,
    page_bytes: Mapping[PoolKind, int],
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
) -> CacheSection:
    """Every pool's size, those left 0 computed: rows for each sequence first, then check-points, history the rest.

    Window pages for every sequence in mid-chunk at once are given if half of the memory holds them. Else fewer, but at
    least so many that every sequence can decode while one is in mid-chunk: the others' prompts wait their turn. Pages
    of check-points come on top.

    Args:
        cache: sizes already given stay; `memory_bytes` bounds the sum.
        page_bytes: bytes of one page of each pool, from the offset table.
    Raises:
        ConfigError: memory holds not even that and one block of history.
    """
    state_rows = cache.state_rows or max_num_seqs
    state_bytes = state_rows * page_bytes[PoolKind.STATE]
    at_rest, in_chunk = _window_pages(1), _window_pages(min(max_num_batched_tokens, max_model_len))
    affordable = (cache.memory_bytes // 2 - state_bytes) // page_bytes[PoolKind.WINDOW]
    least = (max_num_seqs - 1) * at_rest + in_chunk
    live_window = max(least, min(max_num_seqs * in_chunk, affordable))
    check_point_bytes = page_bytes[PoolKind.SNAPSHOT] + WINDOW_PAGES_KEPT * page_bytes[PoolKind.WINDOW]
    snapshot_rows = cache.snapshot_rows
    if snapshot_rows == 0 and cache.prefix_caching:
        left = cache.memory_bytes - state_bytes - live_window * page_bytes[PoolKind.WINDOW]
        snapshot_rows = max(0, min(cache.memory_bytes // CHECK_POINT_PART, left // 2) // check_point_bytes)
    window_pages = cache.window_pages or live_window + WINDOW_PAGES_KEPT * snapshot_rows
    fixed_bytes = (
        window_pages * page_bytes[PoolKind.WINDOW] + state_bytes + snapshot_rows * page_bytes[PoolKind.SNAPSHOT]
    )
    history_pages = cache.history_pages
    if history_pages == 0:
        history_pages = (cache.memory_bytes - fixed_bytes) // page_bytes[PoolKind.HISTORY]
        if history_pages < 1:
            raise ConfigError(
                f"cache.memory_bytes is {cache.memory_bytes}, but window, state and snapshot pools take {fixed_bytes} "
                f"of it: raise it, or lower engine.max_num_seqs ({max_num_seqs})"
            )
        if not cache.prefix_caching:
            # What no running sequence could fill would never be used.
            history_pages = min(history_pages, max_num_seqs * -(-max_model_len // HISTORY_PAGE_TOKENS))
    sized = dataclasses.replace(
        cache,
        history_pages=history_pages,
        window_pages=window_pages,
        state_rows=state_rows,
        snapshot_rows=snapshot_rows,
    )
    logger.info(
        "cache.pools history=%d window=%d state=%d snapshot=%d page_bytes=%s",
        history_pages,
        window_pages,
        state_rows,
        snapshot_rows,
        ",".join(f"{kind.value}:{page_bytes[kind]}" for kind in PoolKind),
    )
    return sized


def _window_pages(chunk_tokens: int) -> int:
    """Pages that a chunk and the 127 positions before it can touch; one more lets the next step be planned early."""
    return -(-(WINDOW_TOKENS - 2 + chunk_tokens) // WINDOW_PAGE_TOKENS) + 2
