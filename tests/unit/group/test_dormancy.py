"""Calls on all ranks of a group about their memory: what a refusal leaves, and what a failure."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest

from control_plane.dormancy import Dormancy, RankMemory
from control_plane.group.settings import GroupSettings
from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import worker_pb2
from service_chassis.errors import Fenced, GroupLost, InvalidParameter, WrongState
from service_chassis.ids import Rank
from support.fake_executor import FakeExecutor

SETTINGS = GroupSettings(model="fake", max_num_seqs=4, num_kv_blocks=16, lease_s=1.0, startup_timeout_s=5.0)
Update = worker_pb2.WorkerServiceUpdateWeightsRequest


@asynccontextmanager
async def dormancy(ranks: FakeExecutor) -> AsyncIterator[tuple[Dormancy, WorkerGroup, list[str]]]:
    group = WorkerGroup(ranks, SETTINGS, owner_id="me")
    await group.form()
    heard: list[str] = []
    made = Dormancy(group, undisturbed=lambda: nullcontext(41), on_change=lambda: heard.append(made.reason))
    try:
        yield made, group, heard
    finally:
        await group.teardown("the test is over")


async def test_all_ranks_are_told_the_step_and_answer_for_their_memory() -> None:
    ranks = FakeExecutor(2)
    async with dormancy(ranks) as (one, group, heard):
        assert await one.sleep(2) == [
            RankMemory(rank=Rank(0), freed_bytes=1000, taken_bytes=10),
            RankMemory(rank=Rank(1), freed_bytes=1000, taken_bytes=11),
        ]
        assert ranks.fakes[1].requests["Sleep"] == worker_pb2.WorkerServiceSleepRequest(epoch=1, after_step=41, level=2)
        await one.wake_up({"kv_cache", "scheduling"})
        assert list(ranks.fakes[0].requests["WakeUp"].tags) == ["kv_cache"]  # type: ignore[attr-defined]
        await one.stage_weights("/new")
        await one.commit_weights()
        assert heard == ["asleep: weights, kv_cache", "asleep: weights", ""]
        assert group.healthy


async def test_sleep_that_one_rank_refuses_leaves_all_awake() -> None:
    ranks = FakeExecutor(2)
    ranks.fakes[1].call_errors["Sleep"] = WrongState("no room on the disk")
    async with dormancy(ranks) as (one, group, heard):
        with pytest.raises(WrongState, match="rank 1: no room on the disk"):
            await one.sleep(1)
        assert [fake.calls.count("WakeUp") for fake in ranks.fakes] == [1, 1]
        assert not one.asleep
        assert heard[-1] == ""
        assert group.healthy


async def test_rank_that_cannot_wake_leaves_the_group_asleep() -> None:
    ranks = FakeExecutor(2)
    async with dormancy(ranks) as (one, group, _):
        await one.sleep(1)
        ranks.fakes[0].call_errors["WakeUp"] = WrongState("9 MiB are needed")
        with pytest.raises(WrongState, match="rank 0: 9 MiB are needed"):
            await one.wake_up(["weights"])
        assert one.asleep == {"weights", "kv_cache"}
        assert group.healthy
        del ranks.fakes[0].call_errors["WakeUp"]
        await one.wake_up(["weights", "kv_cache"])
        assert not one.asleep


async def test_checkpoint_that_one_rank_refuses_is_let_go_by_all() -> None:
    ranks = FakeExecutor(3)
    ranks.fakes[2].call_errors["UpdateWeights"] = InvalidParameter("checkpoint", "/new", "must have shape [3]")
    async with dormancy(ranks) as (one, group, _):
        with pytest.raises(InvalidParameter, match=r"rank 2: checkpoint='/new': must have shape \[3\]"):
            await one.stage_weights("/new")
        for fake in ranks.fakes[:2]:
            assert fake.requests["UpdateWeights"] == Update(epoch=1, after_step=41, phase=Update.PHASE_ABANDON)
        assert group.healthy


async def test_rank_that_refuses_weights_which_others_may_have_taken_loses_the_group() -> None:
    ranks = FakeExecutor(2)
    async with dormancy(ranks) as (one, group, _):
        await one.stage_weights("/new")
        ranks.fakes[1].call_errors["UpdateWeights"] = WrongState("no weights were read that could be put in place")
        with pytest.raises(GroupLost, match=r"rank 1 failed at UpdateWeights: .*no weights were read"):
            await one.commit_weights()
        assert ranks.fakes[0].requests["UpdateWeights"] == Update(epoch=1, after_step=41, phase=Update.PHASE_COMMIT)
        assert group.loss is not None
        assert group.loss.rank == 1
        assert not group.healthy


@pytest.mark.parametrize("error", [ConnectionError("reset"), TimeoutError()])
async def test_rank_that_fails_at_it_loses_the_group_by_its_name(error: Exception) -> None:
    ranks = FakeExecutor(2)
    ranks.fakes[1].call_errors["Sleep"] = error
    async with dormancy(ranks) as (one, group, _):
        with pytest.raises(GroupLost, match="rank 1 failed at Sleep"):
            await one.sleep(1)
        assert group.loss is not None
        assert group.loss.rank == 1
        with pytest.raises(GroupLost, match="rank 1 failed at Sleep"):  # nothing is asked any more
            await one.wake_up(["weights"])


async def test_owner_that_was_replaced_meanwhile_touches_nothing() -> None:
    ranks = FakeExecutor(2)
    ranks.fakes[0].call_errors["Sleep"] = Fenced("epoch 2 was granted")
    async with dormancy(ranks) as (one, group, _):
        with pytest.raises(GroupLost, match="rank 0 has another owner: epoch 2 was granted"):
            await one.sleep(1)
        assert group.loss is not None
        assert group.loss.kind.value == "fenced"
