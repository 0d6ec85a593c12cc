"""The log of cache events: who follows from when, who is too slow, and what a new formation of a group means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import pytest

from control_plane.kv_event_log import KvEventLog, KvFollower
from control_plane.scheduling.block_events import (
    BlockContents,
    BlockEvent,
    BlockRemoved,
    BlockStored,
    CacheCleared,
)
from service_chassis.errors import EventsLost

FIRST, SECOND = (BlockStored(bytes([number]) * 16, BlockContents(None, b"", b"")) for number in (1, 2))


class Source:
    """Stands where an engine is."""

    def __init__(self, *stored: BlockStored) -> None:
        self.stored = list(stored)
        self.listener: Callable[[Sequence[BlockEvent]], None] | None = None

    def follow_blocks(self, listener: Callable[[Sequence[BlockEvent]], None] | None) -> None:
        self.listener = listener

    def stored_blocks(self) -> tuple[list[BlockStored], int]:
        return self.stored, 0

    def say(self, *events: BlockEvent) -> None:
        assert self.listener is not None
        self.listener(events)


@pytest.fixture
def source() -> Source:
    return Source(FIRST)


@pytest.fixture
def log(source: Source) -> KvEventLog:
    made = KvEventLog(max_batches=3)
    made.belong_to(source)
    return made


def test_source_is_asked_for_events_only_while_somebody_follows(log: KvEventLog, source: Source) -> None:
    assert source.listener is None
    with KvFollower([log]), KvFollower([log]):
        assert source.listener is not None
    assert source.listener is None


def test_follower_gets_what_is_there_and_then_what_happens_without_a_gap(log: KvEventLog, source: Source) -> None:
    with KvFollower([log]) as follower:
        (snapshot,) = follower.snapshots()
        assert snapshot.blocks == [FIRST]
        source.say(SECOND)
        source.say(BlockRemoved(FIRST.name), CacheCleared())
        news = follower.news()
        assert [batch.events for _, batch in news] == [(SECOND,), (BlockRemoved(FIRST.name), CacheCleared())]
        assert [batch.sequence for _, batch in news] == [snapshot.sequence + 1, snapshot.sequence + 2]
        assert follower.news() == []
        assert follower.told() == [snapshot.sequence + 2]


def test_who_reads_in_parts_gets_all(log: KvEventLog, source: Source) -> None:
    with KvFollower([log]) as follower:
        for _ in range(3):
            source.say(SECOND)
        assert [len(follower.news(limit=2)) for _ in range(3)] == [2, 1, 0]


def test_who_is_too_slow_is_told_so_and_delays_nobody(log: KvEventLog, source: Source) -> None:
    with KvFollower([log]) as slow, KvFollower([log]) as quick:
        for _ in range(4):
            source.say(SECOND)
            assert len(quick.news()) == 1
        with pytest.raises(EventsLost, match="4 batches behind"):
            slow.news()


def test_another_can_go_on_after_a_number_while_it_is_kept(log: KvEventLog, source: Source) -> None:
    with KvFollower([log]) as first:
        begin = first.told()[0]
        for _ in range(3):
            source.say(SECOND)
        with KvFollower([log]) as second:
            assert second.continue_after(begin + 1)
            assert [batch.sequence for _, batch in second.news()] == [begin + 2, begin + 3]
            for wrong in (begin - 1, begin + 4, 0):
                assert not second.continue_after(wrong)
    with KvFollower([log]) as later:  # nothing was recorded in between
        assert not later.continue_after(begin + 3)
        assert later.told()[0] > begin + (1 << 19)
    with KvFollower([log, KvEventLog()]) as of_two:
        assert not of_two.continue_after(of_two.told()[0])


def test_numbers_of_another_process_are_never_ours(log: KvEventLog) -> None:
    assert KvEventLog().sequence >= log.sequence >= 1_700_000_000 << 20


def test_group_that_is_lost_and_formed_anew_tells_so(log: KvEventLog, source: Source) -> None:
    with KvFollower([log]) as follower:
        follower.snapshots()
        log.belong_to(None)
        assert source.listener is None
        assert not follower.is_any_alive
        adopted = Source(SECOND)
        log.belong_to(adopted)
        adopted.say(FIRST)
        assert [batch.events for _, batch in follower.news()] == [
            (CacheCleared(),),
            (CacheCleared(), SECOND),
            (FIRST,),
        ]
        log.belong_to(adopted)  # the same once more is no news
        assert follower.news() == []


async def test_waiting_ends_with_the_first_news(log: KvEventLog, source: Source) -> None:
    with KvFollower([log]) as follower:
        assert not await follower.wait(0.001)
        waiting = asyncio.create_task(follower.wait(10))
        await asyncio.sleep(0)
        source.say(SECOND)
        assert await waiting
