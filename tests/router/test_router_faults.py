"""Workers that refuse, fail, lie, die and come back, under a real router and real clients."""

import asyncio
import json
import random

import httpx
import openai
import pytest
from fake_worker import letters
from router_world import in_world

from headrace.core.sampling import SamplingParams
from headrace.router import placement
from headrace.router.request import choice_seed

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
async def test_worker_that_its_peer_calls_lost_costs_one_attempt(w):
    """The only other worker is not asked again while its death may be on its way; its next life is, at once."""
    placement.DOUBT_PAUSE_S, before = 3600.0, placement.DOUBT_PAUSE_S
    try:
        w.workers["decode-1"].faults.fail = ["worker_failed"]
        call = asyncio.create_task(w.client.completions.create(model="tide", prompt=[70], max_tokens=4, seed=1))
        await w.until(lambda: not w.workers["decode-1"].faults.fail and w.router.dispatcher.num_waiting == 1)
    finally:
        placement.DOUBT_PAUSE_S = before
    await w.workers["prefill-0"].kill()
    await w.until(lambda: not w.router.dispatcher.placement.can_serve)
    await w.workers["prefill-0"].start()
    assert (await call).choices[0].text == expected(w, [70], 1, 4)
    assert [submit.attempt for submit in w.workers["decode-1"].submits] == [0, 1]
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
async def test_a_session_is_opened_again_however_it_broke(w):
    """A write after the call's end, which grpc.aio tells in its own way, and a defect of ours: nobody is lost."""
    prefill, dispatcher, downs = w.workers["prefill-0"], w.router.dispatcher, []
    session, told = dispatcher._sessions[prefill.address], dispatcher.worker_down
    dispatcher.worker_down = lambda *words: (downs.append(words), told(*words))
    whole = session._write
    for error in (asyncio.InvalidStateError("RPC already finished."), AssertionError("a defect")):

        async def broken(call, error=error):
            session._write = whole
            raise error

        session._write = broken
        downs.clear()
        await prefill.kill()
        await w.until(lambda: len(downs) == 1)
        await prefill.start()
        await w.until(lambda: len(downs) == 2)
        await w.until(lambda: dispatcher.placement.can_serve)
        done = await w.client.completions.create(model="tide", prompt=[70], max_tokens=4, seed=1)
        assert done.choices[0].text == expected(w, [70], 1, 4)
    await nothing_left(w)


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


# ---- several choices ----

THREE = {"model": "tide", "prompt": [70], "max_tokens": 12, "seed": 3, "n": 3}


def expected_three(w, count=12):
    return [expected(w, [70], choice_seed(3, choice), count) for choice in range(3)]


async def read_stream(stream):
    texts = ["", "", ""]
    reasons = [None, None, None]
    async for chunk in stream:
        choice = chunk.choices[0]
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    return texts, reasons


@in_world(roles=TWO_PAIRS)
async def test_choices_go_on_by_themselves_after_a_kill_in_mid_stream(w):
    """One pair of legs before, a pair for each choice after it, and the same texts."""
    for name in ("decode-1", "decode-3"):
        w.workers[name].faults.die_at = 4
    stream = await w.client.completions.create(**THREE, stream=True)
    restart = asyncio.create_task(restart_dead(w))
    texts, reasons = await read_stream(stream)
    restart.cancel()
    assert texts == expected_three(w)
    assert reasons == ["length"] * 3
    by_attempt = {}
    for worker in w.workers.values():
        for submit in worker.submits:
            if worker.role == "prefill":
                by_attempt.setdefault(submit.attempt, []).append(submit)
    assert [len(by_attempt[0]), len(by_attempt[1])] == [1, 3]
    assert {submit.sampling.seed for submit in by_attempt[1]} == {choice_seed(3, choice) for choice in range(3)}
    assert all(not submit.seeds and submit.num_output_tokens for submit in by_attempt[1])
    await nothing_left(w)


@in_world(roles=TWO_PAIRS)
async def test_choices_of_a_pair_lost_before_the_first_token_are_tried_again_as_one(w):
    """One new attempt for all of them."""
    for name in ("decode-1", "decode-3"):
        w.workers[name].faults.fail = ["worker_failed"]
    done = await w.client.completions.create(**THREE)
    assert [choice.text for choice in done.choices] == expected_three(w)
    submits = [s for name in ("prefill-0", "prefill-2") for s in w.workers[name].submits]
    assert all(len(submit.seeds) == 3 for submit in submits)
    assert len(submits) == 1 + max(submit.attempt for submit in submits) > 1
    await nothing_left(w)


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both",)], ids=["pair", "local"])
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_one_choice_and_the_worker_hears_of_it(checkpoint, roles, stream):
    """The others go on to their own ends; usage counts what was shown."""

    def babble(prompt, sampling, index):
        return letters(prompt, sampling, random.Random(f"{sampling.seed} {index}").randrange(26))

    @in_world(roles=roles, script=babble)
    async def body(w):
        worker = w.workers.get("decode-1") or w.workers["both-0"]
        worker.faults.step_s = 0.01
        texts = expected_three(w, 200)
        stop = next(
            texts[1][at : at + 3]
            for at in range(2, 100)
            if all(texts[1][at : at + 3] not in text for text in (texts[0], texts[2]))
        )
        kwargs = {**THREE, "max_tokens": 200, "stop": stop}
        if stream:
            found, reasons = await read_stream(await w.client.completions.create(**kwargs, stream=True))
        else:
            done = await w.client.completions.create(**kwargs)
            found, reasons = ([getattr(c, name) for c in done.choices] for name in ("text", "finish_reason"))
            assert done.usage.prompt_tokens == 1
        assert found == [texts[0], texts[1][: texts[1].index(stop)], texts[2]]
        assert reasons == ["length", "stop", "length"]
        assert [choice for _, choice in worker.choice_aborts] == [1]
        assert all(len(one.submits) == 1 for one in w.workers.values())
        await nothing_left(w)

    body(checkpoint)


@in_world()
async def test_client_that_leaves_ends_all_its_choices(w):
    """One abort for each leg, nothing left."""
    w.workers["decode-1"].faults.hold_at = 3
    stream = await w.client.completions.create(**THREE, stream=True)
    await anext(stream)
    await stream.close()
    await nothing_left(w)
    assert len(w.workers["decode-1"].aborts) == 1


@in_world(queue_timeout_s=0.3)
async def test_choices_that_cannot_go_on_end_with_one_error_event(w):
    """Nothing after it, and no [DONE]."""
    w.workers["decode-1"].faults.die_at = 2
    async with httpx.AsyncClient(base_url=w.url, timeout=20) as client:
        response = await client.post("/v1/completions", json={**THREE, "stream": True})
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert "error" in json.loads(events[-1])
    assert sum("error" in json.loads(event) for event in events) == 1
    await nothing_left(w)


@in_world()
async def test_choice_whose_first_token_ends_it_does_not_end_the_others(w):
    """Known at the prefill already; the decode worker forks the rest."""
    eos = 1
    seeds = [choice_seed(3, choice) for choice in range(3)]
    words = w.cluster.script
    w.cluster.script = lambda prompt, sampling, index: (
        eos if sampling.seed == seeds[1] and index == 0 else words(prompt, sampling, index)
    )
    done = await w.client.completions.create(**THREE)
    assert [choice.finish_reason for choice in done.choices] == ["length", "stop", "length"]
    assert [len(choice.text) for choice in done.choices] == [12, 0, 12]
    w.cluster.script = lambda prompt, sampling, index: eos
    done = await w.client.completions.create(**THREE)
    assert [choice.finish_reason for choice in done.choices] == ["stop"] * 3
    await nothing_left(w)
