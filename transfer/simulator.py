"""Whole transfers between simulated workers on simulated time, with faults from one seed and every rule checked.

Each worker is a `TransferNode` with a make-believe engine: pages that are filled chunk by chunk, poisoned when they are
let go of, compared with the truth when they are admitted. Streams delay, lose, double, swap and mangle messages, and
break; workers stop, resume, die and come back; READs do what `memory_driver` can do. `check` runs after every event and
raises `Broken` with the rule's number; the same seed does the same again.

What stands for each rule:

- I1: each piece of a READ lands inside one landing buffer of its reader, that of its handle, READING or HELD.
- I2: a gather reads final bytes only; what a scatter stored and a taker believed is the truth, segment by segment; so
  is what is admitted; pages stay as they were at their transfer's end; layouts that differ exchange nothing.
- I3: each end hears one outcome; the holder says taken only after the taker; who was cancelled is not admitted; the
  prompt is computed once.
- I4: a phase that waits has its deadline (`audit`), none is due for ever, without faults all ends in bounded time.
- I5: an id that was used is refused for good, one in use stays with its transfer.
- I6: a taker that expects another life of its holder takes nothing; no peer has more buffers than its share (`audit`).
- I7: a failure names its reason, a success brings every first token as it was sampled.
- I8: owners, counters, free lists, handles, agents add up (`audit`); a send buffer is freed by its own filling's reader
  or with its subscription; no copy touches pages that were let go of; at the end everything is free.
- I9: nobody drives a node but its driver and its deadlines: engines here are slow, late and stopped. That blocks flow
  on while an engine says nothing is a test of its own.
- I10: windows and shares hold (`audit`) whatever a mangled message says; no READ is asked for outside of what was
  registered; what a mangled index names is never written.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..config.tree import TransferSection
from ..core.blocks import BLOCK_TOKENS
from ..core.clock import ManualClock
from ..core.errors import HeadraceError
from ..core.ids import Incarnation, TransferId, WorkerId
from ..core.peer import HOLDER_MESSAGES, TAKER_MESSAGES, PeerMessage, Release, Taken
from ..core.segments import RangeKind, SegmentRange
from .api import (
    Arrived,
    BlocksFinal,
    CancelPull,
    CloseLink,
    Command,
    Dial,
    Ended,
    LinkClosed,
    LinkDirection,
    LinkMessage,
    LinkOpened,
    NotNeeded,
    Offer,
    OpenPull,
    Outcome,
    PeerForgotten,
    PeerFound,
    PrefillDone,
    PullFailed,
    TransferEvent,
    Wanted,
    Withdraw,
)
from .buffers import BufferMemory, LandingPhase, SendPhase
from .driver import ReadHandle
from .header import unpack_note
from .holder import FINAL as HOLDER_FINAL
from .holder import HolderPhase
from .memory_driver import MemoryDriver, MemoryFaults, MemoryNetwork
from .node import Copy, TransferNode
from .plain_cache import PlainGeometry, PlainMover, PlainPages

POISON = 0xFF
MAX_TURNS = 1000
"""Turns without any time passing; a healthy world needs a few."""
WHOLE_CHECK = 64
"""How many checks to one that looks at every node, touched or not."""


class Broken(AssertionError):
    """A rule of the design does not hold. The text starts with its number."""


@dataclass(frozen=True, kw_only=True)
class WorldFaults:
    """Probabilities are per message, per copy, per transfer or per second of a worker, as named."""

    reads: MemoryFaults = field(default_factory=MemoryFaults)
    message_s: tuple[float, float] = (0.0005, 0.002)
    message_lost: float = 0.0
    message_doubled: float = 0.0
    message_swapped: float = 0.0
    message_mangled: float = 0.0
    message_misled: float = 0.0
    """What is said of a transfer is said by another worker as well, to the same one."""
    copy_s: tuple[float, float] = (0.0, 0.0)
    """Gathers and scatters take this long; their pages must stay bound."""
    engine_s: tuple[float, float] = (0.001, 0.1)
    """One step of a holder's engine."""
    taker_cancels: float = 0.0
    holder_withdraws: float = 0.0
    repeats: float = 0.0
    """Per transfer: its offer and its pull are said again, while it runs or after it."""
    stale_views: float = 0.0
    """Per transfer: its taker is told which life of the holder to expect, as it was some time ago."""
    breaks_per_s: float = 0.0
    close_s: tuple[float, float] = (0.005, 0.005)
    """When each end hears that a stream is over."""
    other_layouts: float = 0.0
    """Per life of a worker: its pages have another layout than most; it may exchange nothing with them."""
    forgets_per_s: float = 0.0
    """A worker is told to drop a link, and learns of the peer again with the next pull."""
    stops_per_s: float = 0.0
    stop_s: tuple[float, float] = (0.1, 20.0)
    deaths_per_s: float = 0.0


def swarm(seed: int) -> WorldFaults:
    """Some of the faults, each at some rate: a run with all at once hides what a run with two would show."""
    rng = random.Random(seed)

    def some(most: float) -> float:
        return rng.uniform(0.0, most) if rng.random() < 0.5 else 0.0

    return WorldFaults(
        reads=MemoryFaults(
            read_s=(0.0005, rng.choice([0.002, 0.02, 0.5])),
            max_pieces=rng.choice([1, 4, 8]),
            shuffled=some(1.0),
            doubled=some(0.3),
            lost=some(0.05),
            lands_late=some(1.0),
            late_s=rng.choice([(0.001, 0.1), (1.0, 10.0)]),
            hangs=some(0.05),
            corrupts=some(0.1),
            within_sight=rng.random() < 0.3,
            note_s=(0.0, rng.choice([0.0005, 0.05])),
            note_dropped=some(0.05),
            note_doubled=some(0.2),
            note_mangled=some(0.1),
        ),
        message_lost=some(0.05),
        message_doubled=some(0.1),
        message_swapped=some(0.05),
        message_mangled=some(0.02),
        message_misled=some(0.05),
        copy_s=rng.choice([(0.0, 0.0), (0.0, 0.005), (0.01, 0.2)]),
        engine_s=rng.choice([(0.001, 0.1), (0.001, 0.1), (0.1, 2.5)]),
        taker_cancels=some(0.3),
        holder_withdraws=some(0.3),
        repeats=some(0.2),
        stale_views=some(0.5),
        breaks_per_s=some(0.5),
        close_s=rng.choice([(0.005, 0.005), (0.0, 0.5)]),
        other_layouts=some(0.2),
        forgets_per_s=some(0.2),
        stops_per_s=some(0.5),
        deaths_per_s=some(0.3),
    )


class _GuardedMover(PlainMover):
    """Copies as ever, and cries out when pages are touched that were let go of or are not final."""

    num_right = 0
    """Scatters that stored what the sequence holds there."""

    def gather(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        assert isinstance(pages, SimulatedPages)
        if pages.freed:
            raise Broken("I8: a gather reads pages that were let go of")
        if not pages.are_right(ranges):
            raise Broken("I2: a gather reads what is not final")
        return super().gather(pages, ranges, length, buffer_address)

    def scatter(self, pages: object, ranges: Sequence[SegmentRange], length: int, buffer_address: int) -> int:
        assert isinstance(pages, SimulatedPages)
        if pages.freed:
            raise Broken("I8: a scatter writes pages that were let go of")
        digest = super().scatter(pages, ranges, length, buffer_address)
        self.num_right += pages.are_right(ranges)
        return digest


class SimulatedPages(PlainPages):
    """Pages, poisoned at first, that know what they should hold and whether somebody owns them for this transfer."""

    def __init__(self, geometry: PlainGeometry, length: int, truth: bytes) -> None:
        super().__init__(geometry, length)
        self.truth = truth
        self.freed = False
        self.data[:] = bytes([POISON]) * len(truth)

    def are_right(self, ranges: Sequence[SegmentRange]) -> bool:
        """What these ranges hold is the truth."""
        for piece in ranges:
            for layer in range(piece.layer_first, piece.layer_first + piece.layer_count):
                first, size = self.place(piece.kind, layer, piece.first)
                end = first + size * piece.count
                if self.data[first:end] != self.truth[first:end]:
                    return False
        return True

    def let_go(self) -> None:
        self.freed = True
        self.data[:] = bytes([POISON]) * len(self.data)


@dataclass
class Journey:
    """One transfer from both ends."""

    transfer_id: TransferId
    holder: WorkerId
    taker: WorkerId
    length: int
    held_blocks: int
    truth: bytes
    settled: bytes
    """What its pages must hold after its end."""
    source: SimulatedPages
    target: SimulatedPages
    ended: bool
    holder_life: int = 0
    taker_life: int = 0
    incarnation: Incarnation | None = None
    """The life of the holder that the taker was told to expect."""
    layouts: list[bytes] = field(default_factory=lambda: [b"", b""])
    """Fingerprints of holder and taker in those lives."""
    computing: bool = False
    computed: bool = False
    cancelled: bool = False
    num_refused: int = 0
    """Ends that answered a second use of the id."""
    holder_end: Ended | None = None
    taker_end: Arrived | NotNeeded | PullFailed | None = None
    offered: bool = False
    opened: bool = False

    @property
    def first_tokens(self) -> tuple[int, ...]:
        """One, two or three choices, each transfer its own tokens."""
        return tuple(self.transfer_id[: 1 + self.transfer_id[-1] % 3])


@dataclass
class _Stream:
    """One gRPC stream: two ordered queues that may lie."""

    ends: tuple[tuple[WorkerId, int], tuple[WorkerId, int]]
    """(worker, link id) of taker and holder."""
    lives: tuple[int, int]
    open: bool = True
    last_s: list[float] = field(default_factory=lambda: [0.0, 0.0])


class _Worker:
    """A process: its node, its life, what waits for it while it is stopped."""

    def __init__(self, world: World, name: WorkerId) -> None:
        self.name = name
        self.world = world
        self.life = 0
        self.stopped = False
        self.waiting: list[Callable[[], None]] = []
        self.copies: list[Copy] = []
        self.start()

    def start(self) -> None:
        world = self.world
        self.life += 1
        self.stopped = False
        self.waiting, self.copies = [], []
        self.mover = _GuardedMover()
        self.fingerprint = b"other" if world.rng.random() < world.faults.other_layouts else b"plain"
        self.agent_name = f"{self.name}.{self.life}"
        self.node = TransferNode(
            worker_id=self.name,
            incarnation=Incarnation(self.incarnation),
            driver=world.network.driver(self.agent_name),
            geometry=world.geometry,
            mover=self.mover,
            fingerprint=self.fingerprint,
            document='{"plain": 1}',
            section=world.section,
            deliver=lambda event, life=self.life: world.hear(self, life, event),  # type: ignore[misc]
            send=lambda link, message, life=self.life: world.carry(self, life, link, message),  # type: ignore[misc]
            new_link_id=world.link_ids,
            rng=random.Random(world.rng.random()),
            defer=self.defer,
        )
        # Peers may see it longer than this life lasts.
        world.memories.append(self.node.send_memory)
        self.due_s: float | None = None
        self.driver = world.watch(self)

    def handle(self, command: Command) -> None:
        """All that a node is told comes through here, `step` and `copy`: whatever it changes is checked afterwards."""
        self.world.touched.append(self)
        self.node.handle(command, self.world.now_s)

    def step(self) -> None:
        self.world.touched.append(self)
        self.node.step(self.world.now_s)

    def copy(self, copy: Copy) -> None:
        self.world.touched.append(self)
        self.node.run_copy(copy, self.world.now_s)

    @property
    def incarnation(self) -> int:
        return hash_name(self.name) + self.life

    def defer(self, copy: Copy) -> bool:
        lo, hi = self.world.faults.copy_s
        if hi == 0.0:
            return False
        self.world.at(self.world.rng.uniform(lo, hi), self.mine(lambda: self.copy(copy)))
        return True

    def mine(self, act: Callable[[], None]) -> Callable[[], None]:
        """`act`, if this life still runs then; while it is stopped, once it resumes."""
        life = self.life

        def run() -> None:
            if self.life != life:
                return
            if self.stopped:
                self.waiting.append(run)
            else:
                act()

        return run


def hash_name(name: str) -> int:
    """A number for a name, the same in every process."""
    return int.from_bytes(name.encode()[:6].ljust(6, b"\0"), "big") << 8


SIMULATED = TransferSection(
    driver="memory",
    segment_bytes=400,
    num_send_buffers=6,
    num_landing_buffers=6,
    window=3,
    peer_share=0.5,
    read_deadline_s=1.0,
    progress_deadline_s=2.0,
    step_deadline_s=3.0,
    lease_s=6.0,
    beat_s=0.5,
    tombstone_s=60.0,
    offer_wait_s=3.0,
    pull_wait_s=2.0,
    queue_budget_s=10.0,
)


class World:
    """Some workers, the network between them, and the checks."""

    def __init__(
        self,
        seed: int,
        faults: WorldFaults | None = None,
        *,
        num_workers: int = 3,
        section: TransferSection = SIMULATED,
    ) -> None:
        self.seed = seed
        self.faults = faults or WorldFaults()
        self.section = section
        self.rng = random.Random(seed)
        self.clock = ManualClock()
        self.network = MemoryNetwork(self.clock, seed, self.faults.reads)
        self.network.on_write = self._on_write
        self.memories: list[BufferMemory] = []
        self.geometry = PlainGeometry()
        self.link_ids = itertools.count(1)
        self.journeys: dict[TransferId, Journey] = {}
        self.num_checks = 0
        self.touched: list[_Worker] = []
        """Workers whose nodes were told something since the last check."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = itertools.count()
        self._streams: dict[tuple[WorkerId, int], _Stream] = {}
        self._frees: set[tuple[str, int, int]] = set()
        """Fillings of send buffers whose reader was heard of: (agent, buffer, generation)."""
        self._announced: dict[str, dict[int, tuple[int, TransferId]]] = {}
        self._settled: list[Journey] = []
        self.workers = {name: _Worker(self, name) for name in (WorkerId(f"w{number}") for number in range(num_workers))}
        self._misbehave()

    # ---- time ----

    @property
    def now_s(self) -> float:
        return self.clock.now_s()

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now_s + delay_s, next(self._serial), act))

    def run(self, until_s: float) -> None:
        """Let everything happen up to a moment."""
        stood = 0
        while (next_s := self._next_s()) is not None and next_s <= until_s:
            stood = 0 if next_s > self.now_s else stood + 1
            if stood > MAX_TURNS:
                raise Broken("I4: a deadline is due for ever and nobody acts on it")
            self.clock.advance(max(0.0, next_s - self.now_s))
            self._turn()
        self.clock.advance(max(0.0, until_s - self.now_s))

    def run_until_idle(self, max_s: float) -> bool:
        """Let everything happen until nothing is open; whether that came within `max_s`."""
        end_s = self.now_s + max_s
        while self.now_s < end_s:
            if self.is_idle():
                return True
            self.run(min(end_s, self.now_s + 0.5))
        return self.is_idle()

    def is_idle(self) -> bool:
        """Each transfer has ended, each buffer is free, each READ is over."""
        return all(self._is_over(journey) for journey in self.journeys.values()) and all(
            not any(worker.node.holder.counts().values())
            and not any(worker.node.taker.counts().values())
            and all(buffer.phase is SendPhase.FREE for buffer in worker.node.send_buffers.buffers)
            and all(buffer.phase is LandingPhase.FREE for buffer in worker.node.landing_buffers.buffers)
            for worker in self.workers.values()
        )

    def open_ends(self) -> str:
        """What has not ended, for people."""
        found = [f"{journey.transfer_id.hex()[:6]}" for journey in self.journeys.values() if not self._is_over(journey)]
        for worker in self.workers.values():
            counts = worker.node.counts(self.now_s)
            found.append(
                f"{worker.name}: send {counts.send_buffers} landing {counts.landing_buffers} "
                f"subscriptions {counts.subscriptions} pulls {counts.pulls}"
            )
        return "; ".join(found)

    def _is_over(self, journey: Journey) -> bool:
        taker_gone = self.workers[journey.taker].life != journey.taker_life
        holder_gone = self.workers[journey.holder].life != journey.holder_life
        return (journey.taker_end is not None or taker_gone or not journey.opened) and (
            journey.holder_end is not None or holder_gone or not journey.offered
        )

    def _next_s(self) -> float | None:
        due = [self._heap[0][0]] if self._heap else []
        network_s = self.network.next_s()
        if network_s is not None:
            due.append(network_s)
        for worker in self.workers.values():
            if worker.due_s is not None and not worker.stopped:
                due.append(worker.due_s)
        return min(due, default=None)

    def _turn(self) -> None:
        now_s = self.clock.now_s()
        self.network.run_due()
        while self._heap and self._heap[0][0] <= now_s:
            heapq.heappop(self._heap)[2]()
            self.check()
        for worker in self.workers.values():
            # A real thread polls all the time; here a step without news and without a deadline would change nothing.
            if not worker.stopped and (worker.driver.has_news or (worker.due_s is not None and worker.due_s <= now_s)):
                worker.step()
                self.check()

    def heal(self) -> None:
        """No more faults; who is stopped resumes, who is dead has come back."""
        self.faults = WorldFaults(message_s=self.faults.message_s)
        for worker in self.workers.values():
            if worker.stopped:
                self.resume(worker)
        self.network.heal()

    # ---- faults of workers ----

    def _misbehave(self) -> None:
        """A chance of each of the slow faults, every tenth of a second."""
        tenth = 0.1
        for worker in self.workers.values():
            if self.rng.random() < self.faults.breaks_per_s * tenth:
                mine = [stream for stream in self._streams.values() if stream.ends[0][0] == worker.name and stream.open]
                if mine:
                    self.close_stream(self.rng.choice(mine), "broken")
            if not worker.stopped and self.rng.random() < self.faults.stops_per_s * tenth:
                self.stop(worker)
                self.at(self.rng.uniform(*self.faults.stop_s), lambda worker=worker: self.resume(worker))  # type: ignore[misc]
            if self.rng.random() < self.faults.deaths_per_s * tenth:
                self.kill(worker)
            if self.rng.random() < self.faults.forgets_per_s * tenth:
                peer = self.rng.choice(sorted(self.workers))
                worker.mine(lambda worker=worker, peer=peer: worker.handle(PeerForgotten(peer)))()  # type: ignore[misc]
        self.at(tenth, self._misbehave)

    def stop(self, worker: _Worker) -> None:
        worker.stopped = True
        self.network.stop(worker.agent_name)

    def resume(self, worker: _Worker) -> None:
        if not worker.stopped:
            return
        worker.stopped = False
        self.network.resume(worker.agent_name)
        waiting, worker.waiting = worker.waiting, []
        for act in waiting:
            self.at(0.0, act)

    def kill(self, worker: _Worker) -> None:
        """The process dies; another life of it starts at the same address."""
        self.network.kill(worker.agent_name)
        for stream in list(self._streams.values()):
            if worker.name in (stream.ends[0][0], stream.ends[1][0]):
                self.close_stream(stream, "died")
        worker.start()

    # ---- streams ----

    def dial(self, taker: _Worker, link_id: int, holder_name: WorkerId) -> None:
        holder = self.workers[holder_name]
        back_id = next(self.link_ids)
        lives = (taker.life, holder.life)
        stream = _Stream(((taker.name, link_id), (holder.name, back_id)), lives)
        if holder.stopped:
            self.at(2.0, taker.mine(lambda: self._to(taker, LinkClosed(link_id, "no answer"))))
            return
        for end in stream.ends:
            self._streams[end] = stream
        self.at(0.001, holder.mine(lambda: self._to(holder, LinkOpened(back_id, LinkDirection.IN))))
        self.at(0.001, taker.mine(lambda: self._to(taker, LinkOpened(link_id, LinkDirection.OUT))))
        stream.last_s = [self.now_s + 0.001] * 2

    def close_stream(self, stream: _Stream, reason: str, *, by: WorkerId | None = None) -> None:
        """Both ends hear of it, but for the one who closed it."""
        if not stream.open:
            return
        stream.open = False
        for (name, link_id), life in zip(stream.ends, stream.lives, strict=True):
            self._streams.pop((name, link_id), None)
            worker = self.workers[name]
            if name != by and worker.life == life:
                self.at(
                    self.rng.uniform(*self.faults.close_s),
                    worker.mine(self._later(worker, LinkClosed(link_id, reason))),
                )

    def carry(self, sender: _Worker, life: int, link_id: int, message: PeerMessage) -> None:
        """A node sends."""
        stream = self._streams.get((sender.name, link_id))
        if stream is None or not stream.open or life != sender.life:
            return
        way = 0 if stream.ends[0] == (sender.name, link_id) else 1
        name, back_id = stream.ends[1 - way]
        receiver = self.workers[name]
        if receiver.life != stream.lives[1 - way]:
            return
        faults, rng = self.faults, self.rng
        if rng.random() < faults.message_lost:
            return
        if rng.random() < faults.message_mangled:
            message = mangle(message, rng)
        if rng.random() < faults.message_misled and hasattr(message, "transfer_id"):
            self._mislead(receiver, sender, way, message)
        for copy in range(2 if rng.random() < faults.message_doubled else 1):
            arrives_s = max(stream.last_s[way], self.now_s + rng.uniform(*faults.message_s))
            if copy or rng.random() < faults.message_swapped:
                # Others overtake it.
                arrives_s += rng.choice([0.0, 0.01, 0.5])
            else:
                stream.last_s[way] = arrives_s
            deliver = receiver.mine(self._later(receiver, LinkMessage(back_id, message)))
            self.at(arrives_s - self.now_s, deliver)

    def _mislead(self, receiver: _Worker, sender: _Worker, way: int, message: PeerMessage) -> None:
        """A third worker, whose link it is not, says the same. Nothing that it frees counts as freed by right."""
        others = [
            stream
            for stream in self._streams.values()
            if stream.ends[1 - way][0] == receiver.name and stream.ends[way][0] != sender.name
        ]
        if not others:
            return
        stream = self.rng.choice(others)
        link_id, life = stream.ends[1 - way][1], stream.lives[1 - way]
        if life == receiver.life:
            self.at(
                self.rng.uniform(*self.faults.message_s),
                receiver.mine(lambda: receiver.handle(LinkMessage(link_id, message))),
            )

    def _later(self, worker: _Worker, command: LinkMessage | LinkClosed) -> Callable[[], None]:
        return lambda: self._to(worker, command)

    def _to(self, worker: _Worker, command: LinkMessage | LinkClosed | LinkOpened) -> None:
        if isinstance(command, LinkMessage) and isinstance(command.message, Release):
            release = command.message
            self._frees.add((worker.agent_name, release.buffer, release.buffer_gen))
        worker.handle(command)

    # ---- transfers ----

    def start_transfer(self) -> Journey:
        """Draw a request and open both its legs."""
        rng = self.rng
        holder, taker = rng.sample(sorted(self.workers), 2)
        length = rng.choice([1, 3, 100, 255, 256, 257, 511, 700, 1025, 1300])
        held_blocks = rng.choice([0, 0, 0, length // BLOCK_TOKENS, rng.randint(0, length // BLOCK_TOKENS)])
        truth = rng.randbytes(self.geometry.total_bytes(length))
        source, target = (SimulatedPages(self.geometry, length, truth) for _ in range(2))
        journey = Journey(
            transfer_id=TransferId(rng.randbytes(16)),
            holder=holder,
            taker=taker,
            length=length,
            held_blocks=held_blocks,
            truth=truth,
            settled=b"",
            source=source,
            target=target,
            ended=rng.random() < 0.05,
        )
        self._fill(journey.target, journey, 0, held_blocks)
        self.journeys[journey.transfer_id] = journey
        self.at(rng.uniform(0.0, 0.3), lambda: self._offer(journey))
        self.at(rng.uniform(0.0, 0.3), lambda: self._open(journey))
        if rng.random() < self.faults.taker_cancels:
            self.at(rng.uniform(0.0, 1.0), lambda: self._cancel(journey))
        if rng.random() < self.faults.holder_withdraws:
            self.at(rng.uniform(0.0, 1.0), lambda: self._withdraw(journey))
        if rng.random() < self.faults.stale_views:
            journey.incarnation = Incarnation(self.workers[holder].incarnation)
        if rng.random() < self.faults.repeats:
            self.at(rng.uniform(0.3, 8.0), lambda: self._repeat(journey))
        return journey

    def _offer(self, journey: Journey) -> None:
        holder = self.workers[journey.holder]
        journey.offered, journey.holder_life = True, holder.life
        journey.layouts[0] = holder.fingerprint
        holder.mine(lambda: holder.handle(self._offered(journey, journey.source)))()

    def _offered(self, journey: Journey, pages: SimulatedPages) -> Offer:
        return Offer(transfer_id=journey.transfer_id, attempt=1, length=journey.length, pages=pages)

    def _open(self, journey: Journey) -> None:
        holder, taker = self.workers[journey.holder], self.workers[journey.taker]
        journey.opened, journey.taker_life = True, taker.life
        journey.layouts[1] = taker.fingerprint

        def act() -> None:
            taker.handle(PeerFound(holder.name, "address", journey.incarnation))
            taker.handle(self._order(journey, journey.target))

        taker.mine(act)()

    def _order(self, journey: Journey, pages: SimulatedPages) -> OpenPull:
        return OpenPull(
            transfer_id=journey.transfer_id,
            attempt=1,
            holder=journey.holder,
            holder_incarnation=journey.incarnation,
            pages=pages,
            length=journey.length,
            held_blocks=journey.held_blocks,
            num_choices=len(journey.first_tokens),
        )

    def _repeat(self, journey: Journey) -> None:
        """The id is used again, by a mistake of somebody: refused after the end, ignored before it."""
        spare = SimulatedPages(self.geometry, journey.length, journey.truth)
        spare.freed = True
        holder, taker = self.workers[journey.holder], self.workers[journey.taker]
        for worker, known, ended, command in (
            (
                holder,
                journey.offered and holder.life == journey.holder_life,
                journey.holder_end is not None,
                self._offered(journey, spare),
            ),
            (
                taker,
                journey.opened and taker.life == journey.taker_life,
                journey.taker_end is not None,
                self._order(journey, spare),
            ),
        ):
            if not known or worker.stopped:
                continue
            before = journey.num_refused
            worker.handle(command)
            if journey.num_refused - before != ended:
                raise Broken("I5: a second use of a transfer id was not refused")

    def _cancel(self, journey: Journey) -> None:
        taker = self.workers[journey.taker]
        if not journey.opened or taker.life != journey.taker_life:
            return

        def act() -> None:
            journey.cancelled = journey.taker_end is None
            taker.handle(CancelPull(journey.transfer_id))

        taker.mine(act)()

    def _withdraw(self, journey: Journey) -> None:
        holder = self.workers[journey.holder]
        if journey.offered and holder.life == journey.holder_life:
            holder.mine(lambda: holder.handle(Withdraw(journey.transfer_id, "aborted")))()

    def _compute(self, journey: Journey, done_blocks: int) -> None:
        """One chunk of the prompt: a block's bytes are in the pages when it is said to be final, and not before."""
        holder = self.workers[journey.holder]
        if journey.holder_end is not None or holder.life != journey.holder_life:
            return
        total = journey.length // BLOCK_TOKENS
        upto = min(total, done_blocks + self.rng.randint(1, 3))
        self._fill(journey.source, journey, done_blocks, upto)
        if upto < total or (total and done_blocks < total):
            news = BlocksFinal(
                transfer_id=journey.transfer_id,
                num_blocks=upto,
                pages=journey.source,
                computed_tokens=upto * BLOCK_TOKENS,
            )
            holder.handle(news)
            self.at(self.rng.uniform(*self.faults.engine_s), holder.mine(lambda: self._compute(journey, upto)))
            return
        journey.source.data[:] = journey.truth
        journey.computed = True
        finished = PrefillDone(
            transfer_id=journey.transfer_id,
            pages=journey.source,
            first_token=journey.first_tokens[0],
            more_first_tokens=journey.first_tokens[1:],
            first_index=0,
            computed=journey.length,
            cached=0,
            ended=journey.ended,
        )
        holder.handle(finished)

    def _fill(self, pages: SimulatedPages, journey: Journey, first: int, end: int) -> None:
        for block in range(first, end):
            for layer in range(self.geometry.num_layers):
                offset, size = pages.place(RangeKind.HISTORY, layer, block)
                pages.data[offset : offset + size] = journey.truth[offset : offset + size]

    # ---- what nodes say ----

    def hear(self, worker: _Worker, life: int, event: TransferEvent) -> None:
        if life != worker.life:
            return
        match event:
            case Dial(link_id, peer, _):
                self.at(0.001, worker.mine(lambda: self.dial(worker, link_id, peer)))
            case CloseLink(link_id, reason):
                stream = self._streams.get((worker.name, link_id))
                if stream is not None:
                    self.close_stream(stream, reason, by=worker.name)
            case Wanted(transfer_id):
                journey = self.journeys[transfer_id]
                if journey.computing:
                    raise Broken("I3: computing was asked for twice")
                journey.computing = True
                scheduled = BlocksFinal(transfer_id=transfer_id, num_blocks=0, pages=journey.source)

                def begin() -> None:
                    if journey.holder_end is None:
                        worker.handle(scheduled)
                        self._compute(journey, 0)

                self.at(self.rng.uniform(0.0, 0.2), worker.mine(begin))
            case Ended(transfer_id):
                self._holder_ended(self.journeys[transfer_id], event)
            case Arrived(transfer_id) | NotNeeded(transfer_id) | PullFailed(transfer_id):
                self._taker_ended(self.journeys[transfer_id], event)
            case _:
                pass

    def _holder_ended(self, journey: Journey, event: Ended) -> None:
        if journey.holder_end is not None:
            if "used before" not in event.reason:
                raise Broken("I3: the holder ended a transfer twice")
            journey.num_refused += 1
            return
        journey.holder_end = event
        if event.outcome is Outcome.NOT_NEEDED and not journey.ended:
            raise Broken("I3: the holder has ended what the first token has not")
        said_taken = event.outcome is Outcome.TAKEN and self.workers[journey.taker].life == journey.taker_life
        if said_taken and not isinstance(journey.taker_end, Arrived):
            raise Broken("I3: the holder says taken, the taker does not")
        journey.source.let_go()

    def _taker_ended(self, journey: Journey, event: Arrived | NotNeeded | PullFailed) -> None:
        if journey.taker_end is not None:
            if not isinstance(event, PullFailed) or "used before" not in str(event.error):
                raise Broken("I3: the taker ended a transfer twice")
            journey.num_refused += 1
            return
        journey.taker_end = event
        if isinstance(event, PullFailed):
            if not isinstance(event.error, HeadraceError) or not str(event.error):
                raise Broken("I7: a failure without its reason")
        elif not journey.computed or journey.ended != isinstance(event, NotNeeded):
            raise Broken("I3: the outcome is not what the prefill came to")
        if not isinstance(event, PullFailed) and (
            (event.first_token, *event.more_first_tokens) != journey.first_tokens
        ):
            raise Broken("I7: the first tokens are not those that were sampled")
        if isinstance(event, Arrived):
            if journey.cancelled:
                raise Broken("I3: admitted after it was cancelled")
            if journey.layouts[0] != journey.layouts[1]:
                raise Broken("I2: taken from a worker whose pages have another layout")
            if journey.incarnation not in (None, hash_name(journey.holder) + journey.holder_life):
                raise Broken("I6: taken from another life of the holder than was asked for")
            if bytes(journey.target.data) != journey.truth:
                raise Broken("I2: admitted pages differ from the truth")
            journey.settled = journey.truth
            # Decode owns the pages now: a scatter into them would be as wrong as one into freed pages.
            journey.target.freed = True
        else:
            journey.target.let_go()
            journey.settled = bytes([POISON]) * len(journey.truth)
        self._settled.append(journey)

    # ---- checks ----

    def watch(self, worker: _Worker) -> MemoryDriver:
        """Hear of each note that arrives, to know which send buffers may be freed."""
        agent = worker.agent_name
        driver = self.network.find(agent)
        assert driver is not None
        notes = driver.notes

        def heard() -> list[tuple[str, bytes]]:
            found = notes()
            for _, note in found:
                parts = unpack_note(note)
                if parts is not None:
                    self._frees.add((agent, parts[1], parts[2]))
            return found

        driver.notes = heard  # type: ignore[method-assign]
        self._announced[agent] = {}
        self.touched.append(worker)
        return driver

    def _on_write(self, reader: MemoryDriver, address: int, size: int, handle: ReadHandle, after_error: bool) -> None:
        worker = next((w for w in self.workers.values() if w.agent_name == reader.agent_name), None)
        # Bytes after an error are the network's fault, and meet the digest; a dead process has no memory.
        if worker is None or after_error:
            return
        node = worker.node
        stride = node.landing_memory.stride
        index, offset = divmod(address - node.landing_memory.base_address, stride)
        if not 0 <= index < node.landing_memory.num_buffers or offset + size > stride:
            raise Broken("I1: bytes land beside a landing buffer")
        phase = node.landing_buffers.buffers[index].phase
        if phase not in (LandingPhase.READING, LandingPhase.HELD):
            raise Broken(f"I1: bytes land in a buffer that is {phase.value}")
        if node.landing_of(handle) != index:
            raise Broken("I1: bytes of one READ land in the buffer of another")

    def check(self) -> None:
        """Every rule that can be read off the state, after each event, of the nodes that the event touched.

        A node shares nothing with another: what one does reaches the next as an event of its own. That this is so is
        checked as well: every now and then all nodes are looked at, and their deadlines with them.
        """
        self.num_checks += 1
        whole = self.num_checks % WHOLE_CHECK == 0
        for worker in self.workers.values() if whole else self.touched:
            wrong = worker.node.audit()
            if wrong:
                raise Broken(f"I8: {worker.name}: {'; '.join(wrong)}")
            self._check_frees(worker)
            due_s = worker.node.next_s()
            if due_s != worker.due_s and worker not in self.touched:
                raise Broken(f"I8: {worker.name} has changed, yet nothing was said to it")
            worker.due_s = due_s
            for transfer_id, phase in worker.node.holder.phases().items():
                journey = self.journeys.get(transfer_id)
                if journey is None or journey.holder_end is None or phase in HOLDER_FINAL:
                    continue
                if journey.holder_life == worker.life:
                    raise Broken("I5: a transfer that has ended lives again")
            if worker.node.taker.segments_received > worker.mover.num_right:
                raise Broken("I2: bytes were taken for good that are not the sequence's")
        self.touched.clear()
        if self.network.num_outside:
            raise Broken("I10: a READ was asked for outside of what the holder registered")
        for journey in self._settled[-3:]:
            self._check_settled(journey)

    def check_all_settled(self) -> None:
        """No pages changed after they were admitted or let go of."""
        for journey in self._settled:
            self._check_settled(journey)

    def _check_settled(self, journey: Journey) -> None:
        if journey.target.data != journey.settled:
            raise Broken("I2: pages changed after the transfer had ended")

    def _check_frees(self, worker: _Worker) -> None:
        """A send buffer leaves ANNOUNCED only for its own filling's reader, or with its subscription."""
        agent = worker.agent_name
        now: dict[int, tuple[int, TransferId]] = {}
        for buffer in worker.node.send_buffers.buffers:
            if buffer.phase is SendPhase.ANNOUNCED and buffer.owner is not None:
                now[buffer.index] = buffer.generation, buffer.owner
        before = self._announced[agent]
        if now == before:
            return
        self._announced[agent] = now
        for index, (generation, owner) in before.items():
            if now.get(index) == (generation, owner) or (agent, index, generation) in self._frees:
                continue
            if worker.node.holder.phases().get(owner, HolderPhase.ENDED) not in HOLDER_FINAL:
                raise Broken("I8: a send buffer was freed by what was said of another filling")


def mangle(message: PeerMessage, rng: random.Random) -> PeerMessage:
    """The message with one number of it changed. `Taken` is never made up, nor is a token: nobody could tell."""
    if isinstance(message, Taken):
        return message
    numbers = [
        name
        for name in (f.name for f in dataclasses.fields(message))
        if type(getattr(message, name)) is int and name != "first_token"
    ]
    ranges = getattr(message, "index", None) or getattr(message, "ranges", None)
    if ranges and rng.random() < 0.5:
        wild = [0, 1, 2, 5, 1 << 16, (1 << 32) - 1]
        piece = SegmentRange(rng.choice(list(RangeKind)), *(rng.choice(wild) for _ in range(4)))
        name = "index" if hasattr(message, "index") else "ranges"
        return dataclasses.replace(message, **{name: (piece, *ranges[1:])})  # type: ignore[arg-type]
    if not numbers or not isinstance(message, TAKER_MESSAGES + HOLDER_MESSAGES):
        return message
    name = rng.choice(numbers)
    wild_number = rng.choice([0, 1, getattr(message, name) ^ 1, getattr(message, name) + 1, (1 << 32) - 1])
    return dataclasses.replace(message, **{name: wild_number})


def run_world(
    seed: int,
    faults: WorldFaults,
    num_transfers: int,
    *,
    num_workers: int = 3,
    section: TransferSection = SIMULATED,
) -> World:
    """One run: safety under faults, then liveness without them. Raises `Broken`."""
    world = World(seed, faults, num_workers=num_workers, section=section)
    for _ in range(num_transfers):
        world.start_transfer()
        world.run(world.now_s + world.rng.expovariate(10.0))
    # Long enough for the transfers' own deadlines, so that most of what happens happens under faults.
    world.run_until_idle(max_s=10.0)
    world.heal()
    # Leases, back-offs and kept agents are the longest waits.
    if not world.run_until_idle(max_s=120.0):
        raise Broken(f"I4: not all has ended after the faults have ceased: {world.open_ends()}")
    world.check_all_settled()
    return world
