"""Products with weights of 8 and 4 bits on the CPU: see ``maniple_kernels.quantized_linear`` for maths and layout.

Weights stream through once for all rows: 16 outputs at a time, whose weights stay in the first-level cache while the
rows pass by, four together. A row's result has the same bits whichever way it went: products of bytes add up exactly,
and groups follow each other in one order.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit, prange, types
from numba.extending import overload

from maniple_kernels.cpu.simd import (
    LANES,
    add,
    fma,
    load,
    max_lanes,
    maximum,
    mul,
    splat,
    splat_at,
    store,
    sub,
    sum_lanes,
)
from maniple_kernels.cpu.simd_bytes import (
    add_byte_products,
    add_words,
    as_floats,
    high_nibbles,
    load_halves,
    load_words,
    low_nibbles,
    rounded,
    splat_word_at,
    store_bytes,
    zero_words,
)

GROUP = 32  # inputs that share a scale
_WORDS = 8  # of four inputs each, in a group
FEW_ROWS = 8  # whose quantization is not worth a round of threads


@njit(error_model="numpy", cache=True)
def quantize_row(x, row, num_groups, shift, rows):
    """Write a row's groups as signed bytes; of each its scale, scale times sum, and what ``shift`` costs.

    ``rows``: (bytes, int32 that products begin with, scales, sums), flat, of all rows.
    """
    inputs, starts, factors, sums = rows
    signed = inputs.view(np.int8)
    zero = splat(np.float32(0.0))
    for group in range(num_groups):
        at = row * num_groups + group
        low, high = load(x, at * GROUP), load(x, at * GROUP + LANES)
        largest = max_lanes(maximum(maximum(low, sub(zero, low)), maximum(high, sub(zero, high))))
        # The bound keeps the quotient finite; a group of zeros has scale zero.
        inverse = splat(np.float32(127.0) / max(largest, np.float32(1e-36)))
        low, high = rounded(mul(low, inverse)), rounded(mul(high, inverse))
        store_bytes(signed, at * GROUP, low)
        store_bytes(signed, at * GROUP + LANES, high)
        scale, total = largest * np.float32(1.0 / 127.0), sum_lanes(add(low, high))
        starts[at] = np.int32(-shift * total)
        factors[at] = scale
        sums[at] = scale * total


@njit(error_model="numpy", cache=True)
def room_for_rows(num_groups):
    """Return ``rows`` of ``quantize_row`` for so many groups in all."""
    inputs, starts = np.empty(num_groups * _WORDS, np.int32), np.empty(num_groups, np.int32)
    return inputs, starts, np.empty(num_groups, np.float32), np.empty(num_groups, np.float32)


@njit(error_model="numpy", cache=True)
def shift_of(weights):
    """Return what the codes of the weights have too much."""
    return np.float32(128.0 if weights[2] is None else 0.0)


def _load_group(weights, place):
    """Return the codes of 16 outputs, four inputs in each lane, their scales, and their least weights if there are any.

    Which weights these are is known by the type of the third array; nothing is decided in the loop.
    """


@overload(_load_group)
def _load_group_of(weights, place):
    def load_bytes(weights, place):
        codes, scales = weights[0], weights[1]
        at = place * 8 * LANES
        w0, w1 = load_words(codes, at), load_words(codes, at + LANES)
        w2, w3 = load_words(codes, at + 2 * LANES), load_words(codes, at + 3 * LANES)
        w4, w5 = load_words(codes, at + 4 * LANES), load_words(codes, at + 5 * LANES)
        w6, w7 = load_words(codes, at + 6 * LANES), load_words(codes, at + 7 * LANES)
        return (w0, w1, w2, w3, w4, w5, w6, w7), load_halves(scales, place * LANES)

    def load_nibbles(weights, place):
        codes, scales, leasts = weights
        at = place * 4 * LANES
        c0, c1 = load_words(codes, at), load_words(codes, at + LANES)
        c2, c3 = load_words(codes, at + 2 * LANES), load_words(codes, at + 3 * LANES)
        low = low_nibbles(c0), low_nibbles(c1), low_nibbles(c2), low_nibbles(c3)
        high = high_nibbles(c0), high_nibbles(c1), high_nibbles(c2), high_nibbles(c3)
        return low + high, load_halves(scales, place * LANES), load_halves(leasts, place * LANES)

    return load_bytes if isinstance(weights[2], types.NoneType) else load_nibbles


def _add_leasts(total, group, sums, at):
    """Add the least weights times the sum of a row's inputs."""


@overload(_add_leasts)
def _add_leasts_of(total, group, sums, at):
    if len(group) == 3:
        return lambda total, group, sums, at: fma(group[2], splat_at(sums, at), total)
    return lambda total, group, sums, at: total


@njit(error_model="numpy", cache=True)
def _add_group(total, group, rows, at):
    """Add a row's products with one group. In two chains, which the CPU works on side by side."""
    inputs, starts, factors, sums = rows
    weights, word = group[0], at * _WORDS
    first = add_byte_products(splat_word_at(starts, at), weights[0], splat_word_at(inputs, word))
    second = add_byte_products(zero_words(), weights[1], splat_word_at(inputs, word + 1))
    first = add_byte_products(first, weights[2], splat_word_at(inputs, word + 2))
    second = add_byte_products(second, weights[3], splat_word_at(inputs, word + 3))
    first = add_byte_products(first, weights[4], splat_word_at(inputs, word + 4))
    second = add_byte_products(second, weights[5], splat_word_at(inputs, word + 5))
    first = add_byte_products(first, weights[6], splat_word_at(inputs, word + 6))
    second = add_byte_products(second, weights[7], splat_word_at(inputs, word + 7))
    products = as_floats(add_words(first, second))
    return _add_leasts(fma(products, mul(group[1], splat_at(factors, at)), total), group, sums, at)


@njit(error_model="numpy", cache=True)
def multiply_tile(weights, tile, num_groups, num_rows, rows, bias, out, width, column, adds):
    """Write the products of all rows for 16 outputs.

    Args:
        weights: (codes, scales, least weights or None), flat, as in ``quantized_linear``.
        tile: which outputs.
        num_groups: of the inputs.
        num_rows: that ``rows`` holds.
        rows: of ``quantize_row``.
        bias: float32, may be empty.
        out: float32, flat.
        width: of a row of ``out``.
        column: of the first output in it.
        adds: to what is in ``out``.
    """
    row, place = 0, tile * num_groups
    start = load(bias, tile * LANES) if len(bias) else splat(np.float32(0.0))
    while row + 4 <= num_rows:
        t0, t1, t2, t3 = start, start, start, start
        for group in range(num_groups):
            of_group, at = _load_group(weights, place + group), row * num_groups + group
            t0 = _add_group(t0, of_group, rows, at)
            t1 = _add_group(t1, of_group, rows, at + num_groups)
            t2 = _add_group(t2, of_group, rows, at + 2 * num_groups)
            t3 = _add_group(t3, of_group, rows, at + 3 * num_groups)
        _put(out, row * width + column, t0, adds)
        _put(out, (row + 1) * width + column, t1, adds)
        _put(out, (row + 2) * width + column, t2, adds)
        _put(out, (row + 3) * width + column, t3, adds)
        row += 4
    while row < num_rows:
        total = start
        for group in range(num_groups):
            total = _add_group(total, _load_group(weights, place + group), rows, row * num_groups + group)
        _put(out, row * width + column, total, adds)
        row += 1


@njit(error_model="numpy", cache=True)
def _put(out, at, value, adds):
    if adds:
        store(out, at, add(load(out, at), value))
    else:
        store(out, at, value)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def multiply_rows(x, num_rows, num_groups, weights, bias, num_tiles, out):
    """Write x W^T + bias; ``x`` flat [num_rows, num_groups * 32], ``out`` flat [num_rows, num_tiles * 16].

    ``bias`` may be empty; it and ``out`` are float32.
    """
    rows, shift = room_for_rows(num_rows * num_groups), shift_of(weights)
    if num_rows < FEW_ROWS:
        for row in range(num_rows):
            quantize_row(x, row, num_groups, shift, rows)
    else:
        for row in prange(num_rows):
            quantize_row(x, row, num_groups, shift, rows)
    for tile in prange(num_tiles):
        multiply_tile(weights, tile, num_groups, num_rows, rows, bias, out, num_tiles * LANES, tile * LANES, False)
