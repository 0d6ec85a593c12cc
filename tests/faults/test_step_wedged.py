"""The device hangs in a step while the servers still answer (cases A3): stuck is not healthy."""

from __future__ import annotations

import time

from service_chassis.scripted import fail_at
from support.faults import assert_next_group_works, forming, model_with

STEP_TIMEOUT_S = 0.5


async def test_wedged_step_is_lost_within_its_budget_and_a_second() -> None:
    async with forming(model=model_with(fail_at(0, 3, "hang")), step_timeout_s=STEP_TIMEOUT_S) as live:
        await live.run_steps(2)
        pid = live.pid
        sent_at = time.monotonic()
        live.send_step()
        loss = await live.lost(within_s=STEP_TIMEOUT_S + 1.0)
        assert live.lost_at - sent_at > STEP_TIMEOUT_S * 0.9
        assert loss.rank == 0
        assert loss.reason.startswith("rank 0 was stuck in step 3 for 0.")
        assert not live.group.healthy
        assert pid
        ended_at = time.monotonic()
        await live.group.teardown("again")
        assert time.monotonic() - ended_at < 3.0
    await assert_next_group_works()


async def test_slow_step_within_its_budget_is_no_loss() -> None:
    async with forming(model=model_with(step_time_s=0.3), step_timeout_s=2.0) as live:
        await live.run_steps(3)
        assert not live.losses
        live.assert_tokens_exact()
