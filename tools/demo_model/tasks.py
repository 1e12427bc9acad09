"""Training sequences: text, chats, things to find again at any distance, and things to count over all of it.

A sequence is made from (seed, step, row) alone, so that any number of processes make the same ones. Each token has a
weight in the loss: nought where nobody could know it, more where it must be remembered.

Counts are there for c128a. A fact is one place, which c4a's indexer can choose; who leads a count of hundreds of
ballots among sixteen words is in no 64 places, but it is in the mean over everything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from . import chat, facts
from .architecture import ASSISTANT_ID, BOS_ID, END_THINK_ID, EOS_ID, MAX_POSITION, THINK_ID, USER_ID

VALUE_WEIGHT = 4.0
"""Of what must be recalled, where a token of text has 1."""
COUNT_WEIGHT = 96.0
"""Of who won a count: one token for thousands."""
BALLOT_WEIGHT = 0.6
"""Of whom a ballot is for: the best guess is what was counted so far."""
ASKED_WEIGHT = 0.1
"""Of what a user says."""
JUMP = 128
"""Positions jump by multiples of this, at multiples of this."""

KINDS = ("number", "code", "word")
NEEDLES = {
    "number": "The number of the {} is",
    "code": "The code of the {} is",
    "word": "The secret word of the {} is",
    "name": "The name of the {} is",
}
QUESTIONS = {
    "number": "What is the number of the {}?",
    "code": "What is the code of the {}?",
    "word": "What is the secret word of the {}?",
    "name": "What is the name of the {}?",
}
OTHER_QUESTIONS = {
    "number": ("Tell me the number of the {}.", "Which number does the {} have?", "What number does the {} have?"),
    "code": ("Tell me the code of the {}.", "Which code does the {} have?", "What's the code of the {}?"),
    "word": ("Tell me the secret word of the {}.", "Which secret word does the {} have?", "secret word of the {}?"),
    "name": ("Tell me the name of the {}.", "What is the {} called?", "What's the name of the {}?"),
}
"""The same in other words, for training."""

BALLOT = " One for {}."
COUNT_QUESTION = "Which word wins the count?"
COUNT_ANSWER = "The count goes to {}."
CANDIDATES = facts.WORDS[:32]
LEAD = 1.35
"""How many times as many ballots as the second the winner has, where it is measured."""
NUM_CANDIDATES = 16


@dataclass(frozen=True)
class Needle:
    """One fact: an owner of two words, and a value of four digits, three words, one, or a name of several tokens."""

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


def draw_needle(rng: random.Random, others: list[Needle], kinds: tuple[str, ...] = KINDS) -> Needle:
    """Another owner than the others', though it may share a word with one of them."""
    taken = {(n.kind, n.owner) for n in others}
    while True:
        kind = rng.choice(kinds)
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
    elif kind == "name":
        value = chat.invented(rng)
    else:
        value = " ".join(rng.sample([w for w in facts.WORDS if w != adjective], 3 if kind == "code" else 1))
    return Needle(kind, f"{adjective} {noun}", value)


@dataclass(frozen=True)
class Count:
    """Ballots in the order in which they are read, and who has most of them."""

    ballots: tuple[str, ...]
    winner: str


def draw_count(rng: random.Random, num_ballots: int, names: int = NUM_CANDIDATES, lead: float = LEAD) -> Count:
    """The others share the rest almost evenly, so that a sample of the ballots seldom tells who won."""
    chosen = rng.sample(CANDIDATES, names)
    shares = [lead, *(rng.uniform(0.75, 1) for _ in chosen[1:])]
    second = max(1, int(num_ballots / sum(shares)))
    counts = [max(second + 1, round(second * lead)), *(max(1, int(second * share)) for share in shares[1:])]
    ballots = [name for name, count in zip(chosen, counts, strict=True) for _ in range(count)]
    rng.shuffle(ballots)
    return Count(tuple(ballots), chosen[0])


@dataclass
class Sequence:
    """Tokens and their weights, up to a length."""

    length: int
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)
    blind: bool = False
    """Nothing in it may attend to c4a's entries."""

    @property
    def room(self) -> int:
        return self.length - len(self.ids)

    def add(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)


class Row(NamedTuple):
    """A sequence, or several stacked."""

    ids: np.ndarray
    """[length + 1]"""
    weights: np.ndarray
    """[length + 1] of being predicted"""
    positions: np.ndarray
    """[length]"""
    blind: np.ndarray
    """[] bool"""


MIXTURES = {
    1: (
        {"prose": 0.22, "chats": 0.33, "echo": 0.12, "recall": 0.33},
        {"prose": 0.08, "chats": 0.06, "echo": 0.11, "recall": 0.75},
    ),
    2: (
        {"prose": 0.38, "chats": 0.30, "echo": 0.06, "recall": 0.26},
        {"prose": 0.16, "chats": 0.05, "echo": 0.03, "recall": 0.30, "count": 0.46},
    ),
}
"""How likely each kind is, by training: up to 512 tokens, and longer."""
SPREAD = {"echo": 0.2, "recall": 0.35, "count": 0.3}
"""How many of a kind have positions that jump."""
BLIND = 0.5
"""How many counts are taken without c4a: its sample of the ballots, learned first, would leave little to learn."""
CORRUPTED = 0.1
"""How many tokens of every second piece of prose are others: it is harder to learn by heart what is never the same."""


class Maker:
    """Makes sequences from tokenised text; `mixture` of 2 is the second training's, with counts."""

    def __init__(self, tokenizer: Tokenizer, text: np.ndarray, mixture: int = 1) -> None:
        self.tokenizer, self.text, self.mixture = tokenizer, text, mixture
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

    def make(self, rng: random.Random, length: int) -> Row:
        """One sequence of a kind that is drawn."""
        out = Sequence(length + 1)
        chances = MIXTURES[self.mixture][length > 512]
        (kind,) = rng.choices(list(chances), list(chances.values()))
        {"prose": self.prose, "chats": self.chats, "echo": self.echo, "recall": self.recall, "count": self.count}[kind](
            rng, out
        )
        spread = rng.random() < SPREAD.get(kind, 0)
        ids = np.array(out.ids[: length + 1], dtype=np.int64)
        weights = np.array(out.weights[: length + 1], dtype=np.float32)
        positions = np.arange(length, dtype=np.int64)
        if spread:
            for _ in range(rng.choice((1, 1, 2, 3))):
                free = (MAX_POSITION - 1 - int(positions[-1])) // JUMP
                far = int(free ** rng.random()) if free > 1 else 0
                positions[rng.randrange(length // JUMP) * JUMP :] += far * JUMP
        return Row(ids, weights, positions, np.array(out.blind))

    def prose(self, rng: random.Random, out: Sequence) -> None:
        out.add([BOS_ID], 0)
        text = self.slice(rng, out.room)
        weights = [1.0] * len(text)
        if self.mixture == 2 and rng.random() < 0.5:
            for i in range(len(text)):
                if rng.random() < CORRUPTED:
                    text[i], weights[i] = int(self.text[rng.randrange(len(self.text))]), 0.0
        out.ids += text
        out.weights += weights

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
        other = OTHER_QUESTIONS[needle.kind]
        again = self.mixture == 2 and rng.random() < 0.4
        out.add(self.encode(rng.choice(other).format(needle.owner) if again else needle.question), 0)
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
            needles.append(draw_needle(rng, needles, KINDS if self.mixture == 1 else (*KINDS, "name")))
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

    def count(self, rng: random.Random, out: Sequence) -> None:
        """Ballots all over a text, and who won."""
        out.blind = rng.random() < BLIND
        room = out.length - 24
        if rng.random() < 0.1:
            room = int(room * rng.uniform(0.3, 1))  # what is left is filled with chats
        count = draw_count(
            rng,
            int(room * rng.uniform(0.3, 0.8) / 4),
            rng.choice((3, 6, 10, 16, 16, 16)),
            1 + 0.15 * 14 ** rng.random(),
        )
        hay = self.slice(rng, max(2, room - 4 * len(count.ballots)))
        cuts = sorted(rng.randrange(len(hay) + 1) for _ in count.ballots)
        before_name, after_name = self.encode(" One for"), self.encode(".")
        out.add([BOS_ID, USER_ID], 0)
        before = 0
        for cut, name in zip(cuts, count.ballots, strict=True):
            out.add(hay[before:cut], 0.3)
            out.add(before_name, 0.05)
            out.add(self.encode(f" {name}"), BALLOT_WEIGHT)
            out.add(after_name, 0.05)
            before = cut
        out.add(hay[before:], 0.3)
        out.add(self.encode(f"\n\n{COUNT_QUESTION}"), 0)
        out.add([ASSISTANT_ID, END_THINK_ID], 0)
        head, _, end = COUNT_ANSWER.partition(" {}")
        out.add(self.encode(head), 1)
        out.add(self.encode(f" {count.winner}"), COUNT_WEIGHT)
        out.add([*self.encode(end), EOS_ID], 1)
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


def batch(maker: Maker, seed: int, step: int, rows: int, length: int) -> Row:
    """As many rows, stacked."""
    made = [maker.make(random.Random(f"{seed}/{step}/{row}"), length) for row in range(rows)]
    return Row(*(np.stack(part) for part in zip(*made, strict=True)))


def hard_counts(maker: Maker, seed: int, rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """ids [rows, length] that end before the winner's name, and the winners' ids: as `benchmarks/quality.py` asks."""
    ids, winners = [], []
    for row in range(rows):
        rng = random.Random(f"hard/{seed}/{row}")
        count = draw_count(rng, int(length * 0.15))
        head = COUNT_ANSWER.partition(" {}")[0]
        tail = [*maker.encode(f"\n\n{COUNT_QUESTION}"), ASSISTANT_ID, END_THINK_ID, *maker.encode(head)]
        hay = maker.slice(rng, length - len(tail) - 2 - 4 * len(count.ballots))
        cuts = sorted(rng.randrange(len(hay) + 1) for _ in count.ballots)
        text, before = [BOS_ID, USER_ID], 0
        for cut, name in zip(cuts, count.ballots, strict=True):
            text += [*hay[before:cut], *maker.encode(BALLOT.format(name))]
            before = cut
        ids.append([*text, *hay[before:], *tail])
        winners += maker.encode(f" {count.winner}")
    return np.array(ids), np.array(winners)
