"""Answer for a group that another control plane has, by asking that one (PROTOCOL C7).

A control plane without a group of its own may so be ready: whichever of them a name resolves to, a client is served.
The messages are passed on as bytes, unread. A call is relayed once: two control planes that each believe the other to
be the owner refuse it instead of handing it to and fro.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

import grpc

from service_chassis.auth import RELAYED_CALLER_KEY, RELAYED_KEY, current_caller
from service_chassis.channels import Connection
from service_chassis.errors import Cancelled
from service_chassis.method_handlers import Continuation
from service_chassis.telemetry import get_logger
from service_chassis.tls import ClientTls
from service_chassis.watched_files import WatchedFiles

log = get_logger()

_PASSED_ON = ("traceparent", "tracestate", "authorization")
_DETAILS_KEY = "grpc-status-details-bin"

Context = grpc.aio.ServicerContext[Any, Any]


class KnowsOwner(Protocol):
    """Who says where to relay to; see ``Fleet``."""

    @property
    def relay_address(self) -> str:
        """Where the owner answers; empty while calls are answered here."""


class OwnerChannels:
    """Connections to other control planes."""

    def __init__(
        self, *, max_message_bytes: int, tls: ClientTls | None = None, token: WatchedFiles[str] | None = None
    ) -> None:
        """Connect lazily; ``token`` is the bearer token of a control plane, where they know each other by one."""
        self._max_message_bytes = max_message_bytes
        self._tls = tls
        self._token = token
        self._connections: dict[str, Connection[grpc.aio.Channel]] = {}  # by owner's address; there are few owners

    def to(self, address: str) -> grpc.aio.Channel:
        """Return the connection to an address, a new one where there is none."""
        if address not in self._connections:
            options = [
                ("grpc.max_receive_message_length", self._max_message_bytes),
                ("grpc.max_send_message_length", -1),
                # An owner that was stopped breaks no connection, and another one may have the group by then.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.max_pings_without_data", 0),
            ]
            self._connections[address] = Connection(address, options, self._tls, lambda channel: channel)
        return self._connections[address].stub

    def in_the_name_of(self, identity: str) -> list[tuple[str, str | bytes]]:
        """Return the metadata of a call for somebody whom this control plane knows; nobody where it knows none."""
        metadata: list[tuple[str, str | bytes]] = [(RELAYED_KEY, "1")]
        if identity:
            metadata.append((RELAYED_CALLER_KEY, identity.encode()))
        if self._token is not None:
            metadata.append(("authorization", f"Bearer {self._token.present()[0]}"))
        return metadata

    async def close(self) -> None:
        """Close the connections."""
        for connection in self._connections.values():
            await connection.close()


class Relay(grpc.aio.ServerInterceptor):
    """Passes calls of some services on to the owner while there is no group here."""

    def __init__(
        self,
        fleet: KnowsOwner,
        services: Collection[str],
        channels: OwnerChannels,
        *,
        answered_here: Collection[str] = (),
        endless: Collection[str] = (),
    ) -> None:
        """Pass the methods of ``services`` on, but for those that are ``answered_here`` whatever happens.

        Nobody waits for the end of those that are ``endless``, nor for that of a stream of requests.
        """
        self.num_relayed: Counter[str] = Counter()  # calls, by method
        self._fleet = fleet
        self._services = frozenset(services)
        self._answered_here = frozenset(answered_here)
        self._endless = frozenset(endless)
        self._channels = channels
        self._open: set[Any] = set()  # calls to owners
        self._cut: set[Any] = set()  # those of them that we ended
        self._awaited: set[Any] = set()  # those of them that come to an end
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def drain(self, timeout_s: float) -> None:
        """Wait for the calls that are being passed on; after ``timeout_s`` end them, also at the owner."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._is_idle.wait()
        except TimeoutError:
            self.end_all()

    def end_all(self) -> None:
        """End every call that is being passed on, with a status that says why."""
        for call in list(self._open):
            self._cut.add(call)
            call.cancel()

    @contextmanager
    def _passing(self, call: Any, *, ends: bool) -> Iterator[None]:
        """Know of a call to an owner while the block lasts, and end it then."""
        self._open.add(call)
        if ends:
            self._awaited.add(call)
            self._is_idle.clear()
        try:
            yield
        except asyncio.CancelledError:
            if call in self._cut:
                raise Cancelled("the control plane that passed the call on to the owner of the group ends") from None
            raise
        finally:
            call.cancel()
            for calls in (self._open, self._cut, self._awaited):
                calls.discard(call)
            if not self._awaited:
                self._is_idle.set()

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Return a handler that asks the owner, where there is one and this call did not come from another relay."""
        handler = await continuation(handler_call_details)
        method: str = handler_call_details.method
        address = self._fleet.relay_address
        if handler is None or not address or method.split("/")[1] not in self._services:
            return handler
        if method in self._answered_here:
            return handler
        if any(key == RELAYED_KEY for key, _ in handler_call_details.invocation_metadata or ()):
            return handler
        channels = self._channels
        channel = channels.to(address)
        log.debug("call.relayed", method=method, owner_address=address)
        self.num_relayed[method] += 1

        async def relay_unary(request: bytes, context: Context) -> bytes:
            ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
            call = ask(request, metadata=_metadata(context, channels), timeout=context.time_remaining())
            with self._passing(call, ends=True):
                try:
                    return await call
                except grpc.aio.AioRpcError as error:
                    await _end_as(error, context)

        async def relay_stream(request: bytes, context: Context) -> AsyncGenerator[bytes, None]:
            ask: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(method)
            call = ask(request, metadata=_metadata(context, channels), timeout=context.time_remaining())
            with self._passing(call, ends=method not in self._endless):
                try:
                    # It says that the request is in a delta, from when on no proxy may send it again.
                    await call.initial_metadata()
                    if not call.done():
                        await context.send_initial_metadata(())
                    async for message in call:
                        yield message
                except grpc.aio.AioRpcError as error:
                    await _end_as(error, context)

        async def relay_both(requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes, None]:
            ask: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(method)
            call = ask(requests, metadata=_metadata(context, channels), timeout=context.time_remaining())
            with self._passing(call, ends=False):
                try:
                    async for message in call:
                        yield message
                except grpc.aio.AioRpcError as error:
                    await _end_as(error, context)

        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(relay_both)  # no service has the fourth kind
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(relay_stream)
        return grpc.unary_unary_rpc_method_handler(relay_unary)


def _metadata(context: Context, channels: OwnerChannels) -> list[tuple[str, str | bytes]]:
    passed = [(key, value) for key, value in context.invocation_metadata() or () if key in _PASSED_ON]
    if any(key == "authorization" for key, _ in passed):
        return [*passed, (RELAYED_KEY, "1")]  # who calls says so himself
    return [*passed, *channels.in_the_name_of(current_caller().identity)]


async def _end_as(error: grpc.aio.AioRpcError, context: Context) -> NoReturn:
    """End the call with the owner's own status and details."""
    trailers = [(key, value) for key, value in error.trailing_metadata() or () if key == _DETAILS_KEY]
    await context.abort(error.code(), error.details() or "", tuple(trailers))
