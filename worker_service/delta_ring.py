"""Read deltas from the ring in shared memory that the parent on the same host writes (see ``broadcast_ring``)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from service_chassis.protocol.broadcast_ring import BroadcastReader, ReaderFds
from worker_service.heartbeat import Failure, failure_of


class DeltaRing:
    """A rank's end of the ring. Runs on the event loop, between what comes on Steps."""

    def __init__(
        self, fds: ReaderFds, rank: int, take: Callable[[bytes], None], fail: Callable[[Failure], None]
    ) -> None:
        """Pass every message on to ``take``. Whatever goes wrong is the rank's failure: nothing is sent again here."""
        self._fds = fds
        self._rank = rank
        self._take = take
        self._fail = fail
        self._task = asyncio.create_task(self._read_all(), name="delta-ring")

    async def _read_all(self) -> None:
        """Read until the writer closed the ring or is gone, which the parent's lifeline tells as well."""
        try:
            reader = BroadcastReader(self._fds, self._rank)
            try:
                async for message in reader:
                    self._take(message)
            finally:
                reader.close()
        except Exception as error:
            self._fail(failure_of(error, doing="reading deltas from shared memory"))

    async def close(self) -> None:
        """Read no more."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
