"""Ranks that run elsewhere: found by what they say, never started or ended by us."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from control_plane.executors.base import RankCallError, RankExit
from control_plane.executors.remote import RemoteExecutor
from maniple.v1 import worker_pb2
from service_chassis.ids import Rank
from support.faults import SETTINGS, WORKER, LiveGroup, is_alive
from support.remote_ranks import remote_ranks
from support.waiting import until

R0, R1 = Rank(0), Rank(1)
DESCRIBE = worker_pb2.DescribeRequest()


async def test_rank_goes_by_what_the_worker_says_and_not_by_the_order_of_addresses(tmp_path: Path) -> None:
    with remote_ranks(2, directory=tmp_path) as remote:
        executor = RemoteExecutor(remote.addresses[::-1], world_size=2, settings=WORKER)
        await executor.start(timeout_s=20.0)
        assert [executor.describe_rank(rank)[0] for rank in executor.ranks] == list(remote.addresses)
        replies = await executor.collective_rpc("Describe", DESCRIBE, timeout_s=5.0)
        assert [reply.rank for reply in replies] == [0, 1]  # type: ignore[attr-defined]
        await executor.shutdown(grace_s=0.0)


async def test_missing_rank_is_named_with_its_address_when_start_up_is_over() -> None:
    with remote_ranks(2, start=False) as remote:
        remote.start(0)
        live = LiveGroup(
            RemoteExecutor(remote.addresses, world_size=2, settings=WORKER), replace(SETTINGS, startup_timeout_s=2.5)
        )
        with pytest.raises(Exception, match=f"rank 1 .*not found: {remote.addresses[1]}: no answer"):
            await live.form()
        assert remote.processes[0].poll() is None, "what is there is left alone"


async def test_rank_that_starts_late_is_waited_for() -> None:
    with remote_ranks(2, start=False) as remote:
        remote.start(1)
        executor = RemoteExecutor(remote.addresses, world_size=2, settings=WORKER)
        starting = asyncio.create_task(executor.start(timeout_s=20.0))
        await until(lambda: executor.describe_rank(R0)[0], "the first look")
        remote.start(0)
        await starting
        await executor.shutdown(grace_s=0.0)


@pytest.mark.parametrize(
    ("said", "size", "sentence"),
    [(0, 2, "rank 0: .* both say that they are it"), (1, 3, "is rank 1 of 3, and a group of 2 is wanted")],
    ids=["same-rank-twice", "another-size"],
)
async def test_workers_that_cannot_become_a_group_are_refused_at_once(said: int, size: int, sentence: str) -> None:
    with remote_ranks(2, start=False) as remote:
        remote.start(0)
        remote.start(1, rank_said=said, world_size=size)
        executor = RemoteExecutor(remote.addresses, world_size=2, settings=WORKER)
        with pytest.raises(RankCallError, match=sentence):
            await executor.start(timeout_s=60.0)
        await executor.shutdown(grace_s=0.0)


async def test_headless_name_stands_for_its_workers() -> None:
    with remote_ranks(1) as remote:
        port = remote.addresses[0].rpartition(":")[2]
        executor = RemoteExecutor([f"dns:///localhost:{port}"], world_size=1, settings=WORKER)
        # localhost may be ::1 besides, where nobody is: more addresses than ranks is no group.
        addresses = {info[4][0] for info in await asyncio.get_running_loop().getaddrinfo("localhost", int(port))}
        if len(addresses) == 1:
            await executor.start(timeout_s=20.0)
            assert executor.describe_rank(R0)[0] == remote.addresses[0]
        else:
            with pytest.raises(RankCallError, match="stand for 2 addresses, which do not fit 1 ranks"):
                await executor.start(timeout_s=0.5)
        await executor.shutdown(grace_s=0.0)


async def test_worker_started_anew_is_another_incarnation_and_a_lost_rank() -> None:
    with remote_ranks(1) as remote:
        live = LiveGroup(RemoteExecutor(remote.addresses, world_size=1, settings=WORKER), SETTINGS)
        exits: list[RankExit] = []
        live.executor.subscribe_exit(exits.append)
        await live.form()
        await live.run_steps(3)
        remote.kill(0)
        remote.start(0)
        loss = await live.lost(within_s=6.0)
        assert loss.rank == 0
        # Whichever is seen first: that nobody listened for a moment, or that somebody else does.
        assert bool(exits) or "another incarnation" in loss.reason or "another owner" in loss.reason
        await live.group.teardown("done")


async def test_released_ranks_form_the_next_group_at_once_with_the_model_they_have() -> None:
    with remote_ranks(2) as remote:
        pids: list[list[int]] = []
        for _ in range(2):
            live = LiveGroup(RemoteExecutor(remote.addresses, world_size=2, settings=WORKER), SETTINGS)
            await live.form()
            await live.run_steps(3)
            live.assert_tokens_exact()
            pids.append([live.executor.describe_rank(rank)[1] for rank in live.executor.ranks])
            assert await live.group.goodbye(worker_pb2.StepsRequest.Goodbye.KIND_RELEASE)
            await live.group.teardown("the control plane ends")
        assert pids[0] == pids[1]
        assert all(map(is_alive, pids[0]))


async def test_survivors_of_a_lost_rank_are_told_to_leave() -> None:
    with remote_ranks(2) as remote:
        live = LiveGroup(RemoteExecutor(remote.addresses, world_size=2, settings=WORKER), SETTINGS)
        await live.form()
        await live.run_steps(3)
        remote.kill(1)
        await live.lost(within_s=2.0)
        await live.group.teardown("lost")
        await until(lambda: remote.processes[0].poll() is not None, "the survivor's end", timeout_s=2.0)


def test_control_plane_serves_with_workers_elsewhere_and_leaves_them() -> None:
    with remote_ranks(2) as remote:
        words = ["--worker-addresses", ",".join(remote.addresses), "--model", "scripted", "--listen", "127.0.0.1:0"]
        command = [sys.executable, "-m", "control_plane.cli"]
        serving = subprocess.Popen(
            [*command, "control-plane", *words, "--announce", "json", "--log-level", "warning"],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert serving.stdout is not None
            events = (json.loads(line) for line in serving.stdout)
            ready = next(event for event in events if event["event"] == "ready")
            ask = [*command, "generate", "hello", "--server", ready["address"], "--max-tokens", "5"]
            asked = subprocess.run(ask, capture_output=True, text=True, timeout=30)
            assert asked.returncode == 0, asked.stderr
            serving.send_signal(signal.SIGTERM)
            assert serving.wait(20) == 0
        finally:
            serving.kill()
            serving.wait(10)
        assert all(process.poll() is None for process in remote.processes.values())
