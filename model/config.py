"""What a checkpoint's config.json says, in one spelling, checked once.

Two dialects say the same things: the released one (`compress_ratios`, `num_hash_layers`, `rope_scaling`) and what
transformers writes (`layer_types`, `mlp_layer_types`, `rope_parameters`). A setting that shapes the mathematics has no
default: a config that lacks its layer schedule, or states one that this model does not have, is refused by name.
Knows JSON and V4's rules; not tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from ..core.errors import ConfigError

MODEL_TYPE = "deepseek_v4"
MAX_JSON_BYTES = 16 << 20
"""Longest JSON file that is read; a released config has 2 KB, a shard index a few MB."""

HEAD_DIM, ROPE_DIM, INDEX_DIM, WINDOW = 512, 64, 128, 128
"""The geometry that the cache's byte formats are made for; a config with another one is refused."""

RATIO_BY_LAYER_TYPE: Mapping[str, int] = {
    "sliding_attention": 0,
    "compressed_sparse_attention": 4,
    "heavily_compressed_attention": 128,
}


class LayerKind(Enum):
    """The three classes of attention layers, by their compression ratio."""

    WINDOW_ONLY = 0
    C4A = 4
    C128A = 128


@dataclass(frozen=True)
class YarnConfig:
    """How the rotary frequencies of compressed layers are stretched. Nothing multiplies cosines or scores."""

    factor: float
    beta_fast: float
    beta_slow: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """One DeepSeek-V4 model."""

    num_layers: int
    """Main layers; `ratios` has one number for each."""
    hidden_size: int
    vocab_size: int
    num_heads: int
    head_dim: int = HEAD_DIM
    rope_dim: int = ROPE_DIM
    """The last values of a head, of an entry and of an index key that are rotated."""
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int = WINDOW
    """Raw entries that a query sees, its own included."""
    ratios: tuple[int, ...]
    """0 window only, 4 with an indexer, 128; main layers only."""
    rope_theta: float
    """Rotary base of window-only layers."""
    compress_rope_theta: float
    """Rotary base of everything in a compressed layer."""
    yarn: YarnConfig | None
    """Compressed layers only."""
    index_heads: int
    index_dim: int = INDEX_DIM
    index_topk: int
    num_experts: int
    experts_per_token: int
    num_shared_experts: int = 1
    expert_width: int
    num_hash_layers: int
    """Leading layers whose experts a table chooses by token id."""
    routed_scaling: float
    norm_topk_prob: bool = True
    swiglu_limit: float
    hc_mult: int
    """Residual streams."""
    hc_iters: int
    hc_eps: float
    norm_eps: float
    max_position: int
    num_mtp_layers: int
    bos_token_id: int
    eos_token_ids: tuple[int, ...]
    """Every id that ends a generation; from generation_config.json where there is one."""
    expert_dtype: str | None
    """"fp4", "fp8" or None: how routed experts are said to be stored. The tensors decide; this is checked."""

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        return tuple(LayerKind(ratio) for ratio in self.ratios)

    @property
    def group_heads(self) -> int:
        """Heads of one group of the output projection."""
        return self.num_heads // self.o_groups

    def is_hash_layer(self, layer: int) -> bool:
        return layer < self.num_hash_layers

    @classmethod
    def load(cls, path: str | Path) -> ModelConfig:
        """Read a checkpoint directory, or a config.json by itself.

        Raises:
            ConfigError: no such file, no JSON, or a setting that is missing, contradictory or not V4's.
        """
        path = Path(path)
        file = path / "config.json" if path.is_dir() else path
        document = read_json(file)
        generation = file.parent / "generation_config.json"
        stop = read_json(generation) if generation.is_file() else {}
        try:
            return cls.from_dict({**document, **{key: stop[key] for key in STOP_KEYS if stop.get(key) is not None}})
        except ConfigError as error:
            raise type(error)(f"{file}: {error}") from None

    @classmethod
    def from_dict(cls, config_json: Mapping[str, Any]) -> ModelConfig:
        """Build from the document of a config.json, in either dialect.

        Raises:
            ConfigError: names the key that is missing, contradictory or not V4's.
        """
        doc = _Document(config_json)
        doc.must_be("model_type", MODEL_TYPE, "V4.1 and other models have another forward pass")
        for key, only in FIXED.items():
            doc.must_be(key, only, "no released V4 has another value, and the forward pass is written for it", True)
        num_layers = doc.count("num_hidden_layers")
        num_mtp_layers = doc.count("num_nextn_predict_layers", least=0, default=0)
        rope_theta, compress_rope_theta, yarn = _rope(doc)
        config = cls(
            num_layers=num_layers,
            hidden_size=doc.count("hidden_size"),
            vocab_size=doc.count("vocab_size"),
            num_heads=doc.count("num_attention_heads"),
            q_lora_rank=doc.count("q_lora_rank"),
            o_groups=doc.count("o_groups"),
            o_lora_rank=doc.count("o_lora_rank"),
            ratios=_ratios(doc, num_layers, num_mtp_layers),
            rope_theta=rope_theta,
            compress_rope_theta=compress_rope_theta,
            yarn=yarn,
            index_heads=doc.count("index_n_heads"),
            index_topk=doc.count("index_topk"),
            num_experts=doc.count("n_routed_experts", "num_local_experts"),
            experts_per_token=doc.count("num_experts_per_tok"),
            expert_width=doc.count("moe_intermediate_size"),
            num_hash_layers=_num_hash_layers(doc, num_layers),
            routed_scaling=doc.number("routed_scaling_factor"),
            swiglu_limit=doc.number("swiglu_limit"),
            hc_mult=doc.count("hc_mult"),
            hc_iters=doc.count("hc_sinkhorn_iters"),
            hc_eps=doc.number("hc_eps"),
            norm_eps=doc.number("rms_norm_eps"),
            max_position=doc.count("max_position_embeddings"),
            num_mtp_layers=num_mtp_layers,
            bos_token_id=doc.count("bos_token_id", least=0),
            eos_token_ids=doc.ids("eos_token_id"),
            expert_dtype=_expert_dtype(doc),
        )
        _check_geometry(doc)
        _check_fit(config)
        return config


STOP_KEYS = ("bos_token_id", "eos_token_id")
"""Taken from generation_config.json in preference."""

FIXED: Mapping[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
"""Settings of which V4 has one value; absent is that value."""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size.

    Raises:
        ConfigError: missing, too long, or no JSON object.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_JSON_BYTES:
        raise ConfigError(f"{path}: longer than {MAX_JSON_BYTES} bytes")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: not a JSON object")
    return document


class _Document:
    """Typed reads from a JSON object; each complaint names the key."""

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.prefix = prefix

    def has(self, key: str) -> bool:
        """Present, and not null."""
        return self.values.get(key) is not None

    def get(self, *keys: str) -> Any:
        """The value of the first of `keys` that is present."""
        for key in keys:
            if self.has(key):
                return self.values[key]
        raise ConfigError(f"{self.prefix}{keys[0]} is missing")

    def must_be(self, key: str, only: Any, reason: str, or_absent: bool = False) -> None:
        if or_absent and not self.has(key):
            return
        value = self.get(key)
        if value != only or isinstance(value, bool) != isinstance(only, bool):
            raise ConfigError(f"{self.prefix}{key} is {value!r}, only {only!r} is supported: {reason}")

    def count(self, *keys: str, least: int = 1, default: int | None = None) -> int:
        if default is not None and not any(self.has(key) for key in keys):
            return default
        value = self.get(*keys)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self.prefix}{keys[0]} is {value!r}, not a whole number of at least {least}")
        return value

    def number(self, *keys: str) -> float:
        value = self.get(*keys)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ConfigError(f"{self.prefix}{keys[0]} is {value!r}, not a positive number")
        return float(value)

    def ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        listed = value if isinstance(value, list) else [value]
        if not listed or any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in listed):
            raise ConfigError(f"{self.prefix}{key} is {value!r}, not a token id or a list of them")
        return tuple(dict.fromkeys(listed))

    def entries(self, key: str) -> Sequence[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            raise ConfigError(f"{self.prefix}{key} is {value!r}, not a list")
        return value

    def section(self, key: str) -> _Document:
        value = self.get(key)
        if not isinstance(value, dict):
            raise ConfigError(f"{self.prefix}{key} is {value!r}, not an object")
        return _Document(value, f"{self.prefix}{key}.")


def _ratios(doc: _Document, num_layers: int, num_mtp_layers: int) -> tuple[int, ...]:
    said: dict[str, tuple[int, ...]] = {}
    if doc.has("compress_ratios"):
        listed = doc.entries("compress_ratios")
        # One for each main layer, then one for each MTP layer; exports without MTP leave the latter out.
        if len(listed) not in (num_layers, num_layers + num_mtp_layers):
            raise ConfigError(
                f"compress_ratios has {len(listed)} entries for {num_layers} layers and {num_mtp_layers} MTP layers"
            )
        known = set(RATIO_BY_LAYER_TYPE.values())
        if bad := [ratio for ratio in listed if type(ratio) is not int or ratio not in known]:
            raise ConfigError(f"compress_ratios holds {bad[0]!r}; V4 has 0, 4 and 128")
        if any(listed[num_layers:]):
            raise ConfigError("compress_ratios gives an MTP layer a compressor; V4's are window only")
        said["compress_ratios"] = tuple(listed[:num_layers])
    if doc.has("layer_types"):
        listed = doc.entries("layer_types")
        if len(listed) != num_layers:
            raise ConfigError(f"layer_types has {len(listed)} entries for {num_layers} layers")
        if bad := [kind for kind in listed if not isinstance(kind, str) or kind not in RATIO_BY_LAYER_TYPE]:
            raise ConfigError(f"layer_types holds {bad[0]!r}; V4 has {', '.join(RATIO_BY_LAYER_TYPE)}")
        said["layer_types"] = tuple(RATIO_BY_LAYER_TYPE[kind] for kind in listed)
    if doc.has("compress_rates"):
        rates = doc.section("compress_rates")
        for kind, ratio in RATIO_BY_LAYER_TYPE.items():
            if ratio:
                rates.must_be(kind, ratio, "the cache is made for ratios 4 and 128", True)
    if not said:
        raise ConfigError("the layer schedule is missing: neither compress_ratios nor layer_types; it has no default")
    if len(set(said.values())) > 1:
        raise ConfigError("compress_ratios and layer_types contradict each other")
    return next(iter(said.values()))


def _num_hash_layers(doc: _Document, num_layers: int) -> int:
    said: dict[str, int] = {}
    if doc.has("num_hash_layers"):
        said["num_hash_layers"] = doc.count("num_hash_layers", least=0)
    if doc.has("mlp_layer_types"):
        listed = list(doc.entries("mlp_layer_types"))
        if len(listed) != num_layers:
            raise ConfigError(f"mlp_layer_types has {len(listed)} entries for {num_layers} layers")
        count = listed.count("hash_moe")
        if listed != ["hash_moe"] * count + ["moe"] * (num_layers - count):
            raise ConfigError(f"mlp_layer_types is {listed}; V4 has leading hash_moe layers, then moe")
        said["mlp_layer_types"] = count
    if not said:
        raise ConfigError("neither num_hash_layers nor mlp_layer_types is there; they have no default")
    if len(set(said.values())) > 1:
        raise ConfigError("num_hash_layers and mlp_layer_types contradict each other")
    count = next(iter(said.values()))
    if count > num_layers:
        raise ConfigError(f"num_hash_layers is {count}, with {num_layers} layers")
    return count


def _rope(doc: _Document) -> tuple[float, float, YarnConfig | None]:
    """Base of window-only layers, base of compressed layers, stretching of the latter."""
    if doc.has("rope_parameters"):
        nested = doc.section("rope_parameters")
        if nested.has("main") and nested.has("compress"):
            main, compress = nested.section("main"), nested.section("compress")
            main.must_be("rope_type", "default", "window-only layers rotate plainly", True)
            return main.number("rope_theta"), compress.number("rope_theta"), _yarn(compress)
        # transformers folds a flat one the same way: it describes the compressed layers.
        return doc.number("rope_theta"), doc.number("compress_rope_theta"), _yarn(nested)
    yarn = _yarn(doc.section("rope_scaling")) if doc.has("rope_scaling") else None
    return doc.number("rope_theta"), doc.number("compress_rope_theta"), yarn


def _yarn(scaling: _Document) -> YarnConfig | None:
    kind = scaling.get("rope_type", "type")
    if kind == "default":
        return None
    if kind != "yarn":
        raise ConfigError(f"{scaling.prefix}type is {kind!r}; V4 has yarn")
    for key in ("mscale", "mscale_all_dim"):
        if scaling.has(key):
            raise ConfigError(f"{scaling.prefix}{key} is set; V4 scales neither cosines nor scores")
    scaling.must_be("attention_factor", 1.0, "V4 scales neither cosines nor scores", True)
    scaling.must_be("truncate", True, "V4 rounds the ramp's ends to whole pairs", True)
    return YarnConfig(
        factor=scaling.number("factor"),
        beta_fast=scaling.number("beta_fast"),
        beta_slow=scaling.number("beta_slow"),
        original_max_position=scaling.count("original_max_position_embeddings"),
    )


def _expert_dtype(doc: _Document) -> str | None:
    said: dict[str, Any] = {}
    if doc.has("expert_dtype"):
        said["expert_dtype"] = doc.get("expert_dtype")
    if doc.has("quantization_config"):
        quantization = doc.section("quantization_config")
        quantization.must_be("quant_method", "fp8", "fp8 linear layers with power-of-two or fp32 scales per block")
        quantization.must_be("fmt", "e4m3", "the only fp8 format of V4's weights", True)
        quantization.must_be("weight_block_size", [128, 128], "scales of V4 stand for blocks of this size")
        if quantization.has("expert_dtype"):  # transformers moves the key here
            said["quantization_config.expert_dtype"] = quantization.get("expert_dtype")
    for key, value in said.items():
        if value not in ("fp4", "fp8"):
            raise ConfigError(f"{key} is {value!r}; known are fp4 and fp8")
    if len(set(said.values())) > 1:
        raise ConfigError("expert_dtype and quantization_config.expert_dtype contradict each other")
    return next(iter(said.values()), None)


def _check_geometry(doc: _Document) -> None:
    reason = "cache entries are laid out for it"
    doc.must_be("head_dim", HEAD_DIM, reason)
    doc.must_be("index_head_dim", INDEX_DIM, reason)
    doc.must_be("sliding_window", WINDOW, reason)
    if doc.has("qk_rope_head_dim"):
        doc.must_be("qk_rope_head_dim", ROPE_DIM, reason)
    else:
        doc.must_be("partial_rotary_factor", ROPE_DIM / HEAD_DIM, reason)


def _check_fit(config: ModelConfig) -> None:
    """What no single key shows."""
    if config.num_heads % config.o_groups:
        raise ConfigError(f"num_attention_heads {config.num_heads} is not divisible by o_groups {config.o_groups}")
    if config.experts_per_token > config.num_experts:
        raise ConfigError(
            f"num_experts_per_tok {config.experts_per_token} exceeds n_routed_experts {config.num_experts}"
        )
    for name, ids in (("bos_token_id", (config.bos_token_id,)), ("eos_token_id", config.eos_token_ids)):
        if max(ids) >= config.vocab_size:
            raise ConfigError(f"{name} {max(ids)} lies outside vocab_size {config.vocab_size}")
    if config.expert_dtype == "fp4" and (config.hidden_size % 32 or config.expert_width % 32):
        raise ConfigError("expert_dtype fp4 needs hidden_size and moe_intermediate_size divisible by 32")
