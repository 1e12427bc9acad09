"""What the demo model can do, and what serving it costs of that: recall in long prompts, perplexity, chat.

    python benchmarks/quality.py [--parts recall,perplexity,ablations,chat] [--json FILE]

Recall: one fact of four stands somewhere in a haystack of held-out text, and the prompt ends with a question about it.
Every mode gets the same questions, over HTTP, from `headrace serve`; besides how many it answers, what counts is that
modes which must agree give the same text to each. Ablations take parts of the attention away, in one process, to see
whether the recall comes from where it should. A part's figures replace the same part's in an existing FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import platform
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from tokenizers import Tokenizer
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from demo_model.tasks import Needle, draw_needle
from oracle.ours import MAX_POSITIONS, Ours
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
}
"""Prefix hit: what is asked was asked before, and the cache answers for the prompt."""
MUST_AGREE = ("monolithic fp8+fp4", "disaggregated fp8+fp4", "prefix hit fp8+fp4")
QUESTIONS = {1024: 44, 2048: 22, 4096: 22, 8192: 11, 16384: 11, 32000: 5}
"""Prompt tokens -> how many questions, at evenly spaced depths."""
NUM_NEEDLES = 4
ANSWER_TOKENS = 24

CHAT = (
    "Hello", "Who are you?", "What is a headrace?", "Tell me about the river.", "Who keeps the gate?",
    "What is disaggregated serving?", "What is the capital of France?", "What is 7 + 5?", "Tell me a joke.",
    "Repeat: copper falcon river",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """One prompt and what must be in the answer."""

    length: int
    depth: float
    prompt: str
    needle: Needle


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
        return Question(length, depth, "".join(parts), needles[0])

    def questions(self, length: int, count: int) -> list[Question]:
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


def ask(client: httpx.Client, prompt: str, max_tokens: int) -> str:
    """The greedy answer without a thought."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "reasoning_effort": "none",
        "temperature": 0,
        "max_tokens": max_tokens,
    }
    answer = client.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def ask_again(client: httpx.Client, prompt: str, max_tokens: int) -> str:
    """The answer of the second time, whose prompt must not have been computed again."""
    ask(client, prompt, max_tokens)
    names = ("headrace:prompt_tokens_total", "headrace:prompt_tokens_cached_total")
    before = sums(client.get("/metrics").text, *names)
    text = ask(client, prompt, max_tokens)
    after = sums(client.get("/metrics").text, *names)
    asked, cached = (later - earlier for later, earlier in zip(after, before, strict=True))
    assert cached > asked / 2, f"{cached} of {asked} prompt tokens were cached"
    return text


@contextlib.contextmanager
def asking(checkpoint: Path, mode: str) -> Iterator[Callable[[str, int], str]]:
    """How to ask in a mode, while its servers live."""
    with (
        served(checkpoint, MODES[mode]) as url,
        httpx.Client(base_url=url, timeout=600.0, trust_env=False) as client,
    ):
        yield functools.partial(ask_again if mode.startswith("prefix hit") else ask, client)


def recall(checkpoint: Path, modes: Sequence[str], limit: int) -> dict[str, Any]:
    """Each mode's answers, by length and depth."""
    haystack = Haystack(Tokenizer.from_file(str(checkpoint / "tokenizer.json")))
    asked = [q for length, count in QUESTIONS.items() if length <= limit for q in haystack.questions(length, count)]
    told: dict[str, Any] = {}
    for mode in modes:
        with asking(checkpoint, mode) as answer_to:
            rows = []
            for question in asked:
                begin_s = time.perf_counter()
                text = answer_to(question.prompt, ANSWER_TOKENS)
                rows.append(
                    {
                        "tokens": question.length,
                        "depth": round(question.depth, 3),
                        "right": text == f"{question.needle.head} {question.needle.value}.",
                        "answer": text,
                        "seconds": round(time.perf_counter() - begin_s, 2),
                    }
                )
        shares = {
            str(length): f"{sum(r['right'] for r in rows if r['tokens'] == length)}/{count}"
            for length, count in QUESTIONS.items()
            if length <= limit
        }
        print(f"recall, {mode}: {shares}", flush=True)
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


def ablations(checkpoint: Path, length: int, count: int) -> dict[str, Any]:
    """Recall, and perplexity on four pieces of held-out text, with parts of the attention taken away."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    marks = {name: tokenizer.token_to_id(name) for name in ("<｜User｜>", "<｜Assistant｜>", "</think>")}
    model = Ours(checkpoint, "bf16", "fp8")
    asked = Haystack(tokenizer).questions(length, count)
    windows = held_out_windows(checkpoint, 4, length)
    whole, told = transformer.cpu.attend, {}
    for name, removed in ABLATIONS.items():
        transformer.cpu.attend = attend_without(removed)
        try:
            right = 0
            for question in asked:
                text = tokenizer.encode(question.prompt, add_special_tokens=False).ids
                ids = [0, marks["<｜User｜>"], *text, marks["<｜Assistant｜>"], marks["</think>"]]
                want = tokenizer.encode(f"{question.needle.head} {question.needle.value}.").ids
                right += model.greedy(ids, len(want), [512]) == want
            text_perplexity = math.exp(negative_log_likelihood(model, windows, 512))
        finally:
            transformer.cpu.attend = whole
        told[name] = {"right": f"{right}/{count}", "perplexity": round(text_perplexity, 2)}
        print(f"{length} tokens, {name}: {told[name]}", flush=True)
    return {"tokens": length, **told}


def chat(checkpoint: Path) -> dict[str, str]:
    """Greedy answers of the disaggregated run."""
    with (
        served(checkpoint, MODES[MUST_AGREE[1]]) as url,
        httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client,
    ):
        told = {prompt: ask(client, prompt, 128) for prompt in CHAT}
    for prompt, text in told.items():
        print(f"{prompt!r}: {text!r}")
    return told


def disagreements(told: Mapping[str, Any]) -> dict[str, str]:
    """Of each mode that must agree with the first: answers that differ, of those that both were asked."""
    found = {}
    first, *others = MUST_AGREE
    for mode in others:
        if first in told and mode in told:
            answers = [
                {(q["tokens"], q["depth"]): q["answer"] for q in told[each]["questions"]} for each in (first, mode)
            ]
            both = answers[0].keys() & answers[1].keys()
            found[mode] = f"{sum(answers[0][key] != answers[1][key] for key in both)} of {len(both)}"
    return found


def main() -> None:
    from headrace.model.demo import ensure_demo

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint folder; the demo model by default")
    parser.add_argument("--parts", default="recall,perplexity,ablations,chat")
    parser.add_argument("--modes", default=",".join(MODES), help="of recall")
    parser.add_argument("--max-tokens", type=int, default=max(QUESTIONS), help="longest prompts of recall")
    parser.add_argument("--unpacked", type=Path, help="the same weights before they were packed, for perplexity")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = arguments.model or ensure_demo()
    old = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    parts = arguments.parts.split(",")
    found: dict[str, Any] = {}
    if "recall" in parts:
        answers = recall(checkpoint, arguments.modes.split(","), arguments.max_tokens)
        found["recall"] = {**old.get("recall", {}), **answers}
        found["answers that differ"] = disagreements(found["recall"])
    if "perplexity" in parts:
        found["perplexity"] = perplexity(checkpoint, arguments.unpacked, 16, min(2048, MAX_POSITIONS))
    if "ablations" in parts:
        found["ablations"] = ablations(checkpoint, 2048, 11)
    if "chat" in parts:
        found["chat"] = chat(checkpoint)
    config = ModelConfig.load(checkpoint)
    machine = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    about = {"seed": SEED, "commit": commit.stdout.strip(), "index_topk": config.index_topk, **machine}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**old, "about": about, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
