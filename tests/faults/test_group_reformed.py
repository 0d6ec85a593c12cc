"""A server loses its group: what it tells its clients, and how it comes back or goes (--on-group-loss)."""

from __future__ import annotations

import asyncio
import os
import signal
import time

import grpc
import pytest

from control_plane.announcement import Lost, Ready, Stopping
from service_chassis.scripted import fail_at
from support.engine_harness import collect, generation
from support.faults import is_alive, model_with
from support.fleet_harness import running_fleet
from support.scripted_reference import greedy
from support.serve_process import NOT_SERVING, SERVING, Caller, assert_next_server_works, serving
from support.waiting import until

PROMPT = [5, 250, 17, 0, 5]
MP = ("--executor", "mp", "--num-threads", "1")


async def test_server_ends_its_streams_within_a_second_and_serves_again_when_a_rank_is_killed() -> None:
    with serving("--model", model_with(step_time_s=0.01), "--max-num-seqs", "4", *MP) as server:
        async with Caller(server) as caller, asyncio.timeout(60):
            assert await caller.health() == SERVING
            (group,) = (await caller.status()).groups
            streams = [caller.generate(f"r{n}", [*PROMPT, n], 2000) for n in range(6)]
            await until(lambda: sum(bool(stream.token_ids) for stream in streams) == 4, "four run, two wait")
            killed_at = time.monotonic()
            os.kill(group.ranks[0].pid, signal.SIGKILL)
            await caller.healthy(NOT_SERVING, within_s=1.0)
            await asyncio.gather(*(stream.end() for stream in streams))
            assert max(stream.ended_at for stream in streams) - killed_at < 1.0
            cause = "rank 0 exited: killed by SIGKILL"
            for stream in streams:
                ran = bool(stream.token_ids)
                assert stream.error is not None
                # Never in a delta: a retry may help. In one: it must start over.
                wanted = grpc.StatusCode.ABORTED if ran else grpc.StatusCode.UNAVAILABLE
                assert stream.error.code() is wanted
                assert cause in (stream.error.details() or "")
                assert len(stream.in_band) == (1 if ran else 0)
                assert not stream.finishes
                assert not stream.is_done
                assert stream.token_ids == greedy([*PROMPT, int(stream.request_id[1:])], len(stream.token_ids))
            await until(lambda: not is_alive(group.ranks[0].pid), "the worker is gone", timeout_s=2.0)
            refused = await caller.generate("early", PROMPT, 3).end()
            if refused.error is not None:  # unless it is back already
                assert refused.error.code() is grpc.StatusCode.UNAVAILABLE
            await caller.healthy(SERVING, within_s=20.0)
            again = await caller.generate("r0", PROMPT, 5).end()
            assert again.token_ids == greedy(PROMPT, 5)
            assert (await caller.status()).groups[0].ranks[0].pid != group.ranks[0].pid
            assert server.heard(Lost) == [Lost(cause, 0.5)]
            assert server.hear(Ready, 2)
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


async def test_server_exits_with_code_3_when_told_not_to_form_its_group_anew() -> None:
    with serving("--model", model_with(step_time_s=0.01), "--on-group-loss", "exit", *MP) as server:
        async with Caller(server) as caller, asyncio.timeout(30):
            pid = (await caller.status()).groups[0].ranks[0].pid
            stream = caller.generate("r", PROMPT, 2000)
            await until(lambda: stream.token_ids, "tokens")
            os.kill(pid, signal.SIGKILL)
            await stream.end()
            assert stream.error is not None
            assert stream.error.code() is grpc.StatusCode.ABORTED
        assert server.exit_code() == 3
        assert server.heard(Stopping) == [Stopping("rank 0 exited: killed by SIGKILL")]
    await assert_next_server_works("--model", "scripted", "--on-group-loss", "exit", *MP)


async def test_group_is_given_up_after_the_allowed_failures_in_a_row() -> None:
    faulty = model_with(fail_at(0, 2, "raise"))
    with serving("--model", faulty, "--max-group-failures", "1", *MP) as server:
        async with Caller(server) as caller, asyncio.timeout(30):
            for attempt in (1, 2):
                server.hear(Ready, attempt)
                stream = await caller.generate(f"r{attempt}", PROMPT, 5).end()
                assert stream.error is not None
                assert stream.error.code() is grpc.StatusCode.ABORTED
                assert "rank 0 failed in step 2: InjectedFault" in (stream.error.details() or "")
                assert stream.in_band == [stream.error.details()]
        assert server.exit_code() == 3
        assert [lost.retry_in_s for lost in server.heard(Lost)] == [0.5, None]
    await assert_next_server_works("--model", "scripted", "--max-group-failures", "1", *MP)


async def test_formation_that_fails_after_a_loss_is_tried_again() -> None:
    broken = model_with(fail_at(0, 0, "exit"))  # while it loads
    async with running_fleet([model_with(fail_at(0, 2, "raise")), broken, "scripted"]) as running:
        with pytest.raises(Exception, match="InjectedFault"):
            await collect(await running.fleet.generate(generation("a", PROMPT)))
        await until(lambda: len(running.groups[0].losses) == 2, "the second failure", timeout_s=20)
        assert not running.fleet.ready
        view = running.view(0)
        assert (view.state, view.engine) == ("lost", None)
        assert "rank 0 exited: exit code" in view.reason
        await running.formed_anew(0)
        assert [delay for _, delay in running.groups[0].losses] == [0.5, 1.0]
        got = await collect(await running.fleet.generate(generation("a", PROMPT, max_tokens=4)))
        assert got.token_ids[0] == greedy(PROMPT, 4)


async def test_wedged_step_makes_the_server_unready_while_it_still_answers() -> None:
    """Case A3: stuck is not healthy. It comes back with a new group."""
    wedged = model_with(fail_at(0, 3, "hang"))
    with serving("--model", wedged, "--step-timeout-s", "1", *MP) as server:
        async with Caller(server) as caller, asyncio.timeout(60):
            stream = caller.generate("r", PROMPT, 20)
            await until(lambda: len(stream.token_ids) == 2, "two steps")
            await caller.healthy(NOT_SERVING, within_s=2.0)
            await stream.end()
            assert stream.error is not None
            assert stream.error.code() is grpc.StatusCode.ABORTED
            assert "rank 0 was stuck in step 3" in (stream.error.details() or "")
            await caller.status()
            await caller.healthy(SERVING, within_s=20.0)
            assert (await caller.generate("again", PROMPT, 2).end()).token_ids == greedy(PROMPT, 2)
