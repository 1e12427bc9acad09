"""The driver over NIXL: the only module that knows the library, and what it took to make it behave.

- The agent's progress thread sleeps on its event fds; as shipped it spins a whole core, idle or not.
- `transfer()` may copy everything before it returns (CMA) or serve a socket for milliseconds (TCP), and holds the
  library's lock (STRICT) meanwhile. So a helper thread makes a READ's handle, starts it, looks once how it stands and
  releases it: the end of one READ is known while the next one copies. The rest is called by the one transfer thread.
- Nothing cancels a READ. Its handle stays here until the library says DONE or that the connection failed. Any other
  error proves nothing about the bytes: such a READ stays PROC, its buffer out of use.
- An agent's name holds the incarnation, so no message is taken for another life's.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import socket
import stat
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..core.errors import PeerLost
from ..core.ids import Incarnation, WorkerId
from .driver import ReadHandle, ReadState, Region, Seen

PROGRESS_US = 1000
MEASURED_FROM_BYTES = 256 << 10
"""A READ of at least this size shows which way its bytes came."""

logger = logging.getLogger(__name__)

_KEPT: list[Any] = []
"""Agents whose READs had not ended when they were closed: destroying one would not stop the bytes."""


def agent_name(worker_id: WorkerId, incarnation: Incarnation) -> str:
    return f"{worker_id}.{incarnation:016x}"


def load_library() -> Any:
    """Import NIXL with the environment that it and UCX read once, at load."""
    # "error" still prints a line for every peer that leaves.
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    # Where UCX sees no NVLink, a READ of GPU memory else falls to TCP in silence.
    os.environ.setdefault("UCX_CUDA_IPC_ENABLE_GET_ZCOPY", "y")
    # The package "nixl" would import torch; this one does not.
    import nixl_cu13._api as nixl

    return nixl


def open_agent(nixl: Any, name: str, progress_us: int) -> Any:
    """An agent whose progress thread wakes by its event fds, at the latest after `progress_us`."""
    shipped: Any = nixl.nixlBind.nixlAgentConfig

    class Quiet(shipped):  # type: ignore[misc, valid-type, unused-ignore]
        # The Python layer sets the delay to 0 and offers no other way.
        def __setattr__(self, key: str, value: object) -> None:
            super().__setattr__(key, progress_us if key == "pthrDelay" else value)

    nixl.nixlBind.nixlAgentConfig = Quiet
    try:
        return nixl.nixl_agent(
            name,
            nixl.nixl_agent_config(
                backends=["UCX"],
                enable_prog_thread=True,
                sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            ),
        )
    finally:
        nixl.nixlBind.nixlAgentConfig = shipped


@dataclass
class _Read:
    peer: str
    local: int
    remote: int
    num_bytes: int
    remote_device: str
    note: bytes
    handle: Any = None
    told: str | None = None
    """How it stood when the helper thread left it; None until then."""
    error: Exception | None = None
    begun: bool = False
    """The library has it: an error proves nothing about the bytes."""
    received: dict[int, int] | None = None
    """Bytes that each TCP socket had received before, while the peer's transport is not known."""
    puzzled: bool = False


class NixlDriver:
    """One NIXL agent over UCX."""

    def __init__(self, name: str, *, progress_us: int = PROGRESS_US) -> None:
        self._nixl = load_library()
        self._errors = self._nixl.nixlBind
        self._name = name
        self._agent = open_agent(self._nixl, name, progress_us)
        self._send_descriptors: Any = None
        self._landing_memory = _memory("cpu")
        self._reads: dict[ReadHandle, _Read] = {}
        self._handles = itertools.count(1)
        self._transports: dict[str, str] = {}
        self._wake: Callable[[], None] = lambda: None
        self._posts: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._helper = threading.Thread(target=self._post_all, name="transfer-post", daemon=True)
        self._helper.start()

    @property
    def agent_name(self) -> str:
        return self._name

    def register(self, *, send: Region, landing: Region) -> None:
        self._send_descriptors = self._register(send)
        self._register(landing)
        self._landing_memory = _memory(landing.device)

    def _register(self, region: Region) -> Any:
        kind, device = _memory(region.device)
        return self._agent.register_memory([(region.address, region.num_bytes, device, "")], kind)

    def on_progress(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def metadata(self) -> bytes:
        # Partial: a peer can form no handle on the landing buffers.
        return bytes(self._agent.get_partial_agent_metadata(self._send_descriptors, True, ["UCX"]))

    def add_peer(self, metadata: bytes) -> str:
        try:
            name = self._agent.add_remote_agent(metadata)
        except Exception as error:
            raise PeerLost(f"metadata refused: {error}") from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def remove_peer(self, name: str) -> None:
        assert not any(read.peer == name for read in self._reads.values()), "an agent is removed under a READ"
        self._transports.pop(name, None)
        try:
            self._agent.remove_remote_agent(name)
        except Exception:
            logger.warning("nixl.remove_failed peer=%s", name, exc_info=True)

    def post_read(
        self, peer: str, *, local: int, remote: int, num_bytes: int, remote_device: str, note: bytes
    ) -> ReadHandle:
        read = _Read(peer, local, remote, num_bytes, remote_device, note)
        name = ReadHandle(next(self._handles))
        self._reads[name] = read
        self._posts.put(read)
        return name

    def _post_all(self) -> None:
        """The helper thread: hands READs to the library one by one, and takes finished ones back."""
        while (read := self._posts.get()) is not None:
            if read.told is not None:
                self._release(read)
                continue
            told = "ERR"
            try:
                self._begin(read)
                told = self._agent.transfer(read.handle, read.note)
            except Exception as error:
                read.error = error
            else:
                if told == "PROC":
                    # An error is met again, and judged, by `poll`.
                    with contextlib.suppress(Exception):
                        told = self._agent.check_xfer_state(read.handle)
            read.told = told
            if told != "PROC":
                self._wake()

    def _begin(self, read: _Read) -> None:
        """Make the READ's handle."""
        agent = self._agent
        kind, device = _memory(read.remote_device)
        mine_kind, mine_device = self._landing_memory
        mine = agent.get_xfer_descs([(read.local, read.num_bytes, mine_device)], mine_kind)
        theirs = agent.get_xfer_descs([(read.remote, read.num_bytes, device)], kind)
        read.handle = agent.initialize_xfer("READ", mine, theirs, read.peer, read.note)
        if read.num_bytes >= MEASURED_FROM_BYTES and read.peer not in self._transports:
            read.received = _received_by_socket()
        read.begun = True

    def _release(self, read: _Read) -> None:
        try:
            self._agent.release_xfer_handle(read.handle)
        except Exception:
            # The handle's own finaliser tries again.
            logger.warning("nixl.release_failed peer=%s", read.peer, exc_info=True)

    def poll(self, handle: ReadHandle) -> ReadState:
        read = self._reads[handle]
        if read.told is None:
            return ReadState.PROC
        state, error = read.told, read.error
        if state == "PROC":
            try:
                state = self._agent.check_xfer_state(read.handle)
            except Exception as caught:
                state, error = "ERR", caught
        if state == "PROC":
            return ReadState.PROC
        if state == "DONE":
            if read.received is not None:
                self._transports[read.peer] = self._measure(read)
            self._forget(handle)
            return ReadState.DONE
        if self._is_terminal(read, error):
            logger.info("nixl.read_lost peer=%s error=%s", read.peer, error)
            self._forget(handle)
            return ReadState.LOST
        if not read.puzzled:
            read.puzzled = True
            logger.error("nixl.read_unclear peer=%s error=%s", read.peer, error)
        return ReadState.PROC

    def _is_terminal(self, read: _Read, error: Exception | None) -> bool:
        """Nothing lands any more: the connection failed, or the READ was refused before it began."""
        if isinstance(error, self._errors.nixlRemoteDisconnectError) or not read.begun:
            return True
        refused = (
            self._errors.nixlNotFoundError,
            self._errors.nixlInvalidParamError,
            self._errors.nixlNotAllowedError,
            self._errors.nixlMismatchError,
        )
        return read.error is not None and isinstance(error, refused)

    def _forget(self, name: ReadHandle) -> None:
        read = self._reads.pop(name)
        if read.handle is not None:
            self._posts.put(read)

    def see(self, peer: str, remote: int, num_bytes: int) -> Seen | None:
        return None

    def tell(self, peer: str, note: bytes) -> None:
        try:
            self._agent.send_notif(peer, note)
        except Exception as error:
            # The peer frees by its lease what it is not told of.
            logger.info("nixl.note_lost peer=%s error=%s", peer, error)

    def notes(self) -> list[tuple[str, bytes]]:
        found = []
        for name, notes in self._agent.get_new_notifs().items():
            sender = name.decode() if isinstance(name, bytes) else str(name)
            found += [(sender, note if isinstance(note, bytes) else str(note).encode()) for note in notes]
        return found

    # ---- which way the bytes come ----

    def transport(self, peer: str) -> str:
        """NIXL does not tell what UCX chose. So it is measured, at the first large READ of a peer: if one TCP socket of
        this process received as many bytes, they came by TCP; if none did, by what else `UCX_TLS` allows."""
        return f"nixl/UCX {self._transports.get(peer) or _allowed(self._landing_memory[0])}"

    def _measure(self, read: _Read) -> str:
        allowed = _allowed(self._landing_memory[0])
        before, after = read.received, _received_by_socket()
        if before is None or after is None:
            return allowed
        if any(received - before.get(inode, 0) >= read.num_bytes for inode, received in after.items()):
            return "tcp"
        others = [name for name in allowed.split("|") if name != "tcp"]
        return "|".join(others) or "not tcp"

    def close(self) -> None:
        self._posts.put(None)
        self._helper.join(1.0)
        if self._reads or self._helper.is_alive():
            _KEPT.append((self._agent, self._reads))
        self._agent = None


def _memory(device: str) -> tuple[str, int]:
    """NIXL's kind of memory and device number for "cpu" and "cuda:1"."""
    kind, _, number = device.partition(":")
    return ("VRAM" if kind == "cuda" else "DRAM"), int(number or 0)


def _allowed(kind: str) -> str:
    """Transports that carry data between buffers of this kind of memory here, as far as the settings say."""
    names = [name for name in os.environ.get("UCX_TLS", "all").split(",") if name not in ("self", "cuda_copy")]
    if any(name.startswith("^") or name == "all" for name in names):
        return "tcp|cuda_ipc" if kind == "VRAM" else "tcp|cma"
    return "|".join(names) or "none"


def _received_by_socket() -> dict[int, int] | None:
    """Bytes received so far by each TCP socket of this process, by inode; None where the system does not say."""
    found: dict[int, int] = {}
    try:
        numbers = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        return None
    for number in numbers:
        try:
            status = os.fstat(number)
            if not stat.S_ISSOCK(status.st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                # linux/tcp.h: tcpi_bytes_received is the u64 at offset 128.
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
        except OSError:
            continue
        if len(info) == 136:
            found[status.st_ino] = int.from_bytes(info[128:136], "little")
    return found
