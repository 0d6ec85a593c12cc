"""Rings whose readers live in this process, and what a ring must not leave behind."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service_chassis.protocol.broadcast_ring import BroadcastReader, BroadcastWriter, ReaderFds


class Ring:
    """A writer, its readers in the same event loop, and what the writer was told."""

    def __init__(self, num_readers: int, **sizes: int) -> None:
        self.writer = BroadcastWriter(num_readers=num_readers, **sizes)
        self.readers: list[BroadcastReader] = []
        self.lost: list[int] = []
        self.num_rooms = 0
        self._room = asyncio.Event()
        for index in range(num_readers):
            inherited = ReaderFds(*map(os.dup, self.writer.reader_fds(index)))
            self.writer.release_reader_fds(index)
            self.readers.append(BroadcastReader(inherited, index))
        self.memory_fd = self.readers[0]._fds.memory
        self.writer.begin(on_reader_lost=self.lost.append, on_room=self._on_room)
        for reader in self.readers:
            aiter(reader)

    def _on_room(self) -> None:
        self.num_rooms += 1
        self._room.set()

    async def send(self, message: bytes) -> None:
        """Send, waiting for room as often as it takes."""
        while not self.writer.send(message):
            self._room.clear()
            await self._room.wait()

    def close(self) -> None:
        self.writer.close()
        for reader in self.readers:
            reader.close()


@contextmanager
def ring_of(num_readers: int, **sizes: int) -> Iterator[Ring]:
    ring = Ring(num_readers, **sizes)
    try:
        yield ring
    finally:
        ring.close()


async def take(reader: BroadcastReader, count: int) -> list[bytes]:
    """Read ``count`` messages that were sent."""
    return [await anext(reader) for _ in range(count)]


def traces() -> dict[str, object]:
    """What this process has open and mapped, and what has a name: equal before and after, or something leaked."""
    places = ("/dev/shm", tempfile.gettempdir())
    return {
        "descriptors": sorted(os.listdir("/proc/self/fd")),
        "mappings": Path("/proc/self/maps").read_text().count("maniple-ring"),
        # By name: other tests at the same time have segments of their own.
        "named": [name for place in places for name in os.listdir(place) if "maniple-ring" in name],
    }
