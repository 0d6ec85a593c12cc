"""Feed a scripted runner by hand, one step at a time."""

from __future__ import annotations

import numpy as np

from service_chassis.scripted import ScriptedOptions
from worker_service.runner import LoadOptions
from worker_service.scripted import ScriptedRunner
from worker_service.step_work import Mode, NewRow, RowSampling, StepWork, TableChange, TableOp

BLOCK = 3


class Driver:
    """Feeds a runner by hand."""

    def __init__(self, options: ScriptedOptions | None = None) -> None:
        self.runner = ScriptedRunner(options or ScriptedOptions(), rank=0)
        self.runner.load_model(LoadOptions(model="scripted", block_size=BLOCK), lambda share, what: None)
        self.runner.allocate_kv_cache(50)
        self.step = 0

    def run(self, spans: dict[int, tuple[int, int, bool]], **changes: object) -> list[int]:
        """Run one step: row -> (computed, scheduled, samples)."""
        self.step += 1
        rows = sorted(spans)
        work = StepWork(
            step=self.step,
            mode=Mode.RUN,
            rows=np.array(rows, np.int32),
            num_computed_tokens=np.array([spans[row][0] for row in rows], np.int32),
            num_scheduled_tokens=np.array([spans[row][1] for row in rows], np.int32),
            samples=np.array([spans[row][2] for row in rows], np.bool_),
            **changes,  # type: ignore[arg-type]
        )
        self.runner.apply(work)
        self.output = self.runner.execute(work)
        return self.output.token_ids.tolist()


def new_row(row: int, prompt: list[int], *, key: int = 77, **more: object) -> NewRow:
    values: dict[str, object] = {
        "req_index": row,
        "row_key": key + row,
        "request_id": f"r{row}",
        "sample_index": 0,
        "token_ids": np.array(prompt, np.int32),
        "num_prompt_tokens": len(prompt),
        "num_computed_tokens": 0,
        "num_prefill_tokens": len(prompt),
        "sampling": RowSampling(),
    }
    return NewRow(**{**values, **more})  # type: ignore[arg-type]


def table(row: int, *blocks: int, op: TableOp = TableOp.REPLACE) -> TableChange:
    return TableChange(row, 0, op, blocks)


def generate(driver: Driver, row: int, prompt: list[int], count: int, **more: object) -> list[int]:
    """Prefill in one step, then decode, with enough blocks from the start."""
    blocks = range(1 + 10 * row, 11 + 10 * row)
    out = driver.run(
        {row: (0, len(prompt), True)},
        new_rows=(new_row(row, prompt, **more),),
        table_changes=(table(row, *blocks),),
    )
    for position in range(len(prompt), len(prompt) + count - 1):
        out += driver.run({row: (position, 1, True)})
    return out


PROMPT = [5, 250, 17, 0, 5]
