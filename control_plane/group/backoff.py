"""Decide how long to wait before a lost group is formed anew, and when to give up. Pure."""

from __future__ import annotations

FIRST_DELAY_S = 0.5
MAX_DELAY_S = 30.0
# A group that lived for so long was sound: what ends it afterwards is another failure, not the same once more.
HEALTHY_AFTER_S = 120.0


class Backoff:
    """The failures of one group in a row: losses, and attempts to form it that failed."""

    def __init__(self, max_failures: int) -> None:
        """Allow so many failures in a row; the next one is the last."""
        self._max_failures = max_failures
        self._formed_at: float | None = None
        self.num_failures = 0

    def formed(self, now: float) -> None:
        """Note that the group lives."""
        self._formed_at = now

    def failed(self, now: float) -> float | None:
        """Note a failure; return the seconds to wait before the next attempt, or None to give up."""
        if self._formed_at is not None and now - self._formed_at >= HEALTHY_AFTER_S:
            self.num_failures = 0
        self._formed_at = None
        self.num_failures += 1
        if self.num_failures > self._max_failures:
            return None
        return float(min(FIRST_DELAY_S * 2 ** min(self.num_failures - 1, 16), MAX_DELAY_S))
