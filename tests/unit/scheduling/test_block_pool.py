import random

import pytest

from control_plane.scheduling.block_pool import BlockPool

NAMES = [bytes([number]) * 16 for number in range(50)]


def test_pool_never_hands_out_the_null_block_when_it_is_emptied():
    pool = BlockPool(9)
    assert sorted(pool.allocate(8)) == list(range(1, 9))
    assert (pool.num_available, pool.num_in_use) == (0, 8)


def test_pool_refuses_more_blocks_than_it_has():
    pool = BlockPool(4)
    with pytest.raises(AssertionError, match="4 blocks asked, 3 available"):
        pool.allocate(4)


def test_pool_hits_only_the_head_of_a_chain_that_is_computed():
    pool = BlockPool(9)
    blocks = pool.allocate(3)
    for block, name, step in zip(blocks, NAMES, (4, 5, 6), strict=False):
        pool.register(block, name, step)
    assert pool.match(NAMES[:3], completed=3) == []
    assert pool.match(NAMES[:3], completed=5) == blocks[:2]
    assert pool.match([NAMES[7], *NAMES[:3]], completed=9) == []


def test_pool_keeps_what_it_knows_of_released_blocks_until_they_are_needed():
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    for block, name in zip(blocks[:2], NAMES, strict=False):
        pool.register(block, name, 1)
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached, pool.num_in_use) == (2, 2, 0)
    hits = pool.match(NAMES[:2], completed=1)
    assert hits == blocks[:2]
    pool.hold(hits)
    assert (pool.num_free, pool.num_cached, pool.num_in_use) == (2, 0, 2)
    pool.check_integrity([hits])


def test_pool_evicts_the_least_recently_released_chain_from_its_tail():
    pool = BlockPool(7)
    old, new = pool.allocate(3), pool.allocate(3)
    for block, name in zip(old + new, NAMES, strict=False):
        pool.register(block, name, 1)
    pool.release(old)
    pool.release(new)
    assert pool.allocate(1) == old[2:]
    assert pool.match(NAMES[:3], 1) == old[:2]  # the head is still there
    assert pool.allocate(3) == [old[1], old[0], new[2]]
    assert pool.match(NAMES[3:6], 1) == new[:2]


def test_pool_moves_a_chain_to_the_back_when_it_was_hit():
    pool = BlockPool(5)
    first, second = pool.allocate(2), pool.allocate(2)
    for block, name in zip(first + second, NAMES, strict=False):
        pool.register(block, name, 1)
    pool.release(first)
    pool.release(second)
    pool.hold(first)
    pool.release(first)
    assert pool.allocate(2) == [second[1], second[0]]


def test_pool_counts_references_when_rows_share_blocks():
    pool = BlockPool(5)
    shared = pool.allocate(2)
    pool.hold(shared)
    pool.release(shared)
    assert pool.num_in_use == 2
    pool.check_integrity([shared])
    pool.release(shared)
    assert pool.num_in_use == 0


def test_pool_keeps_the_first_block_of_a_name_when_two_rows_compute_the_same():
    pool = BlockPool(5)
    (first,), (second,) = pool.allocate(1), pool.allocate(1)
    pool.register(first, NAMES[0], 1)
    pool.register(second, NAMES[0], 1)
    pool.release([second])
    assert (pool.num_free, pool.num_cached) == (3, 0)
    assert pool.match(NAMES[:1], 1) == [first]


def test_pool_counts_an_idle_hit_as_taken_when_it_says_what_is_missing():
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    for block, name in zip(blocks, NAMES, strict=False):
        pool.register(block, name, 1)
    pool.release(blocks)
    assert pool.num_missing(blocks[:2], 2) == 0
    assert pool.num_missing(blocks[:2], 3) == 1
    pool.hold(blocks[:2])  # a hit that somebody holds costs nothing
    assert pool.num_missing(blocks[:2], 2) == 0


def test_pool_forgets_only_blocks_that_nobody_holds():
    pool = BlockPool(5)
    held, idle = pool.allocate(1), pool.allocate(1)
    pool.register(held[0], NAMES[0], 1)
    pool.register(idle[0], NAMES[1], 1)
    pool.release(idle)
    pool.forget_cached()
    assert (pool.num_free, pool.num_cached) == (3, 0)
    assert pool.match([NAMES[0]], 1) == held
    assert pool.match([NAMES[1]], 1) == []


def test_pool_keeps_its_invariants_when_operations_are_random():
    rng = random.Random(7)
    pool = BlockPool(24)
    tables: list[list[int]] = []
    for step in range(4000):
        if rng.random() < 0.5 and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        else:
            chain = NAMES[rng.randrange(3) * 10 :][: rng.randrange(1, 9)]
            hits = pool.match(chain, completed=step - 1)
            more = rng.randrange(1, 4)
            if pool.num_missing(hits, more) <= 0:
                pool.hold(hits)
                fresh = pool.allocate(more)
                for block, name in zip(fresh, chain[len(hits) :], strict=False):
                    pool.register(block, name, step)
                tables.append(hits + fresh)
        pool.check_integrity(tables)
        assert pool.num_free + pool.num_cached + pool.num_in_use == 23
