"""All decoder layers for the few tokens of decoding requests, in one call, and without a thread that waits for another.

As ``decoder_layer``, with the same bits. A step of a few tokens is short and has five loops a layer: if threads met
after each, one that lost its core to an event loop for a millisecond would stop all others for as long, a few times in
each step. See ``phases`` for how they go on, and for why no buffer is used twice in a step.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit, prange, types
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from maniple_kernels.cpu.calls import address_of, array, caller
from maniple_kernels.cpu.claims import LINE, claim
from maniple_kernels.cpu.decoder_layer import _place_head
from maniple_kernels.cpu.paged_attention import attend
from maniple_kernels.cpu.panel_products import PANEL, call_multiply_panel
from maniple_kernels.cpu.phases import find_missing, finish, is_done, now
from maniple_kernels.cpu.rms_norm import _normalize
from maniple_kernels.cpu.silu_mul import gate
from maniple_kernels.cpu.simd import LANES, add, copy, load, store

_QKV, _ATTEND, _OUTPUT, _GATE, _DOWN = range(5)  # phases of a layer
_NUM_PHASES = 5


@intrinsic
def _pointer(typing_context: Any, address: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), generate


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _array(memory, layer, which, like):
    """Return a flat array of a layer, of the type of ``like``."""
    return carray(_pointer(memory[layer, which, 0]), (memory[layer, which, 1],), like.dtype)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _part(buffer, layer, size):
    return buffer[layer * size : (layer + 1) * size]


# Functions of their own: in one whose loops run in parallel, numba makes such a loop of each of these lines.


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _none(size):
    counts = np.empty(size, np.int64)
    for i in range(size):
        counts[i] = 0
    return counts


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _longest(tiles):
    longest = 0
    for i in range(len(tiles)):
        longest = max(longest, tiles[i, 3] + 1)
    return longest


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _normalize_all(residual, num_tokens, size, norm, eps, normed):
    for token in range(num_tokens):
        _normalize(residual, token * size, size, norm, eps, normed, token * size)


# What is made of the products of a panel, ``sums`` [num_tokens, 32]. Each place is written once, with what stays there.


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _put_qkv(sums, num_tokens, bias, panel, qkv, width):
    for token in range(num_tokens):
        for i in range(0, PANEL, LANES):
            value = load(sums, token * PANEL + i)
            if len(bias):
                value = add(value, load(bias, panel * PANEL + i))
            store(qkv, token * width + panel * PANEL + i, value)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _put_gated(sums, num_tokens, bias, panel, inner, width):
    """Of gates, and the ups behind them."""
    ups = num_tokens * PANEL
    for token in range(num_tokens):
        for i in range(0, PANEL, LANES):
            left, right = load(sums, token * PANEL + i), load(sums, ups + token * PANEL + i)
            if len(bias):
                left = add(left, load(bias, panel * PANEL + i))
                right = add(right, load(bias, width + panel * PANEL + i))
            store(inner, token * width + panel * PANEL + i, gate(left, right))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _put_sum(sums, num_tokens, bias, panel, before, after, width):
    for token in range(num_tokens):
        for i in range(0, PANEL, LANES):
            value = load(sums, token * PANEL + i)
            if len(bias):
                value = add(value, load(bias, panel * PANEL + i))
            at = token * width + panel * PANEL + i
            store(after, at, add(load(before, at), value))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _attend_head(
    ways, qkv, tile, head, norms, cos_sin, tokens, cache, tables, shape, numbers, heads, rounded, attended
):  # fmt: skip
    """Attend for one token and KV head, from a copy of what is rotated."""
    num_kv_heads, group, dim, block_size, width = shape
    request, token, count, position = tile
    positions, slots = tokens
    keys, values = cache
    eps, scale, window = numbers
    queries, key = head * group * dim, num_kv_heads * group * dim
    value = key + dim
    source = token * width
    copy(qkv, source + queries, heads, queries, group * dim)
    copy(qkv, source + key + head * dim, heads, key, dim)
    copy(qkv, source + key + (num_kv_heads + head) * dim, heads, value, dim)
    _place_head(
        heads, queries, key, value, head, shape, norms, eps, cos_sin, positions[token], slots[token], keys, values,
        rounded,
    )  # fmt: skip
    alone = num_kv_heads, group, dim, block_size, 0  # every token's heads begin where the copy does
    attend(ways, heads, keys, values, tables[request], token, count, position, head, alone, scale, window, attended)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _items_of(memory, num_tokens, size, shape):
    """Return the number of items of each phase."""
    num_kv_heads, _, _, _, width = shape
    outputs = size // PANEL
    return width // PANEL, num_tokens * num_kv_heads, outputs, memory[0, 6, 1] // (size * PANEL), outputs


@njit(error_model="numpy", nogil=True, cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def go_through(
    thread, counts, num_tokens, size, memory, windows, buffers, cos_sin, tokens, tables, tiles, shape, eps, scale, ways,
    multiply, num_threads,
):  # fmt: skip
    """Go through all phases, as one of the threads; ``counts`` are (taken, done, flags), the rest as below."""
    taken, done, flags = counts
    streams, qkv, middle, attended, inner = buffers
    num_kv_heads, group, dim, _, width = shape
    attended_size = num_kv_heads * group * dim
    num_items = _items_of(memory, num_tokens, size, shape)
    num_inner = num_items[_GATE] * PANEL
    outputs = num_items[_QKV] + num_items[_ATTEND]
    gates = outputs + num_items[_OUTPUT]
    downs = gates + num_items[_GATE]
    before = (0, num_items[_QKV], outputs, gates, downs)
    in_layer = downs + num_items[_DOWN]
    panel_bytes, longest = PANEL * attended.itemsize, _longest(tiles)
    num_bytes = (
        size * panel_bytes, 2 * dim * longest * attended.itemsize, attended_size * panel_bytes, 2 * size * panel_bytes,
        num_inner * panel_bytes,
    )  # fmt: skip
    normed = np.empty(num_tokens * size, attended.dtype)
    sums = np.empty(2 * num_tokens * PANEL, np.float32)
    heads, rounded = np.empty(attended_size + 2 * dim, np.float32), np.empty(LANES, attended.dtype)
    for layer in range(len(memory)):
        came = _part(streams, layer, num_tokens * size)
        goes = _part(streams, layer + 1, num_tokens * size)
        halfway = _part(middle, layer, num_tokens * size)
        own_qkv = _part(qkv, layer, num_tokens * width)
        own_attended = _part(attended, layer, num_tokens * attended_size)
        own_inner = _part(inner, layer, num_tokens * num_inner)
        norms = _array(memory, layer, 10, attended), _array(memory, layer, 11, attended)
        cache = _array(memory, layer, 12, attended), _array(memory, layer, 13, attended)
        numbers = eps, scale, windows[layer]
        for kind in range(_NUM_PHASES):
            phase, count = layer * _NUM_PHASES + kind, num_items[kind]
            if is_done(done, phase, count):
                continue
            first = layer * in_layer + before[kind]
            x, num_inputs, before_it, behind_it = normed, size, came, halfway
            if kind in (_QKV, _GATE):
                norm = _array(memory, layer, 8 if kind == _QKV else 9, attended)
                _normalize_all(came if kind == _QKV else halfway, num_tokens, size, norm, eps, normed)
            elif kind == _OUTPUT:
                x, num_inputs = own_attended, attended_size
            else:
                x, num_inputs, before_it, behind_it = own_inner, num_inner, halfway, goes
            panels, bias = _array(memory, layer, 0, attended), _array(memory, layer, 1, attended)
            if kind >= _OUTPUT:
                which = 2 * (kind - 1)
                panels, bias = _array(memory, layer, which, attended), _array(memory, layer, which + 1, attended)
            own_taken = _part(taken, phase, num_threads * LINE)
            item, helped = claim(own_taken, count, thread, 0)
            took = np.int64(0)
            while True:
                if item == count:
                    item = find_missing(flags, first, count, done, phase, took, num_bytes[kind])
                    if item == count:
                        break
                began = now()
                if kind == _ATTEND:
                    _attend_head(
                        ways, own_qkv, tiles[item // num_kv_heads], item % num_kv_heads, norms, cos_sin, tokens, cache,
                        tables, shape, numbers, heads, rounded, own_attended,
                    )  # fmt: skip
                else:
                    for part in range(2 if kind == _GATE else 1):
                        panel, at = item + part * num_items[_GATE], part * num_tokens * PANEL
                        given = x, 0, num_tokens, num_inputs, panels, panel, sums, at, PANEL, True
                        call_multiply_panel(multiply, given)
                    if kind == _QKV:
                        _put_qkv(sums, num_tokens, bias, item, own_qkv, width)
                    elif kind == _GATE:
                        _put_gated(sums, num_tokens, bias, item, own_inner, num_inner)
                    else:
                        _put_sum(sums, num_tokens, bias, item, before_it, behind_it, size)
                finish(flags, first + item, done, phase)
                took = now() - began
                if helped < num_threads:
                    item, helped = claim(own_taken, count, thread, helped)
                else:
                    item = np.int64(count)


def _kinds(own):
    size, vector, indices = types.int64, array(types.float32), array(types.int64)
    buffers = types.Tuple((vector, vector, vector, array(own), array(own)))
    tables, tiles = types.Array(types.int32, 2, "C"), types.Array(size, 2, "C")
    return (
        size, types.UniTuple(indices, 3), size, size, types.Array(size, 3, "C"), indices, buffers, vector,
        types.UniTuple(indices, 2), tables, tiles, types.UniTuple(size, 5), types.float32, types.float32,
        types.UniTuple(size, 2), size, size,
    )  # fmt: skip


_call = caller(lambda given: _kinds(given[6][3].dtype))


@functools.cache
def decode_address(dtype: np.dtype) -> np.int64:
    """Return the address of what each thread does, for weights of the type."""
    return address_of(go_through, _kinds(from_dtype(dtype)))


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def run_decode_layers(
    residual,
    num_tokens,
    size,
    memory,
    windows,
    buffers,
    cos_sin,
    tokens,
    tables,
    tiles,
    shape,
    eps,
    scale,
    ways,
    multiply,
    thread_way,
    num_threads,
):
    """Run all layers, in place on the residual stream.

    Args:
        residual: flat [num_tokens, size] float32.
        num_tokens: of the step, one of each request.
        size: of the residual stream.
        memory: [num_layers, 14, 2] int64, address and number of elements of each layer's flat arrays: panels and
            biases of qkv, output, gate and up, down; norms before attention, before the MLP, of queries, of keys; keys,
            values. Biases and the last two norms may be empty.
        windows: [num_layers] int64.
        buffers: (streams float32, qkv float32, middle float32, attended, inner): flat, room for the step in each layer,
            and once more in streams.
        cos_sin: flat [max_model_len, head_dim].
        tokens: (positions, slots), each [num_tokens] int64.
        tables: [num_reqs, max_num_blocks] int32.
        tiles: as in ``paged_attention``, one of each token.
        shape: (num_kv_heads, query heads per KV head, head_dim, block_size, width of qkv).
        eps: of the norms, float32.
        scale: the softmax scale times log2(e), float32.
        ways: of ``attend_addresses``.
        multiply: of ``multiply_panel_address``.
        thread_way: of ``decode_address``.
        num_threads: of ``use_threads``.
    """
    num_phases, num_flags = len(memory) * _NUM_PHASES, len(memory) * sum(_items_of(memory, num_tokens, size, shape))
    counts = _none(num_phases * num_threads * LINE), _none(num_phases * LINE), _none(num_flags)
    streams = buffers[0]
    copy(residual, 0, streams, 0, num_tokens * size)
    for thread in prange(num_threads):
        _call(
            thread_way,
            (
                np.int64(thread), counts, num_tokens, size, memory, windows, buffers, cos_sin, tokens, tables, tiles,
                shape, eps, scale, ways, multiply, num_threads,
            ),
        )  # fmt: skip
    copy(streams, len(memory) * num_tokens * size, residual, 0, num_tokens * size)
