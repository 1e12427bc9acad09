"""Links: the handshake, the probe, doubt and trust, and when an agent may go."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random

import pytest

from headrace.config.tree import TransferSection
from headrace.core.ids import Incarnation, TransferId, WorkerId
from headrace.core.peer import PROTOCOL, Beat, Complete, Gone, Hello, LinkUp, Pull, Refusal, Taken, Welcome
from headrace.transfer.api import (
    CloseLink,
    Dial,
    LinkChanged,
    LinkClosed,
    LinkDirection,
    LinkMessage,
    LinkOpened,
    LinkPhase,
    PeerForgotten,
    PeerFound,
)
from headrace.transfer.buffers import LandingBuffers
from headrace.transfer.decisions import (
    AddPeer,
    Deliver,
    FromPeer,
    LinkDoubted,
    LinkLost,
    LinkReady,
    LinkTrusted,
    PeerAdded,
    PeerUnreachable,
    PostRead,
    ReadDone,
    ReadFailed,
    ReadLost,
    ReadOverdue,
    RemovePeer,
    Send,
    SendBeat,
    Tick,
    ToHolder,
    ToTaker,
)
from headrace.transfer.link import Links, Self, differing_fields, golden_payload, probe_header

SECTION = TransferSection(segment_bytes=4096, num_landing_buffers=4)
PEER = WorkerId("p")
FOUND = PeerFound(PEER, "host:1", Incarnation(77))


class Bench:
    """The links of one worker."""

    def __init__(self, name: str = "d", section: TransferSection = SECTION, fingerprint: bytes = b"same") -> None:
        self.me = Self(
            worker_id=WorkerId(name),
            incarnation=Incarnation(77),
            fingerprint=fingerprint,
            document=json.dumps({"layout": fingerprint.decode()}),
            agent_name=f"{name}.77",
            agent_metadata=b"metadata",
            buffer_base=1 << 20,
            buffer_bytes=8192,
            num_buffers=9,
        )
        self.buffers = LandingBuffers(4, 2, 2)
        self.links = Links(
            me=self.me, buffers=self.buffers, section=section, rng=random.Random(1), new_link_id=itertools.count(1)
        )
        self.now_s = 0.0

    def do(self, event, *, after_s: float = 0.0):
        self.now_s += after_s
        actions = self.links.handle(event, self.now_s)
        assert self.links.audit() == []
        assert self.buffers.audit() == []
        return actions

    def dialled(self) -> int:
        (dial,) = told(self.do(FOUND), Dial)
        return dial.link_id

    def greeted(self) -> int:
        link = self.dialled()
        (hello,) = sent(self.do(LinkOpened(link, LinkDirection.OUT)))
        assert isinstance(hello, Hello)
        return link

    def probing(self) -> tuple[int, PostRead]:
        link = self.greeted()
        (add,) = of(self.do(LinkMessage(link, welcome())), AddPeer)
        assert add.metadata == b"metadata"
        (post,) = of(self.do(PeerAdded(link, "p.77")), PostRead)
        return link, post

    def land(self, post: PostRead, payload: bytes | None = None, transport: str = "memory"):
        probe = welcome().probe
        payload = golden_payload(b"same", probe.payload_bytes) if payload is None else payload
        return self.do(ReadDone(post.landing, probe_header(probe) + payload, transport), after_s=0.001)

    def up(self) -> int:
        link, post = self.probing()
        (again,) = of(self.land(post), PostRead)
        self.land(again)
        return link

    def phase(self) -> LinkPhase:
        (count,) = self.links.counts()
        return count.phase


def welcome(**changes) -> Welcome:
    """What the peer's own links would say."""
    holder = Bench("p")
    holder.do(LinkOpened(5, LinkDirection.IN))
    (message,) = sent(holder.do(LinkMessage(5, hello())))
    return dataclasses.replace(message, **changes)


def hello(**changes) -> Hello:
    message = Hello(
        protocol=PROTOCOL,
        worker_id="d",
        incarnation=77,
        fingerprint=b"same",
        document='{"layout": "same"}',
        max_segment_bytes=4096,
        window=4,
        holder_incarnation=0,
    )
    return dataclasses.replace(message, **changes)


def of(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def sent(actions):
    return [action.message for action in of(actions, Send)]


def told(actions, kind):
    return [action.event for action in of(actions, Deliver) if isinstance(action.event, kind)]


def to_taker(actions, kind):
    return [action.event for action in of(actions, ToTaker) if isinstance(action.event, kind)]


# ---- taking side ----


def test_a_link_is_up_after_its_probe_landed_whole():
    """Dial, Hello, Welcome, agent, READ of a known segment, a second one for its rate, LinkUp."""
    bench = Bench()
    link, post = bench.probing()
    assert post.remote == (1 << 20) + 8 * 8192
    (again,) = of(bench.land(post), PostRead)
    actions = bench.land(again)
    (up,) = sent(actions)
    assert isinstance(up, LinkUp)
    assert up.gigabytes_per_s == pytest.approx((64 + 4096) / 0.001 / 1e9)
    (ready,) = to_taker(actions, LinkReady)
    assert (ready.link_id, ready.agent, ready.incarnation) == (link, "p.77", 77)
    assert bench.phase() is LinkPhase.UP
    assert bench.buffers.counts()["free"] == 4


def test_a_probe_with_other_bytes_is_no_link():
    """Both ends make the probe's bytes from the fingerprint; what landed must be those."""
    bench = Bench()
    _, post = bench.probing()
    actions = bench.land(post, bytes(4096))
    assert to_taker(actions, LinkReady) == []
    assert told(actions, CloseLink) != []
    assert bench.phase() is LinkPhase.DOWN


def test_a_welcome_that_comes_with_the_handshakes_deadline_ends_it_and_its_agent_goes():
    """As after SIGSTOP: the message waits, the deadline is due in the same moment. The agent was asked for, so it is
    added; nobody waits for it any more."""
    bench = Bench()
    link = bench.greeted()
    actions = bench.do(LinkMessage(link, welcome()), after_s=11.0)
    assert of(actions, AddPeer) != []
    assert told(actions, CloseLink) != []
    assert of(bench.do(PeerAdded(link, "p.77")), RemovePeer) == [RemovePeer("p.77")]


@pytest.mark.parametrize(
    "changes",
    [
        {"worker_id": "x"},
        {"agent_metadata": b""},
        {"agent_metadata": bytes((64 << 10) + 1)},
        {"num_buffers": 0},
        {"num_buffers": 1 << 31},
        {"buffer_bytes": 0},
        {"segment_bytes": 1 << 20},
        {"buffer_base": (1 << 64) - 1},
        {"window": 0},
    ],
)
def test_a_welcome_out_of_bounds_is_no_link(changes):
    """Nothing of it is used."""
    bench = Bench()
    link = bench.greeted()
    actions = bench.do(LinkMessage(link, welcome(**changes)))
    assert of(actions, AddPeer) == []
    assert bench.phase() is LinkPhase.DOWN


def test_metadata_that_the_driver_refuses_or_that_names_another_agent_is_no_link():
    """And an agent that was added for nothing is removed."""
    bench = Bench()
    link = bench.greeted()
    bench.do(LinkMessage(link, welcome()))
    bench.do(PeerAdded(link, None))
    assert bench.phase() is LinkPhase.DOWN
    bench = Bench()
    link = bench.greeted()
    bench.do(LinkMessage(link, welcome()))
    assert of(bench.do(PeerAdded(link, "somebody")), RemovePeer) == [RemovePeer("somebody")]
    assert bench.phase() is LinkPhase.DOWN


def test_refusal_of_the_layout_is_for_good_until_another_life():
    """No retry; whoever waits is told; a new incarnation is dialled at once."""
    bench = Bench()
    link = bench.greeted()
    actions = bench.do(LinkMessage(link, Refusal("fingerprint", ("layout: a != b",))))
    assert to_taker(actions, PeerUnreachable) != []
    assert "layout: a != b" in told(actions, LinkChanged)[0].reason
    assert bench.phase() is LinkPhase.INCOMPATIBLE
    assert told(bench.do(Tick(), after_s=1000.0), Dial) == []
    assert to_taker(bench.do(FOUND), PeerUnreachable) != []
    assert told(bench.do(dataclasses.replace(FOUND, incarnation=Incarnation(78))), Dial) != []


def test_a_wrong_transport_refuses_the_link():
    """Measured by the probe; never a silent fall-back."""
    bench = Bench(section=dataclasses.replace(SECTION, require_transport="rc"))
    _, post = bench.probing()
    assert told(bench.land(post, transport="nixl/UCX tcp"), LinkChanged)[-1].phase is LinkPhase.INCOMPATIBLE


def test_dials_back_off_from_half_a_second_to_thirty_with_jitter():
    """So that a crowd does not come back in one moment."""
    bench = Bench()
    link = bench.dialled()
    waits = []
    for _ in range(9):
        bench.do(LinkClosed(link, "refused"))
        waits.append(bench.links.next_s() - bench.now_s)
        (dial,) = told(bench.do(Tick(), after_s=waits[-1]), Dial)
        link = dial.link_id
    assert all(0.25 * 2**place <= wait <= 0.5 * 2**place for place, wait in enumerate(waits[:6]))
    assert max(waits) <= 30.0


def test_a_peer_that_is_wanted_is_dialled_soon_however_long_it_was_away():
    """No pull waits for the rest of half a minute's back-off; and however many want it, it is dialled once."""
    bench = Bench()
    link = bench.dialled()
    for _ in range(9):
        bench.do(LinkClosed(link, "refused"))
        (dial,) = told(bench.do(Tick(), after_s=bench.links.next_s() - bench.now_s), Dial)
        link = dial.link_id
    bench.do(LinkClosed(link, "refused"))
    assert bench.links.next_s() - bench.now_s > 10.0
    for _ in range(4):
        assert told(bench.do(FOUND, after_s=0.1), Dial) == []
    assert len(told(bench.do(Tick(), after_s=0.25), Dial)) == 1
    assert told(bench.do(FOUND), Dial) == []


def test_handshakes_run_one_at_a_time():
    """The second stream waits with its Hello until the first link is up, or has failed."""
    bench = Bench()
    first = bench.dialled()
    (dial,) = told(bench.do(PeerFound(WorkerId("q"), "host:2")), Dial)
    assert sent(bench.do(LinkOpened(first, LinkDirection.OUT))) != []
    assert sent(bench.do(LinkOpened(dial.link_id, LinkDirection.OUT))) == []
    assert isinstance(sent(bench.do(LinkClosed(first, "broken")))[0], Hello)


@pytest.mark.parametrize("stage", ["dialling", "hello", "probe"])
def test_each_stage_of_a_handshake_has_a_deadline(stage):
    """Ten seconds; the probe's buffer is HELD until its READ has ended."""
    bench = Bench()
    {"dialling": bench.dialled, "hello": bench.greeted, "probe": bench.probing}[stage]()
    assert told(bench.do(Tick(), after_s=10.01), CloseLink) != []
    assert bench.phase() is LinkPhase.DOWN
    assert bench.buffers.counts()["held"] == (1 if stage == "probe" else 0)


def test_three_missed_beats_are_doubt_and_a_word_with_a_probe_is_trust():
    """Any message counts as a beat. A probe alone proves nothing: over shared memory it reads a stopped peer too."""
    bench = Bench()
    link = bench.up()
    bench.do(LinkMessage(link, Beat()), after_s=5.0)
    actions = bench.do(Tick(), after_s=6.01)
    assert to_taker(actions, LinkDoubted) == [LinkDoubted(link)]
    (post,) = of(actions, PostRead)
    for _ in range(3):
        assert to_taker(bench.land(post), LinkTrusted) == []
        (post,) = of(bench.do(Tick(), after_s=1.01), PostRead)
    assert bench.phase() is LinkPhase.SUSPECT
    bench.do(LinkMessage(link, Beat()))
    assert bench.phase() is LinkPhase.SUSPECT
    assert to_taker(bench.land(post), LinkTrusted) == [LinkTrusted(link)]
    assert bench.phase() is LinkPhase.UP


def test_no_trust_while_a_read_is_overdue():
    """The probe is good, the HELD buffer of the link is not."""
    bench = Bench()
    link = bench.up()
    landing = bench.buffers.post(TransferId(b"t" * 16), link, "p.77").index
    bench.buffers.give_up(landing, bench.now_s)
    (post,) = of(bench.do(ReadOverdue(link)), PostRead)
    assert to_taker(bench.land(post), LinkTrusted) == []
    bench.buffers.done(landing)
    (post,) = of(bench.do(Tick(), after_s=1.01), PostRead)
    assert to_taker(bench.land(post), LinkTrusted) != []


def test_half_a_minute_in_doubt_is_down():
    """With all that hangs on it."""
    bench = Bench()
    link = bench.up()
    bench.do(ReadOverdue(link))
    for _ in range(29):
        bench.do(Tick(), after_s=1.0)
    assert bench.phase() is LinkPhase.SUSPECT
    assert to_taker(bench.do(Tick(), after_s=1.1), LinkLost) != []


def test_a_failed_read_ends_link_and_agent_once_no_read_runs():
    """No agent is removed under a READ."""
    bench = Bench()
    link = bench.up()
    landing = bench.buffers.post(TransferId(b"t" * 16), link, "p.77").index
    bench.buffers.give_up(landing, bench.now_s)
    actions = bench.do(ReadFailed("p.77"))
    assert to_taker(actions, LinkLost) != []
    assert of(actions, RemovePeer) == []
    bench.buffers.lost(landing)
    assert of(bench.do(Tick()), RemovePeer) == [RemovePeer("p.77")]


def test_a_lost_probe_fails_the_agent():
    """As any READ does."""
    bench = Bench()
    _, post = bench.probing()
    assert of(bench.do(ReadLost(post.landing)), RemovePeer) == [RemovePeer("p.77")]
    assert bench.phase() is LinkPhase.DOWN


def test_the_agent_of_a_broken_stream_is_kept_for_the_next_handshake():
    """Each remove and add with a living peer leaks a descriptor on both sides; after a minute it goes all the same."""
    bench = Bench()
    link = bench.up()
    assert of(bench.do(LinkClosed(link, "broken")), RemovePeer) == []
    (dial,) = told(bench.do(Tick(), after_s=0.6), Dial)
    bench.do(LinkOpened(dial.link_id, LinkDirection.OUT))
    bench.do(LinkMessage(dial.link_id, welcome()))
    (post,) = of(bench.do(PeerAdded(dial.link_id, "p.77")), PostRead)
    bench.land(*of(bench.land(post), PostRead))
    assert bench.phase() is LinkPhase.UP
    bench.do(LinkClosed(dial.link_id, "broken"))
    gone = [action for _ in range(62) for action in of(bench.do(Tick(), after_s=1.0), RemovePeer)]
    assert gone == [RemovePeer("p.77")]


def test_another_life_of_the_peer_gets_another_agent():
    """The old one is removed when the new one is welcomed."""
    bench = Bench()
    link = bench.up()
    bench.do(LinkClosed(link, "died"))
    (dial,) = told(bench.do(Tick(), after_s=0.6), Dial)
    bench.do(LinkOpened(dial.link_id, LinkDirection.OUT))
    actions = bench.do(LinkMessage(dial.link_id, welcome(incarnation=78, agent_name="p.78")))
    assert of(actions, RemovePeer) == [RemovePeer("p.77")]


def test_stale_news_of_a_peer_does_not_break_a_link_that_stands():
    """A router may be behind; the stream knows who lives there."""
    bench = Bench()
    bench.up()
    assert bench.do(dataclasses.replace(FOUND, incarnation=Incarnation(5))) == []
    assert bench.phase() is LinkPhase.UP


def test_a_refused_incarnation_is_asked_for_no_more():
    """The next Hello takes whoever answers."""
    bench = Bench()
    link = bench.greeted()
    bench.do(LinkMessage(link, Refusal("incarnation")))
    (dial,) = told(bench.do(Tick(), after_s=0.6), Dial)
    (again,) = sent(bench.do(LinkOpened(dial.link_id, LinkDirection.OUT)))
    assert again.holder_incarnation == 0


def test_a_forgotten_peer_leaves_nothing():
    """Stream closed, pulls told, agent removed, no dial."""
    bench = Bench()
    link = bench.up()
    actions = bench.do(PeerForgotten(PEER))
    assert told(actions, CloseLink) == [CloseLink(link, "forgotten")]
    assert to_taker(actions, LinkLost) != []
    assert of(actions, RemovePeer) == [RemovePeer("p.77")]
    assert bench.links.counts() == ()
    assert bench.links.next_s() is None


def test_a_link_that_is_up_beats():
    """Every two seconds, each way."""
    bench = Bench()
    link = bench.up()
    assert of(bench.do(Tick(), after_s=2.01), SendBeat) == [SendBeat(link, LinkDirection.OUT)]


def test_speech_of_a_taker_from_a_holder_breaks_the_link():
    """And the other way round."""
    bench = Bench()
    link = bench.up()
    bench.do(LinkMessage(link, Taken(TransferId(b"t" * 16))))
    assert bench.phase() is LinkPhase.DOWN
    holder = held()
    assert told(holder.do(LinkMessage(5, Gone(TransferId(b"t" * 16), ""))), CloseLink) != []


# ---- holding side ----


def held() -> Bench:
    """A holder with one link that is up."""
    bench = Bench("p")
    bench.do(LinkOpened(5, LinkDirection.IN))
    bench.do(LinkMessage(5, hello()))
    bench.do(LinkMessage(5, LinkUp(1.0, "memory")))
    return bench


def test_holder_welcomes_and_is_up_with_link_up():
    """It needs neither metadata nor memory of the taker."""
    bench = Bench("p")
    bench.do(LinkOpened(5, LinkDirection.IN))
    (message,) = sent(bench.do(LinkMessage(5, hello())))
    assert isinstance(message, Welcome)
    assert message.probe.buffer == 8
    (ready,) = [action.event for action in of(bench.do(LinkMessage(5, LinkUp(1.0, "tcp"))), ToHolder)]
    assert (ready.link_id, ready.peer) == (5, "d")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"protocol": PROTOCOL + 1}, "protocol"),
        ({"holder_incarnation": 78}, "incarnation"),
        ({"fingerprint": b"other", "document": '{"layout": "other"}'}, "fingerprint"),
        ({"window": 0}, "bounds"),
        ({"max_segment_bytes": 100}, "bounds"),
    ],
)
def test_holder_refuses_who_does_not_fit(changes, reason):
    """With a reason, the fields that differ, and the end of the stream."""
    bench = Bench("p")
    bench.do(LinkOpened(5, LinkDirection.IN))
    actions = bench.do(LinkMessage(5, hello(**changes)))
    (refusal,) = sent(actions)
    assert refusal.reason == reason
    if reason == "fingerprint":
        assert refusal.differing == ('layout: "other" != "same"',)
    assert told(actions, CloseLink) != []


@pytest.mark.parametrize(
    "message",
    [Pull(transfer_id=TransferId(b"t" * 16), attempt=1, holder_incarnation=0, held_blocks=0), LinkUp(1.0, "")],
)
def test_nothing_is_served_before_the_handshake(message):
    """A pull before Hello or before LinkUp ends the stream."""
    bench = Bench("p")
    bench.do(LinkOpened(5, LinkDirection.IN))
    actions = bench.do(LinkMessage(5, message))
    assert of(actions, ToHolder) == []
    assert told(actions, CloseLink) != []


def test_a_silent_taker_and_a_slow_handshake_are_dropped():
    """By the holder's own timers."""
    bench = Bench("p")
    bench.do(LinkOpened(5, LinkDirection.IN))
    assert told(bench.do(Tick(), after_s=10.1), CloseLink) != []
    bench = held()
    bench.do(LinkMessage(5, Beat()), after_s=29.0)
    assert told(bench.do(Tick(), after_s=29.0), CloseLink) == []
    assert [type(action.event) for action in of(bench.do(Tick(), after_s=1.1), ToHolder)] == [LinkLost]


def test_a_takers_new_life_ends_the_links_of_the_old():
    """Its streams may hang on for a while."""
    bench = held()
    bench.do(LinkOpened(6, LinkDirection.IN))
    actions = bench.do(LinkMessage(6, hello(incarnation=78)))
    assert told(actions, CloseLink) == [CloseLink(5, "the peer lives anew")]


def test_speech_of_an_up_link_reaches_the_holder():
    """In order, with its link."""
    bench = held()
    actions = bench.do(LinkMessage(5, Beat()))
    assert [action.event for action in of(actions, ToHolder)] == [FromPeer(5, Beat())]
    assert of(bench.do(LinkMessage(99, Beat())), ToHolder) == []
    assert bench.links.stale_messages == 1


def test_differing_fields_are_named_by_path():
    """The refusal names what differs; documents that nobody can read are said to be so."""
    ours = json.dumps({"layers": [{"class": "c4a"}, {"class": "window"}], "block": 256})
    theirs = json.dumps({"layers": [{"class": "c4a"}, {"class": "c128a"}], "block": 256, "more": 1})
    assert differing_fields(theirs, ours) == ('layers[1].class: "c128a" != "window"', "more: 1 != null")
    assert differing_fields("{", ours) == ("document: not readable",)
    assert differing_fields(ours, ours) == ("document: equal, yet its digest differs",)
    assert differing_fields("[" * 100_000, ours) == ("document: not readable",)
    assert len(differing_fields(json.dumps({str(n): n for n in range(500)}), "{}")) == 64


def test_complete_message_of_a_holder_goes_to_the_taker():
    """Links know nothing of transfers."""
    bench = Bench()
    link = bench.up()
    message = Complete(
        transfer_id=TransferId(b"t" * 16), length=1, num_segments=1, payload_bytes=1, first_token=1, first_index=0,
        computed_tokens=1, cached_tokens=0, ended=False,
    )  # fmt: skip
    assert to_taker(bench.do(LinkMessage(link, message)), FromPeer) == [FromPeer(link, message)]
