"""Attend to keys and values that lie in blocks: decode, prefill and any mix, causal, grouped heads, sliding window.

For the token at position p of a request, head h, KV head h // (num_heads / num_kv_heads):
``out = sum_j softmax_j(cap(scale * q . k_j)) v_j`` over the positions j of its request with ``max(0, p - window + 1) <=
j <= p``, where position j lies in block ``block_table[j // block_size]`` at offset ``j % block_size``, and
``cap(s) = c * tanh(s / c)`` where scores have a soft cap c.

Keys are stored with the head dimension outermost, [num_blocks, num_kv_heads, head_dim, block_size]: the scores of the
16 keys of a block are then one vector that is accumulated over the head dimension, with no sum across lanes.

Source: Kwon et al. 2023 (paged attention), Milakov and Gimelshein 2018 (online softmax). Behaviour only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from maniple_kernels.backend import fits_cpu_kernels, note_reference
from maniple_kernels.kv_store import store_kv

# Queries of one tile, for whose rows each span of keys is laid out once; fewer where threads would go without a tile.
_TILE_QUERIES, _FEW_QUERIES = 32, 8
_TILES_PER_THREAD = 4
LOG2_E = 1.4426950408889634


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """Where the tokens of one step lie. Host arrays, valid until the next step; shared by all layers."""

    block_tables: npt.NDArray[np.int32]  # [num_reqs, max_num_blocks]
    query_start_loc: npt.NDArray[np.int32]  # [num_reqs + 1]
    seq_lens: npt.NDArray[np.int32]  # [num_reqs], the tokens of this step included
    tiles: npt.NDArray[np.int64]  # [num_tiles, 4]: request, first token, tokens, position of the first
    num_pairs: int  # of a query and a key, about
    # Tokens whose hidden states are looked at after the last layer, [num_wanted], in order; None: all.
    wanted: npt.NDArray[np.int64] | None = None

    def wanted_tiles(self) -> npt.NDArray[np.int64]:
        """Return ``tiles`` of the wanted tokens alone, each in one of its own."""
        assert self.wanted is not None
        request = np.searchsorted(self.query_start_loc, self.wanted, side="right") - 1
        behind = self.query_start_loc[1:][request] - self.wanted  # tokens from it on
        tiles = np.empty((len(self.wanted), 4), np.int64)
        tiles[:, 0], tiles[:, 1], tiles[:, 2], tiles[:, 3] = request, self.wanted, 1, self.seq_lens[request] - behind
        return tiles

    def store(self, keys: Tensor, values: Tensor, slots: Tensor, kv: tuple[Tensor, Tensor]) -> None:
        """As ``store_kv``."""
        store_kv(keys, values, slots, *kv)

    def attend(
        self,
        query: Tensor,
        kv: tuple[Tensor, Tensor],
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        """As ``paged_attention``; into ``out`` where it is given, contiguous and of the shape of ``query``."""
        attended = paged_attention(query, *kv, self, scale, window, soft_cap)
        return attended if out is None else out.copy_(attended)


def plan_attention(
    block_tables: npt.NDArray[np.int32],
    query_start_loc: npt.NDArray[np.int32],
    seq_lens: npt.NDArray[np.int32],
    num_threads: int,
    wanted: npt.NDArray[np.int64] | None = None,
) -> AttentionPlan:
    """Cut the step into tiles, dealt out so that contiguous shares of them take the threads equally long."""
    tiles = _cut(query_start_loc, seq_lens, num_threads)
    costs = tiles[:, 2] * (tiles[:, 3] + tiles[:, 2])
    if num_threads > 1 and len(tiles) > 1:
        costliest_first = np.argsort(-costs, kind="stable")
        tiles = tiles[np.concatenate([costliest_first[thread::num_threads] for thread in range(num_threads)])]
    return AttentionPlan(
        block_tables=block_tables,
        query_start_loc=query_start_loc,
        seq_lens=seq_lens,
        tiles=tiles,
        num_pairs=int(costs.sum()),
        wanted=wanted,
    )


def _cut(
    query_start_loc: npt.NDArray[np.int32], seq_lens: npt.NDArray[np.int32], num_threads: int
) -> npt.NDArray[np.int64]:
    """Return ``tiles`` of a step in the order of its tokens."""
    counts = np.diff(query_start_loc).astype(np.int64)
    if (counts == 1).all():  # nothing but decodes, as in most steps
        tiles = np.ones((len(counts), 4), np.int64)
        tiles[:, 0] = tiles[:, 1] = query_start_loc[:-1]
        tiles[:, 3] = seq_lens - 1
        return tiles
    are_many = int((counts // _TILE_QUERIES).sum()) >= _TILES_PER_THREAD * num_threads
    tile_queries = _TILE_QUERIES if are_many else _FEW_QUERIES
    num_tiles = -(-counts // tile_queries)
    request = np.repeat(np.arange(len(counts)), num_tiles)
    within = (np.arange(len(request)) - np.repeat(np.cumsum(num_tiles) - num_tiles, num_tiles)) * tile_queries
    tiles = np.empty((len(request), 4), np.int64)
    tiles[:, 0] = request
    tiles[:, 1] = query_start_loc[:-1][request] + within
    tiles[:, 2] = np.minimum(tile_queries, counts[request] - within)
    tiles[:, 3] = (seq_lens - counts)[request] + within
    return tiles


def paged_attention_reference(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
) -> Tensor:
    """As ``paged_attention``, request by request: gather, then torch's attention."""
    block_size = key_cache.shape[3]
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    for index, seq_len in enumerate(plan.seq_lens.tolist()):
        start, end = plan.query_start_loc[index : index + 2].tolist()
        num_queries = end - start
        blocks = torch.from_numpy(plan.block_tables[index, : -(-seq_len // block_size)].astype(np.int64))
        blocks = blocks.to(query.device)
        keys = key_cache[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :seq_len]  # [num_kv_heads, seq_len, head_dim]
        values = value_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :seq_len]
        position = torch.arange(seq_len - num_queries, seq_len, device=query.device)[:, None]
        visible = torch.arange(seq_len, device=query.device)[None] <= position
        if window > 0:
            visible &= torch.arange(seq_len, device=query.device)[None] > position - window
        if soft_cap > 0:
            out[start:end] = _attend_capped(query[start:end], keys, values, visible, scale, soft_cap)
            continue
        heads = functional.scaled_dot_product_attention(
            query[start:end].transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=visible,
            scale=scale,
            enable_gqa=True,
        )
        out[start:end] = heads[0].transpose(0, 1)
    return out


def _attend_capped(
    query: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float, soft_cap: float
) -> Tensor:
    """Return [num_queries, num_heads, head_dim]; torch's attention has no cap."""
    group = query.shape[1] // keys.shape[0]
    # [num_kv_heads, group, num_queries, head_dim]
    grouped = query.transpose(0, 1).reshape(keys.shape[0], group, len(query), -1).float()
    scores = grouped @ keys.float().transpose(1, 2)[:, None] * scale
    scores = (soft_cap * torch.tanh(scores / soft_cap)).masked_fill(~visible, -math.inf)
    attended = scores.softmax(dim=-1) @ values.float()[:, None]
    return attended.flatten(0, 1).transpose(0, 1).to(query.dtype)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> Tensor:
    """Attend for all tokens of a step; their own keys and values are in the cache already.

    Args:
        query: [num_tokens, num_heads, head_dim]; heads of one token lie together, tokens may lie apart.
        key_cache: [num_blocks, num_kv_heads, head_dim, block_size], contiguous.
        value_cache: [num_blocks, num_kv_heads, block_size, head_dim], contiguous.
        plan: of this step.
        scale: factor of the scores.
        window: keys that a token sees, itself included; 0: all.
        soft_cap: of the scores; 0: none. The kernel for the CPU has none.
    Returns:
        [num_tokens, num_heads, head_dim], a new tensor.
    """
    _, num_kv_heads, head_dim, block_size = key_cache.shape
    if soft_cap > 0 or not fits_cpu_kernels(query, head_dim, block_size):
        note_reference("paged_attention", query.device, query.dtype)
        return paged_attention_reference(query, key_cache, value_cache, plan, scale, window, soft_cap)
    from maniple_kernels.cpu.paged_attention import attend_addresses, attend_tiles
    from maniple_kernels.cpu.simd import flat, flat_span
    from maniple_kernels.cpu.threads import use_threads

    out = torch.empty(query.shape, dtype=query.dtype)
    num_threads = use_threads(plan.num_pairs * query.shape[1] * head_dim)
    queries, keys, attended = flat_span(query), flat(key_cache), flat(out)
    attend_tiles(
        queries,
        keys,
        flat(value_cache),
        plan.block_tables,
        plan.tiles,
        (num_kv_heads, query.shape[1] // num_kv_heads, head_dim, block_size, query.stride(0)),
        np.float32(scale * LOG2_E),
        window,
        attended,
        attend_addresses(queries.dtype, keys.dtype, attended.dtype),
        num_threads,
    )
    return out


def attention_scale(head_dim: int) -> float:
    """Return the usual scale of the scores."""
    return 1.0 / math.sqrt(head_dim)
