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

CPU_POOL_BYTES = 1 << 30
"""The most that a CPU worker takes for its pools unasked: a laptop has other work, and several workers."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What resolving needs to know of the machine."""

    num_cores: int
    free_memory_bytes: int
    """Of host memory, what can be had without swapping."""
    cuda_memory_bytes: int | None
    """Of the first CUDA device; None: there is none, or nobody asked."""


def resolve(config: Config, host: Host) -> Config:
    """The tree without "auto": device, arithmetic, cache format, threads, memory of the pools.

    Raises:
        ConfigError: CUDA was asked for and there is none.
    """
    model = config.model
    chosen: dict[str, object] = {}
    device = model.device
    if device == "auto":
        device = "cuda" if host.cuda_memory_bytes is not None else "cpu"
        chosen["model.device"] = device
    elif device == "cuda" and host.cuda_memory_bytes is None:
        raise ConfigError("model.device is cuda, but torch sees no CUDA device here")
    if model.dtype == "auto":
        # The weights were trained so; fp32 is for the oracle.
        chosen["model.dtype"] = "bf16"
    if model.kv_dtype == "auto":
        # Half the bytes of bf16, and the format that the weights were trained with; fp32 arithmetic keeps fp32 pages.
        chosen["model.kv_dtype"] = "fp32" if model.dtype == "fp32" else "fp8"
    if config.engine.num_threads == 0:
        chosen["engine.num_threads"] = max(1, host.num_cores)
    if config.cache.memory_bytes == 0:
        if device == "cuda":
            assert host.cuda_memory_bytes is not None
            memory = host.cuda_memory_bytes // 4
        else:
            memory = min(CPU_POOL_BYTES, host.free_memory_bytes // 8)
        chosen["cache.memory_bytes"] = memory
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
    """Every pool's size, those left 0 computed: rows for each sequence first, history from what memory is left.

    Args:
        cache: sizes already given stay; `memory_bytes` bounds the sum.
        page_bytes: bytes of one page of each pool, from the offset table.
    Raises:
        ConfigError: memory holds not even one block of history beside the rest.
    """
    # While a chunk is computed its pages and those of the window before it are held; at rest, the window and what its
    # borders cut.
    held_tokens = min(max_num_batched_tokens, max_model_len) + WINDOW_TOKENS
    window_pages = cache.window_pages or max_num_seqs * (-(-held_tokens // WINDOW_PAGE_TOKENS) + 1)
    state_rows = cache.state_rows or max_num_seqs
    fixed_bytes = (
        window_pages * page_bytes[PoolKind.WINDOW]
        + state_rows * page_bytes[PoolKind.STATE]
        + cache.snapshot_rows * page_bytes[PoolKind.SNAPSHOT]
    )
    history_pages = cache.history_pages
    if history_pages == 0:
        wanted = max_num_seqs * -(-max_model_len // HISTORY_PAGE_TOKENS)
        affordable = (cache.memory_bytes - fixed_bytes) // page_bytes[PoolKind.HISTORY]
        if affordable < 1:
            raise ConfigError(
                f"cache.memory_bytes is {cache.memory_bytes}, but window, state and snapshot pools take {fixed_bytes} "
                f"of it: raise it, or lower engine.max_num_seqs ({max_num_seqs})"
            )
        history_pages = min(wanted, affordable)
    return dataclasses.replace(cache, history_pages=history_pages, window_pages=window_pages, state_rows=state_rows)
