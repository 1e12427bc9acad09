"""The engine: one thread that owns model, pools and books; commands in, events out, a step at a time.

A sequence is a list of tokens of which the first `computed` are in the pages. A step computes some of the rest and,
where a sequence has caught up with its last token, samples the next one: prompt chunks and decoding are the same thing.
Decoding sequences go first, prompts fill the token budget in order of arrival. The loop never waits for anything but
commands.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..config.tree import EngineSection
from ..core.blocks import BLOCK_TOKENS, block_hashes, child_hash, root_hash
from ..core.clock import Clock
from ..core.errors import Cancelled, HeadraceError, NoFreePages, PromptTooLong, QueueFull, RequestError, TransferFailed
from ..core.sampling import FinishReason
from ..kvcache.allocator import CacheManager, Hit
from ..kvcache.check_points import SPACING, next_border, prompt_borders
from ..kvcache.sequence import SequencePages
from ..kvcache.snapshots import CheckPointCopier
from ..model.batch import ForwardPass, LayerViews
from .api import (
    AbortChoice,
    AbortSequence,
    Admit,
    CacheChanged,
    ChunkDone,
    ClearCache,
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
    Store,
    Submit,
    TokenSampled,
)
from .plan import Slice, plan_batch
from .sampler import BrokenLogits, History, raw_logprobs
from .sequences import EngineSequence, Family, Phase, seeded
from .step_logits import StepLogits


class Engine:
    """Owns one model copy and its cache. `post` from any thread; events leave through `sink`, in order."""

    def __init__(
        self,
        model: ForwardPass,
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
        self._sequences: dict[int, EngineSequence] = {}
        """By id."""
        self._families: dict[int, Family] = {}
        """By the request's key."""
        self._fork_ids = itertools.count(-1, -1)
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
        work = self._schedule()
        if work:
            # Said before the step, not after: cached blocks are shipped while the first chunk is computed.
            self._say()
            self._step(work)
        changes = self._manager.drain_events()
        if changes:
            self._events.append(CacheChanged(changes))
        self._load = self._measure()
        self._say()

    def _say(self) -> None:
        # Whoever hears of pages may read them, or write them anew, from another stream of the device.
        self._model.settle()
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
                        self._started(sequence)
            case Admit(key, first_token, _, more_first_tokens):
                sequence = self._sequences.get(key)
                if sequence is not None and sequence.phase is Phase.LANDING:
                    self._manager.admit(key)
                    sequence.computed = sequence.num_prompt
                    sequence.phase = Phase.RUNNING
                    self._publish(sequence)
                    for choice, token in zip(self._fork(sequence), (first_token, *more_first_tokens), strict=True):
                        self._append(choice, token)
            case Store(key):
                sequence = self._sequences.get(key)
                if sequence is not None and sequence.phase is Phase.LANDING:
                    self._manager.admit(key)
                    sequence.computed = sequence.num_prompt
                    self._publish(sequence)
                    self._drop(sequence)
            case Release(key):
                sequence = self._sequences.get(key)
                if sequence is not None and sequence.phase in (Phase.HELD, Phase.LANDING):
                    self._drop(sequence)
            case AbortSequence(key):
                self._abort(key)
            case AbortChoice(key, choice):
                for sequence in self._choices(key):
                    if sequence.choice == choice and sequence.phase is Phase.RUNNING:
                        self._finish(sequence, None, None)
            case ClearCache():
                self._manager.clear_cache()

    def _submit(self, request: EngineRequest) -> None:
        assert request.key not in self._sequences, "keys are never reused"
        total = len(request.prompt) + request.sampling.max_tokens
        chunk = self._section.max_num_batched_tokens
        # A prefill samples all first tokens and forks nothing.
        num_choices = request.num_choices if request.kind in (LegKind.GENERATE, LegKind.LOCAL) else 1

        def fits(choices: int) -> bool:
            return total <= self._max_model_len and self._manager.can_ever_fit(
                len(request.prompt), request.sampling.max_tokens, min(chunk, len(request.prompt)), choices
            )

        if not fits(1):
            longest = min(self._max_model_len, self._manager.max_tokens())
            error = PromptTooLong(f"{total} tokens wanted, at most {longest} fit this worker")
            self._events.append(Refused(request.key, error))
        elif not fits(num_choices):
            most = max(n for n in range(1, num_choices) if fits(n))
            message = f"n is {num_choices}, but at most {most} choices of {total} tokens fit this worker"
            self._events.append(Refused(request.key, RequestError(message, param="n")))
        elif len(self._queue) >= self._section.max_queue:
            self._events.append(Refused(request.key, QueueFull(f"{len(self._queue)} requests wait already")))
        else:
            history = History.of(request.prompt, request.num_output_tokens)
            root = None if self._fingerprint is None else root_hash(self._fingerprint, request.namespace)
            hashes = [] if root is None else block_hashes(root, request.prompt)
            family = Family({request.key}, tuple(itertools.islice(self._fork_ids, num_choices - 1)))
            self._families[request.key] = family
            self._sequences[request.key] = EngineSequence(
                request, request.key, 0, family, seeded(request, 0), list(request.prompt), history, root, hashes
            )
            self._queue.append(request.key)

    def _admit_queued(self) -> None:
        """Take credits in order of arrival; the first that does not fit keeps its place."""
        chunk = self._section.max_num_batched_tokens
        while self._queue:
            key = self._queue[0]
            sequence = self._sequences[key]
            request = sequence.request
            reserve = self._reserve_of(request)
            # Scores of a prompt need every position of it computed, so it reads nothing that is here.
            hashes = [] if request.sampling.prompt_logprobs is not None else sequence.hashes
            try:
                if request.kind.lands:
                    pages, num_held = self._manager.reserve_landing(
                        key, sequence.num_prompt, reserve_tokens=reserve, root=sequence.root, hashes=sequence.hashes
                    )
                else:
                    hit = self._manager.reserve(
                        key,
                        sequence.num_prompt,
                        reserve_tokens=reserve,
                        chunk_tokens=1 if request.kind is LegKind.SHARE else min(chunk, sequence.num_prompt),
                        root=sequence.root,
                        hashes=hashes,
                        whole=request.kind is LegKind.SHARE,
                    )
                    pages, num_held = self._manager.pages(key), hit.num_blocks
                self._manager.reserve_forks(key, sequence.family.forks, sequence.num_prompt, reserve_tokens=reserve)
            except NoFreePages:
                return
            self._queue.popleft()
            if not request.kind.lands:
                is_whole = hit.start == sequence.num_prompt and hit.snapshot_row >= 0
                if request.kind is LegKind.SHARE and not is_whole:
                    self._drop(sequence)
                    self._events.append(Refused(key, TransferFailed("the prefix is not kept here up to its border")))
                    continue
                self._begin_at(sequence, hit, pages)
            sequence.pages = pages
            self._events.append(Reserved(key, num_held * BLOCK_TOKENS, pages))
            if request.kind.lands:
                sequence.phase = Phase.LANDING
            elif request.kind is LegKind.LOCAL or sequence.start_heard:
                self._started(sequence)
            else:
                sequence.phase = Phase.READY

    def _started(self, sequence: EngineSequence) -> None:
        """Credits are taken, and a PREFILL's or SHARE's taker has its own."""
        if sequence.request.kind is not LegKind.SHARE:
            sequence.phase = Phase.RUNNING
            return
        sequence.phase, sequence.started = Phase.HELD, True
        self._events.append(Started(sequence.key, sequence.num_prompt))
        self._events.append(SequenceFinished(sequence.key, None, None, 0, 0.0, sequence.pages))

    def _begin_at(self, sequence: EngineSequence, hit: Hit, pages: SequencePages) -> None:
        """Put what goes before the first position that is computed in its place."""
        sequence.hit, sequence.computed = hit, hit.start
        if sequence.root is not None:
            sequence.borders = prompt_borders(sequence.num_prompt, hit)
        if hit.blank_window:
            self._copier.blank(pages.state_row, hit.blank_window)
        elif hit.start:
            self._copier.restore(hit.snapshot_row, pages.state_row, hit.start)

    def _reserve_of(self, request: EngineRequest) -> int:
        """Output tokens that credits are taken for."""
        if request.kind in (LegKind.SHARE, LegKind.FETCH):
            return 0
        if request.kind is LegKind.PREFILL:
            return 1
        return min(request.sampling.max_tokens, self._section.output_reserve_tokens)

    def _choices(self, key: int) -> list[EngineSequence]:
        """What goes on of a request."""
        family = self._families.get(key)
        return [] if family is None else sorted((self._sequences[each] for each in family.live), key=lambda s: s.choice)

    def _abort(self, key: int) -> None:
        choices = self._choices(key)
        if choices and choices[0].phase is not Phase.HELD:
            self._fail(choices[0], Cancelled("aborted"))

    def _fail(self, sequence: EngineSequence, error: HeadraceError) -> None:
        """All choices end; pages go back, unless a gather or a scatter may still touch them."""
        self._events.append(SequenceFailed(sequence.key, error))
        for each in self._choices(sequence.key):
            if each.phase is Phase.QUEUED:
                self._queue.remove(each.key)
                self._forget(each)
            elif each.phase is Phase.LANDING or (each.request.kind is LegKind.PREFILL and each.started):
                each.phase = Phase.HELD
            else:
                self._drop(each)

    def _drop(self, sequence: EngineSequence) -> None:
        """Its pages go back, and what was promised to forks that never came to be."""
        for each in (sequence.id, *sequence.family.forks):
            self._manager.release(each)
        sequence.family.forks = ()
        self._forget(sequence)

    def _forget(self, sequence: EngineSequence) -> None:
        del self._sequences[sequence.id]
        sequence.family.live.remove(sequence.id)
        if not sequence.family.live:
            del self._families[sequence.key]

    # ---- steps ----

    def _schedule(self) -> list[tuple[Slice, EngineSequence]]:
        """Which tokens this step computes. Takes pages; a sequence that finds none ends with an error."""
        budget = self._section.max_num_batched_tokens
        running = [s for s in self._sequences.values() if s.phase is Phase.RUNNING]
        running.sort(key=lambda sequence: (not sequence.decoding, sequence.request.priority))
        chosen: list[tuple[Slice, EngineSequence]] = []
        for sequence in running:
            if budget <= 0 or len(chosen) == self._section.max_num_seqs:
                break
            if sequence.phase is not Phase.RUNNING or sequence.id not in self._sequences:
                continue  # it ended with another choice of its request
            end = min(len(sequence.tokens), sequence.computed + budget)
            if end < len(sequence.tokens) and end // BLOCK_TOKENS * BLOCK_TOKENS > sequence.computed:
                end = end // BLOCK_TOKENS * BLOCK_TOKENS  # whole blocks can be published and shipped at once
            border = None if sequence.decoding else self._next_border(sequence)
            if border is not None:
                end = min(end, border)
            try:
                sequence.pages = self._manager.extend(sequence.id, end)
            except NoFreePages as error:
                self._fail(sequence, error)
                continue
            if not sequence.started and sequence.request.kind.computes:
                self._events.append(Started(sequence.key, sequence.hit.start))
                sequence.started_s = self._clock.now_s()
            sequence.started = True
            tokens = sequence.tokens[sequence.computed : end]
            wanted: Sequence[int] = [end - 1] if end == len(sequence.tokens) else []
            if sequence.sampling.prompt_logprobs is not None and sequence.computed < sequence.num_prompt:
                wanted = range(sequence.computed, end)
            frozen_below = sequence.hit.num_blocks * BLOCK_TOKENS
            chosen.append((Slice(tokens, sequence.computed, sequence.pages, wanted, frozen_below), sequence))
            budget -= len(tokens)
        return [item for item in chosen if item[1].id in self._sequences]

    def _step(self, work: list[tuple[Slice, EngineSequence]]) -> None:
        raw = self._model.forward(plan_batch([piece for piece, _ in work]), self._views)
        logits = StepLogits(raw, self._model.likeliest(raw))
        end_row = 0
        for piece, sequence in work:
            row, end_row = end_row, end_row + len(piece.logit_positions)
            if sequence.id not in self._sequences:
                continue  # it ended with another choice of its request
            sequence.computed = piece.start + len(piece.tokens)
            try:
                sampled = self._read_logits(sequence, piece, logits, row)
            except BrokenLogits as error:
                self._fail(sequence, error)
                continue
            if sequence.computed // BLOCK_TOKENS > piece.start // BLOCK_TOKENS:
                self._publish(sequence)
            if sequence.request.kind.computes and piece.start < sequence.num_prompt:
                self._events.append(ChunkDone(sequence.key, sequence.computed, sequence.pages))
            self._manager.trim_window(sequence.id, sequence.computed)
            if sampled:
                self._accept(sequence, sampled)
        self._steps += 1
        self._progress_s = self._clock.now_s()

    def _read_logits(self, sequence: EngineSequence, piece: Slice, logits: StepLogits, row: int) -> list[TokenSampled]:
        """Scores of the prompt; and if the sequence has caught up with its last token the next one, of the prompt's
        last token one for each choice. `row` is the piece's first row of logits."""
        params = sequence.sampling
        if params.prompt_logprobs is not None and piece.start < sequence.num_prompt:
            scored = [p for p in piece.logit_positions if p + 1 < sequence.num_prompt]
            if scored:
                tokens = tuple(sequence.tokens[p + 1] for p in scored)
                values = tuple(
                    raw_logprobs(logits.row(row + p - piece.start), t, params.prompt_logprobs)
                    for p, t in zip(scored, tokens, strict=True)
                )
                self._events.append(PromptScored(sequence.key, scored[0] + 1, tokens, values))
        if sequence.computed < len(sequence.tokens):
            return []
        first = len(sequence.tokens) == sequence.num_prompt
        relative = sequence.index - sequence.request.num_output_tokens
        found = []
        last = row + len(piece.logit_positions) - 1
        for choice in range(sequence.request.num_choices) if first else (sequence.choice,):
            of_choice = seeded(sequence.request, choice) if first else params
            token, logprobs = logits.sample(last, of_choice, sequence.history, sequence.index, relative)
            found.append(TokenSampled(sequence.key, sequence.index, token, logprobs, choice))
        return found

    def _accept(self, sequence: EngineSequence, sampled: list[TokenSampled]) -> None:
        if len(sequence.tokens) == sequence.num_prompt:
            sequence.prefill_s = self._clock.now_s() - sequence.started_s
        self._events += sampled
        if sequence.request.kind is LegKind.PREFILL:
            self._end_prefill(sequence, [event.token for event in sampled])
            return
        choices = [sequence] if len(sequence.tokens) > sequence.num_prompt else self._fork(sequence)
        for choice, event in zip(choices, sampled, strict=True):
            self._append(choice, event.token)

    def _fork(self, sequence: EngineSequence) -> list[EngineSequence]:
        """All choices of a request whose prompt has just been computed, or has arrived."""
        family = sequence.family
        choices = [sequence]
        for choice, fork in enumerate(family.forks, 1):
            for kind, source, target in self._manager.fork(sequence.id, fork, sequence.num_prompt):
                self._copier.copy(kind, source, target)
            other = replace(
                sequence,
                id=fork,
                choice=choice,
                sampling=seeded(sequence.request, choice),
                tokens=list(sequence.tokens),
                history=sequence.history.copy(),
                hashes=list(sequence.hashes),
                pages=self._manager.pages(fork),
            )
            self._sequences[fork] = other
            family.live.add(fork)
            choices.append(other)
        family.forks = ()
        return choices

    def _append(self, sequence: EngineSequence, token: int) -> None:
        """One more token of the output, and the end if it is the last."""
        sequence.tokens.append(token)
        sequence.history.add(token)
        over = sequence.over(token)
        if over is not None:
            self._finish(sequence, *over)
        elif len(sequence.tokens) == sequence.num_prompt + 1 and sequence.request.kind is LegKind.LOCAL:
            self._manager.shrink(sequence.id, 1)  # the prompt is over: a chunk's worth of window pages goes back

    def _end_prefill(self, sequence: EngineSequence, first_tokens: list[int]) -> None:
        """The prompt is computed; pages stay until the taker has them."""
        sequence.tokens.append(first_tokens[0])
        ends = [sequence.over(token) for token in first_tokens]
        reason, stop_id = (ends[0] if all(end is not None for end in ends) else None) or (None, None)
        sequence.pages = self._manager.pages(sequence.id)
        self._manager.shrink(sequence.id, 0)
        sequence.phase = Phase.HELD
        computed = sequence.num_prompt - sequence.hit.start
        self._events.append(
            SequenceFinished(sequence.key, reason, stop_id, computed, sequence.prefill_s, sequence.pages)
        )

    def _finish(self, sequence: EngineSequence, reason: FinishReason | None, stop_id: int | None) -> None:
        """One choice is over."""
        computed = 0 if sequence.request.kind is LegKind.GENERATE else sequence.num_prompt - sequence.hit.start
        self._drop(sequence)
        last = not sequence.family.live
        self._events.append(
            SequenceFinished(sequence.key, reason, stop_id, computed, sequence.prefill_s, None, sequence.choice, last)
        )

    # ---- the prefix cache ----

    def _next_border(self, sequence: EngineSequence) -> int | None:
        if sequence.root is None:
            return None
        spaced = self._manager.has_room_for_check_point()
        return next_border(sequence.computed, sequence.borders, spaced=spaced)

    def _publish(self, sequence: EngineSequence) -> None:
        """A step that passed a border is done: whole blocks may be read by others, and the border may be kept."""
        num, computed = sequence.computed // BLOCK_TOKENS, sequence.computed
        if sequence.root is None:
            return
        while len(sequence.hashes) < num:
            at = len(sequence.hashes) * BLOCK_TOKENS
            parent = sequence.hashes[-1] if sequence.hashes else sequence.root
            sequence.hashes.append(child_hash(parent, sequence.tokens[at : at + BLOCK_TOKENS]))
        sequence.pages = self._manager.publish(sequence.id, sequence.hashes[:num])
        if computed % BLOCK_TOKENS or not computed:
            return
        in_output = computed > sequence.num_prompt
        wanted = in_output or computed in sequence.borders or sequence.request.kind.lands
        if not wanted and computed % SPACING:
            return
        row = self._manager.check_point(sequence.id, computed, evict=wanted)
        if row < 0:
            return
        self._copier.save(sequence.pages.state_row, row, computed)
        if in_output:
            if sequence.output_border is not None:
                self._manager.drop_check_point(sequence.output_border)
            sequence.output_border = sequence.hashes[num - 1]

    # ---- books ----

    def _measure(self) -> EngineLoad:
        running = sum(s.phase is Phase.RUNNING for s in self._sequences.values())
        waiting = sum(s.phase in (Phase.QUEUED, Phase.READY, Phase.LANDING) for s in self._sequences.values())
        queued = sum(
            max(0, s.num_prompt - s.computed)
            for s in self._sequences.values()
            if s.phase is not Phase.HELD and s.request.kind.computes
        )
        pools = {kind.value: counts for kind, counts in self._manager.counts().items()}
        mismatches = len(self._manager.check() if running else self._manager.audit())
        return EngineLoad(running, waiting, queued, self._steps, self._progress_s, pools, mismatches)
