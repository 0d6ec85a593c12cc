"""``maniple worker --tensor-parallel-size N``, and ranks that torchrun started."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from control_plane.executors.remote import RemoteExecutor
from maniple.v1 import worker_pb2
from service_chassis.ids import Rank
from support.faults import SETTINGS, WORKER, LiveGroup, is_alive
from support.ports import free_ports
from support.waiting import until

RANK_FLAGS = ("--device", "cpu", "--report-interval-s", "0.05", "--idle-report-interval-s", "0.1")


class Started:
    """A command that starts ranks, what it says, and the ranks."""

    def __init__(self, words: Sequence[str], port: int, log: Path) -> None:
        self.address = f"127.0.0.1:{port}"
        self._log = log
        with log.open("w") as stream:
            self.process = subprocess.Popen(
                [sys.executable, *words], stderr=stream, stdout=stream, start_new_session=True
            )

    @property
    def said(self) -> str:
        return self._log.read_text()

    def executor(self, world_size: int) -> RemoteExecutor:
        return RemoteExecutor([self.address], world_size=world_size, settings=WORKER)

    async def pids(self, world_size: int) -> list[int]:
        """Ask the ranks for their processes."""
        executor = self.executor(world_size)
        await executor.start(timeout_s=30.0)
        await executor.shutdown(grace_s=0.0)
        return [executor.describe_rank(rank)[1] for rank in executor.ranks]

    async def exit_code(self, within_s: float) -> int:
        await until(lambda: self.process.poll() is not None, "the end", timeout_s=within_s)
        return int(self.process.returncode)


@contextmanager
def started(tmp_path: Path, *words: str, port: int) -> Iterator[Started]:
    begun = Started(words, port, tmp_path / "log")
    try:
        yield begun
    finally:
        begun.process.terminate()
        try:
            begun.process.wait(10)
        finally:
            begun.process.kill()
            begun.process.wait(10)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Started]:
    """A container of two ranks: two ports for them, and two for their health."""
    port = free_ports(4, consecutive=True)[0]
    words = ["worker", "--tensor-parallel-size", "2", "--listen", f"127.0.0.1:{port}", *RANK_FLAGS]
    with started(tmp_path, "-m", "control_plane.cli", *words, port=port) as begun:
        yield begun


async def test_ranks_of_a_container_form_a_group_behind_one_address(worker: Started) -> None:
    live = LiveGroup(worker.executor(2), SETTINGS)
    await live.form()
    base = int(worker.address.rpartition(":")[2])
    assert [live.executor.describe_rank(rank)[0] for rank in (Rank(0), Rank(1))] == [
        f"127.0.0.1:{base}",
        f"127.0.0.1:{base + 1}",
    ]
    described = await live.executor.call(Rank(1), "Describe", worker_pb2.DescribeRequest(), timeout_s=5.0)
    assert described.health_address == f":{base + 3}"  # type: ignore[attr-defined]
    await live.run_steps(5)
    live.assert_tokens_exact()
    await live.group.teardown("the control plane ends")
    assert worker.process.poll() is None, "released ranks wait for the next"


async def test_container_ends_when_one_of_its_ranks_does(worker: Started) -> None:
    pids = await worker.pids(2)
    os.kill(pids[1], signal.SIGKILL)
    killed_at = time.monotonic()
    assert await worker.exit_code(within_s=5.0) == 128 + signal.SIGKILL
    assert time.monotonic() - killed_at < 2.0
    assert not any(map(is_alive, pids))
    assert re.search(r'"rank": 1, "reason": "killed by SIGKILL"', worker.said)


async def test_container_fails_also_when_a_rank_was_told_to_go(worker: Started) -> None:
    pids = await worker.pids(2)
    executor = worker.executor(2)
    await executor.start(timeout_s=10.0)
    join = worker_pb2.JoinRequest(epoch=1, owner_id="me", protocol_version=1, rank=1, world_size=2)
    await executor.call(Rank(1), "Join", join, timeout_s=5.0)
    await executor.call(Rank(1), "Leave", worker_pb2.LeaveRequest(epoch=1, reason="enough"), timeout_s=5.0)
    assert await worker.exit_code(within_s=5.0) == 1
    assert not any(map(is_alive, pids))
    await executor.shutdown(grace_s=0.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_all_ranks_in_order(worker: Started, number: signal.Signals) -> None:
    pids = await worker.pids(2)
    worker.process.send_signal(number)
    assert await worker.exit_code(within_s=5.0) == 0
    assert not any(map(is_alive, pids))


async def test_ranks_go_with_a_supervisor_that_is_killed(worker: Started) -> None:
    pids = await worker.pids(2)
    worker.process.kill()
    await until(lambda: not any(map(is_alive, pids)), "the end of the ranks", timeout_s=2.0)


def test_container_that_cannot_listen_says_why(tmp_path: Path) -> None:
    port = free_ports(4, consecutive=True)[0]
    words = ["worker", "--tensor-parallel-size", "2", "--listen", f"203.0.113.1:{port}", *RANK_FLAGS]
    words.append("--allow-plaintext-listen")
    done = subprocess.run(
        [sys.executable, "-m", "control_plane.cli", *words], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 2
    # A line that is no JSON is marked with whose it is.
    assert re.search(r"^\[rank [01]\]   --listen 203\.0\.113\.1:\d+: cannot be bound", done.stderr, re.MULTILINE)


async def test_ranks_that_torchrun_started_form_a_group(tmp_path: Path) -> None:
    port = free_ports(4, consecutive=True)[0]
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "worker_service"]
    with started(tmp_path, *words, "--listen", f"127.0.0.1:{port}", *RANK_FLAGS, port=port) as torchrun:
        live = LiveGroup(torchrun.executor(2), SETTINGS)
        await live.form()
        await live.run_steps(5)
        live.assert_tokens_exact()
        pids = [live.executor.describe_rank(rank)[1] for rank in live.executor.ranks]
        await live.group.teardown("the control plane ends")
        torchrun.process.terminate()
        await torchrun.exit_code(within_s=15.0)
        await until(lambda: not any(map(is_alive, pids)), "the end of the ranks")
