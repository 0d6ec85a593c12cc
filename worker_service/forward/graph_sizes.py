"""Decide which steps are replayed from a recorded graph, and which graph that is. Pure: numbers in, a value out."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

# Nobody waits long for a graph of every size, and padding costs little: a step of few rows takes as long as it takes to
# read the weights.
_LARGEST_BY_DEFAULT = 512


def default_sizes(largest: int) -> tuple[int, ...]:
    """Return the sizes that are recorded if nobody says which: dense where padding would show, up to ``largest``."""
    most = min(largest, _LARGEST_BY_DEFAULT)
    dense = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, _LARGEST_BY_DEFAULT + 1, 32)]
    return tuple(sorted({size for size in dense if size < most} | {most}, reverse=True))


def sizes_to_record(asked: Iterable[int], largest: int) -> tuple[int, ...]:
    """Return the sizes to record, the largest first, so that the smaller ones find their memory in the pool.

    Args:
        asked: for; empty: the default.
        largest: rows that a step of single queries can have. What is beyond is of no use.
    """
    wanted = sorted({size for size in asked if 0 < size <= largest}, reverse=True)
    return tuple(wanted) if any(True for _ in asked) else default_sizes(largest)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """How a step is run."""

    size: int | None  # of the graph; None: as it is, launched kernel by kernel
    reason: str = ""  # why not by a graph

    @property
    def is_replayed(self) -> bool:
        return self.size is not None


class GraphSizes:
    """The sizes there are graphs of."""

    def __init__(self, sizes: Iterable[int]) -> None:
        self._ascending = sorted(sizes)

    def __bool__(self) -> bool:
        return bool(self._ascending)

    def dispatch(self, num_reqs: int, num_tokens: int) -> Dispatch:
        """Say how a step of so many rows and tokens is run: by the smallest graph that holds it, if one does."""
        if not self._ascending:
            return Dispatch(None, "no graphs")
        if num_tokens != num_reqs:
            return Dispatch(None, "some row has more than one token")
        place = bisect.bisect_left(self._ascending, num_reqs)
        if place == len(self._ascending):
            return Dispatch(None, f"more rows than the largest graph, {self._ascending[-1]}")
        return Dispatch(self._ascending[place])
