"""Propose what a row will sample next: what followed when its last tokens occurred before.

Pure, and the same on every rank: it follows from the row's known tokens alone. Costs one pass over them in numpy, and
little more: 8 µs for 32 000 tokens.

Source: prompt lookup decoding (Saxena, 2023), behaviour only.
"""

from __future__ import annotations

import numpy as np

from worker_service.step_work import Int32Array

_NOTHING = np.zeros(0, np.int32)


def propose(known: Int32Array, max_tokens: int, lookup_min: int, lookup_max: int) -> Int32Array:
    """Return what followed at the place where most of the last tokens occurred before, the last such place of several.

    What follows reaches into itself where it must: a text that repeats a short period is continued with it.

    Args:
        known: [num_known] tokens of a row.
        max_tokens: proposed at most.
        lookup_min: so many last tokens must have occurred together.
        lookup_max: more than that are not compared.
    Returns:
        [``max_tokens``] token ids, or none.
    """
    ends = np.flatnonzero(known[:-1] == known[-1])
    num_equal = 1
    while num_equal < lookup_max and len(longer := ends[ends >= num_equal]):
        longer = longer[known[longer - num_equal] == known[-1 - num_equal]]
        if not len(longer):
            break
        ends, num_equal = longer, num_equal + 1
    if not len(ends) or num_equal < lookup_min:
        return _NOTHING
    followed = known[ends[-1] + 1 :]
    found: Int32Array = followed[np.arange(max_tokens) % len(followed)]
    return found
