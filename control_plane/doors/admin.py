"""``maniple.v1.AdminService``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from control_plane.doors.calls import Context
from control_plane.doors.limits import check_number
from control_plane.doors.served_model import ServedModel
from control_plane.dormancy import RankMemory
from control_plane.engine_status import GroupView
from control_plane.fleet import Fleet
from control_plane.pause import PauseMode
from control_plane.profiler import Profiler
from maniple.v1 import admin_pb2, admin_pb2_grpc
from maniple.v1.admin_pb2 import GroupStatus
from service_chassis.errors import InvalidParameter, NotBuilt
from service_chassis.sleep_tags import SCHEDULING
from service_chassis.telemetry import get_logger

log = get_logger()

T = TypeVar("T")

SERVICE = "maniple.v1.AdminService"
_DRAIN_REPORT_S = 0.5
_PAUSE_MODES = {
    admin_pb2.PAUSE_MODE_UNSPECIFIED: PauseMode.ABORT,
    admin_pb2.PAUSE_MODE_ABORT: PauseMode.ABORT,
    admin_pb2.PAUSE_MODE_WAIT: PauseMode.WAIT,
    admin_pb2.PAUSE_MODE_KEEP: PauseMode.KEEP,
}

# Accept no more requests and wait until none is left; after so many seconds (None: never) abort the rest. Returns how
# many were aborted.
Drain = Callable[[float | None], Awaitable[int]]


class AdminDoor(admin_pb2_grpc.AdminServiceServicer):
    """Translate between operators and the engine. Decides nothing."""

    def __init__(
        self,
        fleet: Fleet,
        served: ServedModel,
        *,
        version: str,
        drain: Drain,
        uptime_s: Callable[[], float],
        profile_directory: str = "",
    ) -> None:
        self._fleet = fleet
        self._served = served
        self._version = version
        self._drain = drain
        self._uptime_s = uptime_s
        self._profiler = Profiler(profile_directory, self._num_steps)
        self._under_way: set[asyncio.Future[Any]] = set()  # goes on when the caller that began it is gone

    def _num_steps(self) -> int:
        return sum(view.engine.step for view in self._fleet.status().groups if view.engine is not None)

    async def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Context) -> admin_pb2.GetStatusResponse:
        status = self._fleet.status()
        return admin_pb2.GetStatusResponse(
            model=self._served.names[0],
            version=self._version,
            uptime_s=self._uptime_s(),
            ready=self._fleet.ready,
            not_ready_reason=self._fleet.not_ready_reason,
            groups=[_group_status(group) for group in status.groups],
            prompt_tokens_per_s=status.prompt_tokens_per_s,
            output_tokens_per_s=status.output_tokens_per_s,
            steps_per_s=status.steps_per_s,
            prefix_cache_queries=status.prefix_cache_queries,
            prefix_cache_hits=status.prefix_cache_hits,
            num_finished=status.num_finished,
        )

    async def Drain(
        self, request: admin_pb2.DrainRequest, context: Context
    ) -> AsyncGenerator[admin_pb2.DrainResponse, None]:
        deadline_s = check_number("deadline_s", request.deadline_s, 0.0)
        task = self._carry_out(self._drain(deadline_s or None))
        while True:
            await asyncio.wait({task}, timeout=_DRAIN_REPORT_S)
            is_over = task.done()  # it may end while a report is sent, and the last one must say so
            status = self._fleet.status()
            yield admin_pb2.DrainResponse(
                num_running=status.num_running,
                num_waiting=status.num_waiting,
                num_aborted=task.result() if is_over else 0,
            )
            if is_over:
                return

    async def ResetPrefixCache(
        self, request: admin_pb2.ResetPrefixCacheRequest, context: Context
    ) -> admin_pb2.ResetPrefixCacheResponse:
        num_blocks = self._fleet.reset_prefix_cache()
        in_use = sum(view.num_blocks_in_use for view in self._fleet.status().groups)
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=num_blocks, num_blocks_in_use=in_use)

    async def ListLoras(self, request: admin_pb2.ListLorasRequest, context: Context) -> admin_pb2.ListLorasResponse:
        return admin_pb2.ListLorasResponse()  # none can be loaded yet

    async def PauseGeneration(
        self, request: admin_pb2.PauseGenerationRequest, context: Context
    ) -> admin_pb2.PauseGenerationResponse:
        await self._pause(_pause_mode(request.mode), clear_cache=request.clear_cache)
        return admin_pb2.PauseGenerationResponse()

    async def ResumeGeneration(
        self, request: admin_pb2.ResumeGenerationRequest, context: Context
    ) -> admin_pb2.ResumeGenerationResponse:
        await asyncio.shield(self._carry_out(self._fleet.rest.wake_up([SCHEDULING])))
        return admin_pb2.ResumeGenerationResponse()

    async def IsPaused(self, request: admin_pb2.IsPausedRequest, context: Context) -> admin_pb2.IsPausedResponse:
        return admin_pb2.IsPausedResponse(is_paused=self._fleet.is_paused)

    # To pause is to let the tag `scheduling` sleep. The other tags are those of levels 1 and 2.

    async def Sleep(self, request: admin_pb2.SleepRequest, context: Context) -> admin_pb2.SleepResponse:
        sleep = self._fleet.rest.sleep(request.level, _pause_mode(request.mode))
        return admin_pb2.SleepResponse(ranks=_rank_memory(await asyncio.shield(self._carry_out(sleep))))

    async def WakeUp(self, request: admin_pb2.WakeUpRequest, context: Context) -> admin_pb2.WakeUpResponse:
        wake_up = self._fleet.rest.wake_up(request.tags)
        return admin_pb2.WakeUpResponse(ranks=_rank_memory(await asyncio.shield(self._carry_out(wake_up))))

    async def IsSleeping(self, request: admin_pb2.IsSleepingRequest, context: Context) -> admin_pb2.IsSleepingResponse:
        tags = self._fleet.rest.tags
        return admin_pb2.IsSleepingResponse(is_sleeping=bool(tags), tags=tags)

    async def UpdateWeights(
        self, request: admin_pb2.UpdateWeightsRequest, context: Context
    ) -> admin_pb2.UpdateWeightsResponse:
        num_tensors = await asyncio.shield(self._carry_out(self._fleet.rest.update_weights(request.path)))
        return admin_pb2.UpdateWeightsResponse(num_tensors=num_tensors)

    async def _pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await asyncio.shield(self._carry_out(self._fleet.pause(mode, clear_cache=clear_cache)))

    def _carry_out(self, work: Awaitable[T]) -> asyncio.Future[T]:
        """Begin what goes on to its end also when whoever asked for it is gone."""
        task = asyncio.ensure_future(work)
        self._under_way.add(task)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Future[Any]) -> None:
        self._under_way.discard(task)
        # Whoever still waits is told. Where nobody does, asyncio would take it for a failure that went unnoticed.
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("operation.failed", reason=str(error), error=type(error).__name__)

    async def LoadLora(self, request: admin_pb2.LoadLoraRequest, context: Context) -> admin_pb2.LoadLoraResponse:
        _not_built("LoadLora")

    async def UnloadLora(self, request: admin_pb2.UnloadLoraRequest, context: Context) -> admin_pb2.UnloadLoraResponse:
        _not_built("UnloadLora")

    async def StartProfile(
        self, request: admin_pb2.StartProfileRequest, context: Context
    ) -> admin_pb2.StartProfileResponse:
        self._profiler.start(request.num_steps)
        return admin_pb2.StartProfileResponse()

    async def StopProfile(
        self, request: admin_pb2.StopProfileRequest, context: Context
    ) -> admin_pb2.StopProfileResponse:
        return admin_pb2.StopProfileResponse(path=self._profiler.stop())


def _group_status(group: GroupView) -> GroupStatus:
    status, limits = group.engine, group.limits
    if status is None or limits is None:
        return GroupStatus(name=group.name, state=group.state, reason=group.reason)
    return GroupStatus(
        name=group.name,
        state=group.state,
        reason=group.reason,
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


def _rank_memory(memory: Mapping[str, Sequence[RankMemory]]) -> list[admin_pb2.RankMemory]:
    return [
        admin_pb2.RankMemory(group=group, rank=one.rank, freed_bytes=one.freed_bytes, taken_bytes=one.taken_bytes)
        for group, ranks in memory.items()
        for one in ranks
    ]


def _pause_mode(mode: admin_pb2.PauseMode.ValueType) -> PauseMode:
    if mode not in _PAUSE_MODES:
        raise InvalidParameter("mode", int(mode), "must be one of abort (1), wait (2) and keep (3), or unset")
    return _PAUSE_MODES[mode]


def _not_built(method: str) -> NoReturn:
    raise NotBuilt(f"{SERVICE}/{method} is reserved in the protocol and not built yet")
