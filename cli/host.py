"""Looks at the machine, for `config/resolve.py`."""

from __future__ import annotations

import os

from ..config.resolve import Host


def inspect_host() -> Host:
    """Cores that this process may use, and memory."""
    return Host(num_cores=len(os.sched_getaffinity(0)), free_memory_bytes=_free_memory_bytes())


def _free_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Kernels before 3.14 do not say.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
