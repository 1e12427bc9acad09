"""The desk in a simulated world: whatever comes in whatever order, each leg ends once and every page comes back.

The engine and the transfer thread are models of their contracts (`engine/api.py`, `transfer/api.py`), each with an
inbox and an outbox of its own, so that commands and events cross each other in flight. A seed draws the whole run.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest

from headrace.core.errors import BY_REASON, Cancelled, NoFreePages, TransferFailed
from headrace.core.sampling import FinishReason
from headrace.engine import api as engine
from headrace.engine.api import LegKind
from headrace.kvcache.sequence import SequencePages
from headrace.transfer import api as transfer
from headrace.worker.leg import ChoiceFinished, Failed, Finished, SaidToken

STATS = transfer.TransferStats()


@dataclass
class Sequence:
    """One sequence of the model engine."""

    kind: LegKind
    open: dict[int, int]
    """Choices that go on, and the index of what each says next."""
    started: bool = False
    computed: int = 0
    has_choices: bool = False
    phase: str = "queued"
    """queued, ready, landing, running, held"""


class SimEngine:
    """Commands in order, events in order; asserts what a real engine relies on."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.inbox: deque[engine.Command] = deque()
        self.outbox: deque[engine.Event] = deque()
        self.sequences: dict[int, Sequence] = {}
        self.touched_by_others: set[int] = set()
        """Keys whose pages a gather or a scatter may touch now; the transfer model keeps it."""
        self.bound = 0
        self.freed = 0

    def turn(self) -> None:
        """Apply one command, or let one sequence go one bit on."""
        if self.inbox and self.rng.random() < 0.6:
            self._apply(self.inbox.popleft())
        elif self.sequences:
            key = self.rng.choice(sorted(self.sequences))
            self._go_on(key, self.sequences[key])

    def _apply(self, command: engine.Command) -> None:
        if isinstance(command, engine.Submit):
            key = command.request.key
            assert key not in self.sequences
            if self.rng.random() < 0.1:
                self.outbox.append(engine.Refused(key, NoFreePages("full")))
            else:
                self.sequences[key] = Sequence(
                    command.request.kind, dict.fromkeys(range(command.request.num_choices), 0)
                )
            return
        sequence = self.sequences.get(command.key)
        if sequence is None:
            return
        match command:
            case engine.Start():
                assert sequence.phase == "ready", "the engine forgets a Start that comes too early"
                sequence.phase = "running"
                if sequence.kind is LegKind.SHARE:
                    sequence.phase = "held"
                    self.outbox.append(engine.Started(command.key, 600))
                    self.outbox.append(
                        engine.SequenceFinished(command.key, None, None, 0, 0.0, SequencePages((1,), ((0, 1),), 0))
                    )
            case engine.Store(key):
                assert sequence.kind is LegKind.FETCH
                assert sequence.phase == "landing"
                self._free(key)
            case engine.Admit():
                assert sequence.kind is LegKind.GENERATE
                assert sequence.phase == "landing"
                assert command.key not in self.touched_by_others
                assert 1 + len(command.more_first_tokens) == len(sequence.open)
                sequence.phase, sequence.has_choices = "running", True
                sequence.open = dict.fromkeys(sequence.open, command.first_index + 1)
            case engine.AbortChoice(key, choice):
                assert sequence.has_choices
                assert sequence.kind is not LegKind.PREFILL
                if choice in sequence.open:
                    self._finish(key, sequence, choice, None)
            case engine.Release(key):
                assert sequence.phase in ("held", "landing"), f"released while {sequence.phase}"
                self._free(key)
            case engine.AbortSequence(key):
                if sequence.phase != "held":
                    self._fail(key, sequence, Cancelled("aborted"))

    def _fail(self, key: int, sequence: Sequence, error: Any) -> None:
        self.outbox.append(engine.SequenceFailed(key, error))
        if sequence.phase == "queued":
            del self.sequences[key]
        elif sequence.phase == "landing" or (sequence.kind is LegKind.PREFILL and sequence.started):
            sequence.phase = "held"
        else:
            self._free(key)

    def _free(self, key: int) -> None:
        assert key not in self.touched_by_others, "pages freed under a gather or a scatter"
        del self.sequences[key]
        self.freed += 1

    def _go_on(self, key: int, sequence: Sequence) -> None:
        pages = SequencePages((1,), ((0, 1),), 0)
        if sequence.phase == "queued" and self.rng.random() < 0.5:
            self.bound += 1
            if sequence.kind.lands:
                sequence.phase = "landing"
            else:
                sequence.phase = "running" if sequence.kind is LegKind.LOCAL else "ready"
            self.outbox.append(engine.Reserved(key, 0, pages))
        elif sequence.phase == "running" and self.rng.random() < 0.02:
            self._fail(key, sequence, NoFreePages("outgrown"))
        elif sequence.phase == "running":
            self._compute(key, sequence, pages)

    def _compute(self, key: int, sequence: Sequence, pages: SequencePages) -> None:
        if sequence.kind is not LegKind.GENERATE and sequence.computed < 600:
            if not sequence.started:
                self.outbox.append(engine.Started(key, 0))
            sequence.started = True
            sequence.computed = min(600, sequence.computed + 256)
            self.outbox.append(engine.ChunkDone(key, sequence.computed, pages))
            if sequence.computed < 600:
                return
        # The first tokens come together, later ones in any order.
        choices = list(sequence.open) if not sequence.has_choices else [self.rng.choice(list(sequence.open))]
        sequence.has_choices = True
        for choice in choices:
            self.outbox.append(engine.TokenSampled(key, sequence.open[choice], 9, None, choice))
            sequence.open[choice] += 1
        if sequence.kind is LegKind.PREFILL:
            reason = FinishReason.LENGTH if self.rng.random() < 0.15 else None
            sequence.phase = "held"
            self.outbox.append(engine.SequenceFinished(key, reason, None, 600, 0.1, pages))
            return
        for choice in choices:
            if sequence.open[choice] >= 4 or self.rng.random() < 0.15:
                self._finish(key, sequence, choice, FinishReason.LENGTH)

    def _finish(self, key: int, sequence: Sequence, choice: int, reason: FinishReason | None) -> None:
        del sequence.open[choice]
        last = not sequence.open
        self.outbox.append(engine.SequenceFinished(key, reason, None, 600, 0.1, None, choice, last))
        if last:
            self._free(key)


@dataclass
class Side:
    """One transfer of the model thread, at one end."""

    key: int
    stage: str
    """Holder: offered, wanted, done. Taker: pulling."""
    num_choices: int = 1
    ended: bool = False


@dataclass
class SimTransfer:
    """Holder and taker ends against a peer that does anything."""

    rng: random.Random
    touched: set[int]
    key_of: dict[bytes, int] = field(default_factory=dict)
    inbox: deque[transfer.Command] = field(default_factory=deque)
    outbox: deque[Any] = field(default_factory=deque)
    holding: dict[bytes, Side] = field(default_factory=dict)
    taking: dict[bytes, Side] = field(default_factory=dict)
    peer_lives: bool = True

    def turn(self) -> None:
        if self.inbox and self.rng.random() < 0.6:
            self._apply(self.inbox.popleft())
            return
        ends = [*self.holding.items(), *self.taking.items()]
        if ends and self.peer_lives:
            transfer_id, _ = ends[self.rng.randrange(len(ends))]
            if transfer_id in self.holding:
                self._hold_on(transfer_id, self.holding[transfer_id])
            else:
                self._take_on(transfer_id)

    def _apply(self, command: transfer.Command) -> None:
        match command:
            case transfer.Offer():
                self.holding[command.transfer_id] = Side(self.key_of[command.transfer_id], "offered")
            case transfer.BlocksFinal():
                side = self.holding.get(command.transfer_id)
                if side is not None:
                    assert side.stage == "wanted"
                    if command.num_blocks:
                        self.touched.add(side.key)
            case transfer.PrefillDone():
                side = self.holding.get(command.transfer_id)
                if side is not None:
                    if command.ended:
                        self._end(command.transfer_id, transfer.Outcome.NOT_NEEDED)
                    else:
                        side.stage = "done"
                        self.touched.add(side.key)
            case transfer.Withdraw(transfer_id):
                if transfer_id in self.holding:
                    self._end(transfer_id, transfer.Outcome.ENDED)
            case transfer.OpenPull():
                key = self.key_of[command.transfer_id]
                self.taking[command.transfer_id] = Side(key, "pulling", command.num_choices)
                self.touched.add(key)
            case transfer.CancelPull(transfer_id):
                if transfer_id in self.taking:
                    self._answer(transfer_id, transfer.PullFailed(transfer_id, TransferFailed("cancelled"), STATS))

    def _hold_on(self, transfer_id: Any, side: Side) -> None:
        if self.rng.random() < 0.05:
            self._end(transfer_id, transfer.Outcome.ENDED)
        elif side.stage == "offered":
            side.stage = "wanted"
            self.outbox.append(transfer.Wanted(transfer_id, 0))
        elif side.stage == "done" and self.rng.random() < 0.5:
            self._end(transfer_id, transfer.Outcome.TAKEN)

    def _end(self, transfer_id: Any, outcome: transfer.Outcome) -> None:
        self.touched.discard(self.holding.pop(transfer_id).key)
        self.outbox.append(transfer.Ended(transfer_id, outcome, "", STATS))

    def _take_on(self, transfer_id: Any) -> None:
        draw = self.rng.random()
        more = (9,) * (self.taking[transfer_id].num_choices - 1)
        if draw < 0.1:
            self._answer(transfer_id, transfer.PullFailed(transfer_id, TransferFailed("gone"), STATS))
        elif draw < 0.15:
            self._answer(transfer_id, transfer.NotNeeded(transfer_id, 9, 0, more))
        elif draw < 0.4:
            self._answer(transfer_id, transfer.Arrived(transfer_id, 9, 0, 600, 0, STATS, more))

    def _answer(self, transfer_id: Any, event: Any) -> None:
        self.touched.discard(self.taking.pop(transfer_id).key)
        self.outbox.append(event)


class World:
    """One worker's desk, its two threads, two routers, and time."""

    def __init__(self, rng: random.Random, rig: Any, make_ear: Any, make_order: Any) -> None:
        self.rng = rng
        self.rig = rig
        self.make_order = make_order
        self.engine = SimEngine(rng)
        self.transfer = SimTransfer(rng, self.engine.touched_by_others)
        self.ears = [make_ear(), make_ear()]
        self.make_ear = make_ear
        self.legs: list[tuple[Any, int]] = []
        self.left: list[Any] = []
        self.ids: dict[tuple[int, ...], Any] = {}
        self.now_s = 0.0

    def drain(self) -> None:
        """Commands of the desk reach the inboxes, and each order's key becomes known to the transfer model."""
        commands, told = self.rig.took()
        for command in commands:
            if isinstance(command, engine.Submit):
                transfer_id = self.ids.pop(command.request.prompt, None)
                if transfer_id is not None:
                    self.transfer.key_of[transfer_id] = command.request.key
            self.engine.inbox.append(command)
        self.transfer.inbox.extend(told)

    def submit(self, number: int) -> None:
        kind = self.rng.choice(list(LegKind))
        ear = self.rng.choice(self.ears)
        order = self.make_order(
            kind,
            number,
            prompt=(number, *range(599)),
            timeout_s=self.rng.choice([5.0, 500.0]),
            seeds=tuple(range(self.rng.choice([0, 0, 2, 3]))),
        )
        self.ids[order.prompt] = order.transfer_id
        self.legs.append((ear, number))
        self.rig.desk.submit(ear, number, order, self.now_s)

    def turn(self) -> None:
        """One thing happens somewhere."""
        act = self.rng.choices(
            [
                self.engine.turn,
                self.transfer.turn,
                self._engine_speaks,
                self._transfer_speaks,
                self._router,
                self._time,
            ],
            [30, 30, 20, 20, 3, 2],
        )[0]
        act()
        self.drain()

    def _engine_speaks(self) -> None:
        batch = [self.engine.outbox.popleft() for _ in range(min(len(self.engine.outbox), self.rng.randint(1, 5)))]
        self.rig.desk.on_engine(batch, self.now_s)

    def _transfer_speaks(self) -> None:
        if self.transfer.outbox:
            self.rig.desk.on_transfer(self.transfer.outbox.popleft(), self.now_s)

    def _router(self) -> None:
        if self.rng.random() < 0.05:
            # A session ends and another begins; its end may be noticed twice.
            at = self.rng.randrange(2)
            for _ in range(2):
                self.rig.desk.leave(self.ears[at], Cancelled("left"), self.now_s)
            self.left.append(self.ears[at])
            self.ears[at] = self.make_ear()
        elif self.legs:
            ear, number = self.rng.choice(self.legs)
            if self.rng.random() < 0.7:
                self.rig.desk.abort_choice(ear, number, self.rng.randrange(4), self.now_s)
                return
            for _ in range(self.rng.choice([1, 1, 2])):
                self.rig.desk.abort(ear, number, Cancelled("aborted"), self.now_s)

    def _time(self) -> None:
        self.now_s += self.rng.choice([0.01, 0.1, 1.0])
        self.rig.desk.on_time(self.now_s)

    def run_until_idle(self) -> None:
        """No more faults or requests; time passes until nothing is left."""
        for _ in range(40_000):
            self.turn()
            if not (self.rig.desk.num_legs or self.engine.inbox or self.transfer.inbox or self.engine.sequences):
                return
            if self.rng.random() < 0.02:
                self.now_s += 10.0
                self.rig.desk.on_time(self.now_s)
                self.drain()
        raise AssertionError(f"{self.rig.desk.num_legs} legs never ended")


def check_choices(words: list[Any]) -> None:
    """Each choice counts its tokens upwards and ends at most once, after its last token."""
    ended: set[int] = set()
    indices: dict[int, list[int]] = {}
    for word in words:
        if isinstance(word, SaidToken):
            assert word.choice not in ended
            indices.setdefault(word.choice, []).append(word.index)
        elif isinstance(word, ChoiceFinished | Finished):
            assert word.choice not in ended
            ended.add(word.choice)
    assert all(said == sorted(set(said)) for said in indices.values())


@pytest.mark.parametrize("run", range(40))
def test_every_leg_ends_once_and_every_page_comes_back(
    run: int, rng: random.Random, make_desk: Any, make_ear: Any, make_order: Any
) -> None:
    """Aborts, refusals, lost takers, silent peers and routers that leave, in any order."""
    world = World(rng, make_desk(max_legs=1000), make_ear, make_order)
    world.transfer.peer_lives = run % 4 != 3
    for number in range(1, 61):
        world.submit(number)
        world.drain()
        for _ in range(rng.randint(0, 40)):
            world.turn()
    world.run_until_idle()

    for ear, number in world.legs:
        words = ear.words.get(number, [])
        terminals = [word for word in words if isinstance(word, Finished | Failed)]
        # A router that left may have missed it, but never hears two.
        assert len(terminals) == 1 or (not terminals and ear in world.left)
        if terminals:
            assert words[-1] is terminals[0], "nothing is said after the terminal word"
            assert all(word.error.reason in BY_REASON for word in terminals if isinstance(word, Failed))
        check_choices(words)
    assert world.engine.sequences == {}
    assert world.engine.touched_by_others == set()
    assert world.engine.bound == world.engine.freed
    said = world.rig.witness.said
    assert world.rig.witness.opened == said["Finished"] + said["Failed"]
