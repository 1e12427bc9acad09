"""`KvEvents` and `KvSnapshot`: the gRPC shell around the log of the prefix cache.

A subscriber is a cursor into the log, woken when something is new and then written to, at most once in `BATCH_S`:
what an engine step changes leaves at once, a storm leaves in batches. Each write and each wait has a deadline. Runs on
the event loop that owns the log.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import grpc

from ..core.ids import Incarnation
from ..core.kv_events import KvEvent
from ..proto.internal.v1 import engine_pb2 as pb
from ..proto.kv_convert import change_to_message, stored_to_message
from .kv_events import KvLog, ReplayGone

BATCH_S = 0.005
BEAT_S = 2.0
WRITE_S = 6.0
MAX_STREAMS = 64
MAX_CHANGES = 2048
"""Of one batch, about 100 KB."""
PART_BLOCKS = 2048
"""Of one part of a snapshot; the event loop serves others between two parts."""


class StreamEnded(Exception):
    """Why a stream ends; told as a gRPC status."""

    def __init__(self, code: grpc.StatusCode, why: str) -> None:
        super().__init__(why)
        self.code = code


class KvStreams:
    """See the module."""

    def __init__(self, incarnation: Incarnation, log: KvLog, *, beat_s: float = BEAT_S) -> None:
        self._incarnation = incarnation
        self._log = log
        self._beat_s = beat_s
        self._news: set[asyncio.Event] = set()
        self._num_streams = 0
        self._is_closed = False

    @property
    def log(self) -> KvLog:
        return self._log

    @property
    def num_subscribers(self) -> int:
        return len(self._news)

    def changed(self, changes: Sequence[KvEvent]) -> None:
        """The engine's word; subscribers hear of it."""
        self._log.append(changes)
        self._wake()

    def close(self) -> None:
        """This worker is leaving: every stream ends."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        for news in self._news:
            news.set()

    async def events(self, request: pb.KvEventsRequest, context: Any) -> None:
        """One subscriber, until either end has had enough."""
        news = asyncio.Event()
        try:
            self._check(request.incarnation)
            self._news.add(news)
            self._num_streams += 1
            try:
                await self._follow(request.after_seq, news, context)
            finally:
                self._news.discard(news)
                self._num_streams -= 1
        except StreamEnded as end:
            await context.abort(end.code, str(end))

    async def snapshot(self, request: pb.KvSnapshotRequest, context: Any) -> None:
        """All blocks of one moment, in parts."""
        try:
            self._check(request.incarnation)
            self._num_streams += 1
            try:
                await self._send_snapshot(context)
            finally:
                self._num_streams -= 1
        except StreamEnded as end:
            await context.abort(end.code, str(end))

    def _check(self, incarnation: int) -> None:
        if incarnation != self._incarnation:
            raise StreamEnded(grpc.StatusCode.FAILED_PRECONDITION, "this is another life of the worker")
        if self._num_streams >= MAX_STREAMS:
            raise StreamEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, f"{MAX_STREAMS} streams are open")
        if self._is_closed:
            raise StreamEnded(grpc.StatusCode.UNAVAILABLE, "this worker is leaving")

    async def _follow(self, seq: int, news: asyncio.Event, context: Any) -> None:
        while True:
            news.clear()
            try:
                messages = self._log.after(seq, MAX_CHANGES)
            except ReplayGone as error:
                raise StreamEnded(grpc.StatusCode.OUT_OF_RANGE, str(error)) from None
            if messages:
                seq = messages[-1].seq
            batch = pb.KvEventBatch(
                last_seq=self._log.last_seq,
                messages=[
                    pb.KvMessage(seq=message.seq, changes=[change_to_message(change) for change in message.changes])
                    for message in messages
                ],
            )
            await _write(context, batch)
            await asyncio.sleep(BATCH_S)
            if seq == self._log.last_seq and not self._is_closed:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._beat_s):
                        await news.wait()
            if self._is_closed:
                raise StreamEnded(grpc.StatusCode.UNAVAILABLE, "this worker is leaving")

    async def _send_snapshot(self, context: Any) -> None:
        snapshot = self._log.snapshot()
        blocks = snapshot.blocks
        for start in range(0, max(len(blocks), 1), PART_BLOCKS):
            part = pb.KvSnapshotPart(
                as_of_seq=snapshot.as_of_seq,
                blocks=[stored_to_message(stored) for stored in blocks[start : start + PART_BLOCKS]],
                is_last=start + PART_BLOCKS >= len(blocks),
            )
            await _write(context, part)
            await asyncio.sleep(0)


async def _write(context: Any, message: pb.KvEventBatch | pb.KvSnapshotPart) -> None:
    try:
        async with asyncio.timeout(WRITE_S):
            await context.write(message)
    except TimeoutError:
        raise StreamEnded(grpc.StatusCode.RESOURCE_EXHAUSTED, "the reader does not read") from None
