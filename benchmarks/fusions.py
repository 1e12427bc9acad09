"""What fusing pays on one GPU: our kernels beside the same steps as kernels of their own, each compiled by Inductor,
and beside torch's own operations.

    python benchmarks/fusions.py --out results/fusions_h200_20261201.json

Compressor: save, pool, norm, rotate, quantise, insert. Around decode attention: q's norm and rotation, the new entry's
rotation, quantisation and insertion (K2); the output's rotation back and quantisation (K3). What K2 and K3 cost inside
attention is the difference of two graphs. Each result is compared with the unfused steps' before anything is timed.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from layers import graph_us
from torch import Tensor

from headrace.kernels.cuda import compressor as k1
from headrace.kernels.cuda import decode_attention as k5

BF16, DEV = torch.bfloat16, "cuda"
PARTS = ("K2", "K3")
SETS = 8
"""Inputs in turn, so that a call does not find what the last one left in the cache."""


torch._dynamo.config.recompile_limit = 64
step = functools.partial(torch.compile, dynamic=False, fullgraph=True)
"""One kernel, or two where a reduction needs it."""
eager = functools.partial(torch.compiler.set_stance, "force_eager")


def exponent(amax: Tensor) -> Tensor:
    """ceil(log2(amax / 448)) by bits."""
    bits = amax.view(torch.int32)
    return (bits >> 23) - 135 + ((bits & 0x7FFFFF) > 0x600000).int()


def two_to(power: Tensor) -> Tensor:
    return ((power + 127) << 23).view(torch.float32)


@step
def save(x: Tensor, ape: Tensor, positions: Tensor, ring: Tensor, state: Tensor) -> None:
    half = x.shape[1] // 2
    rows = torch.cat([x[:, :half], x[:, half:] + ape[positions % 4]], 1)
    state.index_put_((ring, positions % state.shape[1]), rows)


def pooled(rows_E8C: Tensor, bias_E8H: Tensor | None, old_E8: Tensor) -> Tensor:
    """Rows of the eight tokens [E, 8, 2048] -> [E, 512]: the older four by the first columns."""
    older, newer = rows_E8C[:, :4], rows_E8C[:, 4:]
    values = torch.cat([older[..., :512], newer[..., 512:1024]], 1)
    scores = torch.cat([older[..., 1024:1536], newer[..., 1536:]], 1)
    if bias_E8H is not None:
        scores = scores + torch.cat([bias_E8H[:, :4, :512], bias_E8H[:, 4:, 512:]], 1)
    scores = torch.where(old_E8[..., None] < 0, -torch.inf, scores)
    return (scores.softmax(1) * values).sum(1)


@step
def pool_ring(state: Tensor, ring: Tensor, eight: Tensor) -> Tensor:
    return pooled(state[ring[:, None], eight % 16], None, eight)


@step
def pool_chunk(x: Tensor, ape: Tensor, eight: Tensor) -> Tensor:
    return pooled(x[eight.clamp(min=0)], ape[eight % 4], eight)


@step
def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight.float()


@step
def rotate(x: Tensor, turn: Tensor) -> Tensor:
    return k5.rotate(x.float(), turn).to(BF16)


@step
def rotate_back(x: Tensor, turn: Tensor) -> Tensor:
    return k5.rotate(x.float(), turn, inverse=True)


@step
def quantise(x: Tensor) -> tuple[Tensor, Tensor]:
    groups = x[:, :448].float().view(-1, 7, 64)
    power = exponent(groups.abs().amax(-1).clamp_min(1e-4))
    codes = (groups * two_to(-power)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    data = torch.cat([codes.view(torch.uint8).flatten(1), x[:, 448:].contiguous().view(torch.uint8)], 1)
    return data, torch.nn.functional.pad((power + 127).to(torch.uint8), (0, 1))


@step
def quantise_output(x: Tensor) -> tuple[Tensor, Tensor]:
    b, h, _ = x.shape
    groups = x.view(b, h // 8, 32, 128).transpose(0, 1)
    power = exponent(groups.abs().amax(-1).clamp_min(1e-10))
    codes = (groups * two_to(-power)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.reshape(h // 8, b, 4096), two_to(power)


@step
def insert(pages: Tensor, slots: Tensor, data: Tensor, scales: Tensor) -> None:
    page, at = slots // 64, slots % 64
    n, stride = pages.shape[0], pages.stride(0)
    pages.as_strided((n, 64, 576), (stride, 576, 1)).index_put_((page, at), data)
    pages.as_strided((n, 64, 8), (stride, 8, 1), 64 * 576).index_put_((page, at), scales)


def turns() -> Tensor:
    angle = torch.arange(65536, device=DEV)[:, None] * 10000.0 ** (-torch.arange(32, device=DEV) / 32)
    return torch.cat([angle.cos(), angle.sin()], 1).float()


def ratios(apart_us: float, fused_us: float, eager_us: float) -> dict[str, float]:
    """Of graphs: steps that are compiled, the fused kernel, the steps by torch's own operations."""
    return {
        "apart_us": apart_us, "fused_us": fused_us, "eager_us": eager_us,
        "ratio": apart_us / fused_us, "eager_ratio": eager_us / fused_us,
    }  # fmt: skip


def unlike(a: Tensor, b: Tensor) -> float:
    return float((a != b).float().mean())


def compressor(table: Tensor) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    ape, weight = torch.randn(4, 1024, device=DEV), torch.rand(512, device=DEV).to(BF16)
    for tokens, sequences in ((64, 64), (8192, 1)):
        decode = sequences > 1
        sets = []
        for i in range(SETS):
            g = torch.Generator(DEV).manual_seed(i)
            positions = torch.arange(tokens, device=DEV)
            if decode:
                positions = torch.randint(2, 16000, (tokens,), device=DEV, generator=g) * 4 + 3
            ring = positions.new_zeros(tokens) if not decode else torch.arange(tokens, device=DEV)
            closes = (positions + 1) % 4 == 0
            places = torch.randperm(tokens, device=DEV, generator=g)
            first = (ring if decode else ring * 0).int()
            sets.append(
                {
                    "x": torch.randn(tokens, 2048, device=DEV, generator=g),
                    "state": torch.randn(sequences, 16, 2048, device=DEV, generator=g),
                    "pages": [torch.zeros(tokens // 64, 64 * 584, dtype=torch.uint8, device=DEV) for _ in range(2)],
                    "slots": places[closes],
                    "turn": table[positions[closes] - 3],
                    "eight": (positions[closes, None] + torch.arange(-7, 1, device=DEV)),
                    "ring": ring,
                    "step": k1.Step(
                        positions_T=positions,
                        first_row_T=first,
                        last_row_T=(first + (0 if decode else tokens - 1)).int(),
                        ring_T=ring,
                        slots_T=torch.where(closes, places, -1),
                    ),
                }
            )

        def apart(d: dict[str, Any], decode: bool = decode) -> None:
            positions, eight = d["step"].positions_T, d["eight"]
            if decode:
                save(d["x"], ape, positions, d["ring"], d["state"])
                entries = pool_ring(d["state"], d["ring"], eight)
            else:
                save(d["x"][-8:], ape, positions[-8:], d["ring"][-8:], d["state"])
                entries = pool_chunk(d["x"], ape, eight)
            turned = rotate(norm(entries, weight), d["turn"])
            insert(d["pages"][0], d["slots"], *quantise(turned))

        def joined(d: dict[str, Any], decode: bool = decode) -> None:
            k1.compress(
                d["x"], ape, weight, d["step"], d["state"], d["pages"][1], 64, table, ratio=4,
                max_tokens_a_sequence=1 if decode else d["x"].shape[0],
            )  # fmt: skip

        for d in sets:
            apart(d)
            joined(d)
        assert unlike(*sets[0]["pages"]) < 2e-3, unlike(*sets[0]["pages"])
        us = [graph_us([lambda d=d, f=f: f(d) for d in sets]) for f in (apart, joined)]
        with eager():
            us.append(graph_us([lambda d=d: apart(d) for d in sets]))
        rows[f"c4a compressor, {tokens} tokens"] = ratios(*us)
    return rows


def attention(table: Tensor) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for batch in (1, 16, 64):
        rows |= attention_of(batch, table)
    return rows


def attention_of(batch: int, table: Tensor) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    near, far = (torch.zeros(n, 64 * 584, dtype=torch.uint8, device=DEV) for n in (2048, 32768))
    for pages in (near, far):
        pages[:, : 64 * 576].random_(0, 100)
        pages[:, 64 * 576 :] = 127
    sets = []
    for i in range(SETS):
        g = torch.Generator(DEV).manual_seed(i)
        slots = [
            torch.randint(0, pages.shape[0] * 64, (batch, n), device=DEV, generator=g).int()
            for pages, n in ((near, 128), (far, 512))
        ]
        new = torch.zeros(batch // 64 + 1, 64 * 584, dtype=torch.uint8, device=DEV)
        positions = torch.randint(0, 65536, (batch,), device=DEV, generator=g)
        kv, places = torch.randn(batch, 512, device=DEV, generator=g).to(BF16), torch.arange(batch, device=DEV)
        lists = [
            k5.EntryList(pages=pages, page_entries=64, slots_BW=own, lengths_B=torch.full_like(own[:, 0], own.shape[1]))
            for pages, own in zip((near, far), slots, strict=True)
        ]
        sets.append(
            {
                "q": torch.randn(batch, 64, 512, device=DEV, generator=g).to(BF16), "lists": lists, "kv": kv,
                "positions": positions, "places": places, "new": [new, new.clone()],
                "window": k1.WindowRows(
                    kv_TD=kv, positions_T=positions, slots_T=places, pages=new, page_entries=64
                ),
            }
        )  # fmt: skip
    sink = torch.randn(64, device=DEV)
    out = torch.empty(batch, 64, 512, dtype=BF16, device=DEV)
    align = (batch + 3) // 4 * 4
    codes = torch.empty(8, batch, 4096, dtype=torch.float8_e4m3fn, device=DEV)
    scales = torch.empty(8 * 32 * align, device=DEV).as_strided((8, batch, 32), (32 * align, 1, align))
    split = 4 if batch == 1 else 2

    def attend(d: dict[str, Any], q: Tensor, *, raw: bool, quant: bool) -> None:
        k5.decode_attention(
            q, *d["lists"], sink_H=sink, split=split, out_BHD=out, positions_B=d["positions"], cos_sin=table,
            raw_q=raw, quantised=(codes, scales) if quant else None,
        )  # fmt: skip

    def before(d: dict[str, Any]) -> Tensor:
        turn = table[d["positions"]][:, None]
        insert(d["new"][1], d["places"], *quantise(rotate(d["kv"][:, None], turn)[:, 0]))
        return rotate(norm(d["q"].float(), torch.ones(512, device=DEV)), turn)

    def after(d: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return quantise_output(rotate_back(out, table[d["positions"]][:, None]))

    forms: dict[str, Callable[[dict[str, Any]], object]] = {
        "attention alone": lambda d: attend(d, d["q"], raw=False, quant=False),
        "K2 inside": lambda d: (k1.insert_window(d["window"], table), attend(d, d["q"], raw=True, quant=False)),
        "K2 apart": lambda d: attend(d, before(d), raw=False, quant=False),
        "K3 inside": lambda d: attend(d, d["q"], raw=False, quant=True),
        "K3 apart": lambda d: (attend(d, d["q"], raw=False, quant=False), after(d)),
    }
    found = {}
    for name, form in forms.items():
        form(sets[0])
        found[name] = [codes.clone(), scales.clone()] if name == "K3 inside" else out.clone()
    worst = (found["K2 inside"].float() - found["K2 apart"].float()).norm() / found["K2 apart"].float().norm()
    assert worst < 5e-3, worst
    assert unlike(*sets[0]["new"]) < 2e-3
    assert unlike(found["K3 inside"][0].view(torch.uint8), after(sets[0])[0].view(torch.uint8)) < 2e-3
    us = {name: graph_us([lambda d=d, f=form: f(d) for d in sets]) for name, form in forms.items()}
    with eager():
        us |= {f"{part} eager": graph_us([lambda d=d, f=forms[f"{part} apart"]: f(d) for d in sets]) for part in PARTS}
    alone = us["attention alone"]
    for part in PARTS:
        apart, inside, by_torch = (us[f"{part} {form}"] - alone for form in ("apart", "inside", "eager"))
        rows[f"{part}, batch {batch}"] = ratios(apart, inside, by_torch)
    rows[f"attention, batch {batch}"] = {"us": alone}
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    table = turns()
    result: dict[str, Any] = {"card": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": {}}
    for part in (compressor, attention):
        result["rows"] |= part(table)
    for name, row in result["rows"].items():
        print(name, {key: round(value, 2) for key, value in row.items()})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
