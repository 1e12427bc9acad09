"""Links: the gRPC streams between this worker and its peers, both ways. They carry messages and mean nothing here.

The transfer thread says whom to dial and what to send; what arrives goes to it, in order. Each link ends once, is told
so once, and takes everything it holds with it. What waits for a stream is bounded, and so is a write: a peer
that does not read loses its link.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from ..core.errors import HeadraceError
from ..core.peer import PeerMessage
from ..proto.internal.v1 import peer_pb2 as pb
from ..proto.internal.v1 import peer_pb2_grpc
from ..proto.peer_convert import from_holder, from_taker, to_holder, to_taker
from ..transfer import api as transfer
from .channels import channel_options

logger = logging.getLogger(__name__)

CONNECT_S = 5.0
WRITE_S = 6.0
MAX_MESSAGE_BYTES = 4 << 20
"""The largest: 65,536 block hashes of a pull, or 1 MiB of layout document."""
MAX_WAITING = 4096
"""Messages of one link that its stream has not taken."""
MAX_TOGETHER = 256
"""Messages in one of the stream's."""
MAX_TOGETHER_BYTES = 1 << 20
"""Of those; a message larger than this goes alone."""
MAX_LINKS_IN = 256


class LinkBroken(Exception):
    """Why a link ended."""


class _Link:
    """One stream and what waits for it."""

    def __init__(self, link_id: int) -> None:
        self.link_id = link_id
        self.task: asyncio.Task[Any] | None = None
        self.end: str | None = None
        self._waiting: deque[PeerMessage] = deque()
        self._wake = asyncio.Event()

    def send(self, message: PeerMessage) -> None:
        if len(self._waiting) >= MAX_WAITING:
            self.finish("the peer does not read")
        else:
            self._waiting.append(message)
            self._wake.set()

    def finish(self, why: str) -> None:
        """End it; the first reason counts. Waiting messages are still sent."""
        if self.end is None:
            self.end = why
        self._wake.set()

    async def pump(self, write: Callable[[Any], Any], convert: Callable[[PeerMessage], Any], together: Any) -> None:
        """Write what waits until the link ends, as much together as one message of the stream may hold."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                try:
                    async with asyncio.timeout(WRITE_S):
                        await write(together(messages=self._next(convert)))
                except TimeoutError:
                    raise LinkBroken("the peer does not read") from None
            if self.end is not None:
                raise LinkBroken(self.end)

    def _next(self, convert: Callable[[PeerMessage], Any]) -> list[Any]:
        messages: list[Any] = []
        left = MAX_TOGETHER_BYTES
        while self._waiting and len(messages) < MAX_TOGETHER:
            message = convert(self._waiting[0])
            left -= message.ByteSize()
            if left < 0 and messages:
                break
            messages.append(message)
            self._waiting.popleft()
        return messages


class Links(peer_pb2_grpc.KvPeerServicer):
    """All links of one worker. Runs on one event loop; `post` hands to the transfer thread."""

    def __init__(self, *, post: Callable[[transfer.Command], None], new_link_id: Callable[[], int]) -> None:
        self._post = post
        self._new_link_id = new_link_id
        self._links: dict[int, _Link] = {}
        self._num_in = 0
        self._closed = False

    @property
    def num_links(self) -> int:
        return len(self._links)

    def send(self, link_id: int, message: PeerMessage) -> None:
        """Send on a link; one that has ended drops it."""
        link = self._links.get(link_id)
        if link is not None:
            link.send(message)

    def close(self, link_id: int, why: str) -> None:
        """End a link after what waits is sent; one that has ended already stays so."""
        link = self._links.get(link_id)
        if link is not None:
            link.finish(why)

    def dial(self, link_id: int, address: str) -> None:
        """Open a link to a holder; answered by `LinkOpened` or `LinkClosed`."""
        if self._closed:
            self._post(transfer.LinkClosed(link_id, "this worker is leaving"))
            return
        link = self._links[link_id] = _Link(link_id)
        link.task = asyncio.create_task(self._out(link, address))

    async def stop(self) -> None:
        """End every link and wait for it, within a second."""
        self._closed = True
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for link in self._links.values():
            link.finish("this worker is leaving")
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=1.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    # ---- taker's end ----

    async def _out(self, link: _Link, address: str) -> None:
        why = "cancelled"
        channel = grpc.aio.insecure_channel(address, options=channel_options(MAX_MESSAGE_BYTES))
        try:
            try:
                async with asyncio.timeout(CONNECT_S):
                    await channel.channel_ready()
                    call = peer_pb2_grpc.KvPeerStub(channel).Link()
                    await call.wait_for_connection()
            except TimeoutError:
                raise LinkBroken(f"no answer within {CONNECT_S:g} s") from None
            self._post(transfer.LinkOpened(link.link_id, transfer.LinkDirection.OUT))
            await self._both(
                link,
                link.pump(call.write, to_taker, pb.TakerMessages),
                self._hear(link, call.read, from_holder, pb.HolderMessages),
            )
        except LinkBroken as broken:
            why = str(broken)
        except grpc.RpcError as error:
            why = _status_text(error)
        except Exception as error:  # gRPC's own classes for a call that is over are private
            why = f"the stream broke: {type(error).__name__}"
        finally:
            self._gone(link, why)
            with contextlib.suppress(asyncio.CancelledError):
                await channel.close(None)

    # ---- holder's end ----

    async def Link(self, request_iterator: AsyncIterator[pb.TakerMessages], context: Any) -> None:
        if self._closed or self._num_in >= MAX_LINKS_IN:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "no more links here")
        link = _Link(self._new_link_id())
        link.task = asyncio.current_task()
        self._links[link.link_id] = link
        self._num_in += 1
        why = "the peer is gone"
        try:
            self._post(transfer.LinkOpened(link.link_id, transfer.LinkDirection.IN))
            # The taker waits for this before it says that the stream stands.
            await context.send_initial_metadata(())
            await self._both(
                link,
                link.pump(context.write, to_holder, pb.HolderMessages),
                self._hear(link, context.read, from_taker, pb.TakerMessages),
            )
        except LinkBroken as broken:
            why = str(broken)
        except Exception as error:  # the same here
            why = f"the stream broke: {type(error).__name__}"
        finally:
            self._num_in -= 1
            self._gone(link, why)

    # ---- both ----

    async def _both(self, link: _Link, *ways: Any) -> None:
        """Run both directions until one ends, then end the other."""
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _hear(self, link: _Link, read: Any, convert: Any, kind: type) -> None:
        while True:
            together = await read()
            if not isinstance(together, kind):  # EOF
                raise LinkBroken("the peer closed it")
            if not 0 < len(together.messages) <= MAX_TOGETHER:  # type: ignore[attr-defined]
                raise LinkBroken(f"the peer broke the protocol: {len(together.messages)} messages")  # type: ignore[attr-defined]
            for message in together.messages:  # type: ignore[attr-defined]
                try:
                    value = convert(message)
                except HeadraceError as fault:
                    raise LinkBroken(f"the peer broke the protocol: {fault}") from fault
                self._post(transfer.LinkMessage(link.link_id, value))

    def _gone(self, link: _Link, why: str) -> None:
        if self._links.pop(link.link_id, None) is not None:
            logger.debug("link.closed link=%d why=%s", link.link_id, why)
            self._post(transfer.LinkClosed(link.link_id, why))


def _status_text(error: grpc.RpcError) -> str:
    code = error.code() if hasattr(error, "code") else None
    details = error.details() if hasattr(error, "details") else ""
    return f"{code.name if code is not None else 'error'}: {details}"[:300]
