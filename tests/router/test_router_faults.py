"""Workers that refuse, fail, lie, die and come back, under a real router and real clients."""

import asyncio
import json

import httpx
import openai
import pytest
from router_world import in_world

from headrace.core.sampling import SamplingParams

TWO_PAIRS = ("prefill", "decode", "prefill", "decode")


def expected(w, prompt, seed, count):
    tokenizer = w.router.edge.model.tokenizer
    sampling = SamplingParams(seed=seed)
    return tokenizer.decode(w.cluster.script(tuple(prompt), sampling, index) for index in range(count))


async def nothing_left(w):
    await w.until(lambda: w.router.dispatcher.num_alive == 0)
    await w.until(lambda: all(worker.num_running == 0 for worker in w.workers.values()))
    assert all(worker.own_legs == 0 for worker in w.router.dispatcher.placement.workers)
    assert all(worker.own_queued_tokens == 0 for worker in w.router.dispatcher.placement.workers)


@in_world()
async def test_refusals_for_want_of_room_are_waited_out(w):
    """The client notices nothing but time."""
    w.workers["decode-1"].faults.refuse = 5
    w.workers["prefill-0"].faults.refuse = 2
    done = await w.client.completions.create(model="tide", prompt=[70], max_tokens=4, seed=1)
    assert done.choices[0].text == expected(w, [70], 1, 4)
    await nothing_left(w)


@in_world(roles=TWO_PAIRS)
async def test_failed_leg_is_tried_on_another_worker(w):
    """Three attempts before the first byte; the same seed gives the same text."""
    w.workers["decode-1"].faults.fail = ["transfer_failed"]
    w.workers["decode-3"].faults.fail = ["worker_failed"]
    done = await w.client.completions.create(model="tide", prompt=[70], max_tokens=4, seed=1)
    assert done.choices[0].text == expected(w, [70], 1, 4)
    attempts = {submit.attempt for worker in w.workers.values() for submit in worker.submits}
    assert max(attempts) >= 1
    transfers = [s.transfer_id for worker in w.workers.values() for s in worker.submits if s.HasField("holder")]
    assert len(set(transfers)) == len(transfers)
    await nothing_left(w)


@in_world()
async def test_attempts_used_up_is_a_502_that_asks_for_no_retry(w):
    """It may be the request that kills workers."""
    w.workers["decode-1"].faults.fail = ["transfer_failed"] * 3
    with pytest.raises(openai.InternalServerError) as caught:
        await w.client.completions.create(model="tide", prompt=[70], max_tokens=4)
    assert (caught.value.status_code, caught.value.code) == (502, "transfer_failed")
    assert caught.value.response.headers["x-should-retry"] == "false"
    await nothing_left(w)


@in_world()
async def test_refusal_for_good_is_the_clients(w):
    """400 from a worker is 400 to the client, at once."""
    w.workers["decode-1"].faults.fail = ["context_length_exceeded"]
    with pytest.raises(openai.BadRequestError) as caught:
        await w.client.completions.create(model="tide", prompt=[70], max_tokens=4)
    assert caught.value.code == "context_length_exceeded"
    await nothing_left(w)


@in_world(roles=TWO_PAIRS)
async def test_worker_killed_before_the_first_token_is_not_noticed(w):
    """Prefill worker dies: another pair."""
    for name in ("prefill-0", "prefill-2"):
        w.workers[name].faults.hold_at = 0
    call = asyncio.create_task(w.client.completions.create(model="tide", prompt=[70], max_tokens=4, seed=3))
    await w.until(lambda: any(w.workers[name].num_running for name in ("prefill-0", "prefill-2")))
    busy = next(worker for worker in w.workers.values() if worker.role == "prefill" and worker.num_running)
    for name in ("prefill-0", "prefill-2"):
        w.workers[name].faults.hold_at = None
    await busy.kill()
    assert (await call).choices[0].text == expected(w, [70], 3, 4)
    await nothing_left(w)


@in_world(roles=TWO_PAIRS)
async def test_worker_killed_in_mid_stream_is_not_noticed(w):
    """Decode worker dies: the stream goes on elsewhere, token for token."""
    w.workers["decode-1"].faults.die_at = 3
    w.workers["decode-3"].faults.die_at = 6
    stream = await w.client.completions.create(model="tide", prompt=[70], max_tokens=12, seed=3, stream=True)
    await_restart = asyncio.create_task(restart_dead(w))
    text = "".join([chunk.choices[0].text async for chunk in stream])
    await_restart.cancel()
    assert text == expected(w, [70], 3, 12)
    async with httpx.AsyncClient(base_url=w.url) as client:
        metrics = (await client.get("/metrics")).text
    assert 'headrace:migrations_total{reason="worker_failed"}' in metrics
    await nothing_left(w)


async def restart_dead(w):
    while True:
        await asyncio.sleep(0.05)
        for worker in w.workers.values():
            if worker._server is None:
                await worker.start()


@in_world(queue_timeout_s=0.3)
async def test_stream_that_cannot_go_on_ends_with_an_error_event(w):
    """No substitute: an event in the error shape, and no [DONE]."""
    w.workers["decode-1"].faults.die_at = 2
    async with httpx.AsyncClient(base_url=w.url, timeout=20) as client:
        body = {"prompt": [70], "max_tokens": 9, "stream": True}
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200
    parts = [json.loads(part[6:]) for part in response.text.split("\n\n") if part]
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert parts[-1]["error"]["code"] == "no_workers"
    assert "[DONE]" not in response.text


@in_world(queue_timeout_s=0.3)
async def test_official_client_raises_on_a_cut_stream(w):
    """And does not take it for a whole answer."""
    w.workers["decode-1"].faults.die_at = 2
    stream = await w.client.chat.completions.create(
        model="tide", messages=[{"role": "user", "content": "x"}], max_tokens=9, stream=True
    )
    with pytest.raises(openai.APIError) as caught:
        async for _ in stream:
            pass
    assert caught.value.code == "no_workers"


@in_world(roles=TWO_PAIRS)
async def test_worker_that_skips_or_repeats_tokens_harms_nobody(w):
    """A gap costs the worker its leg; doubles are heard once."""
    w.workers["decode-1"].faults.gap_at = 4
    w.workers["decode-3"].faults.repeat = True
    w.workers["prefill-0"].faults.repeat = True
    for seed in range(4):
        done = await w.client.completions.create(model="tide", prompt=[70], max_tokens=8, seed=seed)
        assert done.choices[0].text == expected(w, [70], seed, 8)
    await nothing_left(w)


@in_world()
async def test_silent_worker_is_given_up(w):
    """Three beats without a word end the session; when it speaks again it is another one."""
    decode = w.workers["decode-1"]
    decode.faults.silent = True
    await w.until(lambda: not w.router.dispatcher.placement.can_serve)
    decode.faults.silent = False
    await w.until(lambda: w.router.dispatcher.placement.can_serve)
    await w.client.completions.create(model="tide", prompt=[70], max_tokens=2)


@in_world()
async def test_restarted_worker_is_another_life(w):
    """Its incarnation, role and address come from itself."""
    prefill = w.workers["prefill-0"]
    before = prefill._incarnation
    await prefill.kill()
    await w.until(lambda: not w.router.dispatcher.placement.can_serve)
    await prefill.start()
    await w.until(lambda: w.router.dispatcher.placement.can_serve)
    await w.client.completions.create(model="tide", prompt=[70], max_tokens=2)
    holder = w.workers["decode-1"].submits[-1].holder
    assert holder.incarnation == prefill._incarnation != before
    assert holder.peer_address == "peer-of-prefill-0:1"


@in_world()
async def test_worker_that_says_it_leaves_gets_nothing_new(w):
    """By a beat, before its session ends."""
    w.workers["decode-1"].state = "draining"
    w.workers["decode-1"].say_load()
    await w.until(lambda: not w.router.dispatcher.placement.can_serve)
    with pytest.raises(openai.InternalServerError) as caught:
        await w.client.completions.create(model="tide", prompt=[70], max_tokens=2)
    assert caught.value.code == "no_workers"


@in_world(roles=TWO_PAIRS)
async def test_nothing_is_lost_when_clients_leave_and_workers_die(w):
    """200 requests, 50 clients that leave, one worker of each role killed and restarted: one end for each."""
    for worker in w.workers.values():
        worker.faults.step_s = 0.005

    async def one(number):
        kwargs = {"model": "tide", "prompt": [number, 70], "max_tokens": 12, "seed": number}
        if number % 4 == 0:
            call = asyncio.create_task(w.client.completions.create(**kwargs))
            await asyncio.sleep(0.05)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return "left"
        try:
            if number % 4 == 1:
                done = await w.client.completions.create(**kwargs)
                return done.choices[0].text == expected(w, [number, 70], number, 12)
            stream = await w.client.completions.create(**kwargs, stream=True)
            text = "".join([chunk.choices[0].text async for chunk in stream])
            return text == expected(w, [number, 70], number, 12)
        except openai.APIError as error:
            return error.code

    async def kill_and_restart():
        for name in ("decode-1", "prefill-0"):
            await asyncio.sleep(0.1)
            await w.workers[name].kill()
            await asyncio.sleep(0.1)
            await w.workers[name].start()

    killer = asyncio.create_task(kill_and_restart())
    outcomes = await asyncio.gather(*(one(number) for number in range(3, 203)))
    await killer
    assert False not in outcomes
    assert set(outcomes) <= {True, "left", "worker_failed", "transfer_failed", "no_workers"}
    assert outcomes.count(True) > 100
    await nothing_left(w)
    assert w.router.http.num_in_flight == 0
