"""DeepSeek-V4 on a device: the forward pass of `transformer.py` over the operations of `kernels/device.py`.

The same mathematics and the same rounding to bf16 between sub-layers, cut at other places: all products of one input
are one, a hyper-connection ends one sub-layer and begins the next in one operation, queries are normed and rotated
where attention reads them. What a step needs of the host goes to the device in one copy; nothing between it and the
logits waits. Letters as in `kernels/device.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..kernels.device import (
    After,
    CompressorWeights,
    ExpertWeights,
    HeadWeights,
    HyperWeights,
    PlainOps,
    Selected,
    StepPlan,
    expand_plan,
)
from .batch import Batch, LayerViews
from .config import ModelConfig
from .transformer import Weights, rotary_table

Int32Array = npt.NDArray[np.int32]
NUM_WINDOW_PAGES = 3
"""That the window of one token can touch."""
FEW_ROWS = 256
"""More fill the device by themselves."""
WARM_ROWS = (1, 65, 257, 513, 1025, 2048, 4096, 8192)
"""Numbers of tokens that between them use every tile size, and every piece that goes to a library."""


@dataclass(frozen=True)
class StepArrays:
    """What the host knows of a step, as int32 arrays by the names of `expand_plan`."""

    arrays: dict[str, Int32Array]
    num_tokens: int
    num_sequences: int
    max_tokens_a_sequence: int

    @classmethod
    def of(cls, batch: Batch) -> StepArrays:
        seq = batch.seq_T.numpy()
        begins = np.flatnonzero(np.diff(seq, prepend=-1))
        lengths = np.diff(begins, append=len(seq))
        first = np.repeat(begins, lengths)

        def at_tokens(ratio: int) -> Int32Array:
            closing = batch.closing[ratio]
            slots = np.full(len(seq), -1, dtype=np.int32)
            slots[closing.rows_EC[:, -1].numpy()] = closing.slots_E.numpy()
            return slots

        arrays = {
            "token_ids_T": batch.token_ids_T.numpy(),
            "positions_T": batch.positions_T.numpy(),
            "seq_T": seq,
            "first_row_T": first,
            "last_row_T": first + np.repeat(lengths, lengths) - 1,
            "ring_T": batch.state_rows_T.numpy(),
            "window_slots_T": batch.window_slots_T.numpy(),
            "slots4_T": at_tokens(4),
            "slots128_T": at_tokens(128),
            "history_SB": batch.history_SB.numpy(),
            "window_SW": batch.window_SW.numpy(),
            "window_first_S": batch.window_first_S.numpy(),
            "logit_rows_R": batch.logit_rows.numpy(),
        }
        whole = {name: array.astype(np.int32, copy=False) for name, array in arrays.items()}
        return cls(whole, len(seq), len(begins), int(lengths.max()))

    @classmethod
    def idle(cls) -> StepArrays:
        """A decode step of nobody, to be padded."""
        none = np.empty(0, dtype=np.int32)
        table = np.empty((0, 0), dtype=np.int32)
        rows = ("ring_T", "window_slots_T", "slots4_T", "slots128_T", "token_ids_T", "positions_T", "window_first_S")
        return cls({**dict.fromkeys(rows, none), "history_SB": table, "window_SW": table}, 0, 0, 1)

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """First row, tokens and first position of each sequence; none for a decode step."""
        if self.max_tokens_a_sequence == 1:
            return ()
        first, last, positions = (self.arrays[name] for name in ("first_row_T", "last_row_T", "positions_T"))
        return tuple((int(row), int(last[row]) - int(row) + 1, int(positions[row])) for row in np.unique(first))

    @property
    def is_decode(self) -> bool:
        """One token a sequence, and the logits of all are wanted."""
        rows = self.arrays["logit_rows_R"]
        return self.max_tokens_a_sequence == 1 and np.array_equal(rows, np.arange(self.num_tokens))

    def padded(self, tokens: int, blocks: int) -> StepArrays:
        """A decode step with `tokens` rows, a sequence each, and tables of `blocks` blocks; padding writes nothing."""

        def pad(name: str, fill: int, shape: tuple[int, ...]) -> Int32Array:
            array = self.arrays[name]
            whole = np.full(shape, fill, dtype=np.int32)
            whole[tuple(slice(size) for size in array.shape)] = array
            return whole

        every = np.arange(tokens, dtype=np.int32)
        none = ("ring_T", "window_slots_T", "slots4_T", "slots128_T")
        arrays = {name: pad(name, -1, (tokens,)) for name in none}
        arrays |= {name: pad(name, 0, (tokens,)) for name in ("token_ids_T", "positions_T", "window_first_S")}
        arrays |= dict.fromkeys(("seq_T", "first_row_T", "last_row_T", "logit_rows_R"), every)
        arrays["history_SB"] = pad("history_SB", 0, (tokens, blocks))
        arrays["window_SW"] = pad("window_SW", 0, (tokens, NUM_WINDOW_PAGES))
        return StepArrays(arrays, tokens, tokens, 1)


class Staging:
    """One pinned buffer on the host and one on the device: a step's arrays travel in one copy.

    The host's buffer is written again by the next step, so whoever stages must have waited for the last one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.empty(0, dtype=torch.int32)

    def stage(self, arrays: Mapping[str, Int32Array], into: Tensor | None = None) -> dict[str, Tensor]:
        """The arrays on the device; views of `into` (int32), if it is given."""
        sizes = [-(-array.size // 4) * 4 for array in arrays.values()]  # each begins at 16 bytes
        total = sum(sizes)
        if self._device.type == "cpu":
            return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}
        if self._host.numel() < total:
            self._host = torch.empty(2 * total, dtype=torch.int32, pin_memory=True)
        flat, at = self._host.numpy(), 0
        target = torch.empty(total, dtype=torch.int32, device=self._device) if into is None else into
        found = {}
        for (name, array), size in zip(arrays.items(), sizes, strict=True):
            flat[at : at + array.size] = array.reshape(-1)
            found[name] = target[at : at + array.size].view(array.shape)
            at += size
        target[:total].copy_(self._host[:total], non_blocking=True)
        return found


class Lanes:
    """Streams beside the current one, for what can go on at once within a layer of few rows.

    What a lane reads must stay referenced until it has joined; what it makes may be let go of after that: a lane
    begins after all that the main stream was asked for before, so memory is not given to two.
    """

    def __init__(self, device: torch.device, number: int) -> None:
        self._streams = [torch.cuda.Stream(device) for _ in range(number)] if device.type == "cuda" else []
        self._open: list[torch.cuda.Stream] = []

    def lane(self, number: int, rows: int) -> AbstractContextManager[object]:
        """To be entered for the work of one lane; the main stream itself where that would gain nothing."""
        if not self._streams or rows > FEW_ROWS:
            return nullcontext()
        stream = self._streams[number]
        stream.wait_stream(torch.cuda.current_stream())
        self._open.append(stream)
        return torch.cuda.stream(stream)

    def join(self) -> None:
        """The main stream goes on after all lanes that were entered."""
        while self._open:
            torch.cuda.current_stream().wait_stream(self._open.pop())


class DeviceLayer:
    """One layer's weights, put together for the device's operations."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, table: Tensor, dtype: torch.dtype) -> None:
        """table: fp32 [positions, 64], on the device where the weights shall be."""
        c, device = config, table.device
        prefix = f"layers.{layer}"
        self.ratio, self.table = c.ratios[layer], table

        def get(name: str, to: torch.dtype = torch.float32) -> Tensor:
            return weights[f"{prefix}.{name}"].to(device, to).contiguous()

        def hyper(name: str) -> HyperWeights:
            return HyperWeights(get(f"hc_{name}_fn"), get(f"hc_{name}_base"), get(f"hc_{name}_scale"))

        def compressor(stem: str) -> CompressorWeights:
            return CompressorWeights(self.ratio, get(f"{stem}.ape"), get(f"{stem}.norm.weight", dtype))

        self.attn_hc, self.ffn_hc = hyper("attn"), hyper("ffn")
        self.attn_norm, self.ffn_norm = get("attn_norm.weight", dtype), get("ffn_norm.weight", dtype)
        self.q_norm, self.kv_norm = get("attn.q_norm.weight"), get("attn.kv_norm.weight")
        self.sink = get("attn.attn_sink")
        of_x, of_qr = ["wq_a", "wkv"], ["wq_b"]
        self.compressor = self.index = None
        if self.ratio:
            of_x += ["compressor.wkv", "compressor.wgate"]
            self.compressor = compressor("attn.compressor")
        if self.ratio == 4:
            of_x += ["indexer.compressor.wkv", "indexer.compressor.wgate", "indexer.weights_proj"]
            of_qr.append("indexer.wq_b")
            self.index = compressor("attn.indexer.compressor")
        self.of_x = torch.cat([get(f"attn.{name}.weight", dtype) for name in of_x])
        self.of_qr = torch.cat([get(f"attn.{name}.weight", dtype) for name in of_qr])
        self.wo_a = get("attn.wo_a.weight", dtype).view(c.o_groups, c.o_lora_rank, -1)
        self.wo_b = get("attn.wo_b.weight", dtype)
        hashed = layer < c.num_hash_layers
        e, d, f = c.num_experts, c.hidden_size, c.expert_width
        w13 = torch.empty(e + 1, 2 * f, d, dtype=dtype, device=device)
        w2 = torch.empty(e + 1, d, f, dtype=dtype, device=device)
        for i, name in enumerate([*(f"experts.{i}" for i in range(e)), "shared_experts"]):
            w13[i, :f] = get(f"ffn.{name}.w1.weight", dtype)
            w13[i, f:] = get(f"ffn.{name}.w3.weight", dtype)
            w2[i] = get(f"ffn.{name}.w2.weight", dtype)
        self.experts = ExpertWeights(
            gate=get("ffn.gate.weight", dtype),
            bias=None if hashed else get("ffn.gate.bias"),
            table=get("ffn.gate.tid2eid", torch.int32) if hashed else None,
            w13=w13,
            w2=w2,
            choices=c.experts_per_token,
            limit=c.swiglu_limit,
            scaling=c.routed_scaling,
            normalise=c.norm_topk_prob,
        )


class DeviceTransformer:
    """The main model, without its MTP layer; `forward` as `transformer.Transformer` has it, logits on the device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        ops: PlainOps,
        *,
        max_positions: int,
        device: torch.device,
    ) -> None:
        """weights: released names, on any device, exact in `ops.dtype` where they are factors of products."""
        self.config, self.ops, self.device = config, ops, device
        plain = rotary_table(config.rope_theta, None, max_positions).flatten(1).to(device)
        stretched = rotary_table(config.compress_rope_theta, config.yarn, max_positions).flatten(1).to(device)
        self.embed = weights["embed.weight"].to(device, ops.dtype)
        self.layers = [
            DeviceLayer(config, weights, i, stretched if ratio else plain, ops.dtype)
            for i, ratio in enumerate(config.ratios)
        ]
        self.hc_head = HeadWeights(
            *(weights[f"hc_head_{name}"].to(device, torch.float32).contiguous() for name in ("fn", "base", "scale"))
        )
        self.norm = weights["norm.weight"].to(device, ops.dtype)
        self.head = weights["head.weight"].to(device, ops.dtype).contiguous()
        self._staging = Staging(device)
        self._lanes = Lanes(device, 2)

    def forward(self, batch: Batch, views: Sequence[LayerViews]) -> Tensor:
        """Advance the pages by the step's tokens; raw logits of `batch.logit_rows`, fp32 [rows, V] on the device.

        Returns before the device has finished; the last step must have (`settle`).
        """
        return self.compute(StepArrays.of(batch), views)

    def compute(self, step: StepArrays, views: Sequence[LayerViews]) -> Tensor:
        """`forward` of a step that is arrays already."""
        staged = self._staging.stage(step.arrays)
        plan = expand_plan(staged, max_tokens_a_sequence=step.max_tokens_a_sequence, spans=step.spans)
        return self.run(plan, views)

    def likeliest(self, logits_RV: Tensor) -> Tensor | None:
        """The lowest best id of each row, int32; -1 where one is NaN."""
        return self.ops.likeliest(logits_RV)

    def settle(self) -> None:
        """Returns when the device has done all that was asked of it."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def warm(self, views: Sequence[LayerViews], max_tokens: int) -> None:
        """Compile what steps of up to `max_tokens` tokens will launch, by steps of nothing but padding."""
        for rows in WARM_ROWS:
            if rows > max_tokens and rows > 1:
                continue
            for a_sequence in (1, 1 << 20):
                arrays = StepArrays.idle().padded(rows, 1).arrays
                arrays["logit_rows_R"] = arrays["logit_rows_R"][:1]
                self.run(expand_plan(self._staging.stage(arrays), max_tokens_a_sequence=a_sequence), views)
                self.settle()

    def run(self, plan: StepPlan, views: Sequence[LayerViews]) -> Tensor:
        """The step on the device alone: nothing here reads a value back."""
        c, ops = self.config, self.ops
        streams = self.embed[plan.token_ids_T][:, None].repeat(1, c.hc_mult, 1)
        ops.begin(plan)
        after: After | None = None
        for layer, own in zip(self.layers, views, strict=True):
            for hyper, norm, sub_layer in (
                (layer.attn_hc, layer.attn_norm, self._attention),
                (layer.ffn_hc, layer.ffn_norm, self._experts),
            ):
                streams, x, post, comb = ops.hyper_connect(
                    streams, hyper, norm, after, rounds=c.hc_iters, eps=c.hc_eps, norm_eps=c.norm_eps
                )
                after = (sub_layer(x, layer, plan, own), post, comb)
        assert after is not None
        if not plan.logit_rows_R.shape[0]:
            return torch.empty(0, c.vocab_size, device=self.device)
        h = ops.head_input(
            streams, after, plan.logit_rows_R, self.hc_head, self.norm, eps=c.hc_eps, norm_eps=c.norm_eps
        )
        return ops.linear(h, self.head, torch.float32)

    def _experts(self, x_TD: Tensor, layer: DeviceLayer, plan: StepPlan, _: LayerViews) -> Tensor:
        return self.ops.experts(x_TD, layer.experts, plan.token_ids_T)

    def _attention(self, x_TD: Tensor, layer: DeviceLayer, plan: StepPlan, views: LayerViews) -> Tensor:
        c, ops, eps = self.config, self.ops, self.config.norm_eps
        x_TC = ops.linear(x_TD, layer.of_x, torch.float32)
        qr, kv = ops.norm_pair(x_TC, layer.q_norm, layer.kv_norm, eps)
        rows, lanes = x_TD.shape[0], self._lanes
        at, width = c.q_lora_rank + 512, c.num_heads * 512
        end = at + {0: 0, 4: 4 * 512, 128: 2 * 512}[layer.ratio]
        selected = None if layer.compressor is None else Selected(plan.list128_TW, plan.count_T[128])
        if layer.index is not None:
            assert views.index_keys is not None
            assert views.index_state is not None
            with lanes.lane(0, rows):
                ops.store_keys(
                    plan, x_TC[:, end : end + 512], layer.index, views.index_keys, views.index_state, layer.table, eps
                )
                q_TJI = ops.linear(qr, layer.of_qr[width:]).unflatten(1, (c.index_heads, 128))
                selected = ops.choose(plan, q_TJI, x_TC[:, end + 512 :], views.index_keys, layer.table, c.index_topk)
        with lanes.lane(1, rows):
            if layer.compressor is None:
                ops.store_window(plan, kv, views.window, layer.table)
            else:
                assert views.entries is not None
                assert views.entry_state is not None
                ops.store_entries(
                    plan, kv, views.window, x_TC[:, at:end], layer.compressor, views.entries, views.entry_state,
                    layer.table, eps,
                )  # fmt: skip
        q_THK = ops.linear(qr, layer.of_qr[:width]).unflatten(1, (c.num_heads, 512))
        lanes.join()
        o_THK = ops.attend(plan, q_THK, views.window, views.entries, selected, layer.sink, layer.table, eps)
        z = ops.linear_groups(o_THK.flatten(1).unflatten(1, (c.o_groups, -1)), layer.wo_a)
        return ops.linear(z, layer.wo_b)
