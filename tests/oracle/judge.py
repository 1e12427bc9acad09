"""What parity means, and the checkpoints and records that it is judged on."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from . import oracle
from .builder import Variant, random_weights, write_released, write_transformers

TOLERANCE = 5e-5
"""On a logit in fp32; transformers' own noise is a tenth of it."""

SHORT = 300
SHORT_CUTS = (1, 4, 129, 257, SHORT)
LONG = 2500
LONG_CUTS = (1, 2, 3, 4, 5, 7, 8, 127, 128, 129, 131, 255, 256, 257, 511, 512, 513, 1023, 1024, 1025, 2047, LONG)
"""Both sides of every border that a group, a window, a page, a block and YaRN's original length have."""


def worst(logits: Tensor, record: oracle.Record) -> tuple[float, int]:
    """Largest difference from the oracle over the positions that `logits` has, and where it is."""
    per_position = (logits - record.logits[: len(logits)]).abs().amax(1)
    assert not per_position.isnan().any(), f"NaN at {int(per_position.isnan().nonzero()[0])}"
    return float(per_position.max()), int(per_position.argmax())


def check(logits: Tensor, record: oracle.Record) -> None:
    difference, position = worst(logits, record)
    assert difference <= TOLERANCE, f"{difference:.1e} at position {position}"


class Checkpoints:
    """Each variant's checkpoint in each dialect, written when first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def plain(self, v: Variant) -> Path:
        """Released names, bf16 and fp32."""
        return self._made(v, "plain", lambda path: write_released(path, v, random_weights(v)))

    def packed(self, v: Variant) -> Path:
        """Released names and bytes, in shards."""
        return self._made(
            v, "packed", lambda path: write_released(path, v, random_weights(v), packed=True, num_shards=3)
        )

    def transformers(self, v: Variant) -> Path:
        """What save_pretrained writes."""
        return self._made(v, "transformers", lambda path: write_transformers(path, self.plain(v)))

    def record(self, v: Variant, length: int, cuts: tuple[int, ...]) -> oracle.Record:
        return oracle.record(v, length, cuts, lambda: self.plain(v))

    def _made(self, v: Variant, dialect: str, write: object) -> Path:
        path = self.folder / f"{v.name}-{dialect}"
        if not path.exists():
            write(path)
        return path
