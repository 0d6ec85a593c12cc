"""Attention of a tile of many rows: keys and values of a span are laid out as panels once, for all rows of the tile.

The products then have everything in registers and in the first-level cache. A row is added up in the order of
``paged_attention``, which takes the few rows of a decoding request: it has the same bits on either way.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from maniple_kernels.cpu.online_softmax import LEAST, SPAN, ZERO, weigh
from maniple_kernels.cpu.panel_products import PANEL, multiply_panel
from maniple_kernels.cpu.simd import LANES, _element, load, mul, room, splat, store, sum_lanes

_ROWS = 32  # whose scores lie in the first-level cache until they are weighed and multiplied
_I16, _I32, _I64, _F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_INTERLEAVED = ir.Constant(ir.VectorType(_I32, 2 * LANES), [lane for i in range(LANES) for lane in (i, LANES + i)])


@intrinsic
def _lay_pair(typing_context: Any, source: Any, first: Any, second: Any, panels: Any, start: Any, column: Any) -> Any:
    """Put 16 outputs of two inputs, from two places of ``source``, into a panel that has both inputs at ``start``."""
    is_wide = source.dtype == types.float32

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source_, first_, second_, panels_, start_, column_ = arguments
        kinds = signature.args
        scalar, alignment = (_F32, 4) if is_wide else (_I16, 2)
        kind = ir.VectorType(scalar, LANES)
        rows = []
        for place in (first_, second_):
            pointer = _element(context, builder, kinds[0], source_, place)
            row = builder.load(builder.bitcast(pointer, kind.as_pointer()))
            row.align = alignment
            rows.append(row)
        if is_wide:
            for i, row in enumerate(rows):
                at = builder.add(builder.add(start_, column_), _I64(i * PANEL))
                pointer = _element(context, builder, kinds[3], panels_, at)
                builder.store(row, builder.bitcast(pointer, kind.as_pointer())).align = alignment
            return context.get_dummy_value()
        pairs = builder.shuffle_vector(rows[0], rows[1], _INTERLEAVED)
        pointer = _element(context, builder, kinds[3], panels_, builder.add(start_, builder.mul(column_, _I64(2))))
        builder.store(pairs, builder.bitcast(pointer, pairs.type.as_pointer())).align = alignment
        return context.get_dummy_value()

    intp = types.intp
    return types.void(source, intp, intp, panels, intp, intp), generate


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _lay_keys_out(keys, table, head, span, first, last, shape, panels):
    """Make panels of the vectors [first, last) of a span of keys: inputs are dimensions, outputs are keys."""
    num_kv_heads, _, dim, block_size, _ = shape
    for i in range(first, last, LANES):
        block = table[(span + i) // block_size]
        base = (block * num_kv_heads + head) * dim * block_size + (span + i) % block_size
        start = i // PANEL * dim * PANEL
        for d in range(0, dim, 2):
            at = base + d * block_size
            _lay_pair(keys, at, at + block_size, panels, start + d * PANEL, i % PANEL)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _lay_values_out(values, table, head, span, begin, end, used, shape, panels, copy):
    """Make panels of the first ``used`` values of a span: inputs are keys, outputs are dimensions.

    Values of keys outside [begin, end) become zeros: what lies there is not ours, nor finite.
    """
    num_kv_heads, _, dim, block_size, _ = shape
    for i in range(0, used, LANES):
        key = span + i
        if key >= end or key + LANES <= begin:
            for d in range(0, (dim + PANEL - 1) // PANEL * PANEL * LANES, LANES):
                panel, place = d // (PANEL * LANES), d % (PANEL * LANES)
                store(panels, (panel * used + i) * PANEL + place, splat(ZERO))
            continue
        base = ((table[key // block_size] * num_kv_heads + head) * block_size + key % block_size) * dim
        is_whole = begin <= key and key + LANES <= end
        if not is_whole:
            for t in range(LANES):
                for d in range(0, dim, LANES):
                    is_ours = begin <= key + t < end
                    store(copy, t * dim + d, load(values, base + t * dim + d) if is_ours else splat(ZERO))
        for t in range(0, LANES, 2):
            for d in range(0, dim, LANES):
                start, at = (d // PANEL * used + i + t) * PANEL, t * dim + d
                if is_whole:
                    _lay_pair(values, base + at, base + at + dim, panels, start, d % PANEL)
                else:
                    _lay_pair(copy, at, at + dim, panels, start, d % PANEL)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def attend_many(query, keys, values, table, first_query, num_queries, position, head, shape, scale, window, out):
    """As ``attend``; worth its while from some more rows on than are multiplied at once."""
    _, group, dim, _, stride = shape
    num_heads = shape[0] * group
    num_rows = num_queries * group
    width = (dim + PANEL - 1) // PANEL * PANEL
    tops = np.full(num_rows, LEAST, np.float32)
    acc, totals = room(tops, num_rows * width), room(tops, num_rows * LANES)
    acc[:], totals[:] = ZERO, ZERO
    state = tops, totals, acc, width
    scores, weights = room(tops, _ROWS * SPAN), room(keys, _ROWS * SPAN)
    rounded = room(keys, num_rows * dim)
    key_panels, value_panels, copy = room(keys, SPAN * dim), room(keys, SPAN * width), room(keys, LANES * dim)
    value_panels[:] = 0
    for i in range(num_queries):
        for d in range(0, group * dim, LANES):
            store(rounded, i * group * dim + d, load(query, (first_query + i) * stride + head * group * dim + d))
    end = position + num_queries  # keys [0, end) exist for the last query of the tile
    begin = max(0, position - window + 1) if window > 0 else 0  # keys before are for none of the tile
    for span in range(begin // SPAN * SPAN, end, SPAN):
        first = max(0, (begin - span) // LANES * LANES)
        last = min(SPAN, (end - span + LANES - 1) // LANES * LANES)
        used = (last + PANEL - 1) // PANEL * PANEL
        _lay_keys_out(keys, table, head, span, first, last, shape, key_panels)
        _lay_values_out(values, table, head, span, begin, end, used, shape, value_panels, copy)
        for begun in range(0, num_rows, _ROWS):
            count = min(_ROWS, num_rows - begun)
            if position + (begun + count - 1) // group < span:
                continue  # none of these rows sees as far
            for panel in range(used // PANEL):
                multiply_panel(rounded, begun * dim, count, dim, key_panels, panel, scores, panel * PANEL, used, True)
            weigh(scores, used, begun, count, group, position, window, span, 0, used, scale, state, weights)
            for panel in range(width // PANEL):
                at = begun * width + panel * PANEL
                multiply_panel(weights, 0, count, used, value_panels, panel, acc, at, width, False)
    for row in range(num_rows):
        inverse = splat(np.float32(1.0) / sum_lanes(load(totals, row * LANES)))
        start = ((first_query + row // group) * num_heads + head * group + row % group) * dim
        for d in range(0, dim, LANES):
            store(out, start + d, mul(load(acc, row * width + d), inverse))
