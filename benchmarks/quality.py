"""What the demo model can do, and what serving it costs of that: recall in long prompts, perplexity, chat.

    python benchmarks/quality.py [--parts recall,counts,perplexity,ablations,chat] [--json FILE]

Recall: one fact of four stands somewhere in a haystack of held-out text, and the prompt ends with a question about it.
Counts: ballots for sixteen words stand all over such a haystack, and the question is which word has most. Every mode
gets the same questions, over HTTP, from `headrace serve`; besides how many it answers, what counts is that modes which
must agree give the same text to each. Ablations take parts of the attention away, in one process, to see whether the
answers come from where they should: a fact is one place, for c4a's indexer to choose; a count is in no 64 places, and
c128a's entries, all of which are read, hold it. A part's figures replace the same part's in an existing FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from demo_model.tasks import BALLOT, COUNT_ANSWER, COUNT_QUESTION, Needle, draw_count, draw_needle
from oracle.ours import MAX_POSITIONS, Ours
from process.cluster import Child, Cluster
from serving import sums, wait_ready

from headrace.kernels import cpu
from headrace.kernels.paged import PagedEntries
from headrace.model import transformer
from headrace.model.config import ModelConfig

ROOT = Path(__file__).resolve().parents[1]
SEED = 20261130
HELD_OUT = ROOT / "benchmarks" / "held_out.txt"
"""The ends of public-domain books that the demo model was trained on the rest of."""

MODES: Mapping[str, tuple[str, ...]] = {
    "monolithic bf16": ("--monolithic", "--kv-dtype", "bf16"),
    "monolithic fp8+fp4": ("--monolithic", "--kv-dtype", "fp8"),
    "disaggregated fp8+fp4": ("--prefill", "1", "--decode", "1", "--kv-dtype", "fp8"),
    "prefix hit fp8+fp4": ("--prefill", "1", "--decode", "1", "--kv-dtype", "fp8"),
    "migrated fp8+fp4": ("--prefill", "1", "--decode", "2", "--kv-dtype", "fp8"),
}
"""Prefix hit: what is asked was asked before, and the cache answers for the prompt. Migrated: the decode worker that
writes an answer is killed while it does, and the other one goes on."""
MUST_AGREE = ("monolithic fp8+fp4", "disaggregated fp8+fp4", "prefix hit fp8+fp4", "migrated fp8+fp4")
QUESTIONS = {1024: 44, 2048: 22, 4096: 22, 8192: 11, 16384: 11, 32000: 5}
"""Prompt tokens -> how many questions, at evenly spaced depths."""
COUNTS = {2048: 11, 4096: 11, 8192: 11}
"""The same for counts; their ballots are everywhere."""
BALLOT_SHARE = 0.6
"""Which part of a count's prompt is ballots."""
ABLATED = {"recall": {2048: 11}, "counts": {2048: 11}}
NUM_NEEDLES = 4
ANSWER_TOKENS = 24
STREAM_TOKENS = 256
"""Of a stream whose worker is to be killed: enough that there is time for it. What follows the answer's end is cut."""
DEATHS_OF_A_CLUSTER = 4
"""Each death of a worker doubles the pause before the next start, so the killed servers are replaced now and then."""

CHAT = (
    "Hello", "Who are you?", "What is a headrace?", "Tell me about the river.", "Who keeps the gate?",
    "What is disaggregated serving?", "What is the capital of France?", "What is 7 + 5?", "Tell me a joke.",
    "Repeat: copper falcon river",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One prompt and its answer."""

    length: int
    place: float
    """A fact's depth in the haystack; a count's number."""
    prompt: str
    expected: str


class Haystack:
    """Questions of any length and depth, from a seed."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.text = self._encode(HELD_OUT.read_text())

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def question(self, length: int, depth: float, number: int) -> Question:
        """A prompt of about `length` tokens; the asked fact stands at `depth`, the others anywhere."""
        rng = random.Random(f"{SEED}/{length}/{number}")
        needles: list[Needle] = []
        for _ in range(NUM_NEEDLES):
            needles.append(draw_needle(rng, needles))
        sentences = [f" {needle.head} {needle.value}." for needle in needles]
        ask = f"\n\n{needles[0].question}"
        room = length - sum(len(self._encode(text)) for text in (*sentences, ask)) - 4
        at = rng.randrange(len(self.text) - room)
        hay = self.text[at : at + room]
        cuts = [(round(depth * room), 0), *((rng.randrange(room + 1), i) for i in range(1, NUM_NEEDLES))]
        parts, before = [], 0
        for cut, i in sorted(cuts):
            parts += [self.tokenizer.decode(hay[before:cut]), sentences[i]]
            before = cut
        parts += [self.tokenizer.decode(hay[before:]), ask]
        return Question(length, round(depth, 3), "".join(parts), f"{needles[0].head} {needles[0].value}.")

    def count(self, length: int, number: int) -> Question:
        """A prompt of about `length` tokens, most of them ballots."""
        rng = random.Random(f"{SEED}/count/{length}/{number}")
        count = draw_count(rng, int(length * BALLOT_SHARE) // len(self._encode(BALLOT.format("salt"))))
        sentences = [BALLOT.format(name) for name in count.ballots]
        ask = f"\n\n{COUNT_QUESTION}"
        room = length - sum(len(self._encode(text)) for text in (*sentences, ask)) - 4
        at = rng.randrange(len(self.text) - room)
        cuts = sorted(rng.randrange(room + 1) for _ in sentences)
        parts, before = [], 0
        for cut, sentence in zip(cuts, sentences, strict=True):
            parts += [self.tokenizer.decode(self.text[at + before : at + cut]), sentence]
            before = cut
        parts += [self.tokenizer.decode(self.text[at + before : at + room]), ask]
        return Question(length, number, "".join(parts), COUNT_ANSWER.format(count.winner))

    def questions(self, part: str, length: int, count: int) -> list[Question]:
        """Of `recall` or `counts`."""
        if part == "counts":
            return [self.count(length, i) for i in range(count)]
        return [self.question(length, i / max(1, count - 1), i) for i in range(count)]


@contextlib.contextmanager
def served(checkpoint: Path, words: Sequence[str]) -> Iterator[str]:
    """`headrace serve` until the block ends; its address."""
    from headrace.cli.ports import free_ports

    (port,) = free_ports("127.0.0.1", 1)
    command = [sys.executable, "-P", "-m", "headrace", "serve", str(checkpoint), "--port", str(port), *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_ready(f"http://127.0.0.1:{port}", process)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Answer:
    """What was said, and what else is worth keeping."""

    text: str
    notes: Mapping[str, Any] = field(default_factory=dict)


def body_of(prompt: str, max_tokens: int) -> dict[str, Any]:
    """A greedy answer without a thought."""
    return {
        "messages": [{"role": "user", "content": prompt}],
        "reasoning_effort": "none",
        "temperature": 0,
        "max_tokens": max_tokens,
    }


def ask(client: httpx.Client, prompt: str, max_tokens: int) -> Answer:
    answer = client.post("/v1/chat/completions", json=body_of(prompt, max_tokens))
    answer.raise_for_status()
    return Answer(answer.json()["choices"][0]["message"]["content"])


def ask_again(client: httpx.Client, prompt: str, max_tokens: int) -> Answer:
    """The answer of the second time, whose prompt must not have been computed again."""
    ask(client, prompt, max_tokens)
    names = ("headrace:prompt_tokens_total", "headrace:prompt_tokens_cached_total")
    before = sums(client.get("/metrics").text, *names)
    answer = ask(client, prompt, max_tokens)
    after = sums(client.get("/metrics").text, *names)
    asked, cached = (later - earlier for later, earlier in zip(after, before, strict=True))
    assert cached > asked / 2, f"{cached} of {asked} prompt tokens were cached"
    return answer


class Killing:
    """Asks, and kills the decode worker that answers.

    Answers are over in a tenth of a second. So streams go on past their end (`ignore_eos`), and what counts is what the
    answer's own tokens say, of which the killed worker wrote the first and the other one the rest.
    """

    def __init__(self, checkpoint: Path, words: Sequence[str]) -> None:
        self._checkpoint, self._words = checkpoint, words
        self._tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
        self._end_ids = frozenset(ModelConfig.load(checkpoint).eos_token_ids)
        self._cluster: Cluster | None = None
        self._deaths = 0

    def __call__(self, prompt: str, max_tokens: int) -> Answer:
        cluster = self._whole()
        workers = {name: child for name, child in cluster.children().items() if name.startswith("decode")}
        before = cluster.count("router", "headrace:migrations_total")
        ids: list[int] = []
        written = 0
        body = {**body_of(prompt, STREAM_TOKENS), "stream": True, "ignore_eos": True, "return_token_ids": True}
        with cluster.http.stream("POST", "/v1/chat/completions", json=body, timeout=600.0) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                ids += (token for choice in event["choices"] for token in choice.get("token_ids", ()))
                if len(ids) > 1 and not written:  # the first one is the prefill worker's
                    os.kill(holder(workers).pid, signal.SIGKILL)
                    written = len(ids)
        assert cluster.count("router", "headrace:migrations_total") == before + 1, "the stream did not move"
        assert len(ids) == STREAM_TOKENS
        end = next((i for i, token in enumerate(ids) if token in self._end_ids), max_tokens)
        text = self._tokenizer.decode(ids[: min(end, max_tokens)], skip_special_tokens=False)
        return Answer(text, {"tokens before the kill": written, "tokens of the answer": min(end, max_tokens)})

    def _whole(self) -> Cluster:
        """Servers of which none is missing."""
        if self._cluster is None or self._deaths == DEATHS_OF_A_CLUSTER:
            self.close()
            self._cluster, self._deaths = Cluster(self._checkpoint, *self._words), 0
            self._cluster.wait_ready()
        cluster = self._cluster
        cluster.until(lambda: len(cluster.workers()) == 3, 60.0, "all workers live")
        cluster.until_clean(60.0)
        cluster.until(lambda: cluster.count("router", "headrace:router_index_state") == 3, 60.0, "all are connected")
        self._deaths += 1
        return cluster

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.__exit__(None)


def holder(workers: Mapping[str, Child]) -> Child:
    """The one that has a sequence."""
    for child in workers.values():
        state = httpx.get(f"http://127.0.0.1:{child.status_port}/state", timeout=10.0, trust_env=False).json()
        if state["engine"]["running"]:
            return child
    raise AssertionError("no decode worker has the stream")


@contextlib.contextmanager
def asking(checkpoint: Path, mode: str) -> Iterator[Callable[[str, int], Answer]]:
    """How to ask in a mode, while its servers live."""
    if mode.startswith("migrated"):
        with contextlib.closing(Killing(checkpoint, MODES[mode])) as killing:
            yield killing
        return
    with (
        served(checkpoint, MODES[mode]) as url,
        httpx.Client(base_url=url, timeout=600.0, trust_env=False) as client,
    ):
        yield functools.partial(ask_again if mode.startswith("prefix hit") else ask, client)


def answers(
    checkpoint: Path, part: str, sizes: Mapping[int, int], modes: Sequence[str], limit: int
) -> dict[str, dict[str, Any]]:
    """Each mode's answers of a part, by length and place."""
    haystack = Haystack(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    sizes = {length: count for length, count in sizes.items() if length <= limit}
    asked = [q for length, count in sizes.items() for q in haystack.questions(part, length, count)]
    told: dict[str, dict[str, Any]] = {}
    for mode in modes:
        with asking(checkpoint, mode) as answer_to:
            rows = []
            for question in asked:
                begin_s = time.perf_counter()
                answer = answer_to(question.prompt, ANSWER_TOKENS)
                rows.append(
                    {
                        "tokens": question.length,
                        "depth" if part == "recall" else "number": question.place,
                        "right": answer.text == question.expected,
                        "answer": answer.text,
                        **answer.notes,
                        "seconds": round(time.perf_counter() - begin_s, 2),
                    }
                )
        shares = {
            str(length): f"{sum(r['right'] for r in rows if r['tokens'] == length)}/{count}"
            for length, count in sizes.items()
        }
        print(f"{part}, {mode}: {shares}", flush=True)
        told[mode] = {"right": shares, "questions": rows}
    return told


# ---- in one process ----


def negative_log_likelihood(model: Ours, windows: Sequence[list[int]], chunk: int) -> float:
    """Mean over all predicted tokens, in nats."""
    total, count = 0.0, 0
    for ids in windows:
        logits = model.logits(ids, [chunk])[:-1]
        total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
        count += len(ids) - 1
    return total / count


def held_out_windows(checkpoint: Path, count: int, length: int) -> list[list[int]]:
    """Pieces of the held-out text, evenly spaced."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    ids: list[int] = tokenizer.encode(HELD_OUT.read_text(), add_special_tokens=False).ids
    step = (len(ids) - length) // (count - 1)
    return [[0, *ids[i * step : i * step + length - 1]] for i in range(count)]


def perplexity(checkpoint: Path, unpacked: Path | None, num_windows: int, length: int) -> dict[str, Any]:
    """On held-out text, for bf16 and quantised caches; and, where they are at hand, for weights before packing."""
    windows = held_out_windows(checkpoint, num_windows, length)
    told: dict[str, Any] = {"windows": num_windows, "tokens": length}
    runs = {"bf16 cache": (checkpoint, "bf16"), "fp8+fp4 cache": (checkpoint, "fp8")}
    if unpacked is not None:
        runs["weights before packing, bf16 cache"] = (unpacked, "bf16")
    for name, (path, kv_dtype) in runs.items():
        told[name] = round(math.exp(negative_log_likelihood(Ours(path, "bf16", kv_dtype), windows, 512)), 4)
        print(f"perplexity, {name}: {told[name]}", flush=True)
    told["cost of the fp8+fp4 cache"] = round(told["fp8+fp4 cache"] / told["bf16 cache"] - 1, 5)
    return told


Removed = str | None


def attend_without(removed: Removed) -> Callable[..., Tensor]:
    """`cpu.attend` of one sequence in plain tensors, with a part of what is attended to taken away."""

    def attend(
        q_THK: Tensor, positions_T: Tensor, seq_T: Tensor, window: PagedEntries, window_SW: Tensor,
        window_first_S: Tensor, entries: PagedEntries | None, history_SB: Tensor, ratio: int,
        chosen: tuple[Tensor, Tensor] | None, sink_H: Tensor, *, bf16: bool,
    ) -> Tensor:  # fmt: skip
        first, last = int(positions_T[0]), int(positions_T[-1])
        near = torch.arange(max(0, first - 127), last + 1)
        pages = window_SW[0, near // 64 - int(window_first_S[0])].long()
        keys = [cpu.read_entries(window, (pages * 64 + near % 64).contiguous())]
        gap = positions_T[:, None] - near
        seen = [(gap >= 0) & (gap < (1 if removed == "window" else 128))]
        if entries is not None and removed != f"c{ratio}a":
            visible = (positions_T + 1) // ratio
            count = int(visible[-1])
            numbers, per = torch.arange(count), entries.entries_per_page
            mask = numbers < visible[:, None]
            if chosen is not None and removed == "choice":
                mask &= numbers >= visible[:, None] - chosen[0].shape[1]
            elif chosen is not None:
                picked, valid = chosen[0].long(), torch.arange(chosen[0].shape[1]) < chosen[1][:, None]
                mask = torch.zeros(len(positions_T), count + 1, dtype=torch.bool)
                mask.scatter_(1, torch.where(valid, picked, count), True)
                mask = mask[:, :count]
            if count:
                slots = history_SB[0, numbers // per].long() * per + numbers % per
                keys.append(cpu.read_entries(entries, slots.contiguous()))
                seen.append(mask)
        key_SK, seen_TS = torch.cat(keys), torch.cat(seen, 1)
        scores = torch.einsum("thk,sk->ths", q_THK, key_SK) * 512**-0.5
        scores = scores.masked_fill(~seen_TS[:, None], -math.inf)
        sink = sink_H[None, :, None].expand(len(scores), -1, -1)
        paid = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
        out = torch.einsum("ths,sk->thk", paid, key_SK).contiguous()
        if bf16:
            cpu.round_bf16_(out)
        return out

    return attend


ABLATIONS: Mapping[str, Removed] = {
    "whole": None,
    "the most recent c4a entries instead of the indexer's choice": "choice",
    "without c4a entries": "c4a",
    "without c128a entries": "c128a",
    "without the window (each token sees itself alone)": "window",
}


def ablations(checkpoint: Path) -> dict[str, Any]:
    """Recall, counts, and perplexity on four pieces of held-out text, with parts of the attention taken away."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    marks = {name: tokenizer.token_to_id(name) for name in ("<｜User｜>", "<｜Assistant｜>", "</think>")}
    model = Ours(checkpoint, "bf16", "fp8", max_positions=2 * max(max(sizes) for sizes in ABLATED.values()))
    haystack = Haystack(tokenizer)
    asked = {
        f"{part} at {length}": haystack.questions(part, length, count)
        for part, sizes in ABLATED.items()
        for length, count in sizes.items()
    }
    windows = held_out_windows(checkpoint, 4, 2048)
    whole, told = transformer.cpu.attend, {}
    for name, removed in ABLATIONS.items():
        if removed is not None:
            transformer.cpu.attend = attend_without(removed)
        figures: dict[str, Any] = {}
        try:
            for group, questions in asked.items():
                right = 0
                for question in questions:
                    text = tokenizer.encode(question.prompt, add_special_tokens=False).ids
                    ids = [0, marks["<｜User｜>"], *text, marks["<｜Assistant｜>"], marks["</think>"]]
                    want = tokenizer.encode(question.expected).ids
                    right += model.greedy(ids, len(want), [512]) == want
                figures[group] = f"{right}/{len(questions)}"
            text_perplexity = math.exp(negative_log_likelihood(model, windows, 512))
        finally:
            transformer.cpu.attend = whole
        told[name] = {**figures, "perplexity": round(text_perplexity, 2)}
        print(f"{name}: {told[name]}", flush=True)
    return told


def chat(checkpoint: Path) -> dict[str, str]:
    """Greedy answers of the disaggregated run."""
    with (
        served(checkpoint, MODES[MUST_AGREE[1]]) as url,
        httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client,
    ):
        told = {prompt: ask(client, prompt, 128).text for prompt in CHAT}
    for prompt, text in told.items():
        print(f"{prompt!r}: {text!r}")
    return told


def disagreements(told: Mapping[str, Any]) -> dict[str, str]:
    """Of each mode that must agree with the first: answers that differ, of those that both were asked."""
    found = {}
    first, *others = MUST_AGREE
    for mode in others:
        if first in told and mode in told:
            said = [
                {(q["tokens"], q.get("depth", q.get("number"))): q["answer"] for q in told[each]["questions"]}
                for each in (first, mode)
            ]
            both = said[0].keys() & said[1].keys()
            found[mode] = f"{sum(said[0][key] != said[1][key] for key in both)} of {len(both)}"
    return found


def main() -> None:
    from headrace.model.demo import ensure_demo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; the demo model by default")
    parser.add_argument("--parts", default="recall,counts,perplexity,ablations,chat")
    parser.add_argument("--modes", default=",".join(MODES), help="of recall and counts")
    parser.add_argument("--max-tokens", type=int, default=max(QUESTIONS), help="longest prompts of both")
    parser.add_argument("--unpacked", type=Path, help="the same weights before they were packed, for perplexity")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = arguments.model or ensure_demo()
    old = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    topk = ModelConfig.load(checkpoint).index_topk
    old["about"] = {"seed": SEED, "commit": commit.stdout.strip(), "index_topk": topk, **machine}
    for part in arguments.parts.split(","):
        if part in ("recall", "counts"):
            sizes = QUESTIONS if part == "recall" else COUNTS
            told = answers(checkpoint, part, sizes, arguments.modes.split(","), arguments.max_tokens)
            old[part] = {**old.get(part, {}), **told}
            old["answers that differ"] = {**old.get("answers that differ", {}), part: disagreements(old[part])}
        elif part == "perplexity":
            old[part] = perplexity(checkpoint, arguments.unpacked, 16, min(2048, MAX_POSITIONS))
        elif part == "ablations":
            old[part] = ablations(checkpoint)
        elif part == "chat":
            old[part] = chat(checkpoint)
        else:
            parser.error(f"no part {part!r}")
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(old, indent=1) + "\n")


if __name__ == "__main__":
    main()
