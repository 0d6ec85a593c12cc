"""One request with a path that is no text: grpc.aio's own server ends, ours goes on."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from service_chassis.server import bind, make_server
from support.fuzz_frames import headers_frame, settings_frame
from support.waiting import until

_BAD_PATH = b"/x\xae/y"
_GOAWAY = 7


def handlers(gate: asyncio.Event) -> list[grpc.GenericRpcHandler]:
    async def echo(request: bytes, context: Any) -> bytes:
        return request

    async def count(request: bytes, context: Any) -> AsyncIterator[bytes]:
        yield b"1"
        await gate.wait()
        yield b"2"

    methods: dict[str, Any] = {
        "Echo": grpc.unary_unary_rpc_method_handler(echo),
        "Count": grpc.unary_stream_rpc_method_handler(count),
    }
    return [grpc.method_handlers_generic_handler("t.T", methods)]


@asynccontextmanager
async def serving(address: str) -> AsyncIterator[tuple[grpc.aio.Server, str, asyncio.Event]]:
    gate = asyncio.Event()
    server = make_server(1 << 20)
    server.add_generic_rpc_handlers(handlers(gate))
    bound = bind(server, address)
    await server.start()
    try:
        yield server, bound, gate
    finally:
        await server.stop(None)


def connected(address: str) -> grpc.aio.Channel:
    """Connect, and again at once where nobody listens for a moment."""
    return grpc.aio.insecure_channel(address, options=[("grpc.initial_reconnect_backoff_ms", 20)])


async def send_bad_path(address: str) -> None:
    """Say it by hand, since no library would; and see that it arrived: the connection is asked to go away."""
    if address.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
    else:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(settings_frame() + headers_frame(_BAD_PATH))
    kind = None
    async with asyncio.timeout(10):
        while kind != _GOAWAY:
            head = await reader.readexactly(9)
            kind = head[3]
            await reader.readexactly(int.from_bytes(head[:3]))
    writer.close()


async def echo(channel: grpc.aio.Channel, text: bytes) -> bytes:
    """Call once more where the call crossed with the change: it may reach the old server when that takes none."""
    for _ in range(2):
        try:
            answer: bytes = await channel.unary_unary("/t.T/Echo")(text, timeout=10, wait_for_ready=True)
            return answer
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.CANCELLED:
                raise
    raise AssertionError("cancelled twice")


@pytest.fixture(params=["tcp", "unix"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/s.sock"


async def test_server_serves_on_at_its_address_after_a_path_that_is_no_text(address: str) -> None:
    async with serving(address) as (_, bound, _), connected(bound) as channel:
        for number in range(3):
            assert await echo(channel, b"%d" % number) == b"%d" % number
            await send_bad_path(bound)
        assert await echo(channel, b"still") == b"still"


async def test_calls_that_run_go_on_and_end_with_the_server(address: str) -> None:
    async with serving(address) as (server, bound, gate), connected(bound) as channel:
        first, second = (channel.unary_stream("/t.T/Count")(b"") for _ in range(2))
        assert [await first.read(), await second.read()] == [b"1", b"1"]
        await send_bad_path(bound)
        assert await echo(channel, b"new") == b"new"
        gate.set()
        assert await first.read() == b"2"
        assert await first.read() is grpc.aio.EOF
        gate.clear()
        third = channel.unary_stream("/t.T/Count")(b"")
        assert await third.read() == b"1"
        assert await second.read() == b"2"
        await send_bad_path(bound)
        await server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError):
            await third.read()


async def test_stopping_waits_for_calls_of_a_retired_server_as_long_as_it_may(address: str) -> None:
    async with serving(address) as (server, bound, gate), connected(bound) as channel:
        call = channel.unary_stream("/t.T/Count")(b"")
        assert await call.read() == b"1"
        await send_bad_path(bound)
        assert await echo(channel, b"new") == b"new"
        stopping = asyncio.create_task(server.stop(30.0))
        await until(lambda: not _answers(bound), "it listens no more")
        assert not stopping.done()
        gate.set()
        assert await call.read() == b"2"
        async with asyncio.timeout(10):
            await stopping


def _answers(address: str) -> bool:
    unix = address.startswith("unix:")
    with socket.socket(socket.AF_UNIX if unix else socket.AF_INET) as probe:
        host, _, port = address.rpartition(":")
        return probe.connect_ex(address.removeprefix("unix:") if unix else (host, int(port))) == 0
