"""The decode worker's process."""

from __future__ import annotations

from ..config.tree import Config
from ..worker.process import run as run_worker
from .legs import LEGS


def run(config: Config) -> int:
    """Serve GENERATE and LOCAL legs until told to leave; the exit status. `config` is resolved, logging is started."""
    return run_worker(config, LEGS)
