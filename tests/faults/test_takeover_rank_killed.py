"""A rank dies with the control plane, or inside the takeover (cases A13): what a survivor knows is not lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from control_plane.generation import Cursor
from service_chassis.errors import PermissionDenied, ResumeLost, UnknownRequest
from service_chassis.ids import Rank, RequestId
from support.engine_harness import collect, generation
from support.fleet_harness import running_fleet
from support.owners import MODEL, Owner, Reader
from support.remote_ranks import RemoteRanks, remote_ranks
from support.scripted_reference import greedy, seeded
from support.waiting import until

A, B, C = [5, 7, 11], list(range(40, 70)), [250] * 9


async def restart_what_ends(ranks: RemoteRanks) -> None:
    """Be the orchestrator."""
    while True:
        for rank, process in list(ranks.processes.items()):
            if process.poll() is not None:
                ranks.start(rank)
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("when", ["with-the-owner", "in-the-level-up"])
async def test_requests_are_computed_anew_from_what_a_survivor_knew_when_a_rank_is_killed(
    tmp_path: Path, when: str
) -> None:
    with remote_ranks(2, directory=tmp_path) as ranks:
        async with asyncio.timeout(90):
            first = await Owner(ranks.addresses).start()
            short = await Reader("short", greedy(C, 5)).begin(first, generation("short", C, max_tokens=5))
            readers = [
                await Reader("a", greedy(A, 120)).begin(first, generation("a", A, max_tokens=120)),
                await Reader("b", seeded(B, 120, 9, 0, 1.0)).begin(
                    first, generation("b", B, max_tokens=120, temperature=1.0, seed=9)
                ),
            ]
            await short.whole()
            for reader in readers:
                await reader.has(10)
            first.executor.mute.add(Rank(1))
            await until(lambda: first.executor.num_lost_deltas, "a step that rank 0 alone has")
            await first.die()
            pids = {rank: process.pid for rank, process in ranks.processes.items()}
            orchestrator = asyncio.create_task(restart_what_ends(ranks))
            if when == "with-the-owner":
                ranks.kill(1)
            else:
                second = await Owner(ranks.addresses, dies_after="hello 1").start()
                ranks.kill(1)
                await second.die()
            async with running_fleet(
                MODEL,
                executor="remote",
                worker_addresses=(ranks.addresses,),
                tensor_parallel_size=2,
                block_size=4,
                lease_s=0.6,
            ) as running:
                fleet = running.fleet
                assert all(process.pid != pids[rank] for rank, process in ranks.processes.items()), "not formed anew"
                for reader in readers:
                    await reader.resume(fleet)
                for reader in readers:
                    await reader.whole()
                # What had ended is still told, to whoever has the right to it, and nothing else is made up.
                again = Reader("short", greedy(C, 5))
                again.token = short.token
                await (await again.resume(fleet)).whole()
                beyond = Cursor(index=0, num_tokens=6)
                with pytest.raises(ResumeLost):
                    await fleet.resume(RequestId("short"), short.token, "", [beyond])
                with pytest.raises(PermissionDenied):
                    await fleet.resume(RequestId("short"), readers[0].token, "", [])
                with pytest.raises(UnknownRequest):
                    await fleet.resume(RequestId("never"), short.token, "", [])
                following = await collect(await fleet.generate(generation("following", [3, 1, 4], max_tokens=6)))
                assert following.token_ids[0] == greedy([3, 1, 4], 6)
                await running.settled()
            orchestrator.cancel()
