"""From a checkpoint and settings to an engine and what the other rooms must know of its cache."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config.resolve import size_pools
from ..config.tree import CacheSection, Config
from ..core.blocks import BLOCK_TOKENS
from ..core.clock import Clock
from ..core.errors import ConfigError
from ..core.pools import PoolKind
from ..kernels import cpu
from ..kernels.cuda import build as cuda_build
from ..kernels.cuda import hopper
from ..kernels.device import PlainOps
from ..kernels.entry_format import EntryFormat
from ..kvcache.allocator import CacheManager
from ..kvcache.device_segments import DeviceMemory, DeviceMover
from ..kvcache.fingerprint import document, fingerprint, golden_digests, table_digest
from ..kvcache.layout import WINDOW_TOKENS, CacheLayout, CacheShape, Stream
from ..kvcache.pools import CachePools
from ..kvcache.segments import CacheGeometry, CacheMover
from ..kvcache.snapshots import CheckPointCopier
from ..model.batch import ForwardPass, LayerViews
from ..model.checkpoint import load_weights
from ..model.config import ModelConfig
from ..model.device import DeviceTransformer
from ..model.device_graphs import GraphedTransformer
from ..model.transformer import Transformer, Weights, rotary_table
from .api import EventSink
from .core import Engine

logger = logging.getLogger(__name__)

GPU_STEP_BYTES = 1 << 30
"""For graphs, and for what a step over long contexts takes beyond one over none."""


def layer_views(layout: CacheLayout, pools: CachePools) -> list[LayerViews]:
    """Every main layer's streams, out of the one offset table."""
    views = []
    for layer, ratio in enumerate(layout.shape.ratios):
        window = pools.entries(Stream.WINDOW, layer)
        if ratio == 4:
            views.append(
                LayerViews(
                    window,
                    pools.entries(Stream.C4A, layer),
                    pools.ring(Stream.C4A_STATE, layer),
                    pools.entries(Stream.INDEX, layer),
                    pools.ring(Stream.INDEX_STATE, layer),
                )
            )
        elif ratio == 128:
            views.append(LayerViews(window, pools.entries(Stream.C128A, layer), pools.ring(Stream.C128A_STATE, layer)))
        else:
            views.append(LayerViews(window))
    return views


@dataclass(frozen=True)
class Built:
    """One engine, not started, and the faces of its cache."""

    engine: Engine
    config: ModelConfig
    layout: CacheLayout
    pools: CachePools
    geometry: CacheGeometry
    mover: CacheMover | DeviceMover
    allocate: Callable[[int, int], Any] | None
    """Makes transfer buffers (number, stride) where the pools are; None: in the CPU's memory."""
    document: str
    """Canonical layout document; equal documents may exchange pages."""
    fingerprint: bytes
    max_model_len: int
    max_prompt_tokens: int
    """What empty pools hold."""


def weight_digest(path: Path) -> str:
    """Names and sizes of the weight files and the bytes of config.json: enough to tell checkpoints apart at start."""
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb") as stream:
            digest.update(file.name.encode() + os.fstat(stream.fileno()).st_size.to_bytes(8, "little"))
            digest.update(stream.read(1 << 20))
    return digest.hexdigest()


def hopper_device() -> torch.device:
    """The GPU that the process sees first.

    Raises:
        ConfigError: there is none, it is no Hopper, or nothing can compile its kernels.
    """
    if not torch.cuda.is_available():
        raise ConfigError("model.device cuda: torch sees no GPU here; use cpu")
    if torch.cuda.get_device_capability()[0] != 9:
        raise ConfigError(f"model.device cuda: kernels are for Hopper, not for {torch.cuda.get_device_name()}; use cpu")
    if cuda_build.compiler() is None:
        raise ConfigError("model.device cuda: the kernels need nvcc at their first use: set CUDA_HOME or PATH")
    return torch.device("cuda", torch.cuda.current_device())


def has_gpu() -> bool:
    """Whether the engine can compute on a GPU of this process; why not, if not, is logged."""
    try:
        hopper_device()
    except (ConfigError, RuntimeError) as error:  # the latter from a driver that does not answer
        present = torch.cuda.is_available()
        logger.log(logging.WARNING if present else logging.INFO, "engine.no_gpu present=%s reason=%s", present, error)
        return False
    return True


def device_ops(layout: CacheLayout, *, bf16: bool, batch_invariant: bool) -> PlainOps:
    """Kernels where they know the page formats, else plain tensors on the device, whose bits depend on the batch."""
    formats = (EntryFormat[entry.name.upper()] for entry in (layout.kv_entry, layout.index_entry))
    if bf16 and hopper.takes(*formats):
        return hopper.HopperOps() if batch_invariant else hopper.FastHopperOps()
    logger.warning("engine.plain_ops kv_dtype=%s bf16=%s: slow, and not batch-invariant", layout.kv_dtype, bf16)
    return PlainOps(torch.bfloat16 if bf16 else torch.float32)


def device_model(
    config: ModelConfig, weights: Weights, ops: PlainOps, max_model_len: int, max_num_seqs: int, device: torch.device
) -> DeviceTransformer | GraphedTransformer:
    """The forward pass on a GPU; with kernels, decode steps are graphs."""
    model = DeviceTransformer(config, weights, ops, max_positions=max_model_len, device=device)
    if not ops.capturable:
        return model
    return GraphedTransformer(model, max_tokens=max_num_seqs, max_blocks=-(-max_model_len // BLOCK_TOKENS))


def transfer_parts(
    layout: CacheLayout, pools: CachePools
) -> tuple[CacheMover | DeviceMover, Callable[[int, int], Any] | None]:
    """What copies between pages and transfer buffers, and what makes these where the pools are."""
    if pools.device.type == "cpu":
        return CacheMover(layout, pools.specs()), None
    return DeviceMover(layout, pools), lambda number, stride: DeviceMemory(number, stride, pools.device)


@dataclass(frozen=True)
class _Computing:
    """A forward pass and what its cache must know of it."""

    model: ForwardPass
    kernels: str
    """Name of the arithmetic, for the fingerprint."""
    insert: Callable[..., None]


def forward_pass(
    config: Config, model_config: ModelConfig, weights: Weights, layout: CacheLayout, device: torch.device, length: int
) -> _Computing:
    """The model on its device, with all that steps launch compiled; `length` is the longest sequence in tokens."""
    bf16 = config.model.dtype != "fp32"
    if device.type == "cpu":
        return _Computing(
            Transformer(model_config, weights, bf16=bf16, max_positions=length), "cpu-1", cpu.insert_entries
        )
    ops = device_ops(layout, bf16=bf16, batch_invariant=config.engine.batch_invariant)
    model = device_model(model_config, weights, ops, length, config.engine.max_num_seqs, device)
    if ops.capturable:  # else nothing is compiled
        # The pools come later: their size depends on what is left. Padding reads and writes no page.
        scratch = CachePools(layout, dict.fromkeys(PoolKind, 1), str(device))
        model.warm(layer_views(layout, scratch), config.engine.max_num_batched_tokens)
    return _Computing(model, ops.name, ops.insert_entries)


def gpu_pool_bytes(config: Config, device: torch.device) -> int:
    """What is left of a worker's part of the GPU for its pools: a bound at first, and once the model is there and its
    steps were warmed, the size.

    Raises:
        ConfigError: nothing is.
    """
    part = config.cache.gpu_memory_utilization
    free, total = torch.cuda.mem_get_info(device)
    transfer = config.transfer
    buffers = (transfer.num_send_buffers + transfer.num_landing_buffers) * transfer.segment_bytes
    # What the allocator holds: weights, and the most that a step of padding took, if there was one.
    taken = torch.cuda.memory_reserved(device)
    left = min(int(total * part) - taken, free) - buffers - GPU_STEP_BYTES
    if left <= 0:
        which = (
            f"only {free} of the GPU's {total} bytes are free, others hold the rest"
            if free < int(total * part) - taken
            else f"cache.gpu_memory_utilization is {part} of the GPU's {total} bytes: raise it"
        )
        raise ConfigError(
            f"{which}; weights and a step take {taken}, transfer buffers {buffers}, graphs and long contexts "
            f"{GPU_STEP_BYTES}, and nothing is left for the pools"
        )
    return left


def build_engine(
    config: Config,
    clock: Clock,
    sink: EventSink,
    on_fatal: Callable[[BaseException], None],
    progress: Callable[[int, int], None] | None = None,
) -> Built:
    """Load the checkpoint of a resolved config and size its pools.

    Raises:
        ConfigError: the device cannot compute this, or memory does not hold the pools.
        CheckpointError: a tensor is missing, too many, or of another shape.
    """
    device = torch.device("cpu") if config.model.device != "cuda" else hopper_device()
    path = Path(config.model.path)
    model_config = ModelConfig.load(path)
    max_model_len = config.model.max_model_len or model_config.max_position
    if config.engine.num_threads:
        torch.set_num_threads(config.engine.num_threads)
    layout = CacheLayout(CacheShape(model_config.ratios), config.model.kv_dtype)
    sized = functools.partial(
        size_pools,
        page_bytes={kind: pool.page_bytes for kind, pool in layout.pools.items()},
        max_num_seqs=config.engine.max_num_seqs,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        max_model_len=max_model_len,
    )

    def pool_sizes() -> CacheSection:
        given = config.cache
        counted = given.history_pages and given.window_pages and given.state_rows and given.snapshot_rows
        if device.type == "cpu" or given.memory_bytes or counted:
            return sized(given)
        return sized(dataclasses.replace(given, memory_bytes=gpu_pool_bytes(config, device)))

    cache = pool_sizes()  # refuses what cannot fit before the weights are loaded
    weights = load_weights(path, model_config, progress)
    computing = forward_pass(config, model_config, weights, layout, device, max_model_len)
    if device.type != "cpu":
        cache = pool_sizes()  # less is free now
    num_pages = {
        PoolKind.HISTORY: cache.history_pages,
        PoolKind.WINDOW: cache.window_pages,
        PoolKind.STATE: cache.state_rows,
        PoolKind.SNAPSHOT: cache.snapshot_rows,
    }
    pools = CachePools(layout, num_pages, str(device), poison=cache.poison_free_pages)
    replay_tokens = -(-WINDOW_TOKENS * len(layout.shape.ratios) // BLOCK_TOKENS) * BLOCK_TOKENS
    manager = CacheManager(
        num_pages, pools.poison_pages if cache.poison_free_pages else None, replay_tokens=replay_tokens
    )
    far = rotary_table(model_config.compress_rope_theta, model_config.yarn, min(max_model_len, 65536))
    golden = golden_digests(layout, computing.insert, str(device)) | {"rotary": table_digest(far)}
    arithmetic = "fp32" if config.model.dtype == "fp32" else "bf16"
    named = {"weights": weight_digest(path), "arithmetic": arithmetic, "kernels": computing.kernels}
    text = document(layout, named, golden)
    if not config.model.max_model_len:
        max_model_len = min(max_model_len, manager.max_tokens())
    engine = Engine(
        computing.model,
        layer_views(layout, pools),
        manager,
        CheckPointCopier(layout, pools),
        config.engine,
        clock,
        sink,
        on_fatal,
        max_model_len,
        fingerprint(text) if config.cache.prefix_caching else None,
    )
    return Built(
        engine,
        model_config,
        layout,
        pools,
        CacheGeometry(layout),
        *transfer_parts(layout, pools),
        text,
        fingerprint(text),
        max_model_len,
        min(max_model_len, manager.max_tokens()),
    )
