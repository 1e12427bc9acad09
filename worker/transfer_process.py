"""Transfers in a process of their own: the worker's end.

The child maps the pools, registers buffers of its own, and listens where peers find this worker. It is started before
the model is loaded and told what to do afterwards. When it ends unasked the worker is broken, as if a thread of it had
died: the state of transfers is lost. When the worker ends in whatever way, the kernel ends the child.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass

from ..core.errors import ConfigError, PeerLost
from ..core.pools import PoolSpec
from ..transfer import api as transfer
from .pipe import Pipe, pack
from .transfers import GRACE_S, Deliver, Report, TransferSetup

START_S = 60.0
"""From the setup until the child listens: it registers its buffers meanwhile."""
MAX_POOLS = 8


@dataclass(frozen=True)
class Begin:
    """The first value to the child; the pools' descriptors come with it."""

    setup: TransferSetup
    pools: tuple[PoolSpec, ...]
    """Addresses are this process's."""


@dataclass(frozen=True)
class Began:
    """The child listens."""

    port: int
    report: Report


@dataclass(frozen=True)
class Refused:
    """The child cannot begin; it has ended."""

    error: ConfigError


@dataclass(frozen=True)
class Stop:
    """The last value to the child."""


class TransferChild:
    """The child process before it has work: starting it early lets it load while the model does."""

    def __init__(self, log_level: str) -> None:
        self.socket, theirs = socket.socketpair()
        # Nothing but log lines may come from it: whoever started the worker reads what it prints.
        self.process = subprocess.Popen(
            (
                sys.executable, "-P", "-m", "headrace", "transfer", "--socket", str(theirs.fileno()),
                "--die-with", str(os.getpid()), "--log-level", log_level,
            ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
        )  # fmt: skip
        theirs.close()

    def begin(self, begin: Begin, descriptors: list[int]) -> None:
        """Hand over what it is to do; waits until it is read."""
        socket.send_fds(self.socket, [pack(begin)], descriptors)

    def epitaph(self) -> str:
        """What there is to say of one that has ended; its own last words are in the log."""
        return f"the transfer process has ended with status {self.process.poll()}"

    def end(self, patience_s: float = 0.0) -> None:
        """Wait for its end; after `patience_s` make it."""
        try:
            self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.socket.close()


class ProcessTransfers:
    """`transfers.Transfers` in a child process."""

    def __init__(
        self,
        child: TransferChild,
        begin: Begin,
        descriptors: list[int],
        *,
        deliver: Deliver,
        reported: Callable[[Report], None],
    ) -> None:
        self._child, self._begin, self._descriptors = child, begin, descriptors
        self._deliver, self._reported = deliver, reported
        self._began: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._stopping = False
        self._pipe = Pipe(self._heard, self._lost)
        self._report: Report | None = None

    async def start(self) -> int:
        try:
            async with asyncio.timeout(START_S):
                await asyncio.to_thread(self._child.begin, self._begin, self._descriptors)
                await asyncio.get_running_loop().create_unix_connection(lambda: self._pipe, sock=self._child.socket)
                return await self._began
        except TimeoutError:
            self._child.end()
            raise PeerLost(f"the transfer process does not start within {START_S:g} s") from None
        except OSError:
            self._child.end()
            raise PeerLost(self._child.epitaph()) from None
        finally:
            self._stopping = not self._began.done() or self._began.cancelled() or self._began.exception() is not None

    def post(self, command: transfer.Command) -> None:
        self._pipe.send(command)

    def report(self) -> Report:
        assert self._report is not None, "asked before the start"
        return self._report

    async def stop(self) -> None:
        self._stopping = True
        self._pipe.send(Stop())
        await asyncio.to_thread(self._child.end, 4 * GRACE_S)
        self._pipe.close()

    def _heard(self, value: object) -> None:
        match value:
            case Report():
                self._report = value
                self._reported(value)
            case Began():
                self._report = value.report
                if not self._began.done():
                    self._began.set_result(value.port)
            case Refused():
                self._stopping = True
                if not self._began.done():
                    self._began.set_exception(value.error)
            case _:
                self._deliver(value)  # type: ignore[arg-type]

    def _lost(self) -> None:
        if self._stopping:
            return
        self._child.end(GRACE_S)
        if not self._began.done():
            self._began.set_exception(PeerLost(self._child.epitaph()))
        else:
            self._deliver(transfer.ThreadFailed(RuntimeError(self._child.epitaph())))
