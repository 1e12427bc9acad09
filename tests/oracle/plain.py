"""A second judge: V4's forward pass over a whole sequence, in plain tensor code without any cache.

Written from the mathematics alone, apart from both the engine and transformers, so that when one of three disagrees it
is known which. Unlike transformers it also knows the arithmetic that V4 is served in: entries through fp8, index keys
and queries through Hadamard and fp4, activations rounded to bf16 at the stated places; so it judges those modes too.
Each step is a method of its own, and a fault is a subclass that overrides one (`faults.py`).

Shape letters: T tokens, D hidden, N streams, H heads, K = 512, G groups, W entries, J indexer heads, I = 128, E experts
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.model.config import ModelConfig

from .builder import from_fp4, power_of_two_from, to_fp4

EntryMode = Literal["fp32", "bf16", "fp8"]


@dataclass(frozen=True)
class Arithmetic:
    """What is rounded where. fp8 entries bring fp4 index keys and queries, Hadamard-rotated."""

    activations: Literal["fp32", "bf16"] = "fp32"
    entries: EntryMode = "fp32"
    probabilities: Literal["fp32", "bf16"] = "fp32"
    """Rounding of exp(score - max) before it meets the values."""


def rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def qdq_fp8(v: Tensor) -> Tensor:
    """[..., 512] bf16-valued -> its first 448 values through e4m3 with a power of two for each 64."""
    body, rotary = v[..., :448], v[..., 448:]
    blocks = body.unflatten(-1, (7, 64))
    scale = power_of_two_from(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)
    codes = (blocks / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return torch.cat([(codes.float() * scale).flatten(-2), rotary], -1)


def qdq_fp4(v: Tensor) -> Tensor:
    return from_fp4(*to_fp4(v))


def hadamard(v: Tensor) -> Tensor:
    """[..., 128] times the Sylvester matrix of size 128, times 128^-0.5."""
    width = v.shape[-1]
    for stride in (2**k for k in range(width.bit_length() - 1)):
        pairs = v.unflatten(-1, (-1, 2, stride))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        v = torch.stack([a + b, a - b], -2).flatten(-3)
    return v * width**-0.5


class Plain:
    """One model; `logits(ids)` is the pass. Holds the last pass's choices for tests that look inside."""

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], arithmetic: Arithmetic | None = None
    ) -> None:
        self.config = config
        self.weights = weights
        self.arithmetic = arithmetic or Arithmetic()

    # ---- rounding ----

    def act(self, x: Tensor) -> Tensor:
        """What an activation between operations is stored as."""
        return x.bfloat16().float() if self.arithmetic.activations == "bf16" else x

    def entry(self, v: Tensor) -> Tensor:
        """What a raw or compressed entry is read back as."""
        if self.arithmetic.entries == "fp32":
            return v
        v = v.bfloat16().float()
        return qdq_fp8(v) if self.arithmetic.entries == "fp8" else v

    def index_key(self, v: Tensor) -> Tensor:
        if self.arithmetic.entries == "fp32":
            return v
        v = v.bfloat16().float()
        return qdq_fp4(hadamard(v).bfloat16().float()) if self.arithmetic.entries == "fp8" else v

    def index_query(self, v: Tensor) -> Tensor:
        if self.arithmetic.entries != "fp8":
            return v
        return qdq_fp4(hadamard(v.bfloat16().float()).bfloat16().float())

    # ---- the pass ----

    @torch.no_grad()
    def logits(self, ids: list[int]) -> Tensor:
        """[T, V] fp32, every position of `ids`."""
        w, config = self.weights, self.config
        tokens = torch.tensor(ids)
        x_TND = self.act(w["embed.weight"][tokens])[:, None].repeat(1, config.hc_mult, 1)
        for layer in range(config.num_layers):
            p = f"layers.{layer}."
            y, post, comb = self.hc_pre(x_TND, p + "hc_attn")
            y = self.attention(self.norm(y, p + "attn_norm"), layer)
            x_TND = self.hc_post(y, x_TND, post, comb)
            y, post, comb = self.hc_pre(x_TND, p + "hc_ffn")
            y = self.moe(self.norm(y, p + "ffn_norm"), tokens, layer)
            x_TND = self.hc_post(y, x_TND, post, comb)
        return F.linear(self.norm(self.hc_head(x_TND), "norm"), w["head.weight"])

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """The next `count` tokens by whole passes: slow, and nothing to go wrong in."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.logits(ids)[-1].argmax()))
        return ids[len(prompt) :]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return self.act(rms(x, self.config.norm_eps) * self.weights[name + ".weight"])

    def lin(self, x: Tensor, name: str) -> Tensor:
        """A linear layer whose result is an activation."""
        return self.act(F.linear(x, self.weights[name + ".weight"]))

    # ---- hyper-connections ----

    def mixes(self, x_TND: Tensor, fn: Tensor) -> Tensor:
        f = x_TND.flatten(1)
        return F.linear(f, fn) * torch.rsqrt(f.square().mean(-1, keepdim=True) + self.config.norm_eps)

    def hc_pre(self, x_TND: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        n = self.config.hc_mult
        base, scale = self.weights[name + "_base"], self.weights[name + "_scale"]
        mix = self.mixes(x_TND, self.weights[name + "_fn"])
        pre = torch.sigmoid(mix[:, :n] * scale[0] + base[:n]) + self.config.hc_eps
        post = self.post_factor() * torch.sigmoid(mix[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = self.sinkhorn((mix[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)))
        return self.act((pre[..., None] * x_TND).sum(1)), post, comb

    def post_factor(self) -> float:
        return 2.0

    def sinkhorn(self, m: Tensor) -> Tensor:
        eps = self.config.hc_eps
        m = torch.softmax(m, -1) + eps
        m = m / (m.sum(-2, keepdim=True) + eps)
        for _ in range(self.config.hc_iters - 1):
            m = m / (m.sum(-1, keepdim=True) + eps)
            m = m / (m.sum(-2, keepdim=True) + eps)
        return m

    def hc_post(self, y_TD: Tensor, x_TND: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        # comb[old, new]: stream k of the result takes comb[j, k] of stream j.
        return self.act(post[..., None] * y_TD[:, None] + torch.einsum("tjk,tjd->tkd", comb, x_TND))

    def hc_head(self, x_TND: Tensor) -> Tensor:
        w = self.weights
        a = torch.sigmoid(self.mixes(x_TND, w["hc_head_fn"]) * w["hc_head_scale"] + w["hc_head_base"])
        return self.act(((a + self.config.hc_eps)[..., None] * x_TND).sum(1))

    # ---- rotary ----

    def frequencies(self, ratio: int) -> Tensor:
        """[32] fp32: radians a position for each pair."""
        dim = self.config.rope_dim
        i = torch.arange(dim // 2, dtype=torch.float32)
        if ratio == 0:
            return 1.0 / self.config.rope_theta ** (2 * i / dim)
        theta, yarn = self.config.compress_rope_theta, self.config.yarn
        base = 1.0 / theta ** (2 * i / dim)
        if yarn is None:
            return base

        def turns(n: float) -> float:
            return dim * math.log(yarn.original_max_position / (n * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(turns(yarn.beta_fast)), 0), min(math.ceil(turns(yarn.beta_slow)), dim - 1)
        ramp = ((i - low) / (high - low if high > low else 0.001)).clamp(0, 1)
        return base * (1 - ramp) + base / yarn.factor * ramp

    def rotate(self, v: Tensor, positions: Tensor, ratio: int, inverse: bool = False) -> Tensor:
        """Rotate neighbouring pairs of the last 64 values of v [T, ..., n]."""
        angle = positions.float()[:, None] * self.frequencies(ratio)
        angle = angle.view(len(positions), *[1] * (v.dim() - 2), -1)
        cos, sin = angle.cos(), -angle.sin() if inverse else angle.sin()
        still, turning = v[..., : -self.config.rope_dim], v[..., -self.config.rope_dim :]
        a, b = turning[..., 0::2], turning[..., 1::2]
        turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
        return self.act(torch.cat([still, turned], -1))

    # ---- attention ----

    def attention(self, x_TD: Tensor, layer: int) -> Tensor:
        config, ratio, p = self.config, self.config.ratios[layer], f"layers.{layer}.attn."
        positions = torch.arange(len(x_TD))
        qr_TQ = self.norm(self.lin(x_TD, p + "wq_a"), p + "q_norm")
        q_THK = self.lin(qr_TQ, p + "wq_b").unflatten(-1, (config.num_heads, config.head_dim))
        q_THK = self.rotate(self.head_norm(q_THK), positions, ratio)
        raw_TK = self.entry(self.rotate(self.norm(self.lin(x_TD, p + "wkv"), p + "kv_norm"), positions, ratio))
        seen_TT = (positions <= positions[:, None]) & (positions > positions[:, None] - self.window())
        if ratio:
            entries_WK = self.entry(self.compress(x_TD, p + "compressor.", ratio, config.head_dim))
            seen_TW = self.visible(positions, len(entries_WK), ratio)
            if ratio == 4:
                seen_TW = self.choose(x_TD, qr_TQ, seen_TW, p + "indexer.")
            keys, seen = torch.cat([raw_TK, entries_WK]), torch.cat([seen_TT, seen_TW], 1)
        else:
            keys, seen = raw_TK, seen_TT
        o_THK = torch.cat(
            [
                self.attend(q, keys, mask, self.weights[p + "attn_sink"])
                for q, mask in zip(q_THK.split(256), seen.split(256), strict=True)
            ]
        )
        o_THK = self.unrotate(self.act(o_THK), positions, ratio)
        o_TGC = o_THK.flatten(1).unflatten(-1, (config.o_groups, -1))
        wo_a = self.weights[p + "wo_a.weight"].unflatten(0, (config.o_groups, -1))
        z_TGO = self.act(torch.einsum("tgc,goc->tgo", o_TGC, wo_a))
        return self.lin(z_TGO.flatten(1), p + "wo_b")

    def window(self) -> int:
        return self.config.window

    def head_norm(self, q_THK: Tensor) -> Tensor:
        return self.act(rms(q_THK, self.config.norm_eps))

    def unrotate(self, o_THK: Tensor, positions: Tensor, ratio: int) -> Tensor:
        return self.rotate(o_THK, positions, ratio, inverse=True)

    def attend(self, q_THK: Tensor, keys_SK: Tensor, seen_TS: Tensor, sink_H: Tensor) -> Tensor:
        score_HTS = torch.einsum("thk,sk->hts", q_THK, keys_SK) * self.config.head_dim**-0.5
        score_HTS = score_HTS.masked_fill(~seen_TS, -math.inf)
        top = score_HTS.amax(-1, keepdim=True)
        e = torch.exp(score_HTS - top)
        total = e.sum(-1, keepdim=True) + self.sink(sink_H[:, None, None], top)
        if self.arithmetic.probabilities == "bf16":
            e = e.bfloat16().float()
        return (torch.einsum("hts,sk->htk", e, keys_SK) / total).transpose(0, 1)

    def sink(self, sink: Tensor, top: Tensor) -> Tensor:
        return torch.exp(sink - top)

    # ---- compressor ----

    def visible(self, positions: Tensor, num_entries: int, ratio: int) -> Tensor:
        return torch.arange(num_entries) < ((positions + 1) // ratio)[:, None]

    def compress(self, x_TD: Tensor, p: str, ratio: int, width: int) -> Tensor:
        """[W, width] entries of the closed groups, rotated, before quantisation."""
        num = len(x_TD) // ratio
        if num == 0:
            return x_TD.new_zeros(0, width)
        x = x_TD[: num * ratio]
        k = F.linear(x, self.weights[p + "wkv.weight"]).unflatten(0, (num, ratio))
        g = self.add_ape(F.linear(x, self.weights[p + "wgate.weight"]).unflatten(0, (num, ratio)), p)
        if ratio == 4:
            k, g = self.overlap(k, g, width)
        pooled = self.act((torch.softmax(g, 1) * k).sum(1))
        return self.rotate(self.norm(pooled, p + "norm"), self.entry_positions(num, ratio), ratio)

    def add_ape(self, g: Tensor, p: str) -> Tensor:
        return g + self.weights[p + "ape"]

    def overlap(self, k: Tensor, g: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Eight candidates of each group: the group before it by its first columns, its own tokens by the last."""
        absent_k, absent_g = torch.zeros_like(k[:1, :, :width]), torch.full_like(g[:1, :, :width], -math.inf)
        before_k = torch.cat([absent_k, k[:-1, :, :width]])
        before_g = torch.cat([absent_g, g[:-1, :, :width]])
        return torch.cat([before_k, k[..., width:]], 1), torch.cat([before_g, g[..., width:]], 1)

    def entry_positions(self, num: int, ratio: int) -> Tensor:
        return torch.arange(num) * ratio

    # ---- indexer ----

    def choose(self, x_TD: Tensor, qr_TQ: Tensor, visible_TW: Tensor, p: str) -> Tensor:
        """[T, W] which visible entries a token attends to."""
        config = self.config
        keys = self.index_key(self.compress(x_TD, p + "compressor.", 4, config.index_dim))
        if len(keys) <= config.index_topk:
            return visible_TW
        q_TJI = self.lin(qr_TQ, p + "wq_b").unflatten(-1, (config.index_heads, config.index_dim))
        q_TJI = self.index_query(self.rotate(q_TJI, torch.arange(len(x_TD)), 4))
        weight_TJ = self.lin(x_TD, p + "weights_proj") * (config.index_dim * config.index_heads) ** -0.5
        pieces = zip(q_TJI.split(256), weight_TJ.split(256), strict=True)
        score_TW = torch.cat([self.index_scores(q, keys, weight) for q, weight in pieces])
        score_TW = score_TW.masked_fill(~visible_TW, -math.inf)
        chosen = torch.zeros_like(visible_TW)
        chosen.scatter_(1, score_TW.topk(config.index_topk).indices, True)
        return chosen & visible_TW

    def index_scores(self, q_TJI: Tensor, keys_WI: Tensor, weight_TJ: Tensor) -> Tensor:
        dots = torch.relu(torch.einsum("tji,wi->tjw", q_TJI, keys_WI))
        return torch.einsum("tj,tjw->tw", weight_TJ, dots)

    # ---- experts ----

    def moe(self, x_TD: Tensor, tokens: Tensor, layer: int) -> Tensor:
        p = f"layers.{layer}.ffn."
        s_TE = torch.sqrt(F.softplus(F.linear(x_TD, self.weights[p + "gate.weight"])))
        chosen = self.choose_experts(s_TE, tokens, layer)
        share = self.shares(s_TE, chosen, layer) * self.routed_scaling()
        out = torch.zeros_like(x_TD)
        for e in range(self.config.num_experts):
            token, place = (chosen == e).nonzero(as_tuple=True)
            out.index_add_(0, token, share[token, place, None] * self.expert(x_TD[token], f"{p}experts.{e}."))
        return self.act(out + self.expert(x_TD, p + "shared_experts.", shared=True))

    def routed_scaling(self) -> float:
        return self.config.routed_scaling

    def choose_experts(self, s_TE: Tensor, tokens: Tensor, layer: int) -> Tensor:
        p = f"layers.{layer}.ffn.gate."
        if layer < self.config.num_hash_layers:
            return self.weights[p + "tid2eid"][tokens]
        return (s_TE + self.weights[p + "bias"]).topk(self.config.experts_per_token).indices

    def shares(self, s_TE: Tensor, chosen: Tensor, layer: int) -> Tensor:
        s = s_TE.gather(1, chosen)
        return s / (s.sum(-1, keepdim=True) + 1e-20)

    def expert(self, x: Tensor, p: str, shared: bool = False) -> Tensor:
        a, b = (F.linear(x, self.weights[f"{p}{name}.weight"]) for name in ("w1", "w3"))
        a, b = self.clamp(a, b, shared)
        return F.linear(self.act(F.silu(a) * b), self.weights[p + "w2.weight"])

    def clamp(self, a: Tensor, b: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
        limit = self.config.swiglu_limit
        return a.clamp(max=limit), b.clamp(-limit, limit)
