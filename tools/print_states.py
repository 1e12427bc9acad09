"""Prints docs/states.md from the tables that the code runs on. `make docs` rewrites the file, a test compares them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from enum import Enum

TABLES = (
    ("A request in the router", "headrace.router.journey", "NEXT"),
    ("What a router knows of a worker's prefix cache", "headrace.router.prefix_index", "NEXT"),
    ("A PREFILL leg", "headrace.prefill.legs", "NEXT"),
    ("A GENERATE leg", "headrace.decode.legs", "GENERATE_NEXT"),
    ("A LOCAL leg", "headrace.decode.legs", "LOCAL_NEXT"),
    ("A SHARE leg", "headrace.worker.prefix_legs", "SHARE_NEXT"),
    ("A FETCH leg", "headrace.worker.prefix_legs", "FETCH_NEXT"),
    ("The holder's side of a transfer", "headrace.transfer.holder", "NEXT"),
    ("The taker's side of a transfer", "headrace.transfer.taker", "NEXT"),
    ("A send buffer", "headrace.transfer.buffers", "SEND_NEXT"),
    ("A landing buffer", "headrace.transfer.buffers", "LANDING_NEXT"),
    ("A link between two workers", "headrace.transfer.link", "NEXT"),
    ("A worker process", "headrace.worker.lifecycle", "NEXT"),
    ("A child of `headrace serve`", "headrace.cli.supervisor", "NEXT"),
)

HEAD = """\
# States

Printed by `make docs` from the tables that the code runs on; do not edit. An event that is missing in a row would be a
bug and ends the process; one that loops is late or harmless, and stands under *stays on*.
"""


def render() -> str:
    """The whole document."""
    parts = [HEAD]
    for title, module, name in TABLES:
        table = getattr(importlib.import_module(module), name)
        place = f"`{module.removeprefix('headrace.').replace('.', '/')}.py`, `{name}`"
        parts.append(f"## {title}\n\n{place}\n\n{_rows(table)}")
    return "\n".join(parts)


def _rows(table: Mapping[Enum, Mapping[Enum, Enum]]) -> str:
    lines = ["| state | leaves on | stays on |", "|---|---|---|"]
    for state, row in table.items():
        targets: dict[Enum, list[str]] = {}
        for event, target in row.items():
            targets.setdefault(target, []).append(event.name.lower())
        stays = ", ".join(targets.pop(state, []))
        leaves = "; ".join(f"{', '.join(events)} → **{target.name}**" for target, events in targets.items())
        lines.append(f"| **{state.name}** | {leaves} | {stays} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(render(), end="")
