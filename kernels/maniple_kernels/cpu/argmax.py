"""The highest score of each row on the CPU, and whether all of them are numbers, in one pass."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit, prange

from maniple_kernels.cpu.simd import LANES, add, load, max_lanes, maximum, mul, splat, sum_lanes

_TILE = 1024  # scores between two looks at the highest


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _highest(scores, start, size):
    """Return the first place of the highest score, or -1 if one is NaN or an infinity."""
    best, tile = np.float32(-np.inf), 0
    zeros = splat(np.float32(0.0))
    for begin in range(0, size, _TILE):
        top = splat(np.float32(-np.inf))
        for i in range(begin, min(size, begin + _TILE), LANES):
            value = load(scores, start + i)
            top = maximum(value, top)
            zeros = add(zeros, mul(value, splat(np.float32(0.0))))  # 0 times what is not finite is NaN
        highest = max_lanes(top)
        if highest > best:
            best, tile = highest, begin
    if sum_lanes(zeros) != np.float32(0.0):
        return -1
    for i in range(tile, size):
        if scores[start + i] == best:
            return i
    return -1


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def highest_of_rows(scores, num_rows, size, places):
    """Write the place of each row's highest score, -1 where a row is not finite; ``scores`` flat [num_rows, size]."""
    for row in prange(num_rows):
        places[row] = _highest(scores, row * size, size)
