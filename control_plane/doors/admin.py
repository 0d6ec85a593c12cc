"""``maniple.v1.AdminService``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, NoReturn

from control_plane.doors.calls import Context
from control_plane.doors.engine_seat import EngineSeat
from control_plane.doors.limits import check_number
from control_plane.doors.served_model import ServedModel
from maniple.v1 import admin_pb2, admin_pb2_grpc
from maniple.v1.admin_pb2 import GroupStatus
from service_chassis.errors import NotBuilt, NotReady

if TYPE_CHECKING:
    from control_plane.engine import Engine

SERVICE = "maniple.v1.AdminService"
# The reason that an engine gives for not being ready while it drains, whoever asked for it.
DRAINING = "draining"
_DRAIN_REPORT_S = 0.5

# Accept no more requests and wait until none is left; after so many seconds (None: never) abort the rest. Returns how
# many were aborted.
Drain = Callable[[float | None], Awaitable[int]]


class AdminDoor(admin_pb2_grpc.AdminServiceServicer):
    """Translate between operators and the engine. Decides nothing."""

    def __init__(
        self, seat: EngineSeat, served: ServedModel, *, version: str, drain: Drain, uptime_s: Callable[[], float]
    ) -> None:
        self._seat = seat
        self._served = served
        self._version = version
        self._drain = drain
        self._uptime_s = uptime_s
        self._drains: set[asyncio.Task[int]] = set()  # go on when the caller that began them is gone

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        response = admin_pb2.GetStatusResponse(
            model=self._served.names[0],
            version=self._version,
            uptime_s=self._uptime_s(),
            ready=self._seat.ready,
            not_ready_reason=self._seat.not_ready_reason,
        )
        try:
            engine = self._seat.engine
        except NotReady:
            response.groups.add(name="0", state="forming", reason=self._seat.not_ready_reason)
            return response
        status = engine.status()
        response.prompt_tokens_per_s = status.prompt_tokens_per_s
        response.output_tokens_per_s = status.output_tokens_per_s
        response.steps_per_s = status.steps_per_s
        response.prefix_cache_queries = status.prefix_cache_queries
        response.prefix_cache_hits = status.prefix_cache_hits
        response.num_finished = status.num_finished
        response.groups.append(self._group(engine))
        return response

    def _group(self, engine: Engine) -> GroupStatus:
        status, limits = engine.status(), engine.limits
        state = "ready" if status.ready else "draining" if status.not_ready_reason == DRAINING else "lost"
        return GroupStatus(
            name="0",
            state=state,
            reason=status.not_ready_reason,
            epoch=status.epoch,
            step=max(status.step, 0),
            ranks=[
                GroupStatus.RankStatus(
                    rank=rank.rank,
                    address=rank.address,
                    pid=rank.pid,
                    accepted=rank.accepted,
                    completed=rank.completed,
                    silent_for_s=rank.silent_for_s,
                )
                for rank in status.ranks
            ],
            num_running=status.num_running,
            num_waiting=status.num_waiting,
            num_free_blocks=status.num_free_blocks,
            num_cached_blocks=status.num_cached_blocks,
            num_total_blocks=limits.num_blocks - 1,
            block_size=limits.block_size,
            num_preemptions=status.num_preemptions,
        )

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.DrainResponse, None]:
        deadline_s = check_number("deadline_s", request.deadline_s, 0.0)
        engine = self._seat.engine
        task = asyncio.ensure_future(self._drain(deadline_s or None))
        self._drains.add(task)
        task.add_done_callback(self._drains.discard)
        while True:
            await asyncio.wait({task}, timeout=_DRAIN_REPORT_S)
            status = engine.status()
            yield admin_pb2.DrainResponse(
                num_running=status.num_running,
                num_waiting=status.num_waiting,
                num_aborted=task.result() if task.done() else 0,
            )
            if task.done():
                return

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=self._seat.engine.reset_prefix_cache())

    async def IsPaused(self, request: admin_pb2.IsPausedRequest, context: Context) -> admin_pb2.IsPausedResponse:
        return admin_pb2.IsPausedResponse(is_paused=False)  # nothing can pause yet

    async def IsSleeping(self, request: admin_pb2.IsSleepingRequest, context: Context) -> admin_pb2.IsSleepingResponse:
        return admin_pb2.IsSleepingResponse(is_sleeping=False)  # nothing can sleep yet

    async def ListLoras(self, request: admin_pb2.ListLorasRequest, context: Context) -> admin_pb2.ListLorasResponse:
        return admin_pb2.ListLorasResponse()  # none can be loaded yet

    async def PauseGeneration(
        self, request: admin_pb2.PauseGenerationRequest, context: Context
    ) -> admin_pb2.PauseGenerationResponse:
        _not_built("PauseGeneration")

    async def ResumeGeneration(
        self, request: admin_pb2.ResumeGenerationRequest, context: Context
    ) -> admin_pb2.ResumeGenerationResponse:
        _not_built("ResumeGeneration")

    async def Sleep(self, request: admin_pb2.SleepRequest, context: Context) -> admin_pb2.SleepResponse:
        _not_built("Sleep")

    async def WakeUp(self, request: admin_pb2.WakeUpRequest, context: Context) -> admin_pb2.WakeUpResponse:
        _not_built("WakeUp")

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Context) -> admin_pb2.LoadLoraResponse:
        _not_built("LoadLora")

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Context) -> admin_pb2.UnloadLoraResponse:
        _not_built("UnloadLora")

    async def UpdateWeights(
        self, request: admin_pb2.UpdateWeightsRequest, context: Context
    ) -> admin_pb2.UpdateWeightsResponse:
        _not_built("UpdateWeights")

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Context
    ) -> admin_pb2.StartProfileResponse:
        _not_built("StartProfile")

    async def StopProfile(
        self, request: admin_pb2.StopProfileRequest, context: Context
    ) -> admin_pb2.StopProfileResponse:
        _not_built("StopProfile")


def _not_built(method: str) -> NoReturn:
    raise NotBuilt(f"{SERVICE}/{method} is reserved in the protocol and not built yet")
