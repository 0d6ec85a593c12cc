"""The owner dies between the sends of one step to rank 0 and rank 1 (cases A11): one rank waits in its collective."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from service_chassis.ids import Rank
from support.engine_harness import generation
from support.owners import Owner, Reader
from support.remote_ranks import remote_ranks
from support.scripted_reference import greedy, seeded
from support.waiting import until

A, B = [5, 7, 11], list(range(40, 70))


@pytest.mark.parametrize("unheard", [0, 1], ids=["rank-1-has-the-step", "rank-0-has-the-step"])
async def test_next_owner_relays_the_step_and_both_ranks_execute_one_composition(tmp_path: Path, unheard: int) -> None:
    with remote_ranks(2, directory=tmp_path) as ranks:
        async with asyncio.timeout(60):
            first = await Owner(ranks.addresses).start()
            readers = [
                await Reader("a", greedy(A, 150)).begin(first, generation("a", A, max_tokens=150)),
                await Reader("b", seeded(B, 150, 9, 0, 1.0)).begin(
                    first, generation("b", B, max_tokens=150, temperature=1.0, seed=9)
                ),
            ]
            for reader in readers:
                await reader.has(10)
            first.executor.mute.add(Rank(unheard))
            await until(lambda: first.executor.num_lost_deltas, "a step that one rank alone has")
            await first.die()

            second = await Owner(ranks.addresses).start()
            assert second.adopted is not None
            assert second.adopted.snapshot is not None
            assert second.executor.calls.count(f"FetchDeltas {1 - unheard}") == 1  # the relay was needed
            for reader in readers:
                await reader.resume(second)
            for reader in readers:
                await reader.whole()
            await until(
                lambda: len({status.completed for status in second.group.ranks()}) == 1, "one step on both ranks"
            )
            await second.assert_works()
            await second.leave()
