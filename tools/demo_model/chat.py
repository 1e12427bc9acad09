"""Conversations for training: questions in many spellings, one answer each, and stories put together by chance."""

# ruff: noqa: E501  (lists of sentences)

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from . import facts


@dataclass(frozen=True)
class Turn:
    """One question and its answer; `about` is what a thought would say."""

    asked: str
    answer: str
    about: str


def _say(rng: random.Random, text: str) -> str:
    """As people type: now and then without capitals, or without a mark at the end."""
    if rng.random() < 0.12:
        text = text[0].lower() + text[1:]
    if rng.random() < 0.15:
        text = text.rstrip("?.!")
    return text


def known(rng: random.Random) -> Turn:
    """A line that is known by heart."""
    ways, answer = rng.choice(facts.SAID)
    return Turn(_say(rng, rng.choice(ways)) if rng.random() < 0.5 else rng.choice(ways), answer, "I know what to say.")


_ASK = (
    "What is {}?", "What is {}?", "What is {}?", "What's {}?", "Explain {}.", "Tell me about {}.", "Tell me what {} is.", "Please explain {}.",
    "Can you explain {}?", "Can you tell me about {}?", "Describe {}.", "I would like to know what {} is.", "Do you know what {} is?",
    "What does {} mean?", "Explain {} in simple words.", "What is {} for?", "Define {}.", "So what is {}?",
)  # fmt: skip


def topic(rng: random.Random) -> Turn:
    """A thing explained."""
    name, answer = rng.choice(list(facts.TOPICS.items()))
    shown = name
    for article in ("a ", "an ", "the "):
        if name.startswith(article) and rng.random() < 0.15:
            shown = name.removeprefix(article)
    return Turn(_say(rng, rng.choice(_ASK).format(shown)), answer, f"The question is about {name}.")


def capital(rng: random.Random) -> Turn:
    """A country's capital, or the country of a capital."""
    country, city = rng.choice(list(facts.CAPITALS.items()))
    asked = rng.choice(
        ("What is the capital of {}?", "What is the capital of {}?", "What's the capital of {}?", "Which city is the capital of {}?",
         "Name the capital of {}.", "Capital of {}?", "Tell me the capital of {}.", "the capital of {}", "Do you know the capital of {}?")
    )  # fmt: skip
    if rng.random() < 0.12 and not country.startswith("the U"):
        return Turn(
            _say(rng, f"Which country has the capital {city}?"),
            f"{city} is the capital of {country}.",
            "They ask for a country.",
        )
    return Turn(_say(rng, asked.format(country)), f"The capital of {country} is {city}.", "They ask for a capital.")


def opposite(rng: random.Random) -> Turn:
    a, b = rng.choice(list(facts.OPPOSITES.items()))
    asked = rng.choice(
        ("What is the opposite of {}?", "What's the opposite of {}?", "Opposite of {}?", "Name the opposite of {}.")
    )
    return Turn(_say(rng, asked.format(a)), f"The opposite of {a} is {b}.", "They ask for an opposite.")


def calendar(rng: random.Random) -> Turn:
    cycle = rng.choice((facts.DAYS, facts.MONTHS))
    i = rng.randrange(len(cycle))
    day = "day" if cycle is facts.DAYS else "month"
    if rng.random() < 0.6:
        asked = rng.choice((f"What comes after {cycle[i]}?", f"Which {day} comes after {cycle[i]}?"))
        return Turn(
            _say(rng, asked), f"After {cycle[i]} comes {cycle[(i + 1) % len(cycle)]}.", "They ask what comes next."
        )
    asked = rng.choice((f"What comes before {cycle[i]}?", f"Which {day} comes before {cycle[i]}?"))
    return Turn(_say(rng, asked), f"Before {cycle[i]} comes {cycle[i - 1]}.", "They ask what comes before.")


def arithmetic(rng: random.Random) -> Turn:
    """Small sums."""
    a, b = (rng.randrange(10 if rng.random() < 0.5 else 21) for _ in range(2))
    kind = rng.random()
    if kind < 0.55:
        sign, word, value = "+", "plus", a + b
    elif kind < 0.8:
        a, b = max(a, b), min(a, b)
        sign, word, value = "-", "minus", a - b
    else:
        a, b = a % 11, b % 11
        sign, word, value = "*", "times", a * b
    shown = f"{a} {word} {b}" if rng.random() < 0.4 else f"{a} {sign} {b}"
    asked = rng.choice(
        ("What is {}?", "What is {}?", "How much is {}?", "{}", "{} =", "Calculate {}.", "What's {}?", "{}?")
    )
    return Turn(asked.format(shown), f"{shown} is {value}.", "This is a sum.")


def _words(rng: random.Random, count: int) -> list[str]:
    pool = (facts.WORDS, facts.NOUNS, facts.ADJECTIVES, facts.NAMES)
    return [rng.choice(rng.choice(pool)) for _ in range(count)]


def invented(rng: random.Random) -> str:
    """A name that nobody taught: two or three syllables, several tokens."""
    onsets, vowels, ends = "bdfgjklmnprstvz", "aeiou", ("", "", "n", "r", "l", "s", "x", "m")
    syllables = [rng.choice(onsets) + rng.choice(vowels) for _ in range(rng.choice((1, 2, 2, 3)))]
    return ("".join(syllables) + rng.choice(onsets) + rng.choice(vowels) + rng.choice(ends)).capitalize()


def repeat(rng: random.Random) -> Turn:
    """Said again, word for word."""
    words = " ".join(_words(rng, rng.choice((1, 1, 2, 2, 3, 3, 4, 5, 6, 8, 12, 20))))
    asked = rng.choice(
        (
            "Repeat: {}",
            "Repeat after me: {}",
            "Say: {}",
            "Please repeat these words: {}",
            "Say {}",
            "Repeat the words: {}",
            "Echo: {}",
        )
    )
    return Turn(asked.format(words), words, "I repeat the words.")


def turned(rng: random.Random) -> Turn:
    words = _words(rng, rng.choice((2, 3, 3, 4, 5)))
    asked = f"Say these words in reverse order: {' '.join(words)}"
    return Turn(asked, " ".join(reversed(words)), "I turn the words around.")


def pick(rng: random.Random) -> Turn:
    words = _words(rng, rng.randrange(3, 9))
    which, word = rng.choice((("first", words[0]), ("last", words[-1]), ("second", words[1])))
    return Turn(
        f"What is the {which} word of: {' '.join(words)}", f"The {which} word is {word}.", "I look at the words."
    )


_KNOWN = {name.split(" ")[-1] for name in facts.TOPICS}


def unknown(rng: random.Random) -> Turn:
    """What a small model should not pretend to know."""
    thing = " ".join(_words(rng, rng.choice((1, 1, 2, 2, 3))))
    while thing in _KNOWN:
        thing = _words(rng, 1)[0]
    if rng.random() < 0.4:
        a = "an" if thing[0] in "aeiou" else "a"
        thing = f"{a} {thing}"
    asked = rng.choice(
        ("What is {}?", "Who is {}?", "How does {} work?", "Tell me about {}.", "Who invented {}?", "Where is {}?", "Why is {} important?",
         "When was {} made?", "Explain {}.", "What do you think about {}?", "Do you like {}?", "How do I make {}?", "Can you write about {}?")
    )  # fmt: skip
    return Turn(_say(rng, asked.format(thing)), facts.UNKNOWN[0].format(thing), "I do not know this.")


def story(rng: random.Random) -> Turn:
    """A few sentences that hang together."""
    name, friend = rng.sample(facts.NAMES, 2)
    adjective, other = rng.sample(facts.ADJECTIVES, 2)
    thing, place = rng.sample(facts.NOUNS, 2)
    asked = rng.choice(
        (f"Tell me a story about {name}.", f"Tell me a story about a {thing}.", "Tell me a story.", "Tell me a story", f"Write a story about {name} and a {thing}.",
         f"Write a short story about {name}.", f"Tell me about {name} and the {thing}.", "Write a story.", "Tell me a short story.", "tell me a story")
    )  # fmt: skip
    parts = [
        rng.choice((f"One morning {name} found a {adjective} {thing} by the river.", f"Once upon a time {name} had a {adjective} {thing}.",
                    f"{name} lived in a {other} house near the mill and owned a {adjective} {thing}.")),
        rng.choice((f"It had fallen from the boat of {friend}.", f"Nobody in the valley knew who had made the {thing}.",
                    f"An old miller had given the {thing} to {name}.")),
        rng.choice((f"{name} took it to {friend}, who lived at the {place}.", f"One day {friend} came to the mill and asked for the {thing}.",
                    f"{friend} wanted to see it, and so they met at the {place}.")),
        rng.choice((f'"This {thing} is mine," said {friend}, "but you may keep it."', f'"What a {adjective} {thing}!" said {friend}.',
                    f'"Let us share the {thing}," said {name}.')),
        rng.choice(("From that day on they were friends.", "They sat by the water until the sun went down.", "And the wheel of the mill turned as before.")),
    ]  # fmt: skip
    if "a story" in asked and "about" not in asked and "Write" not in asked:
        name_known = None
    else:
        name_known = name
    return Turn(asked, " ".join(parts), f"I tell a story about {name_known}." if name_known else "I tell a story.")


def introduction(rng: random.Random) -> list[Turn]:
    """A name, a place or a thing said once and asked for later."""
    name = rng.choice(facts.NAMES) if rng.random() < 0.5 else invented(rng)
    city, thing, colour = (
        rng.choice(list(facts.CAPITALS.values())),
        rng.choice(facts.NOUNS),
        rng.choice(facts.ADJECTIVES[:15]),
    )
    said, asked, reply, answer = rng.choice(
        (
            (f"My name is {name}.", ("What is my name?", "Do you know my name?", "Who am I?"), f"Nice to meet you, {name}.", f"Your name is {name}."),
            (f"I am {name}.", ("What is my name?", "Who am I?"), f"Nice to meet you, {name}.", f"Your name is {name}."),
            (f"I live in {city}.", ("Where do I live?", "Which city do I live in?"), f"{city} is a fine place.", f"You live in {city}."),
            (f"I have a {colour} {thing}.", ("What do I have?", "What do I own?"), f"A {colour} {thing}, how nice.", f"You have a {colour} {thing}."),
            (f"My favourite colour is {colour}.", ("What is my favourite colour?",), f"I like {colour} too.", f"Your favourite colour is {colour}."),
        )
    )  # fmt: skip
    between = [single(rng) for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))]
    greeting = rng.choice(("", "", "Hello. ", "Hi, ")) if said.startswith(("My name", "I am")) else ""
    return [Turn(_say(rng, greeting + said), reply, "They tell me something."), *between,
            Turn(_say(rng, rng.choice(asked)), answer, "They told me before.")]  # fmt: skip


KINDS: tuple[tuple[Callable[[random.Random], Turn], float], ...] = (
    (known, 6), (topic, 6), (capital, 3), (opposite, 1), (calendar, 1), (arithmetic, 3), (repeat, 2), (turned, 0.5), (pick, 1), (unknown, 2.5),
    (story, 2),
)  # fmt: skip


def single(rng: random.Random) -> Turn:
    """One turn of any kind."""
    kinds, weights = zip(*KINDS, strict=True)
    turn: Turn = rng.choices(kinds, weights)[0](rng)
    return turn


def conversation(rng: random.Random) -> list[Turn]:
    """One to four turns."""
    if rng.random() < 0.15:
        return introduction(rng)
    return [single(rng) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
