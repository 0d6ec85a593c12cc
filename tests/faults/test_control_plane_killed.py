"""The control plane is killed (cases A5): its workers are its children, and nothing of it is left."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc

from support.faults import is_alive, is_stopped, model_with
from support.ports import free_ports
from support.scripted_reference import greedy
from support.serve_process import Caller, assert_next_server_works, serving
from support.waiting import until

PROMPT = [5, 250, 17, 0, 5]
MP = ("--executor", "mp", "--tensor-parallel-size", "2", "--num-threads", "1")


async def test_killed_server_ends_its_streams_and_leaves_no_worker_and_no_file() -> None:
    shm_before = set(os.listdir("/dev/shm"))
    place = ("--listen", f"127.0.0.1:{free_ports(1)[0]}")  # one that it can have again
    with serving("--model", model_with(step_time_s=0.01), *MP, *place) as server:
        async with Caller(server) as caller, asyncio.timeout(60):
            (group,) = (await caller.status()).groups
            pids = [rank.pid for rank in group.ranks]
            (directory,) = server.directories
            assert all(map(is_alive, pids))
            assert directory.exists()
            streams = [caller.generate(f"r{number}", [*PROMPT, number], 2000) for number in range(3)]
            await until(lambda: all(stream.token_ids for stream in streams), "tokens for everybody")
            os.kill(pids[1], signal.SIGSTOP)  # the other one must go by itself, and this one when it is continued
            await until(lambda: is_stopped(pids[1]), "it is stopped")
            server.signal(signal.SIGKILL)
            killed_at = time.monotonic()
            for number, stream in enumerate(streams):
                await stream.end()
                assert stream.error is not None
                assert stream.error.code() is grpc.StatusCode.UNAVAILABLE  # transport loss: nobody is there to say more
                assert not stream.in_band
                assert not stream.finishes
                assert not stream.is_done
                assert stream.token_ids == greedy([*PROMPT, number], len(stream.token_ids))
            assert server.exit_code() == -signal.SIGKILL
            within_s = killed_at + 5.0 - time.monotonic()
            await until(lambda: not is_alive(pids[0]), "the end of rank 0", timeout_s=within_s)
            os.kill(pids[1], signal.SIGCONT)
            within_s = killed_at + 5.0 - time.monotonic()
            await until(lambda: not is_alive(pids[1]) and not directory.exists(), "the end", timeout_s=within_s)
            assert set(os.listdir("/dev/shm")) <= shm_before
        # In the same place, as an orchestrator would.
        await assert_next_server_works("--model", "scripted", *MP, *place)
