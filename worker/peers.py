"""Which holders this worker keeps links to: those it pulls from, and those it pulled from lately.

A router names holders, so their number is bounded and an idle one is forgotten; the transfer thread would dial it for
ever. No I/O; time is passed in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..core.ids import TransferId, WorkerId
from ..transfer import api as transfer

IDLE_S = 600.0
MAX_PEERS = 256


@dataclass
class _Peer:
    used_s: float
    pulls: set[TransferId] = field(default_factory=set)


class PeerBook:
    """Watches what passes to and from the transfer thread; adds `PeerForgotten` where it is due."""

    def __init__(self, *, idle_s: float = IDLE_S, max_peers: int = MAX_PEERS) -> None:
        self._idle_s = idle_s
        self._max_peers = max_peers
        self._peers: dict[WorkerId, _Peer] = {}
        self._holder_of: dict[TransferId, WorkerId] = {}

    @property
    def num_peers(self) -> int:
        return len(self._peers)

    def passes(self, command: transfer.Command, now_s: float) -> list[transfer.Command]:
        """What to post for this command, itself included."""
        match command:
            case transfer.PeerFound(peer):
                forgotten = [] if peer in self._peers else self._make_room()
                self._peers.setdefault(peer, _Peer(now_s)).used_s = now_s
                return [*forgotten, command]
            case transfer.OpenPull():
                peer_of = self._peers.setdefault(command.holder, _Peer(now_s))
                peer_of.used_s = now_s
                peer_of.pulls.add(command.transfer_id)
                self._holder_of[command.transfer_id] = command.holder
                return [command]
            case _:
                return [command]

    def heard(self, event: transfer.TransferEvent, now_s: float) -> None:
        """An answer ends its pull."""
        if isinstance(event, transfer.Arrived | transfer.NotNeeded | transfer.PullFailed):
            holder = self._holder_of.pop(event.transfer_id, None)
            if holder is not None:
                self._peers[holder].pulls.discard(event.transfer_id)
                self._peers[holder].used_s = now_s

    def on_time(self, now_s: float) -> list[transfer.Command]:
        """Forget who was idle for long."""
        idle = [name for name, peer in self._peers.items() if not peer.pulls and now_s - peer.used_s >= self._idle_s]
        return [self._forget(name) for name in idle]

    def _make_room(self) -> list[transfer.Command]:
        """Forget the one without pulls that was used least lately; peers with pulls are bounded by the legs."""
        if len(self._peers) < self._max_peers:
            return []
        free = [(peer.used_s, name) for name, peer in self._peers.items() if not peer.pulls]
        return [self._forget(min(free)[1])] if free else []

    def _forget(self, name: WorkerId) -> transfer.Command:
        del self._peers[name]
        return transfer.PeerForgotten(name)
