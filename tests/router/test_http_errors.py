"""Every error of the HTTP surface: status, shape, code, param; and that a refused request allocates nothing."""

import asyncio
import json

import httpx
import openai
import pytest
from router_world import in_world, world

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
TOOL = {"type": "function", "function": {"name": "f"}}


def check(response, status, code, param=None):
    """The four keys, always; and a request id."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert (body["error"]["code"], body["error"]["param"]) == (code, param), response.text
    assert response.headers["x-request-id"]
    assert len(body["error"]["message"]) < 1000
    return body["error"]


# (body beside a good prompt, param, code)
BAD_COMMON = [
    ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": 1.0}, "max_tokens", "invalid_type"),
    ({"temperature": 2.5}, "temperature", "invalid_value"),
    ({"temperature": "hot"}, "temperature", "invalid_type"),
    ({"top_p": 0}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 1.5}, "min_p", "invalid_value"),
    ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"best_of": 2}, "best_of", "unsupported_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", 1]}, "stop[1]", "invalid_type"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"stop": "x" * 1025}, "stop", "invalid_value"),
    ({"stop_token_ids": [100000]}, "stop_token_ids[0]", "invalid_value"),
    ({"stop_token_ids": [True]}, "stop_token_ids[0]", "invalid_type"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"5": "much"}}, "logit_bias.5", "invalid_type"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "invalid_value"),
    ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "invalid_value"),
    ({"cache_salt": "a@b"}, "cache_salt", "invalid_value"),
    ({"priority": "high"}, "priority", "invalid_type"),
    ({"user": "u" * 513}, "user", "invalid_value"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"structured_outputs": {"regex": "a"}}, "structured_outputs", "unsupported_parameter"),
    ({"guided_json": {}}, "guided_json", "unsupported_parameter"),
    ({"bad_words": ["x"]}, "bad_words", "unsupported_parameter"),
    ({"kv_transfer_params": {}}, "kv_transfer_params", "unsupported_parameter"),
]

BAD_COMPLETIONS = [
    ({"prompt": ""}, "prompt", "invalid_value"),
    ({"prompt": []}, "prompt", "invalid_value"),
    ({"prompt": [[]]}, "prompt[0]", "invalid_value"),
    ({"prompt": ["a", ""]}, "prompt[1]", "invalid_value"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
    ({"prompt": [1, "a"]}, "prompt", "invalid_type"),
    ({"prompt": [1, 1.5]}, "prompt[1]", "invalid_type"),
    ({"prompt": [1, True]}, "prompt[1]", "invalid_type"),
    ({"prompt": [-1]}, "prompt[0]", "invalid_value"),
    ({"prompt": [[1], [10**6]]}, "prompt[1][0]", "invalid_value"),
    ({"prompt": {"text": "x"}}, "prompt", "invalid_type"),
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": ["x"] * 10, "n": 128}, "n", "invalid_value"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"prompt_embeds": "x"}, "prompt_embeds", "unsupported_parameter"),
    ({"suffix": "x", "prompt": ["a", "b"]}, "suffix", "invalid_value"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "invalid_value"),
    ({"max_tokens": 4096}, "prompt", "context_length_exceeded"),
    ({"prompt": [5] * 4096}, "prompt", "context_length_exceeded"),
    ({"prompt": "x" * 2_000_000}, "prompt", "context_length_exceeded"),
    ({"model": "nobody"}, "model", "model_not_found"),
    ({"model": 5}, "model", "invalid_type"),
]

BAD_CHAT = [
    ({"messages": []}, "messages", "invalid_value"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0]",
        "unsupported_value",
    ),
    ({"top_logprobs": 2}, "top_logprobs", "invalid_value"),
    ({"logprobs": 2}, "logprobs", "invalid_type"),
    ({"functions": []}, "functions", "unsupported_parameter"),
    ({"function_call": "auto"}, "function_call", "unsupported_parameter"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_value"),
    ({"audio": {}}, "audio", "unsupported_parameter"),
    ({"thinking_token_budget": 5}, "thinking_token_budget", "unsupported_parameter"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "unsupported_parameter"),
    ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "unsupported_value"),
    (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "tool_choice",
        "unsupported_value",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]},
        "tools[0].function.strict",
        "unsupported_value",
    ),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_tokens": 5000}, "messages", "context_length_exceeded"),
    ({"messages": [{"role": "user", "content": "y" * 2_000_000}]}, "messages", "context_length_exceeded"),
]


@in_world()
async def test_bad_fields_are_named_and_allocate_nothing(w):
    """Each with the status of its code; no worker hears of any."""
    async with httpx.AsyncClient(base_url=w.url, timeout=20) as client:
        for path, good, bad in (
            (COMPLETIONS, {"prompt": "x"}, BAD_COMMON + BAD_COMPLETIONS),
            (CHAT, {"messages": HI}, BAD_COMMON + BAD_CHAT),
        ):
            for fields, param, code in bad:
                response = await client.post(path, json={**good, **fields})
                status = 404 if code == "model_not_found" else 400
                error = check(response, status, code, param)
                assert error["type"] == "invalid_request_error", fields
    assert not any(worker.submits for worker in w.workers.values())
    assert w.router.dispatcher.num_alive == 0


@in_world()
async def test_length_error_gives_all_three_numbers(w):
    """What fits, what the prompt has, what was asked for."""
    async with httpx.AsyncClient(base_url=w.url) as client:
        response = await client.post(COMPLETIONS, json={"prompt": [5] * 4000, "max_tokens": 200})
        message = check(response, 400, "context_length_exceeded", "prompt")["message"]
    assert all(number in message for number in ("4096", "4000", "200"))


def test_prompt_that_fits_no_pool_is_refused(checkpoint):
    """At once, rather than waiting without end."""

    async def body():
        async with world(checkpoint, wait=False) as w:
            for worker in w.workers.values():
                await worker.kill()
                worker.max_prompt_tokens = 100
                await worker.start()
            await w.until(lambda: w.router.dispatcher.placement.max_prompt_tokens == 100)
            await w.until(lambda: w.router.dispatcher.placement.can_serve)
            with pytest.raises(openai.BadRequestError) as caught:
                await w.client.completions.create(model="tide", prompt=[5] * 101, max_tokens=1)
            assert caught.value.code == "context_length_exceeded"

    asyncio.run(body())


@in_world(max_body_bytes=100_000)
async def test_bad_bodies(w):
    """No JSON, no object, NaN, invalid UTF-8, too deep, too large, another type, compressed."""
    json_type = {"content-type": "application/json"}
    async with httpx.AsyncClient(base_url=w.url, timeout=20) as client:

        async def post(content, headers=json_type, path=COMPLETIONS):
            return await client.post(path, content=content, headers=headers)

        for content in (b"", b"{", b'{"prompt": "\xff\xfe"}', b'{"prompt": "x", "temperature": NaN}', b'{"a": 1e999}'):
            check(await post(content), 400, "invalid_json")
        check(await post(b'{"prompt": "\\ud800"}'), 400, "invalid_json")
        check(await post(b"[1]"), 400, "invalid_type")
        deep = b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}"
        check(await post(deep), 400, "invalid_json")
        wide = json.dumps({"prompt": "x", "max_tokens": 1, "metadata": [{}] * 500}).encode()
        assert (await post(wide)).status_code == 200
        check(await post(b"x" * 10_000_000), 413, "request_too_large")

        async def chunks():
            for _ in range(30):
                yield b" " * 10_000

        check(await post(chunks()), 413, "request_too_large")
        check(await post(b"a=b", {"content-type": "application/x-www-form-urlencoded"}), 415, "unsupported_media_type")
        check(await post(b"{}", {**json_type, "content-encoding": "gzip"}), 415, "unsupported_media_type")
        charset = {"content-type": "application/json; charset=utf-8"}
        assert (await post(b'{"prompt": "x", "max_tokens": 1}', charset)).status_code == 200
        check(await post(b"{}", path="/tokenize"), 400, "missing_required_parameter", "prompt")
        check(await post(b'{"tokens": ["a"]}', path="/detokenize"), 400, "invalid_type", "tokens[0]")
    assert w.router.dispatcher.num_alive == 0


@in_world()
async def test_unknown_paths_and_wrong_methods(w):
    """404 and 405 in the error shape, the latter with Allow."""
    async with httpx.AsyncClient(base_url=w.url) as client:
        check(await client.get("/v1/nothing"), 404, "unknown_url")
        check(await client.post("/v1/embeddings", json={}), 404, "unknown_url")
        response = await client.get(COMPLETIONS)
        check(response, 405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
        check(await client.get("/v1/models/nobody"), 404, "model_not_found", "model")


@in_world()
async def test_request_id_is_kept_or_replaced(w):
    """Printable and short is kept; it is part of the body's id and never a key: twice the same may run."""
    async with httpx.AsyncClient(base_url=w.url) as client:
        body = {"prompt": "x", "max_tokens": 1}
        same = {"x-request-id": "mine-7"}
        both = await asyncio.gather(*(client.post(COMPLETIONS, json=body, headers=same) for _ in range(2)))
        for response in both:
            assert response.headers["x-request-id"] == "mine-7"
            assert response.json()["id"] == "cmpl-mine-7"
        for bad in ("a b", "x" * 129):
            response = await client.get("/live", headers={"x-request-id": bad})
            assert response.headers["x-request-id"] not in ("", bad)


@in_world(strict_fields=True)
async def test_unknown_fields_may_be_refused(w):
    """By a setting only."""
    async with httpx.AsyncClient(base_url=w.url) as client:
        check(await client.post(COMPLETIONS, json={"prompt": "x", "colour": 1}), 400, "unsupported_parameter", "colour")
        body = {"prompt": "x", "max_tokens": 1, "metadata": {"a": "b"}, "store": False, "prediction": None}
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200


@in_world()
async def test_deadline_of_a_request(w):
    """From a header; 504, or an event when the stream has begun."""
    w.workers["decode-1"].faults.hold_at = 2
    async with httpx.AsyncClient(base_url=w.url) as client:
        headers = {"x-request-timeout-ms": "300"}
        body = {"prompt": "x", "max_tokens": 5}
        response = await client.post(COMPLETIONS, json=body, headers=headers)
        assert check(response, 504, "deadline_exceeded")["type"] == "timeout_error"
        response = await client.post(COMPLETIONS, json={**body, "stream": True}, headers=headers)
        assert response.status_code == 200
        assert "[DONE]" not in response.text
        assert '"code":"deadline_exceeded"' in response.text
        response = await client.post(COMPLETIONS, json=body, headers={"x-request-timeout-ms": "soon"})
        check(response, 400, "invalid_value", "x-request-timeout-ms")
    await w.until(lambda: w.workers["decode-1"].num_running == 0)


@in_world()
async def test_a_number_in_a_header_fits_where_it_goes_on(w):
    """What no message to a worker can hold is refused at the edge, not met on the way there."""
    async with httpx.AsyncClient(base_url=w.url, timeout=20) as client:
        body = {"prompt": "x", "max_tokens": 1}
        for name in ("x-priority", "x-vllm-priority", "x-request-timeout-ms", "x-request-timeout"):
            for value in (str(1 << 63), str(-(1 << 63) - 1), "9" * 5000, "1.5", "nan"):
                check(await client.post(COMPLETIONS, json=body, headers={name: value}), 400, "invalid_value", name)
        for value in (str((1 << 63) - 1), str(-(1 << 63))):
            assert (await client.post(COMPLETIONS, json=body, headers={"x-priority": value})).status_code == 200
    assert w.router.dispatcher.num_alive == 0


def test_no_workers_is_told_with_reasons(checkpoint):
    """503 with Retry-After, and /ready says why; liveness is another matter."""

    async def body():
        async with world(checkpoint, roles=("prefill",), wait=False) as w:
            await w.until(lambda: w.router.dispatcher.placement.workers)
            async with httpx.AsyncClient(base_url=w.url) as client:
                response = await client.post(COMPLETIONS, json={"prompt": "x"})
                assert check(response, 503, "no_workers")["type"] == "service_unavailable"
                assert response.headers["retry-after"] == "5"
                ready = await client.get("/ready")
                assert ready.status_code == 503
                assert ready.json()["reasons"] == ["no decode worker is ready"]
                assert (await client.get("/health")).status_code == 503
                assert (await client.get("/live")).status_code == 200

    asyncio.run(body())


@in_world(max_queue=2, queue_timeout_s=0.5)
async def test_full_queue_sheds(w):
    """429 with Retry-After once the queue is full, and when patience ends."""
    decode = w.workers["decode-1"]
    decode.faults.hold_at = 1
    w.router.dispatcher.placement.workers[0].own_legs = 256
    w.router.dispatcher.placement.workers[1].own_legs = 256
    async with httpx.AsyncClient(base_url=w.url) as client:
        body = {"prompt": "x", "max_tokens": 3}
        waiting = [asyncio.create_task(client.post(COMPLETIONS, json=body)) for _ in range(2)]
        await w.until(lambda: w.router.dispatcher.num_waiting == 2)
        response = await client.post(COMPLETIONS, json=body)
        assert check(response, 429, "queue_full")["type"] == "rate_limit_error"
        assert response.headers["retry-after"] == "1"
        assert response.headers["retry-after-ms"] == "1000"
        for response in await asyncio.gather(*waiting):
            check(response, 429, "queue_full")
    assert w.router.dispatcher.num_alive == w.router.dispatcher.num_waiting == 0


@in_world()
async def test_draining_router_finishes_what_runs_and_takes_nothing_new(w):
    """/ready says so, /health stays; the rest ends with an error event when the budget is spent."""
    w.workers["decode-1"].faults.step_s = 0.02
    first = asyncio.create_task(w.client.completions.create(model="tide", prompt="x", max_tokens=8))
    await w.until(lambda: w.router.dispatcher.num_alive == 1)
    drain = asyncio.create_task(w.router.drain(5.0))
    await asyncio.sleep(0)
    async with httpx.AsyncClient(base_url=w.url) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "x"})
        check(response, 503, "draining")
        assert response.headers["connection"] == "close"
        assert (await client.get("/ready")).json()["reasons"] == ["the router is draining"]
        assert (await client.get("/health")).status_code == 200
    assert (await first).usage.completion_tokens == 8
    await drain

    w.router.http.is_draining = False
    w.workers["decode-1"].faults.hold_at = 2
    stream = await w.client.completions.create(model="tide", prompt="x", max_tokens=8, stream=True)
    received = [await anext(stream)]
    drain = asyncio.create_task(w.router.drain(0.1))
    with pytest.raises(openai.APIError) as caught:
        received += [chunk async for chunk in stream]
    assert caught.value.code == "draining"
    await drain


@in_world()
async def test_fault_of_ours_says_nothing_of_itself(w):
    """500, generic text, details in the log only."""

    def explode(*_):
        raise ZeroDivisionError("/secret/path")

    w.router.edge.pool.tokenizer.encode_raw = explode
    async with httpx.AsyncClient(base_url=w.url) as client:
        error = check(await client.post(COMPLETIONS, json={"prompt": "x"}), 500, "internal_error")
    assert error == {"message": "internal error", "type": "server_error", "param": None, "code": "internal_error"}
