"""Products of some rows with keys or values as they lie in the cache: matrices with a row for each input.

Two vectors of 16 outputs at a time, perhaps from two blocks. In bfloat16 two rows of the matrix are interleaved on the
way into a register, so that one instruction multiplies two inputs and adds both products. As in ``panel_products`` a
sum is added up input by input, in order, whatever the rows beside it.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from maniple_kernels.cpu.panel_products import multiply_add
from maniple_kernels.cpu.simd import LANES, _element, _spread

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VF32, _VI16 = ir.VectorType(_F32, LANES), ir.VectorType(_I16, LANES)
_INTERLEAVED = ir.Constant(ir.VectorType(_I32, 2 * LANES), [lane for i in range(LANES) for lane in (i, LANES + i)])


def _products_of(num_rows: int) -> Any:
    """Return an operation that adds the products of so many rows to their sums."""

    @intrinsic
    def multiply(
        typing_context: Any,
        x: Any,
        x_start: Any,
        x_gap: Any,
        num_inputs: Any,
        matrix: Any,
        starts: Any,
        gap: Any,
        out: Any,
        places: Any,
        out_gap: Any,
        begins: Any,
    ) -> Any:
        is_wide = matrix.dtype == types.float32
        step = 1 if is_wide else 2  # inputs
        scalar = _F32 if is_wide else _I32
        alignment = 4 if is_wide else 2

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            x_, x_start_, x_gap_, size, matrix_, starts_, gap_, out_, places_, out_gap_, begins_ = arguments
            kinds = signature.args
            first_x = _element(context, builder, kinds[0], x_, x_start_)
            rows = [builder.gep(first_x, [builder.mul(x_gap_, _I64(row))]) for row in range(num_rows)]
            columns = [
                _element(context, builder, kinds[4], matrix_, builder.extract_value(starts_, i)) for i in range(2)
            ]
            targets = []
            for row in range(num_rows):
                for i in range(2):
                    at = builder.add(builder.extract_value(places_, i), builder.mul(out_gap_, _I64(row)))
                    pointer = _element(context, builder, kinds[7], out_, at)
                    targets.append(builder.bitcast(pointer, _VF32.as_pointer()))

            def load(pointer: Any, kind: Any) -> Any:
                value = builder.load(builder.bitcast(pointer, kind.as_pointer()))
                value.align = alignment
                return value

            def weights_at(column: Any, offset: Any) -> Any:
                if is_wide:
                    return load(builder.gep(column, [offset]), _VF32)
                upper = load(builder.gep(column, [offset]), _VI16)
                lower = load(builder.gep(column, [builder.add(offset, gap_)]), _VI16)
                return builder.shuffle_vector(upper, lower, _INTERLEAVED)

            zero = ir.Constant(_VF32, [0.0] * LANES)
            first = []
            for target in targets:
                known = builder.load(target)
                known.align = 4
                first.append(builder.select(begins_, zero, known))
            before, loop = builder.block, builder.append_basic_block("inputs")
            after = builder.append_basic_block("stored")
            builder.branch(loop)
            builder.position_at_end(loop)
            place = builder.phi(_I64)
            totals = [builder.phi(_VF32) for _ in targets]
            offset = builder.mul(place, gap_)
            weights = [weights_at(column, offset) for column in columns]
            sums = []
            for row in range(num_rows):
                value = _spread(builder, load(builder.gep(rows[row], [place]), scalar), ir.VectorType(scalar, LANES))
                sums += [multiply_add(builder, totals[2 * row + i], value, weights[i]) for i in range(2)]
            following = builder.add(place, _I64(step))
            place.add_incoming(_I64(0), before)
            place.add_incoming(following, loop)
            for total, start, result in zip(totals, first, sums, strict=True):
                total.add_incoming(start, before)
                total.add_incoming(result, loop)
            builder.cbranch(builder.icmp_signed("<", following, size), loop, after)
            builder.position_at_end(after)
            for target, result in zip(targets, sums, strict=True):
                builder.store(result, target).align = 4
            return context.get_dummy_value()

        intp = types.intp
        pair = types.UniTuple(intp, 2)
        return types.void(x, intp, intp, intp, matrix, pair, intp, out, pair, intp, types.boolean), generate

    return multiply


_eight, _four, _three, _two, _one = (_products_of(num_rows) for num_rows in (8, 4, 3, 2, 1))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def multiply_cached(x, x_start, x_gap, num_rows, num_inputs, matrix, starts, gap, out, places, out_gap, begins):
    """Add to ``out[places[j] + row * out_gap + i]`` the products of a row with 16 columns i, for both j.

    Args:
        x: row r begins at ``x_start + r * x_gap``; of the type of ``matrix``.
        x_start: where the first row begins.
        x_gap: between rows.
        num_rows: of x.
        num_inputs: even where bfloat16.
        matrix: float32, or uint16 for bfloat16 bits; row k, column i of pair j is at ``starts[j] + k * gap + i``.
        starts: of the two pairs; they may be the same.
        gap: between rows of the matrix.
        out: float32.
        places: of the first row, for both; the same where ``starts`` are.
        out_gap: between rows of ``out``.
        begins: ``out`` holds nothing yet: begin at zero.
    """
    row = 0
    while num_rows - row >= 8:
        at = places[0] + row * out_gap, places[1] + row * out_gap
        _eight(x, x_start + row * x_gap, x_gap, num_inputs, matrix, starts, gap, out, at, out_gap, begins)
        row += 8
    if num_rows - row >= 4:
        at = places[0] + row * out_gap, places[1] + row * out_gap
        _four(x, x_start + row * x_gap, x_gap, num_inputs, matrix, starts, gap, out, at, out_gap, begins)
        row += 4
    at = places[0] + row * out_gap, places[1] + row * out_gap
    if num_rows - row == 3:
        _three(x, x_start + row * x_gap, x_gap, num_inputs, matrix, starts, gap, out, at, out_gap, begins)
    elif num_rows - row == 2:
        _two(x, x_start + row * x_gap, x_gap, num_inputs, matrix, starts, gap, out, at, out_gap, begins)
    elif num_rows - row == 1:
        _one(x, x_start + row * x_gap, x_gap, num_inputs, matrix, starts, gap, out, at, out_gap, begins)
