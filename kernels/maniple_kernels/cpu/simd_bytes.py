"""Vectors of 16 int32 whose lanes hold four bytes each, and the sum of products of such bytes.

Beside ``simd``, for weights of 8 and 4 bits. The sum of products is one instruction where the CPU has AVX512-VNNI;
elsewhere it is spelled out, with the same integers as result.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import functools
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from maniple_kernels.cpu.simd import _VF32, LANES, VECTOR, _call, _element, _spread

_I8, _I32 = ir.IntType(8), ir.IntType(32)
_VI8, _VI32, _VF16 = ir.VectorType(_I8, LANES), ir.VectorType(_I32, LANES), ir.VectorType(ir.HalfType(), LANES)
_BYTES = ir.VectorType(_I8, 4 * LANES)
_PAIRS, _WIDE_PAIRS = ir.VectorType(ir.IntType(16), 2 * LANES), ir.VectorType(_I32, 2 * LANES)


class _Int32x16(types.Type):
    def __init__(self) -> None:
        super().__init__(name="Int32x16")


WORDS = _Int32x16()


@register_model(_Int32x16)
class _WordsModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: Any) -> None:
        super().__init__(dmm, fe_type, _VI32)


def _words(value: int) -> ir.Constant:
    return ir.Constant(_VI32, [value] * LANES)


@functools.cache
def has_vnni() -> bool:
    """Say whether this CPU adds products of bytes in one instruction, of 64 at once."""
    return bool(llvmlite.binding.get_host_cpu_features().get("avx512vnni"))


@intrinsic
def load_words(typing_context: Any, array: Any, index: Any) -> Any:
    """Return elements [index, index + 16) of int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, array, arguments[0], arguments[1])
        value = builder.load(builder.bitcast(pointer, _VI32.as_pointer()))
        value.align = 4
        return value

    return WORDS(array, types.intp), generate


@intrinsic
def splat_word_at(typing_context: Any, array: Any, index: Any) -> Any:
    """Return element ``index`` of int32 in every lane."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _spread(builder, builder.load(_element(context, builder, array, arguments[0], arguments[1])), _VI32)

    return WORDS(array, types.intp), generate


@intrinsic
def zero_words(typing_context: Any) -> Any:
    """Return zeros."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _words(0)

    return WORDS(), generate


@intrinsic
def low_nibbles(typing_context: Any, words: Any) -> Any:
    """Return the lower four bits of each byte, as bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.and_(arguments[0], _words(0x0F0F0F0F))

    return WORDS(WORDS), generate


@intrinsic
def high_nibbles(typing_context: Any, words: Any) -> Any:
    """Return the upper four bits of each byte, as bytes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.and_(builder.lshr(arguments[0], _words(4)), _words(0x0F0F0F0F))

    return WORDS(WORDS), generate


@intrinsic
def add_words(typing_context: Any, x: Any, y: Any) -> Any:
    """Return x + y."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.add(arguments[0], arguments[1])

    return WORDS(WORDS, WORDS), generate


@intrinsic
def add_byte_products(typing_context: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """Add to each lane the four products of its unsigned bytes with its signed bytes. Exact."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if not has_vnni():
            return _spelled_out(builder, *arguments)
        operands = [arguments[0], builder.bitcast(arguments[1], _BYTES), builder.bitcast(arguments[2], _BYTES)]
        function = ir.FunctionType(_VI32, [_VI32, _BYTES, _BYTES])
        name = "llvm.x86.avx512.vpdpbusd.512"
        return builder.call(cgutils.get_or_insert_function(builder.module, function, name), operands)

    return WORDS(WORDS, WORDS, WORDS), generate


def _spelled_out(builder: Any, total: Any, unsigned: Any, signed: Any) -> Any:
    """As ``add_byte_products`` from products of 16 bits in pairs, which most CPUs add in one instruction."""
    ones, twos = _words(0x00FF00FF), ir.Constant(_PAIRS, [8] * (2 * LANES))
    for shift in (0, 8):  # bytes 0 and 2, then 1 and 3
        weights = builder.bitcast(builder.and_(builder.lshr(unsigned, _words(shift)), ones), _PAIRS)
        pairs = builder.bitcast(builder.shl(signed, _words(8 - shift)), _PAIRS)
        values = builder.ashr(pairs, twos)
        products = builder.mul(builder.sext(weights, _WIDE_PAIRS), builder.sext(values, _WIDE_PAIRS))
        nothing = ir.Constant(_WIDE_PAIRS, ir.Undefined)
        even, odd = (
            builder.shuffle_vector(products, nothing, ir.Constant(_VI32, list(range(first, 2 * LANES, 2))))
            for first in (0, 1)
        )
        total = builder.add(total, builder.add(even, odd))
    return total


@intrinsic
def as_floats(typing_context: Any, words: Any) -> Any:
    """Return the lanes as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.sitofp(arguments[0], _VF32)

    return VECTOR(WORDS), generate


@intrinsic
def bytes_as_floats(typing_context: Any, words: Any, place: Any) -> Any:
    """Return byte ``place`` of each lane, unsigned, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        shift = _spread(
            builder, builder.trunc(builder.shl(arguments[1], ir.Constant(arguments[1].type, 3)), _I32), _VI32
        )
        return builder.uitofp(builder.and_(builder.lshr(arguments[0], shift), _words(0xFF)), _VF32)

    return VECTOR(WORDS, types.intp), generate


@intrinsic
def load_halves(typing_context: Any, array: Any, index: Any) -> Any:
    """Return elements [index, index + 16) of uint16, the bits of float16, as float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, array, arguments[0], arguments[1])
        halves = builder.load(builder.bitcast(pointer, _VF16.as_pointer()))
        halves.align = 2
        return builder.fpext(halves, _VF32)

    return VECTOR(array, types.intp), generate


@intrinsic
def rounded(typing_context: Any, x: Any) -> Any:
    """Return the nearest whole numbers, of two the even one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _call(builder, "llvm.rint.v16f32", arguments[0])

    return VECTOR(VECTOR), generate


@intrinsic
def store_bytes(typing_context: Any, array: Any, index: Any, x: Any) -> Any:
    """Write whole numbers in [-128, 127] to elements [index, index + 16) of int8."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, array, arguments[0], arguments[1])
        narrow = builder.trunc(builder.fptosi(arguments[2], _VI32), _VI8)
        builder.store(narrow, builder.bitcast(pointer, _VI8.as_pointer())).align = 1
        return context.get_dummy_value()

    return types.void(array, types.intp, VECTOR), generate
