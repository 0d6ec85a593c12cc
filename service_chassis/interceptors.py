"""Turn exceptions into gRPC statuses, and unreadable requests into INVALID_ARGUMENT, for every service of a server.

``ManipleError`` becomes its row of the one table, with google.rpc details in the trailers. Anything else becomes
INTERNAL with an incident id: its text stays in the log, with the traceback, once. Cancellation is never swallowed.

grpc answers a request that its deserializer cannot read with INTERNAL, and one over the transport's limit with
RESOURCE_EXHAUSTED, both before any handler runs. A client can repair neither from such a status. So the deserializers
are wrapped: they never raise, but return what is wrong, and the handler's wrapper raises that as INVALID_ARGUMENT.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf.message import DecodeError
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from service_chassis.errors import InternalError, InvalidParameter, ManipleError
from service_chassis.method_handlers import Continuation, behaviour_of, maker_like
from service_chassis.telemetry import get_logger

# Handlers are generic over protobuf types that grpc itself does not know; Any is honest here.
Handler = Callable[[Any, "grpc.aio.ServicerContext[Any, Any]"], Any]
Deserializer = Callable[[bytes], Any]

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
_DETAILS_KEY = "grpc-status-details-bin"  # where every language's grpc status library looks for google.rpc.Status


@dataclass(frozen=True, slots=True)
class _Unreadable:
    """Stands where the request would be."""

    error: ManipleError


def error_interceptors(max_message_bytes: int) -> list[grpc.aio.ServerInterceptor]:
    """Return the interceptors that every server of ours has, outermost first."""
    return [UnaryErrorInterceptor(max_message_bytes), StreamErrorInterceptor(max_message_bytes)]


class UnaryErrorInterceptor(grpc.aio.ServerInterceptor):
    """Serve the calls that have one answer."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler.response_streaming:
            return handler
        method = handler_call_details.method
        behaviour = behaviour_of(handler)

        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await behaviour(readable(request), context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:
                await _abort(context, method, error)

        return _rebuilt(handler, answer, self._max_message_bytes)


class StreamErrorInterceptor(grpc.aio.ServerInterceptor):
    """Serve the calls that answer with a stream."""

    def __init__(self, max_message_bytes: int) -> None:
        self._max_message_bytes = max_message_bytes

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None or not handler.response_streaming:
            return handler
        method = handler_call_details.method
        behaviour = behaviour_of(handler)

        # Writes by itself instead of yielding: a cancellation that arrives during a write is then raised here, and the
        # handler's generator is closed at once, not when the collector finds it. What it holds (rows, blocks) goes.
        async def answer(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            try:
                responses = behaviour(readable(request), context)
                if inspect.isawaitable(responses):  # a handler that writes by itself, such as the health service's
                    await responses
                    return
                async with aclosing(responses):
                    async for response in responses:
                        await context.write(response)
            except grpc.aio.AbortError:
                raise
            except grpc.aio.InternalError:
                _client_is_gone()
            except Exception as error:
                await _abort(context, method, error)

        return _rebuilt(handler, answer, self._max_message_bytes)


def readable(request: Any) -> Any:
    """Return the request, or raise what is wrong with it. A stream of requests raises when the bad one is read."""
    if isinstance(request, _Unreadable):
        raise request.error
    if hasattr(request, "__aiter__"):
        return _readable_stream(request)
    return request


async def _readable_stream(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    try:
        async for request in requests:
            if isinstance(request, _Unreadable):
                raise request.error
            yield request
    except cygrpc._ServerStoppedError:
        return  # raised where our own server stops while a stream is read: nothing more comes, as from a lost client


def checked_deserializer(deserialize: Deserializer, max_message_bytes: int) -> Deserializer:
    """Wrap a protobuf deserializer so that it returns what is wrong with a message instead of raising."""
    owner = getattr(deserialize, "__self__", None)  # FromString is bound to the message class
    name = getattr(getattr(owner, "DESCRIPTOR", None), "full_name", "message")

    def checked(data: bytes) -> Any:
        if len(data) > max_message_bytes:
            rule = f"a message may have at most {max_message_bytes} bytes"
            return _Unreadable(InvalidParameter(name, f"{len(data)} bytes", rule))
        try:
            return deserialize(data)
        except (DecodeError, UnicodeDecodeError, ValueError):
            return _Unreadable(InvalidParameter(name, f"{len(data)} bytes", "is not a well-formed protobuf message"))

    return checked


def _rebuilt(
    handler: grpc.RpcMethodHandler[Any, Any], answer: Handler, max_message_bytes: int
) -> grpc.RpcMethodHandler[Any, Any]:
    deserialize = handler.request_deserializer
    return maker_like(handler)(
        answer,
        request_deserializer=checked_deserializer(deserialize, max_message_bytes) if deserialize else None,
        response_serializer=handler.response_serializer,
    )


def as_maniple_error(error: Exception, **facts: object) -> ManipleError:
    """Return the table's error for any exception. Logs an unknown one, with its traceback, under an incident id."""
    if isinstance(error, ManipleError):
        return error
    internal = InternalError()
    get_logger().error("call.crashed", incident_id=internal.incident_id, exc_info=error, **facts)
    return internal


async def _abort(context: grpc.aio.ServicerContext[Any, Any], method: str, error: Exception) -> NoReturn:
    status = as_maniple_error(error, method=method).status()
    trailers = ((_DETAILS_KEY, status.SerializeToString()),)
    try:
        await context.abort(_STATUS_CODES[status.code], status.message, trailers)
    except grpc.aio.InternalError:
        _client_is_gone()
    raise AssertionError("abort raises")


def _client_is_gone() -> NoReturn:
    """End a handler whose call is over.

    grpc refuses to write to it and would log that as an error of ours. It is none: a client's deadline and the engine's
    often pass in the same millisecond. Cancellation is what grpc itself tells a handler a moment later.
    """
    raise asyncio.CancelledError("the call is over")
