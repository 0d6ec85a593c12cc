"""Drive a runner through the device thread as an owner would: steady rows, steps ahead, results as they come."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from worker_service.heartbeat import Vitals
from worker_service.step_loop import CompletedStep, StepLoop
from worker_service.step_work import FinishedRow, Mode, NewRow, RowSampling, StepWork, TableChange, TableOp

DEADLINE_S = 120.0


class Stepper:
    """Rows of one runner. Blocks are given out from 1 on; who uses it knows how many there are."""

    def __init__(self, runner: Any, *, num_blocks: int, block_size: int, ahead: int = 2) -> None:
        """Take a runner that is warmed up; up to ``ahead`` steps are submitted before the first of them is done."""
        self.completed: list[CompletedStep] = []
        self._failure: Exception | None = None
        self._news = threading.Condition()
        self._ahead = ahead
        self._block_size = block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._known: dict[int, int] = {}  # row -> tokens
        self._computed: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        self._keys = itertools.count(1)
        self._step = 0
        self.loop = StepLoop(Vitals("gpu"), self._post, self.completed.append, self._on_failed)
        self.loop.runner = runner
        self.loop.start()

    def _post(self, callback: Callable[[], None]) -> None:
        with self._news:
            callback()
            self._news.notify_all()

    def _on_failed(self, step: int, error: Exception) -> None:
        self._failure = error

    def enter(
        self, row: int, prompt: Sequence[int], *, num_computed: int = 0, sampling: RowSampling | None = None
    ) -> NewRow:
        """Return a new row, ``num_computed`` of whose tokens count as found in the cache."""
        self._known[row], self._computed[row], self._blocks[row] = len(prompt), num_computed, []
        return NewRow(
            req_index=row,
            row_key=next(self._keys),
            request_id=f"r{row}",
            sample_index=0,
            token_ids=np.asarray(prompt, np.int32),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=num_computed,
            num_prefill_tokens=len(prompt),
            sampling=sampling or RowSampling(),
        )

    def submit(self, counts: dict[int, int], new: Sequence[NewRow] = (), finished: Sequence[int] = ()) -> None:
        """Submit a step of so many tokens of each row, once there is room for it."""
        self._step += 1
        ended = []
        for row in finished:
            self._free += reversed(self._blocks.pop(row))
            ended.append(FinishedRow(row, 1, self._known.pop(row)))
            del self._computed[row]
        order, changes = sorted(counts), []
        starts = [self._computed[row] for row in order]
        for row in order:
            self._computed[row] += counts[row]
            missing = -(-self._computed[row] // self._block_size) - len(self._blocks[row])
            if missing > 0:
                blocks = [self._free.pop() for _ in range(missing)]
                op = TableOp.APPEND if self._blocks[row] else TableOp.REPLACE
                changes.append(TableChange(row, 0, op, tuple(blocks)))
                self._blocks[row] += blocks
        samples = np.array([self._computed[row] == self._known[row] for row in order], np.bool_)
        for row, does in zip(order, samples.tolist(), strict=True):
            self._known[row] += does
        self.wait_for(self._step - self._ahead)
        self.loop.submit(
            StepWork(
                step=self._step,
                mode=Mode.RUN,
                finished=tuple(ended),
                new_rows=tuple(new),
                table_changes=tuple(changes),
                rows=np.array(order, np.int32),
                num_computed_tokens=np.array(starts, np.int32),
                num_scheduled_tokens=np.array([counts[row] for row in order], np.int32),
                samples=samples,
            )
        )

    def decode(self, num_steps: int) -> None:
        """Submit steps of one token of each row there is."""
        for _ in range(num_steps):
            self.submit(dict.fromkeys(self._known, 1))

    def finish_all(self) -> None:
        """Take all rows out."""
        rows = list(self._known)
        self.submit({}, finished=rows)
        self.wait_for(self._step)

    def wait_for(self, step: int) -> None:
        """Wait until a step is completed. Raises what a step failed of."""
        with self._news:
            done = self._news.wait_for(
                lambda: self._failure is not None or step <= 0 or len(self.completed) >= step, DEADLINE_S
            )
        if self._failure is not None:
            raise self._failure
        assert done, f"step {step} did not end within {DEADLINE_S:g} s"

    def drain(self) -> None:
        """Wait until all that was submitted is done."""
        self.wait_for(self._step)

    def tokens(self) -> list[list[int]]:
        """Return what each step sampled, in the order of its rows."""
        return [done.output.token_ids.tolist() if done.output is not None else [] for done in self.completed]

    def close(self) -> None:
        self.loop.close()
