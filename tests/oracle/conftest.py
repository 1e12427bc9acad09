"""Lets the tests of this folder, and of others, import `oracle.builder`, `oracle.plain` and the rest by name."""

import sys
from pathlib import Path

import pytest

TESTS = str(Path(__file__).resolve().parents[1])
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    from oracle.judge import Checkpoints

    return Checkpoints(tmp_path_factory.mktemp("oracle"))
