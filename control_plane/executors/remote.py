"""Reach ranks that run elsewhere, started and ended by somebody else: `maniple worker`, torchrun, an orchestrator.

Nothing is started and nothing is killed here. Which rank a worker is, it says itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankCallError, RankExit, StepsConnection
from control_plane.executors.exit_board import ExitBoard
from control_plane.executors.grpc_rank import GrpcRank
from control_plane.executors.worker_addresses import beside, nothing_listens, one_per_rank, resolve
from control_plane.executors.worker_settings import WorkerSettings
from maniple.v1 import rank_health_pb2, worker_pb2
from service_chassis.errors import ManipleError
from service_chassis.ids import Rank
from service_chassis.telemetry import get_logger
from service_chassis.tls import ClientTls

log = get_logger()

# A name may stand for other pods a moment later, and a worker may just be starting.
_RETRY_S = 0.25
# How long one round waits for those that do not answer, before names are looked up again.
_ROUND_S = 3.0
# So often in a row must both ports of a rank refuse before it counts as ended: a port may be between two listeners.
_REFUSALS = 3
_REFUSAL_TIMEOUT_S = 1.0


@dataclass(frozen=True, slots=True)
class _Found:
    target: str
    description: worker_pb2.DescribeResponse


class RemoteExecutor(Executor):
    """Ranks at addresses, or behind one DNS name. See ``worker_addresses`` for what they may look like."""

    outlives_owner = True

    def __init__(
        self, addresses: Sequence[str], *, world_size: int, settings: WorkerSettings, tls: ClientTls | None = None
    ) -> None:
        self.world_size = world_size
        self.allow_insecure_serialization = settings.allow_insecure_serialization
        self._addresses = tuple(addresses)
        self._settings = settings
        self._tls = tls
        self._exits = ExitBoard()
        self._reached: dict[Rank, GrpcRank] = {}
        self._health_targets: dict[Rank, str] = {}
        self._pids: dict[Rank, int] = {}
        self._num_refusals: dict[Rank, int] = {}
        self._expected: dict[Rank, str] = {}  # for people, before they answered: as if the order meant something

    async def start(self, *, timeout_s: float) -> None:
        """Find every rank: ask all addresses until each answers and all ranks are there."""
        assert not self._reached, "an executor is started once"
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        missing = f"nothing is known of {', '.join(self._addresses)}"
        rank = Rank(0)
        while (left_s := deadline - loop.time()) > 0:
            try:
                targets = self._targets(await resolve(self._addresses))
            except OSError as error:
                missing = str(error)
            else:
                self._expected = dict(zip(self.ranks, targets, strict=True))
                found, silent = await self._ask_all(targets, min(left_s, _ROUND_S))
                by_rank = self._by_rank(found)
                if not silent:
                    self._reach(by_rank)
                    return
                rank, missing = self._missing(by_rank, silent)
            await asyncio.sleep(min(_RETRY_S, max(deadline - loop.time(), 0)))
        raise RankCallError(rank, "Describe", f"{missing} (waited {timeout_s:g} s)", error=TimeoutError())

    def _targets(self, hosts: Sequence[str]) -> tuple[str, ...]:
        targets = one_per_rank(hosts, self.world_size)
        if not targets:
            which = ", ".join(self._addresses)
            raise OSError(f"{which} stand for {len(hosts)} addresses, which do not fit {self.world_size} ranks")
        return targets

    async def _ask_all(self, targets: Sequence[str], timeout_s: float) -> tuple[list[_Found], dict[str, str]]:
        """Return who answered, and why the others did not, by target."""
        answers = await asyncio.gather(*(self._ask(target, timeout_s) for target in targets))
        found = [answer for answer in answers if isinstance(answer, _Found)]
        silent = {target: answer for target, answer in zip(targets, answers, strict=True) if isinstance(answer, str)}
        return found, silent

    async def _ask(self, target: str, timeout_s: float) -> _Found | str:
        limit = self._settings.max_step_message_bytes
        asked = GrpcRank(Rank(0), target, target, max_message_bytes=limit, tls=self._tls)
        request = worker_pb2.DescribeRequest()
        try:
            reply = await asked.call("Describe", request, timeout_s=timeout_s, wait_for_ready=True)
        except TimeoutError:
            return "no answer"
        except (ConnectionError, ManipleError) as error:
            return str(error)
        finally:
            await asked.close()
        return _Found(target, cast("worker_pb2.DescribeResponse", reply))

    def _by_rank(self, found: Sequence[_Found]) -> dict[Rank, _Found]:
        """Sort by what they say they are. Raises where that cannot become a group, however long one waits."""
        by_rank: dict[Rank, _Found] = {}
        for one in found:
            rank, size = Rank(one.description.rank), one.description.world_size
            if size != self.world_size:
                cause = f"{one.target} is rank {rank} of {size}, and a group of {self.world_size} is wanted"
                raise RankCallError(rank, "Describe", cause)
            if rank in by_rank:
                cause = f"{by_rank[rank].target} and {one.target} both say that they are it"
                raise RankCallError(rank, "Describe", cause)
            by_rank[rank] = one
        return by_rank

    def _missing(self, by_rank: Mapping[Rank, _Found], silent: Mapping[str, str]) -> tuple[Rank, str]:
        missing = [rank for rank in self.ranks if rank not in by_rank]
        reasons = "; ".join(f"{target}: {reason}" for target, reason in silent.items())
        also = f" (nor rank {', '.join(map(str, missing[1:]))})" if missing[1:] else ""
        return missing[0], f"not found{also}: {reasons}"

    def _reach(self, by_rank: Mapping[Rank, _Found]) -> None:
        limit = self._settings.max_step_message_bytes
        for rank, one in sorted(by_rank.items()):
            health_target = beside(one.target, one.description.health_address)
            self._reached[rank] = GrpcRank(rank, one.target, health_target, max_message_bytes=limit, tls=self._tls)
            self._health_targets[rank] = health_target
            self._pids[rank] = one.description.pid
            log.info("rank.found", rank=rank, address=one.target, health_address=health_target)

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        """Call one rank."""
        return await self._reach_of(rank).call(method, request, timeout_s=timeout_s)

    def _reach_of(self, rank: Rank) -> GrpcRank:
        reached = self._reached.get(rank)
        if reached is None:
            raise ConnectionError("the rank was not found yet")
        return reached

    def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        """See ``Executor``."""
        return self._reach_of(rank).stream(method, request, timeout_s=timeout_s)

    async def open_steps(self, rank: Rank) -> StepsConnection:
        """Open a Steps stream."""
        return await self._reach_of(rank).open_steps()

    async def watch_health(self, rank: Rank, epoch: int) -> AsyncIterator[rank_health_pb2.RankReport]:
        """Watch a rank; when the connection breaks, ask whether its process is gone."""
        try:
            async for report in self._reach_of(rank).watch_health(epoch, self._settings.idle_report_interval_s):
                self._num_refusals[rank] = 0
                yield report
        except ConnectionError:
            await self._ask_whether_gone(rank)
            raise

    async def _ask_whether_gone(self, rank: Rank) -> None:
        """Post the exit of a rank whose ports both refused, several times in a row.

        No process of ours ended, so nobody tells us. A broken stream says nothing, and neither does silence: only
        that its host answers "nobody listens here" is as good as an exit code. A proxy in between never says so.
        """
        target, health_target = self._reached[rank].target, self._health_targets[rank]
        for each in dict.fromkeys((target, health_target)):
            if not await nothing_listens(each, timeout_s=_REFUSAL_TIMEOUT_S):
                self._num_refusals[rank] = 0
                return
        self._num_refusals[rank] = self._num_refusals.get(rank, 0) + 1
        if self._num_refusals[rank] == _REFUSALS:
            self._exits.post(RankExit(rank, f"nothing listens at {target} any more"))

    def subscribe_exit(self, callback: Callable[[RankExit], None]) -> None:
        """See ``Executor``."""
        self._exits.subscribe(callback)

    def describe_rank(self, rank: Rank) -> tuple[str, int]:
        """Return the address, and the pid on the rank's own machine."""
        reached = self._reached.get(rank)
        return reached.target if reached else self._expected.get(rank, ""), self._pids.get(rank, 0)

    async def shutdown(self, *, grace_s: float) -> None:
        """Close our connections. The workers are not ours."""
        self._exits.silence()
        await asyncio.gather(*(reached.close() for reached in self._reached.values()))
