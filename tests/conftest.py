"""Shared by all tests: seeds that come from a test's name."""

from __future__ import annotations

import hashlib
import random

# What pytest asks about an object that was not closed; two threads that import it first at once get half of it.
import tracemalloc  # noqa: F401
from collections.abc import Generator

import pytest

SEED = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("headrace")
    group.addoption("--seed", type=int, default=None, help="replay with this seed instead of the test name's own")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The test's own number, the same on every machine; printed when the test fails, `--seed N` replays it."""
    chosen = request.config.getoption("--seed")
    if chosen is None:
        chosen = int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "little")
    request.node.stash[SEED] = chosen
    return int(chosen)


@pytest.fixture
def rng(seed: int) -> random.Random:
    """Draws from the test's seed."""
    return random.Random(seed)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    seed = item.stash.get(SEED, None)
    if report.failed and seed is not None:
        report.sections.append(("seed", f"replay with --seed {seed}"))
    return report
