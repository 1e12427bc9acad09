"""Stop strings: where the text ends, and how much of it must wait because it may be the start of one.

The match that ends first wins, on a tie the first in the list. Each stop string is followed by its own automaton, one
step a character, so the cost does not grow with how the text teases it. Knows text; not tokens, not streams.
"""

from __future__ import annotations

from collections.abc import Sequence


def _fallbacks(stop: str) -> list[int]:
    """For each prefix of `stop`, the length of its longest proper border."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[i] != stop[length]:
            length = table[length - 1]
        if stop[i] == stop[length]:
            length += 1
        table[i] = length
    return table


class StopMatcher:
    """Feeds on the text of one choice, piece by piece."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._tables = [_fallbacks(stop) for stop in self._stops]
        self._states = [0] * len(self._stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, piece: str, searched: bool = True) -> str:
        """The text that is certain to be output now. After a match `matched` is set and no more may be fed.

        Args:
            searched: False for text of the first min_tokens tokens, which is never part of a match.
        """
        assert self.matched is None
        if not searched or not self._stops:
            return piece
        if not self._held and not any(self._states) and self._first.isdisjoint(piece):
            return piece
        text = self._held + piece
        end = self._advance(piece)
        if end is not None:
            assert self.matched is not None
            stop_end = len(self._held) + end
            self._held = ""
            return text[:stop_end] if self._include else text[: stop_end - len(self.matched)]
        if self._include:
            return piece
        keep = max(self._states)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The rest, when the output has ended without a match."""
        held, self._held = self._held, ""
        return held

    def _advance(self, piece: str) -> int | None:
        """Step all automata over `piece`; where in it the first match ends, if any does."""
        states = self._states
        for position, character in enumerate(piece):
            for i, stop in enumerate(self._stops):
                state = states[i]
                while state and stop[state] != character:
                    state = self._tables[i][state - 1]
                if stop[state] == character:
                    state += 1
                    if state == len(stop):
                        self.matched = stop
                        return position + 1
                states[i] = state
        return None
