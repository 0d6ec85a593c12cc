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
_FEW_ROWS = 64


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def quantize_row(x, start, num_groups, shift, rows, row):
    """Write the groups of x from ``start`` on as bytes; of each its scale, scale times sum, and what the shift costs.

    ``rows``: (bytes, int32 that products begin with, scales, sums), flat, of many rows, of which this is ``row``.
    """
    inputs, starts, factors, sums = rows
    signed = inputs.view(np.int8)
    zero = splat(np.float32(0.0))
    for group in range(num_groups):
        at = row * num_groups + group
        low, high = load(x, start + group * GROUP), load(x, start + group * GROUP + LANES)
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


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def shift_of(weights):
    """Return what the codes of the weights have too much."""
    return np.float32(0.0 if len(weights[2]) else 128.0)


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


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
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


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def multiply_tile(weights, tile, num_groups, rows, first, last, bias, out, start, width, adds):
    """Write the products of some rows for 16 outputs.

    Args:
        weights: (codes, scales, least weights), flat, as in ``quantized_linear``; of 8 bits there are no least ones.
        tile: which outputs.
        num_groups: of the inputs.
        rows: of ``quantize_row``.
        first: of the rows.
        last: of the rows, not included.
        bias: float32, may be empty.
        out: float32, flat.
        start: place of the tile's first output for the first row.
        width: of a row of ``out``.
        adds: to what is in ``out``.
    """
    codes, scales, leasts = weights
    begin = load(bias, tile * LANES) if len(bias) else splat(np.float32(0.0))
    if len(leasts):
        _multiply_tile(weights, begin, tile * num_groups, num_groups, rows, first, last, out, start, width, adds)
    else:
        weights_of_bytes = codes, scales, None
        _multiply_tile(
            weights_of_bytes, begin, tile * num_groups, num_groups, rows, first, last, out, start, width, adds
        )


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _multiply_tile(weights, begin, place, num_groups, rows, first, last, out, start, width, adds):
    row, at = first, start
    while row + 4 <= last:
        t0, t1, t2, t3 = begin, begin, begin, begin
        for group in range(num_groups):
            of_group, source = _load_group(weights, place + group), row * num_groups + group
            t0 = _add_group(t0, of_group, rows, source)
            t1 = _add_group(t1, of_group, rows, source + num_groups)
            t2 = _add_group(t2, of_group, rows, source + 2 * num_groups)
            t3 = _add_group(t3, of_group, rows, source + 3 * num_groups)
        _put(out, at, t0, adds)
        _put(out, at + width, t1, adds)
        _put(out, at + 2 * width, t2, adds)
        _put(out, at + 3 * width, t3, adds)
        row += 4
        at += 4 * width
    while row < last:
        total = begin
        for group in range(num_groups):
            total = _add_group(total, _load_group(weights, place + group), rows, row * num_groups + group)
        _put(out, at, total, adds)
        row += 1
        at += width


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _put(out, at, value, adds):
    if adds:
        store(out, at, add(load(out, at), value))
    else:
        store(out, at, value)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def room_for(num_rows, num_groups, num_parts, few_rows):
    """Return ``rows`` of ``quantize_row`` for products that are dealt out to threads by ``deal``."""
    num_rows = num_parts * num_rows if num_rows <= few_rows else num_rows
    inputs, starts = np.empty(num_rows * num_groups * _WORDS, np.int32), np.empty(num_rows * num_groups, np.int32)
    return inputs, starts, np.empty(num_rows * num_groups, np.float32), np.empty(num_rows * num_groups, np.float32)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def deal(part, num_parts, num_rows, num_tiles, few_rows):
    """Return (first row, last, its place in ``rows``, first tile, last) of one of the threads.

    Of few rows a thread has some outputs. It quantizes the rows for itself, which takes less time than to wait for the
    other threads. Of many it has some rows, with all outputs.
    """
    if num_rows <= few_rows:
        return 0, num_rows, part * num_rows, num_tiles * part // num_parts, num_tiles * (part + 1) // num_parts
    first = num_rows * part // num_parts
    return first, num_rows * (part + 1) // num_parts, first, 0, num_tiles


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def multiply_part(part, num_parts, x, num_rows, num_groups, weights, bias, rows, out, num_tiles, few_rows, adds):
    """Quantize and multiply what ``deal`` gives to a thread; see ``multiply_rows`` and ``multiply_tile``."""
    first, last, base, first_tile, last_tile = deal(part, num_parts, num_rows, num_tiles, few_rows)
    shift, width, end = shift_of(weights), num_tiles * LANES, base + last - first
    for row in range(first, last):
        quantize_row(x, row * num_groups * GROUP, num_groups, shift, rows, base + row - first)
    for tile in range(first_tile, last_tile):
        multiply_tile(weights, tile, num_groups, rows, base, end, bias, out, first * width + tile * LANES, width, adds)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def multiply_rows(x, num_rows, num_groups, weights, bias, num_tiles, out, num_parts):
    """Write x W^T + bias; ``x`` flat [num_rows, num_groups * 32], ``out`` flat [num_rows, num_tiles * 16].

    ``bias`` may be empty; it and ``out`` are float32. ``num_parts``: threads.
    """
    rows = room_for(num_rows, num_groups, num_parts, _FEW_ROWS)
    for part in prange(num_parts):
        multiply_part(
            np.int64(part), num_parts, x, num_rows, num_groups, weights, bias, rows, out, num_tiles, _FEW_ROWS, False
        )
