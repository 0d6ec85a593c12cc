"""A writer or a reader of a ring as a process of its own.

    python ring_process.py read FDS INDEX [STOP_AFTER]    say how many numbered messages came, and whether in order
    python ring_process.py write NUM_READERS              start readers, write for ever

A reader prints ``at N`` when it has read STOP_AFTER messages and then reads no more; at the end of the ring it prints
``end N`` and exits.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a file, from wherever the test is

from service_chassis.protocol.broadcast_ring import BroadcastReader, BroadcastWriter, ReaderFds


def numbered(number: int) -> bytes:
    """A message that says which it is; each thousandth is too long for a chunk, and no two in a row have one length."""
    head = b"%d " % number
    return head + b"x" * (6000 if number % 1000 == 999 else number % 50)


def start_reader(
    writer: BroadcastWriter, index: int, *arguments: object, stdout: int | None = subprocess.PIPE
) -> subprocess.Popen[str]:
    """Start a reader as an executor starts a rank."""
    fds = writer.reader_fds(index)
    command = [sys.executable, __file__, "read", str(fds), str(index), *map(str, arguments)]
    process = subprocess.Popen(command, pass_fds=fds, stdout=stdout, text=True)
    writer.release_reader_fds(index)
    return process


def say(line: str) -> None:
    """Write a line in one piece: several processes share the pipe."""
    os.write(1, f"{line}\n".encode())


async def read(fds: str, index: str, stop_after: str = "-1") -> None:
    count = 0
    reader = BroadcastReader(ReaderFds.parse(fds), int(index))
    say("ready")
    async for message in reader:
        assert message == numbered(count), f"message {message[:20]!r} where number {count} was due"
        count += 1
        if count == int(stop_after):
            say(f"at {count}")
            await asyncio.Event().wait()
    say(f"end {count}")


async def write(num_readers: str) -> None:
    writer = BroadcastWriter(num_readers=int(num_readers))
    for index in range(int(num_readers)):
        start_reader(writer, index, stdout=None)  # it says what it has to say where this process does
    room = asyncio.Event()
    writer.begin(on_reader_lost=lambda _: None, on_room=room.set)
    number = 0
    while True:
        if not writer.send(numbered(number)):
            room.clear()
            await room.wait()
            continue
        number += 1
        if number == 10_000:
            say("writing")


def main(arguments: Sequence[str]) -> None:
    what, *rest = arguments
    asyncio.run({"read": read, "write": write}[what](*rest))
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
