"""Transfers in a process of their own: the same bytes, and one end for whatever happens to either of the two."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.processes import until_gone

from headrace.config.tree import TransferSection
from headrace.core.errors import ConfigError, PeerLost
from headrace.core.ids import TransferId, WorkerId, new_incarnation, new_transfer_id
from headrace.core.pools import PoolKind
from headrace.kvcache.layout import CacheLayout, CacheShape, live_window
from headrace.kvcache.pools import CachePools
from headrace.kvcache.sequence import SequencePages
from headrace.transfer import api
from headrace.worker.transfer_process import Begin, ProcessTransfers, TransferChild
from headrace.worker.transfers import Report, TransferSetup

pytestmark = pytest.mark.process

SHAPE = CacheShape((0, 128, 4))
LENGTH = 1500
NUM_PAGES = {PoolKind.HISTORY: 8, PoolKind.WINDOW: 8, PoolKind.STATE: 2, PoolKind.SNAPSHOT: 2}
PAGES = SequencePages(
    history=(5, 1, 7, 0, 3, 2),
    window=tuple((page, page % 8) for page in live_window(LENGTH)),
    state_row=1,
)


class End:
    """One worker's transfers and pools."""

    def __init__(self, name: str, *, fill: int, peer_port: int = 0, **section: Any) -> None:
        torch.manual_seed(fill)
        self.pools = CachePools(CacheLayout(SHAPE, "fp8"), NUM_PAGES)
        for kind in NUM_PAGES:
            self.pools.storage(kind).random_(0, 256)
        setup = TransferSetup(
            worker_id=WorkerId(name),
            incarnation=new_incarnation(),
            host="127.0.0.1",
            peer_port=peer_port,
            section=TransferSection(segment_bytes=1 << 20, num_send_buffers=4, num_landing_buffers=4, **section),
            shape=SHAPE,
            kv_dtype="fp8",
            fingerprint=b"f" * 32,
            document="{}",
        )
        self.child = TransferChild("warning")
        self.heard: asyncio.Queue[api.WorkerEvent] = asyncio.Queue()
        self.reports: list[Report] = []
        pools, descriptors = self.pools.specs(), self.pools.descriptors()
        self.transfers = ProcessTransfers(
            self.child, Begin(setup, tuple(pools)), [descriptors[pool.kind] for pool in pools],
            deliver=self.heard.put_nowait, reported=self.reports.append,
        )  # fmt: skip

    async def until(self, kind: type) -> Any:
        async with asyncio.timeout(20):
            while not isinstance(event := await self.heard.get(), kind):
                pass
            return event

    async def until_report(self, holds: Callable[[Report], bool]) -> None:
        await until(lambda: holds(self.transfers.report()))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def ended(*ends: End) -> AsyncIterator[None]:
    """Whatever a test does, no child outlives it."""
    try:
        yield
    finally:
        for end in ends:
            end.child.end()


def free(report: Report) -> bool:
    counts = report.counts
    return (
        not counts.open_transfers
        and counts.send_buffers["free"] == counts.landing_buffers["free"] == 4
        and not counts.audit
    )


def all_bytes(end: End, kind: PoolKind) -> torch.Tensor:
    return end.pools.storage(kind).clone()


async def pull(taker: End, holder: End, port: int) -> TransferId:
    """Offer on one side, pull on the other; the prompt is there at once."""
    transfer_id = TransferId(new_transfer_id())
    holder.transfers.post(api.Offer(transfer_id=transfer_id, attempt=1, length=LENGTH, pages=PAGES))
    taker.transfers.post(api.PeerFound(WorkerId("holder"), f"127.0.0.1:{port}"))
    taker.transfers.post(
        api.OpenPull(
            transfer_id=transfer_id, attempt=1, holder=WorkerId("holder"), holder_incarnation=None, pages=PAGES,
            length=LENGTH,
        )
    )  # fmt: skip
    assert (await holder.until(api.Wanted)).transfer_id == transfer_id
    holder.transfers.post(
        api.BlocksFinal(transfer_id=transfer_id, num_blocks=LENGTH // 256, pages=PAGES, computed_tokens=LENGTH)
    )
    return transfer_id


def finish(holder: End, transfer_id: TransferId) -> None:
    holder.transfers.post(
        api.PrefillDone(
            transfer_id=transfer_id, pages=PAGES, first_token=9, first_index=0, computed=LENGTH, cached=0, ended=False
        )
    )


def test_pages_go_from_one_workers_pools_to_anothers() -> None:
    """The engines' processes map what the children gather from and scatter into; pages of nobody keep their bytes."""

    async def script() -> None:
        holder, taker = End("holder", fill=1), End("taker", fill=2)
        async with ended(holder, taker):
            port, _ = await asyncio.gather(holder.transfers.start(), taker.transfers.start())
            before = {kind: all_bytes(taker, kind) for kind in NUM_PAGES}
            transfer_id = await pull(taker, holder, port)
            finish(holder, transfer_id)
            arrived = await taker.until(api.Arrived)
            assert (arrived.transfer_id, arrived.first_token) == (transfer_id, 9)
            assert (await holder.until(api.Ended)).outcome is api.Outcome.TAKEN
            for kind, used in (
                (PoolKind.HISTORY, list(PAGES.history)),
                (PoolKind.WINDOW, [p for _, p in PAGES.window]),
            ):
                theirs, ours = holder.pools.storage(kind), taker.pools.storage(kind)
                unused = [page for page in range(NUM_PAGES[kind]) if page not in used]
                assert torch.equal(ours[used], theirs[used])
                assert torch.equal(ours[unused], before[kind][unused])
            assert torch.equal(taker.pools.storage(PoolKind.SNAPSHOT), before[PoolKind.SNAPSHOT])
            await asyncio.gather(
                taker.until_report(lambda r: free(r) and r.counts.transfers_taken == 1 and r.num_links == 1),
                holder.until_report(lambda r: free(r) and r.counts.transfers_served == 1 and r.num_links == 1),
            )
            await asyncio.gather(holder.transfers.stop(), taker.transfers.stop())
            assert holder.child.process.returncode == taker.child.process.returncode == 0
            assert holder.heard.empty()

    asyncio.run(script())


def test_reports_say_every_second_that_transfers_live() -> None:
    """Without any news too; a stopped child is silent, and nothing is lost when it goes on."""

    async def script() -> None:
        end = End("holder", fill=1)
        async with ended(end):
            await end.transfers.start()
            await asyncio.sleep(2.5)
            assert 2 <= len(end.reports) <= 4
            os.kill(end.child.process.pid, signal.SIGSTOP)
            await asyncio.sleep(0.1)
            num = len(end.reports)
            await asyncio.sleep(1.5)
            assert len(end.reports) == num
            os.kill(end.child.process.pid, signal.SIGCONT)
            await until(lambda: len(end.reports) > num)
            await end.transfers.stop()

    asyncio.run(script())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_child_that_dies_breaks_its_worker_and_fails_its_peers_pull(number: signal.Signals) -> None:
    """The worker is told once; what the other end waits for ends in an error, and its buffers are free again."""

    async def script() -> None:
        holder, taker = End("holder", fill=1), End("taker", fill=2)
        async with ended(holder, taker):
            port, _ = await asyncio.gather(holder.transfers.start(), taker.transfers.start())
            await pull(taker, holder, port)
            os.kill(holder.child.process.pid, number)
            await holder.until(api.ThreadFailed)
            assert (await taker.until(api.PullFailed)).error.reason in ("transfer_failed", "worker_failed")
            await taker.until_report(free)
            holder.transfers.post(api.PeerForgotten(WorkerId("nobody")))
            await asyncio.gather(holder.transfers.stop(), taker.transfers.stop())
            assert holder.heard.empty()

    asyncio.run(script())


def test_a_port_in_use_is_a_setting_to_change() -> None:
    """Said as the worker itself would say it."""

    async def script() -> None:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            end = End("holder", fill=1, peer_port=other.getsockname()[1])
            async with ended(end):
                with pytest.raises(ConfigError, match=r"worker\.peer_port"):
                    await end.transfers.start()

    asyncio.run(script())


def test_a_child_that_is_gone_before_the_start_is_said_so() -> None:
    """It was started while the model loaded, and killed meanwhile."""

    async def script() -> None:
        end = End("holder", fill=1)
        async with ended(end):
            end.child.process.kill()
            end.child.process.wait()
            with pytest.raises(PeerLost, match="has ended with status -9"):
                await end.transfers.start()

    asyncio.run(script())


def test_a_layout_document_larger_than_a_sockets_buffer_passes() -> None:
    """A megabyte is the most that one may have."""

    async def script() -> None:
        end = End("holder", fill=1)
        begin = end.transfers._begin
        end.transfers._begin = replace(begin, setup=replace(begin.setup, document=" " * (1 << 20)))
        async with ended(end):
            assert await end.transfers.start() > 0
            await end.transfers.stop()

    asyncio.run(script())


def test_the_child_ends_with_its_worker() -> None:
    """SIGKILL leaves no word, and no orphan; before it was told anything, and after."""
    code = (
        "import sys, time; from headrace.worker.transfer_process import TransferChild;"
        "print(TransferChild('warning').process.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        child = int(worker.stdout.readline())
        time.sleep(random.uniform(0, 1))
        worker.kill()
    until_gone([child])


def test_the_child_loads_no_torch() -> None:
    """Half a gigabyte of libraries, and a second, for nothing."""
    code = "import sys, headrace.worker.transfer_child; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
