"""Calls that tests behind proxies make: greedy generations of one prompt, whose tokens are known."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import grpc

from maniple.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from maniple_client import AsyncClient
from support.serve_process import Caller, ServeProcess

STEP_S = 0.02
MODEL = "scripted:" + json.dumps({"step_time_s": STEP_S, "sampler": "numpy"})
FLAGS = ("--model", MODEL, "--num-kv-blocks", "4000", "--max-num-seqs", "64")
PROMPT = [5, 250, 17, 0, 5]
LONG = 2000  # tokens: far longer than any test


def client(*addresses: str) -> AsyncClient:
    return AsyncClient(list(addresses), resume_for_s=5.0)


def stub_of(channel: grpc.aio.Channel) -> Any:
    """Return the service, untyped: what a stream reads is either a message or its end."""
    return inference_pb2_grpc.InferenceServiceStub(channel)


def request_of(request_id: str, max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=PROMPT),
        sampling=sampling_pb2.SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens),
    )


async def rest(call: Any) -> list[inference_pb2.GenerateResponse]:
    """Read a call that was begun to its end."""
    found = []
    while (response := await call.read()) is not grpc.aio.EOF:
        found.append(response)
    return found


def tokens_of(responses: list[inference_pb2.GenerateResponse]) -> list[int]:
    return [token for one in responses for token in one.chunk.token_ids]


async def is_idle(server: ServeProcess, *, within_s: float = 5.0) -> float:
    """Wait until the server holds nothing; return how long that took."""
    async with Caller(server) as caller:
        began = time.monotonic()
        while any(group.num_running or group.num_waiting for group in (await caller.status()).groups):
            assert time.monotonic() - began < within_s, "something still runs"
            await asyncio.sleep(0.02)
        return time.monotonic() - began
