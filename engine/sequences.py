"""What the engine knows of one sequence, and of the choices that share a prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum

from ..core.blocks import BlockHash
from ..core.sampling import FinishReason, SamplingParams, end_of
from ..kvcache.allocator import Hit
from ..kvcache.sequence import SequencePages
from .api import EngineRequest
from .sampler import History


class Phase(Enum):
    """Where a sequence stands."""

    QUEUED = "queued"
    """No credits yet."""
    READY = "ready"
    """PREFILL: credits taken, `Start` not heard."""
    LANDING = "landing"
    """GENERATE: another worker's bytes are being scattered into its pages."""
    RUNNING = "running"
    HELD = "held"
    """Over, but a gather or a scatter may still touch its pages; `Release` ends it."""


@dataclass
class Family:
    """The choices of one request."""

    live: set[int] = field(default_factory=set)
    """Ids of the sequences that go on."""
    forks: tuple[int, ...] = ()
    """Ids that have their credits, and no tokens yet: choices 1 and up, until the prompt's end."""


@dataclass
class EngineSequence:
    request: EngineRequest
    id: int
    """The request's key for choice 0, a negative number for a fork."""
    choice: int
    family: Family
    sampling: SamplingParams
    tokens: list[int]
    history: History
    root: BlockHash | None
    """Parent of the first block; None: no prefix cache."""
    hashes: list[BlockHash]
    """Of the full blocks of `tokens`, as far as they were wanted."""
    hit: Hit = field(default_factory=Hit)
    borders: tuple[int, ...] = ()
    """Of the prompt, where a check-point is kept."""
    output_border: BlockHash | None = None
    """The block at whose end the last check-point of the output was kept."""
    phase: Phase = Phase.QUEUED
    start_heard: bool = False
    """PREFILL: `Start` may come before the credits."""
    computed: int = 0
    started: bool = False
    started_s: float = 0.0
    prefill_s: float = 0.0
    """From the first chunk's scheduling to the first token."""
    pages: SequencePages = field(default_factory=SequencePages)

    @property
    def key(self) -> int:
        return self.request.key

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def index(self) -> int:
        """Output index of the next token to be sampled."""
        return len(self.tokens) - self.num_prompt + self.request.num_output_tokens

    @property
    def decoding(self) -> bool:
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > self.num_prompt

    def over(self, token: int) -> tuple[FinishReason, int | None] | None:
        """Whether this token, the last of `tokens`, ended the output; and the stop token that did."""
        return end_of(self.sampling, token, self.index - self.request.num_output_tokens)


def seeded(request: EngineRequest, choice: int) -> SamplingParams:
    """What one choice is sampled with."""
    return replace(request.sampling, seed=request.seeds[choice]) if request.seeds else request.sampling
