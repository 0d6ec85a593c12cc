"""Root mean square norm on the CPU, by rows."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

import numpy as np
from numba import njit, prange

from maniple_kernels.cpu.simd import LANES, add, fma, load, mul, splat, store, sum_lanes


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _normalize(x, start, size, weight, eps, out, out_start):
    squares = splat(np.float32(0.0))
    for i in range(0, size, LANES):
        value = load(x, start + i)
        squares = fma(value, value, squares)
    mean = sum_lanes(squares) / np.float32(size)
    factor = splat(np.float32(1.0) / np.sqrt(mean + eps))
    for i in range(0, size, LANES):
        store(out, out_start + i, mul(mul(load(x, start + i), factor), load(weight, i)))


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def normalize_rows(x, num_rows, size, weight, eps, out):
    """Write the norm of each row of ``x`` to ``out``; both flat [num_rows, size]."""
    for row in prange(num_rows):
        _normalize(x, row * size, size, weight, eps, out, row * size)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def add_and_normalize_rows(x, residual, num_rows, size, weight, eps, out):
    """As ``normalize_rows`` of ``x + residual``, which is written to ``residual``."""
    for row in prange(num_rows):
        for i in range(row * size, (row + 1) * size, LANES):
            store(residual, i, add(load(x, i), load(residual, i)))
        _normalize(residual, row * size, size, weight, eps, out, row * size)


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def normalize_heads(x, num_tokens, stride, num_heads, size, weight, eps):
    """Normalize each head in place; head h of token t begins at ``t * stride + h * size``."""
    for token in prange(num_tokens):
        for head in range(num_heads):
            start = token * stride + head * size
            _normalize(x, start, size, weight, eps, x, start)
