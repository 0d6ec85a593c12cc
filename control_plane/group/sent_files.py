"""Fetch the small files of the model that a rank has loaded (GetModelFiles): bounded, and checked by their hashes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

from control_plane.executors.base import Executor, RankCallError
from maniple.v1 import worker_pb2
from service_chassis.errors import ManipleError
from service_chassis.ids import Rank

# What a rank sends at the most. Tokenizers of today have some 20 MiB.
MAX_FILE_BYTES = 64 << 20
MAX_BYTES = 128 << 20


class FilesUnreadable(ValueError):
    """Files that no rank of ours sends."""


@dataclass(slots=True)
class _Arriving:
    size_bytes: int
    sha256: bytes
    content: bytearray = field(default_factory=bytearray)


async def fetch_model_files(
    executor: Executor, rank: Rank, names: Sequence[str], *, timeout_s: float
) -> dict[str, bytes]:
    """Return those of the named files that the rank has, by name; none where it has not loaded its model.

    Raises:
        RankCallError: it cannot be reached, or what it sent is not what it said it would send.
    """
    method, request = "GetModelFiles", worker_pb2.GetModelFilesRequest(names=names)
    arriving: dict[str, _Arriving] = {}
    try:
        async for part in executor.stream(rank, method, request, timeout_s=timeout_s):
            assert isinstance(part, worker_pb2.GetModelFilesResponse)
            _take(arriving, part, names)
        for name, file in arriving.items():
            _check(name, file)
    except (ManipleError, ConnectionError, TimeoutError, FilesUnreadable) as error:
        cause = str(error) or f"no answer within {timeout_s:g} s"
        raise RankCallError(rank, method, cause, error=error) from error
    return {name: bytes(file.content) for name, file in arriving.items()}


def _take(arriving: dict[str, _Arriving], part: worker_pb2.GetModelFilesResponse, names: Sequence[str]) -> None:
    """Add a part, before which nothing is kept that goes beyond the bounds."""
    if part.name not in names:
        raise FilesUnreadable(f"it sent {part.name!r}, which nobody asked for")
    file = arriving.get(part.name)
    if file is None:
        total = sum(one.size_bytes for one in arriving.values()) + part.size_bytes
        if part.size_bytes > MAX_FILE_BYTES or total > MAX_BYTES:
            rule = f"at most {MAX_FILE_BYTES}, and {MAX_BYTES} in all, are taken"
            raise FilesUnreadable(f"{part.name} has {part.size_bytes} bytes: {rule}")
        file = arriving[part.name] = _Arriving(part.size_bytes, part.sha256)
    if len(file.content) + len(part.chunk) > file.size_bytes:
        raise FilesUnreadable(f"{part.name} is larger than the {file.size_bytes} bytes it should have")
    file.content += part.chunk


def _check(name: str, file: _Arriving) -> None:
    if len(file.content) < file.size_bytes:
        raise FilesUnreadable(f"{name} ended after {len(file.content)} of {file.size_bytes} bytes")
    if hashlib.sha256(file.content).digest() != file.sha256:
        raise FilesUnreadable(f"{name} has another SHA-256 than it should have")
