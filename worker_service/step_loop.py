"""Run the device: one thread owns it, takes work in order, and posts what came out to the event loop.

House rules of this file:
- Everything that touches the runner runs on the device thread: the stages as calls, the steps as works, in one queue.
- The event loop never waits for the device; it is told. The device never waits for the event loop.
- A step that raises is the end: the state of the device is not known any more, later works are dropped.
- Where the runner hands out pending steps (``pending_step``), calls and bookkeeping come when all of them are settled.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, TypeVar

from service_chassis.protocol.arrays import token_terms_sum
from service_chassis.protocol.digest import MASK64
from service_chassis.telemetry import get_logger
from worker_service.heartbeat import Vitals
from worker_service.pending_step import MOST_LAUNCHED, Landings, PendingStep
from worker_service.runner import ModelRunner
from worker_service.step_work import Mode, StepOutput, StepWork

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """One step is done. ``output`` is None where nothing was computed (APPLY_ONLY). Times are monotonic nanoseconds."""

    work: StepWork
    output: StepOutput | None
    token_digest: int
    accepted_ns: int
    started_ns: int
    completed_ns: int

    @property
    def queued_us(self) -> int:
        return (self.started_ns - self.accepted_ns) // 1000

    @property
    def device_us(self) -> int:
        return (self.completed_ns - self.started_ns) // 1000


class _Call(Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        self.function = function
        self.future: Future[T] = Future()

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self.function())
        except BaseException as error:
            self.future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Launched:
    work: StepWork
    pending: PendingStep
    accepted_ns: int
    started_ns: int


@dataclass(frozen=True, slots=True)
class _Landed:
    pending: PendingStep


class StepLoop:
    """The device thread.

    Args:
        vitals: its ``running`` is written here.
        post: hands a callback to the event loop; must be safe from any thread.
        on_completed: called on the event loop, in step order.
        on_failed: called on the event loop, at most once, with the step.
    """

    def __init__(
        self,
        vitals: Vitals,
        post: Callable[[Callable[[], None]], None],
        on_completed: Callable[[CompletedStep], None],
        on_failed: Callable[[int, Exception], None],
    ) -> None:
        self.runner: ModelRunner | None = None  # device thread, set by the call that loads
        self._vitals = vitals
        self._post = post
        self._on_completed = on_completed
        self._on_failed = on_failed
        # Bounded by who submits: the reader of Steps refuses deltas beyond what may be outstanding.
        self._queue: SimpleQueue[tuple[StepWork, int] | _Call[object] | _Landed | None] = SimpleQueue()
        self._launched: deque[_Launched] = deque()  # in step order, not settled; device thread
        self._landings = Landings(lambda pending: self._queue.put(_Landed(pending)))
        self._completed_ns = 0  # when the last step was; device thread
        self._row_keys: dict[int, int] = {}  # by req_index; device thread
        self._token_digest = 0  # over the known tokens of all rows; device thread
        self._failed = False  # device thread
        self._thread = threading.Thread(target=self._run, name="device", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """Have the thread end after what is queued. It is a daemon: a device that hangs does not hold the process."""
        self._queue.put(None)
        self._landings.close()

    def submit(self, work: StepWork) -> None:
        """Queue a step. Never blocks."""
        self._queue.put((work, time.monotonic_ns()))

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Queue a call behind all steps before it."""
        call = _Call(function)
        self._queue.put(call)  # type: ignore[arg-type]
        return call.future

    def forget_rows(self) -> None:
        """Drop all rows; weights and memory stay. What went wrong with them is forgotten too. Device thread."""
        self._row_keys.clear()
        self._failed = False
        self._token_digest = 0
        if self.runner is not None:
            self.runner.reset()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Call):
                self._settle_all()
                item.run()
            elif isinstance(item, _Landed):
                if self._launched and self._launched[0].pending is item.pending:
                    self._settle()
            elif not self._failed:
                self._step(*item)

    def _step(self, work: StepWork, accepted_ns: int) -> None:
        runner = self.runner
        assert runner is not None, "deltas are accepted once the model is loaded"
        while self._launched and not self._may_follow(work):
            self._settle()
        if self._failed:
            return
        started_ns = time.monotonic_ns()
        if not self._launched:
            self._vitals.running = (work.step, time.monotonic())
        try:
            if work.mode is Mode.APPLY_ONLY:
                self._apply_only(work, runner)
                output = None
            else:
                self._note_keys(work)
                runner.apply(work)
                outcome = runner.execute(work)
                if not isinstance(outcome, StepOutput):
                    self._launched.append(_Launched(work, outcome, accepted_ns, started_ns))
                    self._landings.watch(outcome)
                    return
                assert not self._launched, "a step that was admitted beside a pending one is launched, too"
                output = outcome
        except Exception as error:
            self._fail(work, error)
            return
        self._complete(work, output, accepted_ns, started_ns)

    def _may_follow(self, work: StepWork) -> bool:
        """Say whether a work may be applied while the steps that were launched are not settled."""
        return (
            work.mode is Mode.RUN
            and len(self._launched) < MOST_LAUNCHED
            and all(launched.pending.admits(work) for launched in self._launched)
        )

    def _settle(self) -> None:
        """Complete the oldest step that was launched. Waits for it."""
        launched = self._launched.popleft()
        try:
            output = launched.pending.settle()
        except Exception as error:
            self._fail(launched.work, error)
            return
        # Behind another step it began when that one was done.
        started_ns = max(launched.started_ns, self._completed_ns)
        self._complete(launched.work, output, launched.accepted_ns, started_ns)

    def _settle_all(self) -> None:
        while self._launched:
            self._settle()

    def _fail(self, work: StepWork, error: Exception) -> None:
        self._failed = True
        self._launched.clear()
        self._vitals.running = (0, 0.0)
        get_logger().error("step.failed", step=work.step, exc_info=error)
        self._post(lambda: self._on_failed(work.step, error))

    def _complete(self, work: StepWork, output: StepOutput | None, accepted_ns: int, started_ns: int) -> None:
        if output is not None:
            self._token_digest = output.token_digest
        self._completed_ns = time.monotonic_ns()
        digest = self._token_digest & MASK64
        done = CompletedStep(work, output, digest, accepted_ns, started_ns, self._completed_ns)
        # First the clock of the step stops, then its completion is told: a report may say "nothing runs" a moment
        # too early, but never that a completed step still runs.
        self._vitals.running = (self._launched[0].work.step, time.monotonic()) if self._launched else (0, 0.0)
        self._post(lambda: self._on_completed(done))

    def _apply_only(self, work: StepWork, runner: ModelRunner) -> None:
        """Apply a step in which nothing computes, so that nobody else says what the token digest becomes."""
        self._token_digest -= sum(self._tokens_digest(row.req_index, runner) for row in work.finished)
        self._note_keys(work)
        runner.apply(work)
        self._token_digest += sum(self._tokens_digest(row.req_index, runner) for row in work.new_rows)

    def _note_keys(self, work: StepWork) -> None:
        for row in work.finished:
            del self._row_keys[row.req_index]
        for entering in work.new_rows:
            self._row_keys[entering.req_index] = entering.row_key

    def _tokens_digest(self, req_index: int, runner: ModelRunner) -> int:
        return token_terms_sum(self._row_keys[req_index], 0, runner.known_tokens(req_index))
