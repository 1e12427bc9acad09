"""DeepSeek-V4 on the CPU device: a forward pass over paged views; no serving, no allocation of pages.

Letters: T tokens, D hidden, N = 4 streams, H heads, K = 512 head width, E experts. Activations are fp32 in memory; with
`bf16` they are rounded to bf16 where the model keeps bf16: streams, inputs and outputs of sublayers, qr, q, kv,
entries, attention output. Mixing, norms, rotary, pooling, gate, softmax and accumulation stay fp32. Attention reads
every key from the pages, those of this step too, so that what a token sees does not depend on where the prompt was cut.
Source: the published model code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..kernels import cpu
from ..kernels.entry_format import EntryFormat
from .batch import Batch, ClosingEntries, LayerViews
from .config import ModelConfig, YarnConfig

Weights = Mapping[str, Tensor]
"""Released tensor names to values."""


def rotary_table(theta: float, yarn: YarnConfig | None, num_positions: int) -> Tensor:
    """cos and sin of every position: fp32 [positions, 2, 32]. YaRN stretches frequencies; nothing is multiplied."""
    steps = torch.arange(0, 64, 2, dtype=torch.float32)
    frequencies = 1.0 / (theta ** (steps / 64))
    if yarn is not None:

        def dimension(rotations: float) -> float:
            return 64 * math.log(yarn.original_max_position / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low = max(math.floor(dimension(yarn.beta_fast)), 0)
        high: float = min(math.ceil(dimension(yarn.beta_slow)), 63)
        if low == high:
            high += 0.001
        ramp = ((torch.arange(32, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
        frequencies = frequencies * (1 - ramp) + frequencies / yarn.factor * ramp
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], 1).contiguous()


class HyperConnection:
    """Mixes four residual streams into a sublayer's input and back."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, bf16: bool) -> None:
        self.fn = cpu.pack_weight(weights[f"{prefix}_fn"])
        self.base = weights[f"{prefix}_base"].float().contiguous()
        self.scale = weights[f"{prefix}_scale"].float().contiguous()
        self.config, self.bf16 = config, bf16

    def split(self, streams_TND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sublayer input [T, D], and what `join` needs: post [T, 4], comb [T, 4 old, 4 new]."""
        c = self.config
        raw = cpu.linear(streams_TND.flatten(1), self.fn, bf16=False)
        pre, post, comb = cpu.hc_mix(streams_TND, raw, self.scale, self.base, c.hc_iters, c.hc_eps, c.norm_eps)
        return cpu.hc_in(streams_TND, pre, bf16=self.bf16), post, comb

    def join(self, y_TD: Tensor, streams_TND: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        """The streams after the sublayer. comb's row is the old stream, its column the new one."""
        return cpu.hc_out(y_TD, streams_TND, post, comb, bf16=self.bf16)


class Compressor:
    """Pools groups of tokens into entries; rolling rows make it independent of where the prompt is cut."""

    def __init__(
        self, config: ModelConfig, weights: Weights, prefix: str, ratio: int, width: int, table: Tensor, bf16: bool
    ) -> None:
        self.kv_gate = cpu.pack_weight(torch.cat([weights[f"{prefix}.wkv.weight"], weights[f"{prefix}.wgate.weight"]]))
        self.ape = weights[f"{prefix}.ape"].float()
        self.norm = weights[f"{prefix}.norm.weight"].float().contiguous()
        self.ratio, self.width, self.table, self.bf16, self.eps = ratio, width, table, bf16, config.norm_eps
        self.columns = width * (2 if ratio == 4 else 1)

    def rows(self, x_TD: Tensor, positions_T: Tensor) -> Tensor:
        """fp32 [T, 2 * columns]: kv, then gate with the position's bias added."""
        rows_TC = cpu.linear(x_TD, self.kv_gate, bf16=False)
        rows_TC[:, self.columns :] += self.ape[positions_T % self.ratio]
        return rows_TC

    def entries(self, rows_TC: Tensor, ring: object, closing: ClosingEntries) -> Tensor:
        """The entries that close, normed and rotated at their group's first token: [E, width]."""
        held = cpu.ring_address(ring, closing.state_rows_E[:, None], closing.tokens_EC)  # type: ignore[arg-type]
        fresh = rows_TC.data_ptr() + closing.rows_EC * (rows_TC.shape[1] * 4)
        addresses = torch.where(closing.rows_EC >= 0, fresh, held)
        addresses = torch.where(closing.tokens_EC >= 0, addresses, 0).contiguous()
        pooled = cpu.pool_rows(addresses, self.width, self.columns, overlap=self.ratio == 4)
        if self.bf16:
            cpu.round_bf16_(pooled)
        entries = cpu.rms(pooled, self.norm, self.eps, bf16=self.bf16)
        cpu.rope_(entries[:, None], closing.positions_E, self.table, inverse=False, bf16=self.bf16)
        return entries

    def advance(self, x_TD: Tensor, batch: Batch, ring: object) -> Tensor:
        """Entries that close in this step; the ring then holds the step's last rows."""
        rows_TC = self.rows(x_TD, batch.positions_T)
        entries = self.entries(rows_TC, ring, batch.closing[self.ratio])
        alive = batch.positions_T >= batch.ends_T - ring.ring_rows  # type: ignore[attr-defined]
        addresses = cpu.ring_address(ring, batch.state_rows_T, batch.positions_T)  # type: ignore[arg-type]
        cpu.store_rows(rows_TC, torch.where(alive, addresses, 0).contiguous())
        return entries


class Indexer:
    """Chooses which c4a entries a token attends to."""

    def __init__(self, config: ModelConfig, weights: Weights, prefix: str, table: Tensor, bf16: bool) -> None:
        self.wq_b = cpu.pack_weight(weights[f"{prefix}.wq_b.weight"])
        self.weights_proj = cpu.pack_weight(weights[f"{prefix}.weights_proj.weight"])
        self.compressor = Compressor(config, weights, f"{prefix}.compressor", 4, 128, table, bf16)
        self.config, self.table, self.bf16 = config, table, bf16

    def choose(self, x_TD: Tensor, qr_TQ: Tensor, batch: Batch, views: LayerViews) -> tuple[Tensor, Tensor]:
        """Stores the keys that close in this step, then picks the best visible entries of each token."""
        keys, ring = views.index_keys, views.index_state
        assert keys is not None
        assert ring is not None
        quantised = EntryFormat(keys.format).quantised
        key_EI = self.compressor.advance(x_TD, batch, ring)
        q_TJI = cpu.linear(qr_TQ, self.wq_b, bf16=self.bf16).view(-1, self.config.index_heads, 128)
        cpu.rope_(q_TJI, batch.positions_T, self.table, inverse=False, bf16=self.bf16)
        if quantised:  # keys are stored rotated; queries go through the same rounding
            cpu.hadamard_(key_EI)
            cpu.hadamard_(q_TJI)
            q_TJI = cpu.round_trip(keys.format, q_TJI.view(-1, 128)).view_as(q_TJI)
        cpu.insert_entries(keys, batch.closing[4].slots_E, key_EI)
        w_TJ = cpu.linear(x_TD, self.weights_proj, bf16=False) * (128**-0.5 * self.config.index_heads**-0.5)
        return cpu.select_entries(
            q_TJI, w_TJ, batch.positions_T, batch.seq_T, keys, batch.history_SB, self.config.index_topk
        )


class Attention:
    """Latent attention over the window and compressed entries; one vector is key and value of all heads."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, table: Tensor, bf16: bool) -> None:
        prefix = f"layers.{layer}.attn"
        self.ratio = config.ratios[layer]
        self.wq_a, self.wq_b, self.wkv, self.wo_b = (
            cpu.pack_weight(weights[f"{prefix}.{name}.weight"]) for name in ("wq_a", "wq_b", "wkv", "wo_b")
        )
        groups = weights[f"{prefix}.wo_a.weight"].chunk(config.o_groups)
        self.wo_a = [cpu.pack_weight(group) for group in groups]
        self.q_norm = weights[f"{prefix}.q_norm.weight"].float().contiguous()
        self.kv_norm = weights[f"{prefix}.kv_norm.weight"].float().contiguous()
        self.sink = weights[f"{prefix}.attn_sink"].float().contiguous()
        self.config, self.table, self.bf16 = config, table, bf16
        self.compressor = (
            Compressor(config, weights, f"{prefix}.compressor", self.ratio, 512, table, bf16) if self.ratio else None
        )
        self.indexer = Indexer(config, weights, f"{prefix}.indexer", table, bf16) if self.ratio == 4 else None

    def __call__(self, x_TD: Tensor, batch: Batch, views: LayerViews) -> Tensor:
        c, bf16, positions = self.config, self.bf16, batch.positions_T
        qr_TQ = cpu.rms(cpu.linear(x_TD, self.wq_a, bf16=bf16), self.q_norm, c.norm_eps, bf16=bf16)
        q_THK = cpu.linear(qr_TQ, self.wq_b, bf16=bf16).view(-1, c.num_heads, 512)
        q_THK = cpu.rms(q_THK, None, c.norm_eps, bf16=bf16)
        cpu.rope_(q_THK, positions, self.table, inverse=False, bf16=bf16)
        kv_TK = cpu.rms(cpu.linear(x_TD, self.wkv, bf16=bf16), self.kv_norm, c.norm_eps, bf16=bf16)
        cpu.rope_(kv_TK[:, None], positions, self.table, inverse=False, bf16=bf16)
        cpu.insert_entries(views.window, batch.window_slots_T, kv_TK)
        if self.compressor is not None:  # before attention: the token that closes a group sees its entry
            assert views.entries is not None
            entries_EK = self.compressor.advance(x_TD, batch, views.entry_state)
            cpu.insert_entries(views.entries, batch.closing[self.ratio].slots_E, entries_EK)
        chosen = self.indexer.choose(x_TD, qr_TQ, batch, views) if self.indexer is not None else None
        o_THK = cpu.attend(
            q_THK, positions, batch.seq_T, views.window, batch.window_SW, batch.window_first_S,
            views.entries, batch.history_SB, self.ratio, chosen, self.sink, bf16=bf16,
        )  # fmt: skip
        cpu.rope_(o_THK, positions, self.table, inverse=True, bf16=bf16)  # values carry their key's rotation
        flat = o_THK.flatten(1)
        width = flat.shape[1] // c.o_groups
        z = [cpu.linear(flat[:, g * width : (g + 1) * width], w, bf16=bf16) for g, w in enumerate(self.wo_a)]
        return cpu.linear(torch.cat(z, 1), self.wo_b, bf16=bf16)


class Experts:
    """Routed experts, chosen by score or by token id, and one shared expert that every token passes."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, bf16: bool) -> None:
        prefix = f"layers.{layer}.ffn"

        def expert(name: str) -> tuple[cpu.PackedWeight, cpu.PackedWeight]:
            w1, w2, w3 = (weights[f"{prefix}.{name}.w{i}.weight"] for i in (1, 2, 3))
            return cpu.pack_weight(torch.cat([w1, w3])), cpu.pack_weight(w2)

        self.gate = cpu.pack_weight(weights[f"{prefix}.gate.weight"])
        hashed = layer < config.num_hash_layers
        self.bias = None if hashed else weights[f"{prefix}.gate.bias"].float().contiguous()
        self.table = weights[f"{prefix}.gate.tid2eid"] if hashed else None
        self.routed = [expert(f"experts.{e}") for e in range(config.num_experts)]
        self.shared = expert("shared_experts")
        self.config, self.bf16 = config, bf16

    def _expert(self, x_TD: Tensor, weights: tuple[cpu.PackedWeight, cpu.PackedWeight]) -> Tensor:
        ab = cpu.linear(x_TD, weights[0], bf16=False)
        return cpu.linear(cpu.swiglu(ab, self.config.swiglu_limit, bf16=self.bf16), weights[1], bf16=False)

    def __call__(self, x_TD: Tensor, ids_T: Tensor) -> Tensor:
        c = self.config
        logits = cpu.linear(x_TD, self.gate, bf16=False)
        fixed = None if self.table is None else self.table[ids_T].contiguous()
        chosen, weights = cpu.gate(
            logits, self.bias, fixed, c.experts_per_token, c.routed_scaling, normalise=c.norm_topk_prob
        )
        y_TD = torch.zeros_like(x_TD)
        for e, packed in enumerate(self.routed):  # ascending: one order of summation for every token
            rows, choice = (chosen == e).nonzero(as_tuple=True)
            if rows.numel():
                out = self._expert(x_TD[rows], packed)
                cpu.add_rows_(y_TD, rows.contiguous(), weights[rows, choice].contiguous(), out)
        every = torch.arange(x_TD.shape[0])
        cpu.add_rows_(y_TD, every, torch.ones(x_TD.shape[0]), self._expert(x_TD, self.shared))
        if self.bf16:
            cpu.round_bf16_(y_TD)
        return y_TD


class Layer:
    """Attention and experts, each between a split and a join of the streams."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, table: Tensor, bf16: bool) -> None:
        prefix = f"layers.{layer}"
        self.attn_hc = HyperConnection(config, weights, f"{prefix}.hc_attn", bf16)
        self.ffn_hc = HyperConnection(config, weights, f"{prefix}.hc_ffn", bf16)
        self.attn_norm = weights[f"{prefix}.attn_norm.weight"].float().contiguous()
        self.ffn_norm = weights[f"{prefix}.ffn_norm.weight"].float().contiguous()
        self.attention = Attention(config, weights, layer, table, bf16)
        self.experts = Experts(config, weights, layer, bf16)
        self.eps, self.bf16 = config.norm_eps, bf16

    def __call__(self, streams_TND: Tensor, batch: Batch, views: LayerViews) -> Tensor:
        y, post, comb = self.attn_hc.split(streams_TND)
        y = self.attention(cpu.rms(y, self.attn_norm, self.eps, bf16=self.bf16), batch, views)
        streams_TND = self.attn_hc.join(y, streams_TND, post, comb)
        y, post, comb = self.ffn_hc.split(streams_TND)
        y = self.experts(cpu.rms(y, self.ffn_norm, self.eps, bf16=self.bf16), batch.token_ids_T)
        return self.ffn_hc.join(y, streams_TND, post, comb)


class Transformer:
    """The main model, without its MTP layer."""

    def __init__(self, config: ModelConfig, weights: Weights, *, bf16: bool, max_positions: int) -> None:
        """
        Args:
            weights: released names; values of fp8, fp4 and bf16 places already exact in fp32.
            bf16: round activations as the model does; False computes in fp32 throughout.
            max_positions: length of the rotary tables.
        """
        plain = rotary_table(config.rope_theta, None, max_positions)
        stretched = rotary_table(config.compress_rope_theta, config.yarn, max_positions)
        self.config, self.bf16 = config, bf16
        self.embed = weights["embed.weight"].float()
        self.layers = [
            Layer(config, weights, i, stretched if ratio else plain, bf16) for i, ratio in enumerate(config.ratios)
        ]
        self.hc_head_fn = cpu.pack_weight(weights["hc_head_fn"])
        self.hc_head_base = weights["hc_head_base"].float().contiguous()
        self.hc_head_scale = float(weights["hc_head_scale"])
        self.norm = weights["norm.weight"].float().contiguous()
        self.head = cpu.pack_weight(weights["head.weight"])

    def likeliest(self, logits_RV: Tensor) -> Tensor | None:
        """Logits are on the host, where the sampler looks itself."""
        return None

    def settle(self) -> None:
        """Whatever returns here is done."""

    def forward(self, batch: Batch, views: Sequence[LayerViews]) -> Tensor:
        """Advance the pages by the step's tokens; raw logits of `batch.logit_rows`, fp32 [rows, V]."""
        c = self.config
        streams_TND = self.embed[batch.token_ids_T][:, None].repeat(1, c.hc_mult, 1).contiguous()
        for layer, layer_views in zip(self.layers, views, strict=True):
            streams_TND = layer(streams_TND, batch, layer_views)
        streams_TND = streams_TND[batch.logit_rows].contiguous()
        if not streams_TND.shape[0]:
            return torch.empty(0, c.vocab_size)
        raw = cpu.linear(streams_TND.flatten(1), self.hc_head_fn, bf16=False)
        pre = cpu.hc_head_mix(streams_TND, raw, self.hc_head_scale, self.hc_head_base, c.hc_eps, c.norm_eps)
        h_TD = cpu.rms(cpu.hc_in(streams_TND, pre, bf16=self.bf16), self.norm, c.norm_eps, bf16=self.bf16)
        return cpu.linear(h_TD, self.head, bf16=False)
