"""One of two workers never appears (cases A7): the start ends at its deadline and names it, with its address."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import grpc

from control_plane.announcement import Stopping
from maniple.v1 import inference_pb2, inference_pb2_grpc
from support.faults import is_alive
from support.remote_ranks import remote_ranks
from support.takeover import ControlPlane, Reading, Ready, StageProgress, all_free, prompt_of

DEADLINE_S = 1.5
FLAGS = ("--startup-timeout-s", str(DEADLINE_S), "--log-level", "error")


async def refusal(address: str) -> grpc.aio.AioRpcError:
    """Ask for a generation, which must be refused."""
    async with grpc.aio.insecure_channel(address) as channel:
        request = inference_pb2.GenerateRequest(token_ids={"ids": [1, 2]}, sampling={"max_tokens": 3})
        try:
            async for _ in inference_pb2_grpc.InferenceServiceStub(channel).Generate(request, timeout=5):
                pass
        except grpc.aio.AioRpcError as error:
            return error
    raise AssertionError("it was served")


async def test_missing_worker_is_named_with_its_address_when_the_start_ends_at_its_deadline(tmp_path: Path) -> None:
    with remote_ranks(2, directory=tmp_path, start=False) as ranks:
        ranks.start(0)
        first = ControlPlane("a", tmp_path, ranks.addresses, *FLAGS)
        try:
            began = await first.heard(StageProgress, "start")
            refused = await refusal(first.address)
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
            assert "not accepting requests" in (refused.details() or "")
            assert await first.exit_code() == 1
            took_s = time.monotonic() - began
            (stopping,) = [one for _, one in first.announced if isinstance(one, Stopping)]
            assert stopping.reason.startswith("rank 1 failed at start: Describe: not found")
            assert ranks.addresses[1] in stopping.reason
            assert [line["event"] for line in first.events("group.not_formed")] == ["group.not_formed"]
            assert DEADLINE_S - 0.1 < took_s < DEADLINE_S + 5.0  # the end of a process on a busy machine
        finally:
            first.close()
        # Nothing of it is left, and the worker that is there is not ours to end.
        assert {name for name in os.listdir(tmp_path) if ".sock" in name} == {"r0.sock", "r0.sock-health"}
        assert is_alive(ranks.processes[0].pid)

        ranks.start(1)
        later = ControlPlane("a", tmp_path, ranks.addresses)
        try:
            await later.heard(Ready)
            async with asyncio.timeout(30):
                async with later.client() as client:
                    await Reading(client, "r", prompt_of(1), 10).whole()
            await all_free(later)
            later.signal(signal.SIGTERM)
            assert await later.exit_code() == 0
        finally:
            later.close()
