"""The owner is stopped past its lease, replaced, and woken again (cases A10)."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from control_plane.executors.rpc_errors import error_of_call
from maniple.v1 import errors_pb2, inference_pb2, inference_pb2_grpc
from service_chassis.errors import TakenOver
from support.takeover import Lost, Reading, Ready, StageProgress, all_free, prompt_of, site


async def test_owner_that_was_replaced_in_its_sleep_ends_its_clients_and_touches_nothing(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare()
        async with (
            here.client() as client,
            grpc.aio.insecure_channel(owner.address) as plain,
            asyncio.timeout(60),
        ):
            # Its stream stays at the owner all the while, and nobody resumes it.
            request = inference_pb2.GenerateRequest(
                request_id="held", token_ids={"ids": prompt_of(9)}, sampling={"max_tokens": 3000, "ignore_eos": True}
            )
            held = inference_pb2_grpc.InferenceServiceStub(plain).Generate(request)
            assert (await held.read()).WhichOneof("event") == "started"
            reading = Reading(client, "moves", prompt_of(1), 250)
            await reading.has(10)
            owner.signal(signal.SIGSTOP)
            await spare.heard(Ready)
            num_before = len(reading.token_ids)
            owner.signal(signal.SIGCONT)
            await owner.heard(Lost)
            # Both streams end TAKEN_OVER; one of the clients resumes by itself, the other is a plain stub.
            messages: list[inference_pb2.GenerateResponse] = []
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await read_on(held, messages)
            assert ended.value.code() is grpc.StatusCode.ABORTED
            assert messages[-1].error.reason == errors_pb2.ERROR_REASON_TAKEN_OVER
            assert messages[-1].error.owner_address == spare.address
            refused = error_of_call(ended.value)
            assert isinstance(refused, TakenOver)
            assert refused.metadata["owner_address"] == spare.address
            await reading.whole()
            assert len(reading.token_ids) > num_before
            # The one that was replaced waits like any other spare, for as long as the new owner lives.
            await owner.heard(StageProgress, "wait")
            assert owner.is_alive
            assert (await owner.status()).groups[0].state == "held"
            # ... and takes the group back when that one is gone.
            again = Reading(client, "again", prompt_of(2), 80)
            await again.has(5)
            spare.signal(signal.SIGKILL)
            await owner.heard(Ready, times=2)
            await again.whole()
            assert (await owner.status()).groups[0].epoch == 3
            await client.abort("held")
        await all_free(owner)


async def read_on(call: Any, messages: list[inference_pb2.GenerateResponse]) -> None:
    """Keep what a stream brings until it ends."""
    while (message := await call.read()) is not grpc.aio.EOF:
        messages.append(message)
