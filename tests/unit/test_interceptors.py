"""Servers of ours against a plain gRPC client: what travels is what counts here."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from maniple.v1 import worker_pb2
from service_chassis.errors import ConfigurationError, InvalidParameter, QueueFull
from service_chassis.reflection import add_reflection
from service_chassis.server import bind, make_server
from support.logs import captured_log

LIMIT = 1000
SERVICE = "test.Echo"
Request, Response = worker_pb2.LeaveRequest, worker_pb2.LoadModelResponse


class Echo:
    """Four kinds of calls; ``reason`` of the request says how they end."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    def _maybe_fail(self, reason: str) -> None:
        if reason == "invalid":
            raise InvalidParameter("top_p", 7, "must be in (0, 1]")
        if reason == "full":
            raise QueueFull("come again", retry_after_s=1.5)
        if reason == "crash":
            raise RuntimeError("the secret prompt")

    async def unary(self, request: Request, context: Any) -> Response:
        self._maybe_fail(request.reason)
        return Response(duration_s=request.epoch)

    async def stream(self, request: Request, context: Any) -> AsyncIterator[Response]:
        try:
            yield Response(duration_s=1)
            self._maybe_fail(request.reason)
            if request.reason == "forever":
                while True:
                    yield Response(duration_s=2)
                    await asyncio.sleep(0)
        finally:
            self.closed.set()

    async def collect(self, requests: AsyncIterator[Request], context: Any) -> Response:
        total = 0
        async for request in requests:
            self._maybe_fail(request.reason)
            total += request.epoch
        return Response(duration_s=total)

    async def chat(self, requests: AsyncIterator[Request], context: Any) -> AsyncIterator[Response]:
        async for request in requests:
            self._maybe_fail(request.reason)
            yield Response(duration_s=request.epoch)


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Echo, grpc.aio.Channel]]:
    echo = Echo()
    server = make_server(LIMIT)
    kinds: dict[str, tuple[Callable[..., Any], Any]] = {
        "Unary": (grpc.unary_unary_rpc_method_handler, echo.unary),
        "Stream": (grpc.unary_stream_rpc_method_handler, echo.stream),
        "Collect": (grpc.stream_unary_rpc_method_handler, echo.collect),
        "Chat": (grpc.stream_stream_rpc_method_handler, echo.chat),
    }
    handlers = {
        name: make(handler, request_deserializer=Request.FromString, response_serializer=Response.SerializeToString)
        for name, (make, handler) in kinds.items()
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    add_reflection(server, [SERVICE])
    address = bind(server, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield echo, channel
    await server.stop(None)


def method(channel: grpc.aio.Channel, name: str) -> Any:
    make = {
        "Unary": channel.unary_unary,
        "Stream": channel.unary_stream,
        "Collect": channel.stream_unary,
        "Chat": channel.stream_stream,
    }[name]
    return make(f"/{SERVICE}/{name}", request_serializer=lambda raw: raw, response_deserializer=Response.FromString)


async def call(channel: grpc.aio.Channel, name: str, raw: bytes) -> list[float]:
    """Send ``raw`` bytes as the request(s); return what came back."""
    request: Any = iter([raw]) if name in ("Collect", "Chat") else raw
    answer = method(channel, name)(request)
    if name in ("Unary", "Collect"):
        return [(await answer).duration_s]
    return [response.duration_s async for response in answer]


def status_of(error: grpc.aio.AioRpcError) -> status_pb2.Status:
    trailers = dict(error.trailing_metadata() or ())
    return status_pb2.Status.FromString(trailers["grpc-status-details-bin"])


ALL = ["Unary", "Stream", "Collect", "Chat"]


@pytest.mark.parametrize("name", ALL)
async def test_known_error_travels_with_its_details(name: str) -> None:
    async with serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, name, Request(reason="invalid").SerializeToString())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == "top_p=7: must be in (0, 1]"
        status = status_of(caught.value)
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        assert status.details[0].Unpack(info)
        assert status.details[1].Unpack(bad)
        assert (info.reason, info.domain) == ("INVALID_PARAMETER", "maniple.dev")
        assert bad.field_violations[0].field == "top_p"
        assert await call(channel, "Unary", Request(epoch=3).SerializeToString()) == [3]


async def test_full_queue_carries_retry_info() -> None:
    async with serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, "Unary", Request(reason="full").SerializeToString())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        retry = error_details_pb2.RetryInfo()
        assert status_of(caught.value).details[1].Unpack(retry)
        assert retry.retry_delay.ToMilliseconds() == 1500


@pytest.mark.parametrize("name", ALL)
async def test_unknown_exception_becomes_an_incident_without_its_text(name: str) -> None:
    with captured_log() as log:
        async with serving() as (_, channel):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(channel, name, Request(reason="crash").SerializeToString())
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    info = error_details_pb2.ErrorInfo()
    assert status_of(caught.value).details[0].Unpack(info)
    incident = info.metadata["incident_id"]
    assert incident
    assert incident in caught.value.details()
    assert "secret" not in caught.value.details()
    logged = log.getvalue()
    assert logged.count("RuntimeError: the secret prompt") == 1
    assert incident in logged


@pytest.mark.parametrize("name", ALL)
async def test_malformed_message_is_the_clients_fault_and_the_channel_lives(name: str) -> None:
    async with serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, name, b"\xff\xff\xff\xff")
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "maniple.v1.LeaveRequest" in caught.value.details()
        assert "not a well-formed protobuf message" in caught.value.details()
        assert await call(channel, name, Request(epoch=3).SerializeToString()) != []


@pytest.mark.parametrize("name", ALL)
async def test_message_over_the_limit_names_the_limit_and_the_channel_lives(name: str) -> None:
    async with serving() as (_, channel):
        too_long = Request(reason="x" * (LIMIT + 1)).SerializeToString()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(channel, name, too_long)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "at most 1000 bytes" in caught.value.details()
        assert await call(channel, name, Request(epoch=3).SerializeToString()) != []


async def test_cancelled_stream_closes_its_handler_at_once() -> None:
    async with serving() as (echo, channel):
        answer = method(channel, "Stream")(Request(reason="forever").SerializeToString())
        assert (await anext(aiter(answer))).duration_s == 1
        answer.cancel()
        async with asyncio.timeout(2):
            await echo.closed.wait()


async def test_stream_answers_before_its_error_arrive() -> None:
    async with serving() as (_, channel):
        answer = method(channel, "Stream")(Request(reason="invalid").SerializeToString())
        responses = aiter(answer)
        assert (await anext(responses)).duration_s == 1
        with pytest.raises(grpc.aio.AioRpcError):
            await anext(responses)


async def test_reflection_answers_in_both_versions_with_its_own_descriptors() -> None:
    from grpc_reflection.v1alpha import reflection_pb2

    async with serving() as (_, channel):
        for version in ("v1", "v1alpha"):
            service = f"grpc.reflection.{version}.ServerReflection"
            ask = channel.stream_stream(
                f"/{service}/ServerReflectionInfo",
                request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
                response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
            )
            requests = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol=service),
            ]
            listed, described = [answer async for answer in ask(iter(requests))]
            names = {entry.name for entry in listed.list_services_response.service}
            assert names == {SERVICE, "grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection"}
            assert len(described.file_descriptor_response.file_descriptor_proto) == 1


async def test_bind_says_why_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} is in use by another process"):
            bind(make_server(LIMIT), f"127.0.0.1:{port}")
    with pytest.raises(ConfigurationError, match="the directory /nowhere does not exist"):
        bind(make_server(LIMIT), "unix:/nowhere/x.sock")
    with pytest.raises(ConfigurationError, match="at most 107 bytes"):
        bind(make_server(LIMIT), "unix:/tmp/" + "x" * 120)


async def test_taken_port_is_told_by_our_sentence_alone(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for host in ("127.0.0.1", "localhost", "0.0.0.0"):
            with pytest.raises(ConfigurationError, match="is in use by another process"):
                bind(make_server(LIMIT), f"{host}:{taken.getsockname()[1]}")
    assert capfd.readouterr().err == ""  # where grpc's own line would be


async def test_port_whose_connections_linger_is_bound() -> None:
    with socket.socket() as earlier:
        earlier.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as grpc's own
        earlier.bind(("127.0.0.1", 0))
        earlier.listen()
        port = earlier.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = earlier.accept()
            accepted.close()  # the side that closes first waits in TIME_WAIT
            assert client.recv(1) == b""
    assert bind(make_server(LIMIT), f"127.0.0.1:{port}") == f"127.0.0.1:{port}"


@pytest.mark.parametrize("where", ["127.0.0.1:0", "unix:{}/x.sock"])
async def test_address_of_a_living_server_is_refused(where: str, tmp_path: Path) -> None:
    first = make_server(LIMIT)
    address = bind(first, where.format(tmp_path))
    await first.start()
    with pytest.raises(ConfigurationError, match="is in use by another process"):
        bind(make_server(LIMIT), address)
    await first.stop(None)


async def test_socket_that_a_killed_server_left_is_taken_over(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "x.sock"))  # and never listens again
    server = make_server(LIMIT)
    assert bind(server, f"unix:{tmp_path}/x.sock") == f"unix:{tmp_path}/x.sock"
    await server.stop(None)
