"""Whole layers on one GPU: a stack of eight of V4-Flash's exact shape, random weights, decode and prefill.

    python benchmarks/layers.py --out results/layers_h200_20261130.json

Decode is a replay of the engine's own graph (plan, layers, head); prefill is chunks as the engine computes them. Times
by CUDA events, medians; shares and launches by torch's profiler in a run of its own. Contexts of a batch have pages of
their own, filled with small random values; positions end a group of 128, so every compressor pools. Nothing here says
anything about quality: weights are noise.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.core.pools import PoolKind
from headrace.engine.build import layer_views
from headrace.engine.plan import Slice, plan_batch
from headrace.kernels.cuda import dense, experts
from headrace.kernels.cuda.dense import Tile
from headrace.kernels.cuda.hopper import FastHopperOps, HopperOps
from headrace.kernels.device import PlainOps
from headrace.kvcache.layout import CacheLayout, CacheShape
from headrace.kvcache.pools import CachePools
from headrace.kvcache.sequence import SequencePages
from headrace.model.checkpoint import tensor_table
from headrace.model.config import ModelConfig
from headrace.model.device import DeviceTransformer, Lanes, StepArrays
from headrace.model.device_graphs import GraphedTransformer

RATIOS = (0, 0, 4, 128, 4, 128, 4, 128)
"""V4-Flash's first eight layers."""
FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096,
    "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024,
    "o_groups": 8, "o_lora_rank": 1024, "sliding_window": 128, "compress_rope_theta": 160000, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "max_position_embeddings": 1048576, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512,
    "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 2048,
    "num_hash_layers": 3, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6, "hidden_act": "silu", "vocab_size": 129280, "num_nextn_predict_layers": 0,
    "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "attention_bias": False,
}  # fmt: skip


class RandomWeights(Mapping[str, torch.Tensor]):
    """Each tensor is made when it is asked for, on the GPU: the whole would not fit twice."""

    def __init__(self, config: ModelConfig) -> None:
        self._table = tensor_table(config)
        self._experts = config.num_experts
        self._generator = torch.Generator("cuda").manual_seed(1)

    def __getitem__(self, name: str) -> torch.Tensor:
        shape = self._table[name].shape
        if name.endswith("tid2eid"):
            keys = torch.rand(shape[0], self._experts, device="cuda", generator=self._generator)
            return keys.topk(shape[1], 1).indices
        if name.endswith("norm.weight"):
            return torch.ones(shape, device="cuda")
        values = torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(generator=self._generator)
        return values.mul_(shape[-1] ** -0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


def make_pools(layout: CacheLayout, blocks: int, sequences: int, windows: int) -> CachePools:
    """Entries of small values and scales of 1, everywhere."""
    numbers = {
        PoolKind.HISTORY: blocks, PoolKind.WINDOW: windows, PoolKind.STATE: sequences, PoolKind.SNAPSHOT: 1,
    }  # fmt: skip
    pools = CachePools(layout, numbers, "cuda")
    for kind in (PoolKind.HISTORY, PoolKind.WINDOW):
        storage = pools.storage(kind)
        storage.random_(0, 60)
        for region in layout.pools[kind].regions:
            entry = layout.entry(region.stream)
            begin = region.offset + region.rows * entry.data_bytes
            storage[:, begin : begin + region.rows * entry.scale_bytes] = 127
    pools.storage(PoolKind.STATE).zero_()
    return pools


def decode_step(batch: int, context: int, layout: CacheLayout, blocks_in_pool: int) -> StepArrays:
    """One token of each sequence at the last position of `context`; history pages are in no order.

    Where the pool does not hold them all, sequences share their pages in turn, as they would share a prefix.
    """
    blocks, position = context // 256, context - 1
    own = min(batch, blocks_in_pool // blocks)
    order = np.random.default_rng(1).permutation(blocks_in_pool)[: own * blocks].astype(np.int32)
    table = order.reshape(own, blocks)[np.arange(batch) % own]
    every, first = np.arange(batch, dtype=np.int32), (position - 127) // 64
    window = (every[:, None] * 3 + np.arange(3)).astype(np.int32)
    of = position // 64 - first
    last = table[:, position // 256]
    rng = np.random.default_rng(2)
    same = lambda value: np.full(batch, value, dtype=np.int32)  # noqa: E731
    return StepArrays(
        {
            "token_ids_T": rng.integers(0, 129280, batch).astype(np.int32),
            "positions_T": same(position), "seq_T": every, "first_row_T": every, "last_row_T": every, "ring_T": every,
            "window_slots_T": window[:, of] * 64 + position % 64,
            "slots4_T": last * 64 + position % 256 // 4, "slots128_T": last * 2 + position % 256 // 128,
            "history_SB": table, "window_SW": window, "window_first_S": same(first), "logit_rows_R": every,
        },
        batch, batch, 1,
    )  # fmt: skip


def median_ms(act: Callable[[], object], times: int) -> float:
    """Of single runs between events, after two that do not count."""
    taken = []
    for i in range(times + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        act()
        end.record()
        end.synchronize()
        if i >= 2:
            taken.append(begin.elapsed_time(end))
    return statistics.median(taken)


FEW = [
    Tile(64, 32, 128, 4, 4), Tile(64, 32, 256, 4, 3), Tile(64, 32, 256, 4, 4), Tile(64, 64, 128, 4, 4),
    Tile(64, 16, 256, 4, 4), Tile(64, 32, 64, 4, 8), Tile(64, 64, 64, 4, 6), Tile(64, 16, 128, 4, 8),
    Tile(64, 16, 512, 4, 2), Tile(64, 32, 128, 4, 6),
]  # fmt: skip
MANY = [Tile(128, 256, 64, 8, 3), Tile(128, 256, 64, 8, 4), Tile(128, 128, 64, 4, 4), Tile(256, 128, 64, 8, 3)]
UP = [
    Tile(128, 128, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(64, 128, 64, 4, 4), Tile(64, 128, 64, 8, 4),
    Tile(256, 64, 64, 8, 3),
]  # fmt: skip
DOWN = [
    Tile(128, 256, 64, 8, 3), Tile(128, 128, 64, 8, 4), Tile(128, 256, 64, 8, 4), Tile(64, 256, 64, 4, 4),
    Tile(64, 256, 64, 8, 4), Tile(256, 128, 64, 8, 3),
]  # fmt: skip


def graph_us(calls: list[Callable[[], object]]) -> float:
    """Of one of several calls over different weights, in a graph, so that neither launches nor the cache count."""
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_ms(graph.replay, 5) * 1e3 / len(calls)


def tune(model: DeviceTransformer) -> dict[str, Any]:
    """The fastest tiles of the products, set for this process; no bit depends on them."""
    found: dict[str, Any] = {}
    layers = model.layers
    heads = model.config.num_heads * 512
    shapes = {tuple(layer.of_x.shape) for layer in layers} | {tuple(layer.of_qr[:heads].shape) for layer in layers}
    shapes |= {tuple(layer.of_qr[heads:].shape) for layer in layers if layer.index is not None}
    shapes |= {tuple(layers[0].wo_b.shape), tuple(model.head.shape)}
    for columns, depth in sorted(shapes):
        copies = max(2, min(12, (200 << 20) // (columns * depth * 2)))
        weights = [torch.randn(columns, depth, device="cuda", dtype=torch.bfloat16) for _ in range(copies)]
        times = {}
        for tile in FEW:
            both = []
            for rows in (1, 64):
                x = torch.randn(rows, depth, device="cuda", dtype=torch.bfloat16)
                both.append(graph_us([lambda w=w, x=x, t=tile: dense.linear(x, w, x.dtype, tile=t) for w in weights]))
            times[tile] = both
        best = min(times, key=lambda tile: sum(times[tile]))
        dense.FEW_ROWS[columns, depth] = best
        found[f"{columns} x {depth}"] = {str(tile): [round(us, 1) for us in both] for tile, both in times.items()}
        print("tune", columns, depth, best, found[f"{columns} x {depth}"], flush=True)
    grouped = layers[0].wo_a
    times = {}
    for tile in FEW:
        both = []
        for rows in (1, 64):
            x = torch.randn(rows, *grouped.shape[::2], device="cuda", dtype=torch.bfloat16)
            every = [layer.wo_a for layer in layers]
            both.append(graph_us([lambda w=w, x=x, t=tile: dense.linear_groups(x, w, x.dtype, tile=t) for w in every]))
        times[tile] = both
    best = min(times, key=lambda tile: sum(times[tile]))
    dense.FEW_ROWS[grouped.shape[1], grouped.shape[2]] = best
    print("tune groups", best, {str(t): [round(us, 1) for us in both] for t, both in times.items()}, flush=True)
    totals = {}
    for tile in MANY:
        totals[tile] = 0.0
        for weight in (layers[2].of_x, layers[2].of_qr, layers[2].wo_b):
            x = torch.randn(8192, weight.shape[1], device="cuda", dtype=torch.bfloat16)
            totals[tile] += graph_us([lambda w=weight, x=x, t=tile: dense.linear(x, w, x.dtype, tile=t)] * 2)
    dense.MANY_ROWS = min(totals, key=lambda tile: totals[tile])
    print("tune many", dense.MANY_ROWS, {str(tile): round(us) for tile, us in totals.items()}, flush=True)
    x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)
    logits = torch.rand(8192, 256, device="cuda")
    zeros = torch.zeros(256, device="cuda")
    ids, shares = experts.gate(logits, zeros, None, zeros.long(), 6, 1.5, normalise=True)
    own, pairs = layers[0].experts, {}
    for up in UP:
        for down in DOWN:
            if up.m == down.m:
                experts.MANY_ROWS = up, down
                pairs[up, down] = graph_us(
                    [lambda: experts.experts(x, ids, shares, own.w13, own.w2, own.limit, x.dtype)] * 2
                )
    experts.MANY_ROWS = min(pairs, key=lambda pair: pairs[pair])
    print("tune experts", experts.MANY_ROWS, {str(pair): round(us) for pair, us in pairs.items()}, flush=True)
    return found


KINDS = {
    "decode_attention": "K5 attention", "prefill_dense": "K6 attention", "prefill_rows": "K6 attention",
    "prefill_window": "K6 attention",
    "entry_rows": "K6 gather", "mhc": "K7 hyper-connections", "compress": "K1 + K2 entries",
    "index_keys": "K1 index keys",
    "index_queries": "index queries", "index_logits": "K4 logits", "top_k": "K4 top-k", "expert_up": "experts",
    "expert_down": "experts", "expert_sum": "experts", "route": "K8 gate, routing", "gate": "K8 gate, routing",
    "norm_pair": "norms", "turn_back": "norms", "norm_rope": "norms", "streams_head": "head",
    "linear": "dense products",
    "nvjet": "dense products", "gemm": "dense products", "cutlass": "dense products", "splitK": "dense products",
}  # fmt: skip


def shares(act: Callable[[], object]) -> dict[str, Any]:
    """Kernels of one uncaptured run: how many, and microseconds by kind."""
    from torch.profiler import ProfilerActivity, profile

    act()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        act()
        torch.cuda.synchronize()
    by_kind: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    for event in seen.events():
        if event.device_type != torch.autograd.DeviceType.CUDA or event.name.startswith("Mem"):
            continue
        kind = next((kind for part, kind in KINDS.items() if part in event.name), "plan and others")
        by_kind[kind][0] += event.time_range.elapsed_us()
        by_kind[kind][1] += 1
    ordered = sorted(by_kind.items(), key=lambda item: -item[1][0])
    return {
        "kernels": int(sum(n for _, n in by_kind.values())),
        "us": round(sum(us for us, _ in by_kind.values()), 1),
        "by_kind": {kind: {"us": round(us, 1), "launches": int(n)} for kind, (us, n) in ordered},
    }


def launches_a_layer(model: DeviceTransformer, step: StepArrays, views: list[Any]) -> dict[str, int]:
    """Kernels of a layer of each class in decode: those of the stack less those of it without the layer."""
    found = {}

    def count(layers: list[int]) -> int:
        kept = model.layers
        model.layers = [kept[i] for i in layers]
        try:
            return int(shares(lambda: model.compute(step, [views[i] for i in layers]))["kernels"])
        finally:
            model.layers = kept

    for name, layer in (("window", 0), ("c4a", 2), ("c128a", 3)):
        found[name] = count([0, layer]) - count([0]) if layer else count([0, 1]) - count([0])
    return found


def measure(
    ops: PlainOps, arguments: argparse.Namespace, model: DeviceTransformer, pools: CachePools
) -> dict[str, Any]:
    model.ops = ops
    layout, views, rows = pools.layout, layer_views(pools.layout, pools), {}
    blocks = pools.storage(PoolKind.HISTORY).shape[0]
    graphed = GraphedTransformer(model, max_tokens=64, max_blocks=4096)
    for context in (8192, 131072, 1048576):
        for batch in (1, 16, 64):
            step = decode_step(batch, context, layout, blocks)
            logits = graphed.replay(step, views)
            assert not logits[:batch].isnan().any()
            graph = next(reversed(graphed._captured.values())).graph
            row: dict[str, Any] = {"step_ms": round(median_ms(graph.replay, arguments.repeats), 4)}
            if batch * context // 256 > blocks:
                row["contexts"] = blocks * 256 // context
            row |= shares(lambda step=step: model.compute(step, views))
            rows[f"decode batch {batch} context {context}"] = row
            print(
                ops.name, f"decode {batch} x {context}", row["step_ms"], "ms", row["kernels"], "kernels", row["by_kind"]
            )
    lanes, model._lanes = model._lanes, Lanes(torch.device("cpu"), 0)
    graphed = GraphedTransformer(model, max_tokens=64, max_blocks=4096)
    for context in (8192, 131072):
        for batch in (1, 16):
            graphed.replay(decode_step(batch, context, layout, blocks), views)
            graph = next(reversed(graphed._captured.values())).graph
            row = {"step_ms": round(median_ms(graph.replay, arguments.repeats), 4)}
            rows[f"decode batch {batch} context {context}, one stream"] = row
            print(ops.name, f"decode {batch} x {context}, one stream", row["step_ms"], "ms")
    model._lanes = lanes
    step = decode_step(16, 8192, layout, blocks)
    result: dict[str, Any] = {"launches_a_layer": launches_a_layer(model, step, views)}
    print(ops.name, result)
    chunk = arguments.chunk
    for length in (8192, 32768):
        pages = SequencePages(tuple(range(length // 256)), (), 0)
        steps = []
        for start in range(0, length, chunk):
            window = range(max(0, start - 127) // 64, (start + chunk) // 64)
            pages = SequencePages(pages.history, tuple((page, page % 512) for page in window), 0)
            ids = np.random.default_rng(start).integers(0, 129280, chunk).tolist()
            wanted = [length - 1] if start + chunk == length else []
            steps.append(StepArrays.of(plan_batch([Slice(ids, start, pages, wanted)])))

        def prompt(steps: list[StepArrays] = steps) -> None:
            for step in steps:
                model.compute(step, views)
                torch.cuda.synchronize()

        last = steps[-1]
        row = {"ms": round(median_ms(prompt, 3), 3), "chunk": chunk}
        row |= {"last_chunk": shares(lambda last=last: model.compute(last, views))}
        rows[f"prefill {length}"] = row
        print(ops.name, f"prefill {length}", row["ms"], "ms", row["last_chunk"])
    return result | {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chunk", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--blocks", type=int, default=65536, help="history pages: 65536 hold 16 sequences of 1M tokens")
    parser.add_argument("--fast", action="store_true", help="the batch-dependent forms too")
    parser.add_argument("--tune", action="store_true", help="look for the products' tiles first")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    begin_s = time.monotonic()
    # All layers choose experts by the token's id, not only the first three: each form of the kernels and each context
    # reach the same ones, as many as a uniform routing does. Scores of noise would leave that to roundings.
    number = len(RATIOS)
    shape = FLASH | {"compress_ratios": [*RATIOS], "num_hidden_layers": number, "num_hash_layers": number}
    config = ModelConfig.from_dict(shape)
    layout = CacheLayout(CacheShape(RATIOS), "fp8")
    pools = make_pools(layout, arguments.blocks, 64, 1024)
    ops = HopperOps()
    device = torch.device("cuda", 0)
    model = DeviceTransformer(config, RandomWeights(config), ops, max_positions=1 << 20, device=device)
    torch.cuda.synchronize()
    print(f"made in {time.monotonic() - begin_s:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB")
    result: dict[str, Any] = {"ratios": RATIOS, "history_pages": arguments.blocks}
    result["card"] = torch.cuda.get_device_name()
    result["versions"] = {"torch": torch.__version__, "cuda": torch.version.cuda}
    try:
        if arguments.tune:
            result["tiles"] = tune(model)
        result[ops.name] = measure(ops, arguments, model, pools)
        if arguments.fast:
            result[FastHopperOps.name] = measure(FastHopperOps(), arguments, model, pools)
    finally:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
