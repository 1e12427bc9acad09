"""A request as spans: itself, in the words of OpenTelemetry's conventions for generative models, and its placements."""

from __future__ import annotations

from ..traces.spans import Context, Span, Traces
from .dispatch import Sequence
from .request import Request


def end_request(
    traces: Traces,
    context: Context,
    request: Request,
    sequences: list[Sequence],
    *,
    start_s: float,
    end_s: float,
    finish_reasons: list[str],
    tokens: tuple[int, int, int],
    error: BaseException | None,
) -> None:
    """Say all that is known at a request's end.

    Args:
        tokens: of the prompts, of the answers, and of the prompts what was cached.
    """
    operation = "chat" if request.chat is not None else "text_completion"
    prompt_tokens, output_tokens, cached_tokens = tokens
    stats = sequences[0].journey.stats
    events = () if stats.first_token_s is None else (("first_token", stats.first_token_s),)
    traces.end(
        Span(
            name=f"{operation} {request.model}",
            context=context,
            start_s=start_s,
            end_s=end_s,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.model": request.model,
                "gen_ai.request.max_tokens": request.sampling.max_tokens,
                "gen_ai.response.id": request.request_id,
                "gen_ai.response.finish_reasons": finish_reasons,
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": output_tokens,
                "headrace.cached_tokens": cached_tokens,
                "headrace.attempts": 1 + max(sequence.journey.attempt for sequence in sequences),
                "headrace.migrations": sum(sequence.journey.stats.num_migrations for sequence in sequences),
            },
            events=events,
            error=f"{type(error).__name__}: {error}" if error is not None else "",
        )
    )
    for sequence in sequences:
        placed_s, decision = sequence.journey.stats.placed_s, sequence.decision
        if placed_s is None or decision is None:
            continue
        traces.end(
            Span(
                name="route",
                context=traces.begin(context.traceparent),
                start_s=start_s,
                end_s=placed_s,
                attributes={
                    "headrace.reason": decision.reason.value,
                    "headrace.index": decision.state.value,
                    "headrace.workers": decision.plan.workers,
                    "headrace.hit_tokens": decision.hit_tokens,
                    "headrace.path": sequence.journey.stats.path,
                },
            )
        )
