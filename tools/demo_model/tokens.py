"""The demo model's tokenizer: byte-level BPE with V4's special tokens at low ids and every digit by itself."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from . import chat, facts
from .architecture import BOS, EOS, MARKERS, MAX_POSITION, PAD, SPECIAL, VOCAB

SEED = 5
CHATS = 60_000
"""Conversations that count beside the text when merges are chosen."""


def train(texts: Iterable[str]) -> Tokenizer:
    """Merges from the text, the conversations, and every word of the tasks, which thereby are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = [*SPECIAL, *MARKERS]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[AddedToken(name, special=name in SPECIAL, normalized=False) for name in names],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(texts, _talk(), _words()), trainer)
    document = json.loads(tokenizer.to_str())
    for token in document["added_tokens"]:
        token["special"] = token["content"] in SPECIAL
    return Tokenizer.from_str(json.dumps(document))


def _talk() -> Iterator[str]:
    rng = random.Random(SEED)
    for _ in range(CHATS):
        for turn in chat.conversation(rng):
            yield turn.asked + "\n" + turn.answer


def _words() -> Iterator[str]:
    every = {*facts.WORDS, *facts.NOUNS, *facts.ADJECTIVES, *facts.NAMES}
    for word in sorted(every):
        yield from itertools.repeat(f" {word}", 20_000)


def settings() -> dict[str, Any]:
    """tokenizer_config.json."""
    return {
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": BOS,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "model_max_length": MAX_POSITION,
        "pad_token": PAD,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
