"""Serve a scripted group of several ranks, run eight streams on it, and see what a fault does to all of them."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc

from control_plane.announcement import Lost, Ready
from service_chassis.scripted import Fault
from support.faults import is_alive, model_with
from support.scripted_reference import greedy
from support.serve_process import NOT_SERVING, SERVING, Caller, ServeProcess, Stream, serving
from support.waiting import until

NUM_STREAMS = 8
PROMPT = [5, 250, 17, 0, 5]


class ServedRanks:
    """A server with a group of several ranks, and its eight streams."""

    def __init__(self, server: ServeProcess, caller: Caller, pids: Sequence[int]) -> None:
        self.server = server
        self.caller = caller
        self.pids = tuple(pids)  # of the first group, by rank
        self.streams: list[Stream] = []
        self._shm = set(os.listdir("/dev/shm"))

    def begin(self) -> None:
        """Begin the streams."""
        self.streams = [self.caller.generate(f"r{number}", [*PROMPT, number], 2000) for number in range(NUM_STREAMS)]

    async def all_run(self) -> None:
        """Wait until every stream has a token."""
        await until(lambda: all(stream.token_ids for stream in self.streams), "tokens for everybody")

    async def assert_lost(self, reason: str, *, within_s: float, since: float | None = None) -> None:
        """The fault fired, and every stream ended once, in time, with the status and the reason.

        Args:
            reason: a pattern for the whole reason.
            within_s: for the last stream, and for readiness.
            since: when it happened, by the monotonic clock. Default: when the last token came.
        """
        readiness = asyncio.create_task(self._not_serving_at())
        await asyncio.gather(*(stream.end() for stream in self.streams))
        if since is None:
            since = max(stream.token_at for stream in self.streams)
        assert max(stream.ended_at for stream in self.streams) - since < within_s
        assert await readiness - since < within_s
        for stream in self.streams:
            assert stream.error is not None
            assert stream.error.code() is grpc.StatusCode.ABORTED
            assert re.fullmatch(f"the group was lost: {reason}", stream.error.details() or ""), stream.error.details()
            assert stream.in_band == [stream.error.details()]
            assert not stream.finishes
            assert not stream.is_done
            number = int(stream.request_id[1:])
            assert stream.token_ids == greedy([*PROMPT, number], len(stream.token_ids))
        assert re.fullmatch(reason, self.server.hear(Lost).reason)

    async def _not_serving_at(self) -> float:
        await self.caller.healthy(NOT_SERVING, within_s=30.0)
        return time.monotonic()

    async def assert_gone(self, *, within_s: float) -> None:
        """Nothing of the lost group is left: no process, no file in shared memory, no socket."""
        await until(lambda: not any(map(is_alive, self.pids)), "every rank is gone", timeout_s=within_s)
        assert set(os.listdir("/dev/shm")) <= self._shm

    async def assert_next_works(self) -> None:
        """The server forms its group anew and serves again, under the ids of before."""
        self.server.hear(Ready, 2)
        await self.caller.healthy(SERVING, within_s=5.0)
        again = await self.caller.generate("r0", PROMPT, 3).end()
        assert again.token_ids == greedy(PROMPT, 3)
        (group,) = (await self.caller.status()).groups
        assert len(group.ranks) == len(self.pids)
        assert not {rank.pid for rank in group.ranks} & set(self.pids)
        assert len(self.server.heard(Lost)) == 1


@asynccontextmanager
async def served_ranks(*faults: Fault, flags: Sequence[str] = (), world_size: int = 2) -> AsyncIterator[ServedRanks]:
    """Serve ``world_size`` ranks that fail as told, of a model whose steps take 10 ms."""
    model = model_with(*faults, step_time_s=0.01)
    words = ("--model", model, "--executor", "mp", "--tensor-parallel-size", str(world_size), "--num-threads", "1")
    with serving(*words, *flags) as server:
        async with Caller(server) as caller, asyncio.timeout(60):
            (group,) = (await caller.status()).groups
            yield ServedRanks(server, caller, [rank.pid for rank in group.ranks])
