"""The HTTP surface: routes, streams, and the watch for clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response

from .. import __version__
from ..config.tree import RouterSection
from ..core.errors import Cancelled, HeadraceError, RequestError, UnknownModel
from ..core.sampling import SamplingParams
from ..proto.engine_convert import error_code
from . import request as rq
from .chat_format import render
from .fields import Fields, as_text, as_token_ids, integer_of
from .generation import Edge, Generation
from .messages import read_chat
from .middleware import App, ClientGone, EdgeMiddleware, Keys, Message, Receive, Scope, Send, header, send_error
from .openai_reply import KEEP_ALIVE, ChatReply, CompletionReply, Reply, error_body, event

SLOW_CLIENT_S = 60.0
"""A write that waits this long for its reader ends the request."""
KEEP_ALIVE_S = 15.0

EVENT_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Draw = Callable[[Mapping[str, Any], Any, rq.Bounds, rq.Request], rq.Draft]


class JsonResponse(Response):
    """orjson in one line."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content)


class _Later(Response):
    """Lets a route speak ASGI itself: status and headers wait for the first token."""

    def __init__(self, run: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        super().__init__()
        self._run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._run(scope, receive, send)


class HttpSurface:
    """All routes, over one edge."""

    def __init__(self, edge: Edge, section: RouterSection, settings: dict[str, Any]) -> None:
        """
        Args:
            settings: what /server_info shows; without secrets.
        """
        self._edge = edge
        self._section = section
        self._settings = settings
        self._dispatcher = edge.dispatcher
        self.is_draining = False
        self.num_in_flight = 0

    def app(self) -> App:
        """The whole application."""
        inner = FastAPI(title="headrace", version=__version__, docs_url=None, redoc_url=None)
        for path, method, route, text in (
            ("/v1/chat/completions", "POST", self._chat, "A chat completion, whole or streamed."),
            ("/v1/completions", "POST", self._completion, "A text completion, whole or streamed."),
            ("/v1/models", "GET", self._models, "The served names."),
            ("/v1/models/{name:path}", "GET", self._one_model, "One served name."),
            ("/tokenize", "POST", self._tokenize, "Token ids of a text or of a chat."),
            ("/v1/tokenize", "POST", self._tokenize, "Token ids of a text or of a chat."),
            ("/detokenize", "POST", self._detokenize, "The text of token ids."),
            ("/v1/detokenize", "POST", self._detokenize, "The text of token ids."),
            ("/live", "GET", self._live, "200 while the event loop works."),
            ("/ready", "GET", self._ready, "200 when a request would be dispatched; else the reasons."),
            ("/health", "GET", self._health, "200 once the model is up."),
            ("/metrics", "GET", self._metrics, "Prometheus text, OpenMetrics by Accept."),
            ("/version", "GET", self._version, "The release."),
            ("/load", "GET", self._load, "Requests in flight."),
            ("/server_info", "GET", self._server_info, "Settings, model and workers."),
            ("/reset_prefix_cache", "POST", self._reset_prefix_cache, "Every worker forgets its prefix cache."),
            ("/docs", "GET", self._docs, "This list as a page."),
        ):
            inner.add_api_route(
                path,
                route,
                methods=[method],
                summary=text,
                operation_id=f"{method.lower()}_{path.strip('/').replace('/', '_').replace('.', '_')}",
                response_class=Response,
                openapi_extra=_body_schema(path),
            )
        inner.add_api_route("/ping", self._health, methods=["GET", "POST"], include_in_schema=False)
        inner.add_exception_handler(HTTPException, _plain_error)
        inner.add_exception_handler(HeadraceError, _our_error)
        inner.add_exception_handler(Exception, _our_error)
        app: App = inner
        if self._section.cors_origins:
            app = CORSMiddleware(
                inner, allow_origins=self._section.cors_origins, allow_methods=["*"], allow_headers=["*"]
            )
        return EdgeMiddleware(
            app,
            keys=Keys(self._section.api_keys),
            max_body_bytes=self._section.max_body_bytes,
            is_draining=lambda: self.is_draining,
        )

    # ---- generation ----

    async def _chat(self, request: HttpRequest) -> Response:
        return _Later(functools.partial(self._generate, rq.draft_chat, ChatReply))

    async def _completion(self, request: HttpRequest) -> Response:
        return _Later(functools.partial(self._generate, rq.draft_completion, CompletionReply))

    async def _generate(self, draw: Draw, reply: type[Reply], scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and end it at once if its client leaves."""
        surface = "chat" if reply is ChatReply else "completions"
        requests = self._dispatcher.metrics.requests
        self.num_in_flight += 1
        work = asyncio.create_task(self._serve(scope, send, draw, reply))
        watch = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({work, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientGone
            outcome = work.result()
            requests.labels(surface, outcome).inc()
        except (ClientGone, Cancelled):
            requests.labels(surface, "cancelled").inc()
            # Nobody is there to be answered; the access log shall say so.
            scope["headrace.client_gone"] = True
        except HeadraceError as error:
            requests.labels(surface, error_code(error)).inc()
            raise
        finally:
            self.num_in_flight -= 1
            for task in (work, watch):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work

    async def _serve(self, scope: Scope, send: Send, draw: Draw, reply: type[Reply]) -> str:
        """From body to last byte; the outcome for the metrics.

        Raises:
            HeadraceError: before the first byte; later ones become error events.
        """
        base = rq.Request(
            request_id=scope["headrace.request_id"],
            model="",
            prompts=(),
            n=1,
            sampling=SamplingParams(),
            priority=_number(scope, b"x-priority", b"x-vllm-priority") or 0,
            timeout_s=_timeout_s(scope, self._edge.request_timeout_s),
            traceparent=header(scope, b"traceparent")[:64],
        )
        draft = draw(scope["headrace.body"], self._edge.model, self._edge.bounds(), base)
        with await self._edge.open(draft, scope["headrace.arrived_s"]) as generation:
            answer = reply(generation, self._edge.model, int(time.time()), self.fingerprint())
            if not generation.request.stream:
                async for batch in generation.updates(KEEP_ALIVE_S):
                    for update in batch:
                        answer.collect(update)
                await JsonResponse(answer.body())(scope, _no_receive, send)
                return "ok"
            return await self._stream(generation, answer, send)

    async def _stream(self, generation: Generation, answer: Reply, send: Send) -> str:
        """Server-sent events. Status and headers leave with the first of them."""
        started = False
        try:
            async for batch in generation.updates(KEEP_ALIVE_S):
                data = b"".join(chunk for update in batch for chunk in answer.chunks(update))
                if not data:
                    if not started or batch:
                        continue
                    data = KEEP_ALIVE
                if not started:
                    await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM_HEADERS})
                    started = True
                await _send_body(send, data)
            await _send_body(send, b"".join(answer.last_chunks()), more=False)
            return "ok"
        except HeadraceError as error:
            if not started:
                raise
            # No [DONE]: a cut answer must not pass for a whole one.
            await _send_body(send, event(error_body(error)), more=False)
            return error_code(error)

    def fingerprint(self) -> str:
        """Names weights, settings and layout: what a worker's layout fingerprint covers."""
        for worker in self._dispatcher.placement.workers:
            if worker.is_ready:
                return f"hr-{worker.description.fingerprint[:4].hex()}"
        return "hr-0"

    # ---- tokens ----

    async def _tokenize(self, request: HttpRequest) -> Response:
        body = request.scope["headrace.body"]
        fields = Fields(body)
        model, bounds = self._edge.model, self._edge.bounds()
        rq.pick_model(fields, model)
        if fields.given("messages"):
            chat = read_chat(fields, model.dialect)
            segments = render(chat, model.dialect, model.profile).segments
            ids = await self._edge.pool.encode_segments(segments)
        else:
            fields.flag("add_special_tokens", True)
            text = as_text(fields.require("prompt"), "prompt")
            ids = (await self._edge.pool.encode_raw([text]))[0]
        strings = None
        if fields.flag("return_token_strs", False):
            strings = [model.tokenizer.text_of(token) for token in ids]
        return JsonResponse(
            {"count": len(ids), "max_model_len": bounds.max_model_len, "tokens": ids, "token_strs": strings}
        )

    async def _detokenize(self, request: HttpRequest) -> Response:
        fields = Fields(request.scope["headrace.body"])
        model = self._edge.model
        rq.pick_model(fields, model)
        ids = as_token_ids(fields.require("tokens"), "tokens", model.vocab_size, high=rq.LARGEST_COUNT)
        return JsonResponse({"prompt": model.tokenizer.decode(ids)})

    # ---- the rest ----

    async def _models(self) -> Response:
        data = [self._model_card(name) for name in self._edge.model.names]
        return JsonResponse({"object": "list", "data": data})

    async def _one_model(self, name: str) -> Response:
        if name not in self._edge.model.names:
            raise UnknownModel(f"the model {name[:200]!r} does not exist", param="model")
        return JsonResponse(self._model_card(name))

    def _model_card(self, name: str) -> dict[str, Any]:
        model = self._edge.model
        return {
            "id": name,
            "object": "model",
            "created": model.created,
            "owned_by": "headrace",
            "root": model.root,
            "parent": None,
            "max_model_len": self._edge.bounds().max_model_len,
        }

    def not_ready_reasons(self) -> list[str]:
        """Why a request would not be dispatched now."""
        draining = ["the router is draining"] if self.is_draining else []
        return draining + self._dispatcher.placement.not_ready_reasons()

    async def _live(self) -> Response:
        return Response()

    async def _ready(self) -> Response:
        reasons = self.not_ready_reasons()
        return JsonResponse({"ready": not reasons, "reasons": reasons}, status_code=503 if reasons else 200)

    async def _health(self) -> Response:
        up = self.is_draining or self._dispatcher.placement.can_serve
        return Response(status_code=200 if up else 503)

    async def _metrics(self, request: HttpRequest) -> Response:
        self._dispatcher.refresh_gauges()
        body, content_type = self._dispatcher.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    async def _version(self) -> Response:
        return JsonResponse({"version": __version__})

    async def _load(self) -> Response:
        return JsonResponse({"server_load": self.num_in_flight})

    def server_info(self) -> dict[str, Any]:
        """Settings, model and workers as this router sees them now."""
        model = self._edge.model
        return {
            "version": __version__,
            "settings": self._settings,
            "model": {
                "names": list(model.names),
                "root": model.root,
                "dialect": model.dialect.name,
                "effort_profile": model.profile,
                "vocab_size": model.vocab_size,
                "max_model_len": self._edge.bounds().max_model_len,
            },
            "requests": {"running": self._dispatcher.num_alive, "waiting": self._dispatcher.num_waiting},
            "workers": [
                {
                    "address": worker.ref.address,
                    "worker_id": worker.ref.worker_id,
                    "incarnation": f"{worker.ref.incarnation:016x}",
                    "role": worker.description.role.value,
                    "state": worker.state,
                    "fingerprint": worker.description.fingerprint.hex(),
                    "peer_address": worker.ref.peer_address,
                    "max_model_len": worker.description.max_model_len,
                    "max_prompt_tokens": worker.description.max_prompt_tokens,
                    "max_num_seqs": worker.description.max_num_seqs,
                    "device": worker.description.device,
                    "kv_dtype": worker.description.kv_dtype,
                    "version": worker.description.version,
                    "own_legs": worker.own_legs,
                    "index": {
                        "state": worker.index.state.value,
                        "seq": worker.index.seq,
                        "blocks": worker.index.num_blocks,
                        "predicted": worker.index.num_predicted,
                    },
                    "load": {
                        **dataclasses.asdict(worker.load),
                        "pools": {kind: dataclasses.asdict(pool) for kind, pool in worker.load.pools},
                    },
                }
                for worker in self._dispatcher.placement.workers
            ],
        }

    async def _server_info(self) -> Response:
        return JsonResponse(self.server_info())

    async def _reset_prefix_cache(self) -> Response:
        await self._dispatcher.clear_caches()
        return Response()

    async def _docs(self) -> Response:
        return HTMLResponse(_DOCS_PAGE)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _no_receive() -> Message:
    raise AssertionError("a whole response reads nothing")


async def _send_body(send: Send, data: bytes, more: bool = True) -> None:
    try:
        async with asyncio.timeout(SLOW_CLIENT_S):
            await send({"type": "http.response.body", "body": data, "more_body": more})
    except TimeoutError as error:
        raise ClientGone from error


def _number(scope: Scope, *names: bytes) -> int | None:
    """An integer from the first of these headers that is there."""
    for name in names:
        text = header(scope, name)
        if text:
            return integer_of(text, name.decode())
    return None


def _timeout_s(scope: Scope, longest_s: float) -> float:
    milliseconds = _number(scope, b"x-request-timeout-ms")
    seconds = _number(scope, b"x-request-timeout")
    wanted = milliseconds / 1000 if milliseconds is not None else seconds
    if wanted is None:
        return longest_s
    if wanted <= 0:
        raise RequestError("the request timeout must be above 0", param="x-request-timeout-ms")
    return min(wanted, longest_s)


async def _our_error(request: HttpRequest, error: Exception) -> Response:
    """Errors of routes; one that is none of ours is logged by the middleware outside and told as internal."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, error)

    return _Later(answer)


async def _plain_error(request: HttpRequest, error: Exception) -> Response:
    """What the framework itself refuses: unknown paths and wrong methods."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        ours = RequestError(f"{request.method} is not allowed at {path}", code="method_not_allowed")
    else:
        ours = RequestError(f"there is nothing at {path}", code="unknown_url")
    headers = {key: value for key, value in (error.headers or {}).items() if key.lower() == "allow"}
    if error.status_code == 405 and not headers:
        headers = {"allow": _allowed(request)}

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send_error(send, ours, [(key.lower().encode(), value.encode()) for key, value in headers.items()])

    return _Later(answer)


def _allowed(request: HttpRequest) -> str:
    return "POST" if request.method == "GET" else "GET"


def _body_schema(path: str) -> dict[str, Any] | None:
    """What the generated description says of a body: the fields we know; all are checked by our own validators."""
    fields: dict[str, dict[str, Any]] | None = None
    required: list[str] = []
    if path == "/v1/chat/completions":
        fields, required = {name: {} for name in sorted(rq.CHAT_FIELDS)}, ["messages"]
        fields["messages"] = {"type": "array", "items": {"type": "object"}}
    elif path == "/v1/completions":
        fields, required = {name: {} for name in sorted(rq.COMPLETION_FIELDS)}, ["prompt"]
    elif path.endswith("/detokenize"):
        fields, required = {"model": {"type": "string"}, "tokens": {"type": "array"}}, ["tokens"]
    elif path.endswith("/tokenize"):
        fields = {name: {} for name in ("prompt", "messages", "tools", "return_token_strs")}
    if fields is None:
        return None
    fields.setdefault("model", {})["type"] = "string"
    schema = {"type": "object", "properties": fields, "required": required}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


_DOCS_PAGE = """<!doctype html><meta charset="utf-8"><title>headrace</title>
<style>body{font:16px sans-serif;max-width:60em;margin:2em auto}code{background:#eee;padding:.1em .3em}
details{margin:.4em 0}</style><h1>headrace</h1>
<p>Generated from <a href="openapi.json">openapi.json</a>.</p><div id="list">loading</div>
<script>
fetch("openapi.json").then(r=>r.json()).then(doc=>{
  const list=document.getElementById("list");list.textContent="";
  for(const [path,methods] of Object.entries(doc.paths))for(const [method,op] of Object.entries(methods)){
    const entry=document.createElement("details"),head=document.createElement("summary");
    const code=document.createElement("code");code.textContent=method.toUpperCase()+" "+path;
    head.append(code," "+(op.summary||""));entry.append(head);
    const schema=op.requestBody&&op.requestBody.content["application/json"].schema;
    const text=document.createElement("p");
    text.textContent=schema?"Fields: "+Object.keys(schema.properties).sort().join(", "):"No body.";
    entry.append(text);list.append(entry);
  }
});
</script>
"""
