"""Real transfers need real processes: two peers, and the test in the middle that carries their messages."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import pytest

from headrace.core.ids import TransferId, WorkerId, new_transfer_id
from headrace.core.peer import PeerMessage
from headrace.transfer.api import (
    CloseLink,
    Dial,
    LinkClosed,
    LinkDirection,
    LinkMessage,
    LinkOpened,
    PeerFound,
    TransferCounts,
)

GEOMETRY = {"num_layers": 4, "block_bytes": 65536, "window_bytes": 8192, "row_bytes": 4096}
SECTION = {
    "segment_bytes": 1 << 20,
    "num_send_buffers": 8,
    "num_landing_buffers": 8,
    "read_deadline_s": 1.0,
    "progress_deadline_s": 5.0,
    "lease_s": 5.0,
    "beat_s": 0.5,
}
PATIENCE_S = 30.0


class Process:
    """One peer process, as the test sees it."""

    def __init__(self, listener: Listener, name: str, options: dict[str, Any], environment: dict[str, str]) -> None:
        self.name = name
        self.child = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).parent / "nixl_peer.py"),
                str(listener.address),
                name,
                json.dumps(options),
            ],
            env={**os.environ, "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "lo", **environment},
        )
        self.connection: Connection = listener.accept()  # type: ignore[assignment]
        self.heard: deque[tuple[Any, ...]] = deque()

    def tell(self, *order: Any) -> None:
        """An order to one that was killed is lost; that it is gone is seen when its connection is read."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(order)

    def signal(self, number: signal.Signals) -> None:
        self.child.send_signal(number)


class Middle:
    """Carries messages between peers, and tells what it saw."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener = Listener(str(folder / "socket"), "AF_UNIX")
        self.peers: dict[str, Process] = {}
        self._all: list[Process] = []
        self.links: dict[tuple[str, int], tuple[str, int]] = {}
        self.carry: Callable[[Process, int, PeerMessage], bool] = lambda sender, link, message: True
        """May keep a message back (False)."""

    def start(self, name: str, *, environment: dict[str, str] | None = None, **options: Any) -> Process:
        options = {"geometry": GEOMETRY, **options, "section": {**SECTION, **options.get("section", {})}}
        peer = self.peers[name] = Process(self._listener, name, options, environment or {})
        self._all.append(peer)
        self.until(peer, "ready")
        return peer

    def pump(self, timeout_s: float) -> None:
        """Take in what the peers say; carry link messages."""
        living = {peer.connection: peer for peer in self.peers.values() if not peer.connection.closed}
        for ready in wait(list(living), timeout_s):
            peer = living[ready]  # type: ignore[index]
            try:
                said = peer.connection.recv()
            except (EOFError, ConnectionResetError):
                peer.connection.close()
                self._cut(peer)
                continue
            match said:
                case ("link", link_id, message):
                    if self.carry(peer, link_id, message):
                        self.forward(peer, link_id, message)
                case ("event", Dial(link_id, holder, _)):
                    self._dial(peer, link_id, holder)
                case ("event", CloseLink(link_id, reason)):
                    self._close(peer.name, link_id, reason)
                case _:
                    peer.heard.append(said)

    def forward(self, sender: Process, link_id: int, message: PeerMessage) -> None:
        end = self.links.get((sender.name, link_id))
        if end is not None:
            self.peers[end[0]].tell("post", LinkMessage(end[1], message))

    def _dial(self, taker: Process, link_id: int, holder_name: WorkerId) -> None:
        holder = self.peers[holder_name]
        if holder.connection.closed:
            taker.tell("post", LinkClosed(link_id, "nobody there"))
            return
        holder.tell("new_link")
        back_id = self.until(holder, "link_id")[1]
        self.links[taker.name, link_id] = (holder_name, back_id)
        self.links[holder_name, back_id] = (taker.name, link_id)
        holder.tell("post", LinkOpened(back_id, LinkDirection.IN))
        taker.tell("post", LinkOpened(link_id, LinkDirection.OUT))

    def _close(self, name: str, link_id: int, reason: str) -> None:
        end = self.links.pop((name, link_id), None)
        if end is not None and self.links.pop(end, None) is not None and not self.peers[end[0]].connection.closed:
            self.peers[end[0]].tell("post", LinkClosed(end[1], reason))

    def _cut(self, peer: Process) -> None:
        for name, link_id in [end for end in self.links if end[0] == peer.name]:
            self._close(name, link_id, "process died")

    def until(
        self, peer: Process, kind: str, wanted: Callable[[tuple[Any, ...]], bool] | None = None
    ) -> tuple[Any, ...]:
        """The next thing of this kind that the peer says; others stay for later."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            for said in peer.heard:
                if said[0] == kind and (wanted is None or wanted(said)):
                    peer.heard.remove(said)
                    return said
            if time.monotonic() > end_s:
                raise AssertionError(f"{peer.name} did not say {kind}; heard {list(peer.heard)}")
            self.pump(0.05)

    def event(self, peer: Process, kind: type, transfer_id: TransferId | None = None) -> Any:
        """The next event of this class."""

        def fits(said: tuple[Any, ...]) -> bool:
            return isinstance(said[1], kind) and transfer_id in (None, getattr(said[1], "transfer_id", None))

        return self.until(peer, "event", fits)[1]

    def state(self, peer: Process) -> tuple[TransferCounts, float, int]:
        """Counts, CPU seconds, open file descriptors."""
        peer.tell("state")
        _, counts, cpu_s, num_fds = self.until(peer, "state")
        return counts, cpu_s, num_fds

    def until_counts(self, peer: Process, good: Callable[[TransferCounts], bool]) -> TransferCounts:
        """The peer's counts, once they are good."""
        end_s = time.monotonic() + PATIENCE_S
        while not good(counts := self.state(peer)[0]):
            assert time.monotonic() < end_s, counts
            self.pump(0.05)
        return counts

    def link(self, taker: Process, holder: Process) -> None:
        taker.tell("post", PeerFound(WorkerId(holder.name), "address"))

    def transfer(self, taker: Process, holder: Process, length: int, seed: int = 1) -> TransferId:
        """Open both legs."""
        transfer_id = new_transfer_id()
        holder.tell("offer", transfer_id, length, seed)
        taker.tell("pull", transfer_id, length, holder.name)
        return transfer_id

    def stop(self) -> None:
        """End what this test started, by its own handles."""
        for peer in self._all:
            if peer.child.poll() is None:
                peer.child.send_signal(signal.SIGCONT)
                peer.child.kill()
            peer.child.wait()
            peer.connection.close()
        self._listener.close()


@pytest.fixture
def middle(tmp_path: Path) -> Iterator[Middle]:
    """Starts peers and joins them."""
    made = Middle(tmp_path)
    yield made
    made.stop()
