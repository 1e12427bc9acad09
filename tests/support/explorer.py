"""Every order in which a few transfers between two or three workers can go, with a few faults: explicit-state search.

The deciders are the real ones, `Holder` and `Taker` with their buffers; around them stands as little as a world needs:
streams that are queues, READs that land when they like, copies that run when they like, an engine of a few steps. Time
stands still: which deadline passes, and when, is one more choice, so every order of timers is looked at, also those
that no choice of durations would give. Links are up from the start.

A state is (local states of the nodes, everything between them), all small integers and tuples: a node's local state is
pickled once and known by a number, and what an event does to it is computed once. The search goes depth first, so that
a state which leads back to itself shows as well: a world without an end. Where nothing but time can move anything, each
deadline may pass; where there is none, all must have ended, and everything be free.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.config.tree import TransferSection
from headrace.core.blocks import BLOCK_TOKENS
from headrace.core.errors import LayoutError
from headrace.core.ids import Incarnation, TransferId, WorkerId
from headrace.core.peer import Cancel, Gone, Missing, Release
from headrace.core.segments import RangeKind, SegmentRange
from headrace.transfer.api import (
    Arrived,
    BlocksFinal,
    CancelPull,
    Ended,
    LinkDirection,
    NotNeeded,
    Offer,
    OpenPull,
    Outcome,
    PrefillDone,
    PullFailed,
    Wanted,
    Withdraw,
)
from headrace.transfer.buffers import LandingBuffers, LandingPhase, SendBuffers, SendPhase
from headrace.transfer.decisions import (
    Announce,
    Deliver,
    FromPeer,
    Gather,
    Gathered,
    LinkDoubted,
    LinkLost,
    LinkReady,
    NoteIn,
    PeerFaulty,
    PostRead,
    ReadDone,
    ReadFailed,
    ReadLost,
    ReadOverdue,
    Scatter,
    Scattered,
    Send,
    Tick,
    ToLinks,
)
from headrace.transfer.header import unpack_note
from headrace.transfer.holder import FINAL, Holder
from headrace.transfer.taker import Taker, TakerPhase

POISON, CORRUPT = 0, -1
LOST = "lost"
"""In a queue: the stream ends here. Its number is 0."""
BUFFER_BYTES = 128
UNIT_BYTES = 8


class Broken(AssertionError):
    """A rule does not hold. The text starts with its number and ends with the choices that led there."""


@dataclass(frozen=True)
class TinyGeometry:
    """One layer; whole blocks, then one row of state as the tail; a segment is one of these."""

    def payload_bytes(self, ranges: Sequence[SegmentRange], length: int) -> int:
        for piece in ranges:
            end = length // BLOCK_TOKENS if piece.kind is RangeKind.HISTORY else length
            if piece.layer_first or piece.layer_count != 1 or not 0 <= piece.first < piece.first + piece.count <= end:
                raise LayoutError(f"no such range: {piece}")
        return sum(UNIT_BYTES * (piece.count if piece.kind is RangeKind.HISTORY else 1) for piece in ranges)

    def history_segments(self, first_block: int, num_blocks: int, max_bytes: int) -> list[tuple[SegmentRange, ...]]:
        return [
            (SegmentRange(RangeKind.HISTORY, 0, 1, block, 1),) for block in range(first_block, first_block + num_blocks)
        ]

    def tail_segments(self, length: int, max_bytes: int) -> list[tuple[SegmentRange, ...]]:
        return [(SegmentRange(RangeKind.STATE, 0, 1, length - 1, 1),)]

    def expected(self, length: int, held_blocks: int) -> tuple[SegmentRange, ...]:
        blocks = length // BLOCK_TOKENS - held_blocks
        history = (SegmentRange(RangeKind.HISTORY, 0, 1, held_blocks, blocks),) if blocks else ()
        return (*history, SegmentRange(RangeKind.STATE, 0, 1, length - 1, 1))

    def split(self, ranges: Sequence[SegmentRange]) -> frozenset[SegmentRange]:
        return frozenset(
            SegmentRange(piece.kind, 0, 1, unit, 1)
            for piece in ranges
            for unit in range(piece.first, piece.first + piece.count)
        )


GEOMETRY = TinyGeometry()


@dataclass(frozen=True)
class Plan:
    """One transfer of a scenario."""

    holder: int
    taker: int
    num_blocks: int = 1
    ended: bool = False
    """The first token ends the request."""

    @property
    def num_cells(self) -> int:
        return self.num_blocks + 1

    @property
    def length(self) -> int:
        return self.num_blocks * BLOCK_TOKENS


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What the search is over."""

    plans: tuple[Plan, ...]
    num_nodes: int = 2
    num_send: int = 1
    num_landing: int = 1
    window: int = 1
    begun: bool = False
    """The offers and pulls have been made: their orders are for smaller scenarios to look at."""
    max_faults: int = 1
    faults: tuple[str, ...] = ("message", "note", "read", "cancel", "withdraw", "break", "expire")


class Untimed:
    """In place of a `DeadlineHeap`: knows which deadlines there are; one passes when the search says so."""

    def __init__(self) -> None:
        self.keys: dict[object, None] = {}
        self.passing: object = None

    def __len__(self) -> int:
        return len(self.keys)

    def __contains__(self, key: object) -> bool:
        return key in self.keys

    def set(self, key: object, due_s: float) -> None:
        self.keys[key] = None

    def drop(self, key: object) -> None:
        self.keys.pop(key, None)

    def next_s(self) -> None:
        return None

    def pop_due(self, now_s: float) -> Iterator[object]:
        key, self.passing = self.passing, None
        if key is not None and key in self.keys:
            del self.keys[key]
            yield key


CONSTANT = {"_geometry", "_section", "_incarnation", "_buffers"}
COUNTERS = ("stale_messages", "bytes_sent", "segments_sent", "transfers_served", "bytes_received", "segments_received")


class Local:
    """Holder and taker of one node, thawed."""

    def __init__(self, scenario: Scenario) -> None:
        section = TransferSection(
            driver="memory",
            segment_bytes=UNIT_BYTES,
            num_send_buffers=scenario.num_send,
            num_landing_buffers=scenario.num_landing,
            window=scenario.window,
        )
        self.send = SendBuffers(scenario.num_send, scenario.num_send)
        self.landing = LandingBuffers(scenario.num_landing, scenario.num_landing, scenario.num_landing)
        self.holder = Holder(incarnation=Incarnation(1), geometry=GEOMETRY, buffers=self.send, section=section)
        self.taker = Taker(geometry=GEOMETRY, buffers=self.landing, section=section)
        self.holder._deadlines = Untimed()  # type: ignore[assignment]
        self.taker._deadlines = Untimed()  # type: ignore[assignment]

    def freeze(self) -> bytes:
        """By value: equal states give equal bytes, but for the order of dicts where that may matter."""
        for decider in (self.holder, self.taker):
            decider._tombstones = OrderedDict(sorted(decider._tombstones.items()))
            decider._deadlines.keys = dict.fromkeys(sorted(decider._deadlines.keys))  # type: ignore[attr-defined]
            decider._actions = []
            decider.failures.clear()
            for name in COUNTERS:
                if hasattr(decider, name):
                    setattr(decider, name, 0)
        self.taker.refused.clear()
        parts = [
            {name: value for name, value in vars(one).items() if name not in CONSTANT}
            for one in (self.holder, self.taker, self.send, self.landing)
        ]
        out = io.BytesIO()
        pickler = pickle.Pickler(out, 5)
        pickler.fast = True
        pickler.dump(parts)
        return out.getvalue()

    def thaw(self, frozen: bytes) -> None:
        for one, values in zip((self.holder, self.taker, self.send, self.landing), pickle.loads(frozen), strict=True):
            kept = {name: value for name, value in vars(one).items() if name in CONSTANT}
            vars(one).clear()
            vars(one).update(kept, **values)


@dataclass(frozen=True)
class Info:
    """What the world must know of a local state."""

    landing: tuple[LandingPhase, ...]
    send: tuple[tuple[SendPhase, int, TransferId | None], ...]
    ended: frozenset[TransferId]
    """Subscriptions that wait for their last gather only."""
    open: frozenset[TransferId]
    deadlines: tuple[tuple[str, object], ...]
    idle: bool
    num_reads: int


class Read(NamedTuple):
    """A READ between posting and end. `mask`: 1 the header has landed, 2 the payload."""

    node: int
    landing: int
    peer: int
    buffer: int
    note: bytes
    mask: int = 0
    late: bool = False
    """Its error was told; what has not landed yet still may."""


Memory = tuple[bytes, tuple[int, ...]] | None


class Travel(NamedTuple):
    """One transfer, in the world's eyes."""

    target: tuple[int, ...]
    offered: bool = False
    opened: bool = False
    wanted: bool = False
    computed: int = 0
    """Blocks; one more when the prefill is done."""
    cancelled: bool = False
    withdrawn: bool = False
    holder_end: str = ""
    taker_end: str = ""


@dataclass
class Work:
    """A global state, thawed."""

    nodes: list[int]
    streams: list[tuple[bool, tuple[int, ...], tuple[int, ...]]]
    """By pair of taker and holder: open, what travels to the holder, what travels to the taker. Messages and copies
    stand here as numbers: a state is hashed often."""
    notes: list[tuple[int, bytes]]
    reads: list[Read]
    copies: list[tuple[int, ...]]
    send: list[tuple[Memory, ...]]
    landing: list[tuple[Memory, ...]]
    travels: list[Travel]
    faults_left: int


State = tuple[object, ...]
Choice = tuple[object, ...]


@dataclass
class Explorer:
    """The search over one scenario."""

    scenario: Scenario
    max_states: int | None = None
    num_states: int = 0
    num_choices: int = 0
    outcomes: set[tuple[tuple[str, str], ...]] = field(default_factory=set)
    """How the transfers ended, at holder and taker, in the worlds that ended."""

    def __post_init__(self) -> None:
        scenario = self.scenario
        self._bench = Local(scenario)
        self._locals: list[bytes] = []
        self._numbers: dict[bytes, int] = {}
        self._infos: list[Info] = []
        self._moves: dict[tuple[int, str, object, object], tuple[int, tuple[object, ...], int]] = {}
        self._ids = [TransferId(bytes([number + 1]) * 16) for number in range(len(scenario.plans))]
        self._pairs = sorted({(plan.taker, plan.holder) for plan in scenario.plans})
        self._things: list[object] = [LOST]
        self._thing_numbers: dict[object, int] = {LOST: 0}

    # ---- nodes ----

    def _number(self, local: Local) -> int:
        frozen = local.freeze()
        number = self._numbers.get(frozen)
        if number is None:
            number = self._numbers[frozen] = len(self._locals)
            self._locals.append(frozen)
            self._infos.append(self._look(local))
        return number

    def _look(self, local: Local) -> Info:
        """Each local state is audited once, which is as good as after each event."""
        wrong = local.holder.audit() + local.taker.audit()
        if wrong:
            raise Broken(f"I8: {'; '.join(wrong)}")
        phases = local.holder.phases()
        idle = not phases and not local.taker.phases()
        deadlines = [("holder", key) for key in local.holder._deadlines.keys]  # type: ignore[attr-defined]
        deadlines += [("taker", key) for key in local.taker._deadlines.keys]  # type: ignore[attr-defined]
        held = {b.index for b in local.landing.buffers if b.phase is LandingPhase.HELD}
        # A READ that nobody waits for keeps its deadline: it tells when its buffer counts as lost.
        of_nothing = [key for side, key in deadlines if side == "holder" or key[0] != "read" or key[2] not in held]
        if idle and of_nothing:
            raise Broken(f"I8: deadlines of nothing: {of_nothing}")
        return Info(
            landing=tuple(buffer.phase for buffer in local.landing.buffers),
            send=tuple((buffer.phase, buffer.generation, buffer.owner) for buffer in local.send.buffers),
            ended=frozenset(transfer_id for transfer_id, phase in phases.items() if phase in FINAL),
            open=frozenset(phases),
            deadlines=tuple(deadlines),
            num_reads=sum(
                buffer.phase in (LandingPhase.READING, LandingPhase.HELD) for buffer in local.landing.buffers
            ),
            idle=idle
            and all(buffer.phase is LandingPhase.FREE for buffer in local.landing.buffers)
            and all(buffer.phase is SendPhase.FREE for buffer in local.send.buffers),
        )

    def _move(
        self, number: int, side: str, event: object, passing: object = None
    ) -> tuple[int, tuple[object, ...], int]:
        """What an event does to a local state: the next one, the actions, how many segments were stored by it."""
        key = (number, side, event, passing)
        found = self._moves.get(key)
        if found is None:
            local = self._bench
            local.thaw(self._locals[number])
            decider = local.holder if side == "holder" else local.taker
            decider._deadlines.passing = passing  # type: ignore[attr-defined]
            actions = tuple(decider.handle(event, 0.0))  # type: ignore[arg-type]
            stored = local.taker.segments_received
            if isinstance(event, LinkLost) and self._goes_on(local, side, event.link_id):
                raise Broken("I4: a transfer goes on over a stream that is broken")
            after = self._number(local)
            self._check_frees(self._infos[number], self._infos[after], event)
            found = self._moves[key] = (after, actions, stored)
        return found

    @staticmethod
    def _goes_on(local: Local, side: str, link_id: int) -> bool:
        if side == "holder":
            return any(one.link_id == link_id and one.phase not in FINAL for one in local.holder._open.values())
        return any(
            one.link is not None and one.link.link_id == link_id and one.phase is not TakerPhase.DRAINING
            for one in local.taker._open.values()
        )

    def _check_frees(self, before: Info, after: Info, event: object) -> None:
        """A send buffer leaves ANNOUNCED only for its own filling's reader, or with its subscription."""
        message = event.message if isinstance(event, FromPeer) else event
        for index, (phase, generation, owner) in enumerate(before.send):
            if phase is not SendPhase.ANNOUNCED or after.send[index] == (phase, generation, owner):
                continue
            if owner not in after.open or owner in after.ended:
                continue
            if isinstance(message, NoteIn | Release) and (message.buffer, message.buffer_gen) == (index, generation):
                continue
            raise Broken("I8: a send buffer was freed by what was said of another filling")

    def _intern(self, thing: object) -> int:
        number = self._thing_numbers.get(thing)
        if number is None:
            number = self._thing_numbers[thing] = len(self._things)
            self._things.append(thing)
        return number

    # ---- worlds ----

    def first(self) -> State:
        scenario = self.scenario
        empty = self._number(Local(scenario))
        nodes = [empty] * scenario.num_nodes
        for number, (taker, holder) in enumerate(self._pairs):
            ready = LinkReady(
                link_id=number,
                direction=LinkDirection.OUT,
                peer=f"n{holder}",
                incarnation=1,
                window=scenario.window,
                segment_bytes=UNIT_BYTES,
                agent=f"n{holder}",
                buffer_base=BUFFER_BYTES * 1000,
                buffer_bytes=BUFFER_BYTES,
                num_buffers=scenario.num_send + 1,
            )
            nodes[taker] = self._move(nodes[taker], "taker", ready)[0]
            back = dataclasses.replace(ready, direction=LinkDirection.IN, peer=f"n{taker}")
            nodes[holder] = self._move(nodes[holder], "holder", back)[0]
        state = self._freeze(
            Work(
                nodes=nodes,
                streams=[(True, (), ())] * len(self._pairs),
                notes=[],
                reads=[],
                copies=[()] * scenario.num_nodes,
                send=[(None,) * scenario.num_send] * scenario.num_nodes,
                landing=[(None,) * scenario.num_landing] * scenario.num_nodes,
                travels=[Travel((POISON,) * plan.num_cells) for plan in scenario.plans],
                faults_left=scenario.max_faults,
            )
        )
        if scenario.begun:
            for number in range(len(scenario.plans)):
                state = self.take(self.take(state, ("offer", number)), ("open", number))
        return state

    def _freeze(self, work: Work) -> State:
        """What nobody can read any more is forgotten, what has no order is sorted."""
        reads = sorted(work.reads)
        wanted = {(read.peer, read.buffer) for read in reads}
        send = tuple(
            tuple(
                memory
                if (node, index) in wanted or self._infos[work.nodes[node]].send[index][0] is not SendPhase.FREE
                else None
                for index, memory in enumerate(memories)
            )
            for node, memories in enumerate(work.send)
        )
        landing = tuple(
            tuple(
                None if self._infos[work.nodes[node]].landing[index] is LandingPhase.FREE else memory
                for index, memory in enumerate(memories)
            )
            for node, memories in enumerate(work.landing)
        )
        return (
            tuple(work.nodes),
            tuple(work.streams),
            tuple(sorted(work.notes)),
            tuple(reads),
            tuple(work.copies),
            send,
            landing,
            tuple(work.travels),
            work.faults_left,
        )

    def _thaw(self, state: State) -> Work:
        *lists, faults_left = state
        return Work(*(list(one) for one in lists), faults_left)  # type: ignore[arg-type, call-overload]

    # ---- choices ----

    def choices(self, state: State) -> list[Choice]:
        """All that may happen next. With nothing else to happen, time passes."""
        work = self._thaw(state)
        free = list(self._plain(work))
        if work.faults_left:
            free += self._faulty(work)
        if not any(choice[0] != "fault" for choice in free):
            for node, number in enumerate(work.nodes):
                free += [("expire", node, side, key) for side, key in self._infos[number].deadlines]
        return free

    def _plain(self, work: Work) -> Iterator[Choice]:
        for number, travel in enumerate(work.travels):
            if not travel.offered:
                yield ("offer", number)
            if not travel.opened:
                yield ("open", number)
            if travel.wanted and not travel.holder_end and travel.computed < self.scenario.plans[number].num_cells:
                yield ("compute", number)
        for pair, (_, to_holder, to_taker) in enumerate(work.streams):
            if to_holder:
                yield ("deliver", pair, 0)
            if to_taker:
                yield ("deliver", pair, 1)
        for number in range(len(work.notes)):
            yield ("note", number)
        for number in range(len(work.reads)):
            yield ("land", number, 0)
        for node, copies in enumerate(work.copies):
            if copies:
                yield ("copy", node)

    def _faulty(self, work: Work) -> Iterator[Choice]:
        kinds = self.scenario.faults
        for pair, (is_open, *queues) in enumerate(work.streams):
            for way, queue in enumerate(queues):
                if "message" in kinds and queue and queue[0]:
                    yield ("fault", "drop", pair, way)
                    yield ("fault", "double", pair, way)
                    if len(queue) > 1 and queue[1] and queue[0] != queue[1]:
                        yield ("fault", "swap", pair, way)
            if "break" in kinds and is_open:
                yield ("fault", "break", pair)
        if "note" in kinds:
            for number in range(len(work.notes)):
                yield ("fault", "note dropped", number)
                yield ("fault", "note doubled", number)
        if "read" in kinds:
            for number, read in enumerate(work.reads):
                if read.late:
                    continue
                for early in (1, 2, 3):
                    if not read.mask & early:
                        yield ("fault", "lands early", number, early)
                yield ("fault", "corrupt", number)
                yield ("fault", "fails", number, False)
                yield ("fault", "fails", number, True)
        for number, travel in enumerate(work.travels):
            if "cancel" in kinds and travel.opened and not travel.taker_end and not travel.cancelled:
                yield ("fault", "cancel", number)
            if "withdraw" in kinds and travel.offered and not travel.holder_end and not travel.withdrawn:
                yield ("fault", "withdraw", number)
        if "expire" in kinds:
            for node, local in enumerate(work.nodes):
                for side, key in self._infos[local].deadlines:
                    yield ("fault", "expire", node, side, key)

    def take(self, state: State, choice: Choice) -> State:
        """The state after a choice."""
        work = self._thaw(state)
        if choice[0] == "fault":
            work.faults_left -= 1
            choice = choice[1:]
        match choice:
            case ("offer", number):
                self._change(work, number, offered=True)
                plan = self.scenario.plans[number]
                offer = Offer(transfer_id=self._ids[number], attempt=1, length=plan.length, pages=number)
                self._tell(work, plan.holder, "holder", offer)
            case ("open", number):
                self._change(work, number, opened=True)
                plan = self.scenario.plans[number]
                order = OpenPull(
                    transfer_id=self._ids[number],
                    attempt=1,
                    holder=WorkerId(f"n{plan.holder}"),
                    holder_incarnation=None,
                    pages=number,
                    length=plan.length,
                )
                self._tell(work, plan.taker, "taker", order)
            case ("compute", number):
                self._compute(work, number)
            case ("deliver", pair, way):
                self._deliver(work, pair, way, keep=False)
            case ("double", pair, way):
                self._deliver(work, pair, way, keep=True)
            case ("drop", pair, way):
                self._queue(work, pair, way, work.streams[pair][1 + way][1:])
            case ("swap", pair, way):
                first, second, *rest = work.streams[pair][1 + way]
                self._queue(work, pair, way, (second, first, *rest))
            case ("break", pair):
                self._break(work, pair)
            case ("note", number):
                self._note(work, work.notes.pop(number))
            case ("note dropped", number):
                work.notes.pop(number)
            case ("note doubled", number):
                self._note(work, work.notes[number])
            case ("land", number, _):
                self._land(work, work.reads[number], 3, corrupt=False)
            case ("corrupt", number):
                self._land(work, work.reads[number], 3, corrupt=True)
            case ("lands early", number, mask):
                work.reads[number] = self._bytes(work, work.reads[number], mask, corrupt=False)
            case ("fails", number, late):
                read = work.reads.pop(number)
                if late:
                    work.reads.append(read._replace(late=True))
                self._tell(work, read.node, "taker", ReadLost(read.landing))
            case ("cancel", number):
                self._change(work, number, cancelled=True)
                self._tell(work, self.scenario.plans[number].taker, "taker", CancelPull(self._ids[number]))
            case ("withdraw", number):
                self._change(work, number, withdrawn=True)
                self._tell(work, self.scenario.plans[number].holder, "holder", Withdraw(self._ids[number], "aborted"))
            case ("expire", node, side, key):
                self._tell(work, node, side, Tick(), passing=key)
            case ("copy", node):
                self._copy(work, node)
            case _:
                raise AssertionError(choice)
        running = [0] * len(work.nodes)
        for read in work.reads:
            running[read.node] += not read.late
        if running != [self._infos[number].num_reads for number in work.nodes]:
            raise Broken(f"I1: {running} READs run by node, and other numbers of buffers are being read into")
        for plan, travel, transfer_id in zip(self.scenario.plans, work.travels, self._ids, strict=True):
            info = self._infos[work.nodes[plan.holder]]
            if travel.holder_end and transfer_id in info.open - info.ended:
                raise Broken("I5: a transfer that has ended lives again")
        return self._freeze(work)

    # ---- what happens ----

    def _change(self, work: Work, number: int, **changes: object) -> None:
        work.travels[number] = work.travels[number]._replace(**changes)

    def _queue(self, work: Work, pair: int, way: int, queue: Sequence[int]) -> None:
        is_open, *queues = work.streams[pair]
        queues[way] = tuple(queue)
        work.streams[pair] = (is_open, queues[0], queues[1])

    def _deliver(self, work: Work, pair: int, way: int, *, keep: bool) -> None:
        queue = work.streams[pair][1 + way]
        if not keep:
            self._queue(work, pair, way, queue[1:])
        taker, holder = self._pairs[pair]
        message = self._things[queue[0]]
        event = LinkLost(pair, "broken") if message is LOST else FromPeer(pair, message)  # type: ignore[arg-type]
        self._tell(work, *((taker, "taker") if way else (holder, "holder")), event)

    def _break(self, work: Work, pair: int) -> None:
        if work.streams[pair][0]:
            work.streams[pair] = (False, (0,), (0,))

    def _note(self, work: Work, note: tuple[int, bytes]) -> None:
        parts = unpack_note(note[1])
        assert parts is not None
        self._tell(work, note[0], "holder", NoteIn(*parts))

    def _compute(self, work: Work, number: int) -> None:
        plan = self.scenario.plans[number]
        computed = work.travels[number].computed + 1
        self._change(work, number, computed=computed)
        news: BlocksFinal | PrefillDone
        if computed <= plan.num_blocks:
            news = BlocksFinal(transfer_id=self._ids[number], num_blocks=computed, pages=number)
        else:
            news = PrefillDone(
                transfer_id=self._ids[number],
                pages=number,
                first_token=number,
                first_index=0,
                computed=plan.length,
                cached=0,
                ended=plan.ended,
            )
        self._tell(work, plan.holder, "holder", news)

    def _bytes(self, work: Work, read: Read, mask: int, *, corrupt: bool) -> Read:
        """Bytes of a READ land."""
        phase = self._infos[work.nodes[read.node]].landing[read.landing]
        if not read.late and phase not in (LandingPhase.READING, LandingPhase.HELD):
            raise Broken(f"I1: bytes land in a buffer that is {phase.value}")
        source = work.send[read.peer][read.buffer] or (b"", (POISON,))
        memories = list(work.landing[read.node])
        header, payload = memories[read.landing] or (b"", (POISON,))
        if mask & ~read.mask & 1:
            header = source[0]
        if mask & ~read.mask & 2:
            payload = source[1]
        memories[read.landing] = (header, (CORRUPT,) if corrupt else payload)
        work.landing[read.node] = tuple(memories)
        return read._replace(mask=read.mask | mask)

    def _land(self, work: Work, read: Read, mask: int, *, corrupt: bool) -> None:
        """The rest lands and the READ ends."""
        work.reads.remove(read)
        self._bytes(work, read, mask, corrupt=corrupt)
        if read.late:
            return
        memory = work.landing[read.node][read.landing]
        assert memory is not None
        work.notes.append((read.peer, read.note))
        self._tell(work, read.node, "taker", ReadDone(read.landing, memory[0]))

    def _cell(self, piece: SegmentRange, plan: Plan) -> int:
        return piece.first if piece.kind is RangeKind.HISTORY else plan.num_blocks

    def _copy(self, work: Work, node: int) -> None:
        first, *rest = work.copies[node]
        work.copies[node] = tuple(rest)
        copy = self._things[first]
        assert isinstance(copy, Gather | Scatter)
        number = self._ids.index(copy.transfer_id)
        plan, travel = self.scenario.plans[number], work.travels[number]
        cells = [self._cell(piece, plan) for piece in sorted(GEOMETRY.split(copy.ranges))]
        if isinstance(copy, Gather):
            if travel.holder_end:
                raise Broken("I8: a gather reads pages that were let go of")
            if any(cell >= travel.computed for cell in cells):
                raise Broken("I2: a gather reads what is not final")
            payload = tuple(self._truth(number, cell) for cell in cells)
            memories = list(work.send[node])
            memories[copy.buffer] = ((memories[copy.buffer] or (b"", ()))[0], payload)
            work.send[node] = tuple(memories)
            self._tell(work, node, "holder", Gathered(copy.buffer, copy.buffer_gen, digest(payload)))
            return
        if travel.taker_end:
            raise Broken("I8: a scatter writes pages that were let go of")
        memory = work.landing[node][copy.landing]
        assert memory is not None
        payload = memory[1]
        target = list(travel.target)
        for cell, value in zip(cells, payload, strict=False):
            target[cell] = value
        self._change(work, number, target=tuple(target))
        stored = self._tell(work, node, "taker", Scattered(copy.landing, digest(payload)))
        if stored and any(target[cell] != self._truth(number, cell) for cell in cells):
            raise Broken("I2: bytes were taken for good that are not the sequence's")

    @staticmethod
    def _truth(number: int, cell: int) -> int:
        return 16 * (number + 1) + cell

    def _tell(self, work: Work, node: int, side: str, event: object, passing: object = None) -> int:
        """An event to a node, and all that follows from it at once; how many segments were stored by it."""
        work.nodes[node], actions, stored = self._move(work.nodes[node], side, event, passing)
        for action in actions:
            match action:
                case Send(pair, message):
                    self._send(work, node, side, pair, message)
                case Announce(pair, header, ready):
                    memories = list(work.send[node])
                    memories[ready.buffer] = (header, (memories[ready.buffer] or (b"", ()))[1])
                    work.send[node] = tuple(memories)
                    self._send(work, node, side, pair, ready)
                case Gather() | Scatter():
                    work.copies[node] = (*work.copies[node], self._intern(action))
                case PostRead():
                    buffer, offset = divmod(action.remote - BUFFER_BYTES * 1000, BUFFER_BYTES)
                    if offset or not 0 <= buffer < self.scenario.num_send:
                        raise Broken("I10: a READ was asked for outside of what the holder registered")
                    work.reads.append(Read(node, action.landing, int(action.agent[1:]), buffer, action.note))
                case Deliver(told):
                    self._heard(work, told)
                case ToLinks(PeerFaulty(pair)):
                    self._break(work, pair)
                case ToLinks(ReadFailed(agent)):
                    self._break(work, self._pairs.index((node, int(agent[1:]))))
                case ToLinks(ReadOverdue(pair)):
                    self._tell(work, node, "taker", LinkDoubted(pair))
                case _:
                    raise AssertionError(action)
        return stored

    def _send(self, work: Work, node: int, side: str, pair: int, message: object) -> None:
        healthy = work.faults_left == self.scenario.max_faults and not any(plan.ended for plan in self.scenario.plans)
        if healthy and isinstance(message, Cancel | Gone | Missing | Release):
            raise Broken(f"I4: {type(message).__name__}, though nothing has gone wrong")
        is_open, *queues = work.streams[pair]
        if is_open:
            way = 0 if side == "taker" else 1
            self._queue(work, pair, way, (*queues[way], self._intern(message)))

    def _heard(self, work: Work, event: object) -> None:
        match event:
            case Wanted(transfer_id):
                number = self._ids.index(transfer_id)
                if work.travels[number].wanted:
                    raise Broken("I3: computing was asked for twice")
                self._change(work, number, wanted=True)
            case Ended(transfer_id, outcome):
                number = self._ids.index(transfer_id)
                travel = work.travels[number]
                if travel.holder_end:
                    raise Broken("I3: the holder ended a transfer twice")
                if outcome is Outcome.TAKEN and travel.taker_end != "Arrived":
                    raise Broken("I3: the holder says taken, the taker does not")
                self._change(work, number, holder_end=outcome.value)
            case Arrived(transfer_id) | NotNeeded(transfer_id) | PullFailed(transfer_id):
                number = self._ids.index(transfer_id)
                travel, plan = work.travels[number], self.scenario.plans[number]
                if travel.taker_end:
                    raise Broken("I3: the taker ended a transfer twice")
                if not isinstance(event, PullFailed):
                    if travel.computed != plan.num_cells or plan.ended != isinstance(event, NotNeeded):
                        raise Broken("I3: the outcome is not what the prefill came to")
                    if event.first_token != number:
                        raise Broken("I7: the first token is not the one that was sampled")
                if isinstance(event, Arrived):
                    if travel.cancelled:
                        raise Broken("I3: admitted after it was cancelled")
                    if travel.target != tuple(self._truth(number, cell) for cell in range(plan.num_cells)):
                        raise Broken("I2: admitted pages differ from the truth")
                self._change(work, number, taker_end=type(event).__name__)
            case _:
                # That half of the landing buffers are HELD is no news among two of them.
                pass

    # ---- the search ----

    def run(self) -> None:
        """Look at every state. Raises `Broken`."""
        first = self.first()
        done: dict[State, bool] = {first: False}
        path: list[Choice] = []
        stack: list[tuple[State, Iterator[Choice]]] = [(first, iter(self.choices(first)))]
        try:
            while stack:
                state, left = stack[-1]
                choice = next(left, None)
                if choice is None:
                    done[state] = True
                    stack.pop()
                    if path:
                        path.pop()
                    continue
                path.append(choice)
                self.num_choices += 1
                after = self.take(state, choice)
                known = done.get(after)
                if known is None:
                    if self.max_states is not None and len(done) >= self.max_states:
                        path.pop()
                        continue
                    choices = self.choices(after)
                    if not choices:
                        self._check_end(self._thaw(after))
                    done[after] = False
                    stack.append((after, iter(choices)))
                    continue
                if not known:
                    raise Broken("I4: a state leads back to itself: nothing need ever end")
                path.pop()
        except AssertionError as error:
            error.add_note("after " + " | ".join(" ".join(map(str, choice)) for choice in path))
            raise
        finally:
            self.num_states = len(done)

    def _check_end(self, work: Work) -> None:
        """Nothing can happen any more."""
        for travel in work.travels:
            if not travel.taker_end or not travel.holder_end:
                raise Broken("I4: nothing will happen any more, and a transfer has not ended")
        for number in work.nodes:
            if not self._infos[number].idle:
                raise Broken("I8: all has ended, and something is not free")
        self.outcomes.add(tuple((travel.holder_end, travel.taker_end) for travel in work.travels))


def digest(payload: tuple[int, ...]) -> int:
    """Of bytes that are only numbers here."""
    return zlib.crc32(repr(payload).encode())
