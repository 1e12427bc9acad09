"""What transformers says: logits at every position of a prompt, and greedy tokens, with how far each can be trusted.

fp32, eager, one sequence. A choice of experts or of entries that was nearly a tie can fall either way in a correct
engine, so the nearest miss of every choice is recorded. A prompt is grown in pieces, and a piece in which a choice is
nearer than `TIE` is drawn again: what is left has no position in doubt. Greedy tokens cannot be drawn again; of them
those count that come before the first near tie. Results are kept in `.cache/oracle`, under a hash of what made them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from .builder import Variant, oracle_model

CACHE_NAME = "cache" if hasattr(MoeCausalLMOutputWithPast, "cache") else "past_key_values"
"""What the library calls its cache: GPU hosts may have an older one."""
CACHE = Path(__file__).resolve().parents[2] / ".cache" / "oracle"
TIE = 1e-5
"""A chosen score nearer than this to one not chosen is in doubt: transformers' own noise reaches a fifth of it."""
MARGIN = 2e-4
"""A greedy token whose logit leads by less is in doubt: twice the tolerance on both logits."""
PIECE = 64
GREEDY = 32
MAX_DRAWS = 40


@dataclass(frozen=True)
class Continuation:
    """Greedy tokens after the first `length` tokens of the prompt."""

    length: int
    tokens: list[int]
    margins: list[float]
    """First logit minus second, for each token."""
    gaps: list[float]
    """Nearest miss of any choice in the pass that gave each token; the first is the prompt's, so beyond doubt."""

    @property
    def num_certain(self) -> int:
        """Leading tokens that every correct engine gives."""
        for index, (margin, gap) in enumerate(zip(self.margins, self.gaps, strict=True)):
            if margin < MARGIN or gap < TIE:
                return index
        return len(self.tokens)


@dataclass
class Record:
    """One variant's prompt and what follows."""

    prompt: list[int]
    logits: Tensor
    """[T, V] fp32."""
    gaps: Tensor
    """[T] nearest miss of any choice at each position; no less than TIE."""
    continuations: list[Continuation] = field(default_factory=list)


class Choices:
    """Watches a transformers model choose, and keeps the nearest miss at each position of the last pass."""

    def __init__(self, model: Any, index_topk: int) -> None:
        self.index_topk = index_topk
        self.first_position = 0
        self.gaps = torch.empty(0)
        for module in model.modules():
            kind = type(module).__name__
            if kind == "DeepseekV4TopKRouter":
                module.register_forward_hook(self._experts)
            elif kind == "DeepseekV4IndexerScorer":
                module.register_forward_hook(self._entries)

    def start(self, first_position: int, num_tokens: int) -> None:
        self.first_position = first_position
        self.gaps = torch.full((num_tokens,), float("inf"))

    def _experts(self, router: Any, _inputs: Any, output: Any) -> None:
        if router.top_k < router.num_experts:
            scores = router.score_fn(output[0].float()) + router.e_score_correction_bias
            top = scores.topk(router.top_k + 1, dim=-1).values
            self.gaps = torch.minimum(self.gaps, top[:, -2] - top[:, -1])

    def _entries(self, _scorer: Any, _inputs: Any, scores: Tensor) -> None:
        if scores.shape[-1] <= self.index_topk:
            return
        positions = self.first_position + torch.arange(scores.shape[1])
        visible = (positions + 1) // 4
        hidden = torch.arange(scores.shape[-1]) >= visible[:, None]
        top = scores[0].masked_fill(hidden, -torch.inf).topk(self.index_topk + 1).values
        gap = torch.where(visible > self.index_topk, top[:, -2] - top[:, -1], torch.inf)
        self.gaps = torch.minimum(self.gaps, gap)


class Session:
    """A transformers model in the middle of a sequence; `fork` keeps the state for going on twice."""

    def __init__(self, model: Any, choices: Choices, cache: Any = None, length: int = 0) -> None:
        self.model, self.choices, self.cache, self.length = model, choices, cache, length

    def fork(self) -> Session:
        return Session(self.model, self.choices, copy.deepcopy(self.cache), self.length)

    def feed(self, ids: Sequence[int]) -> Tensor:
        """[n, V] logits; the nearest misses are then in `choices.gaps`."""
        self.choices.start(self.length, len(ids))
        out = self.model(torch.tensor([list(ids)]), **{CACHE_NAME: self.cache}, use_cache=True)
        self.cache, self.length = out[CACHE_NAME], self.length + len(ids)
        logits: Tensor = out.logits[0]
        return logits


@torch.no_grad()
def compute(model: Any, v: Variant, length: int, cuts: Sequence[int]) -> Record:
    """Grow a prompt of `length` tokens without near ties; continue greedily from each of `cuts`."""
    g = torch.Generator().manual_seed(v.seed + 1000)
    session = Session(model, Choices(model, v.index_topk))
    prompt: list[int] = []
    logits: list[Tensor] = []
    gaps: list[Tensor] = []
    before_cut: dict[int, Session] = {}
    borders = sorted({*cuts, length, *range(PIECE, length, PIECE)})
    for border in borders:
        for _ in range(MAX_DRAWS):
            piece = torch.randint(2, v.vocab, (border - len(prompt),), generator=g).tolist()
            attempt = session.fork()
            rows = attempt.feed(piece)
            if attempt.choices.gaps.min() >= TIE:
                break
        else:
            raise RuntimeError(f"{v.name}: no piece without a near tie in {MAX_DRAWS} draws at {len(prompt)}")
        prompt += piece
        logits.append(rows)
        gaps.append(attempt.choices.gaps)
        session = attempt
        if border in cuts:
            before_cut[border] = session.fork()
    all_logits = torch.cat(logits)
    record = Record(prompt, all_logits, torch.cat(gaps))
    for cut in sorted(before_cut):
        record.continuations.append(continue_greedily(before_cut[cut], all_logits[cut - 1], cut))
    return record


def continue_greedily(session: Session, row: Tensor, length: int) -> Continuation:
    tokens: list[int] = []
    margins: list[float] = []
    gaps = [float("inf")]
    while True:
        top = row.topk(2)
        tokens.append(int(top.indices[0]))
        margins.append(float(top.values[0] - top.values[1]))
        if len(tokens) == GREEDY:
            return Continuation(length, tokens, margins, gaps)
        row = session.feed(tokens[-1:])[0]
        gaps.append(float(session.choices.gaps[0]))


# ---- kept results ----


def source_hash() -> str:
    """Changes with whatever could change a record."""
    import transformers

    digest = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for name in ("builder.py", "oracle.py"):
        digest.update((Path(__file__).parent / name).read_bytes())
    return digest.hexdigest()[:16]


def record(v: Variant, length: int, cuts: Sequence[int], released: Callable[[], Path]) -> Record:
    """The kept record, or a new one computed from the plain released checkpoint that `released` writes."""
    what = hashlib.sha256(repr((v, length, tuple(cuts))).encode()).hexdigest()[:16]
    file = CACHE / source_hash() / f"{v.name}-{length}-{what}.pt"
    if not file.exists():
        made = compute(oracle_model(released()), v, length, cuts)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}.part")
        torch.save(
            {
                "logits": made.logits,
                "gaps": made.gaps,
                "rest": json.dumps({"prompt": made.prompt, "continuations": [vars(c) for c in made.continuations]}),
            },
            partial,
        )
        partial.rename(file)
    stored = torch.load(file, weights_only=True)
    rest = json.loads(stored["rest"])
    return Record(rest["prompt"], stored["logits"], stored["gaps"], [Continuation(**c) for c in rest["continuations"]])
