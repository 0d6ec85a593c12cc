"""The control plane is stopped and continued (cases A10): it gives no verdict out of its own silence."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import ExitStack

from control_plane.announcement import Lost
from support.faults import SHORT_TIMES, is_stopped, model_with
from support.scripted_reference import greedy
from support.serve_process import SERVING, Caller, serving
from support.waiting import until

# Longer than the heartbeat timeout, the lease and the step's budget together.
STOPPED_S = sum(SHORT_TIMES.values())
WORDS = (
    *("--model", model_with(step_time_s=0.01), "--executor", "mp", "--num-threads", "1"),
    *("--report-interval-s", "0.05", "--idle-report-interval-s", "0.1"),
    *(word for name, value in SHORT_TIMES.items() for word in (f"--{name.replace('_', '-')}", str(value))),
)
PROMPT = [5, 250, 17, 0, 5]
NUM_TOKENS = 250  # two seconds and more after the stop: over the time without an opinion


async def test_stopped_server_goes_on_without_a_verdict_and_without_losing_a_token() -> None:
    # The first is stopped alone, the second with its worker, as when a whole machine is paused.
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(*WORDS)) for _ in range(2)]
        async with Caller(servers[0]) as one, Caller(servers[1]) as other, asyncio.timeout(60):
            callers = [one, other]
            workers = [(await caller.status()).groups[0].ranks[0].pid for caller in callers]
            streams = [caller.generate("r", PROMPT, NUM_TOKENS) for caller in callers]
            await until(lambda: all(len(stream.token_ids) > 5 for stream in streams), "tokens for both")
            stopped = [servers[0].process.pid, servers[1].process.pid, workers[1]]
            for pid in stopped:
                os.kill(pid, signal.SIGSTOP)
            await until(lambda: all(map(is_stopped, stopped)), "they are stopped")
            await asyncio.sleep(0.1)  # what was on its way
            num_before = [len(stream.token_ids) for stream in streams]
            await asyncio.sleep(STOPPED_S)  # the fault itself takes this time; nothing is waited for
            assert [len(stream.token_ids) for stream in streams] == num_before
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            for server, caller, stream, worker in zip(servers, callers, streams, workers, strict=True):
                await stream.end()
                assert stream.error is None
                assert stream.is_done
                assert stream.token_ids == greedy(PROMPT, NUM_TOKENS)
                assert not server.heard(Lost)
                assert await caller.health() == SERVING
                assert (await caller.status()).groups[0].ranks[0].pid == worker
                assert (await caller.generate("next", PROMPT, 3).end()).token_ids == greedy(PROMPT, 3)
        for server in servers:
            server.signal(signal.SIGTERM)
            assert server.exit_code() == 0
