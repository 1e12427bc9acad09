"""Where a sequence stops to keep a check-point: the borders from which others are likely to go on.

The last two borders of a prompt (a longer sibling begins at the last one, the same prompt again needs the one before
its last token), the end of what it found here (other chains part there), and every 2,048 tokens while that costs
nobody anything. Of the output the last border only: the next turn of a conversation begins there.
"""

from __future__ import annotations

from ..core.blocks import BLOCK_TOKENS
from .allocator import Hit

SPACING = 2048


def prompt_borders(prompt_tokens: int, hit: Hit) -> tuple[int, ...]:
    """Borders of a prompt that are worth a check-point whatever it costs, ascending."""
    last = prompt_tokens // BLOCK_TOKENS * BLOCK_TOKENS
    found = hit.num_blocks * BLOCK_TOKENS
    return tuple(border for border in sorted({last - BLOCK_TOKENS, last, found}) if border >= max(found, hit.start + 1))


def next_border(computed: int, borders: tuple[int, ...], *, spaced: bool) -> int | None:
    """Where the next chunk ends at the latest, if it gets that far.

    Args:
        spaced: the borders that are only worth a check-point when it is cheap count too.
    """
    after = [border for border in borders if border > computed]
    if spaced:
        after.append((computed // SPACING + 1) * SPACING)
    return min(after, default=None)
