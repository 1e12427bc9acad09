"""A fact in a long prompt, through real processes: found by prefill and decode workers as by one, word for word."""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path

import pytest
from process.cluster import Cluster

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import quality

pytestmark = pytest.mark.process

BOOK = Path(__file__).resolve().parents[2] / "benchmarks" / "held_out.txt"
FACTS = (
    ("The number of the copper lantern is 4719.", "What is the number of the copper lantern?"),
    ("The code of the quiet falcon is maple zebra salt.", "What is the code of the quiet falcon?"),
    ("The secret word of the velvet anchor is thunder.", "What is the secret word of the velvet anchor?"),
    ("The number of the copper anchor is 3086.", "What is the number of the copper anchor?"),
)
HAY_CHARACTERS = 4_000
"""About 1,300 tokens: five times what one c4a layer attends to."""
SEED = 1
"""Of the haystacks; not the test's own: a small model misses a fact now and then, and what serves it is tested."""


def prompts() -> list[tuple[str, str]]:
    """Each fact asked for, all of them in each haystack at places of their own."""
    book, rng = BOOK.read_text(), random.Random(SEED)
    asked = []
    for sentence, question in FACTS:
        at = rng.randrange(len(book) - HAY_CHARACTERS)
        hay = book[at : at + HAY_CHARACTERS]
        cuts = sorted(rng.sample(range(HAY_CHARACTERS), len(FACTS)))
        parts = [hay[a:b] for a, b in zip([0, *cuts], [*cuts, HAY_CHARACTERS], strict=True)]
        facts = rng.sample([fact for fact, _ in FACTS], len(FACTS))
        text = "".join(f"{part} {fact}" for part, fact in zip(parts, facts, strict=False)) + parts[-1]
        asked.append((f"{text}\n\n{question}", sentence))
    return asked


def answers(cluster: Cluster, asked: list[tuple[str, str]]) -> list[str]:
    found = []
    for prompt, _ in asked:
        body = {"messages": [{"role": "user", "content": prompt}], "reasoning_effort": "none", "temperature": 0}
        answer = cluster.http.post("/v1/chat/completions", json=body, timeout=300.0)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["message"]["content"])
    return found


def test_needles_are_found_by_a_pair_as_by_one(pair: Cluster, one: Cluster):
    """Caches are fp8 and fp4, the pair ships its own; what is found is the same, and it is what was asked for."""
    asked = prompts()
    expected = [sentence for _, sentence in asked]
    assert answers(pair, asked) == expected
    assert answers(one, asked) == expected


@pytest.mark.slow
def test_needles_are_found_by_a_stream_whose_worker_is_killed(demo_checkpoint: Path):
    """The second decode worker goes on in the middle of the answer, and nobody could tell."""
    words = quality.MODES["migrated fp8+fp4"]
    with contextlib.closing(quality.Killing(demo_checkpoint, words)) as ask:
        for prompt, sentence in prompts()[:2]:
            answer = ask(prompt, quality.ANSWER_TOKENS)
            assert answer.text == sentence
            assert answer.notes["tokens before the kill"] < answer.notes["tokens of the answer"]
