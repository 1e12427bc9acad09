"""The door: a Submit message becomes a checked `LegOrder`, or an error, before anything is allocated."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..core.blocks import BLOCK_TOKENS
from ..core.errors import PromptTooLong, RequestError
from ..core.ids import Incarnation, TransferId, WorkerId
from ..core.sampling import SamplingParams
from ..engine.api import LegKind
from ..proto.engine_convert import sampling_from_message, seeds_from_message
from ..proto.internal.v1 import engine_pb2 as pb
from .leg import Holder, LegOrder

TRANSFER_ID_BYTES = 16
MAX_NAME_CHARS = 512
MAX_TIMEOUT_S = 3600.0

_KINDS = {
    pb.LEG_KIND_GENERATE: LegKind.GENERATE,
    pb.LEG_KIND_PREFILL: LegKind.PREFILL,
    pb.LEG_KIND_LOCAL: LegKind.LOCAL,
    pb.LEG_KIND_SHARE: LegKind.SHARE,
    pb.LEG_KIND_FETCH: LegKind.FETCH,
}


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Bounds of this worker, and the check against them."""

    worker_id: WorkerId
    kinds: frozenset[LegKind]
    vocab_size: int
    max_model_len: int
    max_prompt_tokens: int
    """What the pools can hold of one request at all."""

    def order(self, submit: pb.Submit) -> LegOrder:
        """The checked order.

        Raises:
            RequestError: a field is out of bounds; `param` names it.
            PromptTooLong: the prompt, or prompt plus wanted output, fits neither the model nor the pools.
        """
        kind = _KINDS.get(submit.kind)
        if kind is None or kind not in self.kinds:
            raise RequestError(f"this worker takes no legs of kind {submit.kind}", param="kind")
        for name in ("request_id", "cache_salt", "traceparent"):
            if len(getattr(submit, name)) > MAX_NAME_CHARS:
                raise RequestError(f"{name} is longer than {MAX_NAME_CHARS} characters", param=name)
        if not math.isfinite(submit.timeout_s) or submit.timeout_s < 0.0:
            raise RequestError("timeout_s must be a finite number from 0", param="timeout_s")
        prompt = tuple(submit.prompt)
        sampling = sampling_from_message(submit.sampling)
        self._check_tokens(prompt, submit.num_output_tokens, sampling)
        needs_transfer = kind is not LegKind.LOCAL
        if kind in (LegKind.SHARE, LegKind.FETCH) and len(prompt) % BLOCK_TOKENS:
            raise RequestError("a shared prefix ends at a border between blocks", param="prompt")
        if needs_transfer and len(submit.transfer_id) != TRANSFER_ID_BYTES:
            raise RequestError(f"transfer_id has {len(submit.transfer_id)} bytes, not 16", param="transfer_id")
        return LegOrder(
            kind=kind,
            request_id=submit.request_id,
            attempt=submit.attempt,
            prompt=prompt,
            num_output_tokens=submit.num_output_tokens,
            sampling=sampling,
            namespace=submit.cache_salt,
            priority=submit.priority,
            timeout_s=min(submit.timeout_s or MAX_TIMEOUT_S, MAX_TIMEOUT_S),
            transfer_id=TransferId(submit.transfer_id) if needs_transfer else None,
            holder=self._holder(submit.holder) if kind.lands else None,
            seeds=seeds_from_message(submit),
            traceparent=submit.traceparent,
        )

    def _check_tokens(self, prompt: tuple[int, ...], num_output_tokens: int, sampling: SamplingParams) -> None:
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt")
        if len(prompt) > self.max_prompt_tokens:
            raise PromptTooLong(f"{len(prompt)} prompt tokens; the pools hold {self.max_prompt_tokens}", param="prompt")
        if num_output_tokens >= len(prompt):
            raise RequestError("num_output_tokens leaves no prompt", param="num_output_tokens")
        # max_tokens counts from here: what was generated earlier is part of the prompt.
        total = len(prompt) + sampling.max_tokens
        if total > self.max_model_len:
            raise PromptTooLong(f"{total} tokens of prompt and output; the model takes {self.max_model_len}")
        for name, ids in (
            ("prompt", prompt),
            ("stop_token_ids", sampling.stop_token_ids),
            ("eos_token_ids", sampling.eos_token_ids),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("logit_bias", tuple(sampling.logit_bias)),
        ):
            if ids and max(ids) >= self.vocab_size:
                raise RequestError(f"{name} has a token id beyond the vocabulary of {self.vocab_size}", param=name)
        for name, count in (("logprobs", sampling.logprobs), ("prompt_logprobs", sampling.prompt_logprobs)):
            if count is not None and count > self.vocab_size:
                raise RequestError(f"{name} asks for more tokens than there are", param=name)

    def _holder(self, endpoint: pb.Endpoint) -> Holder:
        """The holder of a GENERATE or FETCH leg; never this worker itself, whose legs are LOCAL then."""
        if not endpoint.worker_id or len(endpoint.worker_id) > MAX_NAME_CHARS or endpoint.incarnation == 0:
            raise RequestError("holder names no worker", param="holder")
        if endpoint.worker_id == self.worker_id:
            raise RequestError("holder names this very worker", param="holder")
        host, colon, port = endpoint.peer_address.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 65536) or len(host) > MAX_NAME_CHARS:
            raise RequestError("holder has no peer address host:port", param="holder")
        return Holder(
            worker_id=WorkerId(endpoint.worker_id),
            incarnation=Incarnation(endpoint.incarnation),
            address=endpoint.peer_address,
        )
