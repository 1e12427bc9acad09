"""What transfers cost the engine beside them: decode steps with pages landing in the same pools, and without.

    python benchmarks/step_time.py [--sequences 8] [--tokens 8192] [--rounds 10] [--transport tcp|cma|shm]
                                   [--process own|worker] [--json FILE]

A decode worker's process without its gRPC front: the engine computes steps of the demo checkpoint in its own thread
while another process's pages arrive, one transfer after another without a pause, into pages that the same engine has
reserved (once: what admission costs is not measured here). Transfers run in a process of their own, as they do when
served on the CPU, or in the engine's. Rounds with and without transfers take turns; a round is so many steps. Two
times of each step: the wall's, and the engine thread's own CPU time, which leaves out what other processes take from a
machine with few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import platform
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import uvloop

from headrace.cli.host import inspect_host
from headrace.config.load import load
from headrace.config.resolve import resolve
from headrace.config.tree import TransferSection
from headrace.core.clock import MonotonicClock
from headrace.core.ids import TransferId, WorkerId, new_incarnation, new_transfer_id
from headrace.core.sampling import SamplingParams
from headrace.engine import api as engine
from headrace.engine.build import Built, build_engine
from headrace.transfer import api
from headrace.worker.transfer_process import Begin, ProcessTransfers, TransferChild
from headrace.worker.transfers import LocalTransfers, Transfers, TransferSetup
from transfer import FINGERPRINT, PATIENCE_S, SETTINGS, hold_main

DEMO = Path(__file__).parents[1] / "model" / "demo_weights"
PROMPT_TOKENS = 300
KEY = 1000
"""Of the sequence whose pages are written."""


class Steps:
    """Hears the engine; when each decode step ended, in its own thread."""

    def __init__(self) -> None:
        self.ends: list[tuple[float, float]] = []
        """(wall, engine thread's CPU), seconds."""
        self.reserved: dict[int, engine.Reserved] = {}
        self.news = threading.Condition()

    def hear(self, events: Any) -> None:
        with self.news:
            for event in events:
                assert not isinstance(event, engine.SequenceFailed) or event.error.reason == "cancelled", event
                assert not isinstance(event, engine.Refused), event
                if isinstance(event, engine.Reserved):
                    self.reserved[event.key] = event
            if any(isinstance(event, engine.TokenSampled) for event in events):
                self.ends.append((time.perf_counter(), time.thread_time()))
            self.news.notify_all()

    def until(self, holds: Any) -> None:
        with self.news:
            assert self.news.wait_for(holds, 60.0), "the engine does not go on"


def build(arguments: argparse.Namespace, steps: Steps) -> Built:
    flags = {
        "model.path": str(DEMO),
        "model.device": "cpu",
        "engine.num_threads": str(arguments.threads),
        "cache.memory_bytes": str(1 << 30),
        # Blocks that were here before would not travel again.
        "cache.prefix_caching": "false",
    }

    def fatal(error: BaseException) -> None:
        print(f"the engine has ended: {error!r}", flush=True)
        os._exit(1)

    return build_engine(resolve(load(flags=flags), inspect_host()), MonotonicClock(), steps.hear, fatal)


class Taker:
    """The transfers of the engine's worker."""

    def __init__(self, built: Built, process: str) -> None:
        self._heard: asyncio.Queue[api.WorkerEvent] = asyncio.Queue()
        setup = TransferSetup(
            worker_id=WorkerId("taker"),
            incarnation=new_incarnation(),
            host="127.0.0.1",
            peer_port=0,
            section=TransferSection(),
            shape=built.layout.shape,
            kv_dtype="fp8",
            fingerprint=FINGERPRINT,
            document="{}",
        )
        self.transfers: Transfers
        if process == "own":
            pools, descriptors = built.pools.specs(), built.pools.descriptors()
            self.transfers = ProcessTransfers(
                TransferChild("warning"), Begin(setup, tuple(pools)), [descriptors[pool.kind] for pool in pools],
                deliver=self._heard.put_nowait, reported=lambda report: None,
            )  # fmt: skip
        else:
            self.transfers = LocalTransfers(
                setup, geometry=built.geometry, mover=built.mover, deliver=self._heard.put_nowait,
                reported=lambda report: None,
            )  # fmt: skip

    async def until_up(self) -> str:
        """The holder's link stands; what carries its bytes."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for link in self.transfers.report().counts.links:
                    if link.phase is api.LinkPhase.UP:
                        return link.transport
                await asyncio.sleep(0.01)

    async def arrived(self) -> api.Arrived:
        async with asyncio.timeout(PATIENCE_S):
            event = await self._heard.get()
        if not isinstance(event, api.Arrived):
            raise RuntimeError(f"a pull has failed: {event}")
        return event


class Lander:
    """Takes a prompt from the holder, again and again, while it is told to."""

    def __init__(self, built: Built, steps: Steps, taker: Taker, pipe: Any, tokens: int) -> None:
        self._steps, self._taker, self._pipe, self._tokens = steps, taker, pipe, tokens
        request = engine.EngineRequest(
            key=KEY, kind=engine.LegKind.GENERATE, prompt=(5,) * tokens, num_output_tokens=0,
            sampling=SamplingParams(max_tokens=1),
        )  # fmt: skip
        built.engine.post(engine.Submit(request))
        self.running = False
        self.num_bytes = 0

    async def run(self) -> None:
        await asyncio.to_thread(self._steps.until, lambda: KEY in self._steps.reserved)
        while True:
            if self.running:
                await self._one(self._steps.reserved[KEY].pages)
            else:
                await asyncio.sleep(0.002)

    async def _one(self, pages: Any) -> None:
        transfer_id = TransferId(new_transfer_id())
        self._pipe.send((transfer_id, self._tokens))
        await asyncio.to_thread(self._pipe.recv)
        self._taker.transfers.post(
            api.OpenPull(
                transfer_id=transfer_id,
                attempt=1,
                holder=WorkerId("holder"),
                holder_incarnation=None,
                pages=pages,
                length=self._tokens,
            )
        )
        arrived = await self._taker.arrived()
        self.num_bytes += arrived.stats.payload_bytes


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    steps = Steps()
    built = build(arguments, steps)
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(
        target=hold_main, args=(theirs, arguments.tokens, TransferSection(), "cpu", built.layout), daemon=True
    )
    holder.start()
    taker = Taker(built, arguments.process)
    await taker.transfers.start()
    address, _, _ = await asyncio.to_thread(ours.recv)
    taker.transfers.post(api.PeerFound(WorkerId("holder"), address))
    transport = await taker.until_up()
    per_round = arguments.steps
    output = per_round * (2 * arguments.rounds + 4)
    for key in range(1, 1 + arguments.sequences):
        prompt = tuple((7 * key + place) % 500 + 20 for place in range(PROMPT_TOKENS))
        sampling = SamplingParams(max_tokens=output, ignore_eos=True)
        request = engine.EngineRequest(
            key=key, kind=engine.LegKind.LOCAL, prompt=prompt, num_output_tokens=0, sampling=sampling
        )
        built.engine.post(engine.Submit(request))
    built.engine.start()
    lander = Lander(built, steps, taker, ours, arguments.tokens)
    task = asyncio.create_task(lander.run())
    found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    rates = []

    async def round_of(landing: bool) -> None:
        lander.running = landing
        # The first steps after a change belong to neither.
        begin = len(steps.ends) + per_round // 5
        await asyncio.to_thread(steps.until, lambda: len(steps.ends) > begin)
        bytes_before, begun_s = lander.num_bytes, time.perf_counter()
        await asyncio.to_thread(steps.until, lambda: len(steps.ends) > begin + per_round)
        if landing:
            rates.append((lander.num_bytes - bytes_before) / (time.perf_counter() - begun_s) / 1e9)
        ends = steps.ends[begin : begin + per_round + 1]
        found[landing] += [(after[0] - before[0], after[1] - before[1]) for before, after in itertools.pairwise(ends)]

    await round_of(False)
    found[False].clear()
    for _ in range(arguments.rounds):
        for landing in (False, True):
            await round_of(landing)
    task.cancel()
    os.kill(holder.pid or 0, 9)

    def summary(place: int) -> dict[str, float]:
        alone, beside = ([step[place] * 1e3 for step in found[landing]] for landing in (False, True))
        return {
            "alone_ms": statistics.median(alone),
            "beside_transfers_ms": statistics.median(beside),
            "ratio_of_medians": statistics.median(beside) / statistics.median(alone),
            "ratio_of_means": statistics.fmean(beside) / statistics.fmean(alone),
        }

    return {
        "transport": transport,
        "process": arguments.process,
        "sequences": arguments.sequences,
        "threads": arguments.threads,
        "tokens": arguments.tokens,
        "steps_each": len(found[True]),
        "landing_gigabytes_per_s": statistics.median(rates),
        "wall": summary(0),
        "engine_thread_cpu": summary(1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=8192, help="of the prompts that arrive")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help="in a round")
    parser.add_argument("--threads", type=int, default=1, help="of the engine's kernels")
    parser.add_argument("--transport", choices=("tcp", "cma", "shm"), default="tcp")
    parser.add_argument("--process", choices=("own", "worker"), default="own", help="where transfers run")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    os.environ["UCX_TLS"], os.environ["UCX_NET_DEVICES"] = SETTINGS[arguments.transport], "lo"
    result = uvloop.run(measure(arguments))
    result |= {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    print(json.dumps(result, indent=2), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    os._exit(0)


if __name__ == "__main__":
    main()
