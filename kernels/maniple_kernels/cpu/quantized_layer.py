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
from maniple_kernels.cpu.quantized_linear import FEW_ROWS, GROUP, multiply_tile, quantize_row, room_for_rows, shift_of
from maniple_kernels.cpu.rms_norm import _normalize
from maniple_kernels.cpu.silu_mul import gate
from maniple_kernels.cpu.simd import LANES, load, store


@njit(error_model="numpy", cache=True)
def _normalize_and_quantize(residual, token, size, weight, eps, normed, shift, rows):
    _normalize(residual, token * size, size, weight, eps, normed, token * size)
    quantize_row(normed, token, size // GROUP, shift, rows)


@njit(error_model="numpy", cache=True)
def _gate_tile(weights, tile, num_tiles, num_groups, num_rows, rows, bias, gated, inner):
    """Write silu(gate) * up for 16 gates and the ups that belong to them."""
    width = num_tiles * LANES
    multiply_tile(weights, tile, num_groups, num_rows, rows, bias, gated, 2 * width, tile * LANES, False)
    up = num_tiles + tile
    multiply_tile(weights, up, num_groups, num_rows, rows, bias, gated, 2 * width, up * LANES, False)
    for row in range(num_rows):
        at = row * 2 * width + tile * LANES
        store(inner, row * width + tile * LANES, gate(load(gated, at), load(gated, at + width)))


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def run_quantized_layer(
    residual, num_tokens, size, products, norms, buffers, cos_sin, tokens, cache, tables, tiles, shape, numbers
):
    """Run a layer, in place on the residual stream.

    Args:
        residual: flat [num_tokens, size] float32.
        num_tokens: of the step.
        size: of the residual stream.
        products: (qkv, its bias, output, its bias, gate and up, their bias, down, its bias): weights as in
            ``multiply_tile`` and flat float32 biases, which may be empty.
        norms: as in ``run_layer``, and what follows, too.
        buffers: (normed, qkv, attended, gates and ups, inner): flat float32, room for the step.
        cos_sin: flat [max_model_len, head_dim].
        tokens: (positions, slots).
        cache: (keys, values).
        tables: [num_reqs, max_num_blocks] int32.
        tiles: as in ``paged_attention``.
        shape: (num_kv_heads, query heads per KV head, head_dim, block_size, width of qkv).
        numbers: (eps, softmax scale times log2(e), window).
    """
    qkv_weights, qkv_bias, output_weights, output_bias, gate_weights, gate_bias, down_weights, down_bias = products
    attention_norm, mlp_norm, q_norm, k_norm = norms
    normed, qkv, attended, gated, inner = buffers
    positions, slots = tokens
    keys, values = cache
    eps, scale, window = numbers
    num_kv_heads, group, dim, _, width = shape
    attended_groups, groups = num_kv_heads * group * dim // GROUP, size // GROUP
    inner_groups = len(down_weights[1]) // size
    num_inner = inner_groups * GROUP
    rows = room_for_rows(num_tokens * max(groups, attended_groups, inner_groups))
    few = num_tokens < FEW_ROWS

    shift = shift_of(qkv_weights)
    if few:
        for token in range(num_tokens):
            _normalize_and_quantize(residual, token, size, attention_norm, eps, normed, shift, rows)
    else:
        for token in prange(num_tokens):
            _normalize_and_quantize(residual, token, size, attention_norm, eps, normed, shift, rows)
    for tile in prange(width // LANES):
        multiply_tile(qkv_weights, tile, groups, num_tokens, rows, qkv_bias, qkv, width, tile * LANES, False)

    if few:
        rounded = np.empty(LANES, keys.dtype)
        for token in range(num_tokens):
            _place_heads(
                qkv, token, shape, (q_norm, k_norm), eps, cos_sin, positions[token], slots[token], keys, values, rounded
            )
    else:
        for token in prange(num_tokens):
            rounded = np.empty(LANES, keys.dtype)
            _place_heads(
                qkv, token, shape, (q_norm, k_norm), eps, cos_sin, positions[token], slots[token], keys, values, rounded
            )

    for item in prange(len(tiles) * num_kv_heads):
        request, first, count, position = tiles[item // num_kv_heads]
        head = item % num_kv_heads
        attend(qkv, keys, values, tables[request], first, count, position, head, shape, scale, window, attended)

    shift = shift_of(output_weights)
    if few:
        for token in range(num_tokens):
            quantize_row(attended, token, attended_groups, shift, rows)
    else:
        for token in prange(num_tokens):
            quantize_row(attended, token, attended_groups, shift, rows)
    for tile in prange(size // LANES):
        multiply_tile(
            output_weights, tile, attended_groups, num_tokens, rows, output_bias, residual, size, tile * LANES, True
        )

    shift = shift_of(gate_weights)
    if few:
        for token in range(num_tokens):
            _normalize_and_quantize(residual, token, size, mlp_norm, eps, normed, shift, rows)
    else:
        for token in prange(num_tokens):
            _normalize_and_quantize(residual, token, size, mlp_norm, eps, normed, shift, rows)
    for tile in prange(num_inner // LANES):
        _gate_tile(gate_weights, tile, num_inner // LANES, groups, num_tokens, rows, gate_bias, gated, inner)

    shift = shift_of(down_weights)
    if few:
        for token in range(num_tokens):
            quantize_row(inner, token, inner_groups, shift, rows)
    else:
        for token in prange(num_tokens):
            quantize_row(inner, token, inner_groups, shift, rows)
    for tile in prange(size // LANES):
        multiply_tile(down_weights, tile, inner_groups, num_tokens, rows, down_bias, residual, size, tile * LANES, True)
