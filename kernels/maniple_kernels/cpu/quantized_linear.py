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

_GROUP = 32  # inputs that share a scale
_WORDS = 8  # of four inputs each, in a group
_FEW_ROWS = 8  # whose quantization is not worth a round of threads


@njit(error_model="numpy", cache=True)
def _quantize_row(x, row, num_groups, shift, inputs, starts, factors, sums):
    """Write a row's groups as signed bytes; of each its scale, scale times sum, and what ``shift`` costs."""
    zero = splat(np.float32(0.0))
    for group in range(num_groups):
        at = row * num_groups + group
        low, high = load(x, at * _GROUP), load(x, at * _GROUP + LANES)
        largest = max_lanes(maximum(maximum(low, sub(zero, low)), maximum(high, sub(zero, high))))
        # The bound keeps the quotient finite; a group of zeros has scale zero.
        inverse = splat(np.float32(127.0) / max(largest, np.float32(1e-36)))
        low, high = rounded(mul(low, inverse)), rounded(mul(high, inverse))
        store_bytes(inputs, at * _GROUP, low)
        store_bytes(inputs, at * _GROUP + LANES, high)
        scale, total = largest * np.float32(1.0 / 127.0), sum_lanes(add(low, high))
        starts[at] = np.int32(-shift * total)
        factors[at] = scale
        sums[at] = scale * total


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def _quantize_rows(x, num_rows, num_groups, shift, inputs, starts, factors, sums):
    for row in prange(num_rows):
        _quantize_row(x, row, num_groups, shift, inputs, starts, factors, sums)


def _load_group(codes, scales, leasts, place):
    """Return the codes of 16 outputs, four inputs in each lane, their scales, and their least weights if there are any.

    Which weights these are is known by the type of ``leasts``; nothing is decided in the loop.
    """


@overload(_load_group)
def _load_group_of(codes, scales, leasts, place):
    def load_bytes(codes, scales, leasts, place):
        at = place * 8 * LANES
        w0, w1 = load_words(codes, at), load_words(codes, at + LANES)
        w2, w3 = load_words(codes, at + 2 * LANES), load_words(codes, at + 3 * LANES)
        w4, w5 = load_words(codes, at + 4 * LANES), load_words(codes, at + 5 * LANES)
        w6, w7 = load_words(codes, at + 6 * LANES), load_words(codes, at + 7 * LANES)
        return (w0, w1, w2, w3, w4, w5, w6, w7), load_halves(scales, place * LANES)

    def load_nibbles(codes, scales, leasts, place):
        at = place * 4 * LANES
        c0, c1 = load_words(codes, at), load_words(codes, at + LANES)
        c2, c3 = load_words(codes, at + 2 * LANES), load_words(codes, at + 3 * LANES)
        low = low_nibbles(c0), low_nibbles(c1), low_nibbles(c2), low_nibbles(c3)
        high = high_nibbles(c0), high_nibbles(c1), high_nibbles(c2), high_nibbles(c3)
        return low + high, load_halves(scales, place * LANES), load_halves(leasts, place * LANES)

    return load_bytes if isinstance(leasts, types.NoneType) else load_nibbles


def _add_leasts(total, group, sums, at):
    """Add the least weights times the sum of a row's inputs."""


@overload(_add_leasts)
def _add_leasts_of(total, group, sums, at):
    if len(group) == 3:
        return lambda total, group, sums, at: fma(group[2], splat_at(sums, at), total)
    return lambda total, group, sums, at: total


@njit(error_model="numpy", cache=True)
def _add_group(total, group, inputs, starts, factors, sums, at):
    """Add a row's products with one group. In two chains, which the CPU works on side by side."""
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
def _multiply_tile(codes, scales, leasts, tile, num_groups, num_rows, inputs, starts, factors, sums, start, out, width):
    """Write all rows of 16 outputs."""
    row, place, column = 0, tile * num_groups, tile * LANES
    while row + 4 <= num_rows:
        t0, t1, t2, t3 = start, start, start, start
        for group in range(num_groups):
            weights, at = _load_group(codes, scales, leasts, place + group), row * num_groups + group
            t0 = _add_group(t0, weights, inputs, starts, factors, sums, at)
            t1 = _add_group(t1, weights, inputs, starts, factors, sums, at + num_groups)
            t2 = _add_group(t2, weights, inputs, starts, factors, sums, at + 2 * num_groups)
            t3 = _add_group(t3, weights, inputs, starts, factors, sums, at + 3 * num_groups)
        store(out, row * width + column, t0)
        store(out, (row + 1) * width + column, t1)
        store(out, (row + 2) * width + column, t2)
        store(out, (row + 3) * width + column, t3)
        row += 4
    while row < num_rows:
        total = start
        for group in range(num_groups):
            weights, at = _load_group(codes, scales, leasts, place + group), row * num_groups + group
            total = _add_group(total, weights, inputs, starts, factors, sums, at)
        store(out, row * width + column, total)
        row += 1


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def multiply_rows(x, num_rows, num_groups, codes, scales, leasts, bias, num_tiles, out):
    """Write x W^T + bias; ``x`` flat [num_rows, num_groups * 32], ``out`` flat [num_rows, num_tiles * 16].

    ``bias`` may be empty; it and ``out`` are float32.
    """
    inputs = np.empty(num_rows * num_groups * _WORDS, np.int32)
    starts = np.empty(num_rows * num_groups, np.int32)
    factors, sums = np.empty(num_rows * num_groups, np.float32), np.empty(num_rows * num_groups, np.float32)
    shift = np.float32(128.0 if leasts is None else 0.0)
    if num_rows < _FEW_ROWS:
        for row in range(num_rows):
            _quantize_row(x, row, num_groups, shift, inputs.view(np.int8), starts, factors, sums)
    else:
        _quantize_rows(x, num_rows, num_groups, shift, inputs.view(np.int8), starts, factors, sums)
    for tile in prange(num_tiles):
        start = load(bias, tile * LANES) if len(bias) else splat(np.float32(0.0))
        _multiply_tile(
            codes,
            scales,
            leasts,
            tile,
            num_groups,
            num_rows,
            inputs,
            starts,
            factors,
            sums,
            start,
            out,
            num_tiles * LANES,
        )
