"""The taker decides: what to read, what to believe, and the one outcome."""

from __future__ import annotations

import dataclasses

import pytest

from headrace.config.tree import TransferSection
from headrace.core.errors import Cancelled, PeerLost, StaleEpoch, TransferFailed
from headrace.core.ids import Incarnation, TransferId, WorkerId
from headrace.core.peer import (
    Beat,
    Cancel,
    Complete,
    Gone,
    Missing,
    Pull,
    Release,
    SegmentReady,
    Serving,
    Taken,
)
from headrace.core.segments import RangeKind, SegmentRange
from headrace.transfer.api import Arrived, CancelPull, LinkDirection, NotNeeded, OpenPull, PullFailed, Quarantined
from headrace.transfer.buffers import LandingBuffers
from headrace.transfer.decisions import (
    Deliver,
    FromPeer,
    LinkDoubted,
    LinkLost,
    LinkReady,
    LinkTrusted,
    PeerUnreachable,
    PostRead,
    ReadDone,
    ReadFailed,
    ReadLost,
    ReadOverdue,
    Scatter,
    Scattered,
    Send,
    Tick,
    ToLinks,
)
from headrace.transfer.header import HEADER_BYTES, announced_header, segment_digest
from headrace.transfer.plain_cache import PlainGeometry
from headrace.transfer.taker import Taker

ID = TransferId(b"t" * 16)
SECTION = TransferSection(segment_bytes=300, num_landing_buffers=4, window=3, read_deadline_s=5.0)
LINK = LinkReady(
    link_id=1,
    direction=LinkDirection.OUT,
    peer="p",
    incarnation=77,
    window=3,
    segment_bytes=300,
    agent="p.77",
    buffer_base=1 << 20,
    buffer_bytes=4096,
    num_buffers=9,
    bytes_per_s=1e9,
    transport="memory",
)
LENGTH = 700
GEOMETRY = PlainGeometry()
SEGMENTS = GEOMETRY.history_segments(0, 2, 300) + GEOMETRY.tail_segments(LENGTH, 300)
ORDER = OpenPull(
    transfer_id=ID,
    attempt=1,
    holder=WorkerId("p"),
    holder_incarnation=Incarnation(77),
    pages="pages",
    length=LENGTH,
)


class Bench:
    """A taker with one link, its actions at hand."""

    def __init__(self, section: TransferSection = SECTION, *, link: bool = True) -> None:
        self.buffers = LandingBuffers(section.num_landing_buffers, 3, section.reads)
        self.taker = Taker(geometry=GEOMETRY, buffers=self.buffers, section=section)
        self.now_s = 0.0
        if link:
            self.do(LINK)

    def do(self, event, *, after_s: float = 0.0):
        self.now_s += after_s
        actions = self.taker.handle(event, self.now_s)
        assert self.taker.audit() == []
        return actions

    def says(self, message, *, link: int = 1):
        return self.do(FromPeer(link, message))

    def taking(self) -> None:
        self.do(ORDER)
        self.says(Serving(ID, LENGTH))

    def read(self, post: PostRead, message: SegmentReady, *, header: bytes | None = None, digest: int = 1):
        """The READ ends; and the scatter, if there is one."""
        actions = self.do(ReadDone(post.landing, announced_header(message) if header is None else header))
        done = list(actions)
        for action in actions:
            if isinstance(action, Scatter):
                done += self.do(Scattered(action.landing, digest))
        return done

    def take(self, seq: int):
        """One good segment, start to end."""
        message = ready(seq)
        (post,) = posts(self.says(message))
        return self.read(post, message)


def ready(seq: int, **changes) -> SegmentReady:
    index = SEGMENTS[seq % len(SEGMENTS)]
    message = SegmentReady(
        transfer_id=ID,
        attempt=1,
        seq=seq,
        buffer=seq % 8,
        buffer_gen=1,
        payload_bytes=GEOMETRY.payload_bytes(index, LENGTH),
        digest=segment_digest(index, 1),
        index=index,
    )
    return dataclasses.replace(message, **changes)


def complete(num_segments: int = len(SEGMENTS), **changes) -> Complete:
    message = Complete(
        transfer_id=ID,
        length=LENGTH,
        num_segments=num_segments,
        payload_bytes=0,
        first_token=9,
        first_index=0,
        computed_tokens=LENGTH,
        cached_tokens=0,
        ended=False,
    )
    return dataclasses.replace(message, **changes)


def posts(actions):
    return [action for action in actions if isinstance(action, PostRead)]


def sent(actions):
    return [action.message for action in actions if isinstance(action, Send)]


def told(actions):
    return [action.event for action in actions if isinstance(action, Deliver)]


def failed(actions) -> PullFailed:
    (event,) = (event for event in told(actions) if isinstance(event, PullFailed))
    return event


def test_pull_is_sent_over_a_link_to_that_life_of_the_holder():
    """At once if it is up, else when it comes up; never to another incarnation."""
    assert isinstance(sent(Bench().do(ORDER))[0], Pull)
    bench = Bench(link=False)
    assert bench.do(ORDER) == []
    assert bench.do(dataclasses.replace(LINK, incarnation=78)) == []
    assert sent(bench.do(dataclasses.replace(LINK, link_id=2)))[0].holder_incarnation == 77


def test_everything_stored_and_complete_is_taken():
    """In either order of the last segment and `Complete`."""
    for complete_first in (True, False):
        bench = Bench()
        bench.taking()
        for seq in range(len(SEGMENTS) - 1):
            assert told(bench.take(seq)) == []
        last = ready(len(SEGMENTS) - 1)
        (post,) = posts(bench.says(last))
        if complete_first:
            assert bench.says(complete()) == []
            actions = bench.read(post, last)
        else:
            assert told(bench.read(post, last)) == []
            actions = bench.says(complete())
        assert sent(actions) == [Taken(ID)]
        (arrived,) = told(actions)
        assert isinstance(arrived, Arrived)
        assert arrived.first_token == 9
        assert arrived.stats.num_segments == len(SEGMENTS)
        assert bench.buffers.counts()["free"] == 4


def test_more_than_so_many_reads_of_a_peer_wait_announced():
    """The next one begins with the end of another, before its scatter: the connection is never without one."""
    bench = Bench(dataclasses.replace(SECTION, reads=2))
    bench.taking()
    (first,), (second,) = (posts(bench.says(ready(seq))) for seq in range(2))
    assert bench.says(ready(2)) == []
    assert bench.says(ready(3)) == []
    actions = bench.do(ReadDone(first.landing, announced_header(ready(0))))
    assert [type(action) for action in actions] == [Scatter, PostRead]
    (third,) = posts(actions)
    assert third.num_bytes == HEADER_BYTES + ready(2).payload_bytes
    assert posts(bench.do(ReadDone(second.landing, announced_header(ready(1))))) == [], "three buffers are its share"
    assert len(posts(bench.do(Scattered(first.landing, 1)))) == 1


def test_read_names_the_announced_buffer_and_nothing_else():
    """Address from the link's base and the bounded buffer number; length from the index."""
    bench = Bench()
    bench.taking()
    message = ready(0, buffer=5)
    (post,) = posts(bench.says(message))
    assert (post.agent, post.remote) == ("p.77", (1 << 20) + 5 * 4096)
    assert post.num_bytes == 64 + message.payload_bytes


@pytest.mark.parametrize(
    "changes",
    [
        {"buffer": 8},
        {"buffer": 1 << 31},
        {"payload_bytes": 1 << 31},
        {"payload_bytes": 1},
        {"index": ()},
        {"index": (SegmentRange(RangeKind.HISTORY, 0, 1, 900, 1),)},
        {"index": (SegmentRange(RangeKind.HISTORY, 0, 3, 0, 1),) * 2},
    ],
)
def test_announcement_out_of_bounds_is_the_holders_fault(changes):
    """ABORTED before anything is read."""
    bench = Bench()
    bench.taking()
    actions = bench.says(ready(0, **changes))
    assert posts(actions) == []
    assert sent(actions) == [Cancel(ID)]
    assert isinstance(failed(actions).error, TransferFailed)
    assert bench.taker.refused["bounds"] == 1


def test_segment_larger_than_a_landing_buffer_is_the_holders_fault():
    """However well its index and its bytes agree: a READ of it would write beside the buffer (I10)."""
    bench = Bench()
    bench.taking()
    large = (SegmentRange(RangeKind.HISTORY, 0, 3, 0, 2),)
    size = GEOMETRY.payload_bytes(large, LENGTH)
    assert size > SECTION.segment_bytes
    actions = bench.says(ready(0, index=large, payload_bytes=size))
    assert posts(actions) == []
    assert isinstance(failed(actions).error, TransferFailed)
    assert bench.taker.refused["bounds"] == 1


def test_more_announced_than_the_window_is_a_fault():
    """The holder agreed to it in the handshake. What is being read does not count: its note may be out already."""
    bench = Bench(dataclasses.replace(SECTION, num_landing_buffers=1))
    bench.taking()
    for seq in range(4):
        assert told(bench.says(ready(seq))) == []
    assert failed(bench.says(ready(4)))


def test_landing_buffers_bound_what_is_read_at_once():
    """Announced segments wait unread; each free buffer takes the next."""
    bench = Bench(dataclasses.replace(SECTION, num_landing_buffers=1))
    bench.taking()
    (post,) = posts(bench.says(ready(0)))
    assert posts(bench.says(ready(1))) == []
    after = bench.read(post, ready(0))
    assert len(posts(after)) == 1


def test_stored_or_flying_ranges_are_released_unread():
    """A stored range is never stored again."""
    bench = Bench()
    bench.taking()
    bench.take(0)
    again = bench.says(ready(len(SEGMENTS), buffer=7, buffer_gen=3))
    assert sent(again) == [Release(ID, 7, 3)]
    bench.says(ready(1))
    assert sent(bench.says(ready(len(SEGMENTS) + 1))) == [Release(ID, 7, 1)]


def test_the_same_announcement_twice_is_read_once():
    """It is not even released: its READ may be running."""
    bench = Bench()
    bench.taking()
    assert len(posts(bench.says(ready(0)))) == 1
    assert bench.says(ready(0)) == []
    assert bench.taker.stale_messages == 1


@pytest.mark.parametrize("kind", ["stale", "digest"])
def test_bytes_that_are_not_the_announced_ones_are_asked_for_again_twice(kind):
    """Another header is stale and never scattered; another digest is corrupt. The third time is the end."""
    bench = Bench()
    bench.taking()
    for attempt in range(3):
        message = ready(attempt * len(SEGMENTS), buffer=0)
        (post,) = posts(bench.says(message))
        if kind == "stale":
            actions = bench.read(post, message, header=announced_header(dataclasses.replace(message, buffer_gen=9)))
            assert not any(isinstance(action, Scatter) for action in actions)
        else:
            actions = bench.read(post, message, digest=2)
        if attempt < 2:
            assert isinstance(sent(actions)[0], Missing)
            assert GEOMETRY.split(sent(actions)[0].ranges) == GEOMETRY.split(SEGMENTS[0])
    assert sent(actions) == [Cancel(ID)]
    assert failed(actions).error.reason == "transfer_failed"
    assert bench.taker.refused[kind] == 3


def test_refused_ranges_do_not_count_and_can_still_arrive():
    """Corrupted once, then good: TAKEN."""
    bench = Bench()
    bench.taking()
    bad = ready(0)
    bench.read(posts(bench.says(bad))[0], bad, digest=2)
    for seq in range(1, len(SEGMENTS) + 1):
        actions = bench.take(seq)
    assert told(actions) == []
    assert isinstance(told(bench.says(complete(len(SEGMENTS) + 1)))[0], Arrived)


def test_what_lacks_at_complete_is_missing():
    """An announcement that was lost shows there; the second `Complete` with new totals looks again."""
    bench = Bench()
    bench.taking()
    for seq in range(len(SEGMENTS) - 1):
        bench.take(seq)
    actions = bench.says(complete())
    (missing,) = sent(actions)
    assert GEOMETRY.split(missing.ranges) == GEOMETRY.split(SEGMENTS[-1])
    assert bench.says(complete()) == []
    assert isinstance(sent(bench.says(complete(len(SEGMENTS) + 1)))[0], Missing)
    assert failed(bench.says(complete(len(SEGMENTS) + 2)))


@pytest.mark.parametrize("changes", [{"length": 701}, {"num_segments": 0}, {"more_first_tokens": (8,)}])
def test_complete_that_contradicts_what_came_is_a_fault(changes):
    """Another length, fewer segments than were announced, or first tokens of choices that nobody asked for."""
    bench = Bench()
    bench.taking()
    bench.take(0)
    assert failed(bench.says(complete(**changes)))


def test_first_token_that_ends_the_request_ends_the_pull_without_an_error():
    """Nothing to take; the pages are released, running READs are left to the reaper."""
    bench = Bench()
    bench.taking()
    bench.says(ready(0))
    assert told(bench.says(complete(ended=True))) == [NotNeeded(ID, 9, 0)]
    assert bench.buffers.counts()["held"] == 1


@pytest.mark.parametrize("ended", [False, True])
def test_first_tokens_of_all_choices_come_with_one_transfer(ended):
    """As many as the pull wants; one too few, and nothing is admitted."""
    bench = Bench()
    bench.do(dataclasses.replace(ORDER, num_choices=3))
    bench.says(Serving(ID, LENGTH))
    for seq in range(len(SEGMENTS)):
        bench.take(seq)
    (event,) = told(bench.says(complete(ended=ended, more_first_tokens=(8, 7))))
    assert isinstance(event, NotNeeded if ended else Arrived)
    assert (event.first_token, event.more_first_tokens) == (9, (8, 7))
    bench = Bench()
    bench.do(dataclasses.replace(ORDER, num_choices=3))
    bench.says(Serving(ID, LENGTH))
    assert failed(bench.says(complete(ended=ended, more_first_tokens=(8,))))


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (CancelPull(ID), Cancelled),
        (FromPeer(1, Gone(ID, "withdrawn")), TransferFailed),
        (LinkLost(1, "broken"), PeerLost),
    ],
)
@pytest.mark.parametrize("phase", ["waiting", "taking", "reading", "scattering"])
def test_an_abort_in_any_phase_is_reported_when_no_scatter_writes_the_pages(event, error, phase):
    """The outcome is decided at once; the pages are given back when the copies have ended."""
    bench = Bench()
    bench.do(ORDER)
    post = None
    if phase != "waiting":
        bench.says(Serving(ID, LENGTH))
    if phase in ("reading", "scattering"):
        (post,) = posts(bench.says(ready(0)))
    if phase == "scattering":
        bench.do(ReadDone(post.landing, announced_header(ready(0))))
    actions = bench.do(event)
    if phase == "scattering":
        assert told(actions) == []
        assert bench.taker.counts()["draining"] == 1
        assert bench.do(CancelPull(ID)) == []
        actions = bench.do(Scattered(post.landing, 1))
    assert isinstance(failed(actions).error, error)
    assert bench.buffers.counts()["held"] == (1 if phase == "reading" else 0)
    if phase == "reading":
        assert bench.do(ReadDone(post.landing, b"x" * 64)) == []
    assert bench.buffers.counts()["free"] == 4


def test_overdue_read_is_the_end_and_its_buffer_is_held():
    """The deadline gives the READ up and doubts the link; late bytes are never scattered."""
    bench = Bench(dataclasses.replace(SECTION, progress_deadline_s=60.0))
    bench.taking()
    (post,) = posts(bench.says(ready(0)))
    actions = bench.do(Tick(), after_s=5.1)
    assert failed(actions).error.reason == "transfer_failed"
    assert ToLinks(ReadOverdue(1)) in actions
    assert bench.buffers.counts()["held"] == 1
    assert bench.do(ReadDone(post.landing, announced_header(ready(0)))) == []
    assert bench.buffers.counts()["free"] == 4


def test_failed_read_ends_the_pull_and_frees_its_buffer():
    """A connection error is terminal: nothing more lands."""
    bench = Bench()
    bench.taking()
    (post,) = posts(bench.says(ready(0)))
    actions = bench.do(ReadLost(post.landing))
    assert isinstance(failed(actions).error, PeerLost)
    # The connection went with it: the link has to know.
    assert ToLinks(ReadFailed("p.77")) in actions
    assert bench.buffers.counts()["free"] == 4


@pytest.mark.parametrize(
    ("prepare", "wait_s"),
    [
        (lambda bench: bench.do(ORDER), SECTION.queue_budget_s),
        (lambda bench: bench.taking(), SECTION.step_deadline_s),
    ],
    ids=["queue", "step"],
)
def test_each_wait_of_the_taker_has_a_deadline(prepare, wait_s):
    """Driven by its own timer."""
    bench = Bench()
    prepare(bench)
    assert bench.taker.next_s() == pytest.approx(wait_s)
    assert bench.do(Tick(), after_s=wait_s - 0.01) == []
    assert failed(bench.do(Tick(), after_s=0.02))


def test_waiting_for_a_link_has_a_deadline_and_ends_with_a_refusal():
    """Ten seconds, or at once when the link can't be."""
    bench = Bench(link=False)
    bench.do(ORDER)
    assert isinstance(failed(bench.do(Tick(), after_s=10.1)).error, PeerLost)
    bench = Bench(link=False)
    bench.do(ORDER)
    assert isinstance(failed(bench.do(PeerUnreachable("p", "incompatible"))).error, PeerLost)


def test_tokens_that_are_being_computed_are_progress():
    """A beat with more tokens starts the watchdog anew; one with as many does not."""
    bench = Bench(dataclasses.replace(SECTION, step_deadline_s=5.0))
    bench.taking()
    bench.do(FromPeer(1, Beat((), ((ID, 100),))), after_s=4.0)
    assert bench.do(Tick(), after_s=4.0) == []
    bench.do(FromPeer(1, Beat((), ((ID, 100),))))
    assert failed(bench.do(Tick(), after_s=2.0))


def test_a_step_longer_than_a_move_may_take_is_no_stall():
    """A chunk of a long prompt is computed for as long as it takes; what was announced has the short deadline again."""
    bench = Bench(dataclasses.replace(SECTION, read_deadline_s=20.0))
    bench.taking()
    for seq in range(2):
        assert bench.do(Tick(), after_s=SECTION.step_deadline_s - 1) == []
        bench.take(seq)
    assert posts(bench.says(ready(2)))
    assert failed(bench.do(Tick(), after_s=SECTION.progress_deadline_s + 0.1))


def test_after_the_last_step_only_moves_are_waited_for():
    """`Complete` has come: whatever is missing has been computed."""
    bench = Bench()
    bench.taking()
    bench.says(complete())
    assert failed(bench.do(Tick(), after_s=SECTION.progress_deadline_s + 0.1))


def test_a_link_in_doubt_gets_nothing_new_and_five_seconds_for_the_rest():
    """Trust gives the time back."""
    bench = Bench(dataclasses.replace(SECTION, progress_deadline_s=60.0))
    bench.taking()
    bench.do(LinkDoubted(1))
    other = dataclasses.replace(ORDER, transfer_id=TransferId(b"u" * 16))
    assert bench.do(other) == []
    bench.do(Tick(), after_s=4.9)
    assert [type(message) for message in sent(bench.do(LinkTrusted(1)))] == [Pull]
    assert bench.do(Tick(), after_s=4.9) == []
    bench.do(LinkDoubted(1))
    assert len(told(bench.do(Tick(), after_s=5.1))) == 2


def test_half_of_the_buffers_held_by_late_reads_is_said_once():
    """The worker is to leave and restart. A pull that was cancelled speaks against nobody before its READs are late."""
    bench = Bench()
    bench.taking()
    for seq in range(2):
        bench.says(ready(seq))
    assert not any(isinstance(event, Quarantined) for event in told(bench.do(CancelPull(ID))))
    assert told(bench.do(Tick(), after_s=4.9)) == []
    assert told(bench.do(Tick(), after_s=0.2)) == [Quarantined(2, 4)]
    assert told(bench.do(Tick())) == []


def test_reads_that_end_in_time_after_their_pull_was_cancelled_are_no_alarm():
    """A burst of clients that leave costs buffers for as long as the bytes take, and nothing else."""
    bench = Bench()
    bench.taking()
    for seq in range(2):
        bench.says(ready(seq))
    bench.do(CancelPull(ID))
    for landing in range(2):
        bench.do(ReadDone(landing, bytes(64)))
    assert told(bench.do(Tick(), after_s=60.0)) == []
    assert bench.buffers.num_held == bench.buffers.num_overdue == 0


def test_late_speech_is_counted_and_changes_nothing():
    """After the end, of another link, of another attempt."""
    bench = Bench()
    bench.taking()
    assert bench.says(ready(0), link=2) == []
    assert bench.says(ready(0, attempt=2)) == []
    assert bench.says(Serving(ID, LENGTH)) == []
    bench.do(CancelPull(ID))
    for message in (ready(0), complete(), Gone(ID, ""), Serving(ID, LENGTH)):
        assert bench.says(message) == []
    assert bench.taker.stale_messages == 7


def test_a_transfer_id_is_used_once():
    """A second order with it fails by itself; while the first is open it is ignored."""
    bench = Bench()
    bench.do(ORDER)
    assert bench.do(ORDER) == []
    bench.do(CancelPull(ID))
    assert isinstance(failed(bench.do(ORDER)).error, StaleEpoch)


def test_an_order_that_cannot_be_fails_by_itself():
    """More blocks held than the sequence has."""
    actions = Bench().do(dataclasses.replace(ORDER, length=0))
    assert failed(actions)


def test_serving_another_length_is_a_fault():
    """Both ends must speak of the same prompt."""
    bench = Bench()
    bench.do(ORDER)
    assert failed(bench.says(Serving(ID, LENGTH + 1)))
