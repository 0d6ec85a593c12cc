"""Run the ranks as child processes of this one: gRPC over Unix sockets that nobody else can reach."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankCallError, RankExit, StepsConnection
from control_plane.executors.delta_broadcast import DeltaBroadcast
from control_plane.executors.exit_board import ExitBoard
from control_plane.executors.grpc_rank import GrpcRank
from control_plane.executors.private_directory import PrivateDirectory
from control_plane.executors.worker_settings import WorkerSettings
from maniple.v1 import rank_health_pb2, worker_pb2
from service_chassis.child_process import ChildProcess
from service_chassis.ids import Rank
from service_chassis.protocol.broadcast_ring import ReaderFds, is_supported
from service_chassis.telemetry import get_logger

log = get_logger()

# How long after a broken connection the exit of its process may take to be known.
_EXIT_NEWS_S = 0.5


class MultiprocExecutor(Executor):
    """Ranks that live and die with this process."""

    def __init__(self, *, world_size: int, settings: WorkerSettings, broadcast_ring: bool = False) -> None:
        """Say how many; with ``broadcast_ring`` deltas go through shared memory, where the system has what it takes."""
        self.world_size = world_size
        self.allow_insecure_serialization = settings.allow_insecure_serialization
        self._settings = settings
        self._broadcast_ring = broadcast_ring and is_supported()
        self._exits = ExitBoard()
        self._waiting: set[asyncio.Task[None]] = set()
        self._directory: PrivateDirectory | None = None
        self._children: dict[Rank, ChildProcess] = {}
        self._reached: dict[Rank, GrpcRank] = {}
        # Closes when this process ends, however it ends; the children watch the other end and go.
        self._lifeline_fd = -1

    async def start(self, *, timeout_s: float) -> None:
        """Start all children at once and wait until each answers."""
        assert self._directory is None, "an executor is started once"
        directory = self._directory = PrivateDirectory()
        watched_fd, self._lifeline_fd = os.pipe()
        if self._broadcast_ring:
            self.delta_broadcast = DeltaBroadcast(self.world_size)
        try:
            for rank in self.ranks:
                target = f"unix:{directory.path}/rank{rank}.sock"
                health_target = f"unix:{directory.path}/rank{rank}-health.sock"
                ring_fds = self.delta_broadcast.reader_fds(rank) if self.delta_broadcast is not None else ()
                self._children[rank] = await ChildProcess.start(
                    self._arguments(rank, target, health_target, watched_fd, ring_fds),
                    pass_fds=(watched_fd, *ring_fds),
                    on_exit=_poster(self._exits, rank),
                    prefix=f"[rank {rank}] ",
                )
                self._reached[rank] = GrpcRank(
                    rank, target, health_target, max_message_bytes=self._settings.max_step_message_bytes
                )
                if self.delta_broadcast is not None:
                    self.delta_broadcast.started(rank)
                log.info("rank.started", rank=rank, pid=self._children[rank].pid)
        finally:
            os.close(watched_fd)
        if self.delta_broadcast is not None:
            self.delta_broadcast.begin(self._on_ring_lost)
        await asyncio.gather(*(self._await_answer(rank, timeout_s) for rank in self.ranks))

    def _arguments(
        self, rank: Rank, target: str, health_target: str, parent_fd: int, ring_fds: ReaderFds | tuple[()]
    ) -> list[str]:
        return self._settings.arguments(
            rank,
            self.world_size,
            listen=target,
            health_listen=health_target,
            orphan_grace_s=0,  # the lifeline ends them, silence never does (PROTOCOL C6)
            parent_fd=parent_fd,
            **({"delta_ring_fds": ring_fds} if ring_fds else {}),
        )

    async def _await_answer(self, rank: Rank, timeout_s: float) -> None:
        """Ask until the rank answers, it ends, or time is over."""
        child, reached = self._children[rank], self._reached[rank]
        request = worker_pb2.DescribeRequest()
        answer = asyncio.create_task(reached.call("Describe", request, timeout_s=timeout_s, wait_for_ready=True))
        ended = asyncio.create_task(child.wait())
        try:
            await asyncio.wait({answer, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done():
                raise RankCallError(rank, "Describe", f"the process ended before it answered: {child.cause}")
            await answer
        except TimeoutError as error:
            cause = f"no answer from {reached.target} within {timeout_s:g} s"
            raise RankCallError(rank, "Describe", cause, error=error) from error
        except ConnectionError as error:
            raise RankCallError(rank, "Describe", f"{reached.target}: {error}", error=error) from error
        finally:
            for task in (answer, ended):
                task.cancel()
            await asyncio.gather(answer, ended, return_exceptions=True)

    def _on_ring_lost(self, rank: int) -> None:
        """Lose the rank whose end of the ring is gone, unless its process ended, which says why."""
        waiting = asyncio.create_task(self._report_ring_lost(Rank(rank)), name=f"ring-{rank}")
        self._waiting.add(waiting)
        waiting.add_done_callback(self._waiting.discard)

    async def _report_ring_lost(self, rank: Rank) -> None:
        try:
            async with asyncio.timeout(_EXIT_NEWS_S):
                await self._children[rank].wait()
        except TimeoutError:
            self._exits.post(RankExit(rank, "it closed its end of the broadcast ring"))

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        """Call one rank; a broken connection is explained by the exit of its process where that is the reason."""
        try:
            return await self._reached[rank].call(method, request, timeout_s=timeout_s)
        except ConnectionError as error:
            child = self._children[rank]
            try:
                async with asyncio.timeout(_EXIT_NEWS_S):
                    await child.wait()
            except TimeoutError:
                raise error from None
            raise ConnectionError(f"the process ended: {child.cause}") from error

    def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        """See ``Executor``."""
        return self._reached[rank].stream(method, request, timeout_s=timeout_s)

    async def open_steps(self, rank: Rank) -> StepsConnection:
        """Open a Steps stream to a child."""
        return await self._reached[rank].open_steps()

    def watch_health(self, rank: Rank, epoch: int) -> AsyncIterator[rank_health_pb2.RankReport]:
        """Watch a child on its health connection."""
        return self._reached[rank].watch_health(epoch, self._settings.idle_report_interval_s)

    def subscribe_exit(self, callback: Callable[[RankExit], None]) -> None:
        """See ``Executor``."""
        self._exits.subscribe(callback)

    def describe_rank(self, rank: Rank) -> tuple[str, int]:
        """Return the socket and the pid of a child."""
        reached, child = self._reached.get(rank), self._children.get(rank)
        return reached.target if reached else "", child.pid if child else 0

    async def shutdown(self, *, grace_s: float) -> None:
        """End the children, then remove everything else. Safe to call twice, and after a failed start."""
        self._exits.silence()
        for waiting in self._waiting:
            waiting.cancel()
        if self.delta_broadcast is not None:
            self.delta_broadcast.close()
        await asyncio.gather(*(child.end(grace_s=grace_s) for child in self._children.values()))
        await asyncio.gather(*(reached.close() for reached in self._reached.values()))
        if self._lifeline_fd >= 0:
            os.close(self._lifeline_fd)
            self._lifeline_fd = -1
        if self._directory is not None:
            self._directory.remove()


def _poster(exits: ExitBoard, rank: Rank) -> Callable[[str, tuple[str, ...]], None]:
    return lambda cause, log_tail: exits.post(RankExit(rank, cause, log_tail))
