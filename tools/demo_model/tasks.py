"""Training sequences: text, chats, and things to find again at any distance.

A sequence is made from (seed, step, row) alone, so that any number of processes make the same ones. Each token has a
weight in the loss: nought where nobody could know it, more where it must be remembered.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from . import chat, facts
from .architecture import ASSISTANT_ID, BOS_ID, END_THINK_ID, EOS_ID, MAX_POSITION, THINK_ID, USER_ID

VALUE_WEIGHT = 4.0
"""Of what must be recalled, where a token of text has 1."""
ASKED_WEIGHT = 0.1
"""Of what a user says."""
JUMP = 128
"""Positions jump by multiples of this, at multiples of this."""

KINDS = ("number", "code", "word")
NEEDLES = {
    "number": "The number of the {} is",
    "code": "The code of the {} is",
    "word": "The secret word of the {} is",
}
QUESTIONS = {
    "number": "What is the number of the {}?",
    "code": "What is the code of the {}?",
    "word": "What is the secret word of the {}?",
}


@dataclass(frozen=True)
class Needle:
    """One fact: an owner of two words, and a value of four digits, three words, or one."""

    kind: str
    owner: str
    value: str

    @property
    def head(self) -> str:
        """Its sentence up to the value, which follows after a blank, and a full stop."""
        return NEEDLES[self.kind].format(self.owner)

    @property
    def question(self) -> str:
        return QUESTIONS[self.kind].format(self.owner)


def draw_needle(rng: random.Random, others: list[Needle]) -> Needle:
    """Another owner than the others', though it may share a word with one of them."""
    taken = {(n.kind, n.owner) for n in others}
    while True:
        kind = rng.choice(KINDS)
        adjective, noun = rng.choice(facts.ADJECTIVES), rng.choice(facts.NOUNS)
        if others and rng.random() < 0.3:
            near = rng.choice(others)
            if rng.random() < 0.5:
                adjective = near.owner.split()[0]
            else:
                noun = near.owner.split()[1]
        if rng.random() < 0.15 and others:
            adjective, noun = rng.choice(others).owner.split()
        if (kind, f"{adjective} {noun}") not in taken:
            break
    if kind == "number":
        value = "".join(rng.choice("0123456789") for _ in range(4))
    else:
        value = " ".join(rng.sample([w for w in facts.WORDS if w != adjective], 3 if kind == "code" else 1))
    return Needle(kind, f"{adjective} {noun}", value)


@dataclass
class Sequence:
    """Tokens and their weights, up to a length."""

    length: int
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    @property
    def room(self) -> int:
        return self.length - len(self.ids)

    def add(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)


class Maker:
    """Makes sequences from tokenised text."""

    def __init__(self, tokenizer: Tokenizer, text: np.ndarray) -> None:
        self.tokenizer, self.text = tokenizer, text
        self._cache: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        found = self._cache.get(text)
        if found is None:
            found = self.tokenizer.encode(text, add_special_tokens=False).ids
            if len(self._cache) < 200_000:
                self._cache[text] = found
        return found

    def slice(self, rng: random.Random, count: int) -> list[int]:
        """Consecutive text."""
        at = rng.randrange(len(self.text) - count)
        out: list[int] = self.text[at : at + count].tolist()
        return out

    # ---- kinds of sequences ----

    def make(self, rng: random.Random, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids [length + 1], weights [length + 1] of being predicted, positions [length]."""
        out = Sequence(length + 1)
        spread = False
        kind = rng.random()
        if length <= 512:
            if kind < 0.22:
                self.prose(rng, out)
            elif kind < 0.55:
                self.chats(rng, out)
            elif kind < 0.67:
                self.echo(rng, out)
                spread = rng.random() < 0.2
            else:
                self.recall(rng, out)
                spread = rng.random() < 0.3
        elif kind < 0.08:
            self.prose(rng, out)
        elif kind < 0.14:
            self.chats(rng, out)
        elif kind < 0.25:
            self.echo(rng, out)
            spread = rng.random() < 0.2
        else:
            self.recall(rng, out)
            spread = rng.random() < 0.4
        ids = np.array(out.ids[: length + 1], dtype=np.int64)
        weights = np.array(out.weights[: length + 1], dtype=np.float32)
        positions = np.arange(length, dtype=np.int64)
        if spread:
            for _ in range(rng.choice((1, 1, 2, 3))):
                free = (MAX_POSITION - 1 - int(positions[-1])) // JUMP
                far = int(free ** rng.random()) if free > 1 else 0
                positions[rng.randrange(length // JUMP) * JUMP :] += far * JUMP
        return ids, weights, positions

    def prose(self, rng: random.Random, out: Sequence) -> None:
        out.add([BOS_ID], 0)
        out.add(self.slice(rng, out.room), 1)

    def turn(self, out: Sequence, turn: chat.Turn, think: bool) -> None:
        out.add([USER_ID], 0)
        out.add(self.encode(turn.asked), ASKED_WEIGHT)
        out.add([ASSISTANT_ID], 0)
        if think:
            out.add([THINK_ID], 0)
            out.add(self.encode(turn.about), 1)
            out.add([END_THINK_ID], 1)
        else:
            out.add([END_THINK_ID], 0)
        out.add([*self.encode(turn.answer), EOS_ID], 1)

    def chats(self, rng: random.Random, out: Sequence) -> None:
        """Conversations one after the other; earlier thoughts are dropped, as V4's format does."""
        while out.room > 0:
            out.add([BOS_ID], 0)
            if rng.random() < 0.15:
                out.add(self.encode(rng.choice(facts.SYSTEM)), ASKED_WEIGHT)
            turns = chat.conversation(rng)
            thinking = rng.random() < 0.35
            for i, turn in enumerate(turns):
                self.turn(out, turn, thinking and i == len(turns) - 1)

    def echo(self, rng: random.Random, out: Sequence) -> None:
        """Runs of words or of text that come again later."""
        out.add([BOS_ID], 0)
        runs: list[list[int]] = []
        while out.room > 0:
            if runs and rng.random() < 0.55:
                run = rng.choice(runs)
                out.add(run[:2], 0)
                out.add(run[2:], 1.5)
            else:
                if rng.random() < 0.5:
                    words = [
                        rng.choice(facts.WORDS + facts.NOUNS + facts.ADJECTIVES) for _ in range(rng.randrange(4, 40))
                    ]
                    run = self.encode(" " + " ".join(words[:1]))[:]
                    for word in words[1:]:
                        run = run + self.encode(" " + word)
                    out.add(run, 0)
                else:
                    run = self.slice(rng, rng.randrange(10, 80))
                    out.add(run, 0.3)
                runs.append(run)
            out.add(self.encode("\n"), 0)
            if rng.random() < 0.15:
                out.add(self.slice(rng, rng.randrange(1, max(2, out.length // 4))), 0.3)

    def needle(self, out: Sequence, needle: Needle, again: bool) -> None:
        """Its sentence; `again`: it stood before, so its value can be known."""
        out.add(self.encode(" " + needle.head), 0.3 if not again else 0.5)
        out.add(self.encode(" " + needle.value), VALUE_WEIGHT if again else 0)
        out.add(self.encode("."), 0.3)

    def answer(self, rng: random.Random, out: Sequence, needle: Needle) -> None:
        """One question about a needle, in a turn of its own."""
        out.add([USER_ID], 0)
        out.add(self.encode(needle.question), 0)
        out.add([ASSISTANT_ID], 0)
        if rng.random() < 0.15:
            out.add([THINK_ID], 0)
            out.add([*self.encode("I look it up in the text."), END_THINK_ID], 0.5)
        else:
            out.add([END_THINK_ID], 0)
        out.add(self.encode(needle.head), 1)
        out.add(self.encode(" " + needle.value), VALUE_WEIGHT)
        out.add([*self.encode("."), EOS_ID], 1)

    def recall(self, rng: random.Random, out: Sequence) -> None:
        """Facts in a haystack, asked for at the end, one by one."""
        most = max(2, min(40, out.length // 36))
        count = rng.randint(1, most) if rng.random() < 0.7 else rng.randint(1, 4)
        needles: list[Needle] = []
        for _ in range(count):
            needles.append(draw_needle(rng, needles))
        num_asked = min(len(needles), max(1, rng.randint(1, 16 if out.length > 600 else 8)))
        asked = rng.sample(needles, num_asked)
        style = rng.random()  # of the haystack
        as_chat = rng.random() < 0.85
        room = out.length - 40 * num_asked - 26 * count - 10
        out.add([BOS_ID], 0)
        if as_chat:
            out.add([USER_ID], 0)
        room = max(room, 0)
        if rng.random() < 0.15:
            room = int(room * rng.random())  # a shorter one; what is left is filled with chats
        cuts = (
            sorted(rng.randrange(room + 1) for _ in range(count))
            if rng.random() < 0.8
            else [rng.randrange(room + 1)] * count
        )
        hay = self.hay(rng, room, style)
        before = 0
        for cut, needle in zip(cuts, needles, strict=True):
            out.add(hay[before:cut], 0.3)
            self.needle(out, needle, False)
            before = cut
        out.add(hay[before:], 0.3)
        if as_chat:
            first = True
            for needle in asked:
                if first:  # the first question ends the document's own turn
                    out.add(self.encode("\n\n"), 0)
                    mark = len(out.ids)
                    self.answer(rng, out, needle)
                    del out.ids[mark], out.weights[mark]
                    first = False
                else:
                    self.answer(rng, out, needle)
        else:
            for needle in asked:
                self.needle(out, needle, True)
        if out.room > 0:
            self.chats(rng, out)

    def hay(self, rng: random.Random, count: int, style: float) -> list[int]:
        """Text, or sentences that were said too often."""
        if style < 0.8 or count < 2:
            return self.slice(rng, count) if count else []
        out: list[int] = []
        pool = [self.slice(rng, rng.randrange(8, 30)) for _ in range(rng.randrange(1, 5))]
        while len(out) < count:
            out += rng.choice(pool)
        return out[:count]


def batch(maker: Maker, seed: int, step: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """ids [rows, length + 1], weights alike, positions [rows, length]."""
    made = [maker.make(random.Random(f"{seed}/{step}/{row}"), length) for row in range(rows)]
    ids, weights, positions = (np.stack(part) for part in zip(*made, strict=True))
    return ids, weights, positions
