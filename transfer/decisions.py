"""What the three deciders of this room (holder, taker, links) hear and want, besides the worker's commands and events.

They do no I/O: `handle(event, now_s) -> list[Action]`. `node.py` turns driver, mover and timers into events and carries
actions out, in order, before the next event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..core.ids import TransferId
from ..core.peer import PeerMessage, SegmentReady
from ..core.segments import SegmentRange
from .api import LinkDirection, TransferEvent

# ---- events ----


@dataclass(frozen=True)
class Tick:
    """Time has passed: deadlines may be due."""


@dataclass(frozen=True)
class Gathered:
    """The copy into a send buffer has ended. `digest` None: the pages do not hold what was asked (LayoutError)."""

    buffer: int
    buffer_gen: int
    digest: int | None


@dataclass(frozen=True)
class NoteIn:
    """A taker's READ has ended, so its note says."""

    transfer_id: TransferId
    buffer: int
    buffer_gen: int


@dataclass(frozen=True)
class ReadDone:
    """All bytes landed."""

    landing: int
    header: bytes
    """The first 64 of them; all of them if it was a probe."""
    transport: str = ""
    """A probe: which way they came, as far as the driver knows."""


@dataclass(frozen=True)
class ReadLost:
    """The READ has failed for good, or could not be posted: nothing more lands."""

    landing: int


@dataclass(frozen=True)
class Scattered:
    """The copy out of a landing buffer has ended. `digest` None: the pages cannot hold it (LayoutError)."""

    landing: int
    digest: int | None


@dataclass(frozen=True, kw_only=True)
class LinkReady:
    """A link may carry transfers. OUT: and this is where the holder's buffers lie."""

    link_id: int
    direction: LinkDirection
    peer: str
    incarnation: int
    window: int
    segment_bytes: int
    agent: str = ""
    buffer_base: int = 0
    buffer_bytes: int = 0
    num_buffers: int = 0
    device: str = "cpu"
    bytes_per_s: float = 0.0
    transport: str = ""


@dataclass(frozen=True)
class LinkDoubted:
    """OUT: the link is SUSPECT: start nothing new."""

    link_id: int


@dataclass(frozen=True)
class LinkTrusted:
    """OUT: the link is UP again."""

    link_id: int


@dataclass(frozen=True)
class LinkLost:
    """The link is gone, its transfers with it."""

    link_id: int
    reason: str


@dataclass(frozen=True)
class PeerUnreachable:
    """There is no link to this holder and none will come for now: refused, or forgotten."""

    peer: str
    reason: str


@dataclass(frozen=True)
class FromPeer:
    """A message about transfers, on a link that is up."""

    link_id: int
    message: PeerMessage


@dataclass(frozen=True)
class ReadOverdue:
    """Taker to links: a READ over this link has passed its deadline."""

    link_id: int


@dataclass(frozen=True)
class ReadFailed:
    """Taker to links: a READ of this agent has failed, and with it the connection."""

    agent: str


@dataclass(frozen=True)
class PeerFaulty:
    """Holder or taker to links: this peer breaks the protocol; end the link."""

    link_id: int
    reason: str


# ---- actions ----


@dataclass(frozen=True)
class Send:
    link_id: int
    message: PeerMessage


@dataclass(frozen=True)
class SendBeat:
    """A beat, with whatever holder or taker have to say in it."""

    link_id: int
    direction: LinkDirection


@dataclass(frozen=True)
class Deliver:
    event: TransferEvent


@dataclass(frozen=True)
class Gather:
    """Copy from pages into a send buffer; answered by `Gathered`. The pages stay pinned until then."""

    buffer: int
    buffer_gen: int
    transfer_id: TransferId
    pages: object
    ranges: tuple[SegmentRange, ...]
    length: int


@dataclass(frozen=True)
class Announce:
    """Write the header, then send."""

    link_id: int
    header: bytes
    message: SegmentReady


@dataclass(frozen=True)
class PostRead:
    """READ the first `num_bytes` of a peer's buffer; answered by `ReadDone` or `ReadLost`."""

    landing: int
    agent: str
    remote: int
    num_bytes: int
    device: str
    note: bytes


@dataclass(frozen=True)
class Scatter:
    """Copy from a landing buffer into pages; answered by `Scattered`."""

    landing: int
    transfer_id: TransferId
    pages: object
    ranges: tuple[SegmentRange, ...]
    length: int


@dataclass(frozen=True)
class AddPeer:
    """Know the agent behind this metadata; answered by `PeerAdded`."""

    link_id: int
    metadata: bytes


@dataclass(frozen=True)
class PeerAdded:
    """(event) `name` None: the driver refused it."""

    link_id: int
    name: str | None


@dataclass(frozen=True)
class RemovePeer:
    """Forget an agent that has no READ in flight."""

    agent: str


@dataclass(frozen=True)
class ToHolder:
    event: HolderEvent


@dataclass(frozen=True)
class ToTaker:
    event: TakerEvent


@dataclass(frozen=True)
class ToLinks:
    event: ReadOverdue | ReadFailed | PeerFaulty


LinkNews: TypeAlias = LinkReady | LinkDoubted | LinkTrusted | LinkLost | PeerUnreachable
HolderEvent: TypeAlias = FromPeer | LinkNews | Gathered | NoteIn | Tick
TakerEvent: TypeAlias = FromPeer | LinkNews | ReadDone | ReadLost | Scattered | Tick

Action: TypeAlias = (
    Send
    | SendBeat
    | Deliver
    | Gather
    | Announce
    | PostRead
    | Scatter
    | AddPeer
    | RemovePeer
    | ToHolder
    | ToTaker
    | ToLinks
)
