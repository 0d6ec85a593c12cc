"""Write a step's keys and values into the cache: one program a token. Maths in ``kv_store.py``."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of


@triton.jit
def store_token(
    key_ptr,
    value_ptr,
    slot_ptr,
    key_cache_ptr,
    value_cache_ptr,
    key_stride,
    value_stride,
    key_block_stride,
    key_head_stride,
    key_dim_stride,
    key_slot_stride,
    value_block_stride,
    value_head_stride,
    size,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0)
    slot = tl.load(slot_ptr + token)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    for start in range(0, size, COLUMNS):
        element = start + tl.arange(0, COLUMNS)
        is_element = element < size
        head = element // HEAD_DIM
        dim = element % HEAD_DIM
        keys = tl.load(key_ptr + token * key_stride + element, mask=is_element)
        tl.store(
            key_cache_ptr
            + block * key_block_stride
            + head * key_head_stride
            + dim * key_dim_stride
            + offset * key_slot_stride,
            keys,
            mask=is_element,
        )
        values = tl.load(value_ptr + token * value_stride + element, mask=is_element)
        tl.store(
            value_cache_ptr + block * value_block_stride + head * value_head_stride + offset * HEAD_DIM + dim,
            values,
            mask=is_element,
        )


def store_kv(keys: Tensor, values: Tensor, slots: Tensor, key_cache: Tensor, value_cache: Tensor) -> None:
    """As ``maniple_kernels.kv_store.store_kv``; a token's heads lie together, tokens may lie apart."""
    num_tokens, num_kv_heads, head_dim = keys.shape
    size = num_kv_heads * head_dim
    shape = shape_of("store_kv", architecture_of(keys.device))
    store_token[(num_tokens,)](
        keys,
        values,
        slots,
        key_cache,
        value_cache,
        keys.stride(0),
        values.stride(0),
        *key_cache.stride(),
        value_cache.stride(0),
        value_cache.stride(1),
        size,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[3],
        COLUMNS=min(shape.columns, triton.next_power_of_2(size)),
        num_warps=shape.num_warps,
    )
