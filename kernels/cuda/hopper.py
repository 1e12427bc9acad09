"""The operations of a V4 step by kernels: what `kernels/device.py` says, batch-invariant, on Hopper.

`TritonOps` has what Triton does, for every shape; `HopperOps` puts the CUDA kernels in the place of the rest. Pages are
fp8 entries and fp4 keys, activations bf16. Shapes that a CUDA kernel does not take go to one that does: streams of
another width than 4096 to Triton, fewer than 64 indexer heads are filled up with zeros. Letters as in
`kernels/device.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..device import (
    After,
    CompressorWeights,
    ExpertWeights,
    HeadWeights,
    HyperWeights,
    PlainOps,
    Selected,
    StepPlan,
    ring_rows,
)
from ..entry_format import EntryFormat
from ..paged import PagedEntries, StateRing
from . import compressor, decode_attention, dense, experts, index_entries, indexer, mhc, rows

SPLITS = {0: 1, 4: 2, 128: 4}
"""Blocks that share a token in attention, by the layer's ratio: part of what its bits are."""
MAX_LOGITS = 1 << 26
"""Of the indexer at once, 256 MiB of fp32: a long chunk over a long context goes in pieces."""


def pages_of(view: PagedEntries) -> Tensor:
    """A stream's pages as the kernels want them: uint8 [P, page stride less the offset], a view of the pool."""
    return view.storage[:, view.offset :]


class TritonOps(PlainOps):
    """Products, norms, streams and experts in Triton; what is stored and read as `PlainOps` has it."""

    name = "triton-1"

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(dtype)

    def linear(self, x_TK: Tensor, w_NK: Tensor, out: torch.dtype | None = None) -> Tensor:
        return dense.linear(x_TK, w_NK, out or self.dtype)

    def linear_groups(self, x_TGK: Tensor, w_GNK: Tensor) -> Tensor:
        return dense.linear_groups(x_TGK, w_GNK, self.dtype)

    def norm_pair(self, x_TC: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return rows.norm_pair(x_TC, q_weight, kv_weight, eps, self.dtype)

    def hyper_connect(
        self,
        streams_TND: Tensor,
        weights: HyperWeights,
        norm_D: Tensor,
        after: After | None,
        *,
        rounds: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return rows.streams(
            streams_TND, weights.fn, weights.base, weights.scale, norm_D, after,
            rounds=rounds, eps=eps, norm_eps=norm_eps,
        )  # fmt: skip

    def head_input(
        self,
        streams_TND: Tensor,
        after: After,
        rows_R: Tensor,
        weights: HeadWeights,
        norm_D: Tensor,
        *,
        eps: float,
        norm_eps: float,
    ) -> Tensor:
        return rows.streams_head(
            streams_TND, after, rows_R, weights.fn, weights.base, weights.scale, norm_D, eps=eps, norm_eps=norm_eps
        )

    def experts(self, x_TD: Tensor, weights: ExpertWeights, token_ids_T: Tensor) -> Tensor:
        split = dense.split_of(*weights.gate.shape)
        logits = dense.linear(x_TD, weights.gate, torch.float32, split=split)
        ids, shares = experts.gate(
            logits, weights.bias, weights.table, token_ids_T, weights.choices, weights.scaling,
            normalise=weights.normalise,
        )  # fmt: skip
        return experts.experts(x_TD, ids, shares, weights.w13, weights.w2, weights.limit, self.dtype)

    def likeliest(self, logits_RV: Tensor) -> Tensor:
        return rows.likeliest(logits_RV)


@dataclass(frozen=True)
class _Shared:
    """What the layers of a step have in common, in the kernels' own words."""

    steps: dict[int, compressor.Step]


class HopperOps(TritonOps):
    """See the module."""

    name = "hopper-1"
    capturable = True

    def __init__(self) -> None:
        super().__init__()
        self._shared = _Shared({})

    def begin(self, plan: StepPlan) -> None:
        self._shared = _Shared(
            {
                ratio: compressor.Step(
                    positions_T=plan.positions_T,
                    first_row_T=plan.first_row_T,
                    last_row_T=plan.last_row_T,
                    ring_T=plan.ring_T,
                    slots_T=slots,
                )
                for ratio, slots in plan.slots_T.items()
            }
        )

    def hyper_connect(
        self,
        streams_TND: Tensor,
        weights: HyperWeights,
        norm_D: Tensor,
        after: After | None,
        *,
        rounds: int,
        eps: float,
        norm_eps: float,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        t, _, d = streams_TND.shape
        if d != mhc.HIDDEN:
            return super().hyper_connect(streams_TND, weights, norm_D, after, rounds=rounds, eps=eps, norm_eps=norm_eps)
        layer_in = torch.empty(t, d, dtype=self.dtype, device=streams_TND.device)
        post = torch.empty(t, 4, device=streams_TND.device)
        comb = torch.empty(t, 4, 4, device=streams_TND.device)
        mhc.hyper_connect(
            streams_TND, weights.fn, weights.base, weights.scale, norm_D, layer_in, post, comb, after=after,
            streams_out_TND=None if after is None else streams_TND, rounds=rounds, eps=eps, norm_eps=norm_eps,
        )  # fmt: skip
        return streams_TND, layer_in, post, comb

    # ---- what is stored ----

    @staticmethod
    def _window(plan: StepPlan, kv_TK: Tensor, window: PagedEntries) -> compressor.WindowRows:
        return compressor.WindowRows(
            kv_TD=kv_TK,
            positions_T=plan.positions_T,
            slots_T=plan.window_slots_T,
            pages=pages_of(window),
            page_entries=window.entries_per_page,
        )

    def insert_entries(self, view: PagedEntries, slots: Tensor, values_NK: Tensor) -> None:
        if view.format != EntryFormat.KV_FP8:
            super().insert_entries(view, slots, values_NK)
            return
        # By K2's own insert, rotated by nothing.
        positions = torch.zeros_like(slots)
        still = torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1).to(slots.device)
        window = compressor.WindowRows(
            kv_TD=values_NK.to(self.dtype).contiguous(),
            positions_T=positions,
            slots_T=slots,
            pages=pages_of(view),
            page_entries=view.entries_per_page,
        )
        compressor.insert_window(window, still)

    def store_window(self, plan: StepPlan, kv_TK: Tensor, window: PagedEntries, table: Tensor) -> None:
        compressor.insert_window(self._window(plan, kv_TK, window), table)

    def store_entries(
        self,
        plan: StepPlan,
        kv_TK: Tensor,
        window: PagedEntries,
        x_TC: Tensor,
        weights: CompressorWeights,
        entries: PagedEntries,
        ring: StateRing,
        table: Tensor,
        eps: float,
    ) -> None:
        compressor.compress(
            x_TC, weights.ape, weights.norm, self._shared.steps[weights.ratio], ring_rows(ring), pages_of(entries),
            entries.entries_per_page, table, ratio=weights.ratio, max_tokens_a_sequence=plan.max_tokens_a_sequence,
            eps=eps, window=self._window(plan, kv_TK, window),
        )  # fmt: skip

    def store_keys(
        self,
        plan: StepPlan,
        x_TC: Tensor,
        weights: CompressorWeights,
        keys: PagedEntries,
        ring: StateRing,
        table: Tensor,
        eps: float,
    ) -> None:
        index_entries.compress_keys(
            x_TC, weights.ape, weights.norm, self._shared.steps[4], ring_rows(ring), pages_of(keys), table,
            max_tokens_a_sequence=plan.max_tokens_a_sequence, eps=eps,
        )  # fmt: skip

    # ---- what is read ----

    def choose(
        self,
        plan: StepPlan,
        q_TJI: Tensor,
        w_TJ: Tensor,
        keys: PagedEntries,
        table: Tensor,
        topk: int,
    ) -> Selected:
        t, counts = q_TJI.shape[0], plan.count_T[4]
        chosen = torch.empty(t, topk, dtype=torch.int32, device=q_TJI.device)
        count = torch.empty(t, dtype=torch.int32, device=q_TJI.device)
        q, w = index_entries.quantise_queries(q_TJI.flatten(1), w_TJ, plan.positions_T, table)
        piece = max(1, min(t, MAX_LOGITS // plan.max_entries))
        logits = torch.empty(piece, plan.max_entries, device=q_TJI.device)
        for start in range(0, t, piece):
            at = slice(start, min(start + piece, t))
            some = logits[: at.stop - start]
            indexer.index_logits(q[at], w[at], pages_of(keys), plan.table_TB[at], counts[at], some, skip=topk)
            indexer.top_k(
                some, counts[at], chosen[at], count[at], plan.table_TB[at], max_length=plan.max_entries
            )  # fmt: skip
        return Selected(chosen, count)

    def attend(
        self,
        plan: StepPlan,
        q_THK: Tensor,
        window: PagedEntries,
        entries: PagedEntries | None,
        selected: Selected | None,
        sink_H: Tensor,
        table: Tensor,
        eps: float,
    ) -> Tensor:
        second = None
        split = SPLITS[0]
        if entries is not None and selected is not None:
            second = decode_attention.EntryList(
                pages=pages_of(entries),
                page_entries=entries.entries_per_page,
                slots_BW=selected.slots_TW,
                lengths_B=selected.count_T,
            )
            split = SPLITS[4 if entries.entries_per_page == 64 else 128]
        out = torch.empty(q_THK.shape, dtype=self.dtype, device=q_THK.device)
        decode_attention.decode_attention(
            q_THK,
            decode_attention.EntryList(
                pages=pages_of(window),
                page_entries=window.entries_per_page,
                slots_BW=plan.window_list_TW,
                lengths_B=plan.window_length_T,
            ),
            second,
            sink_H=sink_H,
            split=split,
            out_BHD=out,
            positions_B=plan.positions_T,
            cos_sin=table,
            raw_q=True,
            eps=eps,
            turn_out=True,
        )
        return out


def takes(entries: EntryFormat, keys: EntryFormat) -> bool:
    """Whether the kernels know these page formats."""
    return (entries, keys) == (EntryFormat.KV_FP8, EntryFormat.INDEX_FP4)
