"""Tell a later owner everything: the parts of a ``Snapshot``, and over which connections they may go (PROTOCOL C5).

Pure. Parts are made one by one, so a large batch never exists twice as messages.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from urllib.parse import unquote

from maniple.v1 import worker_pb2
from maniple.v1.scheduler_delta_pb2 import RowLogprobs
from service_chassis.protocol.logprobs import Logprobs
from worker_service.batch_rows import RowState
from worker_service.completed_batch import FrozenBatch, FrozenRow
from worker_service.tombstones import Tombstone

Part = worker_pb2.SnapshotResponse

_HASHES_PER_PART = 8192
_ENTRIES_PER_PART = 65536  # of log-probabilities, at most 9 bytes each
_STATES = {
    RowState.PREFILL: Part.ROW_STATE_PREFILL,
    RowState.DECODE: Part.ROW_STATE_DECODE,
    RowState.PREEMPTED: Part.ROW_STATE_PREEMPTED,
}


def snapshot_parts(
    batch: FrozenBatch | None,
    limits: worker_pb2.GroupLimits | None,
    tombstones: Iterable[tuple[Tombstone, float]],
    tombstone_logprobs: Iterable[tuple[Logprobs | None, Logprobs | None]] = (),
) -> Iterator[Part]:
    """Yield the header, rows ascending, tombstones oldest first, then hashes.

    Args:
        batch: None where there is none; then there are only tombstones.
        limits: of the group.
        tombstones: with their ages in seconds.
        tombstone_logprobs: of output and prompt of each; may end early.
    """
    header = Part.Header(limits=limits)
    if batch is not None:
        header.step, header.state_digest, header.token_digest = batch.step, batch.state_digest, batch.token_digest
    yield Part(header=header)
    for row in batch.rows if batch is not None else ():
        part = Part(row=_row(row))
        yield from _with_logprobs(part, part.row.logprobs, row.logprobs, row.prompt_logprobs)
    told = iter(tombstone_logprobs)
    for tombstone, age_s in tombstones:
        part = Part(tombstone=tombstone)
        part.tombstone.age_s = age_s
        yield from _with_logprobs(part, part.tombstone.logprobs, *next(told, (None, None)))
    for kv_group, kept in enumerate(batch.block_hashes if batch is not None else ()):
        for start in range(0, len(kept), _HASHES_PER_PART):
            some = kept[start : start + _HASHES_PER_PART]
            yield Part(
                block_hashes=Part.BlockHashes(
                    kv_group=kv_group,
                    block_ids=[block for block, _ in some],
                    hashes=b"".join(name for _, name in some),
                )
            )


def _with_logprobs(part: Part, inside: RowLogprobs, output: Logprobs | None, prompt: Logprobs | None) -> Iterator[Part]:
    """Yield a part with as much as fits ``inside`` it, then the rest."""
    pieces: list[RowLogprobs] = []
    at = 1  # nothing precedes the first token
    for piece in prompt.pieces(_ENTRIES_PER_PART) if prompt is not None else ():
        pieces.append(RowLogprobs(prompt=piece.to_message(), first_position=at))
        at += len(piece)
    for piece in output.pieces(_ENTRIES_PER_PART) if output is not None else ():
        pieces.append(RowLogprobs(sampled=piece.to_message()))
    if pieces:
        inside.CopyFrom(pieces[0])
    yield part
    for more in pieces[1:]:
        yield Part(more_logprobs=more)


def _row(row: FrozenRow) -> Part.Row:
    part = Part.Row(
        state=_STATES[row.state],
        num_computed_tokens=row.num_computed_tokens,
        age_s=row.age_s,
        mask_void=row.is_void,
    )
    request = part.request
    request.CopyFrom(row.request)
    request.num_prefill_tokens = row.num_prefill_tokens
    request.token_ids.extend(row.token_ids.tolist())
    for kv_group, table in enumerate(row.tables):
        if table:
            request.blocks.add(kv_group=kv_group).replace.ids.extend(table)
    for kv_group, slot in row.state_slots:
        request.blocks.add(kv_group=kv_group, state_slot=slot)
    return part


def peer_refusal(peer: str, *, encrypted: bool, allow_plaintext: bool) -> str:
    """Say why a snapshot, which holds prompts and outputs, must not go to a peer; empty where it may.

    Args:
        peer: as gRPC names it: ``unix:``, ``ipv4:127.0.0.1:4711``, ``ipv6:[::1]:4711``. A sidecar's mTLS arrives from
            the loopback.
        encrypted: the connection is TLS.
        allow_plaintext: the operator said that the network may see it.
    """
    if encrypted or allow_plaintext or peer.startswith("unix") or _is_loopback(peer):
        return ""
    return (
        f"a snapshot holds prompts and outputs, and the connection from {peer} is neither a Unix socket nor the "
        "loopback nor TLS: start the worker with --allow-plaintext-snapshot where the network may see them"
    )


def _is_loopback(peer: str) -> bool:
    family, _, address = unquote(peer).partition(":")
    if family not in ("ipv4", "ipv6"):
        return False
    host = address.rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped or ip).is_loopback
