"""Remember rows that left, for an owner that comes later: their tokens, and why they ended (PROTOCOL B9).

Pure; used by the event loop alone.
"""

from __future__ import annotations

from collections import deque

from maniple.v1 import worker_pb2

# As it will be told, less its age. Made when a row leaves: with a thousand of them a takeover would wait for that.
Tombstone = worker_pb2.SnapshotResponse.Tombstone


class Tombstones:
    """The last ``max_kept`` rows that left, each for ``keep_s`` while somebody owns the rank.

    Their clock stands still between two owners: whoever lost its stream with the first can only ask the second.
    """

    def __init__(self, *, keep_s: float = 60.0, max_kept: int = 1024) -> None:
        self._keep_s = keep_s
        self._kept: deque[tuple[float, Tombstone]] = deque(maxlen=max_kept)  # when on our clock, ascending
        self._stood_still_s = 0.0
        self._last_expired: float | None = None

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, now: float, tombstone: Tombstone) -> None:
        """Bury a row. The oldest goes where there are too many."""
        self._kept.append((now - self._stood_still_s, tombstone))

    def expire(self, now: float, *, orphaned: bool = False) -> None:
        """Forget rows that left more than ``keep_s`` ago. To be called often.

        Args:
            now: monotonic.
            orphaned: nobody owned the rank since the call before, so that time does not count.
        """
        if orphaned and self._last_expired is not None:
            self._stood_still_s += now - self._last_expired
        self._last_expired = now
        while self._kept and now - self._stood_still_s - self._kept[0][0] > self._keep_s:
            self._kept.popleft()

    def all(self, now: float) -> list[tuple[Tombstone, float]]:
        """Return what is kept with its age in seconds, oldest first."""
        return [(tombstone, max(0.0, now - self._stood_still_s - at)) for at, tombstone in self._kept]

    def clear(self) -> None:
        """Forget all."""
        self._kept.clear()
