"""Our kernels beside their best peers on one Hopper GPU, in one process: checked against float64 first, then timed.

    PYTHONPATH=.src python benchmarks/kernels.py --kit .peers --peers DIR [--parts attention ...] [--json FILE]

--kit is the folder of the peer kit (`table.py`, `peer_*.py`), --peers where its peers were unpacked. Several calls over
different inputs stand in one CUDA graph, so that launches and cached inputs do not count. Rows go to FILE as JSON
lines.
"""

# ruff: noqa: B023  (a case is measured within the loop turn that makes it)

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

PARTS = ("attention", "fused", "indexer", "topk", "compressor", "ends", "move", "hyper", "prefill")
HBM_BYTES_S, BF16_FLOP_S, FP8_FLOP_S = 4.28e12, 777e12, 1430e12
DEV = "cuda"


def floor_us(flops: float, nbytes: float, rate: float = BF16_FLOP_S) -> float:
    """Microseconds that the operation needs at least: bytes at the copy rate, or products at the library's rate."""
    return max(nbytes / HBM_BYTES_S, flops / rate) * 1e6


def attention(
    table: Any, splits: tuple[int, ...] = (1, 2, 4, 5, 10), batches: tuple[int, ...] = (1, 16, 64, 128)
) -> None:
    """K5 against FlashMLA's sparse decode, planned before."""
    import peer_flashmla as peer

    from headrace.kernels.cuda.decode_attention import EntryList, decode_attention

    def ours(data: Any, split: int) -> list[Callable[[], Any]]:
        sets = data.q if isinstance(data.q, list) else [data.q]

        def pick(x, j):
            return x[j] if isinstance(x, list) else x

        lse = torch.full((data.out.shape[0], data.out.shape[2]), float("nan"), device=DEV)

        def call(j: int) -> Any:
            second = None
            if data.extra is not None:
                second = EntryList(
                    pages=data.extra,
                    page_entries=data.page,
                    slots_BW=pick(data.extra_idx, j)[:, 0],
                    lengths_B=data.extra_len,
                )
            decode_attention(
                sets[j][:, 0],
                EntryList(
                    pages=data.swa, page_entries=data.page, slots_BW=pick(data.swa_idx, j)[:, 0], lengths_B=data.swa_len
                ),
                second,
                sink_H=data.sink,
                split=split,
                out_BHD=data.out[:, 0],
                lse_BH=lse,
            )
            return data.out, lse[..., None]

        return [lambda j=j: call(j) for j in range(len(sets))]

    for page, heads in ((64, 64), (256, 64), (32, 64), (2, 64), (64, 128)):
        case = peer.decode_check_case(page, heads)
        for split in splits:
            table.measure(case, f"ours, split {split}", ours(case.data, split))
    for heads in (64, 128):
        for case in peer.decode_cases(batches=batches if heads == 64 else (16, 64), h=heads):
            if "eager" in case.kernel:
                continue
            peer_us = table.measure(case)
            if "planner" in case.kernel:
                continue
            low = floor_us(case.flops, case.nbytes)
            for split in splits:
                us = table.measure(case, f"ours, split {split}", ours(case.data, split))
                table.note(f"split {split}: {us / peer_us:.2f} of the peer's time, floor {low:.1f} us = {low / us:.2f}")


def fused(table: Any, batches: tuple[int, ...] = (1, 16, 64, 128), splits: tuple[int, ...] = (1, 2, 4)) -> None:
    """K2's q side + K5 + K3 in one launch, and K2's kv side before it, against plain PyTorch (float64 attention)."""
    import peer_flashmla as peer
    from gputime import relative_error
    from peer_vllm import cos_sin
    from table import Case, poison

    from headrace.kernels.cuda import compressor as k1
    from headrace.kernels.cuda import decode_attention as k5

    swa, ext = peer.random_cache(2048, 64), peer.random_cache(32768, 64)
    cs = cos_sin(65536)
    for b in batches:
        sets = 8
        q = [torch.randn(b, 64, 512, device=DEV).mul_(3).to(torch.bfloat16) for _ in range(sets)]
        pos = torch.randint(0, 65536, (b,), device=DEV)
        sink = torch.randn(64, device=DEV)
        i0 = [peer.random_slots(b, 128, 2048 * 64)[:, 0] for _ in range(sets)]
        i1 = [peer.random_slots(b, 512, 32768 * 64)[:, 0] for _ in range(sets)]
        l0 = torch.full((b,), 128, device=DEV, dtype=torch.int32)
        l1 = torch.full((b,), 512, device=DEV, dtype=torch.int32)
        out = torch.empty(b, 64, 512, device=DEV, dtype=torch.bfloat16)
        align = (b + 3) // 4 * 4
        codes = torch.empty(8, b, 4096, dtype=torch.float8_e4m3fn, device=DEV)
        scales = torch.empty(8 * 32 * align, device=DEV).as_strided((8, b, 32), (32 * align, 1, align))

        def call(j: int, split: int, quant: bool) -> None:
            k5.decode_attention(
                q[j],
                k5.EntryList(pages=swa, page_entries=64, slots_BW=i0[j], lengths_B=l0),
                k5.EntryList(pages=ext, page_entries=64, slots_BW=i1[j], lengths_B=l1),
                sink_H=sink,
                split=split,
                out_BHD=out,
                positions_B=pos,
                cos_sin=cs,
                raw_q=True,
                quantised=(codes, scales) if quant else None,
            )

        rows = min(b, 16)
        lists = [
            k5.EntryList(pages=p, page_entries=64, slots_BW=i[0][:rows], lengths_B=n[:rows])
            for p, i, n in ((swa, i0, l0), (ext, i1, l1))
        ]
        want, _ = k5.decode_attention_reference(
            k5.norm_rope_q(q[0][:rows], pos[:rows], cs), lists[0], lists[1], sink_H=sink
        )
        want_turned = k5.rotate(want, cs[pos[:rows]][:, None], inverse=True)

        # K2 whole: the new window entries go to a pool of their own, so that the reference stands.
        new = torch.full((b // 64 + 8, swa.shape[1]), 255, dtype=torch.uint8, device=DEV)
        window = [
            k1.WindowRows(
                kv_TD=torch.randn(b, 512, device=DEV).to(torch.bfloat16),
                positions_T=pos,
                slots_T=torch.randperm(new.shape[0] * 64, device=DEV)[:b],
                pages=new,
                page_entries=64,
            )
            for _ in range(sets)
        ]

        def whole(j: int, split: int) -> None:
            k1.insert_window(window[j], cs)
            call(j, split, True)

        def check_whole(_: Any) -> dict[str, float]:
            first = window[0]
            want_kv = k1.quantise_entries(k5.rotate(first.kv_TD.float(), cs[pos]))
            wrong = (k1.entry_bytes(new, 64, first.slots_T) != want_kv).float().mean()
            return {"out": check_quant(None)["out"], "kv bytes unlike": float(wrong)}

        def check_plain(_: Any) -> float:
            return relative_error(out[:rows], want)

        def check_quant(_: Any, split: int = 1) -> dict[str, float]:
            got = (
                (codes.float().view(8, b, 32, 128) * scales[..., None])[:, :rows].transpose(0, 1).reshape(rows, 64, 512)
            )
            mine, mine_scale = codes.clone(), scales.clone()
            call(0, split, False)
            plain = k5.quantise_output(out, pos, cs)
            unlike = (mine.view(torch.uint8) != plain[0].view(torch.uint8)).float().mean() + (
                mine_scale != plain[1]
            ).float().mean()
            return {"out": relative_error(got, want_turned), "share unlike the separate K3": float(unlike)}

        for split in splits:
            table.measure(
                Case(
                    f"ours K2q+K5, split {split}",
                    f"batch {b}, c4a",
                    [lambda j=j, s=split: call(j, s, False) for j in range(sets)],
                    check=check_plain,
                    reset=lambda: poison(out),
                    limit=5e-3,
                )
            )
            table.measure(
                Case(
                    f"ours K2q+K5+K3, split {split}",
                    f"batch {b}, c4a",
                    [lambda j=j, s=split: call(j, s, True) for j in range(sets)],
                    check=lambda r, s=split: check_quant(r, s),
                    reset=lambda: (poison(codes), scales.fill_(math.nan)),
                    limit={"out": 3.5e-2, "share unlike the separate K3": 1e-3},
                )
            )
            table.measure(
                Case(
                    f"ours K2kv, then K2q+K5+K3, split {split}",
                    f"batch {b}, c4a",
                    [lambda j=j, s=split: whole(j, s) for j in range(sets)],
                    check=check_whole,
                    reset=lambda: (poison(codes), scales.fill_(math.nan), new.fill_(255)),
                    limit={"out": 3.5e-2, "kv bytes unlike": 1e-3},
                )
            )


def key_pages(num_pages: int) -> Tensor:
    """Random fp4 index pages [num_pages, 4352], some of the four scales of a key far apart."""
    from headrace.kernels.cuda.indexer import pack_keys

    part = min(num_pages, 256)
    spread = torch.exp2(torch.randint(-8, 4, (part * 64, 4), device=DEV).float()).repeat_interleave(32, 1)
    codes, scales = pack_keys(torch.randn(part * 64, 128, device=DEV) * spread)
    page = torch.cat([codes.view(part, -1), scales.view(part, -1)], 1)
    return page.repeat(-(-num_pages // part), 1)[:num_pages].contiguous()


def indexer(table: Any) -> None:
    """K4 logits with fp4 keys against DeepGEMM's with fp8 keys, and logits + top-512 together."""
    import peer_deepgemm as peer
    from gputime import relative_error
    from table import Case

    from headrace.kernels.cuda import indexer as k4

    dg = peer.load(os.environ["PEERS"])
    for case in peer.logits(dg):
        if "metadata" in case.kernel:
            continue
        peer_us = table.measure(case)
        d = case.data
        b, ctx = d.lens.shape[0], d.table[0].shape[1] * 64
        pages = key_pages(d.cache.shape[0])
        lens = d.lens[:, 0].contiguous()
        out = torch.empty(b, ctx, device=DEV)
        rows = [0, b - 1]
        want = k4.index_logits_reference(d.q[0][rows, 0], d.weights[rows], pages, d.table[0][rows], lens[rows])
        total = int(lens.sum())

        def check(_: Any) -> float:
            return max(relative_error(out[r, : lens[r]], want[i, : lens[r]]) for i, r in enumerate(rows))

        slots, kept = torch.empty(b, 512, dtype=torch.int32, device=DEV), torch.empty(b, dtype=torch.int32, device=DEV)
        for cut in (528,):

            def logits(i: int, cut: int = cut) -> None:
                k4.index_logits(d.q[i][:, 0], d.weights, pages, d.table[i], lens, out, blocks=cut)

            def both(i: int, cut: int = cut) -> None:
                logits(i, cut)
                k4.top_k(out, lens, slots, kept, d.table[i], max_length=ctx)

            us = table.measure(
                Case(
                    f"ours fp4, {cut} blocks",
                    case.shape,
                    [lambda i=i: logits(i) for i in (0, 1)],
                    check=check,
                    limit=1e-3,
                    reset=lambda: out.fill_(math.nan),
                    flops=total * 64 * 128 * 2,
                    nbytes=total * 68,
                )
            )
            low = floor_us(total * 64 * 128 * 2, total * 68, FP8_FLOP_S)
            table.note(f"{us / peer_us:.2f} of the peer's time, floor {low:.1f} us = {low / us:.2f}")
            table.measure(
                Case(f"ours fp4 logits + top 512, {cut} blocks", case.shape, [lambda i=i: both(i) for i in (0, 1)])
            )


def topk(table: Any) -> None:
    """K4's top-k against vLLM's cooperative and persistent ones; ours is compared place by place with a stable sort."""
    import peer_vllm as peer

    from headrace.kernels.cuda import indexer as k4

    peer.load_ops(os.environ["PEERS"])
    for case in peer.topk():
        if "torch" in case.kernel:
            continue
        table.measure(case)
        d = case.data
        want, _ = k4.top_k_reference(d.logits[0], d.lens, 512)
        rows, n = d.logits[0].shape
        for size in (1, 2, 4, 8):
            if n > 32768 * size or ("persistent" in case.kernel and rows <= 64):
                continue
            table.measure(
                case,
                f"ours, {size} blocks a row{' (default)' if size == k4.top_k_blocks(rows, n) else ''}",
                [lambda x=x, s=size: k4.top_k(x, d.lens, d.out, blocks_a_row=s) for x in d.logits],
            )
            k4.top_k(d.logits[0], d.lens, d.out, blocks_a_row=size)
            table.row("", "places unlike the stable sort's", error=float((want != d.out).sum()), limit=0.0)
    for n in (700, 5000, 30000):  # many ties, few values, ragged
        x = torch.randint(-3, 4, (8, n), device=DEV).float() * 0.0  # zeros of both signs
        x[4:] = torch.randint(0, 40, (4, n), device=DEV).float()
        x[6:] = torch.randn(2, n, device=DEV)
        x[7, 5] = 3e38
        lens = torch.tensor([n, n - 1, 513, 512, n, 600, n, n], dtype=torch.int32, device=DEV)
        out = torch.empty(8, 512, dtype=torch.int32, device=DEV)
        want, _ = k4.top_k_reference(x, lens, 512)
        for size in (1, 2, 4, 8):
            k4.top_k(x, lens, out, blocks_a_row=size)
            table.row(
                f"ours, ties, {size} blocks a row",
                f"8 rows of {n}",
                error=float((want != out).float().mean()),
                limit=0.0,
            )


def compressor(table: Any) -> None:
    """K1 against vLLM's Triton kernels: pooling from a state that `save_partial_states` has written before (their
    sum)."""
    import peer_vllm as peer
    from gputime import relative_error
    from table import Case

    from headrace.kernels.cuda import compressor as k1
    from headrace.kernels.cuda.decode_attention import read_entries, rotate

    mod, _ = peer.load_triton(os.environ["PEERS"])
    for case in peer.compressor(mod):
        if "indexer" in case.kernel or (
            "insert (Triton)" not in case.kernel and "two stages" not in case.kernel and "save" not in case.kernel
        ):
            continue
        us = table.measure(case)
        if "save" not in case.kernel:
            continue
        table.note(f"the peer's save takes {us:.1f} us beside its pooling")
        ratio = case.data[0].ratio
        width, entries = k1.WIDTH[ratio], 256 // ratio
        decode = "decode" in case.shape
        calls, first_set = [], None
        for d in case.data:
            n = d.n
            rows = torch.arange(n, device=DEV, dtype=torch.int32)
            step = k1.Step(
                positions_T=d.pos,
                first_row_T=rows if decode else torch.zeros_like(rows),
                last_row_T=rows if decode else torch.full_like(rows, n - 1),
                ring_T=d.req.long(),
                slots_T=d.kvslots.long(),
            )
            state = torch.randn(int(d.req.max()) + 1, k1.POOLED[ratio], 2 * width, device=DEV)
            pages = torch.full_like(d.cache, 255)
            x = d.kvs
            first_set = first_set or (x, d, step, state.clone(), pages)
            calls.append(
                lambda window=None, x=x, d=d, step=step, state=state, pages=pages: k1.compress(
                    x,
                    d.ape,
                    d.w,
                    step,
                    state,
                    pages,
                    entries,
                    d.cs,
                    ratio=ratio,
                    max_tokens_a_sequence=1 if decode else x.shape[0],
                    window=window,
                )
            )
        x, d, step, state, pages = first_set
        some = slice(None) if decode else slice(0, 512)
        on_cpu = k1.Step(
            positions_T=step.positions_T[some].cpu(),
            first_row_T=step.first_row_T[some].cpu(),
            last_row_T=step.last_row_T[some].cpu(),
            ring_T=step.ring_T[some].cpu(),
            slots_T=step.slots_T[some].cpu(),
        )
        done, want, _ = k1.compress_reference(
            x[some].cpu(), d.ape.cpu(), d.w.cpu(), on_cpu, state.cpu(), d.cs.cpu(), ratio=ratio
        )
        slots = step.slots_T[some][done.to(DEV)]

        def check(_: Any) -> dict[str, float]:
            got = read_entries(pages, entries, slots).cpu()
            return {
                "nope": relative_error(got[:, :448], want[:, :448]),
                "rope": relative_error(got[:, 448:], want[:, 448:]),
            }

        ends = int(d.done.sum())
        nbytes = x.numel() * 4 * (1 if not decode else 2) + ends * (d.coff * ratio * 2 * 512 * 4 * decode + 584)
        us = table.measure(
            Case("ours, pool + save", case.shape, calls, check=check, limit=peer.FP8_LIMIT, nbytes=nbytes)
        )
        table.note(f"floor {nbytes / HBM_BYTES_S * 1e6:.1f} us = {nbytes / HBM_BYTES_S * 1e6 / us:.2f}")
        if not decode:
            continue
        new = torch.full((8, 37440), 255, dtype=torch.uint8, device=DEV)
        window = k1.WindowRows(
            kv_TD=torch.randn(x.shape[0], 512, device=DEV).to(torch.bfloat16),
            positions_T=d.pos,
            slots_T=torch.randperm(512, device=DEV)[: x.shape[0]],
            pages=new,
            page_entries=64,
        )
        want_kv = k1.quantise_entries(rotate(window.kv_TD.float(), d.cs[d.pos]))

        def check_window(_: Any) -> dict[str, float]:
            wrong = (k1.entry_bytes(new, 64, window.slots_T) != want_kv).float().mean()
            return {**check(None), "kv bytes unlike": float(wrong)}

        table.measure(
            Case(
                "ours, pool + save + K2kv",
                case.shape,
                [lambda f=f: f(window) for f in calls],
                check=check_window,
                reset=lambda: new.fill_(255),
                limit={**peer.FP8_LIMIT, "kv bytes unlike": 1e-3},
            )
        )


def ends(table: Any) -> None:
    """What stands beside FlashMLA in the peer's decode step: vLLM's fused q/kv op and its inverse rotary +
    quantisation."""
    import peer_vllm as peer

    mod, _ = peer.load_triton(os.environ["PEERS"])
    peer.load_ops(os.environ["PEERS"])
    for n in (1, 16, 64, 128):
        table.measure(peer._fused_qkv(n))
        table.measure(peer._inverse_rope(mod.FusedInvRopeFP8QuantKernel__kernel, n))


def move(table: Any) -> None:
    """Gather of scattered pages with a digest, against torch's index_select without one."""
    from table import Case

    from headrace.kernels.cuda import page_move

    for size, number in ((37440, 28679), (16384, 65536), (131072, 8192)):
        pool = torch.randint(-(2**62), 2**62, (number, size // 8), device=DEV)
        chosen = torch.randperm(number, device=DEV)
        out = torch.empty_like(pool)
        at = torch.arange(number, device=DEV) * size
        pieces = torch.stack(
            [pool.data_ptr() + chosen * size, out.data_ptr() + at, at, torch.full_like(at, size)], 1
        ).contiguous()
        digest = torch.zeros(1, dtype=torch.int64, device=DEV)
        want = page_move.digest_reference(pool[chosen[:64]].view(torch.uint8).flatten())

        def check(_: Any) -> dict[str, float]:
            digest.zero_()
            page_move.move_pieces(pieces[:64], digest, max_bytes=size)
            return {
                "bytes": float(not torch.equal(out, pool[chosen])),
                "digest": float(int(digest) & (2**64 - 1) != want),
            }

        common = {"nbytes": 2 * number * size, "graph": False, "reps": 9}
        table.measure(
            Case(
                "torch index_select, no digest",
                f"{number} x {size} B",
                [lambda: torch.index_select(pool, 0, chosen, out=out)],
                **common,
            )
        )
        table.measure(
            Case(
                "ours, gather + digest",
                f"{number} x {size} B",
                [lambda: page_move.move_pieces(pieces, digest, max_bytes=size)],
                check=check,
                reset=lambda: out.zero_(),
                limit=0.0,
                **common,
            )
        )


def hyper(table: Any) -> None:
    """K7, the whole step, against DeepGEMM's pre-norm product alone (24 products and a sum of squares a token)."""
    import peer_deepgemm as peer
    from gputime import relative_error
    from table import Case, poison

    from headrace.kernels.cuda import mhc as k7

    dg = peer.load(os.environ["PEERS"])

    def inputs(x: Tensor, fn: Tensor) -> Any:
        t = x.shape[0]
        rand = lambda *shape: torch.randn(*shape, device=DEV)  # noqa: E731
        streams, y = x.view(t, 4, 4096), rand(t, 4096).to(torch.bfloat16)
        return {
            "streams": streams,
            "fn": fn,
            "fixed": (rand(24), rand(3).abs() / 128, rand(4096).to(torch.bfloat16)),
            "packed": k7.pack_weights(fn),
            "after": (y, 2 * torch.rand(t, 4, device=DEV), k7.sinkhorn(rand(t, 4, 4), 20, 1e-6)),
            "out": (torch.empty_like(y), torch.empty(t, 4, device=DEV), torch.empty(t, 4, 4, device=DEV)),
            "streams_out": torch.empty_like(streams),
        }

    def call(d: Any, after: bool) -> int:
        ends = {"after": d["after"], "streams_out_TND": d["streams_out"]} if after else {}
        return k7.hyper_connect(d["streams"], d["packed"], *d["fixed"], *d["out"], **ends)

    def measure(shape: str, sets: list[Any], peer_us: float) -> None:
        d, t = sets[0], sets[0]["streams"].shape[0]
        rows = torch.randperm(t, device=DEV)[:256]
        for after in (False, True):
            part = tuple(x[rows] for x in d["after"]) if after else None
            mixed = k7.hyper_connect_reference(d["streams"][rows], d["fn"], *d["fixed"], after=part)[0]
            nbytes = t * ((5 + 5 * after) * 8192 + 80 * (1 + after)) + d["fn"].numel() * 4
            low = floor_us(2 * t * 16384 * 24, nbytes)

            def check(_: Any) -> dict[str, float]:
                # What follows from the streams is held against theirs as written, whose last bits may be others.
                streams = d["streams_out"] if after else d["streams"]
                want = k7.hyper_connect_reference(streams[rows], d["fn"], *d["fixed"])
                names, got = ("streams", "layer_in", "post", "comb"), (streams, *d["out"])
                return {n: relative_error(g[rows], w) for n, g, w in zip(names, got, (mixed, *want[1:]), strict=True)}

            us = table.measure(
                Case(
                    f"ours, {'after + before' if after else 'before'}",
                    shape,
                    [lambda d=d: call(d, after) for d in sets],
                    check=check,
                    reset=lambda: poison(*d["out"], d["streams_out"]),
                    limit={"streams": 1e-3, "layer_in": 3e-3, "post": 2e-5, "comb": 2e-5},
                    nbytes=nbytes,
                )
            )
            table.note(f"{us / peer_us:.2f} of the peer's time, floor {low:.1f} us = {low / us:.2f}")

    for case in peer.hc(dg):
        peer_us = table.measure(case)
        if "64 tokens, 1 split" in case.shape:
            continue
        sets = [inputs(case.data.x, case.data.fn)]
        table.note(f"clusters of 16 blocks at once: {call(sets[0], False)}")
        measure(case.shape.partition(",")[0], sets, peer_us)
    for t, number in ((1, 24), (64, 20), (256, 8)):  # together more than the L2: other streams and weights each time
        data = [
            (torch.randn(t, 16384, device=DEV).bfloat16(), torch.randn(24, 16384, device=DEV)) for _ in range(number)
        ]
        out, squares = torch.empty(16, t, 24, device=DEV), torch.empty(16, t, device=DEV)
        x, fn = data[0]
        shape = f"{t} tokens, {number} sets of streams and weights"
        peer_us = table.measure(
            Case(
                "DeepGEMM tf32_hc_prenorm_gemm, 16 splits",
                shape,
                [lambda x=x, fn=fn: dg.tf32_hc_prenorm_gemm(x, fn, out, squares, 16) for x, fn in data],
                check=lambda _: relative_error(out.sum(0), x.double() @ fn.double().t()),
                reset=lambda: poison(out, squares),
                limit=1e-3,
            )
        )
        measure(shape, [inputs(*d) for d in data], peer_us)


def prefill(table: Any) -> None:
    """K6 against FlashMLA's sparse prefill over the same bf16 rows: window only, c4a (selected) and c128a (dense)."""
    import peer_flashmla as peer
    from gputime import relative_error
    from table import Case, poison

    from headrace.kernels.cuda import prefill_attention as k6
    from headrace.kernels.cuda.decode_attention import read_entries

    pages = peer.random_cache(512, 64)
    everything = torch.arange(512 * 64, device=DEV, dtype=torch.int32)
    all_rows = read_entries(pages, 64, everything.long(), torch.float32).to(torch.bfloat16)
    gathered = torch.full((512 * 8, 8, 8, 64), math.nan, device=DEV, dtype=torch.bfloat16)
    k6.gather_rows(pages, 64, everything, gathered)
    table.row(
        "ours, rows unlike the reference's",
        "gather of 32768",
        error=float((gathered != k6.pack_octets(all_rows)).sum()),
        limit=0.0,
    )

    for kind, first_position, t, h in (
        ("window", 8192, 256, 64),
        ("c4a", 8192, 256, 64),
        ("c128a", 24576, 256, 64),
        ("window", 8192, 8192, 64),
        ("window", 0, 8192, 64),
        ("c4a", 8192, 8192, 64),
        ("c128a", 0, 8192, 64),
        ("c128a", 24576, 8192, 64),
        ("c4a", 8192, 8192, 8),
    ):
        position = torch.arange(first_position, first_position + t, device=DEV)
        base = max(0, first_position - 127) // k6.RING * k6.RING
        ratio = {"window": 0, "c4a": 4, "c128a": 128}[kind]
        length = (position + 1).clamp_max(128).int()
        row = (position - base).int()
        visible = (position + 1) // ratio if ratio else torch.zeros_like(position)
        count = visible.clamp_max(512 if ratio == 4 else 1 << 20).int()
        # Other entries in every layer: each call takes rows from a cache of 32,768.
        octets_w, octets_c = -(-(int(row[-1]) + 1) // 8), -(-int(visible.max()) // 8)
        order = torch.randperm(everything.numel(), device=DEV)[: (octets_w + octets_c) * 8].int()
        rows = all_rows[order.long()]
        slots_w, slots_c = order[: octets_w * 8], order[octets_w * 8 :]
        w, c = k6.pack_octets(rows[: octets_w * 8]).contiguous(), k6.pack_octets(rows[octets_w * 8 :]).contiguous()
        chosen = None
        if ratio == 4:
            chosen = (torch.rand(t, 512, device=DEV) * visible[:, None]).int().sort(1).values
        width = -(-int((length + count).max()) // 128) * 128  # FlashMLA's unit
        place = torch.arange(width, device=DEV)[None]
        behind = place - length[:, None]
        if chosen is None:
            second = behind
        else:
            second = chosen.gather(1, behind.clamp(0, 511))
        index = torch.where(behind < 0, row[:, None] - length[:, None] + 1 + place, second + octets_w * 8).int()
        total = length + count
        index = torch.where(place < total[:, None], index, -1)[:, None].contiguous()
        q = torch.randn(t, h, 512, device=DEV).to(torch.bfloat16)
        sink, out = torch.randn(h, device=DEV), torch.empty_like(q)
        some = torch.cat([torch.arange(8, device=DEV), torch.randint(0, t, (24,), device=DEV)])
        want, _ = k6.prefill_reference(q[some], rows, index[some, 0], sink_H=sink)
        zero = torch.zeros_like(count)

        def attend() -> None:
            if kind == "window":
                k6.prefill_window(q, w, row, length, sink_H=sink, out_THD=out)
            else:
                dense = None if chosen is not None else zero
                k6.prefill_rows(q, w, row, length, c, count, list_TW=chosen, first_T=dense, sink_H=sink, out_THD=out)

        def gather_too() -> None:
            k6.gather_rows(pages, 64, slots_w, w)
            if ratio:
                k6.gather_rows(pages, 64, slots_c, c)
            attend()

        keys = int(total.sum())
        case = Case(
            "FlashMLA prefill",
            f"{kind}, {t} queries from {first_position}, {h} heads, mean of {keys / t:.0f} rows",
            [lambda: peer.prefill(q, rows[:, None], index, sink, total, out)],
            check=lambda _: relative_error(out[some], want),
            reset=lambda: poison(out),
            limit=5e-3,
            flops=keys * h * 2048,
            graph=False,
            reps=10 if t > 256 else 0,
        )
        peer_us = table.measure(case)
        for name, run in (("ours", attend), ("ours, gather from pages first", gather_too)):
            us = table.measure(case, name, [run])
            if us is not None and peer_us is not None:
                low = floor_us(keys * h * 2048, 2 * q.numel() * 2 + rows.numel() * 2)
                table.note(f"{us / peer_us:.2f} of the peer's time, floor {low:.0f} us = {low / us:.2f}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--kit", default=".peers")
    p.add_argument("--peers", default=os.environ.get("PEERS"))
    p.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    p.add_argument("--json")
    p.add_argument("--seed", type=int, default=None)
    a = p.parse_args()
    os.environ["PEERS"] = a.peers
    sys.path.insert(0, a.kit)
    import peer_flashmla
    from table import Table

    seed = a.seed if a.seed is not None else int(time.time())
    torch.manual_seed(seed)
    table = Table("kernels", a.json)
    table.note(f"seed {seed}")
    parts: dict[str, Callable[[Any], None]] = {
        "attention": attention,
        "fused": fused,
        "indexer": indexer,
        "topk": topk,
        "compressor": compressor,
        "ends": ends,
        "move": move,
        "hyper": hyper,
        "prefill": prefill,
    }
    with torch.no_grad():
        peer_flashmla.load(a.peers)
        for part in a.parts:
            try:
                parts[part](table)
            except Exception as exc:
                table.fail(part, "-", exc)
    sys.exit(table.close())


if __name__ == "__main__":
    main()
