"""Identities: who is who, for how long, and what may never be mistaken for what."""

from __future__ import annotations

import secrets
from enum import Enum
from typing import NewType

WorkerId = NewType("WorkerId", str)
"""Stable name of a worker across restarts, for example `decode-0`."""

RequestId = NewType("RequestId", str)
"""The router's name for a request; survives retries and migration. Never a key of engine state."""

TransferId = NewType("TransferId", bytes)
"""16 random bytes, made by the router anew for each attempt."""

Incarnation = NewType("Incarnation", int)
"""Random 64 bit number drawn at process start; another number is another life."""


class Role(Enum):
    """What a worker is asked to do. A role is a weight: every worker can do both phases."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


def new_transfer_id() -> TransferId:
    """A transfer id nobody can guess."""
    return TransferId(secrets.token_bytes(16))


def new_incarnation() -> Incarnation:
    """A number for this process's life; never 0, so that an unset field is no life."""
    return Incarnation(secrets.randbits(63) + 1)
