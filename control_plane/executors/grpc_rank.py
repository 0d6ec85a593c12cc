"""Reach one rank over gRPC: calls and the Steps stream on one connection, health on another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from control_plane.executors.rpc_errors import error_of_call
from maniple.v1 import rank_health_pb2, rank_health_pb2_grpc, worker_pb2, worker_pb2_grpc
from service_chassis.channels import Connection
from service_chassis.ids import Rank
from service_chassis.tls import ClientTls

_METHODS = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"].methods
_UNARY_METHODS = frozenset(
    method.name for method in _METHODS if not (method.client_streaming or method.server_streaming)
)
_PARTS_METHODS = frozenset(
    method.name for method in _METHODS if method.server_streaming and not method.client_streaming
)


def check_unary(method: str) -> None:
    """Raise ``ValueError`` unless ``method`` is a unary call of WorkerService."""
    if method not in _UNARY_METHODS:
        raise ValueError(f"{method} is not a unary call of WorkerService")


def check_parts(method: str) -> None:
    """Raise ``ValueError`` unless ``method`` is a call of WorkerService that answers in parts."""
    if method not in _PARTS_METHODS:
        raise ValueError(f"{method} is not a call of WorkerService that answers in parts")


def channel_options(max_message_bytes: int) -> list[tuple[str, int]]:
    """Return the options of a channel to a rank."""
    return [
        # Channels with equal arguments share one connection otherwise, and the two would be silent together.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Pings find a dead TCP peer for the transport's sake; the heartbeats of the protocol decide about a rank.
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A rank that is just starting, or a broken connection, is tried again at once; the default waits a second.
        ("grpc.initial_reconnect_backoff_ms", 20),
        ("grpc.min_reconnect_backoff_ms", 500),
        ("grpc.max_reconnect_backoff_ms", 100),
        # Workers are never behind the proxy that the environment names for the rest of the world.
        ("grpc.enable_http_proxy", 0),
    ]


class GrpcRank:
    """One rank at an address. Made inside the event loop that uses it."""

    def __init__(
        self, rank: Rank, target: str, health_target: str, *, max_message_bytes: int, tls: ClientTls | None = None
    ) -> None:
        self.rank = rank
        self.target = target
        options = channel_options(max_message_bytes)
        self._worker = Connection(target, options, tls, worker_pb2_grpc.WorkerServiceStub)
        self._health = Connection(health_target, options, tls, rank_health_pb2_grpc.RankHealthServiceStub)

    async def call(self, method: str, request: Message, *, timeout_s: float, wait_for_ready: bool = False) -> Message:
        """Call a unary method; raises as ``Executor.call``."""
        check_unary(method)
        try:
            reply = await getattr(self._worker.stub, method)(request, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from None
        return cast("Message", reply)

    async def stream(self, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        """Call a method that answers in parts; raises as ``Executor.stream``."""
        check_parts(method)
        call = getattr(self._worker.stub, method)(request, timeout=timeout_s)
        try:
            async for part in call:
                yield part
        except grpc.aio.AioRpcError as error:
            raise error_of_call(error) from None
        finally:
            call.cancel()

    async def open_steps(self) -> GrpcStepsConnection:
        """Open a Steps stream. The connection itself is made by the first write."""
        return GrpcStepsConnection(self._worker.stub.Steps())

    async def watch_health(self, epoch: int, idle_interval_s: float) -> AsyncIterator[rank_health_pb2.RankReport]:
        """Yield reports until the connection breaks."""
        request = rank_health_pb2.WatchRequest(epoch=epoch, idle_interval_ms=int(idle_interval_s * 1000))
        call = self._health.stub.Watch(request)
        try:
            async for response in call:
                yield response.report
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
        finally:
            call.cancel()
        raise ConnectionError("the rank ended its health stream")

    async def close(self) -> None:
        """Close both connections at once."""
        await asyncio.gather(self._worker.close(), self._health.close())


class GrpcStepsConnection:
    """A ``StepsConnection`` over gRPC. One task reads, one writes."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def write(self, message: worker_pb2.StepsRequest) -> None:
        """Send; see ``StepsConnection``."""
        try:
            await self._call.write(message)
        except grpc.aio.AioRpcError as error:
            raise ConnectionError(f"{error.code().name}: {error.details()}") from None
        except asyncio.InvalidStateError:  # the call ended before; the reader learns how
            raise ConnectionError("the stream has ended") from None
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            raise ConnectionError("the stream was closed") from None

    async def read(self) -> worker_pb2.StepsResponse | None:
        """Return the next message; see ``StepsConnection``."""
        try:
            message = await self._call.read()
        except grpc.aio.AioRpcError as error:
            failure = error_of_call(error)
            raise ConnectionError(str(failure)) if isinstance(failure, TimeoutError) else failure from None
        except asyncio.CancelledError:
            if _is_being_cancelled():
                raise
            raise ConnectionError("the stream was closed") from None
        return None if message is grpc.aio.EOF else cast("worker_pb2.StepsResponse", message)

    async def close(self) -> None:
        """End the stream; what was written and is still in a buffer may be lost."""
        self._call.cancel()


def _is_being_cancelled() -> bool:
    """Tell a cancellation of this task from the CancelledError that grpc raises for a call that close() ended."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
