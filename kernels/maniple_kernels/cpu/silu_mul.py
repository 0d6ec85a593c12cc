"""The gated activation on the CPU."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit, prange

from maniple_kernels.cpu.simd import LANES, add, div, exp2, load, maximum, mul, splat, store


@njit(inline="always")
def gate(x, y):
    """Return silu(x) * y."""
    # silu(x) = x / (1 + 2 ** (-x * log2(e))); the bound keeps the power finite.
    power = exp2(mul(maximum(x, splat(np.float32(-87.0))), splat(np.float32(-1.4426950408889634))))
    return mul(div(x, add(splat(np.float32(1.0)), power)), y)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def gate_rows(gate_up, num_rows, size, out):
    """Write silu(gate) * up; ``gate_up`` is flat [num_rows, 2 * size], gate first."""
    for row in prange(num_rows):
        source = row * 2 * size
        for i in range(0, size, LANES):
            value = gate(load(gate_up, source + i), load(gate_up, source + size + i))
            store(out, row * size + i, value)
