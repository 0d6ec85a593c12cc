"""Clients reach a server through a real Envoy: what its settings do to their calls, and what ours make of that."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from maniple.v1 import inference_pb2
from maniple_client import TransportLost
from support.envoy import Cluster, Door, Envoy, envoys
from support.mesh_calls import FLAGS, LONG, PROMPT, client, is_idle, request_of, rest, stub_of
from support.scripted_reference import greedy
from support.serve_process import INFERENCE, Caller, ServeProcess, serving
from support.waiting import until


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with serving(*FLAGS) as one:
        assert one.address
        yield one


@asynccontextmanager
async def behind(directory: Path, server: ServeProcess, door: Door, **cluster: object) -> AsyncIterator[Envoy]:
    where = Cluster(addresses=[server.address], **cluster)  # type: ignore[arg-type]
    async with asyncio.timeout(60), envoys(directory, (door, where)) as [one]:
        yield one


async def test_route_timeout_ends_a_stream_as_transport_loss_and_frees_what_it_held(
    server: ServeProcess, tmp_path: Path
) -> None:
    async with behind(tmp_path, server, Door(route_timeout_s=0.5)) as envoy, client(envoy.address()) as one:
        stream = one.generate(token_ids=PROMPT, max_tokens=LONG, ignore_eos=True, temperature=0.0)
        with pytest.raises(TransportLost) as lost:
            await stream.text()
        # Not DEADLINE_EXCEEDED: the client set none, and must not think that it did.
        assert "RST_STREAM" in str(lost.value) or "timeout" in str(lost.value)
        await is_idle(server)


async def test_route_timeout_of_zero_leaves_a_stream_alone(server: ServeProcess, tmp_path: Path) -> None:
    async with behind(tmp_path, server, Door(route_timeout_s=0)) as envoy, client(envoy.address()) as one:
        stream = one.generate(token_ids=PROMPT, max_tokens=100, ignore_eos=True, temperature=0.0)
        assert [token async for event in stream for token in getattr(event, "token_ids", ())] == greedy(PROMPT, 100)


async def test_overflow_of_the_circuit_breaker_is_unavailable_and_leaves_the_others_alone(
    server: ServeProcess, tmp_path: Path
) -> None:
    async with behind(tmp_path, server, Door(route_timeout_s=0), max_requests=2) as envoy:
        channel = grpc.aio.insecure_channel(envoy.address())
        stub = stub_of(channel)
        calls = [stub.Generate(request_of(f"full-{index}", LONG)) for index in range(2)]
        for call in calls:
            assert (await call.read()).WhichOneof("event") == "started"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(request_of("one-too-many", 3)).read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "overflow" in str(refused.value.details())
        for call in calls:
            assert (await call.read()).WhichOneof("event") == "chunk"
            call.cancel()
        await channel.close()
        await is_idle(server)


async def test_cap_of_streams_holds_calls_back_and_the_deadline_frees_the_client(
    server: ServeProcess, tmp_path: Path
) -> None:
    """Beyond a proxy's cap a call hangs without an error: that is why clients set deadlines."""
    async with behind(tmp_path, server, Door(route_timeout_s=0, max_concurrent_streams=1)) as envoy:
        channel = grpc.aio.insecure_channel(envoy.address())
        stub = stub_of(channel)
        first = stub.Generate(request_of("holds", LONG))
        assert (await first.read()).WhichOneof("event") == "started"
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Generate(request_of("hangs", 3), timeout=0.5).read()
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        first.cancel()
        again = stub.Generate(request_of("after", 3), timeout=10)
        events = [event.WhichOneof("event") async for event in again]
        assert events[-1] == "done"
        await channel.close()


@pytest.mark.parametrize("upstream_s", [0.0, 1.0])
async def test_pings_of_clients_and_of_the_proxy_end_no_quiet_connection(
    server: ServeProcess, tmp_path: Path, upstream_s: float
) -> None:
    options = [("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_permit_without_calls", 1)]
    options += [("grpc.http2.max_pings_without_data", 0)]
    async with behind(tmp_path, server, Door(route_timeout_s=0), keepalive_s=upstream_s) as envoy:
        target = envoy.address() if upstream_s else server.address
        channel = grpc.aio.insecure_channel(target, options=options)
        await asyncio.wait_for(channel.channel_ready(), 10)
        seen = []

        async def watch() -> None:
            state = channel.get_state()
            while True:
                await channel.wait_for_state_change(state)
                state = channel.get_state()
                seen.append(state)

        watching = asyncio.create_task(watch())
        await asyncio.sleep(6.5)  # more pings than two strikes
        watching.cancel()
        assert seen == []
        events = stub_of(channel).Generate(request_of(f"pinged-{upstream_s}", 3))
        assert [event.WhichOneof("event") async for event in events][-1] == "done"
        await channel.close()


async def test_retries_of_the_proxy_admit_a_request_once(server: ServeProcess, tmp_path: Path) -> None:
    """Istio retries twice on `unavailable` and `cancelled` by default."""
    door = Door(route_timeout_s=0, retry_on="unavailable,cancelled,resource-exhausted")
    async with behind(tmp_path, server, door) as envoy:
        channel = grpc.aio.insecure_channel(envoy.address())
        stub = stub_of(channel)
        call = stub.Generate(request_of("once", LONG))
        assert (await call.read()).WhichOneof("event") == "started"
        async with Caller(server) as caller:
            # Aborted from elsewhere: the stream ends with what a proxy might take for a reason to try again.
            await caller.inference.Abort(inference_pb2.AbortRequest(request_id="once"))
            assert [one.WhichOneof("event") for one in await rest(call)][-2:] == ["finished", "done"]
            assert sum(group.num_running + group.num_waiting for group in (await caller.status()).groups) == 0
        assert envoy.count("cluster.upstream.upstream_rq_retry") == 0
        running = stub.Generate(request_of("again", LONG))
        assert (await running.read()).WhichOneof("event") == "started"
        with pytest.raises(grpc.aio.AioRpcError) as twice:
            await stub.Generate(request_of("again", 3)).read()
        assert twice.value.code() is grpc.StatusCode.ALREADY_EXISTS
        running.cancel()
        await channel.close()
        await is_idle(server)


async def test_large_errors_stay_whole_and_leave_the_connection_open(server: ServeProcess, tmp_path: Path) -> None:
    """Trailers of more than 8 KiB turn into RESOURCE_EXHAUSTED, of 70 KiB they end everybody's connection."""
    async with behind(tmp_path, server, Door(route_timeout_s=0)) as envoy:
        channel = grpc.aio.insecure_channel(envoy.address())
        stub = stub_of(channel)
        held = stub.Generate(request_of("beside", LONG))
        assert (await held.read()).WhichOneof("event") == "started"
        request = request_of("x" * 300, 3)
        request.sampling.stop.extend("é" * 200 for _ in range(2000))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(request).read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = dict(refused.value.trailing_metadata() or ())["grpc-status-details-bin"]
        assert len(details) + len(refused.value.details() or "") <= 4096
        assert (await held.read()).WhichOneof("event") == "chunk"
        held.cancel()
        await channel.close()


async def test_silent_health_watch_outlives_the_idle_timeout_of_the_proxy(server: ServeProcess, tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    async with behind(tmp_path, server, Door(route_timeout_s=0, stream_idle_timeout_s=12)) as envoy:
        channel = grpc.aio.insecure_channel(envoy.address())
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=INFERENCE))
        async with asyncio.timeout(30):
            for _ in range(2):  # the second comes 10 s later, of itself
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        await channel.close()


async def test_killed_server_is_transport_loss_also_behind_a_proxy(tmp_path: Path) -> None:
    with serving(*FLAGS) as server:
        async with behind(tmp_path, server, Door(route_timeout_s=0)) as envoy, client(envoy.address()) as one:
            stream = one.generate(token_ids=PROMPT, max_tokens=LONG, ignore_eos=True)
            async for event in stream:
                if getattr(event, "token_ids", ()):
                    server.signal(signal.SIGKILL)
                    break
            with pytest.raises(TransportLost):
                async for _ in stream:
                    pass


async def test_stop_with_grace_finishes_streams_and_moves_new_calls_to_the_other_server(tmp_path: Path) -> None:
    """The proxy asks for health; a server that drains is NOT_SERVING, and finishes what it has."""
    with serving(*FLAGS) as first, serving(*FLAGS) as second:
        cluster = Cluster(addresses=[first.address, second.address], health_service=INFERENCE, panic_threshold=0)
        async with asyncio.timeout(90), envoys(tmp_path, (Door(route_timeout_s=0), cluster)) as [envoy]:
            await until(lambda: envoy.count("cluster.upstream.membership_healthy") == 2, "both are healthy")
            channel = grpc.aio.insecure_channel(envoy.address())
            stub = stub_of(channel)
            running = [stub.Generate(request_of(f"drain-{index}", 150)) for index in range(4)]
            for call in running:
                assert (await call.read()).WhichOneof("event") == "started"
            first.signal(signal.SIGTERM)
            await until(lambda: envoy.count("cluster.upstream.membership_healthy") == 1, "the proxy has noticed")
            for index in range(4):
                ends = [event.WhichOneof("event") async for event in stub.Generate(request_of(f"new-{index}", 3))]
                assert ends[-1] == "done"
            for call in running:
                tokens = [token for event in await rest(call) for token in event.chunk.token_ids]
                assert tokens == greedy(PROMPT, 150)
            assert first.exit_code() == 0
            await channel.close()


async def test_only_server_that_is_not_serving_refuses_what_the_panic_threshold_sends_it(tmp_path: Path) -> None:
    """Below the threshold Envoy sends to hosts that it knows to be unhealthy: the server must say so itself."""
    with serving(*FLAGS) as server:
        async with behind(tmp_path, server, Door(route_timeout_s=0), health_service=INFERENCE) as envoy:
            await until(lambda: envoy.count("cluster.upstream.membership_healthy") == 1, "it is healthy")
            async with Caller(server) as caller:
                from maniple.v1 import admin_pb2

                await caller.admin.PauseGeneration(admin_pb2.PauseGenerationRequest())
                await until(lambda: envoy.count("cluster.upstream.membership_healthy") == 0, "the proxy has noticed")
                channel = grpc.aio.insecure_channel(envoy.address())
                stub = stub_of(channel)
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Generate(request_of("paused", 3)).read()
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
                assert "asleep" in str(refused.value.details()) or "paused" in str(refused.value.details())
                await caller.admin.ResumeGeneration(admin_pb2.ResumeGenerationRequest())
                await until(lambda: envoy.count("cluster.upstream.membership_healthy") == 1, "it is healthy again")
                assert [e.WhichOneof("event") async for e in stub.Generate(request_of("after", 3))][-1] == "done"
                await channel.close()


async def test_one_connection_of_a_client_is_spread_over_all_servers(tmp_path: Path) -> None:
    with serving(*FLAGS) as first, serving(*FLAGS) as second:
        cluster = Cluster(addresses=[first.address, second.address])
        async with asyncio.timeout(90), envoys(tmp_path, (Door(route_timeout_s=0), cluster)) as [envoy]:
            channel = grpc.aio.insecure_channel(envoy.address())
            stub = stub_of(channel)
            for index in range(20):
                assert [e.WhichOneof("event") async for e in stub.Generate(request_of(f"b-{index}", 2))][-1] == "done"
            await channel.close()
            assert sorted(envoy.requests_by_address().values()) == [10, 10]


async def test_drain_of_the_proxy_leaves_streams_alone(server: ServeProcess, tmp_path: Path) -> None:
    async with behind(tmp_path, server, Door(route_timeout_s=0)) as envoy, client(envoy.address()) as one:
        stream = one.generate(token_ids=PROMPT, max_tokens=100, ignore_eos=True, temperature=0.0)
        tokens: list[int] = []
        async for event in stream:
            tokens += getattr(event, "token_ids", ())
            if len(tokens) == 3:
                envoy.drain()
        assert tokens == greedy(PROMPT, 100)


async def test_old_connections_end_without_cutting_streams(server: ServeProcess, tmp_path: Path) -> None:
    door = Door(route_timeout_s=0, max_connection_duration_s=0.5)
    async with behind(tmp_path, server, door) as envoy, client(envoy.address()) as one:
        for _ in range(2):
            stream = one.generate(token_ids=PROMPT, max_tokens=60, ignore_eos=True, temperature=0.0)
            assert [t async for event in stream for t in getattr(event, "token_ids", ())] == greedy(PROMPT, 60)
