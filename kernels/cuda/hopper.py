"""The operations of a V4 step by kernels: what `kernels/device.py` says, batch-invariant, on Hopper.

`TritonOps` has what Triton does, for every shape; `HopperOps` puts the CUDA kernels in the place of the rest. Pages are
fp8 entries and fp4 keys, activations bf16. Shapes that a CUDA kernel does not take go to one that does: streams of
another width than 4096 to Triton, fewer than 64 indexer heads are filled up with zeros. Letters as in
`kernels/device.py`.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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
from . import compressor, decode_attention, dense, experts, index_entries, indexer, mhc, prefill_attention, rows

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
        return dense.product(x_TK, w_NK, out or self.dtype)

    def linear_groups(self, x_TGK: Tensor, w_GNK: Tensor) -> Tensor:
        return dense.product_groups(x_TGK, w_GNK, self.dtype)

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

    name = "hopper-3"
    capturable = True

    def __init__(self) -> None:
        super().__init__()
        self._shared = _Shared({})
        self._packed: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()

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
            streams_TND, self._packed_fn(weights.fn), weights.base, weights.scale, norm_D, layer_in, post, comb,
            after=after, streams_out_TND=None if after is None else streams_TND,
            rounds=rounds, eps=eps, norm_eps=norm_eps,
        )  # fmt: skip
        return streams_TND, layer_in, post, comb

    def _packed_fn(self, fn: Tensor) -> Tensor:
        """fn as K7's operands, made when a layer runs for the first time; no graph may be captured meanwhile."""
        packed = self._packed.get(fn)
        if packed is None:
            assert not torch.cuda.is_current_stream_capturing()
            packed = self._packed[fn] = mhc.pack_weights(fn)
            torch.cuda.current_stream(fn.device).synchronize()  # K7 reads them before the kernel ahead has ended
        return packed

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
        return self._best(plan, q_TJI, w_TJ, keys, table, topk, plan.table_TB)

    @staticmethod
    def _best(
        plan: StepPlan,
        q_TJI: Tensor,
        w_TJ: Tensor,
        keys: PagedEntries,
        table: Tensor,
        topk: int,
        pages_TB: Tensor | None,
    ) -> Selected:
        """Slots of the best entries, or their numbers in the sequence if no pages are given."""
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
            pages = None if pages_TB is None else pages_TB[at]
            indexer.top_k(some, counts[at], chosen[at], count[at], pages, max_length=plan.max_entries)
        return Selected(chosen, count)

    def _split(self, tokens: int, ratio: int) -> int | None:
        """Blocks that share a token in attention; None: as many as its own entries ask for, whatever the batch."""
        return None

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
        second, split = None, self._split(q_THK.shape[0], 0)
        if entries is not None and selected is not None:
            second = decode_attention.EntryList(
                pages=pages_of(entries),
                page_entries=entries.entries_per_page,
                slots_BW=selected.slots_TW,
                lengths_B=selected.count_T,
            )
            split = self._split(q_THK.shape[0], 4 if entries.entries_per_page == 64 else 128)
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


@dataclass(frozen=True)
class PrefillRows:
    """Where the rows of a step's sequences lie in K6's workspaces: the window's, the 4:1 and the 128:1 entries."""

    window_slots_R: Tensor
    """int32 slot of each row, -1 for rows that belong to nobody; so below."""
    row_T: Tensor
    """int32, the token's own row: its position modulo the kernel's ring."""
    slots_R: dict[int, Tensor]
    first_T: dict[int, Tensor]
    """int32, by ratio: the row of the sequence's first entry, a multiple of 8."""


def prefill_rows(plan: StepPlan) -> PrefillRows:
    """Sequence after sequence, each with the 127 positions before its first token and all of its entries."""
    device, ring = plan.positions_T.device, prefill_attention.RING
    tokens = plan.positions_T.shape[0]
    row_T = torch.zeros(tokens, dtype=torch.int32, device=device)
    first_T = {ratio: torch.zeros(tokens, dtype=torch.int32, device=device) for ratio in (4, 128)}
    window: list[Tensor] = []
    entries: dict[int, list[Tensor]] = {4: [], 128: []}
    ends = {0: 0, 4: 0, 128: 0}

    def append(parts: list[Tensor], key: int, begin: int, slots: Tensor) -> None:
        gap = begin - ends[key]
        end = -(-(begin + slots.numel()) // 8) * 8
        parts += [slots.new_full((gap,), -1), slots, slots.new_full((end - begin - slots.numel(),), -1)]
        ends[key] = end

    for row, number, start in plan.spans:
        here = slice(row, row + number)
        low = max(0, start - prefill_attention.WINDOW + 1)
        begin = ends[0] + (low - ends[0]) % ring
        slots = torch.cat([plan.window_list_TW[row, : start - low], plan.window_slots_T[here].int()])
        append(window, 0, begin, slots)
        row_T[here] = torch.arange(begin + start - low, begin + start - low + number, dtype=torch.int32, device=device)
        pages = plan.table_TB[row]
        for ratio, a_page in ((4, 64), (128, 2)):
            count = (start + number) // ratio
            place = torch.arange(a_page, dtype=torch.int32, device=device)
            own = (pages[: -(-count // a_page), None] * a_page + place).flatten()[:count]
            first_T[ratio][here] = ends[ratio]
            append(entries[ratio], ratio, ends[ratio], own)
    none = torch.full((8,), -1, dtype=torch.int32, device=device)
    return PrefillRows(
        torch.cat(window), row_T, {ratio: torch.cat([*parts, none]) for ratio, parts in entries.items()}, first_T
    )


class FastHopperOps(HopperOps):
    """The same by whatever is fastest for the step at hand: a row's bits depend on its company, chunk and role.

    Dense products by the library; prompts by K6 from workspaces of dequantised rows; decode attention is cut by the
    size of the batch.
    """

    name = "hopper-fast-4"

    def __init__(self) -> None:
        super().__init__()
        self._prefill: PrefillRows | None = None

    def begin(self, plan: StepPlan) -> None:
        super().begin(plan)
        self._prefill = prefill_rows(plan) if plan.spans else None

    def linear(self, x_TK: Tensor, w_NK: Tensor, out: torch.dtype | None = None) -> Tensor:
        if out is None or out == self.dtype:
            return torch.mm(x_TK, w_NK.t())
        return torch.mm(x_TK, w_NK.t(), out_dtype=out)

    def linear_groups(self, x_TGK: Tensor, w_GNK: Tensor) -> Tensor:
        z_GTN = torch.bmm(x_TGK.transpose(0, 1), w_GNK.transpose(1, 2))
        return z_GTN.transpose(0, 1).reshape(x_TGK.shape[0], -1)

    def choose(
        self,
        plan: StepPlan,
        q_TJI: Tensor,
        w_TJ: Tensor,
        keys: PagedEntries,
        table: Tensor,
        topk: int,
    ) -> Selected:
        if self._prefill is None:
            return super().choose(plan, q_TJI, w_TJ, keys, table, topk)
        best = self._best(plan, q_TJI, w_TJ, keys, table, topk, None)
        first = self._prefill.first_T[4][:, None]
        return Selected(torch.where(best.slots_TW >= 0, best.slots_TW + first, best.slots_TW), best.count_T)

    def _split(self, tokens: int, ratio: int) -> int:
        """What was fastest on 132 multiprocessors, of which 16 clusters of five fit, and seven of ten."""
        if ratio == 0 or tokens > 64:
            return 1
        if tokens > 24:
            return 2
        if ratio == 128 or tokens > 16:
            return 4
        return 5 if tokens > 4 else 10

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
        own = self._prefill
        if own is None:
            return super().attend(plan, q_THK, window, entries, selected, sink_H, table, eps)
        rows.norm_rope_(q_THK, plan.positions_T, table, eps)
        out = torch.empty(q_THK.shape, dtype=self.dtype, device=q_THK.device)
        near = self._gathered(window, own.window_slots_R)
        if entries is None or selected is None:
            prefill_attention.prefill_window(
                q_THK, near, own.row_T, plan.window_length_T, sink_H=sink_H, out_THD=out
            )  # fmt: skip
        else:
            ratio = 4 if entries.entries_per_page == 64 else 128
            far = self._gathered(entries, own.slots_R[ratio])
            prefill_attention.prefill_rows(
                q_THK, near, own.row_T, plan.window_length_T, far, selected.count_T,
                list_TW=selected.slots_TW if ratio == 4 else None, first_T=own.first_T[128] if ratio == 128 else None,
                sink_H=sink_H, out_THD=out,
            )  # fmt: skip
        rows.turn_back(out, plan.positions_T, table)
        return out

    def _gathered(self, view: PagedEntries, slots_R: Tensor) -> Tensor:
        octets = torch.empty(slots_R.numel() // 8, 8, 8, 64, dtype=self.dtype, device=slots_R.device)
        prefill_attention.gather_rows(pages_of(view), view.entries_per_page, slots_R, octets)
        return octets


def takes(entries: EntryFormat, keys: EntryFormat) -> bool:
    """Whether the kernels know these page formats."""
    return (entries, keys) == (EntryFormat.KV_FP8, EntryFormat.INDEX_FP4)
