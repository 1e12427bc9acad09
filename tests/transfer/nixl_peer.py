"""A worker process without an engine, for tests of real transfers: `python nixl_peer.py SOCKET WORKER_ID OPTIONS`.

It runs a `TransferThread` over NIXL and plain pages, says over the socket what the thread says, and does what it is
told. The test in the middle carries the link messages between two of these, and may hold them back.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import threading
from multiprocessing.connection import Client
from typing import Any

from headrace.config.tree import TransferSection
from headrace.core.clock import MonotonicClock
from headrace.core.ids import TransferId, WorkerId, new_incarnation
from headrace.transfer.api import Arrived, BlocksFinal, Command, Ended, Offer, OpenPull, PrefillDone, Wanted
from headrace.transfer.nixl_driver import NixlDriver, agent_name
from headrace.transfer.one_host_driver import OneHostDriver
from headrace.transfer.plain_cache import PlainGeometry, PlainMover, PlainPages
from headrace.transfer.service import TransferThread


class Peer:
    """The process."""

    def __init__(self, socket: str, worker_id: str, options: dict[str, Any]) -> None:
        self.connection = Client(socket, "AF_UNIX")
        self.lock = threading.Lock()
        self.geometry = PlainGeometry(**options["geometry"])
        self.pages: dict[TransferId, PlainPages] = {}
        incarnation = new_incarnation()
        self.thread = TransferThread(
            worker_id=WorkerId(worker_id),
            incarnation=incarnation,
            driver=OneHostDriver(NixlDriver(agent_name(WorkerId(worker_id), incarnation))),
            geometry=self.geometry,
            mover=PlainMover(),
            fingerprint=options.get("fingerprint", "plain").encode(),
            document=json.dumps({"layout": options.get("fingerprint", "plain")}),
            section=TransferSection(**options["section"]),
            clock=MonotonicClock(),
            deliver=self.heard,
            send=lambda link, message: self.say("link", link, message),
        )
        self.thread.start()
        self.say("ready", worker_id, int(incarnation))

    def say(self, *parts: Any) -> None:
        with self.lock:
            self.connection.send(parts)

    def heard(self, event: Any) -> None:
        match event:
            case Wanted(transfer_id):
                pages = self.pages[transfer_id]
                blocks = pages.length // 256
                for done in range(blocks + 1):
                    self.thread.post(BlocksFinal(transfer_id=transfer_id, num_blocks=done, pages=pages))
                self.thread.post(
                    PrefillDone(
                        transfer_id=transfer_id,
                        pages=pages,
                        first_token=7,
                        first_index=0,
                        computed=pages.length,
                        cached=0,
                        ended=False,
                    )
                )
            case Ended(transfer_id):
                self.pages.pop(transfer_id, None)
            case Arrived(transfer_id):
                digest = hashlib.sha256(self.pages.pop(transfer_id).data).hexdigest()
                self.say("arrived_digest", transfer_id, digest)
        self.say("event", event)

    def run(self) -> None:
        while True:
            try:
                order = self.connection.recv()
            except (EOFError, OSError):
                return
            match order:
                case ("post", command):
                    self.thread.post(command)
                case ("new_link",):
                    self.say("link_id", self.thread.new_link_id())
                case ("offer", transfer_id, length, seed):
                    pages = self.pages[transfer_id] = PlainPages(self.geometry, length)
                    pages.data[:] = random.Random(seed).randbytes(len(pages.data))
                    self.say("offered_digest", transfer_id, hashlib.sha256(pages.data).hexdigest())
                    self.thread.post(Offer(transfer_id=transfer_id, attempt=1, length=length, pages=pages))
                case ("pull", transfer_id, length, holder):
                    pages = self.pages[transfer_id] = PlainPages(self.geometry, length)
                    command: Command = OpenPull(
                        transfer_id=transfer_id,
                        attempt=1,
                        holder=WorkerId(holder),
                        holder_incarnation=None,
                        pages=pages,
                        length=length,
                    )
                    self.thread.post(command)
                case ("state",):
                    times = os.times()
                    self.say("state", self.thread.counts(), times.user + times.system, len(os.listdir("/proc/self/fd")))
                case ("stop",):
                    self.thread.stop(5.0)
                    self.say("stopped")
                    return


if __name__ == "__main__":
    Peer(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])).run()
