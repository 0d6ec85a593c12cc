"""A server whose workers end with it is killed: its clients learn at once that there is nothing to resume."""

from __future__ import annotations

import asyncio
import json
import signal
import time

import pytest

from maniple_client import AsyncClient, AsyncGenerationStream, TransportLost
from maniple_client.recovery import RESUME_FOR_S
from support.scripted_reference import greedy
from support.serve_process import serving

SERVER = ("--model", "scripted:" + json.dumps({"step_time_s": 0.01, "sampler": "numpy"}), "--executor", "uni")
PROMPT = [5, 250, 17]


def ask(client: AsyncClient, max_tokens: int) -> AsyncGenerationStream:
    return client.generate(token_ids=PROMPT, temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


async def test_client_is_told_to_start_over_at_once_when_nobody_can_take_over() -> None:
    with serving(*SERVER) as server:
        async with AsyncClient(server.address) as client, asyncio.timeout(60):
            stream = ask(client, 2000)
            while not stream.transcript.samples:
                await anext(stream)
            assert stream.transcript.started is not None
            assert stream.transcript.started.resume_token == ""
            server.signal(signal.SIGKILL)
            killed_at = time.monotonic()
            with pytest.raises(TransportLost):
                await stream.text()
            assert time.monotonic() - killed_at < RESUME_FOR_S / 3
            told = stream.transcript.samples[0].token_ids
            assert told == greedy(PROMPT, len(told))
    with serving(*SERVER) as server:
        async with AsyncClient(server.address) as client, asyncio.timeout(60):
            stream = ask(client, 9)
            await stream.text()
            assert stream.transcript.samples[0].token_ids == greedy(PROMPT, 9)
