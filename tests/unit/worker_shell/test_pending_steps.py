"""Steps that are launched ahead of their outcomes, on a device that is done when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from worker_service.heartbeat import Vitals
from worker_service.pending_step import PendingStep
from worker_service.step_loop import CompletedStep, StepLoop
from worker_service.step_work import Mode, StepOutput, StepWork

DEADLINE_S = 20


class Launched:
    def __init__(self, runner: DeviceRunner, work: StepWork) -> None:
        self._runner, self._work = runner, work
        self.done = threading.Event()
        self.error: Exception | None = None

    def admits(self, work: StepWork) -> bool:
        return work.step not in self._runner.waits_for_all

    def wait(self) -> None:
        assert self.done.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error

    def settle(self) -> StepOutput:
        self.wait()
        self._runner.notes.append(f"settle {self._work.step}")
        return StepOutput(self._work.step, np.zeros(0, np.int32), token_digest=1000 + self._work.step)


class DeviceRunner:
    """Launches what it is given; ``finish`` is the device."""

    device = "fake"

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.launched: dict[int, Launched] = {}
        self.waits_for_all: set[int] = set()
        self.at_once: set[int] = set()
        self._news = threading.Condition()

    def apply(self, work: StepWork) -> None:
        self.notes.append(f"apply {work.step}")

    def execute(self, work: StepWork) -> StepOutput | PendingStep:
        with self._news:
            self.notes.append(f"launch {work.step}")
            self.launched[work.step] = Launched(self, work)
            self._news.notify_all()
        if work.step in self.at_once:
            return StepOutput(work.step, np.zeros(0, np.int32), token_digest=1000 + work.step)
        return self.launched[work.step]

    def await_launch(self, step: int) -> None:
        with self._news:
            assert self._news.wait_for(lambda: step in self.launched, DEADLINE_S)

    def finish(self, step: int, error: Exception | None = None) -> None:
        self.await_launch(step)
        self.launched[step].error = error
        self.launched[step].done.set()


class Harness:
    def __init__(self) -> None:
        self.runner = DeviceRunner()
        self.completed: list[CompletedStep] = []
        self.failures: list[tuple[int, Exception]] = []
        self.vitals = Vitals("x")
        self._news = threading.Condition()
        self.loop = StepLoop(self.vitals, self._post, self.completed.append, lambda *told: self.failures.append(told))
        self.loop.runner = self.runner  # type: ignore[assignment]
        self.loop.start()

    def _post(self, callback: Callable[[], None]) -> None:
        with self._news:
            callback()
            self._news.notify_all()

    def submit(self, *steps: int, mode: Mode = Mode.RUN) -> None:
        for step in steps:
            self.loop.submit(StepWork(step, mode))

    def await_completed(self, step: int) -> CompletedStep:
        with self._news:
            assert self._news.wait_for(lambda: any(done.work.step == step for done in self.completed), DEADLINE_S)
        return self.completed[-1]

    def await_failure(self) -> tuple[int, Exception]:
        with self._news:
            assert self._news.wait_for(lambda: self.failures, DEADLINE_S)
        return self.failures[0]


@pytest.fixture
def harness() -> Iterator[Harness]:
    made = Harness()
    yield made
    for launched in made.runner.launched.values():
        launched.done.set()
    made.loop.close()


def test_the_next_step_is_launched_while_the_device_computes(harness: Harness) -> None:
    harness.submit(1, 2, 3)
    harness.runner.await_launch(2)
    assert harness.runner.notes == ["apply 1", "launch 1", "apply 2", "launch 2"]  # and no third beside two
    assert not harness.completed
    harness.runner.finish(1)
    harness.runner.await_launch(3)
    assert harness.runner.notes[4:] == ["settle 1", "apply 3", "launch 3"]
    harness.runner.finish(2)
    harness.runner.finish(3)
    harness.await_completed(3)
    assert [(done.work.step, done.token_digest) for done in harness.completed] == [(1, 1001), (2, 1002), (3, 1003)]


def test_an_outcome_is_told_without_a_next_step(harness: Harness) -> None:
    harness.submit(1)
    harness.runner.finish(1)
    assert harness.await_completed(1).token_digest == 1001
    assert harness.vitals.running == (0, 0.0)


def test_the_clock_is_that_of_the_step_that_computes(harness: Harness) -> None:
    harness.submit(1, 2)
    harness.runner.await_launch(2)
    assert harness.vitals.running[0] == 1
    harness.runner.finish(1)
    first = harness.await_completed(1)
    assert harness.vitals.running[0] == 2
    harness.runner.finish(2)
    second = harness.await_completed(2)
    assert harness.vitals.running == (0, 0.0)
    # What it waited behind the first is no time of its own.
    assert second.started_ns == first.completed_ns


@pytest.mark.parametrize("mode", [Mode.RUN, Mode.APPLY_ONLY, Mode.DUMMY])
def test_what_is_not_admitted_comes_after_everything_before_it(harness: Harness, mode: Mode) -> None:
    if mode is Mode.RUN:
        harness.runner.waits_for_all = {3}
    harness.submit(1, 2)
    harness.submit(3, mode=mode)
    harness.runner.finish(1)
    harness.await_completed(1)
    harness.runner.finish(2)
    if mode is not Mode.APPLY_ONLY:
        harness.runner.finish(3)
    harness.await_completed(3)
    notes = harness.runner.notes
    assert notes.index("settle 2") < notes.index("apply 3")
    assert [done.work.step for done in harness.completed] == [1, 2, 3]


def test_calls_come_after_the_outcomes_of_the_steps_before_them(harness: Harness) -> None:
    harness.submit(1, 2)
    called = harness.loop.call(lambda: list(harness.runner.notes))
    harness.runner.finish(1)
    harness.runner.finish(2)
    assert called.result(DEADLINE_S)[-2:] == ["settle 1", "settle 2"]


def test_a_step_that_is_done_at_once_follows_one_that_was_launched(harness: Harness) -> None:
    harness.runner.at_once = {2}
    harness.runner.waits_for_all = {2}
    harness.submit(1, 2, 3)
    harness.runner.finish(1)
    harness.runner.finish(3)
    harness.await_completed(3)
    assert [done.work.step for done in harness.completed] == [1, 2, 3]


def test_a_failure_on_the_device_is_that_of_its_own_step_and_the_end(harness: Harness) -> None:
    harness.submit(1, 2)
    harness.runner.await_launch(2)
    harness.submit(3)
    harness.runner.finish(1, ValueError("the device is on fire"))
    step, error = harness.await_failure()
    assert (step, str(error)) == (1, "the device is on fire")
    harness.runner.finish(2)
    harness.loop.call(lambda: None).result(DEADLINE_S)
    assert not harness.completed
    assert harness.failures == [(1, error)]
    assert "launch 3" not in harness.runner.notes
    assert harness.vitals.running == (0, 0.0)
