"""The holder decides: when to gather, when to stop, what to do with speech that is late, doubled or wrong."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.config.tree import TransferSection
from headrace.core.ids import Incarnation, TransferId
from headrace.core.peer import Beat, Cancel, Complete, Gone, Missing, Pull, Release, SegmentReady, Serving, Taken
from headrace.core.segments import RangeKind, SegmentRange
from headrace.transfer.api import BlocksFinal, Ended, LinkDirection, Offer, Outcome, PrefillDone, Wanted, Withdraw
from headrace.transfer.buffers import SendBuffers
from headrace.transfer.decisions import (
    Announce,
    Deliver,
    FromPeer,
    Gather,
    Gathered,
    LinkLost,
    LinkReady,
    NoteIn,
    Send,
    Tick,
    ToLinks,
)
from headrace.transfer.holder import Holder, HolderPhase
from headrace.transfer.plain_cache import PlainGeometry

ID = TransferId(b"t" * 16)
SECTION = TransferSection(segment_bytes=300, num_send_buffers=6, window=2, peer_share=0.5, lease_s=30.0)
LINK = LinkReady(link_id=1, direction=LinkDirection.IN, peer="d", incarnation=5, window=4, segment_bytes=300)
PULL = Pull(transfer_id=ID, attempt=1, holder_incarnation=77, held_blocks=0)
LENGTH = 700


class Bench:
    """A holder with one link, its actions at hand."""

    def __init__(self, section: TransferSection = SECTION) -> None:
        self.buffers = SendBuffers(section.num_send_buffers, 3)
        self.holder = Holder(
            incarnation=Incarnation(77), geometry=PlainGeometry(), buffers=self.buffers, section=section
        )
        self.now_s = 0.0
        self.do(LINK)

    def do(self, event, *, after_s: float = 0.0):
        self.now_s += after_s
        actions = self.holder.handle(event, self.now_s)
        assert self.holder.audit() == []
        return actions

    def says(self, message, *, link: int = 1):
        return self.do(FromPeer(link, message))

    def offer(self, **changes):
        return self.do(dataclasses.replace(Offer(transfer_id=ID, attempt=1, length=LENGTH, pages="pages"), **changes))

    def blocks(self, num: int, computed: int = 0):
        return self.do(BlocksFinal(transfer_id=ID, num_blocks=num, pages="pages", computed_tokens=computed))

    def done(self, ended: bool = False, more: tuple[int, ...] = ()):
        return self.do(
            PrefillDone(
                transfer_id=ID, pages="pages", first_token=9, first_index=0, computed=LENGTH, cached=0, ended=ended,
                more_first_tokens=more,
            )
        )  # fmt: skip

    def gathered(self, gather: Gather):
        return self.do(Gathered(gather.buffer, gather.buffer_gen, 1))

    def run_gathers(self, actions) -> list:
        """End every gather, release every announcement; all that was said."""
        said = []
        todo = list(actions)
        while todo:
            action = todo.pop(0)
            if isinstance(action, Gather):
                todo += self.gathered(action)
            elif isinstance(action, Announce):
                said.append(action.message)
                todo += self.do(NoteIn(ID, action.message.buffer, action.message.buffer_gen))
            elif isinstance(action, Send):
                said.append(action.message)
        return said

    def serving(self) -> list:
        """Up to SERVING with nothing final."""
        self.offer()
        self.says(PULL)
        return self.blocks(0)

    def completed(self) -> list:
        self.serving()
        return self.run_gathers(self.done())


def kinds(actions):
    return [type(action) for action in actions]


def sent(actions):
    return [action.message for action in actions if isinstance(action, Send)]


def told(actions):
    return [action.event for action in actions if isinstance(action, Deliver)]


def ended(actions) -> Ended:
    (event,) = (event for event in told(actions) if isinstance(event, Ended))
    return event


@pytest.mark.parametrize("pull_first", [True, False])
def test_computing_is_wanted_when_pull_and_offer_are_both_here(pull_first):
    """In either order, once."""
    bench = Bench()
    first, second = (bench.says, PULL), (bench.offer, None)
    if not pull_first:
        first, second = second, first
    assert told(first[0](first[1]) if first[1] else first[0]()) == []
    assert told(second[0](second[1]) if second[1] else second[0]()) == [Wanted(ID, 0)]
    assert told(bench.says(PULL)) == []


def test_serving_follows_the_first_chunk_and_blocks_are_gathered_as_they_are_final():
    """`Serving` when scheduled, then whole blocks, each gathered once."""
    bench = Bench()
    assert sent(bench.serving()) == [Serving(ID, LENGTH)]
    (gather,) = bench.blocks(1)
    assert gather.ranges == (SegmentRange(RangeKind.HISTORY, 0, 3, 0, 1),)
    assert bench.blocks(1) == []
    assert bench.blocks(2)[0].ranges[0].first == 1


def test_held_blocks_are_not_gathered():
    """The taker has them."""
    bench = Bench()
    bench.offer()
    bench.says(dataclasses.replace(PULL, held_blocks=1))
    assert [action.ranges[0].first for action in bench.blocks(2) if isinstance(action, Gather)] == [1]


def test_no_more_is_announced_than_the_window():
    """The third segment waits for a note; the prefill does not."""
    bench = Bench()
    bench.serving()
    actions = bench.done()
    gathers = [action for action in actions if isinstance(action, Gather)]
    assert len(gathers) == 2
    for gather in gathers:
        assert Gather not in kinds(bench.gathered(gather))
    after_note = bench.do(NoteIn(ID, gathers[0].buffer, gathers[0].buffer_gen))
    assert kinds(after_note) == [Gather]


def test_complete_comes_after_the_last_announcement_with_the_totals():
    """The stream is ordered: what the taker then lacks is missing."""
    said = Bench().completed()
    segments = [message for message in said if isinstance(message, SegmentReady)]
    assert isinstance(said[-1], Complete)
    assert said[-1].num_segments == len(segments) == 6
    assert said[-1].payload_bytes == sum(message.payload_bytes for message in segments)
    assert [message.seq for message in segments] == list(range(6))
    assert (said[-1].first_token, said[-1].length, said[-1].computed_tokens) == (9, LENGTH, LENGTH)


@pytest.mark.parametrize("ends", [False, True])
def test_first_tokens_of_all_choices_go_with_complete(ends):
    """Each time that it is said, and when there is nothing to take, too."""
    bench = Bench()
    bench.serving()
    said = bench.run_gathers(bench.done(ends, (8, 7)))
    assert (said[-1].first_token, said[-1].more_first_tokens) == (9, (8, 7))


def test_taken_releases_the_pages():
    """And only after `Complete`."""
    bench = Bench()
    bench.completed()
    event = ended(bench.says(Taken(ID)))
    assert event.outcome is Outcome.TAKEN
    assert event.stats.num_segments == 6
    assert bench.holder.phases() == {}


def test_taken_before_complete_is_a_fault():
    """Nobody has everything before everything was announced."""
    bench = Bench()
    bench.serving()
    actions = bench.says(Taken(ID))
    assert ended(actions).outcome is Outcome.ENDED
    assert isinstance(sent(actions)[0], Gone)


def test_first_token_that_ends_the_request_ends_the_subscription():
    """`Complete` says so; nothing is gathered."""
    bench = Bench()
    bench.serving()
    actions = bench.done(ended=True)
    assert sent(actions)[-1].ended
    assert ended(actions).outcome is Outcome.NOT_NEEDED
    assert Gather not in kinds(actions)


@pytest.mark.parametrize("how", ["cancel", "withdraw", "link"])
@pytest.mark.parametrize("phase", ["pulled", "queued", "serving", "complete"])
def test_an_end_in_any_phase_frees_all_buffers_at_once(how, phase):
    """Nobody is asked. Announced buffers are free, the pages are released, late speech is counted."""
    bench = Bench()
    bench.says(PULL)
    if phase != "pulled":
        bench.offer()
    if phase in ("serving", "complete"):
        bench.blocks(0)
        for action in bench.blocks(2):
            bench.gathered(action)
    if phase == "complete":
        bench.run_gathers(bench.done())
    event = {"cancel": FromPeer(1, Cancel(ID)), "withdraw": Withdraw(ID, "aborted"), "link": LinkLost(1, "broken")}[how]
    actions = bench.do(event)
    assert bench.buffers.counts()["free"] == 6
    if phase != "pulled":
        assert ended(actions).outcome is Outcome.ENDED
    assert [type(message) for message in sent(actions)] == ([Gone] if how == "withdraw" else [])
    stale = bench.holder.stale_messages
    assert told(bench.says(Taken(ID))) == []
    bench.do(NoteIn(ID, 0, 1))
    assert bench.holder.stale_messages == stale + 2


def test_pages_stay_pinned_until_the_gather_has_ended():
    """`Ended` waits for the copy that still reads the pages."""
    bench = Bench()
    bench.serving()
    (gather,) = bench.blocks(1)
    actions = bench.says(Cancel(ID))
    assert told(actions) == []
    assert bench.buffers.counts()["draining"] == 1
    assert ended(bench.gathered(gather)).outcome is Outcome.ENDED
    assert bench.buffers.counts()["free"] == 6


def test_pages_that_do_not_hold_what_was_asked_end_the_subscription():
    """The mover's LayoutError is no crash."""
    bench = Bench()
    bench.serving()
    (gather,) = bench.blocks(1)
    assert ended(bench.do(Gathered(gather.buffer, gather.buffer_gen, None))).outcome is Outcome.ENDED


@pytest.mark.parametrize(
    ("prepare", "wait_s", "tells"),
    [
        (lambda bench: bench.offer(), SECTION.offer_wait_s, True),
        (lambda bench: bench.says(PULL), SECTION.pull_wait_s, False),
        (lambda bench: bench.serving(), SECTION.lease_s, True),
    ],
    ids=["offer alone", "pull alone", "lease"],
)
def test_each_wait_has_a_deadline_of_its_own(prepare, wait_s, tells):
    """Driven by its own timer, not by other work."""
    bench = Bench()
    prepare(bench)
    assert bench.holder.next_s() == pytest.approx(wait_s)
    assert bench.do(Tick(), after_s=wait_s - 0.01) == []
    actions = bench.do(Tick(), after_s=0.02)
    assert bool(told(actions)) == tells
    assert bench.holder.phases() == {}


def test_beats_renew_the_lease_and_a_late_one_does_not_revive():
    """For the transfers that it names, of its own link."""
    bench = Bench()
    bench.serving()
    bench.do(FromPeer(1, Beat((ID,))), after_s=29.0)
    bench.do(FromPeer(2, Beat((ID,))), after_s=20.0)
    assert bench.do(Tick(), after_s=9.0) == []
    assert told(bench.do(Tick(), after_s=2.0)) != []
    assert bench.do(FromPeer(1, Beat((ID,)))) == []
    assert bench.holder.phases() == {}


def test_an_announced_segment_that_nobody_reads_ends_the_subscription():
    """Beats alone do not hold a buffer for ever."""
    bench = Bench()
    bench.serving()
    (gather,) = bench.blocks(1)
    bench.gathered(gather)
    for _ in range(3):
        bench.do(FromPeer(1, Beat((ID,))), after_s=9.0)
    assert ended(bench.do(FromPeer(1, Beat((ID,))), after_s=4.0)).reason.startswith("an announced segment")


def test_release_frees_like_a_note_and_once():
    """For its own generation, by its own taker."""
    bench = Bench()
    bench.serving()
    (gather,) = bench.blocks(1)
    bench.gathered(gather)
    bench.says(Release(ID, gather.buffer, gather.buffer_gen + 1))
    bench.says(Release(ID, gather.buffer, gather.buffer_gen), link=2)
    assert bench.buffers.counts()["announced"] == 1
    bench.says(Release(ID, gather.buffer, gather.buffer_gen))
    assert bench.buffers.counts()["free"] == 6
    bench.says(Release(ID, gather.buffer, gather.buffer_gen))
    assert bench.holder.stale_messages == 3


def test_missing_is_gathered_again_with_new_seq_and_generation_and_complete_is_said_again():
    """From the pages, which are still here."""
    bench = Bench()
    said = bench.completed()
    wanted = (SegmentRange(RangeKind.HISTORY, 1, 1, 0, 2), SegmentRange(RangeKind.STATE, 0, 1, LENGTH - 8, 8))
    again = bench.run_gathers(bench.says(Missing(ID, wanted)))
    segments = [message for message in again if isinstance(message, SegmentReady)]
    fine = PlainGeometry().split([piece for message in segments for piece in message.index])
    assert fine == PlainGeometry().split(wanted)
    assert segments[0].seq == 6
    assert isinstance(again[-1], Complete)
    assert again[-1].num_segments == said[-1].num_segments + len(segments)


@pytest.mark.parametrize(
    "wild",
    [
        SegmentRange(RangeKind.HISTORY, 0, 1, 5, 1),
        SegmentRange(RangeKind.HISTORY, 0, 1, 0, 1 << 31),
        SegmentRange(RangeKind.STATE, 0, 900, LENGTH - 8, 8),
        SegmentRange(RangeKind.WINDOW, 0, 1, 0, 1),
    ],
)
def test_missing_of_what_was_never_announced_is_a_fault(wild):
    """Bounds before anything is computed; the subscription ends, the holder does not."""
    bench = Bench()
    bench.completed()
    actions = bench.says(Missing(ID, (wild,)))
    gathers = [action for action in actions if isinstance(action, Gather)]
    assert ended([*actions, *(bench.gathered(gathers[0]) if gathers else [])]).outcome is Outcome.ENDED


def test_missing_before_the_block_was_announced_is_a_fault():
    """A taker cannot ask for what it has not been told of."""
    bench = Bench()
    bench.serving()
    assert ended(bench.says(Missing(ID, (SegmentRange(RangeKind.HISTORY, 0, 1, 0, 1),)))).outcome is Outcome.ENDED


def test_asking_again_is_bounded():
    """A taker that asks for ever is cut off."""
    bench = Bench()
    bench.completed()
    everything = tuple(sorted(PlainGeometry().split(PlainGeometry().expected(LENGTH, 0))))
    for _ in range(3):
        assert told(bench.says(Missing(ID, everything))) == []
        bench.run_gathers(bench.do(Tick()))
    assert Gone in [type(message) for message in sent(bench.says(Missing(ID, everything)))]


def test_second_pull_is_ignored_or_refused_and_the_served_one_stays():
    """Same taker: ignored. Another taker: `Gone` for it."""
    bench = Bench()
    bench.do(dataclasses.replace(LINK, link_id=2, peer="e"))
    bench.serving()
    assert bench.says(PULL) == []
    assert bench.says(dataclasses.replace(PULL, held_blocks=2)) == []
    assert sent(bench.says(PULL, link=2)) == [Gone(ID, "served to another taker")]
    assert bench.holder.phases() == {ID: HolderPhase.SERVING}


def test_pull_of_a_finished_transfer_is_gone():
    """The tombstone answers, for ten minutes."""
    bench = Bench()
    bench.serving()
    bench.says(Cancel(ID))
    assert sent(bench.says(PULL)) == [Gone(ID, "finished")]
    assert isinstance(ended(bench.offer()), Ended)
    bench.do(Tick(), after_s=601.0)
    assert sent(bench.says(PULL)) == []


@pytest.mark.parametrize(
    ("pull", "offer"),
    [
        ({"holder_incarnation": 78}, {}),
        ({"attempt": 2}, {}),
        ({"held_blocks": 3}, {}),
        ({"held_blocks": 1, "block_hashes": ()}, None),
        ({"held_blocks": 1, "block_hashes": (b"a" * 16, b"b" * 16)}, {}),
        ({"held_blocks": 1, "block_hashes": (b"a" * 16,)}, {"block_hashes": (b"b" * 16, b"c" * 16)}),
    ],
    ids=["incarnation", "attempt", "holds too much", "fine", "hashes of others", "other prefix"],
)
def test_pull_that_does_not_fit_the_offer_is_refused(pull, offer):
    """Before anything is computed for it."""
    bench = Bench()
    bench.offer(**(offer or {}))
    actions = bench.says(dataclasses.replace(PULL, **pull))
    assert bool([message for message in sent(actions) if isinstance(message, Gone)]) == (offer is not None)


def test_pulls_that_wait_are_bounded_by_taker():
    """256 of one link; the next is `Gone`, the others stay."""
    bench = Bench()
    for number in range(256):
        pull = dataclasses.replace(PULL, transfer_id=TransferId(number.to_bytes(16, "big")))
        assert sent(bench.holder.handle(FromPeer(1, pull), 0.0)) == []
    assert isinstance(sent(bench.says(PULL))[0], Gone)


def test_buffers_are_given_out_in_turn():
    """A long prompt does not starve a short one."""
    bench = Bench(dataclasses.replace(SECTION, window=4))
    other = TransferId(b"u" * 16)
    for transfer_id in (ID, other):
        bench.do(Offer(transfer_id=transfer_id, attempt=1, length=LENGTH, pages="pages"))
        bench.says(dataclasses.replace(PULL, transfer_id=transfer_id))
        bench.do(BlocksFinal(transfer_id=transfer_id, num_blocks=0, pages="pages"))
    first = [a for a in bench.do(BlocksFinal(transfer_id=ID, num_blocks=2, pages="p")) if isinstance(a, Gather)]
    second = [a for a in bench.do(BlocksFinal(transfer_id=other, num_blocks=2, pages="p")) if isinstance(a, Gather)]
    assert [len(first), len(second)] == [2, 1]
    bench.gathered(first[0])
    after = bench.do(NoteIn(ID, first[0].buffer, first[0].buffer_gen))
    assert [action.transfer_id for action in after if isinstance(action, Gather)] == [other]


def test_beat_tells_progress_of_what_is_being_computed():
    """Tokens keep the taker waiting."""
    bench = Bench()
    bench.serving()
    bench.blocks(0, computed=120)
    assert bench.holder.beat(1) == Beat((ID,), ((ID, 120),))
    assert bench.holder.beat(2) == Beat()


def test_what_a_holder_says_is_no_speech_of_a_taker():
    """It is told to the links, which end the stream."""
    assert kinds(Bench().says(Serving(ID, 1))) == [ToLinks]
