"""What the watchdog is told of ranks that are, or were, at long work."""

from __future__ import annotations

from control_plane.group.rank_reports import RankReports
from control_plane.group.watchdog import Verdict, verdict
from maniple.v1.rank_health_pb2 import RankReport
from service_chassis.ids import Rank


class Watched:
    """One rank with a heartbeat timeout of 2 s, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self.reports = RankReports({Rank(0): "a"}, heartbeat_timeout_s=2.0, step_timeout_s=10.0, clock=lambda: self.now)

    def says(self, *, busy_for_s: float | None) -> None:
        report = RankReport(incarnation_id="a")
        if busy_for_s is not None:
            report.busy.CopyFrom(RankReport.Busy(what="wake", up_to_s=60, for_s=busy_for_s))
        self.reports.heard_health(Rank(0))
        self.reports.heard_steps(Rank(0))
        self.reports.saw_report(Rank(0), report)

    def verdict_after(self, seconds: float) -> Verdict:
        return verdict(self.now + seconds, self.reports.state).verdict


def test_busy_rank_may_be_silent_and_one_that_answered_may_not() -> None:
    watched = Watched()
    watched.says(busy_for_s=5.0)
    assert watched.verdict_after(3.0) is Verdict.HEALTHY
    watched.reports.saw_answers()  # and stops there, before it can say that it is done
    assert watched.verdict_after(3.0) is Verdict.LOST


def test_report_that_the_answer_overtook_makes_nobody_busy() -> None:
    watched = Watched()
    watched.reports.saw_answers()
    watched.now += 0.2
    watched.says(busy_for_s=0.5)
    assert watched.verdict_after(3.0) is Verdict.LOST


def test_work_that_began_after_the_answers_counts() -> None:
    watched = Watched()
    watched.reports.saw_answers()
    watched.now += 0.2
    watched.says(busy_for_s=0.1)
    assert watched.verdict_after(3.0) is Verdict.HEALTHY
    watched.says(busy_for_s=None)
    assert watched.verdict_after(3.0) is Verdict.LOST
