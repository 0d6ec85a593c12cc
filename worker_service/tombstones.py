"""Remember rows that left, for an owner that comes later: their tokens, and why they ended (PROTOCOL B9).

Pure, except that it is written by the device thread and read by the event loop: one lock, held for moments.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tombstone:
    request_id: str
    sample_index: int
    token_ids: tuple[int, ...]  # prompt and output tokens that count; what was sampled past a stop is not among them
    num_prompt_tokens: int
    reason: int  # RowFinished.Reason
    control_blob: bytes
    buried_at: float  # on the worker's monotonic clock


class Tombstones:
    """The last ``max_kept`` rows that left, each for ``keep_s``."""

    def __init__(self, *, keep_s: float = 60.0, max_kept: int = 1024) -> None:
        self._keep_s = keep_s
        self._kept: deque[Tombstone] = deque(maxlen=max_kept)  # by buried_at, ascending
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, tombstone: Tombstone) -> None:
        """Bury a row. The oldest goes where there are too many."""
        with self._lock:
            self._kept.append(tombstone)

    def expire(self, now: float, orphaned_for_s: float = 0.0) -> None:
        """Forget rows that left more than ``keep_s`` ago. Their clock stands still while the rank is orphaned."""
        with self._lock:
            while self._kept and now - orphaned_for_s - self._kept[0].buried_at > self._keep_s:
                self._kept.popleft()

    def all(self) -> list[Tombstone]:
        """Return what is kept, oldest first."""
        with self._lock:
            return list(self._kept)
