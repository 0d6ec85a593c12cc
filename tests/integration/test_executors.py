"""The same behaviour behind all four executors, with real ranks."""

from __future__ import annotations

import ast
import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankCallError, RankExit
from control_plane.executors.multiproc import MultiprocExecutor
from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import worker_pb2
from service_chassis.errors import Fenced, InvalidParameter, PermissionDenied, WrongState
from service_chassis.ids import Rank
from support.executors import KINDS, MP, OF_SEVERAL_RANKS, RAY, REMOTE, UNI, formed, pids_of, ranks_behind
from support.faults import SETTINGS, WORKER, LiveGroup, is_alive
from support.waiting import until

R0, R1 = Rank(0), Rank(1)
DESCRIBE = worker_pb2.DescribeRequest()
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, indirect=True)
SEVERAL_RANKS = pytest.mark.parametrize("kind", OF_SEVERAL_RANKS, indirect=True)


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    if request.param == RAY:
        request.getfixturevalue("ray_cluster")
    return str(request.param)


@pytest.fixture
async def executor(kind: str) -> AsyncIterator[Executor]:
    async with ranks_behind(kind) as make:
        yield make()


@EVERY_KIND
async def test_executor_reaches_the_rank_and_brings_its_refusals_back(executor: Executor) -> None:
    await executor.start(timeout_s=20.0)
    [described] = await executor.collective_rpc("Describe", DESCRIBE, timeout_s=5.0)
    assert isinstance(described, worker_pb2.DescribeResponse)
    assert described.incarnation_id
    assert (described.epoch, described.rank, described.world_size) == (0, 0, 1)
    with pytest.raises(RankCallError, match="rank 0: LoadModel: ") as raised:
        await executor.collective_rpc("LoadModel", worker_pb2.LoadModelRequest(epoch=9), timeout_s=5.0)
    assert isinstance(raised.value.error, Fenced)
    wrong_rank = worker_pb2.JoinRequest(epoch=1, owner_id="me", protocol_version=1, rank=3, world_size=1)
    with pytest.raises(InvalidParameter) as refused:
        await executor.call(R0, "Join", wrong_rank, timeout_s=5.0)
    assert refused.value.field == "rank"
    with pytest.raises(ValueError, match="Steps is not a unary call"):
        await executor.call(R0, "Steps", DESCRIBE, timeout_s=5.0)


@EVERY_KIND
async def test_answers_in_parts_and_their_refusals_come_from_every_executor(kind: str, executor: Executor) -> None:
    await executor.start(timeout_s=20.0)

    async def parts(method: str, request: Message) -> list[Message]:
        return [part async for part in executor.stream(R0, method, request, timeout_s=5.0)]

    assert await parts("GetModelFiles", worker_pb2.GetModelFilesRequest(names=["config.json"])) == []  # none is loaded
    with pytest.raises(InvalidParameter, match="must be a file name"):
        await parts("GetModelFiles", worker_pb2.GetModelFilesRequest(names=["../config.json"]))
    join = worker_pb2.JoinRequest(epoch=1, owner_id="me", protocol_version=1, world_size=1)
    await executor.call(R0, "Join", join, timeout_s=5.0)
    if kind == RAY:  # its ranks are reached over the network, even on one host
        with pytest.raises(WrongState, match="neither a Unix socket nor the loopback nor TLS"):
            await parts("Snapshot", worker_pb2.SnapshotRequest(epoch=1))
    else:
        with pytest.raises(Fenced):
            await parts("Snapshot", worker_pb2.SnapshotRequest(epoch=9))
        (header,) = await parts("Snapshot", worker_pb2.SnapshotRequest(epoch=1))
        assert isinstance(header, worker_pb2.SnapshotResponse)
        assert header.WhichOneof("part") == "header"
    with pytest.raises(ValueError, match="Describe"):
        await parts("Describe", DESCRIBE)


@EVERY_KIND
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


@EVERY_KIND
async def test_health_is_heard_before_anybody_owns_the_rank(executor: Executor) -> None:
    await executor.start(timeout_s=20.0)
    reports = executor.watch_health(R0, 0)
    async with asyncio.timeout(5.0):
        first, second = await anext(reports), await anext(reports)
    assert first.incarnation_id == second.incarnation_id
    assert isinstance(first.incarnation_id, str)
    await reports.aclose()  # type: ignore[attr-defined]


@EVERY_KIND
async def test_group_runs_steps_over_every_executor(kind: str) -> None:
    async with formed(kind) as live:
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
        assert (status.pid > 0) is (kind != UNI)


@EVERY_KIND
async def test_bookkeeping_alone_is_accepted_at_once(kind: str) -> None:
    slow = replace(WORKER, report_interval_s=30.0, idle_report_interval_s=30.0)
    async with formed(kind, workers=slow, heartbeat_timeout_s=60.0) as live:
        accepted: list[int] = []
        live.group.on_accepted = accepted.append
        await live.run_steps(2)
        idle = live.row.idle()
        live.group.send(idle.step, idle.SerializeToString(), idle.mode, state_digest=idle.state_digest, num_tokens=0)
        await until(lambda: 3 in accepted, "acceptance without waiting for an interval")
        assert live.result_steps == [1, 2]


@EVERY_KIND
async def test_bad_model_is_refused_in_the_words_of_the_worker(kind: str, executor: Executor) -> None:
    group = WorkerGroup(executor, replace(SETTINGS, model="scripted:{}x"), owner_id="owner")
    with pytest.raises(InvalidParameter, match="must be JSON after 'scripted:'"):
        await group.form()


# Several ranks


@SEVERAL_RANKS
async def test_collective_call_is_the_same_everywhere_and_the_first_failure_names_its_rank(kind: str) -> None:
    async with ranks_behind(kind, 2) as make:
        executor = make()
        await executor.start(timeout_s=30.0)
        under_way = executor.collective_rpc("Describe", DESCRIBE, timeout_s=5.0)  # a future; nothing has to wait for it
        only_one = executor.collective_rpc("Describe", DESCRIBE, timeout_s=5.0, reply_ranks=[R1])
        assert [reply.rank for reply in await under_way] == [0, 1]  # type: ignore[attr-defined]
        assert [reply.rank for reply in await only_one] == [1]  # type: ignore[attr-defined]

        def join(epoch: int, wrong: int | None = None) -> Callable[[Rank], worker_pb2.JoinRequest]:
            return lambda rank: worker_pb2.JoinRequest(
                epoch=epoch, owner_id="me", protocol_version=1, rank=7 if rank == wrong else rank, world_size=2
            )

        with pytest.raises(RankCallError, match="rank 1: Join: ") as raised:
            await executor.collective_rpc("Join", join(1, wrong=1), timeout_s=5.0)
        assert isinstance(raised.value.error, InvalidParameter)
        joined = await executor.collective_rpc("Join", join(2), timeout_s=5.0)
        assert [reply.epoch for reply in joined] == [2, 2]  # type: ignore[attr-defined]


@SEVERAL_RANKS
async def test_killed_rank_is_named_within_a_second_and_takes_the_group_with_it(kind: str) -> None:
    async with formed(kind, 2) as live:
        await live.run_steps(5)
        live.assert_tokens_exact()
        os.kill(live.executor.describe_rank(R1)[1], signal.SIGKILL)
        killed_at = time.monotonic()
        loss = await live.lost(within_s=5.0)
        assert live.lost_at - killed_at < 1.0
        assert loss.rank == 1
        gone = "nothing listens at 127.0.0.1:" if kind == REMOTE else "killed by SIGKILL"
        assert loss.reason.startswith(f"rank 1 exited: {gone}")


# Workers cannot import this module, so its functions travel by value, as those of a __main__ do.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def _where_it_ran(rank: Any) -> tuple[int, int, str]:
    import os
    import threading

    return rank.config.rank, os.getpid(), threading.current_thread().name


def _raise(rank: Any) -> None:
    raise LookupError(f"nothing on {rank.config.rank}")


@EVERY_KIND
async def test_function_runs_on_the_device_thread_where_both_ends_allow_it(kind: str) -> None:
    async with ranks_behind(kind, settings=replace(WORKER, allow_insecure_serialization=True)) as make:
        executor = make()
        await executor.start(timeout_s=30.0)
        join = worker_pb2.JoinRequest(epoch=1, owner_id="me", protocol_version=1, world_size=1)
        await executor.call(R0, "Join", join, timeout_s=5.0)
        granted = worker_pb2.CallPickledRequest(epoch=1)
        [(rank, pid, thread)] = await executor.collective_rpc(_where_it_ran, granted, timeout_s=20.0)
        assert (rank, pid, thread) == (0, pids_of(executor)[0] if kind != UNI else os.getpid(), "device")
        offset = 40  # a closure travels by value
        assert await executor.collective_rpc(lambda _: offset + 2, granted, timeout_s=5.0) == [42]
        with pytest.raises(RankCallError, match=r"rank 0: _raise: .*nothing on 0"):
            await executor.collective_rpc(_raise, granted, timeout_s=5.0)
        stale = worker_pb2.CallPickledRequest(epoch=9)
        with pytest.raises(RankCallError) as fenced:
            await executor.collective_rpc(_where_it_ran, stale, timeout_s=5.0)
        assert isinstance(fenced.value.error, Fenced)


@pytest.mark.parametrize("kind", [MP], indirect=True)
async def test_function_is_refused_where_this_end_did_not_opt_in(executor: Executor) -> None:
    await executor.start(timeout_s=20.0)
    with pytest.raises(PermissionDenied, match="only in process"):
        executor.collective_rpc(_where_it_ran, worker_pb2.CallPickledRequest(epoch=1), timeout_s=5.0)


async def test_function_is_refused_where_the_worker_did_not_opt_in() -> None:
    opted_in = replace(WORKER, allow_insecure_serialization=True)
    async with ranks_behind(REMOTE, settings=opted_in, workers=WORKER) as make:
        executor = make()
        await executor.start(timeout_s=20.0)
        with pytest.raises(RankCallError, match="started without --allow-insecure-serialization") as refused:
            await executor.collective_rpc(_where_it_ran, worker_pb2.CallPickledRequest(epoch=1), timeout_s=5.0)
        assert isinstance(refused.value.error, PermissionDenied)


# Children


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


async def test_mp_starts_new_programs_and_not_copies_of_this_one() -> None:
    """CUDA, gRPC and threads survive no fork; a copy would also hold every file that is open here."""
    open_here, other_end = os.pipe()
    os.set_inheritable(open_here, True)
    async with ranks_behind(MP, 2) as make:
        executor = make()
        await executor.start(timeout_s=20.0)
        pipe = os.readlink(f"/proc/self/fd/{open_here}")
        for pid in pids_of(executor):
            program, open_there = _program(pid)
            assert program == ["-m", "worker_service"]
            assert pipe not in open_there
    os.close(open_here)
    os.close(other_end)


def _program(pid: int) -> tuple[list[str], list[str]]:
    """What a process runs, and what it has open."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    links = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            links.append(os.readlink(entry))
    return words[1:3], links


def test_nothing_forks() -> None:
    """No module can: neither os.fork nor multiprocessing's processes, whose default on Linux was a fork."""
    root = Path(__file__).parents[2]
    packages = ("control_plane", "worker_service", "service_chassis")
    sources = [source for package in packages for source in (root / package).rglob("*.py")]
    assert len(sources) > 80
    for source in sources:
        for node in ast.walk(ast.parse(source.read_text())):
            names: list[str] = []
            if isinstance(node, ast.Attribute):
                names = [f"_.{node.attr}"]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            for name in names:
                assert name.rpartition(".")[2] not in ("fork", "forkpty", "ProcessPoolExecutor", "set_start_method"), (
                    source
                )
                assert not name.startswith("multiprocessing") or "shared_memory" in name or "tracker" in name, source
