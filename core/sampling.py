"""How a request wants its tokens drawn, and what comes back with each: shared by edge, wire and engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

MAX_CHOICES = 128
"""Of one prompt."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Validated sampling settings of one request. Text-level matters (stop strings) stay in the router."""

    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 is off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int = 16
    min_tokens: int = 0
    seed: int = 0
    """Always set: the router draws one if the client gave none. draw = f(seed, output index, choice)."""
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    """None: none; 0: of the sampled token only; k: of the k likeliest too. Raw distribution."""
    prompt_logprobs: int | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Raw log-probabilities at one output position."""

    logprob: float
    rank: int
    """1 is the likeliest."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), likeliest first, ties to the lower id."""


class FinishReason(Enum):
    """Why a sequence ended well. Failures are errors, never finish reasons."""

    STOP = "stop"
    LENGTH = "length"


def end_of(params: SamplingParams, token: int, num_tokens: int) -> tuple[FinishReason, int | None] | None:
    """Whether an output ends with `token`, its `num_tokens`-th since it was (re)submitted; and the stop id that did it.

    Holder and taker each ask of a first token: one rule, so that they agree.
    """
    if token in params.stop_token_ids:
        return FinishReason.STOP, token
    if token in params.eos_token_ids and not params.ignore_eos:
        return FinishReason.STOP, None
    if num_tokens >= params.max_tokens:
        return FinishReason.LENGTH, None
    return None
