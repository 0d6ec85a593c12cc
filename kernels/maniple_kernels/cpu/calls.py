"""Call a compiled function by its address, so that it is compiled once, for itself.

numba compiles what a function calls together with that function, and a parallel loop four times over: in a function of
its own and in three that lead to it. What is long and is called from parallel loops is therefore compiled apart, and
they are given its address.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.core.typing import signature
from numba.extending import intrinsic

Kinds = tuple[Any, ...]
"""Types of numba."""


def array(kind: Any) -> Any:
    """Return the type of a flat array."""
    return types.Array(kind, 1, "C")


def address_of(function: Any, kinds: Kinds) -> np.int64:
    """Return the address of a function for arguments of these types; compile it, or find it in the cache."""
    function.compile(kinds)
    compiled = function.overloads[kinds]
    return np.int64(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name))


def caller(kinds_of: Callable[[Kinds], Kinds]) -> Any:
    """Return an operation that calls a function without a result: ``call(address, arguments)``.

    Args:
        kinds_of: the types that the function at the address was compiled for, of those of the arguments; theirs are
            converted to them, as far as nothing is lost.
    """

    @intrinsic
    def call(typing_context: Any, address: Any, arguments: Any) -> Any:
        given = tuple(arguments)
        kinds = kinds_of(given)
        if len(kinds) != len(given) or not all(map(functools.partial(_suits, typing_context), given, kinds)):
            raise TypingError(f"a function of {kinds} was called with {given}")

        def generate(context: Any, builder: Any, call_signature: Any, values: Any) -> Any:
            place, packed = values
            convention = context.call_conv
            pointer = convention.get_function_type(types.none, kinds).as_pointer()
            unpacked = cgutils.unpack_tuple(builder, packed, len(kinds))
            converted = [
                context.cast(builder, value, has, wanted)
                for value, has, wanted in zip(unpacked, given, kinds, strict=True)
            ]
            function = builder.inttoptr(place, pointer)
            status, _ = convention.call_function(builder, function, types.none, kinds, converted)
            with cgutils.if_unlikely(builder, status.is_error):
                convention.return_status_propagate(builder, status)
            return context.get_dummy_value()

        return signature(types.void, types.int64, arguments), generate

    return call


def _suits(typing_context: Any, given: Any, wanted: Any) -> bool:
    conversion = typing_context.can_convert(given, wanted)
    return conversion is not None and conversion.name in ("exact", "promote", "safe")
