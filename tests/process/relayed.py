"""A router and workers behind a relay, started and started again by the test; and a client that can leave at any byte.

The command lines are those of `headrace serve`, without its supervisor: a test decides when a process lives.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
from process.cluster import READY_LIMIT_S, unclean
from process.relay import Relay
from prometheus_client.parser import text_string_to_metric_families
from support.processes import signal_worker

from headrace.cli.serve import Child, complete, plan_children
from headrace.config.load import load

HANG_S = 150.0
"""A request that has not ended by then hangs; all deadlines of its own are shorter."""


class RelayedCluster:
    """A context manager; the end of the block leaves no process behind.

    Args:
        folder: for what the processes say.
        settings: beyond the defaults, by key.
        environment: changes to this process's own.
    """

    def __init__(
        self, model: Path, folder: Path, settings: Mapping[str, str], environment: Mapping[str, str] | None = None
    ) -> None:
        flags = {"model.path": str(model), "model.served_names": "demo", "router.port": "0", **settings}
        config = complete(load(flags=flags))
        children = plan_children(config, {**os.environ, **(environment or {})})
        self._children = {child.spec.name: child for child in children}
        self.names = [name for name in self._children if name != "router"]
        self.port = self._children["router"].status_port
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.relay = Relay()
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=30.0, trust_env=False)
        self.start_values: dict[str, Any] = {}

    def __enter__(self) -> RelayedCluster:
        addresses = [
            self.relay.stand_before(name, self._address(name, "engine"), self._address(name, "peer"))
            for name in self.names
        ]
        router = self._children["router"]
        words = (*router.words, "--set", f"router.workers={','.join(addresses)}")
        self._children["router"] = Child(
            spec=router.spec, words=words, environment=router.environment,
            status_host=router.status_host, status_port=router.status_port,
        )  # fmt: skip
        try:
            for name in self._children:
                self.start(name)
            self.wait_ready()
            self.start_values = {name: self._resources(name) for name in self.names}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *failed: object) -> None:
        self.http.close()
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.wait()
        self.relay.__exit__()

    def _address(self, name: str, service: str) -> str:
        """Where a worker itself listens."""
        words = self._children[name].words
        (port,) = (word.partition("=")[2] for word in words if word.startswith(f"worker.{service}_port="))
        return f"127.0.0.1:{port}"

    # ---- processes ----

    def start(self, name: str) -> None:
        """Start a process, for the first time or again, on its own ports."""
        child = self._children[name]
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                child.words, env=dict(child.environment), stdin=subprocess.DEVNULL, stdout=log,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def kill(self, name: str) -> None:
        """SIGKILL, and see it gone."""
        self._processes[name].kill()
        self._processes[name].wait()

    def stop(self, name: str) -> None:
        """SIGSTOP: it keeps its connections and its memory, and does nothing."""
        signal_worker(self.pid(name), signal.SIGSTOP)

    def resume(self, name: str) -> None:
        signal_worker(self.pid(name), signal.SIGCONT)

    def pid(self, name: str) -> int:
        """Of the living process; it must live."""
        process = self._processes[name]
        assert process.poll() is None, f"{name} ended with {process.returncode}\n{self.log()}"
        return process.pid

    def resident_bytes(self, name: str) -> int:
        words = Path(f"/proc/{self.pid(name)}/statm").read_text().split()
        return int(words[1]) * os.sysconf("SC_PAGE_SIZE")

    def num_files(self, name: str) -> int:
        """Open file descriptors."""
        return len(os.listdir(f"/proc/{self.pid(name)}/fd"))

    def log(self) -> str:
        """The last of what the processes said."""
        parts: list[str] = []
        for path in sorted(self._folder.glob("*.log")):
            parts += [f"---- {path.name} ----", *path.read_text(errors="replace").splitlines()[-100:]]
        return "\n".join(parts)

    # ---- states ----

    def wait_ready(self, limit_s: float = READY_LIMIT_S) -> None:
        """Until the router is in session with the present life of every worker, and all are ready."""

        def is_ready() -> bool:
            lives = {name: self.state(name)["incarnation"] for name in self.names}
            known = {worker["worker_id"]: worker["incarnation"] for worker in self._known_workers()}
            return lives == known and self.http.get("/ready").status_code == 200

        self.until(is_ready, limit_s, "ready")

    def until(self, condition: Callable[[], bool], limit_s: float, what: str) -> None:
        """Poll until it holds; what does not answer yet does not hold."""
        end_s = time.monotonic() + limit_s
        while True:
            try:
                if condition():
                    return
            except (httpx.HTTPError, KeyError):
                pass
            assert time.monotonic() < end_s, f"not within {limit_s:g} s: {what}\n{self.log()}"
            time.sleep(0.01)

    def state(self, name: str) -> dict[str, Any]:
        """A worker's /state."""
        found = self.http.get(self._status(name, "state"), timeout=5.0).json()
        assert isinstance(found, dict)
        return found

    def count(self, name: str, sample: str) -> float:
        """A sample of the /metrics of the router or a worker, summed over its labels."""
        text = self.http.get(self._status(name, "metrics"), timeout=5.0).text
        return sum(
            found.value
            for family in text_string_to_metric_families(text)
            for found in family.samples
            if found.name == sample
        )

    def _known_workers(self) -> list[dict[str, Any]]:
        """As the router sees them."""
        workers = self.http.get("/server_info").json()["workers"]
        assert isinstance(workers, list)
        return workers

    def _status(self, name: str, page: str) -> str:
        return f"http://127.0.0.1:{self._children[name].status_port}/{page}"

    def _resources(self, name: str) -> dict[str, Any]:
        """All that can be held, and how much of it is."""
        state = self.state(name)
        transfers = state["transfers"]
        kinds = ("subscriptions", "pulls", "send_buffers", "landing_buffers")
        return {"pools": state["pools"], "legs": state["legs"], **{kind: transfers[kind] for kind in kinds}}

    def until_idle(self, limit_s: float) -> None:
        """Until the router has no request and every worker holds nothing but cached blocks; no audit found a fault."""
        held: dict[str, object] = {}

        def is_idle() -> bool:
            held.clear()
            for name in self.names:
                state = self.state(name)
                busy = {
                    kind: counts
                    for kind in ("subscriptions", "pulls")
                    if any((counts := state["transfers"][kind]).values())
                }
                if faults := [*unclean(state), *busy.items()]:
                    held[name] = faults
            if legs := {
                worker["worker_id"]: worker["own_legs"] for worker in self._known_workers() if worker["own_legs"]
            }:
                held["router's legs"] = legs
            for sample in ("headrace:num_requests_running", "headrace:num_requests_waiting"):
                if count := self.count("router", sample):
                    held[sample] = count
            return not held

        try:
            self.until(is_idle, limit_s, "idle")
        except AssertionError as failure:
            raise AssertionError(f"{failure}\nstill held: {held}") from None
        for name in self.names:
            for sample in ("headrace:kv_audit_mismatch_total", "headrace:leg_alarms_total"):
                assert self.count(name, sample) == 0, (name, sample)

    def until_as_at_start(self, limit_s: float) -> None:
        """Forget the prefix caches; then every pool and every buffer of every worker is as it was at the start."""
        found: dict[str, Any] = {}
        placed = 0.0

        def forget() -> None:
            nonlocal placed
            placed = self.count("router", "headrace:router_decisions_total")
            self.until_idle(limit_s)
            assert self.http.post("/reset_prefix_cache").status_code == 200

        def is_as_at_start() -> bool:
            # A request whose client left before the router had read it may come only now.
            if self.count("router", "headrace:router_decisions_total") != placed:
                forget()
            found.update({name: self._resources(name) for name in self.names})
            return found == self.start_values

        forget()
        try:
            self.until(is_as_at_start, 10.0, "as at the start")
        except AssertionError as failure:
            raise AssertionError(f"{failure}\nat the start {self.start_values}\nnow {found}") from None

    # ---- requests ----

    def ask(self, prompt: list[int], max_tokens: int, *, stream: bool = True) -> Asked:
        """Send a greedy request; what comes of it is read later."""
        return Asked(self.port, prompt, max_tokens, stream=stream)


class Asked:
    """One request as its client sees it."""

    def __init__(self, port: int, prompt: list[int], max_tokens: int, *, stream: bool) -> None:
        self.ids: list[int] = []
        """Output so far."""
        self.error: str | None = None
        """An explicit one: a status of 400 or more, or an error event."""
        self.status = 0
        self._stream = stream
        self._end_s = time.monotonic() + HANG_S
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        self._answer: http.client.HTTPResponse | None = None
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        self._connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})

    def leave(self) -> None:
        """Close the connection, with whatever is on its way."""
        if self._answer is not None:
            self._answer.close()
        self._connection.close()

    def read_first(self) -> None:
        """Until the first output is here."""
        while not self.ids:
            assert self._read_event(), f"no output: {self.error}"

    def read_all(self) -> Asked:
        """To the end, which is a good one or an explicit error."""
        try:
            if self._stream:
                while self._read_event():
                    pass
            else:
                self._read_body()
        finally:
            self.leave()
        return self

    def _begin(self) -> http.client.HTTPResponse:
        if self._answer is None:
            self._answer = self._connection.getresponse()
            self.status = self._answer.status
        return self._answer

    def _read_body(self) -> None:
        document = json.loads(self._begin().read())
        if self.status >= 400:
            self.error = document["error"]["message"]
        else:
            assert self.status == 200
            self.ids = document["choices"][0]["token_ids"]

    def _read_event(self) -> bool:
        """Take in one event; False after the last one."""
        answer = self._begin()
        if self.status != 200:
            self._read_body()
            return False
        while True:
            assert time.monotonic() < self._end_s, f"no end after {self.ids}"
            line = answer.readline().decode()
            assert line, f"the stream ended without a word after {self.ids}"
            word = line.strip().removeprefix("data: ")
            if not line.startswith("data: "):
                continue
            if word == "[DONE]":
                return False
            document = json.loads(word)
            if "error" in document:
                self.error = document["error"]["message"]
                return False
            for choice in document["choices"]:
                self.ids += choice.get("token_ids") or []
            return True
