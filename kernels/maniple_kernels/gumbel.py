"""Draw one id per row from the softmax of its scores with the noise of the protocol: ``argmax(score + noise)``.

Bits, modulo 2**32: ``fmix(fmix(id * 0x9E3779B1 + k0) ^ k1)`` with the murmur3 finaliser; noise:
``-log(-log1p(-v))`` with ``v = min((bits + 0.5) / 2**32, 1 - 2**-24)`` in float32. Bits are exact everywhere, the
logarithms are not. Ties go to the lowest id. Source: Gumbel 1954, Appleby 2008.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from maniple_kernels.backend import has_cpu_kernels

UInt32Array = npt.NDArray[np.uint32]
FloatArray = npt.NDArray[np.float32]

_LARGEST_V = np.float32(1.0 - 2.0**-24)


def _fmix(x: UInt32Array) -> UInt32Array:
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def noise_bits(k0: int, k1: int, token_ids: npt.NDArray[np.integer]) -> UInt32Array:
    """Return the noise bits of the ids under the two keys of one sampled position."""
    mixed = _fmix(token_ids.astype(np.uint32) * np.uint32(0x9E3779B1) + np.uint32(k0))
    return _fmix(mixed ^ np.uint32(k1))


def gumbel_noise(k0: int, k1: int, token_ids: npt.NDArray[np.integer]) -> FloatArray:
    """Return the noise of the ids: between -2.82 and 22.88."""
    v = (noise_bits(k0, k1, token_ids).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-32)
    noise: FloatArray = -np.log(-np.log1p(-np.minimum(v, _LARGEST_V)))
    return noise


def gumbel_argmax_reference(scores: FloatArray, keys: UInt32Array) -> npt.NDArray[np.int32]:
    """As ``gumbel_argmax``, with the noise of every id."""
    ids = np.arange(scores.shape[1])
    chosen = [np.argmax(row + gumbel_noise(k0, k1, ids)) for row, (k0, k1) in zip(scores, keys, strict=True)]
    return np.array(chosen, np.int32)


def gumbel_argmax(scores: Tensor, keys: UInt32Array) -> npt.NDArray[np.int32]:
    """Draw.

    Args:
        scores: [num_rows, vocab_size] float32, on the CPU, contiguous; -inf is never drawn.
        keys: [num_rows, 2] uint32, k0 and k1 of each row's position.
    Returns:
        [num_rows] int32 ids.
    """
    assert scores.dtype is torch.float32
    assert scores.is_contiguous()
    if not has_cpu_kernels():
        return gumbel_argmax_reference(scores.numpy(), keys)
    from maniple_kernels.cpu.gumbel import draw_rows
    from maniple_kernels.cpu.threads import use_threads

    chosen = np.empty(len(scores), np.int32)
    use_threads(scores.numel() * 4)
    draw_rows(scores.numpy(), keys, chosen)
    return chosen
