from __future__ import annotations

import hashlib
import struct

import numpy as np

from worker_service.block_hashes import BlockHashes

SIZE = 3


def named(*token_ids: int, namespace: bytes = b"") -> list[bytes]:
    """The chain of full blocks of a context, by its definition in docs/protocol.md."""
    parent = hashlib.blake2b(b"maniple-kv-1" + namespace, digest_size=16).digest()
    names = []
    for start in range(0, len(token_ids) - SIZE + 1, SIZE):
        packed = struct.pack(f"<{SIZE}I", *token_ids[start : start + SIZE])
        parent = hashlib.blake2b(parent + packed, digest_size=16).digest()
        names.append(parent)
    return names


def array(*token_ids: int) -> np.ndarray:
    return np.array(token_ids, np.int32)


def test_full_blocks_are_kept_under_their_chain_and_the_tail_goes_first() -> None:
    kept = BlockHashes(SIZE)
    kept.keep(0, [7, 4, 9], array(1, 2, 3, 250000, 5, 6, 7), b"")  # the third block is not full
    first, second = named(1, 2, 3, 250000, 5, 6)
    assert kept.free(0, held=()) == [(4, second), (7, first)]


def test_namespace_is_the_root_of_the_chain() -> None:
    kept = BlockHashes(SIZE)
    kept.keep(0, [7], array(1, 2, 3), b"n" * 16)
    assert kept.free(0, held=()) == [(7, named(1, 2, 3, namespace=b"n" * 16)[0])]


def test_blocks_that_are_held_are_not_told_and_come_last_when_let_go_again() -> None:
    kept = BlockHashes(SIZE)
    kept.keep(0, [1, 2], array(1, 2, 3, 4, 5, 6), b"")
    kept.keep(0, [3], array(9, 9, 9), b"")
    assert [block for block, _ in kept.free(0, held={1})] == [2, 3]
    # A row that shared block 1 and went on in block 5 leaves.
    kept.keep(0, [1, 5], array(1, 2, 3, 8, 8, 8), b"")
    assert kept.free(0, held=()) == [
        (2, named(1, 2, 3, 4, 5, 6)[1]),
        (3, named(9, 9, 9)[0]),
        (5, named(1, 2, 3, 8, 8, 8)[1]),
        (1, named(1, 2, 3)[0]),
    ]


def test_block_that_is_handed_out_is_forgotten_and_no_other() -> None:
    kept = BlockHashes(SIZE)
    kept.keep(0, [1, 2], array(1, 2, 3, 4, 5, 6), b"")
    kept.keep(1, [1], array(1, 2, 3), b"")  # another KV group has blocks of its own
    kept.hand_out(0, [1, 77])
    assert [block for block, _ in kept.free(0, held=())] == [2]
    assert [block for block, _ in kept.free(1, held=())] == [1]
    # Its new contents have another hash, also where the block after it is still known.
    kept.keep(0, [1, 2], array(6, 6, 6, 4, 5, 6), b"")
    assert dict(kept.free(0, held=())) == dict(zip([1, 2], named(6, 6, 6, 4, 5, 6), strict=True))


def test_dropped_blocks_have_no_hash_and_those_after_them_do() -> None:
    kept = BlockHashes(SIZE)
    kept.keep(0, [0, 2], array(1, 2, 3, 4, 5, 6), b"")
    assert kept.free(0, held=()) == [(2, named(1, 2, 3, 4, 5, 6)[1])]


def test_forgotten_is_forgotten() -> None:
    kept = BlockHashes(SIZE)
    kept.keep(0, [1], array(1, 2, 3), b"")
    kept.forget()
    assert len(kept) == 0
