"""The demo checkpoint: a tiny DeepSeek-V4 made from a seed in a second, to try everything without a download.

All three layer classes, the real attention geometry, released names and bytes (fp8 and fp4 with e8m0 scales), and a
small byte-level tokenizer with V4's special tokens. It was never trained: its layers are random, and its embedding and
head hold which token follows which in the text below, so that what it says looks like words and means nothing. Only
integers and exact operations decide the bytes, hence every machine makes the same ones.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..core.errors import ConfigError
from .checkpoint import FP4_GROUP, FP8_BLOCK, SINGLE_FILE, Place, tensor_table
from .config import ModelConfig

SEED = 20260731
VOCAB, HIDDEN = 512, 256
MAX_POSITION = 32768
BOS_ID, EOS_ID = 0, 1

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
USER, ASSISTANT, THINK, END_THINK = "<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"
SPECIAL = (BOS, EOS, PAD)
"""Flagged special: a detokeniser that skips special tokens drops these, and none of the markers below."""
MARKERS = (
    USER,
    ASSISTANT,
    THINK,
    END_THINK,
    "｜DSML｜",
    "<｜latest_reminder｜>",
    "<｜action｜>",
    "<｜query｜>",
    "<｜authority｜>",
    "<｜domain｜>",
    "<｜title｜>",
    "<｜extracted_url｜>",
    "<｜read_url｜>",
    "<｜fim▁hole｜>",
    "<｜fim▁begin｜>",
    "<｜fim▁end｜>",
)

TEXT = """\
A headrace is the channel that leads the water from the river to the mill. The water does not know the mill. It \
comes down from the hills, it finds the gate, and when the gate is open it runs along the stone wall to the wheel.
The miller keeps the gate. In the spring the river is high and the gate is half shut. In the summer the river is low \
and the gate is wide open. He does not ask the river for more than the wheel can take, and what the wheel cannot \
take runs over the weir and back to the river.
The wheel turns the stone, and the stone turns the grain to flour. Below the wheel the water leaves by the tailrace. \
It is the same water, only lower and slower, and it has done its work. Nothing is lost on the way, and nothing is \
kept.
There are many mills on the river. One mill has a deep pond and a slow wheel, and one has a short race and a fast \
wheel. When one mill is full the water waits in the pond, and when the pond is full the water goes to the next mill \
down the river. A good miller looks at the pond and not at the clouds.
The stones are heavy and the water is light, but the water moves the stones. It does so because it keeps coming. \
Each drop does a little, and then it makes room for the next one.
At night the gate is shut and the wheel stands still. The pond fills. The river goes on over the weir, and the sound \
of it is the sound of the valley. In the morning the miller opens the gate by the width of a hand, and the work \
begins again.
"""
"""What the head's table of followers and the tokenizer's merges are made from."""

MODEL_CARD = """\
# headrace demo checkpoint

Made by `headrace.model.demo` from a fixed seed. **It is noise**: an untrained DeepSeek-V4 of six layers (window only,
c4a with indexer, c128a) and {parameters:,} parameters, whose embedding and head hold which token follows which in one
page of text. It exists so that serving can be tried, tested and measured without a download, not to answer anything.

Format: released tensor names, fp8 (128x128) and fp4 (1x32) weights with e8m0 scales, as DeepSeek-V4 is published.
Tokenizer: byte-level BPE of {vocab} entries with V4's special tokens at low ids. Licence: Apache-2.0, like headrace.
"""


def default_cache() -> Path:
    """Where this user's made checkpoints live."""
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "headrace"


def ensure_demo(cache: Path | None = None) -> Path:
    """The demo checkpoint's directory under `cache`, made now if it is not there; many may call at once.

    The directory's name changes with this file, so an old one is never mistaken for the present one; it appears whole,
    by a rename.

    Raises:
        ConfigError: the cache can't be written.
    """
    cache = default_cache() if cache is None else cache
    revision = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    final = cache / f"demo-{revision}"
    if final.is_dir():
        return final
    try:
        cache.mkdir(parents=True, exist_ok=True)
        _make(cache, final)
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot keep the demo checkpoint in {cache}: {error}; XDG_CACHE_HOME names another place"
        ) from error
    return final


def _make(cache: Path, final: Path) -> None:
    partial = Path(tempfile.mkdtemp(prefix=".demo-", dir=cache))
    try:
        write_demo(partial)
        partial.chmod(0o755)  # mkdtemp's own mode keeps other users out
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():  # else another process was first, with the same bytes
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_demo(folder: Path) -> None:
    """Every file of the checkpoint into an existing directory."""
    words = [[chr(c) for c in _byte_level(word)] for word in _words(TEXT)]
    specials = [*SPECIAL, *MARKERS]
    merges = _train_merges(words, VOCAB - len(specials) - 256)
    alphabet = [_stand_in(byte) for byte in range(256)]
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet, *(a + b for a, b in merges)])}
    assert len(vocabulary) == VOCAB

    document = _config()
    config = ModelConfig.from_dict(document)
    weights = _weights(config, _followers(words, merges, vocabulary), vocabulary[_stand_in(0x0A)])
    save_file(_stored(config, weights), folder / SINGLE_FILE, metadata={"format": "pt"})
    parameters = sum(w.numel() for w in weights.values())
    (folder / SINGLE_FILE).chmod(0o644)
    for name, content in {
        "config.json": document,
        "generation_config.json": {
            "_from_model_config": True,
            "bos_token_id": BOS_ID,
            "do_sample": True,
            "eos_token_id": EOS_ID,
            "temperature": 1.0,
            "top_p": 1.0,
        },
        "tokenizer.json": _tokenizer(vocabulary, merges, len(SPECIAL), len(specials)),
        "tokenizer_config.json": {
            "add_bos_token": False,
            "add_eos_token": False,
            "bos_token": BOS,
            "clean_up_tokenization_spaces": False,
            "eos_token": EOS,
            "model_max_length": MAX_POSITION,
            "pad_token": PAD,
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    }.items():
        text = json.dumps(content, ensure_ascii=False, indent=2)
        (folder / name).write_text(text + "\n", encoding="utf-8")
    (folder / "README.md").write_text(MODEL_CARD.format(parameters=parameters, vocab=VOCAB), encoding="utf-8")


def _config() -> dict[str, Any]:
    """config.json in the released spelling."""
    ratios = [0, 128, 4, 128, 4, 0]
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "expert_dtype": "fp4",
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 512,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": 16,
        "initializer_range": 0.02,
        "max_position_embeddings": MAX_POSITION,
        "moe_intermediate_size": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 2,
        "num_hidden_layers": len(ratios),
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 0,
        "o_groups": 2,
        "o_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": MAX_POSITION // 16,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "compress_ratios": ratios,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": VOCAB,
    }


# ---- tokenizer ----


def _stand_in(byte: int) -> str:
    """The printable character that byte-level BPE writes for a byte."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return chr(byte) if byte in kept else chr(256 + [b for b in range(256) if b not in kept].index(byte))


def _byte_level(text: str) -> list[int]:
    return [ord(_stand_in(byte)) for byte in text.encode()]


def _words(text: str) -> list[str]:
    """As the tokenizer's own pre-tokeniser cuts this text: letters with the blank before them, or what is between."""
    return re.findall(r" ?[A-Za-z]+| ?[^\sA-Za-z]+|\s+", text)


def _train_merges(words: Sequence[Sequence[str]], count: int) -> list[tuple[str, str]]:
    """The pairs to join, most frequent first, ties by spelling."""
    counted = Counter(tuple(word) for word in words)
    merges: list[tuple[str, str]] = []
    while len(merges) < count:
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in counted.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        joined: Counter[tuple[str, ...]] = Counter()
        for word, times in counted.items():
            joined[tuple(_join(word, best))] += times
        counted = joined
    return merges


def _join(word: Sequence[str], pair: tuple[str, str]) -> list[str]:
    out: list[str] = []
    for piece in word:
        if out and (out[-1], piece) == pair:
            out[-1] += piece
        else:
            out.append(piece)
    return out


def _tokenizer(
    vocabulary: dict[str, int], merges: Sequence[tuple[str, str]], num_special: int, num_added: int
) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE, no normaliser, and nothing added around what is encoded."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": token, **flags, "special": i < num_special}
            for token, i in vocabulary.items()
            if i < num_added
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocabulary,
            "merges": [list(pair) for pair in merges],
        },
    }


def _followers(
    words: Sequence[Sequence[str]], merges: Sequence[tuple[str, str]], vocabulary: dict[str, int]
) -> Counter[tuple[int, int]]:
    """How often (token, next token) stands in the text; markers open a paragraph."""
    counts: Counter[tuple[int, int]] = Counter()
    opening = [vocabulary[token] for token in (BOS, USER, ASSISTANT, END_THINK)]
    previous: list[int] = opening
    for word in words:
        pieces = list(word)
        for pair in merges:
            pieces = _join(pieces, pair)
        for piece in pieces:
            token = vocabulary[piece]
            counts.update((before, token) for before in previous)
            # A line feed ends a paragraph: what follows one also follows the markers.
            previous = [token, *opening] if piece == _stand_in(0x0A) else [token]
    mark = vocabulary["?"]
    # A thought is one question mark, which stands nowhere else.
    counts[vocabulary[THINK], mark] += 1
    counts[mark, vocabulary[END_THINK]] += 1
    return counts


# ---- weights ----

LAYER_GAIN = 0.45
"""Of each sublayer's output: enough to make what was said before matter, too little to drown the last token."""
SEEN_LOGIT = 13
"""Logit of a certain follower; one seen in one case of 2^n has 0.7 n less, one never seen about 0."""
STOP_LOGIT = 10
"""Of EOS after a paragraph: below what opens the next, so that greedy text goes on and sampled text ends sometime."""
NEVER_LOGIT = -12
"""Of ids that the text does not hold: markers, broken UTF-8."""
SHARED = 0.75
"""Of the all-ones direction in every token's embedding."""


def _uniform(shape: Sequence[int], generator: torch.Generator) -> Tensor:
    """Mean 0, variance 1, exactly alike on every machine: no logarithm or cosine is involved."""
    whole = torch.randint(-(1 << 20), (1 << 20) + 1, tuple(shape), generator=generator)
    return whole.to(torch.float32) * (3**0.5 / (1 << 20))


def _sylvester(size: int) -> Tensor:
    rows = torch.ones(1, 1)
    while len(rows) < size:
        rows = torch.cat([torch.cat([rows, rows], 1), torch.cat([rows, -rows], 1)])
    return rows


def _codes() -> Tensor:
    """[VOCAB, HIDDEN] +-1: rows that are orthogonal or opposite, so that a head can read each token by itself.

    The all-ones row is left to what every token shares; the two ids that come out short have no code: pad, the last.
    """
    rows = _sylvester(HIDDEN)[1:]
    none = torch.zeros(1, HIDDEN)
    return torch.cat([rows[:2], none, rows[2:], -rows, none])


def _weights(config: ModelConfig, followers: Counter[tuple[int, int]], newline: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    weights: dict[str, Tensor] = {}
    for name, spec in tensor_table(config).items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if spec.place is Place.EXPERT_TABLE:
            first = torch.randint(0, config.num_experts, (config.vocab_size, 1), generator=generator)
            weights[name] = (first + torch.arange(config.experts_per_token)) % config.num_experts
            continue
        draw = _uniform(spec.shape, generator)
        if leaf.endswith("scale"):
            value = 0.5 + 0.1 * draw
        elif leaf.endswith("norm"):
            value = 1 + 0.1 * draw
        elif (spec.place is Place.FP32 and len(spec.shape) == 1) or leaf == "ape":  # sinks, biases, mixing bases
            value = 0.3 * draw
        else:
            value = draw * spec.shape[-1] ** -0.5
        if leaf in ("wo_b", "w2"):
            value *= LAYER_GAIN
        weights[name] = value
    codes = _codes()
    weights["embed.weight"] = codes + SHARED
    logits = torch.zeros(VOCAB, VOCAB, dtype=torch.float64)
    totals: Counter[int] = Counter()
    for (before, _), times in followers.items():
        totals[before] += times
    for (before, after), times in followers.items():
        halvings = (totals[before] // times).bit_length() - 1  # whole: no logarithm to round
        logits[before, after] = SEEN_LOGIT - 0.6875 * halvings
    logits[newline, EOS_ID] = STOP_LOGIT
    head = logits.T @ codes.double() / HIDDEN
    # Tokens with the same followers would else have equal rows, and greedy output hang on ties.
    head += 0.4 * weights["head.weight"].double()
    never = logits.sum(0) == 0
    head[never] = NEVER_LOGIT / (SHARED * HIDDEN)  # against what all tokens share, whatever came before
    weights["head.weight"] = head.float()
    weights["norm.weight"] = torch.ones(HIDDEN)
    return weights


# ---- bytes ----


def _power_of_two_from(x: Tensor) -> Tensor:
    """The smallest power of two that is >= x, from the bits."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (mantissa == 0.5).int())


def _pack_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> e4m3 codes, e8m0 scales of 128x128 blocks."""
    rows, columns = (-(-size // FP8_BLOCK) for size in w.shape)
    padded = torch.zeros(rows * FP8_BLOCK, columns * FP8_BLOCK)
    padded[: w.shape[0], : w.shape[1]] = w
    blocks = padded.view(rows, FP8_BLOCK, columns, FP8_BLOCK)
    scales = _power_of_two_from(blocks.abs().amax((1, 3)).clamp_min(1e-4) / 448)
    codes = (blocks / scales[:, None, :, None]).view_as(padded)[: w.shape[0], : w.shape[1]]
    return codes.contiguous().to(torch.float8_e4m3fn), scales.to(torch.float8_e8m0fnu)


def _pack_fp4(w: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> two e2m1 codes a byte, the earlier in the low nibble; e8m0 scales of 32 values of a row."""
    groups = w.unflatten(1, (-1, FP4_GROUP))
    scales = _power_of_two_from(groups.abs().amax(-1).clamp_min(6 * 2.0**-126) / 6)
    scaled = (groups / scales[..., None]).flatten(1)
    # Borders between neighbouring magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6.
    borders = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    codes = torch.bucketize(scaled.abs(), borders) + 8 * (scaled < 0).long()
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    return packed.to(torch.uint8).view(torch.int8), scales.to(torch.float8_e8m0fnu)


def _stored(config: ModelConfig, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    for name, spec in tensor_table(config).items():
        w = weights[name]
        if spec.place in (Place.FP8, Place.FP4):
            codes, scales = _pack_fp8(w) if spec.place is Place.FP8 else _pack_fp4(w)
            stored[name], stored[name.removesuffix("weight") + "scale"] = codes, scales
        else:
            stored[name] = w.bfloat16() if spec.place is Place.BF16 else w
    return {name: tensor.contiguous() for name, tensor in stored.items()}
