"""The forward pass on a GPU against transformers: plain operations in fp32, kernels as near as the CPU's bf16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from oracle.builder import Variant, random_weights
from oracle.judge import TOLERANCE, Checkpoints
from oracle.oracle import Record
from support.device_views import feed, views_on

from headrace.kernels.cuda import build
from headrace.kernels.cuda.hopper import HopperOps
from headrace.kernels.device import PlainOps
from headrace.model.config import ModelConfig
from headrace.model.device import DeviceTransformer
from headrace.model.transformer import Transformer

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9 and build.compiler() is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU and nvcc")]
V = Variant(name="gpu", seed=5, ratios=(0, 128, 4, 128, 4, 0), hash_layers=1, index_topk=8)
LENGTH = 300


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    pytest.importorskip("transformers.models.deepseek_v4")
    return Checkpoints(Path(tmp_path_factory.mktemp("oracle"))).record(V, LENGTH, (LENGTH,))


def differences(model: Transformer | DeviceTransformer, device: str, kv_dtype: str, record: Record) -> torch.Tensor:
    logits = feed(model, views_on(device, V.ratios, kv_dtype), record.prompt, [130, 1, 70])
    assert logits.isfinite().all()
    return (logits - record.logits).abs()


def test_logits_are_the_oracle_s(record: Record) -> None:
    """In fp32 within twice the CPU's tolerance; with bf16, fp8 and fp4 about as far from it as the CPU's kernels."""
    config = ModelConfig.from_dict(V.config())
    weights = {k: v if v.dtype == torch.int64 else v.float() for k, v in random_weights(V).items()}
    cuda = torch.device("cuda", 0)
    plain = DeviceTransformer(config, weights, PlainOps(torch.float32), max_positions=4096, device=cuda)
    assert float(differences(plain, "cuda", "fp32", record).max()) < 2 * TOLERANCE
    ours = DeviceTransformer(config, weights, HopperOps(), max_positions=4096, device=cuda)
    got = differences(ours, "cuda", "fp8", record)
    want = differences(Transformer(config, weights, bf16=True, max_positions=4096), "cpu", "fp8", record)
    print(f"mean difference from the oracle: {float(got.mean()):.4f} on the GPU, {float(want.mean()):.4f} on the CPU")
    assert float(got.mean()) < 1.5 * float(want.mean())
    assert float(got.median()) < 1.5 * float(want.median())
