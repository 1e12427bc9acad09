"""The engine without its thread: turns are called one by one, commands and events are all there is."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import pytest
import torch
from oracle.builder import Variant, random_weights
from support.views import NUM_PAGES, NUM_ROWS, NUM_WINDOW_PAGES

from headrace.config.tree import EngineSection
from headrace.core.clock import ManualClock
from headrace.core.errors import PromptTooLong
from headrace.core.pools import PoolKind
from headrace.core.sampling import FinishReason, SamplingParams
from headrace.engine import api
from headrace.engine.build import layer_views
from headrace.engine.core import Engine
from headrace.kvcache.allocator import CacheManager
from headrace.kvcache.layout import CacheLayout, CacheShape
from headrace.kvcache.pools import CachePools
from headrace.kvcache.snapshots import CheckPointCopier
from headrace.model.config import ModelConfig
from headrace.model.transformer import Transformer

RATIOS = (0, 128, 4)
VARIANT = Variant(name="engine", seed=9, ratios=RATIOS, hash_layers=1, index_topk=8)


class Bench:
    """One engine, turned by hand; keeps every event."""

    def __init__(self, model: Transformer, **section: int) -> None:
        pages = {PoolKind.HISTORY: NUM_PAGES, PoolKind.WINDOW: NUM_WINDOW_PAGES, PoolKind.STATE: NUM_ROWS}
        layout = CacheLayout(CacheShape(RATIOS), "fp8")
        pools = CachePools(layout, pages)
        self.manager = CacheManager(pages)
        self.events: list[api.Event] = []
        self.engine = Engine(
            model, layer_views(layout, pools), self.manager, CheckPointCopier(layout, pools), EngineSection(**section),
            ManualClock(), self.events.extend, lambda error: None, 2048, None,
        )  # fmt: skip

    def run(self, *requests: api.EngineRequest, turns: int = 400) -> None:
        for request in requests:
            self.engine.post(api.Submit(request))
        for _ in range(turns):
            self.engine.turn()
            assert not self.manager.audit()
            if not self.engine.load().running and not self.engine.load().waiting:
                break

    def tokens(self, key: int) -> list[tuple[int, float]]:
        sampled = [e for e in self.events if isinstance(e, api.TokenSampled) and e.key == key]
        assert [e.index for e in sampled] == list(range(len(sampled)))
        return [(e.token, e.logprobs.logprob if e.logprobs else 0.0) for e in sampled]

    def of(self, kind: type) -> list[api.Event]:
        return [e for e in self.events if isinstance(e, kind)]


@pytest.fixture(scope="module")
def model() -> Transformer:
    weights = {k: v if v.dtype == torch.int64 else v.float() for k, v in random_weights(VARIANT).items()}
    return Transformer(ModelConfig.from_dict(VARIANT.config()), weights, bf16=True, max_positions=2048)


def request(key: int, length: int, kind: api.LegKind = api.LegKind.LOCAL, **sampling: object) -> api.EngineRequest:
    prompt = torch.randint(2, VARIANT.vocab, (length,), generator=torch.Generator().manual_seed(key)).tolist()
    params = SamplingParams(**{"max_tokens": 6, "seed": key, "logprobs": 0, **sampling})
    return api.EngineRequest(key=key, kind=kind, prompt=tuple(prompt), num_output_tokens=0, sampling=params)


def test_tokens_and_log_probabilities_do_not_depend_on_chunks_or_company(model: Transformer) -> None:
    """Alone in one chunk, and beside others in small chunks: the same bits; every page comes back."""
    wanted = [request(1, 300), request(2, 17, temperature=0.0), request(3, 130), request(4, 1)]
    alone = {}
    for r in wanted:
        bench = Bench(model)
        bench.run(r)
        alone[r.key] = bench.tokens(r.key)
        assert len(alone[r.key]) == 6
    for budget in (2048, 64, 7):
        together = Bench(model, max_num_batched_tokens=budget)
        together.run(*reversed(wanted))
        assert {r.key: together.tokens(r.key) for r in wanted} == alone
        finished = together.of(api.SequenceFinished)
        assert sorted(e.key for e in finished) == [1, 2, 3, 4]
        assert all(e.reason is FinishReason.LENGTH for e in finished)
        assert all(c.free == c.total and not c.reserved for c in together.manager.counts().values())


def test_a_prefill_keeps_its_pages_until_they_are_released(model: Transformer) -> None:
    """One token, one finish, pages bound; `Release` frees them, and nothing is computed before `Start`."""
    bench = Bench(model)
    bench.run(request(5, 200, api.LegKind.PREFILL), turns=3)
    assert not bench.of(api.Started)
    bench.engine.post(api.Start(5))
    bench.run()
    (finished,) = bench.of(api.SequenceFinished)
    assert finished.reason is None
    assert len(finished.pages.history) == 1
    assert [number for number, _ in finished.pages.window] == [1, 2, 3]
    assert bench.manager.counts()[PoolKind.HISTORY].active == 1
    bench.engine.post(api.Release(5))
    bench.run()
    assert all(c.free == c.total and not c.reserved for c in bench.manager.counts().values())


def test_an_abort_in_any_phase_ends_once_and_loses_no_page(model: Transformer) -> None:
    """After each number of turns, for each kind: one end, and pages back (after `Release` where one is due). A SHARE
    of what is not here is refused by itself."""
    for kind in api.LegKind:
        for turns in range(6):
            bench = Bench(model, max_num_batched_tokens=64)
            bench.run(request(6, 150, kind, max_tokens=50), turns=turns)
            bench.engine.post(api.Start(6))
            bench.run(turns=turns)
            bench.engine.post(api.AbortSequence(6))
            bench.engine.post(api.AbortSequence(6))
            bench.run(turns=2)
            ends = [*bench.of(api.SequenceFailed), *bench.of(api.SequenceFinished), *bench.of(api.Refused)]
            assert len(ends) == 1
            bench.engine.post(api.Release(6))
            bench.run(turns=2)
            assert all(c.free == c.total and not c.reserved for c in bench.manager.counts().values())


def test_what_can_never_fit_is_refused_and_takes_nothing(model: Transformer) -> None:
    """Too long for the model or for the empty pools: refused at once."""
    bench = Bench(model)
    bench.run(request(7, 2000, max_tokens=100))
    (refused,) = bench.of(api.Refused)
    assert isinstance(refused.error, PromptTooLong)
    assert all(c.free == c.total and not c.reserved for c in bench.manager.counts().values())


def test_a_stop_token_ends_the_sequence(model: Transformer) -> None:
    """The token is delivered, then the sequence ends with its id."""
    first = Bench(model)
    first.run(request(8, 40, temperature=0.0))
    stop = first.tokens(8)[2][0]
    bench = Bench(model)
    bench.run(request(8, 40, temperature=0.0, stop_token_ids=(stop,)))
    (finished,) = bench.of(api.SequenceFinished)
    assert (finished.reason, finished.stop_token_id) == (FinishReason.STOP, stop)
    assert bench.tokens(8)[-1][0] == stop
