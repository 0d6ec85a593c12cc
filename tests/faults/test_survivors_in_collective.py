"""A rank is killed while the others wait for it in a collective (cases A9): they leave it, and go."""

from __future__ import annotations

import os
import signal
import time

import pytest

from service_chassis.scripted import fail_at
from support.served_ranks import served_ranks


async def test_survivors_leave_the_collective_of_a_killed_rank() -> None:
    # Rank 1 hangs on its way into the collective of step 40, so that ranks 0 and 2 are in it for certain.
    async with served_ranks(fail_at(1, 40, "hang"), world_size=3) as served:
        served.begin()
        await served.all_run()
        status = (await served.caller.status()).groups[0]
        while not all(rank.accepted >= 40 for rank in status.ranks):
            status = (await served.caller.status()).groups[0]
        killed_at = time.monotonic()
        os.kill(served.pids[1], signal.SIGKILL)
        await served.assert_lost(r"rank 1 exited: killed by SIGKILL", since=killed_at, within_s=1.0)
        await served.assert_gone(within_s=killed_at + 2.0 - time.monotonic())
        await served.assert_next_works()


@pytest.mark.parametrize("rank", [0, 1])
async def test_rank_killed_mid_step_ends_every_stream_within_a_second(rank: int) -> None:
    async with served_ranks() as served:
        served.begin()
        await served.all_run()
        killed_at = time.monotonic()
        os.kill(served.pids[rank], signal.SIGKILL)
        await served.assert_lost(rf"rank {rank} exited: killed by SIGKILL", since=killed_at, within_s=1.0)
        await served.assert_gone(within_s=killed_at + 3.0 - time.monotonic())
        await served.assert_next_works()
