"""Write the ring. Everything runs on one event loop and returns at once."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import mmap
import os
import sys
from collections.abc import Callable

from service_chassis.protocol.broadcast_ring.large_area import LargeArea
from service_chassis.protocol.broadcast_ring.layout import (
    CHUNK_HEADER,
    PIPE_BYTES,
    MessageTooLong,
    RingLayout,
    checksum,
)
from service_chassis.protocol.broadcast_ring.reader_fds import ReaderFds

# Large messages are rare, and their pages would stay for ever: given back once all of them were read.
_KEPT_LARGE_BYTES = 1 << 20


def is_supported() -> bool:
    """Whether this system has what the ring is made of."""
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(os, "eventfd")


class _Reader:
    """What the writer has of one living reader."""

    def __init__(self, index: int, flags: memoryview, wake_fd: int) -> None:
        self.index = index
        self.flags = flags  # written by that reader alone
        self.wake_fd = wake_fd


class BroadcastWriter:
    """The one writer of a ring.

    First the readers' processes are started with ``reader_fds``; after each start ``release_reader_fds`` closes what
    only that process may hold, since its end is noticed by nobody holding it any more.

    Args:
        num_readers: processes that must read each message.
        num_chunks: messages that a reader may lag behind.
        chunk_bytes: messages up to this length lie in the ring itself.
        large_bytes: room for longer ones, all together. Takes memory only while it is used.
    """

    def __init__(
        self, *, num_readers: int, num_chunks: int = 256, chunk_bytes: int = 4096, large_bytes: int = 64 << 20
    ) -> None:
        self._layout = layout = RingLayout(
            num_readers=num_readers, num_chunks=num_chunks, chunk_bytes=chunk_bytes, large_bytes=large_bytes
        )
        self._memory_fd = _make_memory(layout)
        self._map = mmap.mmap(self._memory_fd, layout.size)
        self._map[: len(layout.header())] = layout.header()
        self._view = memoryview(self._map)
        self._room_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        pipes = [_make_pipe() for _ in range(num_readers)]
        self._reader_ends = {index: read_fd for index, (read_fd, _) in enumerate(pipes)}
        self._readers = {
            index: _Reader(index, self._view[layout.flags(index)], wake_fd) for index, (_, wake_fd) in enumerate(pipes)
        }
        self._position = 0  # of the next message
        self._large = LargeArea(large_bytes)
        self._large_high = 0  # bytes of the large area that may have pages
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_reader_lost: Callable[[int], None] = _ignore
        self._on_room: Callable[[], None] = _ignore
        self._refused_bytes: int | None = None  # length of the message that room is awaited for

    def reader_fds(self, index: int) -> ReaderFds:
        """Return what the process of a reader must inherit, under the same numbers."""
        return ReaderFds(self._memory_fd, self._reader_ends[index], self._room_fd)

    def release_reader_fds(self, index: int) -> None:
        """Close this process's copy of what the reader alone may hold. Its process was started."""
        os.close(self._reader_ends.pop(index))

    def begin(self, *, on_reader_lost: Callable[[int], None], on_room: Callable[[], None]) -> None:
        """Watch the readers from the running event loop.

        Args:
            on_reader_lost: called from the loop, once for each reader that closed its ring or whose process ended. It
                is not waited for any more; the others go on.
            on_room: called from the loop after ``send`` returned False, when it is worth another try.
        """
        assert not self._reader_ends, "a reader whose descriptors are held here could never be lost"
        self._on_reader_lost, self._on_room = on_reader_lost, on_room
        self._loop = asyncio.get_running_loop()
        for reader in self._readers.values():
            # A write end has nothing to read, but its error is always told, and asyncio passes it on as readable.
            self._loop.add_reader(reader.wake_fd, self._lose, reader.index)

    def send(self, message: bytes) -> bool:
        """Give a message to all readers; False if some reader is a whole ring behind, and then nothing was sent.

        Raises:
            MessageTooLong: there will never be room.
        """
        length = len(message)
        if length > self._layout.max_message_bytes:
            raise MessageTooLong(f"a message has {length} bytes, at most {self._layout.max_message_bytes} are possible")
        if self._large:
            self._reclaim_large()
        if not self._has_room(length):
            self._await_room(length)
            return False
        position, layout = self._position, self._layout
        start, large = layout.body(position), 0
        if length > layout.chunk_bytes:
            place = self._large.place(length)
            assert place is not None, "there was room"
            self._large.take(position, place, length)
            self._large_high = max(self._large_high, place + length)
            start, large = layout.large + place, place + 1
        self._map[start : start + length] = message
        header = (position, length, checksum(position, message), large)
        CHUNK_HEADER.pack_into(self._map, layout.chunk(position), *header)
        self._position += 1
        for reader in self._readers.values():
            # The loop tells of a reader that has gone.
            with contextlib.suppress(BrokenPipeError):
                os.write(reader.wake_fd, b"\1")
        return True

    def close(self) -> None:
        """End the ring: readers get what was sent before, and then its end. Safe to call twice."""
        if self._map.closed:
            return
        self._stop_awaiting_room()
        for reader in list(self._readers.values()):
            self._forget(reader)
        for fd in (*self._reader_ends.values(), self._memory_fd, self._room_fd):
            os.close(fd)
        self._reader_ends.clear()
        self._view.release()
        self._map.close()

    def _has_room(self, length: int) -> bool:
        if not self._was_read(self._position - self._layout.num_chunks):
            return False
        return length <= self._layout.chunk_bytes or self._large.place(length) is not None

    def _reclaim_large(self) -> None:
        """Take back the room of large messages that all have read, and give pages back to the system."""
        while (oldest := self._large.oldest) is not None and self._was_read(oldest):
            self._large.release_oldest()
        if not self._large and self._large_high > _KEPT_LARGE_BYTES:
            self._map.madvise(mmap.MADV_REMOVE, self._layout.large, self._layout.size - self._layout.large)
            self._large_high = 0

    def _was_read(self, position: int) -> bool:
        """Whether every living reader has copied the message at ``position``."""
        if position < max(self._position - self._layout.num_chunks, 0):
            return True  # its chunk was written again since, or never
        chunk, flag = position % self._layout.num_chunks, self._layout.flag_after(position)
        return all(reader.flags[chunk] == flag for reader in self._readers.values())

    # Waiting for room

    def _await_room(self, length: int) -> None:
        assert self._loop is not None, "begin() comes first"
        already, self._refused_bytes = self._refused_bytes is not None, length
        if not already:
            # A count of earlier times may stand there: then the callback finds no room and goes on waiting.
            self._loop.add_reader(self._room_fd, self._look_for_room)

    def _stop_awaiting_room(self) -> None:
        if self._refused_bytes is not None and self._loop is not None:
            self._loop.remove_reader(self._room_fd)
        self._refused_bytes = None

    def _look_for_room(self) -> None:
        # First the count is taken, then the flags are read: a flag set after that writes a new count.
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._room_fd)
        self._reclaim_large()
        if self._refused_bytes is not None and self._has_room(self._refused_bytes):
            self._stop_awaiting_room()
            self._on_room()

    # Losing readers

    def _lose(self, index: int) -> None:
        self._forget(self._readers[index])
        self._on_reader_lost(index)
        if not self._map.closed:
            self._look_for_room()  # perhaps all that was waited for was that one

    def _forget(self, reader: _Reader) -> None:
        if self._loop is not None:
            self._loop.remove_reader(reader.wake_fd)
        os.close(reader.wake_fd)
        reader.flags.release()
        del self._readers[reader.index]


def _make_memory(layout: RingLayout) -> int:
    fd = os.memfd_create("maniple-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, layout.size)
        # Nobody can make it shorter under somebody's hands, which would kill them by SIGBUS.
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.posix_fallocate(fd, 0, layout.large)  # what is used all the time: a lack of memory shows here
    except OSError:
        os.close(fd)
        raise
    return fd


def _make_pipe() -> tuple[int, int]:
    read_fd, write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.fcntl(write_fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return read_fd, write_fd


def _ignore(*_: object) -> None:
    pass
