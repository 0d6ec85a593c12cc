"""Recording never waits for its file, and a log is whole up to where its writer died."""

from __future__ import annotations

import errno
import io
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from control_plane.delta_recorder import DeltaRecorder, GroupRecording
from maniple.v1.delta_log_pb2 import DeltaLogEntry
from service_chassis.errors import ConfigurationError
from service_chassis.protocol.delta_recording import (
    FIRST_LINE,
    NotARecording,
    framed,
    open_for_appending,
    read_records,
)
from support.group_facts import group_facts

RECORDS = [b"", b"x" * 127, b"y" * 128, b"z" * 20_000]


def entries_in(path: Path) -> list[DeltaLogEntry]:
    with path.open("rb") as file:
        return [DeltaLogEntry.FromString(record) for record in read_records(file)]


def test_lengths_are_protobufs_varints() -> None:
    # From the encoding guide: 150 is 96 01.
    assert framed(b"a" * 150)[:2] == b"\x96\x01"
    assert framed(b"")[:1] == b"\x00"
    assert list(read_records(io.BytesIO(FIRST_LINE + b"".join(map(framed, RECORDS))))) == RECORDS


def test_log_cut_off_anywhere_is_read_up_to_there_and_continued(tmp_path: Path) -> None:
    short = [b"a", b"", b"b" * 130]
    whole = FIRST_LINE + b"".join(map(framed, short))
    ends = [len(FIRST_LINE) + sum(len(framed(record)) for record in short[:count]) for count in range(4)]
    path = tmp_path / "log"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = [record for record, end in zip(short, ends[1:], strict=True) if end <= length]
        assert list(read_records(io.BytesIO(whole[:length]))) == kept
        with open_for_appending(str(path)) as file:
            file.write(framed(b"more"))
        assert list(read_records(io.BytesIO(path.read_bytes()))) == [*kept, b"more"]


def test_log_is_its_owners_alone_and_other_files_are_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "log"
    open_for_appending(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    open_for_appending(str(path)).close()
    assert path.stat().st_mode & 0o777 == 0o600
    other = tmp_path / "notes.txt"
    other.write_text("remember the milk\n")
    other.chmod(0o644)
    with pytest.raises(NotARecording):
        open_for_appending(str(other))
    assert other.read_text() == "remember the milk\n"
    assert other.stat().st_mode & 0o777 == 0o644
    for wrong in (other, tmp_path, tmp_path / "no" / "log"):
        with pytest.raises(ConfigurationError, match="record_deltas"):
            DeltaRecorder.at(str(wrong))


class StuckFile(io.BytesIO):
    """A disk that does not answer until it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.writing = threading.Event()
        self.go_on = threading.Event()
        self.written = b""

    def write(self, data: Any) -> int:
        self.writing.set()
        assert self.go_on.wait(10)
        self.written += bytes(data)
        return len(data)


def test_full_queue_pauses_a_group_until_it_is_formed_anew() -> None:
    file = StuckFile()
    recorder = DeltaRecorder(lambda: file, max_queued_bytes=1000)
    slow, other = GroupRecording(recorder, "slow"), GroupRecording(recorder, "other")
    slow.formed(group_facts(), 2)
    assert file.writing.wait(10)
    for _ in range(3):
        slow.sent(b"d" * 400)  # the third is too much
    slow.sent(b"d")  # would fit, and would leave a hole
    other.formed(group_facts(), 1)  # small enough
    file.go_on.set()
    recorder.close()
    records = list(read_records(io.BytesIO(FIRST_LINE + file.written)))
    entries = [DeltaLogEntry.FromString(record) for record in records]
    assert [(one.group, one.WhichOneof("entry")) for one in entries] == [
        ("slow", "formation"),
        ("slow", "delta"),
        ("slow", "delta"),
        ("other", "formation"),
    ]


def test_formation_after_a_pause_is_recorded_again(tmp_path: Path) -> None:
    path = tmp_path / "log"
    recorder = DeltaRecorder(lambda: open_for_appending(str(path)), max_queued_bytes=500)
    group = GroupRecording(recorder, "0")
    group.sent(b"before it was formed")
    group.formed(group_facts(), 1)
    group.sent(b"d" * 600)
    group.counted(1, 5)
    group.formed(group_facts(), 1)
    group.sent(b"d")
    recorder.close()
    assert [entry.WhichOneof("entry") for entry in entries_in(path)] == ["formation", "formation", "delta"]


def test_full_disk_ends_the_recording_and_nothing_else() -> None:
    class FullFile(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    recorder = DeltaRecorder(FullFile)
    group = GroupRecording(recorder, "0")
    group.formed(group_facts(), 1)
    recorder._thread.join(10)
    assert recorder.put(DeltaLogEntry(delta=b"d")) == "the file cannot be written: No space left on device"
    group.sent(b"d")
    recorder.close()


def test_spare_leaves_the_log_alone_until_it_has_something_to_add(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("control_plane.delta_recorder._LOCK_WAIT_S", 0.1)
    path = tmp_path / "log"
    owner, spare, third = (DeltaRecorder.at(str(path)) for _ in range(3))
    first, second, barred = (GroupRecording(recorder, "0") for recorder in (owner, spare, third))
    first.formed(group_facts(), 1)
    first.sent(b"1")
    owner.close()
    second.formed(group_facts(), 1)
    second.sent(b"2")
    until_written(path, 4)
    barred.formed(group_facts(), 1)
    third._thread.join(10)  # gives up: another process writes it
    spare.close()
    assert [entry.delta for entry in entries_in(path) if entry.HasField("delta")] == [b"1", b"2"]
    assert third.put(DeltaLogEntry()) == "the file cannot be written: another process writes it"


def until_written(path: Path, num_entries: int) -> None:
    deadline = time.monotonic() + 10
    while len(entries_in(path)) < num_entries:
        assert time.monotonic() < deadline
        time.sleep(0.01)
