"""Free ports for the processes of one host."""

from __future__ import annotations

import errno
import random
import socket

from ..core.errors import ConfigError

FIRST_PORT, LAST_PORT = 18_000, 32_000
"""Below the ports that kernels give to outgoing connections (32768 and up on Linux). A worker starts again on its old
port, and in between its router keeps dialling it: from such a port a dialler could meet itself and hold the port."""


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports of `host` that nothing listens on now.

    Raises:
        ConfigError: there are fewer, or nothing can listen at `host` whatever the port.
    """
    found: list[int] = []
    candidates = random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    for port in candidates:
        if len(found) == count:
            return found
        refusal = _try_to_bind(host, port)
        if refusal is None:
            found.append(port)
        elif refusal.errno != errno.EADDRINUSE:
            raise ConfigError(f"cannot listen on {host}: {refusal.strerror}")
    raise ConfigError(f"fewer than {count} free ports on {host} between {FIRST_PORT} and {LAST_PORT}")


def is_free(host: str, port: int) -> bool:
    """Whether this process could listen there now."""
    return _try_to_bind(host, port) is None


def check_free(host: str, port: int, keys: str) -> None:
    """
    Args:
        keys: the settings that can change the address.
    Raises:
        ConfigError: this process could not listen there now, and why: only one that is taken calls for another port.
    """
    refusal = _try_to_bind(host, port)
    if refusal is None:
        return
    if refusal.errno == errno.EADDRINUSE:
        raise ConfigError(f"{keys}: something listens on {host}:{port} already; port 0 finds another")
    raise ConfigError(f"{keys}: cannot listen on {host}:{port}: {refusal.strerror}")


def _try_to_bind(host: str, port: int) -> OSError | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return error
    return None
