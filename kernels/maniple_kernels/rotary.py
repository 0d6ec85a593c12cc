"""Rotary position embedding: rotate the pairs (x_i, x_{i + dim / 2}) of each head by the angle ``position * f_i``.

The frequencies and their scaling are the model's business; here comes a table of cosines and sines.
Source: Su et al. 2021, in the halves layout of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maniple_kernels.backend import fits_cpu_kernels


def rotate_reference(x: Tensor, cos_sin: Tensor, positions: Tensor) -> Tensor:
    """Return x [num_tokens, num_heads, head_dim] rotated."""
    cos, sin = cos_sin[positions][:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rotate_(x: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Rotate in place.

    Args:
        x: [num_tokens, num_heads, head_dim]; heads of one token lie together, tokens may lie apart.
        cos_sin: [max_model_len, head_dim] float32: cosines, then sines.
        positions: [num_tokens] int64.
    """
    num_tokens, num_heads, head_dim = x.shape
    if head_dim % 2 or not fits_cpu_kernels(x, head_dim // 2):
        x.copy_(rotate_reference(x, cos_sin, positions))
        return
    from maniple_kernels.cpu.rotary import rotate_heads
    from maniple_kernels.cpu.simd import flat, flat_span
    from maniple_kernels.cpu.threads import use_threads

    use_threads(4 * x.numel())
    rotate_heads(flat_span(x), num_tokens, x.stride(0), num_heads, head_dim, flat(cos_sin), positions.numpy())
