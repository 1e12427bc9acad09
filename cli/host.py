"""Looks at the machine, for `config/resolve.py`. Torch is asked for a CUDA device unless the CPU was wanted."""

from __future__ import annotations

import os

from ..config.resolve import Host
from ..config.tree import Config


def inspect_host(config: Config) -> Host:
    """Cores that this process may use, memory, and a CUDA device unless the CPU was asked for."""
    return Host(
        num_cores=len(os.sched_getaffinity(0)),
        free_memory_bytes=_free_memory_bytes(),
        cuda_memory_bytes=None if config.model.device == "cpu" else _cuda_memory_bytes(),
    )


def _free_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Kernels before 3.14 do not say.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _cuda_memory_bytes() -> int | None:
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)
