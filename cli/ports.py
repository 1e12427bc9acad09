"""Free ports for the processes of one host."""

from __future__ import annotations

import errno
import random
import socket
import sys

from ..core.errors import ConfigError

FIRST_PORT, LAST_PORT = 18_000, 32_000
"""Below the ports that kernels give to outgoing connections (32768 and up on Linux). A worker starts again on its old
port, and in between its router keeps dialling it: from such a port a dialler could meet itself and hold the port."""
_held: list[int] = []
"""Descriptors of sockets that are bound and never listen: what a port was asked for may listen there, and nobody else
who asks is given it."""


def free_ports(host: str, count: int) -> list[int]:
    """`count` different ports of `host` that nothing has bound, kept for this process and its children while it lives.

    Raises:
        ConfigError: there are fewer, or nothing can listen at `host` whatever the port.
    """
    found: list[int] = []
    candidates = random.SystemRandom().sample(range(FIRST_PORT, LAST_PORT), LAST_PORT - FIRST_PORT)
    for port in candidates:
        if len(found) == count:
            return found
        holder = _socket_for(host)
        try:
            holder.bind((host.strip("[]"), port))
        except OSError as refusal:
            holder.close()
            if refusal.errno != errno.EADDRINUSE:
                raise ConfigError(f"cannot listen on {host}: {refusal.strerror}") from refusal
            continue
        found.append(port)
        if sys.platform == "linux":
            # Said after the bind, which therefore found nobody there; from now on it is not in the way of others that
            # say so too. Other systems would let nobody listen.
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            _held.append(holder.detach())
        else:
            holder.close()
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
    with _socket_for(host) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            return error
    return None


def _socket_for(host: str) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
