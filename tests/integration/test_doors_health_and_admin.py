"""``grpc.health.v1`` and ``maniple.v1.AdminService`` over a real socket, before a fake engine."""

from __future__ import annotations

import asyncio
import os
import pstats
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2

from control_plane.engine import Engine
from control_plane.profiler import Profiler
from maniple.v1 import admin_pb2
from service_chassis.errors import InvalidParameter, WrongState
from support.fake_engine import open_doors
from support.waiting import until

INFERENCE = "maniple.v1.InferenceService"
VLLM_ENGINE = "vllm.grpc.engine.VllmEngine"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


def named(service: str) -> health_pb2.HealthCheckRequest:
    return health_pb2.HealthCheckRequest(service=service)


@pytest.mark.parametrize("service", [INFERENCE, VLLM_ENGINE])
async def test_service_is_serving_as_long_as_the_engine_is_ready(service: str) -> None:
    async with open_doors() as doors:
        assert (await doors.health.Check(named(service))).status == SERVING
        doors.engine.set_ready(False, "stuck")
        assert (await doors.health.Check(named(service))).status == NOT_SERVING
        assert (await doors.health.Check(named(""))).status == SERVING  # alive all the same


async def test_unknown_service_is_not_found() -> None:
    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await doors.health.Check(named("nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        watch = doors.health.Watch(named("nobody"))
        assert (await watch.read()).status == SERVICE_UNKNOWN
        watch.cancel()


async def test_list_names_every_service() -> None:
    async with open_doors() as doors:
        statuses = (await doors.health.List(health_pb2.HealthListRequest())).statuses
    assert {name: answer.status for name, answer in statuses.items()} == {
        "": SERVING,
        INFERENCE: SERVING,
        VLLM_ENGINE: SERVING,
    }


async def test_watcher_hears_of_changes_at_once_and_of_no_change_again_and_again() -> None:
    async with open_doors() as doors, asyncio.timeout(10):
        watch = doors.health.Watch(named(INFERENCE))
        assert (await watch.read()).status == SERVING
        assert (await watch.read()).status == SERVING  # repeated, since proxies end silent streams
        doors.engine.set_ready(False, "draining")
        while (await watch.read()).status == SERVING:
            pass
        doors.engine.set_ready(True)
        while (await watch.read()).status == NOT_SERVING:
            pass
        watch.cancel()


async def test_watch_of_a_server_that_stops_ends_in_order_with_the_last_status() -> None:
    async with open_doors() as doors, asyncio.timeout(10):
        watch = doors.health.Watch(named(INFERENCE))
        assert (await watch.read()).status == SERVING
        doors.engine.set_ready(False, "shutting down")
        doors.health_door.end()
        last = SERVING
        while (message := await watch.read()) is not grpc.aio.EOF:
            last = message.status
        assert last == NOT_SERVING
        assert await watch.code() is grpc.StatusCode.OK


async def test_watch_tells_the_last_status_when_it_changed_and_ended_while_another_was_sent() -> None:
    async with open_doors() as doors:
        watch = doors.health_door.Watch(named(INFERENCE), Mock())
        assert (await anext(watch)).status == SERVING
        doors.engine.set_ready(False, "shutting down")  # the server is still writing the one before
        doors.health_door.end()
        assert [message.status async for message in watch] == [NOT_SERVING]


async def test_readiness_is_that_of_the_engine_in_the_seat() -> None:
    async with open_doors() as doors, asyncio.timeout(10):
        watch = doors.health.Watch(named(INFERENCE))
        assert (await watch.read()).status == SERVING
        old = doors.engine
        doors.fleet.leave("the group is formed anew")
        while (await watch.read()).status == SERVING:
            pass
        old.set_ready(True)  # the word of an engine of before counts no more
        assert (await doors.health.Check(named(INFERENCE))).status == NOT_SERVING
        doors.fleet.take(cast(Engine, old))
        assert (await doors.health.Check(named(INFERENCE))).status == SERVING
        watch.cancel()


async def test_status_says_what_the_engine_does() -> None:
    async with open_doors() as doors:
        status = await doors.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert (status.model, status.version, status.uptime_s, status.ready) == ("fake", "1.2.3", 5.0, True)
    assert (status.prefix_cache_queries, status.prefix_cache_hits) == (40, 10)
    (group,) = status.groups
    assert (group.state, group.epoch, group.step, group.num_waiting) == ("ready", 1, 7, 2)
    assert (group.num_free_blocks, group.num_cached_blocks, group.num_total_blocks) == (60, 15, 100)


async def test_status_answers_while_there_is_no_engine() -> None:
    async with open_doors() as doors:
        doors.fleet.leave("loading weights")
        status = await doors.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert (status.ready, status.not_ready_reason) == (False, "loading weights")
    assert [(group.state, group.reason) for group in status.groups] == [("forming", "loading weights")]


@pytest.mark.parametrize(("reason", "state"), [("draining", "draining"), ("rank 0 was lost: it died", "lost")])
async def test_state_of_the_group_follows_the_reason(reason: str, state: str) -> None:
    async with open_doors() as doors:
        doors.engine.set_ready(False, reason)
        status = await doors.admin.GetStatus(admin_pb2.GetStatusRequest())
    assert [(group.state, group.reason) for group in status.groups] == [(state, reason)]


async def test_drain_reports_until_done() -> None:
    async with open_doors() as doors:
        reports = [report async for report in doors.admin.Drain(admin_pb2.DrainRequest(deadline_s=1.5))]
        assert doors.drained == [1.5]
        assert reports[-1].num_aborted == 2
        with pytest.raises(grpc.aio.AioRpcError, match="deadline_s"):
            [_ async for _ in doors.admin.Drain(admin_pb2.DrainRequest(deadline_s=-1))]


async def test_prefix_cache_is_reset_through_the_engine() -> None:
    async with open_doors() as doors:
        assert (await doors.admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())).num_blocks == 15


@pytest.mark.parametrize("method", ["LoadLora", "UnloadLora"])
async def test_what_is_not_built_is_unimplemented_and_says_so(method: str) -> None:
    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(doors.admin, method)(getattr(admin_pb2, f"{method}Request")())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert method in (caught.value.details() or "")


async def test_profile_of_the_event_loop_is_written_where_it_says() -> None:
    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError, match="no profile was started"):
            await doors.admin.StopProfile(admin_pb2.StopProfileRequest())
        await doors.admin.StartProfile(admin_pb2.StartProfileRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="under way"):
            await doors.admin.StartProfile(admin_pb2.StartProfileRequest())
        await doors.admin.GetStatus(admin_pb2.GetStatusRequest())
        path = (await doors.admin.StopProfile(admin_pb2.StopProfileRequest())).path
    try:
        functions = {function for _, _, function in pstats.Stats(path).stats}  # type: ignore[attr-defined]
    finally:
        os.unlink(path)
    assert "GetStatus" in functions


async def test_profile_of_some_steps_ends_by_itself(tmp_path: Path) -> None:
    step = 7
    profiler = Profiler(str(tmp_path), lambda: step)
    profiler.start(2)
    step = 9
    await until(lambda: os.listdir(tmp_path), "the profile is written")
    assert Path(profiler.stop()).parent == tmp_path
    with pytest.raises(WrongState):
        profiler.stop()
    profiler = Profiler(str(tmp_path / "missing"), lambda: step)
    profiler.start(0)
    with pytest.raises(InvalidParameter, match="profile_directory"):
        profiler.stop()
