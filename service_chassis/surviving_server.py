"""A grpc.aio server that one bad request cannot end.

The loop in which grpc.aio takes calls decodes the path of each as UTF-8 before anything of ours sees it. A path that is
none ends that loop, and with it the server: every call is cancelled, the port is closed, and the process lives on and
serves nobody. Anybody who can connect can do that, with one frame.

Here the calls that run go on. The server in grpc's core retires as in a graceful stop, and another one with the same
methods listens in its place a moment later. Clients see no more of it than that their connections are asked to go away;
a call that crosses with that may be CANCELLED.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from grpc._cython import cygrpc  # type: ignore[attr-defined]

from service_chassis.telemetry import get_logger

_AioServer: Any = cygrpc.AioServer  # grpc has no types for it
# Calls of a retired server may take as long as they like, and are ended with the rest by ``stop``.
_FOR_EVER_S = 365 * 86_400.0
# What the old listener may take to let go of its address. It is closed already, on threads of grpc's own.
_REBIND_WITHIN_S = 10.0


class _Core(_AioServer):  # type: ignore[misc]
    """What grpc.aio has of a server, with another word on what follows the end of its loop."""

    on_crash: Callable[[BaseException], None] | None = None

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """Called by grpc's loop to wait for the next call. grpc's core writes that call into memory of the inner task.

        A loop that ends cancels what it waits for. Cancelled itself, the task would give that memory back while the
        core may still write to it, which it does when it shuts down: some other object then has holes in it.
        """
        inner = super()._make_request_call_future(method)
        self._armed.add(inner)
        inner.add_done_callback(self._disarm)
        return asyncio.shield(inner)

    def _disarm(self, inner: asyncio.Task[Any]) -> None:
        self._armed.discard(inner)
        if not inner.cancelled():
            inner.exception()  # looked at: where the loop still waits, it hears of it; else nobody need

    def _serving_task_crash_handler(self, task: asyncio.Task[None]) -> None:
        """Called by grpc when the loop has ended. Its own way is to shut everything down."""
        if task.cancelled() or (error := task.exception()) is None or not self.is_running():
            return
        if self.on_crash is not None:
            self.on_crash(error)

    async def retire(self) -> None:
        """Listen no more, and let the calls that run end by themselves."""
        try:
            await self.shutdown(_FOR_EVER_S)
        except Exception:  # grpc waits for the loop first, which raises again what ended it
            await self.shutdown(_FOR_EVER_S)


class SurvivingServer(grpc.aio.Server):
    """Serve as the server of grpc.aio does, through as many servers of grpc's core as it takes."""

    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> None:
        self._loop: asyncio.AbstractEventLoop = cygrpc.get_working_loop()
        self._arguments = (tuple(interceptors), tuple(options))
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._methods: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._ports: list[tuple[str, grpc.ServerCredentials | None]] = []
        self._retired: list[Any] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_stopping = False
        self._core = self._new_core()

    def add_generic_rpc_handlers(self, generic_rpc_handlers: Iterable[grpc.GenericRpcHandler]) -> None:
        handlers = list(generic_rpc_handlers)
        self._handlers += handlers
        self._core.add_generic_rpc_handlers(handlers)

    def add_registered_method_handlers(
        self, service_name: str, method_handlers: Mapping[str, grpc.RpcMethodHandler[Any, Any]]
    ) -> None:
        """Called by generated code, beside the above."""
        methods = {f"/{service_name}/{name}": handler for name, handler in method_handlers.items()}
        self._methods |= methods
        self._core.add_registered_method_handlers(methods)

    def add_insecure_port(self, address: str) -> int:
        return self._add_port(address, None)

    def add_secure_port(self, address: str, server_credentials: grpc.ServerCredentials) -> int:
        return self._add_port(address, server_credentials)

    async def start(self) -> None:
        await self._core.start()

    async def stop(self, grace: float | None) -> None:
        self._is_stopping = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(core.shutdown(grace) for core in (self._core, *self._retired)))

    async def wait_for_termination(self, timeout: float | None = None) -> bool:
        """Wait until it was stopped; return whether that took longer than ``timeout`` seconds."""
        raise NotImplementedError("who stops it knows")

    def _add_port(self, address: str, credentials: grpc.ServerCredentials | None) -> int:
        port = _open(self._core, address, credentials)
        if not port:
            raise RuntimeError(f"failed to bind to address {address}")
        self._ports.append((_with_port(address, port), credentials))
        return port

    def _new_core(self) -> Any:
        interceptors, options = self._arguments
        core = _Core(self._loop, None, (), interceptors, options, None)
        core.on_crash = self._crashed
        core._armed = set()
        return core

    def _crashed(self, error: BaseException) -> None:
        if self._is_stopping:
            return
        task = self._loop.create_task(self._replace(self._core, error))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self, old: Any, error: BaseException) -> None:
        """Have another server listen where the old one did."""
        retiring = self._loop.create_task(old.retire())
        self._tasks.add(retiring)
        retiring.add_done_callback(self._tasks.discard)
        self._retired.append(old)
        retiring.add_done_callback(lambda _: self._retired.remove(old))
        core = self._new_core()
        core.add_generic_rpc_handlers(self._handlers)
        core.add_registered_method_handlers(self._methods)
        for address, credentials in self._ports:
            await _bind(core, address, credentials)
        self._core = core
        await core.start()
        get_logger().warning("server.replaced", reason=f"{type(error).__name__}: {error}"[:300])


def _open(core: Any, address: str, credentials: grpc.ServerCredentials | None) -> int:
    raw = address.encode()
    port: int = core.add_insecure_port(raw) if credentials is None else core.add_secure_port(raw, credentials)
    return port


def _with_port(address: str, port: int) -> str:
    return address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"


async def _bind(core: Any, address: str, credentials: grpc.ServerCredentials | None) -> None:
    """Bind as soon as the old listener has let go. A socket's file is removed with it, and must not be ours."""
    complain_at = asyncio.get_running_loop().time() + _REBIND_WITHIN_S
    while True:
        with contextlib.suppress(RuntimeError):
            if _is_free(address) and _open(core, address, credentials):
                return
        if asyncio.get_running_loop().time() >= complain_at:
            get_logger().error("server.not_listening", address=address, reason="its address is in use")
            complain_at += _REBIND_WITHIN_S
        await asyncio.sleep(0.005)


def _is_free(address: str) -> bool:
    """Try by ourselves: grpc would complain of each attempt in a line of its own."""
    if address.startswith("unix:"):
        return not Path(address.removeprefix("unix:")).exists()
    host, _, port = address.rpartition(":")
    for family, kind, _, _, where in socket.getaddrinfo(
        host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    ):
        with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
            return True
    return False
