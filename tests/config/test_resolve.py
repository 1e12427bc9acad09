"""What "auto" becomes on a given machine, and how memory is cut into pools."""

from __future__ import annotations

import logging
from dataclasses import replace as with_fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.config.load import load
from headrace.config.resolve import CPU_POOL_BYTES, GPU_MEMORY_UTILIZATION, Host, resolve, size_pools
from headrace.config.tree import CacheSection, Config
from headrace.core.errors import ConfigError
from headrace.core.pools import PoolKind

LAPTOP = Host(num_cores=4, free_memory_bytes=4 << 30)
SERVER = Host(num_cores=64, free_memory_bytes=512 << 30)
GPU_HOST = Host(num_cores=64, free_memory_bytes=512 << 30, has_gpu=True)


def test_auto_on_a_laptop_is_cpu_bf16_and_fp8_pages():
    """A share of memory that leaves room for the rest."""
    config = resolve(Config(), LAPTOP)
    assert (config.model.device, config.model.dtype, config.model.kv_dtype) == ("cpu", "bf16", "fp8")
    assert config.engine.num_threads == 4
    assert config.cache.memory_bytes == 512 << 20


def test_cpu_pools_are_bounded_on_a_large_host():
    """Half a terabyte of free memory is no reason to take it."""
    assert resolve(Config(), SERVER).cache.memory_bytes == CPU_POOL_BYTES


def test_fp32_arithmetic_keeps_fp32_pages_unless_told():
    """fp32 exists to be judged by the oracle."""
    assert resolve(load(flags={"model.dtype": "fp32"}), LAPTOP).model.kv_dtype == "fp32"
    assert resolve(load(flags={"model.dtype": "fp32", "model.kv_dtype": "fp8"}), LAPTOP).model.kv_dtype == "fp8"


def test_auto_on_a_gpu_is_cuda_and_pools_wait_for_what_is_left():
    """Their size is known once the model is there; on the CPU the setting stays as it is."""
    config = resolve(Config(), GPU_HOST)
    assert (config.model.device, config.model.kv_dtype, config.transfer.process) == ("cuda", "fp8", "worker")
    assert (config.cache.memory_bytes, config.cache.gpu_memory_utilization) == (0, GPU_MEMORY_UTILIZATION)
    asked = resolve(load(flags={"model.device": "cpu", "cache.gpu_memory_utilization": "0.5"}), GPU_HOST)
    assert (asked.model.device, asked.cache.memory_bytes) == ("cpu", CPU_POOL_BYTES)
    assert resolve(load(flags={"cache.gpu_memory_utilization": "0.5"}), GPU_HOST).cache.gpu_memory_utilization == 0.5
    assert resolve(load(flags={"cache.memory_bytes": "3GiB"}), GPU_HOST).cache.memory_bytes == 3 << 30
    assert resolve(config, GPU_HOST) == config


@pytest.mark.parametrize("flags", [{"model.dtype": "fp32"}, {"model.kv_dtype": "bf16"}, {"model.kv_dtype": "fp32"}])
def test_auto_takes_no_gpu_without_kernels_for_the_format(flags: dict[str, str]):
    """It would be slow there, and bits would depend on the batch; who says cuda gets it."""
    assert resolve(load(flags=flags), GPU_HOST).model.device == "cpu"
    assert resolve(load(flags=flags | {"model.device": "cuda"}), GPU_HOST).model.device == "cuda"


def test_what_was_said_stays():
    """Also where it cannot work here: the engine says so by name, no other device is taken in silence."""
    assert resolve(load(flags={"model.device": "cuda"}), LAPTOP).model.device == "cuda"


def test_resolving_is_logged_and_done_once(caplog: pytest.LogCaptureFixture):
    """Each value that was chosen is a line; what was said stays, and resolving again changes nothing."""
    with caplog.at_level(logging.INFO):
        config = resolve(load(flags={"engine.num_threads": "3"}), LAPTOP)
    assert config.engine.num_threads == 3
    assert "config.resolved key=model.device from=auto value=cpu" in caplog.messages
    assert not any("num_threads" in message for message in caplog.messages)
    assert resolve(config, LAPTOP) == config


PAGE_BYTES = {PoolKind.HISTORY: 40_000, PoolKind.WINDOW: 180_000, PoolKind.STATE: 900_000, PoolKind.SNAPSHOT: 90_000}


def test_pools_serve_every_sequence_and_history_takes_the_rest():
    """A chunk of 256 and the window before it touch 6 pages; 2 more for borders and the step planned ahead."""
    sized = size_pools(
        CacheSection(memory_bytes=100 << 20, prefix_caching=False), PAGE_BYTES,
        max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1 << 20,
    )  # fmt: skip
    assert (sized.window_pages, sized.state_rows, sized.snapshot_rows) == (8 * 8, 8, 0)
    assert sized.history_pages == ((100 << 20) - 64 * 180_000 - 8 * 900_000) // 40_000


def test_check_points_have_their_part(caplog):
    """An eighth of the memory at most, two window pages with each row; the sizes are said."""
    caplog.set_level("INFO", logger="headrace.config.resolve")
    sized = size_pools(
        CacheSection(memory_bytes=100 << 20), PAGE_BYTES,
        max_num_seqs=8, max_num_batched_tokens=256, max_model_len=1 << 20,
    )  # fmt: skip
    assert sized.snapshot_rows == (100 << 20) // 8 // (90_000 + 2 * 180_000)
    assert sized.window_pages == 8 * 8 + 2 * sized.snapshot_rows
    (line,) = caplog.messages
    assert f"snapshot={sized.snapshot_rows} " in line


def test_window_shrinks_before_it_takes_more_than_half():
    """Large pages or long chunks leave room for history; every sequence can still decode."""
    sized = size_pools(
        CacheSection(memory_bytes=400 << 20, prefix_caching=False), PAGE_BYTES,
        max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=1 << 20,
    )  # fmt: skip
    assert 63 * 4 + 36 <= sized.window_pages < 64 * 36
    assert sized.window_pages * 180_000 + 64 * 900_000 <= 200 << 20
    assert sized.history_pages * 40_000 >= (200 << 20) - 40_000


def test_history_is_no_larger_than_all_sequences_need():
    """A small model does not take memory that nothing could fill, if nothing outlives its sequence."""
    cache = CacheSection(memory_bytes=1 << 40, prefix_caching=False)
    sized = size_pools(cache, PAGE_BYTES, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=300)
    assert sized.history_pages == 4


def test_sizes_that_were_given_stay():
    """Only zeros are computed."""
    given = CacheSection(memory_bytes=0, history_pages=5, window_pages=6, state_rows=7, snapshot_rows=8)
    assert size_pools(given, PAGE_BYTES, max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1) == given


def test_memory_that_holds_no_block_is_refused():
    """Better at the start than as a worker that refuses all."""
    with pytest.raises(ConfigError, match=r"engine\.max_num_seqs"):
        size_pools(
            CacheSection(memory_bytes=1 << 20), PAGE_BYTES,
            max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=4096,
        )  # fmt: skip


@given(
    memory=st.integers(1 << 20, 1 << 36),
    seqs=st.integers(1, 256),
    chunk=st.integers(1, 8192),
    length=st.integers(1, 1 << 20),
)
def test_pools_never_exceed_the_memory(memory: int, seqs: int, chunk: int, length: int):
    """Whatever the limits, the sum of all pools fits or the settings are refused."""
    cache = with_fields(CacheSection(), memory_bytes=memory)
    try:
        sized = size_pools(cache, PAGE_BYTES, max_num_seqs=seqs, max_num_batched_tokens=chunk, max_model_len=length)
    except ConfigError:
        return
    total = (
        sized.history_pages * PAGE_BYTES[PoolKind.HISTORY]
        + sized.window_pages * PAGE_BYTES[PoolKind.WINDOW]
        + sized.state_rows * PAGE_BYTES[PoolKind.STATE]
        + sized.snapshot_rows * PAGE_BYTES[PoolKind.SNAPSHOT]
    )
    assert sized.history_pages >= 1
    assert total <= memory
