"""Keep what is numbered by step and may have to be sent again (PROTOCOL A1).

A rank keeps the bytes of deltas that it accepted, for the next owner, and the output rank keeps results. Both are one
structure: steps ascend, gaps are allowed (a step without a result), the oldest go first.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class StepLog(Generic[T]):
    """Items by ascending step."""

    def __init__(self, max_items: int) -> None:
        """Keep the last ``max_items``."""
        self._items: deque[tuple[int, T]] = deque(maxlen=max_items)

    def __len__(self) -> int:
        return len(self._items)

    def append(self, step: int, item: T) -> None:
        """Keep ``item`` under ``step``, which is above all steps before."""
        assert not self._items or step > self._items[-1][0], "steps ascend"
        self._items.append((step, item))

    def after(self, step: int) -> list[tuple[int, T]]:
        """Return the items above ``step``, ascending. Work is in proportion to what is returned."""
        found = []
        for item in reversed(self._items):
            if item[0] <= step:
                break
            found.append(item)
        found.reverse()
        return found


DeltaLog = StepLog[bytes]
