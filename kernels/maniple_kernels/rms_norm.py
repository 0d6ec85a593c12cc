"""Root mean square norm, with the residual addition before it fused: ``y = x / sqrt(mean(x ** 2) + eps) * weight``.

Computed in float32, rounded once. The residual stream is float32 whatever the weights are: it is small, and a
bfloat16 stream loses more than all products do. Source: Zhang and Sennrich 2019.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from maniple_kernels.backend import fits_cpu_kernels, fits_gpu_kernels, note_reference


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension; the result has the type of ``weight``."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()).to(weight.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """Normalize each row.

    Args:
        x: [num_tokens, size], contiguous.
        weight: [size].
        eps: added to the mean of the squares.
        residual: as x, float32; becomes x + residual, and that is normalized.
    Returns:
        [num_tokens, size] of the type of ``weight``, a new tensor.
    """
    rows, size = x.shape
    if not (fits_cpu_kernels(x, size) and fits_cpu_kernels(weight)):
        if fits_gpu_kernels(x):
            from maniple_kernels.gpu.rms_norm import rms_norm as normalize_on_gpu

            return normalize_on_gpu(x, weight, eps, residual)
        note_reference("rms_norm", x.device, weight.dtype)
        if residual is not None:
            residual += x
            x = residual
        return rms_norm_reference(x, weight, eps)
    from maniple_kernels.cpu.rms_norm import add_and_normalize_rows, normalize_rows
    from maniple_kernels.cpu.simd import flat
    from maniple_kernels.cpu.threads import use_threads

    use_threads(4 * rows * size)
    out = torch.empty(x.shape, dtype=weight.dtype)
    if residual is None:
        normalize_rows(flat(x), rows, size, flat(weight), np.float32(eps), flat(out))
    else:
        add_and_normalize_rows(flat(x), flat(residual), rows, size, flat(weight), np.float32(eps), flat(out))
    return out


def rms_norm_heads_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Normalize each head in place.

    Args:
        x: [num_tokens, num_heads, head_dim]; heads of one token lie together, tokens may lie apart.
        weight: [head_dim].
        eps: added to the mean of the squares.
    """
    num_tokens, num_heads, head_dim = x.shape
    if not fits_cpu_kernels(x, head_dim):
        note_reference("rms_norm_heads", x.device, x.dtype)
        x.copy_(rms_norm_reference(x, weight, eps))
        return
    from maniple_kernels.cpu.rms_norm import normalize_heads
    from maniple_kernels.cpu.simd import flat, flat_span
    from maniple_kernels.cpu.threads import use_threads

    use_threads(4 * x.numel())
    normalize_heads(flat_span(x), num_tokens, x.stride(0), num_heads, head_dim, flat(weight), np.float32(eps))
