"""gRPC's four kinds of handlers: what one runs, and how to make one of a kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["grpc.RpcMethodHandler[Any, Any] | None"]]


def maker_of(*, request_streaming: bool, response_streaming: bool) -> Callable[..., grpc.RpcMethodHandler[Any, Any]]:
    """Return grpc's function that makes a handler of a kind."""
    makers: dict[tuple[bool, bool], Callable[..., grpc.RpcMethodHandler[Any, Any]]] = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }
    return makers[request_streaming, response_streaming]


def maker_like(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[..., grpc.RpcMethodHandler[Any, Any]]:
    """Return grpc's function that makes a handler of the kind of ``handler``."""
    return maker_of(request_streaming=handler.request_streaming, response_streaming=handler.response_streaming)


def behaviour_of(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[Any, Any], Any]:
    """Return what a handler runs, of its four fields the one that is set."""
    behaviour: Any = (
        (handler.stream_stream if handler.request_streaming else handler.unary_stream)
        if handler.response_streaming
        else (handler.stream_unary if handler.request_streaming else handler.unary_unary)
    )
    found: Callable[[Any, Any], Any] = behaviour
    return found
