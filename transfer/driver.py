"""What moves bytes between two workers' registered buffers: one READ a segment, by the taker, and its note.

Nothing cancels a READ. Until `poll` says DONE or LOST its bytes may still land, whatever else was called, so the handle
stays with the driver and the buffer stays out of use. Addresses are integers; no call but `close` waits for a peer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

ReadHandle = NewType("ReadHandle", int)
"""Names one posted READ; never reused in a process."""


class ReadState(Enum):
    """What is known about a READ."""

    PROC = "proc"
    """Its bytes may land at any time."""
    DONE = "done"
    """All of them landed; terminal."""
    LOST = "lost"
    """The connection failed; terminal for the READ and for the peer's agent."""


@dataclass(frozen=True)
class Region:
    """Memory that READs start from or land in. It stays mapped until the process ends."""

    address: int
    num_bytes: int
    device: str = "cpu"
    descriptor: int | None = None
    """Of a file that others on this host may map instead, if it is one; its first byte lies at `address`."""


@dataclass(frozen=True)
class Seen:
    """Memory of a peer's that this process sees, as it is at any moment."""

    address: int
    keeper: object = None
    """The address is good while somebody refers to this, whatever becomes of the peer."""


class Driver(Protocol):
    """One agent. Called by one thread only."""

    @property
    def agent_name(self) -> str:
        """Worker id and incarnation: a name is one life."""
        ...

    def register(self, *, send: Region, landing: Region) -> None:
        """Once, before anything else. Never deregistered."""
        ...

    def on_progress(self, wake: Callable[[], None]) -> None:
        """Call `wake`, in any thread, when `poll` may have news sooner than a patient caller would look."""
        ...

    def metadata(self) -> bytes:
        """What a peer needs to read the send region, and nothing else of this process."""
        ...

    def add_peer(self, metadata: bytes) -> str:
        """Know a peer's agent; its name. Adding a known one again is harmless. Raises PeerError."""
        ...

    def remove_peer(self, name: str) -> None:
        """Forget a peer's agent. The caller has no READ of it in flight. Unknown names are fine."""
        ...

    def post_read(
        self, peer: str, *, local: int, remote: int, num_bytes: int, remote_device: str, note: bytes
    ) -> ReadHandle:
        """Start a READ. `note` reaches the peer when it has ended well: at the latest once `poll` has seen DONE, but
        perhaps before. Raises PeerError: nothing runs."""
        ...

    def see(self, peer: str, remote: int, num_bytes: int) -> Seen | None:
        """These bytes of a peer's send buffers where this process sees them; None: they must be READ."""
        ...

    def tell(self, peer: str, note: bytes) -> None:
        """Send a note without a READ. It may be lost with the peer."""
        ...

    def poll(self, handle: ReadHandle) -> ReadState:
        """DONE and LOST are said once: the handle is then gone."""
        ...

    def notes(self) -> list[tuple[str, bytes]]:
        """Notes that arrived since the last call: (peer's agent name, note). Unauthenticated: they only free."""
        ...

    def transport(self, peer: str) -> str:
        """What carries this peer's bytes, as far as it can be known, for example "nixl/UCX tcp"."""
        ...

    def close(self) -> None:
        """The process is about to end, or a test is: nothing of the agent is used after this."""
        ...
