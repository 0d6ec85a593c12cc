"""Send deltas to all ranks at once through shared memory, beside their Steps streams (``mp``).

Only envelopes with deltas go this way; Hello, heartbeats, results, refusals and goodbyes stay on Steps. A ring loses
nothing and is never opened again, so nothing is sent twice: a rank whose end of it is gone is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from service_chassis.protocol.broadcast_ring import BroadcastWriter, ReaderFds


class DeltaBroadcast:
    """The writer's end, for one group. Used by the event loop."""

    def __init__(self, world_size: int) -> None:
        """Make a ring for so many ranks, none of which has begun to read."""
        self._writer = BroadcastWriter(num_readers=world_size)
        self._unsent: deque[bytes] = deque()  # while a rank is a whole ring behind; bounded by the steps in flight

    def reader_fds(self, rank: int) -> ReaderFds:
        """Return what the process of a rank must inherit."""
        return self._writer.reader_fds(rank)

    def started(self, rank: int) -> None:
        """Note that the process of a rank holds its end."""
        self._writer.release_reader_fds(rank)

    def begin(self, on_rank_lost: Callable[[int], None]) -> None:
        """Watch the ranks, all of which were started; ``on_rank_lost`` is called once for each that closed its end."""
        self._writer.begin(on_reader_lost=on_rank_lost, on_room=self._send_unsent)

    def send(self, message: bytes) -> None:
        """Give an envelope to every rank, in order; never waits.

        Raises:
            MessageTooLong: no ring would take it.
        """
        if self._unsent or not self._writer.send(message):
            self._unsent.append(message)

    def _send_unsent(self) -> None:
        while self._unsent and self._writer.send(self._unsent[0]):
            self._unsent.popleft()

    def close(self) -> None:
        """End it. Safe to call twice."""
        self._unsent.clear()
        self._writer.close()
