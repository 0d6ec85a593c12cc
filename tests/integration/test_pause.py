"""Pause and sleep at level 0 (cases D2 and D3): what requests do meanwhile, and what goes on all the same."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2

from control_plane.doors import admin, inference, vllm_engine
from maniple.v1 import admin_pb2 as pb
from maniple.v1 import inference_pb2
from maniple_client import AsyncClient, WrongState
from service_chassis.scripted import fail_at
from support.door_readers import PROMPT, Reader, counts, refused, running
from support.faults import model_with
from support.real_doors import real_doors
from support.scripted_reference import greedy
from support.waiting import until

SLOW = model_with(step_time_s=0.005)
LONG = 3000  # tokens that nobody waits for


async def test_keep_freezes_what_runs_and_queues_what_comes_and_nobody_loses_a_token() -> None:
    async with real_doors(SLOW) as doors, asyncio.timeout(30):
        readers = await running(doors, 3, 120)
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
        assert (await doors.admin.IsPaused(pb.IsPausedRequest())).is_paused
        assert await doors.readiness() == "NOT_SERVING"
        step = doors.fleet.status().groups[0].engine.step  # type: ignore[union-attr]
        readers.append(Reader(doors.generate("r3", [*PROMPT, 3], 5)))
        await until(lambda: counts(doors) == (3, 1), "three frozen, one queued")
        status = await doors.admin.GetStatus(pb.GetStatusRequest())
        assert (status.ready, status.groups[0].state) == (False, "asleep")
        assert "kept" in status.not_ready_reason
        assert status.groups[0].step == step  # not even a flush: nothing ended
        assert (await doors.vllm.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())).is_paused
        await doors.admin.ResumeGeneration(pb.ResumeGenerationRequest())
        assert await doors.readiness() == "SERVING"
        await asyncio.gather(*(reader.end() for reader in readers))
        for number, reader in enumerate(readers):
            assert reader.token_ids == greedy([*PROMPT, number], 5 if number == 3 else 120)
        await doors.running.settled()


async def test_cancel_abort_and_deadline_work_on_frozen_requests_and_workers_hear_of_it() -> None:
    async with real_doors(SLOW) as doors, asyncio.timeout(30):
        kept, cancelled, aborted = await running(doors, 3, 120)
        late = Reader(doors.generate("late", [*PROMPT, 9], LONG, timeout_s=1.0))
        await until(lambda: late.token_ids, "tokens")
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
        cancelled.call.cancel()
        assert (await doors.inference.Abort(inference_pb2.AbortRequest(request_id="r2"))).was_running
        assert (await aborted.end()).reason == inference_pb2.FINISH_REASON_ABORT
        error = (await late.end()).error
        assert error is not None
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        # Their rows leave the workers' batch by deltas that compute nothing.
        await until(lambda: counts(doors) == (1, 0) and doors.fleet.is_paused, "one row left, all told")
        held = len(PROMPT) + 1 + len(kept.token_ids)
        view = doors.fleet.status().groups[0]
        assert view.engine is not None
        in_use = 399 - view.engine.num_free_blocks - view.engine.num_cached_blocks
        assert 0 <= in_use - held // 4 <= 2
        await doors.admin.ResumeGeneration(pb.ResumeGenerationRequest())
        assert (await kept.end()).token_ids == greedy([*PROMPT, 0], 120)


async def test_keep_takes_effect_where_text_ends_the_last_request_that_computes() -> None:
    # Found in its text, which is written after it was decided that there is nothing to send.
    prompt = next([n] for n in range(256) if all(32 < token < 127 for token in greedy([n], 3)))
    first, second, third = greedy(prompt, 3)
    assert third not in (first, second)
    async with real_doors(model_with(step_time_s=0.2), max_steps_in_flight=1) as doors, asyncio.timeout(30):
        reader = Reader(doors.generate("r", prompt, LONG, sampling={"stop": [chr(third)]}))
        await until(lambda: len(reader.token_ids) == 2, "the step that computes the third")
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
        assert (await reader.end()).reason == inference_pb2.FINISH_REASON_STOP
        assert doors.fleet.is_paused
        await doors.running.settled()


async def test_wait_lets_requests_finish_that_are_here_and_refuses_others() -> None:
    async with real_doors(SLOW, max_num_seqs=2) as doors, asyncio.timeout(30):
        readers = await running(doors, 2, 60)
        readers.append(Reader(doors.generate("r2", [*PROMPT, 2], 10)))  # waits for a row
        await until(lambda: counts(doors) == (2, 1), "one waits")
        pause = doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT))
        await until(lambda: not doors.fleet.ready, "the pause")
        assert not (await doors.admin.IsPaused(pb.IsPausedRequest())).is_paused  # they still compute
        assert (await refused(doors, "new")).code() is grpc.StatusCode.UNAVAILABLE
        await pause
        assert counts(doors) == (0, 0)
        assert (await doors.admin.IsPaused(pb.IsPausedRequest())).is_paused
        for number, reader in enumerate(readers):
            assert (await reader.end()).token_ids == greedy([*PROMPT, number], 10 if number == 2 else 60)
        await doors.admin.ResumeGeneration(pb.ResumeGenerationRequest())
        assert (await Reader(doors.generate("new", PROMPT, 3)).end()).token_ids == greedy(PROMPT, 3)


async def test_abort_ends_all_with_reason_abort_and_frees_their_ids() -> None:
    async with real_doors(SLOW, SLOW) as doors, asyncio.timeout(30):
        readers = await running(doors, 6, LONG)  # on both groups
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest())  # unset is abort, as in vLLM
        for number, reader in enumerate(readers):
            await reader.end()
            assert reader.error is None
            assert reader.reason == inference_pb2.FINISH_REASON_ABORT
            assert reader.token_ids == greedy([*PROMPT, number], len(reader.token_ids))
        assert counts(doors) == (0, 0)
        error = await refused(doors, "r0")
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "paused" in (error.details() or "")
        await doors.admin.ResumeGeneration(pb.ResumeGenerationRequest())
        assert (await Reader(doors.generate("r0", PROMPT, 3)).end()).token_ids == greedy(PROMPT, 3)
        await doors.running.settled()


async def test_another_mode_replaces_the_one_before() -> None:
    async with real_doors(SLOW) as doors, asyncio.timeout(30):
        (reader,) = await running(doors, 1, 100)
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT))
        assert (await reader.end()).token_ids == greedy([*PROMPT, 0], 100)
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
        queued = Reader(doors.generate("q", PROMPT, 3))
        await until(lambda: counts(doors) == (0, 1), "queued")
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_ABORT))
        assert (await queued.end()).reason == inference_pb2.FINISH_REASON_ABORT


async def test_pause_that_is_lifted_before_it_took_effect_says_so() -> None:
    async with real_doors(SLOW) as doors, asyncio.timeout(30):
        await running(doors, 1, LONG)
        pause = doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT))
        await until(lambda: not doors.fleet.ready, "the pause")
        await doors.admin.ResumeGeneration(pb.ResumeGenerationRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="resumed") as caught:
            await pause
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        # Nor is it anybody's failure where its caller has gone meanwhile.
        unnoticed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: unnoticed.append(context))
        pause = doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT))
        await until(lambda: not doors.fleet.ready, "the pause")
        pause.cancel()
        doors.fleet.unpause()
        assert doors.fleet.abort_all() == 1
    gc.collect()
    assert not unnoticed


async def test_pause_outlives_its_caller_and_clears_the_cache_in_the_end() -> None:
    async with real_doors(SLOW) as doors, asyncio.timeout(30):
        (reader,) = await running(doors, 1, 100)
        request = pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT, clear_cache=True)
        call = doors.admin.PauseGeneration(request)
        await until(lambda: not doors.fleet.ready, "the pause")
        call.cancel()
        await reader.end()
        status = doors.fleet.status
        await until(lambda: doors.fleet.is_paused and not status().groups[0].engine.num_cached_blocks, "it is cleared")  # type: ignore[union-attr]


async def test_sleep_at_level_0_is_a_pause_and_twice_is_once() -> None:
    async with real_doors(SLOW) as doors, asyncio.timeout(30):
        (reader,) = await running(doors, 1, 80)
        asleep = pb.IsSleepingResponse(is_sleeping=True, tags=["scheduling"])
        for _ in range(2):
            await doors.admin.Sleep(pb.SleepRequest(level=0, mode=pb.PAUSE_MODE_KEEP))
            assert await doors.admin.IsSleeping(pb.IsSleepingRequest()) == asleep
        await doors.admin.WakeUp(pb.WakeUpRequest(tags=["weights", "kv_cache"]))  # which never slept
        assert await doors.admin.IsSleeping(pb.IsSleepingRequest()) == asleep
        with pytest.raises(grpc.aio.AioRpcError, match=r"tags='wieghts'.*weights, kv_cache, scheduling") as caught:
            await doors.admin.WakeUp(pb.WakeUpRequest(tags=["scheduling", "wieghts"]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await doors.admin.IsSleeping(pb.IsSleepingRequest()) == asleep  # nothing of a refused call is done
        for tags in (["scheduling"], []):
            await doors.admin.WakeUp(pb.WakeUpRequest(tags=tags))
            assert await doors.admin.IsSleeping(pb.IsSleepingRequest()) == pb.IsSleepingResponse()
        assert (await reader.end()).token_ids == greedy([*PROMPT, 0], 80)


@pytest.mark.parametrize(
    ("request_", "code", "said"),
    [
        (pb.SleepRequest(level=1), grpc.StatusCode.FAILED_PRECONDITION, "started with --enable-sleep-mode"),
        (pb.SleepRequest(level=2), grpc.StatusCode.FAILED_PRECONDITION, "started with --enable-sleep-mode"),
        (pb.SleepRequest(level=3), grpc.StatusCode.INVALID_ARGUMENT, "level=3: must be from 0 to 2"),
        (pb.SleepRequest(mode=7), grpc.StatusCode.INVALID_ARGUMENT, "mode=7"),  # type: ignore[arg-type]
        (pb.PauseGenerationRequest(mode=7), grpc.StatusCode.INVALID_ARGUMENT, "mode=7"),  # type: ignore[arg-type]
    ],
    ids=["level-1", "level-2", "level-3", "sleep-mode", "pause-mode"],
)
async def test_wrong_words_change_nothing(request_: Any, code: grpc.StatusCode, said: str) -> None:
    async with real_doors() as doors:
        method = doors.admin.Sleep if isinstance(request_, pb.SleepRequest) else doors.admin.PauseGeneration
        with pytest.raises(grpc.aio.AioRpcError, match=said) as caught:
            await method(request_)
        assert caught.value.code() is code
        assert doors.fleet.ready


async def test_readiness_of_what_wakes_a_server_does_not_go_while_it_sleeps() -> None:
    async with real_doors() as doors:
        await doors.admin.Sleep(pb.SleepRequest())
        for service in (inference.SERVICE, vllm_engine.SERVICE):
            assert await doors.readiness(service) == "NOT_SERVING"
        for service in ("", admin.SERVICE):
            assert await doors.readiness(service) == "SERVING"


async def test_group_that_is_formed_anew_while_paused_is_paused_too() -> None:
    dies = model_with(fail_at(0, 30), step_time_s=0.005)
    async with real_doors([dies, SLOW], SLOW) as doors, asyncio.timeout(30):
        readers = await running(doors, 2, LONG)  # one in each group
        await until(lambda: doors.running.groups[0].losses, "the loss")
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
        await doors.running.formed_anew(0)
        assert not doors.fleet.ready
        assert doors.fleet.is_paused
        assert [view.state for view in doors.fleet.status().groups] == ["asleep", "asleep"]
        assert doors.fleet.has_settled()  # a start would not wait for it
        num_tokens = [len(reader.token_ids) for reader in readers]
        assert counts(doors)[0] + counts(doors)[1] == 2  # the lost one moved, and froze where it is
        await doors.admin.ResumeGeneration(pb.ResumeGenerationRequest())
        await until(lambda: all(len(r.token_ids) > n for r, n in zip(readers, num_tokens, strict=True)), "they go on")
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest())
        for number, reader in enumerate(readers):
            assert (await reader.end()).token_ids == greedy([*PROMPT, number], len(reader.token_ids))


async def test_drain_of_a_paused_server_waits_for_its_requests_until_the_deadline() -> None:
    async with real_doors(SLOW) as doors, asyncio.timeout(30):
        readers = await running(doors, 2, LONG)
        await doors.admin.Sleep(pb.SleepRequest(mode=pb.PAUSE_MODE_KEEP))
        reports = [report async for report in doors.admin.Drain(pb.DrainRequest(deadline_s=0.2))]
        assert (reports[-1].num_running, reports[-1].num_aborted) == (0, 2)
        assert {(await reader.end()).reason for reader in readers} == {inference_pb2.FINISH_REASON_ABORT}
        assert (await refused(doors, "new")).code() is grpc.StatusCode.UNAVAILABLE  # draining, whatever the mode


async def test_python_client_has_the_verbs() -> None:
    async with real_doors(SLOW) as doors, asyncio.timeout(30):
        (reader,) = await running(doors, 1, 80)
        admin = AsyncClient(channel=doors.channel).admin
        await admin.pause("keep", timeout_s=10)
        assert await admin.is_paused()
        answer = await admin.reset_prefix_cache()
        assert answer.num_blocks_in_use == doors.fleet.status().groups[0].num_blocks_in_use >= 1
        await admin.sleep(mode="keep")
        assert await admin.sleeping_tags() == ["scheduling"]
        await admin.wake_up()
        await admin.resume()
        assert (await reader.end()).token_ids == greedy([*PROMPT, 0], 80)
        with pytest.raises(WrongState, match="--enable-sleep-mode"):
            await admin.sleep(2)
        assert [report.num_running async for report in admin.drain()] == [0]
