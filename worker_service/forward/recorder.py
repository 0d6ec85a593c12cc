"""What records work on a device so that it can be replayed as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

Work = Callable[[], None]
Cut = Callable[[Work], None]
"""Runs work between two pieces of a recording: it is called anew at each replay, at this place."""


class Recording(Protocol):
    """What was recorded. It reads and writes the memory that it was recorded with."""

    def replay(self) -> None:
        """Do it again, on the current stream; does not wait for it."""


class Recorder(Protocol):
    """Owner of the memory that recordings share."""

    def record(self, work: Callable[[Cut], None]) -> Recording:
        """Run ``work`` once and record it. What it computes on the host is not part of the recording."""

    def clear(self) -> None:
        """Let the memory go. No recording is replayed afterwards."""
