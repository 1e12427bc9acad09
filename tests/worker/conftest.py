"""Makers and fakes for one worker: orders, a desk with recording peers, and what stands in for engine and transfer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.errors import HeadraceError
from headrace.core.ids import Incarnation, TransferId, WorkerId
from headrace.core.sampling import SamplingParams
from headrace.decode.legs import LEGS as DECODE_LEGS
from headrace.engine.api import LegKind
from headrace.prefill.legs import LEGS as PREFILL_LEGS
from headrace.worker.desk import Desk
from headrace.worker.leg import Failed, Finished, Holder, LegOrder, Word


def build_order(kind: LegKind, number: int = 1, **changes: Any) -> LegOrder:
    fields: dict[str, Any] = {
        "kind": kind,
        "request_id": f"request-{number}",
        "attempt": 1,
        "prompt": tuple(range(1, 601)),
        "num_output_tokens": 0,
        "sampling": SamplingParams(max_tokens=4, eos_token_ids=(2,), stop_token_ids=(7,)),
        "namespace": "",
        "priority": 0,
        "timeout_s": 60.0,
        "transfer_id": None if kind is LegKind.LOCAL else TransferId(number.to_bytes(16, "big")),
        "holder": Holder(worker_id=WorkerId("prefill-0"), incarnation=Incarnation(9), address="127.0.0.1:7101")
        if kind.lands
        else None,
    }
    return LegOrder(**{**fields, **changes})


@pytest.fixture
def make_order() -> Callable[..., LegOrder]:
    return build_order


class Ear:
    """A router that hears: words by leg, in order."""

    def __init__(self) -> None:
        self.words: dict[int, list[Word]] = {}

    def say(self, leg: int, word: Word) -> None:
        self.words.setdefault(leg, []).append(word)

    def terminals(self, leg: int) -> list[Word]:
        return [word for word in self.words.get(leg, []) if isinstance(word, Finished | Failed)]


class Witness:
    """Counts what the desk shows it."""

    def __init__(self) -> None:
        self.opened = self.refused = 0
        self.said: Counter[str] = Counter()
        self.alarms: list[str] = []

    def leg_refused(self, error: HeadraceError) -> None:
        self.refused += 1

    def leg_opened(self, order: LegOrder) -> None:
        self.opened += 1

    def leg_said(self, order: LegOrder, word: Word) -> None:
        self.said[type(word).__name__] += 1

    def alarm(self, order: LegOrder, what: str) -> None:
        self.alarms.append(what)


class DeskRig:
    """A desk between a router's ear and peers that only record."""

    def __init__(self, max_legs: int = 100) -> None:
        self.ear = Ear()
        self.engine: list[Any] = []
        self.transfer: list[Any] = []
        self.witness = Witness()
        self.desk = Desk(
            {**PREFILL_LEGS, **DECODE_LEGS},
            to_engine=self.engine.append,
            to_transfer=self.transfer.append,
            witness=self.witness,
            max_legs=max_legs,
        )

    def took(self) -> tuple[list[Any], list[Any]]:
        """Commands since the last call: (engine's, transfer's)."""
        found = (list(self.engine), list(self.transfer))
        self.engine.clear()
        self.transfer.clear()
        return found


@pytest.fixture
def make_desk() -> type[DeskRig]:
    return DeskRig


@pytest.fixture
def make_ear() -> type[Ear]:
    return Ear
