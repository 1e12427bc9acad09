"""The transfer thread: one thread that owns the driver, the buffers and every decision about transfers of this worker.

How a worker uses it:

- `TransferThread(...)`, `start()`, then `post(command)` from any thread; commands are applied in order; last
  `stop(timeout_s)`. Nothing here waits for the caller, and `post` never blocks.
- `deliver(event)` and `send(link_id, message)` are called in the transfer thread and must only hand over
  (`loop.call_soon_threadsafe`). `send` for a link that is closed already is dropped by the shell in silence.

Links. The shell owns the gRPC streams, the thread owns what they mean:

- Taking: post `PeerFound(worker id, address, incarnation)` when a holder becomes known, at the latest before
  `OpenPull`. The thread delivers `Dial(link_id, peer, address)`, now and after each loss, with back-off. The shell
  opens `KvPeer.Link` there and posts `LinkOpened(link_id, OUT)` as soon as the call stands, or `LinkClosed(link_id,
  why)`. `Hello` comes from the thread through `send`.
- Holding: for a stream that a peer opened, draw `link_id = thread.new_link_id()`, post `LinkOpened(link_id, IN)`.
- Both: each incoming proto message goes through `proto/peer_convert.py` and in as `LinkMessage(link_id, message)`;
  `PeerFault` from the conversion: close the stream. When a stream ends for whatever reason post
  `LinkClosed(link_id, why)` once. On the event `CloseLink(link_id, why)` end the stream; no answer is needed.

Holder: `Offer` -> `Wanted` (let the engine compute) -> `BlocksFinal`* -> `PrefillDone` -> `Ended` (release the pages).
`Ended` may come at any time after `Offer`, exactly once, and only when no gather reads the pages any more.
Taker: `OpenPull` -> `Arrived` | `NotNeeded` | `PullFailed`, exactly once; after either no scatter writes the pages.
"""
