"""Cache shapes of the released models, for commands that have no checkpoint at hand."""

from __future__ import annotations

from collections.abc import Mapping

from .layout import CacheShape


def _alternating(first_two: int, num_layers: int) -> tuple[int, ...]:
    """Two layers of one class, then c4a and c128a in turn, beginning and ending with c4a."""
    return (first_two, first_two, *(4 if layer % 2 == 0 else 128 for layer in range(2, num_layers)))


PRESETS: Mapping[str, CacheShape] = {
    "deepseek-v4-flash": CacheShape(_alternating(0, 43), mtp_layers=1),
    "deepseek-v4-pro": CacheShape(_alternating(128, 61), mtp_layers=1),
}
