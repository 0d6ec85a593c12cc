"""The same behaviour behind both executors, with a real rank."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from control_plane.executors.base import Executor, RankCallError, RankExit
from control_plane.executors.multiproc import MultiprocExecutor
from control_plane.executors.uniproc import UniprocExecutor
from control_plane.executors.worker_settings import WorkerSettings
from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import worker_pb2
from service_chassis.errors import Fenced, InvalidParameter
from service_chassis.ids import Rank
from support.faults import SETTINGS, WORKER, LiveGroup, forming, is_alive
from support.waiting import until

R0 = Rank(0)


def make(kind: str, settings: WorkerSettings = WORKER) -> Executor:
    return UniprocExecutor(settings) if kind == "uni" else MultiprocExecutor(world_size=1, settings=settings)


@pytest.fixture(params=["uni", "mp"])
async def executor(request: pytest.FixtureRequest) -> AsyncIterator[Executor]:
    executor = make(request.param)
    yield executor
    await executor.shutdown(grace_s=2.0)


async def test_executor_reaches_the_rank_and_brings_its_refusals_back(executor: Executor) -> None:
    await executor.start(timeout_s=20.0)
    [described] = await executor.collective_rpc("Describe", worker_pb2.DescribeRequest(), timeout_s=5.0)
    assert isinstance(described, worker_pb2.DescribeResponse)
    assert described.incarnation_id
    assert described.epoch == 0
    with pytest.raises(RankCallError, match="rank 0: LoadModel: ") as raised:
        await executor.collective_rpc("LoadModel", worker_pb2.LoadModelRequest(epoch=9), timeout_s=5.0)
    assert isinstance(raised.value.error, Fenced)
    wrong_rank = worker_pb2.JoinRequest(epoch=1, owner_id="me", protocol_version=1, rank=3, world_size=1)
    with pytest.raises(InvalidParameter) as refused:
        await executor.call(R0, "Join", wrong_rank, timeout_s=5.0)
    assert refused.value.field == "rank"
    with pytest.raises(ValueError, match="Steps is not a unary call"):
        await executor.call(R0, "Steps", worker_pb2.DescribeRequest(), timeout_s=5.0)


async def test_hello_of_a_stranger_is_refused_and_closes_nothing(executor: Executor) -> None:
    await executor.start(timeout_s=20.0)
    join = worker_pb2.JoinRequest(epoch=1, owner_id="me", protocol_version=1, world_size=1)
    await executor.call(R0, "Join", join, timeout_s=5.0)
    mine = await executor.open_steps(R0)
    await mine.write(hello("me"))
    welcome = await mine.read()
    assert welcome is not None
    assert welcome.HasField("welcome")
    stranger = await executor.open_steps(R0)
    await stranger.write(hello("you"))
    with pytest.raises(Fenced):
        await stranger.read()
    await stranger.close()
    await mine.write(worker_pb2.StepsRequest(epoch=1, heartbeat=worker_pb2.StepsRequest.Heartbeat()))
    report = await mine.read()  # still served
    assert report is not None
    assert report.report.epoch == 1
    await mine.close()
    await mine.close()
    with pytest.raises(ConnectionError):
        await mine.write(hello("me"))


def hello(owner_id: str) -> worker_pb2.StepsRequest:
    return worker_pb2.StepsRequest(epoch=1, hello=worker_pb2.StepsRequest.Hello(owner_id=owner_id))


async def test_health_is_heard_before_anybody_owns_the_rank(executor: Executor) -> None:
    await executor.start(timeout_s=20.0)
    reports = executor.watch_health(R0, 0)
    async with asyncio.timeout(5.0):
        first, second = await anext(reports), await anext(reports)
    assert first.incarnation_id == second.incarnation_id
    assert isinstance(first.incarnation_id, str)
    await reports.aclose()  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["uni", "mp"])
async def test_group_runs_steps_over_either_executor(kind: str) -> None:
    async with forming(executor=make(kind)) as live:
        facts = live.facts
        assert facts is not None
        assert (facts.num_blocks, facts.max_model_len, facts.model.vocab_size) == (64, 4096, 260)
        await live.run_steps(40)  # over two block ends
        for _ in range(2):  # two outstanding
            live.send_step()
        await until(lambda: 42 in live.result_steps, "two in flight")
        live.assert_tokens_exact()
        [status] = live.group.ranks()
        assert status.connected
        assert status.completed == 42
        assert (status.pid > 0) is (kind == "mp")


@pytest.mark.parametrize("kind", ["uni", "mp"])
async def test_bookkeeping_alone_is_accepted_at_once(kind: str) -> None:
    executor = make(kind, replace(WORKER, report_interval_s=30.0, idle_report_interval_s=30.0))
    async with forming(executor=executor, heartbeat_timeout_s=60.0) as live:
        accepted: list[int] = []
        live.group.on_accepted = accepted.append
        await live.run_steps(2)
        idle = live.row.idle()
        live.group.send(idle.step, idle.SerializeToString(), idle.mode, state_digest=idle.state_digest, num_tokens=0)
        await until(lambda: 3 in accepted, "acceptance without waiting for an interval")
        assert live.result_steps == [1, 2]


@pytest.mark.parametrize("kind", ["uni", "mp"])
async def test_bad_model_is_refused_in_the_words_of_the_worker(kind: str) -> None:
    group = WorkerGroup(make(kind), replace(SETTINGS, model="scripted:{}x"), owner_id="owner")
    with pytest.raises(InvalidParameter, match="must be JSON after 'scripted:'"):
        await group.form()


async def test_mp_keeps_its_sockets_to_itself_and_ends_everything() -> None:
    executor = MultiprocExecutor(world_size=1, settings=WORKER)
    live = LiveGroup(executor, SETTINGS)
    await live.form()
    pid, directory = live.pid, live.directory
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert sorted(os.listdir(directory)) == ["rank0-health.sock", "rank0.sock"]
    assert os.getsid(pid) == pid  # Ctrl-C in the terminal of the control plane is not for it
    fds_before = len(os.listdir("/proc/self/fd"))
    await live.group.teardown("done")
    assert not is_alive(pid)
    assert not directory.exists()
    assert len(os.listdir("/proc/self/fd")) < fds_before


async def test_mp_explains_a_broken_call_by_the_end_of_its_process() -> None:
    executor = MultiprocExecutor(world_size=1, settings=WORKER)
    exits: list[RankExit] = []
    executor.subscribe_exit(exits.append)
    await executor.start(timeout_s=20.0)
    os.kill(executor.describe_rank(R0)[1], signal.SIGKILL)
    with pytest.raises(ConnectionError, match="the process ended: killed by SIGKILL"):
        await executor.call(R0, "Describe", worker_pb2.DescribeRequest(), timeout_s=5.0)
    late: list[RankExit] = []
    executor.subscribe_exit(late.append)
    assert [end.cause for end in exits] == [end.cause for end in late] == ["killed by SIGKILL"]
    await executor.shutdown(grace_s=1.0)
    assert len(exits) == 1


async def test_mp_names_the_rank_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    executor = MultiprocExecutor(world_size=1, settings=WORKER)
    with pytest.raises(RankCallError, match="rank 0: Describe: the process ended before it answered: exit code 1"):
        await executor.start(timeout_s=20.0)
    await executor.shutdown(grace_s=1.0)


async def test_mp_names_the_rank_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MultiprocExecutor, "_arguments", lambda *_: ["-c", "import time; time.sleep(60)"])
    executor = MultiprocExecutor(world_size=1, settings=WORKER)
    with pytest.raises(RankCallError, match=r"rank 0: Describe: no answer from unix:.*rank0.sock within 0.5 s"):
        await executor.start(timeout_s=0.5)
    pid = executor.describe_rank(R0)[1]
    await executor.shutdown(grace_s=1.0)
    assert not is_alive(pid)
