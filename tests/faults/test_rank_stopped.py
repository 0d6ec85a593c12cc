"""A rank is stopped with SIGSTOP (cases A2): it is silent, and its process lives."""

from __future__ import annotations

import os
import signal
import time

from support.faults import SHORT_TIMES, assert_next_group_works, forming, is_stopped
from support.served_ranks import served_ranks
from support.waiting import until


async def test_stopped_rank_is_lost_within_the_heartbeat_timeout_and_a_second() -> None:
    async with forming(teardown_grace_s=0.5, **SHORT_TIMES) as live:
        timeout_s = SHORT_TIMES["heartbeat_timeout_s"]
        await live.run_steps(2)
        stopped_at = time.monotonic()
        os.kill(live.pid, signal.SIGSTOP)
        await until(lambda: is_stopped(live.pid), "it is stopped")
        live.send_step()  # a step is under way, and nobody will ever answer it
        loss = await live.lost(within_s=timeout_s + 1.0)
        assert live.lost_at - stopped_at > timeout_s / 2
        assert loss.rank == 0
        assert "was silent on its " in loss.reason
        ended_at = time.monotonic()
        await live.group.teardown("again")
        # A stopped process takes no SIGTERM: it is killed after the grace.
        assert time.monotonic() - ended_at < 0.5 + 3.0
    await assert_next_group_works()


async def test_stopped_rank_of_two_is_named_though_the_other_waits_for_it() -> None:
    flags = ("--heartbeat-timeout-s", "1", "--lease-s", "1", "--report-interval-s", "0.05")
    async with served_ranks(flags=(*flags, "--idle-report-interval-s", "0.1")) as served:
        served.begin()
        await served.all_run()
        stopped_at = time.monotonic()
        os.kill(served.pids[1], signal.SIGSTOP)
        await served.assert_lost(r"rank 1 was silent on its .*", since=stopped_at, within_s=1.0 + 1.0)
        # A stopped process takes no SIGTERM: it is killed after the grace.
        await served.assert_gone(within_s=2.0 + 2.0)
        await served.assert_next_works()
