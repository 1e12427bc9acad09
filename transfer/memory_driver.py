"""A driver whose network is this process: READs are copies between buffers of agents that share a `MemoryNetwork`.

The network misbehaves on request, from one seed: READs take their time and land piecemeal, in any order, twice, so that
a send buffer may be refilled under them; they fail, hang for ever, flip bytes, land more bytes long after their error;
notes come late, twice, mangled or never; agents stop, resume and die. Time is the clock that was passed in.
"""

from __future__ import annotations

import ctypes
import heapq
import itertools
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.clock import Clock
from ..core.errors import PeerLost
from .driver import ReadHandle, ReadState, Region, Seen


@dataclass(frozen=True, kw_only=True)
class MemoryFaults:
    """Probabilities are per READ or per note."""

    read_s: tuple[float, float] = (0.0, 0.0)
    """From and to: how long a READ takes."""
    max_pieces: int = 1
    shuffled: float = 0.0
    """The pieces land in any order."""
    doubled: float = 0.0
    """A piece lands twice, the second time later, before the READ ends."""
    lost: float = 0.0
    """The READ fails somewhere on its way."""
    lands_late: float = 0.0
    """Of the failed ones: the remaining bytes land after the error, when its handle is long forgotten."""
    late_s: tuple[float, float] = (1.0, 1.0)
    hangs: float = 0.0
    """The bytes land, the READ never ends; until `heal`."""
    corrupts: float = 0.0
    """One byte lands wrong."""
    within_sight: bool = False
    """Send buffers are seen by whoever may READ them."""
    note_s: tuple[float, float] = (0.0, 0.0)
    note_dropped: float = 0.0
    note_doubled: float = 0.0
    note_mangled: float = 0.0
    """One byte of it is another."""


@dataclass
class _Read:
    handle: ReadHandle
    reader: MemoryDriver
    peer: MemoryDriver
    local: int
    remote: int
    num_bytes: int
    note: bytes
    state: ReadState = ReadState.PROC
    hangs: bool = False
    landed: bool = False
    """All of its bytes have."""
    corrupts: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Pieces that a stopped peer has not sent."""


WriteObserver = Callable[["MemoryDriver", int, int, ReadHandle, bool], None]


class MemoryNetwork:
    """Joins drivers of one process. Thread-safe: each call of a driver runs what is due by the clock."""

    def __init__(self, clock: Clock, seed: int = 0, faults: MemoryFaults | None = None) -> None:
        self.faults = faults or MemoryFaults()
        self.on_write: WriteObserver | None = None
        """Called before bytes of a READ land: reader, address, size, handle, whether its error was told already."""
        self.num_outside = 0
        """READs of a segment that were refused because they leave the registered memory."""
        self._clock = clock
        self._rng = random.Random(seed)
        self._agents: dict[str, MemoryDriver] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self.handles = itertools.count(1)
        self._open: dict[int, _Read] = {}
        self.lock = threading.RLock()

    def driver(self, name: str) -> MemoryDriver:
        """A new agent on this network."""
        with self.lock:
            if name in self._agents:
                raise ValueError(f"agent {name!r} exists")
            driver = self._agents[name] = MemoryDriver(self, name)
            return driver

    def find(self, name: str) -> MemoryDriver | None:
        return self._agents.get(name)

    def next_s(self) -> float | None:
        """When something next happens on the network."""
        return self._heap[0][0] if self._heap else None

    def run_due(self) -> None:
        """Let everything happen that is due."""
        with self.lock:
            now_s = self._clock.now_s()
            while self._heap and self._heap[0][0] <= now_s:
                heapq.heappop(self._heap)[2]()

    def stop(self, name: str) -> None:
        """As SIGSTOP: the agent sends nothing; what was asked of it waits."""
        self._agents[name].stopped = True

    def resume(self, name: str) -> None:
        with self.lock:
            driver = self._agents[name]
            driver.stopped = False
            for read in list(self._open.values()):
                if read.peer is driver:
                    waiting, read.waiting = read.waiting, []
                    for piece in waiting:
                        self._at(0.0, piece)

    def kill(self, name: str) -> None:
        """As SIGKILL: READs of its memory fail; its name is never used again."""
        with self.lock:
            driver = self._agents[name]
            driver.alive = False
            for read in list(self._open.values()):
                if read.peer is driver:
                    self._at(0.1, lambda read=read: self._end(read, ReadState.LOST))  # type: ignore[misc]

    def heal(self) -> None:
        """From now on nothing fails; what hung ends."""
        with self.lock:
            self.faults = MemoryFaults(
                read_s=self.faults.read_s, note_s=self.faults.note_s, within_sight=self.faults.within_sight
            )
            for driver in self._agents.values():
                if driver.stopped:
                    self.resume(driver.agent_name)
            for read in list(self._open.values()):
                read.hangs = False
                if read.landed:
                    self._at(0.0, lambda read=read: self._end(read, ReadState.DONE))  # type: ignore[misc]

    # ---- what drivers call ----

    def post(self, read: _Read) -> None:
        faults, rng = self.faults, self._rng
        self._open[read.handle] = read
        duration_s = rng.uniform(*faults.read_s)
        num_pieces = rng.randint(1, max(1, min(faults.max_pieces, read.num_bytes)))
        cuts = sorted(rng.sample(range(1, read.num_bytes), num_pieces - 1)) if num_pieces > 1 else []
        borders = [0, *cuts, read.num_bytes]
        fails_after = rng.randrange(num_pieces) if rng.random() < faults.lost else None
        lands_late = fails_after is not None and rng.random() < faults.lands_late
        read.hangs = rng.random() < faults.hangs
        read.corrupts = rng.random() < faults.corrupts
        wrong_at = rng.randrange(read.num_bytes)
        pieces = list(itertools.pairwise(borders))
        if num_pieces > 1 and rng.random() < faults.shuffled:
            rng.shuffle(pieces)
        for place, (first, end) in enumerate(pieces):
            at_s = duration_s * (place + 1) / num_pieces
            if fails_after is not None and place >= fails_after:
                if place == fails_after:
                    self._at(at_s, lambda: self._end(read, ReadState.LOST))
                if not lands_late:
                    continue
                at_s += rng.uniform(*faults.late_s)
            last = place == num_pieces - 1 and fails_after is None
            if rng.random() < faults.doubled:
                self._at(rng.uniform(at_s, max(at_s, duration_s)), self._piece(read, first, end, wrong_at, False))
            self._at(at_s, self._piece(read, first, end, wrong_at, last))

    def _piece(self, read: _Read, first: int, end: int, wrong_at: int, last: bool) -> Callable[[], None]:
        def land() -> None:
            if read.state is ReadState.DONE:
                # A second copy that is later than the end was never sent.
                return
            if read.peer.stopped and read.state is ReadState.PROC:
                read.waiting.append(land)
                return
            if not read.peer.alive or not read.reader.alive:
                # The memory of a dead process is gone, on either side.
                return
            if self.on_write is not None:
                self.on_write(read.reader, read.local + first, end - first, read.handle, read.state is ReadState.LOST)
            ctypes.memmove(read.local + first, read.remote + first, end - first)
            if read.corrupts and first <= wrong_at < end:
                ctypes.c_ubyte.from_address(read.local + wrong_at).value ^= 0xFF
            read.landed = read.landed or last
            if last and not read.hangs:
                self._end(read, ReadState.DONE)

        return land

    def _end(self, read: _Read, state: ReadState) -> None:
        if read.state is ReadState.PROC:
            read.state = state
            read.reader.num_ended += 1
            self._open.pop(read.handle, None)

    def send_note(self, sender: str, peer: MemoryDriver, note: bytes) -> None:
        faults, rng = self.faults, self._rng
        if not note or rng.random() < faults.note_dropped:
            return
        if rng.random() < faults.note_mangled:
            place = rng.randrange(len(note))
            note = note[:place] + bytes([note[place] ^ rng.choice([1, 2, 0x80])]) + note[place + 1 :]
        for _ in range(2 if rng.random() < faults.note_doubled else 1):
            self._at(rng.uniform(*faults.note_s), lambda: peer.inbox.append((sender, note)))

    def _at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self._clock.now_s() + delay_s, next(self._serial), act))


class MemoryDriver:
    """One agent of a `MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, name: str) -> None:
        self._network = network
        self._name = name
        self._peers: set[str] = set()
        self._reads: dict[ReadHandle, _Read] = {}
        self._regions: tuple[Region, Region] | None = None
        self.inbox: list[tuple[str, bytes]] = []
        self.num_ended = 0
        """READs whose end was not polled yet."""
        self.alive = True
        self.stopped = False

    @property
    def agent_name(self) -> str:
        return self._name

    @property
    def has_news(self) -> bool:
        """A poll would find something."""
        return self.num_ended > 0 or bool(self.inbox)

    def register(self, *, send: Region, landing: Region) -> None:
        assert self._regions is None
        self._regions = (send, landing)

    def on_progress(self, wake: Callable[[], None]) -> None:
        """The clock brings every end; nobody needs to be woken."""

    def metadata(self) -> bytes:
        return b"memory|" + self._name.encode()

    def add_peer(self, metadata: bytes) -> str:
        kind, _, name = metadata.partition(b"|")
        peer = self._network.find(name.decode(errors="replace"))
        if kind != b"memory" or peer is None or not peer.alive:
            raise PeerLost("no such agent on this network")
        self._peers.add(peer.agent_name)
        return peer.agent_name

    def remove_peer(self, name: str) -> None:
        running = [read for read in self._reads.values() if read.peer.agent_name == name]
        assert not running, "an agent is removed under a READ"
        self._peers.discard(name)

    def post_read(
        self, peer: str, *, local: int, remote: int, num_bytes: int, remote_device: str, note: bytes
    ) -> ReadHandle:
        with self._network.lock:
            other = self._network.find(peer)
            if peer not in self._peers or other is None or not other.alive:
                raise PeerLost(f"no agent {peer!r}")
            assert self._regions is not None
            assert other._regions is not None
            if not _inside(other._regions[0], remote, num_bytes) or not _inside(self._regions[1], local, num_bytes):
                self._network.num_outside += bool(note)
                raise PeerLost("outside the registered memory")
            handle = ReadHandle(next(self._network.handles))
            read = _Read(handle, self, other, local, remote, num_bytes, note)
            self._reads[handle] = read
            self._network.post(read)
            return handle

    def see(self, peer: str, remote: int, num_bytes: int) -> Seen | None:
        """Whoever kills a process in this one keeps its memory, as a mapping would."""
        other = self._network.find(peer)
        if not self._network.faults.within_sight or peer not in self._peers or other is None:
            return None
        assert other._regions is not None
        return Seen(remote) if _inside(other._regions[0], remote, num_bytes) else None

    def tell(self, peer: str, note: bytes) -> None:
        with self._network.lock:
            other = self._network.find(peer)
            if other is not None and other.alive:
                self._network.send_note(self._name, other, note)

    def poll(self, handle: ReadHandle) -> ReadState:
        with self._network.lock:
            self._network.run_due()
            read = self._reads[handle]
            if read.state is not ReadState.PROC:
                del self._reads[handle]
                self.num_ended -= 1
            if read.state is ReadState.DONE:
                self._network.send_note(self._name, read.peer, read.note)
            return read.state

    def notes(self) -> list[tuple[str, bytes]]:
        with self._network.lock:
            self._network.run_due()
            notes, self.inbox = self.inbox, []
            return notes

    def transport(self, peer: str) -> str:
        return "memory"

    def close(self) -> None:
        with self._network.lock:
            self.alive = False


def _inside(region: Region, address: int, num_bytes: int) -> bool:
    return region.address <= address and address + num_bytes <= region.address + region.num_bytes
