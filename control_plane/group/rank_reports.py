"""Keep the watchdog's state from what ranks say and what becomes of their processes. No tasks, no clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from control_plane.executors.base import RankExit
from control_plane.group.digest_check import DigestCheck
from control_plane.group.step_ledger import SentStep
from control_plane.group.watchdog import BusyState, GroupState, RankState, StepState
from maniple.v1 import rank_health_pb2
from service_chassis.ids import Rank
from service_chassis.protocol.failure_kinds import BROKEN_COLLECTIVE


class RankReports:
    """What is known of every rank of one group since its epoch was granted."""

    def __init__(
        self,
        incarnations: Mapping[Rank, str],
        *,
        heartbeat_timeout_s: float,
        step_timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        now = clock()
        self.incarnations = dict(incarnations)
        self.latest: dict[Rank, rank_health_pb2.RankReport] = {}  # what each rank said last, on either connection
        # From the grant on a rank is expected on both connections.
        self.state = GroupState(
            ranks=[RankState(rank, heard_steps_at=now, heard_health_at=now) for rank in sorted(incarnations)],
            heartbeat_timeout_s=heartbeat_timeout_s,
            step_timeout_s=step_timeout_s,
            ticked_at=now,
        )
        self._clock = clock
        self._state_digests = DigestCheck("state")
        self._token_digests = DigestCheck("token")
        self._state_digests.expect(0, 0)
        self._answered_at = float("-inf")  # when all ranks had answered the last call that made them busy

    def on_exit(self, end: RankExit) -> None:
        """Note that a process ended."""
        self.state.ranks[end.rank].exited = f"exited: {end.cause}"

    def on_misbehaved(self, rank: Rank, phrase: str) -> None:
        """Note something no rank of ours does."""
        self.state.ranks[rank].failed = phrase

    def heard_steps(self, rank: Rank) -> None:
        """Note a message on Steps."""
        self.state.ranks[rank].heard_steps_at = self._clock()

    def heard_health(self, rank: Rank) -> None:
        """Note a message on health."""
        self.state.ranks[rank].heard_health_at = self._clock()

    def saw_incarnation(self, rank: Rank, incarnation_id: str) -> None:
        """Compare with the incarnation that joined."""
        if incarnation_id and incarnation_id != self.incarnations[rank]:
            self.state.ranks[rank].restarted = "restarted: another incarnation answers in its place"

    def saw_progress(self, rank: Rank, *, accepted: int, completed: int) -> None:
        """Take over counts; two connections may bring them in either order."""
        known = self.state.ranks[rank]
        if accepted > known.accepted:
            known.accepted, known.accepted_at = accepted, self._clock()
        if completed > known.completed:
            known.completed, known.completed_at = completed, self._clock()

    def saw_state_digest(self, rank: Rank, step: int, value: int) -> None:
        """Compare a rank's batch state with our own."""
        phrase = self._state_digests.report(rank, step, value)
        if phrase:
            self.state.ranks[rank].diverged = phrase

    def saw_answers(self) -> None:
        """Note that every rank answered a call for long work, so that none is busy any more, whatever it said before.

        A rank that stops the moment after has no chance to say so itself, and must not be waited for as a busy one.
        """
        self._answered_at = self._clock()
        for known in self.state.ranks:
            known.busy = None

    def saw_report(self, rank: Rank, report: rank_health_pb2.RankReport) -> None:
        """Take over a report of either connection."""
        known = self.state.ranks[rank]
        self.saw_incarnation(rank, report.incarnation_id)
        if known.restarted:
            return
        self.latest[rank] = report
        self.saw_progress(rank, accepted=report.accepted, completed=report.completed)
        known.running_step, known.running_for_s = report.running_step, report.running_for_ms / 1000
        known.busy = None
        # One that was on its way when the answer came tells of work that is over.
        if report.HasField("busy") and self._clock() - report.busy.for_s > self._answered_at:
            known.busy = BusyState(report.busy.what, report.busy.for_s, report.busy.up_to_s)
        if report.HasField("failure"):
            failure = report.failure
            where = f" in step {failure.step}" if failure.step else ""
            phrase = f"failed{where}: {failure.kind}: {failure.message}"
            if failure.kind != BROKEN_COLLECTIVE:
                known.failed = phrase
            elif not known.left_alone:
                known.left_alone, known.left_alone_at = phrase, self._clock()
        self.saw_state_digest(rank, report.accepted, report.state_digest)
        if report.token_digest:  # 0: the rank does not know it, as after bookkeeping alone
            known.diverged = known.diverged or self._token_digests.report(rank, report.completed, report.token_digest)

    def expect_state_digest(self, step: int, value: int) -> None:
        """Enter our own value, before the delta is sent."""
        self._blame(self._state_digests.expect(step, value))

    def expect_token_digest(self, step: int, value: int) -> None:
        """Enter our own value, once the results up to ``step`` were applied."""
        self._blame(self._token_digests.expect(step, value))

    def watch_step(self, sent: SentStep | None, budget_s: float) -> None:
        """Say which step the watchdog's clock is about."""
        if sent is None:
            self.state.oldest = None
        elif self.state.oldest is None or self.state.oldest.step != sent.step:
            self.state.oldest = StepState(sent.step, sent.sent_at, budget_s)

    def _blame(self, difference: tuple[Rank, str] | None) -> None:
        if difference is not None:
            self.state.ranks[difference[0]].diverged = difference[1]
