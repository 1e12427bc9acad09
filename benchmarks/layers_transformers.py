"""The stack of `layers.py` in transformers' own implementation, on one GPU: its prefill and its decode steps.

    python benchmarks/layers_transformers.py --out results/layers_transformers_h200_20261201.json

Random weights of the same shapes in bf16, its dynamic cache in bf16, eager attention, grouped products for the experts,
no graphs: as the library runs when nothing is done to it. A prompt goes in the largest pieces that fit beside the
weights. Times by CUDA events, medians.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from layers import FLASH, RATIOS, median_ms

os.environ.setdefault("HF_HUB_OFFLINE", "1")
PIECES = (8192, 4096, 2048, 1024, 512)


def make_model(experts: str) -> Any:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config
    from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4ForCausalLM

    settings = {k: v for k, v in FLASH.items() if k not in ("architectures", "model_type")}
    settings |= {"compress_ratios": [*RATIOS], "num_hidden_layers": len(RATIOS), "num_hash_layers": len(RATIOS)}
    config = DeepseekV4Config(**settings)
    config._attn_implementation = "eager"
    config._experts_implementation = experts
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = DeepseekV4ForCausalLM(config).eval()
    for module in model.modules():
        table = getattr(module, "tid2eid", None)
        if table is not None:
            table.data.copy_(torch.rand(*table.shape[:1], config.n_routed_experts, device="cuda").topk(6, 1).indices)
    return model


def advance(model: Any, cache: Any, batch: int, tokens: int, piece: int) -> None:
    """Feeds random tokens in pieces; logits of the last one only."""
    for start in range(0, tokens, piece):
        ids = torch.randint(0, FLASH["vocab_size"], (batch, min(piece, tokens - start)), device="cuda")
        model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)


def prefill(model: Any, batch: int, tokens: int) -> tuple[Any, int]:
    """A cache of so many tokens, by the largest pieces that fit."""
    from transformers import DynamicCache

    for piece in PIECES:
        cache = DynamicCache(config=model.config)
        try:
            advance(model, cache, batch, tokens, piece)
            return cache, piece
        except torch.OutOfMemoryError:
            cache = None
        torch.cuda.empty_cache()
    raise torch.OutOfMemoryError("no piece fits")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--experts", default="grouped_mm")
    parser.add_argument("--prompts", type=int, nargs="*", default=[8192, 32768])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16, 64])
    parser.add_argument("--context", type=int, default=8192)
    arguments = parser.parse_args()
    import transformers

    begin_s = time.monotonic()
    model = make_model(arguments.experts)
    torch.cuda.synchronize()
    print(f"made in {time.monotonic() - begin_s:.1f} s, {torch.cuda.memory_allocated() / 2**30:.1f} GiB", flush=True)
    result: dict[str, Any] = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "card": torch.cuda.get_device_name(), "experts": arguments.experts, "rows": {},
    }  # fmt: skip
    try:
        with torch.inference_mode():
            for tokens in arguments.prompts:
                try:
                    _, piece = prefill(model, 1, tokens)
                    ms = median_ms(lambda tokens=tokens: prefill(model, 1, tokens), 1)
                    row: dict[str, Any] = {"ms": round(ms, 1), "piece": piece}
                except torch.OutOfMemoryError:
                    row = {"ms": None, "piece": None}
                result["rows"][f"prefill {tokens}"] = row
                print("prefill", tokens, row, flush=True)
            for batch in arguments.batches:
                try:
                    cache, piece = prefill(model, batch, arguments.context - 24)
                    ms = median_ms(lambda batch=batch, cache=cache: advance(model, cache, batch, 1, 1), 16)
                    row = {"step_ms": round(ms, 2), "piece": piece}
                except torch.OutOfMemoryError:
                    row = {"step_ms": None}
                cache = None
                torch.cuda.empty_cache()
                result["rows"][f"decode batch {batch} context {arguments.context}"] = row
                print("decode", batch, row, flush=True)
    finally:
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
