"""An engine that counts and measures what it does. Without ``--metrics-listen`` none is made, and nothing is measured.

What it adds to a step does not grow with the rows: some looks at the clock, and a histogram each. The time between
tokens is that between two results that were told, once for all rows that got a token in the later one.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from control_plane.engine import Engine
from control_plane.group.loss import LossReason
from control_plane.live_request import LiveRequest
from control_plane.metrics.meters import GroupMeters
from control_plane.scheduling import request as scheduled
from control_plane.scheduling.plan import PlanMode, StepPlan
from maniple.v1.scheduler_delta_pb2 import StepResult
from service_chassis.errors import ManipleError
from service_chassis.ids import RequestId


class MeteredEngine(Engine):
    """See ``Engine``: the same parts of its loop, between two looks at the clock."""

    def __init__(self, *, meters: GroupMeters, **parts: Any) -> None:
        """Take what an ``Engine`` takes."""
        self._meters = meters
        self._sent_at: dict[int, float] = {}  # RUN steps without a result
        self._beginners: dict[RequestId, LiveRequest] = {}  # started, and without a token
        self._told_at = 0.0  # when tokens were told last
        self._num_untold = 0  # results that were applied since
        self._num_first_tokens = 0  # of the present publication: tokens of requests that had none before
        super().__init__(**parts)
        tell = self._group.on_health

        def on_health(healthy: bool, reason: str) -> None:
            if not healthy and self._group.loss is None:
                meters.suspicions.add()
            tell(healthy, reason)

        self._group.on_health = on_health

    def _plan(self, now: float) -> StepPlan | None:
        began = perf_counter()
        plan = super()._plan(now)
        if plan is not None:
            self._meters.phases["schedule"].observe(perf_counter() - began)
        return plan

    def _send(self, plan: StepPlan, now: float) -> None:
        meters, num_prompt_tokens = self._meters, self._prompt_rate.total
        began = perf_counter()
        super()._send(plan, now)
        ended = perf_counter()
        meters.phases["send"].observe(ended - began)
        meters.delta_bytes.observe(self._encoder.num_bytes)
        runs = plan.mode is PlanMode.RUN
        meters.steps["run" if runs else "apply_only"].add()
        if runs:
            self._sent_at[plan.step] = ended
            meters.iteration_tokens.observe(plan.num_tokens)
        meters.prompt_tokens.add(self._prompt_rate.total - num_prompt_tokens)
        for request in plan.started:
            live = self._live.get(request.request_id)
            if live is not None and live.started_at == now:  # else it started in a group that was lost
                meters.queue_time.observe(now - live.arrived_at)
                self._beginners[request.request_id] = live

    def _on_result(self, result: StepResult) -> None:
        sent_at = self._sent_at.pop(result.step, None)
        if sent_at is not None:
            self._meters.phases["execute"].observe(perf_counter() - sent_at)
        super()._on_result(result)

    def _apply_results(self) -> None:
        if not self._results:
            super()._apply_results()
            return
        self._num_untold += len(self._results)
        began = perf_counter()
        super()._apply_results()
        self._meters.phases["apply"].observe(perf_counter() - began)

    def _publish(self) -> None:
        num_outputs, num_tokens = len(self._outputs), self._output_rate.total
        began = perf_counter()
        super()._publish()
        if not num_outputs:
            return
        meters, now = self._meters, self.now()
        meters.phases["publish"].observe(perf_counter() - began)
        if not (num_tokens := self._output_rate.total - num_tokens):
            return  # vectors, or a part of what is said of a prompt
        meters.output_tokens.add(num_tokens)
        told_at, self._told_at = self._told_at, now
        num_results, self._num_untold = max(self._num_untold, 1), 0
        for request_id in [one for one, live in self._beginners.items() if live.first_token_at is not None]:
            self._begin(self._beginners.pop(request_id))
        num_outputs, self._num_first_tokens = num_outputs - self._num_first_tokens, 0
        # Of several results that are told together a row has a chunk, not several.
        if told_at and (num_chunks := -(-num_outputs // num_results)) > 0:
            meters.inter_token_latency.observe(now - told_at, num_chunks)

    def _begin(self, live: LiveRequest) -> None:
        """Note the first token of a request, and that all it has was told just now."""
        if (ttft_s := live.time_to_first_token_s) is not None:
            self._meters.time_to_first_token.observe(ttft_s)
        self._num_first_tokens += live.num_output_tokens

    def _end(self, live: LiveRequest, error: ManipleError | None, frees_id: bool = False) -> None:
        super()._end(live, error, frees_id)
        if self._beginners.pop(live.generation.request_id, None) is not None and live.first_token_at is not None:
            self._begin(live)
        self._meters.request_ended(live, error, self.now())

    def take_over(self, live: LiveRequest, request: scheduled.Request) -> bool:
        """See ``Engine.take_over``."""
        is_taken = super().take_over(live, request)
        if is_taken:
            self._meters.moved.add()
        return is_taken

    def fail(self, loss: LossReason) -> None:
        """See ``Engine.fail``."""
        if not self._has_failed:
            self._meters.lost(loss)
        super().fail(loss)
