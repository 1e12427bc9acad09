"""The engine: one thread that owns model, pools and books; commands in, events out, a step at a time.

A sequence is a list of tokens of which the first `computed` are in the pages. A step computes some of the rest and,
where a sequence has caught up with its last token, samples the next one: prompt chunks and decoding are the same thing.
Decoding sequences go first, prompts fill the token budget in order of arrival. The loop never waits for anything but
commands.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from ..config.tree import EngineSection
from ..core.blocks import BLOCK_TOKENS, BlockHash, block_hashes, child_hash, root_hash
from ..core.clock import Clock
from ..core.errors import Cancelled, NoFreePages, PromptTooLong, QueueFull
from ..core.sampling import FinishReason
from ..kvcache.allocator import CacheManager, Hit
from ..kvcache.check_points import SPACING, next_border, prompt_borders
from ..kvcache.sequence import SequencePages
from ..kvcache.snapshots import CheckPointCopier
from ..model.batch import LayerViews
from ..model.transformer import Transformer
from .api import (
    AbortSequence,
    Admit,
    CacheChanged,
    ChunkDone,
    Command,
    EngineLoad,
    EngineRequest,
    Event,
    EventSink,
    LegKind,
    PromptScored,
    Refused,
    Release,
    Reserved,
    SequenceFailed,
    SequenceFinished,
    Start,
    Started,
    Submit,
    TokenSampled,
)
from .plan import Slice, plan_batch
from .sampler import BrokenLogits, History, raw_logprobs, sample


class Phase(Enum):
    """Where a sequence stands."""

    QUEUED = "queued"
    """No credits yet."""
    READY = "ready"
    """PREFILL: credits taken, `Start` not heard."""
    LANDING = "landing"
    """GENERATE: another worker's bytes are being scattered into its pages."""
    RUNNING = "running"
    HELD = "held"
    """Over, but a gather or a scatter may still touch its pages; `Release` ends it."""


@dataclass
class _Sequence:
    request: EngineRequest
    tokens: list[int]
    history: History
    root: BlockHash | None
    """Parent of the first block; None: no prefix cache."""
    hashes: list[BlockHash]
    """Of the full blocks of `tokens`, as far as they were wanted."""
    hit: Hit = field(default_factory=Hit)
    borders: tuple[int, ...] = ()
    """Of the prompt, where a check-point is kept."""
    output_border: BlockHash | None = None
    """The block at whose end the last check-point of the output was kept."""
    phase: Phase = Phase.QUEUED
    start_heard: bool = False
    """PREFILL: `Start` may come before the credits."""
    computed: int = 0
    started: bool = False
    started_s: float = 0.0
    prefill_s: float = 0.0
    """From the first chunk's scheduling to the first token."""
    pages: SequencePages = field(default_factory=SequencePages)

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt)

    @property
    def index(self) -> int:
        """Output index of the next token to be sampled."""
        return len(self.tokens) - self.num_prompt + self.request.num_output_tokens

    @property
    def decoding(self) -> bool:
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > self.num_prompt


class Engine:
    """Owns one model copy and its cache. `post` from any thread; events leave through `sink`, in order."""

    def __init__(
        self,
        model: Transformer,
        views: Sequence[LayerViews],
        manager: CacheManager,
        copier: CheckPointCopier,
        section: EngineSection,
        clock: Clock,
        sink: EventSink,
        on_fatal: Callable[[BaseException], None],
        max_model_len: int,
        fingerprint: bytes | None,
    ) -> None:
        """
        Args:
            fingerprint: root of all block hashes; None: nothing is cached beyond its sequence.
            on_fatal: told of a broken invariant in the engine thread, which then ends; the worker must die of it.
            max_model_len: longest prompt plus output.
        """
        self._model, self._views, self._section = model, views, section
        self._manager, self._copier, self._fingerprint = manager, copier, fingerprint
        self._clock, self._sink, self._on_fatal, self._max_model_len = clock, sink, on_fatal, max_model_len
        self._sequences: dict[int, _Sequence] = {}
        self._queue: deque[int] = deque()
        self._inbox: deque[Command] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._events: list[Event] = []
        self._steps = 0
        self._progress_s = clock.now_s()
        self._load = self._measure()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # ---- any thread ----

    def post(self, command: Command) -> None:
        """Apply `command` before the next step."""
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread after the running step."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def load(self) -> EngineLoad:
        """The last snapshot."""
        return self._load

    # ---- engine thread ----

    def _run(self) -> None:
        try:
            while True:
                with self._wake:
                    self._wake.wait_for(lambda: self._inbox or self._stopping or self._runnable(), timeout=1.0)
                    if self._stopping:
                        return
                self.turn()
        except BaseException as error:
            self._on_fatal(error)
            raise

    def turn(self) -> None:
        """Apply what was posted, then compute one step if there is work. The thread's body; tests call it directly."""
        while self._inbox:
            self._apply(self._inbox.popleft())
        self._admit_queued()
        slices, sequences = self._schedule()
        if slices:
            # Said before the step, not after: cached blocks are shipped while the first chunk is computed.
            self._say()
            self._step(slices, sequences)
        changes = self._manager.drain_events()
        if changes:
            self._events.append(CacheChanged(changes))
        self._load = self._measure()
        self._say()

    def _say(self) -> None:
        if self._events:
            events, self._events = self._events, []
            self._sink(events)

    def _runnable(self) -> bool:
        return any(s.phase is Phase.RUNNING for s in self._sequences.values())

    # ---- commands ----

    def _apply(self, command: Command) -> None:
        match command:
            case Submit(request):
                self._submit(request)
            case Start(key):
                sequence = self._sequences.get(key)
                if sequence is not None:
                    sequence.start_heard = True
                    if sequence.phase is Phase.READY:
                        sequence.phase = Phase.RUNNING
            case Admit(key, first_token, _):
                sequence = self._sequences.get(key)
                if sequence is not None and sequence.phase is Phase.LANDING:
                    self._manager.admit(key)
                    sequence.computed = sequence.num_prompt
                    self._publish(key, sequence)
                    sequence.tokens.append(first_token)
                    sequence.history.add(first_token)
                    sequence.phase = Phase.RUNNING
                    self._end_if_over(key, sequence, first_token)
            case Release(key):
                sequence = self._sequences.get(key)
                if sequence is not None and sequence.phase in (Phase.HELD, Phase.LANDING):
                    self._drop(key)
            case AbortSequence(key):
                self._abort(key)

    def _submit(self, request: EngineRequest) -> None:
        assert request.key not in self._sequences, "keys are never reused"
        total = len(request.prompt) + request.sampling.max_tokens
        chunk = self._section.max_num_batched_tokens
        if total > self._max_model_len or not self._manager.can_ever_fit(
            len(request.prompt), request.sampling.max_tokens, min(chunk, len(request.prompt))
        ):
            longest = min(self._max_model_len, self._manager.max_tokens())
            error = PromptTooLong(f"{total} tokens wanted, at most {longest} fit this worker")
            self._events.append(Refused(request.key, error))
        elif len(self._queue) >= self._section.max_queue:
            self._events.append(Refused(request.key, QueueFull(f"{len(self._queue)} requests wait already")))
        else:
            history = History.of(request.prompt, request.num_output_tokens)
            root = None if self._fingerprint is None else root_hash(self._fingerprint, request.namespace)
            hashes = [] if root is None else block_hashes(root, request.prompt)
            self._sequences[request.key] = _Sequence(request, list(request.prompt), history, root, hashes)
            self._queue.append(request.key)

    def _admit_queued(self) -> None:
        """Take credits in order of arrival; the first that does not fit keeps its place."""
        while self._queue:
            key = self._queue[0]
            sequence = self._sequences[key]
            request = sequence.request
            reserve = 1 if request.kind is LegKind.PREFILL else min(request.sampling.max_tokens, self._reserve_tokens)
            # Scores of a prompt need every position of it computed, so it reads nothing that is here.
            hashes = [] if request.sampling.prompt_logprobs is not None else sequence.hashes
            try:
                if request.kind is LegKind.GENERATE:
                    pages, num_held = self._manager.reserve_landing(
                        key, sequence.num_prompt, reserve_tokens=reserve, root=sequence.root, hashes=sequence.hashes
                    )
                else:
                    hit = self._manager.reserve(
                        key,
                        sequence.num_prompt,
                        reserve_tokens=reserve,
                        chunk_tokens=min(self._section.max_num_batched_tokens, sequence.num_prompt),
                        root=sequence.root,
                        hashes=hashes,
                    )
                    pages, num_held = self._manager.pages(key), hit.num_blocks
                    self._begin_at(sequence, hit, pages)
            except NoFreePages:
                return
            self._queue.popleft()
            sequence.pages = pages
            sequence.phase = {
                LegKind.PREFILL: Phase.RUNNING if sequence.start_heard else Phase.READY,
                LegKind.GENERATE: Phase.LANDING,
                LegKind.LOCAL: Phase.RUNNING,
            }[request.kind]
            self._events.append(Reserved(key, num_held * BLOCK_TOKENS, pages))

    def _begin_at(self, sequence: _Sequence, hit: Hit, pages: SequencePages) -> None:
        """Put what goes before the first position that is computed in its place."""
        sequence.hit, sequence.computed = hit, hit.start
        if sequence.root is not None:
            sequence.borders = prompt_borders(sequence.num_prompt, hit)
        if hit.blank_window:
            self._copier.blank(pages.state_row, hit.blank_window)
        elif hit.start:
            self._copier.restore(hit.snapshot_row, pages.state_row, hit.start)

    @property
    def _reserve_tokens(self) -> int:
        return self._section.output_reserve_tokens

    def _abort(self, key: int) -> None:
        sequence = self._sequences.get(key)
        if sequence is None or sequence.phase is Phase.HELD:
            return
        self._events.append(SequenceFailed(key, Cancelled("aborted")))
        self._give_up(key, sequence)

    def _give_up(self, key: int, sequence: _Sequence) -> None:
        """Pages go back, unless a gather or a scatter may still touch them."""
        if sequence.phase is Phase.QUEUED:
            self._queue.remove(key)
            del self._sequences[key]
        elif sequence.phase is Phase.LANDING or (sequence.request.kind is LegKind.PREFILL and sequence.started):
            sequence.phase = Phase.HELD
        else:
            self._drop(key)

    def _drop(self, key: int) -> None:
        del self._sequences[key]
        self._manager.release(key)

    # ---- steps ----

    def _schedule(self) -> tuple[list[Slice], list[tuple[int, _Sequence]]]:
        """Which tokens this step computes. Takes pages; a sequence that finds none ends with an error."""
        budget = self._section.max_num_batched_tokens
        running = [(k, s) for k, s in self._sequences.items() if s.phase is Phase.RUNNING]
        running.sort(key=lambda item: (not item[1].decoding, item[1].request.priority))
        slices: list[Slice] = []
        chosen: list[tuple[int, _Sequence]] = []
        for key, sequence in running:
            if budget <= 0 or len(chosen) == self._section.max_num_seqs:
                break
            end = min(len(sequence.tokens), sequence.computed + budget)
            if end < len(sequence.tokens) and end // BLOCK_TOKENS * BLOCK_TOKENS > sequence.computed:
                end = end // BLOCK_TOKENS * BLOCK_TOKENS  # whole blocks can be published and shipped at once
            border = None if sequence.decoding else self._next_border(sequence)
            if border is not None:
                end = min(end, border)
            try:
                sequence.pages = self._manager.extend(key, end)
            except NoFreePages as error:
                self._events.append(SequenceFailed(key, error))
                self._give_up(key, sequence)
                continue
            if not sequence.started and sequence.request.kind is not LegKind.GENERATE:
                self._events.append(Started(key, sequence.hit.start))
                sequence.started_s = self._clock.now_s()
            sequence.started = True
            tokens = sequence.tokens[sequence.computed : end]
            wanted: Sequence[int] = [end - 1] if end == len(sequence.tokens) else []
            if sequence.request.sampling.prompt_logprobs is not None and sequence.computed < sequence.num_prompt:
                wanted = range(sequence.computed, end)
            frozen_below = sequence.hit.num_blocks * BLOCK_TOKENS
            slices.append(Slice(tokens, sequence.computed, sequence.pages, wanted, frozen_below))
            chosen.append((key, sequence))
            budget -= len(tokens)
        return slices, chosen

    def _step(self, slices: list[Slice], sequences: list[tuple[int, _Sequence]]) -> None:
        logits = self._model.forward(plan_batch(slices), self._views)
        row = 0
        for piece, (key, sequence) in zip(slices, sequences, strict=True):
            rows = logits[row : row + len(piece.logit_positions)]
            row += len(piece.logit_positions)
            sequence.computed = piece.start + len(piece.tokens)
            try:
                sampled = self._read_logits(key, sequence, piece, rows)
            except BrokenLogits as error:
                self._events.append(SequenceFailed(key, error))
                self._give_up(key, sequence)
                continue
            self._publish(key, sequence)
            if sequence.request.kind is not LegKind.GENERATE and piece.start < sequence.num_prompt:
                self._events.append(ChunkDone(key, sequence.computed, sequence.pages))
            self._manager.trim_window(key, sequence.computed)
            if sampled is not None:
                self._accept(key, sequence, sampled)
        self._steps += 1
        self._progress_s = self._clock.now_s()

    def _read_logits(self, key: int, sequence: _Sequence, piece: Slice, rows: Tensor) -> TokenSampled | None:
        """Scores of the prompt, and the next token if the sequence has caught up with its last one."""
        params = sequence.request.sampling
        if params.prompt_logprobs is not None and piece.start < sequence.num_prompt:
            scored = [p for p in piece.logit_positions if p + 1 < sequence.num_prompt]
            if scored:
                tokens = tuple(sequence.tokens[p + 1] for p in scored)
                values = tuple(
                    raw_logprobs(rows[p - piece.start], t, params.prompt_logprobs)
                    for p, t in zip(scored, tokens, strict=True)
                )
                self._events.append(PromptScored(key, scored[0] + 1, tokens, values))
        if sequence.computed < len(sequence.tokens):
            return None
        relative = sequence.index - sequence.request.num_output_tokens
        token, logprobs = sample(rows[-1], params, sequence.history, sequence.index, relative)
        return TokenSampled(key, sequence.index, token, logprobs)

    def _accept(self, key: int, sequence: _Sequence, sampled: TokenSampled) -> None:
        if len(sequence.tokens) == sequence.num_prompt:
            sequence.prefill_s = self._clock.now_s() - sequence.started_s
        self._events.append(sampled)
        sequence.tokens.append(sampled.token)
        sequence.history.add(sampled.token)
        self._end_if_over(key, sequence, sampled.token)

    # ---- the prefix cache ----

    def _next_border(self, sequence: _Sequence) -> int | None:
        if sequence.root is None:
            return None
        spaced = self._manager.has_room_for_check_point()
        return next_border(sequence.computed, sequence.borders, spaced=spaced)

    def _publish(self, key: int, sequence: _Sequence) -> None:
        """The step is done: whole blocks may be read by others from now on, and a border may be kept."""
        num, computed = sequence.computed // BLOCK_TOKENS, sequence.computed
        if sequence.root is None:
            return
        while len(sequence.hashes) < num:
            at = len(sequence.hashes) * BLOCK_TOKENS
            parent = sequence.hashes[-1] if sequence.hashes else sequence.root
            sequence.hashes.append(child_hash(parent, sequence.tokens[at : at + BLOCK_TOKENS]))
        sequence.pages = self._manager.publish(key, sequence.hashes[:num])
        if computed % BLOCK_TOKENS or not computed:
            return
        in_output = computed > sequence.num_prompt
        wanted = in_output or computed in sequence.borders or sequence.request.kind is LegKind.GENERATE
        if not wanted and computed % SPACING:
            return
        row = self._manager.check_point(key, computed, evict=wanted)
        if row < 0:
            return
        self._copier.save(sequence.pages.state_row, row, computed)
        if in_output:
            if sequence.output_border is not None:
                self._manager.drop_check_point(sequence.output_border)
            sequence.output_border = sequence.hashes[num - 1]

    def _end_if_over(self, key: int, sequence: _Sequence, token: int) -> None:
        params, reason, stop_id = sequence.request.sampling, None, None
        if token in params.stop_token_ids:
            reason, stop_id = FinishReason.STOP, token
        elif token in params.eos_token_ids and not params.ignore_eos:
            reason = FinishReason.STOP
        elif sequence.index - sequence.request.num_output_tokens >= params.max_tokens:
            reason = FinishReason.LENGTH
        prefilled = sequence.request.kind is LegKind.PREFILL
        if reason is None and not prefilled:
            if len(sequence.tokens) == sequence.num_prompt + 1 and sequence.request.kind is LegKind.LOCAL:
                self._manager.shrink(key, 1)  # the prompt is over: a chunk's worth of window pages goes back
            return
        if prefilled:
            sequence.pages = self._manager.pages(key)
            self._manager.shrink(key, 0)
            sequence.phase = Phase.HELD
        else:
            self._drop(key)
        pages = sequence.pages if prefilled else None
        computed = 0 if sequence.request.kind is LegKind.GENERATE else sequence.num_prompt - sequence.hit.start
        self._events.append(SequenceFinished(key, reason, stop_id, computed, sequence.prefill_s, pages))

    # ---- books ----

    def _measure(self) -> EngineLoad:
        running = sum(s.phase is Phase.RUNNING for s in self._sequences.values())
        waiting = sum(s.phase in (Phase.QUEUED, Phase.READY, Phase.LANDING) for s in self._sequences.values())
        queued = sum(
            max(0, s.num_prompt - s.computed)
            for s in self._sequences.values()
            if s.phase is not Phase.HELD and s.request.kind is not LegKind.GENERATE
        )
        pools = {kind.value: counts for kind, counts in self._manager.counts().items()}
        mismatches = len(self._manager.check() if running else self._manager.audit())
        return EngineLoad(running, waiting, queued, self._steps, self._progress_s, pools, mismatches)
