"""What a forward pass is handed: the step's tokens, where each finds its sequence's pages, and one layer's views.

Plain tensors; who owns the pages and why a token is in the step is not known here. Letters: T tokens of the step, S
sequences, E entries that close in it, C candidate rows of an entry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..kernels.paged import PagedEntries, StateRing
from .config import ModelConfig


@dataclass(frozen=True)
class ClosingEntries:
    """The compressed entries of one ratio that the step's tokens complete, in order of sequence and entry."""

    positions_E: Tensor
    """int64, of each group's first token: the rotary position."""
    slots_E: Tensor
    """int64, in the history pages; -1 where the published page must not be written again."""
    state_rows_E: Tensor
    """int64, row of the state pool."""
    tokens_EC: Tensor
    """int64 positions of the candidate rows; -1 is absent (before the sequence)."""
    rows_EC: Tensor
    """int64 row of the step that holds the candidate; -1: it is in the ring."""


@dataclass(frozen=True)
class Batch:
    """All layers share it; it is made once a step."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    seq_T: Tensor
    """int32, index into the tables below; tokens of a sequence are neighbours, in order."""
    ends_T: Tensor
    """int64, one past the last position of the token's sequence in this step."""
    state_rows_T: Tensor
    """int64, row of the state pool."""
    window_slots_T: Tensor
    """int64, where the token's raw entry goes."""
    history_SB: Tensor
    """int32 page of each block."""
    window_SW: Tensor
    """int32 page of each 64 tokens from window_first on."""
    window_first_S: Tensor
    """int32."""
    closing: dict[int, ClosingEntries]
    """By ratio, 4 and 128."""
    logit_rows: Tensor
    """int64 rows of the step whose logits are wanted."""


@dataclass(frozen=True)
class LayerViews:
    """One layer's streams in the pools."""

    window: PagedEntries
    entries: PagedEntries | None = None
    """c4a or c128a."""
    entry_state: StateRing | None = None
    index_keys: PagedEntries | None = None
    index_state: StateRing | None = None


class ForwardPass(Protocol):
    """What an engine needs of a model, on whichever device it computes."""

    config: ModelConfig

    def forward(self, batch: Batch, views: Sequence[LayerViews]) -> Tensor:
        """Advance the pages by the step's tokens; raw logits of `batch.logit_rows`, fp32 [rows, V], on its device."""
        ...

    def likeliest(self, logits_RV: Tensor) -> Tensor | None:
        """The lowest best id of each row of logits, int32 on the device, -1 where one is NaN; None: on the host."""
        ...

    def settle(self) -> None:
        """Returns when all that was asked of the device is done: pages hold what was written to them."""
        ...
