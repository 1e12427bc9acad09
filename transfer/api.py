"""What the transfer thread is told and what it says: commands in, events out, values both.

A transfer has a holder, which has the bytes, and a taker, which reads them. A worker may be both at once. Pages are
opaque here: what came with a command goes to the mover with each gather or scatter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..core.errors import HeadraceError
from ..core.ids import Incarnation, TransferId, WorkerId
from ..core.peer import PeerMessage


class LinkDirection(Enum):
    """Which end of a link this worker is."""

    OUT = "out"
    """We opened the stream: we take."""
    IN = "in"
    """The peer opened it: we hold."""


class LinkPhase(Enum):
    """States of a link; `link.py` has the table."""

    DOWN = "down"
    HANDSHAKING = "handshaking"
    UP = "up"
    SUSPECT = "suspect"
    """Silent, or a READ is overdue: nothing new is started on it."""
    INCOMPATIBLE = "incompatible"
    """Refused for good; tried again only when the peer's incarnation changes."""


class Outcome(Enum):
    """How a subscription ended, as the holder knows it."""

    TAKEN = "taken"
    NOT_NEEDED = "not_needed"
    """The first token ended the request."""
    ENDED = "ended"


# ---- commands: links ----


@dataclass(frozen=True)
class PeerFound:
    """Keep a link to this holder from now on; answered by `Dial`. Saying it again is harmless and cheap."""

    peer: WorkerId
    address: str
    incarnation: Incarnation | None = None
    """None: whoever answers there."""


@dataclass(frozen=True)
class PeerForgotten:
    """No more link to this holder: its pulls end, its stream is closed."""

    peer: WorkerId


@dataclass(frozen=True)
class LinkOpened:
    """A stream stands. OUT: the link id of the `Dial`. IN: a fresh id from `TransferThread.new_link_id()`."""

    link_id: int
    direction: LinkDirection


@dataclass(frozen=True)
class LinkMessage:
    """A message arrived on a stream, in order."""

    link_id: int
    message: PeerMessage


@dataclass(frozen=True)
class LinkClosed:
    """A stream ended, or a `Dial` failed. Said exactly once for each link id; late ones are ignored."""

    link_id: int
    reason: str


# ---- commands: holder ----


@dataclass(frozen=True, kw_only=True)
class Offer:
    """The Prefill leg is here and has its credits. Nothing is computed before `Wanted`."""

    transfer_id: TransferId
    attempt: int
    length: int
    """Prompt tokens."""
    pages: object = None
    cached_blocks: int = 0
    """Blocks that are final in `pages` already; 0 is always right."""
    block_hashes: tuple[bytes, ...] = ()
    """Hashes of the prompt's full blocks; when given, a pull that holds others is refused."""


@dataclass(frozen=True, kw_only=True)
class BlocksFinal:
    """Blocks below `num_blocks` are final in `pages`, on the device too. The first one says that the sequence has left
    the queue: post it with `num_blocks=0` when its first chunk is scheduled."""

    transfer_id: TransferId
    num_blocks: int
    pages: object
    computed_tokens: int = 0
    """Positions computed so far: progress that keeps the taker waiting."""


@dataclass(frozen=True, kw_only=True)
class PrefillDone:
    """The whole prompt is final in `pages` and the first token of every choice is known."""

    transfer_id: TransferId
    pages: object
    first_token: int
    first_index: int
    computed: int
    cached: int
    ended: bool
    """The first token, of every choice, ended the request."""
    more_first_tokens: tuple[int, ...] = ()
    """Of choices 1 and up."""


@dataclass(frozen=True)
class Withdraw:
    """Stop serving (leg aborted, engine failed, draining). Answered by `Ended`, unless that came before."""

    transfer_id: TransferId
    reason: str


# ---- commands: taker ----


@dataclass(frozen=True, kw_only=True)
class OpenPull:
    """Credits are taken and `pages` are bound: pull. Answered once, by `Arrived`, `NotNeeded` or `PullFailed`."""

    transfer_id: TransferId
    attempt: int
    holder: WorkerId
    """`PeerFound` was posted for it."""
    holder_incarnation: Incarnation | None
    pages: object
    length: int
    held_blocks: int = 0
    """Leading whole blocks that `pages` hold already."""
    block_hashes: tuple[bytes, ...] = ()
    """Of the held blocks; empty: not checked by the holder."""
    num_choices: int = 1
    """First tokens that must come: one for each."""


@dataclass(frozen=True)
class CancelPull:
    """Give up (client gone, leg aborted). Answered by `PullFailed`, unless an answer came before."""

    transfer_id: TransferId
    reason: str = "cancelled"


Command: TypeAlias = (
    PeerFound
    | PeerForgotten
    | LinkOpened
    | LinkMessage
    | LinkClosed
    | Offer
    | BlocksFinal
    | PrefillDone
    | Withdraw
    | OpenPull
    | CancelPull
)

# ---- events ----


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    """What one transfer cost, at the end that reports it."""

    payload_bytes: int = 0
    num_segments: int = 0
    num_missing: int = 0
    """Ranges asked for again (taker), asked of us again (holder)."""
    seconds: float = 0.0
    """Pull to the end."""
    tail_seconds: float = 0.0
    """`Complete` to the end."""
    transport: str = ""


@dataclass(frozen=True)
class Wanted:
    """Holder: pull and offer are both here; compute. The taker holds `held_blocks`."""

    transfer_id: TransferId
    held_blocks: int


@dataclass(frozen=True)
class Ended:
    """Holder: nothing reads the pages any more; release them, and stop computing if that runs yet. Once per `Offer`."""

    transfer_id: TransferId
    outcome: Outcome
    reason: str
    stats: TransferStats


@dataclass(frozen=True)
class Arrived:
    """Taker: TAKEN. Every byte is stored and verified; admit."""

    transfer_id: TransferId
    first_token: int
    first_index: int
    computed_tokens: int
    cached_tokens: int
    stats: TransferStats
    more_first_tokens: tuple[int, ...] = ()
    """Of choices 1 and up."""


@dataclass(frozen=True)
class NotNeeded:
    """Taker: the first token, of every choice, ended the request. Nothing writes the pages any more; release them."""

    transfer_id: TransferId
    first_token: int
    first_index: int
    more_first_tokens: tuple[int, ...] = ()


@dataclass(frozen=True)
class PullFailed:
    """Taker: ABORTED. Nothing writes the pages any more; release them."""

    transfer_id: TransferId
    error: HeadraceError
    stats: TransferStats


@dataclass(frozen=True)
class Dial:
    """Open `KvPeer.Link` at `address`; answer `LinkOpened(link_id, OUT)` or `LinkClosed(link_id, why)`."""

    link_id: int
    peer: WorkerId
    address: str


@dataclass(frozen=True)
class CloseLink:
    """End this stream. The thread has forgotten the link already; a `LinkClosed` for it is ignored."""

    link_id: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class LinkChanged:
    """A link reached another state; for logs and readiness."""

    link_id: int
    direction: LinkDirection
    peer: str
    phase: LinkPhase
    reason: str = ""
    gigabytes_per_s: float = 0.0
    transport: str = ""


@dataclass(frozen=True)
class Quarantined:
    """Half of the landing buffers are HELD: leave the registry and restart; only a process's end frees them surely."""

    num_held: int
    num_buffers: int


@dataclass(frozen=True)
class ThreadFailed:
    """The transfer thread died of a broken invariant; the worker must end."""

    error: BaseException


WorkerEvent: TypeAlias = Wanted | Ended | Arrived | NotNeeded | PullFailed | Quarantined | ThreadFailed
"""What concerns the worker."""

TransferEvent: TypeAlias = WorkerEvent | Dial | CloseLink | LinkChanged
"""The rest is for who carries the links."""

# ---- counts ----


@dataclass(frozen=True, kw_only=True)
class LinkCount:
    """One link, for metrics and `/state`."""

    link_id: int
    direction: LinkDirection
    peer: str
    phase: LinkPhase
    gigabytes_per_s: float
    transport: str


@dataclass(frozen=True, kw_only=True)
class TransferCounts:
    """A snapshot, made by the transfer thread, read anywhere. Names follow `/metrics`."""

    send_buffers: Mapping[str, int] = field(default_factory=dict)
    """By state, in lower case; all states are present. The same for the next three."""
    landing_buffers: Mapping[str, int] = field(default_factory=dict)
    subscriptions: Mapping[str, int] = field(default_factory=dict)
    """Open ones, by phase."""
    pulls: Mapping[str, int] = field(default_factory=dict)
    links: tuple[LinkCount, ...] = ()
    segments_refused: Mapping[str, int] = field(default_factory=dict)
    """By reason: stale, digest, bounds."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Transfers that ended badly, by reason: link, gone, overdue, stall, digest, stale, fault, cancelled, queue."""
    stale_messages: int = 0
    bytes_sent: int = 0
    """Payload that takers have read or released."""
    bytes_received: int = 0
    """Payload stored and verified."""
    segments_sent: int = 0
    segments_received: int = 0
    transfers_taken: int = 0
    transfers_served: int = 0
    oldest_held_s: float = 0.0
    audit: tuple[str, ...] = ()
    """Mismatches of the conservation audit; must stay empty."""

    @property
    def open_transfers(self) -> int:
        return sum(self.subscriptions.values()) + sum(self.pulls.values())

    @property
    def landing_held(self) -> int:
        return self.landing_buffers.get("held", 0)
