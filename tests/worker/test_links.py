"""Links over real gRPC between two workers whose transfer threads only record."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import pytest

from headrace.core.peer import PROTOCOL, Beat, Cancel, Gone, Hello, LinkUp, PeerMessage
from headrace.proto.internal.v1 import peer_pb2 as pb
from headrace.proto.internal.v1 import peer_pb2_grpc
from headrace.transfer import api as transfer
from headrace.worker.channels import server_options
from headrace.worker.links import MAX_MESSAGE_BYTES, Links

ID = bytes(range(16))
HELLO = Hello(
    protocol=PROTOCOL,
    worker_id="decode-0",
    incarnation=5,
    fingerprint=b"f" * 32,
    document="{}",
    max_segment_bytes=4096,
    window=4,
    holder_incarnation=0,
)


class End:
    """One worker's links, with a server, and what its transfer thread would have got."""

    def __init__(self, first_id: int) -> None:
        self.posted: list[Any] = []
        ids = itertools.count(first_id)
        self.links = Links(post=self.posted.append, new_link_id=lambda: next(ids))
        self.server = grpc.aio.server(options=server_options(MAX_MESSAGE_BYTES))
        peer_pb2_grpc.add_KvPeerServicer_to_server(self.links, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"

    def of(self, kind: type) -> list[Any]:
        return [command for command in self.posted if isinstance(command, kind)]

    def messages(self) -> list[Any]:
        return [command.message for command in self.of(transfer.LinkMessage)]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 (it is the other end of a socket that changes it)
            await asyncio.sleep(0.001)


def between(script: Callable[[End, End], Awaitable[None]]) -> None:
    """Run a script between a taker and a holder."""

    async def main() -> None:
        taker, holder = End(100), End(200)
        await taker.server.start()
        await holder.server.start()
        try:
            await script(taker, holder)
        finally:
            await asyncio.gather(taker.links.stop(), holder.links.stop())
            await asyncio.gather(taker.server.stop(0), holder.server.stop(0))

    asyncio.run(main())


async def linked(taker: End, holder: End) -> int:
    """Dial, and the holder's id of the link once both ends have it."""
    taker.links.dial(1, holder.address)
    await until(lambda: bool(taker.of(transfer.LinkOpened) and holder.of(transfer.LinkOpened)))
    return int(holder.of(transfer.LinkOpened)[0].link_id)


def test_a_link_carries_messages_both_ways_in_order() -> None:
    """Opened at both ends, each message arrives once, as the value that was sent."""

    async def script(taker: End, holder: End) -> None:
        theirs = await linked(taker, holder)
        assert taker.of(transfer.LinkOpened) == [transfer.LinkOpened(1, transfer.LinkDirection.OUT)]
        assert holder.of(transfer.LinkOpened) == [transfer.LinkOpened(200, transfer.LinkDirection.IN)]
        said = [HELLO, LinkUp(1.5, "memory"), *(Cancel(index.to_bytes(16, "big")) for index in range(300))]
        for message in said:
            taker.links.send(1, message)
        answers = [Gone(ID, f"reason {index}") for index in range(300)]
        for answer in answers:
            holder.links.send(theirs, answer)
        await until(lambda: len(holder.messages()) == 302 and len(taker.messages()) == 300)
        assert holder.messages() == said
        assert taker.messages() == answers

    between(script)


@pytest.mark.parametrize("closer", ["taker", "holder"])
def test_a_closed_link_is_told_once_at_both_ends_after_what_was_sent(closer: str) -> None:
    """Either end may close; the last message before it still arrives; later ones are dropped."""

    async def script(taker: End, holder: End) -> None:
        theirs = await linked(taker, holder)
        if closer == "taker":
            taker.links.send(1, Cancel(ID))
            taker.links.close(1, "enough")
        else:
            holder.links.send(theirs, Gone(ID, "over"))
            holder.links.close(theirs, "enough")
        await until(lambda: bool(taker.of(transfer.LinkClosed) and holder.of(transfer.LinkClosed)))
        assert (holder if closer == "taker" else taker).messages() == [
            Cancel(ID) if closer == "taker" else Gone(ID, "over")
        ]
        taker.links.send(1, Cancel(ID))
        taker.links.close(1, "again")
        await taker.links.stop()
        assert len(taker.of(transfer.LinkClosed)) == len(holder.of(transfer.LinkClosed)) == 1
        assert taker.links.num_links == holder.links.num_links == 0

    between(script)


def test_a_dial_that_nobody_answers_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The transfer thread decides when to try again."""

    async def script(taker: End, holder: End) -> None:
        await holder.server.stop(0)
        taker.links.dial(1, holder.address)
        await until(lambda: bool(taker.of(transfer.LinkClosed)))
        assert taker.of(transfer.LinkOpened) == []

    monkeypatch.setattr("headrace.worker.links.CONNECT_S", 0.2)
    between(script)


def test_a_holder_that_dies_ends_the_link() -> None:
    """Its server goes without a word."""

    async def script(taker: End, holder: End) -> None:
        await linked(taker, holder)
        await holder.server.stop(0)
        await until(lambda: bool(taker.of(transfer.LinkClosed)))
        assert len(holder.of(transfer.LinkClosed)) == 1

    between(script)


def test_a_peer_that_breaks_the_protocol_loses_its_link() -> None:
    """A transfer id of 3 bytes is no message: nothing of it reaches the transfer thread."""

    async def script(taker: End, holder: End) -> None:
        async with grpc.aio.insecure_channel(holder.address) as channel:
            call = peer_pb2_grpc.KvPeerStub(channel).Link()
            await call.write(pb.TakerMessages(messages=[pb.TakerMessage(taken=pb.Taken(transfer_id=b"abc"))]))
            await until(lambda: bool(holder.of(transfer.LinkClosed)))
            assert holder.messages() == []
            assert "protocol" in holder.of(transfer.LinkClosed)[0].reason

    between(script)


@pytest.mark.parametrize("number", [0, 257])
def test_an_empty_or_endless_message_of_the_stream_ends_the_link(number: int) -> None:
    """The number of messages in one is bounded, like everything from a peer."""

    async def script(taker: End, holder: End) -> None:
        async with grpc.aio.insecure_channel(holder.address) as channel:
            call = peer_pb2_grpc.KvPeerStub(channel).Link()
            await call.write(pb.TakerMessages(messages=[pb.TakerMessage(beat=pb.PeerBeat())] * number))
            await until(lambda: bool(holder.of(transfer.LinkClosed)))
            assert holder.messages() == []
            assert "protocol" in holder.of(transfer.LinkClosed)[0].reason

    between(script)


def test_messages_that_waited_go_together_in_order_within_a_bound() -> None:
    """Small ones share one message of the stream, large ones make several; order is kept across all."""

    async def script(taker: End, holder: End) -> None:
        theirs = await linked(taker, holder)
        wide = Beat(tuple(index.to_bytes(16, "big") for index in range(4096)))
        sent: list[PeerMessage] = [Gone(ID, str(number)) for number in range(600)]
        sent[300:300] = [wide] * 80  # more than one message of the stream may hold
        for message in sent:
            holder.links.send(theirs, message)
        await until(lambda: len(taker.messages()) == len(sent))
        assert taker.messages() == sent
        taker.links.close(1, "enough")

    between(script)


def test_a_peer_that_does_not_read_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for a stream is bounded."""
    monkeypatch.setattr("headrace.worker.links.MAX_WAITING", 100)
    monkeypatch.setattr("headrace.worker.links.WRITE_S", 0.2)

    async def script(taker: End, holder: End) -> None:
        async with grpc.aio.insecure_channel(holder.address) as channel:
            call = peer_pb2_grpc.KvPeerStub(channel).Link()
            await call.write(pb.TakerMessages(messages=[pb.TakerMessage(beat=pb.PeerBeat())]))
            await until(lambda: bool(holder.of(transfer.LinkOpened)))
            link_id = holder.of(transfer.LinkOpened)[0].link_id
            wide = Beat(tuple(index.to_bytes(16, "big") for index in range(4096)))
            for _ in range(3000):
                holder.links.send(link_id, wide)
                await asyncio.sleep(0)
            await until(lambda: bool(holder.of(transfer.LinkClosed)))
            assert holder.of(transfer.LinkClosed)[0].reason == "the peer does not read"
            call.cancel()

    between(script)


def test_a_worker_that_leaves_ends_its_links_and_dials_no_more() -> None:
    """Every link is told at both ends; a late dial is answered by its end."""

    async def script(taker: End, holder: End) -> None:
        await linked(taker, holder)
        await taker.links.stop()
        await until(lambda: bool(holder.of(transfer.LinkClosed)))
        taker.links.dial(2, holder.address)
        assert taker.of(transfer.LinkClosed)[-1].link_id == 2
        assert taker.links.num_links == 0

    between(script)
