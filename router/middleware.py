"""What every HTTP request passes before its route: id, drain, key, size, type, JSON. And the access log behind it.

Plain ASGI: a wrapper of responses would buffer streams and hide disconnects. Checks run in a fixed order, the first
failure answers, always in the error shape.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import orjson

from ..core.errors import Draining, HeadraceError, RequestError
from ..proto.engine_convert import status_of
from .openai_reply import error_body, error_headers

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

access_log = logging.getLogger("headrace.access")
log = logging.getLogger("headrace.router.http")

MAX_DEPTH = 128
BODY_TIMEOUT_S = 60.0

#: Where a JSON body is read.
JSON_ROUTES = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize"}
)
#: Open to everybody; all else asks for the key.
OPEN_ROUTES = frozenset(
    {"/live", "/ready", "/health", "/ping", "/metrics", "/version", "/load", "/openapi.json", "/docs"}
)

_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}\Z")


class ClientGone(Exception):
    """The connection was closed before the answer was complete."""


class Keys:
    """API keys, as digests; a comparison takes as long for a wrong key as for a right one."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    @property
    def is_open(self) -> bool:
        return not self._digests

    def admits(self, authorization: str, x_api_key: str) -> bool:
        """Whether one of the two headers carries a known key."""
        if self.is_open:
            return True
        scheme, _, token = authorization.partition(" ")
        candidate = token.strip() if scheme.lower() == "bearer" else x_api_key.strip()
        digest = hashlib.sha256(candidate.encode("utf-8", "surrogateescape")).digest()
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def header(scope: Scope, name: bytes) -> str:
    """The first header of this name, or an empty string."""
    for key, value in scope["headers"]:
        if key == name:
            text: str = value.decode("latin-1")
            return text
    return ""


def request_id_of(given: str) -> str:
    """The client's id if it is printable and short, else one of ours."""
    return given if _REQUEST_ID.match(given) else secrets.token_hex(12)


def check_depth(raw: bytes, value: object) -> None:
    """
    Raises:
        RequestError: JSON nested too deeply.
    """
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        following: list[Any] = []
        for item in level:
            inner = item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
            following.extend(child for child in inner if isinstance(child, (dict, list)))
        if not following:
            return
        level = following
    raise RequestError(f"the JSON is nested more than {MAX_DEPTH} levels deep", code="invalid_json")


async def send_error(send: Send, error: BaseException, extra: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """A whole error response."""
    body = orjson.dumps(error_body(error))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *error_headers(error),
        *extra,
    ]
    await send({"type": "http.response.start", "status": status_of(error).http, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class EdgeMiddleware:
    """Around the whole application."""

    def __init__(self, app: App, *, keys: Keys, max_body_bytes: int, is_draining: Callable[[], bool]) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._is_draining = is_draining

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.monotonic()
        request_id = request_id_of(header(scope, b"x-request-id"))
        scope["headrace.request_id"] = request_id
        scope["headrace.arrived_s"] = started_s
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            receive = await self._admit(scope, receive)
            await self._app(scope, receive, send_with_id)
            if scope.get("headrace.client_gone"):
                status = 499
        except ClientGone:
            status = 499
        except HeadraceError as error:
            extra = [(b"connection", b"close")] if isinstance(error, Draining) else []
            if status == 0:
                await send_error(send_with_id, error, extra)
        except Exception as error:
            log.exception("event=internal_error request_id=%s path=%s", request_id, scope["path"])
            if status == 0:
                await send_error(send_with_id, error)
        finally:
            # Probes and scrapes come every second or so, and say nothing while all is well.
            quiet = scope["path"] in OPEN_ROUTES and status in (200, 503)
            access_log.log(
                logging.DEBUG if quiet else logging.INFO,
                "event=access method=%s path=%s status=%d seconds=%.4f request_id=%s",
                scope["method"], scope["path"][:200], status, time.monotonic() - started_s, request_id,
            )  # fmt: skip

    async def _admit(self, scope: Scope, receive: Receive) -> Receive:
        """Check, and read the body where there is one to read.

        Raises:
            HeadraceError: the first check that failed.
        """
        path, method = scope["path"], scope["method"]
        has_json = method == "POST" and path in JSON_ROUTES
        if has_json and self._is_draining():
            raise Draining("the router is leaving")
        guarded = path not in OPEN_ROUTES and method != "OPTIONS"
        if guarded and not self._keys.admits(header(scope, b"authorization"), header(scope, b"x-api-key")):
            raise RequestError("no valid API key was given", code="invalid_api_key")
        if not has_json:
            return receive
        raw = await self._read(scope, receive)
        kind = header(scope, b"content-type").partition(";")[0].strip().lower()
        if kind not in ("", "application/json"):
            raise RequestError("the body must be application/json", code="unsupported_media_type")
        if header(scope, b"content-encoding").strip().lower() not in ("", "identity"):
            raise RequestError("compressed bodies are not accepted", code="unsupported_media_type")
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise RequestError(f"the body is no valid JSON: {error}", code="invalid_json") from error
        check_depth(raw, body)
        if not isinstance(body, dict):
            raise RequestError("the body must be a JSON object", code="invalid_type")
        scope["headrace.body"] = body
        return receive

    async def _read(self, scope: Scope, receive: Receive) -> bytes:
        limit = self._max_body_bytes
        too_large = RequestError(f"the body exceeds {limit} bytes", code="request_too_large")
        declared = header(scope, b"content-length")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGone
                    part = message.get("body", b"")
                    size += len(part)
                    if size > limit:
                        raise too_large
                    parts.append(part)
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError as error:
            raise RequestError("the body did not arrive in time", code="request_timeout") from error
