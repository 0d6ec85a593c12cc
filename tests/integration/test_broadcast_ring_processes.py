"""The ring between real processes: many messages, and either side killed or stopped while it is at work."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from service_chassis.protocol.broadcast_ring import BroadcastWriter, ReaderFds
from support import ring_process
from support.ring_process import numbered, start_reader
from support.rings import ring_of, traces
from support.waiting import until


class Broadcast:
    """A writer in this process, and reader processes."""

    def __init__(self, *stop_after: int, **sizes: int) -> None:
        self.lost: list[int] = []
        self._room = asyncio.Event()
        self.writer = BroadcastWriter(num_readers=len(stop_after), **sizes)
        self.readers = [start_reader(self.writer, index, count) for index, count in enumerate(stop_after)]
        self.writer.begin(on_reader_lost=self.lost.append, on_room=self._room.set)
        for reader in self.readers:
            assert line_of(reader) == "ready"

    async def send(self, first: int, stop: int) -> None:
        for number in range(first, stop):
            while not self.writer.send(numbered(number)):
                self._room.clear()
                async with asyncio.timeout(20):
                    await self._room.wait()

    def send_until_full(self, first: int) -> int:
        """Return the number of the first message that found no room."""
        while self.writer.send(numbered(first)):
            first += 1
        return first


@contextmanager
def broadcast_to(*stop_after: int, **sizes: int) -> Iterator[Broadcast]:
    """Yield a broadcast whose readers stop reading after so many messages; -1 is never."""
    broadcast = Broadcast(*stop_after, **sizes)
    try:
        yield broadcast
    finally:
        broadcast.writer.close()
        for reader in broadcast.readers:
            reader.kill()
            reader.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def hold(fds: ReaderFds) -> subprocess.Popen[bytes]:
    """Start a process that holds what a reader inherits, and reads nothing. Fifty times Python would take long."""
    return subprocess.Popen(["sleep", "60"], pass_fds=fds)


def cpu_s(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


async def test_four_processes_get_100_000_messages_in_order():
    with broadcast_to(-1, -1, -1, -1) as broadcast:
        await broadcast.send(0, 100_000)
        broadcast.writer.close()
        assert [line_of(reader) for reader in broadcast.readers] == ["end 100000"] * 4
        assert [reader.wait(10) for reader in broadcast.readers] == [0] * 4
        assert broadcast.lost == []


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.011])
def test_killed_writer_ends_its_readers_after_the_last_message_and_leaves_nothing(delay_s: float):
    before = traces()
    writer = subprocess.Popen([sys.executable, ring_process.__file__, "write", "3"], stdout=subprocess.PIPE, text=True)
    said = [line_of(writer) for _ in range(4)]
    assert sorted(said) == ["ready"] * 3 + ["writing"]
    time.sleep(delay_s)  # so that it dies at some moment of its writing
    writer.kill()
    rest, _ = writer.communicate(timeout=10)  # until the pipe is closed: nobody of them lives
    assert writer.returncode == -signal.SIGKILL
    counts = [int(line.removeprefix("end ")) for line in rest.splitlines()]
    assert len(counts) == 3
    assert min(counts) >= 10_000
    assert max(counts) - min(counts) <= 1, "only the last message may have reached some and not others"
    assert traces() == before


async def test_reader_killed_mid_read_is_told_and_the_others_miss_nothing():
    with broadcast_to(-1, 1500, -1) as broadcast:
        await broadcast.send(0, 1600)
        stopped = broadcast.readers[1]
        assert line_of(stopped) == "at 1500"
        full_at = 1600

        def has_filled() -> bool:  # the others may be a little behind, too
            nonlocal full_at
            full_at = broadcast.send_until_full(full_at)
            return full_at >= 1500 + 256

        await until(has_filled, "the ring to be full of what one reader has not read")
        assert broadcast.send_until_full(full_at) == 1500 + 256, "no chunk may be written that it has not read"
        assert broadcast.lost == []
        stopped.kill()
        began = time.monotonic()
        await until(lambda: broadcast.lost, "the loss of the reader")
        assert time.monotonic() - began < 1.0, "its end is an event, not a timeout"
        assert broadcast.lost == [1]
        await broadcast.send(full_at, 5000)
        broadcast.writer.close()
        assert [line_of(broadcast.readers[index]) for index in (0, 2)] == ["end 5000"] * 2


async def test_stopped_reader_holds_the_writer_back_and_misses_nothing_when_it_goes_on():
    with broadcast_to(-1, -1) as broadcast:
        os.kill(broadcast.readers[0].pid, signal.SIGSTOP)
        await broadcast.send(0, 200)
        full_at = 200

        def has_filled() -> bool:
            nonlocal full_at
            full_at = broadcast.send_until_full(full_at)
            return full_at >= 256

        await until(has_filled, "the ring to be full of what one reader has not read")
        assert broadcast.send_until_full(full_at) == 256
        assert broadcast.lost == []
        os.kill(broadcast.readers[0].pid, signal.SIGCONT)
        await broadcast.send(full_at, 3000)
        broadcast.writer.close()
        assert [line_of(reader) for reader in broadcast.readers] == ["end 3000"] * 2


async def test_both_sides_sleep_while_there_is_nothing_to_do():
    with broadcast_to(-1, 256, num_chunks=256) as broadcast:
        await broadcast.send(0, 256)
        assert line_of(broadcast.readers[1]) == "at 256"
        broadcast.send_until_full(256)  # now the writer waits for room, one reader for messages, the other for ever
        pids = [os.getpid(), *(reader.pid for reader in broadcast.readers)]
        before = [cpu_s(pid) for pid in pids]
        await asyncio.sleep(1.0)
        assert max(cpu_s(pid) - spent for pid, spent in zip(pids, before, strict=True)) <= 0.05


async def test_fifty_rings_leave_nothing_behind_half_of_them_with_killed_readers():
    with ring_of(1):
        pass  # the loop opens what it keeps
    before = traces()
    for cycle in range(50):
        lost: list[int] = []
        writer = BroadcastWriter(num_readers=2)
        holders = []
        for index in range(2):
            fds = writer.reader_fds(index)
            holders.append(hold(fds))
            writer.release_reader_fds(index)
        writer.begin(on_reader_lost=lost.append, on_room=lambda: None)
        while writer.send(bytes(5000)):
            pass
        if cycle % 2:
            holders[0].kill()
            await until(lambda lost=lost: lost, "the loss of the killed reader")
            assert lost == [0]
        writer.close()
        for holder in holders:
            holder.kill()
            holder.wait(10)
    assert traces() == before


def test_bench_measures_both_ways_and_ends_with_json():
    bench = Path(__file__).resolve().parents[2] / "bench" / "steps.py"
    short = ["--rows", "0", "--readers", "2", "--messages", "40", "--rounds", "1", "--interval-ms", "1"]
    command = [sys.executable, str(bench), *short]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["broadcast"]["rows"]
    assert [(row["transport"], row["num_readers"]) for row in rows] == [("ring", 2), ("stream", 2)]
    assert all(0 < row["p50_us"] <= row["p99_us"] and row["reader_cpu_us"] > 0 for row in rows)
