"""The shell around holder, taker and links: turns driver, mover and time into events, and carries their actions out.

It has no thread and no clock of its own: `service.py` runs it on real time, the simulator on its own. Actions are
carried out in order; what they bring about comes after those that were decided before.
"""

from __future__ import annotations

import ctypes
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from ..config.tree import TransferSection
from ..core.errors import LayoutError, PeerError
from ..core.ids import Incarnation, WorkerId
from ..core.peer import PeerMessage
from ..core.segments import SegmentGeometry, SegmentMover
from .api import (
    BlocksFinal,
    CancelPull,
    Command,
    LinkDirection,
    Offer,
    OpenPull,
    PrefillDone,
    TransferCounts,
    TransferEvent,
    Withdraw,
)
from .buffers import (
    AllocateBuffers,
    HostMemory,
    LandingBuffers,
    LandingPhase,
    SendBuffers,
    buffer_address,
    buffer_stride,
    payload_address,
    region_of,
)
from .decisions import (
    Action,
    AddPeer,
    Announce,
    Deliver,
    Gather,
    Gathered,
    NoteIn,
    PeerAdded,
    PeerFaulty,
    PostRead,
    ReadDone,
    ReadLost,
    RemovePeer,
    Scatter,
    Scattered,
    Send,
    SendBeat,
    Tick,
    ToHolder,
    ToLinks,
    ToTaker,
)
from .driver import Driver, ReadHandle, ReadState, Seen
from .header import HEADER_BYTES, unpack_note
from .holder import Holder
from .link import Links, Self, golden_payload, probe_header
from .taker import Taker

Copy: TypeAlias = Gather | Scatter


@dataclass
class _OpenRead:
    landing: int
    num_bytes: int


@dataclass(frozen=True)
class _SeenSegment:
    """A segment that is scattered from its holder's buffer; its landing buffer only stands for it."""

    seen: Seen
    agent: str
    note: bytes


class TransferNode:
    """All that one worker's transfers are made of. One thread calls it."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        incarnation: Incarnation,
        driver: Driver,
        geometry: SegmentGeometry,
        mover: SegmentMover,
        fingerprint: bytes,
        document: str,
        section: TransferSection,
        deliver: Callable[[TransferEvent], None],
        send: Callable[[int, PeerMessage], None],
        new_link_id: Iterator[int],
        rng: random.Random,
        defer: Callable[[Copy], bool] | None = None,
        allocate: AllocateBuffers = HostMemory,
    ) -> None:
        """`defer` may keep a copy for later (True): `move` it in any thread, then say `copied` in this one."""
        self._driver = driver
        self._mover = mover
        self._deliver = deliver
        self._send = send
        self._defer = defer
        # The last send buffer holds the probe's segment for good.
        stride = buffer_stride(section.segment_bytes)
        self.send_memory = allocate(section.num_send_buffers + 1, stride)
        self.landing_memory = allocate(section.num_landing_buffers, stride)
        driver.register(send=region_of(self.send_memory), landing=region_of(self.landing_memory))
        self.send_buffers = SendBuffers(section.num_send_buffers, _share(section.num_send_buffers, section))
        self.landing_buffers = LandingBuffers(
            section.num_landing_buffers, _share(section.num_landing_buffers, section), section.reads
        )
        self.holder = Holder(incarnation=incarnation, geometry=geometry, buffers=self.send_buffers, section=section)
        self.taker = Taker(geometry=geometry, buffers=self.landing_buffers, section=section)
        me = Self(
            worker_id=worker_id,
            incarnation=incarnation,
            fingerprint=fingerprint,
            document=document,
            agent_name=driver.agent_name,
            agent_metadata=driver.metadata(),
            buffer_base=self.send_memory.base_address,
            buffer_bytes=self.send_memory.stride,
            num_buffers=self.send_memory.num_buffers,
            device=self.send_memory.device,
        )
        self.links = Links(me=me, buffers=self.landing_buffers, section=section, rng=rng, new_link_id=new_link_id)
        probe = self.links.probe
        golden = golden_payload(fingerprint, probe.payload_bytes)
        self.send_memory.write(probe.buffer, 0, probe_header(probe) + golden)
        self._reads: dict[ReadHandle, _OpenRead] = {}
        self._seen: dict[int, _SeenSegment] = {}
        """By landing buffer."""
        self._work: deque[Action] = deque()

    # ---- what comes in ----

    def handle(self, command: Command, now_s: float) -> None:
        """Apply a command and all that follows from it."""
        match command:
            case Offer() | BlocksFinal() | PrefillDone() | Withdraw():
                self._work.extend(self.holder.handle(command, now_s))
            case OpenPull() | CancelPull():
                self._work.extend(self.taker.handle(command, now_s))
            case _:
                self._work.extend(self.links.handle(command, now_s))
        self._run(now_s)

    def flooded(self, link_id: int, now_s: float) -> None:
        """More messages came over this link than anybody can have meant: end it."""
        self._work.extend(self.links.handle(PeerFaulty(link_id, "a flood of messages"), now_s))
        self._run(now_s)

    def step(self, now_s: float) -> bool:
        """Look at READs, notes and deadlines once; whether anything had happened."""
        happened = False
        for handle, read in list(self._reads.items()):
            state = self._driver.poll(handle)
            if state is ReadState.PROC:
                continue
            happened = True
            del self._reads[handle]
            self._read_ended(read, state, now_s)
            self._run(now_s)
        if self.holder.awaits_notes:
            for _, note in self._driver.notes():
                happened = True
                parts = unpack_note(note)
                if parts is not None:
                    self._work.extend(self.holder.handle(NoteIn(*parts), now_s))
                    self._run(now_s)
        for decider in (self.links, self.holder, self.taker):
            due_s = decider.next_s()
            if due_s is not None and due_s <= now_s:
                happened = True
                self._work.extend(decider.handle(Tick(), now_s))
                self._run(now_s)
        return happened

    def move(self, copy: Copy) -> int | None:
        """Move a copy's bytes: their digest, or None where the pages cannot hold them. Touches no state of the room."""
        try:
            if isinstance(copy, Gather):
                payload = payload_address(self.send_memory, copy.buffer)
                return self._mover.gather(copy.pages, copy.ranges, copy.length, payload)
            segment = self._seen.get(copy.landing)
            if segment is not None:
                payload = segment.seen.address + HEADER_BYTES
            else:
                payload = payload_address(self.landing_memory, copy.landing)
            return self._mover.scatter(copy.pages, copy.ranges, copy.length, payload)
        except LayoutError:
            return None

    def copied(self, copy: Copy, digest: int | None, now_s: float) -> None:
        """A deferred copy has ended: all that follows from it."""
        self._copied(copy, digest, now_s)
        self._run(now_s)

    def run_copy(self, copy: Copy, now_s: float) -> None:
        """Do a copy that was deferred, and all that follows from it."""
        self.copied(copy, self.move(copy), now_s)

    def next_s(self) -> float | None:
        """The earliest deadline of all."""
        due = [due_s for decider in (self.links, self.holder, self.taker) if (due_s := decider.next_s()) is not None]
        return min(due, default=None)

    @property
    def awaits_bytes(self) -> bool:
        """Something may come from the driver at any moment: poll it often."""
        if self.holder.awaits_notes:
            return True
        return len(self._reads) > self.landing_buffers.num_held

    @property
    def holds_overdue(self) -> bool:
        """Only READs that nobody waits for any more."""
        return bool(self._reads)

    def landing_of(self, handle: ReadHandle) -> int | None:
        """The buffer that this READ lands in, while it runs."""
        read = self._reads.get(handle)
        return None if read is None else read.landing

    # ---- doing ----

    def _run(self, now_s: float) -> None:
        while self._work:
            self._do(self._work.popleft(), now_s)

    def _do(self, action: Action, now_s: float) -> None:
        match action:
            case Send(link_id, message):
                self._send(link_id, message)
            case Deliver(event):
                self._deliver(event)
            case Gather() | Scatter():
                if self._defer is None or not self._defer(action):
                    self._copied(action, self.move(action), now_s)
            case Announce(link_id, header, ready):
                self.send_memory.write(ready.buffer, 0, header)
                self._send(link_id, ready)
            case PostRead():
                self._post(action, now_s)
            case ToTaker(to_taker):
                self._work.extend(self.taker.handle(to_taker, now_s))
            case ToHolder(to_holder):
                self._work.extend(self.holder.handle(to_holder, now_s))
            case ToLinks(to_links):
                self._work.extend(self.links.handle(to_links, now_s))
            case SendBeat(link_id, direction):
                speaker = self.taker if direction is LinkDirection.OUT else self.holder
                self._send(link_id, speaker.beat(link_id))
            case AddPeer(link_id, metadata):
                self._add_peer(link_id, metadata, now_s)
            case RemovePeer(agent):
                self._driver.remove_peer(agent)

    def _copied(self, copy: Copy, digest: int | None, now_s: float) -> None:
        if isinstance(copy, Gather):
            self._work.extend(self.holder.handle(Gathered(copy.buffer, copy.buffer_gen, digest), now_s))
        else:
            self._let_go(copy.landing)
            self._work.extend(self.taker.handle(Scattered(copy.landing, digest), now_s))

    def _post(self, action: PostRead, now_s: float) -> None:
        probe = self.landing_buffers.buffers[action.landing].owner is None
        seen = None if probe else self._driver.see(action.agent, action.remote, action.num_bytes)
        if seen is not None:
            self._scatter_from(_SeenSegment(seen, action.agent, action.note), action.landing, now_s)
            return
        read = _OpenRead(action.landing, action.num_bytes)
        try:
            handle = self._driver.post_read(
                action.agent,
                local=buffer_address(self.landing_memory, action.landing),
                remote=action.remote,
                num_bytes=action.num_bytes,
                remote_device=action.device,
                note=action.note,
            )
        except PeerError:
            self._read_ended(read, ReadState.LOST, now_s)
            return
        self._reads[handle] = read

    def _scatter_from(self, segment: _SeenSegment, landing: int, now_s: float) -> None:
        """Nothing travels: what a READ would have brought is looked at where it lies."""
        self._seen[landing] = segment
        event = ReadDone(landing, ctypes.string_at(segment.seen.address, HEADER_BYTES), "")
        actions = self.taker.handle(event, now_s)
        if not any(isinstance(action, Scatter) and action.landing == landing for action in actions):
            self._let_go(landing)
        self._work.extend(actions)

    def _let_go(self, landing: int) -> None:
        """The holder may use its buffer again."""
        segment = self._seen.pop(landing, None)
        if segment is not None:
            self._driver.tell(segment.agent, segment.note)

    def _read_ended(self, read: _OpenRead, state: ReadState, now_s: float) -> None:
        buffer = self.landing_buffers.buffers[read.landing]
        assert buffer.phase in (LandingPhase.READING, LandingPhase.HELD)
        probe = buffer.owner is None
        event: ReadDone | ReadLost
        if state is ReadState.DONE:
            seen = read.num_bytes if probe else HEADER_BYTES
            assert buffer.agent is not None
            transport = self._driver.transport(buffer.agent) if probe else ""
            event = ReadDone(read.landing, self.landing_memory.read(read.landing, 0, seen), transport)
        else:
            event = ReadLost(read.landing)
        if probe:
            self._work.extend(self.links.handle(event, now_s))
        else:
            self._work.extend(self.taker.handle(event, now_s))
            # An agent that waits to be removed may have had its last READ just now.
            self._work.extend(self.links.handle(Tick(), now_s))

    def _add_peer(self, link_id: int, metadata: bytes, now_s: float) -> None:
        try:
            name = self._driver.add_peer(metadata)
        except PeerError:
            self._work.extend(self.links.handle(PeerAdded(link_id, None), now_s))
            return
        self._work.extend(self.links.handle(PeerAdded(link_id, name), now_s))

    # ---- telling ----

    def audit(self) -> list[str]:
        """Every conservation check of the room; [] is clean."""
        wrong = self.holder.audit() + self.taker.audit() + self.links.audit()
        running = 0
        for buffer in self.landing_buffers.buffers:
            running += buffer.phase is LandingPhase.READING or buffer.phase is LandingPhase.HELD
        if running != len(self._reads):
            wrong.append(f"node: {len(self._reads)} handles, {running} buffers being read into")
        return wrong

    def counts(self, now_s: float) -> TransferCounts:
        """A snapshot for other threads."""
        holder, taker, links = self.holder, self.taker, self.links
        return TransferCounts(
            send_buffers=self.send_buffers.counts(),
            landing_buffers=self.landing_buffers.counts(),
            subscriptions=holder.counts(),
            pulls=taker.counts(),
            links=links.counts(),
            segments_refused={reason: taker.refused[reason] for reason in ("stale", "digest", "bounds")},
            failures=dict(Counter(holder.failures) + taker.failures),
            stale_messages=holder.stale_messages + taker.stale_messages + links.stale_messages,
            bytes_sent=holder.bytes_sent,
            bytes_received=taker.bytes_received,
            segments_sent=holder.segments_sent,
            segments_received=taker.segments_received,
            transfers_taken=taker.transfers_taken,
            transfers_served=holder.transfers_served,
            oldest_held_s=self.landing_buffers.oldest_held_s(now_s),
            audit=tuple(self.audit()),
        )


def _share(num_buffers: int, section: TransferSection) -> int:
    """How many buffers one peer may occupy."""
    return max(1, int(num_buffers * section.peer_share))
