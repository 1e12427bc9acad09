"""The desk: every leg of this worker, whoever asked for it.

Routes engine and transfer events to the leg they name, carries out what the leg decides, and lets go of it when
nothing of it is left. One thread calls it (the event loop); time is passed in. Whoever is gone is not spoken to; what
is late and names no leg is dropped, since keys and transfer ids never return.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..core.errors import Draining, HeadraceError, QueueFull, StaleEpoch
from ..core.ids import TransferId
from ..engine import api as engine
from ..transfer import api as transfer
from .leg import (
    Abort,
    AbortChoice,
    Alarm,
    Due,
    Failed,
    Finished,
    Leg,
    LegEvent,
    LegFactories,
    LegOrder,
    Say,
    ToEngine,
    ToTransfer,
    TransferLegEvent,
    Word,
)

SPARE_TIMERS = 1024


class Listener(Protocol):
    """Who hears of a leg: a router's session."""

    def say(self, leg: int, word: Word) -> None: ...


class Witness(Protocol):
    """Who counts."""

    def leg_refused(self, error: HeadraceError) -> None: ...

    def leg_opened(self, order: LegOrder) -> None: ...

    def leg_said(self, order: LegOrder, word: Word) -> None: ...

    def alarm(self, order: LegOrder, what: str) -> None: ...


@dataclass
class _Seat:
    """One leg and who hears of it."""

    key: int
    order: LegOrder
    leg: Leg
    listener: Listener
    leg_id: int
    armed_s: float | None = None
    deaf: bool = False
    """Its router is gone."""
    silent: bool = False
    """Its terminal word is said."""


class Desk:
    """See the module."""

    def __init__(
        self,
        factories: LegFactories,
        *,
        to_engine: Callable[[engine.Command], None],
        to_transfer: Callable[[transfer.Command], None],
        witness: Witness,
        max_legs: int,
    ) -> None:
        self._factories = dict(factories)
        self._to_engine = to_engine
        self._to_transfer = to_transfer
        self._witness = witness
        self._max_legs = max_legs
        self._keys = itertools.count(1)
        self._seats: dict[int, _Seat] = {}
        self._by_leg: dict[tuple[Listener, int], int] = {}
        # A worker of both roles may hold and take under one transfer id, for different requests of a bad router.
        self._holding: dict[TransferId, int] = {}
        self._taking: dict[TransferId, int] = {}
        self._timers: list[tuple[float, int]] = []
        self.accepting = True

    # ---- what is here ----

    @property
    def num_legs(self) -> int:
        """Legs of which anything is left, said or unsaid."""
        return len(self._seats)

    def knows(self, listener: Listener, leg_id: int) -> bool:
        """Such a leg is open: its terminal word is not said."""
        return (listener, leg_id) in self._by_leg

    # ---- routers ----

    def submit(self, listener: Listener, leg_id: int, order: LegOrder, now_s: float) -> None:
        """Open a leg. A refusal is the leg's terminal word, and nothing is kept."""
        error = self._objection(order)
        if error is not None:
            self.refuse(listener, leg_id, error)
            return
        key = next(self._keys)
        seat = _Seat(key, order, self._factories[order.kind](key, order, now_s), listener, leg_id)
        self._seats[key] = seat
        self._by_leg[(listener, leg_id)] = key
        if order.transfer_id is not None:
            self._side(order.kind)[order.transfer_id] = key
        self._witness.leg_opened(order)
        self._settle(seat, seat.leg.begin(now_s))

    def refuse(self, listener: Listener, leg_id: int, error: HeadraceError) -> None:
        """Answer a leg that is never opened."""
        self._witness.leg_refused(error)
        listener.say(leg_id, Failed(error))

    def abort(self, listener: Listener, leg_id: int, error: HeadraceError, now_s: float) -> None:
        """End a leg; one that is over already stays so."""
        key = self._by_leg.get((listener, leg_id))
        if key is not None:
            self._tell(self._seats[key], Abort(error), now_s)

    def abort_choice(self, listener: Listener, leg_id: int, choice: int, now_s: float) -> None:
        """End one choice of a leg; one that is over already, or never was, is nothing."""
        key = self._by_leg.get((listener, leg_id))
        if key is not None and choice < self._seats[key].order.num_choices:
            self._tell(self._seats[key], AbortChoice(choice), now_s)

    def leave(self, listener: Listener, error: HeadraceError, now_s: float) -> int:
        """A router is gone: end all of its legs, and speak to it no more. How many were open."""
        keys = [key for (who, _), key in self._by_leg.items() if who is listener]
        for seat in self._seats.values():
            if seat.listener is listener:
                seat.deaf = True
        for key in keys:
            self._tell(self._seats[key], Abort(error), now_s)
        return len(keys)

    def abort_all(self, error: HeadraceError, now_s: float) -> int:
        """This worker's own end. How many were open."""
        keys = list(self._by_leg.values())
        for key in keys:
            self._tell(self._seats[key], Abort(error), now_s)
        return len(keys)

    # ---- engine, transfer, time ----

    def on_engine(self, events: Sequence[engine.SequenceEvent], now_s: float) -> None:
        for event in events:
            seat = self._seats.get(event.key)
            if seat is not None:
                self._tell(seat, event, now_s)

    def on_transfer(self, event: TransferLegEvent, now_s: float) -> None:
        if isinstance(event, transfer.Wanted | transfer.Ended):
            key = self._holding.get(event.transfer_id)
        else:
            key = self._taking.get(event.transfer_id)
        if key is not None:
            self._tell(self._seats[key], event, now_s)

    def on_time(self, now_s: float) -> None:
        """Tell every leg that is due."""
        while self._timers and self._timers[0][0] <= now_s:
            _, key = heapq.heappop(self._timers)
            seat = self._seats.get(key)
            if seat is None:
                continue
            seat.armed_s = None
            due_s = seat.leg.due_s
            if due_s is not None and due_s <= now_s:
                self._tell(seat, Due(), now_s)
            else:
                self._arm(seat)

    # ---- inside ----

    def _objection(self, order: LegOrder) -> HeadraceError | None:
        if not self.accepting:
            return Draining("this worker takes no new work")
        if len(self._seats) >= self._max_legs:
            return QueueFull(f"{self._max_legs} legs are open")
        if order.transfer_id is not None and order.transfer_id in self._side(order.kind):
            return StaleEpoch("this transfer id is in use")
        return None

    def _side(self, kind: engine.LegKind) -> dict[TransferId, int]:
        return self._holding if kind in (engine.LegKind.PREFILL, engine.LegKind.SHARE) else self._taking

    def _tell(self, seat: _Seat, event: LegEvent, now_s: float) -> None:
        self._settle(seat, seat.leg.handle(event, now_s))

    def _settle(self, seat: _Seat, actions: Iterable[Say | ToEngine | ToTransfer | Alarm]) -> None:
        for action in actions:
            match action:
                case ToEngine(command):
                    self._to_engine(command)
                case ToTransfer(command):
                    self._to_transfer(command)
                case Say(word):
                    self._say(seat, word)
                case Alarm(what):
                    self._witness.alarm(seat.order, what)
        if seat.leg.ended:
            assert seat.silent, "a leg ended without a terminal word"
            del self._seats[seat.key]
            if seat.order.transfer_id is not None:
                del self._side(seat.order.kind)[seat.order.transfer_id]
            self._sweep()
        else:
            self._arm(seat)

    def _say(self, seat: _Seat, word: Word) -> None:
        assert not seat.silent, "a leg spoke after its terminal word"
        self._witness.leg_said(seat.order, word)
        if isinstance(word, Finished | Failed):
            seat.silent = True
            del self._by_leg[(seat.listener, seat.leg_id)]
        if not seat.deaf:
            seat.listener.say(seat.leg_id, word)

    def _sweep(self) -> None:
        """Timers of legs that have ended lie in the heap until they are due, an hour at most: not too many of them."""
        if len(self._timers) > 2 * len(self._seats) + SPARE_TIMERS:
            self._timers = [timer for timer in self._timers if timer[1] in self._seats]
            heapq.heapify(self._timers)

    def _arm(self, seat: _Seat) -> None:
        due_s = seat.leg.due_s
        if due_s is not None and (seat.armed_s is None or due_s < seat.armed_s):
            seat.armed_s = due_s
            heapq.heappush(self._timers, (due_s, seat.key))
