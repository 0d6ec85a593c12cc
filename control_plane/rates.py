"""Count events per second over the last ten seconds."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0


class Rate:
    """Events per second over the window, or since the first event if that is less long ago. Counts in whole seconds."""

    def __init__(self) -> None:
        self.total = 0
        self._seconds: deque[list[int]] = deque()  # [second, events], the newest last
        self._since: float | None = None

    def add(self, now: float, count: int) -> None:
        """Count ``count`` events at ``now``, a monotonic time in seconds."""
        self.total += count
        if self._since is None:
            self._since = now
        second = int(now)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1][1] += count
        else:
            self._seconds.append([second, count])
            self._drop_old(now)

    def per_second(self, now: float) -> float:
        """Return the rate at ``now``."""
        self._drop_old(now)
        if self._since is None:
            return 0.0
        span_s = min(WINDOW_S, max(1.0, now - self._since))
        return sum(count for _, count in self._seconds) / span_s

    def _drop_old(self, now: float) -> None:
        while self._seconds and self._seconds[0][0] <= now - WINDOW_S:
            self._seconds.popleft()
