"""The demo checkpoint: made whole, once, alike everywhere; a V4 model that says words, and a V4 tokenizer."""

import hashlib
import json
import sys
import threading
from pathlib import Path

import pytest
import tokenizers
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle.ours import Ours
from oracle.plain import Plain

from headrace.core.errors import ConfigError
from headrace.model import demo
from headrace.model.checkpoint import load_weights
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
SHA256 = "d64457d2da065e0079f946644f7a7a743ef39662d163cc22236d8a4c1ed9a8cf"
"""Of the weights. A new value is a new model: say so in the changelog."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return demo.ensure_demo(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_it_has_every_layer_class_and_both_kinds_of_routing(folder: Path):
    config = ModelConfig.load(folder)
    assert set(config.kinds) == set(LayerKind)
    assert 0 < config.num_hash_layers < config.num_layers
    assert config.max_position == 32768
    assert config.eos_token_ids == (1,)
    assert load_weights(folder, config)["embed.weight"].shape == (config.vocab_size, config.hidden_size)


def test_every_machine_makes_the_same_bytes(folder: Path):
    """Workers on different hosts each make their own, and exchange pages of one model."""
    assert hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest() == SHA256


def test_a_second_call_makes_nothing(folder: Path):
    before = (folder / "model.safetensors").stat()
    assert demo.ensure_demo(folder.parent) == folder
    assert (folder / "model.safetensors").stat() == before


def test_many_at_once_get_one_whole_directory(tmp_path: Path):
    """All write apart and the first rename wins; nothing is left beside it."""
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(demo.ensure_demo(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert list(tmp_path.iterdir()) == [found[0]]
    assert (found[0] / "README.md").is_file()


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(demo, "write_demo", fail)
    with pytest.raises(ConfigError, match="disk full"):
        demo.ensure_demo(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        demo.ensure_demo(tmp_path / "file")


def test_the_cache_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert demo.default_cache() == tmp_path / "headrace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert demo.default_cache() == Path.home() / ".cache" / "headrace"


def test_the_model_card_says_that_it_is_noise(folder: Path):
    assert "**It is noise**" in (folder / "README.md").read_text()


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
    for text in ("The water of the river.\n", "Übergröße — 漢字 🙂\t\r\n\x00", "  a  b   c"):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode(" the river")) == 2
    assert tokenizer.get_vocab_size() == ModelConfig.load(folder).vocab_size


def test_our_model_and_the_plain_reference_agree_on_it(folder: Path):
    """The packed bytes through the plain reference and through ours: the same logits."""
    ours = Ours(folder)
    ids = torch.randint(19, 512, (150,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = Plain(ours.config, ours.weights).logits(ids)
    assert (ours.logits(ids, [64]) - expected).abs().max() < 5e-5


def test_it_says_words_and_does_not_end_at_once(tokenizer: tokenizers.Tokenizer, folder: Path):
    """Greedy text after a chat prompt is printable, varied, and longer than a line."""
    ours = Ours(folder)
    ids = tokenizer.encode("<｜begin▁of▁sentence｜><｜User｜>Tell me about the river.<｜Assistant｜></think>").ids
    said = ours.greedy(ids, 64, [64])
    text = tokenizer.decode(said, skip_special_tokens=False)
    assert 1 not in said
    assert text.replace("\n", " ").isprintable()
    assert text.isascii()
    assert len(set(said)) > 8


def test_what_was_said_before_matters(folder: Path):
    """The head knows followers, but the layers are no ornament: lost or foreign pages change what comes next."""
    ours = Ours(folder)
    a, b = ([0, *tail, 120, 286] for tail in ([103, 120], [278, 117]))
    assert (ours.logits(a, [8])[-1] - ours.logits(b, [8])[-1]).abs().max() > 0.05
