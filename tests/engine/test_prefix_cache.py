"""Hits change nothing: tokens, log-probabilities and the bytes of the cache are those of an engine without one."""

import random

import pytest
import torch
from support.side import LARGE, REPLAY, TINY, Side, leg, local, make_model, ship, words

from headrace.core.kv_events import BlockRemoved
from headrace.core.pools import PoolKind
from headrace.core.sampling import FinishReason, SamplingParams
from headrace.engine import api
from headrace.kvcache.layout import Stream
from headrace.model.transformer import Transformer


@pytest.fixture(scope="module")
def model() -> Transformer:
    return make_model()


@pytest.mark.parametrize("kv_dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp8"])
@pytest.mark.parametrize(
    ("length", "again", "cached"),
    [
        (256, 256, 0),  # the last token is always computed, and a border before it there is none
        (257, 257, 256),
        (512, 512, 256),
        (600, 600, 512),
        (600, 513, 512),
        (600, 530, 512),
        (1024, 1500, 1024),
        (1300, 1024, 256),  # blocks are here, a check-point at their end is not: replayed
        (1300, 700, 0),  # a replay that would begin before the start
    ],
)
def test_resends_and_longer_siblings_equal_a_cold_run(model, kv_dtype, length, again, cached):
    """The same bits, from the last border that has a check-point, or by exact replay."""
    text = words(length, 1600)
    warm, cold = Side(model, kv_dtype), Side(model, kv_dtype, cached=False)
    warm.run(1, text[:length])
    assert warm.run(2, text[:again]) == cold.run(2, text[:again])
    assert warm.cached_tokens(2) == cached
    assert warm.one(2, api.SequenceFinished).computed_tokens == again - cached


@pytest.mark.parametrize("budget", [*(pytest.param(budget, marks=pytest.mark.slow) for budget in (96, 2048)), 300])
def test_chunks_do_not_matter_to_hits(model, budget):
    """Check-points and replays under small token budgets."""
    text = words(5, 1400)
    warm, cold = Side(model, budget=budget), Side(model, cached=False)
    warm.run(1, text[:900])
    for key, length in ((2, 900), (3, 1400), (4, 650)):
        assert warm.run(key, text[:length]) == cold.run(key, text[:length])


def test_the_answer_becomes_prefix(model):
    """The next turn computes only what is new, and what lies beyond the last whole block."""
    warm, cold = Side(model), Side(model, cached=False)
    sampling = SamplingParams(max_tokens=300, seed=7, logprobs=0, ignore_eos=True)
    prompt = words(1, 500)
    for key in (1, 2):
        output = warm.run(key, prompt, sampling)
        assert output == cold.run(key, prompt, sampling)
        if key > 1:
            assert len(prompt) - warm.cached_tokens(key) <= 40 + 256
        prompt += tuple(token for _, token, _ in output) + words(key + 10, 40)


def conversations(seed: int, longest: int) -> list[tuple[tuple[int, ...], SamplingParams, str]]:
    """Requests that resend, continue, fork and cut what was said before; some greedy, some salted."""
    draw = random.Random(seed)
    said: list[tuple[int, ...]] = [words(seed, draw.choice([512, 700, 1000]))]
    requests = []
    for at in range(10):
        base = draw.choice(said)
        match draw.choice(["resend", "continue", "continue", "fork", "cut", "new"]):
            case "resend":
                text = base
            case "continue":
                text = base + words(seed * 100 + at, draw.randint(1, 400))
            case "fork":
                text = base[: draw.randint(1, len(base))] + words(seed * 200 + at, draw.randint(1, 300))
            case "cut":
                text = base[: draw.choice([draw.randint(1, len(base)), max(256, len(base) // 256 * 256)])]
            case _:
                text = words(seed * 300 + at, draw.randint(1, 800))
        said.append(text[:longest])
        temperature = draw.choice([0.0, 1.0])
        sampling = SamplingParams(
            max_tokens=draw.randint(1, 20), seed=at, logprobs=0, ignore_eos=True, temperature=temperature
        )
        requests.append((said[-1], sampling, draw.choice(["", "", "", "tenant"])))
    return requests


@pytest.mark.parametrize("kv_dtype", [pytest.param("bf16", marks=pytest.mark.slow), "fp8"])
@pytest.mark.parametrize("pages", [LARGE, TINY], ids=["large", "tiny"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 9))])
def test_random_conversations_equal_cold_runs(model, kv_dtype, pages, seed):
    """Forks, resends, aligned and unaligned ends, evictions by tiny pools, salts; several at once."""
    warm, cold = Side(model, kv_dtype, pages), Side(model, kv_dtype, cached=False)
    requests = conversations(seed, 1500 if pages is LARGE else 1200)
    for first in range(0, len(requests), 2):
        pair = list(enumerate(requests[first : first + 2], first + 1))
        warm.turns(*(api.Submit(local(key, *request)) for key, request in pair), num=400)
        for key, request in pair:
            assert warm.output(key) == cold.run(key, *request), key
    assert len(warm.stored) == warm.manager.num_cached_blocks
    if seed:
        return  # whether there are hits and evictions is chance
    if pages is LARGE:
        assert sum(warm.cached_tokens(key) for key in range(1, len(requests) + 1)) > 0
    else:
        assert sum(
            isinstance(c, BlockRemoved) for e in warm.events if isinstance(e, api.CacheChanged) for c in e.changes
        )


def test_two_at_once_share_what_both_compute(model):
    """Of two equal blocks one is kept; both sequences read it from then on."""
    warm, cold = Side(model, budget=512), Side(model, cached=False)
    text = words(3, 800)
    warm.turns(api.Submit(local(1, text)), api.Submit(local(2, text)), num=100)
    assert warm.output(1) == warm.output(2) == cold.run(1, text)
    counts = warm.manager.counts()[PoolKind.HISTORY]
    assert (counts.cached, counts.free) == (3, counts.total - 3)


def test_salts_never_share(model):
    """Neither a hit nor a hash; the same salt does."""
    side = Side(model)
    text = words(4, 600)
    side.run(1, text, salt="a")
    mine = set(side.stored)
    side.run(2, text, salt="b")
    assert side.cached_tokens(2) == 0
    assert not mine & (side.stored - mine)
    assert len(side.stored) == 4
    side.run(3, text, salt="a")
    assert side.cached_tokens(3) == 512


def test_what_is_here_is_said_before_anything_is_computed(model):
    """The pages of a hit leave with `Reserved` and `Started`, ahead of the first step."""
    side = Side(model)
    text = words(2, 900)
    side.run(1, text[:600])
    side.turns(api.Submit(leg(2, api.LegKind.PREFILL, text)), api.Start(2))
    where = {type(e): at for at, batch in enumerate(side.batches) for e in batch if getattr(e, "key", None) == 2}
    reserved = side.one(2, api.Reserved)
    assert (reserved.held_tokens, len(reserved.pages.history)) == (512, 2)
    assert where[api.Reserved] <= where[api.Started] < where[api.ChunkDone]
    assert side.of(2, api.ChunkDone)[-1].pages.history[:2] == reserved.pages.history
    side.turns(api.Release(2), num=1)


def test_a_cleared_cache_is_cold(model):
    """All of it at rest; of what is read only the rest goes."""
    side = Side(model)
    text = words(7, 700)
    side.run(1, text)
    side.turns(api.ClearCache(), num=1)
    assert not side.stored
    assert side.run(2, text)
    assert side.cached_tokens(2) == 0
    side.turns(api.Submit(leg(3, api.LegKind.PREFILL, text[:520])), num=1)
    side.turns(api.ClearCache(), num=1)
    assert len(side.stored) == side.manager.num_cached_blocks == 2
    side.turns(api.AbortSequence(3))
    assert all(c.free + c.cached == c.total for c in side.manager.counts().values())


def test_scores_of_a_prompt_read_nothing_from_the_cache(model):
    """Every position is computed when its log-probability is asked for."""
    side = Side(model)
    text = words(6, 600)
    side.run(1, text)
    side.run(2, text, SamplingParams(max_tokens=1, prompt_logprobs=0, logprobs=0))
    assert side.cached_tokens(2) == 0
    assert sum(len(e.tokens) for e in side.of(2, api.PromptScored)) == 599


# ---- removing any stream from a check-point, or from the blocks before it, is noticed ----


def _blank_history(side: Side, stream: Stream) -> None:
    for layer in side.layout.shape.layers(4 if stream in (Stream.C4A, Stream.INDEX) else 128):
        region = side.layout.region(stream, layer)
        for page in side.manager._index.indexed(PoolKind.HISTORY):
            side.pools.storage(PoolKind.HISTORY)[page, region.offset : region.offset + region.length] = 0


def _blank_window(side: Side, stream: Stream) -> None:
    for page in side.manager._index.indexed(PoolKind.WINDOW):
        side.pools.storage(PoolKind.WINDOW)[page] = 0


def _blank_snapshot(side: Side, stream: Stream) -> None:
    for layer in side.layout.shape.layers(4):
        region = side.layout.region(stream, layer)
        for page in side.manager._index.indexed(PoolKind.SNAPSHOT):
            side.pools.storage(PoolKind.SNAPSHOT)[page, region.offset : region.offset + region.length] = 0


@pytest.mark.parametrize(
    ("blank", "stream"),
    [
        (None, Stream.WINDOW),
        (_blank_window, Stream.WINDOW),
        (_blank_history, Stream.C4A),
        (_blank_history, Stream.C128A),
        (_blank_history, Stream.INDEX),
        (_blank_snapshot, Stream.C4A_OVERLAP),
        (_blank_snapshot, Stream.INDEX_OVERLAP),
    ],
)
def test_without_any_one_stream_a_hit_is_another(model, blank, stream):
    """Output and the bytes of the blocks that follow: equal with all streams, different without any one."""
    text = words(8, 900)
    warm, cold = Side(model), Side(model, cached=False)
    warm.run(1, text[:640])
    if blank is not None:
        blank(warm, stream)
    results = []
    for side in (warm, cold):
        side.turns(api.Submit(leg(2, api.LegKind.PREFILL, text)), api.Start(2))
        pages = side.one(2, api.SequenceFinished).pages
        # One block whole, and the entries of the partial one behind it.
        results.append((side.output(2), side.pools.storage(PoolKind.HISTORY)[pages.history[2]].clone()))
        side.turns(api.Release(2))
    assert warm.cached_tokens(2) == 512
    same = results[0][0] == results[1][0] and torch.equal(results[0][1], results[1][1])
    assert same == (blank is None)


def test_without_a_replay_it_would_be_wrong(model):
    """A window that begins empty at the border is not the sequence's: the replay is what makes it exact."""
    text = words(9, 1500)
    outputs = []
    for replay in (0, REPLAY):
        side = Side(model, replay=replay)
        side.run(1, text[:1300])
        side.run(2, text[:1024])
        assert side.cached_tokens(2) == 768 - replay
        outputs.append(side.output(2))
    assert outputs[1] == Side(model, cached=False).run(2, text[:1024])
    assert outputs[0] != outputs[1]


# ---- disaggregated ----


def hand_over(p: Side, d: Side, key: int, prompt: tuple[int, ...]) -> tuple[list, int, int]:
    """One request over both; its output, the blocks that were shipped and the tokens that were not computed."""
    p.turns(api.Submit(leg(key, api.LegKind.PREFILL, prompt)), api.Start(key))
    d.turns(api.Submit(leg(key, api.LegKind.GENERATE, prompt)))
    blocks = ship(p, d, key, len(prompt))
    first = p.one(key, api.TokenSampled)
    p.turns(api.Release(key))
    d.turns(api.Admit(key, first.token, first.index))
    return p.output(key) + d.output(key), blocks, p.cached_tokens(key)


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))])
def test_disaggregated_hits_equal_cold_local_runs(model, kv_dtype, seed):
    """Each side has its own cache; only what the taker lacks is shipped."""
    p, d = Side(model, kv_dtype, budget=300), Side(model, kv_dtype)
    cold = Side(model, kv_dtype, cached=False)
    shipped = whole = cached = 0
    for key, (prompt, _, _) in enumerate(conversations(seed, 1500), 1):
        output, blocks, tokens = hand_over(p, d, key, prompt)
        assert output == cold.run(key, prompt), key
        shipped, whole, cached = shipped + blocks, whole + len(prompt) // 256, cached + tokens
    assert shipped < whole
    assert cached > 0


def test_the_decode_side_goes_on_from_its_own_answer(model):
    """What it decoded is a prefix there: the next turn runs on it alone and computes only what is new."""
    p, d, cold = Side(model), Side(model), Side(model, cached=False)
    prompt = words(2, 505)
    output, _, _ = hand_over(p, d, 1, prompt)
    prompt += tuple(token for _, token, _ in output) + words(3, 30)
    assert d.run(2, prompt) == cold.run(2, prompt)
    assert d.cached_tokens(2) == 512


def test_a_finished_request_ends_for_a_reason(model):
    """A guard for the helpers above: requests run to their length."""
    side = Side(model)
    side.run(1, words(1, 10))
    assert side.one(1, api.SequenceFinished).reason is FinishReason.LENGTH
