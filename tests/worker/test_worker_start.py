"""A worker that is not ready yet, with its transfer process: what a signal or a death does to it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes import children, until_gone

from headrace.model.demo import ensure_demo

pytestmark = pytest.mark.process

LIMIT_S = 30.0


class Starting:
    """A decode worker, from its first moment on."""

    def __init__(self, log: Path) -> None:
        self.log = log
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [
                    sys.executable, "-P", "-m", "headrace", "decode", str(ensure_demo()), "--engine-port", "0",
                    "--peer-port", "0", "--status-port", "0", "--set", "engine.num_threads=1",
                ],
                stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env={**os.environ, "UCX_NET_DEVICES": "lo"},
            )  # fmt: skip

    def until(self, holds: Callable[[], object]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not holds():
            assert time.monotonic() < end_s, self.log.read_text()
            time.sleep(0.002)

    def until_said(self, words: str) -> None:
        self.until(lambda: re.search(words, self.log.read_text()))

    def child(self) -> int:
        """Its transfer process, as soon as it is there."""
        self.until(lambda: children(self.process.pid))
        return children(self.process.pid)[0]

    def end(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(self.log.read_text()) from None


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Starting]]:
    started: list[Starting] = []

    def make() -> Starting:
        started.append(Starting(tmp_path / f"{len(started)}.log"))
        return started[-1]

    yield make
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.mark.parametrize("words", ["cache.pools", "tensors=1 of", "tensors=140 of"])
def test_a_signal_while_the_model_loads_ends_it_well(start: Callable[[], Starting], words: str) -> None:
    """Status 0, not an abort of what was in the middle of C++; its child ends with it."""
    worker = start()
    worker.until_said(words)
    child = worker.child()
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 0, worker.log.read_text()
    until_gone([child])


def test_a_signal_is_heard_while_transfers_do_not_start(start: Callable[[], Starting]) -> None:
    """Their process stands still; nobody waits for it."""
    worker = start()
    child = worker.child()
    os.kill(child, signal.SIGSTOP)
    worker.until_said("tensors=349 of=349")
    time.sleep(2.0)
    assert worker.process.poll() is None
    worker.process.send_signal(signal.SIGTERM)
    assert worker.end() == 0, worker.log.read_text()
    until_gone([child])


def test_a_child_that_dies_while_the_model_loads_is_no_setting_to_change(start: Callable[[], Starting]) -> None:
    """A supervisor may try again: status 1, not 2; at once, not when the model is there."""
    worker = start()
    os.kill(worker.child(), signal.SIGKILL)
    assert worker.end() == 1
    said = worker.log.read_text()
    assert "the transfer process has ended with status -9" in said
    assert "event=ready" not in said
