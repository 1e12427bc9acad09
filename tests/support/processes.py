"""A worker is two processes: the engine's, and its child that transfers run in."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path


def children(pid: int) -> list[int]:
    """Living children of a process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue
        if int(parent) == pid and state != "Z":
            found.append(int(folder.name))
    return found


def transfer_process(pid: int) -> int:
    """The one child of a worker."""
    (child,) = children(pid)
    return child


def signal_worker(pid: int, number: int) -> None:
    """Send a signal to both of a worker's processes."""
    for one in (pid, *children(pid)):
        os.kill(one, number)


def until_gone(pids: Sequence[int], limit_s: float = 10.0) -> None:
    """Processes that nobody but their parent waits for."""
    end_s = time.monotonic() + limit_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < end_s, f"still there: {pids}"
        time.sleep(0.01)
