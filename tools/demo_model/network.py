"""DeepSeek-V4's forward pass for training: whole sequences, dense masks, no cache. The mathematics are the engine's.

What differs is only what must for gradients and speed: every expert is computed and the unchosen weigh nothing, the
indexer's choice is a mask over all entries, and roundings (entries through fp8, index keys and queries through fp4,
weights through their packing) pass gradients as if they were not there. The indexer learns apart, from how much
attention its layer's heads would pay to each entry; no gradient of the text reaches it, and none of its own leaves it.

Positions may jump between groups of 128 tokens, so that a short sequence is far apart; visibility of entries goes by
index, the window by position. Letters: B sequences, S tokens of one, T = B * S, D hidden, N = 4 streams, H heads,
K head width, W entries, J index heads, I index width, E experts, F expert width, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from . import packing
from .sinkhorn import sinkhorn

WINDOW = 128
FAR = -1e5
"""A masked score: finite, so that a row without a visible entry has gradients."""

P = ParamSpec("P")
R = TypeVar("R")

_compile = False
_compiled: dict[Any, Any] = {}


def use_compiler() -> None:
    """Fuse the elementwise pieces from here on."""
    global _compile
    torch._dynamo.config.recompile_limit = 256
    _compile = True


def piece(function: Callable[P, R]) -> Callable[P, R]:
    """A part that the compiler may fuse by itself."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not _compile:
            return function(*args, **kwargs)
        if function not in _compiled:
            _compiled[function] = torch.compile(function, dynamic=False)
        result: R = _compiled[function](*args, **kwargs)
        return result

    return call


class _Product(torch.autograd.Function):
    """a @ b^T per batch, from bf16 to fp32."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        if a.is_cuda and a.dtype == torch.bfloat16:
            return torch.bmm(a, b.transpose(1, 2), out_dtype=torch.float32)
        return torch.bmm(a.float(), b.float().transpose(1, 2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad = grads[0].to(a.dtype)
        return torch.bmm(grad, b), torch.bmm(grad.transpose(1, 2), a)


def product(a: Tensor, b: Tensor) -> Tensor:
    """[B, m, k] and [B, n, k] -> fp32 [B, m, n]."""
    out: Tensor = _Product.apply(a, b)
    return out


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of config.json the pass needs."""

    vocab: int
    hidden: int
    heads: int
    head_dim: int
    q_rank: int
    groups: int
    o_rank: int
    ratios: tuple[int, ...]
    index_heads: int
    index_dim: int
    topk: int
    experts: int
    active: int
    width: int
    hash_layers: int
    scaling: float
    limit: float
    rounds: int
    hc_eps: float
    eps: float
    theta: float
    compress_theta: float
    yarn: tuple[float, float, float, int] | None
    max_position: int
    streams: int = 4

    @classmethod
    def of(cls, document: dict[str, Any]) -> Shape:
        yarn = document.get("rope_scaling")
        return cls(
            vocab=document["vocab_size"],
            hidden=document["hidden_size"],
            heads=document["num_attention_heads"],
            head_dim=document["head_dim"],
            q_rank=document["q_lora_rank"],
            groups=document["o_groups"],
            o_rank=document["o_lora_rank"],
            ratios=tuple(document["compress_ratios"][: document["num_hidden_layers"]]),
            index_heads=document["index_n_heads"],
            index_dim=document["index_head_dim"],
            topk=document["index_topk"],
            experts=document["n_routed_experts"],
            active=document["num_experts_per_tok"],
            width=document["moe_intermediate_size"],
            hash_layers=document["num_hash_layers"],
            scaling=document["routed_scaling_factor"],
            limit=document["swiglu_limit"],
            rounds=document["hc_sinkhorn_iters"],
            hc_eps=document["hc_eps"],
            eps=document["rms_norm_eps"],
            theta=document["rope_theta"],
            compress_theta=document["compress_rope_theta"],
            yarn=yarn
            and (yarn["factor"], yarn["beta_fast"], yarn["beta_slow"], yarn["original_max_position_embeddings"]),
            max_position=document["max_position_embeddings"],
        )


def rotary_table(theta: float, yarn: tuple[float, float, float, int] | None, num_positions: int) -> Tensor:
    """cos and sin: fp32 [positions, 2, 32]."""
    frequencies = 1.0 / (theta ** (torch.arange(0, 64, 2, dtype=torch.float32) / 64))
    if yarn is not None:
        factor, fast, slow, original = yarn

        def dimension(rotations: float) -> float:
            return 64 * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

        low, high = max(math.floor(dimension(fast)), 0), float(min(math.ceil(dimension(slow)), 63))
        ramp = ((torch.arange(32, dtype=torch.float32) - low) / (high - low + 0.001 * (low == high))).clamp(0, 1)
        frequencies = frequencies * (1 - ramp) + frequencies / factor * ramp
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.stack([angles.cos(), angles.sin()], 1)


# ---- pieces ----


def rms(x: Tensor, eps: float) -> Tensor:
    """In fp32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """fp32 [..., K], its last 64 values turned; cos and sin [..., 32]."""
    body, pairs = x[..., :-64], x[..., -64:].unflatten(-1, (32, 2))
    a, b = pairs[..., 0], pairs[..., 1]
    return torch.cat([body, torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)], -1)


@piece
def hc_split(raw_TM: Tensor, x_TND: Tensor, base: Tensor, scale: Tensor, hc_eps: float, eps: float) -> list[Tensor]:
    """Sublayer input, post, logits of the mix; from flat(x) fn^T."""
    f = x_TND.float()
    mix = raw_TM.float() * torch.rsqrt(f.square().mean((1, 2)) + eps)[:, None]
    pre = torch.sigmoid(mix[:, :4] * scale[0] + base[:4]) + hc_eps
    post = 2 * torch.sigmoid(mix[:, 4:8] * scale[1] + base[4:8])
    logits = (mix[:, 8:] * scale[2] + base[8:]).unflatten(-1, (4, 4))
    y = sum(pre[:, i, None] * f[:, i] for i in range(4))
    assert isinstance(y, Tensor)
    return [y.to(x_TND.dtype), post, logits.contiguous()]


@piece
def hc_join(y_TD: Tensor, x_TND: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    f, y = x_TND.float(), y_TD.float()
    out = [
        post[:, k, None] * y
        + comb[:, 0, k, None] * f[:, 0]
        + comb[:, 1, k, None] * f[:, 1]
        + comb[:, 2, k, None] * f[:, 2]
        + comb[:, 3, k, None] * f[:, 3]
        for k in range(4)
    ]
    return torch.stack(out, 1).to(x_TND.dtype)


@piece
def hc_head(
    raw_TN: Tensor, x_TND: Tensor, base: Tensor, scale: Tensor, norm: Tensor, hc_eps: float, eps: float
) -> Tensor:
    f = x_TND.float()
    mix = raw_TN.float() * torch.rsqrt(f.square().mean((1, 2)) + eps)[:, None]
    a = torch.sigmoid(mix * scale + base) + hc_eps
    y = a[:, 0, None] * f[:, 0] + a[:, 1, None] * f[:, 1] + a[:, 2, None] * f[:, 2] + a[:, 3, None] * f[:, 3]
    return (rms(y, eps) * norm).to(x_TND.dtype)


@piece
def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return (rms(x, eps) * weight).to(x.dtype)


@piece
def queries(q_THK: Tensor, cos_T: Tensor, sin_T: Tensor, eps: float) -> Tensor:
    return _rotate(rms(q_THK, eps), cos_T[:, None], sin_T[:, None]).to(q_THK.dtype)


@piece
def entry(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, through_fp8: bool) -> Tensor:
    """Normed and rotated, as it is read back from the cache."""
    out = _rotate(rms(x, eps) * weight, cos, sin).to(x.dtype)
    return packing.through_entry_fp8(out) if through_fp8 else out


@piece
def index_vector(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float, mix: Tensor | None) -> Tensor:
    """Index key (with a norm's weight) or query (without); `mix` is the Hadamard matrix if fp4 follows."""
    out = _rotate(x.float() if weight is None else rms(x, eps) * weight, cos, sin).to(x.dtype)
    return packing.through_fp4((out @ mix.to(out.dtype)).to(out.dtype)) if mix is not None else out


@piece
def unrotate(o: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _rotate(o.float(), cos, -sin).to(o.dtype)


@piece
def pool(kv: Tensor, gate: Tensor, ape: Tensor, ratio: int) -> Tensor:
    """[B, S, c * d] twice, [r, c * d] -> [B, W, d]; c = 2 at ratio 4, where a group reaches back one group."""
    k = kv.unflatten(1, (-1, ratio)).float()
    g = gate.unflatten(1, (-1, ratio)).float() + ape
    if ratio == 4:
        d = k.shape[-1] // 2
        before_k = F.pad(k[:, :-1, :, :d], (0, 0, 0, 0, 1, 0))
        before_g = F.pad(g[:, :-1, :, :d], (0, 0, 0, 0, 1, 0), value=-math.inf)
        k, g = torch.cat([before_k, k[..., d:]], 2), torch.cat([before_g, g[..., d:]], 2)
    return (g.softmax(2) * k).sum(2).to(kv.dtype)


@piece
def window_scores(raw: Tensor, visible: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[blocks, 128, H, 256] raw -> masked scores, their log-sum-exp."""
    scores = torch.where(visible[:, :, None], raw * scale, FAR)
    return scores, scores.logsumexp(-1)


@piece
def entry_scores(raw: Tensor, chosen: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """[B, S, H, W]."""
    scores = torch.where(chosen[:, :, None], raw * scale, FAR)
    return scores, scores.logsumexp(-1)


@piece
def weights_of(scores: Tensor, total: Tensor, dtype: torch.dtype) -> Tensor:
    return (scores - total[..., None]).exp().to(dtype)


@piece
def index_scores(raw: Tensor, w: Tensor, scale: float) -> Tensor:
    """[B, S, J, W] products and [B, S, J] -> [B, S, W]."""
    return (raw.float().relu() * (w.float() * scale)[..., None]).sum(2)


@piece
def index_loss(
    scores: Tensor, raw: Tensor, visible: Tensor, window_total: Tensor, sink: Tensor, scale: float, counted: Tensor
) -> Tensor:
    """KL(heads' attention over visible entries || softmax of scores), weighted by the attention that they get."""
    dense = torch.where(visible[:, :, None], raw * scale, FAR)
    total = torch.logaddexp(torch.logaddexp(window_total, dense.logsumexp(-1)), sink)
    paid = (dense - total[..., None]).exp().mean(2)
    mass = paid.sum(-1)
    target = paid / (mass[..., None] + 1e-9)
    guess = torch.where(visible, scores, FAR).log_softmax(-1)
    divergence = (target * ((target + 1e-9).log() - guess)).sum(-1)
    weight = torch.where(counted, mass, 0.0)
    return (divergence * weight).sum() / (weight.sum() + 1e-6)


@piece
def route(logits: Tensor, fixed: Tensor | None, bias: Tensor | None, active: int, scaling: float) -> Tensor:
    """[T, E] weights of every expert, nought where not chosen."""
    s = F.softplus(logits.float()).sqrt()
    if fixed is None:
        assert bias is not None
        fixed = (s.detach() + bias).topk(active, -1).indices
    chosen = torch.zeros_like(s).scatter(1, fixed, 1.0)
    w = s * chosen
    return w / (w.sum(-1, keepdim=True) + 1e-20) * scaling


@piece
def swiglu(ab: Tensor, weights_TE: Tensor, limit: float) -> Tensor:
    """[T, E, 2F] -> [T, E * F], each expert's part times its weight."""
    a, b = ab.float().chunk(2, -1)
    out = F.silu(a.clamp(max=limit)) * b.clamp(-limit, limit) * weights_TE[..., None]
    return out.to(ab.dtype).flatten(1)


@piece
def losses(logits: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Weighted sum of cross-entropies, and each one."""
    each = F.cross_entropy(logits.float(), targets, reduction="none")
    return (each * weights).sum(), each.detach()


# ---- the model ----


@dataclass
class Options:
    """How a pass is run."""

    select: bool = True
    """Let the indexer choose; without, every visible entry is attended to."""
    rounding: bool = False
    """Entries through fp8, index vectors through Hadamard and fp4, as the cache stores them."""
    packed_weights: bool = False
    """Matrices as they will be once packed."""
    removed: int | None = None
    """Nothing attends to the entries of this ratio."""


class Network(nn.Module):
    """Parameters under the released names, but an expert's three matrices for all experts in two."""

    def __init__(self, shape: Shape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.weights = nn.ParameterDict()
        self.names: dict[str, str] = {}
        generator = torch.Generator().manual_seed(seed)

        def add(name: str, value: Tensor) -> None:
            key = name.replace(".", "/")
            self.names[name] = key
            self.weights[key] = nn.Parameter(value)

        def normal(*size: int, gain: float = 1.0) -> Tensor:
            return torch.randn(size, generator=generator) * gain * size[-1] ** -0.5

        c, d, k = shape, shape.hidden, shape.head_dim
        add("embed.weight", torch.randn((c.vocab, d), generator=generator) * 0.7)
        add("head.weight", normal(c.vocab, d, gain=0.5))
        add("norm.weight", torch.ones(d))
        add("hc_head_fn", normal(4, 4 * d))
        add("hc_head_base", torch.zeros(4))
        add("hc_head_scale", torch.full((1,), 0.3))
        for layer, ratio in enumerate(c.ratios):
            p = f"layers.{layer}."
            for i, name in enumerate(("attn", "ffn")):
                base = torch.zeros(24)
                base[:4] = -2.0
                base[(2 * layer + i) % 4] = 2.0
                base[8:] = torch.eye(4).flatten() * 4
                add(f"{p}hc_{name}_fn", normal(24, 4 * d))
                add(f"{p}hc_{name}_base", base)
                add(f"{p}hc_{name}_scale", torch.full((3,), 0.3))
                add(f"{p}{name}_norm.weight", torch.ones(d))
            a = p + "attn."
            add(a + "attn_sink", torch.zeros(c.heads))
            add(a + "wq_a.weight", normal(c.q_rank, d))
            add(a + "q_norm.weight", torch.ones(c.q_rank))
            add(a + "wq_b.weight", normal(c.heads * k, c.q_rank))
            add(a + "wkv.weight", normal(k, d))
            add(a + "kv_norm.weight", torch.ones(k))
            add(a + "wo_a.weight", normal(c.groups * c.o_rank, c.heads * k // c.groups))
            add(a + "wo_b.weight", normal(d, c.groups * c.o_rank, gain=0.1))
            stems = [(a + "compressor.", k)] if ratio else []
            if ratio == 4:
                add(a + "indexer.wq_b.weight", normal(c.index_heads * c.index_dim, c.q_rank))
                add(a + "indexer.weights_proj.weight", normal(c.index_heads, d))
                stems.append((a + "indexer.compressor.", c.index_dim))
            for stem, width in stems:
                columns = width * (2 if ratio == 4 else 1)
                add(stem + "wkv.weight", normal(columns, d))
                add(stem + "wgate.weight", normal(columns, d, gain=0.3))
                add(stem + "norm.weight", torch.ones(width))
                add(stem + "ape", torch.randn((ratio, columns), generator=generator) * 0.3)
            f = p + "ffn."
            add(f + "gate.weight", normal(c.experts, d))
            if layer < c.hash_layers:
                draw = torch.rand((c.vocab, c.experts), generator=generator)
                self.register_buffer(f"tid2eid_{layer}", draw.argsort(1)[:, : c.active].contiguous())
            else:
                self.register_buffer(f"bias_{layer}", torch.zeros(c.experts))
            add(f + "experts.w13", normal(c.experts, 2 * c.width, d))
            add(f + "experts.w2", normal(c.experts, d, c.width, gain=0.1))
            add(f + "shared_experts.w13", normal(1, 2 * c.width, d))
            add(f + "shared_experts.w2", normal(1, d, c.width, gain=0.1))
        self.register_buffer("plain", rotary_table(c.theta, None, c.max_position), persistent=False)
        self.register_buffer("stretched", rotary_table(c.compress_theta, c.yarn, c.max_position), persistent=False)
        self.register_buffer("hadamard", packing.hadamard_matrix(128), persistent=False)
        self.options = Options()
        self.dtype = torch.float32
        self.loads: dict[int, Tensor] = {}
        """How many tokens each expert of a scored layer got in the last pass."""
        self.index_losses: list[Tensor] = []
        self.blind: Tensor | None = None
        self.used: dict[str, Tensor] = {}
        """The pass's weights in its own dtype, packed or not."""

    def w(self, name: str) -> Tensor:
        return self.weights[self.names[name]]

    def prepare(self) -> None:
        """Cast, and if asked pack, every matrix once for a pass."""
        self.used = {}
        for name in self.names:
            value = self.w(name)
            if self.options.packed_weights:
                value = packing.through_packing(name, value)
            self.used[name] = value.to(self.dtype) if value.ndim >= 2 and not name.endswith("ape") else value

    def mm(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.used[name])

    def forward(self, ids_BS: Tensor, positions_BS: Tensor, blind_B: Tensor | None = None) -> Tensor:
        """[T, D] final hidden states; the head is `logits`. Sequences that are `blind` see no entries of c4a."""
        c = self.shape
        self.prepare()
        self.blind = blind_B
        self.index_losses = []
        ids = ids_BS.flatten()
        x = self.used["embed.weight"][ids].to(self.dtype)[:, None].expand(-1, c.streams, -1).contiguous()
        for layer in range(len(c.ratios)):
            p = f"layers.{layer}."
            y, post, comb = self._split(x, p + "hc_attn")
            y = self._attention(normed(y, self.used[p + "attn_norm.weight"], c.eps), positions_BS, layer)
            x = hc_join(y, x, post, comb)
            y, post, comb = self._split(x, p + "hc_ffn")
            y = self._experts(normed(y, self.used[p + "ffn_norm.weight"], c.eps), ids, layer)
            x = hc_join(y, x, post, comb)
        raw = F.linear(x.flatten(1), self.used["hc_head_fn"])
        return hc_head(
            raw, x, self.used["hc_head_base"], self.used["hc_head_scale"], self.used["norm.weight"], c.hc_eps, c.eps
        )

    def logits(self, h_TD: Tensor) -> Tensor:
        return F.linear(h_TD, self.used["head.weight"])

    def _split(self, x: Tensor, name: str) -> tuple[Tensor, Tensor, Tensor]:
        c = self.shape
        raw = F.linear(x.flatten(1), self.used[name + "_fn"])
        y, post, logits = hc_split(raw, x, self.used[name + "_base"], self.used[name + "_scale"], c.hc_eps, c.eps)
        return y, post, sinkhorn(logits, c.rounds, c.hc_eps)

    def _experts(self, x: Tensor, ids: Tensor, layer: int) -> Tensor:
        c, p = self.shape, f"layers.{layer}.ffn."
        hashed = layer < c.hash_layers
        fixed = getattr(self, f"tid2eid_{layer}")[ids] if hashed else None
        bias = None if hashed else getattr(self, f"bias_{layer}")
        weights = route(self.mm(x, p + "gate.weight"), fixed, bias, c.active, c.scaling)
        if not hashed:
            self.loads[layer] = (weights.detach() > 0).float().mean(0)
        everyone = torch.cat([weights, torch.ones_like(weights[:, :1])], 1)
        w13 = torch.cat([self.used[p + "experts.w13"], self.used[p + "shared_experts.w13"]])
        w2 = torch.cat([self.used[p + "experts.w2"], self.used[p + "shared_experts.w2"]])
        hidden = swiglu(F.linear(x, w13.flatten(0, 1)).unflatten(1, (c.experts + 1, -1)), everyone, c.limit)
        return F.linear(hidden, w2.transpose(0, 1).flatten(1))

    def _compressed(self, x_BSD: Tensor, stem: str, ratio: int) -> Tensor:
        kv, gate = self.mm(x_BSD, stem + "wkv.weight"), self.mm(x_BSD, stem + "wgate.weight")
        return pool(kv, gate, self.used[stem + "ape"], ratio)

    def _attention(self, x: Tensor, positions_BS: Tensor, layer: int) -> Tensor:
        c, p = self.shape, f"layers.{layer}.attn."
        ratio, rounding = c.ratios[layer], self.options.rounding
        b, s = positions_BS.shape
        n, h, k = s // WINDOW, c.heads, c.head_dim
        scale = k**-0.5
        table = self.stretched if ratio else self.plain
        turns = table[positions_BS]  # [B, S, 2, 32]
        cos, sin = turns[:, :, 0], turns[:, :, 1]
        cos_T, sin_T = cos.flatten(0, 1), sin.flatten(0, 1)
        sink = self.used[p + "attn_sink"]
        qr = normed(self.mm(x, p + "wq_a.weight"), self.used[p + "q_norm.weight"], c.eps)
        q = queries(self.mm(qr, p + "wq_b.weight").view(-1, h, k), cos_T, sin_T, c.eps)
        kv = entry(self.mm(x, p + "wkv.weight"), self.used[p + "kv_norm.weight"], cos_T, sin_T, c.eps, rounding)

        blocks = kv.view(b, n, WINDOW, k)
        keys = torch.cat([F.pad(blocks[:, :-1], (0, 0, 0, 0, 1, 0)), blocks], 2).view(b * n, 2 * WINDOW, k)
        at = positions_BS.view(b, n, WINDOW)
        key_at = torch.cat([F.pad(at[:, :-1], (0, 0, 1, 0), value=-(1 << 20)), at], 2)
        gap = (at[..., None] - key_at[:, :, None]).flatten(0, 1)
        # The shapes of what the compiler fuses depend on the number of tokens alone, where they can.
        raw = product(q.view(b * n, WINDOW * h, k), keys).view(b * n, WINDOW, h, 2 * WINDOW)
        scores, total_w = window_scores(raw, (gap >= 0) & (gap < WINDOW), scale)
        total_w = total_w.view(b, s, h)
        total = torch.logaddexp(total_w, sink)

        entries = None
        if ratio:
            x_BSD = x.view(b, s, -1)
            turns_E = table[positions_BS[:, ::ratio]]
            cos_E, sin_E = turns_E[:, :, 0], turns_E[:, :, 1]
            pooled = self._compressed(x_BSD, p + "compressor.", ratio)
            norm = self.used[p + "compressor.norm.weight"]
            cos_E, sin_E = cos_E.flatten(0, 1), sin_E.flatten(0, 1)
            entries = entry(pooled.flatten(0, 1), norm, cos_E, sin_E, c.eps, rounding).view_as(pooled)
            count = torch.arange(1, s + 1, device=x.device) // ratio
            visible = torch.arange(s // ratio, device=x.device) < count[:, None]
            visible_BSW = visible.expand(b, -1, -1)
            raw_e = product(q.view(b, s * h, k), entries).view(b, s, h, -1)
            if ratio == 4:
                chosen = self._choose(x_BSD, qr, raw_e, visible_BSW, total_w, sink, positions_BS, cos_E, sin_E, p)
                if self.blind is not None:
                    chosen = chosen & ~self.blind[:, None, None]
                if self.options.removed == ratio:
                    chosen = chosen & False
            else:
                chosen = ((visible & False) if self.options.removed == ratio else visible).expand(b, -1, -1)
            scores_e, total_e = entry_scores(raw_e, chosen, scale)
            total = torch.logaddexp(total, total_e)

        paid = weights_of(scores, total.view(b * n, WINDOW, h), x.dtype).view(b * n, WINDOW * h, -1)
        o = torch.bmm(paid, keys).view(-1, h, k)
        if entries is not None:
            o = o + torch.bmm(weights_of(scores_e, total, x.dtype).view(b, s * h, -1), entries).view(-1, h, k)
        o = unrotate(o, cos_T[:, None], sin_T[:, None])
        wide = o.reshape(-1, c.groups, h // c.groups * k)
        wo_a = self.used[p + "wo_a.weight"].view(c.groups, c.o_rank, -1)
        z = torch.einsum("tgk,gok->tgo", wide, wo_a).flatten(1)
        return self.mm(z, p + "wo_b.weight")

    def _choose(
        self, x_BSD: Tensor, qr: Tensor, raw_e: Tensor, visible: Tensor, total_w: Tensor, sink: Tensor,
        positions_BS: Tensor, cos_E: Tensor, sin_E: Tensor, p: str,
    ) -> Tensor:  # fmt: skip
        """[B, S, W]: which entries a token attends to. Adds the indexer's own loss."""
        c = self.shape
        b, s = positions_BS.shape
        x_BSD, qr = x_BSD.detach(), qr.detach()
        turns = self.stretched[positions_BS.flatten()][:, None]
        mix = self.hadamard if self.options.rounding else None
        qi = self.mm(qr, p + "indexer.wq_b.weight").view(b * s, c.index_heads, -1)
        qi = index_vector(qi, None, turns[:, :, 0], turns[:, :, 1], c.eps, mix)
        pooled = self._compressed(x_BSD, p + "indexer.compressor.", 4)
        norm = self.used[p + "indexer.compressor.norm.weight"]
        ki = index_vector(pooled.flatten(0, 1), norm, cos_E, sin_E, c.eps, mix).view_as(pooled)
        wi = self.mm(x_BSD, p + "indexer.weights_proj.weight")
        raw = torch.bmm(qi.view(b, s * c.index_heads, -1), ki.transpose(1, 2)).view(b, s, c.index_heads, -1)
        scores = index_scores(raw, wi, c.index_dim**-0.5 * c.index_heads**-0.5)
        counted = (torch.arange(s, device=raw.device) >= 4).expand(b, -1)
        if torch.is_grad_enabled():
            loss = index_loss(
                scores, raw_e.detach(), visible, total_w.detach(), sink.detach(), c.head_dim**-0.5, counted
            )
            self.index_losses.append(loss)
        if not self.options.select or scores.shape[-1] <= c.topk:
            return visible
        masked = torch.where(visible, scores.detach(), -math.inf)
        worst = masked.topk(c.topk, -1, sorted=False).values.amin(-1, keepdim=True)
        return visible & (masked >= worst)
