"""Say where everything lies in the shared memory: half-open ranges, from its first byte on.

    [0, 64)              header: magic, version, num_readers, num_chunks, chunk_bytes, large_bytes
    [64, chunks)         flags: one row per reader, one byte per chunk, rows apart by whole cache lines
    [chunks, large)      chunks: position, length, checksum, place of a large message; then chunk_bytes of message
    [large, size)        large messages, each in one piece

All numbers are little-endian. Nothing in here is read but through the orders that the package's docstring names.
"""

from __future__ import annotations

import mmap
import struct
import zlib
from dataclasses import dataclass

_HEADER = struct.Struct("<8sIIIIQ")
_MAGIC = b"MANIRING"
_VERSION = 1
_CACHE_LINE = 64
# position, length, checksum, offset of the message in the large area + 1, or 0 where it is in the chunk.
CHUNK_HEADER = struct.Struct("<QIIQ")
_CHUNK_HEADER_BYTES = 32
_POSITION = struct.Struct("<QQ")
_LAPS = 256
_MAX_LENGTH = (1 << 32) - 1

# A full ring has a byte of every chunk in the pipe of a reader that has not woken yet. They fit into two pages whatever
# part of the first was read.
MAX_CHUNKS = mmap.PAGESIZE
PIPE_BYTES = 2 * mmap.PAGESIZE


class MessageTooLong(ValueError):
    """The message could not be sent even on an empty ring."""


class RingCorrupted(RuntimeError):
    """The memory does not hold what a writer puts there; there is nothing more to read from this ring."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RingLayout:
    """The sizes of one ring, and the offsets that follow from them."""

    num_readers: int
    num_chunks: int
    chunk_bytes: int
    large_bytes: int

    def __post_init__(self) -> None:
        """Refuse sizes that make no ring."""
        if not 0 < self.num_chunks <= MAX_CHUNKS:
            raise ValueError(f"num_chunks is {self.num_chunks}, must be 1 to {MAX_CHUNKS}")
        if self.num_readers < 1 or self.chunk_bytes < 1 or not 0 <= self.large_bytes <= _MAX_LENGTH:
            raise ValueError(f"no ring has these sizes: {self}")

    @property
    def row_stride(self) -> int:
        """Bytes from the flags of one reader to those of the next: readers never write to a common cache line."""
        return _round_up(self.num_chunks, _CACHE_LINE)

    @property
    def chunk_stride(self) -> int:
        """Bytes from one chunk to the next."""
        return _round_up(_CHUNK_HEADER_BYTES + self.chunk_bytes, _CACHE_LINE)

    @property
    def chunks(self) -> int:
        """Where the chunks begin."""
        return _CACHE_LINE + self.num_readers * self.row_stride

    @property
    def large(self) -> int:
        """Where the large messages begin; whole pages, so that they can be given back."""
        return _round_up(self.chunks + self.num_chunks * self.chunk_stride, mmap.PAGESIZE)

    @property
    def size(self) -> int:
        """Bytes of the whole."""
        return self.large + _round_up(self.large_bytes, mmap.PAGESIZE)

    @property
    def max_message_bytes(self) -> int:
        """The longest message that can be sent."""
        return max(self.chunk_bytes, self.large_bytes)

    def flags(self, reader: int) -> slice:
        """Return the range of a reader's flags."""
        start = _CACHE_LINE + reader * self.row_stride
        return slice(start, start + self.num_chunks)

    def chunk(self, position: int) -> int:
        """Return where the chunk of a message begins."""
        return self.chunks + position % self.num_chunks * self.chunk_stride

    def body(self, position: int) -> int:
        """Return where the message begins in its chunk."""
        return self.chunk(position) + _CHUNK_HEADER_BYTES

    def flag_before(self, position: int) -> int:
        """Return what a reader's flag says while the chunk may be written with the message at ``position``."""
        return position // self.num_chunks % _LAPS

    def flag_after(self, position: int) -> int:
        """Return what a reader's flag says once it has copied the message at ``position``."""
        return (position // self.num_chunks + 1) % _LAPS

    def header(self) -> bytes:
        """Return what stands at the beginning of the memory."""
        return _HEADER.pack(_MAGIC, _VERSION, self.num_readers, self.num_chunks, self.chunk_bytes, self.large_bytes)


def read_layout(start: bytes, size: int) -> RingLayout:
    """Return the layout that the first bytes of a memory of ``size`` bytes name. Raises ``RingCorrupted``."""
    try:
        magic, version, num_readers, num_chunks, chunk_bytes, large_bytes = _HEADER.unpack_from(start)
        if (magic, version) != (_MAGIC, _VERSION):
            raise RingCorrupted(f"this is no ring of version {_VERSION}: {magic!r}, version {version}")
        layout = RingLayout(
            num_readers=num_readers, num_chunks=num_chunks, chunk_bytes=chunk_bytes, large_bytes=large_bytes
        )
    except (struct.error, ValueError) as error:
        raise RingCorrupted(f"the header of the ring is wrong: {error}") from None
    if layout.size != size:
        raise RingCorrupted(f"the ring has {size} bytes, its header says {layout.size}")
    return layout


def checksum(position: int, message: bytes) -> int:
    """Return the checksum of a message at its position: an old message under a new position is wrong, too."""
    return zlib.crc32(message, zlib.crc32(_POSITION.pack(position, len(message))))


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
