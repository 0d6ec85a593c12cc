"""Sleep, WakeUp and UpdateWeights of one rank, as an owner calls them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from maniple.v1 import worker_pb2
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta
from service_chassis.errors import Fenced, InvalidParameter, ManipleError, NotBuilt, WrongState
from service_chassis.protocol.version import FEATURE_SLEEP
from support.formed_rank import Feed, advance, ready_rank
from support.waiting import until
from support.worker_process import DeltaMaker
from worker_service.config import WorkerConfig
from worker_service.rank import Rank

Update = worker_pb2.WorkerServiceUpdateWeightsRequest
APPLY_ONLY = SchedulerDelta.MODE_APPLY_ONLY


@asynccontextmanager
async def sleepy_rank() -> AsyncIterator[Rank]:
    async with ready_rank(WorkerConfig(enable_sleep_mode=True)) as rank:
        yield rank


async def sleep(rank: Rank, **fields: Any) -> worker_pb2.WorkerServiceSleepResponse:
    return await rank.sleep(worker_pb2.WorkerServiceSleepRequest(**{"epoch": 1, "level": 1, **fields}))


async def wake_up(rank: Rank, **fields: Any) -> worker_pb2.WorkerServiceWakeUpResponse:
    return await rank.wake_up(worker_pb2.WorkerServiceWakeUpRequest(**{"epoch": 1, **fields}))


async def asleep(rank: Rank) -> list[str]:
    return list((await rank.describe(worker_pb2.DescribeRequest())).sleeping_tags)


async def test_rank_tells_what_sleeps_and_offers_it_only_where_it_may() -> None:
    async with sleepy_rank() as rank, ready_rank() as other:
        assert FEATURE_SLEEP in (await rank.describe(worker_pb2.DescribeRequest())).features
        assert FEATURE_SLEEP not in (await other.describe(worker_pb2.DescribeRequest())).features
        with pytest.raises(WrongState, match="--enable-sleep-mode"):
            await sleep(other)
        assert (await sleep(rank)).freed_bytes == 99 * 4 * 8  # blocks, slots, bytes
        assert await asleep(rank) == ["kv_cache", "weights"]
        assert (await wake_up(rank, tags=["weights"])).taken_bytes == 0
        assert await asleep(rank) == ["kv_cache"]
        assert (await wake_up(rank, tags=["kv_cache"])).taken_bytes == 99 * 4 * 8
        assert await asleep(rank) == []


async def test_what_does_not_fit_is_refused_and_nothing_sleeps() -> None:
    async with sleepy_rank() as rank:
        with pytest.raises(Fenced):
            await sleep(rank, epoch=7)
        with pytest.raises(WrongState, match="after_step is 3, and the rank has accepted step 0"):
            await sleep(rank, after_step=3)
        for level in (0, 3):
            with pytest.raises(InvalidParameter, match=f"level={level}: must be from 1 to 2"):
                await sleep(rank, level=level)
        with pytest.raises(InvalidParameter, match="tags='scheduling': must be one of weights, kv_cache"):
            await wake_up(rank, tags=["weights", "scheduling"])
        with pytest.raises(InvalidParameter, match="path='/x': the scripted model has no weights"):
            await rank.update_weights(Update(epoch=1, path="/x"))
        with pytest.raises(WrongState):
            await rank.update_weights(Update(epoch=1, phase=Update.PHASE_COMMIT))
        await rank.update_weights(Update(epoch=1, phase=Update.PHASE_ABANDON))
        with pytest.raises(InvalidParameter, match="phase=9: must be one of PHASE_UNSPECIFIED, PHASE_STAGE"):
            await rank.update_weights(Update(epoch=1, phase=9))  # type: ignore[arg-type]
        with pytest.raises(NotBuilt):
            await rank.call("UnloadLora", worker_pb2.WorkerServiceUnloadLoraRequest())
        assert await asleep(rank) == []


@pytest.mark.parametrize("tags", [[], ["weights"], ["kv_cache"]], ids=["all-asleep", "kv-asleep", "weights-asleep"])
async def test_sleeping_rank_takes_only_deltas_that_say_what_ended(tags: list[str]) -> None:
    async with sleepy_rank() as rank:
        feed, maker = Feed(rank), DeltaMaker()
        feed.send(hello=worker_pb2.StepsRequest.Hello(owner_id="A"))
        feed.send(delta=maker.make(new={0: [3, 4], 1: [5]}))
        await feed.until("result")
        await sleep(rank, after_step=1)
        await wake_up(rank, after_step=1, tags=tags)
        feed.send(delta=maker.make(finished=[1], mode=APPLY_ONLY))
        await until(lambda: rank.vitals.completed[0] == 2, "the end of a row")
        feed.send(delta=maker.make())
        report = await feed.until("report")
        while not report.HasField("failure"):
            report = await feed.until("report")
        assert "step 3: mode must be APPLY_ONLY, without block_copies, while" in report.failure.message
        assert rank.vitals.accepted[0] == 2
        with pytest.raises(ManipleError):
            await feed.until("result")


async def test_another_formation_begins_awake() -> None:
    async with sleepy_rank() as rank:
        await sleep(rank)
        await advance(rank, "FormGroup", formation_id="f2")
        assert await asleep(rank) == []
        await advance(rank, "LoadModel", "ProfileMemory", "AllocateKvCache", "WarmUp")
        feed = Feed(rank)
        feed.send(hello=worker_pb2.StepsRequest.Hello(owner_id="A"))
        feed.send(delta=DeltaMaker().make(new={0: [3, 4]}))
        assert (await feed.until("result")).step == 1
