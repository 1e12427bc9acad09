"""What can be said of the NIXL driver without a second process."""

from __future__ import annotations

import socket
import time

import pytest

from headrace.core.errors import PeerLost
from headrace.core.ids import Incarnation, WorkerId
from headrace.transfer import nixl_driver
from headrace.transfer.buffers import HostMemory, buffer_address, region_of
from headrace.transfer.driver import ReadState
from headrace.transfer.nixl_driver import NixlDriver, agent_name


def test_agent_name_is_one_life():
    """Worker and incarnation."""
    assert agent_name(WorkerId("dec-3"), Incarnation(255)) == "dec-3.00000000000000ff"


@pytest.mark.parametrize(
    ("setting", "kind", "allowed"),
    [
        (None, "DRAM", "tcp|cma"),
        ("all", "DRAM", "tcp|cma"),
        ("all", "VRAM", "tcp|cuda_ipc"),
        ("tcp,self", "DRAM", "tcp"),
        ("tcp,self,cma", "DRAM", "tcp|cma"),
        ("self", "DRAM", "none"),
        ("^sm", "DRAM", "tcp|cma"),
        ("rc,cuda_ipc,cuda_copy", "VRAM", "rc|cuda_ipc"),
    ],
)
def test_unmeasured_transport_is_what_the_settings_allow(setting, kind, allowed, monkeypatch):
    """Said as alternatives, never as a guess."""
    if setting is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", setting)
    assert nixl_driver._allowed(kind) == allowed


def test_bytes_of_a_tcp_socket_are_seen():
    """The counter that tells TCP from the rest counts what a socket of this process has received."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        connection, _ = server.accept()
        with connection:
            before = nixl_driver._received_by_socket()
            client.sendall(bytes(100_000))
            received = 0
            while received < 100_000:
                received += len(connection.recv(1 << 20))
            after = nixl_driver._received_by_socket()
    assert before is not None
    assert after is not None
    assert max(count - before.get(inode, 0) for inode, count in after.items()) == 100_000


@pytest.mark.process
def test_driver_refuses_wild_metadata_and_foreign_addresses():
    """Errors of the library are ours, and nothing is posted."""
    driver = NixlDriver("test.1")
    send, landing = HostMemory(2, 8192), HostMemory(2, 8192)
    driver.register(send=region_of(send), landing=region_of(landing))
    assert 0 < len(driver.metadata()) < 64 << 10
    for metadata in (b"", b"garbage", driver.metadata()[:50]):
        with pytest.raises(PeerLost):
            driver.add_peer(metadata)
    local = buffer_address(landing, 0)
    handle = driver.post_read("nobody", local=local, remote=1, num_bytes=64, remote_device="cpu", note=b"")
    end_s = time.monotonic() + 10.0
    while (state := driver.poll(handle)) is ReadState.PROC:
        assert time.monotonic() < end_s
        time.sleep(0.001)
    assert state is ReadState.LOST
    driver.remove_peer("nobody")
    assert driver.notes() == []
    driver.close()
