"""Tiny random V4 checkpoints in every dialect, made so that whatever an engine ignores shows in its logits.

The attention geometry is the real one (heads of 512 with 64 rotary values, window 128, indexer heads of 128, ratios 4
and 128); everything else is tiny and differs from variant to variant. Every parameter is random, those too that a plain
initialisation leaves at 0 or 1, and every value is one that its place in a released checkpoint can store, so that the
dialects hold equal numbers. Names, shapes and byte formats are spelled out here a second time, on purpose: the loader
is not to be judged by its own table. Knows torch and safetensors; the transformers dialect is written by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

HEAD, ROPE, INDEX, WINDOW, STREAMS = 512, 64, 128, 128, 4
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


@dataclass(frozen=True)
class Variant:
    """One tiny model: what differs between them."""

    name: str
    seed: int
    ratios: tuple[int, ...]
    heads: int = 4
    groups: int = 2
    group_rank: int = 32
    query_rank: int = 32
    hidden: int = 128
    experts: int = 8
    chosen: int = 2
    width: int = 64
    hash_layers: int = 2
    index_topk: int = 16
    # With a handful of heads many scores are exactly 0 after the ReLU, and the top-k has no one answer.
    index_heads: int = 64
    swiglu_limit: float = 1.5
    routed_scaling: float = 1.5
    yarn_factor: float = 16.0
    yarn_original: int = 512
    vocab: int = 512
    iterations: int = 20
    mtp: int = 1

    def config(self, packed: bool = False, base: bool = False) -> dict[str, Any]:
        """config.json with the released keys."""
        document: dict[str, Any] = {
            "architectures": ["DeepseekV4ForCausalLM"],
            "model_type": "deepseek_v4",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "use_cache": True,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": len(self.ratios),
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": HEAD,
            "qk_rope_head_dim": ROPE,
            "q_lora_rank": self.query_rank,
            "o_groups": self.groups,
            "o_lora_rank": self.group_rank,
            "sliding_window": WINDOW,
            "compress_ratios": [*self.ratios, *([0] * self.mtp)],
            "compress_rope_theta": 160000,
            "rope_theta": 10000,
            "rope_scaling": {
                "type": "yarn",
                "factor": self.yarn_factor,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": self.yarn_original,
            },
            "max_position_embeddings": 8192,
            "index_n_heads": self.index_heads,
            "index_head_dim": INDEX,
            "index_topk": self.index_topk,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "num_experts_per_tok": self.chosen,
            "moe_intermediate_size": self.width,
            "num_hash_layers": self.hash_layers,
            "scoring_func": "sqrtsoftplus",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "routed_scaling_factor": self.routed_scaling,
            "swiglu_limit": self.swiglu_limit,
            "hc_mult": STREAMS,
            "hc_sinkhorn_iters": self.iterations,
            "hc_eps": 1e-6,
            "rms_norm_eps": 1e-6,
            "num_nextn_predict_layers": self.mtp,
        }
        if packed or base:
            document["expert_dtype"] = "fp8" if base else "fp4"
            document["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
                **({} if base else {"scale_fmt": "ue8m0"}),
            }
        return document


# ---- what can be stored ----


def power_of_two_from(x: Tensor) -> Tensor:
    """The smallest power of two >= x, taken from the bits: a float logarithm is wrong just above powers of two."""
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (fraction == 0.5).int())


def to_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> e4m3 codes and a power of two for each 128x128 block; last blocks may be partial."""
    rows, columns = w.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = w
    blocks = padded.view(padded.shape[0] // 128, 128, padded.shape[1] // 128, 128)
    scales = power_of_two_from(blocks.abs().amax((1, 3)).clamp_min(1e-4) / 448)
    codes = (blocks / scales[:, None, :, None]).view_as(padded)[:rows, :columns]
    return codes.clamp(-448, 448).to(torch.float8_e4m3fn), scales


def from_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    grid = scales.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return codes.float() * grid[: codes.shape[0], : codes.shape[1]]


def to_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """[..., in] -> 4-bit codes, one a byte, and a power of two for each 32; to nearest, ties to the even code."""
    groups = w.unflatten(-1, (-1, 32))
    scales = power_of_two_from(groups.abs().amax(-1).clamp_min(6 * 2.0**-126) / 6)
    scaled = groups / scales[..., None]
    distance = (scaled.abs()[..., None] - E2M1).abs().double()
    # Among equally near codes the even one wins: the odd one is a hair farther away.
    code = (distance + torch.tensor([0.0, 1e-12] * 4, dtype=torch.float64)).argmin(-1)
    code = code + 8 * ((scaled < 0) & (code > 0))
    return code.flatten(-2).to(torch.uint8), scales


def from_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    value = E2M1[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0)
    return value * scales.float().repeat_interleave(32, -1)


# ---- tensors ----

Shapes = dict[str, tuple[tuple[int, ...], str]]


def layer_shapes(v: Variant, prefix: str, ratio: int, hashed: bool) -> Shapes:
    """Released name -> shape and place ("fp8", "fp4", "bf16", "fp32", "table") of one layer's tensors."""
    d, streams = v.hidden, STREAMS
    mix = (2 + streams) * streams
    out: Shapes = {
        "attn_norm.weight": ((d,), "bf16"),
        "ffn_norm.weight": ((d,), "bf16"),
        "attn.attn_sink": ((v.heads,), "fp32"),
        "attn.wq_a.weight": ((v.query_rank, d), "fp8"),
        "attn.q_norm.weight": ((v.query_rank,), "bf16"),
        "attn.wq_b.weight": ((v.heads * HEAD, v.query_rank), "fp8"),
        "attn.wkv.weight": ((HEAD, d), "fp8"),
        "attn.kv_norm.weight": ((HEAD,), "bf16"),
        "attn.wo_a.weight": ((v.groups * v.group_rank, v.heads * HEAD // v.groups), "fp8"),
        "attn.wo_b.weight": ((d, v.groups * v.group_rank), "fp8"),
        "ffn.gate.weight": ((v.experts, d), "bf16"),
        "ffn.shared_experts.w1.weight": ((v.width, d), "fp8"),
        "ffn.shared_experts.w2.weight": ((d, v.width), "fp8"),
        "ffn.shared_experts.w3.weight": ((v.width, d), "fp8"),
    }
    for part in ("attn", "ffn"):
        out[f"hc_{part}_fn"] = ((mix, streams * d), "fp32")
        out[f"hc_{part}_base"] = ((mix,), "fp32")
        out[f"hc_{part}_scale"] = ((3,), "fp32")
    if hashed:
        out["ffn.gate.tid2eid"] = ((v.vocab, v.chosen), "table")
    else:
        out["ffn.gate.bias"] = ((v.experts,), "fp32")
    for e in range(v.experts):
        out[f"ffn.experts.{e}.w1.weight"] = ((v.width, d), "fp4")
        out[f"ffn.experts.{e}.w2.weight"] = ((d, v.width), "fp4")
        out[f"ffn.experts.{e}.w3.weight"] = ((v.width, d), "fp4")
    compressors = {0: [], 128: [("attn.compressor.", HEAD, 1)], 4: [("attn.compressor.", HEAD, 2)]}[ratio]
    if ratio == 4:
        compressors.append(("attn.indexer.compressor.", INDEX, 2))
        out["attn.indexer.wq_b.weight"] = ((v.index_heads * INDEX, v.query_rank), "fp8")
        out["attn.indexer.weights_proj.weight"] = ((v.index_heads, d), "bf16")
    for stem, width, halves in compressors:
        out[stem + "wkv.weight"] = ((halves * width, d), "bf16")
        out[stem + "wgate.weight"] = ((halves * width, d), "bf16")
        out[stem + "ape"] = ((ratio, halves * width), "fp32")
        out[stem + "norm.weight"] = ((width,), "bf16")
    return {prefix + name: spec for name, spec in out.items()}


def head_shapes(v: Variant, prefix: str) -> Shapes:
    return {
        prefix + "hc_head_fn": ((STREAMS, STREAMS * v.hidden), "fp32"),
        prefix + "hc_head_base": ((STREAMS,), "fp32"),
        prefix + "hc_head_scale": ((1,), "fp32"),
        prefix + "norm.weight": ((v.hidden,), "bf16"),
    }


def all_shapes(v: Variant) -> Shapes:
    d = v.hidden
    out: Shapes = {"embed.weight": ((v.vocab, d), "bf16"), "head.weight": ((v.vocab, d), "bf16")}
    out |= head_shapes(v, "")
    for layer, ratio in enumerate(v.ratios):
        out |= layer_shapes(v, f"layers.{layer}.", ratio, layer < v.hash_layers)
    for m in range(v.mtp):
        prefix = f"mtp.{m}."
        out |= layer_shapes(v, prefix, 0, False) | head_shapes(v, prefix)
        out |= {prefix + name: ((d, d), "fp8") for name in ("e_proj.weight", "h_proj.weight")}
        out |= {prefix + name: ((d,), "bf16") for name in ("enorm.weight", "hnorm.weight")}
    return out


def random_tensor(v: Variant, name: str, shape: tuple[int, ...], place: str, g: torch.Generator) -> Tensor:
    """A value for which every use and misuse of the tensor shows, rounded to what the place can store."""
    if place == "table":
        return torch.rand(v.vocab, v.experts, generator=g).topk(v.chosen).indices  # distinct experts for each id
    draw = torch.randn(shape, generator=g)
    leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if leaf.endswith("scale"):
        return 0.7 + 0.2 * draw
    if leaf.endswith("_base"):
        w = 0.7 * draw
        if shape[0] > STREAMS:
            # Mixing matrices on which Sinkhorn has not converged after all rounds: their order and number show.
            w[2 * STREAMS :] *= 5
        return w
    if leaf == "ape":
        return 0.7 * draw
    if leaf == "attn_sink":
        return draw
    if leaf == "bias":
        return 0.2 * draw
    if leaf.endswith("norm"):
        w = 1 + 0.2 * draw
    elif leaf == "embed":
        w = draw
    else:
        w = draw * shape[-1] ** -0.5
    if place == "fp8":
        return from_fp8(*to_fp8(w))
    if place == "fp4":
        return from_fp4(*to_fp4(w))
    return w.bfloat16().float() if place == "bf16" else w


def random_weights(v: Variant) -> dict[str, Tensor]:
    """Released name -> value in fp32 (int64 for tables), mtp.* included."""
    g = torch.Generator().manual_seed(v.seed)
    return {name: random_tensor(v, name, shape, place, g) for name, (shape, place) in all_shapes(v).items()}


# ---- dialects ----


def released_tensors(v: Variant, weights: Mapping[str, Tensor], packed: bool, base: bool = False) -> dict[str, Tensor]:
    """Tensors as stored. Packed: fp8 and fp4 bytes with e8m0 scales; base: fp8 everywhere with fp32 scales."""
    out: dict[str, Tensor] = {}
    for name, (_, place) in all_shapes(v).items():
        w = weights[name]
        if base and place in ("fp8", "fp4"):
            codes, scales = to_fp8(w)
            # fp4 values need not fit one scale per 128x128; what is stored then is another model, equal to itself.
            assert place == "fp4" or torch.equal(from_fp8(codes, scales), w)
            out[name], out[name.removesuffix("weight") + "scale"] = codes, scales * 1.5
        elif packed and place == "fp8":
            codes, scales = to_fp8(w)
            assert torch.equal(from_fp8(codes, scales), w), name
            out[name], out[name.removesuffix("weight") + "scale"] = codes, scales.to(torch.float8_e8m0fnu)
        elif packed and place == "fp4":
            codes, scales = to_fp4(w)
            assert torch.equal(from_fp4(codes, scales), w), name
            out[name] = (codes[:, 0::2] | codes[:, 1::2] << 4).view(torch.int8)
            out[name.removesuffix("weight") + "scale"] = scales.to(torch.float8_e8m0fnu)
        else:
            out[name] = w if place in ("fp32", "table") else w.bfloat16()
    return {name: t.contiguous() for name, t in out.items()}


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], num_shards: int = 1) -> None:
    """model.safetensors, or shards with their index."""
    folder.mkdir(parents=True, exist_ok=True)
    if num_shards == 1:
        save_file(dict(tensors), folder / "model.safetensors", metadata={"format": "pt"})
        return
    names = list(tensors)
    place: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[shard::num_shards]}
        save_file(part, folder / file, metadata={"format": "pt"})
        place |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(t.nbytes for t in tensors.values())}, "weight_map": place}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_released(
    folder: Path,
    v: Variant,
    weights: Mapping[str, Tensor],
    packed: bool = False,
    base: bool = False,
    num_shards: int = 1,
) -> Path:
    """A checkpoint with released names and config keys; plain (bf16 and fp32), packed or base."""
    write_tensors(folder, released_tensors(v, weights, packed, base), num_shards)
    (folder / "config.json").write_text(json.dumps(v.config(packed, base), indent=2))
    return folder


def oracle_model(released: Path) -> Any:
    """transformers' own model of a plain released checkpoint, fp32, eager; it must have read every tensor."""
    from transformers import DeepseekV4ForCausalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model, info = DeepseekV4ForCausalLM.from_pretrained(
        released, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info.values()), info
    return model.eval()


def write_transformers(folder: Path, released: Path) -> Path:
    """What transformers writes of the same model."""
    oracle_model(released).save_pretrained(folder)
    return folder
