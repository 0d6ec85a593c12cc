from __future__ import annotations

from control_plane.group.kv_sizing import MAX_AUTO_BLOCKS, KvMemory, plan_kv_cache

GIB = 1 << 30


def plan(*ranks: KvMemory, **choice: int):  # type: ignore[no-untyped-def]
    return plan_kv_cache(ranks, **({"block_size": 16, "max_model_len": 1000, "max_num_seqs": 8} | choice))


def test_smallest_rank_decides() -> None:
    two = plan(KvMemory(kv_bytes=2 * GIB, block_bytes=1 << 20), KvMemory(kv_bytes=GIB, block_bytes=1 << 20))
    assert (two.num_blocks, two.limited_by) == (1024, "memory")
    assert two.num_tokens == 1023 * 16  # the null block holds nothing
    assert two.bytes_per_rank == GIB
    # 1000 tokens take 63 blocks
    assert round(two.max_concurrency, 6) == round(1023 / 63, 6)


def test_rank_with_larger_blocks_decides() -> None:
    two = plan(KvMemory(kv_bytes=GIB, block_bytes=1 << 20), KvMemory(kv_bytes=GIB, block_bytes=1 << 21))
    assert (two.num_blocks, two.bytes_per_rank) == (512, GIB)


def test_configured_blocks_and_bytes_win_over_the_profile() -> None:
    rank = KvMemory(kv_bytes=GIB, block_bytes=1 << 20)
    assert plan(rank, num_kv_blocks=7).num_blocks == 7
    assert plan(rank, kv_cache_memory_bytes=100 << 20).num_blocks == 100


def test_more_than_a_rank_has_free_is_refused_with_what_fits() -> None:
    ranks = [KvMemory(kv_bytes=GIB, block_bytes=1 << 20, free_bytes=free) for free in (3 * GIB, 2 * GIB)]
    assert not plan(*ranks, num_kv_blocks=2048).shortage  # more than the profile offers, and still there
    assert not plan(*ranks, kv_cache_memory_bytes=2 * GIB).shortage
    said = f"rank 1 has {2 * GIB} bytes free, and a block of this model takes {1 << 20}"
    assert plan(*ranks, num_kv_blocks=2049).shortage == f"must be at most 2048: {said}"
    too_many = plan(*ranks, kv_cache_memory_bytes=3 * GIB).shortage
    assert too_many == f"must be at most the {2 * GIB} bytes that are free on rank 1"
    assert not plan(KvMemory(kv_bytes=GIB, block_bytes=1 << 20), num_kv_blocks=1 << 30).shortage  # it did not say


def test_blocks_are_bounded_when_they_are_tiny() -> None:
    rank = KvMemory(kv_bytes=64 * GIB, block_bytes=128)
    assert (plan(rank).num_blocks, plan(rank).limited_by) == (MAX_AUTO_BLOCKS, "useful")
    # but never below what the rows need: 8 rows of 16 M tokens
    assert plan(rank, max_model_len=1 << 24).num_blocks == 8 * (1 << 20) + 1


def test_shortage_names_the_rank_when_no_usable_block_fits() -> None:
    short = plan(KvMemory(kv_bytes=GIB, block_bytes=1 << 20), KvMemory(kv_bytes=1 << 20, block_bytes=1 << 20))
    assert short.num_blocks == 1
    assert "rank 1 has 1048576 bytes" in short.shortage
    assert (
        "must be at least 2097152: two blocks of this model"
        in plan(KvMemory(kv_bytes=GIB, block_bytes=1 << 20), kv_cache_memory_bytes=1000).shortage
    )
