"""Pack a model's tokenizer files into one zip, for clients that build the tokenizer themselves."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

_CHUNK_BYTES = 512 * 1024
# A fixed time of change, so that the same files give the same archive and the same hash.
_EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TokenizerArchive:
    """A zip and its hash."""

    data: bytes
    sha256: str

    def chunks(self) -> Iterator[tuple[bytes, bool]]:
        """Yield (piece, whether it is the last), each well below any message limit."""
        for start in range(0, max(len(self.data), 1), _CHUNK_BYTES):
            piece = self.data[start : start + _CHUNK_BYTES]
            yield piece, start + _CHUNK_BYTES >= len(self.data)


def pack(files: Iterable[tuple[str, bytes]]) -> TokenizerArchive:
    """Zip (name, content) pairs."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files:
            entry = zipfile.ZipInfo(name, _EPOCH)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, content)
    data = buffer.getvalue()
    return TokenizerArchive(data, hashlib.sha256(data).hexdigest())
