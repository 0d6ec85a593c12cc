"""A vector of 16 float32 values for numba, which has none, and offers no bfloat16 either.

LLVM's own vectoriser makes less than half of the speed out of the same attention loops written with scalars. Here each
operation is one LLVM instruction on ``<16 x float>``, which becomes one AVX-512 register, or two or four smaller ones.
Arrays of uint16 hold bfloat16 bits: they widen on load and round to nearest even on store. Arrays are indexed flat.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model
from torch import Tensor

LANES = 16
_LINE = 64  # bytes
_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_VF32, _VI16, _VI32 = (ir.VectorType(scalar, LANES) for scalar in (_F32, _I16, _I32))
_UNDEFINED = ir.Constant(_VF32, ir.Undefined)


class _BFloat(ir.types.Type):
    """LLVM's type, which llvmlite does not know."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOAT = _BFloat()
_VBF16 = ir.VectorType(BFLOAT, LANES)


@functools.cache
def has_feature(name: str) -> bool:
    """Say whether the CPU that is compiled for, this one, has instructions by LLVM's name of them."""
    return bool(llvmlite.binding.get_host_cpu_features().get(name))


def flat(tensor: Tensor) -> Any:
    """Return the elements of a contiguous tensor as a flat array that shares its memory; bfloat16 as its bits."""
    raw = tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor
    return raw.reshape(-1).numpy()


def flat_span(tensor: Tensor) -> Any:
    """As ``flat`` for a tensor whose tokens lie apart: everything from its first to its last element."""
    return flat(tensor.as_strided(((len(tensor) - 1) * tensor.stride(0) + tensor[0].numel(),), (1,)))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def room(like, size):
    """Return an array of the type of ``like`` that begins with a line of the cache, so that no vector lies on two."""
    items = _LINE // like.itemsize
    memory = np.empty(size + items, like.dtype)
    skipped = (-memory.ctypes.data % _LINE) // like.itemsize
    return memory[skipped : skipped + size]


class _Float32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Float32x16")


VECTOR = _Float32x16()


@register_model(_Float32x16)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VF32)


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    return builder.gep(context.make_array(array_type)(context, builder, array).data, [index])


def _vi32(value: int) -> ir.Constant:
    return ir.Constant(_VI32, [value] * LANES)


def _spread(builder: Any, value: Any, vector_type: Any) -> Any:
    undefined = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, _vi32(0))


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    signature = ir.FunctionType(_VF32, [_VF32] * len(arguments))
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), arguments)


@intrinsic
def load(typing_context: Any, array: Any, index: Any) -> Any:
    """Return elements [index, index + 16)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, array, arguments[0], arguments[1])
        if array.dtype == types.float32:
            value = builder.load(builder.bitcast(pointer, _VF32.as_pointer()))
            value.align = 4
            return value
        bits = builder.load(builder.bitcast(pointer, _VI16.as_pointer()))
        bits.align = 2
        return builder.bitcast(builder.shl(builder.zext(bits, _VI32), _vi32(16)), _VF32)

    return VECTOR(array, types.intp), generate


@intrinsic
def store(typing_context: Any, array: Any, index: Any, value: Any) -> Any:
    """Write elements [index, index + 16)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, array, arguments[0], arguments[1])
        if array.dtype == types.float32:
            written = builder.store(arguments[2], builder.bitcast(pointer, _VF32.as_pointer()))
            written.align = 4
            return context.get_dummy_value()
        if has_feature("avx512bf16"):
            narrow = ir.FunctionType(_VBF16, [_VF32])
            function = cgutils.get_or_insert_function(builder.module, narrow, "llvm.x86.avx512bf16.cvtneps2bf16.512")
            rounded = builder.call(function, [arguments[2]])
            written = builder.store(rounded, builder.bitcast(pointer, _VBF16.as_pointer()))
            written.align = 2
            return context.get_dummy_value()
        bits = builder.bitcast(arguments[2], _VI32)
        odd = builder.and_(builder.lshr(bits, _vi32(16)), _vi32(1))
        rounded = builder.lshr(builder.add(builder.add(bits, _vi32(0x7FFF)), odd), _vi32(16))
        # Rounding would carry the mantissa of a NaN away; keep it quiet and not a number.
        nan = builder.fcmp_unordered("uno", arguments[2], arguments[2])
        rounded = builder.select(nan, _vi32(0x7FC0), rounded)
        written = builder.store(builder.trunc(rounded, _VI16), builder.bitcast(pointer, _VI16.as_pointer()))
        written.align = 2
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate


@intrinsic
def splat_at(typing_context: Any, array: Any, index: Any) -> Any:
    """Return element ``index`` in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value = builder.load(_element(context, builder, array, arguments[0], arguments[1]))
        if array.dtype != types.float32:
            value = builder.bitcast(builder.shl(builder.zext(value, _I32), ir.Constant(_I32, 16)), _F32)
        return _spread(builder, value, _VF32)

    return VECTOR(array, types.intp), generate


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    """Return ``value`` in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, arguments[0], _VF32)

    return VECTOR(types.float32), generate


@intrinsic
def keep_below(typing_context: Any, value: Any, count: Any, otherwise: Any) -> Any:
    """Return ``value`` in the first ``count`` lanes and ``otherwise`` in the rest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bound = _spread(builder, builder.trunc(arguments[1], _I32), _VI32)
        lane = ir.Constant(_VI32, list(range(LANES)))
        kept = builder.icmp_signed("<", lane, bound)
        return builder.select(kept, arguments[0], _spread(builder, arguments[2], _VF32))

    return VECTOR(VECTOR, types.intp, types.float32), generate


@intrinsic
def keep_from(typing_context: Any, value: Any, count: Any, otherwise: Any) -> Any:
    """Return ``otherwise`` in the first ``count`` lanes and ``value`` in the rest."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        bound = _spread(builder, builder.trunc(arguments[1], _I32), _VI32)
        kept = builder.icmp_signed(">=", ir.Constant(_VI32, list(range(LANES))), bound)
        return builder.select(kept, arguments[0], _spread(builder, arguments[2], _VF32))

    return VECTOR(VECTOR, types.intp, types.float32), generate


@intrinsic
def fma(typing_context: Any, x: Any, y: Any, z: Any) -> Any:
    """Return x * y + z, rounded once."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", *arguments)

    return VECTOR(VECTOR, VECTOR, VECTOR), generate


def _binary(build: Callable[[Any, Any, Any], Any]) -> Any:
    @intrinsic
    def operation(typing_context: Any, x: Any, y: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return build(builder, arguments[0], arguments[1])

        return VECTOR(VECTOR, VECTOR), generate

    return operation


def _larger(builder: Any, x: Any, y: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", y, x), y, x)  # a NaN in x stays; one instruction in this form


add = _binary(lambda builder, x, y: builder.fadd(x, y))
sub = _binary(lambda builder, x, y: builder.fsub(x, y))
mul = _binary(lambda builder, x, y: builder.fmul(x, y))
div = _binary(lambda builder, x, y: builder.fdiv(x, y))
maximum = _binary(_larger)


def _across(build: Callable[[Any, Any, Any], Any]) -> Any:
    """Fold the lanes in halves: 16, 8, 4, 2, always in that order."""

    @intrinsic
    def operation(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value, width = arguments[0], LANES // 2
            while width:
                mask = ir.Constant(_VI32, [(lane + width) % LANES for lane in range(LANES)])
                value = build(builder, value, builder.shuffle_vector(value, _UNDEFINED, mask))
                width //= 2
            return builder.extract_element(value, ir.Constant(_I32, 0))

        return types.float32(VECTOR), generate

    return operation


sum_lanes = _across(lambda builder, x, y: builder.fadd(x, y))
max_lanes = _across(_larger)


@intrinsic
def _floor(typing_context: Any, x: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.floor.v16f32", arguments[0])

    return VECTOR(VECTOR), generate


@intrinsic
def _power_of_two(typing_context: Any, x: Any) -> Any:
    """Return 2 ** x for integral x in [-126, 127], by writing the exponent."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        exponent = builder.add(builder.fptosi(arguments[0], _VI32), _vi32(127))
        return builder.bitcast(builder.shl(exponent, _vi32(23)), _VF32)

    return VECTOR(VECTOR), generate


@njit(inline="always")
def exp2(x):
    """Return 2 ** x for x <= 127, with a relative error below 3e-7; below -126 it stays at the least normal number."""
    clipped = maximum(x, splat(np.float32(-126.0)))
    whole = _floor(clipped)
    rest = sub(clipped, whole)
    # A minimax polynomial of 2 ** rest on [0, 1).
    y = splat(np.float32(1.535336188319500e-4))
    y = fma(y, rest, splat(np.float32(1.339887440266574e-3)))
    y = fma(y, rest, splat(np.float32(9.618437357674640e-3)))
    y = fma(y, rest, splat(np.float32(5.550332471162809e-2)))
    y = fma(y, rest, splat(np.float32(2.402264791363012e-1)))
    y = fma(y, rest, splat(np.float32(6.931472028550421e-1)))
    y = fma(y, rest, splat(np.float32(1.0)))
    return mul(y, _power_of_two(whole))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def copy(source, start, target, at, size):
    """Copy some vectors; numba takes seconds to compile the same for slices, whose sizes it must compare."""
    for i in range(0, size, LANES):
        store(target, at + i, load(source, start + i))
