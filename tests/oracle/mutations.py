"""Mistakes that V4 invites, each put into our own model: by its settings, its weights, or one patched step.

Each takes a `Bench` and returns the model to judge. Steps that are one C function (attention, the indexer's choice) are
first replaced by slow copies with a knob, here; `test_mutations.py` shows that the copies themselves are right.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.kernels import cpu
from headrace.model import transformer
from headrace.model.config import ModelConfig

from .ours import Ours


@dataclass
class Bench:
    """What a mutation may touch; patches end with the test."""

    config: ModelConfig
    weights: dict[str, Tensor]
    patch: pytest.MonkeyPatch

    def ours(self) -> Ours:
        return Ours.of(self.config, self.weights)

    def settings(self, **changes: Any) -> Ours:
        self.config = replace(self.config, **changes)
        return self.ours()

    def weight(self, ending: str, change: Callable[[Tensor], Tensor]) -> Ours:
        """Change every tensor whose name ends so."""
        changed = {name: change(w) for name, w in self.weights.items() if name.endswith(ending)}
        assert changed, ending
        self.weights = self.weights | changed
        return self.ours()

    def step(self, name: str, make: Callable[[Any], Any]) -> Ours:
        """Replace a kernel by `make(kernel)`."""
        self.patch.setattr(cpu, name, make(getattr(cpu, name)))
        return self.ours()


# ---- slow copies with knobs ----


def entries_of(view: Any, pages: Tensor, numbers: Tensor) -> Tensor:
    """Values of entries by their number in a sequence."""
    per_page = view.entries_per_page
    slots = pages[numbers // per_page].long() * per_page + numbers % per_page
    return cpu.read_entries(view, slots.contiguous())


def slow_attend(window: int = 128, late: int = 0) -> Callable[..., Tensor]:
    """Entries show `late` tokens after they close."""

    def attend(q_THK, positions, seq, raw, window_SW, first_S, entries, history_SB, ratio, chosen, sink_H, *, bf16):
        out = torch.empty_like(q_THK)
        for t, position in enumerate(positions.tolist()):
            s = int(seq[t])
            numbers = torch.arange(max(0, position - window + 1), position + 1)
            keys = [entries_of(raw, window_SW[s], numbers - 64 * int(first_S[s]))]
            if ratio:
                seen = torch.arange((position + 1) // ratio)
                if chosen is not None:
                    seen = chosen[0][t, : int(chosen[1][t])].long()
                seen = seen[seen < max(0, position + 1 - late) // ratio]
                keys.append(entries_of(entries, history_SB[s], seen))
            keys_SK = torch.cat(keys)
            score = q_THK[t] @ keys_SK.T * 512**-0.5
            top = score.amax(1, keepdim=True)
            e = torch.exp(score - top)
            out[t] = e @ keys_SK / (e.sum(1, keepdim=True) + torch.exp(sink_H[:, None] - top))
        return out

    return attend


def slow_select(use_relu: bool) -> Callable[..., tuple[Tensor, Tensor]]:
    def select(q_TJI, w_TJ, positions, seq, keys, history_SB, topk):
        chosen = torch.full((len(positions), topk), -1, dtype=torch.int32)
        count = torch.zeros(len(positions), dtype=torch.int32)
        for t, position in enumerate(positions.tolist()):
            visible = torch.arange((position + 1) // 4)
            if len(visible) > topk:
                dots = q_TJI[t] @ entries_of(keys, history_SB[int(seq[t])], visible).T
                score = w_TJ[t] @ (torch.relu(dots) if use_relu else dots)
                visible = score.topk(topk).indices.sort().values
            count[t] = len(visible)
            chosen[t, : len(visible)] = visible.int()
        return chosen, count

    return select


# ---- hyper-connections ----


def _other_mix(change: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Callable[[Any], Any]:
    """`change` gets what hc_mix gave, and the unnormalised mixing matrices."""

    def make(kernel: Any) -> Any:
        def hc_mix(streams, raw, scale, base, iterations, eps, norm_eps):
            pre, post, comb = kernel(streams, raw, scale, base, iterations, eps, norm_eps)
            mean = streams.flatten(1).square().mean(1, keepdim=True)
            m = (raw * torch.rsqrt(mean + norm_eps))[:, 8:] * scale[2] + base[8:]
            return change(pre, post, comb, m.view(-1, 4, 4), iterations, eps)

        return hc_mix

    return make


def sinkhorn(m: Tensor, iterations: int, eps: float, last: int) -> Tensor:
    m = torch.softmax(m, -1) + eps
    m = m / (m.sum(last, keepdim=True) + eps)
    for _ in range(iterations - 1):
        for axis in (-3 - last, last):
            m = m / (m.sum(axis, keepdim=True) + eps)
    return m.contiguous()


def _norm_per_stream(bench: Bench) -> Ours:
    def split(self, streams):
        c = self.config
        normed = streams * torch.rsqrt(streams.square().mean(-1, keepdim=True) + c.norm_eps)
        raw = cpu.linear(normed.flatten(1), self.fn, bf16=False)
        pre, post, comb = cpu.hc_mix(normed, raw, self.scale, self.base, c.hc_iters, c.hc_eps, c.norm_eps)
        return cpu.hc_in(streams, pre, bf16=False), post, comb

    bench.patch.setattr(transformer.HyperConnection, "split", split)
    return bench.ours()


# ---- rotary ----


def _other_rope(forward: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Callable[[Any], Any]:
    """Rotate in another order of values."""

    def make(kernel: Any) -> Any:
        def rope_(x, positions, table, *, inverse, bf16):
            other = forward(x).contiguous()
            kernel(other, positions, table, inverse=inverse, bf16=bf16)
            x.copy_(back(other))

        return rope_

    return make


def _interleave(x: Tensor) -> Tensor:
    return torch.cat([x[..., :-64], torch.stack([x[..., -64:-32], x[..., -32:]], -1).flatten(-2)], -1)


def _deinterleave(x: Tensor) -> Tensor:
    return torch.cat([x[..., :-64], x[..., -64::2], x[..., -63::2]], -1)


def _no_inverse(kernel: Any) -> Any:
    def rope_(x, positions, table, *, inverse, bf16):
        if not inverse:
            kernel(x, positions, table, inverse=inverse, bf16=bf16)

    return rope_


def _yarn_everywhere(bench: Bench) -> Ours:
    table = transformer.rotary_table
    bench.patch.setattr(transformer, "rotary_table", lambda theta, yarn, n: table(theta, bench.config.yarn, n))
    return bench.ours()


# ---- compressor ----


def _entries_at(change: Callable[[Tensor, int], Tensor]) -> Callable[[Bench], Ours]:
    def mutate(bench: Bench) -> Ours:
        entries = transformer.Compressor.entries

        def moved(self, rows, ring, closing):
            positions = change(closing.positions_E, self.ratio).contiguous()
            return entries(self, rows, ring, replace(closing, positions_E=positions))

        bench.patch.setattr(transformer.Compressor, "entries", moved)
        return bench.ours()

    return mutate


def _exchange_halves(bench: Bench) -> Ours:
    for name, w in list(bench.weights.items()):
        if ".compressor.w" in name and w.shape[0] in (1024, 256):
            bench.weights[name] = w.roll(w.shape[0] // 2, 0)
        elif name.endswith(".compressor.ape") and w.shape[0] == 4:
            bench.weights[name] = w.roll(w.shape[1] // 2, 1)
    return bench.ours()


def _no_overlap(kernel: Any) -> Any:
    def pool_rows(addresses, width, columns, *, overlap):
        if overlap:
            addresses = addresses.clone()
            addresses[:, :4] = 0
        return kernel(addresses, width, columns, overlap=overlap)

    return pool_rows


# ---- experts ----


def _shared_unclamped(bench: Bench) -> Ours:
    expert = transformer.Experts._expert

    def unclamped(self, x, weights):
        if weights is not self.shared:
            return expert(self, x, weights)
        a, b = cpu.linear(x, weights[0], bf16=False).chunk(2, 1)
        return cpu.linear((torch.nn.functional.silu(a) * b).contiguous(), weights[1], bf16=False)

    bench.patch.setattr(transformer.Experts, "_expert", unclamped)
    return bench.ours()


def _clamp_below(kernel: Any) -> Any:
    def swiglu(ab, limit, *, bf16):
        a, b = ab.chunk(2, 1)
        return kernel(torch.cat([a.clamp(min=-limit), b], 1), limit, bf16=bf16)

    return swiglu


def _bias_in_weights(kernel: Any) -> Any:
    def gate(logits, bias, fixed, k, scaling, *, normalise):
        ids, weights = kernel(logits, bias, fixed, k, scaling, normalise=normalise)
        if bias is not None:
            s = (torch.sqrt(torch.nn.functional.softplus(logits)) + bias).gather(1, ids.long())
            weights = s / s.sum(1, keepdim=True) * scaling
        return ids, weights

    return gate


def _hash_by_score(kernel: Any) -> Any:
    def gate(logits, bias, fixed, k, scaling, *, normalise):
        if fixed is not None:
            bias = torch.zeros(logits.shape[1])
        return kernel(logits, bias, None, k, scaling, normalise=normalise)

    return gate


# ---- pages ----


def _lose_rows(bench: Bench) -> Ours:
    """Compressor rows of earlier pieces read as zeros with equal gates."""
    ring_address = cpu.ring_address
    zeros = torch.zeros(4096)

    def address(ring, rows, positions):
        real = ring_address(ring, rows, positions)
        return real if rows.dim() == 1 else torch.full_like(real, zeros.data_ptr())

    return bench.step("ring_address", lambda _: address)


MUTATIONS: dict[str, Callable[[Bench], Ours]] = {
    "comb_not_transposed": lambda b: b.step(
        "hc_out",
        lambda kernel: lambda y, x, post, comb, *, bf16: kernel(y, x, post, comb.mT.contiguous(), bf16=bf16),
    ),
    "sinkhorn_rows_first": lambda b: b.step(
        "hc_mix", _other_mix(lambda pre, post, _, m, n, eps: (pre, post, sinkhorn(m, n, eps, last=-1)))
    ),
    "sinkhorn_one_round_less": lambda b: b.settings(hc_iters=b.config.hc_iters - 1),
    "post_without_its_two": lambda b: b.step(
        "hc_mix", _other_mix(lambda pre, post, comb, _m, _n, _eps: (pre, post / 2, comb))
    ),
    "mix_norm_per_stream": _norm_per_stream,
    "no_sink": lambda b: b.weight("attn_sink", lambda w: torch.full_like(w, -1e9)),
    "no_head_norm": lambda b: b.step(
        "rms", lambda kernel: lambda x, w, eps, *, bf16: x if w is None else kernel(x, w, eps, bf16=bf16)
    ),
    "no_clamp": lambda b: b.settings(swiglu_limit=1e9),
    "shared_expert_not_clamped": _shared_unclamped,
    "gate_clamped_below_too": lambda b: b.step("swiglu", _clamp_below),
    "bias_in_the_weights": lambda b: b.step("gate", _bias_in_weights),
    "bias_left_out": lambda b: b.weight("gate.bias", torch.zeros_like),
    "hash_layers_by_score": lambda b: b.step("gate", _hash_by_score),
    "no_routed_scaling": lambda b: b.settings(routed_scaling=1.0),
    "small_theta_in_compressed_layers": lambda b: b.settings(compress_rope_theta=10000.0),
    "no_yarn": lambda b: b.settings(yarn=None),
    "yarn_in_window_layers_too": _yarn_everywhere,
    "rotary_half_split": lambda b: b.step("rope_", _other_rope(_interleave, _deinterleave)),
    "rotary_part_first": lambda b: b.step("rope_", _other_rope(lambda x: x.roll(-64, -1), lambda x: x.roll(64, -1))),
    "no_inverse_rotation": lambda b: b.step("rope_", _no_inverse),
    "entry_rotated_at_its_last_token": _entries_at(lambda positions, ratio: positions + ratio - 1),
    "entry_rotated_at_its_number": _entries_at(lambda positions, ratio: positions // ratio),
    "no_ape": lambda b: b.weight(".ape", torch.zeros_like),
    "c4a_halves_exchanged": _exchange_halves,
    "c4a_without_overlap": lambda b: b.step("pool_rows", _no_overlap),
    "all_entries": lambda b: b.settings(index_topk=4096),
    "indexer_without_relu": lambda b: b.step("select_entries", lambda _: slow_select(use_relu=False)),
    "indexer_without_weights": lambda b: b.step(
        "select_entries", lambda kernel: lambda q, w, *rest: kernel(q, torch.ones_like(w), *rest)
    ),
    "window_127": lambda b: b.step("attend", lambda _: slow_attend(127)),
    "window_129": lambda b: b.step("attend", lambda _: slow_attend(129)),
    "entry_seen_a_token_late": lambda b: b.step("attend", lambda _: slow_attend(late=1)),
    "entries_in_the_window_hidden": lambda b: b.step("attend", lambda _: slow_attend(late=127)),
    "rolling_rows_lost": _lose_rows,
}

RIGHT: dict[str, Callable[[Bench], Ours]] = {
    "nothing": lambda b: b.ours(),
    "slow_attend": lambda b: b.step("attend", lambda _: slow_attend()),
    "slow_select": lambda b: b.step("select_entries", lambda _: slow_select(use_relu=True)),
    "other_mix": lambda b: b.step(
        "hc_mix", _other_mix(lambda pre, post, _, m, n, eps: (pre, post, sinkhorn(m, n, eps, last=-2)))
    ),
    "other_rope": lambda b: b.step("rope_", _other_rope(lambda x: x, lambda x: x)),
}
"""The same means without a mistake."""
