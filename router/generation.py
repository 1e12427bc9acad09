"""One accepted request: a sequence for each prompt, what their choices say, and their end. HTTP and gRPC are two
readers of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType

from ..core.clock import Clock
from ..core.errors import HeadraceError
from ..core.sampling import TokenLogprobs
from ..traces.spans import OFF, Traces
from .answer import ChoiceAnswer, Delta
from .block_chains import BlockChains, hash_prompt, is_short
from .dispatch import Dispatcher, Inbox, Output, Sequence
from .journey import End, JourneyStats, OutToken
from .request import Bounds, Draft, Request, settle
from .served_model import ServedModel
from .tokenizer import TokenizerPool
from .traces import end_request


@dataclass
class Usage:
    """Sums over prompts and choices; a prompt counts once whatever n."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass
class Update:
    """News of one choice."""

    choice: int
    delta: Delta = field(default_factory=Delta)
    finished: bool = False
    """The choice is complete; its answer says how."""


@dataclass(frozen=True)
class Edge:
    """What every surface works with."""

    model: ServedModel
    pool: TokenizerPool
    dispatcher: Dispatcher
    clock: Clock
    default_max_tokens: int
    strict_fields: bool
    request_timeout_s: float
    max_model_len: int
    """From settings; 0: what checkpoint and workers allow."""
    traces: Traces = OFF

    def bounds(self) -> Bounds:
        """What requests are checked against right now."""
        placement = self.dispatcher.placement
        limits = [self.max_model_len, self.model.max_position, placement.max_model_len]
        return Bounds(
            max_model_len=min((limit for limit in limits if limit), default=1 << 20),
            max_prompt_tokens=placement.max_prompt_tokens,
            default_max_tokens=self.default_max_tokens,
            strict_fields=self.strict_fields,
            timeout_s=self.request_timeout_s,
        )

    async def open(self, draft: Draft, arrived_s: float) -> Generation:
        """Tokenise, check lengths and capacity, and send the sequences on their way.

        Raises:
            HeadraceError: refused; nothing was allocated.
        """
        request = await settle(draft, self.model, self.bounds(), self.pool)
        self.dispatcher.check_capacity(len(request.prompts))
        chains = await self._hash(request)
        return Generation(request, self, arrived_s, chains)

    async def _hash(self, request: Request) -> list[BlockChains]:
        """The block chains of each prompt, once; off the event loop unless they are short."""
        fingerprints = self.dispatcher.placement.fingerprints

        def work() -> list[BlockChains]:
            return [hash_prompt(prompt.ids, fingerprints, request.cache_salt) for prompt in request.prompts]

        num_tokens = sum(len(prompt.ids) for prompt in request.prompts)
        return work() if is_short(num_tokens, len(fingerprints)) else await self.pool.run(work)


class Generation:
    """A request in flight. Leaving its context cancels what still runs."""

    def __init__(self, request: Request, edge: Edge, arrived_s: float, chains: list[BlockChains]) -> None:
        """
        Args:
            chains: of each prompt.
        """
        self.request = request
        self.answers = [ChoiceAnswer(request, edge.model, choice) for choice in range(request.num_choices)]
        self.prompt_logprobs: list[dict[int, tuple[int, TokenLogprobs]]] = [{} for _ in request.prompts]
        """By prompt: position to (token, log-probabilities)."""
        self._edge = edge
        self._arrived_s = arrived_s
        self._context = edge.traces.begin(request.traceparent)
        # Without traces of our own the client's context reaches the workers as it came.
        traceparent = self._context.traceparent if edge.traces.is_on else request.traceparent
        self._inbox = Inbox()
        self._open = set(range(request.num_choices))
        deadline_s = arrived_s + min(request.timeout_s, edge.request_timeout_s)
        self.sequences: list[Sequence] = [
            edge.dispatcher.submit(
                index=number * request.n,
                inbox=self._inbox,
                prompt=prompt.ids,
                sampling=request.sampling,
                seeds=request.seeds,
                deadline_s=deadline_s,
                arrived_s=arrived_s,
                request_id=request.request_id,
                cache_salt=request.cache_salt,
                chains=chains[number],
                priority=request.priority,
                traceparent=traceparent,
            )
            for number, prompt in enumerate(request.prompts)
        ]
        """By prompt."""
        edge.dispatcher.metrics.prompt_tokens.inc(sum(len(prompt.ids) for prompt in request.prompts))

    def __enter__(self) -> Generation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for sequence in self.sequences:
            self._edge.dispatcher.cancel(sequence)
        if not self._context.sampled:
            return
        usage = self.usage()
        end_request(
            self._edge.traces,
            self._context,
            self.request,
            self.sequences,
            start_s=self._arrived_s,
            end_s=self._edge.clock.now_s(),
            finish_reasons=[answer.finish.reason for answer in self.answers if answer.finish is not None],
            tokens=(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
            error=error,
        )

    def cancel(self, error: HeadraceError) -> None:
        """End what still runs; readers get `error`."""
        for sequence in self.sequences:
            self._edge.dispatcher.cancel(sequence, error)

    @property
    def stats(self) -> JourneyStats:
        """Of the first sequence, for timings."""
        return self.sequences[0].journey.stats

    def usage(self) -> Usage:
        """So far."""
        request = self.request
        return Usage(
            prompt_tokens=sum(len(prompt.ids) for prompt in request.prompts),
            completion_tokens=sum(answer.num_tokens for answer in self.answers),
            cached_tokens=sum(sequence.journey.stats.cached_tokens for sequence in self.sequences),
            reasoning_tokens=sum(answer.reasoning_tokens for answer in self.answers),
        )

    async def updates(self, idle_s: float) -> AsyncIterator[list[Update]]:
        """What is new, step by step, until every choice is complete; an empty list after `idle_s` of silence.

        Raises:
            HeadraceError: a sequence ended badly; the whole request has.
        """
        while self._open:
            updates: list[Update] = []
            for output in await self._inbox.take(idle_s):
                self._take_scores(output)
                if output.index not in self._open:
                    continue
                for tokens in self._split(output.tokens):
                    self._feed(updates, output.index, tokens)
                if output.end is not None:
                    self._end(updates, output.index, output.end)
            yield [u for u in updates if u.delta.tokens or u.delta.pieces or u.finished]

    def _take_scores(self, output: Output) -> None:
        into = self.prompt_logprobs[output.index // self.request.n]
        for token in output.scored:
            if token.logprobs is not None:
                into[token.index] = (token.id, token.logprobs)

    def _split(self, tokens: tuple[OutToken, ...]) -> list[tuple[OutToken, ...]]:
        size = self.request.max_chunk_tokens or max(len(tokens), 1)
        return [tokens[start : start + size] for start in range(0, len(tokens), size)]

    def _update_of(self, updates: list[Update], choice: int) -> Update:
        """The update to add to: the choice's last one of this step, unless chunks must stay small."""
        if not self.request.max_chunk_tokens:
            for update in updates:
                if update.choice == choice:
                    return update
        updates.append(Update(choice))
        return updates[-1]

    def _feed(self, updates: list[Update], choice: int, tokens: tuple[OutToken, ...]) -> None:
        answer = self.answers[choice]
        if answer.finish is not None:
            return
        update = self._update_of(updates, choice)
        self._join(update.delta, answer.feed(tokens))
        if answer.finish is not None:
            update.finished = True
            self._open.discard(choice)
            prompt, number = divmod(choice, self.request.n)
            self._edge.dispatcher.enough(self.sequences[prompt], number)

    def _end(self, updates: list[Update], choice: int, end: End) -> None:
        answer = self.answers[choice]
        if answer.finish is not None:
            return
        if end.reason is None:
            raise end.error or HeadraceError("a sequence ended without an outcome")
        update = self._update_of(updates, choice)
        self._join(update.delta, answer.end(end))
        update.finished = True
        self._open.discard(choice)

    @staticmethod
    def _join(into: Delta, more: Delta) -> None:
        for piece in more.pieces:
            into.add(piece)
        into.tokens.extend(more.tokens)
