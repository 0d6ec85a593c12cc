"""An engine that tells OpenTelemetry of each request that ended. Without an endpoint none is made."""

from __future__ import annotations

from typing import Any

from control_plane.engine import Engine
from control_plane.live_request import LiveRequest
from control_plane.request_spans import RequestSpans
from control_plane.scheduling.plan import StepPlan
from service_chassis.errors import ManipleError
from service_chassis.ids import RequestId


class SpannedEngine(Engine):
    """See ``Engine``."""

    def __init__(self, *, spans: RequestSpans, **parts: Any) -> None:
        """Take what an ``Engine`` takes."""
        self._spans = spans
        self._first_steps: dict[RequestId, int] = {}  # of the requests that are in a delta
        self._last_step = 0  # whose result was applied
        super().__init__(**parts)

    def _send(self, plan: StepPlan, now: float) -> None:
        super()._send(plan, now)
        for request in plan.started:
            if request.request_id in self._live:
                self._first_steps[request.request_id] = plan.step

    def _apply_results(self) -> None:
        if self._results:
            self._last_step = self._results[-1].step
        super()._apply_results()

    def _end(self, live: LiveRequest, error: ManipleError | None, frees_id: bool = False) -> None:
        super()._end(live, error, frees_id)
        first = self._first_steps.pop(live.generation.request_id, 0)
        last = self._last_step if self._last_step >= first else 0  # it ended before the result of its first step
        self._spans.record(live, error, self.now(), (first, last if live.started_at is not None else 0))
