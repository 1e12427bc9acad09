"""From training's parameters to the released names and bytes, and to the plain values that those bytes mean."""

from __future__ import annotations

import torch
from torch import Tensor

from . import packing
from .network import Network


def released(network: Network) -> dict[str, Tensor]:
    """fp32 (int64 for expert tables) values under the released names, unpacked."""
    c = network.shape
    out: dict[str, Tensor] = {}
    for name in network.names:
        value = network.w(name).detach().float().cpu()
        stem, _, leaf = name.rpartition(".")
        if leaf not in ("w13", "w2"):
            out[name] = value
            continue
        for e, matrix in enumerate(value):
            owner = f"{stem}.{e}" if stem.endswith(".experts") else stem
            parts = {"w1": matrix[: c.width], "w3": matrix[c.width :]} if leaf == "w13" else {"w2": matrix}
            for part, w in parts.items():
                out[f"{owner}.{part}.weight"] = w.contiguous()
    for layer in range(len(c.ratios)):
        gate = f"layers.{layer}.ffn.gate."
        if layer < c.hash_layers:
            out[gate + "tid2eid"] = getattr(network, f"tid2eid_{layer}").cpu()
        else:
            out[gate + "bias"] = getattr(network, f"bias_{layer}").float().cpu()
    return out


def packed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Released names to stored tensors, scales beside what needs them."""
    out: dict[str, Tensor] = {}
    for name, w in values.items():
        if ".ffn.experts." in name:
            out[name], out[name.removesuffix("weight") + "scale"] = pack_fp4(w)
        elif is_fp8(name):
            out[name], out[name.removesuffix("weight") + "scale"] = pack_fp8(w)
        elif name.endswith("tid2eid"):
            out[name] = w.to(torch.int64)
        elif is_fp32(name):
            out[name] = w.float()
        else:
            out[name] = w.bfloat16()
    return {name: tensor.contiguous() for name, tensor in out.items()}


def is_fp8(name: str) -> bool:
    stem, _, leaf = name.removesuffix(".weight").rpartition(".")
    return ".shared_experts." in name or (leaf in packing.FP8_LEAVES and not stem.endswith("compressor"))


def is_fp32(name: str) -> bool:
    return "hc_" in name or name.endswith((".ape", ".attn_sink", ".bias"))


def pack_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> e4m3 codes, e8m0 scales of 128x128 blocks."""
    block = packing.FP8_BLOCK
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w, (0, -columns % block, 0, -rows % block))
    blocks = padded.unflatten(1, (-1, block)).unflatten(0, (-1, block))
    scales = packing.power_of_two_from(blocks.abs().amax((1, 3)).clamp_min(1e-4) / 448)
    codes = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :columns]
    return codes.contiguous().to(torch.float8_e4m3fn), scales.to(torch.float8_e8m0fnu)


def pack_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> two e2m1 codes a byte, the earlier in the low nibble; e8m0 scales of 32 values of a row."""
    groups = w.unflatten(1, (-1, packing.FP4_GROUP))
    scales = packing.power_of_two_from(groups.abs().amax(-1).clamp_min(6 * 2.0**-126) / 6)
    values = packing.to_e2m1((groups / scales[..., None]).flatten(1))
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.bucketize(values.abs(), magnitudes) + 8 * (values < 0).long()
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8).view(torch.int8), scales.to(torch.float8_e8m0fnu)
