"""One ``Steps`` stream from its Welcome to its end: what is due is pulled by the writer, never pushed into a queue.

Results lie in the rank's ring anyway, and reports are made when they leave. So a reader that is slow or gone costs no
memory. All methods run on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from maniple.v1 import scheduler_delta_pb2, worker_pb2
from service_chassis.errors import ManipleError
from worker_service.heartbeat import Vitals

_MAX_TIMINGS = 1024

ResultsAfter = Callable[[int], list[tuple[int, scheduler_delta_pb2.StepResult]]]


class StepsStream:
    """The outgoing side of one stream, and whether it still lives."""

    def __init__(
        self,
        vitals: Vitals,
        results_after: ResultsAfter,
        *,
        last_result_step: int,
        report_interval_s: float,
        idle_report_interval_s: float,
    ) -> None:
        self.ended = False  # nothing that is still unread counts
        self._error: ManipleError | None = None
        self._vitals = vitals
        self._results_after = results_after
        self._sent_result = last_result_step
        self._report_interval_s = report_interval_s
        self._idle_report_interval_s = idle_report_interval_s
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._report_due = vitals.failure is not None
        self._timings: deque[worker_pb2.StepsResponse.StepTiming] = deque(maxlen=_MAX_TIMINGS)
        self._catching_up = True
        self._late_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._arm()

    def result_ready(self) -> None:
        """Send what is new in the ring."""
        self._wake.set()

    def tell_timing(self, timing: worker_pb2.StepsResponse.StepTiming) -> None:
        """Send when a step was where. Of a reader that does not read them the oldest are dropped."""
        self._timings.append(timing)
        self._wake.set()

    def report_now(self) -> None:
        """Send a report without waiting for the interval, and begin a new interval."""
        self._report_due = True
        self._late_s = 0.0
        self._wake.set()
        self._arm()

    def caught_up(self) -> None:
        """Report at once, but only the first time, that nothing accepted is left to do: an adopter waits for that."""
        if self._catching_up:
            self._catching_up = False
            self.report_now()

    def became_active(self) -> None:
        """Report soon: the first delta after idleness. In lock step every delta is, so nothing is put off here."""
        if self._timer is None or self._timer.when() > self._loop.time() + self._report_interval_s:
            self._arm()

    def end(self, error: ManipleError | None = None) -> None:
        """End the stream once what is due was sent: with the status of ``error``, or in order. Once."""
        if not self.ended:
            self.ended, self._error = True, error
            self._wake.set()

    async def messages(self) -> AsyncIterator[worker_pb2.StepsResponse]:
        """Yield what is due, until the stream ends; raises the error that it ends with."""
        try:
            while True:
                for step, result in self._results_after(self._sent_result):
                    self._sent_result = step
                    yield worker_pb2.StepsResponse(result=result)
                while self._timings:
                    yield worker_pb2.StepsResponse(timing=self._timings.popleft())
                if self._report_due:
                    self._report_due = False
                    yield worker_pb2.StepsResponse(report=self._vitals.report(self._late_s))
                    continue
                if self.ended:
                    break
                await self._wake.wait()
                self._wake.clear()
            if self._error is not None:
                raise self._error
        finally:
            self.ended = True
            if self._timer is not None:
                self._timer.cancel()

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        interval_s = self._report_interval_s if self._vitals.active else self._idle_report_interval_s
        due = self._loop.time() + interval_s
        self._timer = self._loop.call_at(due, self._interval_passed, due)

    def _interval_passed(self, due: float) -> None:
        if self.ended:
            return
        self._late_s = self._loop.time() - due
        self._report_due = True
        self._wake.set()
        self._arm()
