"""Rotary position embedding on the CPU, in place."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

from numba import njit, prange

from maniple_kernels.cpu.simd import LANES, add, load, mul, store, sub


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def rotate_heads(x, num_tokens, stride, num_heads, size, cos_sin, positions):
    """Rotate heads in place; head h of token t begins at ``t * stride + h * size``; cos_sin is flat [max_len, size]."""
    half = size // 2
    for token in prange(num_tokens):
        angle = positions[token] * size
        for head in range(num_heads):
            start = token * stride + head * size
            for i in range(0, half, LANES):
                cos = load(cos_sin, angle + i)
                sin = load(cos_sin, angle + half + i)
                first = load(x, start + i)
                second = load(x, start + half + i)
                store(x, start + i, sub(mul(first, cos), mul(second, sin)))
                store(x, start + half + i, add(mul(second, cos), mul(first, sin)))
