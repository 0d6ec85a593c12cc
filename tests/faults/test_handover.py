"""SIGTERM of an owner with --handover: a rolling upgrade loses no request and waits for no lease."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from support.takeover import LEASE_S, Reading, Ready, StageProgress, all_free, prompt_of, site


async def test_handover_moves_running_requests_without_waiting_for_the_lease(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare("--handover")
        async with here.client() as client, asyncio.timeout(60):
            readings = [
                Reading(client, "greedy", prompt_of(1), 120),
                Reading(client, "seeded", prompt_of(2), 120, seed=3),
                Reading(client, "stops", prompt_of(3), 120, stop_at=90),
            ]
            for reading in readings:
                await reading.has(10)
            asked_at = owner.signal(signal.SIGTERM)
            ready_at = await spare.heard(Ready)
            print(f"ready {ready_at - asked_at:.3f} s after SIGTERM")
            assert ready_at - asked_at < LEASE_S
            for reading in readings:
                await reading.whole()
            gaps = [max(b - a for a, b in zip(one.token_at, one.token_at[1:], strict=False)) for one in readings]
            print(f"longest pause between two tokens {max(gaps):.3f} s")
            assert await owner.exit_code() == 0
        await all_free(spare)
        assert not spare.times(StageProgress, "load")


async def test_drained_owner_leaves_the_prefix_cache_to_the_next(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare()
        async with here.client() as client, asyncio.timeout(60):
            before = await Reading(client, "before", prompt_of(1), 5).whole()
            running = Reading(client, "running", prompt_of(2), 60)
            await running.has(10)
            owner.signal(signal.SIGTERM)
            await running.whole()  # without --handover it is finished first
            assert await owner.exit_code() == 0
            await spare.heard(Ready)
            again = await Reading(client, "again", before.prompt, 5).whole()
            assert again.started is not None
            assert again.started.num_cached_tokens == 20
        await all_free(spare)
