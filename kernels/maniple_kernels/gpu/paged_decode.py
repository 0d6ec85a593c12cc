"""Paged attention for steps in which every request has one query: split over the keys, then merged.

One program takes one request, one KV head with all its query heads, and one of ``num_splits`` equal parts of the keys.
It keeps the online softmax of its part in powers of two; ``_merge_splits`` weighs the parts. A part's borders follow
from the length of its own request, so a row gets the same bits in any company.

Source: Dao et al. 2023 (split keys for decoding), Kwon et al. 2023. Behaviour only; maths in ``paged_attention.py``.
"""

from __future__ import annotations

import copy

import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of, compiled_width
from maniple_kernels.gpu.paged_keys import find_blocks, load_keys, load_values, soft_capped
from maniple_kernels.gpu.shapes import attention_shape, shape_of

LOG2_E = 1.4426950408889634


@triton.jit
def decode_part(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    weight_ptr,
    scale,  # of the scores, times log2(e)
    soft_cap,  # in the same unit; read only with HAS_SOFT_CAP
    window,
    query_stride,
    key_block_stride,
    key_head_stride,
    key_dim_stride,
    key_slot_stride,
    value_block_stride,
    value_head_stride,
    table_stride,
    num_heads,
    num_splits,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + request)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length - window, 0)
    part = tl.cdiv(tl.cdiv(length - first, num_splits), KEYS) * KEYS
    start = first + split * part
    end = tl.minimum(start + part, length)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    heads = kv_head * GROUP + rows
    is_head = rows < GROUP
    is_dim = dims < HEAD_DIM
    query = tl.load(
        query_ptr + request * query_stride + heads[:, None] * HEAD_DIM + dims[None],
        mask=is_head[:, None] & is_dim[None],
        other=0.0,
    )
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(start, end, KEYS):
        positions = at + tl.arange(0, KEYS)
        is_key = positions < end
        block, slot = find_blocks(table_ptr + request * table_stride, positions, is_key, BLOCK_SIZE)
        key_head_ptr = key_ptr + kv_head * key_head_stride
        keys = load_keys(
            key_head_ptr, block, slot, dims, key_block_stride, key_dim_stride, key_slot_stride, is_dim, is_key
        )
        scores = tl.dot(query, keys, input_precision="ieee") * scale
        if HAS_SOFT_CAP:
            scores = soft_capped(scores, soft_cap)
        scores = tl.where(is_key[None], scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(weights, 1)
        value_head_ptr = value_ptr + kv_head * value_head_stride
        values = load_values(value_head_ptr, block, slot, dims, value_block_stride, is_dim, is_key, HEAD_DIM)
        out = out * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = higher
    place = (request * num_heads + heads) * num_splits + split
    is_empty = total == 0
    tl.store(
        out_ptr + place[:, None] * HEAD_DIM + dims[None],
        out / tl.where(is_empty, 1.0, total)[:, None],
        mask=is_head[:, None] & is_dim[None],
    )
    # log2 of the sum of the weights of this part; -inf where it has no keys
    tl.store(weight_ptr + place, tl.where(is_empty, float("-inf"), highest + tl.log2(total)), mask=is_head)


@triton.jit
def merge_splits(
    part_ptr,
    weight_ptr,
    out_ptr,
    num_splits,
    out_stride,
    num_heads,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,
):
    request = tl.program_id(0)
    head = tl.program_id(1)
    splits = tl.arange(0, SPLITS)
    dims = tl.arange(0, WIDTH)
    is_split = splits < num_splits
    is_dim = dims < HEAD_DIM
    place = (request * num_heads + head) * num_splits + splits
    weights = tl.load(weight_ptr + place, mask=is_split, other=float("-inf"))
    highest = tl.max(weights, 0)
    # A padding row of a graph has no keys at all: zeros, not NaN.
    shares = tl.exp2(weights - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(shares, 0)
    parts = tl.load(part_ptr + place[:, None] * HEAD_DIM + dims[None], mask=is_split[:, None] & is_dim[None], other=0.0)
    out = tl.sum(parts * shares[:, None], 0) / tl.where(total == 0, 1.0, total)
    tl.store(out_ptr + request * out_stride + head * HEAD_DIM + dims, out.to(out_ptr.dtype.element_ty), mask=is_dim)


class DecodeScratch:
    """Where the parts of the splits lie between the two kernels: allocated once, so that graphs can be replayed."""

    def __init__(
        self, max_num_reqs: int, num_heads: int, head_dim: int, num_splits: int, device: torch.device | str
    ) -> None:
        self.num_splits = num_splits
        self.parts = torch.empty(max_num_reqs * num_heads * num_splits * head_dim, dtype=torch.float32, device=device)
        self.weights = torch.empty(max_num_reqs * num_heads * num_splits, dtype=torch.float32, device=device)

    def cut(self, num_splits: int) -> DecodeScratch:
        """Return the same memory for another number of splits, and as many fewer requests."""
        other = copy.copy(self)
        other.num_splits = num_splits
        return other


def num_splits_for(num_reqs: int, num_kv_heads: int, max_seq_len: int, num_processors: int) -> int:
    """Return into how many parts the keys of each request are cut, a power of two.

    As many that every multiprocessor has two programs, but no part shorter than 256 keys of the longest context.
    """
    wanted = 2 * num_processors / max(1, num_reqs * num_kv_heads)
    most = max(1, max_seq_len // 256)
    splits = 1
    while splits * 2 <= min(wanted, most, 64):
        splits *= 2
    return splits


def paged_decode(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    scratch: DecodeScratch,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with one query a request.

    Args:
        query: [num_reqs, num_heads, head_dim]; heads of one token lie together, tokens may lie apart.
        key_cache: [num_blocks, num_kv_heads, head_dim, block_size], with any strides.
        value_cache: [num_blocks, num_kv_heads, block_size, head_dim], slots of one head together.
        block_tables: [num_reqs, max_num_blocks] int32.
        seq_lens: [num_reqs] int32, the query's own position included; 0 for padding, which yields zeros.
        scale: factor of the scores.
        scratch: for at least so many requests; its number of splits is used.
        window: keys that a query sees, itself included; 0: all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0: as they are.
        out: where the result goes, as query.
    Returns:
        [num_reqs, num_heads, head_dim].
    """
    num_reqs, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[3]
    group, width = num_heads // num_kv_heads, compiled_width(head_dim)
    if out is None:
        out = torch.empty((num_reqs, num_heads, head_dim), dtype=query.dtype, device=query.device)
    shape = attention_shape(
        "paged_decode", architecture_of(query.device), width=width, itemsize=key_cache.element_size()
    )
    decode_part[(num_reqs, num_kv_heads, scratch.num_splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        seq_lens,
        scratch.parts,
        scratch.weights,
        scale * LOG2_E,
        soft_cap * LOG2_E,
        window,
        query.stride(0),
        *key_cache.stride(),
        value_cache.stride(0),
        value_cache.stride(1),
        block_tables.stride(0),
        num_heads,
        scratch.num_splits,
        GROUP=group,
        ROWS=max(shape.rows, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        KEYS=shape.columns,
        HAS_WINDOW=window > 0,
        HAS_SOFT_CAP=soft_cap > 0,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    shape = shape_of("merge_splits", architecture_of(query.device))
    merge_splits[(num_reqs, num_heads)](
        scratch.parts,
        scratch.weights,
        out,
        scratch.num_splits,
        out.stride(0),
        num_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        SPLITS=triton.next_power_of_2(scratch.num_splits),
        num_warps=shape.num_warps,
    )
    return out
