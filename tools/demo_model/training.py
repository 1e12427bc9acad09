"""The training loop: which lengths when, Muon for matrices and Adam for the rest, and state that survives a call."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from .architecture import config_document
from .network import Network, Options, Shape, losses, use_compiler
from .tasks import COUNT_WEIGHT, VALUE_WEIGHT, Maker, batch, hard_counts

SEED = 20261130

STAGES: tuple[tuple[float, dict[int, float]], ...] = (
    (0.18, {512: 0.9, 2048: 0.1}),
    (0.40, {512: 0.60, 2048: 0.30, 8192: 0.10}),
    (0.70, {512: 0.42, 2048: 0.30, 8192: 0.28}),
    (1.00, {512: 0.42, 2048: 0.20, 8192: 0.22, 16384: 0.16}),
)
"""Until which part of the training, which length is how likely."""
AGAIN: tuple[tuple[float, dict[int, float]], ...] = ((1.00, {512: 0.20, 2048: 0.48, 8192: 0.24, 16384: 0.08}),)
"""The same for the second training, which goes on from the first's state with counts and more text."""
SELECT_FROM, ROUND_FROM, PACK_FROM = 0.10, 0.45, 0.80
"""From which part on the indexer chooses, cache values are rounded, and weights are packed."""
SNAPSHOT_S = 90.0
SLOWER = {"hc_": 0.15, "gate.weight": 0.3, "weights_proj.weight": 0.3}
"""What part of Adam's rate parameters get whose name holds this: few outputs, each a sum over many inputs."""
FILE_BYTES = 15 << 20


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One training."""

    steps: int
    """The number of the last one."""
    tokens: int
    """Of one step."""
    start: int = 0
    """The second training's first step, or nought."""
    matrix_rate: float = 0.02
    other_rate: float = 0.003
    warm_up: int = 100
    index_weight: float = 0.5
    decay: float = 0.02
    """Of matrices, for each unit of their rate."""
    decay_from: float = 0.55

    @classmethod
    def second(cls, steps: int, tokens: int, start: int) -> Plan:
        """Decaying sooner, and pulling harder at what was learned by heart."""
        return cls(steps=steps, tokens=tokens, start=start, decay=0.1, decay_from=0.35)

    def part(self, step: int) -> float:
        return (step - self.start) / (self.steps - self.start)

    def length(self, step: int) -> int:
        part = self.part(step)
        chances = next(c for until, c in (AGAIN if self.start else STAGES) if part < until or until == 1.0)
        draw = np.random.default_rng([SEED, step]).random()
        for length, chance in chances.items():
            draw -= chance
            if draw < 0:
                return min(length, self.tokens)
        return 512

    def options(self, step: int) -> Options:
        if self.start:
            return Options(select=True, rounding=True, packed_weights=True)
        part = self.part(step)
        return Options(select=part >= SELECT_FROM, rounding=part >= ROUND_FROM, packed_weights=part >= PACK_FROM)

    def rate(self, step: int, first: int, late: float) -> float:
        """Of the highest; `first` is where this call began, for optimisers that forgot; `late` the part of the time."""
        part = max(self.part(step), late)
        warm = min(1.0, (step - first + 1) / self.warm_up)
        return warm * min(1.0, max(0.0, (1 - part) / (1 - self.decay_from)))


class Steps(Dataset[tuple[Tensor, ...]]):
    """A step's batch by its number."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan, self.maker = folder, plan, None

    def __len__(self) -> int:
        return self.plan.steps

    def __getitem__(self, step: int) -> tuple[Tensor, ...]:
        if self.maker is None:
            self.maker = load_maker(self.folder, "train", 2 if self.plan.start else 1)
        length = self.plan.length(step)
        made = batch(self.maker, SEED, step, self.plan.tokens // length, length)
        ids, weights, positions, blind = (torch.from_numpy(part) for part in made)
        return ids.int(), weights, positions.int(), blind


def load_maker(folder: Path, part: str, mixture: int = 1) -> Maker:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with np.load(folder / "text.npz") as held:
        text = held[part]
    return Maker(Tokenizer.from_file(str(folder / "tokenizer.json")), text, mixture)


# ---- optimisers ----


def is_matrix(name: str, value: Tensor) -> bool:
    """What Muon moves: matrices inside layers, but not those that mix streams or route."""
    return (
        value.ndim >= 2
        and name.startswith("layers.")
        and "hc_" not in name
        and not name.endswith((".ape", "gate.weight", "weights_proj.weight"))
    )


@torch.no_grad()
def orthogonal(g: Tensor) -> Tensor:
    """Newton-Schulz towards the nearest matrix with equal singular values; [..., m, n]."""
    x = g.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) * 1.02 + 1e-6)
    for a, b, c in (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ):
        s = x @ x.mT
        x = a * x + (b * s + c * (s @ s)) @ x
    return x.mT if tall else x


class Muon:
    """Momentum, made orthogonal; matrices of one shape go together."""

    def __init__(self, named: list[tuple[str, Tensor]], groups: int) -> None:
        self.shapes: dict[tuple[int, ...], list[Tensor]] = {}
        self.groups = groups
        self.momentum = {id(p): torch.zeros_like(p) for _, p in named}
        for name, p in named:
            self.shapes.setdefault((*self._view(name, p).shape[-2:], p.numel()), []).append(p)
        self.views = {id(p): self._view(name, p).shape for name, p in named}

    def _view(self, name: str, p: Tensor) -> Tensor:
        if name.endswith("wo_a.weight"):
            return p.view(self.groups, -1, p.shape[-1])
        if name.endswith("w13"):  # two matrices in one
            return p.view(p.shape[0] * 2, -1, p.shape[-1])
        return p if p.ndim == 3 else p[None]

    @torch.no_grad()
    def step(self, rate: float, decay: float, beta: float = 0.95) -> None:
        for members in self.shapes.values():
            grads = [p.grad if p.grad is not None else torch.zeros_like(p) for p in members]
            held = [self.momentum[id(p)] for p in members]
            torch._foreach_lerp_(held, grads, 1 - beta)
            ahead = torch._foreach_lerp(grads, held, beta)
            shape = self.views[id(members[0])]
            moves = orthogonal(torch.stack([a.view(shape) for a in ahead]))
            scale = rate * max(1.0, shape[-2] / shape[-1]) ** 0.5
            torch._foreach_mul_(members, 1 - rate * decay)
            torch._foreach_add_(
                members, [m.reshape(p.shape).float() for m, p in zip(moves, members, strict=True)], alpha=-scale
            )


# ---- state ----


def save_state(network: Network, folder: Path, step: int, history: list[dict[str, Any]]) -> None:
    """Weights in files of a bounded size: large matrices in bf16, everything else in fp32."""
    folder.mkdir(parents=True, exist_ok=True)
    files: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in network.state_dict().items():
        value = value.detach().cpu()
        if value.is_floating_point() and value.numel() >= 1 << 15 and "hc_" not in name:
            value = value.bfloat16()
        if value.dtype == torch.int64:
            value = value.to(torch.int16)
        num_bytes = value.numel() * value.element_size()
        if size + num_bytes > FILE_BYTES:
            files.append({})
            size = 0
        files[-1][name.replace(".", "__")] = value.contiguous()
        size += num_bytes
    for i, tensors in enumerate(files):
        save_file(tensors, folder / f"state-{i}.safetensors")
    (folder / "state.json").write_text(json.dumps({"step": step, "history": history}, indent=1))


def load_state(network: Network, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """The step to go on from."""
    loaded: dict[str, Tensor] = {}
    for file in sorted(folder.glob("state-*.safetensors")):
        loaded.update(load_file(file))
    target = network.state_dict()
    network.load_state_dict({n: loaded[n.replace(".", "__")].to(t.dtype) for n, t in target.items()})
    told = json.loads((folder / "state.json").read_text())
    return int(told["step"]), list(told["history"])


# ---- the loop ----


def counts_right(network: Network, data: Path, tokens: int, device: torch.device) -> dict[int, dict[str, float]]:
    """Which part of hard counts over held-out text is right, whole and with a class of entries taken away.

    With gradients, though none is used: pieces that are compiled would be compiled again without.
    """
    maker, found = load_maker(data, "held_out", 2), {}
    for length in (2048, 8192):
        ids, winners = (
            torch.from_numpy(x).to(device) for x in hard_counts(maker, SEED, max(1, tokens // length), length)
        )
        positions = torch.arange(length, device=device).expand(len(ids), -1)
        found[length] = {}
        for name, removed in (("whole", None), ("c4a", 4), ("c128a", 128)):
            network.options = replace(network.options, removed=removed)
            last = network(ids, positions, torch.zeros(len(ids), dtype=torch.bool, device=device))
            guess = network.logits(last.view(len(ids), length, -1)[:, -1].detach()).argmax(-1)
            del last  # with all that its gradients would need
            found[length][name] = (guess == winners).float().mean().item()
    network.options = replace(network.options, removed=None)
    return found


def train(
    data: Path,
    out: Path,
    plan: Plan,
    *,
    resume: Path | None,
    whole: Path,
    seconds: float,
    share: float,
    workers: int,
    compiled: bool,
) -> None:
    """Train from where `whole` (this machine, optimisers too) or `resume` stopped, until done or out of `seconds`.

    In these, `share` of what is left of the plan should be done. Leaves its state in both `whole` and `out`.
    """
    begin = time.monotonic()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda" if cuda else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    network = Network(Shape.of(config_document()), SEED)
    network.dtype = torch.bfloat16 if cuda else torch.float32
    first, history = 0, []
    if resume is not None and not whole.exists():
        first, history = load_state(network, resume)
    network.to(device)
    if compiled:
        use_compiler()
    named = [(n, network.w(n)) for n in network.names]
    muon = Muon([(n, p) for n, p in named if is_matrix(n, p)], network.shape.groups)
    rest = [p for n, p in named if not is_matrix(n, p)]
    slower = {n: next((part for key, part in SLOWER.items() if key in n), 1.0) for n, p in named if not is_matrix(n, p)}
    paces = sorted(set(slower.values()))
    adam = torch.optim.AdamW(
        [{"params": [network.w(n) for n, part in slower.items() if part == pace]} for pace in paces],
        lr=plan.other_rate, betas=(0.9, 0.98), eps=1e-10, weight_decay=0.0, fused=cuda,
    )  # fmt: skip
    forgot = True
    if whole.exists():
        held = torch.load(whole, map_location=device, weights_only=True)
        network.load_state_dict(held["network"])
        adam.load_state_dict(held["adam"])
        for (_, p), m in zip([(n, p) for n, p in named if is_matrix(n, p)], held["momentum"], strict=True):
            muon.momentum[id(p)].copy_(m)
        first, history = int(held["step"]), json.loads(held["history"])
        forgot = False
    start = first if forgot else -plan.warm_up
    loader = DataLoader(
        Steps(data, plan), batch_size=None, sampler=range(first, plan.steps), num_workers=workers, pin_memory=cuda,
        prefetch_factor=6 if workers else None,
    )  # fmt: skip
    step, tokens, marked = first, 0, time.monotonic()
    snapshot = SNAPSHOT_S
    sums: dict[str, list[Tensor]] = {}
    iterator: Iterator[tuple[Tensor, ...]] = iter(loader)
    for ids, weights, positions, blind in iterator:
        ids, weights, positions, blind = (t.to(device, non_blocking=True) for t in (ids, weights, positions, blind))
        ids = ids.long()
        network.options = plan.options(step)
        h = network(ids[:, :-1], positions.long(), blind)
        targets, counted = ids[:, 1:].flatten(), weights[:, 1:].flatten()
        lost, each = losses(network.logits(h), targets, counted)
        lost = lost / counted.sum()
        index = torch.stack(network.index_losses).mean() if network.index_losses else lost.new_zeros(())
        (lost + plan.index_weight * index).backward()
        spent = time.monotonic() - begin
        done = plan.part(first)
        rate = plan.rate(step, start, done + (1 - done) * share * (spent / seconds))
        muon.step(plan.matrix_rate * rate, plan.decay)
        for group, pace in zip(adam.param_groups, paces, strict=True):
            group["lr"] = plan.other_rate * rate * pace
        torch.nn.utils.clip_grad_norm_(rest, 1.0)
        adam.step()
        network.zero_grad(set_to_none=True)
        with torch.no_grad():
            for layer, load in network.loads.items():
                bias = getattr(network, f"bias_{layer}")
                bias += 0.003 * rate * (load.mean() - load).sign()
            length = str(ids.shape[1] - 1)
            recalled = counted == VALUE_WEIGHT
            sums.setdefault(f"loss/{length}", []).append(lost.detach())
            sums.setdefault(f"recall/{length}", []).append((each * recalled).sum() / recalled.sum().clamp(min=1))
            sums.setdefault(f"text/{length}", []).append(
                (each * (counted == 1)).sum() / (counted == 1).sum().clamp(min=1)
            )
            won = counted == COUNT_WEIGHT
            if plan.start and length != "512":
                sums.setdefault(f"count/{length}", []).append((each * won).sum() / won.sum().clamp(min=1))
            sums.setdefault("index", []).append(index.detach())
        step += 1
        tokens += targets.numel()
        over = time.monotonic() - begin > seconds
        if plan.start and (step % 200 == 0 or over or step == plan.steps):
            for length, shares in counts_right(network, data, plan.tokens, device).items():
                for name, right in shares.items():
                    sums.setdefault(f"right/{length}/{name}", []).append(torch.tensor(right))
        if step % 100 == 0 or over or step == plan.steps or step - first in (1, 20):
            told = {k: round(torch.stack(v).mean().item(), 4) for k, v in sorted(sums.items())}
            now = time.monotonic()
            told = {"step": step, "rate": round(rate, 3), "tokens_per_s": round(tokens / (now - marked)), **told}
            print(f"{now - begin:6.1f} s", json.dumps(told), flush=True)
            history.append(told)
            sums, tokens, marked = {}, 0, now
            if not math.isfinite(told["index"]):
                raise SystemExit("the loss is not finite")
        if over:
            break
        if spent > snapshot:
            save_state(network, out, step, history)
            snapshot = spent + SNAPSHOT_S
    save_state(network, out, step, history)
    whole.parent.mkdir(parents=True, exist_ok=True)
    torch.save(
        {
            "network": network.state_dict(), "adam": adam.state_dict(), "step": step, "history": json.dumps(history),
            "momentum": [muon.momentum[id(p)] for n, p in named if is_matrix(n, p)],
        },
        whole,
    )  # fmt: skip
    print(f"stopped at step {step} of {plan.steps} after {time.monotonic() - begin:.0f} s", flush=True)
