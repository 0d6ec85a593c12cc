"""Clients and proxies ping through long silences (cases B2): the connection stays, with every request on it.

By its defaults a server takes that for abuse and sends GOAWAY "too many pings" after some of them. The cases ping every
30 s, and every 10 s without calls, through a silence of 200 s; here it is every second, the fastest that gRPC pings.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator

import grpc
import pytest

from maniple.v1 import inference_pb2, inference_pb2_grpc
from support.faults import model_with
from support.scripted_reference import greedy
from support.serve_process import Caller, serving

SILENCE_S = 5.0  # a server with defaults loses its patience at the fourth
PROMPT = [5, 250, 17, 0, 5]
GET_MODEL = inference_pb2.GetModelRequest()


def connect(address: str) -> grpc.aio.Channel:
    """Return a channel that pings every second, with a connection of its own."""
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return grpc.aio.insecure_channel(address, options=options)


async def break_of(channel: grpc.aio.Channel) -> None:
    """Return when the connection that stands does not stand any more."""
    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def ask_through_silence(address: str) -> None:
    """Make a request whose one token takes so long."""
    async with connect(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.GetModel(GET_MODEL)
        broken = asyncio.create_task(break_of(channel))
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 1}
        request = inference_pb2.GenerateRequest(token_ids={"ids": PROMPT}, sampling=sampling)
        token_ids: list[int] = []
        async for response in stub.Generate(request):
            token_ids += response.chunk.token_ids
        assert token_ids == greedy(PROMPT, 1)
        await stub.GetModel(GET_MODEL)
        assert not broken.done(), "the connection was ended on the way"
        broken.cancel()


async def idle_through_silence(address: str) -> None:
    """Keep a connection without calls for so long."""
    async with connect(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        await stub.GetModel(GET_MODEL)
        broken = asyncio.create_task(break_of(channel))
        await asyncio.sleep(SILENCE_S)
        await stub.GetModel(GET_MODEL)
        assert not broken.done(), "the connection was ended meanwhile"
        broken.cancel()


async def lose_patience() -> None:
    """The control: a server with gRPC's defaults ends the connection of the same client."""

    async def silent(request: bytes, context: object) -> AsyncIterator[bytes]:
        await asyncio.sleep(2 * SILENCE_S)
        yield b""

    server = grpc.aio.server()
    handlers = {"Silent": grpc.unary_stream_rpc_method_handler(silent)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("control", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with connect(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"(?i)too many pings"):
            async for _ in channel.unary_stream("/control/Silent")(b""):
                pass
    await server.stop(0)


async def test_request_and_connection_stay_through_pings_and_silence() -> None:
    with serving("--model", model_with(step_time_per_token_s=SILENCE_S / len(PROMPT)), "--executor", "uni") as server:
        address = server.address
        async with asyncio.timeout(60):
            await asyncio.gather(ask_through_silence(address), idle_through_silence(address), lose_patience())
            async with Caller(server) as caller:
                await caller.status()
                assert (await caller.generate("next", [7], 1).end()).token_ids == greedy([7], 1)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
