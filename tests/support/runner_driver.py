"""Drive a real model runner by hand-made steps: blocks and counts are kept here, as a scheduler would."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from worker_service.forward.assemble import ForwardOptions
from worker_service.model_runner import TorchModelRunner
from worker_service.process_group import ProcessGroup
from worker_service.runner import LoadOptions
from worker_service.sleep.choose import SleepOptions
from worker_service.step_work import (
    FinishedRow,
    Mode,
    NewRow,
    Pooling,
    RowSampling,
    StepOutput,
    StepWork,
    TableChange,
    TableOp,
)

NUM_BLOCKS = 200


class Row:
    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.num_computed = 0
        self.blocks: list[int] = []


class RunnerDriver:
    """One loaded runner and the batch it is given."""

    def __init__(
        self,
        directory: Path,
        *,
        budget: int = 256,
        num_threads: int = 1,
        group: ProcessGroup | None = None,
        forward: ForwardOptions | None = None,
        sleep: SleepOptions | None = None,
        **options: object,
    ) -> None:
        """Load; as one of several ranks where a group is given."""
        rank, world_size = (group.rank, group.world_size) if group else (0, 1)
        self.runner = TorchModelRunner(
            device="cpu", rank=rank, world_size=world_size, num_threads=num_threads, forward=forward, sleep=sleep
        )
        if group is not None:
            self.runner.join(group)
        defaults = {"dtype": "float32", "max_num_seqs": 16, "max_num_batched_tokens": budget, "max_model_len": 256}
        load = LoadOptions(model=str(directory), **{**defaults, **options})  # type: ignore[arg-type]
        self.facts = self.runner.load_model(load, lambda share, what: None)
        self.runner.allocate_kv_cache(NUM_BLOCKS)
        self.block_size = load.block_size
        self.logits: dict[int, list[Tensor]] = {}  # row -> scores of every position it sampled at
        self.rows: dict[int, Row] = {}
        self._step = 0
        # Scattered on purpose: neighbouring blocks of a row are never neighbours in memory.
        self._free = np.random.default_rng(7).permutation(np.arange(1, NUM_BLOCKS)).tolist()
        self._samples: list[int] = []
        outputs = self.runner._outputs
        assert outputs is not None
        compute = outputs.compute_logits

        def remember(hidden: Tensor) -> Tensor | None:
            scores = compute(hidden)
            if scores is None or not self._samples:  # rank 0 has them; a dummy step
                return scores
            for row, one in zip(self._samples, scores.clone(), strict=True):
                self.logits.setdefault(row, []).append(one)
            return scores

        outputs.compute_logits = remember  # type: ignore[method-assign]

    def enter(
        self, row: int, prompt: Sequence[int], sampling: RowSampling | None = None, pooling: Pooling | None = None
    ) -> NewRow:
        self.rows[row] = Row(prompt)
        return NewRow(
            req_index=row,
            row_key=1000 * self._step + row,
            request_id=f"r{row}",
            sample_index=0,
            token_ids=np.array(prompt, np.int32),
            num_prompt_tokens=len(prompt),
            num_computed_tokens=0,
            num_prefill_tokens=len(prompt),
            sampling=sampling or RowSampling(),
            pooling=pooling,
        )

    def step(
        self,
        scheduled: dict[int, int],
        *,
        new: Sequence[NewRow] = (),
        preempted: Sequence[int] = (),
        finished: Sequence[int] = (),
        pooled: Sequence[int] = (),
    ) -> dict[int, int]:
        """Run one step: row -> tokens; return the sampled token of each row that sampled. ``pooled`` end with it."""
        self._step += 1
        ended = tuple(FinishedRow(row, 1, len(self.rows[row].tokens)) for row in finished)
        for row in (*preempted, *finished):
            self._free += self.rows[row].blocks
            self.rows[row].blocks, self.rows[row].num_computed = [], 0
        for row in finished:
            del self.rows[row]
        changes, order = [], sorted(scheduled)
        computed = [self.rows[row].num_computed for row in order]
        for row in order:
            state = self.rows[row]
            state.num_computed += scheduled[row]
            missing = -(-state.num_computed // self.block_size) - len(state.blocks)
            if missing > 0:
                blocks = [self._free.pop() for _ in range(missing)]
                op = TableOp.APPEND if state.blocks else TableOp.REPLACE
                changes.append(TableChange(row, 0, op, tuple(blocks)))
                state.blocks += blocks
        ends = [row for row in order if self.rows[row].num_computed == len(self.rows[row].tokens)]
        self._samples = [row for row in ends if row not in pooled]
        work = StepWork(
            step=self._step,
            mode=Mode.RUN,
            finished=ended,
            preempted=tuple(preempted),
            new_rows=tuple(new),
            table_changes=tuple(changes),
            rows=np.array(order, np.int32),
            num_computed_tokens=np.array(computed, np.int32),
            num_scheduled_tokens=np.array([scheduled[row] for row in order], np.int32),
            samples=np.array([row in self._samples for row in order], np.bool_),
            pooled=tuple(pooled),
        )
        self.runner.apply(work)
        outcome = self.runner.execute(work)
        self.output = output = outcome if isinstance(outcome, StepOutput) else outcome.settle()
        sampled = dict(zip(self._samples, output.token_ids.tolist(), strict=True))
        self._samples = []
        for row, token in sampled.items():
            self.rows[row].tokens.append(token)
        return sampled

    def generate(self, row: int, prompt: Sequence[int], count: int, *, chunk: int = 0) -> list[int]:
        """Run one row alone to ``count`` tokens, its prompt in pieces of ``chunk``; leave it in the batch."""
        new = [self.enter(row, prompt)]
        output: list[int] = []
        while len(output) < count:
            missing = len(self.rows[row].tokens) - self.rows[row].num_computed
            output += self.step({row: min(missing, chunk or missing)}, new=new).values()
            new = []
        return output

    def teacher_force(self, row: int, tokens: Sequence[int]) -> None:
        """Put known tokens in the place of what was sampled last."""
        state = self.rows[row]
        batch = self.runner._batch
        assert batch is not None
        start = len(state.tokens) - 1
        state.tokens[start:] = tokens
        batch.token_ids[row, start : start + len(tokens)] = tokens
        batch.num_tokens[row] = len(state.tokens)


def single_thread() -> None:
    """Keep torch off the cores that other tests use."""
    torch.set_num_threads(1)
