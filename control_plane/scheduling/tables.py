"""Give samples their block tables, and keep the names of what the blocks contain.

This is the pool seen from a sample: how many blocks it needs, which of them exist already, what they will hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from control_plane.scheduling.block_events import BlockContents
from control_plane.scheduling.block_pool import BlockPool
from control_plane.scheduling.plan import BlockCopy
from control_plane.scheduling.request import Sample
from service_chassis.ids import BlockId, Step
from service_chassis.protocol.block_hash import block_hash, packed_block_hash, packed_ids, root_hash


@dataclass(frozen=True, slots=True)
class Place:
    """Room for a sample: the blocks of its whole prefill, and how much of it is computed already."""

    block_ids: list[BlockId]
    num_computed_tokens: int
    num_registered: int  # leading blocks whose contents the pool knows
    parent: Sample | None = None  # the sample it forks from
    block_copies: tuple[BlockCopy, ...] = ()


class Tables:
    """The block tables of all samples of a group."""

    def __init__(self, num_blocks: int, block_size: int, *, caching: bool) -> None:
        """Make empty tables over ``num_blocks`` blocks, the null block included."""
        self.pool = BlockPool(num_blocks)
        self.caching = caching
        self._block_size = block_size

    def find_place(self, sample: Sample, parent: Sample | None, *, spare: int, completed: int) -> Place | None:
        """Take the blocks that ``sample`` needs to compute all its known tokens; None, and nothing taken, if too few.

        Args:
            sample: without blocks.
            parent: a sample of the same request, past its prompt, whose blocks it shares.
            spare: blocks that must stay available beside those taken.
            completed: the last step whose result is known; a block that a later one computes is no hit yet.
        """
        num_known = sample.num_prefill_tokens
        shared = self._shared(sample, parent, completed)
        num_more = math.ceil(num_known / self._block_size) - len(shared)
        if self.pool.num_missing(shared, num_more + spare) > 0:
            return None
        self.pool.hold(shared)
        block_ids = shared + self.pool.allocate(num_more)
        if parent is None:
            return Place(block_ids, len(shared) * self._block_size, len(shared))
        # A fork computes the last token of the prompt once more, for a sample of its own, in a block of its own; what
        # precedes that token in its block is copied.
        sample.hashes = parent.hashes[: num_known // self._block_size]
        last = len(shared)
        copies = (BlockCopy(parent.block_ids[last], block_ids[last]),) if (num_known - 1) % self._block_size else ()
        return Place(block_ids, num_known - 1, last, parent, copies)

    def num_cached_tokens(self, token_ids: Sequence[int], cache_namespace: bytes, completed: int) -> int:
        """Return how many tokens a request with these would find computed by step ``completed``. Takes nothing."""
        block_size, num_found = self._block_size, 0
        name = root_hash(cache_namespace)
        # As in `_shared`: the last token is always computed.
        while self.caching and num_found + block_size < len(token_ids):
            name = block_hash(name, token_ids[num_found : num_found + block_size])
            if not self.pool.match((name,), completed):
                break
            num_found += block_size
        return num_found

    def grow(self, sample: Sample) -> tuple[BlockId, ...]:
        """Add one block to a sample's table. The caller has made sure that one is available."""
        blocks = self.pool.allocate(1)
        sample.block_ids += blocks
        return tuple(blocks)

    def release(self, sample: Sample) -> None:
        """Take a sample's table."""
        self.pool.release(sample.block_ids)
        sample.block_ids = []
        sample.num_registered = 0

    def note_computed(self, sample: Sample, num_computed_tokens: int, step: Step) -> None:
        """``step`` computes the sample up to ``num_computed_tokens``: name the blocks that it fills.

        Blocks that hold a token which is still on its way are named later.
        """
        if not self.caching:
            return
        num_full = min(num_computed_tokens, len(sample.token_ids)) // self._block_size
        first, hashes, namespace = sample.num_registered, sample.hashes, sample.request.cache_namespace
        if num_full <= first:
            return
        self._name_blocks(sample, first)
        for index, token_ids in enumerate(self._packed(sample, first, num_full), first):
            parent = hashes[index - 1] if index else None
            if index == len(hashes):  # else it was named when the cache was looked up
                hashes.append(packed_block_hash(parent or root_hash(namespace), token_ids))
            contents = BlockContents(parent, token_ids, namespace)
            self.pool.register(sample.block_ids[index], hashes[index], step, contents)
        sample.num_registered = num_full

    def _packed(self, sample: Sample, first: int, end: int) -> list[bytes]:
        """Return the token ids of blocks [first, end) of a sample, packed as block hashes take them."""
        if first >= end:
            return []
        packed = packed_ids(sample.token_ids[first * self._block_size : end * self._block_size])
        size = len(packed) // (end - first)
        return [packed[start : start + size] for start in range(0, len(packed), size)]

    def check_integrity(self, holders: Iterable[Sample]) -> None:
        """Raise AssertionError unless the pool agrees with the tables of ``holders``, who are all that have one."""
        self.pool.check_integrity([sample.block_ids for sample in holders])

    def _shared(self, sample: Sample, parent: Sample | None, completed: int) -> list[BlockId]:
        """Return existing blocks at the head of what will be the sample's table. Takes nothing."""
        # At least the last known token is computed, since its logits are what is sampled from.
        num_full = (sample.num_prefill_tokens - 1) // self._block_size
        if parent is not None:
            return parent.block_ids[:num_full]
        if not self.caching or sample.request.skip_reading_prefix_cache:
            return []
        num_full = min(num_full, len(sample.token_ids) // self._block_size)
        self._name_blocks(sample, num_full)
        return self.pool.match(sample.hashes[:num_full], completed)

    def _name_blocks(self, sample: Sample, num_blocks: int) -> None:
        """Compute the chain hashes of a sample's first ``num_blocks`` blocks, all of known tokens."""
        hashes = sample.hashes
        parent = hashes[-1] if hashes else root_hash(sample.request.cache_namespace)
        for token_ids in self._packed(sample, len(hashes), num_blocks):
            parent = packed_block_hash(parent, token_ids)
            hashes.append(parent)
