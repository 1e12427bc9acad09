"""Send and landing buffers: the only memory that READs touch, one segment each, in one mapping per kind.

A landing buffer is the only memory that another process's bytes reach. A deadline gives a READ up but does not stop it:
its bytes may land much later. So a buffer is free again when its own handle has ended, never on time alone (HELD).
A send buffer may be taken back at any moment: a late reader meets another generation and refuses the bytes.
Knows states, owners and generations; not handles, messages, pages.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

from ..core.ids import TransferId
from .driver import Region
from .header import HEADER_BYTES

PAGE_BYTES = 4096


class BufferMemory(Protocol):
    """Equal buffers in one mapping: header, then payload. Zeroed, page-aligned, never moved, mapped for good."""

    num_buffers: int
    stride: int
    """Bytes from one buffer's start to the next one's."""
    base_address: int
    device: str
    """"cpu" or "cuda:N"."""
    descriptor: int | None
    """As in `driver.Region`."""

    def read(self, index: int, offset: int, num_bytes: int) -> bytes:
        """A copy of bytes of one buffer, the header included in `offset`."""
        ...

    def write(self, index: int, offset: int, data: bytes) -> None:
        """Overwrite bytes of one buffer; a READ that begins afterwards sees them."""
        ...


AllocateBuffers: TypeAlias = Callable[[int, int], BufferMemory]
"""Makes the memory of `num_buffers` buffers of `stride` bytes, a multiple of `PAGE_BYTES`."""


def buffer_stride(payload_bytes: int) -> int:
    """Bytes of one buffer with a payload of so many."""
    return -(-(HEADER_BYTES + payload_bytes) // PAGE_BYTES) * PAGE_BYTES


def region_of(memory: BufferMemory) -> Region:
    """All of it, as the driver registers it."""
    return Region(memory.base_address, memory.num_buffers * memory.stride, memory.device, memory.descriptor)


def buffer_address(memory: BufferMemory, index: int) -> int:
    """Where a buffer's header starts."""
    assert 0 <= index < memory.num_buffers
    return memory.base_address + index * memory.stride


def payload_address(memory: BufferMemory, index: int) -> int:
    return buffer_address(memory, index) + HEADER_BYTES


class HostMemory:
    """Buffers in the CPU's memory: of a file without a name, whose size is sealed, so that others may map it safely."""

    device = "cpu"

    def __init__(self, num_buffers: int, stride: int) -> None:
        self.num_buffers = num_buffers
        self.stride = stride
        self.descriptor: int | None = os.memfd_create("headrace-buffers", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, num_buffers * stride)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        weakref.finalize(self, os.close, self.descriptor)
        self._mapping = mmap.mmap(self.descriptor, num_buffers * stride)
        # The exported pointer also keeps the mapping from being closed while this object lives.
        self._pointer = (ctypes.c_char * len(self._mapping)).from_buffer(self._mapping)
        self.base_address = ctypes.addressof(self._pointer)

    def read(self, index: int, offset: int, num_bytes: int) -> bytes:
        assert 0 <= offset <= self.stride - num_bytes
        start = index * self.stride + offset
        return self._mapping[start : start + num_bytes]

    def write(self, index: int, offset: int, data: bytes) -> None:
        assert 0 <= offset <= self.stride - len(data)
        start = index * self.stride + offset
        self._mapping[start : start + len(data)] = data


# ---- send buffers ----


class SendPhase(Enum):
    FREE = "free"
    FILLING = "filling"
    ANNOUNCED = "announced"
    DRAINING = "draining"
    """The subscription is over, its gather is not: the copy still writes here."""


class SendEvent(Enum):
    GATHER = "gather"
    GATHERED = "gathered"
    READ = "read"
    """The reader's note, or its `Release`."""
    OVER = "over"
    """The subscription has ended: nobody is asked."""


SEND_NEXT: dict[SendPhase, dict[SendEvent, SendPhase]] = {
    SendPhase.FREE: {SendEvent.GATHER: SendPhase.FILLING},
    SendPhase.FILLING: {SendEvent.GATHERED: SendPhase.ANNOUNCED, SendEvent.OVER: SendPhase.DRAINING},
    SendPhase.ANNOUNCED: {SendEvent.READ: SendPhase.FREE, SendEvent.OVER: SendPhase.FREE},
    SendPhase.DRAINING: {SendEvent.GATHERED: SendPhase.FREE, SendEvent.OVER: SendPhase.DRAINING},
}


@dataclass
class SendBuffer:
    """One send buffer. `generation` counts its fillings, so that each is freed once and recognised for ever."""

    index: int
    phase: SendPhase = SendPhase.FREE
    generation: int = 0
    owner: TransferId | None = None
    link_id: int | None = None


class SendBuffers:
    """The holder's buffers, shared out by taker (link)."""

    def __init__(self, num_buffers: int, max_per_link: int) -> None:
        self.buffers = [SendBuffer(index) for index in range(num_buffers)]
        self._max_per_link = max_per_link
        # A stack: what was read last is filled next, while a CPU still has it in its cache.
        self._free = list(reversed(range(num_buffers)))
        self._by_link: Counter[int] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def may_fill(self, link_id: int) -> bool:
        """A buffer is free and this taker is below its share."""
        return bool(self._free) and self._by_link[link_id] < self._max_per_link

    def fill(self, owner: TransferId, link_id: int) -> SendBuffer:
        """Start a new generation of a free buffer."""
        assert self.may_fill(link_id)
        buffer = self.buffers[self._free.pop()]
        buffer.phase = SEND_NEXT[buffer.phase][SendEvent.GATHER]
        # Wraps where the wire's field does; 0 stays "never filled".
        buffer.generation = buffer.generation % 0xFFFFFFFF + 1
        buffer.owner, buffer.link_id = owner, link_id
        self._by_link[link_id] += 1
        return buffer

    def gathered(self, index: int, generation: int) -> SendBuffer:
        """The gather has ended: ANNOUNCED, or FREE if its subscription has ended meanwhile."""
        buffer = self.buffers[index]
        assert buffer.generation == generation
        self._move(buffer, SendEvent.GATHERED)
        return buffer

    def read(self, owner: TransferId, index: int, generation: int) -> bool:
        """A note or a `Release`; False, and no change, unless it is of this very filling."""
        if not 0 <= index < len(self.buffers):
            return False
        buffer = self.buffers[index]
        if buffer.phase is not SendPhase.ANNOUNCED or buffer.generation != generation or buffer.owner != owner:
            return False
        self._move(buffer, SendEvent.READ)
        return True

    def over(self, index: int) -> None:
        """The buffer's subscription has ended."""
        self._move(self.buffers[index], SendEvent.OVER)

    def _move(self, buffer: SendBuffer, event: SendEvent) -> None:
        buffer.phase = SEND_NEXT[buffer.phase][event]
        if buffer.phase is SendPhase.FREE:
            assert buffer.link_id is not None
            self._by_link[buffer.link_id] -= 1
            if not self._by_link[buffer.link_id]:
                del self._by_link[buffer.link_id]
            buffer.owner = buffer.link_id = None
            self._free.append(buffer.index)

    def counts(self) -> Mapping[str, int]:
        return _counts(SendPhase, [buffer.phase for buffer in self.buffers])

    def audit(self) -> list[str]:
        """Free list and share counters against the buffers themselves; [] is clean."""
        free: list[int] = []
        links: dict[int, int] = {}
        wrong: list[str] = []
        for buffer in self.buffers:
            is_free = buffer.phase is SendPhase.FREE
            if is_free:
                free.append(buffer.index)
            if buffer.link_id is not None:
                links[buffer.link_id] = links.get(buffer.link_id, 0) + 1
            if is_free != (buffer.owner is None) or is_free != (buffer.link_id is None):
                wrong.append(f"send: buffer {buffer.index} is {buffer.phase.value} with owner {buffer.owner!r}")
        if sorted(self._free) != free:
            wrong.append(f"send: free list {sorted(self._free)} but free buffers {free}")
        if links != dict(self._by_link):
            wrong.append(f"send: buffers by link {links} but counted {dict(self._by_link)}")
        if links and max(links.values()) > self._max_per_link:
            wrong.append(f"send: more than {self._max_per_link} buffers for one link: {links}")
        return wrong


# ---- landing buffers ----


class LandingPhase(Enum):
    FREE = "free"
    READING = "reading"
    LANDED = "landed"
    HELD = "held"
    """Overdue, or its transfer has ended: bytes may still land. Never scattered."""


class LandingEvent(Enum):
    POSTED = "posted"
    DONE = "done"
    LOST = "lost"
    GIVEN_UP = "given_up"
    SETTLED = "settled"
    """The scatter has ended, or the landed bytes were refused without one."""


LANDING_NEXT: dict[LandingPhase, dict[LandingEvent, LandingPhase]] = {
    LandingPhase.FREE: {LandingEvent.POSTED: LandingPhase.READING},
    LandingPhase.READING: {
        LandingEvent.DONE: LandingPhase.LANDED,
        LandingEvent.LOST: LandingPhase.FREE,
        LandingEvent.GIVEN_UP: LandingPhase.HELD,
    },
    LandingPhase.LANDED: {LandingEvent.SETTLED: LandingPhase.FREE},
    LandingPhase.HELD: {LandingEvent.DONE: LandingPhase.FREE, LandingEvent.LOST: LandingPhase.FREE},
}


@dataclass
class LandingBuffer:
    """One landing buffer."""

    index: int
    phase: LandingPhase = LandingPhase.FREE
    owner: TransferId | None = None
    """None while in use: a probe of the link."""
    link_id: int | None = None
    agent: str | None = None
    held_since_s: float | None = field(default=None, compare=False)
    is_overdue: bool = field(default=False, compare=False)
    """HELD, and its READ's own deadline has passed: it may be so for ever."""


class LandingBuffers:
    """The taker's buffers, shared out by peer. The share counts HELD ones, so one sick peer cannot take them all; READs
    that run at once are bounded besides, since more of them only end together."""

    def __init__(self, num_buffers: int, max_per_agent: int, max_reads: int) -> None:
        self.buffers = [LandingBuffer(index) for index in range(num_buffers)]
        self._max_per_agent = max_per_agent
        self._max_reads = max_reads
        self._free = list(reversed(range(num_buffers)))
        self._by_agent: Counter[str] = Counter()
        self._reading: Counter[str] = Counter()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def may_post(self, agent: str) -> bool:
        if not self._free or self._reading[agent] >= self._max_reads:
            return False
        return self._by_agent[agent] < self._max_per_agent

    def post(self, owner: TransferId | None, link_id: int, agent: str) -> LandingBuffer:
        """Take a free buffer for a READ of this peer."""
        assert self.may_post(agent)
        buffer = self.buffers[self._free.pop()]
        buffer.phase = LANDING_NEXT[buffer.phase][LandingEvent.POSTED]
        buffer.owner, buffer.link_id, buffer.agent = owner, link_id, agent
        self._by_agent[agent] += 1
        self._reading[agent] += 1
        return buffer

    def done(self, index: int) -> LandingPhase:
        """The READ has ended well: LANDED, or FREE if it was given up before."""
        return self._move(index, LandingEvent.DONE)

    def lost(self, index: int) -> LandingPhase:
        """The READ has failed: nothing more lands."""
        return self._move(index, LandingEvent.LOST)

    def give_up(self, index: int, now_s: float) -> LandingPhase:
        """Nobody waits for this READ any more, but it still runs."""
        self.buffers[index].held_since_s = now_s
        return self._move(index, LandingEvent.GIVEN_UP)

    def overdue(self, index: int) -> None:
        """The deadline of a READ that nobody waits for has passed."""
        assert self.buffers[index].phase is LandingPhase.HELD
        self.buffers[index].is_overdue = True

    def settle(self, index: int) -> LandingPhase:
        """The landed bytes were stored or refused."""
        return self._move(index, LandingEvent.SETTLED)

    def open_reads(self, agent: str) -> int:
        """READs of this peer whose bytes may still land: its agent must stay."""
        open_phases = (LandingPhase.READING, LandingPhase.HELD)
        return sum(buffer.agent == agent and buffer.phase in open_phases for buffer in self.buffers)

    @property
    def num_held(self) -> int:
        return sum(buffer.phase is LandingPhase.HELD for buffer in self.buffers)

    @property
    def num_overdue(self) -> int:
        """HELD ones whose READ is late, not merely one that was given up a moment ago."""
        return sum(buffer.is_overdue for buffer in self.buffers)

    def oldest_held_s(self, now_s: float) -> float:
        """Age of the oldest HELD buffer; 0 without one."""
        since = [buffer.held_since_s for buffer in self.buffers if buffer.held_since_s is not None]
        return now_s - min(since) if since else 0.0

    def _move(self, index: int, event: LandingEvent) -> LandingPhase:
        buffer = self.buffers[index]
        if buffer.phase is LandingPhase.READING:
            assert buffer.agent is not None
            self._reading[buffer.agent] -= 1
            if not self._reading[buffer.agent]:
                del self._reading[buffer.agent]
        buffer.phase = LANDING_NEXT[buffer.phase][event]
        if buffer.phase is LandingPhase.FREE:
            assert buffer.agent is not None
            self._by_agent[buffer.agent] -= 1
            if not self._by_agent[buffer.agent]:
                del self._by_agent[buffer.agent]
            buffer.owner = buffer.link_id = buffer.agent = buffer.held_since_s = None
            buffer.is_overdue = False
            self._free.append(index)
        return buffer.phase

    def counts(self) -> Mapping[str, int]:
        return _counts(LandingPhase, [buffer.phase for buffer in self.buffers])

    def audit(self) -> list[str]:
        """Free list and share counters against the buffers themselves; [] is clean."""
        free: list[int] = []
        agents: dict[str, int] = {}
        reading: dict[str, int] = {}
        wrong: list[str] = []
        for buffer in self.buffers:
            phase, agent = buffer.phase, buffer.agent
            if phase is LandingPhase.READING and agent is not None:
                reading[agent] = reading.get(agent, 0) + 1
            if phase is LandingPhase.FREE:
                free.append(buffer.index)
            if agent is not None:
                agents[agent] = agents.get(agent, 0) + 1
            if (phase is LandingPhase.FREE) != (agent is None) or (phase is LandingPhase.HELD) != (
                buffer.held_since_s is not None
            ):
                wrong.append(f"landing: buffer {buffer.index} is {phase.value} with agent {agent!r}")
        if sorted(self._free) != free:
            wrong.append(f"landing: free list {sorted(self._free)} but free buffers {free}")
        if agents != dict(self._by_agent):
            wrong.append(f"landing: buffers by agent {agents} but counted {dict(self._by_agent)}")
        if reading != dict(self._reading):
            wrong.append(f"landing: READs by agent {reading} but counted {dict(self._reading)}")
        if reading and max(reading.values()) > self._max_reads:
            wrong.append(f"landing: more than {self._max_reads} READs of one agent: {reading}")
        if agents and max(agents.values()) > self._max_per_agent:
            wrong.append(f"landing: more than {self._max_per_agent} buffers for one agent: {agents}")
        return wrong


def _counts(phases: type[SendPhase] | type[LandingPhase], seen: list[SendPhase] | list[LandingPhase]) -> dict[str, int]:
    counted = Counter(phase.value for phase in seen)
    return {phase.value: counted[phase.value] for phase in phases}
