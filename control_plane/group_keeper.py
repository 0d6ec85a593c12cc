"""Keep one group alive: form it or take it over, run its engine, see it lost, form it anew, or give up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from enum import Enum

from control_plane.dormancy import commit_weights, stage_weights
from control_plane.engine import Engine
from control_plane.executors.base import Executor
from control_plane.fleet import LOST, Fleet
from control_plane.group.backoff import Backoff
from control_plane.group.batch_snapshot import BatchSnapshot, SnapshotUnreadable
from control_plane.group.formation import ProgressCallback
from control_plane.group.loss import GroupNotFormed, LossKind, LossReason
from control_plane.group.settings import GroupFacts
from control_plane.group.takeover import Adopted
from control_plane.group.worker_group import WorkerGroup
from control_plane.handover import HandoverSettings, NextOwner, ResumeAt
from service_chassis.errors import ConfigurationError, ManipleError
from service_chassis.ids import Rank
from service_chassis.telemetry import get_logger

log = get_logger()

Prepare = Callable[[Executor], Awaitable[None]]

# Ranks that were told to leave need a moment to be gone, and a group that went to another owner is not in a hurry.
_READOPT_S = 0.2


class OnGroupLoss(Enum):
    """What follows the loss of a group."""

    REFORM = "reform"  # form it anew
    EXIT = "exit"  # leave that to whoever restarts this process


class GroupKeeper:
    """The life of one group, over any number of formations. One task runs ``start`` and then ``run``."""

    def __init__(
        self,
        name: str,
        *,
        fleet: Fleet,
        make_group: Callable[[], WorkerGroup],
        make_engine: Callable[[WorkerGroup, Adopted, BatchSnapshot | None], Engine],
        on_group_loss: OnGroupLoss,
        backoff: Backoff,
        progress: ProgressCallback,
        prepare: Prepare | None = None,
        on_lost: Callable[[str, float | None], None] = lambda reason, retry_in_s: None,
        on_formed: Callable[[GroupFacts], None] = lambda facts: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take what is needed.

        Args:
            name: of the group, for people.
            fleet: is told of every engine.
            make_group: returns a group not yet formed.
            make_engine: returns an engine for a group that lives now, with the batch that it runs, if it was taken
                over, or else with what survived of the batch before.
            on_group_loss: the policy.
            backoff: of this group alone.
            progress: told of every stage of every formation.
            prepare: fetches from the ranks what an engine needs, once they have their model; called at least once
                before ``make_engine``, and already while another control plane holds them. Raises as ``start``.
            on_lost: told of a loss, or of a formation that failed after one, and when the next attempt comes, if any.
            on_formed: told when the group lives again after a loss.
            clock: the backoff's.
        """
        self.name = name
        self._fleet = fleet
        self._make_group = make_group
        self._make_engine = make_engine
        self._on_group_loss = on_group_loss
        self._backoff = backoff
        self._progress = progress
        self._prepare = prepare
        self._on_lost = on_lost
        self._on_formed = on_formed
        self._clock = clock
        # Of the present life:
        self._group: WorkerGroup | None = None
        self._engine: Engine | None = None
        self._loop: asyncio.Task[None] | None = None
        self._loss: LossReason | None = None
        self._lost = asyncio.Event()
        self._survivors: BatchSnapshot | None = None  # of a batch that could not be taken over
        self._preparing: asyncio.Task[None] | None = None  # while another control plane holds the group
        self._out_of_reach_since: float | None = None  # a rank that waits for an owner, or has another one

    async def start(self) -> GroupFacts:
        """Form the group, or take it over, and seat its engine.

        Raises:
            GroupNotFormed, InvalidParameter: as ``WorkerGroup.form``; nothing is left of the attempt.
        """
        self._loss = None
        self._lost.clear()
        self._out_of_reach_since = None
        adopted = await self._get_group()
        assert self._group is not None
        facts = adopted.facts
        if self._prepare is not None:
            await self._prepare_for(self._group, self._prepare)
        await self._renew_weights(self._group, adopted)
        try:
            self._engine = self._make_engine(self._group, adopted, self._survivors)
        except SnapshotUnreadable as error:
            # Rare and bad enough to begin again from nothing.
            await self._group.teardown(str(error))
            raise GroupNotFormed(LossReason(None, str(error))) from error
        self._survivors = None
        self._engine.on_lost = self._on_engine_lost
        self._loop = asyncio.create_task(self._engine.run(), name=f"engine-{self.name}")
        self._loop.add_done_callback(self._on_loop_done)
        self._backoff.formed(self._clock())
        self._fleet.take(self._engine, self.name)
        log.info(
            "engine.started",
            group=self.name,
            epoch=facts.epoch,
            num_blocks=facts.num_blocks,
            formed_in_s=round(facts.formed_in_s, 3),
        )
        return facts

    async def _renew_weights(self, group: WorkerGroup, adopted: Adopted) -> None:
        """Bring the weights of a group that is formed anew to those that serve; take over what it has otherwise."""
        rest = self._fleet.rest
        if adopted.snapshot is not None:
            rest.weights_path = adopted.facts.weights_path or rest.weights_path
        elif rest.weights_path:
            after_step = adopted.facts.first_step - 1
            try:
                await stage_weights(group, after_step, rest.weights_path)
                await commit_weights(group, after_step)
            except ManipleError as error:
                await group.teardown(error.message)
                raise

    async def _prepare_for(self, group: WorkerGroup, prepare: Prepare) -> None:
        try:
            await prepare(group.executor)
            if group.loss is not None:  # meanwhile, and no engine was there to be told
                raise GroupNotFormed(group.loss)
        except (GroupNotFormed, ConfigurationError) as error:
            await group.teardown(str(error))
            raise

    async def _prepare_early(self, group: WorkerGroup, prepare: Prepare) -> None:
        """Be quicker when the group is ours. Nothing depends on it: ranks that load have nothing to give yet."""
        try:
            await prepare(group.executor)
        except (GroupNotFormed, ConfigurationError) as error:
            log.info("group.not_prepared", group=self.name, reason=str(error))

    async def _get_group(self) -> Adopted:
        """Form a group; where ranks outlive their owners, wait until it is free, and take over what it runs."""
        while True:
            group = self._group = self._make_group()
            if not group.executor.outlives_owner:
                return Adopted(facts=await group.form(self._report_stage), snapshot=None)
            try:
                return await group.adopt(self._report_stage, on_held=self._on_held)
            except GroupNotFormed as error:
                self._survivors = error.survivors or self._survivors
                if (
                    error.loss.kind is not LossKind.FENCED
                    and not error.were_dismissed
                    and not (error.began_nothing and self._has_patience(group.settings.startup_timeout_s))
                ):
                    raise
                log.warning("group.not_adopted", group=self.name, reason=error.loss.reason)
                await asyncio.sleep(_READOPT_S)

    def _has_patience(self, timeout_s: float) -> bool:
        """Wait for a rank that its owner, or whoever runs it, brings back: a spare does not go with it."""
        now = self._clock()
        if self._out_of_reach_since is None:
            self._out_of_reach_since = now
        return now - self._out_of_reach_since < timeout_s

    def _on_held(self, reason: str, owner_address: str) -> None:
        self._out_of_reach_since = None
        if self._group is not None and owner_address == self._group.settings.owner_address:
            owner_address = ""  # of one that is gone: whoever asks there now asks us
        self._fleet.hold(reason, self.name, owner_address)
        self._progress("wait", Rank(0), 0.0, reason)
        if (
            self._prepare is not None
            and self._group is not None
            and (self._preparing is None or self._preparing.done())
        ):
            early = self._prepare_early(self._group, self._prepare)
            self._preparing = asyncio.create_task(early, name=f"prepare-{self.name}")

    async def hand_over(self, resume_at: ResumeAt, settings: HandoverSettings) -> None:
        """Leave the group, and what runs in it, to the next owner. ``run`` must not be under way any more.

        Args:
            resume_at: how the next owner is asked for the requests of clients that cannot resume.
            settings: how long everything may take.
        """
        if self._engine is not None and self._group is not None and self._group.executor.outlives_owner:
            next_owner = NextOwner(
                self._group.next_owner_address,
                resume_at,
                settings,
                on_found=lambda address: self._fleet.hold("handed over", self.name, address),
            )
            await self._engine.leave_to_next(next_owner)

    async def run(self, loss: LossReason | None = None) -> LossReason:
        """Keep the group alive; return the last loss when that is given up.

        Args:
            loss: why ``start`` failed; None if it did not.
        """
        while True:
            if loss is None:
                await self._lost.wait()
                assert self._loss is not None
                loss = self._loss
            await self._end_life(loss.reason)
            while (delay_s := self._next_delay_s(loss)) is not None:
                log.warning("group.lost", group=self.name, reason=loss.reason, retry_in_s=delay_s)
                self._on_lost(loss.reason, delay_s)
                await asyncio.sleep(delay_s)
                await self._fleet.rest.until_awake()
                try:
                    facts = await self.start()
                except (GroupNotFormed, ManipleError) as error:
                    loss = error.loss if isinstance(error, GroupNotFormed) else LossReason(None, error.message)
                    self._fleet.leave(loss.reason, self.name, state=LOST)
                else:
                    self._on_formed(facts)
                    loss = None
                    break
            if loss is not None:
                log.error("group.given_up", group=self.name, reason=loss.reason, failures=self._backoff.num_failures)
                self._on_lost(loss.reason, None)
                return loss

    async def end(self, reason: str) -> None:
        """End the group and everything of it, in whatever state it is. ``run`` must not be under way any more."""
        if self._engine is not None and self._group is not None and not self._engine.is_idle:
            # Nobody waited for them, since another group could not be formed: workers that live on have them still.
            kind = LossKind.FENCED if self._group.executor.outlives_owner else LossKind.LOST
            self._engine.fail(LossReason(None, reason, kind))
        await self._end_life(reason)

    def _next_delay_s(self, loss: LossReason) -> float | None:
        if loss.kind is LossKind.FENCED:
            assert self._group is not None
            return _READOPT_S if self._group.executor.outlives_owner else None  # to wait for it like any spare
        if self._on_group_loss is OnGroupLoss.EXIT:
            return None
        return self._backoff.failed(self._clock())

    async def _end_life(self, reason: str) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
            await asyncio.gather(self._preparing, return_exceptions=True)
            self._preparing = None
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        if self._group is not None:
            await self._group.teardown(reason)

    def _report_stage(self, stage: str, rank: Rank, share: float, detail: str) -> None:
        self._fleet.report(f"rank {rank}: {stage} {share:.0%}", self.name)
        self._progress(stage, rank, share, detail)

    def _on_engine_lost(self, loss: LossReason) -> None:
        self._loss = loss
        self._fleet.leave(loss.reason, self.name, state=LOST)
        self._lost.set()

    def _on_loop_done(self, loop: asyncio.Task[None]) -> None:
        """End the clients when the engine's loop failed: a defect of ours must not become a silent hang."""
        error = None if loop.cancelled() else loop.exception()
        if error is not None and self._engine is not None:
            log.error("engine.failed", group=self.name, exc_info=error)
            self._engine.fail(LossReason(None, f"the control plane failed: {type(error).__name__}"))
