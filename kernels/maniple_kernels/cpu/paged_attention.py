"""Paged attention on the CPU: walk the block table, load each block once for the heads and queries that share it.

The few rows of a decoding request are multiplied with what lies in the cache, many with a copy (``tile_attention``).

Keys are taken 64 at a time: scores, then their weights, then the weighted values. The spans of 64 begin at multiples of
64 in the request, so what one query computes is the same in any tile: spans and vectors that it may not look at add
exact zeros to it.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import functools

import numpy as np
from numba import njit, prange, types
from numba.np.numpy_support import from_dtype

from maniple_kernels.cpu.cache_products import multiply_cached
from maniple_kernels.cpu.calls import address_of, array, caller
from maniple_kernels.cpu.claims import claim, nothing_taken
from maniple_kernels.cpu.online_softmax import LEAST, SPAN, ZERO, weigh
from maniple_kernels.cpu.simd import LANES, load, mul, splat, store, sum_lanes
from maniple_kernels.cpu.tile_attention import attend_many

FEW_ROWS = 8  # for which keys and values are multiplied as they lie in the cache


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _copy_visible(values, base, dim, begin, end, copy):
    """Copy the rows [begin, end) of 16 values, and zeros for the others: what lies there is not ours, nor finite."""
    for t in range(LANES):
        for d in range(0, dim, LANES):
            store(copy, t * dim + d, load(values, base + t * dim + d) if begin <= t < end else splat(ZERO))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def attend_few(query, keys, values, table, first_query, num_queries, position, head, shape, scale, window, out):
    """Attend for the queries [first_query, first_query + num_queries) of one request and one KV head.

    For at most ``FEW_ROWS`` queries of all heads; ``attend_many`` is for more.
    """
    num_kv_heads, group, dim, block_size, stride = shape
    num_rows = num_queries * group
    acc = np.zeros(num_rows * dim, np.float32)
    tops = np.full(num_rows, LEAST, np.float32)
    totals = np.zeros(num_rows * LANES, np.float32)
    state = tops, totals, acc, dim
    scores = np.empty(num_rows * SPAN, np.float32)
    weights = np.empty(num_rows * SPAN, keys.dtype)
    rounded = np.empty(num_rows * dim, keys.dtype)
    copy = np.empty(LANES * dim, keys.dtype)
    for i in range(num_queries):
        for d in range(0, group * dim, LANES):
            store(rounded, i * group * dim + d, load(query, (first_query + i) * stride + head * group * dim + d))
    end = position + num_queries  # keys [0, end) exist for the last query of the tile
    begin = max(0, position - window + 1) if window > 0 else 0  # keys before are for none of the tile
    for span in range(begin // SPAN * SPAN, end, SPAN):
        first = max(0, (begin - span) // LANES * LANES)
        last = min(SPAN, (end - span + LANES - 1) // LANES * LANES)
        for i in range(first, last, 2 * LANES):
            j = i + LANES if i + LANES < last else i
            block, other = table[(span + i) // block_size], table[(span + j) // block_size]
            starts = (
                (block * num_kv_heads + head) * dim * block_size + (span + i) % block_size,
                (other * num_kv_heads + head) * dim * block_size + (span + j) % block_size,
            )
            multiply_cached(rounded, 0, dim, num_rows, dim, keys, starts, block_size, scores, (i, j), SPAN, True)
        weigh(scores, SPAN, 0, num_rows, group, position, window, span, first, last, scale, state, weights)
        for i in range(first, last, LANES):
            block = table[(span + i) // block_size]
            base = ((block * num_kv_heads + head) * block_size + (span + i) % block_size) * dim
            whole = span + i >= begin and span + i + LANES <= end
            if not whole:
                _copy_visible(values, base, dim, begin - span - i, end - span - i, copy)
            for d in range(0, dim, 2 * LANES):
                e = d + LANES if d + LANES < dim else d
                if whole:
                    at = base + d, base + e
                    multiply_cached(weights, i, SPAN, num_rows, LANES, values, at, dim, acc, (d, e), dim, False)
                else:
                    multiply_cached(weights, i, SPAN, num_rows, LANES, copy, (d, e), dim, acc, (d, e), dim, False)
    for row in range(num_rows):
        inverse = splat(np.float32(1.0) / sum_lanes(load(totals, row * LANES)))
        start = (first_query + row // group) * num_kv_heads * group + head * group + row % group
        for d in range(0, dim, LANES):
            store(out, start * dim + d, mul(load(acc, row * dim + d), inverse))


def _kinds(query, own, out):
    cache, size = array(own), types.int64
    shape = types.UniTuple(size, 5)
    return (
        array(query), cache, cache, array(types.int32), size, size, size, size, shape, types.float32, size, array(out)
    )  # fmt: skip


_call = caller(lambda given: _kinds(given[0].dtype, given[1].dtype, given[11].dtype))


@functools.cache
def attend_addresses(query: np.dtype, cache: np.dtype, out: np.dtype) -> tuple[np.int64, np.int64]:
    """Return the addresses of the attention of few and of many rows, for arrays of these types."""
    kinds = _kinds(*map(from_dtype, (query, cache, out)))
    return address_of(attend_few, kinds), address_of(attend_many, kinds)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def attend(ways, query, keys, values, table, first_query, num_queries, position, head, shape, scale, window, out):
    """Attend for some queries of one request and one KV head; ``ways`` are of ``attend_addresses``."""
    way = ways[0] if num_queries * shape[1] <= FEW_ROWS else ways[1]
    _call(
        way, (query, keys, values, table, first_query, num_queries, position, head, shape, scale, window, out)
    )  # fmt: skip


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def attend_tiles(query, keys, values, tables, tiles, shape, scale, window, out, ways, num_threads):
    """Attend for every tile and KV head.

    Args:
        query: flat; the heads of token t begin at ``t * stride``.
        keys: flat [num_blocks, num_kv_heads, head_dim, block_size].
        values: flat [num_blocks, num_kv_heads, block_size, head_dim].
        tables: [num_reqs, max_num_blocks] int32.
        tiles: [num_tiles, 4] int64: request, first token, tokens, position of the first.
        shape: (num_kv_heads, query heads per KV head, head_dim, block_size, stride).
        scale: the softmax scale times log2(e).
        window: keys a query sees, itself included; 0: all before it.
        out: flat [num_tokens, num_heads, head_dim].
        ways: of ``attend_addresses``.
        num_threads: of ``use_threads``.
    """
    num_kv_heads = shape[0]
    taken, num_items = nothing_taken(num_threads), len(tiles) * num_kv_heads
    for thread in prange(num_threads):
        item, helped = claim(taken, num_items, thread, 0)
        while item < num_items:
            request, first, count, position = tiles[item // num_kv_heads]
            head = item % num_kv_heads
            attend(ways, query, keys, values, tables[request], first, count, position, head, shape, scale, window, out)
            item, helped = claim(taken, num_items, thread, helped)
