"""Shipping a prompt's cache between two processes: the whole path beside raw NIXL READs and a plain copy.

    python benchmarks/transfer.py [--tokens 4096 32768 131072] [--transports tcp cma] [--json FILE]
    python benchmarks/transfer.py --transports cuda [--devices cuda:0 cuda:1]

Two processes hold pools of DeepSeek-V4-Flash's layout (fp8 entries, fp4 index keys). The *whole path* is what a decode
worker waits for: pull and announcements over gRPC, gather, digest, READ, digest, scatter, until the pages are admitted;
every block is final at its start, so nothing hides behind computing. *Raw* is NIXL alone: the same bytes cut into the
same segments, READ from equal buffers into equal buffers, as many at a time as the window allows. *Copy* is one memcpy
of as many bytes in one process; on GPUs a `copy_`, from the holder's card to the taker's. The three take turns within
one sitting; medians. Rates are payload bytes a second. On a GPU the gather and scatter kernels alone are set beside a
`copy_` of the same bytes within the card too (kernel: by events; call: with all that a call does on the host).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import dataclasses
import json
import multiprocessing
import os
import platform
import statistics
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch
import uvloop

from headrace.config.tree import TransferSection
from headrace.core.blocks import BLOCK_TOKENS
from headrace.core.clock import MonotonicClock
from headrace.core.ids import TransferId, WorkerId, new_incarnation, new_transfer_id
from headrace.core.pools import PoolKind
from headrace.kernels.cuda.page_move import move_pieces
from headrace.kvcache.device_segments import DeviceMemory, DeviceMover
from headrace.kvcache.layout import CacheLayout, live_window
from headrace.kvcache.pools import CachePools
from headrace.kvcache.presets import PRESETS
from headrace.kvcache.segments import CacheMover
from headrace.kvcache.sequence import SequencePages
from headrace.proto.internal.v1 import peer_pb2_grpc
from headrace.transfer import api
from headrace.transfer.buffers import HostMemory
from headrace.transfer.cuts import cut_history
from headrace.transfer.nixl_driver import NixlDriver, agent_name, load_library, open_agent
from headrace.transfer.one_host_driver import OneHostDriver
from headrace.transfer.service import TransferThread
from headrace.worker import links
from headrace.worker.channels import server_options
from headrace.worker.links import Links

PATIENCE_S = 20.0
FINGERPRINT = b"benchmark"
SETTINGS = {"tcp": "tcp,self,cuda_copy", "cma": "cma,tcp,self,cuda_copy", "shm": "all", "cuda": "all"}
"""UCX_TLS of each transport. shm: what two processes of one host take unasked, beside raw READs over CMA. With GPU
memory UCX takes cuda_ipc where it can; what it took is measured and printed."""


def flash_layout() -> CacheLayout:
    return CacheLayout(PRESETS["deepseek-v4-flash"], "fp8")


class Side:
    """One worker without an engine: pools, transfer thread, links."""

    def __init__(
        self,
        name: str,
        tokens: int,
        section: TransferSection,
        device: str,
        layout: CacheLayout | None = None,
    ) -> None:
        layout = layout or flash_layout()
        on_gpu = device != "cpu"
        if on_gpu:
            torch.cuda.set_device(device)
        blocks = -(-tokens // BLOCK_TOKENS)
        numbers = {PoolKind.HISTORY: blocks, PoolKind.WINDOW: 8, PoolKind.STATE: 1, PoolKind.SNAPSHOT: 1}
        self.pools = CachePools(layout, numbers, device)
        torch.manual_seed(1)
        for kind in numbers:
            storage = self.pools.storage(kind)
            storage.random_(0, 256) if name == "holder" else storage.zero_()
        self.mover = DeviceMover(layout, self.pools) if on_gpu else CacheMover(layout, self.pools.specs())
        self.geometry = self.mover.geometry
        self.heard: asyncio.Queue[api.TransferEvent] = asyncio.Queue()
        self.loop = asyncio.get_running_loop()
        incarnation = new_incarnation()
        self.thread = TransferThread(
            worker_id=WorkerId(name),
            incarnation=incarnation,
            driver=OneHostDriver(NixlDriver(agent_name(WorkerId(name), incarnation))),
            geometry=self.geometry,
            mover=self.mover,
            fingerprint=FINGERPRINT,
            document="{}",
            section=section,
            clock=MonotonicClock(),
            deliver=lambda event: self._in_loop(self._hear, event),
            send=lambda link_id, message: self._in_loop(self.links.send, link_id, message),
            allocate=partial(DeviceMemory, device=torch.device(device)) if on_gpu else HostMemory,
        )
        self.links = Links(post=self.thread.post, new_link_id=self.thread.new_link_id)

    def _in_loop(self, act: Callable[..., object], *arguments: object) -> None:
        self.loop.call_soon_threadsafe(act, *arguments)

    def _hear(self, event: api.TransferEvent) -> None:
        match event:
            case api.Dial(link_id, _, address):
                self.links.dial(link_id, address)
            case api.CloseLink(link_id, reason):
                self.links.close(link_id, reason)
            case _:
                self.heard.put_nowait(event)

    async def until(self, kind: type, what: Callable[[Any], bool] = lambda event: True) -> Any:
        """The next event of this kind."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                event = await self.heard.get()
                if isinstance(event, api.PullFailed):
                    raise RuntimeError(f"a pull has failed: {event}")
                if isinstance(event, kind) and what(event):
                    return event

    def pages(self, tokens: int) -> SequencePages:
        window = live_window(tokens)
        return SequencePages(
            tuple(range(-(-tokens // BLOCK_TOKENS))), tuple((page, page % 8) for page in window), state_row=0
        )

    def segments(self, tokens: int, max_bytes: int) -> list[int]:
        """Payload bytes of each segment of a prompt."""
        blocks = range(tokens // BLOCK_TOKENS)
        cut = cut_history(self.geometry, tokens, blocks, blocks, max_bytes)
        cut += self.geometry.tail_segments(tokens, max_bytes)
        return [self.geometry.payload_bytes(segment, tokens) for segment in cut]


# ---- the holder's process ----


async def hold(
    pipe: Connection, tokens: int, section: TransferSection, device: str, layout: CacheLayout | None
) -> None:
    """Serve every transfer whose id comes through the pipe; all of it is final at once."""
    side = Side("holder", tokens, section, device, layout)
    server = grpc.aio.server(options=server_options(links.MAX_MESSAGE_BYTES))
    peer_pb2_grpc.add_KvPeerServicer_to_server(side.links, server)
    port = server.add_insecure_port("127.0.0.1:0")
    side.thread.start()
    await server.start()
    raw = RawEnd("raw-holder", section, device)
    pipe.send((f"127.0.0.1:{port}", raw.metadata(), (raw.address, raw.number)))
    order: asyncio.Queue[Any] = asyncio.Queue()

    def listen() -> None:
        while True:
            try:
                said = pipe.recv()
            except (EOFError, OSError):
                said = None
            side.loop.call_soon_threadsafe(order.put_nowait, said)
            if said is None:
                return

    threading.Thread(target=listen, daemon=True).start()
    while (said := await order.get()) is not None:
        transfer_id, length = said
        pages = side.pages(length)
        side.thread.post(
            api.Offer(
                transfer_id=transfer_id, attempt=1, length=length, pages=pages, cached_blocks=length // BLOCK_TOKENS
            )
        )
        pipe.send("offered")
        await side.until(api.Wanted)
        side.thread.post(
            api.PrefillDone(
                transfer_id=transfer_id,
                pages=pages,
                first_token=1,
                first_index=0,
                computed=0,
                cached=length,
                ended=False,
            )
        )
        await side.until(api.Ended)
    await side.links.stop()
    await server.stop(1.0)
    side.thread.stop(5.0)


def hold_main(
    pipe: Connection, tokens: int, section: TransferSection, device: str, layout: CacheLayout | None = None
) -> None:
    uvloop.run(hold(pipe, tokens, section, device, layout))
    os._exit(0)


# ---- raw READs ----


class RawEnd:
    """An agent with a window of buffers, and nothing on top of the library."""

    def __init__(self, name: str, section: TransferSection, device: str) -> None:
        self._nixl = load_library()
        self.agent = open_agent(self._nixl, name, 1000)
        self.stride = -(-section.segment_bytes // 4096) * 4096
        self._memory = torch.full((section.window * self.stride,), 7, dtype=torch.uint8, device=device)
        self.address = self._memory.data_ptr()
        self.kind, self.number = ("DRAM", 0) if device == "cpu" else ("VRAM", int(device.partition(":")[2] or 0))
        self._registered = self.agent.register_memory(
            [(self.address, self._memory.numel(), self.number, "")], self.kind
        )

    def metadata(self) -> bytes:
        return bytes(self.agent.get_partial_agent_metadata(self._registered, True, ["UCX"]))

    def add(self, metadata: bytes) -> str:
        name = self.agent.add_remote_agent(metadata)
        return name.decode() if isinstance(name, bytes) else str(name)

    def read_all(self, peer: str, remote: tuple[int, int], sizes: list[int], window: int) -> float:
        """Seconds to READ segments of these sizes, `window` in flight."""
        begun_s = time.perf_counter()
        running: deque[tuple[int, Any, str]] = deque()
        left = deque(sizes)
        free = deque(range(window))
        while left or running:
            while left and free:
                slot, size = free.popleft(), left.popleft()
                mine = self.agent.get_xfer_descs([(self.address + slot * self.stride, size, self.number)], self.kind)
                theirs = self.agent.get_xfer_descs([(remote[0] + slot * self.stride, size, remote[1])], self.kind)
                handle = self.agent.initialize_xfer("READ", mine, theirs, peer, b"done")
                running.append((slot, handle, self.agent.transfer(handle, b"done")))
            for _ in range(len(running)):
                slot, handle, state = running.popleft()
                if state == "PROC":
                    state = self.agent.check_xfer_state(handle)
                if state == "PROC":
                    running.append((slot, handle, state))
                    continue
                self.agent.release_xfer_handle(handle)
                free.append(slot)
            if running and not (left and free):
                time.sleep(0.0001)
        return time.perf_counter() - begun_s


# ---- the taker, which measures ----


def copy_once(num_bytes: int, memory: list[torch.Tensor]) -> float:
    begun_s = time.perf_counter()
    if memory[0].device.type == "cpu":
        ctypes.memmove(memory[1].data_ptr(), memory[0].data_ptr(), num_bytes)
    else:
        memory[1].copy_(memory[0])
        for device in {tensor.device for tensor in memory}:
            torch.cuda.synchronize(device)
    return time.perf_counter() - begun_s


def kernels_alone(side: Side, section: TransferSection) -> dict[str, float]:
    """GB/s of one segment's gather, scatter and plain copy on this card."""
    tokens = 32768
    pages = side.pages(tokens)
    segment = side.geometry.history_segments(0, tokens // BLOCK_TOKENS, section.segment_bytes)[0]
    payload = side.geometry.payload_bytes(segment, tokens)
    buffer = torch.empty(payload, dtype=torch.uint8, device=side.pools.device)
    other = torch.empty_like(buffer)
    addresses, lengths = side.mover.segments.resolve(pages, segment, tokens)
    offsets = lengths.cumsum() - lengths
    digest = torch.zeros(1, dtype=torch.int64, device=side.pools.device)

    def pieces(source: Any, target: Any) -> torch.Tensor:
        columns = [torch.from_numpy(column) for column in (source, target, offsets, lengths)]
        return torch.stack(columns, 1).to(side.pools.device)

    out, back = pieces(addresses, buffer.data_ptr() + offsets), pieces(buffer.data_ptr() + offsets, addresses)
    longest = int(lengths.max())
    kernels: dict[str, Callable[[], object]] = {
        "gather": lambda: move_pieces(out, digest, max_bytes=longest),
        "scatter": lambda: move_pieces(back, digest, max_bytes=longest),
        "copy": lambda: other.copy_(buffer),
    }
    found: dict[str, float] = {"segment_bytes": payload}
    for name, run in kernels.items():
        times = []
        for _ in range(30):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(10):
                run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 10e3)
        found[f"{name}_kernel"] = payload / statistics.median(times[5:]) / 1e9
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: side.mover.gather(pages, segment, tokens, buffer.data_ptr()),
        "scatter": lambda: side.mover.scatter(pages, segment, tokens, buffer.data_ptr()),
    }
    for name, run in calls.items():
        times = []
        for _ in range(60):
            begun_s = time.perf_counter()
            run()
            times.append(time.perf_counter() - begun_s)
        found[f"{name}_call"] = payload / statistics.median(times[10:]) / 1e9
    return found


async def measure(arguments: argparse.Namespace, section: TransferSection, devices: tuple[str, str]) -> dict[str, Any]:
    """All lengths over the transport that this process was started with; devices of holder and taker."""
    holder_device, taker_device = devices
    longest = max(arguments.tokens)
    ours, theirs = multiprocessing.Pipe()
    holder = multiprocessing.get_context("spawn").Process(
        target=hold_main, args=(theirs, longest, section, holder_device), daemon=True
    )
    holder.start()
    side = Side("taker", longest, section, taker_device)
    side.thread.start()
    address, metadata, remote = await asyncio.to_thread(ours.recv)
    raw = RawEnd("raw-taker", section, taker_device)
    peer = raw.add(metadata)
    side.thread.post(api.PeerFound(WorkerId("holder"), address))
    up = await side.until(api.LinkChanged, lambda event: event.phase is api.LinkPhase.UP)

    async def whole(length: int) -> float:
        transfer_id = TransferId(new_transfer_id())
        await asyncio.to_thread(ours.send, (transfer_id, length))
        await asyncio.to_thread(ours.recv)
        begun_s = time.perf_counter()
        side.thread.post(
            api.OpenPull(
                transfer_id=transfer_id,
                attempt=1,
                holder=WorkerId("holder"),
                holder_incarnation=None,
                pages=side.pages(length),
                length=length,
            )
        )
        await side.until(api.Arrived)
        return time.perf_counter() - begun_s

    rows = []
    for length in arguments.tokens:
        sizes = side.segments(length, section.segment_bytes)
        payload = sum(sizes)
        memory = [
            torch.full((payload,), fill, dtype=torch.uint8, device=device)
            for fill, device in zip((1, 2), devices, strict=True)
        ]
        ways: dict[str, Callable[[], Awaitable[float]]] = {
            "whole": lambda length=length: whole(length),
            "raw": lambda sizes=sizes: asyncio.to_thread(raw.read_all, peer, remote, sizes, section.window),
            "copy": lambda payload=payload, memory=memory: asyncio.to_thread(copy_once, payload, memory),
        }
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(arguments.repeats + 1):
            for way, run in ways.items():
                spent_s = await run()
                if turn:
                    times[way].append(spent_s)
        rate = {way: payload / statistics.median(spent) / 1e9 for way, spent in times.items()}
        pairs = [raw_s / whole_s for raw_s, whole_s in zip(times["raw"], times["whole"], strict=True)]
        rows.append(
            {
                "tokens": length,
                "payload_bytes": payload,
                "segments": len(sizes),
                "gigabytes_per_s": rate,
                "whole_of_raw": rate["whole"] / rate["raw"],
                "whole_of_raw_each": sorted(pairs),
                "whole_of_copy": rate["whole"] / rate["copy"],
            }
        )
    alone = kernels_alone(side, section) if taker_device != "cpu" else None
    ours.send(None)
    holder.join(10.0)
    holder.kill()
    side.thread.stop(5.0)
    return {"transport": up.transport, "probe_gigabytes_per_s": up.gigabytes_per_s, "alone": alone, "rows": rows}


def measure_main(
    pipe: Connection, arguments: argparse.Namespace, section: TransferSection, devices: tuple[str, str]
) -> None:
    pipe.send(uvloop.run(measure(arguments, section, devices)))
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--transports", nargs="+", choices=sorted(SETTINGS), default=["tcp", "cma", "shm"])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--segment-mib", type=float, default=None, help="payload bound of a segment")
    parser.add_argument("--window", type=int, default=None)
    parser.add_argument("--reads", type=int, default=None)
    parser.add_argument("--devices", nargs=2, default=["cuda:0", "cuda:0"], help="of holder and taker, for cuda")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    section = TransferSection()
    if arguments.segment_mib is not None:
        section = dataclasses.replace(section, segment_bytes=int(arguments.segment_mib * (1 << 20)))
    if arguments.reads is not None:
        section = dataclasses.replace(section, reads=arguments.reads)
    if arguments.window is not None:
        buffers = max(section.num_send_buffers, 2 * arguments.window)
        section = dataclasses.replace(
            section, window=arguments.window, num_send_buffers=buffers, num_landing_buffers=buffers
        )
    spawn = multiprocessing.get_context("spawn")
    found = []
    for transport in arguments.transports:
        # UCX reads its settings once, at load: each transport has processes of its own.
        os.environ["UCX_TLS"] = SETTINGS[transport]
        # A host without a network has the loopback device alone, and UCX takes that only by name.
        os.environ["UCX_NET_DEVICES"] = "lo" if transport != "cuda" else "all"
        ours, theirs = spawn.Pipe()
        devices = tuple(arguments.devices) if transport == "cuda" else ("cpu", "cpu")
        child = spawn.Process(target=measure_main, args=(theirs, arguments, section, devices))
        child.start()
        theirs.close()
        result = ours.recv()
        child.join(10.0)
        found.append({"setting": transport, "devices": devices, **result})
        print(f"{transport}: {devices[0]} to {devices[1]}, {result['transport']}; kernels alone {result['alone']}")
        for row in result["rows"]:
            rate = row["gigabytes_per_s"]
            print(
                f"{transport:>4} {row['tokens']:>8} tokens {row['payload_bytes'] / 1e6:8.1f} MB "
                f"{row['segments']:>3} segments  whole {rate['whole']:6.2f}  raw {rate['raw']:6.2f}  "
                f"copy {rate['copy']:6.2f} GB/s  whole/raw {row['whole_of_raw']:.2f} "
                f"whole/copy {row['whole_of_copy']:.2f}",
                flush=True,
            )
    if arguments.json is not None:
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        machine = {"machine": platform.processor() or platform.machine(), "cores": os.cpu_count(), "card": card}
        arguments.json.write_text(
            json.dumps({**machine, "section": dataclasses.asdict(section), "transports": found}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
