"""Lines for a reader who may stop: written whole or dropped and counted, and nobody waits."""

from __future__ import annotations

import fcntl
import io
import os
import select
import threading
from collections.abc import Iterator
from typing import TextIO

import pytest

from service_chassis.lossy_stream import LossyStream

ROOM = 16384  # of a pipe, four pages


class Pipe:
    def __init__(self) -> None:
        self._source, target = os.pipe()
        fcntl.fcntl(target, fcntl.F_SETPIPE_SZ, ROOM)
        self.target: TextIO = open(target, "w")  # noqa: SIM115

    def read(self, wait_s: float = 0.0) -> bytes:
        """Return all that is there; nothing if nothing comes."""
        ready, _, _ = select.select([self._source], [], [], wait_s)
        return os.read(self._source, 1 << 20) if ready else b""

    def close(self) -> None:
        os.close(self._source)
        self.target.close()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    one = Pipe()
    yield one
    one.close()


def written(stream: LossyStream, lines: list[str], wait_s: float = 0.0) -> None:
    """Write from another thread: one that waits would not come back."""

    def write() -> None:
        for line in lines:
            stream.write(line, wait_s)

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive(), "it waits for a reader"


def notice(num_lines: int) -> str:
    return f"<{num_lines}>"


def test_what_finds_no_room_is_dropped_and_said_once_there_is_some(pipe: Pipe) -> None:
    stream = LossyStream(pipe.target, notice)
    written(stream, [f"line {number}\n" for number in range(5000)])
    first = pipe.read().decode().splitlines()
    assert first == [f"line {number}" for number in range(len(first))]
    assert 1000 < len(first) < 3000
    written(stream, ["after\n", "again\n"])
    assert pipe.read().decode().splitlines() == [f"<{5000 - len(first)}>", "after", "again"]


def test_line_that_finds_room_for_a_part_is_ended_before_the_next(pipe: Pipe) -> None:
    stream = LossyStream(pipe.target, notice)
    written(stream, ["é" * 9000 + "\n", "lost\n"])
    start = pipe.read().decode()
    assert set(start) == {"é"}
    assert 0 < len(start) < 9000
    written(stream, ["after\n"])
    assert pipe.read() == b"\n<2>\nafter\n"


def test_long_lines_come_whole_to_who_reads(pipe: Pipe) -> None:
    lines = [f"{number} " + "é" * 9000 + "\n" for number in range(20)]
    stream = LossyStream(pipe.target, notice)
    thread = threading.Thread(target=lambda: [stream.write(line, 5.0) for line in lines], daemon=True)
    thread.start()
    got = b""
    while len(got) < len("".join(lines).encode()):
        part = pipe.read(5.0)
        assert part, "nothing more comes"
        got += part
    assert got.decode() == "".join(lines)


def test_what_must_not_be_lost_waits_for_a_slow_reader_and_no_longer_than_it_may(pipe: Pipe) -> None:
    stream = LossyStream(pipe.target, notice)
    written(stream, ["x" * 20000 + "\n"])
    written(stream, ["lost\n"], 0.05)
    threading.Timer(0.2, pipe.read).start()
    written(stream, ["kept\n"], 10.0)
    assert pipe.read().endswith(b"<2>\nkept\n")


def test_streams_that_are_no_files_take_everything() -> None:
    target = io.StringIO()
    LossyStream(target, notice).write("x" * 10000 + "\n")
    assert target.getvalue() == "x" * 10000 + "\n"
