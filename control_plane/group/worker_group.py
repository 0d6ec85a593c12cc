"""Own one group of ranks: form it, send it deltas, hear of its loss, end it once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankCallError, RankExit
from control_plane.group.allowance import Allowance
from control_plane.group.batch_snapshot import BatchSnapshot
from control_plane.group.claim import Grant
from control_plane.group.formation import Formation, ProgressCallback
from control_plane.group.last_word import confirm
from control_plane.group.leveling import Standing
from control_plane.group.loss import GroupNotFormed, LossKind, LossReason
from control_plane.group.rank_clock import StepTiming
from control_plane.group.rank_stream import RankStream
from control_plane.group.settings import GroupFacts, GroupSettings, RankStatus
from control_plane.group.step_ledger import StepLedger
from control_plane.group.takeover import (
    Adopted,
    claim_when_free,
    dissolve,
    formation_of,
    has_batch,
    loss_of,
    snapshot_of_survivor,
    take_over,
)
from control_plane.group.tenure import OUTPUT_RANK, Tenure
from control_plane.group.watchdog import Judgement, Verdict
from maniple.v1 import rank_health_pb2, scheduler_delta_pb2, worker_pb2
from service_chassis.errors import Fenced, GroupLost, InvalidParameter, ManipleError, NotBuilt, WrongState, clip
from service_chassis.ids import Epoch, Rank
from service_chassis.telemetry import get_logger

__all__ = ["OUTPUT_RANK", "WorkerGroup"]

log = get_logger()

# How long a survivor may take to hear that the group is over.
_FAREWELL_S = 0.5
# What a message adds to the delta in it.
_ENVELOPE_BYTES = 64


class WorkerGroup:
    """A group under one owner, from its formation to its end. Not used again afterwards: form a new one.

    The engine sets the callbacks before ``form``. They come from the event loop and must not raise.
    """

    def __init__(
        self,
        executor: Executor,
        settings: GroupSettings,
        *,
        owner_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self.settings = settings
        self.on_result: Callable[[scheduler_delta_pb2.StepResult], None] = lambda result: None
        self.on_accepted: Callable[[int], None] = lambda step: None  # every rank accepted up to this step
        self.on_lost: Callable[[LossReason], None] = lambda loss: None  # at most once, after form() returned
        # Told when each step was where on each rank; None: ranks are not asked.
        self.on_timing: Callable[[Rank, StepTiming], None] | None = None
        self.on_health: Callable[[bool, str], None] = lambda healthy, reason: None
        self.healthy = False  # since form() returned, and as the watchdog sees it; the reason beside it is for people
        self.health_reason = "the group is not formed"
        self.allowance = Allowance()  # of the control plane
        self.loss: LossReason | None = None
        self.facts: GroupFacts | None = None
        self._owner_id = owner_id
        self._clock = clock
        self._tenure: Tenure | None = None  # since the grant
        self._continues = False  # the tenure goes on from the batch of an owner before us
        self._forming: asyncio.Task[Adopted] | None = None
        self._progress: ProgressCallback = lambda stage, rank, share, detail: None
        self._stage = ""
        self._lost = asyncio.Event()
        self._has_parted = False  # a goodbye was said
        self._last_word: asyncio.Task[None] | None = None
        self._teardown: asyncio.Task[None] | None = None

    # Formation

    async def form(self, progress: ProgressCallback = lambda stage, rank, share, detail: None) -> GroupFacts:
        """Start or find the ranks and bring them to readiness.

        A failure leaves nothing behind: the group is torn down before this raises.

        Raises:
            InvalidParameter: what was asked for cannot be served, in the words of the rank that refused.
            GroupNotFormed: a rank is missing, lost or late; the text names it.
        """
        return (await self._come_to_life(self._form(), progress)).facts

    async def _form(self) -> Adopted:
        return Adopted(facts=await self._formation().run(), snapshot=None)

    def _formation(self) -> Formation:
        return Formation(
            self.executor,
            self.settings,
            owner_id=self._owner_id,
            progress=self._report_stage,
            on_granted=self._begin_tenure,
        )

    async def adopt(
        self,
        progress: ProgressCallback = lambda stage, rank, share, detail: None,
        *,
        on_held: Callable[[str, str], None] = lambda reason, owner_address: None,
    ) -> Adopted:
        """Get hold of ranks that live without us: wait while another owner lives, then take over what they run.

        Ranks that run nothing are formed as by ``form``. A failure leaves nothing of ours behind; unless another owner
        was quicker, the ranks are told to leave, and what one of them still knew of the batch is in what is raised.

        Args:
            progress: told of stages.
            on_held: told, with a reason and the owner's address, whenever who holds the group has changed.

        Raises:
            InvalidParameter: what was asked for cannot be served, in the words of the rank that refused.
            GroupNotFormed: a rank is missing, lost, late, of another formation, or another owner has it.
        """
        return await self._come_to_life(self._adopt(on_held), progress)

    async def _adopt(self, on_held: Callable[[str, str], None]) -> Adopted:
        executor, settings = self.executor, self.settings
        try:
            self._enter("start")
            await executor.start(timeout_s=settings.startup_timeout_s)
            self._enter("join")
            grant = await claim_when_free(
                executor,
                settings,
                owner_id=self._owner_id,
                allowance=self.allowance,
                on_held=on_held,
                is_over=lambda: self._teardown is not None,
            )
            if formation_of(grant):
                return await take_over(executor, settings, grant, self._continue_tenure, self._enter)
        except RankCallError as error:
            reason = f"rank {error.rank} failed at {self._stage}: {error.method}: {error.cause}"
            not_formed = GroupNotFormed(LossReason(error.rank, reason))
            is_out_of_reach = isinstance(error.error, ConnectionError | TimeoutError)
            not_formed.began_nothing = self._stage == "join" and is_out_of_reach
            raise not_formed from error
        if has_batch(grant):
            loss = loss_of(grant)
            not_formed = GroupNotFormed(loss, await dissolve(executor, grant, loss.reason))
            not_formed.were_dismissed = True
            raise not_formed
        return Adopted(facts=await self._formation().run(grant), snapshot=None)

    async def _come_to_life(self, work: Coroutine[Any, Any, Adopted], progress: ProgressCallback) -> Adopted:
        """Do what makes the group live; end it if that fails, or a rank is lost meanwhile."""
        assert self._forming is None, "a group is formed once"
        self._progress = progress
        self.executor.subscribe_exit(self._on_exit)
        self._forming = asyncio.create_task(work)
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait({self._forming, lost}, return_when=asyncio.FIRST_COMPLETED)
            if self.loss is not None:  # knows more than the call that failed with it
                raise GroupNotFormed(self.loss)
            if self._teardown is not None or self._forming.cancelled():
                raise GroupNotFormed(LossReason(None, "the group was torn down while it was forming"))
            adopted = self._forming.result()
        except BaseException as error:
            if isinstance(error, GroupNotFormed):
                self.loss = self.loss or error.loss
                if self._continues and self.loss.kind is not LossKind.FENCED:
                    error.survivors = await self._ask_survivors()
                    error.were_dismissed = True  # by the teardown
            await self.teardown(str(error) or type(error).__name__)
            raise
        finally:
            lost.cancel()
        assert self._tenure is not None, "a group lives under a grant"
        self._tenure.step_us_per_token = adopted.facts.step_us_per_token
        if adopted.snapshot is None:  # formed, and not found as another owner left it
            self._tenure.saw_answers()
        self.facts = adopted.facts
        self._set_health(Judgement(Verdict.HEALTHY))
        return adopted

    async def _ask_survivors(self) -> BatchSnapshot | None:
        """Save what survivors know of a batch that we failed to take over, before they are told to leave."""
        assert self.loss is not None
        assert self._tenure is not None
        tenure, lost = self._tenure, self.loss.rank
        ranks = [rank for rank in self.executor.ranks if rank != lost and not tenure.has_exited(rank)]
        return await snapshot_of_survivor(self.executor, tenure.epoch, ranks)

    def _enter(self, stage: str) -> None:
        for rank in self.executor.ranks:
            self._report_stage(stage, rank, 0.0, "")

    def _report_stage(self, stage: str, rank: Rank, share: float, detail: str) -> None:
        self._stage = stage
        self._progress(stage, rank, share, detail)

    def _begin_tenure(self, grant: Grant) -> None:
        self._tenure = self._new_tenure(grant)
        self._tenure.begin()

    def _continue_tenure(self, grant: Grant, standing: Standing) -> Tenure:
        """Open the streams of ranks that go on with the batch of an owner before us."""
        self._continues = True
        tenure = self._tenure = self._new_tenure(grant, standing.ledger(grant, self._clock()))
        standing.begin(tenure)
        tenure.begin()
        return tenure

    def _new_tenure(self, grant: Grant, ledger: StepLedger | None = None) -> Tenure:
        return Tenure(
            self.executor,
            self.settings,
            grant,
            owner_id=self._owner_id,
            clock=self._clock,
            listener=self,
            ledger=ledger,
            on_timing=self.on_timing,
        )

    # Steps

    def send(
        self,
        step: int,
        delta: bytes,
        mode: scheduler_delta_pb2.SchedulerDelta.Mode.ValueType,
        *,
        state_digest: int,
        num_tokens: int,
    ) -> None:
        """Queue the next delta for every rank; never waits. What is sent to a lost group goes nowhere.

        Args:
            step: the last one sent, plus one.
            delta: the serialized SchedulerDelta.
            mode: of the delta; a RUN step owes a result.
            state_digest: of the batch state after the delta, as in the delta itself.
            num_tokens: tokens scheduled in the step, for its time budget.
        """
        if self._tenure is None or self._is_over:
            return
        limit = self.executor.max_step_message_bytes - _ENVELOPE_BYTES
        if len(delta) > limit:
            # Ranks would refuse it, and seem to be at fault.
            size = f"the delta of step {step} has {len(delta)} bytes, and ranks take {limit}"
            self._lose(LossReason(None, f"the control plane failed, by a defect of its own: {size}"))
        else:
            self._tenure.send(step, delta, mode, state_digest, num_tokens)

    def send_sample_input(self, sample_input: scheduler_delta_pb2.SampleInput) -> None:
        """Queue what the sampling of a step waits for; kept and sent again until the step's result came."""
        if self._tenure is not None and not self._is_over:
            self._tenure.send_sample_input(sample_input)

    def expect_token_digest(self, step: int, value: int) -> None:
        """Say what every rank's token digest must be once it has completed ``step``."""
        if self._tenure is not None:
            self._tenure.expect_token_digest(step, value)

    def accuse(self, rank: Rank, phrase: str) -> None:
        """End the group because of an answer of ``rank`` that cannot be true; ``phrase`` goes on after "rank N"."""
        if self._tenure is not None:
            self._tenure.accuse(rank, phrase)

    @property
    def _is_over(self) -> bool:
        return self.loss is not None or self._teardown is not None

    # What the tenure tells; see TenureListener

    def tenure_answered(self, result: scheduler_delta_pb2.StepResult) -> None:
        """Pass a result to the engine."""
        self.on_result(result)

    def tenure_settled(self, step: int) -> None:
        """Pass an acceptance to the engine."""
        self.on_accepted(step)

    def tenure_judged(self, judgement: Judgement) -> None:
        """Act on a verdict."""
        if judgement.verdict is Verdict.LOST:
            self._lose(LossReason(judgement.rank, str(judgement)))
        elif self.facts is not None:
            self._set_health(judgement)

    def tenure_fenced(self, rank: Rank, why: str) -> None:
        """End the group without touching its ranks."""
        self._lose(LossReason(rank, f"rank {rank} has another owner: {why}", LossKind.FENCED))

    def tenure_broke(self, what: str, error: BaseException) -> None:
        """End a group that is not watched any more."""
        log.error("group_task.failed", task=what, exc_info=error)
        self._lose(LossReason(None, f"the control plane failed at {what}: {type(error).__name__}"))

    def rank_is_busy(self, rank: Rank, busy: rank_health_pb2.RankReport.Busy) -> None:
        """Show progress of a stage."""
        if self.facts is None:
            self._progress(self._stage, rank, busy.progress, busy.detail or busy.what)

    def _on_exit(self, end: RankExit) -> None:
        if self._tenure is None:
            self._lose(LossReason(end.rank, f"rank {end.rank} exited: {end.cause}"))
        else:
            self._tenure.on_exit(end)

    def _set_health(self, judgement: Judgement) -> None:
        healthy = judgement.verdict is Verdict.HEALTHY
        self.health_reason = "" if healthy else str(judgement)
        if healthy != self.healthy:
            self.healthy = healthy
            self.on_health(healthy, self.health_reason)

    # The end

    def _lose(self, loss: LossReason) -> None:
        if self._is_over:
            return
        self.loss = loss
        self.healthy, self.health_reason = False, loss.reason
        log.error("rank.lost" if loss.rank is not None else "group.lost", rank=loss.rank, reason=loss.reason)
        if self._tenure is not None:
            self._tenure.silence()
        self._lost.set()
        if self.facts is None or self._tenure is None:
            return  # form() raises it and tears down
        if self.executor.outlives_owner:
            self.on_health(False, loss.reason)  # at once; the rest must wait for an answer
            self._last_word = asyncio.create_task(self._ask_for_the_last_word(self._tenure, loss))
        else:
            self._tell_loss(loss)

    async def _ask_for_the_last_word(self, tenure: Tenure, loss: LossReason) -> None:
        loss = await confirm(
            loss,
            self.executor,
            tenure.epoch,
            tenure.living(),
            have_told=tenure.have_told_of_a_loss(),
            timeout_s=_FAREWELL_S,
        )
        log.info("loss.confirmed", epoch=tenure.epoch, kind=loss.kind.value, owner_address=loss.owner_address)
        self._tell_loss(loss)

    def _tell_loss(self, loss: LossReason) -> None:
        self.loss = loss
        try:
            self.on_lost(loss)
        finally:
            self._begin_teardown(loss.reason)

    async def goodbye(self, kind: worker_pb2.StepsRequest.Goodbye.Kind.ValueType) -> bool:
        """Send a goodbye to every rank, the last one first (PROTOCOL E); say whether all took it.

        Nothing more is heard of the ranks, and teardown leaves them to whoever comes next.
        """
        if self._tenure is None:
            return False
        self._has_parted = True
        if kind != worker_pb2.StepsRequest.Goodbye.KIND_SHUTDOWN:
            self.executor.let_go()
        self._tenure.silence()
        taken = [await stream.goodbye(kind, timeout_s=_FAREWELL_S) for stream in reversed(self._tenure.streams)]
        return all(taken)

    async def ask_all(
        self, method: str, request: Message, *, timeout_s: float, may_refuse: bool = True
    ) -> list[Message]:
        """Make a call that changes the ranks on all of them, in rank order; our epoch is set in ``request``.

        Args:
            method: of WorkerService.
            request: the same for all.
            timeout_s: for the slowest.
            may_refuse: False where ranks must not differ in it: one that refuses then loses the group, too.

        Raises:
            InvalidParameter, WrongState, NotBuilt: a rank refused, in its words; the group lives on.
            GroupLost: the group is lost, before this or by it.
        """
        if self._tenure is None or self._is_over:
            raise GroupLost(self.health_reason)
        request.epoch = self._tenure.epoch  # type: ignore[attr-defined]  # all these have one
        try:
            replies = await self.executor.collective_rpc(method, request, timeout_s=timeout_s)
        except RankCallError as error:
            cause = error.error
            if may_refuse and isinstance(cause, InvalidParameter | WrongState | NotBuilt):
                if len(self.executor.ranks) > 1:
                    cause.message = clip(f"rank {error.rank}: {cause.message}")
                    cause.args = (cause.message,)
                raise cause from error
            if isinstance(cause, Fenced):
                self.tenure_fenced(error.rank, cause.message)
            else:
                self._lose(LossReason(error.rank, f"rank {error.rank} failed at {error.method}: {error.cause}"))
            raise GroupLost(self.health_reason) from error
        self._tenure.saw_answers()
        return replies

    async def proves_ownership(self) -> bool:
        """Ask the ranks, and say whether one answered just now that the epoch is still ours."""
        if self._tenure is None or self._is_over or self._has_parted:
            return False
        epoch = self._tenure.epoch
        for rank in self.executor.ranks:
            try:
                reply = await self.executor.call(rank, "Describe", worker_pb2.DescribeRequest(), timeout_s=_FAREWELL_S)
            except (ManipleError, ConnectionError, TimeoutError):
                continue
            assert isinstance(reply, worker_pb2.DescribeResponse)
            return reply.epoch == epoch
        return False

    async def next_owner_address(self) -> str:
        """Ask the ranks where their owner answers clients; nothing while we are the last, or nobody says."""
        for rank in self.executor.ranks:
            try:
                reply = await self.executor.call(rank, "Describe", worker_pb2.DescribeRequest(), timeout_s=_FAREWELL_S)
            except (ManipleError, ConnectionError, TimeoutError):
                continue
            assert isinstance(reply, worker_pb2.DescribeResponse)
            return reply.owner_address if self._tenure and reply.epoch > self._tenure.epoch else ""
        return ""

    async def teardown(self, reason: str) -> None:
        """End the group and everything it started, once; every call returns when that is done."""
        await asyncio.shield(self._begin_teardown(reason))

    def _begin_teardown(self, reason: str) -> asyncio.Task[None]:
        if self._teardown is None:
            self.healthy, self.health_reason = False, reason
            self._teardown = asyncio.create_task(self._run_teardown(reason))
        return self._teardown

    async def _run_teardown(self, reason: str) -> None:
        started_at = time.monotonic()
        if self._last_word is not None:
            await asyncio.wait({self._last_word})
        if self._forming is not None:
            self._forming.cancel()
            await asyncio.wait({self._forming}, timeout=_FAREWELL_S)
            if self._forming.done() and not self._forming.cancelled():
                self._forming.exception()  # form() raised it, or the loss that explains it
        is_others = self.loss is not None and self.loss.kind is not LossKind.LOST  # or may be
        if self._tenure is not None:
            self._tenure.silence()
            if self.loss is None and self.executor.outlives_owner and not self._has_parted:
                await self._leave_to_next()
            if not (is_others or self._has_parted):
                farewells = (self._dismiss(self._tenure, stream, reason) for stream in self._tenure.streams)
                await asyncio.gather(*farewells)
            await self._tenure.end()
        # What another owner may hold is not ours to kill; of ranks that outlive us only the connections are closed.
        if is_others:
            self.executor.let_go()
        if not is_others or self.executor.outlives_owner:
            await self.executor.shutdown(grace_s=self.settings.teardown_grace_s)
        self.allowance.give_back(self._owner_id)
        epoch = self._tenure.epoch if self._tenure is not None else Epoch(0)
        log.info("group.ended", epoch=epoch, reason=reason, duration_s=round(time.monotonic() - started_at, 3))

    async def _leave_to_next(self) -> None:
        """Say that we go, to ranks that wait for the next owner: with their batch, where they have one."""
        goodbye = worker_pb2.StepsRequest.Goodbye
        keeps_it = self.facts is not None or self._continues
        await self.goodbye(goodbye.KIND_HANDOVER if keeps_it else goodbye.KIND_RELEASE)

    async def _dismiss(self, tenure: Tenure, stream: RankStream, reason: str) -> None:
        """Tell a rank to go: on its stream, or by a call where that is broken. One that is gone needs no telling."""
        if tenure.has_exited(stream.rank):
            return
        if await stream.goodbye(worker_pb2.StepsRequest.Goodbye.KIND_SHUTDOWN, timeout_s=_FAREWELL_S):
            return
        request = worker_pb2.LeaveRequest(epoch=tenure.epoch, reason=reason)
        try:
            await self.executor.call(stream.rank, "Leave", request, timeout_s=_FAREWELL_S)
        except (ManipleError, ConnectionError, TimeoutError) as error:
            log.info("rank.not_dismissed", rank=stream.rank, reason=str(error))

    # For people

    def ranks(self) -> list[RankStatus]:
        """Return what is known of each rank, for GetStatus."""
        return self._tenure.ranks() if self._tenure is not None else []
