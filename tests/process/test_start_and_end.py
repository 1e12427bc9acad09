"""Serve starts in time, tells the truth while it runs, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from process.cluster import Cluster, listening_ports
from support.processes import children

pytestmark = pytest.mark.process

LOOPBACK_V6 = {"00000000000000000000000001000000", "0000000000000000FFFF00000100007F"}
"""::1, and 127.0.0.1 as an IPv6 socket has it."""


def shared_memory(pids: list[int]) -> set[Path]:
    """Segments that these processes map; other clusters of this machine have their own."""
    found = set()
    for pid in pids:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line.partition("/dev/shm/")[2]
            if path:
                found.add(Path("/dev/shm", path.removesuffix(" (deleted)")))
    return found


def processes_of(cluster: Cluster) -> dict[int, str]:
    """Name by pid: router, workers, and the workers' transfer processes."""
    found = {}
    for name, child in cluster.children().items():
        found[child.pid] = name
        found |= dict.fromkeys(children(child.pid), f"{name}'s transfers")
    return found


def wait_gone(pids: list[int], limit_s: float) -> list[int]:
    """Those of `pids` that still live after `limit_s`; a zombie does not."""
    end_s = time.monotonic() + limit_s
    while True:
        left = []
        for pid in pids:
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    left.append(pid)
            except OSError:
                continue
        if not left or time.monotonic() > end_s:
            return left
        time.sleep(0.05)


def test_ready_and_gone_after_ctrl_c(pair: Cluster, demo_checkpoint: Path):
    """Ctrl-C ends with status 0 and leaves no process, no port, no shared-memory segment."""
    # Kernels are compiled once for a user and a machine; that first time is not what is measured, and `pair` had it.
    assert pair.is_ready()
    with Cluster(demo_checkpoint) as cluster:
        cluster.wait_ready()
        answer = cluster.complete(
            model=cluster.http.get("/v1/models").json()["data"][0]["id"], prompt="The", max_tokens=4
        )
        assert answer["choices"][0]["finish_reason"] in ("length", "stop")
        running = processes_of(cluster)
        workers = ("prefill-0", "decode-0")
        assert set(running.values()) == {"router", *workers, *(f"{name}'s transfers" for name in workers)}
        pids = list(running)
        ports = listening_ports({*pids, cluster.process.pid})
        segments = shared_memory(pids)
        assert cluster.port in ports
        assert cluster.stop(signal.SIGINT) == 0
    assert wait_gone(pids, 0.0) == []
    assert [segment for segment in segments if segment.exists()] == []
    # Not whether they could be had: some are the kernel's to give to anybody's outgoing connections.
    assert not ports & listening_ports()


def test_nothing_listens_beyond_loopback(pair: Cluster):
    """One host needs no other: not HTTP, not gRPC, not NIXL's own listener."""
    exposed = []
    for pid, name in processes_of(pair).items():
        inodes = {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()}
        for table, local in (("tcp", {"0100007F"}), ("tcp6", LOOPBACK_V6)):
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                words = line.split()
                address = words[1].partition(":")[0]
                if words[3] == "0A" and f"socket:[{words[9]}]" in inodes and address not in local:
                    exposed.append((name, words[1]))
    assert exposed == []


def test_ctrl_c_while_loading_ends_at_once(demo_checkpoint: Path):
    """Nobody waits for a start that is not wanted any more."""
    with Cluster(demo_checkpoint) as cluster:
        cluster.until(lambda: len(cluster.children()) == 3, 20.0, "children started")
        pids = list(processes_of(cluster))
        assert cluster.stop(signal.SIGINT, 20.0) == 0
        assert wait_gone(pids, 0.0) == []


def test_dead_children_are_replaced_on_their_ports(mortal: Cluster):
    """Other processes under the same names and ports; readiness says no in between, and requests work after."""
    for victims in (("prefill-0", "decode-0"), ("router",)):
        old = {name: mortal.children()[name] for name in victims}
        lives = {name: mortal.state(name)["incarnation"] for name in victims if old[name].status_port}
        for name in victims:
            mortal.kill(name)
        mortal.until(lambda: not mortal.is_ready(), 10.0, f"not ready without {victims}")
        mortal.until(mortal.is_ready, 60.0, f"ready again with other {victims}")
        for name in victims:
            new = mortal.children()[name]
            assert new.pid != old[name].pid
            assert new.status_port == old[name].status_port
            if name in lives:
                assert mortal.state(name)["incarnation"] != lives[name]
        answer = mortal.complete(model="demo", prompt="The water", max_tokens=8)
        assert answer["usage"]["completion_tokens"] >= 1


def test_killed_supervisor_leaves_no_orphan(mortal: Cluster):
    """kill -9 to serve: the kernel ends its children."""
    pids = list(processes_of(mortal))
    assert len(pids) == 5
    mortal.process.kill()
    mortal.process.wait()
    assert wait_gone(pids, 10.0) == []


def test_demo_once_answers_and_ends():
    """`make demo ONCE=1`: an answer, what happened, status 0, and nobody left."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "headrace", "demo", "--once", "--port", "0"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120.0, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    for word in ("TTFT", "ITL", "tokens", "pages", "shipped", "shared memory"):
        assert word in done.stdout
