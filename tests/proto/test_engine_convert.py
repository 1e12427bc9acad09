"""What crosses the session arrives as it was sent, and nothing unchecked gets through."""

import math

import grpc
import pytest

from headrace.core import errors
from headrace.core.sampling import FinishReason, SamplingParams, TokenLogprobs
from headrace.proto import engine_convert as convert
from headrace.proto.internal.v1 import engine_pb2 as pb


def make_params() -> SamplingParams:
    return SamplingParams(
        temperature=0.75,
        top_p=0.5,
        top_k=7,
        min_p=0.125,
        presence_penalty=-1.5,
        frequency_penalty=0.25,
        repetition_penalty=1.25,
        max_tokens=99,
        min_tokens=3,
        seed=-(1 << 63),
        stop_token_ids=(5, 6),
        eos_token_ids=(1,),
        ignore_eos=True,
        logit_bias={4: -100.0, 9: 2.5},
        allowed_token_ids=(4, 5, 9),
        logprobs=0,
        prompt_logprobs=3,
    )


def test_sampling_survives_the_wire():
    """Every field comes back, an unset and a zero logprobs stay apart."""
    params = make_params()
    wire = pb.Sampling.FromString(convert.sampling_to_message(params).SerializeToString())
    assert convert.sampling_from_message(wire) == params
    plain = convert.sampling_from_message(convert.sampling_to_message(SamplingParams()))
    assert plain == SamplingParams()
    assert plain.logprobs is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("min_p", math.inf),
        ("presence_penalty", 3.0),
        ("repetition_penalty", 0.0),
        ("max_tokens", 0),
    ],
)
def test_sampling_out_of_range_is_refused(field, value):
    """A worker never computes with a number that the router should have refused."""
    message = convert.sampling_to_message(SamplingParams())
    setattr(message, field, value)
    with pytest.raises(errors.RequestError):
        convert.sampling_from_message(message)


@pytest.mark.parametrize("reason", sorted(errors.BY_REASON))
def test_error_survives_the_wire(reason):
    """Class, reason and text of a worker's error are rebuilt at the router."""
    error = errors.BY_REASON[reason]("what happened")
    again = convert.error_from_message(convert.error_to_message(error))
    assert type(again) is type(error)
    assert again.reason == error.reason
    assert str(again) == "what happened"


def test_unexpected_exceptions_keep_their_text_at_home():
    """An exception may name paths and hosts, so the router hears a fixed text and blames the peer."""
    message = convert.error_to_message(ValueError("/secret/path"))
    assert "secret" not in message.message
    again = convert.error_from_message(message)
    assert again.remedy is errors.Remedy.ELSEWHERE


def test_every_error_that_can_leave_has_a_status():
    """The table is the only place that knows HTTP and gRPC numbers."""
    for kind in errors.BY_REASON.values():
        assert convert.status_of(kind("x")).http >= 400
    assert convert.status_of(errors.RequestError("x", code="unsupported_value")).http == 400
    assert convert.status_of(ValueError("x")).grpc is grpc.StatusCode.INTERNAL
    assert convert.error_code(errors.LayoutError("x")) == "internal_error"


def test_tokens_and_finish_reasons_survive_the_wire():
    """With and without log-probabilities."""
    scored = TokenLogprobs(-0.5, 2, ((3, -0.25), (7, -0.5)))
    assert convert.logprobs_from_message(convert.token_to_message(4, 7, scored)) == scored
    assert convert.logprobs_from_message(convert.token_to_message(4, 7, None)) is None
    for reason in (*FinishReason, None):
        assert convert.finish_from_message(pb.Finished(reason=convert.finish_to_message(reason))) is reason
    with pytest.raises(errors.RequestError):
        convert.finish_from_message(pb.Finished())
