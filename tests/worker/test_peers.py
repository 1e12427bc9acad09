"""The book of peers: whom this worker keeps a link to."""

from __future__ import annotations

from typing import Any

from headrace.core.errors import TransferFailed
from headrace.core.ids import Incarnation, TransferId, WorkerId
from headrace.transfer import api as transfer
from headrace.worker.peers import PeerBook


def found(name: str) -> transfer.PeerFound:
    return transfer.PeerFound(WorkerId(name), "127.0.0.1:1", Incarnation(1))


def pull(number: int, name: str) -> transfer.OpenPull:
    return transfer.OpenPull(
        transfer_id=TransferId(number.to_bytes(16, "big")),
        attempt=1,
        holder=WorkerId(name),
        holder_incarnation=Incarnation(1),
        pages=None,
        length=10,
    )


def failed(number: int) -> Any:
    transfer_id = TransferId(number.to_bytes(16, "big"))
    return transfer.PullFailed(transfer_id, TransferFailed("gone"), transfer.TransferStats())


def test_an_idle_peer_is_forgotten_and_one_with_a_pull_is_not() -> None:
    """The transfer thread dials a peer for as long as it is in the book."""
    book = PeerBook(idle_s=100.0)
    book.passes(found("a"), 0.0)
    book.passes(found("b"), 0.0)
    book.passes(pull(1, "b"), 0.0)
    assert book.on_time(99.0) == []
    assert book.on_time(100.0) == [transfer.PeerForgotten(WorkerId("a"))]
    assert book.on_time(1000.0) == []
    book.heard(failed(1), 1000.0)
    assert book.on_time(1099.0) == []
    assert book.on_time(1100.0) == [transfer.PeerForgotten(WorkerId("b"))]
    assert book.num_peers == 0


def test_the_book_is_bounded_and_drops_who_was_used_least_lately() -> None:
    """A router that names many holders costs no more than the bound."""
    book = PeerBook(max_peers=2)
    book.passes(found("a"), 0.0)
    book.passes(found("b"), 1.0)
    book.passes(found("a"), 2.0)
    assert book.passes(found("c"), 3.0) == [transfer.PeerForgotten(WorkerId("b")), found("c")]
    book.passes(pull(1, "a"), 4.0)
    book.passes(pull(2, "c"), 4.0)
    assert book.passes(found("d"), 5.0) == [found("d")]


def test_an_answer_to_an_unknown_pull_is_ignored() -> None:
    """Answers may come late."""
    PeerBook().heard(failed(7), 0.0)
