"""Count who holds which KV block, and remember what the blocks that nobody holds still contain.

Every block but the null block is in exactly one of three places: *free* (contents unknown), *cached* (held by no row,
contents named by a chain hash, evicted when nothing is free), *in use* (held by one or more rows; may have a name too).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from control_plane.scheduling.block_events import BlockContents, BlockEvent, BlockRemoved, BlockStored, CacheCleared
from service_chassis.ids import BlockId


class _Named(NamedTuple):
    name: bytes  # chain hash
    computed_by: int  # step that computes it
    contents: BlockContents | None  # None: not known


class BlockPool:
    """The blocks of one group. Pure bookkeeping: it does not know rows, steps or policy."""

    def __init__(self, num_blocks: int) -> None:
        """Make a pool of ``num_blocks`` blocks, of which block 0, the null block, is never handed out."""
        assert num_blocks >= 2
        self.num_total = num_blocks - 1
        self._references = [0] * num_blocks  # block id -> rows that hold it
        self._free = [BlockId(block) for block in range(num_blocks - 1, 0, -1)]  # a stack; low ids first
        self._cached: OrderedDict[BlockId, None] = OrderedDict()  # next to be evicted first
        self._by_hash: dict[bytes, BlockId] = {}
        self._named: dict[BlockId, _Named] = {}
        self._events: list[BlockEvent] | None = None  # since they were taken last; None: nobody wants them

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out: free ones, then cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_in_use(self) -> int:
        return self.num_total - self.num_available

    def adopt(
        self, tables: Iterable[Sequence[BlockId]], cached: Iterable[tuple[BlockId, bytes]], computed_by: int
    ) -> None:
        """Take the state that follows from the tables of rows and the names of other blocks. Once, in a new pool.

        Args:
            tables: one for each row.
            cached: (block, chain hash) of blocks in no table, next to be evicted first.
            computed_by: a step that is completed.
        """
        for table in tables:
            for block in table:
                self._references[block] += 1
        for block, name in cached:
            if not self._references[block] and name not in self._by_hash:
                self._by_hash[name] = block
                self._named[block] = _Named(name, computed_by, None)
                self._cached[block] = None
        self._free = [block for block in self._free if not self._references[block] and block not in self._cached]

    def match(self, hashes: Sequence[bytes], completed: int) -> list[BlockId]:
        """Return the blocks that hold the longest known head of a chain and were computed by step ``completed``.

        Takes nothing: the blocks are the caller's only after ``hold``.
        """
        blocks: list[BlockId] = []
        for name in hashes:
            block = self._by_hash.get(name)
            if block is None or self._named[block].computed_by > completed:
                break
            blocks.append(block)
        return blocks

    def num_missing(self, hits: Sequence[BlockId], num_more: int) -> int:
        """Return how many blocks too few there are to hold ``hits`` and ``num_more`` new ones; negative: to spare."""
        num_idle_hits = sum(not self._references[block] for block in hits)
        return num_more + num_idle_hits - self.num_available

    def hold(self, blocks: Iterable[BlockId]) -> None:
        """Add one reference to each block, cached or in use."""
        for block in blocks:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1

    def allocate(self, num_blocks: int) -> list[BlockId]:
        """Hand out blocks with one reference each. The caller has made sure that there are as many."""
        assert num_blocks <= self.num_available, f"{num_blocks} blocks asked, {self.num_available} available"
        taken: list[BlockId] = []
        for _ in range(num_blocks):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
            self._references[block] = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Give back one row's table. Its tail is evicted before its head, since a chain is hit from the head."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._named:
                self._cached[block] = None
            else:
                self._free.append(block)

    def register(self, block: BlockId, name: bytes, computed_by: int, contents: BlockContents | None = None) -> None:
        """Name the contents that ``block``, which is in use, has once step ``computed_by`` is completed.

        The first block of a name keeps it: two rows that compute the same tokens at once leave one cached block.
        """
        if name in self._by_hash or block in self._named:
            return
        self._by_hash[name] = block
        self._named[block] = _Named(name, computed_by, contents)
        if self._events is not None and contents is not None:
            self._events.append(BlockStored(name, contents))

    def forget_cached(self) -> None:
        """Forget the contents of all blocks that no row holds."""
        for block in self._cached:
            self._forget(block)
        self._free.extend(self._cached)
        self._cached.clear()

    def clear(self) -> None:
        """Forget the contents of all blocks: the memory goes. No row holds one."""
        assert self.num_available == self.num_total, "a row holds blocks"
        events, self._events = self._events, None
        self.forget_cached()
        self._events = events
        if events is not None:
            events.append(CacheCleared())

    def _forget(self, block: BlockId) -> None:
        name, _, contents = self._named.pop(block)
        del self._by_hash[name]
        # Nobody was told of a block of unknown contents.
        if self._events is not None and contents is not None:
            self._events.append(BlockRemoved(name))

    # --- for those who follow what is cached

    def record_events(self, wanted: bool) -> None:
        """Keep events from now on, or no more."""
        self._events = [] if wanted else None

    def take_events(self) -> list[BlockEvent]:
        """Return what happened since the last call, in order."""
        if not self._events:
            return []
        taken, self._events = self._events, []
        return taken

    def stored(self) -> tuple[list[BlockStored], int]:
        """Return every named block, parents before children, and how many there are of unknown contents. O(named)."""
        # Where a parent was evicted and came back, it got its name after its children: they wait for it.
        late = {name for name, _, contents in self._named.values() if contents is not None}
        orphans: dict[bytes, list[BlockStored]] = {}  # name of the parent -> children
        ordered: list[BlockStored] = []
        for name, _, contents in self._named.values():
            if contents is None:
                continue
            if contents.parent in late:
                orphans.setdefault(contents.parent, []).append(BlockStored(name, contents))
                continue
            found = [BlockStored(name, contents)]
            for stored in found:  # grows by the children of what is in it
                late.discard(stored.name)
                found += orphans.pop(stored.name, ())
            ordered += found
        return ordered, len(self._named) - len(ordered)

    def check_integrity(self, tables: Iterable[Sequence[BlockId]]) -> None:
        """Raise AssertionError unless the pool agrees with the tables of all rows."""
        references = [0] * len(self._references)
        for table in tables:
            for block in table:
                references[block] += 1
        assert references == self._references, "references differ from the tables"
        assert not references[0], "the null block is in a table"
        in_use = {BlockId(block) for block, count in enumerate(references) if count}
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free), "a block is free twice"
        assert len(free | cached | in_use) == len(free) + len(cached) + len(in_use), "a block is in two places"
        assert len(free) + len(cached) + len(in_use) == self.num_total, "free + cached + in use is not the total"
        assert cached <= self._named.keys(), "a cached block has no name"
        assert not free & self._named.keys(), "a free block has a name"
        assert {named.name: block for block, named in self._named.items()} == self._by_hash, "names and blocks differ"
