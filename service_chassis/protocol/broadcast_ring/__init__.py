"""Broadcast messages from one process to others on the same host, through memory that they share.

One writer, N readers, started by the writer. Every reader gets every message, in order, once. A message takes one chunk
of a ring; a message longer than a chunk lies beside the ring, and its chunk says where. A chunk is written again only
when every reader has flagged that it copied what was in it. Both sides live in an event loop and neither ever blocks
it: a writer without room is told so, a reader without messages sleeps in its loop's own wait.

What each reader gets is three descriptors and nothing with a name, so nothing can be left behind by whoever is killed:

- the memory, a memfd (it counts as memory of the processes, not against the size of /dev/shm);
- the read end of a pipe of its own, into which the writer puts one byte per message. It wakes the reader, it counts
  what may be read, and it tells each side of the other's end: end of file here, EPOLLERR at the writer's end;
- an eventfd shared by all readers, on which the writer waits when it is out of room, and only then.

What order of memory is relied on, since Python has no fences:

- Writer to reader: the chunk is stored before the byte is written to the pipe, and loaded after that byte was read.
  Both system calls take the pipe's lock, so whoever read the byte sees the chunk. No index in shared memory says what
  is new.
- Reader to writer: the flag must not be seen before the reader's loads of the chunk are done. The flag is stored only
  after a comparison of the checksum of the *copied* bytes, a control dependency from those loads to the store, which
  x86-64 and arm64 both keep. The writer's stores to a chunk depend in the same way on its loads of the flags.
- A flag is one byte, written by one process, so that no store of it can be torn. It holds the lap in which the chunk
  was read, so nobody ever resets it.
- All the same every chunk carries its position and a checksum over position and message. A reader that finds another
  value stops with ``RingCorrupted`` instead of passing on what nobody wrote.
"""

from service_chassis.protocol.broadcast_ring.layout import MessageTooLong, RingCorrupted
from service_chassis.protocol.broadcast_ring.reader import BroadcastReader
from service_chassis.protocol.broadcast_ring.reader_fds import ReaderFds
from service_chassis.protocol.broadcast_ring.writer import BroadcastWriter, is_supported

__all__ = ["BroadcastReader", "BroadcastWriter", "MessageTooLong", "ReaderFds", "RingCorrupted", "is_supported"]
