"""What two workers say about a transfer, as frozen values; `proto/peer_convert.py` puts them on the wire.

Bounds that every receiver relies on (I10) stand here: a message that breaks one never becomes a value of these classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from .errors import PeerError
from .ids import TransferId
from .sampling import MAX_CHOICES
from .segments import SegmentRange

PROTOCOL = 4
"""Version of the peer protocol; both ends of a link speak the same."""

MAX_INDEX_RANGES = 256
MAX_MISSING_RANGES = 4096
MAX_METADATA_BYTES = 64 << 10
MAX_DOCUMENT_BYTES = 1 << 20
MAX_HASHES = 1 << 16
MAX_ALIVE = 4096
MAX_REASON_CHARS = 1000
MAX_MORE_FIRST_TOKENS = MAX_CHOICES - 1


class PeerFault(PeerError):
    """A peer said what no healthy peer says: out of bounds, never asked for, or out of turn."""

    reason: ClassVar[str] = "transfer_failed"


# ---- taker to holder ----


@dataclass(frozen=True, kw_only=True)
class Hello:
    """First message of a taker."""

    protocol: int
    worker_id: str
    incarnation: int
    fingerprint: bytes
    document: str
    """Canonical JSON behind the fingerprint; only ever used to name what differs."""
    max_segment_bytes: int
    window: int
    holder_incarnation: int
    """0: whoever is there."""


@dataclass(frozen=True)
class LinkUp:
    """The probe arrived whole: the link may carry transfers."""

    gigabytes_per_s: float
    transport: str


@dataclass(frozen=True, kw_only=True)
class Pull:
    """The taker has its credits and wants the sequence."""

    transfer_id: TransferId
    attempt: int
    holder_incarnation: int
    held_blocks: int
    block_hashes: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Release:
    """An announced buffer will not be read."""

    transfer_id: TransferId
    buffer: int
    buffer_gen: int


@dataclass(frozen=True)
class Missing:
    """Announce these ranges again."""

    transfer_id: TransferId
    ranges: tuple[SegmentRange, ...]


@dataclass(frozen=True)
class Taken:
    """Everything is stored and verified."""

    transfer_id: TransferId


@dataclass(frozen=True)
class Cancel:
    """The taker gives the transfer up."""

    transfer_id: TransferId


# ---- holder to taker ----


@dataclass(frozen=True)
class Probe:
    """A known segment that lies in the holder's send memory for good."""

    buffer: int
    buffer_gen: int
    payload_bytes: int
    digest: int


@dataclass(frozen=True, kw_only=True)
class Welcome:
    """The holder's answer to `Hello`: where its send buffers lie."""

    worker_id: str
    incarnation: int
    segment_bytes: int
    window: int
    agent_name: str
    agent_metadata: bytes
    buffer_base: int
    buffer_bytes: int
    num_buffers: int
    """With the probe's buffer, the last one."""
    device: str
    probe: Probe


@dataclass(frozen=True)
class Refusal:
    """The holder's other answer to `Hello`; the stream ends."""

    reason: str
    differing: tuple[str, ...] = ()


@dataclass(frozen=True)
class Serving:
    """The first chunk of the sequence is about to run."""

    transfer_id: TransferId
    length: int


@dataclass(frozen=True, kw_only=True)
class SegmentReady:
    """A segment lies in a send buffer, ready to be read."""

    transfer_id: TransferId
    attempt: int
    seq: int
    buffer: int
    buffer_gen: int
    payload_bytes: int
    digest: int
    """Over index and payload."""
    index: tuple[SegmentRange, ...]


@dataclass(frozen=True, kw_only=True)
class Complete:
    """All was announced. The stream is ordered: what the taker then lacks is missing, not late."""

    transfer_id: TransferId
    length: int
    num_segments: int
    payload_bytes: int
    first_token: int
    first_index: int
    computed_tokens: int
    cached_tokens: int
    ended: bool
    """The first token, of every choice, ended the request: nothing to take."""
    more_first_tokens: tuple[int, ...] = ()
    """Of choices 1 and up, with the same index."""


@dataclass(frozen=True)
class Gone:
    """The holder no longer serves this transfer."""

    transfer_id: TransferId
    reason: str


# ---- both ways ----


@dataclass(frozen=True)
class Beat:
    """Still here, each `beat_s`."""

    alive: tuple[TransferId, ...] = ()
    """Transfers the sender still works on."""
    progress: tuple[tuple[TransferId, int], ...] = ()
    """Holder: tokens computed so far."""


TakerMessage: TypeAlias = Hello | LinkUp | Pull | Release | Missing | Taken | Cancel | Beat
HolderMessage: TypeAlias = Welcome | Refusal | Serving | SegmentReady | Complete | Gone | Beat
PeerMessage: TypeAlias = TakerMessage | HolderMessage

TAKER_MESSAGES = (Hello, LinkUp, Pull, Release, Missing, Taken, Cancel, Beat)
HOLDER_MESSAGES = (Welcome, Refusal, Serving, SegmentReady, Complete, Gone, Beat)
