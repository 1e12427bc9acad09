"""The settings of headrace: frozen, keyword-only sections with a docstring under each field.

Plain data: nothing here reads a file, the environment or the machine. `load.py` builds the tree, `resolve.py` turns
"auto" into values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DeviceName = Literal["auto", "cpu", "cuda"]
ComputeDtype = Literal["auto", "fp32", "bf16"]
KvDtype = Literal["auto", "fp32", "bf16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Which model, in which arithmetic."""

    path: str = ""
    """Directory with config.json, safetensors and tokenizer."""
    served_names: tuple[str, ...] = ()
    """Names that requests may use, the first the default; empty: the directory's name."""
    device: DeviceName = "auto"
    """auto: cuda where the process sees a GPU that the kernels are for, can compile them, and they know the formats
    (bf16 with fp8 pages); else cpu."""
    dtype: ComputeDtype = "auto"
    """Rounding of activations between operations; fp32 exists to be judged by the oracle."""
    kv_dtype: KvDtype = "auto"
    """Bytes of cache entries; fp8 means fp8 entries with fp4 indexer keys."""
    max_model_len: int = 0
    """Longest prompt plus output in tokens; 0: the checkpoint's own, as far as the pools can hold it."""


@dataclass(frozen=True, kw_only=True)
class CacheSection:
    """Sizes of the four pools."""

    memory_bytes: int = 0
    """Bytes for all pools together; 0: on the CPU an eighth of the host's free memory, at most 1 GiB; on a GPU what
    `gpu_memory_utilization` leaves."""
    gpu_memory_utilization: float = 0.0
    """Part of a GPU's memory that one worker may take: weights, what a step needs, transfer buffers, and pools, which
    get the rest. 0: nine tenths, divided by the workers that `serve` starts."""
    history_pages: int = 0
    """256 tokens each; 0: from memory_bytes. The same for the other pools."""
    window_pages: int = 0
    state_rows: int = 0
    snapshot_rows: int = 0
    """Check-points that can be kept at once."""
    prefix_caching: bool = True
    """Keep whole blocks of finished sequences, and read them instead of computing them again."""
    poison_free_pages: bool = False
    """Fill freed pages with 0xFF, so that any stale read becomes a NaN."""


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """One rank's step."""

    max_num_seqs: int = 64
    """Sequences that may hold a state row at once."""
    max_num_batched_tokens: int = 2048
    """Tokens computed in one step: decode tokens first, prompt chunks fill the rest."""
    max_queue: int = 4096
    """Waiting legs; more are refused."""
    output_reserve_tokens: int = 512
    """Growth that admission promises for: min(max_tokens, this)."""
    num_threads: int = 0
    """CPU threads of the kernels; 0: all cores divided by the workers of this host."""
    batch_invariant: bool = True
    """On a GPU: a token's bits depend on its sequence alone. False is faster, and gives up every promise of equal
    bits; on the CPU it changes nothing."""


@dataclass(frozen=True, kw_only=True)
class TransferSection:
    """Shipping pages."""

    driver: Literal["nixl", "memory"] = "nixl"
    process: Literal["auto", "own", "worker"] = "auto"
    """Where transfers run. own: in a process that shares the pools with the worker's, so that its engine shares nothing
    else with them; worker: in the worker's. auto: own where the pools lie in the CPU's memory."""
    segment_bytes: int = 8 << 20
    """Payload bound of one segment, and size of a buffer less its header."""
    num_send_buffers: int = 16
    num_landing_buffers: int = 16
    window: int = 8
    """Announced, not yet released segments of one transfer."""
    reads: int = 4
    """READs of one peer that run at once. They share its connection and end together, so the others of a window are
    better announced and waiting."""
    peer_share: float = 0.5
    """Largest part of the landing buffers that one peer may occupy, held ones counted."""
    read_deadline_s: float = 5.0
    progress_deadline_s: float = 5.0
    """A transfer with something to move ends without any progress for this long."""
    step_deadline_s: float = 60.0
    """A transfer that waits for its holder to compute ends after this long: when a stuck holder ends itself."""
    lease_s: float = 30.0
    beat_s: float = 2.0
    tombstone_s: float = 600.0
    offer_wait_s: float = 30.0
    """A prefill that nobody pulls for this long ends: longer than a taker may need for its credits."""
    pull_wait_s: float = 5.0
    """A pull whose prefill does not come for this long ends: both are sent together."""
    queue_budget_s: float = 120.0
    """A pull that the holder's queue keeps waiting for this long ends."""
    require_transport: str = ""
    """Refuse links over any other transport, for example "cuda_ipc" or "rc"."""


@dataclass(frozen=True, kw_only=True)
class WorkerSection:
    """One worker process."""

    worker_id: str = ""
    role: Literal["prefill", "decode", "both"] = "both"
    host: str = "127.0.0.1"
    engine_port: int = 7100
    peer_port: int = 7101
    status_port: int = 8080
    drain_s: float = 30.0
    wedged_after_s: float = 30.0
    """No step progress with work present for this long: not ready."""


@dataclass(frozen=True, kw_only=True)
class RouterSection:
    """The edge."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_enabled: bool = False
    grpc_host: str = "127.0.0.1"
    grpc_port: int = 50051
    workers: tuple[str, ...] = ()
    """host:port of each worker's engine service. Role and peer address come from the worker itself."""
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Empty: open. From HEADRACE_API_KEY, comma-separated, or a file; never from flags."""
    max_body_bytes: int = 32 << 20
    max_queue: int = 1024
    """Requests waiting for a worker; more are answered 429."""
    queue_timeout_s: float = 30.0
    attempts: int = 3
    """Tries before the first output byte."""
    local_prefill_tokens: int = 512
    """A decode worker that holds the beginning of a prompt computes the rest itself if it is no longer than this and no
    prefill worker would be cheaper; 0: never."""
    fetch_min_tokens: int = 2048
    """A prefill worker takes a prefix from another worker's cache instead of computing it, if that spares it at least
    so many tokens; 0: never."""
    request_timeout_s: float = 600.0
    drain_s: float = 30.0
    default_max_tokens: int = 0
    """Chat requests without a bound; 0: the rest of the context."""
    strict_fields: bool = False
    cors_origins: tuple[str, ...] = ()
    tokenizer_threads: int = 2
    effort_profile: Literal["auto", "official", "preview"] = "auto"
    """Which texts tell the model how hard to think; auto: detected from the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class ServeSection:
    """The supervisor of one host."""

    prefill: int = 1
    decode: int = 1
    monolithic: bool = False
    restart: bool = True
    """Start a worker again when it dies, with growing pauses."""
    ready_timeout_s: float = 300.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """The whole tree."""

    model: ModelSection = field(default_factory=ModelSection)
    cache: CacheSection = field(default_factory=CacheSection)
    engine: EngineSection = field(default_factory=EngineSection)
    transfer: TransferSection = field(default_factory=TransferSection)
    worker: WorkerSection = field(default_factory=WorkerSection)
    router: RouterSection = field(default_factory=RouterSection)
    serve: ServeSection = field(default_factory=ServeSection)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    otlp_traces_endpoint: str = ""
    """Collector that spans of requests are sent to, for example http://localhost:4317 (OTLP over gRPC); empty: none."""
