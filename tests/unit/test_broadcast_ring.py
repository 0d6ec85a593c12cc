"""The ring within one event loop: order, room, laps, large messages, ends, and what nobody wrote."""

import asyncio
import mmap
import os
import random
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service_chassis.protocol.broadcast_ring import (
    BroadcastReader,
    BroadcastWriter,
    MessageTooLong,
    ReaderFds,
    RingCorrupted,
)
from service_chassis.protocol.broadcast_ring.large_area import LargeArea
from service_chassis.protocol.broadcast_ring.layout import MAX_CHUNKS, RingLayout
from support.rings import ring_of, take, traces
from support.waiting import until

SMALL = {"num_chunks": 5, "chunk_bytes": 32, "large_bytes": 1000}


def numbered(number: int, length: int) -> bytes:
    return (number.to_bytes(4, "little") * (length // 4 + 1))[:length]


async def test_ring_gives_every_message_to_every_reader_in_order_over_many_laps():
    sent = [numbered(n, length) for n, length in enumerate([0, 1, 31, 32, 33, 7, 1000, 999, 3] * 70)]
    with ring_of(3, **SMALL) as ring:
        readings = [asyncio.create_task(take(reader, len(sent))) for reader in ring.readers]
        for message in sent:
            await ring.send(message)
        assert await asyncio.gather(*readings) == [sent] * 3


async def test_ring_is_full_when_one_reader_is_a_ring_behind_and_overwrites_nothing():
    with ring_of(2, **SMALL) as ring:
        assert all(ring.writer.send(b"%d" % n) for n in range(5))
        assert await take(ring.readers[0], 5) == [b"0", b"1", b"2", b"3", b"4"]
        assert not ring.writer.send(b"refused")
        assert not ring.writer.send(b"refused")
        assert await take(ring.readers[1], 1) == [b"0"]
        await until(lambda: ring.num_rooms, "room")
        assert ring.writer.send(b"5")
        assert not ring.writer.send(b"refused")
        assert await take(ring.readers[1], 5) == [b"1", b"2", b"3", b"4", b"5"]
        assert await take(ring.readers[0], 1) == [b"5"]


async def test_ring_tells_of_room_once_for_each_refusal():
    with ring_of(1, **SMALL) as ring:
        for n in range(4):
            while ring.writer.send(b"x"):
                pass
            assert ring.num_rooms == n
            await take(ring.readers[0], 5)
            await until(lambda n=n: ring.num_rooms == n + 1, "room")
        ring.writer.send(b"y")
        await take(ring.readers[0], 1)
        for _ in range(10):
            await asyncio.sleep(0)
        assert ring.num_rooms == 4


async def test_writer_waiting_for_room_sleeps_while_the_reader_does():
    with ring_of(1, **SMALL) as ring:
        for _ in range(3):  # leaves an old count of read messages
            ring.writer.send(b"x")
            await take(ring.readers[0], 1)
        while ring.writer.send(b"x"):
            pass
        looks = []
        look = ring.writer._look_for_room
        ring.writer._loop.add_reader(ring.writer._room_fd, lambda: (looks.append(1), look()))
        await until(lambda: looks, "the look that the old count causes")
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(looks) == 1
        assert ring.num_rooms == 0


async def test_large_area_is_bounded_and_its_room_comes_back():
    with ring_of(2, num_chunks=40, chunk_bytes=32, large_bytes=1000) as ring:
        for n in range(3):
            ring.writer.send(b"%d" % n)
        for reader in ring.readers:
            await take(reader, 3)
        assert ring.writer.send(bytes(600))
        assert not ring.writer.send(bytes(600))
        await take(ring.readers[0], 1)
        for _ in range(5):  # the writer looks, and there is no room
            await asyncio.sleep(0)
        assert not ring.writer.send(bytes(600))
        await take(ring.readers[1], 1)
        await until(lambda: ring.num_rooms, "room")
        assert ring.writer.send(numbered(7, 600))
        assert await take(ring.readers[1], 1) == [numbered(7, 600)]


@pytest.mark.parametrize("first", range(0, 40, 7))
async def test_writer_hears_of_room_wherever_in_the_ring_it_was_full(first: int):
    with ring_of(2, num_chunks=40, chunk_bytes=8) as ring:
        for _ in range(first):
            ring.writer.send(b"x")
        for reader in ring.readers:
            await take(reader, first)
        while ring.writer.send(b"x"):
            pass
        for reader in ring.readers:
            assert ring.num_rooms == 0
            await take(reader, 11)
        await until(lambda: ring.num_rooms, "room", timeout_s=2)


async def test_message_more_than_a_lap_old_counts_as_read():
    with ring_of(1, **SMALL) as ring:
        for _ in range(12):
            ring.writer.send(b"x")
            await take(ring.readers[0], 1)
        assert [ring.writer._was_read(position) for position in (0, 6, 7, 11)] == [True] * 4
        ring.writer.send(b"y")
        assert not ring.writer._was_read(12)


async def test_large_message_is_not_waited_for_when_its_chunk_was_written_again():
    with ring_of(1, num_chunks=2, chunk_bytes=8, large_bytes=100) as ring:
        for lap in range(600):  # more laps than a flag can count
            large = numbered(lap, 100)
            assert ring.writer.send(large)
            assert await take(ring.readers[0], 1) == [large]
            for _ in range(lap % 5):
                assert ring.writer.send(b"small")
                await take(ring.readers[0], 1)


async def test_memory_of_large_messages_is_given_back_once_they_were_read():
    def resident() -> int:
        return os.fstat(ring.memory_fd).st_blocks * 512

    with ring_of(1, num_chunks=4, chunk_bytes=64, large_bytes=16 << 20) as ring:
        before = resident()
        message = random.Random(1).randbytes(9 << 20)
        assert ring.writer.send(message)
        assert resident() > before + (8 << 20)
        assert await take(ring.readers[0], 1) == [message]
        assert ring.writer.send(b"next")
        assert resident() <= before
        assert ring.writer.send(message)
        assert await take(ring.readers[0], 2) == [b"next", message]


async def test_message_that_never_fits_is_refused_and_the_ring_goes_on():
    with ring_of(1, **SMALL) as ring:
        with pytest.raises(MessageTooLong, match="1001 bytes, at most 1000"):
            ring.writer.send(bytes(1001))
        assert ring.writer.send(bytes(1000))
        assert await take(ring.readers[0], 1) == [bytes(1000)]


async def test_reader_gets_what_was_sent_before_the_writer_ended_and_then_the_end():
    with ring_of(2, **SMALL) as ring:
        for n in range(3):
            ring.writer.send(b"%d" % n)
        ring.writer.close()
        ring.writer.close()
        for reader in ring.readers:
            assert [message async for message in reader] == [b"0", b"1", b"2"]
            assert [message async for message in reader] == []
    assert ring.lost == []


async def test_reader_that_waits_is_woken_by_the_end_of_the_writer():
    with ring_of(1, **SMALL) as ring:
        waiting = asyncio.ensure_future(take(ring.readers[0], 1))
        await asyncio.sleep(0)
        ring.writer.close()
        with pytest.raises(StopAsyncIteration):
            await asyncio.wait_for(waiting, 10)


async def test_lost_reader_is_told_once_and_not_waited_for():
    with ring_of(3, **SMALL) as ring:
        while ring.writer.send(b"x"):
            pass
        for index in (0, 2):
            await take(ring.readers[index], 5)
        ring.readers[1].close()
        await until(lambda: ring.num_rooms, "room, since nobody else lags")
        assert ring.lost == [1]
        assert ring.writer.send(b"y")
        assert [await take(ring.readers[index], 1) for index in (0, 2)] == [[b"y"]] * 2
        ring.readers[0].close()
        ring.writer.send(b"to a closed pipe")
        await until(lambda: len(ring.lost) == 2, "the other loss")
        assert ring.lost == [1, 0]
        assert await take(ring.readers[2], 1) == [b"to a closed pipe"]


async def test_cancelled_wait_loses_no_message():
    with ring_of(1, **SMALL) as ring:
        (reader,) = ring.readers
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        ring.writer.send(b"first")
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        ring.writer.send(b"second")
        assert await take(reader, 2) == [b"first", b"second"]


async def test_reader_of_a_long_burst_lets_other_tasks_run():
    with ring_of(1, num_chunks=1000, chunk_bytes=8) as ring:
        turns = []

        async def other() -> None:
            while True:
                turns.append(len(got))
                await asyncio.sleep(0)

        got: list[bytes] = []
        for _ in range(1000):
            ring.writer.send(b"x")
        await asyncio.sleep(0)
        task = asyncio.create_task(other())
        while len(got) < 1000:
            got.append(await anext(ring.readers[0]))
        task.cancel()
        assert len(set(turns)) >= 10


@pytest.mark.parametrize("num_readers", [1, 2, 5])
async def test_ring_equals_its_model_under_random_operations(num_readers: int):
    """10 000 operations; the model is a queue per reader, and room is where the queues are short enough."""
    random_ = random.Random(num_readers)
    num_chunks, chunk_bytes, large_bytes = 7, 24, 300
    with ring_of(num_readers, num_chunks=num_chunks, chunk_bytes=chunk_bytes, large_bytes=large_bytes) as ring:
        unread: list[deque[bytes]] = [deque() for _ in ring.readers]
        refusals = sent = 0
        for number in range(10_000):
            slow_phase = number // 500 % 2
            if random_.random() < (0.7 if slow_phase else 0.35):
                length = random_.choice([0, 5, 23, 24, 25, 60, 130, 299, 300]) if random_.random() < 0.5 else 20
                message = random_.randbytes(length)
                accepted = ring.writer.send(message)
                longest = max(unread, key=len)
                if len(longest) == num_chunks:
                    assert not accepted
                elif length <= chunk_bytes or not any(len(old) > chunk_bytes for queue in unread for old in queue):
                    assert accepted
                # else the large area decides, see the property of LargeArea
                refusals, sent = refusals + (not accepted), sent + accepted
                for queue in unread if accepted else ():
                    queue.append(message)
            else:
                reader = random_.randrange(num_readers)
                for _ in range(min(random_.randint(0, 4), len(unread[reader]))):
                    assert await anext(ring.readers[reader]) == unread[reader].popleft()
        for reader, queue in zip(ring.readers, unread, strict=True):
            assert await take(reader, len(queue)) == list(queue)
        assert sent > 1000
        assert refusals > 100


@given(st.data())
def test_large_area_never_gives_a_byte_twice_and_fits_whatever_is_alone(data: st.DataObject):
    area = LargeArea(50)
    taken: deque[range] = deque()
    for position in range(data.draw(st.integers(1, 60))):
        if taken and data.draw(st.booleans()):
            area.release_oldest()
            taken.popleft()
            continue
        length = data.draw(st.integers(1, 50))
        start = area.place(length)
        if start is None:
            used = set().union(*taken)
            for tried in (range(taken[-1].stop, taken[-1].stop + length), range(length)):
                assert tried.stop > 50 or used & set(tried), f"{tried} was free, behind the newest or at the start"
            continue
        area.take(position, start, length)
        mine = range(start, start + length)
        assert mine.stop <= 50
        assert not any(set(mine) & set(other) for other in taken)
        taken.append(mine)


class TestWhatNobodyWrote:
    """Each spoils the memory behind the writer's back."""

    @pytest.mark.parametrize(
        "spoil",
        [
            pytest.param(lambda layout, n: layout.body(n) + 2, id="message"),
            pytest.param(lambda layout, n: layout.chunk(n), id="position"),
            pytest.param(lambda layout, n: layout.chunk(n) + 8, id="length"),
            pytest.param(lambda layout, n: layout.chunk(n) + 11, id="length-far-out"),
            pytest.param(lambda layout, n: layout.chunk(n) + 12, id="checksum"),
            pytest.param(lambda layout, n: layout.chunk(n) + 16, id="place"),
            pytest.param(lambda layout, n: layout.chunk(n) + 23, id="place-far-out"),
        ],
    )
    async def test_reader_passes_on_what_came_before_and_stops(self, spoil):
        with ring_of(1, **SMALL) as ring:
            (reader,) = ring.readers
            for n in range(7):
                ring.writer.send(numbered(n, 20))
                await take(reader, 1)
            ring.writer.send(b"good")
            ring.writer.send(b"spoiled")
            with mmap.mmap(ring.memory_fd, 0) as memory:
                memory[spoil(RingLayout(num_readers=1, **SMALL), 8)] ^= 0xFF
            assert await anext(reader) == b"good"
            for _ in range(2):
                with pytest.raises(RingCorrupted, match="message 8"):
                    await anext(reader)

    async def test_chunk_that_was_read_a_lap_before_is_not_taken_for_a_new_one(self):
        with ring_of(1, **SMALL) as ring:
            (reader,) = ring.readers
            for _ in range(5):
                ring.writer.send(b"lap 0")
            await take(reader, 5)
            os.write(ring.writer._readers[0].wake_fd, b"\1")  # says that there is one more
            with pytest.raises(RingCorrupted, match="message 5"):
                await anext(reader)

    async def test_old_message_is_not_taken_for_one_at_a_new_position(self):
        with ring_of(1, **SMALL) as ring:
            layout = RingLayout(num_readers=1, **SMALL)
            ring.writer.send(b"old")
            ring.writer.send(b"new")
            old, new = (slice(layout.chunk(n) + 8, layout.chunk(n + 1)) for n in (0, 1))
            with mmap.mmap(ring.memory_fd, 0) as memory:
                memory[new] = memory[old]  # all but the position
            assert await anext(ring.readers[0]) == b"old"
            with pytest.raises(RingCorrupted, match="message 1"):
                await anext(ring.readers[0])

    @pytest.mark.parametrize(("at", "says"), [(0, "no ring"), (8, "version"), (16, "bytes"), (12, "bytes")])
    async def test_reader_refuses_a_header_that_does_not_fit(self, at: int, says: str):
        writer = BroadcastWriter(num_readers=1, **SMALL)
        fds = ReaderFds(*map(os.dup, writer.reader_fds(0)))
        with mmap.mmap(fds.memory, 0) as memory:
            memory[at] ^= 0x40
        with pytest.raises(RingCorrupted, match=says):
            BroadcastReader(fds, 0)
        for fd in fds:
            os.close(fd)
        writer.close()

    async def test_reader_refuses_a_number_that_the_ring_does_not_have(self):
        writer = BroadcastWriter(num_readers=2, **SMALL)
        fds = ReaderFds(*map(os.dup, writer.reader_fds(0)))
        with pytest.raises(RingCorrupted, match="2 readers, this is number 2"):
            BroadcastReader(fds, 2)
        for fd in fds:
            os.close(fd)
        writer.close()

    async def test_memory_cannot_be_made_shorter_under_the_writer(self):
        with ring_of(1, **SMALL) as ring, pytest.raises(PermissionError):
            os.ftruncate(ring.memory_fd, 100)


async def test_wake_pipe_holds_a_byte_of_every_chunk_of_the_largest_ring():
    with ring_of(1, num_chunks=MAX_CHUNKS, chunk_bytes=1, large_bytes=0) as ring:
        for _ in range(MAX_CHUNKS - 1):  # so that the ring begins in the middle of a page of the pipe
            ring.writer.send(b"")
        await take(ring.readers[0], MAX_CHUNKS - 1)
        for _ in range(3):
            for _ in range(MAX_CHUNKS):
                assert ring.writer.send(b"x")
            assert not ring.writer.send(b"x")
            assert await take(ring.readers[0], MAX_CHUNKS) == [b"x"] * MAX_CHUNKS


@pytest.mark.parametrize(
    "sizes", [{"num_chunks": 0}, {"num_chunks": MAX_CHUNKS + 1}, {"num_readers": 0}, {"large_bytes": 1 << 32}]
)
def test_writer_refuses_sizes_that_make_no_ring(sizes: dict[str, int]):
    before = traces()
    with pytest.raises(ValueError):
        BroadcastWriter(**{"num_readers": 1, **SMALL, **sizes})
    assert traces() == before


async def test_ring_leaves_no_descriptor_and_no_mapping_after_it_was_closed():
    with ring_of(1, **SMALL):
        pass  # the loop opens what it keeps
    before = traces()
    for _ in range(20):
        with ring_of(3, **SMALL) as ring:
            ring.writer.send(b"unread")
            while ring.writer.send(bytes(30)):
                pass
    assert traces() == before


async def test_reader_keeps_its_descriptors_from_its_own_children():
    writer = BroadcastWriter(num_readers=1, **SMALL)
    fds = ReaderFds(*map(os.dup, writer.reader_fds(0)))
    for fd in fds:
        os.set_inheritable(fd, True)  # as they come from the parent
    reader = BroadcastReader(fds, 0)
    assert not any(map(os.get_inheritable, fds))
    reader.close()
    writer.close()


def test_reader_fds_survive_the_command_line():
    assert ReaderFds.parse(str(ReaderFds(5, 17, 6))) == ReaderFds(5, 17, 6)
    with pytest.raises(ValueError):
        ReaderFds.parse("5,17")
