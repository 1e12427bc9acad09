"""Looks at the machine, for `config/resolve.py`."""

from __future__ import annotations

import os

from ..config.resolve import Host


def inspect_host(*, device_is_open: bool = True) -> Host:
    """Cores that this process may use, memory, and, if the device is open to choice, whether there is a GPU to take."""
    from ..engine.build import has_gpu

    return Host(
        num_cores=len(os.sched_getaffinity(0)),
        free_memory_bytes=_free_memory_bytes(),
        has_gpu=device_is_open and has_gpu(),
    )


def _free_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Kernels before 3.14 do not say.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
