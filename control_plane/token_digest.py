"""Keep the control plane's own token digest (PROTOCOL B7): what the ranks' known tokens must add up to.

It counts what was sampled, also past a stop and for rows that were given up meanwhile: workers know those tokens too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from control_plane.scheduling.plan import StepPlan
from service_chassis.ids import ReqIndex, RowKey
from service_chassis.protocol.arrays import UInt64Array, mix_array, token_terms_sum
from service_chassis.protocol.digest import MASK64, row_factor

_SHIFT = np.uint64(32)


class TokenDigest:
    """Sum over the known tokens of all rows of a batch. Plans and results in step order."""

    def __init__(self) -> None:
        self._value = 0
        # Per req_index; as long as the highest row so far asks for.
        self._factors: UInt64Array = np.zeros(64, np.uint64)
        self._num_known: UInt64Array = np.zeros(64, np.uint64)
        self._sums: UInt64Array = np.zeros(64, np.uint64)
        # Plans share the tuple of their rows while it does not change; so its array is made once.
        self._rows: tuple[ReqIndex, ...] = ()
        self._rows_np: npt.NDArray[np.intp] = np.zeros(0, np.intp)

    @property
    def value(self) -> int:
        """The digest, below 2**64."""
        return self._value & MASK64

    def apply(self, plan: StepPlan) -> None:
        """Let rows leave and enter as ``plan`` says."""
        for end in plan.finished:
            self._value -= int(self._sums[end.req_index])
        for new in plan.new_rows:
            # A fork knows what its parent knows of the prompt.
            known = new.token_ids or new.sample.request.prompt_token_ids[: new.num_prefill_tokens]
            self.enter(new.req_index, new.row_key, known)

    def enter(self, row: ReqIndex, row_key: RowKey, known: Sequence[int]) -> None:
        """Let one row enter with the tokens that are known of it."""
        if row >= len(self._factors):
            self._grow(row)
        total = token_terms_sum(row_key, 0, known)
        self._factors[row] = row_factor(row_key)
        self._num_known[row] = len(known)
        self._sums[row] = total
        self._value += total

    def add_sampled(self, rows: tuple[ReqIndex, ...], token_ids: Sequence[int]) -> None:
        """Count one sampled token for each of ``rows``."""
        if rows is not self._rows:
            self._rows, self._rows_np = rows, np.array(rows, np.intp)
        index = self._rows_np
        ids = np.array(token_ids, np.uint64)
        terms = mix_array(self._factors[index] ^ mix_array(self._num_known[index] << _SHIFT | ids))
        self._num_known[index] += np.uint64(1)
        self._sums[index] += terms
        self._value += int(terms.sum(dtype=np.uint64))

    def add_several(self, rows: Sequence[ReqIndex], token_ids: Sequence[Sequence[int]]) -> None:
        """Count one or several sampled tokens for each of ``rows``."""
        for place in range(max(map(len, token_ids))):
            more = [(row, ids[place]) for row, ids in zip(rows, token_ids, strict=True) if place < len(ids)]
            self.add_sampled(tuple(row for row, _ in more), [token_id for _, token_id in more])

    def _grow(self, row: int) -> None:
        more = np.zeros(row + 1, np.uint64)
        self._factors = np.concatenate([self._factors, more])
        self._num_known = np.concatenate([self._num_known, more])
        self._sums = np.concatenate([self._sums, more])
