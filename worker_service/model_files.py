"""Send the small files of a model's directory: tokenizer, template, configuration. Never weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from maniple.v1 import worker_pb2
from service_chassis.errors import InvalidParameter

MAX_FILE_BYTES = 64 << 20
_CHUNK_BYTES = 1 << 20
_MAX_NAME_BYTES = 255  # of file systems; they refuse to look for a longer one


async def read_model_files(source: str, names: Sequence[str]) -> AsyncIterator[worker_pb2.GetModelFilesResponse]:
    """Yield the named files of the directory ``source`` in chunks; names that do not exist there are left out.

    Raises:
        InvalidParameter: a name is more than a file name, or the file is larger than 64 MiB.
    """
    directory = Path(source)
    for name in names:
        if name != Path(name).name or name in ("", ".", "..") or "\0" in name:
            raise InvalidParameter("names", name, "must be a file name without a directory")
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise InvalidParameter("names", name, f"may have at most {_MAX_NAME_BYTES} bytes")
        path = directory / name
        if not source or not path.is_file():
            continue
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise InvalidParameter("names", name, f"has {size} bytes; at most {MAX_FILE_BYTES} are sent")
        content = await asyncio.to_thread(path.read_bytes)
        digest = hashlib.sha256(content).digest()
        for start in range(0, max(1, len(content)), _CHUNK_BYTES):
            yield worker_pb2.GetModelFilesResponse(
                name=name, size_bytes=len(content), sha256=digest, chunk=content[start : start + _CHUNK_BYTES]
            )
