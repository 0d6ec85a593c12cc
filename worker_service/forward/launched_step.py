"""A step of the torch runner whose sampled tokens stay on the device until somebody settles it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from worker_service.input_batch import InputBatch
from worker_service.step_work import Int32Array, StepOutput, StepWork

_NO_TOKENS = np.zeros(0, np.int32)


class Outcome(Protocol):
    """What a step sampled, perhaps not computed yet."""

    def wait(self) -> None:
        """Wait until it is there. Any thread."""

    def take(self) -> Int32Array:
        """Return the token ids, once they are there; raises what is wrong with them."""


class LaunchedStep:
    """See ``PendingStep``. Made when everything of the step was launched, the copy of its outcome included."""

    def __init__(
        self,
        work: StepWork,
        batch: InputBatch,
        outcome: Outcome,
        *,
        admits: Callable[[StepWork], bool],
        check: Callable[[], None],
    ) -> None:
        """Count the tokens that will come.

        Args:
            work: that was launched.
            batch: that has applied it.
            outcome: of the rows that sample.
            admits: says whether another work can do without the tokens of this one on the host.
            check: raises where what the device computed counts for nothing.
        """
        self.admits = admits
        self.wait = outcome.wait
        self._step = work.step
        self._batch = batch
        self._outcome = outcome
        self._check = check
        self._expected = batch.expect(work.rows[work.samples])

    def settle(self) -> StepOutput:
        token_ids = self._outcome.take()
        self._check()
        digest = self._batch.settle(self._expected, token_ids)
        return StepOutput(step=self._step, token_ids=token_ids, token_digest=digest)


class NothingSampled:
    """The outcome of a step in which no row came to its end: all there is to wait for is that it is done."""

    def __init__(self, wait: Callable[[], None]) -> None:
        self.wait = wait

    def take(self) -> Int32Array:
        self.wait()
        return _NO_TOKENS
