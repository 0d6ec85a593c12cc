"""Paged attention on the CPU: walk the block table, widen each block once for the heads and queries that share it."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit, prange

from maniple_kernels.cpu.simd import (
    LANES,
    add,
    exp2,
    fma,
    keep_below,
    load,
    max_lanes,
    mul,
    splat,
    splat_at,
    store,
    sub,
    sum_lanes,
)

LEAST = np.float32(-1e30)  # finite, so that differences of two of them are no NaN
ZERO = np.float32(0.0)


@njit(error_model="numpy", cache=True)
def _attend(query, keys, values, table, first_query, num_queries, position, head, shape, scale, window, out):
    """Attend for the queries [first_query, first_query + num_queries) of one request and one KV head.

    Online softmax over the blocks in table order. What one query sees is the same in any tile: blocks that it may not
    look at are skipped for it, and masked lanes add exact zeros.
    """
    num_kv_heads, group, dim, block_size, stride = shape
    num_rows = num_queries * group
    acc = np.zeros(num_rows * dim, np.float32)
    top = np.full(num_rows, LEAST, np.float32)
    total = np.zeros(num_rows, np.float32)
    wide_k = np.empty(dim * block_size, np.float32)
    wide_v = np.empty(dim * block_size, np.float32)
    weights = np.empty(LANES, np.float32)
    end = position + num_queries  # keys [0, end) exist for the last query of the tile
    begin = max(0, position - window + 1) if window > 0 else 0
    for block in range(begin // block_size, (end + block_size - 1) // block_size):
        base = (table[block] * num_kv_heads + head) * dim * block_size
        for i in range(0, dim * block_size, LANES):
            store(wide_k, i, load(keys, base + i))
            store(wide_v, i, load(values, base + i))
        for i in range(num_queries):
            last = position + i  # the query's own position, the last it sees
            least = max(0, last - window + 1) if window > 0 else 0
            for lane0 in range(0, block_size, LANES):
                start = block * block_size + lane0
                if start > last or start + LANES <= least:
                    continue
                count = min(LANES, last + 1 - start)
                hidden = max(0, least - start)
                for g in range(group):
                    row = i * group + g
                    q = (first_query + i) * stride + (head * group + g) * dim
                    s0 = splat(ZERO)
                    s1 = s0
                    s2 = s0
                    s3 = s0
                    for d in range(0, dim, 4):
                        k = d * block_size + lane0
                        s0 = fma(splat_at(query, q + d), load(wide_k, k), s0)
                        s1 = fma(splat_at(query, q + d + 1), load(wide_k, k + block_size), s1)
                        s2 = fma(splat_at(query, q + d + 2), load(wide_k, k + 2 * block_size), s2)
                        s3 = fma(splat_at(query, q + d + 3), load(wide_k, k + 3 * block_size), s3)
                    scores = mul(add(add(s0, s1), add(s2, s3)), splat(scale))
                    scores = keep_below(scores, count, LEAST)
                    if hidden > 0:
                        scores = add(scores, keep_below(splat(LEAST), hidden, ZERO))
                    new_top = max(top[row], max_lanes(scores))
                    rescale = exp2(sub(splat_at(top, row), splat(new_top)))
                    top[row] = new_top
                    share = keep_below(exp2(sub(scores, splat(new_top))), count, ZERO)
                    if hidden > 0:
                        share = sub(share, keep_below(share, hidden, ZERO))
                    store(weights, 0, share)
                    total[row] = sum_lanes(fma(keep_below(splat_at(total, row), 1, ZERO), rescale, share))
                    for d in range(0, dim, LANES):
                        sums = mul(load(acc, row * dim + d), rescale)
                        for t in range(hidden, count):
                            sums = fma(splat_at(weights, t), load(wide_v, (lane0 + t) * dim + d), sums)
                        store(acc, row * dim + d, sums)
    for i in range(num_queries):
        for g in range(group):
            row = i * group + g
            inverse = splat(np.float32(1.0) / total[row])
            o = (((first_query + i) * num_kv_heads + head) * group + g) * dim
            for d in range(0, dim, LANES):
                store(out, o + d, mul(load(acc, row * dim + d), inverse))


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def attend_tiles(query, keys, values, tables, tiles, shape, scale, window, out):
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
    """
    num_kv_heads = shape[0]
    for item in prange(len(tiles) * num_kv_heads):
        request, first, count, position = tiles[item // num_kv_heads]
        head = item % num_kv_heads
        _attend(query, keys, values, tables[request], first, count, position, head, shape, scale, window, out)
