"""Eight clients end their requests (cases C1): by resetting their streams, and by ``Abort``."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from maniple.v1 import inference_pb2
from support.faults import model_with
from support.scripted_reference import greedy
from support.serve_process import Caller, Stream, serving
from support.waiting import until

PROMPT = [5, 250, 17, 0, 5]
NUM_BLOCKS = 600


async def all_free(caller: Caller, *, within_s: float) -> None:
    """Wait until nothing runs or waits, and every block is free or cached."""
    deadline = time.monotonic() + within_s
    while True:
        (group,) = (await caller.status()).groups
        if group.num_running == group.num_waiting == 0:
            assert group.num_free_blocks + group.num_cached_blocks == NUM_BLOCKS - 1
            return
        assert time.monotonic() < deadline, f"not free after {within_s} s: {group}"
        await asyncio.sleep(0.01)


async def eight(caller: Caller, name: str) -> list[Stream]:
    """Begin eight streams, of which four run and four wait."""
    streams = [caller.generate(f"{name}-{number}", [*PROMPT, number], 2000) for number in range(8)]
    await until(lambda: sum(bool(stream.token_ids) for stream in streams) == 4, "four run")
    (group,) = (await caller.status()).groups
    assert (group.num_running, group.num_waiting) == (4, 4)
    return streams


@pytest.mark.parametrize("executor", ["uni", "mp"])
async def test_cancelled_and_aborted_requests_leave_nothing_behind(executor: str) -> None:
    words = ("--model", model_with(step_time_s=0.01), "--max-num-seqs", "4", "--num-kv-blocks", str(NUM_BLOCKS))
    with serving(*words, "--executor", executor, "--num-threads", "1") as server:
        async with Caller(server) as caller, asyncio.timeout(60):
            streams = await eight(caller, "reset")
            for stream in streams:
                stream.cancel()
            await all_free(caller, within_s=1.0)
            for stream in streams:
                await stream.end()
                assert not stream.finishes

            streams = await eight(caller, "aborted")
            for stream in streams:
                aborted = await caller.inference.Abort(inference_pb2.AbortRequest(request_id=stream.request_id))
                assert aborted.was_running
            await all_free(caller, within_s=1.0)
            for number, stream in enumerate(streams):
                await stream.end()
                assert stream.error is None
                assert [one.reason for one in stream.finishes] == [inference_pb2.FINISH_REASON_ABORT]
                assert stream.is_done
                assert stream.token_ids == greedy([*PROMPT, number], len(stream.token_ids))

            following = await caller.generate("aborted-0", PROMPT, 5).end()  # an aborted id is free at once
            assert following.token_ids == greedy(PROMPT, 5)
            await all_free(caller, within_s=1.0)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
