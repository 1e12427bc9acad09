"""The taker's side of transfers: which announced segments to read, whether the bytes are good, and the outcome.

A transfer ends once, TAKEN or ABORTED, here. TAKEN means that every byte its pages need was stored in one pass with the
digest that the holder announced for it; anything less is never shown to the engine. Destinations come from the
announced index and the taker's own pages, never from landed bytes. Decides without I/O; time is passed in.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..config.tree import TransferSection
from ..core.errors import Cancelled, HeadraceError, LayoutError, PeerLost, StaleEpoch, TransferFailed
from ..core.ids import TransferId
from ..core.peer import (
    MAX_ALIVE,
    MAX_MISSING_RANGES,
    Beat,
    Cancel,
    Complete,
    Gone,
    Missing,
    PeerFault,
    Pull,
    Release,
    SegmentReady,
    Serving,
    Taken,
)
from ..core.segments import SegmentGeometry
from .api import Arrived, CancelPull, LinkDirection, NotNeeded, OpenPull, PullFailed, Quarantined, TransferStats
from .buffers import LandingBuffers, LandingPhase
from .coverage import Coverage, Places
from .decisions import (
    Action,
    Deliver,
    FromPeer,
    LinkDoubted,
    LinkLost,
    LinkReady,
    LinkTrusted,
    PeerFaulty,
    PeerUnreachable,
    PostRead,
    ReadDone,
    ReadFailed,
    ReadLost,
    ReadOverdue,
    Scatter,
    Scattered,
    Send,
    TakerEvent,
    ToLinks,
)
from .header import HEADER_BYTES, announced_header, pack_note, segment_digest
from .lease import DeadlineHeap

LINK_WAIT_S = 10.0
"""How long a pull waits for its link to come up."""
SUSPECT_GRACE_S = 5.0
"""What running transfers get on a link in doubt."""
MAX_ASKS = 2
"""How often a range is asked for again; the next time it is refused, the transfer ends."""
EXPECTED_FACTOR = 20.0
"""A deadline is this many times the time that the probe's rate predicts, but never less than the configured one."""
MAX_TOMBSTONES = 100_000


class TakerPhase(Enum):
    LINKING = "linking"
    """No link to the holder yet."""
    WAITING = "waiting"
    """`Pull` is sent; the holder queues."""
    TAKING = "taking"
    DRAINING = "draining"
    """The outcome is ABORTED, a scatter still writes the pages."""
    TAKEN = "taken"
    ABORTED = "aborted"


class TakerStep(Enum):
    """What moves a transfer."""

    LINKED = "linked"
    SERVED = "served"
    PIECE = "piece"
    """A segment announced, read, refused or stored; `Complete`; progress in a beat."""
    COVERED = "covered"
    """`Complete` was seen and every byte is stored."""
    ABORT = "abort"
    """Cancelled, gone, link lost, overdue, refused too often, fault of the peer, the first token ended the request."""
    SETTLED = "settled"
    """No scatter writes the pages any more."""


P, S = TakerPhase, TakerStep

NEXT: dict[TakerPhase, dict[TakerStep, TakerPhase]] = {
    P.LINKING: {S.LINKED: P.WAITING, S.ABORT: P.DRAINING},
    P.WAITING: {S.SERVED: P.TAKING, S.ABORT: P.DRAINING},
    P.TAKING: {S.PIECE: P.TAKING, S.SERVED: P.TAKING, S.COVERED: P.TAKEN, S.ABORT: P.DRAINING},
    # Pages stay bound until the scatters have ended, good or not.
    P.DRAINING: {S.PIECE: P.DRAINING, S.ABORT: P.DRAINING, S.SETTLED: P.ABORTED},
    P.TAKEN: {S.ABORT: P.TAKEN},
    P.ABORTED: {S.ABORT: P.ABORTED},
}

WAITS = {P.LINKING: "link", P.WAITING: "queue", P.TAKING: "progress"}
"""Which deadline ends each phase at the latest (I4)."""


@dataclass
class Announced:
    """One announced segment on its way through a landing buffer."""

    message: SegmentReady
    places: Places


@dataclass
class Transfer:
    """One pull as its taker sees it."""

    order: OpenPull
    phase: TakerPhase
    opened_s: float
    coverage: Coverage
    link: LinkReady | None = None
    pending: deque[Announced] = field(default_factory=deque)
    """Announced, waiting for a landing buffer. The holder's window bounds it."""
    reading: dict[int, Announced] = field(default_factory=dict)
    """By landing buffer."""
    scattering: dict[int, Announced] = field(default_factory=dict)
    seen: set[int] = field(default_factory=set)
    """`seq` of every announcement."""
    complete: Complete | None = None
    complete_s: float = 0.0
    computed_tokens: int = 0
    num_segments: int = 0
    num_missing: int = 0
    error: HeadraceError | None = None
    not_needed: bool = False

    @property
    def transfer_id(self) -> TransferId:
        return self.order.transfer_id


DeadlineKey: TypeAlias = tuple[str, TransferId, int]
TakerInput: TypeAlias = TakerEvent | OpenPull | CancelPull


class Taker:
    """All pulls of a worker, and its landing buffers."""

    def __init__(
        self,
        *,
        geometry: SegmentGeometry,
        buffers: LandingBuffers,
        section: TransferSection,
    ) -> None:
        self._geometry = geometry
        self._buffers = buffers
        self._section = section
        self._open: dict[TransferId, Transfer] = {}
        self._links: dict[int, LinkReady] = {}
        self._doubted: set[int] = set()
        self._turn: deque[TransferId] = deque()
        """Transfers with announced segments, in the order in which they get landing buffers."""
        self._tombstones: OrderedDict[TransferId, float] = OrderedDict()
        self._deadlines: DeadlineHeap[DeadlineKey] = DeadlineHeap()
        self._now_s = 0.0
        self._actions: list[Action] = []
        self._alarmed = False
        self.stale_messages = 0
        self.bytes_received = 0
        self.segments_received = 0
        self.transfers_taken = 0
        self.refused: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    # ---- the door ----

    def handle(self, event: TakerInput, now_s: float) -> list[Action]:
        """Take one event in; what is to be done, in order."""
        self._now_s = now_s
        self._actions = []
        match event:
            case OpenPull():
                self._open_pull(event)
            case CancelPull():
                self._cancel(event)
            case FromPeer():
                self._from_peer(event)
            case ReadDone():
                self._read_done(event)
            case ReadLost():
                self._read_lost(event.landing)
            case Scattered():
                self._scattered(event)
            case LinkReady(direction=LinkDirection.OUT):
                self._link_ready(event)
            case LinkDoubted():
                self._link_doubted(event.link_id)
            case LinkTrusted():
                self._link_trusted(event.link_id)
            case LinkLost():
                self._link_lost(event.link_id, event.reason)
            case PeerUnreachable():
                for transfer in list(self._open.values()):
                    if transfer.phase is P.LINKING and transfer.order.holder == event.peer:
                        self._abort(transfer, "link", PeerLost(event.reason))
            case _:
                pass
        self._due()
        self._post_reads()
        self._alarm()
        return self._actions

    def next_s(self) -> float | None:
        """When `Tick` is needed at the latest."""
        return self._deadlines.next_s()

    def beat(self, link_id: int) -> Beat:
        """What this side says in its beat to one holder: these transfers live."""
        mine = [t.transfer_id for t in self._open.values() if t.link is not None and t.link.link_id == link_id]
        return Beat(tuple(mine[:MAX_ALIVE]))

    def counts(self) -> Mapping[str, int]:
        """Open transfers by phase."""
        counted = Counter(transfer.phase.value for transfer in self._open.values())
        return {phase.value: counted[phase.value] for phase in (P.LINKING, P.WAITING, P.TAKING, P.DRAINING)}

    def phases(self) -> Mapping[TransferId, TakerPhase]:
        """Open transfers."""
        return {transfer_id: transfer.phase for transfer_id, transfer in self._open.items()}

    def audit(self) -> list[str]:
        """Buffers, deadlines and transfers against each other; [] is clean."""
        wrong = self._buffers.audit()
        for buffer in self._buffers.buffers:
            if buffer.owner is None or buffer.phase is LandingPhase.HELD:
                continue
            owner = self._open.get(buffer.owner)
            reading = buffer.phase is LandingPhase.READING
            if owner is None or buffer.index not in (owner.reading if reading else owner.scattering):
                wrong.append(f"taker: buffer {buffer.index} ({buffer.phase.value}) belongs to nobody open")
            elif reading and ("read", buffer.owner, buffer.index) not in self._deadlines:
                wrong.append(f"taker: a READ into buffer {buffer.index} has no deadline")
        for transfer_id, transfer in self._open.items():
            for index in (*transfer.reading, *transfer.scattering):
                if self._buffers.buffers[index].owner != transfer_id:
                    wrong.append(f"taker: buffer {index} is another's, yet a transfer counts on it")
            if transfer.phase is P.DRAINING:
                if not transfer.scattering:
                    wrong.append("taker: a transfer drains without a scatter")
                continue
            wait = WAITS[transfer.phase]
            if (wait, transfer_id, 0) not in self._deadlines:
                wrong.append(f"taker: a transfer is {transfer.phase.value} without its deadline ({wait})")
            if transfer.pending and transfer_id not in self._turn:
                wrong.append("taker: announced segments wait for no turn")
        return wrong

    # ---- commands ----

    def _open_pull(self, order: OpenPull) -> None:
        if order.transfer_id in self._open:
            self.stale_messages += 1
            return
        if order.transfer_id in self._tombstones:
            error = StaleEpoch("transfer id used before")
            self._actions.append(Deliver(PullFailed(order.transfer_id, error, TransferStats())))
            return
        try:
            coverage = Coverage(self._geometry, order.length, order.held_blocks)
        except LayoutError as error:
            self._tombstones[order.transfer_id] = self._now_s + self._section.tombstone_s
            self._actions.append(Deliver(PullFailed(order.transfer_id, error, TransferStats())))
            return
        transfer = Transfer(order, P.LINKING, self._now_s, coverage)
        self._open[order.transfer_id] = transfer
        self._deadlines.set(("link", order.transfer_id, 0), self._now_s + LINK_WAIT_S)
        for link in self._links.values():
            if link.link_id not in self._doubted and self._fits(transfer, link):
                self._pull(transfer, link)
                break

    def _fits(self, transfer: Transfer, link: LinkReady) -> bool:
        wanted = transfer.order.holder_incarnation
        return link.peer == transfer.order.holder and wanted in (None, link.incarnation)

    def _pull(self, transfer: Transfer, link: LinkReady) -> None:
        order = transfer.order
        self._step(transfer, S.LINKED)
        transfer.link = link
        self._deadlines.drop(("link", order.transfer_id, 0))
        self._deadlines.set(("queue", order.transfer_id, 0), self._now_s + self._section.queue_budget_s)
        self._send(
            transfer,
            Pull(
                transfer_id=order.transfer_id,
                attempt=order.attempt,
                holder_incarnation=link.incarnation,
                held_blocks=order.held_blocks,
                block_hashes=order.block_hashes,
            ),
        )

    def _cancel(self, command: CancelPull) -> None:
        transfer = self._open.get(command.transfer_id)
        if transfer is not None:
            self._abort(transfer, "cancelled", Cancelled(command.reason))

    # ---- links ----

    def _link_ready(self, link: LinkReady) -> None:
        self._links[link.link_id] = link
        for transfer in list(self._open.values()):
            if transfer.phase is P.LINKING and self._fits(transfer, link):
                self._pull(transfer, link)

    def _link_doubted(self, link_id: int) -> None:
        self._doubted.add(link_id)
        for transfer in self._open.values():
            if transfer.link is not None and transfer.link.link_id == link_id:
                self._deadlines.set(("suspect", transfer.transfer_id, 0), self._now_s + SUSPECT_GRACE_S)

    def _link_trusted(self, link_id: int) -> None:
        self._doubted.discard(link_id)
        for transfer in list(self._open.values()):
            if transfer.link is not None and transfer.link.link_id == link_id:
                self._deadlines.drop(("suspect", transfer.transfer_id, 0))
            elif transfer.phase is P.LINKING and self._fits(transfer, self._links[link_id]):
                self._pull(transfer, self._links[link_id])

    def _link_lost(self, link_id: int, reason: str) -> None:
        self._links.pop(link_id, None)
        self._doubted.discard(link_id)
        for transfer in list(self._open.values()):
            if transfer.link is not None and transfer.link.link_id == link_id:
                self._abort(transfer, "link", PeerLost(reason), tell=False)

    # ---- messages ----

    def _from_peer(self, event: FromPeer) -> None:
        message = event.message
        if isinstance(message, Beat):
            for transfer_id, computed in message.progress:
                transfer = self._open.get(transfer_id)
                if transfer is None or transfer.phase is not P.TAKING or not self._is_of(transfer, event.link_id):
                    continue
                if computed > transfer.computed_tokens:
                    transfer.computed_tokens = computed
                    self._progress(transfer)
            return
        if not isinstance(message, Serving | SegmentReady | Complete | Gone):
            self._actions.append(ToLinks(PeerFaulty(event.link_id, f"unexpected {type(message).__name__}")))
            return
        transfer = self._open.get(message.transfer_id)
        if transfer is None or not self._is_of(transfer, event.link_id) or transfer.phase is P.DRAINING:
            self.stale_messages += 1
            return
        try:
            match message:
                case Gone(_, reason):
                    self._abort(transfer, "gone", TransferFailed(f"holder: {reason}"), tell=False)
                case Serving(_, length):
                    self._serving(transfer, length)
                case SegmentReady():
                    self._segment_ready(transfer, message)
                case Complete():
                    self._complete(transfer, message)
        except PeerFault as fault:
            self.refused["bounds"] += 1
            self._abort(transfer, "fault", TransferFailed(f"holder's fault: {fault}"))

    def _is_of(self, transfer: Transfer, link_id: int) -> bool:
        return transfer.link is not None and transfer.link.link_id == link_id

    def _serving(self, transfer: Transfer, length: int) -> None:
        if length != transfer.order.length:
            raise PeerFault(f"serves {length} tokens of {transfer.order.length}")
        if transfer.phase is P.TAKING:
            self.stale_messages += 1
            return
        self._step(transfer, S.SERVED)
        self._deadlines.drop(("queue", transfer.transfer_id, 0))
        self._progress(transfer)

    def _segment_ready(self, transfer: Transfer, message: SegmentReady) -> None:
        link = transfer.link
        assert link is not None
        if message.attempt != transfer.order.attempt or message.seq in transfer.seen:
            # Said twice: the first one is being read, or was. Releasing it would hand the buffer on under our READ.
            self.stale_messages += 1
            return
        if transfer.phase is not P.TAKING:
            raise PeerFault("announced before serving")
        if len(transfer.seen) > 8 * len(transfer.coverage) + 64:
            raise PeerFault("announced too often")
        transfer.seen.add(message.seq)
        if not 0 <= message.buffer < link.num_buffers - 1:
            raise PeerFault(f"no send buffer {message.buffer}")
        if message.payload_bytes > min(link.segment_bytes, self._section.segment_bytes):
            raise PeerFault(f"{message.payload_bytes} bytes in one segment")
        # A posted READ does not count: its note may have freed the send buffer before its end is seen here.
        if len(transfer.pending) >= link.window:
            raise PeerFault("more announced than the window")
        places = transfer.coverage.places(message.index, message.payload_bytes)
        self._step(transfer, S.PIECE)
        if not transfer.coverage.wanted(places):
            # Stored or in flight already: a stored range is never stored again.
            self._send(transfer, Release(transfer.transfer_id, message.buffer, message.buffer_gen))
            return
        transfer.coverage.take_off(places)
        transfer.pending.append(Announced(message, places))
        self._progress(transfer)
        if transfer.transfer_id not in self._turn:
            self._turn.append(transfer.transfer_id)

    def _complete(self, transfer: Transfer, message: Complete) -> None:
        last = transfer.complete
        if last is not None and message.num_segments <= last.num_segments:
            self.stale_messages += 1
            return
        num_first = 1 + len(message.more_first_tokens)
        if num_first != transfer.order.num_choices:
            raise PeerFault(f"{num_first} first tokens for {transfer.order.num_choices} choices")
        if message.ended:
            # Nothing to take, whatever was announced: the request is over on the holder's side.
            transfer.complete = message
            transfer.not_needed = True
            self._abort(transfer, None, None, tell=False)
            return
        if transfer.phase is not P.TAKING:
            raise PeerFault("complete before serving")
        if message.length != transfer.order.length:
            raise PeerFault(f"complete at {message.length} tokens of {transfer.order.length}")
        if message.num_segments < len(transfer.seen):
            raise PeerFault(f"{len(transfer.seen)} segments came, {message.num_segments} were announced")
        self._step(transfer, S.PIECE)
        if last is None:
            transfer.complete_s = self._now_s
        transfer.complete = message
        self._progress(transfer)
        # The stream is ordered: what was not announced by now will not be, unless asked for.
        missing = transfer.coverage.missing()
        if missing:
            self._ask(transfer, missing, "stall")
        else:
            self._maybe_taken(transfer)

    # ---- READs ----

    def _post_reads(self) -> None:
        """Free landing buffers go to transfers in turn, one each; announced segments wait, unread, for them."""
        passed = 0
        while self._buffers.num_free and passed < len(self._turn):
            transfer_id = self._turn.popleft()
            transfer = self._open.get(transfer_id)
            if transfer is None or not transfer.pending:
                continue
            link = transfer.link
            assert link is not None
            if not self._buffers.may_post(link.agent):
                self._turn.append(transfer_id)
                passed += 1
                continue
            passed = 0
            announced = transfer.pending.popleft()
            if transfer.pending:
                self._turn.append(transfer_id)
            message = announced.message
            landing = self._buffers.post(transfer_id, link.link_id, link.agent).index
            transfer.reading[landing] = announced
            num_bytes = HEADER_BYTES + message.payload_bytes
            self._deadlines.set(("read", transfer_id, landing), self._now_s + self._allow(link, num_bytes))
            self._actions.append(
                PostRead(
                    landing,
                    link.agent,
                    link.buffer_base + message.buffer * link.buffer_bytes,
                    num_bytes,
                    link.device,
                    pack_note(transfer_id, message.buffer, message.buffer_gen),
                )
            )

    def _allow(self, link: LinkReady, num_bytes: int) -> float:
        """How long a READ may take."""
        expected_s = num_bytes / link.bytes_per_s if link.bytes_per_s else 0.0
        return max(self._section.read_deadline_s, EXPECTED_FACTOR * expected_s)

    def _read_done(self, event: ReadDone) -> None:
        owner = self._buffers.buffers[event.landing].owner
        assert owner is not None
        self._deadlines.drop(("read", owner, event.landing))
        if self._buffers.done(event.landing) is LandingPhase.FREE:
            # HELD: nobody waits for these bytes any more.
            return
        transfer = self._open[owner]
        announced = transfer.reading.pop(event.landing)
        self._step(transfer, S.PIECE)
        if event.header != announced_header(announced.message):
            self._buffers.settle(event.landing)
            self._refuse(transfer, announced, "stale")
            return
        transfer.scattering[event.landing] = announced
        order = transfer.order
        self._actions.append(
            Scatter(event.landing, order.transfer_id, order.pages, announced.message.index, order.length)
        )

    def _read_lost(self, landing: int) -> None:
        buffer = self._buffers.buffers[landing]
        owner, agent = buffer.owner, buffer.agent
        assert owner is not None
        assert agent is not None
        waited_for = buffer.phase is LandingPhase.READING
        self._buffers.lost(landing)
        self._deadlines.drop(("read", owner, landing))
        if waited_for:
            transfer = self._open[owner]
            del transfer.reading[landing]
            self._abort(transfer, "link", PeerLost("a READ has failed"))
        self._actions.append(ToLinks(ReadFailed(agent)))

    def _scattered(self, event: Scattered) -> None:
        owner = self._buffers.buffers[event.landing].owner
        assert owner is not None
        transfer = self._open[owner]
        announced = transfer.scattering.pop(event.landing)
        self._buffers.settle(event.landing)
        self._step(transfer, S.PIECE)
        message = announced.message
        good = event.digest is not None and segment_digest(message.index, event.digest) == message.digest
        if good:
            transfer.coverage.store(announced.places, message.payload_bytes)
            transfer.num_segments += 1
            self.segments_received += 1
            self.bytes_received += message.payload_bytes
        if transfer.phase is P.DRAINING:
            self._maybe_settled(transfer)
        elif not good:
            self._refuse(transfer, announced, "digest")
        else:
            self._progress(transfer)
            self._maybe_taken(transfer)

    def _refuse(self, transfer: Transfer, announced: Announced, reason: str) -> None:
        """The landed bytes are not the announced ones: the ranges stay uncovered and are asked for again."""
        self.refused[reason] += 1
        transfer.coverage.put_back(announced.places)
        self._ask(transfer, announced.places, reason)

    def _ask(self, transfer: Transfer, places: Places, reason: str) -> None:
        ranges = transfer.coverage.ranges(places)
        while len(ranges) > MAX_MISSING_RANGES:
            # What does not fit one message is asked for when the next `Complete` has come.
            places = places[: len(places) // 2]
            ranges = transfer.coverage.ranges(places)
        if transfer.coverage.ask(places) > MAX_ASKS:
            self._abort(transfer, reason, TransferFailed(f"ranges did not arrive whole, last: {reason}"))
            return
        transfer.num_missing += sum(stop - start for start, stop in places)
        self._send(transfer, Missing(transfer.transfer_id, ranges))

    # ---- ends ----

    def _maybe_taken(self, transfer: Transfer) -> None:
        if transfer.complete is None or not transfer.coverage.full:
            return
        assert not transfer.reading
        assert not transfer.pending
        assert not transfer.scattering
        self._step(transfer, S.COVERED)
        self._send(transfer, Taken(transfer.transfer_id))
        self.transfers_taken += 1
        complete = transfer.complete
        arrived = Arrived(
            transfer.transfer_id,
            complete.first_token,
            complete.first_index,
            complete.computed_tokens,
            complete.cached_tokens,
            self._stats(transfer),
            complete.more_first_tokens,
        )
        self._forget(transfer)
        self._actions.append(Deliver(arrived))

    def _abort(self, transfer: Transfer, kind: str | None, error: HeadraceError | None, *, tell: bool = True) -> None:
        """Give up. `kind` is for the counter; the engine hears of it when no scatter writes the pages any more."""
        if transfer.phase is P.DRAINING:
            return
        self._step(transfer, S.ABORT)
        transfer.error = error
        if kind is not None:
            self.failures[kind] += 1
        if tell and transfer.link is not None:
            self._send(transfer, Cancel(transfer.transfer_id))
        for landing in list(transfer.reading):
            # Left to the reaper: its bytes may land for as long as the READ runs. Its deadline stays: only a READ that
            # is late speaks against the peer.
            self._buffers.give_up(landing, self._now_s)
        transfer.reading.clear()
        transfer.pending.clear()
        if transfer.transfer_id in self._turn:
            self._turn.remove(transfer.transfer_id)
        for key in ("link", "queue", "progress", "suspect"):
            self._deadlines.drop((key, transfer.transfer_id, 0))
        self._maybe_settled(transfer)

    def _maybe_settled(self, transfer: Transfer) -> None:
        if transfer.scattering:
            return
        self._step(transfer, S.SETTLED)
        stats = self._stats(transfer)
        self._forget(transfer)
        if transfer.not_needed:
            assert transfer.complete is not None
            complete = transfer.complete
            not_needed = NotNeeded(
                transfer.transfer_id, complete.first_token, complete.first_index, complete.more_first_tokens
            )
            self._actions.append(Deliver(not_needed))
        else:
            assert transfer.error is not None
            self._actions.append(Deliver(PullFailed(transfer.transfer_id, transfer.error, stats)))

    def _forget(self, transfer: Transfer) -> None:
        del self._open[transfer.transfer_id]
        for key in ("link", "queue", "progress", "suspect"):
            self._deadlines.drop((key, transfer.transfer_id, 0))
        self._tombstones[transfer.transfer_id] = self._now_s + self._section.tombstone_s
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def _due(self) -> None:
        for kind, transfer_id, landing in self._deadlines.pop_due(self._now_s):
            transfer = self._open.get(transfer_id)
            if kind == "read":
                buffer = self._buffers.buffers[landing]
                assert buffer.owner == transfer_id
                if buffer.phase is LandingPhase.HELD:
                    self._buffers.overdue(landing)
                    continue
            if transfer is None or transfer.phase is P.DRAINING:
                continue
            match kind:
                case "link":
                    self._abort(transfer, "link", PeerLost("no link to the holder came up"))
                case "queue":
                    self._abort(transfer, "queue", TransferFailed("the holder's queue took too long"))
                case "suspect":
                    self._abort(transfer, "link", PeerLost("the link stayed in doubt"))
                case "progress":
                    self._abort(transfer, "stall", TransferFailed("no progress"))
                case "read":
                    link = transfer.link
                    assert link is not None
                    assert landing in transfer.reading
                    # From the holder of the whole prefix this is the end; the buffer goes to the reaper.
                    self._abort(transfer, "overdue", TransferFailed("a READ is overdue"))
                    self._buffers.overdue(landing)
                    self._actions.append(ToLinks(ReadOverdue(link.link_id)))
                case _:
                    raise AssertionError(kind)
        while self._tombstones and next(iter(self._tombstones.values())) <= self._now_s:
            self._tombstones.popitem(last=False)

    def _alarm(self) -> None:
        """Said once each time half of the buffers are HELD by READs that are late."""
        num_overdue = self._buffers.num_overdue
        many = 2 * num_overdue >= len(self._buffers.buffers)
        if many and not self._alarmed:
            self._actions.append(Deliver(Quarantined(num_overdue, len(self._buffers.buffers))))
        self._alarmed = many

    # ---- small ----

    def _progress(self, transfer: Transfer) -> None:
        """Something came on: the watchdog starts anew."""
        link = transfer.link
        assert link is not None
        section = self._section
        expected_s = section.segment_bytes / link.bytes_per_s if link.bytes_per_s else 0.0
        moves = transfer.pending or transfer.reading or transfer.scattering or transfer.complete is not None
        # With nothing to move the holder computes, and one step of a long prompt may take long; its beats, or their
        # absence, say sooner than this whether it lives.
        patience_s = section.progress_deadline_s if moves else section.step_deadline_s
        allow_s = max(patience_s, EXPECTED_FACTOR * expected_s)
        self._deadlines.set(("progress", transfer.transfer_id, 0), self._now_s + allow_s)

    def _stats(self, transfer: Transfer) -> TransferStats:
        return TransferStats(
            payload_bytes=transfer.coverage.stored_bytes,
            num_segments=transfer.num_segments,
            num_missing=transfer.num_missing,
            seconds=self._now_s - transfer.opened_s,
            tail_seconds=self._now_s - transfer.complete_s if transfer.complete is not None else 0.0,
            transport=transfer.link.transport if transfer.link is not None else "",
        )

    def _step(self, transfer: Transfer, step: TakerStep) -> None:
        transfer.phase = NEXT[transfer.phase][step]

    def _send(self, transfer: Transfer, message: Pull | Release | Missing | Taken | Cancel) -> None:
        assert transfer.link is not None
        self._actions.append(Send(transfer.link.link_id, message))
