"""Keep items in order of a key, with removal from the middle, at a cost that does not grow with a scan."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator
from typing import Any, Generic, TypeVar

Item = TypeVar("Item", bound=Hashable)


class OrderQueue(Generic[Item]):
    """A heap whose removed items are skipped when they surface. Keys are comparable and unique."""

    def __init__(self) -> None:
        self._heap: list[tuple[Any, Item]] = []
        self._keys: dict[Item, Any] = {}  # what is really in the queue

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, item: Item) -> bool:
        return item in self._keys

    def __iter__(self) -> Iterator[Item]:
        """In no order."""
        return iter(self._keys)

    def push(self, key: Any, item: Item) -> None:
        assert item not in self._keys
        self._keys[item] = key
        heapq.heappush(self._heap, (key, item))

    def discard(self, item: Item) -> bool:
        """Remove ``item`` wherever it is. False: it was not there."""
        if self._keys.pop(item, None) is None:
            return False
        # Removed entries stay in the heap until they surface; without this a flood of aborts would keep them all.
        if len(self._heap) > 2 * len(self._keys) + 32:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapq.heapify(self._heap)
        return True

    def first(self) -> Item | None:
        """The item with the smallest key; it stays."""
        heap, keys = self._heap, self._keys
        while heap:
            key, item = heap[0]
            if keys.get(item) is key:
                return item
            heapq.heappop(heap)
        return None

    def first_key(self) -> Any | None:
        item = self.first()
        return None if item is None else self._keys[item]
