"""A worker whose device takes its time and computes next to nothing: takes the flags of ``maniple worker``.

Everything of it is the real worker, but for the model. That is the scripted one (``step_time_s`` says how long a step
takes) without what its 256 rows would compute: 6 ms of Python, in which a bench on two cores would drown. Tokens are a
line of arithmetic, the digest of them is right.
"""

from __future__ import annotations

import time

import numpy as np

import worker_service.scripted
from service_chassis.protocol.arrays import UInt64Array, mix_array
from service_chassis.protocol.digest import MASK64, row_factor
from worker_service.__main__ import main
from worker_service.scripted import ScriptedRunner
from worker_service.step_work import NewRow, StepOutput, StepWork

_SHIFT = np.uint64(32)
_MOST_ROWS = 65536


class _Sums:
    """What the rows' tokens add up to, by row; stands where the scripted model has a dictionary."""

    def __init__(self) -> None:
        self.array: UInt64Array = np.zeros(_MOST_ROWS, np.uint64)

    def __setitem__(self, row: int, value: int) -> None:
        self.array[row] = value

    def __delitem__(self, row: int) -> None:
        self.array[row] = 0


class QuickRunner(ScriptedRunner):
    """See ``ScriptedRunner``; forks, masks, pooling and log-probabilities are not for this."""

    def __init__(self, *arguments: object, **options: object) -> None:
        super().__init__(*arguments, **options)  # type: ignore[arg-type]
        self._sums = _Sums()
        self._token_digests = self._sums  # type: ignore[assignment]
        self._factors: UInt64Array = np.zeros(_MOST_ROWS, np.uint64)
        self._last_id = np.int64(self._options.eos_token_id)

    def _enter(self, new: NewRow) -> None:
        super()._enter(new)
        self._factors[new.req_index] = row_factor(new.row_key)

    def execute(self, work: StepWork) -> StepOutput:
        started = time.monotonic()
        rows = work.rows[work.samples]
        positions = (work.num_computed_tokens + work.num_scheduled_tokens)[work.samples]
        token_ids = ((positions * 7 + rows * 13) % self._last_id).astype(np.int32)  # never the end of the text
        self.token_ids[rows, positions] = token_ids
        self.num_tokens[rows] = positions + 1
        known = positions.astype(np.uint64) << _SHIFT | token_ids.astype(np.uint64)
        self._sums.array[rows] += mix_array(self._factors[rows] ^ mix_array(known))
        sampling_ns = time.monotonic_ns()
        if (left_s := started + self._options.step_time_s - time.monotonic()) > 0:
            time.sleep(left_s)
        return StepOutput(
            step=work.step,
            token_ids=token_ids,
            token_digest=int(self._sums.array.sum()) & MASK64,
            device_us=int((time.monotonic() - started) * 1e6),
            sampling_ns=sampling_ns,
        )


if __name__ == "__main__":
    worker_service.scripted.ScriptedRunner = QuickRunner  # type: ignore[misc]
    main()
