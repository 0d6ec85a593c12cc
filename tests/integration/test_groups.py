"""Several groups of one model behind one address: where requests go, what operators see, and one id at a time."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import grpc
import pytest

from control_plane.announcement import Lost, Ready, StageProgress
from control_plane.engine_status import GroupView
from service_chassis.errors import DuplicateRequest, GroupLost, NotReady
from service_chassis.ids import RequestId
from service_chassis.protocol.block_hash import namespace_of
from support.engine_harness import collect, generation
from support.faults import model_with
from support.fleet_harness import RunningFleet, running_fleet
from support.remote_ranks import remote_ranks
from support.scripted_reference import greedy
from support.serve_process import NOT_SERVING, SERVING, Caller, serving
from support.waiting import until

UNI = {"executor": "uni", "block_size": 4, "max_num_seqs": 8, "num_kv_blocks": 4000}
SLOW = model_with(step_time_s=0.01)


def group_of(running: RunningFleet, request_id: str) -> int:
    """Which group has a request."""
    name = RequestId(request_id)
    (found,) = [index for index, kept in enumerate(running.groups) if kept.engines[-1].knows(name)]
    return found


async def test_request_goes_to_the_group_that_has_its_prefix_cached_unless_it_is_overloaded() -> None:
    shared = list(range(40))
    async with running_fleet(SLOW, SLOW, **UNI) as running, asyncio.timeout(30):
        fleet = running.fleet
        # An idle fleet: the first group takes it, and has the prefix from then on; the other one gets another prefix.
        first = await fleet.generate(generation("first", shared, max_tokens=3))
        other = await fleet.generate(generation("other", [200, *range(100, 140)], max_tokens=3))
        assert (group_of(running, "first"), group_of(running, "other")) == (0, 1)
        await asyncio.gather(collect(first), collect(other))
        # Two of eight rows are the lead that a cached prefix may have.
        streams = [await fleet.generate(generation(f"r{n}", [*shared, n], max_tokens=400)) for n in range(5)]
        assert [group_of(running, f"r{n}") for n in range(5)] == [0, 0, 0, 1, 0]
        # What shares the other group's prefix goes there; what is salted differently finds nothing anywhere.
        streams.append(await fleet.generate(generation("o", [200, *range(100, 140), 5], max_tokens=400)))
        assert group_of(running, "o") == 1
        streams.append(
            await fleet.generate(generation("salted", shared, max_tokens=400, cache_namespace=namespace_of("", "x")))
        )
        assert group_of(running, "salted") == 1
        await until(lambda: sum(v.engine.num_running for v in fleet.status().groups if v.engine) == 7, "all run")
        for stream in streams:
            stream.cancel()
        await running.settled()
        status = fleet.status()
        assert status.prefix_cache_hits == 5 * 40  # r0, r1, r2, r4 and o
        assert status.num_finished == 9


async def test_id_is_taken_in_all_groups_while_it_runs_and_a_minute_after() -> None:
    async with running_fleet(SLOW, SLOW, **UNI) as running, asyncio.timeout(30):
        fleet = running.fleet
        await fleet.generate(generation("filler", [9], max_tokens=1000))
        stream = await fleet.generate(generation("same", [1], max_tokens=30))
        assert group_of(running, "same") == 1
        for _ in range(3):
            with pytest.raises(DuplicateRequest):
                await fleet.generate(generation("same", [2]))
            await fleet.generate(generation(f"more-{_}", [3], max_tokens=1000))
        await collect(stream)
        with pytest.raises(DuplicateRequest):
            await fleet.generate(generation("same", [2]))
        assert not fleet.abort(stream.generation.request_id)  # an explicit abort frees it
        await collect(await fleet.generate(generation("same", [2], max_tokens=2)))
        assert fleet.abort_all() == 4
        await running.settled()


async def test_fleet_is_ready_while_one_group_is_and_says_of_each_why_not() -> None:
    async with running_fleet(SLOW, SLOW, SLOW, **UNI) as running, asyncio.timeout(30):
        heard: list[bool] = []
        running.fleet.on_readiness(heard.append)
        running.groups[0].engines[0].close("maintenance")
        running.fleet.leave("the disk is full", "1", state="lost")
        assert running.fleet.ready
        assert [state_of(view) for view in running.fleet.status().groups] == [
            ("lost", "maintenance"),
            ("lost", "the disk is full"),
            ("ready", ""),
        ]
        running.fleet.report("rank 2: load 40%", "1")
        running.groups[2].engines[0].close("maintenance")
        assert heard[-1] is running.fleet.ready is False
        assert running.fleet.not_ready_reason == "group 0: maintenance; group 1: rank 2: load 40%; group 2: maintenance"
        assert running.view(1).state == "forming"
        with pytest.raises(NotReady, match="group 1: rank 2: load 40%"):
            await running.fleet.generate(generation("r", [1]))


def state_of(view: GroupView) -> tuple[str, str]:
    return view.state, view.reason


async def test_server_of_two_groups_loses_one_and_no_client_notices() -> None:
    words = ("--model", SLOW, "--data-parallel-size", "2", "--executor", "mp", "--num-threads", "1")
    with serving(*words) as server:
        async with Caller(server) as caller, asyncio.timeout(60):
            assert {one.group for one in server.heard(StageProgress)} == {"0", "1"}
            status = await caller.status()
            assert [(group.name, group.state) for group in status.groups] == [("0", "ready"), ("1", "ready")]
            assert server.hear(Ready).num_blocks == sum(group.num_total_blocks for group in status.groups)
            streams = [caller.generate(f"r{n}", [7, n], 150) for n in range(8)]
            await until(lambda: all(stream.token_ids for stream in streams), "tokens for everybody")
            assert {group.num_running for group in (await caller.status()).groups} == {4}
            duplicate = await caller.generate("r3", [1], 2).end()
            assert duplicate.error is not None
            assert duplicate.error.code() is grpc.StatusCode.ALREADY_EXISTS
            os.kill(status.groups[1].ranks[0].pid, signal.SIGKILL)
            await until(lambda: bool(server.heard(Lost)), "the loss is said")
            assert await caller.health() == SERVING
            lost = (await caller.status()).groups[1]
            assert lost.state in ("lost", "forming")
            await asyncio.gather(*(stream.end() for stream in streams))
            for number, stream in enumerate(streams):
                assert stream.error is None
                assert stream.token_ids == greedy([7, number], 150)
            assert server.hear(Ready, 2)
            status = await caller.status()
            assert [group.state for group in status.groups] == ["ready", "ready"]
            assert status.num_finished == 8
            assert server.heard(Lost) == [Lost("rank 0 exited: killed by SIGKILL", 0.5, "1")]
            # Both at once: nobody is left to go on with what runs.
            streams = [caller.generate(f"s{n}", [7, n], 1000) for n in range(4)]
            await until(lambda: all(stream.token_ids for stream in streams), "tokens for everybody")
            for group in status.groups:
                os.kill(group.ranks[0].pid, signal.SIGKILL)
            await caller.healthy(NOT_SERVING, within_s=1.0)
            await asyncio.gather(*(stream.end() for stream in streams))
            assert {stream.error.code() for stream in streams if stream.error} == {grpc.StatusCode.ABORTED}
            await caller.healthy(SERVING, within_s=20.0)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


async def test_two_control_planes_share_groups_and_one_takes_what_the_other_leaves(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with remote_ranks(directory=tmp_path / "a") as a, remote_ranks(directory=tmp_path / "b") as b:
        flags = ("--model", SLOW, "--worker-addresses", f"{a.addresses[0]};{b.addresses[0]}")
        with serving(*flags, "--max-groups", "1") as first:
            async with Caller(first) as caller, asyncio.timeout(30):
                states = sorted(group.state for group in (await caller.status()).groups)
                assert states == ["held", "ready"]  # whichever was quicker
            with serving(*flags) as second:
                async with Caller(second) as caller, asyncio.timeout(60):
                    states = sorted(group.state for group in (await caller.status()).groups)
                    assert states == ["held", "ready"]  # what the first may not have
                    assert (await caller.generate("r", [5, 6], 5).end()).token_ids == greedy([5, 6], 5)
                    first.close()
                    await asyncio.to_thread(second.hear, Ready, 2)
                    assert {group.state for group in (await caller.status()).groups} == {"ready"}
                    streams = [caller.generate(f"s{n}", [7, n], 20) for n in range(4)]
                    await asyncio.gather(*(stream.end() for stream in streams))
                    assert [stream.token_ids for stream in streams] == [greedy([7, n], 20) for n in range(4)]
                    assert all(group.step > 0 for group in (await caller.status()).groups)


def test_server_does_not_start_when_one_of_its_groups_cannot_be_formed() -> None:
    broken = 'scripted:{"faults": [{"rank": 0, "step": 0, "kind": "exit"}]}'
    with serving("--model", broken, "--data-parallel-size", "2", "--executor", "mp") as server:
        assert server.exit_code() == 1
        assert not server.heard(Ready)


async def test_streams_get_their_one_status_when_the_control_plane_ends_without_waiting_for_them() -> None:
    async with running_fleet(model_with(step_time_s=0.01)) as running, asyncio.timeout(30):
        stream = await running.fleet.generate(generation("r", [1, 2], max_tokens=2000))
        await anext(stream)
        kept = running.groups[0]
        assert kept.keeping is not None
        kept.keeping.cancel()
        await asyncio.gather(kept.keeping, return_exceptions=True)
        await kept.keeper.end("another group could not be formed")
        with pytest.raises(GroupLost, match="another group could not be formed"):
            async for _ in stream:
                pass
