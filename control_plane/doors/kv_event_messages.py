"""Write what prefix caches hold in the words of ``smg.grpc.common``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from smg_grpc_proto.generated import common_pb2

from control_plane.kv_event_log import CacheSnapshot, EventBatch
from control_plane.scheduling.block_events import BlockEvent, BlockRemoved, BlockStored, CacheCleared
from service_chassis.protocol.block_hash import unpacked_ids

# Blocks in one message of a snapshot: some 100 KB at 16 tokens each.
_BLOCKS_PER_CHUNK = 1024


def snapshot_messages(snapshot: CacheSnapshot, dp_rank: int, block_size: int) -> Iterator[common_pb2.KvEventBatch]:
    """Yield the parts of a snapshot; their numbers end with its own."""
    blocks = snapshot.blocks
    count = max(1, -(-len(blocks) // _BLOCKS_PER_CHUNK))
    for index in range(count):
        part = blocks[index * _BLOCKS_PER_CHUNK : (index + 1) * _BLOCKS_PER_CHUNK]
        events: list[BlockEvent] = [*([CacheCleared()] if index == 0 else []), *part]
        first = snapshot.sequence - count + 1
        yield common_pb2.KvEventBatch(
            sequence_number=first + index,
            timestamp=snapshot.at,
            events=_events(events, block_size, numbered=False),
            dp_rank=dp_rank,
            snapshot=common_pb2.KvSnapshotChunk(
                index=index,
                count=count,
                blocks=len(blocks),
                # Blocks of an owner before us have names and no tokens: who routes must know that more is cached.
                unknown_before=first if snapshot.num_unknown else 0,
            ),
        )


def batch_message(batch: EventBatch, dp_rank: int, block_size: int) -> common_pb2.KvEventBatch:
    """Return one batch of events."""
    return common_pb2.KvEventBatch(
        sequence_number=batch.sequence,
        timestamp=batch.at,
        events=_events(batch.events, block_size, numbered=True),
        dp_rank=dp_rank,
    )


def _events(events: Sequence[BlockEvent], block_size: int, *, numbered: bool) -> list[common_pb2.KvCacheEvent]:
    """Write events in order; what goes on a chain, and what goes together, is one."""
    written: list[common_pb2.KvCacheEvent] = []
    last: BlockEvent | None = None
    for event in events:
        if isinstance(event, CacheCleared):
            written.append(common_pb2.KvCacheEvent(cleared=common_pb2.KvCacheCleared()))
        elif isinstance(event, BlockRemoved):
            if not isinstance(last, BlockRemoved):
                removed = common_pb2.KvBlocksRemoved(tier=common_pb2.KV_CACHE_TIER_DEVICE)
                written.append(common_pb2.KvCacheEvent(removed=removed))
            written[-1].removed.block_hashes.append(as_int64(event.name))
        else:
            if not (isinstance(last, BlockStored) and event.contents.parent == last.name):
                written.append(common_pb2.KvCacheEvent(stored=_chain_head(event)))
            written[-1].stored.blocks.add(
                block_hash=as_int64(event.name),
                token_ids=unpacked_ids(event.contents.token_ids),
                block_size=block_size,
            )
        last = event
    if numbered:
        for number, event_message in enumerate(written, start=1):
            event_message.event_id = number
    return written


def _chain_head(event: BlockStored) -> common_pb2.KvBlocksStored:
    stored = common_pb2.KvBlocksStored(tier=common_pb2.KV_CACHE_TIER_DEVICE)
    parent, namespace = event.contents.parent, event.contents.cache_namespace
    if parent is not None:
        stored.parent_block_hash = as_int64(parent)
    if namespace:
        # Not the salt itself, which nobody keeps: who compares will not take such blocks for those of other callers.
        stored.cache_salt = namespace.hex()
    return stored


def as_int64(name: bytes) -> int:
    """Return a block's name as this contract has it: its first 8 bytes."""
    return int.from_bytes(name[:8], "little", signed=True)
