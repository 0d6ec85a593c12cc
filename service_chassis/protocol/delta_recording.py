"""Frame a recorded log of deltas in a file: a first line that says what it is, then records behind their lengths.

What a record holds is ``DeltaLogEntry`` of delta_log.proto; here it is bytes. The framing is protobuf's own delimited
format, so that a reader in any language is a few lines.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

FIRST_LINE = b"maniple delta log 1\n"
# Far above any delta; a length beyond it is no length but damage.
_MAX_RECORD_BYTES = 1 << 30


class NotARecording(Exception):
    """The file is not a recorded log, or is damaged; the text says where."""


def framed(record: bytes) -> bytes:
    """Return a record behind its length."""
    length, prefix = len(record), bytearray()
    while length > 0x7F:
        prefix.append(length & 0x7F | 0x80)
        length >>= 7
    prefix.append(length)
    return bytes(prefix) + record


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a log. One that was cut off at the end, where its writer was killed, is left out.

    Raises:
        NotARecording: on reading.
    """
    if (first := file.read(len(FIRST_LINE))) != FIRST_LINE:
        if first and not FIRST_LINE.startswith(first):
            raise NotARecording(f"does not begin with the line {FIRST_LINE.decode().strip()!r}")
        return
    while (length := _read_length(file)) is not None:
        record = file.read(length)
        if len(record) < length:
            return
        yield record


def check_path(path: str) -> None:
    """See whether a log can be begun or continued at ``path``; make an empty file where there is none.

    Raises:
        OSError: it cannot be opened.
        NotARecording: something else is there.
    """
    with _open(path) as file:
        next(read_records(file), None)


def open_for_appending(path: str) -> BinaryIO:
    """Open a log, a new one or one to go on with, that nobody but its owner may read: prompts are in it.

    It is locked, since one process at a time may write it. A record that was cut off at its end is removed first.

    Raises:
        BlockingIOError: another process writes it.
        OSError: it cannot be opened.
        NotARecording: something else is there.
    """
    file = _open(path)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with os.fdopen(os.dup(file.fileno()), "rb") as reader:
            end = _end_of_records(reader)
        # Only now: a file that is none of ours is left as it is.
        os.fchmod(file.fileno(), 0o600)
        file.truncate(end)
        file.seek(end)
        if end == 0:
            file.write(FIRST_LINE)
    except BaseException:
        file.close()
        raise
    return file


def _open(path: str) -> BinaryIO:
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotARecording("is not a regular file")
    return file


def _end_of_records(file: BinaryIO) -> int:
    """Return the offset behind the last whole record; 0 where not even the first line is whole."""
    end = 0
    for record in read_records(file):
        end = (end or len(FIRST_LINE)) + len(framed(record))
    return end or (len(FIRST_LINE) if file.tell() >= len(FIRST_LINE) else 0)


def _read_length(file: BinaryIO) -> int | None:
    length = shift = 0
    while byte := file.read(1):
        length |= (byte[0] & 0x7F) << shift
        if length > _MAX_RECORD_BYTES:
            raise NotARecording(f"a record before offset {file.tell()} claims {length} bytes")
        if byte[0] < 0x80:
            return length
        shift += 7
    return None
