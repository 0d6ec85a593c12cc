"""Products of some rows with one panel of weights: the inner loop of every linear layer on the CPU.

A panel holds the weights of 32 outputs as the loop reads them: [inputs][32] in float32, and in bfloat16
[inputs / 2][32][2], so that one instruction multiplies two inputs and adds both products. Each row's sums live in two
registers from the first input to the last; up to eight rows share what was loaded of the panel.

Whatever the rows beside it, a row's sum is added up input by input, in order: it has the same bits in any batch.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import functools
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import from_dtype

from maniple_kernels.cpu.calls import address_of, array, caller
from maniple_kernels.cpu.simd import BFLOAT, LANES, _element, _spread, has_feature

PANEL = 32  # outputs
_VECTORS = PANEL // LANES
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_VF32, _VI32 = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)


_PAIRS, _VI16 = ir.VectorType(BFLOAT, 2 * LANES), ir.VectorType(ir.IntType(16), 2 * LANES)


def has_products(*, bfloat16: bool) -> bool:
    """Say whether this CPU has the instructions and the registers that the loop is laid out for."""
    return has_feature("avx512f") and (has_feature("avx512bf16") or not bfloat16)


def multiply_add(builder: Any, total: Any, x: Any, weights: Any) -> Any:
    """Return total + x * weights, lane by lane; weights of 32 bfloat16 are pairs, whose two products are added."""

    def fma(x: Any, y: Any, z: Any) -> Any:
        function = ir.FunctionType(_VF32, [_VF32] * 3)
        return builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.fma.v16f32"), [x, y, z])

    if weights.type == _VF32:
        return fma(x, weights, total)
    if has_feature("avx512bf16"):
        function = ir.FunctionType(_VF32, [_VF32, _PAIRS, _PAIRS])
        function = cgutils.get_or_insert_function(builder.module, function, "llvm.x86.avx512bf16.dpbf16ps.512")
        return builder.call(function, [total, builder.bitcast(x, _PAIRS), builder.bitcast(weights, _PAIRS)])
    shift, mask = ir.Constant(_VI32, [16] * LANES), ir.Constant(_VI32, [-65536] * LANES)
    for widen in (lambda bits: builder.shl(bits, shift), lambda bits: builder.and_(bits, mask)):
        left, right = (builder.bitcast(widen(builder.bitcast(pair, _VI32)), _VF32) for pair in (x, weights))
        total = fma(left, right, total)
    return total


def _products_of(num_rows: int) -> Any:
    """Return an operation that multiplies so many rows with a panel; its sums stay in registers all along."""

    @intrinsic
    def multiply(
        typing_context: Any,
        x: Any,
        x_start: Any,
        num_inputs: Any,
        panels: Any,
        start: Any,
        out: Any,
        at: Any,
        gap: Any,
        begins: Any,
    ) -> Any:
        """Add to ``out[at + row * gap + i]`` for all 32 outputs; row r of x begins at ``x_start + r * num_inputs``."""
        is_wide = panels.dtype == types.float32
        step = 1 if is_wide else 2  # inputs
        weights_type, scalar = (_VF32, _F32) if is_wide else (_VI16, _I32)
        alignment = 4 if is_wide else 2

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x_, x_start_, size, panels_, start_, out_, at_, gap_, begins_ = arguments
            kinds = signature.args
            first_x = _element(context, builder, kinds[0], x_, x_start_)
            panel = _element(context, builder, kinds[3], panels_, start_)
            first_out = _element(context, builder, kinds[5], out_, at_)
            rows = [builder.gep(first_x, [builder.mul(size, _I64(row))]) for row in range(num_rows)]
            zero = ir.Constant(_VF32, [0.0] * LANES)
            targets, known = [], []
            for row in range(num_rows):
                for vector in range(_VECTORS):
                    place = builder.add(builder.mul(gap_, _I64(row)), _I64(vector * LANES))
                    targets.append(builder.bitcast(builder.gep(first_out, [place]), _VF32.as_pointer()))
                    value = builder.load(targets[-1])
                    value.align = 4
                    known.append(builder.select(begins_, zero, value))

            before, loop = builder.block, builder.append_basic_block("inputs")
            after = builder.append_basic_block("stored")
            builder.branch(loop)
            builder.position_at_end(loop)
            place = builder.phi(_I64)
            totals = [builder.phi(_VF32) for _ in targets]

            def load(pointer: Any, kind: Any) -> Any:
                value = builder.load(builder.bitcast(pointer, kind.as_pointer()))
                value.align = alignment
                return value

            offset = builder.mul(place, _I64(PANEL))
            weights = [
                load(builder.gep(panel, [builder.add(offset, _I64(vector * LANES * step))]), weights_type)
                for vector in range(_VECTORS)
            ]
            sums = []
            for row in range(num_rows):
                value = _spread(builder, load(builder.gep(rows[row], [place]), scalar), ir.VectorType(scalar, LANES))
                sums += [
                    multiply_add(builder, totals[_VECTORS * row + vector], value, weights[vector])
                    for vector in range(_VECTORS)
                ]
            following = builder.add(place, _I64(step))
            place.add_incoming(_I64(0), before)
            place.add_incoming(following, loop)
            for total, start_value, result in zip(totals, known, sums, strict=True):
                total.add_incoming(start_value, before)
                total.add_incoming(result, loop)
            builder.cbranch(builder.icmp_signed("<", following, size), loop, after)

            builder.position_at_end(after)
            for target, result in zip(targets, sums, strict=True):
                builder.store(result, target).align = 4
            return context.get_dummy_value()

        intp = types.intp
        return types.void(x, intp, intp, panels, intp, out, intp, intp, types.boolean), generate

    return multiply


_eight, _four, _two, _one = (_products_of(num_rows) for num_rows in (8, 4, 2, 1))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def multiply_panel(x, x_start, num_rows, num_inputs, panels, panel, out, at, gap, begins):
    """Add to ``out[at + row * gap + i]``, float32, for the 32 outputs i of a panel and each row of x.

    Args:
        x: flat; row r begins at ``x_start + r * num_inputs``. Of the type of ``panels``.
        x_start: where the first row begins.
        num_rows: of x.
        num_inputs: even where bfloat16.
        panels: flat [num_panels, num_inputs * 32]; float32, or uint16 for bfloat16 bits.
        panel: which one.
        out: float32, flat.
        at: place of the first row's first output.
        gap: between rows of ``out``.
        begins: ``out`` holds nothing yet: begin at zero.
    """
    start = panel * num_inputs * PANEL
    row = 0
    while num_rows - row >= 8:
        _eight(x, x_start + row * num_inputs, num_inputs, panels, start, out, at + row * gap, gap, begins)
        row += 8
    if num_rows - row >= 4:
        _four(x, x_start + row * num_inputs, num_inputs, panels, start, out, at + row * gap, gap, begins)
        row += 4
    if num_rows - row >= 2:
        _two(x, x_start + row * num_inputs, num_inputs, panels, start, out, at + row * gap, gap, begins)
        row += 2
    if row < num_rows:
        _one(x, x_start + row * num_inputs, num_inputs, panels, start, out, at + row * gap, gap, begins)


def _kinds(own):
    many, size = array(own), types.int64
    return many, size, size, size, many, size, array(types.float32), size, size, types.boolean


call_multiply_panel = caller(lambda given: _kinds(given[0].dtype))
"""As ``multiply_panel``, through its address."""


@functools.cache
def multiply_panel_address(dtype: np.dtype) -> np.int64:
    """Return the address of ``multiply_panel`` for panels of the type."""
    return address_of(multiply_panel, _kinds(from_dtype(dtype)))
