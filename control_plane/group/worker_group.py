"""Own one group of ranks: form it, send it deltas, watch it, end it once.

The engine sees callbacks; everything that waits for a rank happens in tasks of the group.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Coroutine
from typing import Any

from control_plane.executors.base import Executor, RankExit
from control_plane.group.formation import Formation, Grant, ProgressCallback
from control_plane.group.loss import GroupNotFormed, LossKind, LossReason
from control_plane.group.rank_reports import RankReports
from control_plane.group.rank_stream import RankStream, StreamTiming
from control_plane.group.settings import GroupFacts, GroupSettings, RankStatus
from control_plane.group.step_ledger import Answer, SentStep, StepLedger
from control_plane.group.watchdog import Judgement, Verdict, known_loss, move_clock, verdict
from maniple.v1 import rank_health_pb2, scheduler_delta_pb2, worker_pb2
from service_chassis.errors import Fenced, ManipleError
from service_chassis.ids import Epoch, Rank
from service_chassis.telemetry import get_logger

log = get_logger()

OUTPUT_RANK = Rank(0)
_RUN = (scheduler_delta_pb2.SchedulerDelta.MODE_UNSPECIFIED, scheduler_delta_pb2.SchedulerDelta.MODE_RUN)
_HEALTH_RETRY_S = 0.1
# How long a survivor may take to hear that the group is over.
_FAREWELL_S = 0.5


class WorkerGroup:
    """A group under one owner, from its formation to its end. Not used again afterwards; form a new one."""

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
        # Set by the engine before form(). All are called from the event loop and must not raise.
        self.on_result: Callable[[scheduler_delta_pb2.StepResult], None] = lambda result: None
        self.on_accepted: Callable[[int], None] = lambda step: None  # every rank accepted up to this step
        self.on_lost: Callable[[LossReason], None] = lambda loss: None  # at most once, after form() returned
        self.on_health: Callable[[bool, str], None] = lambda healthy, reason: None
        self.healthy = False  # becomes true when form() returns; the reason beside it is for people
        self.health_reason = "the group is not formed"
        self.loss: LossReason | None = None
        self.facts: GroupFacts | None = None
        self._owner_id = owner_id
        self._clock = clock
        self._epoch = Epoch(0)
        self._ledger = StepLedger(executor.ranks)
        self._reports: RankReports | None = None  # since the grant
        self._streams: list[RankStream] = []
        self._tasks: set[asyncio.Task[None]] = set()  # streams, health watches, watchdog; ended by teardown alone
        self._forming: asyncio.Task[GroupFacts] | None = None
        self._progress: ProgressCallback = lambda stage, rank, share, detail: None
        self._stage = ""
        self._teardown: asyncio.Task[None] | None = None
        self._lost = asyncio.Event()

    # Formation

    async def form(self, progress: ProgressCallback = lambda stage, rank, share, detail: None) -> GroupFacts:
        """Start or find the ranks and bring them to readiness.

        A failure leaves nothing behind: the group is torn down before this raises.

        Raises:
            InvalidParameter: what was asked for cannot be served, in the words of the rank that refused.
            GroupNotFormed: a rank is missing, lost or late; the text names it.
        """
        assert self._forming is None, "a group is formed once"
        self._progress = progress
        formation = Formation(
            self.executor,
            self.settings,
            owner_id=self._owner_id,
            progress=self._report_stage,
            on_granted=self._begin_tenure,
        )
        self.executor.subscribe_exit(self._on_exit)
        self._forming = asyncio.create_task(formation.run())
        lost = asyncio.create_task(self._lost.wait())
        try:
            await asyncio.wait({self._forming, lost}, return_when=asyncio.FIRST_COMPLETED)
            if self.loss is not None:  # knows more than the call that failed with it
                raise GroupNotFormed(self.loss)
            if self._teardown is not None or self._forming.cancelled():
                raise GroupNotFormed(LossReason(None, "the group was torn down while it was forming"))
            facts = self.facts = self._forming.result()
        except BaseException as error:
            await self.teardown(str(error) or type(error).__name__)
            raise
        finally:
            lost.cancel()
        self._set_health(Judgement(Verdict.HEALTHY))
        return facts

    def _report_stage(self, stage: str, rank: Rank, share: float, detail: str) -> None:
        self._stage = stage
        self._progress(stage, rank, share, detail)

    def _begin_tenure(self, grant: Grant) -> None:
        """Open the streams and begin to watch: all ranks granted."""
        settings = self.settings
        self._epoch = grant.epoch
        self._reports = RankReports(
            grant.incarnations,
            epoch=grant.epoch,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            step_timeout_s=settings.step_timeout_s,
            clock=self._clock,
        )
        timing = StreamTiming(
            report_interval_s=settings.report_interval_s,
            idle_report_interval_s=settings.idle_report_interval_s,
            answer_timeout_s=settings.heartbeat_timeout_s,
        )
        for rank in self.executor.ranks:
            stream = RankStream(
                rank,
                functools.partial(self.executor.open_steps, rank),
                self._ledger,
                self,
                epoch=grant.epoch,
                owner_id=self._owner_id,
                timing=timing,
            )
            self._streams.append(stream)
            self._spawn(stream.run(), f"steps-{rank}")
            self._spawn(self._watch_health(rank, self._reports), f"health-{rank}")
        self._spawn(self._watch(self._reports), "watchdog")

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None:  # a defect of ours; without this task a rank is unwatched, so the group cannot go on
            log.error("group_task.failed", task=task.get_name(), exc_info=error)
            self._lose(LossReason(None, f"the control plane failed at {task.get_name()}: {type(error).__name__}"))

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
        if self._reports is None or self.loss is not None or self._teardown is not None:
            return
        message = worker_pb2.StepsRequest(epoch=self._epoch, delta=delta)
        self._ledger.add(SentStep(step, message, mode in _RUN, num_tokens, self._clock()))
        self._reports.expect_state_digest(step, state_digest)
        for stream in self._streams:
            stream.wake()

    def send_sample_input(self, sample_input: scheduler_delta_pb2.SampleInput) -> None:
        """Queue what the sampling of a step waits for; kept and sent again until the step's result came."""
        message = worker_pb2.StepsRequest(epoch=self._epoch, sample_input=sample_input)
        self._ledger.add_sample_input(sample_input.step, message)
        for stream in self._streams:
            stream.send_sample_input(message)

    def expect_token_digest(self, step: int, value: int) -> None:
        """Say what every rank's token digest must be once it has completed ``step``."""
        if self._reports is not None:
            self._reports.expect_token_digest(step, value)
            self._act_on_facts()

    def accuse(self, rank: Rank, phrase: str) -> None:
        """End the group because of an answer of ``rank`` that cannot be true; ``phrase`` goes on after "rank N"."""
        if self._reports is not None:
            self._reports.on_misbehaved(rank, phrase)
            self._act_on_facts()

    # What ranks say; see StreamListener

    def on_welcome(self, rank: Rank, welcome: worker_pb2.StepsResponse.Welcome) -> None:
        """Check where the rank stands before anything is sent to it again."""
        reports = self._known_reports()
        reports.heard_steps(rank)
        reports.saw_incarnation(rank, welcome.incarnation_id)
        lowest, highest = self._ledger.accepted(rank), self._ledger.last_sent
        if not lowest <= welcome.accepted <= highest:
            phrase = f"says that it accepted step {welcome.accepted}; known are {lowest} to {highest}"
            reports.on_misbehaved(rank, phrase)
        else:
            reports.saw_state_digest(rank, welcome.accepted, welcome.state_digest)
            self._take_progress(rank, welcome.accepted, welcome.completed)
        self._act_on_facts()

    def on_step_result(self, rank: Rank, result: scheduler_delta_pb2.StepResult) -> None:
        """Pass a result on, in order and once."""
        reports = self._known_reports()
        reports.heard_steps(rank)
        if rank != OUTPUT_RANK or self.loss is not None:
            return
        due = self._ledger.next_result
        answer = self._ledger.answer(result.step)
        if answer is Answer.DUE:
            self._take_progress(rank, result.step, result.step)
            self.on_result(result)
        elif answer is Answer.GAP:
            reports.on_misbehaved(rank, f"sent the result of step {result.step} while that of step {due} was due")
            self._act_on_facts()

    def on_stream_report(self, rank: Rank, report: rank_health_pb2.RankReport) -> None:
        """Take over a report from Steps."""
        self._known_reports().heard_steps(rank)
        self._take_report(rank, report)

    def on_refused(self, rank: Rank, error: ManipleError) -> None:
        """End the group: no reconnect can help."""
        if isinstance(error, Fenced):
            self._lose(LossReason(rank, f"rank {rank} has another owner: {error.message}", LossKind.FENCED))
            return
        self._known_reports().on_refused(rank, error)
        self._act_on_facts()

    def _take_report(self, rank: Rank, report: rank_health_pb2.RankReport) -> None:
        reports = self._known_reports()
        reports.saw_report(rank, report)
        if self.facts is None and report.HasField("busy"):
            busy = report.busy
            self._progress(self._stage, rank, busy.progress, busy.detail or busy.what)
        if report.accepted > self._ledger.last_sent:
            reports.on_misbehaved(rank, f"says that it accepted step {report.accepted}, which was never sent")
        self._act_on_facts()
        if self.loss is None:
            self._take_progress(rank, report.accepted, report.completed)

    def _take_progress(self, rank: Rank, accepted: int, completed: int) -> None:
        self._known_reports().saw_progress(rank, accepted=accepted, completed=completed)
        if self._ledger.accept(rank, accepted):
            self.on_accepted(self._ledger.accepted_by_all)

    def _known_reports(self) -> RankReports:
        assert self._reports is not None, "no rank speaks before the grant"
        return self._reports

    # Watching

    async def _watch_health(self, rank: Rank, reports: RankReports) -> None:
        while True:
            try:
                async for report in self.executor.watch_health(rank, self._epoch):
                    reports.heard_health(rank)
                    self._take_report(rank, report)
            except ConnectionError as error:
                log.warning("health_stream.broken", rank=rank, reason=str(error))
            await asyncio.sleep(_HEALTH_RETRY_S)

    async def _watch(self, reports: RankReports) -> None:
        """Tick the watchdog."""
        tick_s = min(0.1, self.settings.heartbeat_timeout_s / 10)
        while True:
            await asyncio.sleep(tick_s)
            now = self._clock()
            oldest = self._ledger.oldest
            reports.watch_step(oldest, self._budget_s(oldest.num_tokens) if oldest else 0.0)
            late_s = move_clock(reports.state, now, tick_s)
            if late_s > 1.0:
                log.warning("watchdog.was_late", late_s=round(late_s, 3))
            self._act(verdict(now, reports.state))

    def _budget_s(self, num_tokens: int) -> float:
        step_us_per_token = self.facts.step_us_per_token if self.facts else 0.0
        return self.settings.step_timeout_s + num_tokens * step_us_per_token / 1e6

    def _on_exit(self, end: RankExit) -> None:
        if self._reports is None:
            self._lose(LossReason(end.rank, f"rank {end.rank} exited: {end.cause}"))
        else:
            self._reports.on_exit(end)
            self._act_on_facts()

    def _act_on_facts(self) -> None:
        """Act at once on what needs no punctual watcher."""
        reports = self._known_reports()
        if reports.fenced_by is not None:
            self._lose(LossReason(None, f"epoch {reports.fenced_by} was granted to another owner", LossKind.FENCED))
        judgement = known_loss(reports.state)
        if judgement is not None:
            self._act(judgement)

    def _act(self, judgement: Judgement) -> None:
        if judgement.verdict is Verdict.LOST:
            self._lose(LossReason(judgement.rank, str(judgement)))
        elif self.facts is not None:
            self._set_health(judgement)

    def _set_health(self, judgement: Judgement) -> None:
        healthy = judgement.verdict is Verdict.HEALTHY
        self.health_reason = "" if healthy else str(judgement)
        if healthy != self.healthy:
            self.healthy = healthy
            self.on_health(healthy, self.health_reason)

    # The end

    def _lose(self, loss: LossReason) -> None:
        if self.loss is not None or self._teardown is not None:
            return
        self.loss = loss
        log.error("rank.lost" if loss.rank is not None else "group.lost", rank=loss.rank, reason=loss.reason)
        self.healthy, self.health_reason = False, loss.reason
        self._lost.set()
        if self.facts is not None:  # else form() raises it and tears down
            self.on_lost(loss)
            self._begin_teardown(loss.reason)

    async def goodbye(self, kind: worker_pb2.StepsRequest.Goodbye.Kind.ValueType) -> bool:
        """Send a goodbye to every rank, the last one first (PROTOCOL E); say whether all took it."""
        taken = [await stream.goodbye(kind, timeout_s=_FAREWELL_S) for stream in reversed(self._streams)]
        return all(taken)

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
        if self._forming is not None:
            self._forming.cancel()
            await asyncio.wait({self._forming}, timeout=_FAREWELL_S)
        fenced = self.loss is not None and self.loss.kind is LossKind.FENCED
        if not fenced:
            await asyncio.gather(*(self._dismiss(stream, reason) for stream in self._streams))
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not fenced:  # what another owner holds is not ours to kill
            await self.executor.shutdown(grace_s=self.settings.teardown_grace_s)
        log.info("group.ended", epoch=self._epoch, reason=reason, duration_s=round(time.monotonic() - started_at, 3))

    async def _dismiss(self, stream: RankStream, reason: str) -> None:
        """Tell a rank to go: on its stream, or by a call where that is broken. One that is gone needs no telling."""
        if self._reports is not None and self._reports.state.ranks[stream.rank].exited:
            return
        if await stream.goodbye(worker_pb2.StepsRequest.Goodbye.KIND_SHUTDOWN, timeout_s=_FAREWELL_S):
            return
        request = worker_pb2.LeaveRequest(epoch=self._epoch, reason=reason)
        try:
            await self.executor.call(stream.rank, "Leave", request, timeout_s=_FAREWELL_S)
        except (ManipleError, ConnectionError, TimeoutError) as error:
            log.info("rank.not_dismissed", rank=stream.rank, reason=str(error))

    # For people

    def ranks(self) -> list[RankStatus]:
        """Return what is known of each rank, for GetStatus."""
        if self._reports is None:
            return []
        now = self._clock()
        statuses = []
        for state, stream in zip(self._reports.state.ranks, self._streams, strict=True):
            address, pid = self.executor.describe_rank(state.rank)
            heard_at = min(state.heard_steps_at or now, state.heard_health_at or now)
            statuses.append(
                RankStatus(
                    rank=state.rank,
                    address=address,
                    pid=pid,
                    incarnation_id=self._reports.incarnations[state.rank],
                    connected=stream.connected,
                    accepted=state.accepted,
                    completed=state.completed,
                    running_step=state.running_step,
                    running_for_s=state.running_for_s,
                    silent_for_s=max(now - heard_at, 0.0),
                    busy=state.busy.what if state.busy else "",
                )
            )
        return statuses
