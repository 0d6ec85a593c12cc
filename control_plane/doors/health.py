"""``grpc.health.v1``: the empty name is liveness, a service's name is its readiness.

Liveness says that this process answers; it holds while a model loads and while requests drain. Stuck, asleep, draining
and dead groups are NOT_SERVING under the names of the services that need a model. What needs none, such as the service
that wakes a sleeping server up, is SERVING as long as the process answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health_pb2 import HealthCheckResponse

from control_plane.doors.calls import Context
from control_plane.fleet import Fleet

SERVICE = "grpc.health.v1.Health"
NEED_NO_MODEL = ("maniple.v1.AdminService", SERVICE)
# A watcher hears the same again after so long, since proxies end streams that are silent.
REPEAT_S = 10.0


class HealthDoor(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # untyped stubs
    """Tells readiness as the fleet has it at the moment of asking; watchers hear of changes at once."""

    def __init__(self, fleet: Fleet, services: Sequence[str], *, repeat_s: float = REPEAT_S) -> None:
        """Answer for ``services``, those of ``NEED_NO_MODEL`` among them; every other name is unknown."""
        self._fleet = fleet
        self._services = frozenset(services)
        self._repeat_s = repeat_s
        self._watchers: set[asyncio.Event] = set()
        self._is_over = False
        fleet.on_readiness(lambda ready: self._wake())

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> HealthCheckResponse:
        status = self._status(request.service)
        if status == HealthCheckResponse.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"service={request.service[:120]!r}: is not served here")
        return HealthCheckResponse(status=status)

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        statuses = {name: HealthCheckResponse(status=self._status(name)) for name in ("", *sorted(self._services))}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncGenerator[HealthCheckResponse, None]:
        changed = asyncio.Event()
        self._watchers.add(changed)
        told = None  # what the watcher knows, None where it should hear it again
        try:
            while True:
                changed.clear()
                status = self._status(request.service)
                if status != told:
                    yield HealthCheckResponse(status=status)
                    told = status
                    continue  # it may have changed again while it was sent, and the last status must be told
                if self._is_over:
                    return
                try:
                    async with asyncio.timeout(self._repeat_s):
                        await changed.wait()
                except TimeoutError:
                    told = None
        finally:
            self._watchers.discard(changed)

    def end(self) -> None:
        """End all watches: nothing changes any more, and the server would wait for them."""
        self._is_over = True
        self._wake()

    def _status(self, service: str) -> HealthCheckResponse.ServingStatus:
        if service and service not in self._services:
            return HealthCheckResponse.SERVICE_UNKNOWN
        serving = not service or service in NEED_NO_MODEL or self._fleet.is_serving
        return HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING

    def _wake(self) -> None:
        for changed in self._watchers:
            changed.set()
