"""Talk to the ranks and watch them, from the grant of the epoch to the end of the group.

Every task that waits for a rank lives here. What comes of it goes to one listener, from the event loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol

from control_plane.executors.base import Executor, RankExit
from control_plane.group.claim import Grant
from control_plane.group.rank_clock import StepTiming
from control_plane.group.rank_reports import RankReports
from control_plane.group.rank_stream import RankStream, StreamTiming
from control_plane.group.settings import GroupSettings, RankStatus
from control_plane.group.step_ledger import Answer, SentStep, StepLedger
from control_plane.group.watchdog import Judgement, known_loss, move_clock, verdict
from maniple.v1 import rank_health_pb2, scheduler_delta_pb2, worker_pb2
from service_chassis.errors import Fenced, ManipleError
from service_chassis.ids import Rank
from service_chassis.telemetry import get_logger

log = get_logger()

OUTPUT_RANK = Rank(0)
_RUN = (scheduler_delta_pb2.SchedulerDelta.MODE_UNSPECIFIED, scheduler_delta_pb2.SchedulerDelta.MODE_RUN)
_HEALTH_RETRY_S = 0.1
# Later than this, a thread did not run: its process, or its host, is stopped or starved.
_NOTABLY_LATE_S = 1.0


class TenureListener(Protocol):
    """Who is told. Nothing more comes after ``silence``."""

    def tenure_answered(self, result: scheduler_delta_pb2.StepResult) -> None:
        """The next result: in order, once."""

    def tenure_settled(self, step: int) -> None:
        """Every rank accepted all steps up to this one."""

    def tenure_judged(self, judgement: Judgement) -> None:
        """The watchdog looked."""

    def tenure_fenced(self, rank: Rank, why: str) -> None:
        """Another owner holds the epoch."""

    def tenure_broke(self, what: str, error: BaseException) -> None:
        """A task of ours failed: a defect, and a rank is unwatched."""

    def rank_is_busy(self, rank: Rank, busy: rank_health_pb2.RankReport.Busy) -> None:
        """A rank told of long work."""


class Tenure:
    """One owner's time with the ranks. A ``StreamListener``."""

    def __init__(
        self,
        executor: Executor,
        settings: GroupSettings,
        grant: Grant,
        *,
        owner_id: str,
        clock: Callable[[], float],
        listener: TenureListener,
        ledger: StepLedger | None = None,
        on_timing: Callable[[Rank, StepTiming], None] | None = None,
    ) -> None:
        """Take a grant and, of ranks that go on with another owner's batch, where they stand."""
        self.epoch = grant.epoch
        self.step_us_per_token = 0.0  # known once the group is formed
        self._executor = executor
        self._settings = settings
        self._clock = clock
        self._listener = listener
        self._silenced = False
        self._ledger = ledger or StepLedger(executor.ranks)
        self._progress = asyncio.Event()  # a rank said something
        self._reports = RankReports(
            grant.incarnations,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            step_timeout_s=settings.step_timeout_s,
            clock=clock,
        )
        timing = StreamTiming(
            report_interval_s=settings.report_interval_s,
            idle_report_interval_s=settings.idle_report_interval_s,
            answer_timeout_s=settings.heartbeat_timeout_s,
        )
        self.streams = [
            RankStream(
                rank,
                functools.partial(executor.open_steps, rank),
                self._ledger,
                self,
                epoch=grant.epoch,
                owner_id=owner_id,
                timing=timing,
                sends_deltas=executor.delta_broadcast is None,
                on_timing=on_timing,
            )
            for rank in executor.ranks
        ]
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self) -> None:
        """Open the streams and begin to watch."""
        for stream in self.streams:
            self._spawn(stream.run(), f"steps-{stream.rank}")
            self._spawn(self._watch_health(stream.rank), f"health-{stream.rank}")
        self._spawn(self._watch(), "watchdog")

    def silence(self) -> None:
        """Tell the listener nothing more; the ranks are still talked to."""
        self._silenced = True

    async def end(self) -> None:
        """End all tasks."""
        self.silence()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._silenced:
            self._listener.tenure_broke(task.get_name(), error)

    # Down

    def send(
        self,
        step: int,
        delta: bytes,
        mode: scheduler_delta_pb2.SchedulerDelta.Mode.ValueType,
        state_digest: int,
        num_tokens: int,
    ) -> None:
        """See ``WorkerGroup.send``."""
        message = worker_pb2.StepsRequest(epoch=self.epoch, delta=delta)
        was_idle = self._ledger.oldest is None
        self._ledger.add(SentStep(step, message, mode in _RUN, num_tokens, self._clock()))
        self.expect_state_digest(step, state_digest)
        broadcast = self._executor.delta_broadcast
        if broadcast is not None:
            broadcast.send(message.SerializeToString())
            if not was_idle:
                return  # the streams have nothing to write, and beat at the right interval already
        for stream in self.streams:
            stream.wake()

    def send_sample_input(self, sample_input: scheduler_delta_pb2.SampleInput) -> None:
        """See ``WorkerGroup.send_sample_input``."""
        message = worker_pb2.StepsRequest(epoch=self.epoch, sample_input=sample_input)
        self._ledger.add_sample_input(sample_input.step, message)
        self.streams[OUTPUT_RANK].send_sample_input(message)  # nowhere else anything is sampled

    def expect_state_digest(self, step: int, value: int) -> None:
        """Say what every rank's state digest must be once it has accepted ``step``."""
        self._reports.expect_state_digest(step, value)

    def expect_token_digest(self, step: int, value: int) -> None:
        """See ``WorkerGroup.expect_token_digest``."""
        self._reports.expect_token_digest(step, value)
        self._act_on_facts()

    # Up; see StreamListener

    def on_welcome(self, rank: Rank, welcome: worker_pb2.StepsResponse.Welcome) -> None:
        """Check where the rank stands before anything is sent to it again."""
        self._reports.heard_steps(rank)
        self._reports.saw_incarnation(rank, welcome.incarnation_id)
        lowest, highest = self._ledger.accepted(rank), self._ledger.last_sent
        if not lowest <= welcome.accepted <= highest:
            self.accuse(rank, f"says that it accepted step {welcome.accepted}; known are {lowest} to {highest}")
            return
        self._reports.saw_state_digest(rank, welcome.accepted, welcome.state_digest)
        self._act_on_facts()
        self._take_progress(rank, welcome.accepted, welcome.completed)

    def on_step_result(self, rank: Rank, result: scheduler_delta_pb2.StepResult) -> None:
        """Pass a result on, in order and once."""
        self._reports.heard_steps(rank)
        if rank != OUTPUT_RANK or self._silenced:
            return
        due = self._ledger.next_result
        answer = self._ledger.answer(result.step)
        if answer is Answer.DUE:
            self._take_progress(rank, result.step, result.step)
            self._listener.tenure_answered(result)
        elif answer is Answer.GAP:
            self.accuse(rank, f"sent the result of step {result.step} while that of step {due} was due")

    def on_stream_report(self, rank: Rank, report: rank_health_pb2.RankReport) -> None:
        """Take over a report from Steps."""
        self._reports.heard_steps(rank)
        self._take_report(rank, report)

    def on_refused(self, rank: Rank, error: ManipleError) -> None:
        """Note that no reconnect can help."""
        if isinstance(error, Fenced):
            self._fenced(rank, error.message)
        elif not self._reports.state.ranks[rank].left_alone:  # else that is why, and the cause lies with another rank
            self.accuse(rank, f"refused: {type(error).__name__}: {error.message}")

    def on_exit(self, end: RankExit) -> None:
        """Note that a rank's process ended."""
        self._reports.on_exit(end)
        self._act_on_facts()

    def accuse(self, rank: Rank, phrase: str) -> None:
        """Note something that no rank of ours does; ``phrase`` goes on after "rank N"."""
        self._reports.on_misbehaved(rank, phrase)
        self._act_on_facts()

    def _take_report(self, rank: Rank, report: rank_health_pb2.RankReport) -> None:
        if report.epoch > self.epoch:
            self._fenced(rank, f"it granted epoch {report.epoch}")
        if report.accepted > self._ledger.last_sent:
            if report.epoch <= self.epoch:  # else the next owner sent it
                self.accuse(rank, f"says that it accepted step {report.accepted}, which was never sent")
            return
        if report.HasField("busy") and not self._silenced:
            self._listener.rank_is_busy(rank, report.busy)
        self._reports.saw_report(rank, report)
        self._progress.set()
        self._act_on_facts()
        self._take_progress(rank, report.accepted, report.completed)

    def saw_answers(self) -> None:
        """Note that every rank answered a call for long work."""
        self._reports.saw_answers()

    async def news(self) -> Mapping[Rank, rank_health_pb2.RankReport]:
        """Wait until some rank reports, and return the latest report of each that did since the grant."""
        self._progress.clear()
        await self._progress.wait()
        return self._reports.latest

    def _take_progress(self, rank: Rank, accepted: int, completed: int) -> None:
        self._reports.saw_progress(rank, accepted=accepted, completed=completed)
        if self._ledger.accept(rank, accepted) and not self._silenced:
            self._listener.tenure_settled(self._ledger.accepted_by_all)

    # Watching

    async def _watch_health(self, rank: Rank) -> None:
        was_heard = True
        while True:
            try:
                async for report in self._executor.watch_health(rank, self.epoch):
                    was_heard = True
                    self._reports.heard_health(rank)
                    if report.late_ms > 1000 * _NOTABLY_LATE_S:
                        log.warning("rank.was_late", rank=rank, late_s=report.late_ms / 1000)
                    self._take_report(rank, report)
            except ConnectionError as error:
                # Once for each time that it broke: behind a proxy a rank that is gone refuses every new try. And a rank
                # that was told to go takes its streams along.
                tell = log.warning if was_heard and not self._silenced else log.debug
                tell("health_stream.broken", rank=rank, reason=str(error))
                was_heard = False
            await asyncio.sleep(_HEALTH_RETRY_S)

    async def _watch(self) -> None:
        """Tick the watchdog."""
        tick_s = min(0.1, self._settings.heartbeat_timeout_s / 10)
        while True:
            await asyncio.sleep(tick_s)
            now = self._clock()
            oldest = self._ledger.oldest
            self._reports.watch_step(oldest, self._budget_s(oldest) if oldest else 0.0)
            late_s = move_clock(self._reports.state, now, tick_s)
            if late_s > _NOTABLY_LATE_S:
                log.warning("watchdog.was_late", late_s=round(late_s, 3))
            if not self._silenced:
                self._listener.tenure_judged(verdict(now, self._reports.state))

    def _budget_s(self, sent: SentStep) -> float:
        return self._settings.step_timeout_s + sent.num_tokens * self.step_us_per_token / 1e6

    def _act_on_facts(self) -> None:
        """Act at once on what needs no punctual watcher."""
        judgement = known_loss(self._reports.state)
        if judgement is not None and not self._silenced:
            self._listener.tenure_judged(judgement)

    def _fenced(self, rank: Rank, why: str) -> None:
        if not self._silenced:
            self._listener.tenure_fenced(rank, why)

    # For people, and for the farewell

    def has_exited(self, rank: Rank) -> bool:
        """Whether the rank's process is known to have ended."""
        return bool(self._reports.state.ranks[rank].exited)

    def living(self) -> dict[Rank, str]:
        """Return the incarnations of the ranks that are not known to have ended."""
        return {
            rank: incarnation for rank, incarnation in self._reports.incarnations.items() if not self.has_exited(rank)
        }

    def have_told_of_a_loss(self) -> set[Rank]:
        """Return the ranks whose last report says, under our epoch, that they or the group cannot go on."""
        latest = self._reports.latest.items()
        return {rank for rank, report in latest if report.epoch == self.epoch and report.HasField("failure")}

    def ranks(self) -> list[RankStatus]:
        """Return what is known of each rank."""
        now = self._clock()
        statuses = []
        for state, stream in zip(self._reports.state.ranks, self.streams, strict=True):
            address, pid = self._executor.describe_rank(state.rank)
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
