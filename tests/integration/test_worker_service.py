"""One real worker process over Unix sockets, spoken to in plain protocol messages, with the scripted model."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import grpc
import pytest

from maniple.v1 import scheduler_delta_pb2, worker_pb2
from service_chassis.scripted import ScriptedOptions, fail_at
from support.scripted_reference import greedy
from support.worker_process import DEADLINE_S, Delta, DeltaMaker, Goodbye, Hello, RawSteps, refusal_of, worker_process

PROMPT = [5, 250, 17, 0, 5]


async def refused(call: Any) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return refusal_of(caught.value)


async def test_rank_decodes_what_the_definition_says_and_mentions_nothing(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, welcome = await worker.open()
        assert (welcome.accepted, welcome.completed) == (0, 0)
        maker = DeltaMaker()
        await steps.send(delta=maker.make(new={2: PROMPT}))
        await steps.send(delta=maker.make(new={0: [9]}))
        tokens: dict[int, list[int]] = {0: [], 2: list((await steps.result()).token_ids)}
        for _ in range(6):
            result = await steps.result()
            tokens[0].append(result.token_ids[0])
            tokens[2].append(result.token_ids[1])
            await steps.send(delta=maker.make())
        assert tokens == {0: greedy([9], 6), 2: greedy(PROMPT, 7)}
        report = await steps.report_where(lambda report: report.completed == maker.step)
        assert report.state_digest == maker.digest.value
        described = await worker.describe()
        assert (described.num_rows, described.completed, described.device) == (2, 8, "scripted")


async def test_reports_come_at_their_interval_also_in_lock_step(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready(options=ScriptedOptions(step_time_s=0.02))
        steps, _ = await worker.open()
        maker = DeltaMaker()
        await steps.send(delta=maker.make(new={0: PROMPT}))
        num_reports, began = 0, time.monotonic()
        while num_reports < 1 + 5:  # one comes at once, when everything was done for the first time
            response = await steps.read()
            if response.WhichOneof("message") == "result":
                await steps.send(delta=maker.make())
            else:
                num_reports += 1
        assert 0.4 < time.monotonic() - began < 3
        assert maker.step > 10


async def test_bookkeeping_delta_is_reported_as_accepted_at_once(tmp_path: Path) -> None:
    async with worker_process(tmp_path, "--idle-report-interval-s", "60", "--report-interval-s", "60") as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        maker = DeltaMaker()
        await steps.send(delta=maker.make(new={0: PROMPT}))
        await steps.result()
        await steps.send(delta=maker.make(finished=[0], mode=Delta.MODE_APPLY_ONLY))
        report = await steps.report_where(lambda report: report.accepted == 2)
        assert report.state_digest == 0
        await worker.report_where(lambda report: report.completed == 2)
        described = await worker.describe()
        assert (described.num_rows, described.num_tombstones) == (0, 1)


@pytest.mark.parametrize(
    ("fault", "code", "reason"),
    [
        ("dropped", grpc.StatusCode.ABORTED, "OUT_OF_ORDER"),
        ("repeated", grpc.StatusCode.ABORTED, "OUT_OF_ORDER"),
        ("old epoch", grpc.StatusCode.FAILED_PRECONDITION, "FENCED"),
    ],
)
async def test_delta_out_of_order_is_refused_and_changes_nothing(
    tmp_path: Path, fault: str, code: grpc.StatusCode, reason: str
) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready(epoch=7)
        steps, _ = await worker.open(epoch=7)
        maker = DeltaMaker()
        first = maker.make(new={0: PROMPT})
        await steps.send(delta=first)
        digest = maker.digest.value
        second, third = maker.make(), maker.make()
        if fault == "dropped":
            await steps.send(delta=third)
        elif fault == "repeated":
            await steps.send(delta=first)
        else:
            await steps.send(epoch=6, delta=second)
        refusal = await steps.end()
        assert refusal is not None
        assert (refusal.code, refusal.reason, refusal.metadata["expected_step"]) == (code, reason, "2")
        assert reason == "FENCED" or "expected step is 2" in refusal.message
        # The rank keeps its lease, executes what it had accepted, and goes on with a new stream.
        again, welcome = await worker.open(epoch=7)
        assert (welcome.accepted, welcome.state_digest) == (1, digest)
        assert (await again.result()).step == 1
        await again.send(delta=second)
        await again.send(delta=third)
        tokens = [list((await again.result()).token_ids) for _ in range(2)]
        assert tokens == [[token] for token in greedy(PROMPT, 3)[1:]]


async def test_result_of_a_broken_stream_is_resent_and_nothing_runs_twice(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        maker = DeltaMaker()
        await steps.send(delta=maker.make(new={0: PROMPT}))
        assert list((await steps.result()).token_ids) == greedy(PROMPT, 1)
        await steps.send(delta=maker.make())
        await steps.send(delta=maker.make())
        await worker.report_where(lambda report: report.completed == 3)
        steps.call.cancel()  # steps 2 and 3 were executed, their results not read
        again, welcome = await worker.open(last_result_step=1)
        assert (welcome.accepted, welcome.completed) == (3, 3)
        results = [await again.result(), await again.result()]
        assert [result.step for result in results] == [2, 3]
        await again.send(delta=maker.make())
        results.append(await again.result())
        assert [result.token_ids[0] for result in results] == greedy(PROMPT, 4)[1:]


async def test_newer_stream_of_the_owner_replaces_the_older(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        old, _ = await worker.open()
        maker = DeltaMaker()
        await old.send(delta=maker.make(new={0: PROMPT}))
        await old.result()
        new, welcome = await worker.open(last_result_step=1)
        assert welcome.accepted == 1
        refusal = await old.end()
        assert refusal is not None
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.ABORTED, "SUPERSEDED")
        await new.send(delta=maker.make())
        assert (await new.result()).step == 2


@pytest.mark.parametrize(("epoch", "owner_id"), [(4, "A"), (6, "A"), (5, "B")])
async def test_hello_of_somebody_else_is_refused_and_closes_nothing(tmp_path: Path, epoch: int, owner_id: str) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready(epoch=5)
        steps, _ = await worker.open(epoch=5)
        intruder = RawSteps(worker.stub, epoch)
        await intruder.send(hello=Hello(owner_id=owner_id))
        refusal = await intruder.end()
        assert refusal is not None
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FENCED")
        maker = DeltaMaker()
        await steps.send(delta=maker.make(new={0: PROMPT}))
        assert (await steps.result()).step == 1


async def test_stream_must_begin_with_hello(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps = RawSteps(worker.stub, 1)
        await steps.send(heartbeat=worker_pb2.StepsRequest.Heartbeat())
        refusal = await steps.end()
        assert refusal is not None
        assert refusal.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "the first message of a stream must be hello" in refusal.message


async def test_living_owner_is_not_replaced_and_a_silent_one_is(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready(epoch=1)
        await worker.join(epoch=2, owner_id="A", owner_address="a:1", lease_ms=600)
        steps, _ = await worker.open(epoch=2)
        asked_until = time.monotonic() + 1.5
        while time.monotonic() < asked_until:  # far longer than the lease, which the heartbeats renew
            await steps.send(heartbeat=worker_pb2.StepsRequest.Heartbeat())
            refusal = await refused(worker.join(epoch=3, owner_id="B"))
            assert (refusal.code, refusal.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_HELD")
            assert refusal.metadata["owner_address"] == "a:1"
            await asyncio.sleep(0.1)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    granted = await worker.join(epoch=3, owner_id="B")
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.05)
        assert (granted.formation_id, granted.stage) == ("f1", worker_pb2.WORKER_STAGE_READY)
        end = await steps.end()
        assert end is not None
        assert (end.code, end.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "FENCED")
        call = worker.stub.WarmUp(worker_pb2.WarmUpRequest(epoch=2))
        assert (await refused(call)).reason == "FENCED"


async def test_handover_keeps_the_batch_and_frees_the_lease_at_once(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        maker = DeltaMaker()
        raw = maker.make(new={0: PROMPT})
        await steps.send(delta=raw)
        await steps.result()
        await steps.send(epoch=9, goodbye=Goodbye(kind=Goodbye.KIND_SHUTDOWN))  # stale: dropped
        await steps.send(goodbye=Goodbye(kind=Goodbye.KIND_HANDOVER))
        assert await steps.end() is None
        granted = await worker.join(epoch=2, owner_id="B")
        assert (granted.accepted, granted.completed, granted.formation_id) == (1, 1, "f1")
        assert granted.state_digest == maker.digest.value
        fetched = await worker.stub.FetchDeltas(worker_pb2.FetchDeltasRequest(epoch=2, from_step=1))
        assert list(fetched.deltas) == [raw]
        steps, _ = await worker.open(epoch=2, owner_id="B", last_result_step=1)
        await steps.send(delta=maker.make())
        assert list((await steps.result()).token_ids) == greedy(PROMPT, 2)[1:]


async def test_release_drops_the_batch_and_keeps_the_weights(tmp_path: Path) -> None:
    options = ScriptedOptions(load_time_s=0.3)
    async with worker_process(tmp_path) as worker:
        await worker.make_ready(options=options)
        steps, _ = await worker.open()
        await steps.send(delta=DeltaMaker().make(new={0: PROMPT}))
        await steps.result()
        await steps.send(goodbye=Goodbye(kind=Goodbye.KIND_RELEASE))
        assert await steps.end() is None
        described = await worker.describe()
        assert (described.num_rows, described.formation_id, described.accepted) == (0, "", 0)
        await worker.join(epoch=2, owner_id="B")
        began = time.monotonic()
        await worker.load(epoch=2, options=options)
        assert time.monotonic() - began < 0.25  # nothing was loaded again


async def test_goodbye_of_an_unknown_kind_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        # Kinds of a later protocol are sent as their number; proto3 lets any through.
        await steps.send(goodbye=Goodbye(kind=-(2**31)))  # type: ignore[arg-type]
        refusal = await steps.end()
        assert refusal is not None
        assert (refusal.code, refusal.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_PARAMETER")
        assert refusal.message.startswith("goodbye.kind=-2147483648: ")
        await worker.open()  # still the same owner's


async def test_shutdown_ends_the_process_in_order(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        await steps.send(goodbye=Goodbye(kind=Goodbye.KIND_SHUTDOWN))
        assert await worker.exit_code(2) == 0


async def test_content_that_breaks_a_rule_fails_the_rank_and_changes_nothing(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        maker = DeltaMaker()
        await steps.send(delta=maker.make(new={0: PROMPT}))
        await steps.result()
        digest = maker.digest.value
        bad = scheduler_delta_pb2.SchedulerDelta(step=2, mode=Delta.MODE_RUN)
        bad.finished.add(req_index=3)
        await steps.send(delta=bad.SerializeToString())
        report = await steps.report_where(lambda report: report.HasField("failure"))
        assert (report.failure.kind, report.failure.step) == ("DeltaRefused", 2)
        assert (report.accepted, report.state_digest) == (1, digest)
        end = await steps.end()
        assert end is not None
        assert (end.code, end.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "DELTA_REFUSED")
        seen = await worker.report_where(lambda report: report.HasField("failure"))
        assert seen.failure.kind == "DeltaRefused"
        assert (await worker.describe()).stage == worker_pb2.WORKER_STAGE_FAILED


async def test_wrong_digest_in_a_delta_is_seen_before_anything_is_launched(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        delta = Delta.FromString(DeltaMaker().make(new={0: PROMPT}))
        delta.state_digest ^= 1
        await steps.send(delta=delta.SerializeToString())
        report = await steps.report_where(lambda report: report.HasField("failure"))
        assert report.failure.kind == "DigestMismatch"
        assert (report.accepted, report.completed) == (0, 0)


async def test_step_that_raises_is_reported_on_both_connections(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready(options=ScriptedOptions(faults=(fail_at(0, 2),)))
        steps, _ = await worker.open()
        maker = DeltaMaker()
        for _ in range(2):
            await steps.send(delta=maker.make(new={0: PROMPT} if maker.step == 0 else None))
        report = await steps.report_where(lambda report: report.HasField("failure"))
        assert (report.failure.kind, report.failure.step) == ("InjectedFault", 2)
        assert report.failure.message == "injected at rank 0, step 2"
        assert report.completed == 1
        assert (await worker.report_where(lambda report: report.HasField("failure"))).failure.step == 2
        # Nothing follows the failed step, and only Leave helps.
        await steps.send(delta=maker.make())
        end = await steps.end()
        assert end is not None
        assert end.reason == "WRONG_STATE"
        await worker.stub.Leave(worker_pb2.LeaveRequest(epoch=1, reason="it failed"))
        assert await worker.exit_code(2) == 0


async def test_health_answers_during_a_step_that_hangs_and_leave_still_ends_it(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready(options=ScriptedOptions(faults=(fail_at(0, 1, "hang"),)))
        steps, _ = await worker.open()
        await steps.send(delta=DeltaMaker().make(new={0: PROMPT}))
        report = await worker.report_where(lambda report: report.running_for_ms > 300)
        assert (report.running_step, report.accepted, report.completed) == (1, 1, 0)
        report = await steps.report_where(lambda report: report.running_for_ms > 300)
        assert report.running_step == 1
        await worker.stub.Leave(worker_pb2.LeaveRequest(epoch=1, reason="stuck"))
        assert await worker.exit_code(2) == 0


async def test_health_and_calls_answer_during_load_and_say_how_far_it_is(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.join()
        load = asyncio.create_task(worker.load(options=ScriptedOptions(load_time_s=0.8)))
        report = await worker.report_where(lambda report: report.busy.progress > 0.2)
        assert report.busy.what == "load"
        assert 0 < report.busy.for_s < report.busy.up_to_s
        assert (await worker.describe()).stage == worker_pb2.WORKER_STAGE_FORMED
        assert not load.done()
        await load
        report = await worker.report_where(lambda report: True)
        assert not report.HasField("busy")


async def test_crash_while_loading_names_the_exception_and_fails_the_rank(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.join()
        refusal = await refused(worker.load(options=ScriptedOptions(faults=(fail_at(0, 0),))))
        assert refusal.code is grpc.StatusCode.INTERNAL
        assert "InjectedFault: load: injected at rank 0, step 0" in refusal.message
        assert (await worker.describe()).stage == worker_pb2.WORKER_STAGE_FAILED


async def test_calls_that_do_not_fit_are_refused_and_the_rank_lives(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        assert (await refused(worker.join(epoch=0))).code is grpc.StatusCode.INVALID_ARGUMENT
        assert "this is rank 0" in (await refused(worker.join(rank=1))).message
        assert "versions 1 to 1" in (await refused(worker.join(protocol_version=2))).message
        await worker.join()
        stub = worker.stub
        early = await refused(stub.ProfileMemory(worker_pb2.ProfileMemoryRequest(epoch=1)))
        assert early.reason == "WRONG_STATE"
        two = worker_pb2.FormGroupRequest(epoch=1, formation_id="f", rank=0, world_size=2)
        assert "world_size=2: this rank was started for 1" in (await refused(stub.FormGroup(two))).message
        assert (await refused(worker.load(dtype="float8"))).reason == "INVALID_PARAMETER"
        assert "max_num_seqs=0" in (await refused(worker.load(max_num_seqs=0))).message
        sleep = await refused(stub.Sleep(worker_pb2.WorkerServiceSleepRequest(epoch=1, level=1)))
        assert (sleep.code, sleep.reason) == (grpc.StatusCode.FAILED_PRECONDITION, "WRONG_STATE")
        steps, _ = await worker.open()
        await steps.send(delta=DeltaMaker().make(new={0: PROMPT}))
        end = await steps.end()
        assert end is not None
        assert end.reason == "WRONG_STATE"
        await worker.make_ready()  # nothing of this was the rank's failure


async def test_parent_death_ends_the_process_even_during_a_step(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready(options=ScriptedOptions(faults=(fail_at(0, 1, "hang"),)))
        steps, _ = await worker.open()
        await steps.send(delta=DeltaMaker().make(new={0: PROMPT}))
        await worker.report_where(lambda report: report.running_step == 1)
        worker.parent_dies()
        assert await worker.exit_code(2) == 71


async def test_sigterm_ends_the_process_and_its_streams(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        os.kill(worker.process.pid, signal.SIGINT)  # Ctrl-C is for the parent
        worker.process.terminate()
        assert await worker.exit_code(2) == 0
        assert await steps.end() is not None
        assert not os.listdir(tmp_path)  # no socket stays behind


async def test_orphan_leaves_after_its_grace(tmp_path: Path) -> None:
    async with worker_process(tmp_path, "--orphan-grace-s", "0.5") as worker:
        await worker.join(lease_ms=300)
        assert await worker.exit_code(DEADLINE_S) == 0
        assert any("no owner" in line.get("reason", "") for line in worker.log)


def test_wrong_flags_are_reported_all_at_once_before_anything_starts() -> None:
    command = [sys.executable, "-m", "worker_service", "--rank", "x", "--device", "tpu", "--listen", "unix:/nowhere/a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    faults = [line.strip().split(":")[0] for line in done.stderr.splitlines()[1:]]
    assert faults == ["--rank x", "--device tpu"]


def test_address_that_cannot_be_bound_is_a_sentence() -> None:
    command = [sys.executable, "-m", "worker_service", "--listen", "unix:/nowhere/a"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert "the directory /nowhere does not exist" in done.stderr
    assert "Traceback" not in done.stderr


def test_scripted_worker_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; import worker_service.__main__, worker_service.scripted"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)
