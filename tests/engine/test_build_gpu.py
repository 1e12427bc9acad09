"""How much of a GPU the pools get, and what a host without one says; no GPU is needed to know."""

from __future__ import annotations

import logging

import pytest
import torch

from headrace.cli.host import inspect_host
from headrace.config.load import load
from headrace.core.errors import ConfigError
from headrace.engine.build import GPU_STEP_BYTES, gpu_pool_bytes

GIB = 1 << 30


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A GPU of 140 GiB; a test says what is free and taken."""
    memory = {"free": 139 * GIB, "total": 140 * GIB, "taken": 20 * GIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory["free"], memory["total"]))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: memory["taken"])
    return memory


def bytes_for_pools(part: str) -> int:
    flags = {"cache.gpu_memory_utilization": part, "transfer.segment_bytes": "8MiB"}
    return gpu_pool_bytes(load(flags=flags), torch.device("cuda", 0))


def test_pools_get_what_the_part_leaves(card: dict[str, int]):
    """Less weights, 32 transfer buffers, and room for a step; never more than is free, for others may be there."""
    buffers = 32 * (8 << 20)
    assert bytes_for_pools("0.9") == int(140 * GIB * 0.9) - 20 * GIB - buffers - GPU_STEP_BYTES
    card["free"] = 5 * GIB
    assert bytes_for_pools("0.9") == 5 * GIB - buffers - GPU_STEP_BYTES


def test_nothing_left_is_refused(card: dict[str, int]):
    """With the setting that can change it."""
    card["taken"] = 70 * GIB
    with pytest.raises(ConfigError, match=r"cache\.gpu_memory_utilization is 0\.45"):
        bytes_for_pools("0.45")


def test_why_the_cpu_was_taken_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Whoever expects the GPU finds the reason in the log; who named a device is not asked about any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO):
        assert not inspect_host().has_gpu
    assert any(message.startswith("host.no_gpu reason=") for message in caplog.messages)
    caplog.clear()
    assert not inspect_host(device_is_open=False).has_gpu
    assert not caplog.messages
