"""`headrace serve`: the shell of the supervisor. Starts processes, probes them, passes signals on, shows progress.

Children are started by exec in sessions of their own, so that a terminal's Ctrl-C reaches only this process, which then
lets the router drain before the workers. They are told this process's id and ask the kernel to die with it. Their ports
are chosen once and kept across restarts, so that the router's list of workers stays true.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..config.load import ENV_API_KEY, ENV_CONFIG, ENV_PREFIX, FIELDS, as_flags, replace
from ..config.resolve import GPU_MEMORY_UTILIZATION
from ..config.tree import Config
from ..core.errors import ConfigError
from .ports import check_free, free_ports
from .supervisor import (
    Action,
    AllReady,
    ChildSpec,
    ChildState,
    Event,
    Exited,
    Finish,
    Policy,
    Probed,
    Signal,
    Spawn,
    StopAsked,
    Supervisor,
    Tell,
    Tick,
)

logger = logging.getLogger(__name__)

PROBE_STARTING_S = 0.1
PROBE_READY_S = 1.0
PROBE_TIMEOUT_S = 2.0
PROGRESS_S = 3.0
"""How often someone who waits is told what for."""
MAX_LINE_BYTES = 8192
KILL_MARGIN_S = 5.0
"""What a child may need beyond its own drain to leave."""


@dataclass(frozen=True, kw_only=True)
class Child:
    """How to start a child, and where it tells its readiness."""

    spec: ChildSpec
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    status_host: str
    status_port: int


def serve(config: Config) -> int:
    """Serve until a signal ends it; the exit status."""
    config = complete(config)

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    async def when_ready() -> None:
        say(f"headrace: serving {config.model.path} at {base_url(config)} (Ctrl-C drains and ends)")

    return asyncio.run(HostServer(config, say=say, when_ready=when_ready, show=say).run())


def complete(config: Config) -> Config:
    """The settings with this host's ports and each worker's share of it filled in.

    Raises:
        ConfigError: no checkpoint at the path, or nothing can listen at the wanted address.
    """
    if not (Path(config.model.path) / "config.json").is_file():
        raise ConfigError(f"model.path: no config.json in {config.model.path or 'an unnamed directory'}")
    changes: dict[str, object] = {"model.path": str(Path(config.model.path).resolve())}
    host = config.router.host
    if config.router.port == 0:
        changes["router.port"] = free_ports(host, 1)[0]
    else:
        check_free(host, config.router.port, "router.host, router.port")
    if config.router.grpc_enabled:
        if config.router.grpc_port == 0:
            changes["router.grpc_port"] = free_ports(config.router.grpc_host, 1)[0]
        else:
            check_free(config.router.grpc_host, config.router.grpc_port, "router.grpc_host, router.grpc_port")
    if config.engine.num_threads == 0:
        changes["engine.num_threads"] = max(1, len(os.sched_getaffinity(0)) // len(worker_names(config)))
    if config.cache.gpu_memory_utilization == 0 and len(worker_names(config)) > 1:
        # They all see the same GPU first, if there is one.
        changes["cache.gpu_memory_utilization"] = round(GPU_MEMORY_UTILIZATION / len(worker_names(config)), 3)
    return replace(config, changes)


def worker_names(config: Config) -> list[tuple[str, str, str]]:
    """(worker id, command, role) of each worker that the settings ask for."""
    if config.serve.monolithic:
        return [(f"worker-{index}", "decode", "both") for index in range(config.serve.decode)]
    prefill = [(f"prefill-{index}", "prefill", "prefill") for index in range(config.serve.prefill)]
    return prefill + [(f"decode-{index}", "decode", "decode") for index in range(config.serve.decode)]


def base_url(config: Config) -> str:
    """Where clients on this host find the router."""
    host = reachable(config.router.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{config.router.port}"


def reachable(host: str) -> str:
    """An address to dial for what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host.strip("[]"))


def plan_children(config: Config, environment: Mapping[str, str]) -> list[Child]:
    """The router and the workers with their command lines.

    Settings travel in command lines, so that a line from the log starts the same process by hand; this process's own
    HEADRACE_ settings are therefore taken out of the environment. Only the router gets the API keys, and not as words.
    """
    names = worker_names(config)
    host = config.worker.host
    ports = free_ports(host, 3 * len(names))
    plain = {name: value for name, value in environment.items() if not _is_setting(name)}
    plain["PYTHONUNBUFFERED"] = "1"
    if config.model.device != "cuda" and host in ("127.0.0.1", "localhost"):
        # Unset, UCX listens on the host's routable addresses too.
        plain.setdefault("UCX_NET_DEVICES", "lo")
    python = (sys.executable, "-P", "-m", "headrace")
    parent = ("--die-with", str(os.getpid()))
    workers: list[Child] = []
    for index, (worker_id, command, role) in enumerate(names):
        engine_port, peer_port, status_port = ports[3 * index : 3 * index + 3]
        own = replace(
            config,
            {
                "worker.worker_id": worker_id,
                "worker.role": role,
                "worker.engine_port": engine_port,
                "worker.peer_port": peer_port,
                "worker.status_port": status_port,
            },
        )
        # The role is said even where it is the tree's default: the command has its own.
        words = (*python, command, config.model.path, *as_flags(own, _not_for_workers()),
                 "--set", f"worker.role={role}", *parent)  # fmt: skip
        spec = ChildSpec(name=worker_id, stop_rank=1, drain_s=config.worker.drain_s + KILL_MARGIN_S)
        threads = {"OMP_NUM_THREADS": str(config.engine.num_threads)}
        workers.append(
            Child(spec=spec, words=words, environment=plain | threads, status_host=host, status_port=status_port)
        )
    addresses = ",".join(f"{host}:{ports[3 * index]}" for index in range(len(names)))
    edge = as_flags(config, [key for key in FIELDS if key.startswith(("serve.", "worker."))] + ["model.path"])
    router = Child(
        spec=ChildSpec(name="router", stop_rank=0, drain_s=config.router.drain_s + KILL_MARGIN_S),
        words=(*python, "router", config.model.path, *edge, "--set", f"router.workers={addresses}", *parent),
        environment=plain | ({ENV_API_KEY: ",".join(config.router.api_keys)} if config.router.api_keys else {}),
        status_host=reachable(config.router.host),
        status_port=config.router.port,
    )
    return [router, *workers]


def _is_setting(name: str) -> bool:
    roots = {ENV_PREFIX + key.upper() for key in FIELDS if "." not in key}
    return name.startswith(ENV_PREFIX) and ("__" in name or name in roots or name in (ENV_API_KEY, ENV_CONFIG))


def _not_for_workers() -> list[str]:
    return [key for key in FIELDS if key.startswith(("serve.", "router."))] + ["model.path", "worker.role"]


class HostServer:
    """Runs one host's children until they have all ended.

    Args:
        say: takes one line of this process's own.
        show: takes one line that a child wrote, with the child's name before it.
        when_ready: awaited in a task of its own once all children are ready for the first time.
    """

    def __init__(
        self,
        config: Config,
        *,
        say: Callable[[str], None],
        show: Callable[[str], None],
        when_ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._children = {child.spec.name: child for child in plan_children(config, os.environ)}
        policy = Policy(restart=config.serve.restart, ready_timeout_s=config.serve.ready_timeout_s)
        self._supervisor = Supervisor([child.spec for child in self._children.values()], policy)
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._tasks: set[asyncio.Task[None]] = set()
        self._say, self._show, self._when_ready = say, show, when_ready
        self._status: int | None = None

    async def run(self) -> int:
        """Start all, keep them, and end them on SIGINT or SIGTERM; the exit status."""
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self.stop)
        self._say(f"headrace: starting {', '.join(self._children)}")
        for name in self._children:
            self._start(self._probe(name))
        self._start(self._report_progress())
        event: Event = Tick()
        try:
            while True:
                for action in self._supervisor.handle(event, time.monotonic()):
                    await self._perform(action)
                if self._status is not None:
                    return self._status
                event = await self._next_event()
        finally:
            for process in self._processes.values():
                if process.returncode is None:
                    process.kill()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def stop(self) -> None:
        """Drain and end; asked again, kill."""
        self._events.put_nowait(StopAsked())

    async def _next_event(self) -> Event:
        pause_s = max(0.0, self._supervisor.next_wake_s() - time.monotonic())
        try:
            return await asyncio.wait_for(self._events.get(), min(pause_s, 3600.0))
        except TimeoutError:
            return Tick()

    async def _perform(self, action: Action) -> None:
        match action:
            case Spawn(name):
                await self._spawn(self._children[name])
            case Signal(name, signum):
                with contextlib.suppress(ProcessLookupError):
                    self._processes[name].send_signal(signum)
            case Tell(text):
                self._say(f"headrace: {text}")
            case AllReady():
                self._start(self._run_when_ready())
            case Finish(status):
                self._status = status

    async def _run_when_ready(self) -> None:
        await self._when_ready()

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            # A probe or the demo's own code is broken: not a state to serve in.
            logger.error("serve.task_failed", exc_info=task.exception())
            self.stop()

    async def _spawn(self, child: Child) -> None:
        logger.debug("serve.spawn name=%s command=%s", child.spec.name, " ".join(child.words))
        try:
            process = await asyncio.create_subprocess_exec(
                *child.words,
                env=child.environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            self._say(f"headrace: cannot start {child.spec.name}: {error}")
            self._events.put_nowait(Exited(child.spec.name, 127))
            return
        self._processes[child.spec.name] = process
        self._start(self._watch(child.spec.name, process))

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        """Pass the child's lines on until it ends, then report its end."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(65_536):
            *lines, rest = (rest + chunk).split(b"\n")
            rest = rest[:MAX_LINE_BYTES]
            for line in lines:
                self._show(f"{name} | {line[:MAX_LINE_BYTES].decode(errors='replace')}")
        if rest:
            self._show(f"{name} | {rest.decode(errors='replace')}")
        status = await process.wait()
        self._events.put_nowait(Exited(name, status))

    async def _probe(self, name: str) -> None:
        child = self._children[name]
        while True:
            state = self._supervisor.state(name)
            await asyncio.sleep(PROBE_READY_S if state is ChildState.READY else PROBE_STARTING_S)
            if state in (ChildState.STARTING, ChildState.READY, ChildState.UNREADY):
                ready = await is_ready(child.status_host, child.status_port)
                self._events.put_nowait(Probed(name, ready))

    async def _report_progress(self) -> None:
        since_s = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_S)
            waiting = [n for n in self._children if self._supervisor.state(n) is ChildState.STARTING]
            if waiting:
                self._say(f"headrace: loading {', '.join(waiting)} ({time.monotonic() - since_s:.0f} s)")
            else:
                since_s = time.monotonic()


async def is_ready(host: str, port: int) -> bool:
    """Whether GET /ready answers 200 in time."""
    try:
        async with asyncio.timeout(PROBE_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /ready HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError, ValueError):
        return False
    return status_line.split(b" ")[1:2] == [b"200"]
