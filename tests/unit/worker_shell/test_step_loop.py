"""The device thread with a runner that only takes notes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from service_chassis.protocol.arrays import token_terms_sum
from worker_service.heartbeat import Vitals
from worker_service.step_loop import CompletedStep, StepLoop
from worker_service.step_work import FinishedRow, Mode, NewRow, RowSampling, StepOutput, StepWork


class NotingRunner:
    device = "none"

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.threads: set[int] = set()
        self.tokens: dict[int, list[int]] = {}
        self.fails_at = 0

    def apply(self, work: StepWork) -> None:
        self.notes.append(f"apply {work.step}")
        self.threads.add(threading.get_ident())
        for row in work.finished:
            del self.tokens[row.req_index]
        for new in work.new_rows:
            self.tokens[new.req_index] = new.token_ids.tolist()

    def execute(self, work: StepWork) -> StepOutput:
        self.notes.append(f"execute {work.step}")
        if work.step == self.fails_at:
            raise ValueError("the device is on fire")
        for tokens in self.tokens.values():
            tokens.append(100 + work.step)
        digest = sum(token_terms_sum(row, 0, tokens) for row, tokens in self.tokens.items()) % 2**64
        return StepOutput(work.step, np.zeros(0, np.int32), token_digest=digest)

    def known_tokens(self, req_index: int) -> list[int]:
        return self.tokens[req_index]


class Harness:
    def __init__(self) -> None:
        self.runner = NotingRunner()
        self.completed: list[CompletedStep] = []
        self.failures: list[tuple[int, Exception]] = []
        self.vitals = Vitals("x")

        def post(callback: Callable[[], None]) -> None:
            callback()

        self.loop = StepLoop(self.vitals, post, self.completed.append, lambda *failure: self.failures.append(failure))
        self.loop.runner = self.runner  # type: ignore[assignment]
        self.loop.start()

    def flush(self) -> None:
        self.loop.call(lambda: None).result(timeout=5)


@pytest.fixture
def harness() -> Any:
    made = Harness()
    yield made
    made.loop.close()


def new(row: int, *tokens: int) -> NewRow:
    return NewRow(
        req_index=row,
        row_key=row,
        request_id=f"r{row}",
        sample_index=2,
        token_ids=np.array(tokens, np.int32),
        num_prompt_tokens=len(tokens),
        num_computed_tokens=0,
        num_prefill_tokens=len(tokens),
        sampling=RowSampling(),
        control_blob=b"blob",
    )


def test_steps_and_calls_run_in_order_on_one_thread(harness: Harness) -> None:
    harness.loop.submit(StepWork(1, Mode.RUN))
    harness.loop.submit(StepWork(2, Mode.APPLY_ONLY))
    called_on = harness.loop.call(threading.get_ident).result(timeout=5)
    harness.loop.submit(StepWork(3, Mode.DUMMY))
    harness.flush()
    assert harness.runner.notes == ["apply 1", "execute 1", "apply 2", "apply 3", "execute 3"]
    assert harness.runner.threads == {called_on} != {threading.get_ident()}
    assert [(done.work.step, done.output is None) for done in harness.completed] == [(1, False), (2, True), (3, False)]


def test_step_that_raises_is_the_end(harness: Harness) -> None:
    harness.runner.fails_at = 2
    for step in (1, 2, 3):
        harness.loop.submit(StepWork(step, Mode.RUN))
    harness.flush()
    assert harness.runner.notes[-1] == "execute 2"
    assert [done.work.step for done in harness.completed] == [1]
    [(step, error)] = harness.failures
    assert (step, str(error)) == (2, "the device is on fire")
    assert harness.vitals.running == (0, 0.0)


def test_token_digest_of_a_bookkeeping_step_is_that_of_the_rows_left(harness: Harness) -> None:
    harness.loop.submit(StepWork(1, Mode.RUN, new_rows=(new(3, 5, 6), new(4, 9))))
    harness.loop.submit(
        StepWork(2, Mode.APPLY_ONLY, finished=(FinishedRow(3, 1, 3),), new_rows=(new(1, 8, 8),))
    )  # fmt: skip
    harness.flush()
    expected = (token_terms_sum(4, 0, [9, 101]) + token_terms_sum(1, 0, [8, 8])) % 2**64
    assert harness.completed[-1].token_digest == expected
