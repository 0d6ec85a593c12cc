"""Device functions of both attention kernels: a tile of keys, its values, and the soft cap of scores."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_blocks(row_ptr, positions, is_key, BLOCK_SIZE: tl.constexpr):
    """Return the block of each position, and its slot in there; ``row_ptr`` is the request's row of the tables."""
    block = tl.load(row_ptr + positions // BLOCK_SIZE, mask=is_key, other=0)
    return block.to(tl.int64), positions % BLOCK_SIZE


@triton.jit
def load_keys(head_ptr, block, slot, dims, block_stride, dim_stride, slot_stride, is_dim, is_key):
    """Return [WIDTH, KEYS] of one KV head."""
    return tl.load(
        head_ptr + block[None] * block_stride + dims[:, None] * dim_stride + slot[None] * slot_stride,
        mask=is_dim[:, None] & is_key[None],
        other=0.0,
    )


@triton.jit
def load_values(head_ptr, block, slot, dims, block_stride, is_dim, is_key, HEAD_DIM: tl.constexpr):
    """Return [KEYS, WIDTH] of one KV head."""
    return tl.load(
        head_ptr + block[:, None] * block_stride + slot[:, None] * HEAD_DIM + dims[None],
        mask=is_key[:, None] & is_dim[None],
        other=0.0,
    )


@triton.jit
def soft_capped(scores, cap):
    """Return ``cap * tanh(scores / cap)``, both times log2(e): tanh(x) = 1 - 2 / (exp(2 x) + 1), in powers of two."""
    return cap * (1 - 2 / (tl.exp2(scores * (2 * 1.4426950408889634 / cap)) + 1))
