"""`headrace demo`: the whole thing on this machine, one question asked, and what happened told in numbers.

Asks as any client would, over HTTP, and reads the router's /metrics before and after: nothing here looks inside.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import math
import os
import re
import shlex
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from ..config.load import replace
from ..config.tree import Config, RouterSection
from ..core.errors import ConfigError
from .ports import is_free
from .serve import HostServer, base_url, complete

NAME = "demo"
MAX_TOKENS = 128
TIMEOUT_S = 120.0


@dataclass(kw_only=True)
class Answer:
    """What the client saw."""

    text: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str = ""
    asked_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    """When each piece of text came."""

    @property
    def ttft_s(self) -> float:
        return self.arrivals_s[0] - self.asked_s

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


@dataclass(frozen=True, kw_only=True)
class Shipment:
    """What one request moved between the workers, by the router's own count."""

    num_bytes: int
    num_pages: int
    transport: str
    seconds: float
    tail_s: float
    prefill_s: float


def demo(config: Config, *, prompt: str, once: bool) -> int:
    """Serve the demo checkpoint, ask it `prompt`, report; then end (`once`) or serve on. The exit status."""
    print("headrace demo: a router, a prefill worker and a decode worker on this machine", flush=True)
    from ..model.demo import default_cache, ensure_demo

    checkpoint = ensure_demo()
    _tell("checkpoint", str(checkpoint))
    changes: dict[str, object] = {"model.path": str(checkpoint), "model.served_names": [NAME]}
    with open_log(default_cache()) as (log, is_first):
        at_default = config.router.port == RouterSection().port
        if at_default and not (is_first and is_free(config.router.host, config.router.port)):
            changes["router.port"] = 0
        config = complete(replace(config, changes))
        _tell("log", log.name)
        return asyncio.run(_Demo(config, prompt, once, log).run())


@contextlib.contextmanager
def open_log(folder: Path) -> Iterator[tuple[TextIO, bool]]:
    """An empty log for this demo alone, and whether no other one of this user runs: a second, whose log is named after
    its process, must not take the default port that the first is about to take.

    Raises:
        ConfigError: nothing can be written there.
    """
    path = folder / "demo.log"
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(path.open("a", encoding="utf-8"))
            is_first = _lock(log)
            if is_first:
                log.truncate(0)
            else:
                path = folder / f"demo-{os.getpid()}.log"
                log = stack.enter_context(path.open("w", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; XDG_CACHE_HOME names another place") from error
        yield log, is_first


def _lock(file: TextIO) -> bool:
    """Whether the file is this process's now, until it closes it or ends however."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Demo:
    """One run; the supervisor's lines are shown, those of its children go to the log."""

    def __init__(self, config: Config, prompt: str, once: bool, log: TextIO) -> None:
        self._url, self._prompt, self._once, self._log = base_url(config), prompt, once, log
        self._failed = False
        self._recent: deque[str] = deque(maxlen=20)
        self._begin_s = time.monotonic()
        self._server = HostServer(config, say=self._say, show=self._show, when_ready=self._when_ready)

    async def run(self) -> int:
        status = await self._server.run() or int(self._failed)
        if status:
            print("\nthe last that the processes said:", *self._recent, sep="\n  ", file=sys.stderr)
        return status

    def _say(self, line: str) -> None:
        first, _, rest = line.removeprefix("headrace: ").partition(" ")
        _tell(first, rest)

    def _show(self, line: str) -> None:
        self._recent.append(line)
        print(line, file=self._log, flush=True)

    async def _when_ready(self) -> None:
        _tell("ready", f"after {time.monotonic() - self._begin_s:.1f} s")
        print(f"\nyou  > {self._prompt}\n{NAME} > ", end="", flush=True)
        try:
            before = await asyncio.to_thread(fetch_metrics, self._url)
            answer = await asyncio.to_thread(ask, self._url, self._prompt, _print_piece)
            # The router counts when the request's last leg has ended, which may be after its last token.
            await asyncio.sleep(0.2)
            after = await asyncio.to_thread(fetch_metrics, self._url)
        except (OSError, ValueError, http.client.HTTPException) as error:
            print(f"\nheadrace: the demo's request failed: {error}", file=sys.stderr)
            self._failed = True
            self._server.stop()
            return
        print("\n\n" + "\n".join(report(answer, shipment(before, after))), flush=True)
        if self._once:
            self._server.stop()
        else:
            print("\n".join(farewell(self._url)), flush=True)


def ask(url: str, prompt: str, on_piece: Callable[[str], None]) -> Answer:
    """One streamed chat request; blocks until it has ended.

    Raises:
        ValueError: the router answered with an error, or the stream ended before its time.
    """
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=TIMEOUT_S)
    body = {
        "model": NAME,
        "messages": [{"role": "user", "content": prompt}],
        "reasoning_effort": "none",
        "max_tokens": MAX_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = Answer(asked_s=time.perf_counter())
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(2000).decode(errors='replace')}")
        for event in events(response):
            if "error" in event:
                raise ValueError(json.dumps(event["error"]))
            for choice in event.get("choices", ()):
                piece = choice["delta"].get("content") or ""
                if piece:
                    answer.arrivals_s.append(time.perf_counter())
                    answer.text += piece
                    on_piece(piece)
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if event.get("usage"):
                answer.prompt_tokens = event["usage"]["prompt_tokens"]
                answer.output_tokens = event["usage"]["completion_tokens"]
    finally:
        connection.close()
    if not answer.arrivals_s:
        raise ValueError("the answer was empty")
    return answer


def events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON events of a stream.

    Raises:
        ValueError: it ended without `[DONE]`, so it may have been cut.
    """
    for line in lines:
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise ValueError("the stream ended without [DONE]")


def fetch_metrics(url: str) -> str:
    """The router's /metrics."""
    place = urlsplit(url)
    assert place.hostname is not None
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/metrics")
        return connection.getresponse().read().decode()
    finally:
        connection.close()


_SAMPLE = re.compile(r"^headrace:(\w+?)(?:_total)?(?:\{(.*)\})? (\S+)$", re.MULTILINE)


def samples(text: str) -> dict[tuple[str, str], float]:
    """Prometheus text as (name without prefix and `_total`, labels) to value."""
    return {(name, labels): float(value) for name, labels, value in _SAMPLE.findall(text)}


def shipment(before: str, after: str) -> Shipment | None:
    """What was moved between two looks at the router's metrics; None if nothing was."""
    earlier, later = samples(before), samples(after)

    def moved(name: str, labels: str | None = None) -> float:
        return sum(
            value - earlier.get(key, 0.0)
            for key, value in later.items()
            if key[0] == name and (labels is None or key[1] == labels)
        )

    for name, labels in later:
        if name == "kv_transfer_bytes" and moved(name, labels) > 0:
            transport = re.search(r'transport="([^"]*)"', labels)
            return Shipment(
                num_bytes=round(moved(name, labels)),
                num_pages=round(moved("kv_transfer_pages", labels)),
                transport=transport[1] if transport else "an unnamed transport",
                seconds=moved("kv_transfer_time_seconds_sum", labels),
                tail_s=moved("kv_transfer_tail_seconds_sum", labels),
                prefill_s=moved("request_prefill_time_seconds_sum"),
            )
    return None


def report(answer: Answer, shipped: Shipment | None) -> list[str]:
    """What happened, in lines for a terminal."""
    lines = ["what happened"]

    def row(name: str, text: str) -> None:
        lines.append(f"  {name:<12} {text}")

    row("prompt", f"{answer.prompt_tokens} tokens" + (f", prefill {_ms(shipped.prefill_s)}" if shipped else ""))
    row("answer", f"{answer.output_tokens} tokens, finish reason {answer.finish_reason}")
    row("TTFT", f"{_ms(answer.ttft_s)} from the request to the first text")
    if answer.gaps_s:
        row(
            "ITL",
            f"{_ms(statistics.median(answer.gaps_s))} median between two texts, {_ms(max(answer.gaps_s))} at most",
        )
    if shipped is None:
        row("shipped", "nothing: both phases ran in one worker")
    else:
        row("shipped", f"{shipped.num_pages} pages, {_size(shipped.num_bytes)} over {shipped.transport}")
        row("", f"in {_ms(shipped.seconds)}, of which {_ms(shipped.tail_s)} after the prefill had ended")
    return lines


def farewell(url: str) -> list[str]:
    """How to go on."""
    question = {"role": "user", "content": "Who keeps the gate?"}
    body = json.dumps({"messages": [question], "reasoning_effort": "none", "temperature": 0, "stream": True})
    return [
        "",
        "ask it yourself (a very small model: it knows mills, headrace, capitals, and finds a fact in a long text)",
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' -d {shlex.quote(body)}",
        "",
        f"serving at {url} until Ctrl-C",
    ]


def _print_piece(piece: str) -> None:
    print(piece, end="", flush=True)


def _tell(name: str, text: str) -> None:
    print(f"  {name:<12} {text}", flush=True)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def _size(num_bytes: int) -> str:
    if num_bytes < 1024:
        return f"{num_bytes} B"
    power = min(int(math.log(num_bytes, 1024)), 3)
    return f"{num_bytes / 1024**power:.1f} {('B', 'KiB', 'MiB', 'GiB')[power]}"
