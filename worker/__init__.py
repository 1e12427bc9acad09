"""One worker process: sessions with routers, links to peers, status, drain. The same for every role.

What a leg of one kind decides stands in `prefill/` and `decode/`; those rooms pass their legs in (`process.run`), so
this room imports neither. A worker that takes every kind is `run(config, {**prefill.legs.LEGS, **decode.legs.LEGS})`.
"""
