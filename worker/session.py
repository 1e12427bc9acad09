"""Sessions: one stream a router carries all of its legs. The gRPC shell around the desk.

Words of one leg merge into one item, and everything that is ready goes into one Step, so a slow stream makes messages
larger, not more. What may wait is bounded, and so is the time of one write: a router that does not read loses its
session, and a session that ends, however it ends, ends its legs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from ..core.clock import Clock
from ..core.errors import Cancelled, HeadraceError
from ..proto.engine_convert import PROTOCOL
from ..proto.internal.v1 import engine_pb2 as pb
from ..proto.internal.v1 import engine_pb2_grpc
from .desk import Desk
from .intake import Intake
from .items import merge, weight
from .kv_streams import KvStreams
from .leg import Word

logger = logging.getLogger(__name__)

BEAT_S = 2.0
SILENCE_S = 3 * BEAT_S
"""A router silent for three beats is taken for dead."""
HELLO_S = 5.0
WRITE_S = 6.0
MAX_DRAIN_S = 86_400.0
MAX_WORDS = 150_000
"""Of one session, waiting for its stream; in the order of 3 MB, below gRPC's default bound of a message."""
MAX_SESSIONS = 64
MAX_ROUTER_ID_CHARS = 256
MAX_MESSAGE_BYTES = 16 << 20
"""A prompt of a million tokens and a full list of allowed tokens take 4 MB."""


class SessionEnded(Exception):
    """Why a session ends; told to the router as a gRPC status."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class RouterSession:
    """One router's ear: what its legs said and the stream has not taken yet."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.wake = asyncio.Event()
        self.stuck = asyncio.Event()
        """There is no use in waiting for the stream."""
        self.beat_asked = False
        self.end: SessionEnded | None = None
        self._items: dict[int, pb.LegItem] = {}
        self._words = 0

    def say(self, leg: int, word: Word) -> None:
        if self.end is not None:
            return
        self._words += weight(word)
        if self._words > MAX_WORDS:
            self._items.clear()
            self.finish(SessionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router does not read"))
            self.stuck.set()
            return
        item = self._items.get(leg)
        if item is None:
            item = self._items[leg] = pb.LegItem(leg=leg)
        merge(item, word)
        self.wake.set()

    def ask_beat(self) -> None:
        """Tell the router now how things stand."""
        self.beat_asked = True
        self.wake.set()

    def finish(self, end: SessionEnded) -> None:
        """End the session once what was said is sent; the first reason counts."""
        if self.end is None:
            self.end = end
        self.wake.set()

    def take(self) -> pb.Step | None:
        """Everything that waits, as one message."""
        if not self._items:
            return None
        step = pb.Step(items=self._items.values())
        self._items.clear()
        self._words = 0
        return step


class EngineService(engine_pb2_grpc.EngineServicer):
    """The `Engine` service of one worker. Runs on the event loop that owns the desk."""

    def __init__(
        self,
        *,
        desk: Desk,
        intake: Intake,
        kv: KvStreams,
        describe: Callable[[], pb.WorkerDescription],
        load: Callable[[], pb.LoadReport],
        drain: Callable[[float], None],
        clear_cache: Callable[[], None],
        fatal: Callable[[BaseException], None],
        clock: Clock,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._desk = desk
        self._intake = intake
        self._kv = kv
        self._describe = describe
        self._load = load
        self._drain = drain
        self._clear_cache = clear_cache
        self._fatal = fatal
        self._clock = clock
        self._beat_s = beat_s
        self._silence_s = silence_s
        self._sessions: set[RouterSession] = set()

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def beat_now(self) -> None:
        """Tell every router at once, for example that this worker is leaving."""
        for session in self._sessions:
            session.ask_beat()

    def finish_sessions(self, why: str) -> None:
        """Send what is still to be said, then end every session, and the streams of the cache's changes."""
        self._kv.close()
        for session in self._sessions:
            session.finish(SessionEnded(grpc.StatusCode.UNAVAILABLE, why))

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.WorkerDescription:
        return self._describe()

    async def Load(self, request: pb.LoadRequest, context: Any) -> pb.LoadReport:
        return self._load()

    async def Drain(self, request: pb.DrainRequest, context: Any) -> pb.DrainReply:
        """Begin to leave; answered at once, progress is in the load reports."""
        if not 0.0 <= request.budget_s <= MAX_DRAIN_S:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"budget_s must be 0 to {MAX_DRAIN_S:.0f}")
        self._drain(request.budget_s)
        return pb.DrainReply()

    async def ClearCache(self, request: pb.ClearCacheRequest, context: Any) -> pb.ClearCacheReply:
        """Forget the prefix cache before the next step; what that did is in the cache's changes."""
        self._clear_cache()
        return pb.ClearCacheReply()

    async def KvSnapshot(self, request: pb.KvSnapshotRequest, context: Any) -> None:
        await self._kv.snapshot(request, context)

    async def KvEvents(self, request: pb.KvEventsRequest, context: Any) -> None:
        await self._kv.events(request, context)

    async def Session(self, request_iterator: AsyncIterator[pb.RouterMessage], context: Any) -> None:
        session: RouterSession | None = None
        tasks: list[asyncio.Task[Any]] = []
        try:
            session = await self._greet(context)
            tasks = [
                asyncio.create_task(self._write(session, context)),
                asyncio.create_task(session.stuck.wait()),
                # Says why it ends through the session: what the router shall still hear comes first.
                asyncio.create_task(self._read(session, context)),
            ]
            await asyncio.wait(tasks[:2], return_when=asyncio.FIRST_COMPLETED)
            assert session.end is not None
            raise session.end
        except SessionEnded as end:
            logger.info("session.ended router=%s why=%s", session.name if session is not None else "", end)
            for task in tasks:
                task.cancel()
            if session is not None:
                self._leave(session)
            if end.code is not grpc.StatusCode.OK:
                # A router that does not read does not take the status either.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await context.abort(end.code, str(end))
        finally:
            # Here too when the connection broke: gRPC cancels the handler.
            for task in tasks:
                task.cancel()
            if session is not None:
                self._leave(session)

    async def _greet(self, context: Any) -> RouterSession:
        first = await _read_one(context, HELLO_S)
        if first.WhichOneof("kind") != "hello":
            raise SessionEnded(grpc.StatusCode.INVALID_ARGUMENT, "the first message must be Hello")
        hello = first.hello
        if hello.protocol != PROTOCOL:
            raise SessionEnded(
                grpc.StatusCode.FAILED_PRECONDITION, f"protocol {hello.protocol} is not this worker's {PROTOCOL}"
            )
        if not hello.router_id or len(hello.router_id) > MAX_ROUTER_ID_CHARS:
            raise SessionEnded(grpc.StatusCode.INVALID_ARGUMENT, "router_id is empty or too long")
        if len(self._sessions) >= MAX_SESSIONS:
            raise SessionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_SESSIONS} sessions are open")
        session = RouterSession(hello.router_id)
        self._sessions.add(session)
        try:
            await _send(context, pb.WorkerMessage(welcome=self._describe()))
        except BaseException:
            self._sessions.discard(session)
            raise
        logger.info("session.opened router=%s incarnation=%d", session.name, hello.router_incarnation)
        return session

    def _leave(self, session: RouterSession) -> None:
        if session in self._sessions:
            self._sessions.discard(session)
            session.finish(SessionEnded(grpc.StatusCode.OK, "left"))
            num_open = self._desk.leave(session, Cancelled("the router's session ended"), self._clock.now_s())
            if num_open:
                logger.warning("session.legs_aborted router=%s legs=%d", session.name, num_open)

    async def _read(self, session: RouterSession, context: Any) -> None:
        try:
            while True:
                self._hear(session, await _read_one(context, self._silence_s))
        except SessionEnded as end:
            session.finish(end)
        except Exception as error:
            # A broken invariant of the desk: nothing that it says can be trusted any more.
            self._fatal(error)

    def _hear(self, session: RouterSession, message: pb.RouterMessage) -> None:
        now_s = self._clock.now_s()
        match message.WhichOneof("kind"):
            case "submit":
                submit = message.submit
                if self._desk.knows(session, submit.leg):
                    raise SessionEnded(grpc.StatusCode.INVALID_ARGUMENT, f"leg {submit.leg} is open already")
                try:
                    order = self._intake.order(submit)
                except HeadraceError as error:
                    self._desk.refuse(session, submit.leg, error)
                else:
                    self._desk.submit(session, submit.leg, order, now_s)
            case "abort":
                abort = message.abort
                if abort.HasField("choice"):
                    self._desk.abort_choice(session, abort.leg, abort.choice, now_s)
                else:
                    self._desk.abort(session, abort.leg, Cancelled("aborted by the router"), now_s)
            case "beat":
                pass
            case kind:
                raise SessionEnded(grpc.StatusCode.INVALID_ARGUMENT, f"unexpected message {kind}")

    async def _write(self, session: RouterSession, context: Any) -> None:
        try:
            await self._write_on(session, context)
        except SessionEnded as end:
            session.finish(end)

    async def _write_on(self, session: RouterSession, context: Any) -> None:
        beat_due_s = self._clock.now_s()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, beat_due_s - self._clock.now_s())):
                    await session.wake.wait()
            session.wake.clear()
            step = session.take()
            if step is not None:
                await _send(context, pb.WorkerMessage(step=step))
            if session.end is not None:
                return
            if session.beat_asked or self._clock.now_s() >= beat_due_s:
                session.beat_asked = False
                await _send(context, pb.WorkerMessage(beat=pb.Beat(load=self._load())))
                beat_due_s = self._clock.now_s() + self._beat_s


async def _read_one(context: Any, within_s: float) -> pb.RouterMessage:
    """The next message; silence and the end of the stream end the session."""
    try:
        async with asyncio.timeout(within_s):
            message = await context.read()
    except TimeoutError:
        raise SessionEnded(grpc.StatusCode.DEADLINE_EXCEEDED, f"silent for {within_s:g} s") from None
    except Exception as error:
        # The call is over, or the bytes are no message: gRPC's classes for it are private.
        raise SessionEnded(grpc.StatusCode.INVALID_ARGUMENT, f"unreadable: {type(error).__name__}") from error
    if not isinstance(message, pb.RouterMessage):  # EOF
        raise SessionEnded(grpc.StatusCode.OK, "the router closed it")
    return message


async def _send(context: Any, message: pb.WorkerMessage) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            await context.write(message)
    except TimeoutError:
        raise SessionEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, "the router does not read") from None
    except Exception as error:  # gRPC's own classes for a call that is over are private
        raise SessionEnded(grpc.StatusCode.OK, f"the stream broke: {type(error).__name__}") from error
