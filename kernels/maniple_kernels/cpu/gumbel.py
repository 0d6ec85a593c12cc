"""Gumbel sampling on the CPU: compute the logarithms only of ids that might win."""

# mypy: ignore-errors
# (numba compiles these bodies with types of its own)
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic

_TILE = 64  # ids that are tested together, without a branch


@intrinsic
def _bits_of(typing_context: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), generate


@njit(inline="always")
def _fmix(x):
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B))
    x = np.uint32(np.uint32(x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35))
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit(inline="always")
def _noise_bits(k0, k1, token_id):
    mixed = _fmix(np.uint32(np.uint32(np.uint32(token_id) * np.uint32(0x9E3779B1)) + k0))
    return _fmix(np.uint32(mixed ^ k1))


@njit(inline="always")
def _noise(bits):
    v = min((np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-32), np.float32(1.0 - 2.0**-24))
    return -np.log(-np.log1p(-v))


@njit(error_model="numpy", cache=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)
def _draw(scores, k0, k1):
    """Return the id of the highest score with noise.

    The noise is at most ``-log(v)``, so an id can only reach ``best`` if ``log2(v) <= (score - best) * log2(e)``. The
    bits of a float, read as an integer, are a lower bound of its logarithm: a test without one that few pass in vain.
    """
    chosen = np.argmax(scores)
    best = scores[chosen] + _noise(_noise_bits(k0, k1, chosen))
    for start in range(0, len(scores), _TILE):
        end = min(start + _TILE, len(scores))
        hope = np.float32(-1e30)
        for i in range(start, end):
            # (bits + 0.5) / 2 ** 32 without the division: 32 is taken off the exponent below.
            v = np.float32(_noise_bits(k0, k1, i)) + np.float32(0.5)
            log2_v = np.float32(_bits_of(v)) * np.float32(2.0**-23) - np.float32(127.0 + 32.0)
            hope = max(hope, (scores[i] - best) * np.float32(1.4426950) - log2_v)
        if hope >= np.float32(-1e-3):  # the margin is for rounding
            for i in range(start, end):
                value = scores[i] + _noise(_noise_bits(k0, k1, i))
                if value > best or (value == best and i < chosen):
                    best = value
                    chosen = i
    return chosen


@njit(error_model="numpy", nogil=True, parallel=True, cache=True)
def draw_rows(scores, keys, chosen):
    """Draw one id for each row of ``scores`` [num_rows, vocab_size]; keys [num_rows, 2] uint32."""
    for row in prange(len(scores)):
        chosen[row] = _draw(scores[row], keys[row, 0], keys[row, 1])
