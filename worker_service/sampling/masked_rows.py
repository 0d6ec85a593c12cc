"""Sample under masks, and keep track of rows whose mask died with their owner (PROTOCOL B6).

Such a row is *void*: from the step that should have given it a token it has none to give, so whatever it computes
afterwards is padding, which it writes into blocks of its own. The output rank finds out, and tells the others by the
token ``NOT_SAMPLED``. It ends when an owner resumes the row with exactly the tokens that it knows.
"""

from __future__ import annotations

import numpy as np

from worker_service.sampling.columns import SamplingColumns
from worker_service.step_work import NOT_SAMPLED, Int32Array, RowLogprobs, StepWork


class MaskedRows:
    """Owned by a runner; device thread."""

    def __init__(self) -> None:
        self._void: set[int] = set()

    def apply(self, work: StepWork, num_tokens: Int32Array) -> None:
        """Follow the rows of a delta. ``num_tokens`` are those that each row knows."""
        if not self._void:
            return
        self._void.difference_update(row.req_index for row in work.finished)
        for resumed in work.resumed:
            # A dead owner may have planned on with the token that never came; that is padding like the rest.
            if resumed.num_prefill_tokens == num_tokens[resumed.req_index]:
                self._void.discard(resumed.req_index)

    def await_masks(self, work: StepWork, columns: SamplingColumns) -> None:
        """Wait for what the step's sampling waits for. On the output rank, when the scores are there."""
        columns.masks.clear()
        if not work.awaits_mask:
            return
        assert work.gate is not None, "a step that waits knows for what"
        masks = work.gate.wait()
        if masks is None:
            self._void.update(work.awaits_mask)
        else:
            columns.masks.update(masks)

    def decide(self, rows: Int32Array, token_ids: Int32Array) -> Int32Array:
        """Return what was sampled for ``rows``, but nothing for those that are void."""
        if not self._void:
            return token_ids
        return np.where(np.isin(rows, list(self._void)), np.int32(NOT_SAMPLED), token_ids)

    def follow(self, rows: Int32Array, token_ids: Int32Array) -> None:
        """Take what the output rank said of ``rows``; on every rank."""
        void = rows[token_ids == NOT_SAMPLED]
        if len(void):
            self._void.update(void.tolist())

    @property
    def has_void(self) -> bool:
        """Whether some row has no token to give."""
        return bool(self._void)

    def clear(self) -> None:
        """Forget all rows."""
        self._void.clear()


def of_sampled(rows: Int32Array, token_ids: Int32Array, logprobs: tuple[RowLogprobs, ...]) -> tuple[RowLogprobs, ...]:
    """Leave out what is told of tokens that were not sampled."""
    void = set(rows[token_ids == NOT_SAMPLED].tolist())
    if not void:
        return logprobs
    kept = (
        RowLogprobs(one.req_index, None, one.prompt, one.first_position) if one.req_index in void else one
        for one in logprobs
    )
    return tuple(one for one in kept if one.sampled is not None or one.prompt is not None)
