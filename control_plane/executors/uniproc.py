"""Run the one rank in this process: no gRPC, no child, plain calls of the same object that a worker process serves.

The only file of the control plane that loads the worker service, and only when it starts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, cast

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankCallError, RankExit, StepsConnection
from control_plane.executors.grpc_rank import check_parts, check_unary
from control_plane.executors.worker_settings import WorkerSettings
from maniple.v1 import rank_health_pb2, worker_pb2
from service_chassis.ids import Rank
from service_chassis.telemetry import get_logger

if TYPE_CHECKING:
    import worker_service.rank

log = get_logger()


class UniprocExecutor(Executor):
    """One rank in this process. It ends with the process, so it never reports an exit."""

    world_size = 1

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._started: worker_service.rank.Rank | None = None
        self._closed = asyncio.Event()

    async def start(self, *, timeout_s: float) -> None:
        """Load the worker service and start its device thread."""
        assert self._started is None, "an executor is started once"
        try:
            from worker_service.config import WorkerConfig
            from worker_service.rank import Rank as WorkerRank
        except ImportError as error:
            raise RankCallError(
                Rank(0), "start", f"the worker service cannot be loaded: {error}", error=error
            ) from error
        settings = self._settings
        config = WorkerConfig(
            orphan_grace_s=0,  # it ends with this process, silence never ends it
            device=settings.device,
            first_device=settings.first_device,
            device_ids=settings.device_ids,
            num_threads=settings.num_threads,
            num_groups_sharing=settings.num_groups_sharing,
            attention_backend=settings.attention_backend,
            torch_compile=settings.torch_compile,
            tune_kernels=settings.tune_kernels,
            enable_sleep_mode=settings.enable_sleep_mode,
            sleep_backend=settings.sleep_backend,
            sleep_directory=settings.sleep_directory,
            report_interval_s=settings.report_interval_s,
            idle_report_interval_s=settings.idle_report_interval_s,
        )
        self._started = WorkerRank(config, request_exit=lambda reason: log.info("rank.left", rank=0, reason=reason))
        await self._started.start()

    @property
    def _rank(self) -> worker_service.rank.Rank:
        if self._started is None or self._closed.is_set():
            raise ConnectionError("the rank is not running")
        return self._started

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        """Call the rank's method of that name."""
        check_unary(method)
        async with asyncio.timeout(timeout_s):
            return await self._rank.call(method, request)

    async def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        """Yield what the rank's method of that name yields."""
        check_parts(method)
        async with asyncio.timeout(timeout_s), aclosing(self._rank.method(method)(request)) as parts:
            async for part in parts:
                yield part

    def function_caller(
        self, function: Callable[[Any], object], epoch: int
    ) -> Callable[[Rank, float], Coroutine[Any, Any, Any]]:
        """Call the function itself: nothing is pickled where there is no wire."""

        async def call_one(_: Rank, timeout_s: float) -> Any:
            worker = self._rank
            async with asyncio.timeout(timeout_s):
                return await worker.call_function(function, epoch)

        return call_one

    async def open_steps(self, rank: Rank) -> StepsConnection:
        """Open a stream over a queue."""
        return _InProcessSteps(self._rank.steps)

    async def watch_health(self, rank: Rank, epoch: int) -> AsyncIterator[rank_health_pb2.RankReport]:
        """Yield the rank's own reports, at its intervals and whenever it has news."""
        vitals, loop, wake = self._rank.vitals, asyncio.get_running_loop(), asyncio.Event()
        late_s = 0.0

        def on_news() -> None:  # from any thread
            loop.call_soon_threadsafe(wake.set)

        with vitals.listening(on_news):
            while not self._closed.is_set():
                yield vitals.report(late_s)
                settings = self._settings
                interval_s = settings.report_interval_s if vitals.active else settings.idle_report_interval_s
                due = time.monotonic() + interval_s
                try:
                    async with asyncio.timeout(interval_s):
                        await wake.wait()
                    wake.clear()
                    late_s = 0.0
                except TimeoutError:
                    late_s = time.monotonic() - due
        raise ConnectionError("the rank is not running")

    def subscribe_exit(self, callback: Callable[[RankExit], None]) -> None:
        """Nothing to report, ever."""

    def describe_rank(self, rank: Rank) -> tuple[str, int]:
        """It has no address and no process of its own."""
        return "in this process", 0

    async def shutdown(self, *, grace_s: float) -> None:
        """End streams and the device thread. A device that hangs keeps its (daemon) thread until the process ends."""
        if self._started is not None and not self._closed.is_set():
            self._closed.set()
            try:
                async with asyncio.timeout(grace_s):
                    await self._started.close()
            except TimeoutError:
                log.warning("rank.not_closed", rank=0, grace_s=grace_s)


_Serve = Callable[[AsyncIterator[worker_pb2.StepsRequest]], AsyncIterator[worker_pb2.StepsResponse]]


class _InProcessSteps:
    """A ``StepsConnection`` to a rank in this process."""

    def __init__(self, serve: _Serve) -> None:
        # Bounded by the ledger: what is outstanding is limited there, and heartbeats are taken as they come.
        self._requests: asyncio.Queue[worker_pb2.StepsRequest | None] = asyncio.Queue()
        self._responses = cast("AsyncGenerator[worker_pb2.StepsResponse, None]", serve(self._written()))
        self._ended = False

    async def _written(self) -> AsyncIterator[worker_pb2.StepsRequest]:
        while (message := await self._requests.get()) is not None:
            yield message

    async def write(self, message: worker_pb2.StepsRequest) -> None:
        if self._ended:
            raise ConnectionError("the stream has ended")
        self._requests.put_nowait(message)

    async def read(self) -> worker_pb2.StepsResponse | None:
        try:
            return await anext(self._responses)
        except StopAsyncIteration:
            self._ended = True
            return None
        except BaseException:
            self._ended = True
            raise

    async def close(self) -> None:
        self._ended = True
        self._requests.put_nowait(None)
        await self._responses.aclose()
