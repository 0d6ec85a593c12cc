"""Find the first of several stop strings in a growing text, one character at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A stop string ended. Both counts are of characters of the text pushed last and may be negative for ``begin``."""

    stop: str
    begin: int  # where the stop string begins, relative to the pushed text; negative when it began earlier
    end: int  # just behind its last character


class StopMatcher:
    """Knuth-Morris-Pratt over all stop strings at once.

    The match is the one that *ends* first, and of those the longest: what a reader of single characters would see. So
    it does not depend on where tokens happen to be cut. The cost of a character is constant and nothing older than the
    longest stop string is kept.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._fallbacks = tuple(_fallbacks(stop) for stop in self._stops)
        self._matched = [0] * len(self._stops)  # stop index -> length of its longest prefix that ends the text

    def push(self, text: str, *, may_match: bool = True) -> Match | None:
        """Read on. With ``may_match=False`` a complete stop string is passed over, now and for ever."""
        for position, character in enumerate(text):
            found: str | None = None
            for index, stop in enumerate(self._stops):
                fallback = self._fallbacks[index]
                length = self._matched[index]
                while length and stop[length] != character:
                    length = fallback[length]
                if stop[length] == character:
                    length += 1
                if length == len(stop):
                    if may_match and (found is None or len(stop) > len(found)):
                        found = stop
                    length = fallback[length]
                self._matched[index] = length
            if found is not None:
                return Match(found, position + 1 - len(found), position + 1)
        return None

    def skip(self, text: str) -> None:
        """Go on behind a text, from whose beginning on no stop string occurs in what was read and in it."""
        longest = max(map(len, self._stops), default=0)
        if len(text) >= longest:
            self._matched = [0] * len(self._stops)
            text = text[len(text) - longest + 1 :]
        self.push(text, may_match=False)

    @property
    def num_held(self) -> int:
        """How many characters at the end of the text may be the beginning of a stop string."""
        return max(self._matched, default=0)


def _fallbacks(stop: str) -> tuple[int, ...]:
    """Return for each length of a matched prefix the next shorter prefix that also ends there."""
    fallbacks = [0] * (len(stop) + 1)
    length = 0
    for position in range(1, len(stop)):
        while length and stop[length] != stop[position]:
            length = fallbacks[length]
        if stop[length] == stop[position]:
            length += 1
        fallbacks[position + 1] = length
    return tuple(fallbacks)
