"""Read a Snapshot: the whole batch state of one rank, as plain values (PROTOCOL C5)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import Enum

from google.protobuf.message import Message

from maniple.v1 import sampling_pb2, worker_pb2
from maniple.v1.scheduler_delta_pb2 import RowFinished, RowLogprobs
from service_chassis.ids import BlockId, ReqIndex, RequestId, RowKey
from service_chassis.protocol.block_hash import HASH_BYTES
from service_chassis.protocol.logprobs import Logprobs


class SnapshotUnreadable(ValueError):
    """A snapshot that no rank of ours sends."""


class RowStanding(Enum):
    """What a row is doing."""

    PREFILL = worker_pb2.SnapshotResponse.ROW_STATE_PREFILL
    DECODE = worker_pb2.SnapshotResponse.ROW_STATE_DECODE
    PREEMPTED = worker_pb2.SnapshotResponse.ROW_STATE_PREEMPTED


class LeaveReason(Enum):
    """Why a row left."""

    UNKNOWN = RowFinished.REASON_UNSPECIFIED
    STOP = RowFinished.REASON_STOP
    LENGTH = RowFinished.REASON_LENGTH
    ABORT = RowFinished.REASON_ABORT
    DEADLINE = RowFinished.REASON_DEADLINE


@dataclass(slots=True)
class KeptLogprobs:
    """What is kept of a row's log-probabilities; complete once the next row or tombstone has come."""

    output: Logprobs | None = None  # a position a token, where asked for, unless they were too many to be kept
    prompt: Logprobs | None = None  # from the second token on; None also where another row of the request has them

    def take(self, part: RowLogprobs) -> None:
        """Add what a message says. Raises ``SnapshotUnreadable``."""
        try:
            if part.HasField("sampled"):
                self.output = _joined(self.output, Logprobs.from_message(part.sampled))
            if part.HasField("prompt"):
                self.prompt = _joined(self.prompt, Logprobs.from_message(part.prompt))
        except ValueError as error:
            raise SnapshotUnreadable(f"log-probabilities: {error}") from None


def _joined(before: Logprobs | None, more: Logprobs) -> Logprobs:
    if before is None:
        return more
    if before.width != more.width:  # which shows only where a position says something
        if not any(before.ranks):
            before = Logprobs(more.width, num_unknown=len(before))
        elif not any(more.ranks):
            more = Logprobs(before.width, num_unknown=len(more))
        else:
            raise ValueError(f"positions of {before.width} entries, then of {more.width}")
    before.extend(more)
    return before


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveRow:
    """A row in the batch. Tokens and blob are the client's: they are left out of what is printed."""

    req_index: ReqIndex
    row_key: RowKey
    request_id: RequestId
    sample_index: int
    n: int
    standing: RowStanding
    token_ids: tuple[int, ...]  # all known: what was sampled past a stop is among them
    num_prompt_tokens: int
    num_cached_tokens: int  # found in the prefix cache when it entered
    num_computed_tokens: int
    block_ids: tuple[BlockId, ...]
    sampling: sampling_pb2.RowSampling
    deadline_s: float | None  # left now
    age_s: float
    cache_namespace: bytes
    control_blob: bytes
    logprobs: KeptLogprobs = field(default_factory=KeptLogprobs)
    pools: bool = False  # it ends with a vector
    is_void: bool = False  # its mask died: what it computed past its known tokens is padding

    def __repr__(self) -> str:
        return f"LiveRow({self.req_index}, {self.request_id!r}, {self.sample_index}, {self.standing.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuriedRow:
    """A row that left."""

    request_id: RequestId
    sample_index: int
    token_ids: tuple[int, ...]  # those that count
    num_prompt_tokens: int
    reason: LeaveReason
    age_s: float
    control_blob: bytes
    logprobs: KeptLogprobs = field(default_factory=KeptLogprobs)

    def __repr__(self) -> str:
        return f"BuriedRow({self.request_id!r}, {self.sample_index}, {self.reason.name})"


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSnapshot:
    """A batch after the step that was completed last."""

    step: int
    state_digest: int
    token_digest: int
    rows: tuple[LiveRow, ...]
    buried: tuple[BuriedRow, ...]  # oldest first
    cached: tuple[tuple[BlockId, bytes], ...]  # blocks that no row holds, with chain hashes; evicted first comes first


async def read_snapshot(parts: AsyncIterator[Message]) -> BatchSnapshot:
    """Collect the parts of a snapshot.

    Raises:
        SnapshotUnreadable: something in it cannot be.
        Whatever the transport raises.
    """
    header: worker_pb2.SnapshotResponse.Header | None = None
    rows: list[LiveRow] = []
    buried: list[BuriedRow] = []
    cached: list[tuple[BlockId, bytes]] = []
    logprobs = KeptLogprobs()  # of whichever came last
    async for part in parts:
        assert isinstance(part, worker_pb2.SnapshotResponse)
        which = part.WhichOneof("part")
        if (header is None) != (which == "header"):
            raise SnapshotUnreadable("a snapshot has one header, and it comes first")
        if which == "header":
            header = part.header
        elif which == "row":
            rows.append(_live_row(part.row))
            logprobs = rows[-1].logprobs
            logprobs.take(part.row.logprobs)
        elif which == "tombstone":
            buried.append(_buried_row(part.tombstone))
            logprobs = buried[-1].logprobs
            logprobs.take(part.tombstone.logprobs)
        elif which == "more_logprobs":
            logprobs.take(part.more_logprobs)
        elif which == "block_hashes":
            cached += _cached(part.block_hashes)
    if header is None:
        raise SnapshotUnreadable("the snapshot is empty")
    return BatchSnapshot(
        step=header.step,
        state_digest=header.state_digest,
        token_digest=header.token_digest,
        rows=tuple(rows),
        buried=tuple(buried),
        cached=tuple(cached),
    )


def _live_row(row: worker_pb2.SnapshotResponse.Row) -> LiveRow:
    request = row.request
    try:
        standing = RowStanding(row.state)
    except ValueError:
        raise SnapshotUnreadable(f"row {request.req_index} is in state {row.state}") from None
    if any(change.kv_group or change.WhichOneof("change") != "replace" for change in request.blocks):
        raise SnapshotUnreadable(f"row {request.req_index} has tables of several KV groups")
    return LiveRow(
        req_index=ReqIndex(request.req_index),
        row_key=RowKey(request.row_key),
        request_id=RequestId(request.request_id),
        sample_index=request.sample_index,
        n=request.n,
        standing=standing,
        token_ids=tuple(request.token_ids),
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_computed_tokens,
        num_computed_tokens=row.num_computed_tokens,
        is_void=row.mask_void,
        block_ids=tuple(BlockId(block) for change in request.blocks for block in change.replace.ids),
        sampling=request.sampling,
        deadline_s=request.deadline_ms / 1000 - row.age_s if request.deadline_ms else None,
        age_s=row.age_s,
        cache_namespace=request.cache_namespace,
        control_blob=request.control_blob,
        pools=request.HasField("pooling"),
    )


def _buried_row(stone: worker_pb2.SnapshotResponse.Tombstone) -> BuriedRow:
    try:
        reason = LeaveReason(stone.reason)
    except ValueError:  # of a later release
        reason = LeaveReason.UNKNOWN
    return BuriedRow(
        request_id=RequestId(stone.request_id),
        sample_index=stone.sample_index,
        token_ids=tuple(stone.token_ids),
        num_prompt_tokens=stone.num_prompt_tokens,
        reason=reason,
        age_s=stone.age_s,
        control_blob=stone.control_blob,
    )


def _cached(part: worker_pb2.SnapshotResponse.BlockHashes) -> list[tuple[BlockId, bytes]]:
    if part.kv_group or len(part.hashes) != HASH_BYTES * len(part.block_ids):
        raise SnapshotUnreadable("block hashes that fit no block")
    names = (part.hashes[start : start + HASH_BYTES] for start in range(0, len(part.hashes), HASH_BYTES))
    return [(BlockId(block), name) for block, name in zip(part.block_ids, names, strict=True)]
