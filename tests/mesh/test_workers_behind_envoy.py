"""A control plane reaches its workers through a real Envoy, as through a sidecar: same ports, another address."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from control_plane.announcement import Lost, Ready
from maniple_client import Aborted, AsyncClient, Chunk
from maniple_client.errors import from_rpc_error
from support.envoy import Cluster, Door, Envoy, envoys
from support.ports import free_ports
from support.scripted_reference import greedy
from support.serve_process import Caller, ServeProcess
from support.waiting import until
from support.worker_command import worker_processes

MODEL = "scripted:" + json.dumps({"step_time_s": 0.01, "sampler": "numpy"})
PROMPT = [5, 250, 17, 0, 5]
# Where the proxy listens: workers are on 127.0.0.1, at the same ports.
SIDECAR = "127.0.0.2"


@dataclass(frozen=True)
class Mesh:
    """Workers, the proxy before them, and a control plane that knows the proxy alone."""

    server: ServeProcess
    envoy: Envoy
    workers: Any
    ends: tuple[list[Door], list[Cluster]]


def ends(ports: Sequence[int], world_size: int, door: dict[str, Any], cluster: dict[str, Any]) -> Any:
    """A door and a cluster for every port of the ranks and of their health servers."""
    every = [
        (f"{kind}-{rank}", port + rank)
        for kind, port in zip(("rank", "health"), ports, strict=True)
        for rank in range(world_size)
    ]
    doors = [Door(name=name, cluster=name, address=f"{SIDECAR}:{port}", **door) for name, port in every]
    clusters = [Cluster(name=name, addresses=[f"127.0.0.1:{port}"], **cluster) for name, port in every]
    return doors, clusters


@contextmanager
def control_plane(address: str, world_size: int, *flags: str) -> Iterator[ServeProcess]:
    words = ["--worker-addresses", address, "--model", MODEL, "--tensor-parallel-size", str(world_size)]
    words += ["--num-kv-blocks", "2000", "--step-timeout-s", "5", "--startup-timeout-s", "40", *flags]
    server = ServeProcess(words, verb="control-plane")
    try:
        yield server
    finally:
        server.close()


@asynccontextmanager
async def mesh(
    directory: Path, *flags: str, world_size: int = 2, door: dict[str, Any] | None = None, **cluster: Any
) -> AsyncIterator[Mesh]:
    ports = free_ports(3 * world_size, consecutive=True)[::world_size]
    made = ends(ports[:2], world_size, door or {}, cluster)
    if cluster.get("health_service"):  # asked where the kubelet asks, too
        for rank, one in enumerate(made[1]):
            made[1][rank] = dataclasses.replace(one, health_port=ports[2] + rank % world_size)
    listen, health, probe = (f"127.0.0.1:{port}" for port in ports)
    with worker_processes(listen, health, world_size, "--probe-listen", probe) as workers:
        async with asyncio.timeout(100), envoys(directory, made) as [envoy]:
            with control_plane(f"{SIDECAR}:{ports[0]}", world_size, *flags) as server:
                yield Mesh(server, envoy, workers, made)


def formed_at(caller_status: Any) -> tuple[int, int]:
    """What changes when a group is lost and formed anew: its epoch and its state."""
    [group] = caller_status.groups
    return group.epoch, len(group.ranks)


async def asked(caller: Caller, request_id: str, count: int) -> list[int]:
    stream = await caller.generate(request_id, PROMPT, count).end()
    assert stream.error is None, stream.error
    return stream.token_ids


async def test_group_lives_through_idle_and_route_timeouts_of_the_mesh(tmp_path: Path) -> None:
    """Idle for several times both timeouts: streams that the proxy ends are opened again, and nobody is lost."""
    door = {"route_timeout_s": 5.0, "stream_idle_timeout_s": 3.0}
    async with mesh(tmp_path, door=door) as one:
        one.server.hear(Ready, timeout_s=60)
        async with Caller(one.server) as caller:
            assert await asked(caller, "before", 20) == greedy(PROMPT, 20)
            before = formed_at(await caller.status())
            cut = [f"cluster.health-{rank}.upstream_rq_timeout" for rank in range(2)]
            began = time.monotonic()
            while time.monotonic() - began < 13:
                assert (await caller.status()).groups[0].state
                await asyncio.sleep(0.5)
            assert all(one.envoy.count(name) >= 2 for name in cut), "the proxy ended no health stream: the test is void"
            assert await asked(caller, "after", 20) == greedy(PROMPT, 20)
            assert formed_at(await caller.status()) == before
        assert not one.server.heard(Lost)


async def test_steps_run_longer_than_the_route_timeout(tmp_path: Path) -> None:
    async with mesh(tmp_path, door={"route_timeout_s": 2.0}) as one:
        one.server.hear(Ready, timeout_s=60)
        async with Caller(one.server) as caller:
            assert await asked(caller, "long", 400) == greedy(PROMPT, 400)
        assert not one.server.heard(Lost)


@pytest.mark.parametrize("killed", ["a rank", "all at once"])
async def test_killed_rank_is_named_with_the_right_status_behind_a_proxy(tmp_path: Path, killed: str) -> None:
    """The proxy says INTERNAL where a killed host would say UNAVAILABLE; clients hear that the group is lost.

    At once, if a rank told of it before it was gone as well. Behind a proxy nobody can tell otherwise that the ranks
    have not gone over to another control plane: then clients that resume hear it as soon as it is proven.
    """
    async with mesh(tmp_path, "--heartbeat-timeout-s", "2", door={"route_timeout_s": 0}) as one:
        one.server.hear(Ready, timeout_s=60)
        async with AsyncClient(one.server.address) as client:
            token_ids: list[int] = []

            async def read() -> None:
                async for event in client.generate(token_ids=PROMPT, max_tokens=3000, temperature=0.0):
                    token_ids.extend(event.token_ids if isinstance(event, Chunk) else [])

            reading = asyncio.create_task(read())
            await until(lambda: len(token_ids) > 3, "it runs")
            if killed == "a rank":
                one.workers.kill(1)
            else:
                one.workers.end()
            await asyncio.to_thread(one.workers.process.wait, 20)
            lost = await asyncio.to_thread(one.server.hear, Lost, timeout_s=20)
            assert lost.reason.startswith(("rank ", "the group lost a rank"))
            one.workers.start()
            with pytest.raises(Aborted) as caught:
                await reading
            assert caught.value.reason == "GROUP_LOST"
            assert token_ids == greedy(PROMPT, len(token_ids))
        async with Caller(one.server) as caller:
            one.server.hear(Ready, times=2, timeout_s=60)
            assert await asked(caller, "after", 10) == greedy(PROMPT, 10)


async def test_retries_of_the_mesh_between_the_services_change_nothing(tmp_path: Path) -> None:
    """With the default policy of a mesh on every route, forming, serving and losing a rank go as without."""
    door = {"route_timeout_s": 0, "retry_on": "unavailable,cancelled,deadline-exceeded,reset,connect-failure"}
    async with mesh(tmp_path, door=door) as one:
        one.server.hear(Ready, timeout_s=60)
        async with Caller(one.server) as caller:
            streams = [caller.generate(f"r{index}", [index, *PROMPT], 40) for index in range(8)]
            for index, stream in enumerate(streams):
                assert (await stream.end()).token_ids == greedy([index, *PROMPT], 40)
            one.workers.kill(0)  # and with it all of its container
            lost = await asyncio.to_thread(one.server.hear, Lost, timeout_s=20)
            assert lost.reason.startswith("rank ")
            refused = await caller.generate("not now", PROMPT, 3).end()
            assert refused.error is not None
            assert refused.error.code() is grpc.StatusCode.UNAVAILABLE


async def test_pings_of_the_proxy_do_not_end_the_connections_of_idle_workers(tmp_path: Path) -> None:
    async with mesh(tmp_path, door={"route_timeout_s": 0}, keepalive_s=1.0) as one:
        one.server.hear(Ready, timeout_s=60)
        async with Caller(one.server) as caller:
            connections = [f"cluster.{kind}-0.upstream_cx_total" for kind in ("rank", "health")]
            before = [one.envoy.count(name) for name in connections]
            await asyncio.sleep(6.5)
            assert [one.envoy.count(name) for name in connections] == before, "a connection was ended"
            assert await asked(caller, "after", 10) == greedy(PROMPT, 10)


async def test_proxy_that_is_gone_is_taken_for_the_end_of_its_ranks_and_the_group_is_formed_anew(
    tmp_path: Path,
) -> None:
    """That nobody listens where a rank was is as good as its exit code; who replaces a sidecar replaces the group."""
    async with mesh(tmp_path, door={"route_timeout_s": 0}) as one:
        one.server.hear(Ready, timeout_s=60)
        async with Caller(one.server) as caller:
            stream = caller.generate("across", PROMPT, 3000)
            await until(lambda: len(stream.token_ids) > 3, "it runs")
            one.envoy.end()
            await stream.end()
            assert stream.error is not None
            assert stream.error.code() is grpc.StatusCode.ABORTED
            assert stream.token_ids == greedy(PROMPT, len(stream.token_ids))
        assert "nothing listens" in one.server.hear(Lost).reason


async def test_circuit_breaker_too_small_for_a_group_is_a_start_that_ends(tmp_path: Path) -> None:
    async with mesh(tmp_path, "--startup-timeout-s", "4", door={"route_timeout_s": 0}, max_requests=1) as one:
        code = await asyncio.to_thread(one.server.exit_code, within_s=60)
        assert code == 1


async def test_cap_of_streams_of_a_sidecar_is_a_start_that_ends(tmp_path: Path) -> None:
    """Calls beyond the cap hang without an error: the deadline of the stage is what ends that."""
    door = {"route_timeout_s": 0, "max_concurrent_streams": 1}
    async with mesh(tmp_path, "--startup-timeout-s", "4", door=door) as one:
        code = await asyncio.to_thread(one.server.exit_code, within_s=60)
        assert code == 1


@pytest.mark.parametrize("panic_threshold", [0.0, 50.0])
async def test_rank_that_failed_is_named_whether_or_not_the_proxy_still_sends_to_it(
    tmp_path: Path, panic_threshold: float
) -> None:
    """A failed rank is NOT_SERVING: below the threshold the proxy goes on sending to it, else it answers by itself."""
    fault = {"rank": 1, "step": 30, "kind": "raise"}
    failing = "scripted:" + json.dumps({"step_time_s": 0.01, "sampler": "numpy", "faults": [fault]})
    checked: dict[str, Any] = {"health_service": "maniple.v1.WorkerService", "panic_threshold": panic_threshold}
    async with mesh(tmp_path, "--model", failing, door={"route_timeout_s": 0}, **checked) as one:
        one.server.hear(Ready, timeout_s=60)
        assert all(one.envoy.count(f"cluster.rank-{rank}.health_check.success") for rank in range(2)), "none was asked"
        async with Caller(one.server) as caller:
            stream = await caller.generate("running", PROMPT, 3000).end()
            assert stream.error is not None
            assert stream.error.code() is grpc.StatusCode.ABORTED
            assert "rank 1 failed in step 30" in str(stream.error.details())
            assert from_rpc_error(stream.error).reason == "GROUP_LOST"
            assert stream.token_ids == greedy(PROMPT, len(stream.token_ids))


async def test_drain_of_the_sidecar_leaves_the_streams_of_a_group_alone(tmp_path: Path) -> None:
    async with mesh(tmp_path, door={"route_timeout_s": 0}) as one:
        one.server.hear(Ready, timeout_s=60)
        async with Caller(one.server) as caller:
            stream = caller.generate("across", PROMPT, 100)
            await until(lambda: len(stream.token_ids) > 3, "it runs")
            one.envoy.drain()
            await stream.end()
            assert stream.error is None, stream.error
            assert stream.token_ids == greedy(PROMPT, 100)
        assert not one.server.heard(Lost)
