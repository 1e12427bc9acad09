"""The logits of one step, on whichever device they were computed, and the tokens that follow from them.

On a GPU the likeliest token of every row is found there, and comes back in the one copy that a step waits for; rows
that are drawn from, penalised or scored come to the host whole, all together, and are sampled as on the CPU. Either
way a row's token is the same.
"""

from __future__ import annotations

from torch import Tensor

from ..core.sampling import SamplingParams, TokenLogprobs
from .sampler import GREEDY_BELOW, BrokenLogits, History, sample


class StepLogits:
    """See the module; rows are numbered as `Batch.logit_rows` names them."""

    def __init__(self, logits_RV: Tensor, best_R: Tensor | None) -> None:
        """best_R: what `ForwardPass.likeliest` found; this waits for it."""
        self._logits_RV, self._host_RV = logits_RV, logits_RV if best_R is None else None
        self._best: list[int] = [] if best_R is None else best_R.tolist()

    def row(self, row: int) -> Tensor:
        """fp32 [V] on the host."""
        if self._host_RV is None:
            self._host_RV = self._logits_RV.cpu()
        return self._host_RV[row]

    def sample(
        self, row: int, params: SamplingParams, history: History, index: int, num_new: int
    ) -> tuple[int, TokenLogprobs | None]:
        """As `sampler.sample`.

        Raises:
            BrokenLogits: a logit is NaN.
        """
        if not self._best or not is_plain_greedy(params, num_new):
            return sample(self.row(row), params, history, index, num_new)
        if self._best[row] < 0:
            raise BrokenLogits("the model's logits are not numbers")
        return self._best[row], None


def is_plain_greedy(params: SamplingParams, num_new: int) -> bool:
    """Whether the likeliest token is the answer, and nothing else is asked of the logits."""
    return (
        params.temperature < GREEDY_BELOW
        and params.logprobs is None
        and params.repetition_penalty == 1.0
        and not params.presence_penalty
        and not params.frequency_penalty
        and not params.logit_bias
        and not params.allowed_token_ids
        and num_new >= params.min_tokens
    )
