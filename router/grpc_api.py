"""The public gRPC service `headrace.v1.Generation`: the same request, the same validators, other messages.

A request is turned into the fields of its HTTP twin and read by the same code; paths of refused fields are turned back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
import orjson
from google.protobuf import json_format
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from .. import __version__
from ..config.tree import RouterSection
from ..core.errors import Cancelled, ConfigError, Draining, HeadraceError, QueueFull, RequestError
from ..core.sampling import SamplingParams, TokenLogprobs
from ..proto.engine_convert import error_code, status_of
from ..proto.v1 import generation_pb2 as pb
from ..proto.v1 import generation_pb2_grpc
from . import request as rq
from .answer import calls_of
from .chat_format import render
from .fields import Fields, as_token_ids, integer_of, missing, unsupported, wrong_value
from .generation import Edge, Generation, Update, Usage
from .http import KEEP_ALIVE_S, SLOW_CLIENT_S, HttpSurface
from .journey import OutToken
from .messages import read_chat
from .middleware import Keys, check_depth, request_id_of
from .output_parser import CallArguments, CallOpened, Piece, TextPiece
from .tokenizer import Tokenizer

log = logging.getLogger("headrace.router.grpc")

SERVICE = pb.DESCRIPTOR.services_by_name["Generation"].full_name

MAX_SEND_BYTES = 64 << 20
MAX_VIOLATION_TEXT = 200
LEAVE_GRACE_S = 2.0
HEALTH_POLL_S = 0.2

OPTIONS = (
    ("grpc.max_send_message_length", MAX_SEND_BYTES),
    ("grpc.max_metadata_size", 16 << 10),
    ("grpc.max_concurrent_streams", 1024),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.max_connection_age_ms", 30 * 60_000),
    ("grpc.max_connection_age_grace_ms", 2 * 3_600_000),
    ("grpc.so_reuseport", 0),
)

Form = pb.OutputOptions
_FINISH = {
    "stop": pb.Finish.REASON_STOP,
    "length": pb.Finish.REASON_LENGTH,
    "tool_calls": pb.Finish.REASON_TOOL_CALLS,
}
_CHAT_PATHS = ("messages", "tools", "tool_choice", "response_format")
_SAMPLING = tuple(field.name for field in pb.SamplingParams.DESCRIPTOR.fields)


def rich_status(error: BaseException, request_id: str) -> status_pb2.Status:
    """The details of an error; small, since they travel as one header."""
    status, code = status_of(error), error_code(error)
    message = str(error)[:500] if code != "internal_error" else "internal error"
    number: int = status.grpc.value[0]
    out = status_pb2.Status(code=number, message=message)
    out.details.add().Pack(error_details_pb2.ErrorInfo(reason=status.info, domain="headrace"))
    out.details.add().Pack(error_details_pb2.RequestInfo(request_id=request_id))
    if isinstance(error, RequestError) and error.param:
        violation = error_details_pb2.BadRequest.FieldViolation(
            field=proto_path(error.param), description=message[:MAX_VIOLATION_TEXT]
        )
        out.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if status.retry_after_s is not None:
        delay = Duration(seconds=int(status.retry_after_s))
        out.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return out


def proto_path(param: str) -> str:
    """The path in the gRPC request of a field that is named as in HTTP."""
    name = param.replace("[", ".").partition(".")[0]
    rest = param[len(name) :]
    if name in _CHAT_PATHS:
        return f"chat.{name}_json{rest}"
    if name in ("thinking", "reasoning_effort", "task", "continue_final_message", "chat_template_kwargs"):
        return f"chat.{name}{rest}"
    if name in _SAMPLING:
        return f"sampling.{param}"
    if name == "structured_outputs":
        return "sampling.constraint"
    if name == "prompt":
        return f"token_ids.ids{rest}" if rest else "prompt"
    if name in ("logprobs", "top_logprobs"):
        return "output.logprobs"
    if name in ("prompt_logprobs", "echo"):
        return f"output.{name}"
    return param


class GrpcSurface(generation_pb2_grpc.GenerationServicer):
    """The service and its server."""

    def __init__(self, edge: Edge, section: RouterSection, http: HttpSurface) -> None:
        self._edge = edge
        self._section = section
        self._http = http
        self._keys = Keys(section.api_keys)
        self._running: dict[tuple[str, str], set[Generation]] = {}
        """By key and request id: what `Abort` may end."""
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        self._server: Any = None
        self._watch: asyncio.Task[None] | None = None
        self._left = False

    # ---- life ----

    async def start(self, address: str) -> str:
        """Serve; the bound address.

        Raises:
            ConfigError: it is taken or not ours.
        """
        receive = ("grpc.max_receive_message_length", self._section.max_body_bytes)
        self._server = grpc.aio.server(interceptors=[_KeyInterceptor(self._keys)], options=(*OPTIONS, receive))
        generation_pb2_grpc.add_GenerationServicer_to_server(self, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        host, _, _ = address.rpartition(":")
        if host in ("127.0.0.1", "[::1]", "localhost"):
            names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)
        try:
            port = self._server.add_insecure_port(address)
        except RuntimeError as error:
            raise ConfigError(f"router.grpc_host, router.grpc_port: cannot listen on {address}") from error
        await self._set_health()
        await self._server.start()
        self._watch = asyncio.create_task(self._watch_health())
        return f"{host}:{port}"

    def leaving(self) -> None:
        self._left = True

    async def stop(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._health.enter_graceful_shutdown()
        await self._server.stop(LEAVE_GRACE_S)

    async def _watch_health(self) -> None:
        while True:
            await asyncio.sleep(HEALTH_POLL_S)
            await self._set_health()

    async def _set_health(self) -> None:
        ready = not self._left and not self._http.not_ready_reasons()
        status = health_pb2.HealthCheckResponse.SERVING if ready else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, status)

    # ---- generation ----

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        async with self._answering(request, context) as (generation, form):
            updates: list[Update] = []
            async for batch in generation.updates(KEEP_ALIVE_S):
                updates += batch
            return self._whole(request, generation, form, updates)

    async def GenerateStream(self, request: pb.GenerateRequest, context: Any) -> None:
        async with self._answering(request, context) as (generation, form):
            told = [0] * generation.request.num_choices
            untold: list[list[OutToken]] = [[] for _ in told]
            started = False
            async for batch in generation.updates(KEEP_ALIVE_S):
                if not started and not batch:
                    continue
                if not started:
                    started = True
                    await _write(context, pb.GenerateEvent(started=self._started(request, generation)))
                if not batch:
                    await _write(context, pb.GenerateEvent(keep_alive=pb.KeepAlive()))
                for update in batch:
                    untold[update.choice] += update.delta.tokens
                    tokens = untold[update.choice]
                    needs = bool(tokens) and (form != Form.FORM_TEXT or generation.request.logprobs is not None)
                    shows_ids = form in (Form.FORM_TOKEN_IDS, Form.FORM_TEXT_AND_TOKEN_IDS)
                    if (update.delta.pieces and form != Form.FORM_TOKEN_IDS) or (
                        needs and (shows_ids or update.finished)
                    ):
                        delta = self._delta(generation, form, update.choice, update.delta.pieces, tokens)
                        delta.first_token = told[update.choice]
                        if request.output.running_usage:
                            delta.usage.CopyFrom(_usage(generation.usage()))
                        told[update.choice] += len(tokens)
                        untold[update.choice] = []
                        await _write(context, pb.GenerateEvent(delta=delta))
                    if update.finished:
                        finished = pb.ChoiceFinished(index=update.choice, finish=_finish(generation, update.choice))
                        await _write(context, pb.GenerateEvent(choice_finished=finished))
            completed = pb.Completed(usage=_usage(generation.usage()), timing=self._timing(generation))
            await _write(context, pb.GenerateEvent(completed=completed))

    @contextlib.asynccontextmanager
    async def _answering(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[tuple[Generation, int]]:
        """Open a generation for a call; errors become its status."""
        arrived_s = self._edge.clock.now_s()
        metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
        request_id = request_id_of(request.request_id or metadata.get("x-request-id", ""))
        await context.send_initial_metadata((("x-request-id", request_id),))
        owner = (_key_of(metadata), request_id)
        requests = self._edge.dispatcher.metrics.requests
        outcome = "cancelled"
        try:
            if self._http.is_draining:
                raise Draining("the router is leaving")
            draft, form = self._draft(request, request_id, metadata, context.time_remaining())
            generation = await self._edge.open(draft, arrived_s)
            self._http.num_in_flight += 1
            self._running.setdefault(owner, set()).add(generation)
            try:
                with generation:
                    yield generation, form
            finally:
                self._http.num_in_flight -= 1
                self._running[owner].discard(generation)
                if not self._running[owner]:
                    del self._running[owner]
            outcome = "ok"
        except Exception as error:
            outcome = error_code(error)
            await _abort(context, error, request_id)
        finally:
            requests.labels("grpc", outcome).inc()

    def _draft(
        self, request: pb.GenerateRequest, request_id: str, metadata: Mapping[str, str], remaining_s: float | None
    ) -> tuple[rq.Draft, int]:
        """Read a request with the validators of its HTTP twin."""
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise missing("prompt")
        body = body_of(request)
        priority = request.priority
        if not priority and metadata.get("x-priority"):
            priority = integer_of(metadata["x-priority"], "x-priority")
        longest_s = self._edge.request_timeout_s
        base = rq.Request(
            request_id=request_id,
            model="",
            prompts=(),
            n=1,
            sampling=SamplingParams(),
            priority=priority,
            max_chunk_tokens=request.output.max_chunk_tokens,
            timeout_s=min(longest_s, remaining_s) if remaining_s is not None else longest_s,
            traceparent=metadata.get("traceparent", "")[:64],
        )
        bounds = self._edge.bounds()
        form = request.output.form
        if kind == "chat":
            draft = rq.draft_chat(body, self._edge.model, bounds, base)
            form = form or Form.FORM_MESSAGE
            if form != Form.FORM_MESSAGE:
                draft = rq.plain_text(draft)
        else:
            if request.sampling.HasField("thinking_token_budget"):
                raise unsupported("thinking_token_budget", "it belongs to chat prompts")
            draft = rq.draft_completion(body, self._edge.model, bounds, base)
            form = form or (Form.FORM_TEXT if kind == "text" else Form.FORM_TOKEN_IDS)
            if form == Form.FORM_MESSAGE:
                raise wrong_value("output.form", "a form other than message, as the prompt is no chat", "FORM_MESSAGE")
        if form not in Form.Form.values():
            raise wrong_value("output.form", "a form that this release knows", form)
        wanted = draft.request.sampling.prompt_logprobs
        if wanted is not None:
            num_prompt = len(request.token_ids.ids) or len(request.text)
            if num_prompt * (12 + 7 * wanted) > MAX_SEND_BYTES:
                raise wrong_value("prompt_logprobs", "so small that the answer fits one message", wanted)
        return draft, form

    # ---- messages ----

    def _started(self, request: pb.GenerateRequest, generation: Generation) -> pb.Started:
        usage = generation.usage()
        out = pb.Started(
            request_id=generation.request.request_id,
            model=generation.request.model,
            system_fingerprint=self._http.fingerprint(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
        )
        out.created.FromSeconds(int(time.time()))
        self._add_prompt(request, generation, out)
        return out

    def _whole(
        self, request: pb.GenerateRequest, generation: Generation, form: int, updates: list[Update]
    ) -> pb.GenerateResponse:
        out = pb.GenerateResponse(
            request_id=generation.request.request_id,
            model=generation.request.model,
            usage=_usage(generation.usage()),
            timing=self._timing(generation),
            system_fingerprint=self._http.fingerprint(),
        )
        out.created.FromSeconds(int(time.time()))
        self._add_prompt(request, generation, out)
        for index in range(generation.request.num_choices):
            pieces = [piece for update in updates if update.choice == index for piece in update.delta.pieces]
            tokens = [token for update in updates if update.choice == index for token in update.delta.tokens]
            delta = self._delta(generation, form, index, pieces, tokens)
            choice = out.choices.add(
                index=index, text=delta.text, token_ids=delta.token_ids, finish=_finish(generation, index)
            )
            if form == Form.FORM_MESSAGE:
                choice.message.reasoning = delta.message.reasoning
                choice.message.content = delta.message.content
                for call, arguments in calls_of(pieces):
                    choice.message.tool_calls.add(
                        index=call.index, id=call.id, name=call.name, arguments_json=arguments
                    )
            if delta.HasField("logprobs"):
                choice.logprobs.CopyFrom(delta.logprobs)
            if request.output.echo:
                prompt = generation.request.prompts[index // generation.request.n]
                if form == Form.FORM_TOKEN_IDS:
                    choice.token_ids[:] = [*prompt.ids, *choice.token_ids]
                else:
                    choice.text = (prompt.text or self._edge.model.tokenizer.decode(prompt.ids)) + choice.text
        return out

    def _add_prompt(self, request: pb.GenerateRequest, generation: Generation, out: Any) -> None:
        prompt = generation.request.prompts[0].ids
        if request.output.return_prompt_token_ids:
            out.prompt_token_ids.ids.extend(prompt)
        wanted = generation.request.sampling.prompt_logprobs
        if wanted is None:
            return
        scored = generation.prompt_logprobs[0]
        if len(scored) != len(prompt) - 1:
            raise HeadraceError("some prompt positions came without log-probabilities")
        values = [(token, scored[position][1]) for position, token in enumerate(prompt[1:], start=1)]
        _add_logprobs(out.prompt_logprobs, values, wanted, None)
        out.prompt_logprobs.token_ids.insert(0, prompt[0])
        out.prompt_logprobs.first_unscored = 1

    def _delta(
        self, generation: Generation, form: int, index: int, pieces: Iterable[Piece], tokens: list[OutToken]
    ) -> pb.Delta:
        out = pb.Delta(index=index)
        if form in (Form.FORM_TOKEN_IDS, Form.FORM_TEXT_AND_TOKEN_IDS):
            out.token_ids.extend(token.id for token in tokens)
        if form in (Form.FORM_TEXT, Form.FORM_TEXT_AND_TOKEN_IDS):
            out.text = "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))
        if form == Form.FORM_MESSAGE:
            for piece in pieces:
                _add_piece(out.message, piece)
        wanted = generation.request.logprobs
        if wanted is not None:
            tokenizer = self._edge.model.tokenizer if form != Form.FORM_TOKEN_IDS else None
            values = [(token.id, token.logprobs) for token in tokens if token.logprobs is not None]
            _add_logprobs(out.logprobs, values, wanted, tokenizer)
        return out

    def _timing(self, generation: Generation) -> pb.Timing:
        stats, arrived_s = generation.stats, generation.sequences[0].arrived_s
        out = pb.Timing()
        out.total.FromNanoseconds(int((self._edge.clock.now_s() - arrived_s) * 1e9))
        out.prefill.FromNanoseconds(int(stats.prefill_s * 1e9))
        if stats.placed_s is not None:
            out.queue.FromNanoseconds(int((stats.placed_s - arrived_s) * 1e9))
        if stats.first_token_s is not None:
            out.time_to_first_token.FromNanoseconds(int((stats.first_token_s - arrived_s) * 1e9))
        if stats.transferred is not None:
            out.transfer_tail.FromNanoseconds(int(stats.transferred.tail_seconds * 1e9))
        return out

    # ---- the rest ----

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        key = _key_of(dict(context.invocation_metadata() or ()))
        known = []
        for request_id in request.request_ids:
            running = self._running.get((key, request_id))
            if running:
                known.append(request_id)
                for generation in list(running):
                    generation.cancel(Cancelled("aborted by its owner"))
        return pb.AbortResponse(aborted=known)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        model = self._edge.model
        try:
            rq.pick_model(Fields({"model": request.model}), model)
            kind = request.WhichOneof("prompt")
            if kind is None:
                raise missing("prompt")
            if kind == "chat":
                chat = read_chat(Fields(_chat_fields(request.chat)), model.dialect)
                segments = render(chat, model.dialect, model.profile).segments
                ids = await self._edge.pool.encode_segments(segments)
                text = "".join(segment.text for segment in segments)
            else:
                text = request.text
                ids = (await self._edge.pool.encode_raw([text]))[0]
        except Exception as error:
            await _abort(context, error, "")
        return pb.TokenizeResponse(
            token_ids=ids,
            token_bytes=[model.tokenizer.bytes_of(token) for token in ids],
            max_model_len=self._edge.bounds().max_model_len,
            prompt_text=text,
        )

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:
        model = self._edge.model
        try:
            rq.pick_model(Fields({"model": request.model}), model)
            ids = as_token_ids(list(request.token_ids), "token_ids", model.vocab_size, high=rq.LARGEST_COUNT)
        except Exception as error:
            await _abort(context, error, "")
        return pb.DetokenizeResponse(text=model.tokenizer.decode(ids, skip_special=request.skip_special_tokens))

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        model = self._edge.model
        out = pb.ListModelsResponse()
        for name in model.names:
            card = out.models.add(
                id=name,
                root=model.root,
                max_model_len=self._edge.bounds().max_model_len,
                vocab_size=model.vocab_size,
                eos_token_ids=model.eos_token_ids,
            )
            card.created.FromSeconds(model.created)
        return out

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        reasons = self._http.not_ready_reasons()
        dispatcher = self._edge.dispatcher
        out = pb.GetServerInfoResponse(
            version=__version__,
            ready=not reasons,
            not_ready_reasons=reasons,
            running_requests=dispatcher.num_alive - dispatcher.num_waiting,
            waiting_requests=dispatcher.num_waiting,
        )
        json_format.ParseDict(json.loads(json.dumps(self._http.server_info()["settings"])), out.settings)
        return out


class _KeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses calls without a key before their message is read; health and reflection are open."""

    def __init__(self, keys: Keys) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], details: grpc.HandlerCallDetails
    ) -> Any:
        guarded = details.method.startswith(f"/{SERVICE}/")
        metadata = {key: value for key, value in details.invocation_metadata or () if isinstance(value, str)}
        if not guarded or self._keys.admits(metadata.get("authorization", ""), metadata.get("x-api-key", "")):
            return await continuation(details)

        async def refuse(request: Any, context: Any) -> None:
            error = RequestError("no valid API key was given", code="invalid_api_key")
            await _abort(context, error, metadata.get("x-request-id", "")[:128])

        return grpc.unary_unary_rpc_method_handler(refuse)


async def _abort(context: Any, error: BaseException, request_id: str) -> NoReturn:
    """End a call with an error; one that is none of ours is logged here and says nothing of itself."""
    if not isinstance(error, HeadraceError):
        log.error("event=internal_error request_id=%s", request_id, exc_info=error)
    status = rich_status(error, request_id)
    trailing: list[tuple[str, str | bytes]] = [("grpc-status-details-bin", status.SerializeToString())]
    retry_after_s = status_of(error).retry_after_s
    if retry_after_s is not None:
        trailing.append(("grpc-retry-pushback-ms", str(int(retry_after_s * 1000))))
    await context.abort(status_of(error).grpc, status.message, trailing_metadata=tuple(trailing))
    raise AssertionError("abort raises")


async def _write(context: Any, message: pb.GenerateEvent) -> None:
    try:
        async with asyncio.timeout(SLOW_CLIENT_S):
            await context.write(message)
    except TimeoutError as error:
        raise QueueFull("the client does not read its stream") from error


def _key_of(metadata: Mapping[str, Any]) -> str:
    return str(metadata.get("authorization") or metadata.get("x-api-key") or "")


def body_of(request: pb.GenerateRequest) -> dict[str, Any]:
    """The fields of the HTTP twin of a request."""
    kind = request.WhichOneof("prompt")
    body: dict[str, Any] = {"model": request.model}
    if kind == "chat":
        body |= _chat_fields(request.chat)
    else:
        body["prompt"] = request.text if kind == "text" else list(request.token_ids.ids)
    sampling = request.sampling
    for field in sampling.DESCRIPTOR.fields:
        if field.name not in ("logit_bias", "constraint") and not field.is_repeated:
            if field.has_presence and not sampling.HasField(field.name):
                continue
            body[field.name] = getattr(sampling, field.name)
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        values = list(getattr(sampling, name))
        if values:
            body[name] = values
    if sampling.logit_bias:
        body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}
    if sampling.HasField("constraint"):
        body["structured_outputs"] = {}
    if request.cache_salt:
        body["cache_salt"] = request.cache_salt
    output = request.output
    if output.HasField("skip_special_tokens"):
        body["skip_special_tokens"] = output.skip_special_tokens
    if output.HasField("prompt_logprobs"):
        body["prompt_logprobs"] = output.prompt_logprobs
    if output.echo:
        body["echo"] = True
    if output.HasField("logprobs"):
        body |= {"logprobs": True, "top_logprobs": output.logprobs} if kind == "chat" else {"logprobs": output.logprobs}
    return body


def _chat_fields(chat: pb.ChatPrompt) -> dict[str, Any]:
    """The chat fields, their JSON texts parsed.

    Raises:
        RequestError: a text is no JSON.
    """
    body: dict[str, Any] = {}
    for name in _CHAT_PATHS:
        text = getattr(chat, f"{name}_json")
        if text:
            try:
                body[name] = orjson.loads(text)
            except orjson.JSONDecodeError as error:
                raise RequestError(f"'{name}_json' is no JSON", param=name, code="invalid_json") from error
            check_depth(text.encode(), body[name])
    if chat.HasField("thinking"):
        body["thinking"] = {"type": "enabled" if chat.thinking else "disabled"}
    for name in ("reasoning_effort", "task"):
        if getattr(chat, name):
            body[name] = getattr(chat, name)
    if chat.continue_final_message:
        body["continue_final_message"] = True
    if chat.HasField("parallel_tool_calls"):
        body["parallel_tool_calls"] = chat.parallel_tool_calls
    if chat.HasField("chat_template_kwargs"):
        try:
            body["chat_template_kwargs"] = json_format.MessageToDict(chat.chat_template_kwargs)
        except ValueError as error:
            # NaN and infinities, which a Struct can hold and JSON cannot.
            raise wrong_value("chat_template_kwargs", "of finite numbers", "NaN or infinity") from error
    return body


def _add_piece(message: pb.Message, piece: Piece) -> None:
    if isinstance(piece, TextPiece):
        if piece.kind == "reasoning":
            message.reasoning += piece.text
        else:
            message.content += piece.text
    elif isinstance(piece, CallOpened):
        message.tool_calls.add(index=piece.index, id=piece.id, name=piece.name)
    else:
        assert isinstance(piece, CallArguments)
        message.tool_calls.add(index=piece.index, arguments_json=piece.text)


def _add_logprobs(
    out: pb.Logprobs, values: list[tuple[int, TokenLogprobs]], wanted: int, tokenizer: Tokenizer | None
) -> None:
    out.num_top = wanted
    for token, logprobs in values:
        out.token_ids.append(token)
        out.logprobs.append(logprobs.logprob)
        for other, value in logprobs.top[:wanted]:
            out.top_token_ids.append(other)
            out.top_logprobs.append(value)
        if tokenizer is not None:
            out.token_bytes.append(tokenizer.bytes_of(token))


def _usage(usage: Usage) -> pb.Usage:
    return pb.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        reasoning_tokens=usage.reasoning_tokens,
    )


def _finish(generation: Generation, choice: int) -> pb.Finish:
    finish = generation.answers[choice].finish
    assert finish is not None
    out = pb.Finish(reason=_FINISH[finish.reason])
    if isinstance(finish.stop, str):
        out.stop_string = finish.stop
    elif finish.stop is not None:
        out.stop_token_id = finish.stop
    return out
