"""The softmax over keys that come span by span: weights of one span, and the factor of what came before.

What one row computes is the same in any tile: keys and vectors that it may not look at add exact zeros to it.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit

from maniple_kernels.cpu.simd import (
    LANES,
    add,
    exp2,
    fma,
    keep_below,
    keep_from,
    load,
    max_lanes,
    maximum,
    mul,
    splat,
    store,
)

SPAN = 64  # keys
LEAST = np.float32(-1e30)  # finite, so that differences of two of them are no NaN
ZERO = np.float32(0.0)
# What a score may be above the one that weights are powers of the distance to: nearly all sums then stay as they are,
# which saves a branch that nobody could foretell. A weight of 2 ** 8 is as exact as one of 1.
_SLACK = np.float32(8.0)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _keep_visible(x, first, hidden, count, otherwise):
    """Return the lanes of keys [hidden, count) of a span, of the vector that begins at key ``first``."""
    return keep_from(keep_below(x, count - first, otherwise), hidden - first, otherwise)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _sees(position, row, group, window, span):
    """Return the keys [hidden, count) of a span that a row sees."""
    own = position + row // group  # the query's own position, the last it sees
    return (own - window + 1 - span if window > 0 else 0), own + 1 - span


@njit(error_model="numpy", cache=True, forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def weigh(scores, gap, begun, num_rows, group, position, window, span, first, last, scale, state, weights):
    """Turn some rows' scores of the vectors [first, last) of a span into weights, and bring their sums up to them.

    Row by row: first all the largest scores and then all weights, so that the long ways to either overlap.

    Args:
        scores: of keys of the span, row after row.
        gap: between rows of ``scores`` and ``weights``.
        begun: the first row's number in the tile.
        num_rows: that are weighed.
        group: rows of one query.
        position: of the tile's first query.
        window: keys that a query sees, itself included; 0: all before it.
        span: the key that it begins with.
        first: key of the span, a multiple of 16; those before are for none of the tile.
        last: key of the span, a multiple of 16; those from here on are for none of the tile.
        scale: the softmax scale times log2(e), not negative.
        state: of all rows of the tile: (largest score until now, [rows, 16] sums of weights, [rows, width] sums of
            weighted values, width).
        weights: of the type of the values.
    """
    tops, totals, acc, width = state
    hidden, _ = _sees(position, begun + num_rows - 1, group, window, span)
    _, count = _sees(position, begun, group, window, span)
    is_whole = hidden <= first and count >= last
    for row in range(num_rows):
        largest, at = splat(LEAST), row * gap
        if is_whole:
            for i in range(first, last, LANES):
                largest = maximum(largest, load(scores, at + i))
        else:
            hidden, count = _sees(position, begun + row, group, window, span)
            for i in range(first, last, LANES):
                largest = maximum(largest, _keep_visible(load(scores, at + i), i, hidden, count, LEAST))
        top, known = max_lanes(largest) * scale, tops[begun + row]
        if top <= known + _SLACK:
            continue
        tops[begun + row] = top
        rescale = exp2(splat(known - top))
        store(totals, (begun + row) * LANES, mul(load(totals, (begun + row) * LANES), rescale))
        for i in range((begun + row) * width, (begun + row + 1) * width, LANES):
            store(acc, i, mul(load(acc, i), rescale))
    for row in range(num_rows):
        total, at = (begun + row) * LANES, row * gap
        sums, top = load(totals, total), splat(-tops[begun + row])
        if is_whole:
            for i in range(first, last, LANES):
                weight = exp2(fma(load(scores, at + i), splat(scale), top))
                store(weights, at + i, weight)
                sums = add(sums, weight)
        else:
            hidden, count = _sees(position, begun + row, group, window, span)
            for i in range(first, last, LANES):
                weight = exp2(fma(load(scores, at + i), splat(scale), top))
                weight = _keep_visible(weight, i, hidden, count, ZERO)
                store(weights, at + i, weight)
                sums = add(sums, weight)
        store(totals, total, sums)
