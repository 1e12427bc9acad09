"""Links: who is connected to whom, proved by a probe, watched by beats.

A link has a direction, taker to holder. The taking side dials, says `Hello`, learns where the holder's send buffers
lie, reads a known segment out of them and only then says `LinkUp`. The holding side answers, and needs neither metadata
nor memory of the taker. An agent is removed only when no READ of it runs. Decides without I/O; time is passed in.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..config.tree import TransferSection
from ..core.ids import Incarnation, WorkerId
from ..core.peer import (
    HOLDER_MESSAGES,
    MAX_METADATA_BYTES,
    PROTOCOL,
    TAKER_MESSAGES,
    Beat,
    Hello,
    PeerMessage,
    Probe,
    Refusal,
    Welcome,
)
from ..core.peer import LinkUp as LinkUpMessage
from .api import (
    CloseLink,
    Dial,
    LinkChanged,
    LinkClosed,
    LinkCount,
    LinkDirection,
    LinkMessage,
    LinkOpened,
    LinkPhase,
    PeerForgotten,
    PeerFound,
)
from .buffers import LandingBuffers, LandingPhase
from .decisions import (
    Action,
    AddPeer,
    Deliver,
    FromPeer,
    LinkDoubted,
    LinkLost,
    LinkReady,
    LinkTrusted,
    PeerAdded,
    PeerFaulty,
    PeerUnreachable,
    PostRead,
    ReadDone,
    ReadFailed,
    ReadLost,
    ReadOverdue,
    RemovePeer,
    Send,
    SendBeat,
    Tick,
    ToHolder,
    ToTaker,
)
from .header import HEADER_BYTES, header_bytes
from .lease import DeadlineHeap

HANDSHAKE_S = 10.0
BACKOFF_MIN_S = 0.5
BACKOFF_MAX_S = 30.0
BEATS_MISSED = 3
SUSPECT_S = 30.0
PROBE_AGAIN_S = 1.0
AGENT_KEPT_S = 60.0
"""How long the agent of a lost link waits for the next handshake."""
MAX_LINKS = 1024
MAX_BUFFERS = 1 << 16
MAX_BUFFER_BYTES = 1 << 31
PROBE_BYTES = 4 << 20
PROBE_GEN = 1
NO_TRANSFER = bytes(16)


class LinkStep(Enum):
    """What moves a link, as its taking side sees it."""

    DIAL = "dial"
    PROVED = "proved"
    """The probe landed whole."""
    MISMATCH = "mismatch"
    """Fingerprint, protocol or transport: no retry helps."""
    DOUBT = "doubt"
    """Beats missed, or a READ overdue."""
    TRUST = "trust"
    """A probe landed whole again, no READ is overdue, and the peer was heard since it was silent."""
    BREAK = "break"
    """Stream broken, READ failed, other incarnation, deadline, forgotten."""
    NEW_LIFE = "new_life"
    """The peer's incarnation has changed."""


P, S = LinkPhase, LinkStep

NEXT: dict[LinkPhase, dict[LinkStep, LinkPhase]] = {
    P.DOWN: {S.DIAL: P.HANDSHAKING, S.BREAK: P.DOWN, S.NEW_LIFE: P.DOWN},
    P.HANDSHAKING: {S.PROVED: P.UP, S.MISMATCH: P.INCOMPATIBLE, S.BREAK: P.DOWN, S.NEW_LIFE: P.DOWN},
    P.UP: {S.DOUBT: P.SUSPECT, S.BREAK: P.DOWN, S.NEW_LIFE: P.DOWN},
    P.SUSPECT: {S.DOUBT: P.SUSPECT, S.TRUST: P.UP, S.BREAK: P.DOWN, S.NEW_LIFE: P.DOWN},
    P.INCOMPATIBLE: {S.BREAK: P.DOWN, S.NEW_LIFE: P.DOWN},
}

WAITS = {P.DOWN: "dial", P.HANDSHAKING: "handshake", P.UP: "silent", P.SUSPECT: "suspect", P.INCOMPATIBLE: None}
"""Which deadline ends each phase at the latest (I4). Nobody waits for an incompatible peer: it has to live anew."""


class Stage(Enum):
    """Where a handshake is."""

    DIALLING = "dialling"
    TURN = "turn"
    """Connected; another handshake of our agent runs."""
    HELLO = "hello"
    ADDING = "adding"
    PROBING = "probing"


@dataclass
class OutLink:
    """The link to one holder."""

    peer: WorkerId
    address: str
    incarnation: Incarnation | None
    phase: LinkPhase = LinkPhase.DOWN
    link_id: int | None = None
    stage: Stage = Stage.DIALLING
    failures: int = 0
    """Since the last UP, for the back-off."""
    dial_s: float = 0.0
    """DOWN: when it is dialled again."""
    welcome: Welcome | None = None
    agent: str | None = None
    agent_failed: bool = False
    """A READ of it has failed: it is removed before the next handshake."""
    transport: str = ""
    bytes_per_s: float = 0.0
    warm: bool = False
    """The first probe has landed. It paid for the connection and for untouched memory: the second is timed."""
    probe_landing: int | None = None
    probe_posted_s: float = 0.0
    overdue: set[int] = field(default_factory=set)
    silent: bool = False
    """Too many beats were missed, and nothing was heard since."""

    def ready(self, section: TransferSection) -> LinkReady:
        welcome = self.welcome
        assert welcome is not None
        assert self.link_id is not None
        assert self.agent is not None
        return LinkReady(
            link_id=self.link_id,
            direction=LinkDirection.OUT,
            peer=self.peer,
            incarnation=welcome.incarnation,
            window=max(1, min(section.window, welcome.window)),
            segment_bytes=min(section.segment_bytes, welcome.segment_bytes),
            agent=self.agent,
            buffer_base=welcome.buffer_base,
            buffer_bytes=welcome.buffer_bytes,
            num_buffers=welcome.num_buffers,
            device=welcome.device,
            bytes_per_s=self.bytes_per_s,
            transport=self.transport,
        )


@dataclass
class InLink:
    """A stream that a taker opened."""

    link_id: int
    phase: LinkPhase = LinkPhase.HANDSHAKING
    hello: Hello | None = None
    bytes_per_s: float = 0.0
    transport: str = ""


@dataclass(frozen=True, kw_only=True)
class Self:
    """What this worker says of itself in a handshake."""

    worker_id: WorkerId
    incarnation: Incarnation
    fingerprint: bytes
    document: str
    agent_name: str
    agent_metadata: bytes
    buffer_base: int
    buffer_bytes: int
    num_buffers: int
    device: str = "cpu"


LinksInput: TypeAlias = (
    PeerFound
    | PeerForgotten
    | LinkOpened
    | LinkMessage
    | LinkClosed
    | PeerAdded
    | ReadDone
    | ReadLost
    | ReadOverdue
    | ReadFailed
    | PeerFaulty
    | Tick
)
DeadlineKey: TypeAlias = tuple[str, str]


def golden_payload(fingerprint: bytes, num_bytes: int) -> bytes:
    """The probe's bytes: both ends make them from the fingerprint that they agree on."""
    return hashlib.shake_128(b"headrace probe|" + fingerprint).digest(num_bytes)


def golden_digest(payload: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(payload, digest_size=8).digest(), "little")


def probe_header(probe: Probe) -> bytes:
    """The header before the probe's payload."""
    return header_bytes(
        transfer_id=NO_TRANSFER,
        attempt=0,
        seq=0,
        buffer=probe.buffer,
        buffer_gen=probe.buffer_gen,
        index_count=0,
        payload_bytes=probe.payload_bytes,
        digest=probe.digest,
    )


def probe_bytes(segment_bytes: int) -> int:
    """A probe is as large as a segment, up to 4 MiB."""
    return min(segment_bytes, PROBE_BYTES)


class Links:
    """All links of a worker, both directions, and the agents behind them."""

    def __init__(
        self,
        *,
        me: Self,
        buffers: LandingBuffers,
        section: TransferSection,
        rng: random.Random,
        new_link_id: Iterator[int],
    ) -> None:
        self._me = me
        self._buffers = buffers
        self._section = section
        self._rng = rng
        self._new_link_id = new_link_id
        self._out: dict[str, OutLink] = {}
        self._in: dict[int, InLink] = {}
        self._agents: set[str] = set()
        """Known to the driver."""
        self._leaving: set[str] = set()
        """To be removed when their last READ has ended."""
        self._handshakes: deque[str] = deque()
        """Peers in the order in which their handshakes run; the first one's does. One at a time for our agent."""
        self._deadlines: DeadlineHeap[DeadlineKey] = DeadlineHeap()
        self._now_s = 0.0
        self._actions: list[Action] = []
        payload = golden_payload(me.fingerprint, probe_bytes(section.segment_bytes))
        self._probe = Probe(me.num_buffers - 1, PROBE_GEN, len(payload), golden_digest(payload))
        self.failures: Counter[str] = Counter()
        self.stale_messages = 0

    @property
    def probe(self) -> Probe:
        """What must lie in our own last send buffer."""
        return self._probe

    # ---- the door ----

    def handle(self, event: LinksInput, now_s: float) -> list[Action]:
        """Take one event in; what is to be done, in order."""
        self._now_s = now_s
        self._actions = []
        match event:
            case PeerFound():
                self._found(event)
            case PeerForgotten(peer):
                self._forgotten(peer)
            case LinkOpened(link_id, direction):
                self._opened(link_id, direction)
            case LinkMessage(link_id, message):
                self._message(link_id, message)
            case LinkClosed(link_id, reason):
                self._closed(link_id, reason)
            case PeerAdded():
                self._added(event)
            case ReadDone():
                self._probe_done(event)
            case ReadLost(landing):
                self._probe_lost(landing)
            case ReadOverdue(link_id):
                link = self._by_id(link_id)
                if link is not None:
                    self._doubt(link, "a READ is overdue")
            case ReadFailed(agent):
                self._agent_failed(agent)
            case PeerFaulty(link_id, reason):
                self._drop(link_id, reason)
            case Tick():
                pass
        self._due()
        self._next_handshake()
        self._remove_agents()
        return self._actions

    def next_s(self) -> float | None:
        """When `Tick` is needed at the latest."""
        return self._deadlines.next_s()

    def counts(self) -> tuple[LinkCount, ...]:
        out = [
            LinkCount(
                link_id=link.link_id or 0,
                direction=LinkDirection.OUT,
                peer=link.peer,
                phase=link.phase,
                gigabytes_per_s=link.bytes_per_s / 1e9,
                transport=link.transport,
            )
            for link in self._out.values()
        ]
        back = [
            LinkCount(
                link_id=link.link_id,
                direction=LinkDirection.IN,
                peer=link.hello.worker_id if link.hello is not None else "",
                phase=link.phase,
                gigabytes_per_s=link.bytes_per_s / 1e9,
                transport=link.transport,
            )
            for link in self._in.values()
        ]
        return (*out, *back)

    def audit(self) -> list[str]:
        """Agents against links and READs, phases against deadlines; [] is clean."""
        wrong: list[str] = []
        known = set(self._leaving)
        for link in self._out.values():
            if link.agent is not None:
                known.add(link.agent)
            wait = WAITS[link.phase]
            if wait is not None and (wait, link.peer) not in self._deadlines:
                wrong.append(f"links: a link is {link.phase.value} without its deadline ({wait})")
        if not known <= self._agents:
            wrong.append(f"links: agents {sorted(known)} but the driver knows {sorted(self._agents)}")
        if not self._agents <= known:
            wrong.append(f"links: the driver knows {sorted(self._agents)}, nobody uses all of them")
        for buffer in self._buffers.buffers:
            # LANDED bytes need no agent any more.
            if buffer.agent is None or buffer.agent in self._agents or buffer.phase is LandingPhase.LANDED:
                continue
            wrong.append(f"links: buffer {buffer.index} reads from an agent that was removed")
        return wrong

    # ---- the taking side ----

    def _found(self, command: PeerFound) -> None:
        link = self._out.get(command.peer)
        if link is None:
            if len(self._out) >= MAX_LINKS:
                self._actions.append(ToTaker(PeerUnreachable(command.peer, "too many peers")))
                return
            link = self._out[command.peer] = OutLink(command.peer, command.address, command.incarnation)
            self._deadlines.set(("dial", link.peer), self._now_s)
            return
        moved = command.address != link.address
        reborn = command.incarnation is not None and command.incarnation != link.incarnation
        link.address = command.address
        if reborn:
            link.incarnation = command.incarnation
        if not reborn and not moved:
            if link.phase is P.INCOMPATIBLE:
                self._actions.append(ToTaker(PeerUnreachable(link.peer, "incompatible")))
            elif link.phase is P.DOWN and link.dial_s > self._now_s + BACKOFF_MIN_S:
                # A pull needs it, and its router takes the peer for alive: a long silence may be over.
                self._dial_at(link, self._now_s + BACKOFF_MIN_S)
        elif link.phase in (P.DOWN, P.INCOMPATIBLE) or (moved and link.phase is not P.UP):
            # A stream that stands knows better than the news who lives there: it ends with its peer.
            self._break(link, "another life of the peer", step=S.NEW_LIFE)
            self._dial_soon(link, first=True)

    def _forgotten(self, peer: WorkerId) -> None:
        link = self._out.get(peer)
        if link is None:
            return
        self._break(link, "forgotten")
        self._deadlines.drop(("dial", peer))
        self._leave(link)
        del self._out[peer]
        self._actions.append(ToTaker(PeerUnreachable(peer, "forgotten")))

    def _dial(self, link: OutLink) -> None:
        self._step(link, S.DIAL, "")
        link.link_id = next(self._new_link_id)
        link.stage = Stage.DIALLING
        link.warm = False
        self._deadlines.set(("handshake", link.peer), self._now_s + HANDSHAKE_S)
        self._actions.append(Deliver(Dial(link.link_id, link.peer, link.address)))

    def _opened(self, link_id: int, direction: LinkDirection) -> None:
        if direction is LinkDirection.IN:
            if len(self._in) >= MAX_LINKS:
                self._actions.append(Deliver(CloseLink(link_id, "too many links")))
                return
            self._in[link_id] = InLink(link_id)
            self._deadlines.set(("hello", str(link_id)), self._now_s + HANDSHAKE_S)
            return
        link = self._by_id(link_id)
        if link is None or link.phase is not P.HANDSHAKING or link.stage is not Stage.DIALLING:
            self._actions.append(Deliver(CloseLink(link_id, "nobody waits for this link")))
            return
        link.stage = Stage.TURN
        self._handshakes.append(link.peer)

    def _next_handshake(self) -> None:
        """Let the first one in the queue speak, if it has not yet."""
        while self._handshakes:
            link = self._out.get(self._handshakes[0])
            if link is not None and link.phase is P.HANDSHAKING and link.stage is not Stage.DIALLING:
                break
            self._handshakes.popleft()
        else:
            return
        if link.stage is not Stage.TURN:
            return
        if link.agent is not None and link.agent_failed:
            # The old agent leaves first; its READs may take until the peer's kernel gives them up.
            self._leave(link)
        assert link.link_id is not None
        link.stage = Stage.HELLO
        self._deadlines.set(("handshake", link.peer), self._now_s + HANDSHAKE_S)
        hello = Hello(
            protocol=PROTOCOL,
            worker_id=self._me.worker_id,
            incarnation=self._me.incarnation,
            fingerprint=self._me.fingerprint,
            document=self._me.document,
            max_segment_bytes=self._section.segment_bytes,
            window=self._section.window,
            holder_incarnation=link.incarnation or 0,
        )
        self._actions.append(Send(link.link_id, hello))

    def _from_holder(self, link: OutLink, message: PeerMessage) -> None:
        self._heard(link)
        if link.phase in (P.UP, P.SUSPECT):
            if isinstance(message, Welcome | Refusal):
                self._break(link, f"unexpected {type(message).__name__}")
                self._dial_soon(link)
                return
            assert link.link_id is not None
            self._actions.append(ToTaker(FromPeer(link.link_id, message)))
            return
        if isinstance(message, Beat):
            return
        if link.stage is not Stage.HELLO:
            self._fail(link, f"unexpected {type(message).__name__}")
        elif isinstance(message, Refusal):
            if message.reason == "incarnation":
                # Our knowledge of who lives there is older than the peer: take whoever answers next time.
                link.incarnation = None
                self._fail(link, "refused: incarnation")
            elif message.reason in ("fingerprint", "protocol"):
                self._mismatch(link, f"refused: {message.reason} {', '.join(message.differing)}".strip())
            else:
                self._fail(link, f"refused: {message.reason}")
        elif isinstance(message, Welcome):
            self._welcomed(link, message)
        else:
            self._fail(link, f"unexpected {type(message).__name__}")

    def _welcomed(self, link: OutLink, welcome: Welcome) -> None:
        reason = self._misfit(link, welcome)
        if reason is not None:
            self._fail(link, reason)
            return
        if link.agent is not None and link.agent != welcome.agent_name:
            self._leave(link)
        if welcome.agent_name in self._leaving:
            # A failed agent of this very life still has READs: no handshake before they have ended.
            self._fail(link, "the old agent's READs still run")
            return
        link.welcome = welcome
        link.stage = Stage.ADDING
        assert link.link_id is not None
        self._actions.append(AddPeer(link.link_id, welcome.agent_metadata))

    def _misfit(self, link: OutLink, welcome: Welcome) -> str | None:
        """Bounds of what the peer says of itself (I10)."""
        if welcome.worker_id != link.peer:
            return f"is {welcome.worker_id!r}, not {link.peer!r}"
        if not 0 < len(welcome.agent_metadata) <= MAX_METADATA_BYTES:
            return f"{len(welcome.agent_metadata)} bytes of metadata"
        if not 2 <= welcome.num_buffers <= MAX_BUFFERS or not 0 < welcome.buffer_bytes <= MAX_BUFFER_BYTES:
            return "buffers out of bounds"
        if not 0 < welcome.segment_bytes <= welcome.buffer_bytes - HEADER_BYTES or welcome.window < 1:
            return "segments out of bounds"
        if welcome.buffer_base <= 0 or welcome.buffer_base + welcome.num_buffers * welcome.buffer_bytes > 1 << 64:
            return "addresses out of bounds"
        probe = welcome.probe
        if probe.buffer != welcome.num_buffers - 1 or not 0 < probe.payload_bytes <= welcome.segment_bytes:
            return "probe out of bounds"
        return None

    def _added(self, event: PeerAdded) -> None:
        link = self._by_id(event.link_id)
        if event.name is not None:
            self._agents.add(event.name)
        if link is None or link.stage is not Stage.ADDING or link.welcome is None:
            # A `Welcome` that comes when the handshake's deadline is due (the worker was stopped, say) still has its
            # agent added, and the handshake has ended before that is told.
            if event.name is not None and all(other.agent != event.name for other in self._out.values()):
                self._leaving.add(event.name)
            return
        if event.name is None:
            self._fail(link, "the driver refused the peer's metadata")
            return
        if event.name != link.welcome.agent_name:
            self._leaving.add(event.name)
            self._fail(link, f"agent is {event.name!r}, not {link.welcome.agent_name!r}")
            return
        link.agent = event.name
        link.agent_failed = False
        link.stage = Stage.PROBING
        self._try_probe(link)

    # ---- probes ----

    def _try_probe(self, link: OutLink) -> None:
        """READ the known segment, now or when a landing buffer is free."""
        assert link.agent is not None
        assert link.welcome is not None
        assert link.link_id is not None
        if link.probe_landing is not None:
            return
        if not self._buffers.may_post(link.agent):
            self._deadlines.set(("probe", link.peer), self._now_s + 0.05)
            return
        welcome = link.welcome
        num_bytes = HEADER_BYTES + welcome.probe.payload_bytes
        if welcome.probe.payload_bytes > self._section.segment_bytes:
            self._fail(link, "the probe does not fit a landing buffer")
            return
        landing = self._buffers.post(None, link.link_id, link.agent).index
        link.probe_landing = landing
        link.probe_posted_s = self._now_s
        self._deadlines.set(("probe_read", link.peer), self._now_s + HANDSHAKE_S)
        remote = welcome.buffer_base + welcome.probe.buffer * welcome.buffer_bytes
        self._actions.append(PostRead(landing, link.agent, remote, num_bytes, welcome.device, b""))

    def _probe_done(self, event: ReadDone) -> None:
        buffer = self._buffers.buffers[event.landing]
        link = self._probing(event.landing)
        if self._buffers.done(event.landing) is LandingPhase.FREE:
            return
        assert buffer.phase is LandingPhase.LANDED
        self._buffers.settle(event.landing)
        assert link is not None
        link.probe_landing = None
        self._deadlines.drop(("probe_read", link.peer))
        welcome = link.welcome
        assert welcome is not None
        # Header and payload against what both ends make of the fingerprint for themselves.
        payload = golden_payload(self._me.fingerprint, welcome.probe.payload_bytes)
        good = event.header == probe_header(welcome.probe) + payload
        good = good and welcome.probe.digest == golden_digest(payload)
        seconds = max(self._now_s - link.probe_posted_s, 1e-9)
        link.transport = event.transport
        wanted = self._section.require_transport
        if link.phase is P.HANDSHAKING and not good:
            self._fail(link, "the probe landed with other bytes than announced")
        elif link.phase is P.HANDSHAKING and wanted and wanted not in event.transport:
            # Never a silent fall-back: the link is refused, loudly.
            self._mismatch(link, f"transport is {event.transport!r}, required {wanted!r}")
        elif link.phase is P.HANDSHAKING and not link.warm:
            link.warm = True
            self._try_probe(link)
        elif link.phase is P.HANDSHAKING:
            self._up(link, (HEADER_BYTES + welcome.probe.payload_bytes) / seconds)
        elif link.phase is P.SUSPECT:
            if not good:
                self._break(link, "the probe landed with other bytes than announced")
                self._dial_soon(link)
            elif not link.silent and not self._overdue(link):
                self._step(link, S.TRUST, "the probe landed whole")
                self._deadlines.drop(("suspect", link.peer))
                self._heard(link)
                assert link.link_id is not None
                self._actions.append(ToTaker(LinkTrusted(link.link_id)))
            else:
                self._deadlines.set(("probe", link.peer), self._now_s + PROBE_AGAIN_S)

    def _probe_lost(self, landing: int) -> None:
        agent = self._buffers.buffers[landing].agent
        assert agent is not None
        self._buffers.lost(landing)
        link = self._probing(landing)
        if link is not None:
            link.probe_landing = None
            self._deadlines.drop(("probe_read", link.peer))
        self._agent_failed(agent)

    def _probing(self, landing: int) -> OutLink | None:
        return next((link for link in self._out.values() if link.probe_landing == landing), None)

    def _overdue(self, link: OutLink) -> bool:
        return any(
            buffer.phase is LandingPhase.HELD and buffer.link_id == link.link_id for buffer in self._buffers.buffers
        )

    # ---- states of the taking side ----

    def _up(self, link: OutLink, bytes_per_s: float) -> None:
        self._deadlines.drop(("handshake", link.peer))
        self._deadlines.drop(("agent", link.peer))
        link.bytes_per_s = bytes_per_s
        link.failures = 0
        self._step(link, S.PROVED, "")
        self._heard(link)
        assert link.link_id is not None
        self._actions.append(Send(link.link_id, LinkUpMessage(bytes_per_s / 1e9, link.transport)))
        self._deadlines.set(("beat", link.peer), self._now_s + self._section.beat_s)
        self._actions.append(ToTaker(link.ready(self._section)))

    def _heard(self, link: OutLink) -> None:
        link.silent = False
        if link.phase is P.UP:
            self._deadlines.set(("silent", link.peer), self._now_s + BEATS_MISSED * self._section.beat_s)

    def _doubt(self, link: OutLink, reason: str) -> None:
        if link.phase not in (P.UP, P.SUSPECT):
            return
        was_up = link.phase is P.UP
        self._step(link, S.DOUBT, reason)
        if was_up:
            self._deadlines.drop(("silent", link.peer))
            self._deadlines.set(("suspect", link.peer), self._now_s + SUSPECT_S)
            assert link.link_id is not None
            self._actions.append(ToTaker(LinkDoubted(link.link_id)))
            self._deadlines.set(("probe", link.peer), self._now_s)

    def _fail(self, link: OutLink, reason: str) -> None:
        """This handshake ends; another one later."""
        self._break(link, reason)
        self._dial_soon(link)

    def _mismatch(self, link: OutLink, reason: str) -> None:
        self.failures["incompatible"] += 1
        self._let_stream_go(link, reason)
        self._step(link, S.MISMATCH, reason)
        self._actions.append(ToTaker(PeerUnreachable(link.peer, reason)))

    def _break(self, link: OutLink, reason: str, *, step: LinkStep = S.BREAK, close: bool = True) -> None:
        if link.phase is P.DOWN:
            return
        self.failures["broken"] += 1
        self._let_stream_go(link, reason, close=close)
        self._step(link, step, reason)

    def _let_stream_go(self, link: OutLink, reason: str, *, close: bool = True) -> None:
        if link.probe_landing is not None:
            self._buffers.give_up(link.probe_landing, self._now_s)
            link.probe_landing = None
        for kind in ("handshake", "silent", "suspect", "probe", "probe_read", "beat"):
            self._deadlines.drop((kind, link.peer))
        if link.link_id is not None:
            if link.phase in (P.UP, P.SUSPECT):
                self._actions.append(ToTaker(LinkLost(link.link_id, reason)))
            if close:
                self._actions.append(Deliver(CloseLink(link.link_id, reason)))
        if link.agent is not None and ("agent", link.peer) not in self._deadlines:
            self._deadlines.set(("agent", link.peer), self._now_s + AGENT_KEPT_S)
        link.welcome = None

    def _dial_soon(self, link: OutLink, *, first: bool = False) -> None:
        """Back-off from 0.5 s to 30 s with jitter, so that a crowd does not come back in one moment."""
        if first:
            link.failures = 0
            delay_s = 0.0
        else:
            delay_s = min(BACKOFF_MIN_S * 2.0 ** min(link.failures, 10), BACKOFF_MAX_S) * self._rng.uniform(0.5, 1.0)
            link.failures += 1
        self._dial_at(link, self._now_s + delay_s)

    def _dial_at(self, link: OutLink, at_s: float) -> None:
        link.dial_s = at_s
        self._deadlines.set(("dial", link.peer), at_s)

    def _agent_failed(self, agent: str) -> None:
        for link in self._out.values():
            if link.agent == agent:
                link.agent_failed = True
                if link.phase is not P.DOWN:
                    self._fail(link, "a READ has failed")
                self._leave(link)

    def _leave(self, link: OutLink) -> None:
        """The link has no more use for its agent."""
        if link.agent is not None:
            self._leaving.add(link.agent)
            link.agent = None
            link.agent_failed = False
            self._deadlines.drop(("agent", link.peer))

    def _remove_agents(self) -> None:
        for agent in sorted(self._leaving):
            if not self._buffers.open_reads(agent):
                self._leaving.discard(agent)
                self._agents.discard(agent)
                self._actions.append(RemovePeer(agent))

    # ---- the holding side ----

    def _from_taker(self, link: InLink, message: PeerMessage) -> None:
        silent_s = max(self._section.lease_s, BEATS_MISSED * self._section.beat_s)
        if isinstance(message, Hello):
            if link.hello is not None:
                self._drop(link.link_id, "said hello twice")
            else:
                self._hello(link, message)
            return
        if link.hello is None:
            self._drop(link.link_id, f"{type(message).__name__} before hello")
            return
        if isinstance(message, LinkUpMessage):
            if link.phase is P.UP:
                self._drop(link.link_id, "said up twice")
                return
            link.phase = P.UP
            link.bytes_per_s, link.transport = message.gigabytes_per_s * 1e9, message.transport
            self._deadlines.drop(("hello", str(link.link_id)))
            self._deadlines.set(("in_silent", str(link.link_id)), self._now_s + silent_s)
            self._changed_in(link, "")
            ready = LinkReady(
                link_id=link.link_id,
                direction=LinkDirection.IN,
                peer=link.hello.worker_id,
                incarnation=link.hello.incarnation,
                window=link.hello.window,
                segment_bytes=link.hello.max_segment_bytes,
            )
            self._actions.append(ToHolder(ready))
            return
        if link.phase is not P.UP:
            if not isinstance(message, Beat):
                self._drop(link.link_id, f"{type(message).__name__} before the link is up")
            return
        self._deadlines.set(("in_silent", str(link.link_id)), self._now_s + silent_s)
        self._actions.append(ToHolder(FromPeer(link.link_id, message)))

    def _hello(self, link: InLink, hello: Hello) -> None:
        me = self._me
        refusal: Refusal | None = None
        if hello.protocol != PROTOCOL:
            refusal = Refusal("protocol", (f"{hello.protocol} is not {PROTOCOL}",))
        elif hello.holder_incarnation not in (0, me.incarnation):
            refusal = Refusal("incarnation")
        elif hello.fingerprint != me.fingerprint:
            refusal = Refusal("fingerprint", differing_fields(hello.document, me.document))
        elif hello.window < 1 or hello.max_segment_bytes < self._probe.payload_bytes:
            refusal = Refusal("bounds", ("window or max_segment_bytes too small",))
        if refusal is not None:
            self.failures["refused"] += 1
            self._actions.append(Send(link.link_id, refusal))
            self._drop(link.link_id, f"refused: {refusal.reason} {', '.join(refusal.differing)}".strip())
            return
        for other in list(self._in.values()):
            old = other.hello
            if old is not None and old.worker_id == hello.worker_id and old.incarnation != hello.incarnation:
                self._drop(other.link_id, "the peer lives anew")
        link.hello = hello
        welcome = Welcome(
            worker_id=me.worker_id,
            incarnation=me.incarnation,
            segment_bytes=self._section.segment_bytes,
            window=self._section.window,
            agent_name=me.agent_name,
            agent_metadata=me.agent_metadata,
            buffer_base=me.buffer_base,
            buffer_bytes=me.buffer_bytes,
            num_buffers=me.num_buffers,
            device=me.device,
            probe=self._probe,
        )
        self._actions.append(Send(link.link_id, welcome))
        self._deadlines.set(("in_beat", str(link.link_id)), self._now_s + self._section.beat_s)

    # ---- streams ----

    def _message(self, link_id: int, message: PeerMessage) -> None:
        if link_id in self._in:
            if isinstance(message, TAKER_MESSAGES):
                self._from_taker(self._in[link_id], message)
            else:
                self._drop(link_id, f"{type(message).__name__} from a taker")
            return
        link = self._by_id(link_id)
        if link is None:
            self.stale_messages += 1
        elif isinstance(message, HOLDER_MESSAGES):
            self._from_holder(link, message)
        else:
            self._fail(link, f"{type(message).__name__} from a holder")

    def _closed(self, link_id: int, reason: str) -> None:
        if link_id in self._in:
            self._drop(link_id, reason, close=False)
            return
        link = self._by_id(link_id)
        if link is not None:
            self._break(link, reason, close=False)
            self._dial_soon(link)

    def _drop(self, link_id: int, reason: str, *, close: bool = True) -> None:
        """End a link that a peer broke, whichever direction."""
        back = self._in.pop(link_id, None)
        if back is None:
            link = self._by_id(link_id)
            if link is not None:
                self._fail(link, reason)
            return
        for kind in ("hello", "in_silent", "in_beat"):
            self._deadlines.drop((kind, str(link_id)))
        if back.phase is P.UP:
            self._actions.append(ToHolder(LinkLost(link_id, reason)))
        back.phase = P.DOWN
        self._changed_in(back, reason)
        if close:
            self._actions.append(Deliver(CloseLink(link_id, reason)))

    def _by_id(self, link_id: int) -> OutLink | None:
        """The living taking link of this stream."""
        for link in self._out.values():
            if link.link_id == link_id and link.phase not in (P.DOWN, P.INCOMPATIBLE):
                return link
        return None

    # ---- time ----

    def _due(self) -> None:
        for kind, name in self._deadlines.pop_due(self._now_s):
            if kind in ("hello", "in_silent", "in_beat"):
                self._due_in(kind, int(name))
                continue
            link = self._out[name]
            match kind:
                case "dial":
                    if link.phase is P.DOWN:
                        self._dial(link)
                case "handshake":
                    self._fail(link, f"the handshake took too long ({link.stage.value})")
                case "beat":
                    assert link.link_id is not None
                    self._actions.append(SendBeat(link.link_id, LinkDirection.OUT))
                    self._deadlines.set(("beat", name), self._now_s + self._section.beat_s)
                case "silent":
                    # A probe cannot disprove it: where READs need no help of the peer's they work on a stopped one too.
                    link.silent = True
                    self._doubt(link, f"{BEATS_MISSED} beats missed")
                case "suspect":
                    self._fail(link, "in doubt for too long")
                case "probe":
                    if link.stage is Stage.PROBING:
                        self._try_probe(link)
                case "probe_read":
                    self._probe_overdue(link)
                case "agent":
                    if link.phase is P.HANDSHAKING and link.stage in (Stage.ADDING, Stage.PROBING):
                        self._deadlines.set(("agent", name), self._now_s + HANDSHAKE_S)
                    else:
                        self._leave(link)
                case _:
                    raise AssertionError(kind)

    def _probe_overdue(self, link: OutLink) -> None:
        if link.phase is P.HANDSHAKING:
            self._fail(link, "the probe is overdue")
            return
        assert link.probe_landing is not None
        self._buffers.give_up(link.probe_landing, self._now_s)
        self._buffers.overdue(link.probe_landing)
        link.probe_landing = None
        self._deadlines.set(("probe", link.peer), self._now_s + PROBE_AGAIN_S)

    def _due_in(self, kind: str, link_id: int) -> None:
        match kind:
            case "hello":
                self._drop(link_id, "the handshake took too long")
            case "in_silent":
                self._drop(link_id, "silent")
            case _:
                self._actions.append(SendBeat(link_id, LinkDirection.IN))
                self._deadlines.set(("in_beat", str(link_id)), self._now_s + self._section.beat_s)

    # ---- small ----

    def _step(self, link: OutLink, step: LinkStep, reason: str) -> None:
        before = link.phase
        link.phase = NEXT[link.phase][step]
        if link.phase is not before and link.link_id is not None:
            changed = LinkChanged(
                link_id=link.link_id,
                direction=LinkDirection.OUT,
                peer=link.peer,
                phase=link.phase,
                reason=reason,
                gigabytes_per_s=link.bytes_per_s / 1e9,
                transport=link.transport,
            )
            self._actions.append(Deliver(changed))

    def _changed_in(self, link: InLink, reason: str) -> None:
        if link.hello is None:
            return
        changed = LinkChanged(
            link_id=link.link_id,
            direction=LinkDirection.IN,
            peer=link.hello.worker_id,
            phase=link.phase,
            reason=reason,
            gigabytes_per_s=link.bytes_per_s / 1e9,
            transport=link.transport,
        )
        self._actions.append(Deliver(changed))


def differing_fields(theirs: str, ours: str, limit: int = 64) -> tuple[str, ...]:
    """Which fields of two canonical documents differ, as `path: theirs != ours`. Never used to make them meet."""
    try:
        left, right = json.loads(theirs), json.loads(ours)
    except (ValueError, RecursionError):
        return ("document: not readable",)
    found: list[str] = []

    def walk(path: str, a: object, b: object) -> None:
        if len(found) >= limit or a == b:
            return
        if isinstance(a, dict) and isinstance(b, dict):
            for key in sorted(a.keys() | b.keys()):
                walk(f"{path}.{key}" if path else str(key), a.get(key), b.get(key))
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for place, (one, other) in enumerate(zip(a, b, strict=True)):
                walk(f"{path}[{place}]", one, other)
        else:
            found.append(f"{path}: {json.dumps(a)[:80]} != {json.dumps(b)[:80]}")

    walk("", left, right)
    return tuple(found) or ("document: equal, yet its digest differs",)
