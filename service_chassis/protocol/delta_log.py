"""Keep what is numbered by step and may have to be sent again (PROTOCOL A1).

The control plane keeps the bytes of deltas until every rank accepted them, a rank keeps those it accepted for the next
owner, and the output rank keeps results. All three are one structure: steps ascend, gaps are allowed (a step without a
result), the oldest go first.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class StepLog(Generic[T]):
    """Items by ascending step."""

    def __init__(self, max_items: int | None = None) -> None:
        """Keep the last ``max_items``; None keeps all until ``drop_through``."""
        self._items: deque[tuple[int, T]] = deque(maxlen=max_items)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def first_step(self) -> int | None:
        """The oldest step kept."""
        return self._items[0][0] if self._items else None

    @property
    def last_step(self) -> int | None:
        """The newest step kept."""
        return self._items[-1][0] if self._items else None

    def append(self, step: int, item: T) -> None:
        """Keep ``item`` under ``step``, which is above all steps before."""
        assert not self._items or step > self._items[-1][0], "steps ascend"
        self._items.append((step, item))

    def drop_through(self, step: int) -> None:
        """Forget all items up to and including ``step``."""
        while self._items and self._items[0][0] <= step:
            self._items.popleft()

    def after(self, step: int) -> list[tuple[int, T]]:
        """Return the items above ``step``, ascending. Work is in proportion to what is returned."""
        found = []
        for item in reversed(self._items):
            if item[0] <= step:
                break
            found.append(item)
        found.reverse()
        return found

    def clear(self) -> None:
        """Forget everything."""
        self._items.clear()


DeltaLog = StepLog[bytes]
