"""Tell others what the prefix caches of the groups hold, step by step: numbered batches that any number can follow.

Costs nothing while nobody follows: nothing is recorded then, and a follower begins with all that is there. It costs the
engine the same for one follower as for many, and no follower can delay it: what is told is kept in one bounded log a
group, and who falls out of it at the far end is told so.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from control_plane.scheduling.block_events import BlockEvent, BlockStored, CacheCleared
from service_chassis.errors import EventsLost
from service_chassis.telemetry import get_logger

logger = get_logger()

# Batches of one group that are kept for followers. A batch a step: a follower may be so many steps behind.
MAX_BATCHES = 4096
# What a recording that begins leaves free below itself, so that numbers of before are never taken for its own, and that
# the parts of a snapshot have numbers of their own.
_SEQUENCE_GAP = 1 << 20


class BlockSource(Protocol):
    """An engine, as far as it matters here."""

    def follow_blocks(self, listener: Callable[[Sequence[BlockEvent]], None] | None) -> None:
        """Tell ``listener`` of every event from now on; None: tell nobody."""
        ...

    def stored_blocks(self) -> tuple[list[BlockStored], int]:
        """Return every named block, parents before children, and how many there are of unknown contents."""
        ...


class EventBatch(NamedTuple):
    """What happened in one step."""

    sequence: int
    at: float  # Unix time
    events: Sequence[BlockEvent]


class CacheSnapshot(NamedTuple):
    """All that a group holds after a batch."""

    sequence: int  # of that batch
    at: float
    blocks: Sequence[BlockStored]  # parents before children
    num_unknown: int  # named blocks of which nobody here knows the tokens


class KvEventLog:
    """The events of one group, whichever formation of it lives."""

    def __init__(self, max_batches: int = MAX_BATCHES) -> None:
        # Never a number that this group had in another process, unless a clock was set back.
        self.sequence = int(time.time()) * _SEQUENCE_GAP
        self._batches: deque[EventBatch] = deque(maxlen=max_batches)
        self._source: BlockSource | None = None
        self._followers: set[asyncio.Event] = set()

    @property
    def is_alive(self) -> bool:
        """Whether the group lives."""
        return self._source is not None

    def belong_to(self, source: BlockSource | None) -> None:
        """Say which engine the group has now; None: it has none, and what it held is gone."""
        if source is self._source:
            return
        if self._source is not None and self._followers:
            self._source.follow_blocks(None)
            self._append((CacheCleared(),))
        self._source = source
        if source is not None and self._followers:
            self._append((CacheCleared(), *source.stored_blocks()[0]))
            source.follow_blocks(self._append)

    def follow(self, wake: asyncio.Event) -> None:
        """Record as long as somebody follows, and set ``wake`` when there is something new."""
        if not self._followers:
            self._batches.clear()
            self.sequence += _SEQUENCE_GAP
            if self._source is not None:
                self._source.follow_blocks(self._append)
        self._followers.add(wake)

    def unfollow(self, wake: asyncio.Event) -> None:
        """Take a follower away."""
        self._followers.discard(wake)
        if not self._followers and self._source is not None:
            self._source.follow_blocks(None)

    def snapshot(self) -> CacheSnapshot:
        """Return what is there now. Whatever happens later is in the batches after its number. O(blocks)."""
        blocks, num_unknown = self._source.stored_blocks() if self._source is not None else ([], 0)
        return CacheSnapshot(self.sequence, time.time(), blocks, num_unknown)

    def has_after(self, sequence: int) -> bool:
        """Whether all batches after that number are here."""
        return self.sequence - len(self._batches) <= sequence <= self.sequence

    def after(self, sequence: int, limit: int) -> list[EventBatch]:
        """Return the first ``limit`` batches after that number; ``has_after`` holds."""
        num_behind = self.sequence - sequence
        first = len(self._batches) - num_behind
        return [self._batches[index] for index in range(first, min(first + limit, len(self._batches)))]

    def _append(self, events: Sequence[BlockEvent]) -> None:
        self.sequence += 1
        self._batches.append(EventBatch(self.sequence, time.time(), tuple(events)))
        for wake in self._followers:
            wake.set()


class KvFollower:
    """One who follows all groups. Use as a context manager, in one event loop."""

    def __init__(self, logs: Iterable[KvEventLog]) -> None:
        self._logs = list(logs)
        self._wake = asyncio.Event()
        self._told: list[int] = []  # by group: the last number that was taken

    def __enter__(self) -> KvFollower:
        for log in self._logs:
            log.follow(self._wake)
        self._told = [log.sequence for log in self._logs]
        logger.info("kv_events.followed", num_groups=len(self._logs))
        return self

    def __exit__(self, *_: object) -> None:
        for log in self._logs:
            log.unfollow(self._wake)
        logger.info("kv_events.left", num_groups=len(self._logs))

    @property
    def is_any_alive(self) -> bool:
        """Whether some group lives."""
        return any(log.is_alive for log in self._logs)

    def continue_after(self, sequence: int) -> bool:
        """Go on after a number that was told before; False, and nothing changed, where that is not possible any more.

        Each group counts for itself, so it is possible with one group alone.
        """
        if len(self._logs) != 1 or not self._logs[0].has_after(sequence):
            return False
        self._told = [sequence]
        return True

    def snapshots(self) -> list[CacheSnapshot]:
        """Return what each group holds; ``news`` goes on after it."""
        taken = [log.snapshot() for log in self._logs]
        self._told = [snapshot.sequence for snapshot in taken]
        return taken

    def told(self) -> list[int]:
        """Return the last number of each group that was taken."""
        return list(self._told)

    def news(self, limit: int = 64) -> list[tuple[int, EventBatch]]:
        """Take what is new, with the index of its group, at most ``limit`` batches a group. Empty: nothing is.

        Raises:
            EventsLost: what is next is not kept any more, since the follower is too far behind.
        """
        self._wake.clear()
        found = []
        for index, log in enumerate(self._logs):
            if not log.has_after(self._told[index]):
                num_behind = log.sequence - self._told[index]
                raise EventsLost(f"the subscriber is {num_behind} batches behind, more than are kept; begin anew")
            for batch in log.after(self._told[index], limit):
                self._told[index] = batch.sequence
                found.append((index, batch))
        return found

    async def wait(self, timeout_s: float) -> bool:
        """Wait for something new; False: there was nothing for so long."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True
