"""The owner dies while rows sample under masks: with the masks, or between a delta and its masks (PROTOCOL B6, C4)."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from control_plane.generation import Generation
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from service_chassis.ids import Rank
from support.engine_harness import END, generation
from support.masks import greedy_choice
from support.owners import Owner, Reader
from support.remote_ranks import remote_ranks
from support.scripted_reference import greedy
from support.waiting import until

PROMPTS = [[5, 7, 11], list(range(40, 70)), [3] * 9]
# Long texts that part from each other again and again, so that a grammar that lost its place is seen.
_DRAW = random.Random(8)
OPTIONS = sorted({"".join(_DRAW.choices("ab", k=139)) for _ in range(40)})
MATE = [9, 8, 7]


def wanted(request_id: str, prompt: list[int], **more: Any) -> Generation:
    constraint = Constraint(ConstraintKind.CHOICE, options=tuple(OPTIONS))
    return generation(request_id, prompt, max_tokens=160, eos_ids=frozenset({END}), constraint=constraint, **more)


async def begin(owner: Owner) -> list[Reader]:
    readers = [
        await Reader(f"r{number}", greedy_choice(prompt, OPTIONS)).begin(owner, wanted(f"r{number}", prompt))
        for number, prompt in enumerate(PROMPTS)
    ]
    mate = Reader("mate", greedy(MATE, 150))
    readers.append(await mate.begin(owner, mate.wanted(MATE)))
    for reader in readers:
        await reader.has(10)
    return readers


async def go_on(owner: Owner, readers: list[Reader]) -> None:
    for reader in readers:
        await reader.resume(owner)
    for reader in readers:
        await reader.whole()
    await until(lambda: len({status.completed for status in owner.group.ranks()}) == 1, "one step on all ranks")
    await owner.assert_works()
    await owner.leave()


async def test_next_owner_follows_each_grammar_from_where_its_output_is(tmp_path: Path) -> None:
    with remote_ranks(1, directory=tmp_path) as ranks:
        async with asyncio.timeout(90):
            first = await Owner(ranks.addresses).start()
            readers = await begin(first)
            await first.die()
            second = await Owner(ranks.addresses).start()
            await go_on(second, readers)


@pytest.mark.parametrize(
    ("depth", "unheard"),
    [(1, None), (4, 0), (4, 1)],
    ids=["lock-step", "rank-1-is-ahead", "rank-0-is-ahead"],
)
async def test_rows_whose_masks_died_lose_no_token(tmp_path: Path, depth: int, unheard: int | None) -> None:
    with remote_ranks(2, directory=tmp_path) as ranks:
        async with asyncio.timeout(90):
            first = await Owner(ranks.addresses, max_steps_in_flight=depth).start()
            readers = await begin(first)
            first.executor.loses_masks = True
            if unheard is not None:
                first.executor.mute.add(Rank(unheard))
            # Rank 0 waits for masks, or for a step that it will not get; and so do the masks of the steps behind.
            await until(lambda: first.executor.num_lost_masks or first.executor.num_lost_deltas, "a loss")
            await asyncio.sleep(0.05)
            await first.die()

            second = await Owner(ranks.addresses).start()
            assert second.adopted is not None
            assert second.adopted.snapshot is not None
            rows = {row.request_id: row for row in second.adopted.snapshot.rows}
            if first.executor.num_lost_masks:
                assert all(rows[reader.request_id].is_void for reader in readers[:-1])
            assert not rows[readers[-1].request_id].is_void
            await go_on(second, readers)


async def test_owner_after_the_next_one_finds_rows_void_still(tmp_path: Path) -> None:
    with remote_ranks(1, directory=tmp_path) as ranks:
        async with asyncio.timeout(90):
            first = await Owner(ranks.addresses).start()
            readers = await begin(first)
            first.executor.loses_masks = True
            await until(lambda: first.executor.num_lost_masks, "a mask that got lost")
            await first.die()
            # It has voided the masks, and does not come to a delta of its own.
            second = await Owner(ranks.addresses, dies_after="Snapshot 0").start()
            await second.die()
            third = await Owner(ranks.addresses).start()
            await go_on(third, readers)


async def test_stream_that_breaks_in_place_of_a_mask_brings_it_again(tmp_path: Path) -> None:
    with remote_ranks(1, directory=tmp_path) as ranks:
        async with asyncio.timeout(90):
            owner = await Owner(ranks.addresses).start()
            readers = await begin(owner)
            owner.executor.num_breaks_left = 5
            await until(lambda: not owner.executor.num_breaks_left, "five broken streams")
            for reader in readers:
                await reader.whole()
            assert owner.group.ranks()[0].connected
            await owner.assert_works()
            await owner.leave()
