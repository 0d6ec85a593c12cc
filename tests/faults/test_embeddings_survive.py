"""An embedding whose group or control plane is lost: its client gets the vector all the same, and nothing is held."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np

from control_plane.generation import Embedded, Generation, PoolingChoice
from service_chassis.scripted import fail_at
from support.engine_harness import generation
from support.faults import model_with
from support.fleet_harness import running_fleet
from support.scripted_reference import vector
from support.takeover import all_free, site
from support.waiting import until

PROMPT = [(5 * place) % 251 for place in range(120)]


def embedding(request_id: str, kind: str) -> Generation:
    one = generation(request_id, PROMPT, max_tokens=1, skip_reading_prefix_cache=kind == "mean")
    return replace(one, pooling=PoolingChoice(is_mean=kind == "mean", normalize=False))


async def test_embeddings_are_computed_anew_in_another_group_when_theirs_is_lost_in_mid_prompt() -> None:
    breaks = model_with(fail_at(0, 4, "raise"), step_time_s=0.005)  # with the mean of some chunks summed up
    again = model_with(step_time_s=0.005)
    async with running_fleet([breaks, again], again, max_num_batched_tokens=24) as running, asyncio.timeout(60):
        kinds = ["mean", "last"] * 4
        streams = [await running.fleet.generate(embedding(f"r{k}", kind)) for k, kind in enumerate(kinds)]

        async def read(stream: object) -> list[object]:
            return [event async for event in stream]  # type: ignore[attr-defined]

        for kind, events in zip(kinds, await asyncio.gather(*map(read, streams)), strict=True):
            (embedded,) = [event for event in events if isinstance(event, Embedded)]
            np.testing.assert_allclose(embedded.vector, vector(PROMPT, kind), rtol=0, atol=1e-6)
            assert [type(event).__name__ for event in events].count("Started") == 1
        ((reason, _),) = running.groups[0].losses
        assert reason.startswith("rank 0 failed in step 4: InjectedFault: ")
        await running.formed_anew(0)
        await running.settled()


async def test_embedding_is_asked_again_by_its_client_when_the_control_plane_was_killed(tmp_path: Path) -> None:
    prompt = [(7 * place) % 255 for place in range(1500)]
    async with asyncio.timeout(60), site(tmp_path) as one:
        owner, spare = await one.owner_and_spare("--max-num-batched-tokens", "16")
        async with one.client() as client:
            asked = asyncio.create_task(client.embed(token_ids=prompt, pooling="mean", normalize=False, timeout_s=40))

            async def is_running() -> bool:
                (group,) = (await owner.status()).groups
                return bool(group.num_running and group.step > 3)

            while not await is_running():
                assert not asked.done()
            owner.process.kill()
            got = await asked
            np.testing.assert_allclose(got.vector, vector(prompt, "mean"), rtol=0, atol=1e-6)
            assert got.num_prompt_tokens == 1500
            # What was adopted of it is not computed to its end for nobody.
            await until(lambda: len(spare.events("request.finished")) == 2, "both are over")
            assert sorted(line["reason"] for line in spare.events("request.finished")) == ["abort", "stop"]
            await all_free(spare)
