from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from structlog.testing import capture_logs

from control_plane.group.loss import GroupNotFormed, LossKind, LossReason
from control_plane.group.settings import GroupSettings
from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import rank_health_pb2, scheduler_delta_pb2, worker_pb2
from service_chassis.errors import DeltaRefused, Fenced, InvalidParameter, WrongState
from support.fake_executor import Delta, FakeExecutor
from support.waiting import until

SETTINGS = GroupSettings(
    model="fake",
    max_num_seqs=4,
    report_interval_s=0.02,
    idle_report_interval_s=0.05,
    heartbeat_timeout_s=0.6,
    step_timeout_s=0.4,
    startup_timeout_s=5.0,
)


class Recorded:
    """A group with everything it told its engine."""

    def __init__(self, executor: FakeExecutor, settings: GroupSettings = SETTINGS) -> None:
        self.executor = executor
        self.group = WorkerGroup(executor, settings, owner_id="owner")
        self.results: list[tuple[int, list[int]]] = []
        self.accepted: list[int] = []
        self.losses: list[LossReason] = []
        self.health: list[tuple[bool, str]] = []
        self.stages: list[str] = []
        self.group.on_result = lambda result: self.results.append((result.step, list(result.token_ids)))
        self.group.on_accepted = self.accepted.append
        self.group.on_lost = self.losses.append
        self.group.on_health = lambda healthy, reason: self.health.append((healthy, reason))

    async def form(self):  # type: ignore[no-untyped-def]
        facts = await self.group.form(
            lambda stage, rank, share, detail: self.stages.append(f"{stage} {detail}".strip())
        )
        await until(lambda: all(status.connected for status in self.group.ranks()), "streams")
        return facts

    def send(self, *steps: int, mode: int = Delta.MODE_RUN) -> None:
        for step in steps:
            delta = Delta(step=step, mode=mode, state_digest=100 + step)  # type: ignore[arg-type]
            self.group.send(step, delta.SerializeToString(), delta.mode, state_digest=100 + step, num_tokens=1)

    async def answered(self, step: int) -> None:
        await until(lambda: self.results and self.results[-1][0] == step, f"result of step {step}")


@pytest.fixture
async def executor() -> FakeExecutor:
    return FakeExecutor(tokens=lambda delta: [delta.step * 10])


@pytest.fixture
async def recorded(executor: FakeExecutor) -> AsyncIterator[Recorded]:
    recorded = Recorded(executor)
    await recorded.form()
    yield recorded
    await recorded.group.teardown("test over")
    assert executor.num_shutdowns == 1
    assert len(recorded.losses) <= 1


async def test_form_joins_rank_0_first_then_runs_the_stages_on_all_ranks() -> None:
    executor = FakeExecutor(3)
    order: list[tuple[int, str]] = []
    for fake in executor.fakes:
        fake.calls = type("L", (list,), {"append": lambda self, m, r=fake.rank: order.append((r, m))})()
    recorded = Recorded(executor)
    facts = await recorded.form()
    joins = [rank for rank, method in order if method == "Join"]
    assert joins == [0, 1, 2]
    stages = ["Describe", "Join", "FormGroup", "LoadModel", "ProfileMemory", "AllocateKvCache", "WarmUp"]
    for rank in range(3):
        assert [method for r, method in order if r == rank] == stages
    assert facts.num_blocks == 1024  # 1 MiB in blocks of 1 KiB
    assert facts.max_model_len == 4096
    assert (facts.epoch, facts.first_step) == (1, 1)
    assert recorded.group.healthy
    assert list(dict.fromkeys(recorded.stages)) == [
        "start", "join", "form", "load", "profile", "allocate", "warm up", "ready"
    ]  # fmt: skip
    await recorded.group.teardown("done")
    assert [fake.goodbyes for fake in executor.fakes] == [[worker_pb2.StepsRequest.Goodbye.KIND_SHUTDOWN]] * 3


async def test_ranks_are_told_which_graphs_to_record() -> None:
    executor = FakeExecutor(2)
    recorded = Recorded(executor, replace(SETTINGS, enforce_eager=True, cuda_graph_sizes=(4, 32, 1)))
    await recorded.form()
    wanted = worker_pb2.WarmUpRequest(epoch=1, capture_sizes=[32, 4, 1], enforce_eager=True)
    assert [fake.requests["WarmUp"] for fake in executor.fakes] == [wanted] * 2
    await recorded.group.teardown("done")


async def test_results_come_in_order_and_once_and_bytes_are_equal_on_all_ranks() -> None:
    executor = FakeExecutor(2, tokens=lambda delta: [delta.step * 10])
    recorded = Recorded(executor)
    await recorded.form()
    recorded.send(1, 2)
    recorded.send(3, mode=Delta.MODE_APPLY_ONLY)
    recorded.send(4)
    await recorded.answered(4)
    await until(lambda: recorded.accepted and recorded.accepted[-1] == 4, "accepted by both")
    assert recorded.results == [(1, [10]), (2, [20]), (4, [40])]
    assert recorded.accepted == sorted(set(recorded.accepted))
    assert executor.fakes[0].raw_deltas == executor.fakes[1].raw_deltas
    await recorded.group.teardown("done")


async def test_unread_result_is_resent_and_nothing_runs_twice_when_the_stream_breaks(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    fake = executor.fakes[0]
    recorded.send(1)
    await recorded.answered(1)
    fake.hold = True
    recorded.send(2)
    await until(lambda: fake.accepted == 2, "step 2 accepted")
    fake.mute_steps = True
    fake.release()
    fake.break_stream()  # executed, and the answer died on the way
    fake.mute_steps = False
    recorded.send(3)
    await recorded.answered(3)
    assert recorded.results == [(1, [10]), (2, [20]), (3, [30])]
    assert [delta.step for delta in fake.deltas] == [1, 2, 3]
    assert fake.hellos == [0, 1]  # the second hello says which result was read last
    assert not recorded.losses


async def test_delta_that_was_lost_is_resent_byte_identical_after_a_reconnect(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    fake = executor.fakes[0]
    fake.break_stream()
    fake.refuse_connections = True
    recorded.send(1, 2)
    await until(lambda: not recorded.group.ranks()[0].connected, "the break was noticed")
    assert not fake.raw_deltas
    fake.refuse_connections = False
    await recorded.answered(2)
    assert [Delta.FromString(raw).step for raw in fake.raw_deltas] == [1, 2]
    assert recorded.health == [(True, "")]  # a broken stream is no verdict


async def test_sample_inputs_above_completed_are_resent_after_a_reconnect(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    fake = executor.fakes[0]
    fake.hold = True
    recorded.send(1)
    await until(lambda: fake.accepted == 1, "accepted")
    recorded.group.send_sample_input(scheduler_delta_pb2.SampleInput(step=1))
    await until(lambda: fake.sample_inputs == [1], "the first input")
    fake.break_stream()
    await until(lambda: fake.sample_inputs == [1, 1], "the same input again")
    fake.release()
    await recorded.answered(1)


async def test_stream_that_ends_in_order_without_goodbye_is_opened_again(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    fake = executor.fakes[0]
    assert fake.connection is not None
    fake.connection.incoming.put_nowait(None)
    await until(lambda: len(fake.hellos) == 2, "a second hello")
    assert not recorded.losses


async def test_group_is_lost_at_once_and_once_when_a_process_exits(recorded: Recorded, executor: FakeExecutor) -> None:
    executor.kill(0)
    assert [loss.reason for loss in recorded.losses] == ["rank 0 exited: killed by SIGKILL"]
    executor.kill(0)
    recorded.send(1)  # goes nowhere, and raises nothing
    assert not recorded.group.healthy
    await recorded.group.teardown("again")
    assert len(recorded.losses) == 1


@pytest.mark.parametrize("connection", ["steps", "health"])
async def test_group_is_lost_when_one_connection_is_silent(
    recorded: Recorded, executor: FakeExecutor, connection: str
) -> None:
    setattr(executor.fakes[0], f"mute_{connection}", True)
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].rank == 0
    assert "silent" in recorded.losses[0].reason
    assert recorded.health[1][0] is False  # it was suspect before


async def test_rank_whose_heartbeats_were_late_is_named_and_that_is_no_loss(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    punctual = executor.fakes[0].report

    def late() -> rank_health_pb2.RankReport:
        report = punctual()
        report.late_ms = 1500
        return report

    with capture_logs() as logs:
        executor.fakes[0].report = late  # type: ignore[method-assign]
        await until(lambda: [line for line in logs if line["event"] == "rank.was_late"], "it is seen")
        executor.fakes[0].report = punctual  # type: ignore[method-assign]
    told = next(line for line in logs if line["event"] == "rank.was_late")
    assert (told["rank"], told["late_s"], told["log_level"]) == (0, 1.5, "warning")
    recorded.send(1)
    await recorded.answered(1)
    assert not recorded.losses


async def test_group_is_lost_when_a_step_runs_over_its_budget_though_the_rank_speaks(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    fake = executor.fakes[0]
    fake.hold = True
    recorded.send(1)
    fake.running_for_ms = 350  # below the budget of 0.4 s
    await until(lambda: recorded.group.ranks()[0].running_step == 1, "the report")
    assert not recorded.losses
    fake.running_for_ms = 450
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].reason.startswith("rank 0 was stuck in step 1 for 0.")


async def test_group_is_lost_and_names_step_and_class_when_a_rank_reports_a_failure(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    executor.fakes[0].failure = rank_health_pb2.RankReport.Failure(kind="ValueError", message="bad", step=5)
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].reason == "rank 0 failed in step 5: ValueError: bad"


async def test_group_is_lost_when_the_state_digest_of_a_step_differs(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    recorded.send(1)
    await recorded.answered(1)
    executor.fakes[0].state_digest ^= 1
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].reason.startswith("rank 0 diverged: its state digest after step 1 is")


async def test_group_is_lost_when_a_delta_is_refused_for_its_content(
    recorded: Recorded, executor: FakeExecutor
) -> None:
    executor.fakes[0].refusal = DeltaRefused("row 3 is not live")
    recorded.send(1)
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].reason == "rank 0 refused: DeltaRefused: row 3 is not live"
    assert recorded.losses[0].kind is LossKind.LOST


async def test_group_is_lost_when_another_incarnation_answers(recorded: Recorded, executor: FakeExecutor) -> None:
    executor.fakes[0].incarnation_id = "another"
    executor.fakes[0].break_stream()
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].rank == 0
    assert "restarted" in recorded.losses[0].reason


async def test_group_is_lost_when_a_result_is_skipped(recorded: Recorded, executor: FakeExecutor) -> None:
    executor.fakes[0].hold = True
    recorded.send(1, 2)
    await until(lambda: executor.fakes[0].accepted == 2, "accepted")
    executor.fakes[0].say(result=scheduler_delta_pb2.StepResult(step=2))
    await until(lambda: recorded.losses, "the verdict")
    assert "result of step 2 while that of step 1 was due" in recorded.losses[0].reason


async def test_fenced_group_touches_nothing() -> None:
    executor = FakeExecutor()
    recorded = Recorded(executor)
    await recorded.form()
    executor.fakes[0].refusal = Fenced("epoch 2 was granted to another owner")
    recorded.send(1)
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].kind is LossKind.FENCED
    await recorded.group.teardown("fenced")
    assert executor.fakes[0].goodbyes == []
    assert "Leave" not in executor.fakes[0].calls
    assert executor.num_shutdowns == 0


async def test_owner_that_slept_through_its_end_hears_of_the_next_one_not_of_steps_it_never_sent() -> None:
    executor = FakeExecutor()
    recorded = Recorded(executor)
    await recorded.form()
    report = executor.fakes[0].report()
    report.epoch += 1
    report.accepted += 9  # the next owner sent them
    executor.fakes[0].say(report=report)
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].kind is LossKind.FENCED
    assert recorded.losses[0].reason == f"rank 0 has another owner: it granted epoch {report.epoch}"
    await recorded.group.teardown("fenced")


async def test_goodbye_parts_from_the_ranks_without_a_verdict_and_teardown_leaves_them_alone() -> None:
    executor = FakeExecutor(2)
    recorded = Recorded(executor)
    await recorded.form()
    assert await recorded.group.goodbye(worker_pb2.StepsRequest.Goodbye.KIND_HANDOVER)
    await recorded.group.teardown("handed over")
    for fake in executor.fakes:
        assert fake.goodbyes == [worker_pb2.StepsRequest.Goodbye.KIND_HANDOVER]
        assert "Leave" not in fake.calls
    assert not recorded.losses


async def test_teardown_begins_though_the_engine_raises_at_the_loss(executor: FakeExecutor) -> None:
    recorded = Recorded(executor)
    await recorded.form()

    def raise_it(loss: LossReason) -> None:
        raise RuntimeError("a defect")

    recorded.group.on_lost = raise_it
    with pytest.raises(RuntimeError):
        executor.kill(0)
    await until(lambda: executor.num_shutdowns == 1, "teardown")


async def test_defect_in_a_callback_ends_the_group(recorded: Recorded, executor: FakeExecutor) -> None:
    def raise_it(result: scheduler_delta_pb2.StepResult) -> None:
        raise RuntimeError("a defect")

    recorded.group.on_result = raise_it
    recorded.send(1)
    await until(lambda: recorded.losses, "the verdict")
    assert recorded.losses[0].reason == "the control plane failed at steps-0: RuntimeError"


async def test_bad_model_passes_through_in_the_words_of_the_rank(executor: FakeExecutor) -> None:
    refusal = InvalidParameter("model", "/nowhere", "is not a directory")
    executor.fakes[0].call_errors["LoadModel"] = refusal
    recorded = Recorded(executor)
    with pytest.raises(InvalidParameter) as raised:
        await recorded.form()
    assert raised.value is refusal
    assert executor.num_shutdowns == 1
    assert not recorded.losses


async def test_start_up_deadline_names_the_missing_rank_and_its_address() -> None:
    executor = FakeExecutor(2)
    executor.fakes[1].hanging_calls.add("LoadModel")
    recorded = Recorded(executor, GroupSettings(model="fake", startup_timeout_s=0.3))
    with pytest.raises(GroupNotFormed, match=r"rank 1 \(fake:1\) failed at load: LoadModel: no answer within"):
        await recorded.form()
    assert executor.num_shutdowns == 1


async def test_form_says_why_when_a_rank_dies_while_it_loads(executor: FakeExecutor) -> None:
    executor.fakes[0].hanging_calls.add("LoadModel")
    recorded = Recorded(executor)
    forming = asyncio.create_task(recorded.form())
    await until(lambda: "LoadModel" in executor.fakes[0].calls, "loading")
    executor.kill(0, "exit code 3")
    with pytest.raises(GroupNotFormed, match="rank 0 exited: exit code 3"):
        await forming
    assert not recorded.losses  # form() said it
    assert executor.num_shutdowns == 1


async def test_teardown_during_form_ends_it_and_every_caller_returns(executor: FakeExecutor) -> None:
    executor.fakes[0].hanging_calls.add("LoadModel")
    recorded = Recorded(executor)
    forming = asyncio.create_task(recorded.form())
    await until(lambda: "LoadModel" in executor.fakes[0].calls, "loading")
    await asyncio.gather(recorded.group.teardown("stop"), recorded.group.teardown("stop"))
    with pytest.raises(GroupNotFormed, match="torn down"):
        await forming
    assert executor.num_shutdowns == 1


async def test_cancelled_form_is_cancelled_and_leaves_nothing(executor: FakeExecutor) -> None:
    executor.fakes[0].hanging_calls.add("LoadModel")
    recorded = Recorded(executor)
    forming = asyncio.create_task(recorded.form())
    await until(lambda: "LoadModel" in executor.fakes[0].calls, "loading")
    forming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await forming
    assert executor.num_shutdowns == 1
    others = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task.get_name() for task in others if task.get_name().startswith(("steps-", "health-", "watchdog"))]


async def test_progress_of_long_work_is_shown_while_forming(executor: FakeExecutor) -> None:
    executor.fakes[0].hanging_calls.add("LoadModel")
    executor.fakes[0].busy = rank_health_pb2.RankReport.Busy(what="load", up_to_s=60, progress=0.5, detail="model.st")
    recorded = Recorded(executor)
    forming = asyncio.create_task(recorded.form())
    await until(lambda: "load model.st" in recorded.stages, "progress")
    await recorded.group.teardown("stop")
    with pytest.raises(GroupNotFormed):
        await forming


async def test_rank_that_refuses_because_another_left_it_is_not_blamed() -> None:
    executor = FakeExecutor(2)
    recorded = Recorded(executor)
    await recorded.form()
    alone = executor.fakes[0]
    alone.failure = rank_health_pb2.RankReport.Failure(kind="BrokenCollective", message="no peer", step=1)
    alone.refusal = WrongState("the rank failed: no peer")
    alone.say(report=alone.report())
    recorded.send(1)
    await until(lambda: not recorded.group.ranks()[0].connected, "the refusal ended its stream")
    executor.kill(1)
    await until(lambda: recorded.losses, "the verdict")
    assert [(loss.rank, loss.reason) for loss in recorded.losses] == [(1, "rank 1 exited: killed by SIGKILL")]
    await recorded.group.teardown("done")


async def test_a_delta_over_the_limit_of_a_message_is_our_defect_and_no_ranks() -> None:
    executor = FakeExecutor(2)
    executor.max_step_message_bytes = 1064
    recorded = Recorded(executor)
    await recorded.form()
    sent = recorded.group.send
    sent(1, b"x" * 1001, Delta.MODE_RUN, state_digest=101, num_tokens=1)
    (loss,) = recorded.losses
    assert loss.rank is None
    assert "defect of its own: the delta of step 1 has 1001 bytes, and ranks take 1000" in loss.reason
    assert [fake.deltas for fake in executor.fakes] == [[], []]
    await recorded.group.teardown("test over")
