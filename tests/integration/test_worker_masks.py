"""Rows that wait for a mask, in plain protocol messages: real worker processes, and owners that die (PROTOCOL B6)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from maniple.v1 import worker_pb2
from support.masks import greedy_under, sample_input, void
from support.raw_owner import RawOwner, snapshot_of, worker_processes
from support.scripted_reference import greedy
from support.worker_process import DeltaMaker, Goodbye, worker_process

PROMPT = [5, 250, 17, 0, 5]
OTHER = [9, 8, 7]
EVEN, ODD = range(0, 260, 2), range(1, 260, 2)


async def test_masked_row_samples_what_its_mask_allows_and_its_mate_what_it_likes(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        maker = DeltaMaker()
        known = list(PROMPT)
        for step, ids in enumerate((EVEN, ODD, [250, 256], [3]), start=1):
            new = {0: PROMPT, 3: OTHER} if step == 1 else None
            await steps.send(delta=maker.make(new=new, awaits_mask=[0]))
            await steps.send(sample_input=sample_input(step, {0: ids}))
            result = await steps.result()
            assert list(result.token_ids) == [greedy_under(known, ids), greedy(OTHER, step)[-1]]
            known.append(result.token_ids[0])


async def test_of_several_masks_for_a_step_the_first_counts_also_before_its_delta(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        maker = DeltaMaker()
        await steps.send(sample_input=sample_input(1, {0: EVEN}))
        await steps.send(sample_input=sample_input(1, {0: ODD}))
        await steps.send(delta=maker.make(new={0: PROMPT}, awaits_mask=[0]))
        await steps.send(sample_input=void(1, 0))
        first = greedy_under(PROMPT, EVEN)
        assert list((await steps.result()).token_ids) == [first]
        # For a step that is done, and for one that nobody will ever see.
        await steps.send(sample_input=sample_input(1, {0: ODD}))
        await steps.send(sample_input=sample_input(10_000, {0: ODD}))
        await steps.send(delta=maker.make())
        assert list((await steps.result()).token_ids) == [greedy([*PROMPT, first], 1)[0]]


async def test_clock_of_a_step_stands_still_while_it_waits_for_its_owner(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        maker = DeltaMaker()
        await steps.send(delta=maker.make(new={0: PROMPT}, awaits_mask=[0]))
        report = await worker.report_where(lambda report: report.running_step == 1)
        later = [await worker.report_where(lambda report: report.running_step == 1) for _ in range(10)][-1]
        # Ten reports take at least a tenth of a second.
        assert later.running_for_ms == report.running_for_ms < 100
        await steps.send(sample_input=sample_input(1, {0: [7]}))
        assert list((await steps.result()).token_ids) == [7]


async def test_mask_that_does_not_fit_its_step_fails_the_rank(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        await steps.send(delta=DeltaMaker().make(new={0: PROMPT, 2: OTHER}, awaits_mask=[0, 2]))
        await steps.send(sample_input=sample_input(1, {2: EVEN}))
        report = await steps.report_where(lambda report: report.HasField("failure"))
        assert report.failure.kind == "DeltaRefused"
        assert "req_indices=[2]: must be the rows that wait, [0, 2]" in report.failure.message


async def test_mask_of_a_stale_epoch_is_dropped(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        await steps.send(delta=DeltaMaker().make(new={0: PROMPT}, awaits_mask=[0]))
        await worker.report_where(lambda report: report.running_step == 1)
        await worker.join(2, "B", force=True)
        stale, _ = await worker.open(2, "B")
        stale.epoch = 1
        await stale.send(sample_input=sample_input(1, {0: [3]}))
        stale.epoch = 2
        await stale.send(sample_input=sample_input(1, {0: [4]}))
        assert list((await stale.result()).token_ids) == [4]


@asynccontextmanager
async def masked_group(directory: Path, world_size: int) -> AsyncIterator[tuple[RawOwner, DeltaMaker, list[int]]]:
    """A group whose owner has a masked row 1 with two tokens of output, and a free row 3 with one."""
    async with worker_processes(directory, world_size) as workers:
        owner = RawOwner(workers, "A", 1)
        await owner.form()
        maker, known = DeltaMaker(), list(PROMPT)
        for step in (1, 2):
            new = {1: PROMPT} if step == 1 else {3: OTHER}
            await owner.send(maker.make(new=new, awaits_mask=[1]))
            await owner.send_sample_input(sample_input(step, {1: EVEN}))
            known.append((await owner.streams[0].result()).token_ids[0])
        yield owner, maker, known
        await owner.fall_silent()


@pytest.mark.parametrize("world_size", [1, 2])
async def test_row_whose_mask_died_samples_nothing_until_an_owner_resumes_it(tmp_path: Path, world_size: int) -> None:
    async with masked_group(tmp_path, world_size) as (owner, maker, known):
        # Two steps are on their way that nobody will say the masks of; one of them the last rank has not got.
        await owner.send(maker.make(awaits_mask=[1]))
        await owner.send(maker.make(awaits_mask=[1]), [0])
        await owner.workers[0].report_where(lambda report: report.accepted == 4)
        await owner.die()
        adopter = RawOwner(owner.workers, "B", 2)
        await adopter.claim_when_lapsed()
        last = await adopter.level_up()
        for step in (3, 4):
            await adopter.send_sample_input(void(step, 1))
        await adopter.completed(last)
        taken = await snapshot_of(adopter.workers[0], 2)
        assert taken.tokens(1) == known
        assert taken.rows[1].mask_void
        assert taken.rows[1].num_computed_tokens == len(known) + 1  # as deltas count it, padding and all
        assert taken.tokens(3) == OTHER + greedy(OTHER, 3)
        assert not taken.rows[3].mask_void
        # Left alone it goes on computing padding; its mate gets its tokens.
        maker = taken.delta_maker()
        await adopter.send(maker.make())
        result = await adopter.streams[0].result()
        assert (list(result.token_ids), list(result.num_tokens)) == (greedy(OTHER, 4)[-1:], [0, 1])
        # And it comes back with what it knows.
        await adopter.send(maker.make(resumed={1: len(known)}, awaits_mask=[1]))
        await adopter.send_sample_input(sample_input(6, {1: ODD}))
        result = await adopter.streams[0].result()
        assert result.token_ids[0] == greedy_under(known, ODD)
        known.append(result.token_ids[0])
        await adopter.send(maker.make())
        result = await adopter.streams[0].result()
        assert (list(result.token_ids), list(result.num_tokens)) == ([greedy(known, 1)[0], greedy(OTHER, 6)[-1]], [])
        await adopter.completed(7)
        await adopter.fall_silent()


async def test_mask_that_reached_the_output_rank_counts_and_the_adopters_void_does_not(tmp_path: Path) -> None:
    async with masked_group(tmp_path, 2) as (owner, maker, known):
        await owner.send(maker.make(awaits_mask=[1]), [0])
        await owner.send_sample_input(sample_input(3, {1: ODD}))
        await owner.workers[0].report_where(lambda report: report.running_step == 3)
        await owner.die()
        adopter = RawOwner(owner.workers, "B", 2)
        await adopter.claim_when_lapsed()
        await adopter.open(last_result_step=2)
        # Rank 0 waits in the collective for rank 1, with the mask in hand.
        await adopter.send_sample_input(void(3, 1))
        deltas = (await adopter.workers[0].stub.FetchDeltas(worker_pb2.FetchDeltasRequest(epoch=2, from_step=3))).deltas
        await adopter.send(deltas[0], [1])
        await adopter.completed(3)
        taken = await snapshot_of(adopter.workers[0], 2)
        assert taken.tokens(1) == [*known, greedy_under(known, ODD)]
        assert not taken.rows[1].mask_void
        await adopter.fall_silent()


async def test_plan_of_a_dead_owner_that_counts_on_a_dead_mask_is_padding(tmp_path: Path) -> None:
    async with masked_group(tmp_path, 1) as (owner, maker, known):
        await owner.send(maker.make(awaits_mask=[1]))
        # It meant to preempt the row with the token that the mask was to give it.
        await owner.send(maker.make(resumed={1: len(known) + 1}, awaits_mask=[1]))
        await owner.workers[0].report_where(lambda report: report.accepted == 4)
        await owner.die()
        adopter = RawOwner(owner.workers, "B", 2)
        await adopter.claim_when_lapsed()
        await adopter.level_up()
        for step in (3, 4):
            await adopter.send_sample_input(void(step, 1))
        await adopter.completed(4)
        taken = await snapshot_of(adopter.workers[0], 2)
        assert taken.tokens(1) == known
        assert taken.rows[1].mask_void
        maker = taken.delta_maker()
        await adopter.send(maker.make(resumed={1: len(known)}, awaits_mask=[1]))
        await adopter.send_sample_input(sample_input(5, {1: EVEN}))
        assert (await adopter.streams[0].result()).token_ids[0] == greedy_under(known, EVEN)
        await adopter.fall_silent()


async def test_blocks_of_a_void_row_are_named_by_what_it_knows_alone(tmp_path: Path) -> None:
    async with masked_group(tmp_path, 1) as (owner, maker, known):
        assert len(known) == 7
        for _ in range(3):  # computes up to position 9: two blocks of four are full, one of them of padding
            await owner.send(maker.make(awaits_mask=[1]))
        await owner.workers[0].report_where(lambda report: report.accepted == 5)
        await owner.die()
        adopter = RawOwner(owner.workers, "B", 2)
        await adopter.claim_when_lapsed()
        await adopter.level_up()
        for step in (3, 4, 5):
            await adopter.send_sample_input(void(step, 1))
        await adopter.completed(5)
        taken = await snapshot_of(adopter.workers[0], 2)
        table = list(taken.rows[1].request.blocks[0].replace.ids)
        maker = taken.delta_maker()
        await adopter.send(maker.make(resumed={1: len(known)}))
        await adopter.streams[0].result()
        await adopter.completed(6)
        taken = await snapshot_of(adopter.workers[0], 2)
        assert set(taken.hashes) & set(table) == {table[0]}
        await adopter.fall_silent()


async def test_release_lets_a_step_that_waits_go(tmp_path: Path) -> None:
    async with worker_process(tmp_path) as worker:
        await worker.make_ready()
        steps, _ = await worker.open()
        await steps.send(delta=DeltaMaker().make(new={0: PROMPT}, awaits_mask=[0]))
        await worker.report_where(lambda report: report.running_step == 1)
        await steps.send(goodbye=Goodbye(kind=Goodbye.KIND_RELEASE))
        assert await steps.end() is None
        # Only a device thread that is free goes through the stages again.
        await worker.make_ready(2)
        steps, _ = await worker.open(2)
        await steps.send(delta=DeltaMaker().make(new={0: PROMPT}))
        assert list((await steps.result()).token_ids) == greedy(PROMPT, 1)
