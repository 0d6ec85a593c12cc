"""Sleep across owners: a group that is taken over asleep, and weights that only some ranks took."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from control_plane.dormancy import Dormancy
from control_plane.fleet import Fleet
from control_plane.group.loss import GroupNotFormed
from control_plane.pause import PauseMode
from maniple.v1 import worker_pb2
from service_chassis.errors import InvalidParameter, WrongState
from service_chassis.ids import Rank
from support.engine_harness import collect, generation
from support.faults import WORKER
from support.owners import Owner, Reader
from support.remote_ranks import remote_ranks
from support.scripted_reference import greedy
from support.tiny_checkpoints import tiny_config, tiny_tensors, write_checkpoint

SLEEPY = replace(WORKER, enable_sleep_mode=True, num_threads=1)
PROMPT = [9, 8, 7, 6, 5]
Update = worker_pb2.WorkerServiceUpdateWeightsRequest


async def stand_still(owner: Owner) -> Dormancy:
    owner.engine.pause(PauseMode.KEEP)
    await owner.engine.stand_still()
    with owner.engine.without_steps():
        await owner.engine.empty_cache()
    return owner.engine.dormancy


@pytest.mark.parametrize("woken", [[], ["weights"]], ids=["all-asleep", "weights-awake"])
async def test_group_is_taken_over_asleep_and_its_requests_go_on_when_it_wakes(
    tmp_path: Path, woken: list[str]
) -> None:
    with remote_ranks(2, SLEEPY, directory=tmp_path) as ranks:
        async with asyncio.timeout(60):
            first = await Owner(ranks.addresses).start()
            reader = Reader("kept", greedy(PROMPT, 150))
            await reader.begin(first, reader.wanted(PROMPT))
            await reader.has(10)
            dormancy = await stand_still(first)
            assert sum(one.freed_bytes for one in await dormancy.sleep(1)) == 2 * 400 * 4 * 8
            if woken:
                await dormancy.wake_up(woken)
            await first.die()
            second = await Owner(ranks.addresses).start()
            assert second.adopted is not None
            assert second.adopted.facts.asleep == {"weights", "kv_cache"} - set(woken)
            fleet = Fleet()
            fleet.take(second.engine)
            assert fleet.rest.tags == [*({"weights"} - set(woken)), "kv_cache", "scheduling"]
            assert [view.state for view in fleet.status().groups] == ["asleep"]
            await reader.resume(fleet)
            told = len(reader.token_ids)
            step = second.engine.status().step
            await fleet.rest.sleep(1, PauseMode.KEEP)  # what sleeps sleeps, and what does not is put to sleep
            await fleet.rest.wake_up(["weights"])
            assert len(reader.token_ids) == told
            assert second.engine.status().ranks[0].completed <= step + 1  # nothing but what says that the cache is gone
            await fleet.rest.wake_up(())
            await reader.whole()
            assert fleet.ready
            await second.assert_works()
            await second.leave()


def seen_by_one(directory: Path, seed: int, **changed: Any) -> Path:
    """A directory that is some rank's own, with a checkpoint under a name that all know."""
    config = tiny_config("LlamaForCausalLM", vocab_size=210, num_key_value_heads=2, num_attention_heads=4)
    write_checkpoint(directory / "next", config, {**tiny_tensors(config, seed=seed), **changed})
    return directory


async def test_checkpoint_that_one_rank_refuses_is_taken_by_none_and_half_an_update_is_never_served(
    tmp_path: Path,
) -> None:
    import torch

    model = seen_by_one(tmp_path / "model", 1) / "next"
    good, bad = (
        seen_by_one(tmp_path / "good", 2),
        seen_by_one(tmp_path / "bad", 2, **{"lm_head.weight": torch.zeros(1)}),
    )
    settings = {"model": str(model), "dtype": "float32"}
    (tmp_path / "sockets").mkdir()
    with remote_ranks(2, SLEEPY, directory=tmp_path / "sockets", cwd=good, start=False) as ranks:
        ranks.start(0)
        ranks._cwd = bad
        ranks.start(1)
        async with asyncio.timeout(100):
            first = await Owner(ranks.addresses, **settings).start()
            want = (await collect(await first.engine.generate(generation("a", PROMPT)))).token_ids
            dormancy = await stand_still(first)
            with pytest.raises(InvalidParameter, match=r"rank 1: .*lm_head\.weight must have shape"):
                await dormancy.stage_weights("/proc/self/cwd/next")
            commit = Update(epoch=1, after_step=first.engine.status().step, phase=Update.PHASE_COMMIT)
            with pytest.raises(WrongState, match="no weights were read"):  # rank 0 has let go of them
                await first.executor.call(Rank(0), "UpdateWeights", commit, timeout_s=30)
            first.engine.unpause()
            again = await collect(await first.engine.generate(generation("b", PROMPT)))
            assert again.token_ids == want

            # An owner that dies between two commits leaves ranks that nobody takes over as they are.
            dormancy = await stand_still(first)
            for phase in (Update.PHASE_STAGE, Update.PHASE_COMMIT):
                request = Update(
                    epoch=1, after_step=first.engine.status().step, path="/proc/self/cwd/next", phase=phase
                )
                await first.executor.call(Rank(0), "UpdateWeights", request, timeout_s=30)
            await first.die()
            second = Owner(ranks.addresses, **settings)
            with pytest.raises(GroupNotFormed, match="rank 1 has weights from 'its model', and rank 0 others"):
                await second.start()
