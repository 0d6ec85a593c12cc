"""Two spares claim one group at once: one has it, the other goes on waiting."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

from support.takeover import Reading, StageProgress, all_free, prompt_of, site
from support.waiting import until


async def test_one_of_two_racing_spares_gets_the_group_and_the_other_waits(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        owner, *spares = await here.owner_and_spare()
        spares.append(here.control_plane("c"))
        await spares[1].heard(StageProgress, "wait")
        async with here.client() as client, asyncio.timeout(60):
            readings = [Reading(client, f"r{number}", prompt_of(number), 60, seed=number) for number in range(3)]
            for reading in readings:
                await reading.has(10)
            owner.signal(signal.SIGKILL)
            await until(lambda: any(spare.is_ready for spare in spares), "one to be ready")
            winner, other = sorted(spares, key=lambda spare: not spare.is_ready)
            for reading in readings:
                await reading.whole()
            assert not other.is_ready
            assert other.is_alive
            assert (await other.status()).groups[0].state == "held"
            assert winner.address in (await other.status()).groups[0].reason
            # A request to the spare is told where the owner is, and its client goes there.
            await Reading(client, "new", prompt_of(7), 10).whole()
        await all_free(winner)
