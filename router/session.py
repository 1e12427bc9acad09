"""One long-lived session with one worker: every request of this router travels over it, one message a step back.

Connects again with growing pauses, greets, beats, tells when the worker is gone. The end of a session ends all its
legs, on both sides. Turns gRPC into calls on `SessionOwner` and back; decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

import grpc
import grpc.aio

from ..core.clock import Clock
from ..core.errors import HeadraceError, PeerLost
from ..core.ids import Incarnation, Role
from ..proto.engine_convert import (
    PROTOCOL,
    error_from_message,
    finish_from_message,
    logprobs_from_message,
    sampling_to_message,
)
from ..proto.internal.v1 import engine_pb2 as pb
from ..proto.internal.v1 import engine_pb2_grpc
from .journey import LegFinished, LegKind, LegReport, OpenLeg, OutToken, Transferred
from .kv_subscription import KvSubscription
from .placement import Description, Load, PoolLoad, WorkerRef
from .prefix_index import PrefixIndex

log = logging.getLogger("headrace.router.session")

MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Channels to one address would share their back-off otherwise; the pauses here are our own.
    ("grpc.use_local_subchannel_pool", 1),
)

_KINDS = {
    LegKind.GENERATE: pb.LEG_KIND_GENERATE,
    LegKind.PREFILL: pb.LEG_KIND_PREFILL,
    LegKind.LOCAL: pb.LEG_KIND_LOCAL,
    LegKind.SHARE: pb.LEG_KIND_SHARE,
    LegKind.FETCH: pb.LEG_KIND_FETCH,
}


class SessionOwner(Protocol):
    """Who hears what a session hears."""

    def worker_up(self, description: Description) -> PrefixIndex:
        """The index that the session feeds while it lives."""
        ...

    def worker_down(self, address: str, error: HeadraceError) -> None: ...

    def worker_load(self, address: str, load: Load) -> None: ...

    def worker_said(self, address: str, reports: list[tuple[int, LegReport]]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class SessionTimes:
    """Deadlines of a session, seconds."""

    connect_s: float = 5.0
    beat_s: float = 2.0
    missed_beats: int = 3
    first_pause_s: float = 0.1
    longest_pause_s: float = 2.0


def description_from_message(address: str, message: pb.WorkerDescription) -> Description:
    """Check and convert what a worker says of itself.

    Raises:
        PeerLost: another protocol, or a role that is none.
    """
    if message.protocol != PROTOCOL:
        raise PeerLost(f"worker speaks session protocol {message.protocol}, this router {PROTOCOL}")
    try:
        role = Role(message.role)
    except ValueError as error:
        raise PeerLost(f"worker has unknown role {message.role!r}") from error
    return Description(
        ref=WorkerRef(address, message.worker_id, message.incarnation, message.peer_address),
        role=role,
        state=message.state,
        fingerprint=message.fingerprint,
        model=message.model,
        max_model_len=message.max_model_len,
        max_prompt_tokens=message.max_prompt_tokens,
        vocab_size=message.vocab_size,
        max_num_seqs=message.max_num_seqs,
        replay_tokens=message.replay_tokens,
        device=message.device,
        kv_dtype=message.kv_dtype,
        version=message.version,
    )


def load_from_message(message: pb.LoadReport) -> Load:
    pools = tuple(
        (
            kind,
            PoolLoad(
                total=pool.total,
                free=pool.free,
                active=pool.active,
                cached=pool.cached,
                reserved=pool.reserved,
                pinned=pool.pinned,
            ),
        )
        for kind, pool in sorted(message.pools.items())
    )
    return Load(
        running=message.running,
        waiting=message.waiting,
        queued_tokens=message.queued_tokens,
        state=message.state,
        steps=message.steps,
        landing_held=message.landing_held,
        audit_mismatches=message.audit_mismatches,
        open_transfers=message.open_transfers,
        kv_seq=message.kv_seq,
        kv_blocks=message.kv_blocks,
        pools=pools,
    )


def report_from_message(item: pb.LegItem) -> LegReport:
    """What one step says about one leg."""
    tokens = tuple(OutToken(token.index, token.id, logprobs_from_message(token), token.choice) for token in item.tokens)
    scored: tuple[OutToken, ...] = ()
    if item.HasField("prompt_logprobs"):
        scored = tuple(
            OutToken(token.index, token.id, logprobs_from_message(token)) for token in item.prompt_logprobs.tokens
        )
    transferred = finished = None
    failed: HeadraceError | None = None
    if item.HasField("transferred"):
        wire = item.transferred
        transferred = Transferred(
            wire.num_bytes, wire.num_segments, wire.num_pages, wire.seconds, wire.tail_seconds, wire.transport
        )
    if item.HasField("finished"):
        try:
            finished = LegFinished(
                finish_from_message(item.finished),
                item.finished.stop_token_id if item.finished.HasField("stop_token_id") else None,
                item.finished.prefill_s,
                item.finished.computed_tokens,
            )
        except HeadraceError as error:
            failed = PeerLost(str(error))
    if item.HasField("failed"):
        failed = error_from_message(item.failed)
    return LegReport(
        reserved_tokens=item.reserved.held_tokens if item.HasField("reserved") else None,
        started=(item.started.cached_tokens, item.started.queued_s) if item.HasField("started") else None,
        tokens=tokens,
        scored=scored,
        transferred=transferred,
        ended_choices=tuple(ended.choice for ended in item.choices),
        finished=finished,
        failed=failed,
    )


def submit_message(action: OpenLeg, *, request_id: str, cache_salt: str, priority: int, traceparent: str) -> pb.Submit:
    message = pb.Submit(
        leg=action.leg,
        kind=_KINDS[action.kind],
        request_id=request_id,
        attempt=action.attempt,
        transfer_id=action.transfer_id,
        prompt=action.prompt,
        num_output_tokens=action.num_output_tokens,
        sampling=sampling_to_message(action.sampling),
        cache_salt=cache_salt,
        priority=priority,
        timeout_s=action.timeout_s,
        traceparent=traceparent,
        seeds=action.seeds,
    )
    if action.holder is not None:
        message.holder.worker_id = action.holder.worker_id
        message.holder.incarnation = action.holder.incarnation
        message.holder.peer_address = action.holder.peer_address
    return message


CALL_ENDED = (grpc.aio.AioRpcError, grpc.aio.UsageError, asyncio.InvalidStateError, TimeoutError)
"""How grpc.aio says that a call is over: by its status, and to whoever writes after its end in other ways."""


class WorkerSession:
    """Keeps one session alive; `run` returns when it is cancelled."""

    def __init__(
        self,
        address: str,
        owner: SessionOwner,
        *,
        router_id: str,
        router_incarnation: Incarnation,
        times: SessionTimes,
        clock: Clock,
        seed: int | None = None,
    ) -> None:
        self.address = address
        self._owner = owner
        self._router_id = router_id
        self._incarnation = router_incarnation
        self._times = times
        self._clock = clock
        self._seed = seed
        self._random = random.Random(seed)
        self._outbox: deque[pb.RouterMessage] = deque()
        self._wake = asyncio.Event()
        self._is_up = False
        self._heard = False
        self._stub: Any = None
        """While the session is up."""

    async def clear_cache(self) -> None:
        """Have the worker forget its prefix cache; what that did comes with the cache's changes.

        Raises:
            PeerLost: no session, or no answer in time.
        """
        if self._stub is None:
            raise PeerLost(f"no session with {self.address}")
        try:
            await self._stub.ClearCache(pb.ClearCacheRequest(), timeout=self._times.connect_s)
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"{self.address}: {error.details()}") from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # The session ended, and its channel with it.
            raise PeerLost(f"{self.address}: the session ended") from None

    def send(self, message: pb.RouterMessage) -> bool:
        """Queue a message; False if there is no session, so that the leg must be given up."""
        if not self._is_up:
            return False
        self._outbox.append(message)
        self._wake.set()
        return True

    async def run(self) -> None:
        pause_s = self._times.first_pause_s
        while True:
            was_up = False
            try:
                was_up = await self._one_session()
            except HeadraceError as error:
                log.info("event=session_refused worker=%s reason=%r", self.address, str(error))
            except Exception:
                # A defect, and told as one; but a worker that nobody dials again would be lost until a restart.
                log.exception("event=session_broken worker=%s", self.address)
            pause_s = self._times.first_pause_s if was_up else min(pause_s * 2, self._times.longest_pause_s)
            await asyncio.sleep(pause_s * (0.5 + self._random.random()))

    async def _one_session(self) -> bool:
        """From connecting to the end; whether the worker was up."""
        async with grpc.aio.insecure_channel(self.address, options=CHANNEL_OPTIONS) as channel:
            stub: Any = engine_pb2_grpc.EngineStub(channel)
            call: Any = stub.Session()
            error: HeadraceError = PeerLost("the session with the worker has ended")
            try:
                async with asyncio.timeout(self._times.connect_s):
                    hello = pb.Hello(protocol=PROTOCOL, router_id=self._router_id, router_incarnation=self._incarnation)
                    await call.write(pb.RouterMessage(hello=hello))
                    first = await call.read()
                if not isinstance(first, pb.WorkerMessage) or first.WhichOneof("kind") != "welcome":
                    raise PeerLost("the worker did not greet")
                description = description_from_message(self.address, first.welcome)
                self._outbox.clear()
                self._is_up, self._stub = True, stub
                log.info(
                    "event=session_up worker=%s id=%s role=%s state=%s",
                    self.address, description.ref.worker_id, description.role.value, description.state,
                )  # fmt: skip
                index = self._owner.worker_up(description)
                await self._talk(call, self._subscription(index).run(stub))
            except CALL_ENDED as cause:
                details = cause.details() if isinstance(cause, grpc.aio.AioRpcError) else str(cause)
                log.debug("event=session_error worker=%s details=%r", self.address, details)
            except HeadraceError as ours:
                error = ours
                if not self._is_up:
                    raise
            finally:
                was_up, self._is_up, self._stub = self._is_up, False, None
                call.cancel()
                if was_up:
                    log.info("event=session_down worker=%s", self.address)
                    self._owner.worker_down(self.address, error)
            return was_up

    def _subscription(self, index: PrefixIndex) -> KvSubscription:
        return KvSubscription(
            index,
            address=self.address,
            clock=self._clock,
            silence_s=self._times.beat_s * self._times.missed_beats,
            first_pause_s=self._times.first_pause_s,
            longest_pause_s=self._times.longest_pause_s,
            seed=self._seed,
        )

    async def _talk(self, call: Any, follow: Coroutine[Any, Any, None]) -> None:
        """Read, write and beat until one of them fails; follow the worker's prefix cache meanwhile."""
        tasks = [asyncio.create_task(work(call)) for work in (self._read, self._write, self._beat)]
        tasks.append(asyncio.create_task(follow))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await task

    async def _read(self, call: Any) -> None:
        while True:
            message = await call.read()
            if not isinstance(message, pb.WorkerMessage):
                return
            self._heard = True
            kind = message.WhichOneof("kind")
            if kind == "step":
                self._owner.worker_said(
                    self.address, [(item.leg, report_from_message(item)) for item in message.step.items]
                )
            elif kind == "beat":
                self._owner.worker_load(self.address, load_from_message(message.beat.load))

    async def _write(self, call: Any) -> None:
        while True:
            while self._outbox:
                await call.write(self._outbox.popleft())
            self._wake.clear()
            await self._wake.wait()

    async def _beat(self, call: Any) -> None:
        missed = 0
        while True:
            self._heard = False
            await asyncio.sleep(self._times.beat_s)
            # Beats are counted, not seconds: when this very loop stood still, the worker was not silent.
            missed = 0 if self._heard else missed + 1
            if missed >= self._times.missed_beats:
                raise PeerLost(f"the worker has been silent for {missed} beats")
            self.send(pb.RouterMessage(beat=pb.Beat()))
