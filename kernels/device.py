"""What a V4 step needs of a device, and its plain form in PyTorch, for any device, page format and shape.

`PlainOps` is the reference of `cuda/hopper.py`, which puts kernels in its place: it is written for reading, waits for
the device where that is simplest, and its products and reductions are torch's, so the bits of a row may depend on the
rows beside it. It serves where no kernel does: page formats other than fp8 with fp4 keys, and arithmetic in fp32.

Letters: T tokens, S sequences, B blocks of a table, D hidden, N = 4 streams, Q query rank, H heads, J indexer heads,
E experts, C choices, F expert width, W places of a list, R rows of logits. `dtype` is that of activations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from . import entry_format
from .entry_format import EntryFormat
from .paged import PagedEntries, StateRing

WINDOW, WINDOW_PAGE = 128, 64


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A step's tensors on the device, shared by all layers; padding rows have ring -1 and empty lists."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64."""
    first_row_T: Tensor
    """int32, the row of the first token of the same sequence in this step."""
    last_row_T: Tensor
    """int32, and of the last."""
    ring_T: Tensor
    """int64, row of the state pool; -1 is padding."""
    window_slots_T: Tensor
    """int64, where the token's raw entry goes; -1 for padding."""
    slots_T: Mapping[int, Tensor]
    """By ratio: int64, where the entry that closes at this token goes; -1: none does, or it is published."""
    table_TB: Tensor
    """int32 page of each block of the token's sequence."""
    window_list_TW: Tensor
    """int32 [T, 128] slots of the window's entries by position, -1 past the last."""
    window_length_T: Tensor
    """int32."""
    list128_TW: Tensor
    """int32 [T, 2B] slots of all 128:1 entries."""
    count_T: Mapping[int, Tensor]
    """By ratio: int32, how many entries the token sees."""
    logit_rows_R: Tensor
    """int64."""
    max_tokens_a_sequence: int
    """Of this step: an upper bound."""
    max_entries: int
    """Of 4:1 entries that a token sees: an upper bound."""
    spans: tuple[tuple[int, int, int], ...] = ()
    """On the host: first row, tokens and first position of each sequence; none for a decode step."""


@dataclass(frozen=True)
class HyperWeights:
    """Of one hyper-connection, fp32."""

    fn: Tensor
    """[24, 4 D]."""
    base: Tensor
    """[24]."""
    scale: Tensor
    """[3]."""


@dataclass(frozen=True)
class HeadWeights:
    """Of the streams' sum before the last norm, fp32."""

    fn: Tensor
    """[4, 4 D]."""
    base: Tensor
    """[4]."""
    scale: Tensor
    """[1]."""


@dataclass(frozen=True)
class CompressorWeights:
    """What follows the projection."""

    ratio: int
    ape: Tensor
    """fp32 [ratio, columns]."""
    norm: Tensor
    """[width], of the activations' dtype, which holds it exactly."""


@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts and, as the last one, the shared expert."""

    gate: Tensor
    """[E, D]."""
    bias: Tensor | None
    """fp32 [E]; None: the table chooses."""
    table: Tensor | None
    """int32 [V, C]."""
    w13: Tensor
    """[E + 1, 2 F, D], w1 above w3."""
    w2: Tensor
    """[E + 1, D, F]."""
    choices: int
    limit: float
    scaling: float
    normalise: bool


@dataclass(frozen=True)
class Selected:
    """Entries that a token attends to besides its window."""

    slots_TW: Tensor
    """int32."""
    count_T: Tensor
    """int32."""


After = tuple[Tensor, Tensor, Tensor]
"""What a sub-layer leaves: its output [T, D], post [T, 4] and comb [T, 4 old, 4 new] fp32."""


def expand_plan(
    arrays: Mapping[str, Tensor], *, max_tokens_a_sequence: int, spans: tuple[tuple[int, int, int], ...] = ()
) -> StepPlan:
    """The plan from int32 tensors that came from the host; waits for nothing, so that a graph can hold it.

    Args:
        arrays: by token `token_ids_T`, `positions_T`, `seq_T` (row of the tables below), `first_row_T`, `last_row_T`,
            `ring_T`, `window_slots_T`, `slots4_T`, `slots128_T`; by sequence `history_SB`, and `window_SW`, the page of
            each 64 tokens from `window_first_S` on; `logit_rows_R`.
    """
    history_SB, window_SW = arrays["history_SB"], arrays["window_SW"]
    seq, positions, ring = (arrays[name].long() for name in ("seq_T", "positions_T", "ring_T"))
    real = ring >= 0
    table_TB = history_SB[seq]
    place = torch.arange(WINDOW, device=seq.device)
    length = torch.where(real, (positions + 1).clamp(max=WINDOW), 0)
    at = (positions - length + 1)[:, None] + place
    page = (at // WINDOW_PAGE - arrays["window_first_S"].long()[seq][:, None]).clamp(0, window_SW.shape[1] - 1)
    slots = window_SW.long()[seq].gather(1, page) * WINDOW_PAGE + at % WINDOW_PAGE
    pairs = torch.arange(2, device=seq.device, dtype=torch.int32)
    return StepPlan(
        token_ids_T=arrays["token_ids_T"].long(),
        positions_T=positions,
        first_row_T=arrays["first_row_T"],
        last_row_T=arrays["last_row_T"],
        ring_T=ring,
        window_slots_T=arrays["window_slots_T"].long(),
        slots_T={ratio: arrays[f"slots{ratio}_T"].long() for ratio in (4, 128)},
        table_TB=table_TB,
        window_list_TW=torch.where(place < length[:, None], slots, -1).int(),
        window_length_T=length.int(),
        list128_TW=(table_TB[:, :, None] * 2 + pairs).flatten(1),
        count_T={ratio: torch.where(real, (positions + 1) // ratio, 0).int() for ratio in (4, 128)},
        logit_rows_R=arrays["logit_rows_R"].long(),
        max_tokens_a_sequence=max_tokens_a_sequence,
        max_entries=history_SB.shape[1] * 64,
        spans=spans,
    )


class PlainOps:
    """See the module."""

    name = "plain-1"
    """Stands in the fingerprint: pages and tokens of one name are the same bits."""
    capturable = False
    """Whether a step never waits, so that a graph can hold it."""

    def __init__(self, dtype: torch.dtype) -> None:
        """dtype: of activations, bf16 or fp32; weights of products have it too."""
        self.dtype = dtype

    def begin(self, plan: StepPlan) -> None:
        """Before the first layer of a step: what all layers share beyond the plan."""

    # ---- products, norms, streams ----

    def linear(self, x_TK: Tensor, w_NK: Tensor, out: torch.dtype | None = None) -> Tensor:
        """x W^T, summed in fp32 -> [T, N] of `out`, or of `dtype`."""
        return (x_TK.float() @ w_NK.float().t()).to(out or self.dtype)

    def linear_groups(self, x_TGK: Tensor, w_GNK: Tensor) -> Tensor:
        """Each group by its own weight -> [T, G * N] of `dtype`."""
        return torch.einsum("tgk,gnk->tgn", x_TGK.float(), w_GNK.float()).flatten(1).to(self.dtype)

    def norm_pair(self, x_TC: Tensor, q_weight: Tensor, kv_weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The first Q columns and the 512 after them, rounded to `dtype`, then normed -> [T, Q], [T, 512]."""
        rank = q_weight.shape[0]
        parts = (x_TC[:, :rank], q_weight), (x_TC[:, rank : rank + 512], kv_weight)
        qr, kv = (self._rms(part.to(self.dtype).float(), weight, eps).to(self.dtype) for part, weight in parts)
        return qr, kv

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
        """Ends one sub-layer, if `after` is given, and begins the next.

        Returns:
            streams [T, 4, D] and the sub-layer's normed input [T, D] of dtype; post [T, 4], comb [T, 4, 4] fp32.
        """
        streams = self._joined(streams_TND, after)
        s = streams.float()
        flat = s.flatten(1)
        mix = flat @ weights.fn.t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        scale, base = weights.scale, weights.base
        pre = torch.sigmoid(mix[:, :4] * scale[0] + base[:4]) + eps
        post = 2 * torch.sigmoid(mix[:, 4:8] * scale[1] + base[4:8])
        m = torch.softmax((mix[:, 8:] * scale[2] + base[8:]).unflatten(1, (4, 4)), -1) + eps
        m = m / (m.sum(-2, keepdim=True) + eps)
        for _ in range(rounds - 1):
            m = m / (m.sum(-1, keepdim=True) + eps)
            m = m / (m.sum(-2, keepdim=True) + eps)
        x = torch.einsum("tn,tnd->td", pre, s).to(self.dtype).float()
        return streams, self._rms(x, norm_D, norm_eps).to(self.dtype), post, m

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
        """Ends the last sub-layer for the rows whose logits are wanted, sums their streams and norms -> [R, D]."""
        y, post, comb = after
        s = self._joined(streams_TND[rows_R], (y[rows_R], post[rows_R], comb[rows_R])).float()
        flat = s.flatten(1)
        mix = flat @ weights.fn.t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
        pre = torch.sigmoid(mix * weights.scale + weights.base) + eps
        x = torch.einsum("tn,tnd->td", pre, s).to(self.dtype).float()
        return self._rms(x, norm_D, norm_eps).to(self.dtype)

    def _joined(self, streams_TND: Tensor, after: After | None) -> Tensor:
        if after is None:
            return streams_TND
        y, post, comb = after
        mixed = post[..., None] * y.float()[:, None] + torch.einsum("tmn,tmd->tnd", comb, streams_TND.float())
        return mixed.to(self.dtype)

    @staticmethod
    def _rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return y if weight is None else y * weight.float()

    @staticmethod
    def _rotate(x: Tensor, turns: Tensor, *, inverse: bool = False) -> Tensor:
        """Adjacent pairs of the last 64 channels; turns [..., 64]: cosines, then sines; fp32."""
        cos, sin = turns[..., :32], turns[..., 32:]
        sin = -sin if inverse else sin
        even, odd = x[..., -64::2], x[..., -63::2]
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
        return torch.cat([x[..., :-64], turned], -1)

    # ---- what is stored ----

    def insert_entries(self, view: PagedEntries, slots: Tensor, values_NK: Tensor) -> None:
        """Entries as they are, by the way that a step stores them: `entry_format.insert_entries`."""
        entry_format.insert_entries(view, slots, values_NK)

    def store_window(self, plan: StepPlan, kv_TK: Tensor, window: PagedEntries, table: Tensor) -> None:
        """Rotates the normed kv [T, 512] and stores the window's entries. table: fp32 [positions, 64]."""
        entries = self._rotate(kv_TK.float(), table[plan.positions_T]).to(self.dtype).float()
        entry_format.insert_entries(window, plan.window_slots_T, entries)

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
        """`store_window`, and the compressed entries that close in this step, from the projection's fp32 columns
        (values, then scores); the ring then holds the step's last rows."""
        self.store_window(plan, kv_TK, window, table)
        tokens, pooled = self._pool(plan, x_TC, weights, ring)
        at = plan.positions_T[tokens] // weights.ratio * weights.ratio
        normed = self._rms(pooled.to(self.dtype).float(), weights.norm, eps).to(self.dtype).float()
        made = self._rotate(normed, table[at]).to(self.dtype).float()
        entry_format.insert_entries(entries, plan.slots_T[weights.ratio][tokens], made)

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
        """As `store_entries`, the indexer's keys; packed ones are stored after a Hadamard rotation."""
        tokens, pooled = self._pool(plan, x_TC, weights, ring)
        normed = self._rms(pooled.to(self.dtype).float(), weights.norm, eps).to(self.dtype).float()
        made = self._rotate(normed, table[plan.positions_T[tokens] // 4 * 4]).to(self.dtype).float()
        if EntryFormat(keys.format).quantised:
            made = hadamard(made)
        entry_format.insert_entries(keys, plan.slots_T[4][tokens], made)

    def _pool(self, plan: StepPlan, x_TC: Tensor, weights: CompressorWeights, ring: StateRing) -> tuple[Tensor, Tensor]:
        """Rows of the step that close an entry, and what they pool [n, width] fp32; then the ring is brought up."""
        ratio, columns = weights.ratio, ring.columns
        width, reach = (columns // 2, 8) if ratio == 4 else (columns, 128)
        state = ring_rows(ring)
        rows_TC = x_TC.float().clone()
        rows_TC[:, columns:] += weights.ape[plan.positions_T % ratio]
        tokens = ((plan.slots_T[ratio] >= 0) & (plan.ring_T >= 0)).nonzero()[:, 0]
        places = torch.arange(1 - reach, 1, device=x_TC.device)
        at = plan.positions_T[tokens, None] + places  # candidates' positions
        row = tokens[:, None] + places
        fresh = row >= plan.first_row_T[tokens, None]
        held = state[plan.ring_T[tokens, None], at % ring.ring_rows]
        candidates = torch.where(fresh[..., None], rows_TC[row.clamp_min(0)], held)
        values, scores = candidates[..., :columns], candidates[..., columns:]
        if ratio == 4:
            values = torch.cat([values[:, :4, :width], values[:, 4:, width:]], 1)
            scores = torch.cat([scores[:, :4, :width], scores[:, 4:, width:]], 1)
        absent = (at < 0)[..., None]
        shares = scores.masked_fill(absent, float("-inf")).softmax(1)
        pooled = (shares * values.masked_fill(absent, 0)).sum(1)
        every = torch.arange(x_TC.shape[0], device=x_TC.device)
        alive = ((every > plan.last_row_T - ring.ring_rows) & (plan.ring_T >= 0)).nonzero()[:, 0]
        state[plan.ring_T[alive], plan.positions_T[alive] % ring.ring_rows] = rows_TC[alive]
        return tokens, pooled

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
        """The best visible 4:1 entries of each token, ascending, ties to the lower one; all while there are few.

        A score that is no finite number breaks the token's choice: its count is -1, and attention gives NaN.

        Args:
            q_TJI: [T, J, 128], not rotated. w_TJ: fp32, not scaled. keys: stored up to this step's.
        """
        heads = q_TJI.shape[1]
        q = self._rotate(q_TJI.float(), table[plan.positions_T][:, None]).to(self.dtype).float()
        if EntryFormat(keys.format).quantised:
            q = hadamard(q)
            packed = entry_format.pack_entries(EntryFormat(keys.format), q.flatten(0, 1))
            q = entry_format.unpack_entries(EntryFormat(keys.format), *packed).view_as(q)
        w = w_TJ * (128**-0.5 * heads**-0.5)
        slots = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
        counts = plan.count_T[4].clamp(max=topk)
        for t, count in enumerate(plan.count_T[4].tolist()):
            every = torch.arange(count, device=q.device)
            every = plan.table_TB[t].long()[every // 64] * 64 + every % 64
            if count > topk:
                scores = (torch.relu(q[t] @ entry_format.read_entries(keys, every).t()) * w[t, :, None]).sum(0)
                best = torch.sort(scores + 0.0, descending=True, stable=True).indices[:topk]
                every = every[best.sort().values]
                if not scores.isfinite().all():
                    counts[t] = -1
            slots[t, : every.numel()] = every.int()
        return Selected(slots, counts)

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
        """Norms and rotates q [T, H, 512], attends, and rotates back -> [T, H, 512] of dtype."""
        turns = table[plan.positions_T][:, None]
        q = self._rms(q_THK.float(), None, eps).to(self.dtype).float()
        q = self._rotate(q, turns).to(self.dtype).float()
        out = torch.empty_like(q)
        for t, (raw, count) in enumerate(
            zip(
                plan.window_length_T.tolist(),
                [0] * len(q) if selected is None else selected.count_T.tolist(),
                strict=True,
            )
        ):
            if count < 0:
                out[t] = torch.nan
                continue
            k = entry_format.read_entries(window, plan.window_list_TW[t, :raw].long())
            if entries is not None and selected is not None:
                k = torch.cat([k, entry_format.read_entries(entries, selected.slots_TW[t, :count].long())])
            z = torch.cat([q[t] @ k.t() * 512**-0.5, sink_H[:, None]], 1)
            out[t] = z.softmax(-1)[:, :-1] @ k
        out = out.to(self.dtype).float()
        return self._rotate(out, turns, inverse=True).to(self.dtype)

    # ---- experts, tokens ----

    def gate(self, logits_TE: Tensor, weights: ExpertWeights, token_ids_T: Tensor) -> tuple[Tensor, Tensor]:
        """K8: experts int32 [T, C] and their weights fp32 [T, C]; ties go to the lower expert."""
        scores = torch.nn.functional.softplus(logits_TE).sqrt()
        if weights.table is not None:
            ids = weights.table[token_ids_T].long()
        else:
            assert weights.bias is not None
            order = torch.sort(scores + weights.bias, descending=True, stable=True)
            ids = order.indices[:, : weights.choices]
        chosen = scores.gather(1, ids)
        if weights.normalise:
            chosen = chosen / (chosen.sum(1, keepdim=True) + 1e-20)
        return ids.int(), chosen * weights.scaling

    def experts(self, x_TD: Tensor, weights: ExpertWeights, token_ids_T: Tensor) -> Tensor:
        """Gate, chosen experts and the shared one -> [T, D] of dtype."""
        ids, shares = self.gate(self.linear(x_TD, weights.gate, torch.float32), weights, token_ids_T)
        y = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device)
        for e in range(weights.w13.shape[0] - 1):
            rows, choice = (ids == e).nonzero(as_tuple=True)
            if rows.numel():
                y[rows] += shares[rows, choice, None] * self._expert(x_TD[rows], weights, e)
        return (y + self._expert(x_TD, weights, -1)).to(self.dtype)

    def _expert(self, x_TD: Tensor, weights: ExpertWeights, e: int) -> Tensor:
        a, b = self.linear(x_TD, weights.w13[e], torch.float32).chunk(2, 1)
        limit = weights.limit
        h = (torch.nn.functional.silu(a.clamp(max=limit)) * b.clamp(-limit, limit)).to(self.dtype)
        return self.linear(h, weights.w2[e], torch.float32)

    def likeliest(self, logits_RV: Tensor) -> Tensor:
        """The lowest id among the largest logits of each row, int32 [R]; -1 where one is NaN."""
        ids = (logits_RV == logits_RV.amax(1, keepdim=True)).int().argmax(1)
        return torch.where(logits_RV.isnan().any(1), -1, ids).int()


def hadamard(x: Tensor) -> Tensor:
    """Orthonormal 128-point Hadamard of the last axis, from bf16 to bf16 values, fp32 inside."""
    i = torch.arange(128, device=x.device)
    bits = i[:, None] & i
    for shift in (4, 2, 1):
        bits = bits ^ (bits >> shift)
    turned: Tensor = (x.bfloat16().float() @ (1.0 - 2.0 * (bits & 1))) * 128**-0.5
    return turned.bfloat16().float()


def ring_rows(ring: StateRing) -> Tensor:
    """The ring as fp32 [rows of the pool, ring rows, 2 * columns], a view."""
    flat = ring.storage.view(torch.float32)
    rows: Tensor = flat.as_strided(
        (flat.shape[0], ring.ring_rows, 2 * ring.columns),
        (flat.stride(0), 2 * ring.columns, 1),
        flat.storage_offset() + ring.offset // 4,
    )
    return rows
