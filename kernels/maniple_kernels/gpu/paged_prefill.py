"""Paged attention for any mix of prompts, chunks and single queries, causal over what is cached.

One program takes one tile of queries of one request and one KV head: the query heads of the group lie side by side in
the rows of the tile, ``row = query * GROUP + head``, so that each key is read once for all of them. Tiles come as a
list made on the host, since requests have different lengths.

Source: Dao 2023 (tiles over queries), Kwon et al. 2023. Behaviour only; maths in ``paged_attention.py``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of, compiled_width
from maniple_kernels.gpu.paged_decode import LOG2_E
from maniple_kernels.gpu.paged_keys import find_blocks, load_keys, load_values, soft_capped
from maniple_kernels.gpu.shapes import attention_shape


@triton.jit
def prefill_tile(
    query_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    tile_ptr,
    start_ptr,
    length_ptr,
    out_ptr,
    scale,  # of the scores, times log2(e)
    soft_cap,  # in the same unit; read only with HAS_SOFT_CAP
    window,
    query_stride,
    out_stride,
    key_block_stride,
    key_head_stride,
    key_dim_stride,
    key_slot_stride,
    value_block_stride,
    value_head_stride,
    table_stride,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):
    QUERIES: tl.constexpr = ROWS // GROUP
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    request = tl.load(tile_ptr + 2 * tile)
    first_query = tl.load(tile_ptr + 2 * tile + 1)
    start = tl.load(start_ptr + request)
    num_queries = tl.load(start_ptr + request + 1) - start
    length = tl.load(length_ptr + request)
    before = length - num_queries  # tokens known before this step

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, WIDTH)
    query_of_row = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows < QUERIES * GROUP) & (query_of_row < num_queries)
    is_dim = dims < HEAD_DIM
    position = before + query_of_row
    token = (start + query_of_row).to(tl.int64)
    query = tl.load(
        query_ptr + token[:, None] * query_stride + heads[:, None] * HEAD_DIM + dims[None],
        mask=is_row[:, None] & is_dim[None],
        other=0.0,
    )
    last = tl.minimum(first_query + QUERIES, num_queries) - 1
    end = before + last + 1
    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(before + first_query - window + 1, 0) // KEYS * KEYS
    highest = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, WIDTH], tl.float32)
    for at in range(first_key, end, KEYS):
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
        is_seen = positions[None] <= position[:, None]
        if HAS_WINDOW:
            is_seen &= positions[None] > position[:, None] - window
        scores = tl.where(is_seen, scores, float("-inf"))
        # Finite from the beginning: a row may see none of the first keys of its tile.
        higher = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        decay = tl.exp2(highest - higher)
        total = total * decay + tl.sum(weights, 1)
        value_head_ptr = value_ptr + kv_head * value_head_stride
        values = load_values(value_head_ptr, block, slot, dims, value_block_stride, is_dim, is_key, HEAD_DIM)
        out = out * decay[:, None] + tl.dot(weights.to(values.dtype), values, input_precision="ieee")
        highest = higher
    out = out / tl.where(total == 0, 1.0, total)[:, None]
    tl.store(
        out_ptr + token[:, None] * out_stride + heads[:, None] * HEAD_DIM + dims[None],
        out.to(out_ptr.dtype.element_ty),
        mask=is_row[:, None] & is_dim[None],
    )


def queries_per_tile(group: int, rows: int) -> int:
    """Return how many queries a tile of ``rows`` takes with ``group`` query heads a KV head."""
    return max(1, rows // group)


def plan_tiles(query_start_loc: npt.NDArray[np.int32], queries: int) -> npt.NDArray[np.int32]:
    """Return [num_tiles, 2]: the request of each tile and its first query within it, request after request.

    Args:
        query_start_loc: [num_reqs + 1].
        queries: of one tile.
    """
    counts = np.diff(query_start_loc).astype(np.int64)
    num_tiles = -(-counts // queries)
    request = np.repeat(np.arange(len(counts)), num_tiles)
    within = np.arange(len(request)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)
    return np.stack((request, within * queries), axis=1).astype(np.int32)


def paged_prefill(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    tiles: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    scale: float,
    *,
    window: int = 0,
    soft_cap: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """Attend for all tokens of a step.

    Args:
        query: [num_tokens, num_heads, head_dim]; heads of one token lie together, tokens may lie apart.
        key_cache: [num_blocks, num_kv_heads, head_dim, block_size], with any strides.
        value_cache: [num_blocks, num_kv_heads, block_size, head_dim], slots of one head together.
        block_tables: [num_reqs, max_num_blocks] int32.
        tiles: [num_tiles, 2] int32 of ``plan_tiles`` for ``tile_queries`` queries.
        query_start_loc: [num_reqs + 1] int32.
        seq_lens: [num_reqs] int32, the tokens of this step included.
        scale: factor of the scores.
        window: keys that a query sees, itself included; 0: all.
        soft_cap: scores become ``soft_cap * tanh(score / soft_cap)``; 0: as they are.
        out: where the result goes, as query.
    Returns:
        [num_tokens, num_heads, head_dim].
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[3]
    group, width = num_heads // num_kv_heads, compiled_width(head_dim)
    if out is None:
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    shape = attention_shape(
        "paged_prefill", architecture_of(query.device), width=width, itemsize=key_cache.element_size()
    )
    prefill_tile[(len(tiles), num_kv_heads)](
        query,
        key_cache,
        value_cache,
        block_tables,
        tiles,
        query_start_loc,
        seq_lens,
        out,
        scale * LOG2_E,
        soft_cap * LOG2_E,
        window,
        query.stride(0),
        out.stride(0),
        *key_cache.stride(),
        value_cache.stride(0),
        value_cache.stride(1),
        block_tables.stride(0),
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
    return out


def tile_queries(query: Tensor, key_cache: Tensor) -> int:
    """Return how many queries a tile takes for tensors like these: what ``plan_tiles`` must be given."""
    group = query.shape[1] // key_cache.shape[1]
    return tile_queries_for(group, query.shape[2], key_cache.element_size(), query.device)


def tile_queries_for(group: int, head_dim: int, itemsize: int, device: torch.device) -> int:
    """As ``tile_queries``, for ``group`` query heads a KV head and elements of ``itemsize`` bytes in the cache."""
    width = compiled_width(head_dim)
    shape = attention_shape("paged_prefill", architecture_of(device), width=width, itemsize=itemsize)
    return queries_per_tile(group, max(shape.rows, triton.next_power_of_2(group)))
