"""A driver that sees the buffers of peers on the same host, and reads those of all others by another driver.

Send buffers are memory of a file without a name. A peer that can open it (the same user, the same process namespace)
maps it for reading, and scatters from there: one copy less than with a READ, and no right to trace the peer is needed.
The scatter digests the very bytes that it stores, so bytes that change under it are refused like any wrong ones. A
link's probe is a READ all the same, which is a copy then and there. Notes go through the other driver.

What a peer says about its memory is not trusted. The file is looked at before it is opened, it must be the one that was
named and of a size that cannot shrink any more, and reading it writes nowhere but into a landing buffer.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import json
import logging
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields

import numpy as np
import numpy.typing as npt

from ..core.errors import PeerLost
from .driver import Driver, ReadHandle, ReadState, Region, Seen

TRANSPORT = "shared memory"
MAGIC = b"HRM1"
MAX_DESCRIPTION_BYTES = 1024

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Described:
    """Where a process's send buffers are, for others on its host."""

    host: str
    """Boot and process namespace: what makes a process number mean the same."""
    pid: int
    descriptor: int
    device: int
    inode: int
    num_bytes: int
    base: int
    """Its own address of the first byte."""


@dataclass
class _Mapped:
    base: int
    mapping: mmap.mmap
    array: npt.NDArray[np.uint8]

    def address(self, remote: int, num_bytes: int) -> int | None:
        """Where these bytes of the peer's lie here; None if it has no such bytes."""
        offset = remote - self.base
        if num_bytes < 1 or offset < 0 or offset + num_bytes > len(self.array):
            return None
        return int(self.array.ctypes.data) + offset


class OneHostDriver:
    """`Driver`; see the module."""

    def __init__(self, other: Driver) -> None:
        self._other = other
        self._described: _Described | None = None
        self._peers: dict[str, _Mapped] = {}
        self._ended: dict[ReadHandle, ReadState] = {}
        """READs that were copies, until they are polled."""
        # The other driver counts from 1 upwards.
        self._handles = itertools.count(-1, -1)
        self._wake: Callable[[], None] = lambda: None

    @property
    def agent_name(self) -> str:
        return self._other.agent_name

    def register(self, *, send: Region, landing: Region) -> None:
        self._other.register(send=send, landing=landing)
        if send.descriptor is not None and landing.device == "cpu" and is_allowed():
            status = os.fstat(send.descriptor)
            self._described = _Described(
                _this_host(), os.getpid(), send.descriptor, status.st_dev, status.st_ino, send.num_bytes, send.address
            )

    def on_progress(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._other.on_progress(wake)

    def metadata(self) -> bytes:
        """The description, and the other driver's metadata behind it."""
        described = json.dumps(asdict(self._described)).encode() if self._described is not None else b""
        return MAGIC + len(described).to_bytes(2, "little") + described + self._other.metadata()

    def add_peer(self, metadata: bytes) -> str:
        described, rest = _split(metadata)
        name = self._other.add_peer(rest)
        if described is not None and self._described is not None and name not in self._peers:
            mapped = _map(described, self._described.host)
            if mapped is not None:
                self._peers[name] = mapped
        return name

    def remove_peer(self, name: str) -> None:
        # Unmapped when nothing refers to it any more.
        self._peers.pop(name, None)
        self._other.remove_peer(name)

    def post_read(
        self, peer: str, *, local: int, remote: int, num_bytes: int, remote_device: str, note: bytes
    ) -> ReadHandle:
        mapped = self._peers.get(peer)
        if mapped is None:
            return self._other.post_read(
                peer, local=local, remote=remote, num_bytes=num_bytes, remote_device=remote_device, note=note
            )
        handle, source = ReadHandle(next(self._handles)), mapped.address(remote, num_bytes)
        if source is not None:
            ctypes.memmove(local, source, num_bytes)
            self._other.tell(peer, note)
        self._ended[handle] = ReadState.LOST if source is None else ReadState.DONE
        self._wake()
        return handle

    def see(self, peer: str, remote: int, num_bytes: int) -> Seen | None:
        mapped = self._peers.get(peer)
        address = None if mapped is None else mapped.address(remote, num_bytes)
        return None if address is None else Seen(address, mapped)

    def tell(self, peer: str, note: bytes) -> None:
        self._other.tell(peer, note)

    def poll(self, handle: ReadHandle) -> ReadState:
        if handle > 0:
            return self._other.poll(handle)
        return self._ended.pop(handle)

    def notes(self) -> list[tuple[str, bytes]]:
        return self._other.notes()

    def transport(self, peer: str) -> str:
        return TRANSPORT if peer in self._peers else self._other.transport(peer)

    def close(self) -> None:
        self._other.close()


def is_allowed() -> bool:
    """`UCX_TLS`, which says what may carry bytes, counts here too: its names for shared memory are understood."""
    names = os.environ.get("UCX_TLS", "all").split(",")
    shared = {"all", "shm", "sm", "posix", "sysv"}
    if names[0].startswith("^"):
        return not shared & {name.removeprefix("^") for name in names}
    return bool(shared & set(names))


def _this_host() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def _split(metadata: bytes) -> tuple[_Described | None, bytes]:
    """A peer's description, if it gave one that can be one, and the rest."""
    if metadata[:4] != MAGIC or len(metadata) < 6:
        raise PeerLost("metadata of another kind")
    size = int.from_bytes(metadata[4:6], "little")
    described, rest = metadata[6 : 6 + size], metadata[6 + size :]
    if len(described) != size or size > MAX_DESCRIPTION_BYTES:
        raise PeerLost("metadata of another kind")
    if not described:
        return None, rest
    try:
        words = json.loads(described)
        if not isinstance(words, dict) or set(words) != {field.name for field in fields(_Described)}:
            raise PeerLost("metadata of another kind")
        numbers = [value for name, value in words.items() if name != "host"]
        if not isinstance(words["host"], str) or not all(type(number) is int for number in numbers):
            raise PeerLost("metadata of another kind")
    except (ValueError, RecursionError) as error:
        raise PeerLost("metadata of another kind") from error
    return _Described(**words), rest


def _map(described: _Described, host: str) -> _Mapped | None:
    """The peer's send buffers, if they are within reach."""
    if described.host != host or described.pid < 1 or described.descriptor < 0 or described.num_bytes < 1:
        return None
    path = f"/proc/{described.pid}/fd/{described.descriptor}"
    try:
        # Opening a device or a pipe does something; looking where the link leads does nothing.
        looked = os.stat(path)
        if not stat.S_ISREG(looked.st_mode) or (looked.st_dev, looked.st_ino) != (described.device, described.inode):
            return None
        number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(number)
            same = (found.st_dev, found.st_ino) == (described.device, described.inode)
            # Memory that is read after it was cut off would end this process.
            sealed = same and fcntl.fcntl(number, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
            if not sealed or found.st_size < described.num_bytes:
                return None
            mapping = mmap.mmap(number, described.num_bytes, access=mmap.ACCESS_READ)
        finally:
            os.close(number)
    except (OSError, ValueError, OverflowError) as error:
        logger.info("shared.out_of_reach pid=%d error=%s", described.pid, error)
        return None
    return _Mapped(described.base, mapping, np.frombuffer(mapping, dtype=np.uint8))
