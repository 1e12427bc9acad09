"""The errors of headrace, classed by what helps the caller.

Nobody reads the text to decide; `remedy` says what to do. `reason` is the stable machine-readable name that the OpenAI
error body (`code`) and gRPC's `ErrorInfo.reason` are made from.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar


class Remedy(Enum):
    """What a caller can do about an error."""

    CHANGE_REQUEST = "change_request"
    LATER = "later"
    ELSEWHERE = "elsewhere"
    DROP = "drop"
    FIX_CONFIG = "fix_config"


class HeadraceError(Exception):
    """Base of all errors that cross a room's border."""

    remedy: ClassVar[Remedy]
    reason: ClassVar[str] = "internal_error"


class RequestError(HeadraceError):
    """The request itself is wrong; the same request can never succeed here."""

    remedy = Remedy.CHANGE_REQUEST
    reason = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code or self.reason


class PromptTooLong(RequestError):
    """Prompt, or prompt plus the wanted output, exceeds the model's or the pools' length."""

    reason = "context_length_exceeded"


class UnknownModel(RequestError):
    """No such served model name."""

    reason = "model_not_found"


class CapacityError(HeadraceError):
    """Room is short now; the same request can succeed later."""

    remedy = Remedy.LATER
    reason = "queue_full"


class NoFreePages(CapacityError):
    """A pool cannot give what was asked; nothing was taken."""


class QueueFull(CapacityError):
    """A bounded queue is full."""


class NoWorkers(CapacityError):
    """Nothing is ready to serve."""

    reason = "no_workers"


class Draining(CapacityError):
    """The process is leaving and takes no new work."""

    reason = "draining"


class DeadlineExceeded(HeadraceError):
    """The request's own deadline passed."""

    remedy = Remedy.CHANGE_REQUEST
    reason = "deadline_exceeded"


class Cancelled(HeadraceError):
    """The client left, or someone aborted the request."""

    remedy = Remedy.DROP
    reason = "cancelled"


class PeerError(HeadraceError):
    """Another process failed; the same work can succeed elsewhere."""

    remedy = Remedy.ELSEWHERE
    reason = "worker_failed"


class PeerLost(PeerError):
    """The connection to a worker ended."""


class TransferFailed(PeerError):
    """Pages did not arrive whole: overdue, corrupt, stale or gone."""

    reason = "transfer_failed"


class StaleError(HeadraceError):
    """Speech of an earlier life or attempt; drop it silently."""

    remedy = Remedy.DROP
    reason = "stale"


class StaleEpoch(StaleError):
    """The message names another incarnation than the living one."""


class LeaseExpired(StaleError):
    """The promise that the message relies on has ended."""


class LayoutError(HeadraceError):
    """Bytes or shapes do not fit the layout that both sides agreed on."""

    remedy = Remedy.FIX_CONFIG
    reason = "layout_mismatch"


class ConfigError(HeadraceError):
    """A setting is unknown or wrong; the text names the key and the nearest known one."""

    remedy = Remedy.FIX_CONFIG
    reason = "invalid_config"


class CheckpointError(ConfigError):
    """A checkpoint lacks a tensor, has one too many, or one of another shape or dtype."""


#: Every error that may cross a process border, by its reason; `proto/convert.py` rebuilds them from it.
BY_REASON: dict[str, type[HeadraceError]] = {
    "invalid_value": RequestError,
    "context_length_exceeded": PromptTooLong,
    "model_not_found": UnknownModel,
    "queue_full": QueueFull,
    "no_workers": NoWorkers,
    "draining": Draining,
    "deadline_exceeded": DeadlineExceeded,
    "cancelled": Cancelled,
    "worker_failed": PeerLost,
    "transfer_failed": TransferFailed,
    "stale": StaleEpoch,
}
