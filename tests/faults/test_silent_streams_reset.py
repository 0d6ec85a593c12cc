"""A proxy between control plane and workers resets streams without DATA (cases B3): heartbeats keep them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc

from control_plane.executors.remote import RemoteExecutor
from control_plane.executors.worker_settings import WorkerSettings
from maniple.v1 import worker_pb2, worker_pb2_grpc
from support.faults import SETTINGS, WORKER, LiveGroup, assert_next_group_works, is_alive
from support.remote_ranks import remote_ranks
from support.resetting_proxy import ResettingProxy
from support.waiting import until

SILENCE_S = 1.5
IDLE_S = 3.5
# The same port at another address of this host: what a rank says of its health server leads to the proxy as well.
THERE, BETWEEN = "127.0.0.1", "127.0.0.2"


@asynccontextmanager
async def group_behind_a_proxy(worker: WorkerSettings) -> AsyncIterator[tuple[LiveGroup, ResettingProxy]]:
    """Form a group of one rank whose two connections lead through a proxy."""
    with remote_ranks(1, worker) as remote:
        port = int(remote.addresses[0].rpartition(":")[2])
        async with grpc.aio.insecure_channel(remote.addresses[0]) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            described = await stub.Describe(worker_pb2.DescribeRequest(), timeout=20, wait_for_ready=True)
        health_port = int(described.health_address.rpartition(":")[2])
        async with (
            ResettingProxy((BETWEEN, port), (THERE, port), silence_s=SILENCE_S) as proxy,
            ResettingProxy((BETWEEN, health_port), (THERE, health_port), silence_s=3600),
        ):
            executor = RemoteExecutor([f"{BETWEEN}:{port}"], world_size=1, settings=worker)
            settings = replace(SETTINGS, idle_report_interval_s=worker.idle_report_interval_s, heartbeat_timeout_s=10.0)
            live = LiveGroup(executor, settings)
            await live.form()
            try:
                yield live, proxy
                assert not live.losses
            finally:
                await live.group.teardown("the test is over")
        assert is_alive(remote.processes[0].pid)  # it is not ours to end


async def test_heartbeats_keep_an_idle_stream_through_a_proxy_that_resets_silent_ones() -> None:
    async with group_behind_a_proxy(WORKER) as (live, proxy), asyncio.timeout(60):
        await live.run_steps(3)
        num_streams = proxy.num_streams
        await asyncio.sleep(IDLE_S)  # the fault itself: nothing happens for so long
        assert (proxy.num_resets, proxy.num_streams) == (0, num_streams)
        await live.run_steps(3)
        live.assert_tokens_exact()
    await assert_next_group_works()


async def test_stream_that_was_reset_is_opened_again_without_a_verdict() -> None:
    """The control: rarer heartbeats than the proxy bears. A broken stream is a transport loss and no more."""
    rarely = replace(WORKER, idle_report_interval_s=2 * SILENCE_S)
    async with group_behind_a_proxy(rarely) as (live, proxy), asyncio.timeout(60):
        await live.run_steps(3)
        await until(lambda: proxy.num_resets >= 1, "a reset")
        await live.run_steps(3)
        live.assert_tokens_exact()
    await assert_next_group_works()
