"""Leave a group to its next owner: say goodbye, tell clients where to go on, read on for those that cannot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from control_plane.group.worker_group import WorkerGroup
from control_plane.handover import NextOwner
from control_plane.live_request import LiveRequest
from control_plane.live_requests import LiveRequests
from maniple.v1 import worker_pb2
from service_chassis.errors import InternalError, ManipleError, NotReady, TakenOver
from service_chassis.ids import RequestId

log = structlog.get_logger(__name__)

# A spare that waits for the group has it within this time of the goodbye: then clients can be told where.
SPARE_WITHIN_S = 1.0


class Departure:
    """How one engine leaves its group. Event loop; owned by the engine.

    Args:
        group: that is left.
        live: the requests that are here.
        end: ends a request, with an error or well; ``frees_id`` makes its id usable again.
        abort_all: ends all of them.
    """

    def __init__(
        self,
        group: WorkerGroup,
        live: LiveRequests,
        *,
        end: Callable[[LiveRequest, ManipleError | None, bool], None],
        abort_all: Callable[[], object],
    ) -> None:
        self.is_under_way = False  # no new steps
        self.is_last_step_told = asyncio.Event()  # none is outstanding either, and clients have what came of them
        self._group = group
        self._live = live
        self._end = end
        self._abort_all = abort_all
        self._reading: dict[RequestId, asyncio.Task[None]] = {}  # at the next owner, for clients that cannot resume

    async def settle(self, timeout_s: float) -> bool:
        """Wait until the steps under way are answered and told; False: one hangs, and the next owner will see to it."""
        try:
            async with asyncio.timeout(timeout_s):
                await self.is_last_step_told.wait()
        except TimeoutError:
            return False
        return True

    async def complete(self, next_owner: NextOwner) -> bool:
        """Give the lease up, from the last rank to the first, and only then tell clients; see ``leave_to_next``.

        Return, when the last request that was read elsewhere is done, whether every rank knew that it is free.
        """
        try:
            is_free = await self._group.goodbye(worker_pb2.StepsRequest.Goodbye.KIND_HANDOVER)
            address = "" if self._live.is_idle else await next_owner.address(within_s=SPARE_WITHIN_S)
        except asyncio.CancelledError:  # a second signal; what runs goes on all the same, at whoever comes next
            self._tell_that_they_are_elsewhere("")
            raise
        self._tell_that_they_are_elsewhere(address)
        try:
            async with asyncio.timeout(next_owner.settings.drain_timeout_s), asyncio.TaskGroup() as readings:
                for live in self._live:
                    reading = readings.create_task(self._read_on(live, next_owner))
                    self._reading[live.generation.request_id] = reading
        except TimeoutError:
            self._abort_all()
        return is_free

    def forget(self, request_id: RequestId) -> None:
        """Read a request no further: that ends it there."""
        if (reading := self._reading.pop(request_id, None)) is not None:
            reading.cancel()

    def _tell_that_they_are_elsewhere(self, address: str) -> None:
        """End what a client can go on with by itself at the next owner, or never began."""
        where = {"owner_address": address} if address else {}
        for live in self._live:
            if live.started_at is None or live.generation.pooling is not None:  # a vector is nowhere before it is whole
                self._end(live, NotReady("the control plane hands over to another", metadata=where), True)
            elif live.stream is None or live.generation.client_resumes:
                self._end(live, TakenOver("the control plane handed the group over", metadata=where), False)

    async def _read_on(self, live: LiveRequest, next_owner: NextOwner) -> None:
        try:
            error = await next_owner.read_on(live)
        except Exception as defect:
            error = InternalError()
            log.error("handover.failed", incident_id=error.incident_id, exc_info=defect)
        del self._reading[live.generation.request_id]
        self._end(live, error, False)
