"""What can be said of the NIXL driver without a second process."""

from __future__ import annotations

import socket

import pytest

from headrace.core.errors import PeerLost, TransferFailed
from headrace.core.ids import Incarnation, WorkerId
from headrace.transfer import nixl_driver
from headrace.transfer.buffers import BufferMemory
from headrace.transfer.nixl_driver import NixlDriver, agent_name


def test_agent_name_is_one_life():
    """Worker and incarnation."""
    assert agent_name(WorkerId("dec-3"), Incarnation(255)) == "dec-3.00000000000000ff"


@pytest.mark.parametrize(
    ("setting", "allowed"),
    [
        (None, "tcp|cma"),
        ("all", "tcp|cma"),
        ("tcp,self", "tcp"),
        ("tcp,self,cma", "tcp|cma"),
        ("self", "none"),
        ("^sm", "tcp|cma"),
        ("rc,cuda_ipc", "rc|cuda_ipc"),
    ],
)
def test_unmeasured_transport_is_what_the_settings_allow(setting, allowed, monkeypatch):
    """Said as alternatives, never as a guess."""
    if setting is None:
        monkeypatch.delenv("UCX_TLS", raising=False)
    else:
        monkeypatch.setenv("UCX_TLS", setting)
    assert nixl_driver._allowed() == allowed


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
    send, landing = BufferMemory(2, 4096), BufferMemory(2, 4096)
    driver.register(send=send.region, landing=landing.region)
    assert 0 < len(driver.metadata()) < 64 << 10
    for metadata in (b"", b"garbage", driver.metadata()[:50]):
        with pytest.raises(PeerLost):
            driver.add_peer(metadata)
    with pytest.raises(TransferFailed):
        driver.post_read("nobody", local=landing.address(0), remote=1, num_bytes=64, remote_device="cpu", note=b"")
    driver.remove_peer("nobody")
    assert driver.notes() == []
    driver.close()
