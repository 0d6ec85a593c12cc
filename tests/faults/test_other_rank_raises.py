"""A rank that is not the output rank raises in a step (cases A1): nobody asked it for an answer, and all hear of it."""

from __future__ import annotations

from service_chassis.scripted import fail_at
from support.served_ranks import served_ranks


async def test_exception_on_another_rank_ends_every_stream_with_rank_and_class() -> None:
    async with served_ranks(fail_at(1, 40, "raise")) as served:
        served.begin()
        await served.assert_lost(r"rank 1 failed in step 40: InjectedFault: injected at rank 1, step 40", within_s=0.5)
        assert max(len(stream.token_ids) for stream in served.streams) <= 39
        await served.assert_gone(within_s=2.0)
        await served.assert_next_works()
