"""Loading: three dialects to the same values, and every defect refused by name before anything is used."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle.builder import (
    E2M1,
    Variant,
    from_fp8,
    oracle_model,
    random_weights,
    released_tensors,
    to_fp8,
    write_released,
    write_tensors,
    write_transformers,
)

from headrace.core.errors import CheckpointError
from headrace.model.checkpoint import load_weights, released_name, stream_weights, tensor_table, unpack_fp4, unpack_fp8
from headrace.model.config import ModelConfig

# Small, yet of every kind; 160 and 48 leave partial fp8 blocks.
V = Variant("loader", 21, (0, 4, 128), hidden=160, query_rank=48, width=32, experts=3, hash_layers=1, vocab=64)

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return random_weights(V)


@pytest.fixture(scope="module")
def released(weights: Tensors, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_released(tmp_path_factory.mktemp("released"), V, weights)


def same(loaded: Tensors, weights: Tensors) -> bool:
    main = {name for name in weights if not name.startswith("mtp.")}
    return loaded.keys() == main and all(torch.equal(loaded[name], weights[name]) for name in main)


def load(path: Path) -> Tensors:
    return load_weights(path, ModelConfig.load(path))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_released_names_load_to_the_exact_values(weights: Tensors, tmp_path: Path, packed: bool, num_shards: int):
    """Plain floats or packed bytes, one file or shards; every tensor but mtp.*, fp32 or int64."""
    write_released(tmp_path, V, weights, packed=packed, num_shards=num_shards)
    loaded = load(tmp_path)
    assert same(loaded, weights)
    assert loaded.keys() == tensor_table(ModelConfig.load(tmp_path)).keys()
    assert {t.dtype for name, t in loaded.items() if not name.endswith("tid2eid")} == {torch.float32}


def test_both_namings_of_transformers_load(weights: Tensors, released: Path, tmp_path: Path):
    """The mixture that save_pretrained writes, and a bare state dict with all experts in one tensor."""
    saved = write_transformers(tmp_path / "saved", released)
    names = load_file(saved / "model.safetensors").keys()
    assert "model.layers.1.attn.norm.weight" in names  # the misnamed one is what is read here
    assert same(load(saved), weights)
    state = {name: t.contiguous() for name, t in oracle_model(released).state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    write_tensors(tmp_path / "state", state)
    (tmp_path / "state" / "config.json").write_text((saved / "config.json").read_text())
    assert same(load(tmp_path / "state"), weights)


def test_base_checkpoints_load_fp8_experts_with_fp32_scales(weights: Tensors, tmp_path: Path):
    """Scales that are no powers of two multiply as they are."""
    write_released(tmp_path, V, weights, base=True)
    loaded = load(tmp_path)
    for name in ("layers.1.ffn.experts.2.w2.weight", "layers.0.attn.wo_a.weight"):
        codes, scales = to_fp8(weights[name])
        assert torch.equal(loaded[name], from_fp8(codes, scales * 1.5))


def test_bytes_unpack_to_every_value_they_can_hold():
    """All 256 fp4 bytes, low nibble first; all fp8 codes, over partial blocks."""
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    scales = torch.tensor([[1.0, 0.25]]).repeat(8, 1)
    signed = torch.cat([E2M1, -E2M1])
    wanted = torch.stack([signed.repeat(16), signed.repeat_interleave(16)], 1).view(8, 64)
    wanted[:, 32:] /= 4
    assert torch.equal(unpack_fp4(codes.view(torch.int8), scales), wanted)
    codes = torch.arange(130 * 131, dtype=torch.int64).remainder(126).to(torch.uint8).view(130, 131)
    codes = codes.view(torch.float8_e4m3fn)
    scales = torch.tensor([[1.0, 2.0], [4.0, 8.0]])
    value = unpack_fp8(codes, scales)
    assert torch.equal(value[:128, :128], codes[:128, :128].float())
    assert torch.equal(value[128:, 128:], codes[128:, 128:].float() * 8)
    assert torch.equal(value, from_fp8(codes, scales))


def test_tensors_come_one_at_a_time_with_progress(released: Path):
    """A caller may pack each before the next is read; the count says where it is."""
    config, seen = ModelConfig.load(released), []
    stream = stream_weights(released, config, lambda done, total: seen.append((done, total)))
    assert next(stream)[0] == "embed.weight"
    assert seen == []
    list(stream)
    total = len(tensor_table(config))
    assert seen == [(done, total) for done in range(1, total + 1)]


def test_a_loaded_tensor_outlives_the_file(weights: Tensors, tmp_path: Path):
    """Nothing hangs on the mapping: a file that is replaced later changes no weight."""
    write_released(tmp_path, V, weights)
    loaded = load(tmp_path)
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert same(loaded, weights)


def test_names_of_transformers_become_released_ones():
    """Spot checks where two namings are easily confused."""
    for name, wanted in {
        "lm_head.weight": "head.weight",
        "model.embed_tokens.weight": "embed.weight",
        "model.norm.weight": "norm.weight",
        "model.hc_head.hc_scale": "hc_head_scale",
        "model.layers.3.attn_hc.scale": "layers.3.hc_attn_scale",
        "model.layers.3.ffn_hc.fn": "layers.3.hc_ffn_fn",
        "model.layers.3.attn.norm.weight": "layers.3.attn.kv_norm.weight",
        "model.layers.3.attn.compressor.norm.weight": "layers.3.attn.compressor.norm.weight",
        "model.layers.3.self_attn.compressor.kv_norm.weight": "layers.3.attn.compressor.norm.weight",
        "model.layers.3.self_attn.compressor.indexer.q_b_proj.weight": "layers.3.attn.indexer.wq_b.weight",
        "model.layers.3.self_attn.compressor.indexer.position_bias": "layers.3.attn.indexer.compressor.ape",
        "model.layers.3.mlp.gate.e_score_correction_bias": "layers.3.ffn.gate.bias",
        "model.layers.3.mlp.shared_experts.up_proj.weight": "layers.3.ffn.shared_experts.w3.weight",
        "layers.3.attn.wq_a.scale": "layers.3.attn.wq_a.scale",
    }.items():
        assert released_name(name) == wanted


# ---- refusals ----


def without(name: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(name)


def changed(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


def poke(name: str, byte: int) -> Callable[[Tensors], None]:
    """Another byte somewhere in a tensor."""

    def change(tensors: Tensors) -> None:
        flat = tensors[name].clone().view(torch.uint8).flatten()
        flat[flat.numel() // 2] = byte
        tensors[name] = flat.view(tensors[name].dtype).view(tensors[name].shape)

    return change


WQ, EXPERT, GATE = "layers.1.attn.wq_b", "layers.2.ffn.experts.1.w2", "layers.0.ffn.gate"
DEFECTS: list[tuple[str, Callable[[Tensors], Any], str]] = [
    ("missing", without("layers.2.attn.compressor.ape"), "missing tensors: layers.2.attn.compressor.ape"),
    ("missing_sink", without("layers.0.attn.attn_sink"), "layers.0.attn.attn_sink"),
    ("missing_bias", without("layers.1.ffn.gate.bias"), "layers.1.ffn.gate.bias"),
    ("missing_table", without(f"{GATE}.tid2eid"), "tid2eid"),
    ("missing_scale", without(f"{WQ}.scale"), f"{WQ}.scale"),
    ("missing_expert", without(f"{EXPERT}.weight"), f"{EXPERT}.weight"),
    ("unknown", lambda t: t.update({"layers.9.attn.wq_a.weight": torch.zeros(1)}), "layers.9.attn.wq_a.weight"),
    ("unknown_scale", lambda t: t.update({"layers.0.attn.nothing.scale": torch.zeros(1)}), "nothing.scale"),
    ("bias_of_a_hash_layer", lambda t: t.update({f"{GATE}.bias": torch.zeros(3)}), f"{GATE}.bias"),
    ("doubled", lambda t: t.update({"model.norm.weight": t["norm.weight"].clone()}), "stored twice"),
    ("shape", changed("norm.weight", lambda w: w[:-1]), "norm.weight: shape [159], not [160]"),
    ("shape_fp8", changed(f"{WQ}.weight", lambda w: w.view(torch.uint8).T.view(w.dtype)), f"{WQ}.weight: shape"),
    ("shape_scale", changed(f"{WQ}.scale", lambda s: s.view(torch.uint8)[:-1].view(s.dtype)), f"{WQ}.scale: shape"),
    ("shape_fp4", changed(f"{EXPERT}.weight", lambda w: w[:, :-1]), f"{EXPERT}.weight: shape"),
    ("dtype", changed("norm.weight", lambda w: w.double()), "norm.weight: dtype F64"),
    ("dtype_of_fp8", changed(f"{WQ}.weight", lambda w: w.view(torch.int8)), f"{WQ}.weight: dtype I8"),
    ("dtype_of_scale", changed(f"{WQ}.scale", lambda s: s.view(torch.uint8)), f"{WQ}.scale: dtype U8"),
    ("dtype_of_fp4_scale", changed(f"{EXPERT}.scale", lambda s: s.float()), f"{EXPERT}.scale: dtype F32"),
    ("dtype_of_table", changed(f"{GATE}.tid2eid", lambda t: t.float()), "tid2eid: dtype F32"),
    ("scale_of_plain", lambda t: t.update({"norm.scale": torch.ones(1)}), "norm.scale"),
    ("e8m0_255", poke(f"{EXPERT}.scale", 255), f"{EXPERT}.scale: holds the e8m0 byte 255"),
    ("e4m3_nan", poke(f"{WQ}.weight", 0x7F), f"{WQ}.weight: holds values that are not finite"),
    ("bf16_inf", changed("embed.weight", lambda w: w * torch.inf), "embed.weight: holds values that are not finite"),
    ("table_too_high", changed(f"{GATE}.tid2eid", lambda t: t + 3), "tid2eid: names experts outside 0 to 2"),
    ("table_below_0", changed(f"{GATE}.tid2eid", lambda t: t - 4), "tid2eid: names experts outside"),
]


@pytest.mark.parametrize(("change", "named"), [d[1:] for d in DEFECTS], ids=[d[0] for d in DEFECTS])
def test_a_defective_tensor_is_refused_by_name(
    weights: Tensors, tmp_path: Path, change: Callable[[Tensors], Any], named: str
):
    """A tensor missing, unknown, doubled, of another shape or dtype, or holding what is no number."""
    tensors = released_tensors(V, weights, packed=True)
    change(tensors)
    write_tensors(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(V.config(packed=True)))
    with pytest.raises(CheckpointError) as error:
        load(tmp_path)
    assert named in str(error.value)


def test_experts_in_another_format_than_the_config_says_are_refused(weights: Tensors, tmp_path: Path):
    write_released(tmp_path, V, weights, packed=True)
    (tmp_path / "config.json").write_text(json.dumps(V.config(base=True)))
    with pytest.raises(CheckpointError, match="stored as fp4, but expert_dtype says fp8"):
        load(tmp_path)


def test_a_scale_beside_plain_floats_is_refused(weights: Tensors, tmp_path: Path):
    """It would mean another value than the one that is read."""
    tensors = released_tensors(V, weights, packed=False) | {f"{WQ}.scale": torch.ones(1)}
    write_tensors(tmp_path, tensors)
    (tmp_path / "config.json").write_text(json.dumps(V.config()))
    with pytest.raises(CheckpointError, match="a scale, though"):
        load(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(V.config()))
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors\.index\.json nor model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x00" * 7, b"\xff" * 64, b"\x08" + b"\x00" * 7 + b"not json", b"\x80\x02}q"]
)
def test_a_file_that_is_no_safetensors_is_refused(weights: Tensors, tmp_path: Path, content: bytes):
    """Short, with an endless header, with a broken one, or a pickle: an error, never a crash or code."""
    write_released(tmp_path, V, weights)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def test_a_truncated_file_is_refused(weights: Tensors, tmp_path: Path):
    write_released(tmp_path, V, weights)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(tmp_path)


def sharded(weights: Tensors, path: Path) -> tuple[Path, dict[str, Any]]:
    write_released(path, V, weights, num_shards=2)
    index = path / "model.safetensors.index.json"
    return index, json.loads(index.read_text())


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "weights.bin", 7])
def test_an_index_reaches_no_other_folder_and_no_other_format(weights: Tensors, tmp_path: Path, file: object):
    index, document = sharded(weights, tmp_path)
    document["weight_map"]["norm.weight"] = file
    index.write_text(json.dumps(document))
    with pytest.raises(CheckpointError, match=r"norm\.weight lies in"):
        load(tmp_path)


def test_an_index_and_its_shards_must_agree(weights: Tensors, tmp_path: Path):
    """A tensor that the index does not list, one that it lists in vain, one in two shards, a shard that is gone."""
    index, document = sharded(weights, tmp_path)
    shards = sorted(set(document["weight_map"].values()))

    def refused(match: str, **changes: object) -> None:
        index.write_text(json.dumps({"weight_map": document["weight_map"] | changes}))
        with pytest.raises(CheckpointError, match=match):
            load(tmp_path)

    refused("is missing, though the index", **{"layers.0.extra": shards[0]})
    elsewhere = shards[document["weight_map"]["norm.weight"] == shards[0]]
    refused("which the index does not place there", **{"norm.weight": elsewhere})
    kept = load_file(tmp_path / elsewhere)
    save_file(kept | {"norm.weight": weights["norm.weight"]}, tmp_path / elsewhere)
    refused("which the index does not place there|stored twice")
    (tmp_path / elsewhere).unlink()
    refused(elsewhere)


def test_an_index_without_a_map_is_refused(weights: Tensors, tmp_path: Path):
    index, _ = sharded(weights, tmp_path)
    for content in ("{}", '{"weight_map": []}', '{"weight_map": {}}'):
        index.write_text(content)
        with pytest.raises(CheckpointError, match="no weight_map"):
            load(tmp_path)
