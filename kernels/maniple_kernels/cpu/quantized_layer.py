"""A whole decoder layer on the CPU in one call, its weights of 8 and 4 bits.

As ``decoder_layer``, with other products: each takes a float32 row to bytes first, see ``quantized_linear``.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit, prange

from maniple_kernels.cpu.decoder_layer import _place_heads
from maniple_kernels.cpu.paged_attention import attend
from maniple_kernels.cpu.quantized_linear import (
    GROUP,
    deal,
    multiply_part,
    multiply_tile,
    quantize_row,
    room_for,
    shift_of,
)
from maniple_kernels.cpu.rms_norm import _normalize
from maniple_kernels.cpu.silu_mul import gate
from maniple_kernels.cpu.simd import LANES, load, store

_FEW_ROWS = 32  # see ``deal``; also: whose heads are not worth a round of threads


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _quantize_normed(residual, size, first, last, norm, eps, shift, rows, base):
    normed = np.empty(size, np.float32)
    for row in range(first, last):
        _normalize(residual, row * size, size, norm, eps, normed, 0)
        quantize_row(normed, 0, size // GROUP, shift, rows, base + row - first)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _place_rows(qkv, first, last, shape, head_norms, eps, cos_sin, tokens, cache):
    keys, values = cache
    positions, slots = tokens
    rounded = np.empty(LANES, keys.dtype)
    for row in range(first, last):
        _place_heads(qkv, row, shape, head_norms, eps, cos_sin, positions[row], slots[row], keys, values, rounded)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _qkv_part(
    part, num_parts, residual, num_rows, size, weights, bias, norms, rows, qkv, shape, eps, cos_sin, tokens, cache
):
    """Compute queries, keys and values; of many rows, also norm, rotate and keep them."""
    width = shape[4]
    first, last, base, first_tile, last_tile = deal(part, num_parts, num_rows, width // LANES, _FEW_ROWS)
    _quantize_normed(residual, size, first, last, norms[0], eps, shift_of(weights), rows, base)
    end, start = base + last - first, first * width
    for tile in range(first_tile, last_tile):
        multiply_tile(weights, tile, size // GROUP, rows, base, end, bias, qkv, start + tile * LANES, width, False)
    if num_rows > _FEW_ROWS:
        _place_rows(qkv, first, last, shape, (norms[2], norms[3]), eps, cos_sin, tokens, cache)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _gate_part(part, num_parts, residual, num_rows, size, weights, bias, norm, eps, rows, gated, inner, num_inner):
    """Write silu(gate) * up."""
    num_tiles, groups = num_inner // LANES, size // GROUP
    first, last, base, first_tile, last_tile = deal(part, num_parts, num_rows, num_tiles, _FEW_ROWS)
    _quantize_normed(residual, size, first, last, norm, eps, shift_of(weights), rows, base)
    end, width = base + last - first, 2 * num_inner
    for tile in range(first_tile, last_tile):
        at = first * width + tile * LANES
        multiply_tile(weights, tile, groups, rows, base, end, bias, gated, at, width, False)
        multiply_tile(weights, num_tiles + tile, groups, rows, base, end, bias, gated, at + num_inner, width, False)
        for row in range(first, last):
            at = row * width + tile * LANES
            store(inner, row * num_inner + tile * LANES, gate(load(gated, at), load(gated, at + num_inner)))


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def run_quantized_layer(
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
    shape,
    numbers,
    ways,
    num_parts,
):
    """Run a layer, in place on the residual stream.

    Args:
        residual: flat [num_tokens, size] float32.
        num_tokens: of the step.
        size: of the residual stream.
        products: (qkv, its bias, output, its bias, gate and up, their bias, down, its bias): weights as in
            ``multiply_tile`` and flat float32 biases, which may be empty.
        norms: as in ``run_layer``, and what follows, too.
        buffers: (qkv, attended, gates and ups, inner): flat float32, room for the step.
        cos_sin: flat [max_model_len, head_dim].
        tokens: (positions, slots).
        cache: (keys, values).
        tables: [num_reqs, max_num_blocks] int32.
        tiles: as in ``paged_attention``.
        shape: (num_kv_heads, query heads per KV head, head_dim, block_size, width of qkv).
        numbers: (eps, softmax scale times log2(e), window).
        ways: of ``attend_addresses``.
        num_parts: threads.
    """
    qkv_weights, qkv_bias, output_weights, output_bias, gate_weights, gate_bias, down_weights, down_bias = products
    qkv, attended, gated, inner = buffers
    keys, values = cache
    eps, scale, window = numbers
    num_kv_heads, group, dim, _, _ = shape
    attended_groups, inner_groups = num_kv_heads * group * dim // GROUP, len(down_weights[1]) // size
    num_tiles, num_inner = size // LANES, inner_groups * GROUP
    rows = room_for(num_tokens, max(size // GROUP, attended_groups, inner_groups), num_parts, _FEW_ROWS)

    # Whole numbers are signed below: with the loop's own, unsigned one everything would be compiled a second time.
    for part in prange(num_parts):
        _qkv_part(
            np.int64(part), num_parts, residual, num_tokens, size, qkv_weights, qkv_bias, norms, rows, qkv, shape, eps,
            cos_sin, tokens, cache,
        )  # fmt: skip
    if num_tokens <= _FEW_ROWS:
        _place_rows(qkv, 0, num_tokens, shape, (norms[2], norms[3]), eps, cos_sin, tokens, cache)
    for item in prange(len(tiles) * num_kv_heads):
        request, first, count, position = tiles[item // num_kv_heads]
        head = np.int64(item % num_kv_heads)
        attend(ways, qkv, keys, values, tables[request], first, count, position, head, shape, scale, window, attended)
    for part in prange(num_parts):
        multiply_part(
            np.int64(part), num_parts, attended, num_tokens, attended_groups, output_weights, output_bias, rows,
            residual, num_tiles, _FEW_ROWS, True,
        )  # fmt: skip
    for part in prange(num_parts):
        _gate_part(
            np.int64(part), num_parts, residual, num_tokens, size, gate_weights, gate_bias, norms[1], eps, rows, gated,
            inner, num_inner,
        )  # fmt: skip
    for part in prange(num_parts):
        multiply_part(
            np.int64(part), num_parts, inner, num_tokens, inner_groups, down_weights, down_bias, rows, residual,
            num_tiles, _FEW_ROWS, True,
        )  # fmt: skip
