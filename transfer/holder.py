"""The holder's side of transfers: which segments to gather, for whom, when to stop serving.

A subscription needs a pull (the taker has its credits) and an offer (the prefill leg is here). It ends by the taker's
`Taken`, or for any reason at once: nobody is asked, all its send buffers are free, a late reader refuses the bytes.
Pages stay pinned until no gather reads them; then, and only then, `Ended`. Decides without I/O; time is passed in.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeAlias

from ..config.tree import TransferSection
from ..core.blocks import BLOCK_TOKENS
from ..core.errors import LayoutError
from ..core.ids import Incarnation, TransferId
from ..core.peer import (
    MAX_ALIVE,
    MAX_INDEX_RANGES,
    MAX_MISSING_RANGES,
    Beat,
    Cancel,
    Complete,
    Gone,
    Missing,
    PeerFault,
    Pull,
    Release,
    SegmentReady,
    Serving,
    Taken,
)
from ..core.segments import RangeKind, SegmentGeometry, SegmentRange
from .api import BlocksFinal, Ended, LinkDirection, Offer, Outcome, PrefillDone, TransferStats, Wanted, Withdraw
from .buffers import SendBuffers, SendPhase
from .coverage import check_bounds, join_units, num_finest
from .cuts import cut_history
from .decisions import (
    Action,
    Announce,
    Deliver,
    FromPeer,
    Gather,
    Gathered,
    HolderEvent,
    LinkLost,
    LinkReady,
    NoteIn,
    PeerFaulty,
    Send,
    ToLinks,
)
from .header import announced_header, segment_digest
from .lease import DeadlineHeap

MAX_WAITING_PULLS = 1000
MAX_PER_LINK = 256
MAX_TOMBSTONES = 100_000
MAX_ASKS = 3
"""How many times as many ranges as the sequence has a taker may ask for again in all."""


class HolderPhase(Enum):
    OFFERED = "offered"
    """The leg is here, no taker yet."""
    PULLED = "pulled"
    """A taker is here, no leg yet."""
    QUEUED = "queued"
    """Both; the first chunk has not been scheduled."""
    SERVING = "serving"
    COMPLETE = "complete"
    """All was announced, first token included."""
    DONE = "done"
    ENDED = "ended"


class HolderStep(Enum):
    """What moves a subscription."""

    OFFER = "offer"
    PULL = "pull"
    SCHEDULED = "scheduled"
    PIECE = "piece"
    """A segment gathered, read, released or asked for again; a beat; more blocks final."""
    ANNOUNCED_ALL = "announced_all"
    TAKEN = "taken"
    END = "end"
    """Cancel, withdrawal, stream broken, lease out, first token ends the request, deadline, fault."""


P, S = HolderPhase, HolderStep

NEXT: dict[HolderPhase, dict[HolderStep, HolderPhase]] = {
    P.OFFERED: {S.PULL: P.QUEUED, S.PIECE: P.OFFERED, S.END: P.ENDED},
    P.PULLED: {S.OFFER: P.QUEUED, S.PULL: P.PULLED, S.PIECE: P.PULLED, S.END: P.ENDED},
    P.QUEUED: {S.SCHEDULED: P.SERVING, S.PULL: P.QUEUED, S.PIECE: P.QUEUED, S.END: P.ENDED},
    P.SERVING: {S.ANNOUNCED_ALL: P.COMPLETE, S.PULL: P.SERVING, S.PIECE: P.SERVING, S.END: P.ENDED},
    # Ranges asked for again go out from here; `Complete` is then said once more, with new totals.
    P.COMPLETE: {
        S.ANNOUNCED_ALL: P.COMPLETE,
        S.PULL: P.COMPLETE,
        S.PIECE: P.COMPLETE,
        S.TAKEN: P.DONE,
        S.END: P.ENDED,
    },
    # The last gather may still run: the pages are let go of when it has ended.
    P.DONE: {S.PULL: P.DONE, S.PIECE: P.DONE, S.TAKEN: P.DONE, S.END: P.DONE},
    P.ENDED: {S.PULL: P.ENDED, S.PIECE: P.ENDED, S.TAKEN: P.ENDED, S.END: P.ENDED},
}

FINAL = (P.DONE, P.ENDED)

WAITS = {P.OFFERED: "offer", P.PULLED: "pull", P.QUEUED: "lease", P.SERVING: "lease", P.COMPLETE: "lease"}
"""Which deadline ends each phase at the latest (I4)."""


@dataclass
class Subscription:
    """One transfer as its holder sees it."""

    transfer_id: TransferId
    phase: HolderPhase
    opened_s: float
    offer: Offer | None = None
    pull: Pull | None = None
    link_id: int | None = None
    window: int = 0
    segment_bytes: int = 0
    pages: object = None
    num_final: int = 0
    """Whole blocks that are final in `pages`."""
    num_planned: int = 0
    """Blocks below this one are planned, or held by the taker."""
    computed_tokens: int = 0
    scheduled: bool = False
    done: PrefillDone | None = None
    plan: deque[tuple[SegmentRange, ...]] = field(default_factory=deque)
    ranges: dict[int, tuple[SegmentRange, ...]] = field(default_factory=dict)
    """What each buffer of ours holds or is being filled with."""
    payload: dict[int, int] = field(default_factory=dict)
    next_seq: int = 0
    announced_bytes: int = 0
    num_gathering: int = 0
    num_asked: int = 0
    num_expected: int = 0
    """Finest ranges of the whole transfer; counted when the first is asked for again."""
    complete_s: float | None = None
    outcome: Outcome = Outcome.ENDED
    reason: str = ""

    @property
    def length(self) -> int:
        assert self.offer is not None
        return self.offer.length

    @property
    def key(self) -> tuple[int, int]:
        assert self.pull is not None
        return self.pull.attempt, self.pull.held_blocks


DeadlineKey: TypeAlias = tuple[str, TransferId, int]
HolderInput: TypeAlias = HolderEvent | Offer | BlocksFinal | PrefillDone | Withdraw


class Holder:
    """All subscriptions of a worker, and its send buffers."""

    def __init__(
        self, *, incarnation: Incarnation, geometry: SegmentGeometry, buffers: SendBuffers, section: TransferSection
    ) -> None:
        self._incarnation = incarnation
        self._geometry = geometry
        self._buffers = buffers
        self._section = section
        self._open: dict[TransferId, Subscription] = {}
        self._links: dict[int, LinkReady] = {}
        self._per_link: Counter[int] = Counter()
        self._turn: deque[TransferId] = deque()
        """Subscriptions with segments to gather, in the order in which they get buffers."""
        self._tombstones: OrderedDict[TransferId, float] = OrderedDict()
        self._deadlines: DeadlineHeap[DeadlineKey] = DeadlineHeap()
        self._now_s = 0.0
        self._actions: list[Action] = []
        self.stale_messages = 0
        self.bytes_sent = 0
        self.segments_sent = 0
        self.transfers_served = 0
        self.failures: Counter[str] = Counter()

    # ---- the door ----

    def handle(self, event: HolderInput, now_s: float) -> list[Action]:
        """Take one event in; what is to be done, in order."""
        self._now_s = now_s
        self._actions = []
        match event:
            case Offer():
                self._offer(event)
            case BlocksFinal():
                self._blocks_final(event)
            case PrefillDone():
                self._prefill_done(event)
            case Withdraw():
                self._withdraw(event)
            case FromPeer():
                self._from_peer(event.link_id, event)
            case Gathered():
                self._gathered(event)
            case NoteIn():
                self._read(event.transfer_id, event.buffer, event.buffer_gen)
            case LinkReady(direction=LinkDirection.IN):
                self._links[event.link_id] = event
            case LinkLost():
                self._link_lost(event.link_id, event.reason)
            case _:
                pass
        self._due()
        self._give_out()
        return self._actions

    def next_s(self) -> float | None:
        """When `Tick` is needed at the latest."""
        return self._deadlines.next_s()

    def beat(self, link_id: int) -> Beat:
        """What this side says in its beat to one taker."""
        mine = [s for s in self._open.values() if s.link_id == link_id and s.phase not in FINAL][:MAX_ALIVE]
        return Beat(
            tuple(s.transfer_id for s in mine),
            tuple((s.transfer_id, s.computed_tokens) for s in mine if s.phase is P.SERVING),
        )

    @property
    def awaits_notes(self) -> bool:
        """A taker may be reading one of our buffers."""
        return any(buffer.phase is SendPhase.ANNOUNCED for buffer in self._buffers.buffers)

    def counts(self) -> Mapping[str, int]:
        """Open subscriptions by phase."""
        counted = Counter(subscription.phase.value for subscription in self._open.values())
        return {phase.value: counted[phase.value] for phase in HolderPhase if phase not in FINAL}

    def phases(self) -> Mapping[TransferId, HolderPhase]:
        """Open subscriptions, those included whose last gather still runs."""
        return {transfer_id: subscription.phase for transfer_id, subscription in self._open.items()}

    def audit(self) -> list[str]:
        """Buffers, shares, deadlines and subscriptions against each other; [] is clean."""
        wrong = self._buffers.audit()
        filling: dict[TransferId, int] = {}
        announced: set[TransferId] = set()
        for buffer in self._buffers.buffers:
            if buffer.owner is None:
                continue
            owner = self._open.get(buffer.owner)
            if owner is None or (buffer.phase is not SendPhase.DRAINING and buffer.index not in owner.ranges):
                wrong.append(f"holder: buffer {buffer.index} ({buffer.phase.value}) belongs to nobody open")
            if buffer.phase is not SendPhase.ANNOUNCED:
                filling[buffer.owner] = filling.get(buffer.owner, 0) + 1
            elif ("buffer", buffer.owner, buffer.index) not in self._deadlines:
                wrong.append(f"holder: buffer {buffer.index} waits for its reader without a deadline")
            else:
                announced.add(buffer.owner)
        linked: dict[int, int] = {}
        for subscription in self._open.values():
            num_filling = filling.get(subscription.transfer_id, 0)
            if num_filling != subscription.num_gathering:
                wrong.append(f"holder: {subscription.num_gathering} gathers counted, {num_filling} buffers filling")
            if subscription.phase in FINAL:
                if not subscription.num_gathering:
                    wrong.append("holder: an ended subscription without a gather is still open")
                if subscription.transfer_id in announced or subscription.ranges:
                    wrong.append("holder: an ended subscription still has announced buffers")
                continue
            if len(subscription.ranges) > subscription.window:
                wrong.append(f"holder: {len(subscription.ranges)} buffers, the window is {subscription.window}")
            wait = WAITS[subscription.phase]
            if (wait, subscription.transfer_id, 0) not in self._deadlines:
                wrong.append(f"holder: a subscription is {subscription.phase.value} without its deadline ({wait})")
            if subscription.link_id is not None:
                linked[subscription.link_id] = linked.get(subscription.link_id, 0) + 1
        if linked != dict(self._per_link):
            wrong.append(f"holder: subscriptions by link {linked} but counted {dict(self._per_link)}")
        return wrong

    # ---- commands ----

    def _offer(self, offer: Offer) -> None:
        known = self._open.get(offer.transfer_id)
        if offer.transfer_id in self._tombstones or (known is not None and known.offer is not None):
            # The second prefill with one id is refused: ids are new for each attempt. A life that has ended answers
            # the leg, one that runs already does not.
            self.stale_messages += 1
            if known is None:
                self._deliver_ended(offer.transfer_id, Outcome.ENDED, "transfer id used before", TransferStats())
            return
        if known is None:
            known = self._new(offer.transfer_id, P.OFFERED)
            self._deadlines.set(("offer", offer.transfer_id, 0), self._now_s + self._section.offer_wait_s)
        known.offer = offer
        known.pages = offer.pages
        known.num_final = min(offer.cached_blocks, offer.length // BLOCK_TOKENS)
        if known.phase is P.PULLED:
            self._step(known, S.OFFER)
            self._meet(known)

    def _blocks_final(self, news: BlocksFinal) -> None:
        subscription = self._open.get(news.transfer_id)
        if subscription is None or subscription.phase in FINAL or subscription.offer is None:
            return
        self._step(subscription, S.PIECE)
        subscription.scheduled = True
        subscription.pages = news.pages
        subscription.computed_tokens = max(subscription.computed_tokens, news.computed_tokens)
        subscription.num_final = min(max(subscription.num_final, news.num_blocks), subscription.length // BLOCK_TOKENS)
        self._serve(subscription)

    def _prefill_done(self, news: PrefillDone) -> None:
        subscription = self._open.get(news.transfer_id)
        if subscription is None or subscription.phase in FINAL or subscription.offer is None:
            return
        self._step(subscription, S.PIECE)
        subscription.scheduled = True
        subscription.pages = news.pages
        subscription.computed_tokens = subscription.length
        subscription.num_final = subscription.length // BLOCK_TOKENS
        subscription.done = news
        self._serve(subscription)

    def _withdraw(self, command: Withdraw) -> None:
        subscription = self._open.get(command.transfer_id)
        if subscription is not None and subscription.phase not in FINAL:
            self._end(subscription, "withdrawn", command.reason)

    # ---- messages ----

    def _from_peer(self, link_id: int, event: FromPeer) -> None:
        match event.message:
            case Pull() as pull:
                self._pull(link_id, pull)
            case Release(transfer_id, buffer, buffer_gen):
                if self._of(link_id, transfer_id) is not None:
                    self._read(transfer_id, buffer, buffer_gen)
            case Missing() as missing:
                self._missing(link_id, missing)
            case Taken(transfer_id):
                subscription = self._of(link_id, transfer_id)
                if subscription is None:
                    return
                if subscription.phase is P.COMPLETE:
                    self._finish(subscription, S.TAKEN, Outcome.TAKEN, "taken")
                    self.transfers_served += 1
                else:
                    self._fault(subscription, "taken before complete")
            case Cancel(transfer_id):
                subscription = self._of(link_id, transfer_id)
                if subscription is not None:
                    self._end(subscription, "cancelled", "cancelled by the taker", tell=False)
            case Beat(alive):
                for transfer_id in alive:
                    subscription = self._open.get(transfer_id)
                    if subscription is not None and subscription.link_id == link_id and subscription.phase not in FINAL:
                        self._deadlines.set(("lease", transfer_id, 0), self._now_s + self._section.lease_s)
            case _:
                self._actions.append(ToLinks(PeerFaulty(link_id, f"unexpected {type(event.message).__name__}")))

    def _of(self, link_id: int, transfer_id: TransferId) -> Subscription | None:
        """The living subscription that this taker may speak of; late and foreign speech is counted."""
        subscription = self._open.get(transfer_id)
        if subscription is None or subscription.link_id != link_id or subscription.phase in FINAL:
            self.stale_messages += 1
            return None
        return subscription

    def _pull(self, link_id: int, pull: Pull) -> None:
        link = self._links.get(link_id)
        if link is None:
            self.stale_messages += 1
            return
        known = self._open.get(pull.transfer_id)
        if pull.transfer_id in self._tombstones or (known is not None and known.phase in FINAL):
            self.stale_messages += 1
            self._send(link_id, Gone(pull.transfer_id, "finished"))
            return
        if known is not None and known.pull is not None:
            # Said twice: ignored. Another body or another taker: refused, and the one that is served stays served.
            self.stale_messages += 1
            if known.link_id != link_id:
                self._send(link_id, Gone(pull.transfer_id, "served to another taker"))
            else:
                self._step(known, S.PULL)
            return
        reason = self._refuses(link_id, pull)
        if reason is not None:
            self.failures["refused"] += 1
            self._send(link_id, Gone(pull.transfer_id, reason))
            return
        if known is None:
            known = self._new(pull.transfer_id, P.PULLED)
            self._deadlines.set(("pull", pull.transfer_id, 0), self._now_s + self._section.pull_wait_s)
        known.pull, known.link_id = pull, link_id
        known.window = max(1, min(self._section.window, link.window))
        known.segment_bytes = min(self._section.segment_bytes, link.segment_bytes)
        self._per_link[link_id] += 1
        self._deadlines.set(("lease", pull.transfer_id, 0), self._now_s + self._section.lease_s)
        if known.phase is P.OFFERED:
            self._step(known, S.PULL)
            self._meet(known)

    def _refuses(self, link_id: int, pull: Pull) -> str | None:
        """Why this pull is not even queued."""
        if pull.holder_incarnation not in (0, self._incarnation):
            return "another incarnation"
        if self._per_link[link_id] >= MAX_PER_LINK:
            return "too many transfers of one taker"
        waiting = sum(subscription.phase is P.PULLED for subscription in self._open.values())
        if pull.transfer_id not in self._open and waiting >= MAX_WAITING_PULLS:
            return "too many pulls wait"
        if pull.block_hashes and len(pull.block_hashes) != pull.held_blocks:
            return "hashes of other blocks than those held"
        return None

    def _meet(self, subscription: Subscription) -> None:
        """Pull and offer are both here."""
        offer, pull = subscription.offer, subscription.pull
        assert offer is not None
        assert pull is not None
        self._deadlines.drop(("offer", subscription.transfer_id, 0))
        self._deadlines.drop(("pull", subscription.transfer_id, 0))
        if pull.attempt != offer.attempt:
            self._end(subscription, "fault", "pull and prefill are of different attempts")
            return
        held = pull.held_blocks
        if held * BLOCK_TOKENS > offer.length:
            self._end(subscription, "fault", "the taker holds more than the sequence has")
            return
        if pull.block_hashes and offer.block_hashes and pull.block_hashes != offer.block_hashes[:held]:
            self._end(subscription, "fault", "the taker holds another prefix")
            return
        subscription.num_planned = held
        self._actions.append(Deliver(Wanted(subscription.transfer_id, held)))
        self._serve(subscription)

    def _missing(self, link_id: int, message: Missing) -> None:
        subscription = self._of(link_id, message.transfer_id)
        if subscription is None:
            return
        if subscription.phase not in (P.SERVING, P.COMPLETE):
            self._fault(subscription, "asked again before anything was announced")
            return
        self._step(subscription, S.PIECE)
        try:
            check_bounds(message.ranges, subscription.length, MAX_MISSING_RANGES)
            fine = sorted(self._geometry.split(message.ranges))
            subscription.num_asked += len(fine)
            if not subscription.num_expected:
                assert subscription.pull is not None
                held_blocks = subscription.pull.held_blocks
                subscription.num_expected = num_finest(self._geometry.expected(subscription.length, held_blocks))
            if subscription.num_asked > MAX_ASKS * subscription.num_expected:
                raise PeerFault("asked again too often")
            if not all(self._was_announced(subscription, piece) for piece in fine):
                raise PeerFault("asked again for what was never announced")
            subscription.plan.extend(self._cut(fine, subscription))
        except (PeerFault, LayoutError) as error:
            self._fault(subscription, str(error))
            return
        self._queue(subscription)

    def _was_announced(self, subscription: Subscription, piece: SegmentRange) -> bool:
        assert subscription.pull is not None
        if piece.kind is RangeKind.HISTORY and piece.first < subscription.length // BLOCK_TOKENS:
            return subscription.pull.held_blocks <= piece.first < subscription.num_planned
        return subscription.complete_s is not None

    def _cut(self, fine: list[SegmentRange], subscription: Subscription) -> list[tuple[SegmentRange, ...]]:
        """Finest ranges into segments that fit a buffer and an index."""
        segments: list[tuple[SegmentRange, ...]] = []
        current: list[SegmentRange] = []
        current_bytes = 0
        for piece in fine:
            piece_bytes = self._geometry.payload_bytes((piece,), subscription.length)
            too_big = current_bytes + piece_bytes > subscription.segment_bytes
            if current and (too_big or len(current) == MAX_INDEX_RANGES):
                segments.append(join_units(current))
                current, current_bytes = [], 0
            current.append(piece)
            current_bytes += piece_bytes
        if current:
            segments.append(join_units(current))
        return segments

    # ---- serving ----

    def _serve(self, subscription: Subscription) -> None:
        """Plan whatever became final; the first chunk's scheduling starts the serving."""
        if subscription.phase is P.QUEUED and subscription.scheduled:
            self._step(subscription, S.SCHEDULED)
            assert subscription.link_id is not None
            self._send(subscription.link_id, Serving(subscription.transfer_id, subscription.length))
        if subscription.phase is not P.SERVING:
            return
        done = subscription.done
        if done is not None and done.ended:
            assert subscription.link_id is not None
            self._send(subscription.link_id, self._complete(subscription, done))
            self._finish(subscription, S.END, Outcome.NOT_NEEDED, "the first token ended the request")
            return
        planned, final = subscription.num_planned, subscription.num_final
        if final > planned:
            _, held_blocks = subscription.key
            travelling = range(held_blocks, subscription.length // BLOCK_TOKENS)
            subscription.plan.extend(
                cut_history(
                    self._geometry, subscription.length, range(planned, final), travelling, subscription.segment_bytes
                )
            )
            subscription.num_planned = final
        if done is not None and subscription.complete_s is None:
            # Once: the tail is planned when the prompt is done, and the phase turns when all of it was announced.
            subscription.complete_s = self._now_s
            subscription.plan.extend(self._geometry.tail_segments(subscription.length, subscription.segment_bytes))
        self._queue(subscription)
        self._maybe_complete(subscription)

    def _queue(self, subscription: Subscription) -> None:
        if subscription.plan and subscription.transfer_id not in self._turn:
            self._turn.append(subscription.transfer_id)

    def _give_out(self) -> None:
        """Free buffers go to subscriptions in turn, one each."""
        passed = 0
        while self._buffers.num_free and passed < len(self._turn):
            transfer_id = self._turn.popleft()
            subscription = self._open.get(transfer_id)
            if subscription is None or subscription.phase in FINAL or not subscription.plan:
                continue
            link_id = subscription.link_id
            assert link_id is not None
            self._turn.append(transfer_id)
            if len(subscription.ranges) >= subscription.window or not self._buffers.may_fill(link_id):
                passed += 1
                continue
            passed = 0
            ranges = subscription.plan.popleft()
            buffer = self._buffers.fill(transfer_id, link_id)
            subscription.ranges[buffer.index] = ranges
            subscription.payload[buffer.index] = self._geometry.payload_bytes(ranges, subscription.length)
            assert subscription.payload[buffer.index] <= self._section.segment_bytes
            subscription.num_gathering += 1
            self._actions.append(
                Gather(buffer.index, buffer.generation, transfer_id, subscription.pages, ranges, subscription.length)
            )
            if not subscription.plan:
                self._turn.remove(transfer_id)

    def _gathered(self, event: Gathered) -> None:
        transfer_id = self._buffers.buffers[event.buffer].owner
        assert transfer_id is not None
        subscription = self._open[transfer_id]
        buffer = self._buffers.gathered(event.buffer, event.buffer_gen)
        subscription.num_gathering -= 1
        self._step(subscription, S.PIECE)
        if subscription.phase in FINAL:
            self._let_go(subscription)
            return
        if event.digest is None:
            self._end(subscription, "fault", "the pages do not hold what was to be gathered")
            return
        assert subscription.link_id is not None
        assert subscription.pull is not None
        ranges = subscription.ranges[buffer.index]
        message = SegmentReady(
            transfer_id=transfer_id,
            attempt=subscription.pull.attempt,
            seq=subscription.next_seq,
            buffer=buffer.index,
            buffer_gen=buffer.generation,
            payload_bytes=subscription.payload[buffer.index],
            digest=segment_digest(ranges, event.digest),
            index=ranges,
        )
        subscription.next_seq += 1
        subscription.announced_bytes += message.payload_bytes
        self._deadlines.set(("buffer", transfer_id, buffer.index), self._now_s + self._section.lease_s)
        self._actions.append(Announce(subscription.link_id, announced_header(message), message))
        self._maybe_complete(subscription)

    def _maybe_complete(self, subscription: Subscription) -> None:
        """`Complete` follows the last announcement on the ordered stream."""
        done = subscription.done
        if done is None or subscription.plan or subscription.num_gathering:
            return
        self._step(subscription, S.ANNOUNCED_ALL)
        assert subscription.link_id is not None
        self._send(subscription.link_id, self._complete(subscription, done))

    def _complete(self, subscription: Subscription, done: PrefillDone) -> Complete:
        return Complete(
            transfer_id=subscription.transfer_id,
            length=subscription.length,
            num_segments=subscription.next_seq,
            payload_bytes=subscription.announced_bytes,
            first_token=done.first_token,
            first_index=done.first_index,
            computed_tokens=done.computed,
            cached_tokens=done.cached,
            ended=done.ended,
            more_first_tokens=done.more_first_tokens,
        )

    def _read(self, transfer_id: TransferId, buffer: int, buffer_gen: int) -> None:
        """A note or a `Release`: frees this very filling, once."""
        subscription = self._open.get(transfer_id)
        if not self._buffers.read(transfer_id, buffer, buffer_gen):
            self.stale_messages += 1
            return
        assert subscription is not None
        self._step(subscription, S.PIECE)
        self._forget_buffer(subscription, buffer)

    def _forget_buffer(self, subscription: Subscription, buffer: int) -> None:
        del subscription.ranges[buffer]
        self.bytes_sent += subscription.payload.pop(buffer)
        self.segments_sent += 1
        self._deadlines.drop(("buffer", subscription.transfer_id, buffer))

    # ---- ends ----

    def _link_lost(self, link_id: int, reason: str) -> None:
        self._links.pop(link_id, None)
        for subscription in list(self._open.values()):
            if subscription.link_id == link_id and subscription.phase not in FINAL:
                self._end(subscription, "link", reason, tell=False)

    def _due(self) -> None:
        for kind, transfer_id, _ in self._deadlines.pop_due(self._now_s):
            subscription = self._open.get(transfer_id)
            if subscription is None or subscription.phase in FINAL:
                continue
            reason = {
                "offer": "no taker came",
                "pull": "no prefill came",
                "lease": "the taker's lease ran out",
                "buffer": "an announced segment was neither read nor released",
            }[kind]
            self._end(subscription, "lease" if kind in ("lease", "buffer") else "queue", reason)
        while self._tombstones:
            transfer_id, due_s = next(iter(self._tombstones.items()))
            if due_s > self._now_s and len(self._tombstones) <= MAX_TOMBSTONES:
                break
            del self._tombstones[transfer_id]

    def _fault(self, subscription: Subscription, reason: str) -> None:
        self._end(subscription, "fault", reason)

    def _end(self, subscription: Subscription, kind: str, reason: str, *, tell: bool = True) -> None:
        """Stop serving. `kind` is for the counter, `reason` for people."""
        self.failures[kind] += 1
        if tell and subscription.link_id is not None:
            self._send(subscription.link_id, Gone(subscription.transfer_id, reason))
        self._finish(subscription, S.END, Outcome.ENDED, reason)

    def _finish(self, subscription: Subscription, step: HolderStep, outcome: Outcome, reason: str) -> None:
        transfer_id = subscription.transfer_id
        self._step(subscription, step)
        subscription.outcome, subscription.reason = outcome, reason
        if subscription.link_id is not None:
            self._per_link[subscription.link_id] -= 1
            if not self._per_link[subscription.link_id]:
                del self._per_link[subscription.link_id]
        for kind in ("offer", "pull", "lease"):
            self._deadlines.drop((kind, transfer_id, 0))
        subscription.plan.clear()
        # All buffers at once; nobody is asked. One whose gather still runs is free when that has ended.
        for index in list(subscription.ranges):
            if outcome is Outcome.TAKEN and self._buffers.buffers[index].phase is SendPhase.ANNOUNCED:
                # The taker has it, only the note was lost.
                self.bytes_sent += subscription.payload[index]
                self.segments_sent += 1
            self._buffers.over(index)
            self._deadlines.drop(("buffer", transfer_id, index))
        subscription.ranges.clear()
        subscription.payload.clear()
        if transfer_id in self._turn:
            self._turn.remove(transfer_id)
        self._tombstones[transfer_id] = self._now_s + self._section.tombstone_s
        if len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)
        self._let_go(subscription)

    def _let_go(self, subscription: Subscription) -> None:
        """When no gather reads the pages any more they may go."""
        if subscription.num_gathering:
            return
        del self._open[subscription.transfer_id]
        if subscription.offer is None:
            return
        tail_s = 0.0 if subscription.complete_s is None else self._now_s - subscription.complete_s
        stats = TransferStats(
            payload_bytes=subscription.announced_bytes,
            num_segments=subscription.next_seq,
            num_missing=subscription.num_asked,
            seconds=self._now_s - subscription.opened_s,
            tail_seconds=tail_s,
        )
        self._deliver_ended(subscription.transfer_id, subscription.outcome, subscription.reason, stats)

    # ---- small ----

    def _new(self, transfer_id: TransferId, phase: HolderPhase) -> Subscription:
        subscription = Subscription(transfer_id, phase, self._now_s)
        self._open[transfer_id] = subscription
        return subscription

    def _step(self, subscription: Subscription, step: HolderStep) -> None:
        subscription.phase = NEXT[subscription.phase][step]

    def _send(self, link_id: int, message: Gone | Serving | Complete) -> None:
        self._actions.append(Send(link_id, message))

    def _deliver_ended(self, transfer_id: TransferId, outcome: Outcome, reason: str, stats: TransferStats) -> None:
        self._actions.append(Deliver(Ended(transfer_id, outcome, reason, stats)))
