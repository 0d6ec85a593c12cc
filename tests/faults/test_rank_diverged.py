"""A rank computes something else than the others (cases A8): it is named, and not one token more is sent."""

from __future__ import annotations

from service_chassis.scripted import fail_at
from support.served_ranks import served_ranks


async def test_diverged_rank_is_named_and_the_group_is_lost() -> None:
    async with served_ranks(fail_at(1, 40, "wrong_digest")) as served:
        served.begin()
        await served.assert_lost(
            r"rank 1 diverged: its token digest after step [4-9]\d is [0-9a-f]{16}, not [0-9a-f]{16}",
            within_s=1.0,  # it is seen with the rank's next report
        )
        await served.assert_gone(within_s=2.0)
        await served.assert_next_works()
