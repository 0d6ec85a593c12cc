"""Sample where tokens were tried ahead: one position after the other, for as long as they were right.

Nothing here is about probabilities. A row's noise depends on the position alone, so what it would sample at a position
is known as soon as all tokens before it are; a token that was tried is accepted if it is that one. Each position is
sampled when the tokens before it are in the batch, so penalties, bad words and minimal lengths see what they would see
one step at a time, and outputs are equal to the bit where the scores are.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from worker_service.speculation.tries import TokenTable
from worker_service.step_work import NOT_SAMPLED, Int32Array, StepWork

Int64Array = npt.NDArray[np.int64]


def num_scores_of(work: StepWork) -> Int32Array:
    """Return for each row that samples at how many positions it may: one, or each that it computes.

    Args:
        work: as ``with_tries`` returned it.
    """
    rows = work.rows[work.samples]
    tries = () if work.speculation is None else work.speculation.rows
    scores: Int32Array = np.where(np.isin(rows, tries), work.num_scheduled_tokens[work.samples], np.int32(1))
    return scores


def places_of_scores(work: StepWork, num_scores: Int32Array) -> Int64Array:
    """Return, row after row, the places among the step's tokens behind which something may be sampled."""
    last = np.cumsum(work.num_scheduled_tokens)[work.samples] - 1
    behind = np.repeat(np.cumsum(num_scores), num_scores) - 1 - np.arange(num_scores.sum())
    places: Int64Array = np.repeat(last, num_scores) - behind
    return places


def sample_tries(
    rows: Int32Array,
    num_scores: Int32Array,
    batch: TokenTable,
    sample: Callable[[Int64Array, Int32Array], Int32Array],
    append: Callable[[Int32Array, Int32Array], None],
) -> tuple[Int32Array, Int32Array]:
    """Sample and append, position by position.

    Args:
        rows: [num_rows] that sample.
        num_scores: [num_rows] positions of each that there are scores for.
        batch: what was tried lies behind the known tokens of each row.
        sample: given places among all scores and their rows, each once, returns what follows the known tokens of each.
        append: given rows and a token for each, makes them known.
    Returns:
        The tokens, row after row, and [num_rows] how many each row has; NOT_SAMPLED is one.
    """
    starts = np.cumsum(num_scores) - num_scores
    sampled = np.full((len(rows), int(num_scores.max())), NOT_SAMPLED, np.int32)
    num_tokens = np.zeros(len(rows), np.int32)
    going = np.arange(len(rows))
    for ahead in range(sampled.shape[1]):
        here = rows[going]
        token_ids = sample(starts[going] + ahead, here)
        sampled[going, ahead] = token_ids
        num_tokens[going] += 1
        goes_on = num_scores[going] > ahead + 1
        goes_on[goes_on] = batch.token_ids[here[goes_on], batch.num_tokens[here[goes_on]]] == token_ids[goes_on]
        given = token_ids != NOT_SAMPLED
        append(here[given], token_ids[given])
        going = going[goes_on]
        if not len(going):
            break
    return sampled[np.arange(sampled.shape[1]) < num_tokens[:, None]], num_tokens


def append_sampled(
    rows: Int32Array, token_ids: Int32Array, num_tokens: Int32Array, append: Callable[[Int32Array, Int32Array], None]
) -> None:
    """Append what another rank sampled; arguments as ``sample_tries`` takes and returns them."""
    starts = np.cumsum(num_tokens) - num_tokens
    for ahead in range(int(num_tokens.max(initial=0))):
        (going,) = np.nonzero(num_tokens > ahead)
        here = token_ids[starts[going] + ahead]
        given = here != NOT_SAMPLED
        append(rows[going][given], here[given])
