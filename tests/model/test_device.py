"""The device's forward pass by its plain operations, on the CPU, against the reference; and how a step gets there."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from oracle.builder import Variant, random_weights
from support.device_views import feed, pages_for, views_on

from headrace.engine.plan import Slice, plan_batch
from headrace.kernels.cuda.hopper import prefill_rows
from headrace.kernels.device import PlainOps, expand_plan
from headrace.kvcache.sequence import SequencePages
from headrace.model.config import ModelConfig
from headrace.model.device import DeviceTransformer, Staging, StepArrays
from headrace.model.device_graphs import bucket_of
from headrace.model.transformer import Transformer

RATIOS = (0, 128, 4)
CPU = torch.device("cpu")


def make_models(dtype: torch.dtype, seed: int = 3) -> tuple[Transformer, DeviceTransformer, list[int]]:
    """The reference, the device's, and a prompt that closes entries of both ratios and selects among them."""
    variant = Variant(name="t", seed=seed, ratios=RATIOS, hash_layers=1, index_topk=8)
    weights = {k: v if v.dtype == torch.int64 else v.float() for k, v in random_weights(variant).items()}
    config = ModelConfig.from_dict(variant.config())
    ids = torch.randint(2, variant.vocab, (150,), generator=torch.Generator().manual_seed(seed)).tolist()
    reference = Transformer(config, weights, bf16=dtype != torch.float32, max_positions=1024)
    return reference, DeviceTransformer(config, weights, PlainOps(dtype), max_positions=1024, device=CPU), ids


def test_fp32_logits_are_the_references() -> None:
    """Within 5e-5 at every position, whole and in pieces that leave rows to the rings."""
    reference, device, ids = make_models(torch.float32)
    want = feed(reference, views_on("cpu", RATIOS, "fp32"), ids, [len(ids)])
    for sizes in ([len(ids)], [5, 1, 100, 7]):
        got = feed(device, views_on("cpu", RATIOS, "fp32"), ids, sizes)
        torch.testing.assert_close(got, want, rtol=0, atol=5e-5)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
def test_bf16_logits_are_near_the_references(kv_dtype: str) -> None:
    """Rounded at other places, so a choice of an entry or an expert may fall otherwise; not more than that."""
    reference, device, ids = make_models(torch.bfloat16)
    want = feed(reference, views_on("cpu", RATIOS, kv_dtype), ids, [len(ids)])
    got = feed(device, views_on("cpu", RATIOS, kv_dtype), ids, [len(ids)])
    assert float((got - want).abs().mean()) < 0.08
    assert float((got - want).abs().median()) < 0.02


def test_padding_writes_nothing_and_moves_no_row() -> None:
    """A decode step of two sequences, filled up to a bucket: the same logits, the same bytes in all pages."""
    _, device, ids = make_models(torch.float32)
    logits, pages = [], []
    for padded in (False, True):
        views = views_on("cpu", RATIOS, "fp32")
        slices = []
        for turn, length in enumerate((140, 127)):
            own = pages_for(150, turn)
            device.forward(plan_batch([Slice(ids[:length], 0, own, ())]), views)
            slices.append(Slice(ids[length : length + 1], length, own, (length,)))
        step = StepArrays.of(plan_batch(slices))
        assert step.is_decode
        logits.append(device.compute(step.padded(8, 4) if padded else step, views)[:2])
        pages.append([view.window.storage for view in views] + [views[1].entries.storage, views[2].index_keys.storage])
    torch.testing.assert_close(*logits, rtol=0, atol=1e-5)
    for a, b in zip(*pages, strict=True):  # up to last bits, as torch's sums depend on the batch; poison is NaN
        torch.testing.assert_close(a.view(torch.float32), b.view(torch.float32), rtol=1e-4, atol=1e-5, equal_nan=True)


def test_step_arrays_say_where_rows_stand() -> None:
    """First and last rows of each sequence, and the slot of an entry at the token that closes it."""
    slices = [Slice([1] * 6, 2, pages_for(300, 0), (7,)), Slice([1] * 1, 255, pages_for(300, 1), ())]
    step = StepArrays.of(plan_batch(slices))
    assert step.arrays["first_row_T"].tolist() == [0] * 6 + [6]
    assert step.arrays["last_row_T"].tolist() == [5] * 6 + [6]
    first, second = pages_for(300, 0).history[0], pages_for(300, 1).history[0]
    assert step.arrays["slots4_T"].tolist() == [-1, first * 64, -1, -1, -1, first * 64 + 1, second * 64 + 63]
    assert step.arrays["slots128_T"].tolist() == [-1] * 6 + [second * 2 + 1]
    assert (step.num_tokens, step.num_sequences, step.max_tokens_a_sequence) == (7, 2, 6)
    assert not step.is_decode


def test_workspace_rows_are_where_prefill_attention_looks(rng: random.Random) -> None:
    """Window rows by position, each at its position modulo the ring; entries in order from a multiple of 8 on."""
    for _ in range(40):
        slices, used = [], 0
        for turn in range(rng.randint(1, 3)):
            start, number = rng.choice([0, 1, 100, 128, 700]), rng.choice([1, 2, 63, 300])
            blocks, windows = (
                -(-(start + number) // 256),
                range(max(0, start - 127) // 64, (start + number - 1) // 64 + 1),
            )
            history = tuple(rng.sample(range(20 * turn, 20 * turn + 20), blocks))
            pages = SequencePages(history, tuple((page, 50 * turn + page) for page in windows), turn)
            slices.append(Slice([1] * number, start, pages, ()))
            used += number
        step = StepArrays.of(plan_batch([*slices, Slice([1, 1], 0, SequencePages((99,), ((0, 999),), 9), ())]))
        staged = Staging(CPU).stage(step.arrays)
        plan = expand_plan(staged, max_tokens_a_sequence=step.max_tokens_a_sequence, spans=step.spans)
        own = prefill_rows(plan)
        assert own.window_slots_R.numel() % 8 == 0
        for t in range(used + 2):
            length, row, position = int(plan.window_length_T[t]), int(own.row_T[t]), int(plan.positions_T[t])
            assert row % 144 == position % 144
            assert torch.equal(own.window_slots_R[row - length + 1 : row + 1], plan.window_list_TW[t, :length])
            for ratio, a_page in ((4, 64), (128, 2)):
                first, count = int(own.first_T[ratio][t]), int(plan.count_T[ratio][t])
                assert first % 8 == 0
                assert own.slots_R[ratio].numel() % 8 == 0
                place = torch.arange(count)
                want = plan.table_TB[t].long()[place // a_page] * a_page + place % a_page
                assert torch.equal(own.slots_R[ratio][first : first + count].long(), want)


def test_staging_keeps_names_shapes_and_values() -> None:
    arrays = {"a": np.arange(5, dtype=np.int32), "b": np.arange(6, dtype=np.int32).reshape(2, 3)}
    staged = Staging(CPU).stage(arrays)
    assert {name: tensor.tolist() for name, tensor in staged.items()} == {
        "a": [0, 1, 2, 3, 4],
        "b": [[0, 1, 2], [3, 4, 5]],
    }


def test_buckets_hold_what_runs_in_them() -> None:
    """Rows to the next power of two, blocks by fours, never beyond the longest sequence unless it is that long."""
    assert bucket_of(1, 1, 16) == (1, 16)
    assert bucket_of(3, 33, 4096) == (4, 128)
    assert bucket_of(64, 4096, 4096) == (64, 4096)
    for tokens in range(1, 70):
        for blocks in (1, 31, 32, 33, 500, 4000):
            rows, room = bucket_of(tokens, blocks, 4096)
            assert rows >= tokens
            assert blocks <= room <= 4096
