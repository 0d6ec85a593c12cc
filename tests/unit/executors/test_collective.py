from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from google.protobuf.message import Message

from control_plane.executors.collective import RankCallError, start_on_all
from maniple.v1 import worker_pb2
from service_chassis.errors import InvalidParameter
from service_chassis.ids import Rank


class Calls:
    """One call per rank that ends when the test says so."""

    def __init__(self, num_ranks: int) -> None:
        self.ends = {Rank(rank): asyncio.get_running_loop().create_future() for rank in range(num_ranks)}
        self.started: list[int] = []
        self.cancelled: list[int] = []

    async def call(self, rank: Rank) -> Message:
        self.started.append(rank)
        try:
            return await self.ends[rank]  # type: ignore[no-any-return]
        except asyncio.CancelledError:
            self.cancelled.append(rank)
            raise

    def start(self, **options: object) -> asyncio.Task[list[Message]]:
        calls = {rank: self.call(rank) for rank in reversed(self.ends)}
        return start_on_all("LoadModel", calls, **({"timeout_s": 5.0} | options))  # type: ignore[arg-type]


def reply(pid: int) -> Message:
    return worker_pb2.DescribeResponse(pid=pid)


async def test_replies_come_in_rank_order_whatever_the_order_of_answers() -> None:
    calls = Calls(3)
    answers = calls.start()
    for rank in (2, 0, 1):
        calls.ends[Rank(rank)].set_result(reply(rank))
        await asyncio.sleep(0)
    assert await answers == [reply(0), reply(1), reply(2)]


async def test_calls_are_under_way_before_anybody_awaits() -> None:
    calls = Calls(2)
    answers = calls.start()
    await asyncio.sleep(0)
    assert sorted(calls.started) == [0, 1]
    answers.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answers


async def test_call_that_fails_before_anybody_waits_names_its_rank() -> None:
    calls = Calls(1)
    answers = calls.start()
    calls.ends[Rank(0)].set_exception(ConnectionError("gone"))
    with pytest.raises(RankCallError, match="rank 0: LoadModel: gone"):
        await answers


async def test_first_failure_wins_names_its_rank_and_cancels_the_others() -> None:
    calls = Calls(3)
    answers = calls.start()
    refusal = InvalidParameter("model", "x", "is not a directory")
    calls.ends[Rank(0)].set_result(reply(0))
    calls.ends[Rank(1)].set_exception(refusal)
    with pytest.raises(RankCallError, match="rank 1: LoadModel: model='x': is not a directory") as raised:
        await answers
    assert raised.value.rank == 1
    assert raised.value.error is refusal
    assert calls.cancelled == [2]


async def test_failure_of_a_rank_that_was_not_named_ends_the_call() -> None:
    calls = Calls(2)
    answers = calls.start(reply_ranks=[Rank(0)])
    calls.ends[Rank(1)].set_exception(ConnectionError("gone"))
    with pytest.raises(RankCallError, match="rank 1: LoadModel: gone"):
        await answers


async def test_call_returns_when_the_named_ranks_answered_and_leaves_the_others_alone() -> None:
    calls = Calls(2)
    answers = calls.start(reply_ranks=[Rank(0)])
    calls.ends[Rank(0)].set_result(reply(0))
    assert await answers == [reply(0)]
    assert not calls.cancelled
    calls.ends[Rank(1)].set_result(reply(1))


async def test_hang_guard_names_every_late_rank() -> None:
    calls = Calls(3)
    answers = calls.start(timeout_s=0.02)
    calls.ends[Rank(0)].set_result(reply(0))
    with pytest.raises(RankCallError, match=r"rank 1: LoadModel: no answer within 0.02 s \(nor from rank 2\)"):
        await answers
    assert sorted(calls.cancelled) == [1, 2]


async def test_cancelling_the_call_cancels_it_on_all_ranks() -> None:
    calls = Calls(2)
    answers = calls.start()
    await asyncio.sleep(0)
    answers.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answers
    assert sorted(calls.cancelled) == [0, 1]


async def test_failures_in_the_same_moment_are_one_failure_and_no_noise() -> None:
    noise: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: noise.append(context))

    async def fail() -> int:
        raise ConnectionError("refused")

    with pytest.raises(RankCallError, match="rank 0: Describe: refused"):
        await start_on_all("Describe", {Rank(rank): fail() for rank in range(3)}, timeout_s=5)
    gc.collect()
    await asyncio.sleep(0)
    assert noise == []
