"""config.json in both dialects, and what is refused instead of being assumed."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle.variants import BY_NAME

from headrace.core.errors import ConfigError
from headrace.model.config import MAX_JSON_BYTES, LayerKind, ModelConfig, YarnConfig

V = BY_NAME["every_kind"]


def released(**changes: Any) -> dict[str, Any]:
    """A released config with changes; None takes a key away."""
    document = V.config(packed=True) | changes
    return {key: value for key, value in document.items() if value is not None}


def as_transformers(**changes: Any) -> dict[str, Any]:
    """The same settings as transformers spells them."""
    document = released()
    for key in ("compress_ratios", "num_hash_layers", "rope_scaling", "expert_dtype", "quantization_config"):
        del document[key]
    document |= {
        "layer_types": [
            {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}[ratio]
            for ratio in V.ratios
        ],
        "mlp_layer_types": ["hash_moe"] * 2 + ["moe"] * 4,
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": 10000, "partial_rotary_factor": 0.125},
            "compress": {
                "rope_type": "yarn",
                "rope_theta": 160000,
                "attention_factor": 1.0,
                "factor": 16.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "original_max_position_embeddings": 512,
            },
        },
    }
    document |= changes
    return {key: value for key, value in document.items() if value is not None}


def test_the_released_dialect_is_read():
    """Every setting, the schedule without its MTP entry."""
    config = ModelConfig.from_dict(released())
    assert config.ratios == (0, 128, 4, 128, 4, 0)
    assert config.kinds[1:3] == (LayerKind.C128A, LayerKind.C4A)
    assert config.yarn == YarnConfig(16.0, 32.0, 1.0, 512)
    assert (config.rope_theta, config.compress_rope_theta) == (10000.0, 160000.0)
    assert (config.head_dim, config.rope_dim, config.index_dim, config.window) == (512, 64, 128, 128)
    assert (config.num_mtp_layers, config.num_hash_layers, config.expert_dtype) == (1, 2, "fp4")
    assert [config.is_hash_layer(layer) for layer in range(3)] == [True, True, False]
    assert (config.bos_token_id, config.eos_token_ids) == (0, (1,))
    assert config.group_heads == 2


def test_both_dialects_say_the_same():
    assert ModelConfig.from_dict(as_transformers()) == ModelConfig.from_dict(
        released(expert_dtype=None, quantization_config=None)
    )


def test_a_schedule_without_mtp_entries_is_read():
    """Exports drop what stands for the MTP layer."""
    assert ModelConfig.from_dict(released(compress_ratios=list(V.ratios))).ratios == V.ratios


def test_flat_rope_parameters_describe_the_compressed_layers():
    """As transformers itself folds them."""
    flat = as_transformers()["rope_parameters"]["compress"] | {"rope_theta": 1}
    document = as_transformers(rope_parameters=flat, rope_theta=10000, compress_rope_theta=160000)
    assert ModelConfig.from_dict(document) == ModelConfig.from_dict(as_transformers())


@pytest.mark.parametrize("scaling", [None, {"type": "default"}])
def test_no_scaling_is_plain_rotation(scaling: dict[str, Any] | None):
    assert ModelConfig.from_dict(released(rope_scaling=scaling)).yarn is None


REFUSED = [
    ({"compress_ratios": None}, "compress_ratios"),
    ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for 6 layers"),
    ({"compress_ratios": [0, 128, 4, 128, 4, 0, 0, 0]}, "compress_ratios has 8 entries"),
    ({"compress_ratios": [0, 128, 4, 128, 4, 2]}, "compress_ratios holds 2"),
    ({"compress_ratios": [0, 128, 4, 128, 4, [4]]}, "compress_ratios holds"),
    ({"compress_ratios": [0, 128, 4, 128, 4, False]}, "compress_ratios holds False"),
    ({"compress_ratios": [0, 128, 4, 128, 4, 0, 4]}, "MTP"),
    ({"compress_ratios": "0,4"}, "compress_ratios is '0,4', not a list"),
    ({"layer_types": ["sliding_attention"] * 6}, "contradict"),
    ({"num_hash_layers": None}, "num_hash_layers"),
    ({"num_hash_layers": 7}, "num_hash_layers is 7"),
    ({"num_hash_layers": True}, "num_hash_layers is True"),
    ({"mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3}, "contradict"),
    ({"model_type": "deepseek_v41"}, "deepseek_v41"),
    ({"model_type": None}, "model_type is missing"),
    ({"expert_dtype": "int4"}, "expert_dtype is 'int4'"),
    ({"quantization_config": {"quant_method": "awq"}}, "quant_method"),
    ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [64, 64]}}, "weight_block_size"),
    (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "expert_dtype": "fp8"}},
        "contra",
    ),
    ({"head_dim": 256}, "head_dim is 256"),
    ({"head_dim": None}, "head_dim is missing"),
    ({"qk_rope_head_dim": 32}, "qk_rope_head_dim is 32"),
    ({"qk_rope_head_dim": None}, "partial_rotary_factor is missing"),
    ({"index_head_dim": 64}, "index_head_dim"),
    ({"sliding_window": 256}, "sliding_window"),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"n_shared_experts": 2}, "n_shared_experts"),
    ({"scoring_func": "softmax"}, "scoring_func"),
    ({"norm_topk_prob": False}, "norm_topk_prob"),
    ({"tie_word_embeddings": True}, "tie_word_embeddings"),
    ({"o_groups": 3}, "o_groups 3"),
    ({"num_experts_per_tok": 9}, "num_experts_per_tok 9"),
    ({"index_topk": 0}, "index_topk is 0"),
    ({"index_topk": None}, "index_topk is missing"),
    ({"swiglu_limit": None}, "swiglu_limit is missing"),
    ({"swiglu_limit": float("nan")}, "swiglu_limit is nan"),
    ({"routed_scaling_factor": "1.5"}, "routed_scaling_factor"),
    ({"vocab_size": 1.5}, "vocab_size is 1.5"),
    ({"compress_rope_theta": None}, "compress_rope_theta is missing"),
    ({"rope_scaling": {"type": "linear", "factor": 4}}, "linear"),
    ({"rope_scaling": V.config()["rope_scaling"] | {"mscale": 1.0}}, "mscale"),
    ({"rope_scaling": V.config()["rope_scaling"] | {"attention_factor": 1.3}}, "attention_factor"),
    ({"rope_scaling": {"type": "yarn", "factor": 16}}, "rope_scaling.beta_fast is missing"),
    ({"eos_token_id": []}, "eos_token_id"),
    ({"eos_token_id": 512}, "eos_token_id 512 lies outside"),
    ({"hidden_size": 144}, "divisible by 32"),
]


@pytest.mark.parametrize(
    ("changes", "named"), REFUSED, ids=[f"{next(iter(c))}-{i}" for i, (c, _) in enumerate(REFUSED)]
)
def test_what_is_missing_or_not_v4_is_refused_by_name(changes: dict[str, Any], named: str):
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(released(**changes))
    assert named in str(error.value)


REFUSED_OF_TRANSFORMERS = [
    ({"layer_types": None}, "neither compress_ratios nor layer_types"),
    ({"layer_types": ["full_attention"] * 6}, "full_attention"),
    ({"layer_types": ["sliding_attention"] * 5}, "layer_types has 5 entries"),
    ({"mlp_layer_types": ["moe", "hash_moe", *["moe"] * 4]}, "leading hash_moe"),
    ({"mlp_layer_types": ["moe"]}, "mlp_layer_types has 1 entries"),
    ({"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates.compressed_sparse_attention is 8"),
]


@pytest.mark.parametrize(("changes", "named"), REFUSED_OF_TRANSFORMERS)
def test_what_transformers_would_default_is_refused(changes: dict[str, Any], named: str):
    """Its default schedule is not the released one."""
    with pytest.raises(ConfigError) as error:
        ModelConfig.from_dict(as_transformers(**changes))
    assert named in str(error.value)


def test_stop_ids_come_from_the_generation_config(tmp_path: Path):
    """Where there is one; the model's own config otherwise."""
    (tmp_path / "config.json").write_text(json.dumps(released()))
    assert ModelConfig.load(tmp_path).eos_token_ids == (1,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7, 1]}))
    assert ModelConfig.load(tmp_path).eos_token_ids == (1, 7)
    assert ModelConfig.load(tmp_path / "config.json").eos_token_ids == (1, 7)


@pytest.mark.parametrize("content", ["", "[]", "{", "[" * 100_000, "\x00"])
def test_a_file_that_is_no_json_object_is_refused(tmp_path: Path, content: str):
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_missing_or_endless_file_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelConfig.load(tmp_path)
    (tmp_path / "config.json").write_bytes(b" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(ConfigError, match="longer than"):
        ModelConfig.load(tmp_path)


def test_reading_changes_nothing():
    document = as_transformers()
    before = copy.deepcopy(document)
    ModelConfig.from_dict(document)
    assert document == before
