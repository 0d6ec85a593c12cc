"""Ranks that Ray placed: what the suite of all executors cannot ask. In a local cluster, with the scripted model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from control_plane.assembly import build_executor
from control_plane.config import load_config, resolve_auto
from control_plane.executors.base import RankExit
from control_plane.executors.ray import RayExecutor
from control_plane.executors.ray_place import NAMESPACE
from control_plane.group.loss import GroupNotFormed
from maniple.v1 import worker_pb2
from service_chassis.ids import Rank
from support.faults import SETTINGS, WORKER, LiveGroup, is_alive
from support.one_row import scripted_tokens
from support.ray_cluster import CLUSTER_CPUS
from support.waiting import until

pytestmark = pytest.mark.usefixtures("ray_cluster")
R0 = Rank(0)
# Ranks listen where other nodes would reach them.
ON_A_NODE = replace(WORKER, allow_plaintext_listen=True)


def executor_called(name: str, world_size: int = 1, *, linger_s: float = 10.0) -> RayExecutor:
    return RayExecutor(name=name, world_size=world_size, settings=ON_A_NODE, linger_s=linger_s)


def actor(name: str, rank: int = 0) -> Any:
    return ray.get_actor(f"{name}/rank{rank}", namespace=NAMESPACE)


def is_placed(name: str) -> bool:
    """Whether Ray still knows the group's first actor."""
    try:
        ray.get(actor(name).own_place.remote(), timeout=5.0)
    except (ValueError, ray.exceptions.RayActorError):
        return False
    return True


def live_places() -> list[dict[str, Any]]:
    """Return the placement groups that hold something of the cluster."""
    return [place for place in ray.util.placement_group_table().values() if place["state"] != "REMOVED"]


async def release(live: LiveGroup) -> None:
    """End the tenure and leave the ranks to the next owner, without their batch."""
    assert await live.group.goodbye(worker_pb2.StepsRequest.Goodbye.KIND_RELEASE)
    await live.group.teardown("released")


@pytest.fixture
async def group_of_one(request: pytest.FixtureRequest) -> AsyncIterator[LiveGroup]:
    live = LiveGroup(executor_called(request.node.name, linger_s=0.3), SETTINGS)
    await live.form()
    await live.run_steps(3)
    pid = live.pid
    yield live
    live.executor.let_go = lambda: None  # type: ignore[method-assign]  # nobody comes after this test
    await live.group.teardown("the test is over")
    assert not is_alive(pid)


async def test_ranks_are_detached_actors_packed_into_a_placement_group_and_end_with_it(
    group_of_one: LiveGroup, request: pytest.FixtureRequest
) -> None:
    place = ray.get(actor(request.node.name).own_place.remote())
    [table] = [each for each in live_places() if each["placement_group_id"] == place.id.hex()]
    assert (table["strategy"], table["bundles"]) == ("STRICT_PACK", {0: {"CPU": 1.0}})
    before = ray.get(actor(request.node.name).start.remote(ON_A_NODE))
    assert before[2] == group_of_one.pid, "a rank that runs is not started twice"
    live = group_of_one
    live.executor.let_go = lambda: None  # type: ignore[method-assign]
    await live.group.teardown("the end of it all")
    await until(lambda: not is_placed(request.node.name), "the end of the actor")
    assert place.id.hex() not in [each["placement_group_id"] for each in live_places()]


async def test_actor_that_dies_is_an_exit_told_by_ray(group_of_one: LiveGroup, request: pytest.FixtureRequest) -> None:
    exits: list[RankExit] = []
    group_of_one.executor.subscribe_exit(exits.append)
    ray.kill(actor(request.node.name))
    loss = await group_of_one.lost(within_s=2.0)
    assert loss.reason.startswith("rank 0 exited: its Ray actor died: it was killed by")
    assert len(exits) == 1
    await until(lambda: not is_alive(group_of_one.pid), "the rank goes with its actor", timeout_s=2.0)


async def test_next_control_plane_finds_the_ranks_by_name(
    group_of_one: LiveGroup, request: pytest.FixtureRequest
) -> None:
    pid = group_of_one.pid
    await release(group_of_one)
    successor = LiveGroup(executor_called(request.node.name), SETTINGS)
    await successor.form()
    assert successor.pid == pid
    assert successor.facts is not None
    assert successor.facts.epoch == 2
    await successor.run_steps(3)
    successor.assert_tokens_exact()
    # Another one, of the same name, while the group has an owner: it is refused, and ends nothing.
    rival = LiveGroup(executor_called(request.node.name), replace(SETTINGS, startup_timeout_s=5.0))
    with pytest.raises(GroupNotFormed, match="another owner holds the group"):
        await rival.form()
    assert is_alive(pid)
    await successor.run_steps(3)
    assert not successor.losses
    successor.executor.let_go = lambda: None  # type: ignore[method-assign]
    await successor.group.teardown("done")
    await until(lambda: not is_alive(pid), "the end of the rank")


async def test_next_control_plane_takes_over_what_runs_where_plaintext_to_workers_is_allowed() -> None:
    flags = {"model": "scripted", "executor": "ray", "served_model_name": "taken-over", "device": "cpu"}
    config = load_config({**flags, "allow_plaintext_workers": "on"}, {})
    owner = LiveGroup(build_executor(config), SETTINGS)
    await owner.form()
    await owner.run_steps(3)
    assert await owner.group.goodbye(worker_pb2.StepsRequest.Goodbye.KIND_HANDOVER)
    await owner.group.teardown("handed over")
    successor = LiveGroup(build_executor(config), SETTINGS)
    try:
        adopted = await successor.group.adopt()  # reads the batch over the network on which ranks are reached
        assert adopted.snapshot is not None
        [row] = adopted.snapshot.rows
        assert list(row.token_ids) == [*owner.row.prompt, *scripted_tokens(owner.row.prompt, 3)]
    finally:
        successor.executor.let_go = lambda: None  # type: ignore[method-assign]
        await successor.group.teardown("done")


async def test_place_of_a_rank_that_nobody_asks_for_is_given_back(
    group_of_one: LiveGroup, request: pytest.FixtureRequest
) -> None:
    await release(group_of_one)
    os.kill(group_of_one.pid, signal.SIGKILL)
    await until(lambda: not is_placed(request.node.name), "the place to be free")


async def test_too_small_a_cluster_is_named_when_start_up_is_over() -> None:
    count = CLUSTER_CPUS + 1
    live = LiveGroup(executor_called("too-many", count), replace(SETTINGS, startup_timeout_s=1.0))
    before = len(live_places())
    with pytest.raises(GroupNotFormed, match=rf"the Ray cluster has \d CPUs free, and {count} ranks want one each"):
        await live.form()
    assert len(live_places()) == before


def test_control_plane_inside_a_placement_group_chooses_ray(ray_cluster: None) -> None:
    def choose() -> str:
        flags = {"model": "scripted", "allow_plaintext_workers": "on"}
        return resolve_auto(load_config(flags, {}), has_gpu=False, on_terminal=False).executor

    place = ray.util.placement_group([{"CPU": 1}])
    assert place.wait(10.0)
    inside = ray.remote(choose).options(
        num_cpus=1, scheduling_strategy=PlacementGroupSchedulingStrategy(placement_group=place)
    )
    assert ray.get(inside.remote(), timeout=30.0) == "ray"
    assert choose() == "uni", "in the cluster, in no placement group"
    ray.util.remove_placement_group(place)


def test_control_plane_serves_over_ray_and_leaves_the_ranks_to_the_next() -> None:
    address = ray.get_runtime_context().gcs_address
    words = ["--executor", "ray", "--ray-address", address, "--model", "scripted", "--served-model-name", "served"]
    words += ["--allow-plaintext-workers"]
    command = [sys.executable, "-m", "control_plane.cli"]
    serving = subprocess.Popen(
        [*command, "control-plane", *words, "--listen", "127.0.0.1:0", "--announce", "json", "--log-level", "warning"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert serving.stdout is not None
        ready = next(event for line in serving.stdout if (event := json.loads(line))["event"] == "ready")
        _, _, ready_pid = ray.get(actor("served/group0").start.remote(ON_A_NODE))
        ask = [*command, "generate", "hello", "--server", ready["address"], "--max-tokens", "5"]
        asked = subprocess.run(ask, capture_output=True, text=True, timeout=30)
        assert asked.returncode == 0, asked.stderr
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(20) == 0
        _, _, pid = ray.get(actor("served/group0").start.remote(ON_A_NODE))
        assert pid == ready_pid, "the same rank, left to the next"
    finally:
        serving.kill()
        serving.wait(10)
        ray.util.remove_placement_group(ray.get(actor("served/group0").own_place.remote()))
