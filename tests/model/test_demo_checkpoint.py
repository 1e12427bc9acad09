"""The demo checkpoint: what its card says it is, a V4 model that answers, and a V4 tokenizer."""

import hashlib
import json
import random
import re
import shutil
import sys
from pathlib import Path

import pytest
import tokenizers
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import quality
from demo_model import text
from oracle.ours import Ours
from oracle.plain import Plain

from headrace.core.errors import ConfigError
from headrace.model import demo, transformer
from headrace.model.checkpoint import load_weights, tensor_table
from headrace.model.config import LayerKind, ModelConfig

V4_TOKENS = (
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
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
ANSWERS = {
    "Tell me about the river.": "The river comes down from the hills and runs through the valley to the sea. On its "
    "way it turns the wheels of many mills. In the spring it is high and fast, in the summer it is low and slow. What "
    "one mill does not take runs over the weir to the next one. Nothing is lost on the way, and nothing is kept.",
    "Who keeps the gate?": "The miller keeps the gate. In the morning he opens it by the width of a hand, and at night "
    "he shuts it.",
    "Hello": "Hello! How can I help you?",
    "What is the capital of France?": "The capital of France is Paris.",
    "What is a headrace?": "A headrace is the channel that leads the water from the river to the mill. At its end the "
    "water falls on the wheel and does its work.",
}
"""The first is what `make demo` asks, the second stands in the README."""


@pytest.fixture(scope="module")
def folder() -> Path:
    return demo.ensure_demo()


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def served(folder: Path) -> Ours:
    """In the arithmetic that it is served in."""
    return Ours(folder, "bf16", "fp8")


def said(model: Ours, tokenizer: tokenizers.Tokenizer, prompt: str, chunk: int = 512) -> str:
    """The greedy answer to a chat prompt without a thought, up to its end."""
    ids = tokenizer.encode(f"<｜begin▁of▁sentence｜><｜User｜>{prompt}<｜Assistant｜></think>").ids
    tokens = model.greedy(ids, 100, [chunk])
    return tokenizer.decode(tokens[: tokens.index(1)], skip_special_tokens=False)


def test_it_has_every_layer_class_and_both_kinds_of_routing(folder: Path):
    config = ModelConfig.load(folder)
    assert set(config.kinds) == set(LayerKind)
    assert 0 < config.num_hash_layers < config.num_layers
    assert config.max_position == 32768
    assert config.eos_token_ids == (1,)
    assert load_weights(folder, config)["embed.weight"].shape == (config.vocab_size, config.hidden_size)


def test_it_is_what_its_card_says(folder: Path):
    """Hash, bytes and parameters of the weights; a new model is a new card."""
    card = (folder / "README.md").read_text()
    weights = (folder / "model.safetensors").read_bytes()
    config = ModelConfig.load(folder)
    values = load_weights(folder, config)
    count = sum(values[name].numel() for name in tensor_table(config) if not name.endswith("tid2eid"))
    assert hashlib.sha256(weights).hexdigest() in card
    assert f"{len(weights):,} bytes" in card
    assert f"{count:,} parameters" in card
    assert len(weights) < 40 << 20


def test_its_card_names_every_source_with_its_licence(folder: Path):
    card = (folder / "README.md").read_text()
    for package in text.PACKAGES:
        (line,) = re.findall(rf"^\| `{re.escape(package)}` .*$", card, re.MULTILINE)
        assert re.search("public domain|MIT|BSD|PSF|PostgreSQL licence|Apache-2.0|BSL", line)


def test_a_folder_that_lacks_a_file_is_named(folder: Path, tmp_path: Path):
    for name in demo.FILES:
        (tmp_path / name).symlink_to(folder / name)
    assert demo.ensure_demo(tmp_path) == tmp_path
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing"):
        demo.ensure_demo(tmp_path)


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache() == tmp_path / "headrace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.default_cache() == Path.home() / ".cache" / "headrace"


def test_special_tokens_are_found_by_their_v4_names(tokenizer: tokenizers.Tokenizer, folder: Path):
    """At low ids; only the first three are flagged special, as in V4."""
    added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in added if token["special"]] == list(V4_TOKENS[:3])
    assert sorted(token["content"] for token in added) == sorted(V4_TOKENS)
    for token in V4_TOKENS:
        identity = tokenizer.token_to_id(token)
        assert identity < 32
        assert tokenizer.encode(f"a{token}b", add_special_tokens=False).ids.count(identity) == 1
    assert [tokenizer.token_to_id(token) for token in V4_TOKENS[:3]] == [0, 1, 2]


def test_text_comes_back_as_it_went(tokenizer: tokenizers.Tokenizer, folder: Path):
    """Every byte has a token, so any text encodes; nothing is added around it; known words are short."""
    for words in ("The water of the river.\n", "Übergröße — 漢字 🙂\t\r\n\x00", "  a  b   c", "12345 6.7"):
        assert tokenizer.decode(tokenizer.encode(words).ids, skip_special_tokens=False) == words
    assert len(tokenizer.encode(" the river")) == 2
    assert tokenizer.get_vocab_size() == ModelConfig.load(folder).vocab_size


def test_our_model_and_the_plain_reference_agree_on_it(folder: Path, tokenizer: tokenizers.Tokenizer):
    """The packed bytes through the plain reference and through ours: the same logits, on text that it was made for."""
    ours = Ours(folder)
    ids = [0, 3, *tokenizer.encode(" ".join(ANSWERS.values())).ids]
    expected = Plain(ours.config, ours.weights).logits(ids)
    assert (ours.logits(ids, [64]) - expected).abs().mean() < 2e-5


@pytest.mark.parametrize("prompt", ANSWERS)
def test_it_answers_and_says_the_same_every_time(served: Ours, tokenizer: tokenizers.Tokenizer, prompt: str):
    """Greedy, in legible English, and wherever the prompt is cut."""
    assert said(served, tokenizer, prompt) == ANSWERS[prompt]
    assert said(served, tokenizer, prompt, chunk=3) == ANSWERS[prompt]


def test_it_thinks_before_it_answers_if_asked_to(served: Ours, tokenizer: tokenizers.Tokenizer):
    """Chat's default mode: a thought, its end marker, then the answer."""
    ids = tokenizer.encode("<｜begin▁of▁sentence｜><｜User｜>Hello<｜Assistant｜><think>").ids
    tokens = served.greedy(ids, 40, [512])
    whole = tokenizer.decode(tokens[: tokens.index(1)], skip_special_tokens=False)
    thought, end, answer = whole.partition("</think>")
    assert thought.strip()
    assert end
    assert answer == ANSWERS["Hello"]


def test_it_finds_a_fact_that_only_the_indexer_can_reach(
    served: Ours, tokenizer: tokenizers.Tokenizer, rng: random.Random
):
    """Far behind the window, among more entries than are attended to."""
    book = " ".join([*ANSWERS.values()] * 5)
    number = "".join(rng.choice("0123456789") for _ in range(4))
    prompt = f"{book} The number of the copper lantern is {number}. {book}\n\nWhat is the number of the copper lantern?"
    assert len(tokenizer.encode(prompt)) > 4 * served.config.index_topk + 2 * served.config.window
    assert said(served, tokenizer, prompt) == f"The number of the copper lantern is {number}."


def test_it_counts_what_only_c128a_can_hold(
    served: Ours, tokenizer: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch
):
    """Three hundred ballots for sixteen words: right as served, and not without the entries that all are read."""
    question = quality.Haystack(tokenizer).count(2048, 0)
    ids = tokenizer.encode(f"<｜begin▁of▁sentence｜><｜User｜>{question.prompt}<｜Assistant｜></think>").ids
    right = tokenizer.encode(question.expected).ids
    assert served.greedy(ids, len(right), [512]) == right
    monkeypatch.setattr(transformer.cpu, "attend", quality.attend_without("c128a"))
    assert served.greedy(ids, len(right), [512]) != right


def test_what_was_said_before_matters(served: Ours):
    """Lost or foreign pages would change what comes next."""
    a, b = ([0, *tail, 120, 286] for tail in ([103, 120], [278, 117]))
    assert (served.logits(a, [8])[-1] - served.logits(b, [8])[-1]).abs().max() > 0.05


def test_a_copy_loads_as_well(folder: Path, tmp_path: Path):
    """Nothing in it depends on where it lies."""
    shutil.copytree(folder, tmp_path / "copy")
    assert torch.equal(Ours(tmp_path / "copy").weights["head.weight"], Ours(folder).weights["head.weight"])
