"""From scheduled work to the tensors of one step: slots, tables, closing entries. Made once a step, for all layers.

A decision without I/O on tensors that it makes itself; reads page ids, never pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ..core.blocks import BLOCK_TOKENS
from ..kvcache.sequence import SequencePages
from ..model.batch import Batch, ClosingEntries

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

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


def _tables(slices: Sequence[Slice]) -> tuple[Int32Array, Int32Array, Int64Array]:
    history = np.zeros((len(slices), max(1, max(len(s.pages.history) for s in slices))), dtype=np.int32)
    first = [max(0, s.start - WINDOW_TOKENS + 1) // WINDOW_PAGE_TOKENS for s in slices]
    last = [(s.start + len(s.tokens) - 1) // WINDOW_PAGE_TOKENS for s in slices]
    window = np.zeros((len(slices), max(b - a for a, b in zip(first, last, strict=True)) + 1), dtype=np.int32)
    for i, s in enumerate(slices):
        history[i, : len(s.pages.history)] = s.pages.history
        window[i, : last[i] - first[i] + 1] = [s.pages.window_pages[p] for p in range(first[i], last[i] + 1)]
    return history, window, np.array(first, dtype=np.int64)


@dataclass(frozen=True)
class _Rows:
    """Of each slice: positions it begins at and ends before, first row in the step, state row, published history."""

    starts: Int64Array
    ends: Int64Array
    rows: Int64Array
    state_rows: Int64Array
    frozen_below: Int64Array


def _closing(of: _Rows, history: Int32Array, ratio: int) -> ClosingEntries:
    """Entries [start // ratio, end // ratio) of each slice; candidates: the group, for ratio 4 the one before too."""
    per_page = BLOCK_TOKENS // ratio
    reach = np.arange(-4 if ratio == 4 else 0, ratio)
    first = of.starts // ratio
    counts = of.ends // ratio - first
    seq = np.repeat(np.arange(len(counts)), counts)
    entry = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[seq]
    candidates = entry[:, None] * ratio + reach
    slot = history[seq, entry // per_page].astype(np.int64) * per_page + entry % per_page
    start = of.starts[seq, None]
    return ClosingEntries(
        torch.from_numpy(entry * ratio),
        torch.from_numpy(np.where((entry + 1) * ratio > of.frozen_below[seq], slot, -1)),
        torch.from_numpy(of.state_rows[seq]),
        torch.from_numpy(np.maximum(candidates, -1)),
        torch.from_numpy(np.where(candidates >= start, candidates - start + of.rows[seq, None], -1)),
    )


def plan_batch(slices: Sequence[Slice]) -> Batch:
    """The step's tensors. Every slice has at least one token."""
    assert slices
    assert all(s.tokens for s in slices)
    history, window, first = _tables(slices)
    starts, lengths, state_rows, frozen = (
        np.array(values, dtype=np.int64)
        for values in zip(*((s.start, len(s.tokens), s.pages.state_row, s.frozen_below) for s in slices), strict=True)
    )
    of = _Rows(starts, starts + lengths, np.cumsum(lengths) - lengths, state_rows, frozen)
    seq = np.repeat(np.arange(len(slices)), lengths)
    positions = np.arange(len(seq)) - of.rows[seq] + starts[seq]
    pages = window[seq, positions // WINDOW_PAGE_TOKENS - first[seq]].astype(np.int64)
    return Batch(
        token_ids_T=torch.tensor([t for s in slices for t in s.tokens]),
        positions_T=torch.from_numpy(positions),
        seq_T=torch.from_numpy(seq.astype(np.int32)),
        ends_T=torch.from_numpy(of.ends[seq]),
        state_rows_T=torch.from_numpy(state_rows[seq]),
        window_slots_T=torch.from_numpy(pages * WINDOW_PAGE_TOKENS + positions % WINDOW_PAGE_TOKENS),
        history_SB=torch.from_numpy(history),
        window_SW=torch.from_numpy(window),
        window_first_S=torch.from_numpy(first.astype(np.int32)),
        closing={ratio: _closing(of, history, ratio) for ratio in (4, 128)},
        logit_rows=torch.tensor(
            [row + p - s.start for row, s in zip(of.rows.tolist(), slices, strict=True) for p in s.logit_positions],
            dtype=torch.int64,
        ),
    )
