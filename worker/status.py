"""Probes and scrapes, answered by a thread of their own that waits for nobody: /live /ready /metrics /state.

The same thread looks each second whether the worker makes progress, and ends the process when nothing but a restart
helps. It reads snapshots; it never asks the engine, the transfer thread or the event loop for anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from ..core.clock import Clock
from ..core.errors import ConfigError
from .lifecycle import ProgressWatch, WorkerState
from .metrics import Snapshots

logger = logging.getLogger(__name__)

LOOK_S = 1.0
MAX_CONNECTIONS = 64
EXIT_WEDGED = 70

Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
Send: TypeAlias = Callable[[dict[str, Any]], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class StatusSource:
    """What the answers are made from; each callable may be called in any thread."""

    snapshots: Snapshots
    describe: Callable[[], dict[str, Any]]
    """Who this is, and what the audits say, for `/state`."""
    registry: CollectorRegistry
    watch: ProgressWatch


class StatusServer:
    """The status thread. `start` binds and returns the port; `stop` ends it."""

    def __init__(
        self,
        source: StatusSource,
        *,
        host: str,
        port: int,
        clock: Clock,
        hopeless: Callable[[], None] = lambda: os._exit(EXIT_WEDGED),
    ) -> None:
        self._source = source
        self._host = host
        self._port = port
        self._clock = clock
        self._hopeless = hopeless
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> int:
        """Listen; the port.

        Raises:
            ConfigError: the port is taken.
        """
        listener = _listen(self._host, self._port)
        port = int(listener.getsockname()[1])
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._answer,
                log_config=None,
                log_level="warning",
                access_log=False,
                interface="asgi3",
                proxy_headers=False,
                lifespan="off",
                loop="asyncio",
                http="h11",
                ws="none",
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=5,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(target=self._run, args=(listener,), name="status", daemon=True)
        self._thread.start()
        return port

    def stop(self, timeout_s: float = 3.0) -> None:
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(timeout_s)

    def _run(self, listener: socket.socket) -> None:
        with contextlib.closing(listener):
            asyncio.run(self._serve(listener))

    async def _serve(self, listener: socket.socket) -> None:
        assert self._server is not None
        looking = asyncio.create_task(self._look())
        try:
            await self._server.serve(sockets=[listener])
        finally:
            looking.cancel()

    async def _look(self) -> None:
        source = self._source
        while True:
            source.watch.observe(source.snapshots.engine(), self._clock.now_s())
            if source.watch.hopeless:
                logger.critical("worker.hopeless stalled_s=%.0f", source.watch.stalled_s)
                self._hopeless()
                return
            await asyncio.sleep(LOOK_S)

    # ---- answers ----

    async def _answer(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        assert scope["type"] == "http"
        if scope["method"] not in ("GET", "HEAD"):
            await _reply(send, 405, {"error": "GET only"})
            return
        match scope["path"]:
            case "/live":
                status, body = self.live()
                await _reply(send, status, body)
            case "/ready":
                status, body = self.ready()
                await _reply(send, status, body)
            case "/state":
                await _reply(send, 200, self.state())
            case "/metrics":
                await _reply_bytes(send, 200, generate_latest(self._source.registry), CONTENT_TYPE_LATEST)
            case _:
                await _reply(send, 404, {"error": "no such page; there are /live /ready /metrics /state"})

    def live(self) -> tuple[int, dict[str, Any]]:
        """200 once the start is over, until nothing but a restart helps."""
        state, watch = self._state(), self._source.watch
        body = {"state": state.value, "stalled_s": round(watch.stalled_s, 3)}
        return (503 if state is WorkerState.STARTING or watch.hopeless else 200), body

    def ready(self) -> tuple[int, dict[str, Any]]:
        """200 in READY alone; else 503 with the reasons."""
        state, watch = self._state(), self._source.watch
        reasons: list[str] = []
        if state is not WorkerState.READY:
            reasons.append(f"state is {state.value}")
        if watch.wedged:
            reasons.append(f"work is present and no step has ended for {watch.stalled_s:.1f} s")
        return (503 if reasons else 200), {"ready": not reasons, "state": state.value, "reasons": reasons}

    def state(self) -> dict[str, Any]:
        """Everything that helps someone who debugs."""
        source = self._source
        load, counts = source.snapshots.engine(), source.snapshots.transfer()
        document: dict[str, Any] = {
            **source.describe(),
            "state": self._state().value,
            "legs": source.snapshots.num_legs(),
            "stalled_s": round(source.watch.stalled_s, 3),
        }
        if load is not None:
            document["engine"] = {
                "running": load.running,
                "waiting": load.waiting,
                "queued_tokens": load.queued_tokens,
                "steps": load.steps,
                "audit_mismatches": load.audit_mismatches,
            }
            document["pools"] = {kind: asdict(counts) for kind, counts in load.pools.items()}
        if counts is not None:
            document["transfers"] = {
                "subscriptions": dict(counts.subscriptions),
                "pulls": dict(counts.pulls),
                "send_buffers": dict(counts.send_buffers),
                "landing_buffers": dict(counts.landing_buffers),
                "taken": counts.transfers_taken,
                "served": counts.transfers_served,
                "failures": dict(counts.failures),
                "bytes_sent": counts.bytes_sent,
                "bytes_received": counts.bytes_received,
                "audit": list(counts.audit),
            }
            document["links"] = [
                {
                    "peer": link.peer,
                    "direction": link.direction.value,
                    "phase": link.phase.value,
                    "gigabytes_per_s": link.gigabytes_per_s,
                    "transport": link.transport,
                }
                for link in counts.links
            ]
        return document

    def _state(self) -> WorkerState:
        return self._source.snapshots.state()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's delay off only for sockets that say that they are TCP's.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ConfigError(f"worker.status_port: cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


async def _reply(send: Send, status: int, body: dict[str, Any]) -> None:
    await _reply_bytes(send, status, json.dumps(body).encode(), "application/json")


async def _reply_bytes(send: Send, status: int, body: bytes, content_type: str) -> None:
    headers = [(b"content-type", content_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
