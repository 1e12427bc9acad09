"""The official client over real HTTP, a router, and workers that speak the real protocol."""

import asyncio
import json

import httpx
import openai
import pytest
from router_world import in_world, script_of, world

from headrace.core.blocks import BlockHash
from headrace.core.kv_events import BlockStored
from headrace.core.sampling import SamplingParams
from headrace.router import dialect
from headrace.router.request import choice_seed

D, N = dialect.DSML, dialect.END_THINK
OFF = {"thinking": {"type": "disabled"}}
HI = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": "gauge", "parameters": {"type": "object"}}}]

CALL = (
    f'Let me see.\n\n<{D}tool_calls>\n<{D}invoke name="gauge">\n'
    f'<{D}parameter name="river" string="true">Ebro "é"</{D}parameter>\n</{D}invoke>\n</{D}tool_calls>'
)


async def raw_events(w, path, body):
    """(headers, data of each event)"""
    async with httpx.AsyncClient(base_url=w.url, timeout=20) as client:
        response = await client.post(path, json=body)
    parts = response.text.split("\n\n")
    assert parts[-1] == ""
    return response, parts[:-1]


@in_world()
async def test_chat_whole(w):
    """Thinking by default: both reasoning fields, usage with cached and reasoning tokens."""
    w.cluster.script = script_of(w, f"\nHm.\n{N}\n\nHello.")
    done = await w.client.chat.completions.create(model="tide", messages=HI)
    choice = done.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Hello.", "stop")
    assert choice.message.reasoning == choice.message.reasoning_content == "Hm."
    assert choice.message.role == "assistant"
    assert choice.stop_reason is None
    assert done.object == "chat.completion"
    assert done.id == f"chatcmpl-{done._request_id}"
    assert done.usage.total_tokens == done.usage.prompt_tokens + done.usage.completion_tokens
    assert done.usage.prompt_tokens_details.cached_tokens == done.usage.prompt_tokens // 2
    assert 0 < done.usage.completion_tokens_details.reasoning_tokens < done.usage.completion_tokens


@in_world()
async def test_chat_stream_has_the_documented_order(w):
    """Role chunk, deltas of one kind each, finish chunk, usage chunk, [DONE]; one id throughout."""
    w.cluster.script = script_of(w, f"Hm.{N}Hello.")
    body = {"messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    response, parts = await raw_events(w, "/v1/chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["cache-control"] == "no-cache"
    assert all(part.startswith("data: ") for part in parts)
    assert parts[-1] == "data: [DONE]"
    events = [json.loads(part[6:]) for part in parts[:-1]]
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert len({event["id"] for event in events}) == 1
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
    assert (events[-1]["choices"], events[-1]["usage"]["prompt_tokens"] > 0) == ([], True)
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    assert events[-2]["choices"][0]["delta"] == {}
    deltas = [event["choices"][0]["delta"] for event in events[1:-2]]
    kinds = [tuple(sorted(delta)) for delta in deltas]
    assert set(kinds) == {("content",), ("reasoning", "reasoning_content")}
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello."


@in_world()
async def test_stream_helper_of_the_client_accumulates(w):
    """`chat.completions.stream` needs whole arguments and a finish reason."""
    w.cluster.script = script_of(w, CALL)
    async with w.client.chat.completions.stream(model="tide", messages=HI, tools=TOOLS, extra_body=OFF) as stream:
        async for _ in stream:
            pass
        final = await stream.get_final_completion()
    message = final.choices[0].message
    assert final.choices[0].finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert json.loads(message.tool_calls[0].function.arguments) == {"river": 'Ebro "é"'}


@in_world()
async def test_tool_calls_whole(w):
    """Content null when there is none, ids, names, arguments; tool_choice none leaves the markup as text."""
    w.cluster.script = script_of(w, CALL.removeprefix("Let me see."))
    done = await w.client.chat.completions.create(model="tide", messages=HI, tools=TOOLS, extra_body=OFF)
    message = done.choices[0].message
    assert message.content is None
    assert message.tool_calls[0].function.name == "gauge"
    assert message.tool_calls[0].id.startswith("call_")
    done = await w.client.chat.completions.create(
        model="tide", messages=HI, tools=TOOLS, tool_choice="none", extra_body=OFF
    )
    assert done.choices[0].message.tool_calls is None
    assert D in done.choices[0].message.content


@in_world()
async def test_required_call_without_thinking_starts_inside_the_block(w):
    """The prompt opens it, the output goes on."""
    w.cluster.script = script_of(w, CALL.partition("tool_calls>\n")[2])
    done = await w.client.chat.completions.create(
        model="tide", messages=HI, tools=TOOLS, tool_choice="required", extra_body=OFF
    )
    assert done.choices[0].finish_reason == "tool_calls"
    prompt = w.workers["prefill-0"].submits[0].prompt
    assert w.router.edge.model.tokenizer.decode(prompt).endswith(f"{N}\n\n<{D}tool_calls>\n")


@in_world()
async def test_parallel_calls_can_be_off(w):
    """Only the first call leaves."""
    two = CALL.replace(f"</{D}invoke>\n</{D}", f'</{D}invoke>\n<{D}invoke name="b">\n</{D}invoke>\n</{D}')
    w.cluster.script = script_of(w, two)
    kwargs = {"model": "tide", "messages": HI, "tools": TOOLS, "extra_body": OFF}
    done = await w.client.chat.completions.create(**kwargs)
    assert len(done.choices[0].message.tool_calls) == 2
    done = await w.client.chat.completions.create(**kwargs, parallel_tool_calls=False)
    assert len(done.choices[0].message.tool_calls) == 1


@in_world()
async def test_continued_answer_can_echo_what_was_given(w):
    """`continue_final_message` with `echo`."""
    w.cluster.script = script_of(w, " tide.")
    messages = [*HI, {"role": "assistant", "content": "High"}]
    extra = {**OFF, "continue_final_message": True, "add_generation_prompt": False, "echo": True}
    done = await w.client.chat.completions.create(model="tide", messages=messages, extra_body=extra)
    assert done.choices[0].message.content == "High tide."
    stream = await w.client.chat.completions.create(model="tide", messages=messages, extra_body=extra, stream=True)
    assert "".join([c.choices[0].delta.content or "" async for c in stream]) == "High tide."


@in_world()
async def test_hidden_reasoning_is_generated_but_not_sent(w):
    """`include_reasoning: false`."""
    w.cluster.script = script_of(w, f"Hm.{N}Yes.")
    done = await w.client.chat.completions.create(model="tide", messages=HI, extra_body={"include_reasoning": False})
    assert done.choices[0].message.content == "Yes."
    assert not hasattr(done.choices[0].message, "reasoning")
    assert done.usage.completion_tokens_details.reasoning_tokens > 0


@in_world()
async def test_stop_string_cuts_text_and_ends_the_work(w):
    """Usage counts up to the matching token; both workers are told."""
    w.cluster.script = script_of(w, "one END two three four five six seven")
    done = await w.client.completions.create(model="tide", prompt="x", max_tokens=40, stop=["nope", "END"])
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("one ", "stop")
    assert done.choices[0].stop_reason == "END"
    assert done.usage.completion_tokens == len(w.router.edge.model.tokenizer.encode_raw("one END"))
    done = await w.client.completions.create(
        model="tide", prompt="x", max_tokens=40, stop="END", extra_body={"include_stop_str_in_output": True}
    )
    assert done.choices[0].text == "one END"
    await w.until(lambda: w.workers["decode-1"].num_running == 0)


@in_world()
async def test_completions_take_all_forms_of_prompt(w):
    """String, list, ids, lists of ids: the same ids reach the workers, choices in order of prompts."""
    tokenizer = w.router.edge.model.tokenizer
    ids = tokenizer.encode_raw("tide")
    for prompt, count in (("tide", 1), (["tide", "tide"], 2), (ids, 1), ([ids, ids], 2)):
        w.workers["prefill-0"].submits.clear()
        done = await w.client.completions.create(model="tide", prompt=prompt, max_tokens=3)
        assert [choice.index for choice in done.choices] == list(range(count))
        assert {tuple(submit.prompt) for submit in w.workers["prefill-0"].submits} == {tuple(ids)}
        assert done.usage.prompt_tokens == len(ids) * count
        assert done.usage.completion_tokens == 3 * count
        assert {choice.finish_reason for choice in done.choices} == {"length"}


@in_world()
async def test_completion_stream_carries_its_end_on_text(w):
    """No role chunk, no empty first chunk; exactly max_tokens tokens when EOS is ignored."""
    w.cluster.script = lambda prompt, sampling, index: 1 if index == 2 else 70
    body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    _, parts = await raw_events(w, "/v1/completions", body)
    events = [json.loads(part[6:]) for part in parts[:-1]]
    texts = [event["choices"][0]["text"] for event in events[:-1]]
    assert all(texts)
    assert len("".join(texts)) == 4
    assert events[-2]["choices"][0]["finish_reason"] == "length"
    assert events[-1]["usage"]["completion_tokens"] == 5
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)


@in_world()
async def test_token_ids_can_be_returned(w):
    """EOS too; on each chunk of a stream, and once the prompt's."""
    w.cluster.script = script_of(w, "é")
    extra = {"return_token_ids": True}
    expected = [*w.router.edge.model.tokenizer.encode_raw("é"), 1]
    done = await w.client.completions.create(model="tide", prompt=[5, 6], max_tokens=9, extra_body=extra)
    assert done.choices[0].token_ids == expected
    assert done.choices[0].prompt_token_ids == [5, 6]
    for path, body in (
        ("/v1/completions", {"prompt": [5, 6], "max_tokens": 9}),
        ("/v1/chat/completions", {"messages": HI, "max_tokens": 9, **OFF}),
    ):
        _, parts = await raw_events(w, path, {**body, **extra, "stream": True})
        events = [json.loads(part[6:]) for part in parts[:-1]]
        ids = [token for event in events for choice in event["choices"] for token in choice.get("token_ids", [])]
        assert ids == expected
        assert sum("prompt_token_ids" in json.dumps(event) for event in events) == 1


@in_world()
async def test_log_probabilities_of_chat(w):
    """One item a token in order, own bytes, k alternatives; all told by the finish chunk."""
    w.cluster.script = script_of(w, "aé")
    kwargs = {"model": "tide", "messages": HI, "logprobs": True, "top_logprobs": 2, "extra_body": OFF}
    done = await w.client.chat.completions.create(**kwargs)
    items = done.choices[0].logprobs.content
    assert bytes(b for item in items[:-1] for b in item.bytes).decode() == "aé"
    assert len(items) == done.usage.completion_tokens
    assert {len(item.top_logprobs) for item in items} == {2}
    assert items[0].logprob == -0.5
    stream = await w.client.chat.completions.create(**kwargs, stream=True)
    told = []
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            told += chunk.choices[0].logprobs.content
    assert [item.token for item in told] == [item.token for item in items]


@in_world()
async def test_log_probabilities_of_completions_with_echo(w):
    """Offsets from the start of the prompt, null first; a scored prompt makes no token."""
    done = await w.client.completions.create(model="tide", prompt="xyz", max_tokens=2, logprobs=1, echo=True)
    choice = done.choices[0]
    assert choice.text.startswith("xyz")
    assert len(choice.text) == 5
    told = choice.logprobs
    assert told.token_logprobs[0] is None
    assert told.text_offset == [0, 1, 2, 3, 4]
    assert all(token in top for token, top in zip(told.tokens[1:], told.top_logprobs[1:], strict=True))
    scored = await w.client.completions.create(model="tide", prompt="xyz", max_tokens=0, logprobs=0, echo=True)
    assert (scored.choices[0].text, scored.choices[0].finish_reason) == ("xyz", "length")
    assert len(scored.choices[0].logprobs.tokens) == 3
    assert scored.usage.completion_tokens == 0


@in_world()
async def test_prompt_log_probabilities(w):
    """A list by position, null first; in the body of a chat, in the choice of a completion."""
    extra = {"prompt_logprobs": 2}
    done = await w.client.completions.create(model="tide", prompt=[5, 6, 7], max_tokens=1, extra_body=extra)
    first, *rest = done.choices[0].prompt_logprobs
    assert first is None
    assert rest[0]["6"] == {"logprob": -0.5, "rank": 1, "decoded_token": "\x27"} or rest[0]["6"]["rank"] == 1
    chat = await w.client.chat.completions.create(model="tide", messages=HI, max_tokens=1, extra_body=extra)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


@in_world()
async def test_several_choices_draw_differently_and_repeat(w):
    """Choice 0 is what n = 1 gives; a seed repeats all of them; the prompt counts once."""
    kwargs = {"model": "tide", "prompt": "x", "max_tokens": 12, "seed": 42}
    one = await w.client.completions.create(**kwargs)
    three = await w.client.completions.create(**kwargs, n=3)
    again = await w.client.completions.create(**kwargs, n=3)
    texts = [choice.text for choice in three.choices]
    assert texts == [choice.text for choice in again.choices]
    assert texts[0] == one.choices[0].text
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    for worker in w.workers.values():
        seeds = [(submit.sampling.seed, *submit.seeds) for submit in worker.submits]
        assert seeds == [(42,), *[(42, 42, choice_seed(42, 1), choice_seed(42, 2))] * 2], "one leg for all choices"
    for choice, text in enumerate(texts):
        alone = await w.client.completions.create(**{**kwargs, "seed": choice_seed(42, choice)})
        assert alone.choices[0].text == text
    stream = await w.client.completions.create(**kwargs, n=3, stream=True)
    streamed = ["", "", ""]
    async for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].text
    assert streamed == texts


@in_world()
async def test_settings_reach_the_worker_as_sent(w):
    """Every sampling field, through the session."""
    await w.client.completions.create(
        model="tide", prompt="x", max_tokens=3, temperature=0.004, top_p=0.5, presence_penalty=-1,
        frequency_penalty=1.5, seed=-7, logit_bias={"5": 400, "6": -100},
        extra_body={
            "top_k": 9, "min_p": 0.25, "repetition_penalty": 1.5, "min_tokens": 1, "stop_token_ids": [9],
            "ignore_eos": True, "allowed_token_ids": [1, 2, 3], "cache_salt": "tenant", "priority": -3,
        },
    )  # fmt: skip
    submit = w.workers["prefill-0"].submits[0]
    from headrace.proto.engine_convert import sampling_from_message

    got = sampling_from_message(submit.sampling)
    assert got == SamplingParams(
        temperature=pytest.approx(0.01), top_p=0.5, top_k=9, min_p=0.25, presence_penalty=-1.0, frequency_penalty=1.5,
        repetition_penalty=1.5, max_tokens=3, min_tokens=1, seed=-7, stop_token_ids=(9,), eos_token_ids=(1,),
        ignore_eos=True, logit_bias={5: 100.0, 6: -100.0}, allowed_token_ids=(1, 2, 3),
    )  # fmt: skip
    assert (submit.cache_salt, submit.priority) == ("tenant", -3)
    assert 0 < submit.timeout_s <= 600


@in_world()
async def test_greedy_and_unset_settings(w):
    """Below 1e-5 is greedy; a seed is always drawn; without a bound a chat gets the rest of the context."""
    await w.client.completions.create(model="tide", prompt="x", temperature=0, max_tokens=1)
    w.cluster.script = script_of(w, "x")
    await w.client.chat.completions.create(model="tide", messages=HI)
    first, second = w.workers["prefill-0"].submits
    assert first.sampling.temperature == 0
    assert first.sampling.seed != second.sampling.seed
    assert second.sampling.max_tokens == 4096 - len(second.prompt)


@in_world()
async def test_models_and_small_routes(w):
    """Listing, one card, health, version, load, docs and description without the internet."""
    models = await w.client.models.list()
    assert [model.id for model in models.data] == ["tide", "tide-alias"]
    assert models.data[0].max_model_len == 4096
    assert (await w.client.models.retrieve("tide-alias")).owned_by == "headrace"
    assert (await w.client.completions.create(model="tide-alias", prompt="x")).model == "tide-alias"
    async with httpx.AsyncClient(base_url=w.url) as client:
        for path in ("/live", "/health", "/ping", "/version", "/load", "/ready", "/server_info"):
            assert (await client.get(path)).status_code == 200, path
        assert (await client.post("/ping")).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0}
        document = (await client.get("/openapi.json")).json()
        assert "/v1/chat/completions" in document["paths"]
        page = (await client.get("/docs")).text
        assert "https://" not in page
        assert "http://" not in page
        info = (await client.get("/server_info")).json()
        assert {worker["role"] for worker in info["workers"]} == {"prefill", "decode"}
        assert info["model"]["effort_profile"] == "preview"
        assert "api_keys" not in json.dumps(info)


@in_world()
async def test_every_worker_forgets_its_prefixes_when_told(w):
    """200 once all have; 502 when one of them is not there."""
    for worker in w.workers.values():
        worker.cache(BlockStored(BlockHash(b"b" * 16), BlockHash(bytes(16)), True))
    async with httpx.AsyncClient(base_url=w.url) as client:
        assert (await client.post("/reset_prefix_cache")).status_code == 200
        assert not any(worker.blocks for worker in w.workers.values())
        assert (await client.get("/reset_prefix_cache")).status_code == 405
        await w.workers["decode-1"].kill()
        answer = await client.post("/reset_prefix_cache")
        assert answer.status_code == 502
        assert answer.json()["error"]["message"]


@in_world()
async def test_tokenize_gives_the_ids_of_the_request(w):
    """Chat and text, and back."""
    async with httpx.AsyncClient(base_url=w.url) as client:
        chat = (await client.post("/tokenize", json={"messages": HI, "return_token_strs": True})).json()
        await w.client.chat.completions.create(model="tide", messages=HI, max_tokens=1)
        assert chat["tokens"] == list(w.workers["prefill-0"].submits[0].prompt)
        assert chat["count"] == len(chat["tokens"]) == len(chat["token_strs"])
        text = (await client.post("/v1/tokenize", json={"model": "tide", "prompt": "tide é"})).json()
        assert text["token_strs"] is None
        back = await client.post("/detokenize", json={"tokens": text["tokens"]})
        assert back.json() == {"prompt": "tide é"}


@in_world()
async def test_metrics_tell_what_happened(w):
    """Our names, both formats."""
    await w.client.completions.create(model="tide", prompt="x", max_tokens=3)
    async with httpx.AsyncClient(base_url=w.url) as client:
        plain = await client.get("/metrics")
        opened = await client.get("/metrics", headers={"accept": "application/openmetrics-text"})
    assert opened.text.rstrip().endswith("# EOF")
    for line in (
        'headrace:time_to_first_token_seconds_count{path="pair"} 1.0',
        'headrace:inter_token_latency_seconds_count{path="pair"} 2.0',
        "headrace:generation_tokens_total 3.0",
        'headrace:kv_transfer_bytes_total{transport="fake"} 1000.0',
        'headrace:num_requests_running{role="router"} 0.0',
        'headrace:router_decisions_total{mode="exact",path="pair",reason="load"} 1.0',
        'headrace:router_index_state{state="exact"} 2.0',
        'headrace:request_total{outcome="ok",surface="completions"} 1.0',
    ):
        assert line in plain.text


@in_world(roles=("both",))
async def test_one_worker_of_both_roles_serves_alone(w):
    """Monolithic: the same answers over one leg."""
    done = await w.client.completions.create(model="tide", prompt="x", max_tokens=4, seed=1)
    assert done.usage.completion_tokens == 4
    async with world(w.router.edge.model.root) as pair:
        other = await pair.client.completions.create(model="tide", prompt="x", max_tokens=4, seed=1)
    assert done.choices[0].text == other.choices[0].text


@in_world()
async def test_cancelled_stream_ends_both_legs(w):
    """The client leaves in mid-stream."""
    w.workers["decode-1"].faults.hold_at = 3
    stream = await w.client.completions.create(model="tide", prompt="x", max_tokens=50, stream=True)
    async for _ in stream:
        break
    assert w.workers["decode-1"].num_running == 1
    await stream.close()
    await w.until(lambda: w.workers["decode-1"].num_running == 0 and w.router.dispatcher.num_alive == 0)


@in_world()
async def test_client_that_leaves_a_plain_request_ends_both_legs(w):
    """Before the first token, and not streamed."""
    w.workers["prefill-0"].faults.hold_at = 0
    call = asyncio.create_task(w.client.completions.create(model="tide", prompt="x", max_tokens=50))
    await w.until(lambda: w.states == ["prefilling"])
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await w.until(lambda: w.workers["prefill-0"].num_running + w.workers["decode-1"].num_running == 0)
    assert w.router.dispatcher.num_alive == 0
    async with httpx.AsyncClient(base_url=w.url) as client:
        assert 'headrace:request_cancellations_total{phase="prefilling"} 1.0' in (await client.get("/metrics")).text


@in_world()
async def test_two_hundred_at_once(w):
    """Every one gets its own answer; nothing is left behind."""
    w.workers["decode-1"].max_num_seqs = 256

    async def one(number):
        kwargs = {"model": "tide", "prompt": [number, 70], "max_tokens": 6, "seed": number}
        if number % 2:
            stream = await w.client.completions.create(**kwargs, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])
        return (await w.client.completions.create(**kwargs)).choices[0].text

    got = await asyncio.gather(*(one(number) for number in range(200)))
    tokenizer = w.router.edge.model.tokenizer
    for number, text in enumerate(got):
        sampling = SamplingParams(seed=number)
        assert text == tokenizer.decode(w.cluster.script((number, 70), sampling, index) for index in range(6))
    assert w.router.dispatcher.num_alive == 0
    assert w.router.http.num_in_flight == 0
    assert all(worker.own_legs == 0 for worker in w.router.dispatcher.placement.workers)


def test_keys_guard_what_they_should(checkpoint):
    """Bearer or x-api-key; open routes stay open; a wrong key is told nothing."""

    async def body():
        async with world(checkpoint, key="right", api_keys=("other", "right")) as w:
            await w.client.completions.create(model="tide", prompt="x", max_tokens=1)
            wrong = w.client.with_options(api_key="wrong")
            with pytest.raises(openai.AuthenticationError) as caught:
                await wrong.models.list()
            assert caught.value.code == "invalid_api_key"
            assert caught.value.response.headers["www-authenticate"] == "Bearer"
            async with httpx.AsyncClient(base_url=w.url) as client:
                assert (await client.get("/health")).status_code == 200
                assert (await client.get("/server_info")).status_code == 401
                assert (await client.get("/v1/models", headers={"x-api-key": "right"})).status_code == 200

    asyncio.run(body())
