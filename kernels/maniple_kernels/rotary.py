"""Rotary position embedding: rotate the pairs (x_i, x_{i + dim / 2}) of each head by the angle ``position * f_i``.

The frequencies and their scaling are the model's business; here comes a table of cosines and sines.
Source: Su et al. 2021, in the halves layout of transformers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from maniple_kernels.backend import fits_cpu_kernels, fits_gpu_kernels, note_reference
from maniple_kernels.rms_norm import rms_norm_heads_


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
        if head_dim % 2 == 0 and fits_gpu_kernels(x):
            from maniple_kernels.gpu.rotary import norm_and_rotate_

            norm_and_rotate_(x, cos_sin, positions)
            return
        note_reference("rotary", x.device, x.dtype)
        x.copy_(rotate_reference(x, cos_sin, positions))
        return
    from maniple_kernels.cpu.rotary import rotate_heads
    from maniple_kernels.cpu.simd import flat, flat_span
    from maniple_kernels.cpu.threads import use_threads

    use_threads(4 * x.numel())
    rotate_heads(flat_span(x), num_tokens, x.stride(0), num_heads, head_dim, flat(cos_sin), positions.numpy())


def norm_and_rotate_(
    x: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *,
    num_query_heads: int,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> None:
    """Normalize each head, if weights are given, and rotate, both in place.

    Args:
        x: [num_tokens, num_heads, head_dim]: query heads, then key heads; tokens may lie apart.
        cos_sin: [max_model_len, head_dim] float32: cosines, then sines.
        positions: [num_tokens] int64.
        num_query_heads: how many of the heads take ``query_norm``.
        query_norm: [head_dim], given with ``key_norm`` or not at all.
        key_norm: [head_dim].
        eps: added to the mean of the squares.
    """
    if query_norm is None or key_norm is None:
        rotate_(x, cos_sin, positions)
        return
    if x.shape[2] % 2 == 0 and fits_gpu_kernels(x):
        from maniple_kernels.gpu.rotary import norm_and_rotate_ as on_gpu

        on_gpu(
            x,
            cos_sin,
            positions,
            num_query_heads=num_query_heads,
            query_norm=query_norm,
            key_norm=key_norm,
            eps=eps,
        )
        return
    rms_norm_heads_(x[:, :num_query_heads], query_norm, eps)
    rms_norm_heads_(x[:, num_query_heads:], key_norm, eps)
    rotate_(x, cos_sin, positions)
