"""Clients reach servers through a real nginx: with docs/proxies/nginx.conf, and with the defaults that it replaces."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from maniple_client import TransportLost
from support.mesh_calls import FLAGS, LONG, PROMPT, client, is_idle, request_of, rest, stub_of, tokens_of
from support.nginx import nginx_before
from support.scripted_reference import greedy
from support.serve_process import Caller, ServeProcess, serving


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ServeProcess]]:
    with serving(*FLAGS) as first, serving(*FLAGS) as second:
        assert first.address != second.address
        yield [first, second]


async def test_gap_longer_than_the_read_timeout_ends_a_stream_and_frees_what_it_held(
    servers: list[ServeProcess], tmp_path: Path
) -> None:
    """What the default of 60 s does to a silent stream, at one second."""
    [server, _] = servers
    with nginx_before(tmp_path, [server.address], changes={"grpc_read_timeout": "1s"}) as address:
        async with Caller(server) as caller, client(address) as one, asyncio.timeout(60):
            stream = one.generate(token_ids=PROMPT, max_tokens=LONG, ignore_eos=True, temperature=0.0)
            await anext(stream)
            await caller.admin.PauseGeneration(admin_pb2.PauseGenerationRequest(mode=admin_pb2.PAUSE_MODE_KEEP))
            with pytest.raises(TransportLost):
                await stream.text()
            await caller.admin.ResumeGeneration(admin_pb2.ResumeGenerationRequest())
        await is_idle(server)


async def test_body_of_a_long_stream_of_requests_is_not_limited(servers: list[ServeProcess], tmp_path: Path) -> None:
    """The default counts all that a stream ever sends, so a KServe client is cut off after a megabyte."""
    for changes, is_cut in (({"client_max_body_size": None}, True), ({}, False)):
        kind = "default" if is_cut else "ours"
        with nginx_before(tmp_path / kind, [servers[0].address], changes=changes) as address:
            async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
                stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
                ended = await _answers(stub.ModelStreamInfer(_kserve_requests(24, 64 << 10)))
        assert (ended != 24) == is_cut, (kind, ended)


async def test_one_connection_of_a_client_is_spread_over_all_servers(
    servers: list[ServeProcess], tmp_path: Path
) -> None:
    before = [await _num_finished(one) for one in servers]
    with nginx_before(tmp_path, [one.address for one in servers]) as address:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
            stub = stub_of(channel)
            for index in range(20):
                heard = [event async for event in stub.Generate(request_of(f"nginx-{index}", 2))]
                assert tokens_of(heard) == greedy(PROMPT, 2)
    assert [await _num_finished(one) - old for one, old in zip(servers, before, strict=True)] == [10, 10]


async def test_many_streams_share_a_connection(servers: list[ServeProcess], tmp_path: Path) -> None:
    """Beyond the default of 128 the next stream would hang without an error."""
    with nginx_before(tmp_path, [servers[0].address]) as address:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
            stub = stub_of(channel)
            calls = [stub.Generate(request_of(f"many-{index}", LONG)) for index in range(140)]
            last = stub.Tokenize(inference_pb2.TokenizeRequest(text="x"), timeout=20)
            assert list((await last).token_ids) == [ord("x")]
            for call in calls:
                call.cancel()
    await is_idle(servers[0])


async def test_killed_server_is_transport_loss_and_new_calls_reach_the_other(
    servers: list[ServeProcess], tmp_path: Path
) -> None:
    with serving(*FLAGS) as doomed, nginx_before(tmp_path, [doomed.address, servers[1].address]) as address:
        async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(60):
            stub = stub_of(channel)
            calls = [stub.Generate(request_of(f"killed-{index}", 150)) for index in range(2)]
            for call in calls:
                assert (await call.read()).WhichOneof("event") == "started"
            doomed.signal(signal.SIGKILL)
            codes = []
            for call in calls:
                try:
                    assert tokens_of(await rest(call)) == greedy(PROMPT, 150)
                except grpc.aio.AioRpcError as error:
                    codes.append(error.code())
            # It resets the stream: the code of HTTP/2 that says so.
            assert codes in ([grpc.StatusCode.UNAVAILABLE], [grpc.StatusCode.INTERNAL]), codes
            for index in range(4):
                heard = [event async for event in stub.Generate(request_of(f"new-{index}", 3))]
                assert tokens_of(heard) == greedy(PROMPT, 3)


async def _num_finished(server: ServeProcess) -> int:
    async with grpc.aio.insecure_channel(server.address) as channel:
        status = await admin_pb2_grpc.AdminServiceStub(channel).GetStatus(admin_pb2.GetStatusRequest())
    return status.num_finished


async def _kserve_requests(count: int, size: int) -> AsyncIterator[service_pb2.ModelInferRequest]:
    """Small prompts with a large parameter that nobody reads: the id is given back as it is."""
    for index in range(count):
        request = service_pb2.ModelInferRequest(model_name="scripted", id=f"{index}")
        text = request.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text.contents.bytes_contents.append(b"x")
        sampling = request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
        said = {"max_tokens": 1, "ignore_eos": True, "temperature": 0}
        sampling.contents.bytes_contents.append(json.dumps(said).encode() + b" " * size)
        yield request


async def _answers(call: Any) -> int | grpc.StatusCode:
    """Count the good answers of a stream, or return how it ended."""
    count = 0
    try:
        async for response in call:
            assert not response.error_message, response.error_message
            count += response.infer_response.parameters["triton_final_response"].bool_param
    except grpc.aio.AioRpcError as error:
        return error.code()
    return count
