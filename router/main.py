"""The router process: sockets, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import signal
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from ..config.tree import Config
from ..core.clock import MonotonicClock
from ..core.errors import ConfigError, Draining
from ..traces.spans import open_traces
from .connection import EdgeConnection
from .dispatch import Dispatcher
from .generation import Edge
from .grpc_api import GrpcSurface
from .http import HttpSurface
from .metrics import RouterMetrics
from .served_model import load_served_model
from .session import SessionTimes
from .tokenizer import TokenizerPool

log = logging.getLogger("headrace.router")

KEEP_ALIVE_S = 120
"""Longer than the idle time after which load generators and proxies reuse a connection."""

LISTEN_BACKLOG = 2048
"""Connections that wait to be accepted."""

SECRETS = ("api_keys",)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: how to leave is decided here."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Router:
    """One router in this event loop. `start` binds and prints nothing; `drain` leaves gracefully."""

    def __init__(self, config: Config, *, times: SessionTimes | None = None, seed: int | None = None) -> None:
        """
        Raises:
            ConfigError: the checkpoint or an address cannot be used.
        """
        self._section = config.router
        clock = MonotonicClock()
        model = load_served_model(config.model, config.router.effort_profile)
        self._pool = TokenizerPool(model.tokenizer, threads=config.router.tokenizer_threads)
        self.dispatcher = Dispatcher(config.router, clock=clock, metrics=RouterMetrics(), times=times, seed=seed)
        self.edge = Edge(
            model=model,
            pool=self._pool,
            dispatcher=self.dispatcher,
            clock=clock,
            default_max_tokens=config.router.default_max_tokens,
            strict_fields=config.router.strict_fields,
            request_timeout_s=config.router.request_timeout_s,
            max_model_len=config.model.max_model_len,
            traces=open_traces(config.otlp_traces_endpoint, "headrace-router", f"router-{os.getpid()}"),
        )
        self.http = HttpSurface(self.edge, config.router, _shown_settings(config))
        self.grpc: GrpcSurface | None = None
        self.http_address = ""
        self.grpc_address = ""
        self._http_task: asyncio.Task[None] | None = None
        self._server: _Server | None = None

    async def start(self) -> None:
        """Bind, serve, connect to the workers."""
        section = self._section
        sock = _bind(section.host, section.port)
        host, port = sock.getsockname()[:2]
        self.http_address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        loopback = section.host in ("127.0.0.1", "::1", "localhost")
        if not section.api_keys and not loopback:
            log.warning("event=open_listener host=%s text='no API key is configured'", section.host)
        if section.grpc_enabled:
            self.grpc = GrpcSurface(self.edge, section, self.http)
            try:
                self.grpc_address = await self.grpc.start(f"{section.grpc_host}:{section.grpc_port}")
            except Exception:
                sock.close()
                raise
        config = uvicorn.Config(
            self.http.app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            http=EdgeConnection,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            server_header=False,
            date_header=True,
            proxy_headers=False,
        )
        self._server = _Server(config)
        self._http_task = asyncio.create_task(self._server.serve(sockets=[sock]))
        while not self._server.started:
            if self._http_task.done():
                self._http_task.result()
                raise ConfigError(f"router.port: the HTTP server did not start on {self.http_address}")
            await asyncio.sleep(0.005)
        self.dispatcher.start()

    async def drain(self, budget_s: float) -> None:
        """Take nothing new, let what runs finish for `budget_s`, then end it with errors."""
        self.http.is_draining = True
        if self.grpc is not None:
            self.grpc.leaving()
        log.info("event=draining in_flight=%d budget_s=%.1f", self.dispatcher.num_alive, budget_s)
        await self.dispatcher.wait_idle(budget_s)
        self.dispatcher.end_all(Draining("the router is leaving"))

    async def stop(self) -> None:
        """End what still runs, close the listeners and the sessions."""
        self.http.is_draining = True
        await self.dispatcher.stop()
        if self.grpc is not None:
            await self.grpc.stop()
        if self._server is not None and self._http_task is not None:
            self._server.should_exit = True
            done, _ = await asyncio.wait({self._http_task}, timeout=2.0)
            if not done:
                self._server.force_exit = True
                await self._http_task
        self._pool.close()
        await asyncio.to_thread(self.edge.traces.close)


async def serve(config: Config) -> None:
    """Run a router until SIGTERM or SIGINT; the second one ends it at once."""
    router = Router(config)
    leave, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if leave.is_set() else leave).set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        await router.start()
        # One line for whoever started this process with port 0.
        print(f"event=listening http={router.http_address} grpc={router.grpc_address or '-'}", flush=True)
        await leave.wait()
        drain = asyncio.create_task(router.drain(config.router.drain_s))
        rush = asyncio.create_task(hurry.wait())
        await asyncio.wait({drain, rush}, return_when=asyncio.FIRST_COMPLETED)
        drain.cancel()
        rush.cancel()
    finally:
        await router.stop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def run(config: Config) -> int:
    """The process's exit status."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(serve(config))
    else:
        uvloop.run(serve(config))
    return 0


def _bind(host: str, port: int) -> socket.socket:
    """
    Raises:
        ConfigError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        # Two that only bind are not told of each other; the second that listens is, here and not somewhere in a server.
        sock.listen(LISTEN_BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"router.host, router.port: cannot listen on {host}:{port}: {error.strerror}") from error
    return sock


def _shown_settings(config: Config) -> dict[str, Any]:
    router = {key: value for key, value in dataclasses.asdict(config.router).items() if key not in SECRETS}
    return {"router": router, "model": dataclasses.asdict(config.model)}
