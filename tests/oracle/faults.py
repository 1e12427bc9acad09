"""Mistakes that V4 invites, each put into the plain reference by overriding one step; the oracle must tell them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from .plain import Plain, rms


def _plain(**methods: object) -> type[Plain]:
    return type("Faulty", (Plain,), methods)


def _config(**changes: object) -> type[Plain]:
    """A plain pass that believes another config."""

    class Faulty(Plain):
        def __init__(self, config, weights, arithmetic=None):
            super().__init__(replace(config, **changes), weights, arithmetic)

    return Faulty


def _rows_first(self: Plain, m: Tensor) -> Tensor:
    eps = self.config.hc_eps
    m = torch.softmax(m, -1) + eps
    m = m / (m.sum(-1, keepdim=True) + eps)
    for _ in range(self.config.hc_iters - 1):
        m = m / (m.sum(-2, keepdim=True) + eps)
        m = m / (m.sum(-1, keepdim=True) + eps)
    return m


def _half_split(self: Plain, v: Tensor, positions: Tensor, ratio: int, inverse: bool = False) -> Tensor:
    still, turning = v[..., :-64], v[..., -64:]
    pairs = torch.stack([turning[..., :32], turning[..., 32:]], -1).flatten(-2)
    turned = Plain.rotate(self, torch.cat([still, pairs], -1), positions, ratio, inverse)[..., -64:]
    return torch.cat([still, turned[..., 0::2], turned[..., 1::2]], -1)


def _rotary_first(self: Plain, v: Tensor, positions: Tensor, ratio: int, inverse: bool = False) -> Tensor:
    return Plain.rotate(self, v.roll(-64, -1), positions, ratio, inverse).roll(64, -1)


def _stretch_all(self: Plain, ratio: int) -> Tensor:
    if ratio:
        return Plain.frequencies(self, ratio)
    plain = replace(self.config, compress_rope_theta=self.config.rope_theta)
    return Plain(plain, self.weights).frequencies(4)


def _exchanged(self: Plain, k: Tensor, g: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return Plain.overlap(self, k.roll(width, -1), g.roll(width, -1), width)


def _shares_with_bias(self: Plain, s_TE: Tensor, chosen: Tensor, layer: int) -> Tensor:
    if layer >= self.config.num_hash_layers:
        s_TE = s_TE + self.weights[f"layers.{layer}.ffn.gate.bias"]
    return Plain.shares(self, s_TE, chosen, layer)


def _per_stream(self: Plain, x_TND: Tensor, fn: Tensor) -> Tensor:
    return F.linear(rms(x_TND, self.config.norm_eps).flatten(1), fn)


def _with_limit(limit: float | None, shared_only: bool = False, both_sides: bool = False) -> type[Plain]:
    class Faulty(Plain):
        def clamp(self, a: Tensor, b: Tensor, shared: bool) -> tuple[Tensor, Tensor]:
            if limit is None and (shared or not shared_only):
                return a, b
            a, b = super().clamp(a, b, shared)
            return (a.clamp(min=-self.config.swiglu_limit) if both_sides else a), b

    return Faulty


FAULTS: dict[str, type[Plain]] = {
    "comb_not_transposed": _plain(
        hc_post=lambda self, y, x, post, comb: Plain.hc_post(self, y, x, post, comb.transpose(1, 2))
    ),
    "sinkhorn_rows_first": _plain(sinkhorn=_rows_first),
    "sinkhorn_one_round_less": _config(hc_iters=19),
    "post_without_its_two": _plain(post_factor=lambda self: 1.0),
    "mix_norm_per_stream": _plain(mixes=_per_stream),
    "no_sink": _plain(sink=lambda self, sink, top: torch.zeros_like(top)),
    "no_head_norm": _plain(head_norm=lambda self, q: q),
    "no_clamp": _with_limit(None),
    "shared_expert_not_clamped": _with_limit(None, shared_only=True),
    "gate_clamped_below_too": _with_limit(1.0, both_sides=True),
    "bias_in_the_weights": _plain(shares=_shares_with_bias),
    "bias_left_out": _plain(
        choose_experts=lambda self, s, tokens, layer: (
            Plain.choose_experts(self, s, tokens, layer)
            if layer < self.config.num_hash_layers
            else s.topk(self.config.experts_per_token).indices
        )
    ),
    "hash_layers_by_score": _plain(
        choose_experts=lambda self, s, tokens, layer: (
            s.topk(self.config.experts_per_token).indices
            if layer < self.config.num_hash_layers
            else Plain.choose_experts(self, s, tokens, layer)
        )
    ),
    "no_routed_scaling": _plain(routed_scaling=lambda self: 1.0),
    "small_theta_in_compressed_layers": _config(compress_rope_theta=10000.0),
    "no_yarn": _config(yarn=None),
    "yarn_in_window_layers_too": _plain(frequencies=_stretch_all),
    "rotary_half_split": _plain(rotate=_half_split),
    "rotary_part_first": _plain(rotate=_rotary_first),
    "no_inverse_rotation": _plain(unrotate=lambda self, o, positions, ratio: o),
    "entry_rotated_at_its_last_token": _plain(
        entry_positions=lambda self, num, ratio: Plain.entry_positions(self, num, ratio) + ratio - 1
    ),
    "entry_rotated_at_its_number": _plain(entry_positions=lambda self, num, ratio: torch.arange(num)),
    "no_ape": _plain(add_ape=lambda self, g, p: g),
    "c4a_halves_exchanged": _plain(overlap=_exchanged),
    "c4a_without_overlap": _plain(overlap=lambda self, k, g, width: (k[..., width:], g[..., width:])),
    "all_entries": _config(index_topk=1 << 20),
    "indexer_without_relu": _plain(index_scores=lambda self, q, keys, w: torch.einsum("tj,tji,wi->tw", w, q, keys)),
    "indexer_without_weights": _plain(
        index_scores=lambda self, q, keys, w: Plain.index_scores(self, q, keys, torch.ones_like(w))
    ),
    "window_127": _plain(window=lambda self: 127),
    "window_129": _plain(window=lambda self: 129),
    "entry_seen_a_token_late": _plain(
        visible=lambda self, positions, num, ratio: Plain.visible(self, positions - 1, num, ratio)
    ),
    "entries_in_the_window_hidden": _plain(
        visible=lambda self, positions, num, ratio: Plain.visible(self, positions - 127, num, ratio)
    ),
}
