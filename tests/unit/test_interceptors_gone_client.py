"""A call that ends while its handler still answers is no error of ours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc._cython import cygrpc

from service_chassis.errors import DeadlineExceeded
from service_chassis.interceptors import StreamErrorInterceptor, UnaryErrorInterceptor, readable


class GoneContext:
    """Of a call that grpc has finished: nothing can be sent any more."""

    async def write(self, message: object) -> None:
        raise grpc.aio.InternalError("execute_batch")

    async def abort(self, code: object, details: str, trailers: object) -> None:
        raise grpc.aio.InternalError("execute_batch")


async def answer_of(interceptor: Any, handler: Any) -> Any:
    async def continuation(details: object) -> Any:
        return handler

    class Details:
        method = "/test.Service/Method"

    return await interceptor.intercept_service(continuation, Details())


async def fails(request: object, context: object) -> None:
    raise DeadlineExceeded("the deadline of the request passed")


async def fails_in_stream(request: object, context: object) -> AsyncIterator[object]:
    raise DeadlineExceeded("the deadline of the request passed")
    yield


async def streams(request: object, context: object) -> AsyncIterator[object]:
    while True:
        yield object()


@pytest.mark.parametrize("behaviour", [fails_in_stream, streams])
async def test_stream_whose_client_is_gone_ends_as_cancelled_and_logs_nothing(behaviour: Any, capsys: Any) -> None:
    made: Any = grpc.unary_stream_rpc_method_handler(behaviour)
    handler = await answer_of(StreamErrorInterceptor(1000), made)
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_stream(object(), GoneContext())
    assert "crashed" not in "".join(capsys.readouterr())


async def test_unary_whose_client_is_gone_ends_as_cancelled() -> None:
    handler = await answer_of(UnaryErrorInterceptor(1000), grpc.unary_unary_rpc_method_handler(fails))
    with pytest.raises(asyncio.CancelledError):
        await handler.unary_unary(object(), GoneContext())


async def test_stream_of_requests_ends_where_our_own_server_stops() -> None:
    async def requests() -> AsyncIterator[bytes]:
        yield b"first"
        raise cygrpc._ServerStoppedError("Server already stopped.")

    assert [request async for request in readable(requests())] == [b"first"]
