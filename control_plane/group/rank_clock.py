"""Bring what a rank says of its steps to this process's clock."""

from __future__ import annotations

from dataclasses import dataclass

from maniple.v1 import worker_pb2


@dataclass(frozen=True, slots=True)
class StepTiming:
    """When one step was where on one rank; monotonic nanoseconds, here. ``sampling_ns`` is 0 where it is not known."""

    step: int
    accepted_ns: int
    started_ns: int
    sampling_ns: int
    completed_ns: int


@dataclass(frozen=True, slots=True)
class RankClock:
    """How far a rank's monotonic clock is ahead of ours, as the round trip of a Hello showed.

    On one host both are the same clock. Elsewhere the error is at most half of the round trip, and grows as two
    quartzes drift apart: some milliseconds an hour, until the stream is opened again.
    """

    ahead_ns: int = 0

    @classmethod
    def seen(cls, rank_ns: int, *, asked_ns: int, answered_ns: int) -> RankClock:
        """Take what a rank's clock said at some moment between two of ours; 0: it does not say."""
        ahead_ns = rank_ns - (asked_ns + answered_ns) // 2
        is_the_same = asked_ns <= rank_ns <= answered_ns  # or cannot be told from it
        return cls(0 if is_the_same or not rank_ns else ahead_ns)

    def here(self, timing: worker_pb2.StepsResponse.StepTiming) -> StepTiming:
        """Return a step's times on our clock."""
        return StepTiming(
            step=timing.step,
            accepted_ns=timing.accepted_ns - self.ahead_ns,
            started_ns=timing.started_ns - self.ahead_ns,
            sampling_ns=timing.sampling_ns - self.ahead_ns if timing.sampling_ns else 0,
            completed_ns=timing.completed_ns - self.ahead_ns,
        )
