"""Reading a checkpoint: every tensor that its config calls for, in released names, with its exact values.

Three dialects hold the same model: released names with fp8 and fp4 bytes and their scales, released names in plain
floats, and what transformers writes (its module names, or its mixture of both). Nothing is defaulted or passed over: a
tensor that is missing, unknown, doubled, or of another shape or dtype than its place allows ends the loading, by name.
Only `mtp.*` is skipped. Knows safetensors and number formats; not what the tensors are for.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..core.errors import CheckpointError
from .config import ModelConfig, read_json

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
FP8_BLOCK, FP4_GROUP = 128, 32

Progress = Callable[[int, int], None]
"""Called with tensors done and tensors in all."""


class Place(Enum):
    """What the released checkpoint stores somewhere; other dialects store plain floats there."""

    FP8 = "fp8"
    FP4 = "fp4"
    BF16 = "bf16"
    FP32 = "fp32"
    EXPERT_TABLE = "expert_table"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor that a config calls for."""

    shape: tuple[int, ...]
    place: Place


def tensor_table(config: ModelConfig) -> dict[str, TensorSpec]:
    """Released name -> shape and place of every tensor of the main layers, embedding and head; scales not counted."""
    d, streams, k, i = config.hidden_size, config.hc_mult, config.head_dim, config.index_dim
    table: dict[str, TensorSpec] = {}

    def add(place: Place, **shapes: tuple[int, ...]) -> None:
        for name, shape in shapes.items():
            table[prefix + name.replace("__", ".")] = TensorSpec(shape, place)

    prefix = ""
    add(Place.BF16, embed__weight=(config.vocab_size, d), head__weight=(config.vocab_size, d), norm__weight=(d,))
    add(Place.FP32, hc_head_fn=(streams, streams * d), hc_head_base=(streams,), hc_head_scale=(1,))
    mixes = (2 + streams) * streams
    for layer, ratio in enumerate(config.ratios):
        prefix = f"layers.{layer}."
        add(Place.BF16, attn_norm__weight=(d,), ffn_norm__weight=(d,))
        add(Place.FP32, hc_attn_fn=(mixes, streams * d), hc_attn_base=(mixes,), hc_attn_scale=(3,))
        add(Place.FP32, hc_ffn_fn=(mixes, streams * d), hc_ffn_base=(mixes,), hc_ffn_scale=(3,))
        prefix = f"layers.{layer}.attn."
        add(Place.FP32, attn_sink=(config.num_heads,))
        add(Place.BF16, q_norm__weight=(config.q_lora_rank,), kv_norm__weight=(k,))
        add(
            Place.FP8,
            wq_a__weight=(config.q_lora_rank, d),
            wq_b__weight=(config.num_heads * k, config.q_lora_rank),
            wkv__weight=(k, d),
            wo_a__weight=(config.o_groups * config.o_lora_rank, config.group_heads * k),
            wo_b__weight=(d, config.o_groups * config.o_lora_rank),
        )
        compressors = []
        if ratio:
            compressors.append(("compressor.", k))
        if ratio == 4:
            add(Place.FP8, indexer__wq_b__weight=(config.index_heads * i, config.q_lora_rank))
            add(Place.BF16, indexer__weights_proj__weight=(config.index_heads, d))
            compressors.append(("indexer.compressor.", i))
        for stem, width in compressors:
            prefix = f"layers.{layer}.attn.{stem}"
            columns = 2 * width if ratio == 4 else width  # at 4:1 a token has a part in two groups
            add(Place.BF16, wkv__weight=(columns, d), wgate__weight=(columns, d), norm__weight=(width,))
            add(Place.FP32, ape=(ratio, columns))
        prefix = f"layers.{layer}.ffn."
        add(Place.BF16, gate__weight=(config.num_experts, d))
        if config.is_hash_layer(layer):
            add(Place.EXPERT_TABLE, gate__tid2eid=(config.vocab_size, config.experts_per_token))
        else:
            add(Place.FP32, gate__bias=(config.num_experts,))
        experts = [("shared_experts", Place.FP8), *((f"experts.{e}", Place.FP4) for e in range(config.num_experts))]
        for stem, place in experts:
            prefix = f"layers.{layer}.ffn.{stem}."
            width = config.expert_width
            add(place, w1__weight=(width, d), w2__weight=(d, width), w3__weight=(width, d))
    return table


def load_weights(path: str | Path, config: ModelConfig, progress: Progress | None = None) -> dict[str, Tensor]:
    """All tensors of `tensor_table(config)` in released names: fp32, int64 for the expert tables; `mtp.*` left out.

    Raises:
        CheckpointError: names the file or tensor that is missing, unknown, doubled, malformed or not finite.
    """
    return dict(stream_weights(path, config, progress))


def stream_weights(
    path: str | Path, config: ModelConfig, progress: Progress | None = None
) -> Iterator[tuple[str, Tensor]]:
    """`load_weights` one tensor at a time, for a caller that packs each before the next; memory is one tensor's.

    All names, shapes and dtypes are checked before the first tensor is read.
    """
    table = tensor_table(config)
    with_files = _open(Path(path))
    sources = _sources(with_files, config)
    scales = {name: sources.pop(name) for name in list(sources) if name.endswith(".scale")}
    _refuse_differences(set(table), set(sources), set(scales))
    for name, spec in table.items():
        _check(name, spec, sources[name], scales.get(_scale_of(name)), config)
    for done, (name, spec) in enumerate(table.items(), start=1):
        try:
            value = _read(name, spec, sources[name], scales.get(_scale_of(name)), config)
        except SafetensorError as error:
            raise CheckpointError(f"{name}: {error}") from error
        yield name, value
        if progress is not None:
            progress(done, len(table))


# ---- files and names ----


@dataclass(frozen=True)
class _Source:
    """Where a tensor's bytes are: one of a file's tensors, or a part of one that holds all experts."""

    file: Any
    stored_name: str
    dtype: str
    shape: tuple[int, ...]
    part: tuple[int, slice] | None = None

    def tensor(self) -> Tensor:
        if self.part is None:
            whole: Tensor = self.file.get_tensor(self.stored_name)
            return whole
        piece: Tensor = self.file.get_slice(self.stored_name)[self.part]
        return piece


def _open(path: Path) -> dict[str, Any]:
    """Stored name -> opened file. safetensors itself bounds and checks the headers; nothing is unpickled."""
    index = path / INDEX_FILE
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict) or not listed:
            raise CheckpointError(f"{index}: no weight_map")
        for name, file in listed.items():
            if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors"):
                raise CheckpointError(f"{index}: {name} lies in {file!r}, which is no safetensors file of this folder")
        files = sorted(set(listed.values()))
    elif (path / SINGLE_FILE).is_file():
        listed, files = None, [SINGLE_FILE]
    else:
        raise CheckpointError(f"{path}: neither {INDEX_FILE} nor {SINGLE_FILE}")
    where: dict[str, Any] = {}
    for file in files:
        try:
            opened: Any = safe_open(path / file, framework="pt", device="cpu")
            names = opened.keys()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path / file}: {error}") from error
        for name in names:
            if name in where:
                raise CheckpointError(f"{path}: {name} is stored twice")
            if listed is not None and listed.get(name) != file:
                raise CheckpointError(f"{path / file}: holds {name}, which the index does not place there")
            where[name] = opened
    if listed is not None and (gone := sorted(set(listed) - set(where))):
        raise CheckpointError(f"{path / listed[gone[0]]}: {gone[0]} is missing, though the index places it there")
    return where


_HF_TOP = {"lm_head": "head", "embed_tokens": "embed"}
_HF_COMPRESSOR = {"kv_proj": "wkv", "gate_proj": "wgate", "position_bias": "ape", "kv_norm": "norm"}
_HF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.sinks": "attn.attn_sink",
    "self_attn.q_a_proj": "attn.wq_a",
    "self_attn.q_a_norm": "attn.q_norm",
    "self_attn.q_b_proj": "attn.wq_b",
    "self_attn.kv_proj": "attn.wkv",
    "self_attn.kv_norm": "attn.kv_norm",
    "self_attn.o_a_proj": "attn.wo_a",
    "self_attn.o_b_proj": "attn.wo_b",
    "self_attn.compressor.indexer.q_b_proj": "attn.indexer.wq_b",
    "self_attn.compressor.indexer.scorer.weights_proj": "attn.indexer.weights_proj",
    "mlp.gate": "ffn.gate",
    "mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "mlp.gate.tid2eid": "ffn.gate.tid2eid",
    "mlp.shared_experts.gate_proj": "ffn.shared_experts.w1",
    "mlp.shared_experts.down_proj": "ffn.shared_experts.w2",
    "mlp.shared_experts.up_proj": "ffn.shared_experts.w3",
    # transformers' save_pretrained renames one norm too far.
    "attn.norm": "attn.kv_norm",
    **{f"{part}_hc.{leaf}": f"hc_{part}_{leaf}" for part in ("attn", "ffn") for leaf in ("fn", "base", "scale")},
    **{f"self_attn.compressor.{hf}": f"attn.compressor.{ours}" for hf, ours in _HF_COMPRESSOR.items()},
    **{f"self_attn.compressor.indexer.{hf}": f"attn.indexer.compressor.{ours}" for hf, ours in _HF_COMPRESSOR.items()},
}
_ALL_EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")
_LAYER_NAME = re.compile(r"(layers\.\d+\.)(.+)")


def released_name(name: str) -> str:
    """A stored name in released spelling; an unknown one comes back as it is, less `model.`."""
    name = name.removeprefix("model.")
    if name.startswith("hc_head.hc_"):
        return name.replace("hc_head.hc_", "hc_head_", 1)
    stem, suffix = name, ""
    for known in (".weight", ".scale"):
        if name.endswith(known) and not name.endswith(f"_hc{known}"):
            stem, suffix = name.removesuffix(known), known
    if match := _LAYER_NAME.fullmatch(stem):
        return match[1] + _HF_LAYER.get(match[2], match[2]) + suffix
    return _HF_TOP.get(stem, stem) + suffix


def _sources(where: Mapping[str, Any], config: ModelConfig) -> dict[str, _Source]:
    """Released name -> where its bytes are."""
    sources: dict[str, _Source] = {}

    def add(name: str, source: _Source) -> None:
        if name in sources:
            raise CheckpointError(f"{name} is stored twice: as {sources[name].stored_name}, {source.stored_name}")
        sources[name] = source

    for stored, file in where.items():
        bare = stored.removeprefix("model.")
        if bare.startswith("mtp."):
            continue
        view = file.get_slice(stored)
        dtype, shape = str(view.get_dtype()), tuple(int(size) for size in view.get_shape())
        if not (match := _ALL_EXPERTS.fullmatch(bare)):
            add(released_name(stored), _Source(file, stored, dtype, shape))
            continue
        width, d = config.expert_width, config.hidden_size
        rows = (
            {"w1": slice(0, width), "w3": slice(width, 2 * width)} if match[2] == "gate_up_proj" else {"w2": slice(d)}
        )
        whole = (config.num_experts, 2 * width, d) if match[2] == "gate_up_proj" else (config.num_experts, d, width)
        if shape != whole:
            raise CheckpointError(f"{stored}: shape {list(shape)}, not {list(whole)}")
        for e in range(config.num_experts):
            for leaf, cut in rows.items():
                name = f"layers.{match[1]}.ffn.experts.{e}.{leaf}.weight"
                add(name, _Source(file, stored, dtype, (cut.stop - (cut.start or 0), shape[2]), (e, cut)))
    return sources


def _scale_of(name: str) -> str:
    return name.removesuffix(".weight") + ".scale"


def _refuse_differences(wanted: set[str], there: set[str], scales: set[str]) -> None:
    def some(names: set[str]) -> str:
        ordered = sorted(names)
        return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")

    if missing := wanted - there:
        raise CheckpointError(f"missing tensors: {some(missing)}")
    if unknown := (there - wanted) | (scales - {_scale_of(name) for name in wanted}):
        raise CheckpointError(f"tensors that this config does not call for: {some(unknown)}")


# ---- bytes to values ----

_FLOATS = frozenset({"F32", "BF16", "F16"})
_SCALES = frozenset({"F8_E8M0", "F32"})


def _check(name: str, spec: TensorSpec, source: _Source, scale: _Source | None, config: ModelConfig) -> None:
    """Shape and dtype of a tensor and of its scale, from the headers alone."""

    def shape_is(what: str, shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        if shape != wanted:
            raise CheckpointError(f"{what}: shape {list(shape)}, not {list(wanted)}")

    def dtype_in(what: str, dtype: str, allowed: frozenset[str]) -> None:
        if dtype not in allowed:
            raise CheckpointError(f"{what}: dtype {dtype}, not one of {', '.join(sorted(allowed))}")

    form = _form(spec, source)
    if form in (Place.FP8, Place.FP4) and spec.place is Place.FP4 and config.expert_dtype not in (None, form.value):
        raise CheckpointError(f"{name}: stored as {form.value}, but expert_dtype says {config.expert_dtype}")
    if form is Place.FP4:
        shape_is(name, source.shape, (spec.shape[0], spec.shape[1] // 2))
        scale_shape, scale_dtypes = (spec.shape[0], spec.shape[1] // FP4_GROUP), frozenset({"F8_E8M0"})
        if spec.shape[1] % FP4_GROUP:
            raise CheckpointError(f"{name}: {spec.shape[1]} columns are no whole groups of {FP4_GROUP}")
    elif form is Place.FP8:
        shape_is(name, source.shape, spec.shape)
        scale_shape = (-(-spec.shape[0] // FP8_BLOCK), -(-spec.shape[1] // FP8_BLOCK))
        scale_dtypes = _SCALES
    else:
        shape_is(name, source.shape, spec.shape)
        allowed = frozenset({"I64", "I32"}) if form is Place.EXPERT_TABLE else _FLOATS
        dtype_in(name, source.dtype, allowed)
        if scale is not None:
            raise CheckpointError(f"{_scale_of(name)}: a scale, though {name} is {source.dtype}")
        return
    if scale is None:
        raise CheckpointError(f"missing tensors: {_scale_of(name)}, the scale of a {form.value} tensor")
    shape_is(_scale_of(name), scale.shape, scale_shape)
    dtype_in(_scale_of(name), scale.dtype, scale_dtypes)


def _form(spec: TensorSpec, source: _Source) -> Place:
    """How a tensor is stored here: its own dtype decides, as far as its place allows."""
    if spec.place is Place.FP4 and source.dtype in ("I8", "U8"):
        return Place.FP4
    if spec.place in (Place.FP4, Place.FP8) and source.dtype == "F8_E4M3":
        return Place.FP8
    return Place.EXPERT_TABLE if spec.place is Place.EXPERT_TABLE else Place.FP32


def _read(name: str, spec: TensorSpec, source: _Source, scale: _Source | None, config: ModelConfig) -> Tensor:
    stored = source.tensor()
    form = _form(spec, source)
    # What is returned is a copy in any case: nothing may hang on the mapped file.
    if form is Place.EXPERT_TABLE:
        table = stored.to(torch.int64, copy=True)
        if int(table.min()) < 0 or int(table.max()) >= config.num_experts:
            raise CheckpointError(f"{name}: names experts outside 0 to {config.num_experts - 1}")
        return table
    if scale is None:
        value = stored.to(torch.float32, copy=True)
    else:
        factors = scale_values(scale.tensor(), _scale_of(name))
        value = unpack_fp4(stored, factors) if form is Place.FP4 else unpack_fp8(stored, factors)
    if not bool(torch.isfinite(value).all()):
        raise CheckpointError(f"{name}: holds values that are not finite")
    return value


def scale_values(scale: Tensor, name: str) -> Tensor:
    """Scales as fp32: e8m0 byte s is 2^(s-127), fp32 stays.

    Raises:
        CheckpointError: an e8m0 byte is 255 (NaN), or an fp32 scale is not finite and positive.
    """
    if scale.dtype == torch.float32:
        if not bool((torch.isfinite(scale) & (scale > 0)).all()):
            raise CheckpointError(f"{name}: holds scales that are not finite and positive")
        return scale
    codes = scale.view(torch.uint8)  # reinterpreted: a numeric conversion to uint8 would destroy them
    if bool((codes == 255).any()):
        raise CheckpointError(f"{name}: holds the e8m0 byte 255, which is no number")
    return scale.to(torch.float32)


def unpack_fp8(codes: Tensor, scales: Tensor) -> Tensor:
    """[out, in] e4m3 times one scale for each 128x128 block, the last of which may be partial; fp32."""
    value = codes.to(torch.float32)
    for block, row in enumerate(scales):
        rows = value[block * FP8_BLOCK : (block + 1) * FP8_BLOCK]
        rows *= row.repeat_interleave(FP8_BLOCK)[: value.shape[1]]
    return value


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
_NIBBLES = torch.cat([_E2M1, -_E2M1])
_BYTES = torch.stack([_NIBBLES.repeat(16), _NIBBLES.repeat_interleave(16)], 1)
"""Byte -> its low nibble's value, then its high nibble's."""


def unpack_fp4(codes: Tensor, scales: Tensor) -> Tensor:
    """[out, in/2] bytes, the earlier value in the low nibble, times one scale for each 32 values of a row; fp32."""
    rows, half = codes.shape
    value = _BYTES.index_select(0, codes.view(torch.uint8).flatten().int()).view(rows, scales.shape[1], FP4_GROUP)
    value *= scales[:, :, None]
    return value.view(rows, 2 * half)
