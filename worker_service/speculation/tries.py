"""Turn a step as it was planned into the step that is computed: with as many tokens ahead as there are to try."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from worker_service.speculation.prompt_lookup import propose
from worker_service.step_work import Int32Array, StepWork


class MiscountedRow(RuntimeError):
    """A delta says another number of accepted tokens than this rank has: the owner and the ranks have diverged."""


class TokenTable(Protocol):
    """What is read of a batch, and written behind what is known of a row."""

    token_ids: Int32Array  # [max_num_seqs, max_model_len]
    num_tokens: Int32Array  # [max_num_seqs], known


def with_tries(work: StepWork, batch: TokenTable) -> StepWork:
    """Return what is computed of a step; rows for which nothing is found compute one token.

    What is tried lies in the table behind the known tokens. All ranks find the same, since they know the same.

    Raises:
        MiscountedRow: nothing was changed.
    """
    speculation = work.speculation
    if speculation is None:
        return work
    for row in (*speculation.settled, *speculation.rows):
        num_computed = int(work.num_computed_tokens[np.searchsorted(work.rows, row)])
        if num_computed + 1 != batch.num_tokens[row]:
            raise MiscountedRow(
                f"step {work.step}: row {row} has computed {num_computed} tokens by its delta, "
                f"and {batch.num_tokens[row] - 1} by what it sampled"
            )
    scheduled, trying = work.num_scheduled_tokens.copy(), []
    for row in speculation.rows:
        place, num_known = np.searchsorted(work.rows, row), int(batch.num_tokens[row])
        found = propose(
            batch.token_ids[row, :num_known],
            int(scheduled[place]) - 1,
            speculation.prompt_lookup_min,
            speculation.prompt_lookup_max,
        )
        batch.token_ids[row, num_known : num_known + len(found)] = found
        scheduled[place] = 1 + len(found)
        if len(found):
            trying.append(row)
    tried = replace(speculation, rows=tuple(trying)) if trying else None
    return replace(work, num_scheduled_tokens=scheduled, speculation=tried)
