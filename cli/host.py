"""Looks at the machine, for `config/resolve.py`."""

from __future__ import annotations

import logging
import os

from ..config.resolve import Host
from ..core.errors import ConfigError

logger = logging.getLogger(__name__)


def inspect_host(*, device_is_open: bool = True) -> Host:
    """Cores that this process may use, memory, and, if the device is open to choice, whether there is a GPU to take."""
    return Host(
        num_cores=len(os.sched_getaffinity(0)),
        free_memory_bytes=_free_memory_bytes(),
        has_gpu=device_is_open and _has_gpu(),
    )


def _has_gpu() -> bool:
    from ..engine.build import hopper_device

    try:
        hopper_device()
    except ConfigError as error:
        logger.info("host.no_gpu reason=%s", error)
        return False
    return True


def _free_memory_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as stream:
        for line in stream:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    # Kernels before 3.14 do not say.
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
