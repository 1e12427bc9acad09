"""What `headrace serve` would start, without starting it; ports; and children that end with their parent."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from headrace.cli import ports
from headrace.cli.main import make_parser, settings
from headrace.cli.ports import FIRST_PORT, LAST_PORT, free_ports, is_free
from headrace.cli.serve import Child, base_url, complete, plan_children, worker_names
from headrace.config.load import load
from headrace.config.tree import Config
from headrace.core.errors import ConfigError


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def make_config(checkpoint: Path, **flags: str) -> Config:
    keys = {"model.path": str(checkpoint), "router.port": "0"}
    return load(flags=keys | {key.replace("__", "."): value for key, value in flags.items()})


def child_config(child: Child) -> Config:
    """The settings that a child would read from its own command line."""
    arguments = make_parser().parse_args(child.words[4:])
    return settings(arguments)


def test_children_get_the_parents_settings_by_words(checkpoint: Path):
    """Each child's own command line rebuilds what matters to it."""
    config = complete(make_config(checkpoint, model__kv_dtype="bf16", engine__max_num_batched_tokens="96"))
    router, prefill, decode = plan_children(config, {})
    assert [child.spec.name for child in (router, prefill, decode)] == ["router", "prefill-0", "decode-0"]
    for child, role in ((prefill, "prefill"), (decode, "decode")):
        own = child_config(child)
        assert (own.worker.worker_id, own.worker.role) == (child.spec.name, role)
        assert (own.model, own.engine, own.cache, own.transfer) == (
            config.model, config.engine, config.cache, config.transfer,
        )  # fmt: skip
        assert own.worker.status_port == child.status_port
    edge = child_config(router)
    assert edge.router.port == config.router.port
    addresses = {f"127.0.0.1:{child_config(child).worker.engine_port}" for child in (prefill, decode)}
    assert set(edge.router.workers) == addresses


def test_no_two_children_share_a_port(checkpoint: Path):
    """Three for each worker."""
    config = complete(make_config(checkpoint, serve__prefill="2", serve__decode="3"))
    ports = [config.router.port]
    for child in plan_children(config, {})[1:]:
        own = child_config(child).worker
        ports += [own.engine_port, own.peer_port, own.status_port]
    assert len(set(ports)) == len(ports) == 16


def test_monolithic_is_workers_that_do_both(checkpoint: Path):
    """The yardstick: same engine, no transfer."""
    config = complete(make_config(checkpoint, serve__monolithic="true"))
    assert worker_names(config) == [("worker-0", "decode", "both")]
    _, worker = plan_children(config, {})
    assert child_config(worker).worker.role == "both"


def test_keys_reach_the_router_alone_and_not_as_words(checkpoint: Path):
    """Settings in the environment become words, secrets stay out of them, other variables pass."""
    environment = {
        "HEADRACE_API_KEY": "hush", "HEADRACE_ROUTER__MAX_QUEUE": "9", "HEADRACE_LOG_LEVEL": "debug", "PATH": "/bin",
    }  # fmt: skip
    config = complete(load(environment=environment, flags={"model.path": str(checkpoint), "router.port": "0"}))
    router, *workers = plan_children(config, environment)
    assert router.environment["HEADRACE_API_KEY"] == "hush"
    assert "router.max_queue=9" in router.words
    for child in (router, *workers):
        assert "hush" not in " ".join(child.words)
        assert "hush" not in repr(child)
        assert child.environment["PATH"] == "/bin"
        assert "HEADRACE_ROUTER__MAX_QUEUE" not in child.environment
        assert "log_level=debug" in child.words
    assert all("HEADRACE_API_KEY" not in child.environment for child in workers)


def test_cores_are_shared_out(checkpoint: Path):
    """Workers of one host do not each take all of them; a wish is kept."""
    cores = len(os.sched_getaffinity(0))
    assert complete(make_config(checkpoint)).engine.num_threads == max(1, cores // 2)
    assert complete(make_config(checkpoint, serve__monolithic="true")).engine.num_threads == cores
    assert complete(make_config(checkpoint, engine__num_threads="3")).engine.num_threads == 3


def test_a_gpu_is_shared_out(checkpoint: Path):
    """Workers of one host see the same GPU first; one alone is left to choose, a wish is kept and handed on."""
    assert complete(make_config(checkpoint)).cache.gpu_memory_utilization == 0.45
    assert complete(make_config(checkpoint, serve__monolithic="true")).cache.gpu_memory_utilization == 0.0
    asked = complete(make_config(checkpoint, cache__gpu_memory_utilization="0.3"))
    assert asked.cache.gpu_memory_utilization == 0.3
    _, *workers = plan_children(asked, {})
    assert all("cache.gpu_memory_utilization=0.3" in child.words for child in workers)


def test_taken_port_is_refused_before_anything_starts(checkpoint: Path):
    """With the key that can change it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=r"router\.port"):
            complete(make_config(checkpoint, router__port=str(port)))


@pytest.mark.parametrize("port", ["0", "8000"])
def test_an_address_of_another_host_is_not_called_taken(port: str, checkpoint: Path):
    """No port would help, and none is tried after the first."""
    elsewhere = "203.0.113.7"
    for changes in (
        {"router__host": elsewhere, "router__port": port},
        {"router__grpc_enabled": "true", "router__grpc_host": elsewhere, "router__grpc_port": port},
    ):
        with pytest.raises(ConfigError, match=f"cannot listen on {elsewhere}") as caught:
            complete(make_config(checkpoint, **changes))
        assert "already" not in str(caught.value)


def test_base_url_is_one_that_can_be_dialled():
    """A wildcard is where one listens, not where one goes."""
    assert base_url(load(flags={"router.host": "0.0.0.0"})) == "http://127.0.0.1:8000"
    assert base_url(load(flags={"router.host": "::"})) == "http://[::1]:8000"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets a bound port be listened on")
def test_ports_that_were_given_out_are_given_to_nobody_else(monkeypatch: pytest.MonkeyPatch):
    """Two supervisors that start at once, or one whose worker starts again; what a port was promised to can listen."""
    first = free_ports("127.0.0.1", 1)[0] // 100 * 100
    monkeypatch.setattr(ports, "FIRST_PORT", first)
    monkeypatch.setattr(ports, "LAST_PORT", first + 60)
    own = free_ports("127.0.0.1", 20)
    script = (
        "from headrace.cli import ports\n"
        f"ports.FIRST_PORT, ports.LAST_PORT = {first}, {first + 60}\n"
        "print(*ports.free_ports('127.0.0.1', 20))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    others = {int(word) for word in run.stdout.split()}
    assert len(others) == 20
    assert not others & {*own}
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    assert server.add_insecure_port(f"127.0.0.1:{own[0]}") == own[0]
    server.start()
    assert not is_free("127.0.0.1", own[0])
    server.stop(None).wait()
    assert is_free("127.0.0.1", own[0])


def test_free_ports_are_distinct_free_and_not_ephemeral():
    """No outgoing connection can be given one of them."""
    found = free_ports("127.0.0.1", 50)
    assert len(set(found)) == 50
    assert all(FIRST_PORT <= port < LAST_PORT and is_free("127.0.0.1", port) for port in found)


def test_child_ends_when_its_parent_is_killed():
    """SIGKILL to the parent leaves no orphan: the kernel tells the child."""
    child = (
        "import os, sys; from headrace.cli.parent import die_with;"
        "die_with(int(sys.argv[1])); print('up', flush=True); os.read(0, 1)"
    )
    parent = (
        "import os, subprocess, sys;"
        f"p = subprocess.Popen([sys.executable, '-P', '-c', {child!r}, str(os.getpid())], stdout=subprocess.PIPE);"
        "p.stdout.readline(); print(p.pid, flush=True); os.read(0, 1)"
    )
    with subprocess.Popen(
        [sys.executable, "-P", "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        orphan = os.pidfd_open(int(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        process.wait()
        try:
            # Readable once the process has ended.
            assert select.select([orphan], [], [], 10.0)[0]
        finally:
            os.close(orphan)


def test_child_of_another_parent_leaves_at_once():
    """The parent may have died before the kernel was asked."""
    code = "from headrace.cli.parent import die_with; die_with(1); print('still here')"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (1, b"")
