"""Random traffic through every layer of a scripted server: nothing internal, nothing left behind."""

from __future__ import annotations

import asyncio
import collections
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2_grpc
from maniple.v1.inference_pb2 import AbortRequest, GenerateRequest
from maniple.v1.sampling_pb2 import SamplingParams

NUM_REQUESTS = 300
NUM_AT_ONCE = 30
VOCAB_SIZE = 260


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server with few blocks and rows: (address, log)."""
    log = tmp_path / "log"
    command = [sys.executable, "-m", "control_plane.cli", "serve", "--model", "scripted", "--listen", "127.0.0.1:0"]
    command += ["--announce", "json", "--num-kv-blocks", "40", "--max-num-seqs", "12", "--max-num-batched-tokens", "48"]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            said = json.loads(line)
            if said.get("event") == "ready":
                yield said["address"], log
                break
    finally:
        process.terminate()
        assert process.wait(20) == 0, log.read_text()[-2000:]
        process.stdout.close()


def any_sampling(rng: random.Random) -> SamplingParams:
    max_tokens = rng.randrange(1, 60)
    choices: dict[str, Any] = {
        "temperature": rng.choice([0, 1e-6, 0.3, 1, 50]),
        "top_p": rng.choice([1e-6, 0.5, 1]),
        "top_k": rng.choice([-1, 0, 1, 5, VOCAB_SIZE, 2**31 - 1]),
        "min_p": rng.choice([0, 0.1, 1]),
        "repetition_penalty": rng.choice([0.01, 1.2, 10]),
        "presence_penalty": rng.uniform(-2, 2),
        "frequency_penalty": rng.uniform(-2, 2),
        "min_tokens": rng.randrange(max_tokens + 1),
        "stop": rng.sample(["a", "ab", "é", "xxxx"], 2),
        "stop_token_ids": rng.sample(range(VOCAB_SIZE), 20),
        "include_stop_str_in_output": True,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "seed": rng.getrandbits(64),
        "n": rng.randrange(1, 5),
        "logit_bias": {token_id: rng.uniform(-100, 100) for token_id in rng.sample(range(VOCAB_SIZE), 5)},
        "bad_words": ["a", "the"],
        "truncate_prompt_tokens": rng.randrange(1, 50),
        "spaces_between_special_tokens": False,
        "logprobs": rng.randrange(21),
        "prompt_logprobs": rng.randrange(21),
        "logprobs_mode": rng.randrange(4),
    }
    chosen = {name: value for name, value in choices.items() if rng.random() < 0.3}
    return SamplingParams(max_tokens=max_tokens, **chosen)


def any_request(rng: random.Random, request_id: str) -> GenerateRequest:
    request = GenerateRequest(
        request_id=request_id,
        sampling=any_sampling(rng),
        priority=rng.randrange(-2, 3),
        only_final=rng.random() < 0.2,
        skip_text=rng.random() < 0.2,
        cache_salt=rng.choice(["", "tenant"]),
    )
    match rng.randrange(3):
        case 0:
            request.text = "hello " * rng.randrange(1, 40)
        case 1:
            request.token_ids.ids.extend(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 250)))
        case _:
            request.chat.messages.add(role="user", content="x" * rng.randrange(1, 99))
    return request


async def test_random_traffic_ends_every_stream_and_frees_every_block(server: tuple[str, Path]) -> None:
    address, log = server
    rng = random.Random(7)
    outcomes: collections.Counter[str] = collections.Counter()
    turn = asyncio.Semaphore(NUM_AT_ONCE)
    async with grpc.aio.insecure_channel(address) as channel:
        inference = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
        admin = admin_pb2_grpc.AdminServiceStub(channel)  # type: ignore[no-untyped-call, unused-ignore]

        async def group() -> admin_pb2.GroupStatus:
            status = await admin.GetStatus(admin_pb2.GetStatusRequest())
            return status.groups[0]

        async def send(request: GenerateRequest, act: float, timeout_s: float | None) -> None:
            async with turn:
                call = inference.Generate(request, timeout=timeout_s)
                last = ""
                try:
                    count = 0
                    async for event in call:
                        count += 1
                        last = event.WhichOneof("event") or ""
                        if count == 2 and act < 0.1:
                            call.cancel()
                        elif count == 2 and act < 0.2:
                            await inference.Abort(AbortRequest(request_id=request.request_id))
                    outcomes[last] += 1
                except asyncio.CancelledError:
                    outcomes["cancelled"] += 1
                except grpc.aio.AioRpcError as error:
                    outcomes[error.code().name] += 1

        before = await group()
        async with asyncio.timeout(60):
            await asyncio.gather(
                *(
                    send(any_request(rng, f"r{index}"), rng.random(), rng.choice([None, None, 30, 0.02]))
                    for index in range(NUM_REQUESTS)
                )
            )
        after = await group()
        for _ in range(200):
            if after.num_running == 0:
                break
            after = await group()
            await asyncio.sleep(0.01)
    assert set(outcomes) <= {"done", "cancelled", "DEADLINE_EXCEEDED"}, outcomes
    assert outcomes["done"] > NUM_REQUESTS / 2
    assert (after.num_running, after.num_waiting) == (0, 0)
    assert after.num_free_blocks + after.num_cached_blocks == before.num_free_blocks + before.num_cached_blocks
    assert '"level": "error"' not in log.read_text()
