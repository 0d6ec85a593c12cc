"""Put gRPC in front of a rank: the passing on of messages, and who may have a snapshot."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from maniple.v1 import worker_pb2
from service_chassis.errors import WrongState
from service_chassis.method_handlers import maker_of
from worker_service.rank import Rank
from worker_service.snapshot import peer_refusal

_SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


def worker_service_handler(rank: Rank) -> grpc.GenericRpcHandler:
    """Return the handler of WorkerService.

    The calls of a rank are named after the protocol's and take and return its messages, so the table is made from the
    service's descriptor: a call that is added to the protocol and not to the rank fails when the server starts.
    """
    methods = {method.name: _handler(method, rank) for method in _SERVICE.methods}
    return grpc.method_handlers_generic_handler(_SERVICE.full_name, methods)


def _handler(method: MethodDescriptor, rank: Rank) -> grpc.RpcMethodHandler[Any, Any]:
    answer: Callable[[Any], Any] = rank.method(method.name)
    if method.name == "Snapshot":
        respond: Callable[[Any, Any], Any] = _guarded_snapshot(rank)
    else:
        respond = _streaming(answer) if method.server_streaming else _unary(answer)
    make = maker_of(request_streaming=method.client_streaming, response_streaming=method.server_streaming)
    return make(
        respond,
        request_deserializer=GetMessageClass(method.input_type).FromString,
        response_serializer=_serialize,
    )


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _unary(answer: Callable[[Any], Awaitable[Message]]) -> Callable[[Any, Any], Awaitable[Message]]:
    async def respond(request: Any, context: Any) -> Message:
        return await answer(request)

    return respond


def _streaming(answer: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    # The interceptor iterates what this returns and closes it when the call ends.
    def respond(request: Any, context: Any) -> Any:
        return answer(request)

    return respond


def _guarded_snapshot(rank: Rank) -> Callable[[Any, Any], Any]:
    allow_plaintext = rank.config.allow_plaintext_snapshot

    def respond(request: Any, context: Any) -> Any:
        refusal = peer_refusal(
            context.peer(),
            encrypted=b"ssl" in context.auth_context().get("transport_security_type", ()),
            allow_plaintext=allow_plaintext,
        )
        if refusal:
            raise WrongState(refusal)
        return rank.snapshot(request)

    return respond
