"""Between the messages of the `Engine` session and core types, and the one table of error statuses.

Both ends use it: the router packs requests and reads items, the worker the other way round. Everything that arrives is
checked here, so that neither end computes with a NaN or an index out of bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import grpc

from ..core.errors import BY_REASON, HeadraceError, PeerError, RequestError
from ..core.sampling import MAX_CHOICES, FinishReason, SamplingParams, TokenLogprobs
from .internal.v1 import engine_pb2 as pb

PROTOCOL = 3
"""Version of the session protocol; both ends must say the same."""

MAX_MESSAGE_TEXT = 1000
"""Characters of an error's text that cross the wire."""


@dataclass(frozen=True)
class WireStatus:
    """How one error reason looks to clients."""

    http: int
    grpc: grpc.StatusCode
    type: str
    """`type` of the OpenAI error body."""
    info: str
    """`ErrorInfo.reason` of the gRPC details."""
    retry_after_s: float | None = None


_BAD = "invalid_request_error"

STATUS: dict[str, WireStatus] = {
    "invalid_type": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "INVALID_VALUE"),
    "invalid_value": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "INVALID_VALUE"),
    "missing_required_parameter": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "MISSING_FIELD"),
    "unsupported_parameter": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "UNSUPPORTED"),
    "unsupported_value": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "UNSUPPORTED"),
    "context_length_exceeded": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "CONTEXT_LENGTH_EXCEEDED"),
    "invalid_json_schema": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "INVALID_JSON_SCHEMA"),
    "invalid_json": WireStatus(400, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "INVALID_VALUE"),
    "invalid_api_key": WireStatus(401, grpc.StatusCode.UNAUTHENTICATED, _BAD, "INVALID_API_KEY"),
    "forbidden": WireStatus(403, grpc.StatusCode.PERMISSION_DENIED, "permission_error", "FORBIDDEN"),
    "model_not_found": WireStatus(404, grpc.StatusCode.NOT_FOUND, _BAD, "MODEL_NOT_FOUND"),
    "unknown_url": WireStatus(404, grpc.StatusCode.UNIMPLEMENTED, _BAD, "UNKNOWN_URL"),
    "method_not_allowed": WireStatus(405, grpc.StatusCode.UNIMPLEMENTED, _BAD, "METHOD_NOT_ALLOWED"),
    "request_timeout": WireStatus(408, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", "REQUEST_TIMEOUT"),
    "request_too_large": WireStatus(413, grpc.StatusCode.RESOURCE_EXHAUSTED, _BAD, "REQUEST_TOO_LARGE"),
    "unsupported_media_type": WireStatus(415, grpc.StatusCode.INVALID_ARGUMENT, _BAD, "UNSUPPORTED"),
    "rate_limit_exceeded": WireStatus(
        429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "RATE_LIMIT_EXCEEDED", 1.0
    ),
    "queue_full": WireStatus(429, grpc.StatusCode.RESOURCE_EXHAUSTED, "rate_limit_error", "QUEUE_FULL", 1.0),
    # 499 never reaches a client: it is what the access log says of one that left.
    "cancelled": WireStatus(499, grpc.StatusCode.CANCELLED, _BAD, "CANCELLED"),
    "internal_error": WireStatus(500, grpc.StatusCode.INTERNAL, "server_error", "INTERNAL"),
    "worker_failed": WireStatus(502, grpc.StatusCode.UNAVAILABLE, "server_error", "WORKER_FAILED"),
    "transfer_failed": WireStatus(502, grpc.StatusCode.DATA_LOSS, "server_error", "TRANSFER_FAILED"),
    "no_workers": WireStatus(503, grpc.StatusCode.UNAVAILABLE, "service_unavailable", "NO_WORKERS", 5.0),
    "draining": WireStatus(503, grpc.StatusCode.UNAVAILABLE, "service_unavailable", "DRAINING", 1.0),
    "deadline_exceeded": WireStatus(504, grpc.StatusCode.DEADLINE_EXCEEDED, "timeout_error", "DEADLINE_EXCEEDED"),
}


def error_code(error: BaseException) -> str:
    """The reason under which an error leaves; what is none of ours, or has no status of its own, is internal."""
    code = error.code if isinstance(error, RequestError) else getattr(error, "reason", "internal_error")
    return code if isinstance(error, HeadraceError) and code in STATUS else "internal_error"


def status_of(error: BaseException) -> WireStatus:
    """HTTP and gRPC status of an error."""
    return STATUS[error_code(error)]


class WorkerInternalError(PeerError):
    """A worker reported a fault of its own, or a reason that this release does not know."""


def error_to_message(error: BaseException) -> pb.Failed:
    """How a worker tells the router; the text of an unexpected exception stays in the worker's log."""
    if isinstance(error, HeadraceError):
        return pb.Failed(reason=error.reason, message=str(error)[:MAX_MESSAGE_TEXT])
    return pb.Failed(reason="internal_error", message="internal error in the worker")


def error_from_message(message: pb.Failed) -> HeadraceError:
    """The error that a worker reported, rebuilt by its reason."""
    kind = BY_REASON.get(message.reason, WorkerInternalError)
    return kind(message.message[:MAX_MESSAGE_TEXT] or message.reason)


def sampling_to_message(params: SamplingParams) -> pb.Sampling:
    """Every field is set: on the wire there is no default."""
    message = pb.Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        seed=params.seed,
        stop_token_ids=params.stop_token_ids,
        eos_token_ids=params.eos_token_ids,
        ignore_eos=params.ignore_eos,
        allowed_token_ids=params.allowed_token_ids,
    )
    for token, bias in params.logit_bias.items():
        message.logit_bias[token] = bias
    if params.logprobs is not None:
        message.logprobs = params.logprobs
    if params.prompt_logprobs is not None:
        message.prompt_logprobs = params.prompt_logprobs
    return message


def sampling_from_message(message: pb.Sampling) -> SamplingParams:
    """Rebuild and check.

    Raises:
        RequestError: a number is not finite or out of its range; `param` names the field.
    """
    checks = (
        ("temperature", message.temperature, 0.0, math.inf),
        ("top_p", message.top_p, 0.0, 1.0),
        ("min_p", message.min_p, 0.0, 1.0),
        ("presence_penalty", message.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", message.frequency_penalty, -2.0, 2.0),
        ("repetition_penalty", message.repetition_penalty, 0.0, math.inf),
    )
    for name, value, low, high in checks:
        if not math.isfinite(value) or not low <= value <= high:
            raise RequestError(f"{name} is {value}, expected {low} to {high}", param=name)
    if message.top_p == 0.0 or message.repetition_penalty == 0.0:
        raise RequestError("top_p and repetition_penalty must be above 0", param="top_p")
    if message.max_tokens == 0:
        raise RequestError("max_tokens must be at least 1", param="max_tokens")
    bias = dict(message.logit_bias)
    if not all(math.isfinite(value) for value in bias.values()):
        raise RequestError("logit_bias holds a value that is not finite", param="logit_bias")
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=max(message.top_k, 0),
        min_p=message.min_p,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        seed=message.seed,
        stop_token_ids=tuple(message.stop_token_ids),
        eos_token_ids=tuple(message.eos_token_ids),
        ignore_eos=message.ignore_eos,
        logit_bias=bias,
        allowed_token_ids=tuple(message.allowed_token_ids),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        prompt_logprobs=message.prompt_logprobs if message.HasField("prompt_logprobs") else None,
    )


def seeds_from_message(message: pb.Submit) -> tuple[int, ...]:
    """The seeds of several choices.

    Raises:
        RequestError: too many.
    """
    if len(message.seeds) > MAX_CHOICES:
        raise RequestError(f"{len(message.seeds)} choices, at most {MAX_CHOICES}", param="seeds")
    return tuple(message.seeds)


def token_to_message(index: int, token: int, logprobs: TokenLogprobs | None, choice: int = 0) -> pb.Token:
    """One output token (index = output index) or one scored prompt token (index = prompt position)."""
    message = pb.Token(index=index, id=token, choice=choice)
    if logprobs is not None:
        message.logprob = logprobs.logprob
        message.rank = logprobs.rank
        for other, value in logprobs.top:
            message.top_ids.append(other)
            message.top_logprobs.append(value)
    return message


def logprobs_from_message(message: pb.Token) -> TokenLogprobs | None:
    """The log-probabilities that ride on a token, if any."""
    if not message.HasField("logprob"):
        return None
    return TokenLogprobs(message.logprob, message.rank, tuple(zip(message.top_ids, message.top_logprobs, strict=True)))


_REASON_TO_MESSAGE = {
    FinishReason.STOP: pb.Finished.REASON_STOP,
    FinishReason.LENGTH: pb.Finished.REASON_LENGTH,
}


def finish_to_message(reason: FinishReason | None) -> pb.Finished.Reason:
    """None: a PREFILL leg's pages were taken; or the router ended one of several choices."""
    return pb.Finished.REASON_NONE if reason is None else _REASON_TO_MESSAGE[reason]


def finish_from_message(message: pb.Finished | pb.ChoiceFinished) -> FinishReason | None:
    """None: a PREFILL leg's pages were taken; or the router ended one of several choices.

    Raises:
        RequestError: the reason is none that this release knows.
    """
    for reason, number in _REASON_TO_MESSAGE.items():
        if message.reason == number:
            return reason
    if message.reason == pb.Finished.REASON_NONE:
        return None
    raise RequestError(f"unknown finish reason {message.reason}")
