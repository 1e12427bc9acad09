"""READs between processes of one host: by copying what can be mapped, by the other driver what cannot."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.clock import MonotonicClock
from headrace.core.errors import PeerLost
from headrace.transfer import one_host_driver
from headrace.transfer.buffers import HostMemory, region_of
from headrace.transfer.driver import ReadState, Region
from headrace.transfer.memory_driver import MemoryDriver, MemoryNetwork
from headrace.transfer.one_host_driver import MAGIC, TRANSPORT, OneHostDriver, _Described, _split

STRIDE = 8192


class Telling(MemoryDriver):
    """The driver for all other peers: its network is this process, its metadata the agent's name."""

    def tell(self, peer: str, note: bytes) -> None:
        self.told = [*getattr(self, "told", []), (peer, note)]


class End:
    """A driver with two buffers of each kind."""

    def __init__(self, name: str, network: MemoryNetwork) -> None:
        self.other = network.driver(name)
        self.other.__class__ = Telling
        self.driver = OneHostDriver(self.other)  # type: ignore[arg-type]
        self.send, self.landing = HostMemory(2, STRIDE), HostMemory(2, STRIDE)
        self.driver.register(send=region_of(self.send), landing=region_of(self.landing))

    def read(self, peer: str, remote: int, num_bytes: int, note: bytes = b"note") -> ReadState:
        handle = self.driver.post_read(
            peer, local=self.landing.base_address, remote=remote, num_bytes=num_bytes, remote_device="cpu", note=note
        )
        end_s = time.monotonic() + 10.0
        while (state := self.driver.poll(handle)) is ReadState.PROC:
            assert time.monotonic() < end_s
            time.sleep(0.0005)
        return state


@pytest.fixture(autouse=True)
def everything_is_allowed(monkeypatch):
    monkeypatch.delenv("UCX_TLS", raising=False)


@pytest.fixture
def network():
    return MemoryNetwork(MonotonicClock())


@pytest.fixture
def pair(network):
    """Holder and taker."""
    return End("p.1", network), End("d.1", network)


def described(metadata: bytes, **changes: object) -> bytes:
    """The same metadata with another description."""
    said, rest = _split(metadata)
    assert said is not None
    words = json.dumps({**dataclasses.asdict(said), **changes}).encode()
    return MAGIC + len(words).to_bytes(2, "little") + words + rest


def test_a_read_is_a_copy_and_its_note_goes_the_other_way(pair):
    """The bytes of that moment, in the landing buffer; the peer is told once, and progress wakes whoever waits."""
    holder, taker = pair
    woken = threading.Event()
    taker.driver.on_progress(woken.set)
    name = taker.driver.add_peer(holder.driver.metadata())
    assert taker.driver.transport(name) == TRANSPORT
    for turn in range(3):
        payload = os.urandom(5000)
        holder.send.write(1, 64, payload)
        woken.clear()
        assert taker.read(name, holder.send.base_address + STRIDE + 64, 5000, b"%d" % turn) is ReadState.DONE
        assert woken.is_set()
        assert taker.landing.read(0, 0, 5000) == payload
    assert taker.other.told == [("p.1", b"0"), ("p.1", b"1"), ("p.1", b"2")]
    taker.driver.remove_peer(name)
    taker.driver.close()
    holder.driver.close()


def test_what_is_seen_changes_with_the_peers_buffer_and_outlives_its_agent(pair):
    """It is the peer's own memory; whoever refers to it may go on reading."""
    holder, taker = pair
    name = taker.driver.add_peer(holder.driver.metadata())
    base = holder.send.base_address
    seen = taker.driver.see(name, base + STRIDE, 4)
    assert seen is not None
    for word in (b"once", b"more"):
        holder.send.write(1, 0, word)
        assert ctypes.string_at(seen.address, 4) == word
    assert taker.driver.see(name, base + 2 * STRIDE - 3, 4) is None
    assert taker.driver.see("nobody", base, 4) is None
    taker.driver.remove_peer(name)
    gc.collect()
    assert ctypes.string_at(seen.address, 4) == b"more"
    taker.driver.tell("p.1", b"a note")
    assert taker.other.told == [("p.1", b"a note")]


def test_bytes_that_the_peer_does_not_have_are_lost(pair):
    """Before its memory, behind it and across its end; nothing lands."""
    holder, taker = pair
    name = taker.driver.add_peer(holder.driver.metadata())
    taker.landing.write(0, 0, b"untouched")
    base, size = holder.send.base_address, 2 * STRIDE
    for remote, num_bytes in ((base - 1, 10), (base + size, 1), (base + size - 5, 6), (0, 8), (1 << 63, 8)):
        assert taker.read(name, remote, num_bytes) is ReadState.LOST
    assert taker.landing.read(0, 0, 9) == b"untouched"
    assert taker.read(name, base + size - 5, 5) is ReadState.DONE


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        (None, True), ("all", True), ("shm,tcp", True), ("posix,self", True), ("tcp,self", False),
        ("cma,tcp,self", False), ("^shm", False), ("^rc", True), ("self", False),
    ],
)  # fmt: skip
def test_what_may_carry_bytes_is_said_where_ucx_is_told(setting, allowed, monkeypatch, network):
    """One switch for both. What is not allowed is neither offered nor taken."""
    if setting is not None:
        monkeypatch.setenv("UCX_TLS", setting)
    assert one_host_driver.is_allowed() is allowed
    holder = End("p.1", network)
    assert (_split(holder.driver.metadata())[0] is not None) is allowed
    monkeypatch.delenv("UCX_TLS", raising=False)
    offering = End("p.2", network)
    offered = offering.driver.metadata()
    if setting is not None:
        monkeypatch.setenv("UCX_TLS", setting)
    taker = End("d.1", network)
    assert (taker.driver.transport(taker.driver.add_peer(offered)) == TRANSPORT) is allowed


def unsealed() -> int:
    number = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(number, 2 * STRIDE)
    return number


def pipe() -> int:
    return os.pipe()[0]


def claim(number: int, **changes: object) -> Callable[[bytes], bytes]:
    """Metadata that names this file of ours, truly."""
    status = os.fstat(number)
    return lambda metadata: described(metadata, descriptor=number, device=status.st_dev, inode=status.st_ino, **changes)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda m: described(m, host="elsewhere"), id="another_host"),
        pytest.param(lambda m: described(m, pid=1 << 30), id="no_such_process"),
        pytest.param(lambda m: described(m, pid=-1), id="no_process"),
        pytest.param(lambda m: described(m, descriptor=1 << 20), id="no_such_file"),
        pytest.param(lambda m: described(m, inode=1), id="another_file"),
        pytest.param(lambda m: described(m, num_bytes=1 << 40), id="larger_than_it_is"),
        pytest.param(lambda m: described(m, num_bytes=0), id="nothing"),
        pytest.param(lambda m: claim(unsealed())(m), id="may_be_cut_off"),
        pytest.param(lambda m: claim(pipe())(m), id="a_pipe"),
        pytest.param(lambda m: MAGIC + b"\0\0" + _split(m)[1], id="said_nothing"),
    ],
)
def test_what_cannot_be_mapped_safely_is_left_to_the_other_driver(pair, change):
    """Silently: the bytes arrive all the same."""
    holder, taker = pair
    name = taker.driver.add_peer(change(holder.driver.metadata()))
    assert taker.driver.transport(name) != TRANSPORT
    holder.send.write(0, 0, b"by another way")
    assert taker.read(name, holder.send.base_address, 14) is ReadState.DONE
    assert taker.landing.read(0, 0, 14) == b"by another way"


def test_buffers_on_a_gpu_are_left_to_the_other_driver(network):
    """Neither end of such a pair has bytes to copy."""
    driver = network.driver("p.1")
    driver.__class__ = Telling
    ours = OneHostDriver(driver)  # type: ignore[arg-type]
    memory = HostMemory(2, STRIDE)
    region = Region(memory.base_address, 2 * STRIDE, "cpu", None)
    ours.register(send=region, landing=region)
    assert _split(ours.metadata())[0] is None


@given(st.binary(max_size=200) | st.builds(lambda rest: MAGIC + rest, st.binary(max_size=200)))
def test_wild_metadata_is_refused_or_says_nothing(metadata):
    """Never another error."""
    try:
        said, rest = _split(metadata)
    except PeerLost:
        return
    assert said is None
    assert metadata.endswith(rest)


@pytest.mark.parametrize(
    "words",
    [{}, {"pid": 1}, [], 7, dict.fromkeys(_Described.__dataclass_fields__, "1"),
     dict.fromkeys(_Described.__dataclass_fields__, 1.5)],
)  # fmt: skip
def test_descriptions_of_another_form_are_refused(words):
    """Exactly these fields, and numbers where numbers belong."""
    text = json.dumps(words).encode()
    with pytest.raises(PeerLost):
        _split(MAGIC + len(text).to_bytes(2, "little") + text + b"rest")


def test_memory_outlives_its_process(pair, network):
    """A peer that is killed in the middle of a READ takes nothing away from under it; its file cannot be cut off."""
    code = (
        "import os, sys, time; from headrace.transfer.buffers import HostMemory;"
        "memory = HostMemory(2, 8192); memory.write(0, 0, b'last words'); s = os.fstat(memory.descriptor);"
        "print(os.getpid(), memory.descriptor, s.st_dev, s.st_ino, memory.base_address, flush=True); time.sleep(60)"
    )
    holder, taker = pair
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, descriptor, device, inode, base = (int(word) for word in process.stdout.readline().split())
        changes = {"pid": pid, "descriptor": descriptor, "device": device, "inode": inode, "base": base}
        name = taker.driver.add_peer(described(holder.driver.metadata(), **changes))
        assert taker.driver.transport(name) == TRANSPORT
        process.kill()
        process.wait()
        assert taker.read(name, base, 10) is ReadState.DONE
        assert taker.landing.read(0, 0, 10) == b"last words"
    descriptor = holder.send.descriptor
    assert descriptor is not None
    with pytest.raises(PermissionError):
        os.ftruncate(descriptor, mmap.PAGESIZE)
