"""Have Ray place the ranks: detached, named actors in a placement group, and our own streams to what they hold.

The ranks outlive this control plane. The next one, of the same name, finds them by their names.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankCallError, RankExit, StepsConnection
from control_plane.executors.exit_board import ExitBoard
from control_plane.executors.grpc_rank import GrpcRank
from control_plane.executors.ray_place import NoPlace, Place, connect, find_or_make, give_back
from control_plane.executors.worker_addresses import beside
from control_plane.executors.worker_settings import WorkerSettings
from maniple.v1 import rank_health_pb2, worker_pb2
from service_chassis.errors import clip
from service_chassis.ids import Rank
from service_chassis.telemetry import get_logger
from service_chassis.tls import ClientTls

log = get_logger()

# How long after a broken connection Ray's news of an exit may take.
_EXIT_NEWS_S = 1.0
# A rank that just said where it listens, or was found, answers at once.
_ANSWER_S = 5.0
_RETRY_S = 0.1
# An actor that does not answer within this time after its grace is killed.
_ACTOR_ANSWER_S = 2.0


class RayExecutor(Executor):
    """Ranks in a Ray cluster."""

    outlives_owner = True

    def __init__(
        self,
        *,
        name: str,
        world_size: int,
        settings: WorkerSettings,
        address: str = "auto",
        tls: ClientTls | None = None,
        orphan_grace_s: float = 60.0,
        linger_s: float = 10.0,
    ) -> None:
        """Prepare.

        Args:
            name: of the group in the cluster; who comes with the same finds the same ranks.
            world_size: ranks.
            settings: of every rank that is started.
            address: of the cluster.
            tls: how ranks are reached; they get theirs from MANIPLE_WORKER_TLS_* of their node.
            orphan_grace_s: how long ranks wait for the next control plane.
            linger_s: how long the place of a rank that ended is kept for another.
        """
        self.world_size = world_size
        self.allow_insecure_serialization = settings.allow_insecure_serialization
        self._name = name
        self._settings = settings
        self._tls = tls
        self._address = address
        self._terms = {"orphan_grace_s": orphan_grace_s, "linger_s": linger_s}
        self._exits = ExitBoard()
        self._place: Place | None = None
        self._reached: dict[Rank, GrpcRank] = {}
        self._pids: dict[Rank, int] = {}
        self._watches: dict[Rank, asyncio.Task[None]] = {}
        self._exited: dict[Rank, RankExit] = {}
        self._ours: set[Rank] = set()  # made by us, or granted to us: no other control plane has them
        self._let_go = False

    async def start(self, *, timeout_s: float) -> None:
        """Find or make the actors, and wait until the rank in each listens."""
        assert self._place is None, "an executor is started once"
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.to_thread(connect, self._address)
                place = self._place = await asyncio.to_thread(
                    find_or_make,
                    self._name,
                    self.world_size,
                    {"CPU": 1, "GPU": 1} if self._settings.device == "cuda" else {"CPU": 1},
                    timeout_s=0.9 * timeout_s,  # its own words say more than ours
                    **self._terms,
                )
                if place.is_new:
                    self._ours.update(place.actors)
                await asyncio.gather(*(self._start_rank(rank, actor) for rank, actor in place.actors.items()))
        except NoPlace as error:
            raise RankCallError(Rank(0), "start", str(error), error=error) from error
        except TimeoutError as error:
            late = next((rank for rank in self.ranks if rank not in self._reached), Rank(0))
            whom = "its Ray actor" if self._place else f"the Ray cluster at {self._address!r}"
            cause = f"no answer from {whom} within {timeout_s:g} s"
            raise RankCallError(late, "start", cause, error=error) from error

    async def _start_rank(self, rank: Rank, actor: Any) -> None:
        """Start or find the rank in its actor, and hear it answer. One that is just dying is started anew."""
        while rank not in self._reached:
            try:
                target, health_address, pid = await _reply(actor.start.remote(self._settings))
            except Exception as error:  # what an actor raised comes as a class made for it
                raise RankCallError(rank, "start", _actor_failure(error), error=error) from error
            limit = self._settings.max_step_message_bytes
            health_target = beside(target, health_address)
            reached = GrpcRank(rank, target, health_target, max_message_bytes=limit, tls=self._tls)
            try:
                await reached.call("Describe", worker_pb2.DescribeRequest(), timeout_s=_ANSWER_S)
            except (ConnectionError, TimeoutError) as error:
                log.warning("rank.not_answering", rank=rank, address=target, reason=str(error))
                await reached.close()
                await asyncio.sleep(_RETRY_S)
                continue
            self._reached[rank], self._pids[rank] = reached, pid
        # Asked once, answered at the end: Ray tells us, and nobody polls.
        watch = _watch(self._exits, self._exited, rank, actor.wait_for_end.remote())
        self._watches[rank] = asyncio.create_task(watch, name=f"exit-of-rank-{rank}")
        log.info("rank.found", rank=rank, address=self._reached[rank].target, pid=self._pids[rank])

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        """Call one rank; a broken connection is explained by the end of its process where that is the reason."""
        reached = self._reach_of(rank)
        try:
            reply = await reached.call(method, request, timeout_s=timeout_s)
        except ConnectionError as error:
            await asyncio.wait({self._watches[rank]}, timeout=_EXIT_NEWS_S)
            if rank in self._exited:
                raise ConnectionError(f"the process ended: {self._exited[rank].cause}") from error
            raise
        if method == "Join":
            self._ours.add(rank)
        return reply

    def _reach_of(self, rank: Rank) -> GrpcRank:
        reached = self._reached.get(rank)
        if reached is None:
            raise ConnectionError("the rank was not started yet")
        return reached

    def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        """See ``Executor``."""
        return self._reach_of(rank).stream(method, request, timeout_s=timeout_s)

    async def open_steps(self, rank: Rank) -> StepsConnection:
        """Open a Steps stream, straight to the rank."""
        return await self._reach_of(rank).open_steps()

    def watch_health(self, rank: Rank, epoch: int) -> AsyncIterator[rank_health_pb2.RankReport]:
        """Watch a rank on its health connection."""
        return self._reach_of(rank).watch_health(epoch, self._settings.idle_report_interval_s)

    def subscribe_exit(self, callback: Callable[[RankExit], None]) -> None:
        """See ``Executor``."""
        self._exits.subscribe(callback)

    def describe_rank(self, rank: Rank) -> tuple[str, int]:
        """Return the address, and the pid on the rank's own host."""
        reached = self._reached.get(rank)
        return reached.target if reached else f"Ray actor {self._name}/rank{rank}", self._pids.get(rank, 0)

    def let_go(self) -> None:
        """Leave the ranks to the next control plane; without one they end after their grace."""
        self._let_go = True

    async def shutdown(self, *, grace_s: float) -> None:
        """Close our connections; end the ranks unless they were let go or another control plane has them."""
        self._exits.silence()
        place = self._place
        if place is not None and not self._let_go:
            ours = {rank: actor for rank, actor in place.actors.items() if rank in self._ours}
            await asyncio.gather(*(_end(actor, grace_s) for actor in ours.values()))
            places = [place.placement_group] if len(ours) == self.world_size else []
            await asyncio.to_thread(give_back, ours.values(), places)
        for watch in self._watches.values():
            watch.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
        await asyncio.gather(*(reached.close() for reached in self._reached.values()))
        self._place = None


async def _watch(exits: ExitBoard, exited: dict[Rank, RankExit], rank: Rank, end: Any) -> None:
    """Report the end of a rank, as its actor tells it or as Ray tells the actor's own. Holds no executor."""
    try:
        cause, log_tail = await _reply(end)
    except Exception as error:  # RayActorError, or a lost connection to the cluster
        cause, log_tail = _actor_failure(error), ()
    exited[rank] = RankExit(rank, cause, log_tail)
    exits.post(exited[rank])


def _actor_failure(error: Exception) -> str:
    """Say what an exception from an actor means: its own, which Ray wraps in one of that class, or its death."""
    cause = getattr(error, "cause", None)
    text = " ".join(str(cause if isinstance(cause, Exception) else error).split())
    why = text.partition("The actor is dead because ")[2]
    return clip(f"its Ray actor died: {why}" if why else text or type(error).__name__, 500)


async def _end(actor: Any, grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s + _ACTOR_ANSWER_S):
            await _reply(actor.end.remote(grace_s))
    except Exception as error:  # dead already, or stuck; in both cases it is killed next
        log.info("rank_actor.not_ended", reason=_actor_failure(error))


async def _reply(ref: Any) -> Any:
    """Await a reply of an actor."""
    return await cast("Awaitable[Any]", ref)
