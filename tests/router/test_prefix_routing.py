"""A router that follows its workers' prefix caches over real gRPC, and places by what it learned."""

import httpx
from router_world import in_world

from headrace.core.blocks import block_hashes, root_hash
from headrace.core.kv_events import BlockRemoved, BlockStored, CacheCleared
from headrace.proto.internal.v1 import engine_pb2 as pb
from headrace.router.block_chains import hash_prompt
from headrace.router.prefix_index import IndexState

PROMPT = [40 + number % 200 for number in range(900)]


def chain_blocks(fingerprint, tokens, salt=""):
    """What a worker says that has computed this prompt; a check-point at every border."""
    root = root_hash(fingerprint, salt)
    chain = block_hashes(root, tokens)
    return [BlockStored(block, parent, True) for block, parent in zip(chain, [root, *chain], strict=False)]


def worker_of(w, name):
    return next(worker for worker in w.router.dispatcher.placement.workers if worker.ref.worker_id == name)


def index_of(w, name):
    return worker_of(w, name).index


async def until_equal(w, name):
    """The index is exact and says what the worker holds."""
    worker = w.workers[name]
    await w.until(
        lambda: (
            index_of(w, name).state is IndexState.EXACT
            and index_of(w, name).seq == len(worker.messages)
            and index_of(w, name).held() == worker.blocks
        )
    )


@in_world()
async def test_index_follows_its_worker(w):
    """From a snapshot in parts, through changes, a lost message, a broken stream and a cleared cache."""
    worker = w.workers["prefill-0"]
    blocks = chain_blocks(worker.fingerprint, PROMPT * 8)
    await until_equal(w, "prefill-0")
    worker.cache(*blocks[:5])
    await until_equal(w, "prefill-0")
    worker.cache(BlockRemoved(blocks[4].block))
    worker.faults.drop_messages = 1
    worker.cache(blocks[4])
    worker.cache(blocks[5])
    await until_equal(w, "prefill-0")
    worker.faults.break_events = 1
    worker.cache(blocks[6])
    worker.cache(blocks[7])
    await until_equal(w, "prefill-0")
    assert worker.num_snapshots == 1
    worker.cache(CacheCleared())
    worker.cache(blocks[0])
    await until_equal(w, "prefill-0")
    assert worker.num_snapshots == 2


@in_world()
async def test_replay_that_is_gone_is_a_snapshot(w):
    """The worker keeps its latest messages, not all."""
    worker = w.workers["prefill-0"]
    await until_equal(w, "prefill-0")
    worker.num_kept = 0
    worker.faults.drop_messages = 1
    for block in chain_blocks(worker.fingerprint, PROMPT):
        worker.cache(block)
    await until_equal(w, "prefill-0")
    assert worker.num_snapshots >= 2


@in_world()
async def test_next_life_starts_from_nothing(w):
    """What the dead worker held is forgotten before the new one is used."""
    worker = w.workers["prefill-0"]
    worker.cache(*chain_blocks(worker.fingerprint, PROMPT))
    await until_equal(w, "prefill-0")
    before = index_of(w, "prefill-0")
    await worker.kill()
    await w.until(lambda: not w.router.dispatcher.placement.can_serve)
    await worker.start()
    await w.until(lambda: w.router.dispatcher.placement.can_serve)
    await until_equal(w, "prefill-0")
    assert index_of(w, "prefill-0") is not before
    assert index_of(w, "prefill-0").num_blocks == 0


@in_world(wait=False)
async def test_worker_without_events_is_used_all_the_same(w):
    """By load, and by what this router sent there."""
    for worker in w.workers.values():
        worker.faults.no_events = True
    await w.until(lambda: w.router.dispatcher.placement.can_serve)
    for name in w.workers:
        await w.until(lambda name=name: index_of(w, name).state is IndexState.DEGRADED)
    await w.client.completions.create(model="tide", prompt=PROMPT, max_tokens=2)
    assert index_of(w, "prefill-0").num_predicted == 3
    async with httpx.AsyncClient(base_url=w.url) as client:
        text = (await client.get("/metrics")).text
    assert 'headrace:router_index_state{state="degraded"} 2.0' in text
    assert 'headrace:router_decisions_total{mode="degraded",path="pair",reason="load"} 1.0' in text


def kinds(w):
    """Worker and kind of every leg so far."""
    return {(name, submit.kind) for name, worker in w.workers.items() for submit in worker.submits}


@in_world(roles=("prefill", "prefill", "decode", "decode"))
async def test_prompt_goes_where_its_prefix_is(w):
    """A prefill worker that holds it computes; a decode worker that holds nearly all of it needs no other."""
    blocks = chain_blocks(w.workers["prefill-1"].fingerprint, PROMPT)
    w.workers["prefill-1"].cache(*blocks[:1])
    w.workers["decode-2"].cache(*blocks[:1])
    for name in w.workers:
        await until_equal(w, name)
    await w.client.completions.create(model="tide", prompt=PROMPT, max_tokens=2)
    assert kinds(w) == {("prefill-1", pb.LEG_KIND_PREFILL), ("decode-2", pb.LEG_KIND_GENERATE)}
    w.workers["decode-3"].cache(*blocks)
    await until_equal(w, "decode-3")
    done = await w.client.completions.create(model="tide", prompt=PROMPT, max_tokens=2)
    assert ("decode-3", pb.LEG_KIND_LOCAL) in kinds(w)
    assert done.usage.prompt_tokens_details.cached_tokens == 450, "the worker's word, not the router's guess"
    async with httpx.AsyncClient(base_url=w.url) as client:
        text = (await client.get("/metrics")).text
    assert 'headrace:router_decisions_total{mode="exact",path="local",reason="local"} 1.0' in text
    assert "headrace:router_predicted_vs_actual_hit_tokens_count 2.0" in text
    assert 'headrace:router_hit_tokens_total{kind="actual"} 900.0' in text


@in_world()
async def test_prompt_whose_scores_are_wanted_is_placed_as_if_nobody_held_it(w):
    """All of it is computed."""
    for name, worker in w.workers.items():
        worker.cache(*chain_blocks(worker.fingerprint, PROMPT))
        await until_equal(w, name)
    body = {"model": "tide", "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
    async with httpx.AsyncClient(base_url=w.url) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        text = (await client.get("/metrics")).text
    assert 'headrace:router_decisions_total{mode="exact",path="pair",reason="load"} 1.0' in text


@in_world(roles=("prefill", "prefill", "decode"))
async def test_salt_reaches_the_chain_and_the_worker(w):
    """Another tenant's blocks are no hit, though the tokens are the same."""
    fingerprint = w.workers["prefill-1"].fingerprint
    w.workers["prefill-1"].cache(*chain_blocks(fingerprint, PROMPT, "red"))
    await until_equal(w, "prefill-1")
    async with httpx.AsyncClient(base_url=w.url) as client:
        for salt, reason in (("blue", "load"), ("red", "hit")):
            body = {"model": "tide", "prompt": PROMPT, "max_tokens": 1, "cache_salt": salt}
            assert (await client.post("/v1/completions", json=body)).status_code == 200
            text = (await client.get("/metrics")).text
            assert f'headrace:router_decisions_total{{mode="exact",path="pair",reason="{reason}"}} 1.0' in text
    salts = {submit.cache_salt for worker in w.workers.values() for submit in worker.submits}
    assert salts == {"red", "blue"}


@in_world()
async def test_usage_tells_cached_tokens_on_every_way_out(w):
    """Whole or streamed, one choice or several: once for each prompt."""
    cached = len(PROMPT) // 2
    whole = await w.client.completions.create(model="tide", prompt=PROMPT, max_tokens=2, n=3)
    assert whole.usage.prompt_tokens_details.cached_tokens == cached
    two = await w.client.completions.create(model="tide", prompt=[PROMPT, PROMPT[:100]], max_tokens=2, n=2)
    assert (two.usage.prompt_tokens, two.usage.prompt_tokens_details.cached_tokens) == (1000, cached + 50)
    for n in (1, 2):
        stream = await w.client.completions.create(
            model="tide", prompt=PROMPT, max_tokens=2, n=n, stream=True, stream_options={"include_usage": True}
        )
        last = [chunk async for chunk in stream][-1]
        assert last.usage.prompt_tokens_details.cached_tokens == cached


@in_world()
async def test_prompt_of_several_choices_is_looked_for_once(w):
    """One prefill, whose hit is that of the request."""
    said = iter((512,))
    w.workers["prefill-0"].cached_tokens = lambda prompt: next(said)
    done = await w.client.completions.create(model="tide", prompt=PROMPT, max_tokens=2, n=3)
    assert done.usage.prompt_tokens_details.cached_tokens == 512


@in_world(roles=("prefill", "decode", "decode"))
async def test_resumed_stream_is_looked_for_with_what_was_said(w):
    """Prompt and journal together make the chain of the next attempt."""
    prompt = PROMPT[:510]
    seen = []
    decide = w.router.dispatcher.placement.decide

    def watch(want, now_s):
        decision = decide(want, now_s)
        if not seen:
            w.workers[decision.plan.decode.worker_id].faults.die_at = 6
        seen.append((want.num_tokens, len(want.chains.of(w.workers["prefill-0"].fingerprint))))
        return decision

    w.router.dispatcher.placement.decide = watch
    await w.client.completions.create(model="tide", prompt=prompt, max_tokens=10)
    assert seen[0] == (510, 1)
    assert seen[1] == (516, 2)


def test_chains_follow_the_contract_of_the_core():
    """Root from fingerprint and salt, one hash a full block."""
    chain = hash_prompt(PROMPT, [b"x"], "s").of(b"x")
    assert list(chain) == [stored.block for stored in chain_blocks(b"x", PROMPT, "s")]
