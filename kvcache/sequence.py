"""The pages of one sequence, by logical position."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class SequencePages:
    """Page ids that hold a sequence: an immutable snapshot, safe to read in any thread."""

    history: tuple[int, ...] = ()
    """Page of block b at index b."""
    window: tuple[tuple[int, int], ...] = ()
    """(position // 64, page id), ascending; pages below the window are gone."""
    state_row: int = -1
    """Row of the state pool; -1 before one is taken."""

    window_pages: dict[int, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "window_pages", dict(self.window))
