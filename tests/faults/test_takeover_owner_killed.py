"""The new owner dies at every point of its own takeover (cases A13); the next one does the same and gets further."""

from __future__ import annotations

import asyncio
from pathlib import Path

from service_chassis.ids import Rank
from support.engine_harness import generation
from support.owners import Owner, Reader
from support.remote_ranks import remote_ranks
from support.scripted_reference import greedy, seeded
from support.waiting import until

POINTS = [
    "Describe 0",
    "Join 0",  # rank 0 has granted, rank 1 was not asked
    "Join 1",
    "FetchDeltas 0",
    "hello 0",
    "delta 1",  # relayed
    "Snapshot 0",
    "delta 0",  # the first of its own: again rank 1 lacks one
]
A, B, C = [5, 7, 11], list(range(40, 70)), [250] * 9


async def test_owner_after_owner_dies_in_its_takeover_and_the_last_one_loses_nothing(tmp_path: Path) -> None:
    with remote_ranks(2, directory=tmp_path) as ranks:
        async with asyncio.timeout(90):
            owner = await Owner(ranks.addresses).start()
            readers = [
                await Reader("a", greedy(A, 150)).begin(owner, generation("a", A, max_tokens=150)),
                await Reader("b", seeded(B, 150, 9, 0, 1.0)).begin(
                    owner, generation("b", B, max_tokens=150, temperature=1.0, seed=9)
                ),
                await Reader("c", greedy(C, 120)).begin(owner, generation("c", C, max_tokens=120)),
            ]
            for reader in readers:
                await reader.has(10)
            owner.executor.mute.add(Rank(1))
            await until(lambda: owner.executor.num_lost_deltas, "a step that rank 0 alone has")
            await owner.die()

            for point in POINTS:
                owner = await Owner(ranks.addresses, dies_after=point).start()
                await asyncio.wait_for(owner.point.reached.wait(), 10)
                await owner.die()

            last = await Owner(ranks.addresses).start()
            assert last.adopted is not None
            assert last.adopted.facts.epoch == len(POINTS) + 1  # the one that died of Describe had none
            for reader in readers:
                await reader.resume(last)
            for reader in readers:
                await reader.whole()
            await last.assert_works()
            await last.leave()
