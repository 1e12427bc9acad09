"""The public gRPC service, driven by a client that has the .proto file and nothing else of ours."""

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import grpc_tools
import httpx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from router_world import in_world, script_of, world

from headrace.router import dialect
from headrace.router.grpc_api import proto_path

PROTO = Path(__file__).resolve().parents[2] / "proto" / "v1" / "generation.proto"
SERVICE = "headrace.v1.Generation"
D, N = dialect.DSML, dialect.END_THINK


class Client:
    """Messages and methods from the descriptor of the file, in a pool of their own."""

    def __init__(self, files: bytes, channel) -> None:
        pool = descriptor_pool.DescriptorPool()
        for file in descriptor_pb2.FileDescriptorSet.FromString(files).file:
            pool.Add(file)
        self.service = pool.FindServiceByName(SERVICE)
        self._channel = channel
        self._pool = pool

    def message(self, name):
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"headrace.v1.{name}"))

    def call(self, name, request=None, **options):
        method = self.service.methods_by_name[name]
        kind = self._channel.unary_stream if method.server_streaming else self._channel.unary_unary
        request = request or message_factory.GetMessageClass(method.input_type)()
        answer = message_factory.GetMessageClass(method.output_type)
        stub = kind(
            f"/{SERVICE}/{name}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        return stub(request, timeout=10, **options)


@pytest.fixture(scope="session")
def proto_files(tmp_path_factory) -> bytes:
    out = tmp_path_factory.mktemp("proto") / "set.bin"
    standard = Path(grpc_tools.__file__).parent / "_proto"
    arguments = [f"-I{PROTO.parent}", f"-I{standard}", "--include_imports", f"--descriptor_set_out={out}"]
    # In a process of its own: NIXL aborts when it is loaded beside the compiler's library.
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *arguments, str(PROTO)], check=True)
    return out.read_bytes()


@contextlib.asynccontextmanager
async def connected(w, files):
    async with grpc.aio.insecure_channel(w.router.grpc_address) as channel:
        yield Client(files, channel)


@pytest.fixture
def in_grpc(checkpoint, proto_files):
    """Runs a scenario(world, client)."""

    def run(scenario, **settings):
        async def body():
            async with world(checkpoint, grpc_enabled=True, **settings) as w, connected(w, proto_files) as client:
                await asyncio.wait_for(scenario(w, client), 30)

        asyncio.run(body())

    return run


def generate(client, **parts):
    return client.message("GenerateRequest")(**parts)


def text_request(client, text="x", **sampling):
    sampling.setdefault("max_tokens", 4)
    sampling.setdefault("seed", 5)
    return generate(client, text=text, sampling=client.message("SamplingParams")(**sampling))


def details_of(error):
    """The rich status: {name: unpacked detail}."""
    raw = dict(error.trailing_metadata())["grpc-status-details-bin"]
    assert len(raw) < 4096
    found = {}
    for detail in status_pb2.Status.FromString(raw).details:
        kind = getattr(error_details_pb2, detail.type_url.rpartition(".")[2])
        found[kind.__name__] = kind.FromString(detail.value)
    return found


def test_http_and_grpc_say_the_same(in_grpc):
    """Same request, same seed, same text and usage: whole, streamed, as ids."""

    async def scenario(w, client):
        async with httpx.AsyncClient(base_url=w.url) as http:
            body = {"prompt": "x", "max_tokens": 4, "seed": 5, "return_token_ids": True}
            over_http = (await http.post("/v1/completions", json=body)).json()
        choice = over_http["choices"][0]
        whole = await client.call("Generate", text_request(client))
        assert whole.choices[0].text == choice["text"]
        assert whole.choices[0].finish.reason == 2
        assert whole.usage.completion_tokens == over_http["usage"]["completion_tokens"] == 4
        assert whole.usage.cached_tokens == over_http["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert whole.system_fingerprint == over_http["system_fingerprint"]
        ids = client.message("TokenIds")(ids=choice["prompt_token_ids"])
        request = generate(
            client, token_ids=ids, sampling=client.message("SamplingParams")(max_tokens=4, seed=5), request_id="r1"
        )
        call = client.call("GenerateStream", request)
        events = [event async for event in call]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[0] == "started"
        assert kinds[-2:] == ["choice_finished", "completed"]
        assert set(kinds[1:-2]) == {"delta"}
        assert events[0].started.prompt_tokens == len(choice["prompt_token_ids"])
        assert events[0].started.request_id == "r1"
        assert dict(await call.initial_metadata())["x-request-id"] == "r1"
        got = []
        for event in events[1:-2]:
            assert event.delta.first_token == len(got)
            assert event.delta.text == ""
            got += event.delta.token_ids
        assert got == choice["token_ids"]
        assert events[-1].completed.usage.completion_tokens == 4
        assert events[-1].completed.timing.time_to_first_token.ToNanoseconds() > 0

    in_grpc(scenario)


def test_choices_are_those_of_http_whole_and_streamed(in_grpc):
    """Three of one prompt: the same ids and ends, by index, from one prefill each time."""

    async def scenario(w, client):
        async with httpx.AsyncClient(base_url=w.url) as http:
            body = {"prompt": "x", "max_tokens": 6, "seed": 5, "n": 3, "return_token_ids": True}
            over_http = (await http.post("/v1/completions", json=body)).json()
        expected = [choice["token_ids"] for choice in over_http["choices"]]
        assert len(set(map(tuple, expected))) == 3
        ids = client.message("TokenIds")(ids=over_http["choices"][0]["prompt_token_ids"])
        sampling = client.message("SamplingParams")(max_tokens=6, seed=5, n=3)
        request = generate(client, token_ids=ids, sampling=sampling)
        whole = await client.call("Generate", request)
        assert [choice.index for choice in whole.choices] == [0, 1, 2]
        assert [list(choice.token_ids) for choice in whole.choices] == expected
        assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(ids.ids), 18)
        streamed, finished = {0: [], 1: [], 2: []}, []
        async for event in client.call("GenerateStream", request):
            if event.WhichOneof("event") == "delta":
                assert event.delta.index not in finished
                streamed[event.delta.index] += event.delta.token_ids
            elif event.WhichOneof("event") == "choice_finished":
                finished.append(event.choice_finished.index)
        assert list(streamed.values()) == expected
        assert sorted(finished) == [0, 1, 2]
        assert all(len(worker.submits) == 3 for worker in w.workers.values())

    in_grpc(scenario)


def test_chat_becomes_a_message(in_grpc):
    """Reasoning, content and calls, whole and in pieces; or unparsed text."""
    output = (
        f'Hm.{N}Look.\n\n<{D}tool_calls>\n<{D}invoke name="f">\n<{D}parameter name="k" string="true">v</{D}parameter>\n'
        f"</{D}invoke>\n</{D}tool_calls>"
    )

    async def scenario(w, client):
        w.cluster.script = script_of(w, output)
        chat = client.message("ChatPrompt")(
            messages_json=json.dumps([{"role": "user", "content": "hi"}]),
            tools_json=json.dumps([{"type": "function", "function": {"name": "f"}}]),
            reasoning_effort="low",
        )
        message = (await client.call("Generate", generate(client, chat=chat))).choices[0].message
        assert (message.reasoning, message.content) == ("Hm.", "Look.")
        assert [(call.name, call.arguments_json) for call in message.tool_calls] == [("f", '{"k": "v"}')]
        parts = {"reasoning": "", "content": "", "arguments": ""}
        async for event in client.call("GenerateStream", generate(client, chat=chat)):
            if event.WhichOneof("event") == "delta":
                parts["reasoning"] += event.delta.message.reasoning
                parts["content"] += event.delta.message.content
                parts["arguments"] += "".join(call.arguments_json for call in event.delta.message.tool_calls)
            elif event.WhichOneof("event") == "choice_finished":
                assert event.choice_finished.finish.reason == 3
        assert parts == {"reasoning": "Hm.", "content": "Look.", "arguments": '{"k": "v"}'}
        form = client.message("OutputOptions")(form=4, logprobs=1)
        both = await client.call("Generate", generate(client, chat=chat, output=form))
        assert both.choices[0].text == output
        assert len(both.choices[0].token_ids) == len(both.choices[0].logprobs.logprobs)
        assert b"".join(both.choices[0].logprobs.token_bytes).startswith(b"Hm.")

    in_grpc(scenario)


def test_options_of_output(in_grpc):
    """Prompt log-probabilities, prompt ids, echo, small chunks, stop strings cut by token."""

    async def scenario(w, client):
        options = client.message("OutputOptions")(prompt_logprobs=1, return_prompt_token_ids=True, echo=True)
        request = text_request(client, "xyz")
        request.output.CopyFrom(options)
        whole = await client.call("Generate", request)
        assert whole.choices[0].text.startswith("xyz")
        assert list(whole.prompt_logprobs.token_ids) == list(whole.prompt_token_ids.ids)
        assert whole.prompt_logprobs.first_unscored == 1
        assert len(whole.prompt_logprobs.logprobs) == len(whole.prompt_token_ids.ids) - 1
        w.cluster.script = script_of(w, "one END two")
        tokenizer = w.router.edge.model.tokenizer
        request = generate(
            client,
            token_ids=client.message("TokenIds")(ids=[70]),
            sampling=client.message("SamplingParams")(max_tokens=20, stop=["END"]),
            output=client.message("OutputOptions")(max_chunk_tokens=1),
        )
        ids = []
        async for event in client.call("GenerateStream", request):
            if event.WhichOneof("event") == "delta":
                assert len(event.delta.token_ids) == 1
                ids += event.delta.token_ids
            elif event.WhichOneof("event") == "choice_finished":
                assert event.choice_finished.finish.stop_string == "END"
        assert ids == tokenizer.encode_raw("one END")

    in_grpc(scenario)


def test_errors_carry_details(in_grpc):
    """Status, reason, field by its path in the proto; all small."""

    async def scenario(w, client):
        long = client.message("TokenIds")(ids=[5] * 5000)
        bard = '[{"role": "bard"}]'
        regex = client.message("SamplingParams")(constraint={"regex": "a"})
        message = client.message("OutputOptions")(form=3)
        chat = client.message("ChatPrompt")
        user = '[{"role": "user", "content": "x"}]'
        half = '[{"role": "user", "content": "\\ud800"}]'
        deep = "[" * 200 + "]" * 200
        nan = chat(messages_json=user)
        nan.chat_template_kwargs.update({"thinking": float("nan")})
        for request, reason, field in (
            (generate(client), "MISSING_FIELD", "prompt"),
            (text_request(client, top_p=2.0), "INVALID_VALUE", "sampling.top_p"),
            (text_request(client, temperature=float("nan")), "INVALID_VALUE", "sampling.temperature"),
            (text_request(client, bad_words=["x"]), "UNSUPPORTED", "sampling.bad_words"),
            (text_request(client, thinking_token_budget=3), "UNSUPPORTED", "sampling.thinking_token_budget"),
            (generate(client, token_ids=long), "CONTEXT_LENGTH_EXCEEDED", "prompt"),
            (generate(client, text="x", model="no"), "MODEL_NOT_FOUND", "model"),
            (generate(client, chat=chat(messages_json="{")), "INVALID_VALUE", "chat.messages_json"),
            (generate(client, chat=chat(messages_json=bard)), "INVALID_VALUE", "chat.messages_json[0].role"),
            (generate(client, chat=chat(messages_json=half)), "INVALID_VALUE", "chat.messages_json"),
            (generate(client, chat=chat(messages_json=user, tools_json=deep)), "INVALID_VALUE", ""),
            (generate(client, chat=nan), "INVALID_VALUE", "chat.chat_template_kwargs"),
            (generate(client, text="x", sampling=regex), "UNSUPPORTED", "sampling.constraint"),
            (generate(client, text="x", output=message), "INVALID_VALUE", "output.form"),
        ):
            status = grpc.StatusCode.NOT_FOUND if field == "model" else grpc.StatusCode.INVALID_ARGUMENT
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.call("Generate", request, metadata=(("x-request-id", "mine"),))
            error = caught.value
            details = details_of(error)
            assert (error.code(), details["ErrorInfo"].reason) == (status, reason), error.details()
            assert details["ErrorInfo"].domain == "headrace"
            assert details["RequestInfo"].request_id == "mine"
            assert not field or details["BadRequest"].field_violations[0].field == field
        for priority in ("--5", "high", "1" + "0" * 19):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.call("Generate", text_request(client), metadata=(("x-priority", priority),))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert not w.workers["decode-1"].submits

    in_grpc(scenario)


def test_fault_of_ours_says_nothing_of_itself(in_grpc):
    """INTERNAL with our details, whatever the method; what went wrong stands in the log only."""

    async def scenario(w, client):
        def explode(*_):
            raise ZeroDivisionError("/secret/path")

        w.router.edge.pool.tokenizer.encode_raw = explode
        for method, request in (
            ("Generate", text_request(client)),
            ("Tokenize", client.message("TokenizeRequest")(text="x")),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.call(method, request)
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "internal error")
            assert details_of(caught.value)["ErrorInfo"].reason == "INTERNAL"

    in_grpc(scenario)


def test_paths_of_fields_are_turned_back():
    """From HTTP's names to the proto's."""
    assert proto_path("messages[2].role") == "chat.messages_json[2].role"
    assert proto_path("stop[1]") == "sampling.stop[1]"
    assert proto_path("prompt[3]") == "token_ids.ids[3]"
    assert proto_path("top_logprobs") == "output.logprobs"
    assert proto_path("chat_template_kwargs.thinking") == "chat.chat_template_kwargs.thinking"


async def gather_into(events, call):
    async for event in call:
        events.append(event.WhichOneof("event"))


def test_failures_of_workers_have_their_own_codes(in_grpc):
    """DATA_LOSS for a transfer, UNAVAILABLE with RetryInfo for nobody; mid-stream the trailing status."""

    async def scenario(w, client):
        w.workers["decode-1"].faults.fail = ["transfer_failed"] * 3
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("Generate", text_request(client))
        assert caught.value.code() is grpc.StatusCode.DATA_LOSS
        w.workers["decode-1"].faults.die_at = 2
        events = []
        call = client.call("GenerateStream", text_request(client, max_tokens=9))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await gather_into(events, call)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "completed" not in events
        assert "delta" in events
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("Generate", text_request(client))
        assert details_of(caught.value)["ErrorInfo"].reason == "NO_WORKERS"
        assert details_of(caught.value)["RetryInfo"].retry_delay.seconds == 5
        assert dict(caught.value.trailing_metadata())["grpc-retry-pushback-ms"] == "5000"

    in_grpc(scenario, queue_timeout_s=0.3)


def test_cancel_deadline_and_abort_end_the_legs(in_grpc):
    """The stream's end, the client's deadline, or a word from the same owner."""

    async def scenario(w, client):
        decode = w.workers["decode-1"]
        decode.faults.hold_at = 2

        async def idle():
            await w.until(lambda: decode.num_running == 0 and w.router.dispatcher.num_alive == 0)

        call = client.call("GenerateStream", text_request(client, max_tokens=9))
        assert (await anext(aiter(call))).WhichOneof("event") == "started"
        call.cancel()
        await idle()
        method = client.service.methods_by_name["Generate"]
        stub = client._channel.unary_unary(
            f"/{SERVICE}/Generate",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(text_request(client, max_tokens=9), timeout=0.3)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await idle()
        request = text_request(client, max_tokens=9)
        request.request_id = "end-me"
        call = client.call("GenerateStream", request)
        stream = aiter(call)
        await anext(stream)
        abort = client.message("AbortRequest")(request_ids=["end-me", "unknown"])
        assert list((await client.call("Abort", abort)).aborted) == ["end-me"]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in stream:
                pass
        assert caught.value.code() is grpc.StatusCode.CANCELLED
        await idle()

    in_grpc(scenario)


def test_small_methods(in_grpc):
    """Tokenize, detokenize, models, server info."""

    async def scenario(w, client):
        tokenizer = w.router.edge.model.tokenizer
        answer = await client.call("Tokenize", client.message("TokenizeRequest")(text="tide é"))
        assert list(answer.token_ids) == tokenizer.encode_raw("tide é")
        assert b"".join(answer.token_bytes) == "tide é".encode()
        chat = client.message("ChatPrompt")(messages_json='[{"role": "user", "content": "hi"}]', thinking=False)
        answer = await client.call("Tokenize", client.message("TokenizeRequest")(chat=chat))
        assert answer.prompt_text == f"{dialect.BOS}{dialect.USER}hi{dialect.ASSISTANT}{N}"
        request = client.message("DetokenizeRequest")(
            token_ids=[*tokenizer.encode_raw("é"), 1], skip_special_tokens=True
        )
        assert (await client.call("Detokenize", request)).text == "é"
        models = (await client.call("ListModels")).models
        assert [model.id for model in models] == ["tide", "tide-alias"]
        assert list(models[0].eos_token_ids) == [1]
        info = await client.call("GetServerInfo")
        assert info.ready
        assert "api_keys" not in info.settings["router"]

    in_grpc(scenario)


def test_health_follows_readiness_and_reflection_lists(in_grpc):
    """Also without a key; drain turns it."""

    async def scenario(w, client):
        health = health_pb2_grpc.HealthStub(client._channel)
        check = health_pb2.HealthCheckRequest(service=SERVICE)
        watch = health.Watch(check)
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        assert (await health.Check(check)).status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2_grpc.ServerReflectionStub(client._channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        names = {found.name for found in (await listing.read()).list_services_response.service}
        assert SERVICE in names
        await w.router.drain(0.1)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        watch.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.call("Generate", text_request(client), metadata=(("authorization", "Bearer k"),))
        assert details_of(caught.value)["ErrorInfo"].reason == "DRAINING"

    in_grpc(scenario, api_keys=("k",))


def test_key_is_asked_for(in_grpc):
    """Before the message is read; by either header."""

    async def scenario(w, client):
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await client.call("Generate", text_request(client), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        stream = client.call("GenerateStream", text_request(client))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await anext(aiter(stream))
        assert details_of(caught.value)["ErrorInfo"].reason == "INVALID_API_KEY"
        for metadata in ((("authorization", "Bearer k"),), (("x-api-key", "k"),)):
            await client.call("Generate", text_request(client), metadata=metadata)

    in_grpc(scenario, api_keys=("k",))


@in_world()
async def test_service_is_off_unless_asked_for(w):
    """No port, no server."""
    assert w.router.grpc is None
    assert w.router.grpc_address == ""
