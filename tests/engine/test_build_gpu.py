"""How much of a GPU the pools get, and what a host without one says; no GPU is needed to know."""

from __future__ import annotations

import logging

import pytest
import torch

from headrace.cli.host import inspect_host
from headrace.config.load import load
from headrace.config.resolve import Host, resolve
from headrace.core.clock import MonotonicClock
from headrace.core.errors import ConfigError
from headrace.engine import build
from headrace.engine.build import GPU_STEP_BYTES, gpu_pool_bytes
from headrace.model.demo import ensure_demo

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


def test_a_full_card_is_not_blamed_on_the_setting(card: dict[str, int]):
    """Raising the part would not help there."""
    card["free"] = GIB
    with pytest.raises(ConfigError, match=f"only {GIB} of the GPU's .* are free") as refusal:
        bytes_for_pools("0.9")
    assert "raise" not in str(refusal.value)


@pytest.mark.parametrize("flags", [{"cache.memory_bytes": "1MiB"}, {"cache.gpu_memory_utilization": "0.0001"}])
def test_hopeless_pools_are_refused_before_weights_are_loaded(
    flags: dict[str, str], card: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    """Minutes and many gigabytes earlier; on the CPU and on a GPU."""
    monkeypatch.setattr(build, "load_weights", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr(build, "hopper_device", lambda: torch.device("cuda", 0))
    on_gpu = "gpu_memory_utilization" in next(iter(flags))
    card["taken"] = 0
    config = resolve(
        load(flags=flags | {"model.path": str(ensure_demo()), "model.device": "cuda" if on_gpu else "cpu"}),
        Host(num_cores=1, free_memory_bytes=GIB),
    )
    with pytest.raises(ConfigError):
        build.build_engine(config, MonotonicClock(), lambda _: None, lambda _: None)


def test_a_driver_that_does_not_answer_means_cpu_loudly(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """No traceback: the machine can still compute; but whoever paid for the GPU is warned."""

    def broken() -> tuple[int, int]:
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    assert not inspect_host().has_gpu
    assert [record.levelname for record in caplog.records if "no_gpu" in record.message] == ["WARNING"]


def test_why_the_cpu_was_taken_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """Whoever expects the GPU finds the reason in the log; who named a device is not asked about any."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.INFO):
        assert not inspect_host().has_gpu
    assert any(message.startswith("engine.no_gpu present=False reason=") for message in caplog.messages)
    caplog.clear()
    assert not inspect_host(device_is_open=False).has_gpu
    assert not caplog.messages
