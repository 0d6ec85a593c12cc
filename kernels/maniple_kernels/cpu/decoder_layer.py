"""A whole decoder layer on the CPU in one call: what lies between its products costs no way through Python.

See ``maniple_kernels.decoder_layer`` for the maths. Between the products everything stays float32; inputs of products
are rounded to the weights' type, keys and values to the cache's.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit, prange

from maniple_kernels.cpu.claims import claim, nothing_taken
from maniple_kernels.cpu.linear import ROWS
from maniple_kernels.cpu.paged_attention import attend_tiles
from maniple_kernels.cpu.panel_products import PANEL, call_multiply_panel
from maniple_kernels.cpu.rms_norm import _normalize
from maniple_kernels.cpu.silu_mul import gate
from maniple_kernels.cpu.simd import LANES, add, copy, load, mul, store, sub

_FEW_TOKENS = 4  # at a time, of norms and angles: one is not worth a claim


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _rotate(x, start, half, cos_sin, angle):
    for i in range(0, half, LANES):
        cos = load(cos_sin, angle + i)
        sin = load(cos_sin, angle + half + i)
        first = load(x, start + i)
        second = load(x, start + half + i)
        store(x, start + i, sub(mul(first, cos), mul(second, sin)))
        store(x, start + half + i, add(mul(second, cos), mul(first, sin)))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _place_head(
    heads, queries, key, value, head, shape, norms, eps, cos_sin, position, slot, keys, values, rounded
):  # fmt: skip
    """Norm and rotate what a token has of one KV head, queries and key, and put key and value into their slot.

    Its queries, its key and its value begin at these places of ``heads``.
    """
    num_kv_heads, group, dim, block_size, _ = shape
    q_norm, k_norm = norms
    for at in range(queries, queries + group * dim, dim):
        if len(q_norm):
            _normalize(heads, at, dim, q_norm, eps, heads, at)
        _rotate(heads, at, dim // 2, cos_sin, position * dim)
    if len(k_norm):
        _normalize(heads, key, dim, k_norm, eps, heads, key)
    _rotate(heads, key, dim // 2, cos_sin, position * dim)
    block, offset = slot // block_size, slot % block_size
    base = (block * num_kv_heads + head) * dim * block_size
    for i in range(0, dim, LANES):
        store(values, base + offset * dim + i, load(heads, value + i))
        store(rounded, 0, load(heads, key + i))
        for lane in range(LANES):
            keys[base + (i + lane) * block_size + offset] = rounded[lane]


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _place_heads(qkv, token, shape, norms, eps, cos_sin, position, slot, keys, values, rounded):
    """As ``_place_head``, of all heads of a token."""
    num_kv_heads, group, dim, _, width = shape
    for head in range(num_kv_heads):
        queries = token * width + head * group * dim
        key = token * width + (num_kv_heads * group + head) * dim
        value = key + num_kv_heads * dim
        _place_head(
            qkv, queries, key, value, head, shape, norms, eps, cos_sin, position, slot, keys, values, rounded
        )  # fmt: skip


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _add_panel(multiply, x, num_rows, num_inputs, panels, bias, panel, sums, residual, width):
    """Add a panel of products to the residual stream."""
    for first in range(0, num_rows, ROWS):
        count = min(ROWS, num_rows - first)
        call_multiply_panel(
            multiply, (x, first * num_inputs, count, num_inputs, panels, panel, sums, 0, PANEL, True)
        )  # fmt: skip
        for row in range(count):
            for i in range(0, PANEL, LANES):
                value = load(sums, row * PANEL + i)
                if len(bias):
                    value = add(value, load(bias, panel * PANEL + i))
                at = (first + row) * width + panel * PANEL + i
                store(residual, at, add(load(residual, at), value))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _gate_panel(multiply, x, num_rows, num_inputs, panels, bias, panel, num_panels, gates, ups, inner):
    """Write silu(gate) * up for a panel of gates and the panel of ups that belongs to it."""
    width = num_panels * PANEL
    for first in range(0, num_rows, ROWS):
        count = min(ROWS, num_rows - first)
        start, of_ups = first * num_inputs, num_panels + panel
        call_multiply_panel(multiply, (x, start, count, num_inputs, panels, panel, gates, 0, PANEL, True))
        call_multiply_panel(multiply, (x, start, count, num_inputs, panels, of_ups, ups, 0, PANEL, True))
        for row in range(count):
            for i in range(0, PANEL, LANES):
                left, right = load(gates, row * PANEL + i), load(ups, row * PANEL + i)
                if len(bias):
                    left = add(left, load(bias, panel * PANEL + i))
                    right = add(right, load(bias, width + panel * PANEL + i))
                store(inner, (first + row) * width + panel * PANEL + i, gate(left, right))


# The parts below are functions of their own, so that what runs twice in a layer is compiled once.


@njit(error_model="numpy", nogil=True, parallel=True, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _norm_many(residual, num_tokens, size, norm, eps, normed, num_threads):
    taken, num_items = nothing_taken(num_threads), (num_tokens + _FEW_TOKENS - 1) // _FEW_TOKENS
    for thread in prange(num_threads):
        few, helped = claim(taken, num_items, thread, 0)
        while few < num_items:
            for token in range(few * _FEW_TOKENS, min((few + 1) * _FEW_TOKENS, num_tokens)):
                _normalize(residual, token * size, size, norm, eps, normed, token * size)
            few, helped = claim(taken, num_items, thread, helped)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _project(multiply, x, num_tokens, size, panels, bias, qkv, width, num_threads):
    taken, num_panels = nothing_taken(num_threads), width // PANEL
    for thread in prange(num_threads):
        panel, helped = claim(taken, num_panels, thread, 0)
        while panel < num_panels:
            at = panel * PANEL
            call_multiply_panel(multiply, (x, 0, num_tokens, size, panels, panel, qkv, at, width, True))
            if len(bias):
                for token in range(num_tokens):
                    for i in range(panel * PANEL, (panel + 1) * PANEL, LANES):
                        store(qkv, token * width + i, add(load(qkv, token * width + i), load(bias, i)))
            panel, helped = claim(taken, num_panels, thread, helped)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _place_many(qkv, num_tokens, shape, norms, eps, cos_sin, positions, slots, keys, values, num_threads):
    taken, num_items = nothing_taken(num_threads), (num_tokens + _FEW_TOKENS - 1) // _FEW_TOKENS
    for thread in prange(num_threads):
        rounded = np.empty(LANES, keys.dtype)
        few, helped = claim(taken, num_items, thread, 0)
        while few < num_items:
            for token in range(few * _FEW_TOKENS, min((few + 1) * _FEW_TOKENS, num_tokens)):
                position, slot = positions[token], slots[token]
                _place_heads(qkv, token, shape, norms, eps, cos_sin, position, slot, keys, values, rounded)
            few, helped = claim(taken, num_items, thread, helped)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _add_product(multiply, x, num_rows, num_inputs, panels, bias, residual, size, num_threads):
    taken, num_panels = nothing_taken(num_threads), size // PANEL
    for thread in prange(num_threads):
        sums = np.empty(ROWS * PANEL, np.float32)
        panel, helped = claim(taken, num_panels, thread, 0)
        while panel < num_panels:
            _add_panel(multiply, x, num_rows, num_inputs, panels, bias, panel, sums, residual, size)
            panel, helped = claim(taken, num_panels, thread, helped)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _gate_product(multiply, x, num_tokens, size, panels, bias, num_panels, inner, num_threads):
    taken = nothing_taken(num_threads)
    for thread in prange(num_threads):
        gates, ups = np.empty(ROWS * PANEL, np.float32), np.empty(ROWS * PANEL, np.float32)
        panel, helped = claim(taken, num_panels, thread, 0)
        while panel < num_panels:
            _gate_panel(multiply, x, num_tokens, size, panels, bias, panel, num_panels, gates, ups, inner)
            panel, helped = claim(taken, num_panels, thread, helped)


@njit(error_model="numpy", nogil=True, cache=True)
def run_layer(
    residual,
    num_tokens,
    size,
    products,
    norms,
    buffers,
    cos_sin,
    tokens,
    cache,
    tables,
    tiles,
    wanted,
    wants_all,
    shape,
    numbers,
    ways,
    multiply,
    num_threads,
):
    """Run a layer, in place on the residual stream.

    One function, since whatever calls the loops is compiled together with all of them.

    Args:
        residual: flat [num_tokens, size] float32.
        num_tokens: of the step.
        size: of the residual stream.
        products: (qkv, its bias, output, its bias, gate and up, their bias, down, its bias): panels and flat biases,
            which may be empty.
        norms: (before attention, before the MLP, of queries, of keys); the last two may be empty.
        buffers: (normed, qkv float32, attended, inner): flat, room for the step.
        cos_sin: flat [max_model_len, head_dim].
        tokens: (positions, slots), each [num_tokens] int64.
        cache: (keys, values), flat.
        tables: [num_reqs, max_num_blocks] int32.
        tiles: as in ``paged_attention``; of the wanted tokens.
        wanted: tokens that are looked at after this layer, [num_wanted] int64, in order. Of the others their keys and
            values alone are computed; their rows of the residual stream stay what came in.
        wants_all: all are, whatever ``wanted`` is.
        shape: (num_kv_heads, query heads per KV head, head_dim, block_size, width of qkv).
        numbers: (eps, softmax scale times log2(e), window).
        ways: of ``attend_addresses``.
        multiply: of ``multiply_panel_address``.
        num_threads: of ``use_threads``.
    """
    qkv_panels, qkv_bias, output_panels, output_bias, gate_panels, gate_bias, down_panels, down_bias = products
    attention_norm, mlp_norm, q_norm, k_norm = norms
    normed, qkv, attended, inner = buffers
    positions, slots = tokens
    keys, values = cache
    eps, scale, window = numbers
    num_kv_heads, group, dim, _, width = shape
    attended_size = num_kv_heads * group * dim
    num_inner = len(down_panels) // size

    _norm_many(residual, num_tokens, size, attention_norm, eps, normed, num_threads)
    _project(multiply, normed, num_tokens, size, qkv_panels, qkv_bias, qkv, width, num_threads)
    _place_many(qkv, num_tokens, shape, (q_norm, k_norm), eps, cos_sin, positions, slots, keys, values, num_threads)
    if not wants_all and len(wanted) == 0:
        return
    attend_tiles(qkv, keys, values, tables, tiles, shape, scale, window, attended, ways, num_threads)
    stream, num_rows = residual, num_tokens
    if not wants_all:
        num_rows = len(wanted)
        stream = np.empty(num_rows * size, np.float32)
        for i, token in enumerate(wanted):
            copy(residual, token * size, stream, i * size, size)
            copy(attended, token * attended_size, attended, i * attended_size, attended_size)
    _add_product(multiply, attended, num_rows, attended_size, output_panels, output_bias, stream, size, num_threads)
    _norm_many(stream, num_rows, size, mlp_norm, eps, normed, num_threads)
    _gate_product(multiply, normed, num_rows, size, gate_panels, gate_bias, num_inner // PANEL, inner, num_threads)
    _add_product(multiply, inner, num_rows, num_inner, down_panels, down_bias, stream, size, num_threads)
    if not wants_all:
        for i, token in enumerate(wanted):
            copy(stream, i * size, residual, token * size, size)
