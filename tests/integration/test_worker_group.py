"""A group of a real worker process: formation, its deadline and its end."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.executors.multiproc import MultiprocExecutor
from control_plane.group.loss import GroupNotFormed
from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import worker_pb2
from service_chassis.errors import InvalidParameter, LeaseHeld
from service_chassis.scripted import fail_at
from support.faults import SETTINGS, WORKER, forming, is_alive, model_with
from support.waiting import until


class Forming:
    """A group that is being formed, and the stages it told of."""

    def __init__(self, **settings: object) -> None:
        self.executor = MultiprocExecutor(world_size=1, settings=WORKER)
        self.group = WorkerGroup(self.executor, replace(SETTINGS, **settings), owner_id="owner")  # type: ignore[arg-type]
        self.stages: list[str] = []
        self.shares: list[float] = []
        self.task = asyncio.create_task(self.group.form(self._on_progress))

    def _on_progress(self, stage: str, rank: int, share: float, detail: str) -> None:
        self.stages.append(stage)
        self.shares.append(share)

    async def reach(self, stage: str) -> None:
        await until(lambda: stage in self.stages or self.task.done(), f"stage {stage}")

    def assert_nothing_left(self) -> None:
        address, pid = self.executor.describe_rank(self.executor.ranks[0])
        assert pid
        assert not is_alive(pid)
        assert not Path(address.removeprefix("unix:")).parent.exists()


async def test_formation_tells_its_stages_in_order_and_the_lease_is_held_meanwhile() -> None:
    # Loading takes longer than lease and heartbeat timeout: only heartbeats on Steps hold the rank through it.
    forming = Forming(model=model_with(load_time_s=1.6), lease_s=1.0)
    await forming.reach("load")
    await asyncio.sleep(1.3)
    join = worker_pb2.JoinRequest(epoch=9, owner_id="another", protocol_version=1, world_size=1)
    with pytest.raises(LeaseHeld):
        await forming.executor.call(forming.executor.ranks[0], "Join", join, timeout_s=5.0)
    facts = await forming.task
    assert list(dict.fromkeys(forming.stages)) == [
        "start", "join", "form", "load", "profile", "allocate", "warm up", "ready"
    ]  # fmt: skip
    assert facts.formed_in_s > 1.6
    assert forming.group.healthy
    await forming.group.teardown("done")
    forming.assert_nothing_left()


async def test_start_up_deadline_names_rank_address_and_stage_and_leaves_nothing() -> None:
    started_at = time.monotonic()
    forming = Forming(model=model_with(fail_at(0, 0, "hang")), startup_timeout_s=4.0)
    with pytest.raises(GroupNotFormed, match=r"rank 0 \(unix:.*rank0.sock\) failed at load: LoadModel: no answer"):
        await forming.task
    assert time.monotonic() - started_at < 4.0 + 4.0
    forming.assert_nothing_left()


async def test_cache_that_no_memory_holds_is_refused_before_it_is_allocated() -> None:
    forming = Forming(num_kv_blocks=2**31 - 1)  # 256 GiB of them, at 128 bytes each
    with pytest.raises(
        InvalidParameter, match=r"num_kv_blocks=2147483647: must be at most \d+: rank 0 has \d+ bytes f"
    ):
        await forming.task
    assert "warm up" not in forming.stages
    forming.assert_nothing_left()


async def test_cancelled_formation_leaves_nothing() -> None:
    forming = Forming(model=model_with(load_time_s=30.0))
    await forming.reach("load")
    forming.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forming.task
    forming.assert_nothing_left()


async def test_teardown_while_loading_leaves_nothing() -> None:
    forming = Forming(model=model_with(load_time_s=30.0))
    await forming.reach("load")
    started_at = time.monotonic()
    await forming.group.teardown("changed our mind")
    assert time.monotonic() - started_at < 4.0
    with pytest.raises(GroupNotFormed, match="torn down"):
        await forming.task
    forming.assert_nothing_left()


async def test_two_groups_live_side_by_side() -> None:
    async with forming() as one, forming() as other:
        await one.run_steps(3)
        await other.run_steps(2)
        assert one.pid != other.pid
        assert one.directory != other.directory
        one.assert_tokens_exact()
        other.assert_tokens_exact()
