"""Rotary embedding of queries and keys in place, with their norms before it: one program for some heads of a token.

Maths in ``rotary.py`` and ``rms_norm.py``; here both in one pass over the heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of


@triton.jit
def norm_and_rotate_heads(
    x_ptr,
    cos_sin_ptr,
    position_ptr,
    query_weight_ptr,
    key_weight_ptr,
    stride,
    num_heads,
    num_query_heads,
    eps,
    HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    pair = tl.arange(0, WIDTH)
    is_pair = (pair < HALF)[None]
    is_here = (head < num_heads)[:, None] & is_pair
    position = tl.load(position_ptr + token)
    cos = tl.load(cos_sin_ptr + position * (2 * HALF) + pair, mask=pair < HALF, other=0.0)[None]
    sin = tl.load(cos_sin_ptr + position * (2 * HALF) + HALF + pair, mask=pair < HALF, other=0.0)[None]
    at = x_ptr + token * stride + head[:, None] * (2 * HALF) + pair[None]
    first = tl.load(at, mask=is_here, other=0.0).to(tl.float32)
    second = tl.load(at + HALF, mask=is_here, other=0.0).to(tl.float32)
    if HAS_NORM:
        factor = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * HALF) + eps)[:, None]
        is_query = (head < num_query_heads)[:, None]
        low_query = tl.load(query_weight_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None]
        low_key = tl.load(key_weight_ptr + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None]
        high_query = tl.load(query_weight_ptr + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None]
        high_key = tl.load(key_weight_ptr + HALF + pair, mask=pair < HALF, other=0.0).to(tl.float32)[None]
        first = first * factor * tl.where(is_query, low_query, low_key)
        second = second * factor * tl.where(is_query, high_query, high_key)
    kind = x_ptr.dtype.element_ty
    tl.store(at, (first * cos - second * sin).to(kind), mask=is_here)
    tl.store(at + HALF, (second * cos + first * sin).to(kind), mask=is_here)


def norm_and_rotate_(
    x: Tensor,
    cos_sin: Tensor,
    positions: Tensor,
    *,
    num_query_heads: int = 0,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Normalize, if weights are given, and rotate in place.

    Args:
        x: [num_tokens, num_heads, head_dim]: query heads, then key heads; heads of one token lie together.
        cos_sin: [max_model_len, head_dim] float32: cosines, then sines.
        positions: [num_tokens] int64.
        num_query_heads: how many of the heads take ``query_norm``.
        query_norm: [head_dim], given with ``key_norm`` or not at all.
        key_norm: [head_dim].
        eps: added to the mean of the squares.
    """
    num_tokens, num_heads, head_dim = x.shape
    assert head_dim % 2 == 0
    assert (query_norm is None) == (key_norm is None)
    shape = shape_of("norm_and_rotate", architecture_of(x.device))
    norm = query_norm is not None
    norm_and_rotate_heads[(num_tokens, triton.cdiv(num_heads, shape.rows))](
        x,
        cos_sin,
        positions,
        query_norm if norm else cos_sin,
        key_norm if norm else cos_sin,
        x.stride(0),
        num_heads,
        num_query_heads,
        eps,
        HALF=head_dim // 2,
        WIDTH=triton.next_power_of_2(head_dim // 2),
        HEADS=shape.rows,
        HAS_NORM=norm,
        num_warps=shape.num_warps,
    )
