"""One `headrace serve` with its children, as a test sees it: over HTTP, gRPC, signals and /proc, nothing else."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
from prometheus_client.parser import text_string_to_metric_families

from headrace.cli.ports import free_ports

T = TypeVar("T")

READY_LIMIT_S = 90.0
"""Patience of tests that do not measure readiness: the machine may be busy."""


@dataclass(frozen=True)
class Child:
    """A process that serve started."""

    name: str
    pid: int
    status_port: int | None
    """None for the router, whose status is on its HTTP port."""


class Cluster:
    """A running `headrace serve`. A context manager: the end of the block leaves no process behind.

    Args:
        words: more words for the command line.
        grpc: serve the public gRPC API too.
        environment: changes to this process's own.
    """

    def __init__(
        self, model: Path, *words: str, grpc: bool = False, environment: Mapping[str, str] | None = None
    ) -> None:
        self.port, self.grpc_port = free_ports("127.0.0.1", 2)
        self.url = f"http://127.0.0.1:{self.port}"
        self.grpc_target = f"127.0.0.1:{self.grpc_port}"
        edge = ["--grpc", "--grpc-port", str(self.grpc_port)] if grpc else []
        self.begin_s = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "headrace", "serve", str(model), "--port", str(self.port), *edge, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=60.0, trust_env=False)
        self._seen: dict[int, Child] = {}

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, failed: type[BaseException] | None, *rest: object) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.children()
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(20.0)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(5.0)
        if failed is not None:
            print(self.log())

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.decode(errors="replace").rstrip("\n"))

    def log(self) -> str:
        """What serve and its children have said so far; the last of it, if it is long."""
        return "\n".join(["---- log of headrace serve ----", *self.lines[-400:]])

    def wait_ready(self, limit_s: float = READY_LIMIT_S) -> float:
        """Wait for serve's own word and for /ready; seconds since the start."""
        self.until(lambda: any("headrace: serving" in line for line in self.lines), limit_s, "ready")
        assert self.is_ready()
        return time.monotonic() - self.begin_s

    def until(self, condition: Callable[[], T], limit_s: float, what: str) -> T:
        """Poll until `condition` holds; its value."""
        end_s = time.monotonic() + limit_s
        while True:
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                raise AssertionError(f"serve ended with {self.process.returncode} before: {what}\n{self.log()}")
            if time.monotonic() > end_s:
                raise AssertionError(f"not within {limit_s:g} s: {what}\n{self.log()}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        """What the router says on /ready."""
        try:
            return self.http.get("/ready", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def children(self) -> dict[str, Child]:
        """The living children by name, found by their parent and their command lines."""
        found: dict[str, Child] = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                words = (folder / "cmdline").read_bytes().decode().split("\0")
            except (OSError, ValueError, IndexError):
                continue
            if parent != self.process.pid or "--die-with" not in words:
                continue
            line = " ".join(words)
            name = re.search(r"worker\.worker_id=(\S+)", line)
            port = re.search(r"worker\.status_port=(\d+)", line)
            child = Child(name[1] if name else "router", int(folder.name), int(port[1]) if port else None)
            found[child.name] = child
            self._seen[child.pid] = child
        return found

    def ever_seen(self) -> list[Child]:
        """Every child that `children` has ever found."""
        return list(self._seen.values())

    def kill(self, name: str) -> None:
        """SIGKILL, as a crash would be."""
        os.kill(self.children()[name].pid, signal.SIGKILL)

    def state(self, name: str) -> dict[str, Any]:
        """A worker's /state."""
        port = self.children()[name].status_port
        found = httpx.get(f"http://127.0.0.1:{port}/state", timeout=10.0, trust_env=False).json()
        assert isinstance(found, dict)
        return found

    def count(self, name: str, sample: str, **labels: str) -> float:
        """A sample of a process's /metrics, summed over all labels that are not given."""
        port = self.port if name == "router" else self.children()[name].status_port
        text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10.0, trust_env=False).text
        return sum(
            found.value
            for family in text_string_to_metric_families(text)
            for found in family.samples
            if found.name == sample and labels.items() <= found.labels.items()
        )

    def until_clean(self, limit_s: float = 20.0) -> None:
        """Wait until every worker answers, and is as an idle one."""

        def is_clean() -> bool:
            try:
                return not any(unclean(self.state(name)) for name in self.workers())
            except httpx.HTTPError:
                return False

        self.until(is_clean, limit_s, "clean")

    def workers(self) -> list[str]:
        """Names of the living workers."""
        return sorted(name for name, child in self.children().items() if child.status_port is not None)

    def complete(self, **body: Any) -> dict[str, Any]:
        """POST /v1/completions; the answer, which must be good."""
        answer = self.http.post("/v1/completions", json=body, timeout=300.0)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        assert isinstance(found, dict)
        return found

    def stop(self, signum: signal.Signals = signal.SIGINT, limit_s: float = 30.0) -> int:
        """Signal serve and wait for its end; its exit status."""
        self.children()
        self.process.send_signal(signum)
        try:
            return self.process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"serve still lives {limit_s:g} s after {signum.name}\n{self.log()}") from None


def unclean(state: Mapping[str, Any]) -> list[str]:
    """What a worker's /state says that an idle, sound worker would not; empty is clean."""
    faults: list[str] = []
    if state.get("legs", 0):
        faults.append(f"{state['legs']} legs")
    engine = state.get("engine", {})
    for key in ("running", "waiting", "queued_tokens", "audit_mismatches"):
        if engine.get(key, 0):
            faults.append(f"engine.{key} {engine[key]}")
    for pool, sizes in state.get("pools", {}).items():
        if sizes["free"] + sizes["cached"] != sizes["total"] or sizes["reserved"]:
            faults.append(f"pool {pool} {json.dumps(sizes)}")
    transfers = state.get("transfers", {})
    for kind in ("send_buffers", "landing_buffers"):
        busy = {name: count for name, count in transfers.get(kind, {}).items() if name.lower() != "free" and count}
        if busy:
            faults.append(f"{kind} {busy}")
    faults += [str(fault) for fault in transfers.get("audit", [])]
    return faults


def listening_ports(pids: set[int] | None = None) -> set[int]:
    """TCP ports on which any of these processes listens; None: anybody."""
    inodes: set[str] = set()
    for pid in pids or ():
        for entry in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                found = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry))
            except OSError:
                continue
            if found:
                inodes.add(found[1])
    ports: set[int] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and (pids is None or words[9] in inodes):
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports
