"""An engine that tells a trace when it does what. Without ``--trace`` none is made, and nothing is measured."""

from __future__ import annotations

from time import monotonic_ns
from typing import Any

from control_plane.engine import Engine
from control_plane.scheduling.plan import PlanMode, StepPlan
from control_plane.step_trace import GroupTrace


class TracedEngine(Engine):
    """See ``Engine``: the same parts of its loop, between two looks at the clock."""

    def __init__(self, *, trace: GroupTrace, **parts: Any) -> None:
        """Take what an ``Engine`` takes."""
        self._trace = trace
        self._untold: list[int] = []  # steps that are applied and not published
        super().__init__(**parts)

    def _plan(self, now: float) -> StepPlan | None:
        began_ns = monotonic_ns()
        plan = super()._plan(now)
        if plan is not None:
            self._trace.work("schedule", began_ns, monotonic_ns(), [plan.step])
        return plan

    def _send(self, plan: StepPlan, now: float) -> None:
        began_ns = monotonic_ns()
        super()._send(plan, now)
        ended_ns = monotonic_ns()
        self._trace.work("send", began_ns, ended_ns, [plan.step], tokens=plan.num_tokens, rows=len(plan.rows))
        self._trace.launched(plan.step, began_ns)
        if plan.mode is PlanMode.RUN:
            self._trace.sent(plan.step, ended_ns, num_tokens=plan.num_tokens, num_rows=len(plan.rows))

    def _apply_results(self) -> None:
        steps = [result.step for result in self._results]
        began_ns = monotonic_ns()
        super()._apply_results()
        if steps:
            ended_ns = monotonic_ns()
            self._trace.work("result", began_ns, ended_ns, steps)
            for step in steps:
                self._trace.answered(step, began_ns)
            self._untold += steps

    def _publish(self) -> None:
        steps, self._untold = self._untold, []
        began_ns = monotonic_ns()
        super()._publish()
        if steps:
            self._trace.work("publish", began_ns, monotonic_ns(), steps)
