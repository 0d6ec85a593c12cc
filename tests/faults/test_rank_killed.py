"""A rank's process dies: while idle (cases A4), in a step, and while it starts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from control_plane.announcement import Lost, Ready
from control_plane.executors.multiproc import MultiprocExecutor
from control_plane.group.loss import GroupNotFormed
from control_plane.group.settings import GroupSettings
from control_plane.group.worker_group import WorkerGroup
from service_chassis.scripted import fail_at
from support.faults import WORKER, assert_next_group_works, forming, is_alive, model_with
from support.scripted_reference import greedy
from support.serve_process import NOT_SERVING, SERVING, Caller, serving


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL], ids=lambda number: number.name)
async def test_rank_killed_while_idle_is_named_within_a_second(number: signal.Signals) -> None:
    async with forming() as live:
        await live.run_steps(2)
        killed_at = time.monotonic()
        os.kill(live.pid, number)
        loss = await live.lost(within_s=2.0)
        assert live.lost_at - killed_at < 1.0
        assert loss.rank == 0
        assert loss.reason == f"rank 0 exited: killed by {number.name}"
        assert not live.group.healthy
        live.assert_tokens_exact()
    await assert_next_group_works()


async def test_server_is_not_ready_within_two_seconds_when_a_rank_aborts_while_nothing_runs() -> None:
    with serving("--model", "scripted", "--executor", "mp", "--tensor-parallel-size", "2") as server:
        async with Caller(server) as caller, asyncio.timeout(60):
            (group,) = (await caller.status()).groups
            assert (group.num_running, group.num_waiting) == (0, 0)
            assert await caller.health() == SERVING
            os.kill(group.ranks[1].pid, signal.SIGABRT)
            await caller.healthy(NOT_SERVING, within_s=2.0)
            assert server.hear(Lost).reason == "rank 1 exited: killed by SIGABRT"
            server.hear(Ready, 2)
            await caller.healthy(SERVING, within_s=5.0)
            assert not any(is_alive(rank.pid) for rank in group.ranks)
            await caller.status()
            assert (await caller.generate("r", [5, 250, 17], 4).end()).token_ids == greedy([5, 250, 17], 4)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


async def test_rank_that_exits_in_a_step_is_lost_with_its_exit_code() -> None:
    async with forming(model=model_with(fail_at(0, 3, "exit"))) as live:
        await live.run_steps(3)
        loss = await live.lost(within_s=2.0)
        assert loss.reason.startswith("rank 0 exited: exit code ")
        assert live.result_steps == [1, 2]
        live.assert_tokens_exact()
    await assert_next_group_works()


async def test_rank_that_dies_while_it_loads_ends_the_formation() -> None:
    executor = MultiprocExecutor(world_size=1, settings=WORKER)
    group = WorkerGroup(executor, GroupSettings(model=model_with(fail_at(0, 0, "abort"))), owner_id="owner")
    started_at = time.monotonic()
    with pytest.raises(GroupNotFormed, match=r"rank 0 exited: killed by SIGABRT"):
        await group.form()
    assert time.monotonic() - started_at < 10.0
    address, pid = executor.describe_rank(executor.ranks[0])
    assert pid
    assert not is_alive(pid)
    assert not Path(address.removeprefix("unix:")).parent.exists()
    await assert_next_group_works()
