"""One worker process from start to exit: engine thread, event loop, status thread, and transfers, here or in a child.

The event loop owns the desk; engine and transfers hand their events over and wait for nobody. Settings arrive resolved
and with logging started. A broken invariant in any thread ends the process at once: its incarnation dies with it, and
routers and peers know what that means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from .. import __version__
from ..config.tree import Config
from ..core.blocks import BLOCK_TOKENS
from ..core.clock import Clock, MonotonicClock
from ..core.errors import ConfigError, Draining, HeadraceError, PeerLost
from ..core.ids import Incarnation, WorkerId, new_incarnation
from ..engine import api as engine
from ..engine.build import Built, build_engine
from ..model.config import WINDOW
from ..proto.engine_convert import PROTOCOL
from ..proto.internal.v1 import engine_pb2, engine_pb2_grpc
from ..traces.spans import open_traces
from ..transfer import api as transfer
from . import session
from .channels import server_options
from .desk import Desk
from .hand_over import HandOver
from .intake import Intake
from .kv_events import KvLog
from .kv_streams import KvStreams
from .leg import LegFactories, TransferLegEvent
from .lifecycle import Change, Lifecycle, ProgressWatch, WorkerState
from .metrics import Snapshots, WorkerMetrics
from .peers import PeerBook
from .session import EngineService
from .status import StatusServer, StatusSource
from .traces import LegTraces
from .transfer_process import Begin, ProcessTransfers, TransferChild
from .transfers import GRACE_S, LocalTransfers, Report, Transfers, TransferSetup, bind, bracketed

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""How late a leg's deadline may be noticed; a second is the shortest of them."""
CORDON_S = 0.5
"""From the beat that tells routers to the drain. Routers without a session learn by the refusal of their first leg."""
EXIT_FAILED = 1
EXIT_BROKEN = 70
EXIT_AGAIN = 75
"""The process is sound but wants to be started anew."""


def run(config: Config, legs: LegFactories) -> int:
    """Serve until a signal, a drain call or a fault ends it; the exit status."""
    worker = Worker(config, legs)
    try:
        status = asyncio.run(worker.run())
    except HeadraceError as error:
        if not worker.is_loading:
            raise
        logger.error("worker.failed error=%s", error)
        status = EXIT_FAILED
    if worker.is_loading:
        # Its thread is in the middle of C++ that does not survive the interpreter's end.
        logging.shutdown()
        sys.stdout.flush()
        os._exit(status)
    return status


class Worker:
    """See the module."""

    def __init__(self, config: Config, legs: LegFactories, *, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock if clock is not None else MonotonicClock()
        role = config.worker.role
        self._traces = open_traces(config.otlp_traces_endpoint, f"headrace-{role}", config.worker.worker_id or role)
        self._legs = legs
        self._incarnation: Incarnation = new_incarnation()
        self._worker_id = WorkerId(config.worker.worker_id or f"{config.worker.role}-0")
        self._lifecycle = Lifecycle(self._changed)
        self._watch = ProgressWatch(wedged_after_s=config.worker.wedged_after_s, now_s=self._clock.now_s())
        self._parts: _Parts | None = None
        self._leaving = asyncio.Event()
        self._hurry = asyncio.Event()
        self._drain_s = config.worker.drain_s
        self._status = 0
        self._book = PeerBook()
        self._kv = KvStreams(self._incarnation, KvLog())
        self._loading: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._hand_over: HandOver

    async def run(self) -> int:
        """The whole life; the exit status."""
        self._loop = asyncio.get_running_loop()
        self._hand_over = HandOver(self._loop, self._fatal)
        self._loop.set_exception_handler(self._loop_failed)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)
        snapshots = Snapshots(
            state=lambda: self._lifecycle.state,
            engine=lambda: self._parts.built.engine.load() if self._parts is not None else None,
            transfer=lambda: self._parts.transfers.report().counts if self._parts is not None else None,
            num_legs=lambda: self._parts.desk.num_legs if self._parts is not None else 0,
            stalled_s=lambda: self._watch.stalled_s,
            num_cached_blocks=lambda: self._kv.log.num_blocks,
        )
        metrics = WorkerMetrics(role=self._config.worker.role, snapshots=snapshots)
        source = StatusSource(
            snapshots=snapshots, describe=self._describe_state, registry=metrics.registry, watch=self._watch
        )
        section = self._config.worker
        status = StatusServer(source, host=section.host, port=section.status_port, clock=self._clock)
        status_port = status.start()
        child = TransferChild(self._config.log_level) if self._config.transfer.process == "own" else None
        try:
            built = await self._build(child)
            if built is None:
                return self._status
            await self._serve(built, child, metrics, status_port)
        finally:
            status.stop()
            if child is not None:
                child.end()
        return self._status

    # ---- start ----

    @property
    def is_loading(self) -> bool:
        """The thread that loads the model runs."""
        return self._loading is not None and self._loading.is_alive()

    async def _build(self, child: TransferChild | None) -> Built | None:
        """Load the model beside the loop, so that probes and signals are answered; None: told to leave meanwhile.

        Raises:
            PeerLost: the transfer process has ended meanwhile.
        """
        done: asyncio.Future[Built] = self._loop.create_future()

        def settle(built: Built | None, error: BaseException | None) -> None:
            if done.done():
                return
            if error is not None:
                done.set_exception(error)
            else:
                assert built is not None
                done.set_result(built)

        def load() -> None:
            built, error = None, None
            try:
                built = build_engine(self._config, self._clock, self._from_engine, self._fatal, _report_loading())
            except BaseException as caught:
                error = caught
            # A process that was told to leave has closed its loop.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(settle, built, error)

        # A daemon: nothing stops a load, and the process must be free to end under it.
        self._loading = threading.Thread(target=load, name="load", daemon=True)
        self._loading.start()
        while not await self._or_leaving(done, TICK_S):
            if child is not None and child.process.poll() is not None:
                raise PeerLost(child.epitaph())
        if self._leaving.is_set():
            done.cancel()
            self._lifecycle.handle(Change.DRAIN)
            return None
        return done.result()

    async def _or_leaving(self, work: asyncio.Future[Any], limit_s: float | None = None) -> bool:
        """Wait for `work`, but no longer than until this process is told to leave; False: `limit_s` is over first."""
        leaving = asyncio.create_task(self._leaving.wait())
        try:
            ended, _ = await asyncio.wait((work, leaving), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
        return bool(ended)

    async def _serve(self, built: Built, child: TransferChild | None, metrics: WorkerMetrics, status_port: int) -> None:
        section = self._config.worker
        _check_segments(built, self._config.transfer.segment_bytes)
        transfers = self._make_transfers(built, child)
        desk = Desk(
            self._legs,
            to_engine=built.engine.post,
            to_transfer=self._to_transfer,
            witness=metrics
            if not self._traces.is_on
            else LegTraces(metrics, self._traces, self._worker_id, self._clock.now_s),
            max_legs=self._config.engine.max_queue + 2 * self._config.engine.max_num_seqs,
        )
        service = EngineService(
            desk=desk,
            intake=Intake(
                worker_id=self._worker_id,
                kinds=frozenset(self._legs),
                vocab_size=built.config.vocab_size,
                max_model_len=built.max_model_len,
                max_prompt_tokens=built.max_prompt_tokens,
            ),
            kv=self._kv,
            describe=self._describe,
            load=self._load_report,
            drain=self._drain,
            clear_cache=lambda: built.engine.post(engine.ClearCache()),
            fatal=self._fatal,
            clock=self._clock,
        )
        engine_server = grpc.aio.server(options=server_options(session.MAX_MESSAGE_BYTES))
        engine_pb2_grpc.add_EngineServicer_to_server(service, engine_server)
        engine_port = bind(engine_server, section.host, section.engine_port, "worker.engine_port")
        starting = asyncio.ensure_future(transfers.start())
        await self._or_leaving(starting)
        if self._leaving.is_set() and not starting.done():
            starting.cancel()
            await engine_server.stop(0.0)
            self._lifecycle.handle(Change.DRAIN)
            return
        peer_port = starting.result()
        host = bracketed(_reachable(section.host))
        self._parts = _Parts(
            built=built,
            transfers=transfers,
            desk=desk,
            service=service,
            metrics=metrics,
            peer_address=f"{host}:{peer_port}",
        )
        built.engine.start()
        await engine_server.start()
        ticking = asyncio.create_task(self._tick())
        self._lifecycle.handle(Change.BUILT)
        print(
            f"event=ready worker_id={self._worker_id} engine={host}:{engine_port} peer={host}:{peer_port} "
            f"status={host}:{status_port}",
            flush=True,
        )
        try:
            await self._leaving.wait()
            await self._flush(self._parts)
        finally:
            ticking.cancel()
            service.finish_sessions("this worker is leaving")
            await engine_server.stop(GRACE_S)
            await transfers.stop()
            await asyncio.to_thread(self._traces.close)
            built.engine.stop(GRACE_S)

    def _make_transfers(self, built: Built, child: TransferChild | None) -> Transfers:
        setup = TransferSetup(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            host=self._config.worker.host,
            peer_port=self._config.worker.peer_port,
            section=self._config.transfer,
            shape=built.layout.shape,
            kv_dtype=self._config.model.kv_dtype,
            fingerprint=built.fingerprint,
            document=built.document,
        )
        if child is None:
            return LocalTransfers(
                setup,
                geometry=built.geometry,
                mover=built.mover,
                allocate=built.allocate,
                deliver=self._from_transfers,
                reported=self._transfers_reported,
                clock=self._clock,
            )
        pools, descriptors = built.pools.specs(), built.pools.descriptors()
        return ProcessTransfers(
            child,
            Begin(setup, tuple(pools)),
            [descriptors[pool.kind] for pool in pools],
            deliver=self._from_transfers,
            reported=self._transfers_reported,
        )

    async def _flush(self, parts: _Parts) -> None:
        """Refuse what is new, let run what is open, within the budget."""
        parts.desk.accepting = False
        self._lifecycle.handle(Change.DRAIN)
        parts.service.beat_now()
        if parts.service.num_sessions:
            await self._pause(CORDON_S)
        self._lifecycle.handle(Change.TOLD)
        end_s = self._clock.now_s() + self._drain_s
        while parts.desk.num_legs and self._clock.now_s() < end_s and not self._hurry.is_set():
            await self._pause(TICK_S)
        if parts.desk.num_legs:
            num_open = parts.desk.abort_all(Draining("this worker is leaving"), self._clock.now_s())
            logger.warning("worker.drain_cut legs=%d", num_open)
            self._lifecycle.handle(Change.BUDGET_OVER)
        else:
            self._lifecycle.handle(Change.EMPTY)

    async def _pause(self, for_s: float) -> None:
        """Sleep, unless a second signal asks for the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(for_s):
                await self._hurry.wait()

    # ---- signals, time ----

    def _signalled(self, number: int) -> None:
        if self._leaving.is_set():
            self._hurry.set()
        logger.info("worker.signal number=%d", number)
        self._leaving.set()

    def _drain(self, budget_s: float) -> None:
        """The Drain call."""
        if not self._leaving.is_set():
            self._drain_s = budget_s
            self._leaving.set()

    async def _tick(self) -> None:
        """Deadlines and progress, by their own clock."""
        while True:
            self._hand_over.call(self._on_time)
            await asyncio.sleep(TICK_S)

    def _on_time(self) -> None:
        parts, now_s = self._parts, self._clock.now_s()
        assert parts is not None
        parts.desk.on_time(now_s)
        for command in self._book.on_time(now_s):
            parts.transfers.post(command)
        self._watch.loop_alive(now_s)
        self._lifecycle.handle(Change.STALLED if self._watch.wedged else Change.PROGRESSED)

    # ---- between the threads ----

    def _from_engine(self, events: Sequence[engine.Event]) -> None:
        """In the engine's thread."""
        self._hand_over.post(self._on_engine, list(events))

    def _on_engine(self, events: Sequence[engine.Event]) -> None:
        assert self._parts is not None
        of_legs: list[engine.SequenceEvent] = []
        for event in events:
            if isinstance(event, engine.CacheChanged):
                self._kv.changed(event.changes)
            else:
                of_legs.append(event)
        self._parts.desk.on_engine(of_legs, self._clock.now_s())

    def _to_transfer(self, command: transfer.Command) -> None:
        assert self._parts is not None
        for passed in self._book.passes(command, self._clock.now_s()):
            self._parts.transfers.post(passed)

    def _transfers_reported(self, report: Report) -> None:
        self._watch.transfers_alive(self._clock.now_s())

    def _from_transfers(self, event: transfer.WorkerEvent) -> None:
        self._hand_over.call(self._on_transfer, event)

    def _on_transfer(self, event: transfer.WorkerEvent) -> None:
        parts, now_s = self._parts, self._clock.now_s()
        assert parts is not None
        match event:
            case transfer.Quarantined(num_held, num_buffers):
                logger.error("worker.quarantined held=%d of=%d", num_held, num_buffers)
                self._status = EXIT_AGAIN
                self._leaving.set()
            case transfer.ThreadFailed(error):
                self._fatal(error)
            case _:
                leg_event: TransferLegEvent = event
                self._book.heard(leg_event, now_s)
                if isinstance(leg_event, transfer.Ended) and leg_event.outcome is transfer.Outcome.TAKEN:
                    parts.metrics.transferred("out", leg_event.stats)
                parts.desk.on_transfer(leg_event, now_s)

    # ---- faults ----

    def _fatal(self, error: BaseException) -> None:
        """In any thread: an invariant is broken, and nothing this process says can be trusted any more."""
        logger.critical("worker.broken error=%r", error, exc_info=error)
        logging.shutdown()
        os._exit(EXIT_BROKEN)

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        logger.error("loop.error message=%s error=%r", context.get("message"), context.get("exception"))

    def _changed(self, before: WorkerState, after: WorkerState, change: Change) -> None:
        logger.info("worker.state from=%s to=%s by=%s", before.value, after.value, change.value)
        if self._parts is not None:
            self._parts.service.beat_now()

    # ---- what others are told ----

    def _describe(self) -> engine_pb2.WorkerDescription:
        parts, config = self._parts, self._config
        assert parts is not None
        return engine_pb2.WorkerDescription(
            worker_id=self._worker_id,
            incarnation=self._incarnation,
            role=config.worker.role,
            state=self._lifecycle.state.value,
            fingerprint=parts.built.fingerprint,
            model=config.model.served_names[0] if config.model.served_names else Path(config.model.path).name,
            max_model_len=parts.built.max_model_len,
            vocab_size=parts.built.config.vocab_size,
            peer_address=parts.peer_address,
            block_tokens=BLOCK_TOKENS,
            max_prompt_tokens=parts.built.max_prompt_tokens,
            device=config.model.device,
            kv_dtype=config.model.kv_dtype,
            version=__version__,
            protocol=PROTOCOL,
            max_num_seqs=config.engine.max_num_seqs,
            replay_tokens=replay_tokens(parts.built.config.num_layers),
        )

    def _load_report(self) -> engine_pb2.LoadReport:
        assert self._parts is not None
        load, counts = self._parts.built.engine.load(), self._parts.transfers.report().counts
        return engine_pb2.LoadReport(
            running=load.running,
            waiting=load.waiting,
            queued_tokens=load.queued_tokens,
            pools={
                kind: engine_pb2.PoolLoad(
                    total=c.total,
                    free=c.free,
                    active=c.active,
                    landing=c.landing,
                    reserved=c.reserved,
                    cached=c.cached,
                    pinned=c.pinned,
                )
                for kind, c in load.pools.items()
            },
            landing_held=counts.landing_held,
            audit_mismatches=load.audit_mismatches + len(counts.audit),
            state=self._lifecycle.state.value,
            steps=load.steps,
            open_transfers=counts.open_transfers,
            kv_seq=self._kv.log.last_seq,
            kv_blocks=self._kv.log.num_blocks,
        )

    def _describe_state(self) -> dict[str, Any]:
        """In the status thread: who this is, for `/state`."""
        parts, config = self._parts, self._config
        document: dict[str, Any] = {
            "worker_id": self._worker_id,
            "incarnation": f"{self._incarnation:016x}",
            "role": config.worker.role,
            "version": __version__,
            "model": config.model.path,
            "kv_dtype": config.model.kv_dtype,
        }
        if parts is not None:
            document["fingerprint"] = parts.built.fingerprint.hex()
            document["peer_address"] = parts.peer_address
            document["sessions"] = parts.service.num_sessions
            document["peers"] = self._book.num_peers
            document["streams"] = parts.transfers.report().num_links
            log = self._kv.log
            document["prefix_cache"] = {
                "blocks": log.num_blocks, "seq": log.last_seq, "subscribers": self._kv.num_subscribers,
            }  # fmt: skip
        return document


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What exists once the model is loaded."""

    built: Built
    transfers: Transfers
    desk: Desk
    service: EngineService
    metrics: WorkerMetrics
    peer_address: str


def replay_tokens(num_layers: int) -> int:
    """Positions after which every layer's window is exact again, started from none; in whole blocks."""
    return -(-WINDOW * num_layers // BLOCK_TOKENS) * BLOCK_TOKENS


def _check_segments(built: Built, segment_bytes: int) -> None:
    """Every sequence can be cut into segments of this size; a smaller one would only show with some lengths.

    Raises:
        ConfigError: one range of one layer does not fit.
    """
    least = built.geometry.min_segment_bytes
    if segment_bytes < least:
        raise ConfigError(f"transfer.segment_bytes is {segment_bytes}; this model needs at least {least}")


def _report_loading() -> Callable[[int, int], None]:
    """Progress lines for whoever watches the log, one a tenth."""
    told = -1

    def report(done: int, total: int) -> None:
        nonlocal told
        tenth = done * 10 // total if total else 10
        if tenth > told:
            told = tenth
            logger.info("worker.loading tensors=%d of=%d", done, total)

    return report


def _reachable(host: str) -> str:
    """An address under which others find what listens on `host`."""
    if host in ("0.0.0.0", "::", "[::]"):
        return socket.gethostbyname(socket.gethostname())
    return host.strip("[]")
