"""The control plane of a paused group is killed: the pause was its own, and the next owner goes on."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import grpc
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from support.takeover import Reading, Ready, all_free, prompt_of, site


async def test_requests_that_a_dead_control_plane_kept_frozen_go_on_under_the_next(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare()
        async with here.client() as client, asyncio.timeout(60):
            await Reading(client, "before", prompt_of(0, 24), 5).whole()
            reading = Reading(client, "frozen", prompt_of(1), 100)
            await reading.has(10)
            async with owner.client() as operator:
                await operator.admin.pause("keep")
                assert await operator.admin.is_paused()
            frozen_at = len(reading.token_ids)
            owner.signal(signal.SIGKILL)
            await spare.heard(Ready)
            async with spare.client() as operator:
                assert not await operator.admin.is_paused()
                assert (await operator.status()).ready
            await reading.whole()
            assert frozen_at < len(reading.expected)
        await all_free(spare)
        # Of blocks that no row held at the takeover nobody knows the tokens any more; a subscriber is told so.
        async with grpc.aio.insecure_channel(spare.address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            events = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=10)
            first = await events.read()
            assert first.snapshot.unknown_before > 0
            assert first.snapshot.blocks >= 100 // 4  # those of the request that went on
            events.cancel()
