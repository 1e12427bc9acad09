"""What the engine is told and what it says: commands in, events out.

Commands may be posted from any thread; the engine applies them between steps. Events leave once a step, in order, from
the engine's own thread. A sequence is named by a key that the worker draws and never reuses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from ..core.errors import HeadraceError
from ..core.kv_events import KvEvent
from ..core.sampling import FinishReason, SamplingParams, TokenLogprobs
from ..kvcache.pages import PoolCounts
from ..kvcache.sequence import SequencePages


class LegKind(Enum):
    """Which phases of a request run here."""

    PREFILL = "prefill"
    """Compute the prompt, sample the first token, keep the pages until `Release`."""
    GENERATE = "generate"
    """The prompt's pages arrive from elsewhere (`Admit`); decode from output index `first_index + 1` on."""
    LOCAL = "local"
    """Both phases here."""
    SHARE = "share"
    """Nothing is computed: the prompt ends at a border that this cache keeps, and another worker takes it from here."""
    FETCH = "fetch"
    """Nothing is computed: the prompt's pages arrive from another worker's cache and stay in this one (`Store`)."""

    @property
    def computes(self) -> bool:
        """The prompt, or what of it is not here, is computed by this leg."""
        return self in (LegKind.PREFILL, LegKind.LOCAL)

    @property
    def lands(self) -> bool:
        """The prompt's pages arrive from elsewhere."""
        return self in (LegKind.GENERATE, LegKind.FETCH)


@dataclass(frozen=True, kw_only=True)
class EngineRequest:
    """One sequence as the engine needs it."""

    key: int
    kind: LegKind
    prompt: tuple[int, ...]
    num_output_tokens: int
    """How many trailing ids of `prompt` were generated earlier: output indices and penalties count from there."""
    sampling: SamplingParams
    namespace: str = ""
    priority: int = 0
    seeds: tuple[int, ...] = ()
    """One choice for each, drawn with that seed in place of the sampling's: the prompt is computed once, and arrives
    once. Empty: one choice."""

    @property
    def num_choices(self) -> int:
        return max(1, len(self.seeds))


# ---- commands ----


@dataclass(frozen=True)
class Submit:
    """Queue a request: answered by `Reserved` or `Refused`. LOCAL then computes at once; a PREFILL or a SHARE waits for
    its `Start`; a GENERATE or a FETCH for the bytes."""

    request: EngineRequest


@dataclass(frozen=True)
class Start:
    """PREFILL: a taker has its credits; compute. SHARE: it may have the pages."""

    key: int


@dataclass(frozen=True)
class Admit:
    """GENERATE: every byte is here and verified, and P's first token is known; decode from the next step on."""

    key: int
    first_token: int
    first_index: int
    more_first_tokens: tuple[int, ...] = ()
    """Of choices 1 and up."""


@dataclass(frozen=True)
class Store:
    """FETCH: every byte is here and verified; the blocks are cached, with a check-point at their end, and the sequence
    is over."""

    key: int


@dataclass(frozen=True)
class Release:
    """The pages of a finished PREFILL or SHARE, or of a GENERATE or FETCH that was never admitted, are read or written
    by nobody else."""

    key: int


@dataclass(frozen=True)
class AbortSequence:
    """End a sequence in any phase. Pages return at once, except those of a PREFILL, a SHARE, a FETCH or an unadmitted
    GENERATE: these wait for `Release`, since a gather or a scatter may still touch them."""

    key: int


@dataclass(frozen=True)
class AbortChoice:
    """End one choice; the others go on. The last one's end is the sequence's. Answered by its `SequenceFinished` with
    reason None; of a choice that is over, by nothing."""

    key: int
    choice: int


@dataclass(frozen=True)
class ClearCache:
    """Forget every block and check-point that no sequence reads."""


Command: TypeAlias = Submit | Start | Admit | Store | Release | AbortSequence | AbortChoice | ClearCache

# ---- events ----


@dataclass(frozen=True)
class Reserved:
    """Credits for the whole prompt and the output reserve are taken in every pool."""

    key: int
    held_tokens: int
    """Of whole leading blocks that are here already: final in `pages`, to be neither computed nor shipped again."""
    pages: SequencePages
    """GENERATE, FETCH: page ids for the whole prompt, for the scatter. Others: of the blocks that are held."""


@dataclass(frozen=True)
class Refused:
    """Nothing was taken and nothing is kept of the request."""

    key: int
    error: HeadraceError


@dataclass(frozen=True)
class Started:
    """PREFILL, LOCAL: the first chunk is in this step. SHARE: the pages may be gathered."""

    key: int
    cached_tokens: int


@dataclass(frozen=True)
class ChunkDone:
    """Positions below `computed` are final in the pages, on the device too."""

    key: int
    computed: int
    pages: SequencePages


@dataclass(frozen=True)
class TokenSampled:
    """One output token."""

    key: int
    index: int
    """Absolute output index, from 0."""
    token: int
    logprobs: TokenLogprobs | None
    choice: int = 0


@dataclass(frozen=True)
class PromptScored:
    """Raw log-probabilities of prompt tokens from `first_position` on."""

    key: int
    first_position: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]


@dataclass(frozen=True)
class SequenceFinished:
    """The sequence ended well; LOCAL and GENERATE pages are back. PREFILL: the prompt and its first token are done
    (`reason` None unless that token ended the request); pages stay until `Release`. SHARE: the same, with no token."""

    key: int
    reason: FinishReason | None
    stop_token_id: int | None
    computed_tokens: int
    prefill_s: float
    pages: SequencePages | None
    choice: int = 0
    """Which one ended; of a PREFILL always 0, and `reason` is None unless every choice's first token ended it."""
    last: bool = True
    """No other choice goes on."""


@dataclass(frozen=True)
class SequenceFailed:
    """The sequence ended badly; pages as after `AbortSequence`."""

    key: int
    error: HeadraceError


@dataclass(frozen=True)
class CacheChanged:
    """What may be hit here has changed. Names no sequence; comes after the state it tells of is final."""

    changes: tuple[KvEvent, ...]


SequenceEvent: TypeAlias = (
    Reserved | Refused | Started | ChunkDone | TokenSampled | PromptScored | SequenceFinished | SequenceFailed
)
Event: TypeAlias = SequenceEvent | CacheChanged

EventSink: TypeAlias = Callable[[Sequence[Event]], None]


@dataclass(frozen=True)
class EngineLoad:
    """A snapshot for load reports and metrics; made in the engine thread, read anywhere."""

    running: int
    waiting: int
    queued_tokens: int
    steps: int
    last_progress_s: float
    """Monotonic time of the last step end; with work present and this long ago, the worker is wedged."""
    pools: dict[str, PoolCounts]
    """By pool kind."""
    audit_mismatches: int
