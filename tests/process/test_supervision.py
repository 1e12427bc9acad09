"""The supervisor's shell with real processes that only pretend to serve: starts, deaths, signals, output."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.cli import serve as serve_module
from headrace.cli.ports import free_ports, is_free
from headrace.cli.serve import Child, HostServer, is_ready
from headrace.cli.supervisor import ChildSpec
from headrace.config.load import load

pytestmark = pytest.mark.process

PRETENDER = """
import http.server, os, signal, sys, threading, time
from headrace.cli.parent import die_with
die_with(int(sys.argv[1]))
mode, port, folder = sys.argv[2], int(sys.argv[3]), sys.argv[4]
print(f"hello from {os.getpid()}", flush=True)
open(f"{folder}/{port}.{os.getpid()}", "w").close()
if mode == "refuses":
    sys.exit(2)
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 404)
        self.end_headers()
    def log_message(self, *words):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Answer)
def leave(signum, frame):
    print("leaving", flush=True)
    if mode != "stubborn":
        threading.Thread(target=server.shutdown).start()
signal.signal(signal.SIGTERM, leave)
server.serve_forever()
"""


class Stage:
    """A HostServer over pretenders, and what it said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path, **modes: str) -> None:
        self.folder = folder
        self.ports = dict(zip(modes, free_ports("127.0.0.1", len(modes)), strict=True))
        children = [
            Child(
                spec=ChildSpec(name=name, stop_rank=0 if name == "router" else 1, drain_s=2.0),
                words=(
                    *(sys.executable, "-P", "-c", PRETENDER),
                    *(str(os.getpid()), mode, str(self.ports[name]), str(folder)),
                ),
                environment=dict(os.environ),
                status_host="127.0.0.1",
                status_port=self.ports[name],
            )
            for name, mode in modes.items()
        ]  # fmt: skip
        monkeypatch.setattr(serve_module, "plan_children", lambda config, environment: children)
        self.said: list[str] = []
        self.shown: list[str] = []
        self.ready = asyncio.Event()
        config = load(flags={"serve.ready_timeout_s": "20"})
        self.server = HostServer(config, say=self.said.append, show=self.shown.append, when_ready=self._when_ready)

    async def _when_ready(self) -> None:
        self.ready.set()

    def pids(self, name: str) -> list[int]:
        """Every process that this child ever was."""
        return [int(path.suffix[1:]) for path in self.folder.glob(f"{self.ports[name]}.*")]

    async def act(self, script: Callable[[], object]) -> int:
        """Run the server, and `script` in a thread once all is ready; the exit status."""

        async def scripted() -> None:
            await self.ready.wait()
            await asyncio.to_thread(script)
            self.server.stop()

        playing = asyncio.create_task(scripted())
        async with asyncio.timeout(60.0):
            status = await self.server.run()
            if not self.ready.is_set():
                playing.cancel()
            await asyncio.gather(playing, return_exceptions=True)
        return status


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def until(condition: Callable[[], object]) -> None:
    end_s = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def test_children_start_speak_and_leave(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Their lines are shown under their names; at the end none lives, and their ports are free."""
    stage = Stage(monkeypatch, tmp_path, router="sound", worker="sound")
    assert asyncio.run(stage.act(lambda: None)) == 0
    (pid,) = stage.pids("router")
    assert f"router | hello from {pid}" in stage.shown
    assert "worker | leaving" in stage.shown
    assert stage.shown.index("router | leaving") < stage.shown.index("worker | leaving")
    assert not any(lives(pid) for name in stage.ports for pid in stage.pids(name))
    assert all(is_free("127.0.0.1", port) for port in stage.ports.values())


def test_killed_child_comes_back_on_its_port(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Another process, the same port."""
    stage = Stage(monkeypatch, tmp_path, router="sound", worker="sound")

    def script() -> None:
        (old,) = stage.pids("worker")
        os.kill(old, signal.SIGKILL)
        until(lambda: len(stage.pids("worker")) == 2)
        until(lambda: asyncio.run(is_ready("127.0.0.1", stage.ports["worker"])))

    assert asyncio.run(stage.act(script)) == 0
    assert "headrace: worker ended with signal 9: starting it again in 0.5 s" in stage.said
    assert len(stage.pids("router")) == 1


def test_stubborn_child_is_killed_in_the_end(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Its drain is bounded."""
    stage = Stage(monkeypatch, tmp_path, router="sound", worker="stubborn")
    assert asyncio.run(stage.act(lambda: None)) == 0
    assert "headrace: worker has not left: killing it" in stage.said
    assert not any(lives(pid) for pid in stage.pids("worker"))


def test_configuration_error_of_a_child_ends_the_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Status 1, the others are told to leave, and the child's own words were shown."""
    stage = Stage(monkeypatch, tmp_path, router="sound", worker="refuses")
    assert asyncio.run(stage.act(lambda: None)) == 1
    assert any("worker ended with status 2: giving up" in line for line in stage.said)
    assert not any(lives(pid) for name in stage.ports for pid in stage.pids(name))
