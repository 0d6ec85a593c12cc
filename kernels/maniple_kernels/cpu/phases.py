"""Go through phases of work with other threads without ever waiting for one that does not run.

A phase is a number of items, each of which writes what follows from the phases before. A thread takes items as
``claims`` deals them out. When none is left it looks at those that somebody else still computes: it gives them about
the time that one takes, then computes them itself, and goes on. Whoever was away, since an event loop or a neighbour
had its core, comes back to an item that is done, writes the same once more, and passes by all that was done meanwhile.

So two things must hold, as long as the work lasts: an item writes the same however often it is computed, and nothing
that an item reads or writes is used for anything else.
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from maniple_kernels.cpu.claims import LINE, atomic
from maniple_kernels.cpu.simd import _element

_I64 = ir.IntType(64)
_LEAST_CYCLES = 40_000  # that an item of somebody else is given: 10 to 20 microseconds


# All that was written before is there for who sees the count.
_exchange, _count_up = atomic("xchg", "acq_rel"), atomic("add", "acq_rel")


@intrinsic
def _look(typing_context: Any, counts: Any, place: Any) -> Any:
    """Return a count, and see what was written before it was."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], *arguments)
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(counts, types.intp), generate


@intrinsic
def now(typing_context: Any) -> Any:
    """Return the cycle counter of the CPU."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(_I64, [])
        return builder.call(cgutils.get_or_insert_function(builder.module, function, "llvm.readcyclecounter"), [])

    return types.int64(), generate


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def is_done(done, phase, num_items):
    """Say whether all items of a phase are computed; ``done`` has a count for each phase, a line apart."""
    return _look(done, phase * LINE) == num_items


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def finish(flags, place, done, phase):
    """Note that an item is computed, by whomever; ``flags[place]`` is its own."""
    if _exchange(flags, place) == 0:
        _count_up(done, phase * LINE)


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def find_missing(flags, first, num_items, done, phase, took, num_bytes):
    """Wait until a phase is done, or return an item that somebody else does not come to an end with.

    Args:
        flags: of all items; those of the phase begin at ``first``.
        first: see there.
        num_items: of the phase.
        done: see ``is_done``.
        phase: which.
        took: cycles that the thread's own last item took; 0 if it had none.
        num_bytes: that an item reads, at most; a core gets some of them in a cycle.
    Returns:
        An item to compute; ``num_items`` when all are.
    """
    until = now() + max(2 * took, num_bytes, _LEAST_CYCLES)
    while not is_done(done, phase, num_items):
        if now() > until:
            for item in range(num_items):
                if _look(flags, first + item) == 0:
                    return np.int64(item)
    return np.int64(num_items)
