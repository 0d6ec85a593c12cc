"""Hide where workers live: in this process, in child processes, behind addresses, in Ray.

An executor starts and reaches the ranks of one group. It decides nothing about steps, leases or health: it carries
calls and streams, and says at once when a process is gone.
"""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, overload

from google.protobuf.message import Message

from control_plane.executors.callables import pickled_call
from control_plane.executors.collective import RankCallError, start_on_all
from control_plane.executors.delta_broadcast import DeltaBroadcast
from maniple.v1 import rank_health_pb2, worker_pb2
from service_chassis.ids import Rank

__all__ = ["Executor", "RankCallError", "RankExit", "StepsConnection"]


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank's process ended. ``cause`` is for people: "exit code 1", "killed by SIGKILL", and its last log lines."""

    rank: Rank
    cause: str
    log_tail: tuple[str, ...] = ()


class StepsConnection(Protocol):
    """One open ``Steps`` stream to one rank. A transport, without memory: resending is the group's business."""

    async def write(self, message: worker_pb2.StepsRequest) -> None:
        """Send. Raises ``ConnectionError`` when the stream is broken."""

    async def read(self) -> worker_pb2.StepsResponse | None:
        """Return the next message; None when the rank closed the stream in order.

        Raises:
            ConnectionError: transport loss.
            ManipleError: the rank ended the stream with a status of the one table (order refusal, fenced, ...).
        """

    async def close(self) -> None:
        """End the stream from this side. Safe to call twice."""


class Executor(abc.ABC):
    """The ranks of one group.

    ``collective_rpc``: the same method and request on every rank; returns when all named ranks answered, in rank order;
    the first failure on any rank, named or not, ends the call and names it; the timeout is a hang guard.
    """

    world_size: int
    # Whether the ranks live on when this control plane ends: then a goodbye leaves them to the next (PROTOCOL C6).
    outlives_owner: ClassVar[bool] = False
    # What carries deltas to all ranks instead of their Steps streams, once started; most have nothing.
    delta_broadcast: DeltaBroadcast | None = None
    # What a rank takes in one message (``max_step_message_bytes`` of ``WorkerSettings``).
    max_step_message_bytes: int = 64 << 20
    # Our half of the opt-in to callables; each worker has its own.
    allow_insecure_serialization: bool = False

    @property
    def ranks(self) -> tuple[Rank, ...]:
        """All ranks, ascending."""
        return tuple(Rank(index) for index in range(self.world_size))

    @abc.abstractmethod
    async def start(self, *, timeout_s: float) -> None:
        """Start or find the ranks, until each answers ``Describe``. Raises ``RankCallError`` naming a missing one."""

    @abc.abstractmethod
    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        """Call a unary method of WorkerService on one rank.

        Raises:
            ManipleError: the rank refused with a status of the one table.
            ConnectionError: it could not be reached, or is gone; the text says what is known.
            TimeoutError: no answer within ``timeout_s``.
        """

    @abc.abstractmethod
    def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        """Call a method of WorkerService that answers in parts, on one rank; ``timeout_s`` is for all of them.

        Raises, on reading: as ``call``.
        """

    @overload
    def collective_rpc(
        self,
        method: str,
        request: Message | Callable[[Rank], Message],
        *,
        timeout_s: float,
        reply_ranks: Sequence[Rank] | None = None,
    ) -> Awaitable[list[Message]]: ...

    @overload
    def collective_rpc(
        self,
        method: Callable[[Any], object],
        request: worker_pb2.CallPickledRequest,
        *,
        timeout_s: float,
        reply_ranks: Sequence[Rank] | None = None,
    ) -> Awaitable[list[Any]]: ...

    def collective_rpc(
        self,
        method: str | Callable[[Any], object],
        request: Message | Callable[[Rank], Message],
        *,
        timeout_s: float,
        reply_ranks: Sequence[Rank] | None = None,
    ) -> Awaitable[list[Any]]:
        """Call ``method`` of WorkerService, or a function, on every rank.

        Args:
            method: name of a unary call of WorkerService, e.g. "LoadModel". Or a function of one argument, the worker's
                ``Rank``, to be called on its device's thread: in process (``uni``), or where both ends opted in to
                pickled functions.
            request: the message, or a function of the rank where only the rank's own number differs (FormGroup, Join).
                For a function: a ``CallPickledRequest`` with nothing but the epoch.
            timeout_s: no rank may take longer.
            reply_ranks: ranks whose replies are returned; default all.
        Returns:
            An awaitable of the replies in rank order, and thus also the future of a call that does not block: the calls
            are under way when this returns, awaited or not. It raises ``RankCallError`` at the first failure on any
            rank, and the calls to the others are then cancelled.
        Raises:
            PermissionDenied: a function, and this end did not opt in.
        """
        if callable(method):
            assert isinstance(request, worker_pb2.CallPickledRequest)
            call_one = self.function_caller(method, request.epoch)
            calls = {rank: call_one(rank, timeout_s) for rank in self.ranks}
            name = getattr(method, "__qualname__", repr(method))
            return start_on_all(name, calls, timeout_s=timeout_s, reply_ranks=reply_ranks)
        return start_on_all(
            method,
            {
                rank: self.call(rank, method, request(rank) if callable(request) else request, timeout_s=timeout_s)
                for rank in self.ranks
            },
            timeout_s=timeout_s,
            reply_ranks=reply_ranks,
        )

    def function_caller(
        self, function: Callable[[Any], object], epoch: int
    ) -> Callable[[Rank, float], Coroutine[Any, Any, Any]]:
        """Return what calls ``function`` on one rank, given a timeout. Over a wire it travels pickled, once made."""
        pickled = pickled_call(function, epoch, allowed=self.allow_insecure_serialization)

        async def call_one(rank: Rank, timeout_s: float) -> Any:
            return pickled.result(await self.call(rank, "CallPickled", pickled.request, timeout_s=timeout_s))

        return call_one

    @abc.abstractmethod
    async def open_steps(self, rank: Rank) -> StepsConnection:
        """Open a new Steps stream to one rank."""

    @abc.abstractmethod
    def watch_health(self, rank: Rank, epoch: int) -> AsyncIterator[rank_health_pb2.RankReport]:
        """Yield the rank's reports from its own health connection until it breaks (``ConnectionError``)."""

    @abc.abstractmethod
    def subscribe_exit(self, callback: Callable[[RankExit], None]) -> None:
        """Call back once per ended process, from the event loop; at once for one that ended before. Not in shutdown."""

    @abc.abstractmethod
    def describe_rank(self, rank: Rank) -> tuple[str, int]:
        """Return (address, pid or 0) for people."""

    def let_go(self) -> None:  # noqa: B027 - nothing to do where ranks end with us
        """Leave the ranks to the next owner: ``shutdown`` then ends none that outlives this one."""

    @abc.abstractmethod
    async def shutdown(self, *, grace_s: float) -> None:
        """End all ranks that this executor started, by force after ``grace_s``; leave no process, socket or file."""
