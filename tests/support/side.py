"""One engine over poisoned pools, turned by hand: half a pair, or a worker that does both phases."""

from __future__ import annotations

import torch
from oracle.builder import Variant, random_weights

from headrace.config.tree import EngineSection
from headrace.core.blocks import root_hash
from headrace.core.clock import ManualClock
from headrace.core.kv_events import BlockRemoved, BlockStored, CacheCleared
from headrace.core.pools import PoolKind
from headrace.core.sampling import SamplingParams
from headrace.core.segments import RangeKind
from headrace.engine import api
from headrace.engine.build import layer_views
from headrace.engine.core import Engine
from headrace.kvcache.allocator import CacheManager
from headrace.kvcache.device_segments import DeviceMover
from headrace.kvcache.layout import CacheLayout, CacheShape
from headrace.kvcache.pools import CachePools
from headrace.kvcache.segments import CacheGeometry, CacheMover
from headrace.kvcache.snapshots import CheckPointCopier
from headrace.model.batch import ForwardPass
from headrace.model.config import ModelConfig
from headrace.model.transformer import Transformer

RATIOS = (0, 128, 4)
VARIANT = Variant(name="prefix", seed=23, ratios=RATIOS, hash_layers=1, index_topk=8)
REPLAY = 512
"""128 positions for each of three layers, in whole blocks."""
LARGE = {PoolKind.HISTORY: 64, PoolKind.WINDOW: 200, PoolKind.STATE: 8, PoolKind.SNAPSHOT: 16}
TINY = {PoolKind.HISTORY: 7, PoolKind.WINDOW: 26, PoolKind.STATE: 4, PoolKind.SNAPSHOT: 2}
ROOTS = {root_hash(b"fingerprint", salt) for salt in ("", "a", "b", "tenant")}
SAMPLED = SamplingParams(max_tokens=9, seed=5, logprobs=0, ignore_eos=True)


class Side:
    """One engine, turned by hand; pages are poisoned whenever they are free."""

    def __init__(
        self,
        model: ForwardPass,
        kv_dtype: str = "fp8",
        pages: dict = LARGE,
        *,
        cached: bool = True,
        budget: int = 2048,
        replay: int = REPLAY,
        longest: int = 4096,
        device: str = "cpu",
    ) -> None:
        """device: of the pools, and where the model computes."""
        self.layout = CacheLayout(CacheShape(RATIOS), kv_dtype)
        self.pools = CachePools(self.layout, pages, device, poison=True)
        self.manager = CacheManager(pages, self.pools.poison_pages, replay_tokens=replay)
        on_cpu = device == "cpu"
        self.mover = CacheMover(self.layout, self.pools.specs()) if on_cpu else DeviceMover(self.layout, self.pools)
        self.copier = CheckPointCopier(self.layout, self.pools)
        self.events: list[api.Event] = []
        self.batches: list[list[api.Event]] = []
        self.stored: set[bytes] = set()
        self.engine = Engine(
            model, layer_views(self.layout, self.pools), self.manager, self.copier,
            EngineSection(max_num_batched_tokens=budget), ManualClock(), self._hear, lambda error: None, longest,
            b"fingerprint" if cached else None,
        )  # fmt: skip

    def _hear(self, events: list[api.Event]) -> None:
        self.events += events
        self.batches.append(list(events))
        for event in events:
            for change in event.changes if isinstance(event, api.CacheChanged) else ():
                match change:
                    case BlockStored(block, parent, _):
                        # A root is nobody's block; else the chain has no hole at any time.
                        assert parent in self.stored or parent in ROOTS
                        self.stored.add(block)
                    case BlockRemoved(block):
                        self.stored.remove(block)
                    case CacheCleared():
                        self.stored.clear()

    def turns(self, *commands: api.Command, num: int = 700) -> None:
        for command in commands:
            self.engine.post(command)
        for _ in range(num):
            self.engine.turn()
            assert not self.manager.audit()
            if not self.engine.load().running and not self.engine.load().queued_tokens:
                break

    def of(self, key: int, kind: type) -> list[api.Event]:
        return [e for e in self.events if isinstance(e, kind) and e.key == key]

    def one(self, key: int, kind: type) -> api.Event:
        (event,) = self.of(key, kind)
        return event

    def output(self, key: int) -> list[tuple[int, int, float]]:
        return [(e.index, e.token, e.logprobs.logprob) for e in self.of(key, api.TokenSampled)]

    def run(self, key: int, prompt: tuple[int, ...], sampling: SamplingParams = SAMPLED, salt: str = "") -> list:
        """One request alone, to its end."""
        self.turns(api.Submit(local(key, prompt, sampling, salt)))
        assert not self.of(key, api.SequenceFailed)
        assert not self.of(key, api.Refused)
        return self.output(key)

    def cached_tokens(self, key: int) -> int:
        return self.one(key, api.Started).cached_tokens


def local(key: int, prompt: tuple[int, ...], sampling: SamplingParams = SAMPLED, salt: str = "") -> api.EngineRequest:
    return api.EngineRequest(
        key=key, kind=api.LegKind.LOCAL, prompt=prompt, num_output_tokens=0, sampling=sampling, namespace=salt
    )


def leg(key: int, kind: api.LegKind, prompt: tuple[int, ...]) -> api.EngineRequest:
    return api.EngineRequest(key=key, kind=kind, prompt=prompt, num_output_tokens=0, sampling=SAMPLED)


def words(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(2, VARIANT.vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def make_model(longest: int = 4096) -> Transformer:
    weights = {k: v if v.dtype == torch.int64 else v.float() for k, v in random_weights(VARIANT).items()}
    return Transformer(ModelConfig.from_dict(VARIANT.config()), weights, bf16=True, max_positions=longest)


def ship(p: Side, d: Side, key: int, length: int, skip: RangeKind | None = None) -> int:
    """Everything that `d` lacks of a prompt, digests compared; how many blocks that were.

    Args:
        skip: what holds ranges of this kind is gathered, and lost.
    """
    reserved, sent = d.one(key, api.Reserved), p.one(key, api.SequenceFinished).pages
    held, geometry, covered, limit = reserved.held_tokens // 256, CacheGeometry(p.layout), set(), 1 << 20
    blocks = length // 256 - held
    segments = geometry.history_segments(held, blocks, limit) if blocks else []
    for ranges in segments + geometry.tail_segments(length, limit):
        buffer = torch.empty(geometry.payload_bytes(ranges, length) + 64, dtype=torch.uint8, device=p.pools.device)
        digest = p.mover.gather(sent, ranges, length, buffer.data_ptr())
        covered |= geometry.split(ranges)
        if all(one.kind is not skip for one in ranges):
            assert d.mover.scatter(reserved.pages, ranges, length, buffer.data_ptr()) == digest
    assert covered == geometry.split(geometry.expected(length, held))
    return blocks
