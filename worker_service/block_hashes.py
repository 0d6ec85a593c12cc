"""Remember what the KV blocks of rows that left still contain, by their chain hashes (PROTOCOL B9).

No hash travels per step: both ends can compute it from tokens. A worker keeps it from the moment a row lets a block go
until the block is handed out again, so that an adopter finds the prefix cache where the dead owner left it. Blocks that
live rows hold are not here, or not to be relied on: their hashes follow from those rows' tokens and tables.

Pure; used by the event loop alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from service_chassis.protocol.block_hash import block_hash, root_hash
from worker_service.step_work import Int32Array


class BlockHashes:
    """Chain hashes by KV group and block, the next to be evicted first."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kept: dict[tuple[int, int], bytes] = {}  # (kv_group, block id) -> hash, in the order they were let go

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, kv_group: int, table: Sequence[int], token_ids: Int32Array, namespace: bytes) -> None:
        """Keep the hashes of the full blocks of a row that leaves or loses its blocks.

        The tail of a table is let go before its head, since a chain is hit from the head.

        Args:
            kv_group: of the table.
            table: block ids in order; the null block where they were dropped.
            token_ids: those whose KV is in the cache, from position 0 on.
            namespace: the row's.
        """
        size, kept = self._block_size, self._kept
        num_full = min(len(table), len(token_ids) // size)
        hashes: list[bytes] = []
        # A head that is shared with a row that left before has its hashes already.
        for block in table[:num_full]:
            known = kept.get((kv_group, block))
            if known is None:
                break
            hashes.append(known)
        parent = hashes[-1] if hashes else root_hash(namespace)
        for start in range(len(hashes) * size, num_full * size, size):
            parent = block_hash(parent, token_ids[start : start + size].tolist())
            hashes.append(parent)
        for index in reversed(range(num_full)):
            if table[index]:
                place = kv_group, table[index]
                kept.pop(place, None)  # held and let go again: it goes to the end
                kept[place] = hashes[index]

    def hand_out(self, kv_group: int, block_ids: Iterable[int]) -> None:
        """Forget what these blocks contained: they are about to be written."""
        for block in block_ids:
            self._kept.pop((kv_group, block), None)

    def forget(self) -> None:
        """Forget all."""
        self._kept.clear()

    def free(self, kv_group: int, held: Collection[int]) -> list[tuple[int, bytes]]:
        """Return (block id, hash) of the blocks that no live row holds, the next to be evicted first."""
        return [(block, name) for (group, block), name in self._kept.items() if group == kv_group and block not in held]
