"""A rank raises in a step (cases A1, for one rank), or computes something else than we think (A8)."""

from __future__ import annotations

import time

from service_chassis.scripted import fail_at
from support.faults import assert_next_group_works, forming, model_with


async def test_exception_in_a_step_is_named_with_its_class_and_step() -> None:
    async with forming(model=model_with(fail_at(0, 5, "raise"))) as live:
        await live.run_steps(4)
        sent_at = time.monotonic()
        await live.run_steps(1)
        loss = await live.lost(within_s=2.0)
        assert live.lost_at - sent_at < 1.0
        assert loss.rank == 0
        assert loss.reason.startswith("rank 0 failed in step 5: InjectedFault: ")
        assert live.result_steps == [1, 2, 3, 4]
        live.assert_tokens_exact()
    await assert_next_group_works()


async def test_wrong_token_digest_is_a_diverged_rank() -> None:
    async with forming(model=model_with(fail_at(0, 3, "wrong_digest"))) as live:
        await live.run_steps(2)
        # What the engine would say after each result, from its own tokens.
        for step in (1, 2, 3):
            live.group.expect_token_digest(step, live.token_digest(step))
        await live.run_steps(1)
        loss = await live.lost(within_s=2.0)
        assert loss.rank == 0
        assert loss.reason.startswith("rank 0 diverged: its token digest after step 3 is ")
    await assert_next_group_works()
