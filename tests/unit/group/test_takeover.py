"""A group with ranks that another owner left: what is asked of whom, in which order, and what ends it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from control_plane.group.loss import GroupNotFormed, LossKind
from control_plane.group.settings import GroupSettings
from control_plane.group.takeover import Adopted
from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import worker_pb2
from service_chassis.errors import InvalidParameter
from support.formed_ranks import Delta, FormedExecutor
from support.waiting import until

SETTINGS = GroupSettings(
    model="fake",
    max_num_seqs=4,
    num_kv_blocks=16,
    report_interval_s=0.02,
    idle_report_interval_s=0.03,
    heartbeat_timeout_s=5.0,
    lease_s=1.0,
    step_timeout_s=0.3,
    startup_timeout_s=5.0,
    teardown_grace_s=0.5,
)


def deltas(last: int, first: int = 1) -> list[Delta]:
    return [Delta(step=step, mode=Delta.MODE_RUN, state_digest=100 + step) for step in range(first, last + 1)]


async def adopt(executor: FormedExecutor, **hooks: Any) -> tuple[WorkerGroup, Adopted]:
    group = WorkerGroup(executor, SETTINGS, owner_id="me")
    async with asyncio.timeout(10):
        return group, await group.adopt(**hooks)


async def refused(executor: FormedExecutor) -> GroupNotFormed:
    with pytest.raises(GroupNotFormed) as caught:
        await adopt(executor)
    return caught.value


async def test_level_ranks_are_adopted_at_the_step_after_theirs_without_a_stage() -> None:
    executor = FormedExecutor()
    for rank in (0, 1):
        executor.let_accept(rank, *deltas(7))
    stages: list[str] = []
    group, adopted = await adopt(executor, progress=lambda stage, *_: stages.append(stage))
    assert adopted.snapshot is not None
    assert (adopted.facts.epoch, adopted.facts.first_step, adopted.snapshot.step) == (2, 8, 7)
    assert (adopted.facts.max_num_seqs, adopted.facts.num_blocks) == (3, 50)  # the group's own limits
    assert adopted.facts.step_us_per_token == 2.5
    for fake in executor.fakes:
        assert fake.raw_deltas == []
        assert not {"FormGroup", "LoadModel", "FetchDeltas"} & set(fake.calls)
    assert list(dict.fromkeys(stages)) == ["start", "join", "level up", "snapshot"]
    # The tenure goes on from there: the next delta reaches every rank.
    results = []
    group.on_result = results.append
    group.send(8, deltas(8, 8)[0].SerializeToString(), Delta.MODE_RUN, state_digest=108, num_tokens=1)
    await until(lambda: results and all(fake.accepted == 8 for fake in executor.fakes), "the next step")
    assert [result.step for result in results] == [8]
    await group.teardown("done")


@pytest.mark.parametrize("behind", [0, 1])
async def test_what_one_rank_lacks_is_relayed_byte_for_byte_and_its_results_are_nobodys(behind: int) -> None:
    executor = FormedExecutor()
    ahead = 1 - behind
    executor.fakes[ahead].hold = True  # it waits in a collective for the other
    executor.let_accept(ahead, *deltas(9))
    executor.let_accept(behind, *deltas(7))
    executor.fakes[ahead].completed = 7
    heard = asyncio.get_running_loop().create_task(until(lambda: executor.fakes[behind].accepted == 9, "the relay"))
    heard.add_done_callback(lambda _: executor.fakes[ahead].release())
    group = WorkerGroup(executor, SETTINGS, owner_id="me")
    results: list[Any] = []
    group.on_result = results.append
    adopted = await group.adopt()
    assert adopted.facts.first_step == 10
    assert executor.fakes[behind].raw_deltas == [delta.SerializeToString() for delta in deltas(9, 8)]
    assert executor.fakes[ahead].raw_deltas == []
    assert results == []
    await group.teardown("done")


async def test_rank_outside_the_formation_is_lost_and_nothing_is_relayed_to_it() -> None:
    executor = FormedExecutor(3)
    for rank in (0, 2):
        executor.let_accept(rank, *deltas(7))
    executor.formations[1], executor.stages[1] = "", worker_pb2.WORKER_STAGE_UNSPECIFIED
    error = await refused(executor)
    assert (error.loss.rank, error.were_dismissed) == (1, True)
    assert "outside the formation" in error.loss.reason
    assert error.survivors is not None
    assert error.survivors.step == 7
    assert [("Leave" in fake.calls) for fake in executor.fakes] == [True, False, True]
    assert all(fake.raw_deltas == [] for fake in executor.fakes)


@pytest.mark.parametrize("digest", ["state", "token"])
async def test_ranks_that_diverged_are_asked_what_they_know_and_then_told_to_leave(digest: str) -> None:
    executor = FormedExecutor()
    executor.let_accept(0, *deltas(6))
    executor.let_accept(1, *deltas(6))
    if digest == "state":
        executor.fakes[1].state_digest = 999
    else:
        executor.fakes[1].token_digest = 999
    error = await refused(executor)
    assert "diverged" in error.loss.reason
    assert error.survivors is not None
    assert executor.snapshots_of
    assert all(fake.goodbyes == [worker_pb2.StepsRequest.Goodbye.KIND_SHUTDOWN] for fake in executor.fakes)


async def test_rank_that_gets_no_further_is_named_within_the_budget_of_a_step() -> None:
    executor = FormedExecutor()
    executor.let_accept(0, *deltas(5))
    executor.let_accept(1, *deltas(4))
    executor.fakes[1].hold = True
    error = await refused(executor)
    assert error.loss.rank == 1
    assert "gets no further" in error.loss.reason


async def test_relay_with_a_gap_is_no_relay() -> None:
    executor = FormedExecutor()
    executor.let_accept(0, *deltas(9))
    executor.let_accept(1, *deltas(5))
    executor.fetched = [delta.SerializeToString() for delta in deltas(9, 8)]
    error = await refused(executor)
    assert "to relay" in error.loss.reason
    assert executor.fakes[1].raw_deltas == []


async def test_snapshot_of_another_step_is_not_adopted() -> None:
    executor = FormedExecutor()
    for rank in (0, 1):
        executor.let_accept(rank, *deltas(7))
    executor.snapshot_step = 6
    error = await refused(executor)
    assert "not the batch" in error.loss.reason


async def test_owner_fenced_in_its_takeover_says_goodbye_to_nobody() -> None:
    executor = FormedExecutor()
    executor.let_accept(0, *deltas(5))
    executor.let_accept(1, *deltas(4))
    executor.fakes[1].hold = True

    async def be_quicker() -> None:
        await until(lambda: executor.fakes[1].hellos, "its stream")
        for fake in executor.fakes:
            fake.epoch = 9
            fake.break_stream()

    quicker = asyncio.create_task(be_quicker())
    error = await refused(executor)
    await quicker
    assert error.loss.kind is LossKind.FENCED
    assert not error.were_dismissed
    assert all(fake.goodbyes == [] and "Leave" not in fake.calls for fake in executor.fakes)


async def test_ranks_that_run_nothing_are_formed_under_the_one_grant() -> None:
    executor = FormedExecutor(formed=False)
    group, adopted = await adopt(executor)
    assert adopted.snapshot is None
    assert (adopted.facts.epoch, adopted.facts.first_step) == (1, 1)
    for fake in executor.fakes:
        assert fake.calls.count("Join") == 1
        assert fake.calls.index("Join") < fake.calls.index("FormGroup") < fake.calls.index("WarmUp")
    await group.teardown("done")


async def test_formation_that_lapsed_before_it_was_ready_is_formed_anew() -> None:
    executor = FormedExecutor()
    executor.stages = [worker_pb2.WORKER_STAGE_LOADED] * 2
    group, adopted = await adopt(executor)
    assert adopted.snapshot is None
    assert all("FormGroup" in fake.calls for fake in executor.fakes)
    await group.teardown("done")


async def test_living_owner_is_waited_for_without_asking_for_its_ranks() -> None:
    executor = FormedExecutor()
    executor.silent_for_ms = 50
    held: list[tuple[str, str]] = []
    waiting = asyncio.create_task(adopt(executor, on_held=lambda reason, where: held.append((reason, where))))
    await until(lambda: executor.fakes[0].calls.count("Describe") >= 4, "some polls")
    assert [where for _, where in held] == ["other:1"]
    assert not any("Join" in fake.calls for fake in executor.fakes)
    executor.silent_for_ms = 1000
    group, adopted = await waiting
    assert adopted.facts.epoch == 2
    await group.teardown("done")


async def test_free_lease_is_claimed_at_once() -> None:
    executor = FormedExecutor()
    executor.silent_for_ms, executor.owner_address = 0, ""  # HANDOVER was said a moment ago
    group, adopted = await adopt(executor, on_held=lambda *_: pytest.fail("nobody holds it"))
    assert adopted.snapshot is not None
    await group.teardown("done")


async def test_others_are_asked_only_by_who_holds_rank_0_and_are_waited_for() -> None:
    executor = FormedExecutor(3)
    executor.refusals = {0: 2, 2: 3}  # its lease lapses a moment later than that of rank 0
    group, _ = await adopt(executor)
    assert executor.fakes[0].calls.count("Join") == 3
    assert executor.fakes[1].calls.count("Join") == 1
    assert executor.fakes[2].calls.count("Join") == 4
    await group.teardown("done")


async def test_ranks_with_another_model_are_left_alone() -> None:
    executor = FormedExecutor()
    executor.model = "other"
    with pytest.raises(InvalidParameter, match="another model, 'other'"):
        await adopt(executor)
    assert all("Join" not in fake.calls and "Leave" not in fake.calls for fake in executor.fakes)


async def test_wanted_end_within_a_takeover_leaves_the_batch_to_the_next() -> None:
    executor = FormedExecutor()
    executor.let_accept(0, *deltas(5))
    executor.let_accept(1, *deltas(4))
    executor.fakes[1].hold = True
    taking = asyncio.create_task(adopt(executor))
    await until(lambda: executor.fakes[1].raw_deltas, "the relay")
    taking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await taking
    assert all(fake.goodbyes == [worker_pb2.StepsRequest.Goodbye.KIND_HANDOVER] for fake in executor.fakes)
