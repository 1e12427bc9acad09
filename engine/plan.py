"""From scheduled work to the tensors of one step: slots, tables, closing entries. Made once a step, for all layers.

A decision without I/O on tensors that it makes itself; reads page ids, never pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.blocks import BLOCK_TOKENS
from ..kvcache.sequence import SequencePages
from ..model.batch import Batch, ClosingEntries

WINDOW_PAGE_TOKENS = 64
WINDOW_TOKENS = 128


@dataclass(frozen=True)
class Slice:
    """Tokens [start, start + len(tokens)) of one sequence, whose pages reach that far."""

    tokens: Sequence[int]
    start: int
    pages: SequencePages
    logit_positions: Sequence[int]
    """Positions of the slice whose logits are wanted."""
    frozen_below: int = 0
    """History below this position is published: it is read, never written again."""


def _tables(slices: Sequence[Slice]) -> tuple[Tensor, Tensor, Tensor]:
    history = torch.zeros(len(slices), max(1, max(len(s.pages.history) for s in slices)), dtype=torch.int32)
    first = [max(0, s.start - WINDOW_TOKENS + 1) // WINDOW_PAGE_TOKENS for s in slices]
    last = [(s.start + len(s.tokens) - 1) // WINDOW_PAGE_TOKENS for s in slices]
    window = torch.zeros(len(slices), max(b - a for a, b in zip(first, last, strict=True)) + 1, dtype=torch.int32)
    for i, s in enumerate(slices):
        history[i, : len(s.pages.history)] = torch.tensor(s.pages.history, dtype=torch.int32)
        pages = [s.pages.window_pages[p] for p in range(first[i], last[i] + 1)]
        window[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
    return history, window, torch.tensor(first, dtype=torch.int32)


def _closing(slices: Sequence[Slice], ratio: int) -> ClosingEntries:
    """Entries [start // ratio, end // ratio) of each slice; candidates: the group, for ratio 4 the one before too."""
    per_page = BLOCK_TOKENS // ratio
    reach = torch.arange(-4 if ratio == 4 else 0, ratio)
    positions, slots, state_rows, tokens, rows = [], [], [], [], []
    row = 0
    for s in slices:
        end = s.start + len(s.tokens)
        entry = torch.arange(s.start // ratio, end // ratio)
        pages = torch.tensor(s.pages.history or (0,), dtype=torch.int64)
        candidates = entry[:, None] * ratio + reach
        positions.append(entry * ratio)
        slot = pages[entry // per_page] * per_page + entry % per_page
        slots.append(torch.where((entry + 1) * ratio > s.frozen_below, slot, -1))
        state_rows.append(torch.full_like(entry, s.pages.state_row))
        tokens.append(candidates.clamp_min(-1))
        rows.append(torch.where(candidates >= s.start, candidates - s.start + row, -1))
        row += len(s.tokens)
    return ClosingEntries(
        torch.cat(positions), torch.cat(slots), torch.cat(state_rows), torch.cat(tokens), torch.cat(rows)
    )


def plan_batch(slices: Sequence[Slice]) -> Batch:
    """The step's tensors. Every slice has at least one token."""
    assert slices
    assert all(s.tokens for s in slices)
    history, window, first = _tables(slices)
    positions = torch.cat([torch.arange(s.start, s.start + len(s.tokens)) for s in slices])
    seq = torch.cat([torch.full((len(s.tokens),), i, dtype=torch.int32) for i, s in enumerate(slices)])
    rows = seq.long()
    pages = window[rows, positions // WINDOW_PAGE_TOKENS - first[rows]].long()
    offsets = [0]
    for s in slices:
        offsets.append(offsets[-1] + len(s.tokens))
    return Batch(
        token_ids_T=torch.tensor([t for s in slices for t in s.tokens]),
        positions_T=positions,
        seq_T=seq,
        ends_T=torch.tensor([s.start + len(s.tokens) for s in slices])[rows],
        state_rows_T=torch.tensor([s.pages.state_row for s in slices])[rows],
        window_slots_T=pages * WINDOW_PAGE_TOKENS + positions % WINDOW_PAGE_TOKENS,
        history_SB=history,
        window_SW=window,
        window_first_S=first,
        closing={ratio: _closing(slices, ratio) for ratio in (4, 128)},
        logit_rows=torch.tensor(
            [o + p - s.start for o, s in zip(offsets, slices, strict=False) for p in s.logit_positions],
            dtype=torch.int64,
        ),
    )
