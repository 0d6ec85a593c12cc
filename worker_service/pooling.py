"""Turn hidden states into the one vector of each row that asks for it (``NewRequest.pooling``).

Without torch, so that the scripted model uses it too. Sums are kept in float64: a prompt's mean does not depend on how
it was cut into chunks, but for the last bits of what the model computed. A row that is preempted begins anew, since it
computes all its tokens again; so nothing here must survive but what lies between two chunks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from worker_service.step_work import Float32Array, Pooling, StepWork

Float64Array = npt.NDArray[np.float64]
# Called with a place in ``work.rows`` and positions [start, stop) of that row, all of this step: returns the sum of
# their hidden states behind the final norm, [hidden_size].
HiddenSum = Callable[[int, int, int], Float64Array]

_SHORTEST = 1e-12  # below this length a vector has no direction


class NonFiniteHiddenStates(Exception):
    """The model computed NaN or an infinity: a vector of that is no embedding."""


class Pooler:
    """The rows of one batch that end with a vector. Used by the device thread alone."""

    def __init__(self) -> None:
        self._rows: dict[int, Pooling] = {}
        self._sums: dict[int, Float64Array] = {}  # mean rows that are half-way through their prompt

    def apply(self, work: StepWork) -> None:
        """Note the rows that leave and enter."""
        for finished in work.finished:
            self._rows.pop(finished.req_index, None)
            self._sums.pop(finished.req_index, None)
        for new in work.new_rows:
            if new.pooling is not None:
                self._rows[new.req_index] = new.pooling

    def take(self, work: StepWork, sum_of: HiddenSum) -> tuple[Float32Array, ...]:
        """Take what a step computed; return the vectors of ``work.pooled``. A batch without such rows costs nothing.

        Raises:
            NonFiniteHiddenStates: a vector holds NaN or an infinity.
        """
        if self.is_empty:
            return ()
        vectors: dict[int, Float32Array] = {}
        for place, row in enumerate(work.rows.tolist()):  # a few, each with a chunk of a prompt
            pooling = self._rows.get(row)
            if pooling is None:
                continue
            start = int(work.num_computed_tokens[place])
            stop = start + int(work.num_scheduled_tokens[place])
            is_complete = row in work.pooled
            if pooling.is_mean:
                total = sum_of(place, start, stop)
                if start:
                    total = total + self._sums.pop(row)
                if is_complete:
                    vectors[row] = _vector(total / stop, pooling, row)
                else:
                    self._sums[row] = total
            elif is_complete:
                vectors[row] = _vector(sum_of(place, stop - 1, stop), pooling, row)
        return tuple(vectors[row] for row in work.pooled)

    @property
    def is_empty(self) -> bool:
        """No row of the batch ends with a vector."""
        return not self._rows

    def has_rows(self, work: StepWork) -> bool:
        """Say whether some row of a work, or that enters with it, ends with a vector."""
        if any(new.pooling is not None for new in work.new_rows):
            return True
        return bool(self._rows) and not self._rows.keys().isdisjoint(work.rows.tolist())

    def clear(self) -> None:
        """Forget all rows."""
        self._rows.clear()
        self._sums.clear()


def _vector(pooled: Float64Array, pooling: Pooling, row: int) -> Float32Array:
    if not np.isfinite(pooled).all():
        raise NonFiniteHiddenStates(f"the model's hidden states are not finite: row {row}")
    if pooling.normalize:
        pooled = pooled / max(float(np.linalg.norm(pooled)), _SHORTEST)
    return pooled.astype(np.float32)
