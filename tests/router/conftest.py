"""A small byte-level tokenizer with the markers of the chat format, built once."""

import json
import sys
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from headrace.router import dialect
from headrace.router.tokenizer import Tokenizer

HERE = str(Path(__file__).resolve().parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)

CORPUS = [
    "The tide table of the harbour says when the ferry leaves the quay and the gauge reads three metres.",
    '<tool_calls> invoke name="tide_table"> parameter name="harbour" string="true"> string="false"> function_calls',
    "Reasoning about the answer: first the question, then the table, then the answer in one line.\n\n",
]

MARKERS = [
    dialect.USER,
    dialect.ASSISTANT,
    dialect.THINK,
    dialect.END_THINK,
    dialect.DSML,
    dialect.REMINDER,
    dialect.SYSTEM,
    dialect.EXTRACTED_URL,
    dialect.FIM_BEGIN,
    dialect.FIM_HOLE,
    dialect.FIM_END,
    *dialect.TASKS.values(),
]


def make_definition() -> str:
    built = tokenizers.Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=[dialect.BOS, dialect.EOS, "<｜▁pad▁｜>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(CORPUS, trainer)
    built.add_tokens([tokenizers.AddedToken(name, normalized=False) for name in MARKERS])
    return built.to_str()


@pytest.fixture(scope="session")
def definition() -> str:
    return make_definition()


@pytest.fixture(scope="session")
def tokenizer(definition) -> Tokenizer:
    return Tokenizer(definition)


@pytest.fixture(scope="session")
def checkpoint(definition, tmp_path_factory) -> str:
    """A checkpoint folder as far as the router reads one."""
    folder = tmp_path_factory.mktemp("checkpoint")
    size = len(json.loads(definition)["model"]["vocab"]) + len(MARKERS)
    (folder / "tokenizer.json").write_text(definition, encoding="utf-8")
    config = {"model_type": "deepseek_v4", "vocab_size": size, "max_position_embeddings": 4096, "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "temperature": 1.0, "top_p": 1.0}))
    return str(folder)
