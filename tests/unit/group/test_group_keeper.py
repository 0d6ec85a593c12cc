"""What a control plane does that waits for a group, when a rank of it goes out of reach."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message import Message

from control_plane.engine import Engine
from control_plane.fleet import Fleet
from control_plane.group.backoff import Backoff
from control_plane.group.batch_snapshot import BatchSnapshot
from control_plane.group.loss import GroupNotFormed
from control_plane.group.settings import GroupSettings
from control_plane.group.takeover import Adopted
from control_plane.group.worker_group import WorkerGroup
from control_plane.group_keeper import GroupKeeper, OnGroupLoss
from maniple.v1 import worker_pb2
from service_chassis.errors import WrongState
from service_chassis.ids import Rank
from support.fake_executor import FakeExecutor
from support.formed_ranks import FormedExecutor
from support.waiting import until

SETTINGS = GroupSettings(
    model="fake", max_num_seqs=4, num_kv_blocks=16, lease_s=1.0, startup_timeout_s=5.0, owner_address="me:1"
)


class OthersRanks(FormedExecutor):
    """Ranks of an owner who lives; one of them fails after some questions."""

    def __init__(self, error: Exception | None = None, *, is_held: bool = True) -> None:
        super().__init__()
        self.silent_for_ms = 0 if is_held else 60_000
        self._error = error
        self._num_answers = 4

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        if self._error is not None and isinstance(request, worker_pb2.DescribeRequest) and rank == 1:
            self._num_answers -= 1
            if self._num_answers < 0:
                raise self._error
        return await super().call(rank, method, request, timeout_s=timeout_s)


class Seated(Exception):
    """The group is ours; a test needs no engine."""


class Keeper:
    """A keeper of ranks that are another set at every attempt."""

    def __init__(self, ranks: Iterator[FakeExecutor], clock: Callable[[], float] = lambda: 0.0) -> None:
        self.groups: list[WorkerGroup] = []
        self.said: list[str] = []
        self._ranks = ranks
        self.fleet = Fleet()
        self.keeper = GroupKeeper(
            "0",
            fleet=self.fleet,
            make_group=self._make_group,
            make_engine=self._make_engine,
            on_group_loss=OnGroupLoss.REFORM,
            backoff=Backoff(5),
            progress=lambda stage, rank, share, detail: self.said.append(stage),
            clock=clock,
        )

    def _make_group(self) -> WorkerGroup:
        self.groups.append(WorkerGroup(next(self._ranks), SETTINGS, owner_id=f"me-{len(self.groups)}"))
        return self.groups[-1]

    def _make_engine(self, group: WorkerGroup, adopted: Adopted, survivors: BatchSnapshot | None) -> Engine:
        raise Seated

    async def start(self) -> Any:
        async with asyncio.timeout(20):
            try:
                return await self.keeper.start()
            finally:
                await asyncio.gather(*(group.teardown("done") for group in self.groups))


@pytest.mark.parametrize("error", [ConnectionError("refused"), TimeoutError("silent")])
async def test_spare_outlives_a_rank_that_dies_while_it_waits(error: Exception) -> None:
    waiting = OthersRanks(error)
    keeper = Keeper(iter([waiting, OthersRanks(is_held=False)]))
    with pytest.raises(Seated):
        await keeper.start()
    assert "wait" in keeper.said
    assert len(keeper.groups) == 2
    assert all("Leave" not in fake.calls and not fake.goodbyes for fake in waiting.fakes), "they are another's"


@pytest.mark.parametrize(("owner_address", "is_serving"), [("other:1", True), ("me:1", False)])
async def test_spare_is_ready_while_another_one_has_the_group_and_not_while_it_waits_for_the_lease_of_its_forerunner(
    owner_address: str, is_serving: bool
) -> None:
    ranks = OthersRanks()
    ranks.owner_address = owner_address
    keeper = Keeper(iter([ranks]))
    starting = asyncio.create_task(keeper.start())
    await until(lambda: "wait" in keeper.said, "that the group is held")
    assert keeper.fleet.is_serving == is_serving
    ranks.silent_for_ms = 60_000
    with pytest.raises(Seated):
        await starting


async def test_group_that_is_formed_anew_gets_the_weights_that_were_taken_last() -> None:
    Update = worker_pb2.WorkerServiceUpdateWeightsRequest
    ranks = FakeExecutor(2)
    keeper = Keeper(iter([ranks, FakeExecutor(2), FakeExecutor(2)]))
    with pytest.raises(Seated):
        await keeper.start()
    assert all("UpdateWeights" not in fake.calls for fake in ranks.fakes)
    keeper.fleet.rest.weights_path = "/new"
    with pytest.raises(Seated):
        await keeper.start()
    for fake in keeper.groups[1].executor.fakes:  # type: ignore[attr-defined]
        assert fake.calls.count("UpdateWeights") == 2
        assert fake.requests["UpdateWeights"] == Update(epoch=1, phase=Update.PHASE_COMMIT)
    refusing = keeper._ranks
    keeper._ranks = iter([one := next(refusing)])
    one.fakes[1].call_errors["UpdateWeights"] = WrongState("no memory")  # type: ignore[attr-defined]
    with pytest.raises(WrongState, match="rank 1: no memory"):
        await keeper.start()
    assert keeper.groups[2].loss is None
    assert one.num_shutdowns == 1  # type: ignore[attr-defined]


async def test_refusal_of_a_rank_ends_the_waiting() -> None:
    keeper = Keeper(iter([OthersRanks(WrongState("not you"))]))
    with pytest.raises(GroupNotFormed, match="rank 1 failed at join: Describe: not you"):
        await keeper.start()


async def test_rank_that_is_out_of_reach_again_and_again_ends_the_waiting_at_the_start_up_timeout() -> None:
    now = iter(range(0, 100, 2))

    def gone() -> Iterator[FormedExecutor]:
        while True:
            ranks = OthersRanks(ConnectionError("refused"), is_held=False)
            ranks._num_answers = 0
            yield ranks

    keeper = Keeper(gone(), clock=lambda: float(next(now)))
    with pytest.raises(GroupNotFormed, match="rank 1 failed at join: Describe: refused"):
        await keeper.start()
    assert len(keeper.groups) == 4  # the last one after 6 s
