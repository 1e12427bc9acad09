"""The router as a process: its first line, its signals, its errors; and clients that read slowly or not at all."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest
from router_world import in_world

from headrace.config.tree import Config, ModelSection, RouterSection
from headrace.core.errors import ConfigError
from headrace.router import connection as connection_module
from headrace.router import http as http_module
from headrace.router import main as main_module
from headrace.router.main import Router
from headrace.router.served_model import detect_profile, load_served_model

START = """
import sys
from headrace.config.tree import Config, ModelSection, RouterSection
from headrace.router.main import run
section = RouterSection(port=0, grpc_enabled=True, grpc_port=0, workers=("127.0.0.1:1",), drain_s=float(sys.argv[2]))
sys.exit(run(Config(model=ModelSection(path=sys.argv[1]), router=section)))
"""


def start(checkpoint, drain_s):
    process = subprocess.Popen(
        [sys.executable, "-c", START, checkpoint, str(drain_s)], stdout=subprocess.PIPE, text=True
    )
    fields = dict(part.split("=") for part in process.stdout.readline().split())
    assert fields["event"] == "listening"
    return process, fields


@pytest.mark.process
def test_process_says_where_it_listens_and_leaves_on_a_signal(checkpoint):
    """Port 0 on both surfaces; SIGTERM with nothing in flight ends it with status 0."""
    process, fields = start(checkpoint, 20)
    with process:
        assert httpx.get(f"http://{fields['http']}/live").status_code == 200
        ready = httpx.get(f"http://{fields['http']}/ready")
        assert ready.json()["reasons"] == ["no worker is connected"]
        host, port = fields["grpc"].split(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0


def test_the_second_of_two_that_start_at_once_is_refused():
    """Before either serves: not told, it would say that it listens, and its clients would be answered by the other."""
    with main_module._bind("127.0.0.1", 0) as first, pytest.raises(ConfigError, match="cannot listen on"):
        main_module._bind("127.0.0.1", first.getsockname()[1])


def test_taken_port_is_a_clear_error(checkpoint):
    """It names the setting and the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        async def over_http():
            await Router(Config(model=ModelSection(path=checkpoint), router=RouterSection(port=port))).start()

        with pytest.raises(ConfigError, match=rf"router.port.*127.0.0.1:{port}"):
            asyncio.run(over_http())

        async def over_grpc():
            section = RouterSection(port=0, grpc_enabled=True, grpc_port=port)
            await Router(Config(model=ModelSection(path=checkpoint), router=section)).start()

        with pytest.raises(ConfigError, match=r"router\.grpc_port"):
            asyncio.run(over_grpc())


def test_import_is_light():
    """Neither torch nor nixl nor transformers; the room itself loads at once."""
    code = (
        "import time, sys; begin = time.perf_counter(); import headrace.router; took = time.perf_counter() - begin;"
        "import headrace.router.main;"
        "print(took, sorted({'torch', 'nixl', 'nixl_cu13', 'transformers'} & set(sys.modules)))"
    )
    took, loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split(maxsplit=1)
    assert float(took) < 0.5
    assert loaded.strip() == "[]"


def test_checkpoint_without_its_files_is_a_clear_error(tmp_path):
    """What is missing is named."""
    with pytest.raises(ConfigError, match=r"model\.path is not set"):
        load_served_model(ModelSection())
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_served_model(ModelSection(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="no JSON"):
        load_served_model(ModelSection(path=str(tmp_path)))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_served_model(ModelSection(path=str(tmp_path)))


def test_effort_profile_is_detected(tmp_path):
    """From the encoder's text, else from the date in the name."""
    for name, expected in (
        ("V4-Flash", "preview"),
        ("V4-0731", "official"),
        ("V4-0424", "preview"),
        ("V4-1201", "official"),
    ):
        folder = tmp_path / name
        folder.mkdir()
        assert detect_profile(folder) == expected
    (tmp_path / "V4-0731" / "encoding").mkdir()
    source = tmp_path / "V4-0731" / "encoding" / "encoding_dsv4.py"
    source.write_text("REASONING_EFFORT_MAX = 'raise SystemExit'")
    assert detect_profile(tmp_path / "V4-0731") == "preview"
    source.write_text("REASONING_EFFORT_PROMPTS = {}")
    assert detect_profile(tmp_path / "V4-0731") == "official"


def test_silent_stream_is_kept_alive(monkeypatch, checkpoint):
    """A comment after the first event; clients skip it."""
    monkeypatch.setattr(http_module, "KEEP_ALIVE_S", 0.05)

    @in_world()
    async def scenario(w):
        w.workers["decode-1"].faults.step_s = 0.15
        body = {"prompt": "x", "max_tokens": 3, "stream": True}
        async with httpx.AsyncClient(base_url=w.url) as client:
            parts = (await client.post("/v1/completions", json=body)).text.split("\n\n")
        assert ": keep-alive" in parts
        assert parts[0].startswith("data: ")
        stream = await w.client.completions.create(model="tide", prompt="x", max_tokens=3, stream=True)
        assert len("".join([chunk.choices[0].text async for chunk in stream])) == 3

    scenario(checkpoint)


def test_client_that_does_not_finish_its_headers_is_left(monkeypatch, checkpoint):
    """Silence, half a head, half a second head: closed after the deadline; a running answer is not cut."""
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.2)

    @in_world()
    async def scenario(w):
        host, _, port = w.router.http_address.rpartition(":")
        whole = b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n"
        for sent, status in ((b"", b""), (b"GET /li", b""), (whole + b"GET /live HTTP/1.1\r\nhost", b"HTTP/1.1 200")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(5):
                answer = await reader.read()
            assert answer.startswith(status)
            assert answer.count(b"HTTP/1.1") == bool(status)
            writer.close()

        w.workers["decode-1"].faults.step_s = 0.1
        body = json.dumps({"prompt": "x", "max_tokens": 8, "stream": True}).encode()
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        writer.write(b"GET /live HTTP/1.1\r\nhost")
        async with asyncio.timeout(10):
            answer = await reader.read()
        assert answer.count(b"data: [DONE]") == 1
        writer.close()

    scenario(checkpoint)


@in_world()
async def test_headers_without_an_end_are_refused(w):
    """Long before they fill the memory."""
    host, _, port = w.router.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /live HTTP/1.1\r\nx: ")
    num_sent = 0
    with contextlib.suppress(ConnectionError):
        while num_sent < 64 << 20 and not reader.at_eof():
            writer.write(b"a" * 65536)
            num_sent += 65536
            await writer.drain()
    assert num_sent < 32 << 20
    writer.close()


def test_client_that_does_not_read_is_left(monkeypatch, checkpoint):
    """A write that waits too long ends the request on the workers, and the connection."""
    monkeypatch.setattr(http_module, "SLOW_CLIENT_S", 0.3)

    @in_world()
    async def scenario(w):
        body = {"prompt": "x", "max_tokens": 4000, "logprobs": 20, "n": 4, "stream": True}
        body["return_tokens_as_token_ids"] = True
        data = json.dumps(body).encode()
        host, port = w.router.http_address.split(":")
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, (host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n\r\n".encode()
        await loop.sock_sendall(sock, head + data)
        await w.until(lambda: w.router.dispatcher.num_alive > 0)
        began = time.monotonic()
        await w.until(lambda: w.router.http.num_in_flight == 0, timeout_s=20)
        sock.close()
        assert w.router.dispatcher.num_alive == 0
        assert time.monotonic() - began < 20
        metrics = w.router.dispatcher.metrics.render("")[0].decode()
        ended = [line for line in metrics.splitlines() if line.startswith("headrace:request_total{")]
        assert ended == ['headrace:request_total{outcome="cancelled",surface="completions"} 1.0']

    scenario(checkpoint)
