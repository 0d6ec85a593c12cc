"""Read the ring, from the reader's event loop."""

from __future__ import annotations

import asyncio
import mmap
import os

from service_chassis.protocol.broadcast_ring.layout import CHUNK_HEADER, RingCorrupted, checksum, read_layout
from service_chassis.protocol.broadcast_ring.reader_fds import ReaderFds

# Messages passed on before other tasks of the loop get their turn.
_BURST = 64
_PIPE_READ_BYTES = 1 << 16


class BroadcastReader:
    """One reader of a ring: an asynchronous iterator of messages, in order, each once, for one task.

    It ends after the last message when the writer closed the ring or its process ended; which of the two is not told.
    A message counts as read when it was copied out, before the iterator yields it. A cancelled wait loses none.

    Raises:
        RingCorrupted: from the constructor or the iterator; there is nothing more to read.
    """

    def __init__(self, fds: ReaderFds, index: int) -> None:
        """Take over the inherited descriptors ``fds`` as the reader with this index."""
        self._fds = fds
        for fd in fds:
            os.set_inheritable(fd, False)  # a grandchild that held them would look like a living reader
        size = os.fstat(fds.memory).st_size
        if size == 0:
            raise RingCorrupted("the memory of the ring is empty")
        self._map = mmap.mmap(fds.memory, size)
        self._layout = read_layout(self._map[: mmap.PAGESIZE], size)
        if not 0 <= index < self._layout.num_readers:
            raise RingCorrupted(f"the ring has {self._layout.num_readers} readers, this is number {index}")
        self._flags = self._layout.flags(index).start
        self._quarter = max(self._layout.num_chunks // 4, 1)
        self._position = 0  # of the next message
        self._ready = 0  # messages that may be read
        self._burst = 0
        self._ended = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> BroadcastReader:
        """Begin to listen in the running event loop."""
        if self._loop is None and not self._ended:
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fds.wake, self._on_wake)
        return self

    async def __anext__(self) -> bytes:
        """Return the next message."""
        self._burst += 1
        if self._burst > _BURST:
            self._burst = 0
            await asyncio.sleep(0)
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
            self._burst = 0
            assert self._loop is not None, "aiter() comes first"
            assert self._waiter is None, "a ring is read by one task"
            self._waiter = self._loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    def close(self) -> None:
        """Read no more: to the writer this reader is lost, to its own iterator this is the end. Safe to call twice."""
        if self._map.closed:
            return
        self._end()
        self._ready = 0
        for fd in self._fds:
            os.close(fd)
        self._map.close()

    def _on_wake(self) -> None:
        try:
            count = len(os.read(self._fds.wake, _PIPE_READ_BYTES))
        except BlockingIOError:
            return
        if count:
            self._ready += count
        else:
            self._end()
        self._resume()

    def _end(self) -> None:
        self._ended = True
        if self._loop is not None:
            self._loop.remove_reader(self._fds.wake)
            self._loop = None
        self._resume()

    def _resume(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _take(self) -> bytes:
        """Copy the next message, check it, flag its chunk as read."""
        position, layout = self._position, self._layout
        stamp, length, expected, large = CHUNK_HEADER.unpack_from(self._map, layout.chunk(position))
        if large:
            start, room = layout.large + large - 1, layout.large_bytes - (large - 1)
        else:
            start, room = layout.body(position), layout.chunk_bytes
        if stamp != position or length > room:
            raise self._corrupted(f"position {stamp} and {length} bytes where {room} fit")
        message = self._map[start : start + length]
        if checksum(position, message) != expected:
            raise self._corrupted(f"{length} bytes with another checksum")
        # Only now, and because of that comparison: see the package's docstring.
        self._map[self._flags + position % layout.num_chunks] = layout.flag_after(position)
        self._position += 1
        self._ready -= 1
        # A writer out of room waits for a large message, or for one of a full ring, which has all quarters.
        if large or not position % self._quarter:
            os.eventfd_write(self._fds.room, 1)
        return message

    def _corrupted(self, found: str) -> RingCorrupted:
        return RingCorrupted(f"the chunk of message {self._position} holds {found}")
