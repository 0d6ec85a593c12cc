"""Share the items of a loop among threads: each has a part of its own, and helps others when it is done with that.

``prange`` cuts a loop into equal parts, and all wait for the thread whose core somebody else uses for a moment: an
event loop, a neighbour on the same physical core. And requests of different lengths are no equal parts. Within its own
part a thread goes from item to item in order, as the CPU's prefetching likes it.

A loop over all items of some work is written as::

    taken = nothing_taken(num_threads)
    for thread in prange(num_threads):
        item, helped = claim(taken, num_items, thread, 0)
        while item < num_items:
            ...
            item, helped = claim(taken, num_items, thread, helped)
"""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from maniple_kernels.cpu.simd import _element

LINE = 8  # counts in a cache line
_I64 = ir.IntType(64)


def atomic(operation: str, ordering: str) -> Any:
    """Return an operation of LLVM's on a count, by one, at once for all threads; it returns the count as it was."""

    @intrinsic
    def change(typing_context: Any, counts: Any, place: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = _element(context, builder, signature.args[0], *arguments)
            return builder.atomic_rmw(operation, pointer, _I64(1), ordering)

        return types.int64(counts, types.intp), generate

    return change


# What the items read was written before the threads came together: nothing is ordered by the count.
_count_up = atomic("add", "monotonic")


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def nothing_taken(num_threads):
    """Return how many items were taken of each thread's part of a loop that begins, counts apart by a cache line.

    ``num_threads`` are those of ``use_threads``; asked inside, numba would not keep what it compiled.
    """
    taken = np.empty(num_threads * LINE, np.int64)
    for i in range(0, len(taken), LINE):
        taken[i] = 0
    return taken


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def claim(taken, num_items, thread, helped):
    """Take an item: of the thread's own part, or of one that it helps.

    Args:
        taken: of ``nothing_taken``.
        num_items: of the loop, cut into as many parts as there are threads.
        thread: who asks.
        helped: parts that it found taken; at first 0, later what was returned.
    Returns:
        (item, parts found taken), both int64; ``num_items`` when all are taken.
    """
    num_threads = np.int64(len(taken) // LINE)
    while helped < num_threads:
        part = (np.int64(thread) + helped) % num_threads
        item = num_items * part // num_threads + _count_up(taken, part * LINE)
        if item < num_items * (part + 1) // num_threads:
            return item, helped
        helped += 1
    return np.int64(num_items), helped
