"""Decide how many KV blocks a group gets: the smallest rank decides for all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# More blocks than this hold only prefix cache that nobody asked for, and cost the scheduler memory of its own; unless
# the rows themselves need them.
MAX_AUTO_BLOCKS = 1 << 16
_NULL_BLOCK = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KvMemory:
    """What one rank reports."""

    kv_bytes: int  # free for KV
    block_bytes: int  # one block on this rank
    free_bytes: int | None = None  # there at the most, for who asks for a size of his own; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class KvPlan:
    """The decision. ``num_blocks`` includes the null block; ``shortage`` is a sentence where it cannot work.

    Where a size was asked for, it is the rule that this one breaks.
    """

    num_blocks: int
    bytes_per_rank: int  # on the rank with the largest blocks
    num_tokens: int  # cache capacity of the group
    max_concurrency: float  # requests of full length that fit at once
    limited_by: str  # configured, memory, useful
    shortage: str = ""


def plan_kv_cache(
    ranks: Sequence[KvMemory],
    *,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_kv_blocks: int = 0,
    kv_cache_memory_bytes: int = 0,
) -> KvPlan:
    """Choose the number of blocks.

    Args:
        ranks: one entry a rank.
        block_size: tokens of a block.
        max_model_len: tokens of one request.
        max_num_seqs: rows.
        num_kv_blocks: use so many, the null block included; 0: as memory allows.
        kv_cache_memory_bytes: use so many bytes on each rank; 0: what the profile left.
    """
    blocks_per_request = -(-max_model_len // block_size)
    by_memory = min((kv_cache_memory_bytes or rank.kv_bytes) // max(rank.block_bytes, 1) for rank in ranks)
    useful = max(MAX_AUTO_BLOCKS, max_num_seqs * blocks_per_request + _NULL_BLOCK)
    if num_kv_blocks:
        num_blocks, limited_by = num_kv_blocks, "configured"
    elif kv_cache_memory_bytes:
        num_blocks, limited_by = by_memory, "configured"
    elif by_memory > useful:
        num_blocks, limited_by = useful, "useful"
    else:
        num_blocks, limited_by = by_memory, "memory"
    num_tokens = max(num_blocks - _NULL_BLOCK, 0) * block_size
    return KvPlan(
        num_blocks=num_blocks,
        bytes_per_rank=num_blocks * max(rank.block_bytes for rank in ranks),
        num_tokens=num_tokens,
        max_concurrency=num_tokens / (blocks_per_request * block_size),
        limited_by=limited_by,
        shortage=_shortage(ranks, num_blocks, kv_cache_memory_bytes)
        or _excess(ranks, num_blocks, num_kv_blocks, kv_cache_memory_bytes),
    )


def _shortage(ranks: Sequence[KvMemory], num_blocks: int, kv_cache_memory_bytes: int) -> str:
    if num_blocks > _NULL_BLOCK:
        return ""
    smallest = min(range(len(ranks)), key=lambda rank: ranks[rank].kv_bytes // max(ranks[rank].block_bytes, 1))
    rank = ranks[smallest]
    if kv_cache_memory_bytes:
        return f"must be at least {2 * rank.block_bytes}: two blocks of this model, of {rank.block_bytes} bytes each"
    return (
        f"rank {smallest} has {rank.kv_bytes} bytes left for the KV cache, fewer than two blocks of {rank.block_bytes} "
        "bytes: use a smaller model or max_num_batched_tokens, or free memory"
    )


def _excess(ranks: Sequence[KvMemory], num_blocks: int, num_kv_blocks: int, kv_cache_memory_bytes: int) -> str:
    """Say what fits where more was asked for than a rank's memory holds: it would be found out in the middle of a step.

    Memory of a CPU is taken when a block is first written, and who takes too much is killed.
    """
    if not (num_kv_blocks or kv_cache_memory_bytes):
        return ""
    for rank, memory in enumerate(ranks):
        free_bytes = memory.free_bytes
        if free_bytes is None or num_blocks * memory.block_bytes <= free_bytes:
            continue
        if kv_cache_memory_bytes:
            return f"must be at most the {free_bytes} bytes that are free on rank {rank}"
        fits = free_bytes // memory.block_bytes
        return (
            f"must be at most {fits}: rank {rank} has {free_bytes} bytes free, and a block of this model takes "
            f"{memory.block_bytes}"
        )
    return ""
