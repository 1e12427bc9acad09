"""Feeds one worker's prefix index: a snapshot, then the events after it, for as long as the session lives.

Turns gRPC into calls on `PrefixIndex`, which says what is wanted next; decides nothing but the pauses. A snapshot that
is followed from its own number needs no buffer here: the worker keeps the messages meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import grpc
import grpc.aio

from ..core.clock import Clock
from ..core.errors import PeerLost
from ..proto.internal.v1 import engine_pb2 as pb
from ..proto.kv_convert import change_from_message, stored_from_message
from .prefix_index import IndexState, PrefixIndex

log = logging.getLogger("headrace.router.kv")

SNAPSHOT_S = 30.0
MAX_FAILURES = 5
"""In a row without anything heard: the worker has no channel that works."""
NO_CHANNEL_PAUSE_S = 30.0


class KvSubscription:
    """See the module; `run` ends when it is cancelled."""

    def __init__(
        self,
        index: PrefixIndex,
        *,
        address: str,
        clock: Clock,
        silence_s: float,
        first_pause_s: float,
        longest_pause_s: float,
        seed: int | None = None,
    ) -> None:
        """
        Args:
            silence_s: the worker speaks more often than this; else the stream is taken for broken.
        """
        self._index = index
        self._address = address
        self._clock = clock
        self._silence_s = silence_s
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._random = random.Random(seed)
        self._num_failures = 0

    async def run(self, stub: Any) -> None:
        """Follow the worker at the other end of `stub`."""
        while True:
            try:
                await self._follow(stub)
                self._num_failures += 1
            except grpc.aio.AioRpcError as error:
                self._failed(error)
            except (PeerLost, grpc.aio.UsageError) as error:
                log.warning("event=kv_unreadable worker=%s error=%r", self._address, str(error))
                self._num_failures += 1
                self._index.reset()
            await asyncio.sleep(self._pause_s())

    async def _follow(self, stub: Any) -> None:
        """From the subscription until the index or the worker wants another one."""
        self._index.on_time(self._clock.now_s())
        self._index.subscribed()
        if self._index.needs_snapshot:
            await self._take_snapshot(stub)
        if not self._index.needs_snapshot:
            await self._hear(stub)

    async def _take_snapshot(self, stub: Any) -> None:
        request = pb.KvSnapshotRequest(incarnation=self._index.incarnation)
        call = stub.KvSnapshot(request, timeout=SNAPSHOT_S)
        is_first = True
        try:
            while isinstance(part := await call.read(), pb.KvSnapshotPart):
                blocks = [stored_from_message(stored) for stored in part.blocks]
                self._index.snapshot_part(part.as_of_seq, blocks, is_first=is_first, is_last=part.is_last)
                if part.is_last or self._index.state is IndexState.DEGRADED:
                    return
                is_first = False
        finally:
            call.cancel()
        self._index.broken(self._clock.now_s())

    async def _hear(self, stub: Any) -> None:
        request = pb.KvEventsRequest(incarnation=self._index.incarnation, after_seq=self._index.seq)
        call = stub.KvEvents(request)
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    batch = await call.read()
                if not isinstance(batch, pb.KvEventBatch):
                    break
                messages = [
                    (message.seq, [change_from_message(change) for change in message.changes])
                    for message in batch.messages
                ]
                before = self._index.state
                goes_on = self._index.heard(batch.last_seq, messages, self._clock.now_s())
                self._told(before)
                self._num_failures = 0
                if not goes_on:
                    return
        except TimeoutError:
            pass
        finally:
            call.cancel()
        self._index.broken(self._clock.now_s())

    def _failed(self, error: grpc.aio.AioRpcError) -> None:
        self._num_failures += 1
        before = self._index.state
        match error.code():
            case grpc.StatusCode.OUT_OF_RANGE:
                self._index.replay_gone()
            case grpc.StatusCode.FAILED_PRECONDITION:
                self._index.reset()
            case grpc.StatusCode.UNIMPLEMENTED:
                self._index.no_channel()
            case _ if self._num_failures >= MAX_FAILURES:
                self._index.no_channel()
            case _:
                self._index.broken(self._clock.now_s())
        log.debug("event=kv_stream_ended worker=%s code=%s", self._address, error.code())
        self._told(before)

    def _told(self, before: IndexState) -> None:
        index = self._index
        if index.state is not before:
            log.info(
                "event=index_state worker=%s from=%s to=%s seq=%d blocks=%d",
                self._address, before.value, index.state.value, index.seq, index.num_blocks,
            )  # fmt: skip

    def _pause_s(self) -> float:
        """Short while something is heard, doubled with each failure in a row; long without a channel."""
        if self._index.state is IndexState.DEGRADED:
            pause_s = NO_CHANNEL_PAUSE_S
        else:
            pause_s = min(self._first_pause_s * 2.0 ** min(self._num_failures, 10), self._longest_pause_s)
        return pause_s * (0.5 + self._random.random())
