"""From one row of logits to one token: the same row, history and output index give the same token, anywhere.

Randomness is a counter, draw = f(seed, output index), so a resumed or migrated stream draws the same numbers. Each row
is worked on alone and in float64: neither the batch nor the other rows can move a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..core.errors import PeerError
from ..core.sampling import SamplingParams, TokenLogprobs

_MASK = (1 << 64) - 1
GREEDY_BELOW = 1e-5


class BrokenLogits(PeerError):
    """The logits hold a NaN: a page or a weight is wrong, and no token may be made of it."""


def uniform(seed: int, index: int) -> float:
    """The `index`-th draw of `seed`, in [0, 1) with 53 bits: two rounds of splitmix64's finaliser over both."""
    x = (seed & _MASK) ^ 0x9E3779B97F4A7C15
    for word in (index + 1, seed >> 64):
        x = (x + word * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return (x >> 11) / (1 << 53)


@dataclass
class History:
    """Token counts that penalties need; grows with the output."""

    seen: set[int] = field(default_factory=set)
    """Ids of prompt and output: the repetition penalty."""
    output: dict[int, int] = field(default_factory=dict)
    """Occurrences in the output: presence and frequency penalties."""

    def copy(self) -> History:
        """For a fork."""
        return History(set(self.seen), dict(self.output))

    @classmethod
    def of(cls, prompt: Sequence[int], num_output_tokens: int) -> History:
        """`prompt` whose last `num_output_tokens` ids were generated earlier."""
        history = cls(set(prompt))
        for token in prompt[len(prompt) - num_output_tokens :]:
            history.output[token] = history.output.get(token, 0) + 1
        return history

    def add(self, token: int) -> None:
        self.seen.add(token)
        self.output[token] = self.output.get(token, 0) + 1


def _penalised(logits_V: Tensor, params: SamplingParams, history: History, num_new: int) -> Tensor:
    """Float64 logits after penalties, bias and bans."""
    x = logits_V.double()
    if params.repetition_penalty != 1.0 and history.seen:
        ids = torch.tensor(sorted(history.seen))
        values = x[ids]
        x[ids] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and history.output:
        ids = torch.tensor(sorted(history.output))
        counts = torch.tensor([history.output[i] for i in sorted(history.output)], dtype=torch.float64)
        x[ids] -= params.frequency_penalty * counts + params.presence_penalty
    for token, bias in params.logit_bias.items():
        x[token] = float("-inf") if bias <= -100 else x[token] + bias
    if params.allowed_token_ids:
        allowed = torch.full_like(x, float("-inf"))
        ids = torch.tensor(params.allowed_token_ids)
        allowed[ids] = x[ids]
        x = allowed
    if num_new < params.min_tokens:
        banned = {*params.stop_token_ids, *(() if params.ignore_eos else params.eos_token_ids)}
        if banned:
            x[torch.tensor(sorted(banned))] = float("-inf")
    return x


def _draw(x: Tensor, params: SamplingParams, index: int) -> int:
    """Inverse transform over the kept tokens, likeliest first, ties to the lower id."""
    order = torch.sort(x / params.temperature, descending=True, stable=True)
    p = torch.softmax(order.values, 0)
    keep = torch.ones_like(p, dtype=torch.bool)
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.top_p < 1.0:
        keep &= p.cumsum(0) - p < params.top_p
    if params.min_p > 0.0:
        keep &= p >= params.min_p * p[0]
    keep[0] = True
    edges = torch.where(keep, p, 0.0).cumsum(0)
    at = int(torch.searchsorted(edges, uniform(params.seed, index) * edges[-1], right=True))
    last = int(keep.nonzero()[-1])
    return int(order.indices[min(at, last)])


def raw_logprobs(logits_V: Tensor, token: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of the raw distribution: of `token`, and of the `num_top` likeliest."""
    logp = torch.log_softmax(logits_V.double(), 0)
    own = logp[token]
    rank = int((logp > own).sum()) + 1
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        order = torch.sort(logp, descending=True, stable=True)
        top = tuple(zip(order.indices[:num_top].tolist(), order.values[:num_top].float().tolist(), strict=True))
    return TokenLogprobs(own.float().item(), rank, top)


def sample(
    logits_V: Tensor, params: SamplingParams, history: History, index: int, num_new: int | None = None
) -> tuple[int, TokenLogprobs | None]:
    """The token at output `index`, and its raw log-probabilities if they are wanted.

    Args:
        num_new: tokens since the request was (re)submitted, which `min_tokens` counts; default: `index`.

    Raises:
        BrokenLogits: a logit is NaN.
    """
    if bool(logits_V.isnan().any()):
        raise BrokenLogits("the model's logits are not numbers")
    x = _penalised(logits_V, params, history, index if num_new is None else num_new)
    token = int(x.argmax()) if params.temperature < GREEDY_BELOW else _draw(x, params, index)
    return token, None if params.logprobs is None else raw_logprobs(logits_V, token, params.logprobs)
