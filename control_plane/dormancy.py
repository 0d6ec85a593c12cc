"""What of one group sleeps, and the calls on its ranks that change it. Scheduling is the engine's: see there."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import cast

from control_plane.group.worker_group import WorkerGroup
from maniple.v1 import worker_pb2
from service_chassis.errors import ManipleError
from service_chassis.ids import Rank
from service_chassis.sleep_tags import MEMORY_TAGS, WEIGHTS
from service_chassis.telemetry import get_logger

log = get_logger()

# Ranks end their work whatever becomes of the call; these are for those that never answer.
_SLEEP_TIMEOUT_S = 900.0
_LOAD_TIMEOUT_S = 1800.0

_Update = worker_pb2.WorkerServiceUpdateWeightsRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """What a rank gave back, and what it takes now; bytes."""

    rank: Rank
    freed_bytes: int = 0
    taken_bytes: int


class Dormancy:
    """The memory of one group. Calls are made with no step under way, one at a time."""

    def __init__(
        self,
        group: WorkerGroup,
        *,
        undisturbed: Callable[[], AbstractAsyncContextManager[int]],
        on_change: Callable[[], None],
    ) -> None:
        """Take a group that lives.

        Args:
            group: whose facts say what slept when it was taken over.
            undisturbed: gives the last step, which all ranks have taken; while it is held, none is sent.
            on_change: called when something fell asleep or woke.
        """
        self._group = group
        self._undisturbed = undisturbed
        self._on_change = on_change
        facts = group.facts
        self.asleep: frozenset[str] = facts.asleep if facts is not None else frozenset()

    @property
    def reason(self) -> str:
        """Why nothing is computed; nothing while all is awake."""
        tags = [tag for tag in MEMORY_TAGS if tag in self.asleep]
        return f"asleep: {', '.join(tags)}" if tags else ""

    async def sleep(self, level: int) -> list[RankMemory]:
        """Have all ranks give memory back. The KV cache must hold nothing any more. Raises as ``ask_all``."""
        before = self.asleep
        self._set(frozenset(MEMORY_TAGS))  # from here on nobody counts on any of it
        try:
            async with self._undisturbed() as last_step:
                request = worker_pb2.WorkerServiceSleepRequest(after_step=last_step, level=level)
                answers = await self._group.ask_all("Sleep", request, timeout_s=_SLEEP_TIMEOUT_S)
        except ManipleError:
            if not before:
                await self._undo()
            raise
        slept = cast("list[worker_pb2.WorkerServiceSleepResponse]", answers)
        log.info("group.slept", level=level, freed_bytes=sum(answer.freed_bytes for answer in slept))
        return [
            RankMemory(rank=rank, freed_bytes=answer.freed_bytes, taken_bytes=answer.taken_bytes)
            for rank, answer in zip(self._group.executor.ranks, slept, strict=True)
        ]

    async def _undo(self) -> None:
        """Wake the ranks that fell asleep before another refused to."""
        try:
            await self.wake_up(MEMORY_TAGS)
        except ManipleError as error:
            log.error("group.half_asleep", reason=error.message)

    async def wake_up(self, tags: Collection[str]) -> list[RankMemory]:
        """Have all ranks take memory again. What a rank refuses to wake sleeps on. Raises as ``ask_all``."""
        tags = [tag for tag in MEMORY_TAGS if tag in tags]
        async with self._undisturbed() as last_step:
            request = worker_pb2.WorkerServiceWakeUpRequest(after_step=last_step, tags=tags)
            answers = await self._group.ask_all("WakeUp", request, timeout_s=_LOAD_TIMEOUT_S)
        self._set(self.asleep - set(tags))
        woke = cast("list[worker_pb2.WorkerServiceWakeUpResponse]", answers)
        log.info("group.woke_up", tags=tags, asleep=sorted(self.asleep))
        return [
            RankMemory(rank=rank, taken_bytes=answer.taken_bytes)
            for rank, answer in zip(self._group.executor.ranks, woke, strict=True)
        ]

    async def stage_weights(self, path: str) -> int:
        """Have all ranks read other weights, beside those that serve; return the number of tensors.

        Where one rank refuses, all let go of what they read. Raises as ``ask_all``.
        """
        try:
            async with self._undisturbed() as last_step:
                return await stage_weights(self._group, last_step, path)
        except ManipleError:
            await self.abandon_weights()
            raise

    async def abandon_weights(self) -> None:
        """Have all ranks let go of weights that they read. A rank that cannot is lost, or does so with its owner."""
        try:
            async with self._undisturbed() as last_step:
                request = _Update(after_step=last_step, phase=_Update.PHASE_ABANDON)
                await self._group.ask_all("UpdateWeights", request, timeout_s=_SLEEP_TIMEOUT_S)
        except ManipleError as error:
            log.warning("weights.not_abandoned", reason=error.message)

    async def commit_weights(self) -> None:
        """Have all ranks put the weights that they read in place; those are awake then.

        Raises:
            GroupLost: a rank did not, while others may have: tokens of mixed weights must never be served.
        """
        async with self._undisturbed() as last_step:
            await commit_weights(self._group, last_step, may_refuse=False)
        self._set(self.asleep - {WEIGHTS})

    def _set(self, asleep: frozenset[str]) -> None:
        self.asleep = asleep
        self._on_change()


async def stage_weights(group: WorkerGroup, after_step: int, path: str) -> int:
    """Have the ranks of a group read the weights of a model directory; return the number of tensors."""
    request = _Update(after_step=after_step, path=path, phase=_Update.PHASE_STAGE)
    answers = await group.ask_all("UpdateWeights", request, timeout_s=_LOAD_TIMEOUT_S)
    return max(answer.num_tensors for answer in cast("list[worker_pb2.WorkerServiceUpdateWeightsResponse]", answers))


async def commit_weights(group: WorkerGroup, after_step: int, *, may_refuse: bool = True) -> None:
    """Have the ranks put them in place."""
    request = _Update(after_step=after_step, phase=_Update.PHASE_COMMIT)
    answers = await group.ask_all("UpdateWeights", request, timeout_s=_SLEEP_TIMEOUT_S, may_refuse=may_refuse)
    taken = sum(answer.taken_bytes for answer in cast("list[worker_pb2.WorkerServiceUpdateWeightsResponse]", answers))
    log.info("weights.replaced", taken_bytes=taken)
