"""Sleep at levels 1 and 2 (cases D), on a model whose tokens change if one slot of a lost cache is read."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import grpc
import pytest

from control_plane.cli import admin as admin_command
from control_plane.doors import admin, inference
from control_plane.engine import FLUSH_AFTER_S
from control_plane.fleet import Fleet
from control_plane.pause import PauseMode
from control_plane.scheduling.block_events import CacheCleared
from maniple.v1 import admin_pb2 as pb
from maniple.v1 import inference_pb2
from service_chassis.errors import InvalidParameter, NotReady
from support.door_readers import PROMPT, Reader, counts, refused, running
from support.faults import model_with
from support.real_doors import RealDoors, real_doors
from support.scripted_reference import greedy
from support.waiting import until

SLOW = model_with(step_time_s=0.005)
LONG = 3000  # tokens that nobody waits for
MAY_SLEEP: dict[str, Any] = {"enable_sleep_mode": True}
TWO_RANKS: dict[str, Any] = {**MAY_SLEEP, "executor": "mp", "tensor_parallel_size": 2}
MODES = {"abort": pb.PAUSE_MODE_ABORT, "wait": pb.PAUSE_MODE_WAIT, "keep": pb.PAUSE_MODE_KEEP}


async def tags(doors: RealDoors) -> list[str]:
    answer = await doors.admin.IsSleeping(pb.IsSleepingRequest())
    assert answer.is_sleeping == bool(answer.tags)
    return list(answer.tags)


def accepted(doors: RealDoors) -> list[int]:
    """The last step that each rank took."""
    engine = doors.fleet.status().groups[0].engine
    assert engine is not None
    return [rank.accepted for rank in engine.ranks]


@pytest.mark.parametrize("level", [1, 2])
async def test_d1_the_same_prompt_gives_the_same_tokens_and_finds_nothing_cached(level: int) -> None:
    prompt = list(range(30, 51))
    async with real_doors(**TWO_RANKS) as doors, asyncio.timeout(30):
        want = greedy(prompt, 20)
        assert (await Reader(doors.generate("a", prompt, 20)).end()).token_ids == want
        again = await Reader(doors.generate("b", prompt, 20)).end()
        assert (again.token_ids, again.num_cached_tokens) == (want, 20)  # five blocks of four
        heard: list[Any] = []
        doors.running.groups[0].engines[0].follow_blocks(heard.extend)
        await doors.admin.Sleep(pb.SleepRequest(level=level))
        assert heard == [CacheCleared()]
        assert doors.fleet.status().groups[0].engine.num_cached_blocks == 0  # type: ignore[union-attr]
        await doors.admin.WakeUp(pb.WakeUpRequest())
        after = await Reader(doors.generate("c", prompt, 20)).end()
        assert (after.token_ids, after.num_cached_tokens) == (want, 0)


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_d2_no_step_reaches_a_rank_before_the_cache_is_awake(mode: str) -> None:
    async with real_doors(**TWO_RANKS) as doors, asyncio.timeout(30):
        await doors.admin.Sleep(pb.SleepRequest(level=1, mode=MODES[mode]))
        assert await tags(doors) == ["weights", "kv_cache", "scheduling"]
        await doors.admin.WakeUp(pb.WakeUpRequest(tags=["weights"]))
        assert await tags(doors) == ["kv_cache", "scheduling"]
        before = accepted(doors)
        if mode == "keep":
            queued = Reader(doors.generate("q", PROMPT, 9))
            await until(lambda: counts(doors) == (0, 1), "queued")
        else:
            error = await refused(doors, "q")
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "asleep: kv_cache" in (error.details() or "")
        for call in (
            doors.admin.ResumeGeneration(pb.ResumeGenerationRequest()),
            doors.admin.WakeUp(pb.WakeUpRequest(tags=["scheduling"])),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match="while kv_cache sleep") as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert accepted(doors) == before
        assert await doors.readiness() == "NOT_SERVING"
        await doors.admin.WakeUp(pb.WakeUpRequest(tags=["kv_cache"]))
        assert await tags(doors) == []
        reader = queued if mode == "keep" else Reader(doors.generate("q", PROMPT, 9))
        assert (await reader.end()).token_ids == greedy(PROMPT, 9)


async def test_d3_what_is_done_already_is_done_and_an_unknown_tag_changes_nothing() -> None:
    async with real_doors(**TWO_RANKS) as doors, asyncio.timeout(30):
        freed = [await doors.admin.Sleep(pb.SleepRequest(level=level)) for level in (1, 1, 2, 1)]
        # What 400 blocks of 4 slots of 8 bytes take, on each rank.
        assert [[rank.freed_bytes for rank in answer.ranks] for answer in freed] == [[400 * 4 * 8] * 2] + [[0, 0]] * 3
        with pytest.raises(grpc.aio.AioRpcError, match=r"tags='kv'.*weights, kv_cache, scheduling") as caught:
            await doors.admin.WakeUp(pb.WakeUpRequest(tags=["weights", "kv"]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await tags(doors) == ["weights", "kv_cache", "scheduling"]
        for _ in range(2):
            await doors.admin.WakeUp(pb.WakeUpRequest(tags=["kv_cache"]))
            assert await tags(doors) == ["weights", "scheduling"]
        for _ in range(2):
            await doors.admin.WakeUp(pb.WakeUpRequest())
            assert await tags(doors) == []
        assert (await Reader(doors.generate("r", PROMPT, 5)).end()).token_ids == greedy(PROMPT, 5)


async def test_a_pause_of_before_outlasts_the_sleep() -> None:
    async with real_doors(**MAY_SLEEP) as doors, asyncio.timeout(30):
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest())
        await doors.admin.Sleep(pb.SleepRequest(level=1))
        await doors.admin.WakeUp(pb.WakeUpRequest(tags=["weights", "kv_cache"]))
        assert await tags(doors) == ["scheduling"]
        await doors.admin.ResumeGeneration(pb.ResumeGenerationRequest())
        assert await tags(doors) == []
        assert doors.fleet.ready


@pytest.mark.parametrize("mode", MODES)
async def test_running_requests_on_two_ranks_end_finish_or_go_on(mode: str) -> None:
    async with real_doors(SLOW, **TWO_RANKS) as doors, asyncio.timeout(60):
        num_tokens = 150 if mode != "abort" else LONG
        readers = await running(doors, 3, num_tokens)
        await doors.admin.Sleep(pb.SleepRequest(level=1, mode=MODES[mode]))
        assert await doors.readiness() == "NOT_SERVING"
        assert await doors.readiness(admin.SERVICE) == "SERVING"
        (group,) = (await doors.admin.GetStatus(pb.GetStatusRequest())).groups
        assert (group.state, group.reason) == ("asleep", "asleep: weights, kv_cache")
        if mode == "keep":
            assert counts(doors) == (0, 3)  # no row has a block
            told = [len(reader.token_ids) for reader in readers]
            assert max(told) < num_tokens
            # What ends while all sleeps is told to the ranks, which take nothing else.
            before = accepted(doors)
            readers[2].call.cancel()
            await until(lambda: counts(doors) == (0, 2), "cancelled")
            await until(lambda: min(accepted(doors)) > min(before), "the ranks heard of it")
        else:
            assert counts(doors) == (0, 0)
        await doors.admin.WakeUp(pb.WakeUpRequest())
        for number, reader in enumerate(readers[: 2 if mode == "keep" else 3]):
            await reader.end()
            assert reader.error is None
            assert reader.token_ids == greedy([*PROMPT, number], len(reader.token_ids))
            if mode == "abort":
                assert reader.reason == inference_pb2.FINISH_REASON_ABORT
            else:
                assert len(reader.token_ids) == num_tokens
        await doors.running.settled()


async def test_group_lost_in_its_sleep_comes_back_when_all_is_awake() -> None:
    async with real_doors(SLOW, **TWO_RANKS) as doors, asyncio.timeout(60):
        (reader,) = await running(doors, 1, LONG)
        await doors.admin.Sleep(pb.SleepRequest(level=2, mode=pb.PAUSE_MODE_KEEP))
        os.kill(doors.running.pid(0, 1), signal.SIGKILL)
        await reader.end()
        assert reader.error is not None
        assert reader.error.code() is grpc.StatusCode.ABORTED
        assert "rank 1" in (reader.error.details() or "")
        await until(lambda: doors.fleet.rest.num_held_back, "it would be formed anew")
        assert doors.running.view(0).engine is None  # its memory may be somebody else's by now
        assert await tags(doors) == ["weights", "kv_cache", "scheduling"]
        await doors.admin.WakeUp(pb.WakeUpRequest())
        await doors.running.formed_anew(0)
        assert (await Reader(doors.generate("new", PROMPT, 5)).end()).token_ids == greedy(PROMPT, 5)


async def test_request_of_a_group_that_is_lost_asleep_goes_on_in_another_that_slept() -> None:
    async with real_doors(SLOW, SLOW, **{**MAY_SLEEP, "executor": "mp"}) as doors, asyncio.timeout(60):
        readers = await running(doors, 2, 150)
        assert [view.engine.num_running for view in doors.fleet.status().groups if view.engine] == [1, 1]
        answer = await doors.admin.Sleep(pb.SleepRequest(level=1, mode=pb.PAUSE_MODE_KEEP))
        assert [(one.group, one.rank) for one in answer.ranks] == [("0", 0), ("1", 0)]
        os.kill(doors.running.pid(0), signal.SIGKILL)
        await until(lambda: doors.running.view(0).engine is None, "the loss")
        assert counts(doors) == (0, 2)
        await doors.admin.WakeUp(pb.WakeUpRequest())
        for number, reader in enumerate(readers):
            assert (await reader.end()).token_ids == greedy([*PROMPT, number], 150)
        await doors.running.formed_anew(0)


async def test_sleep_while_the_model_is_loaded_is_refused() -> None:
    with pytest.raises(NotReady, match="the model is being loaded"):
        await Fleet().rest.sleep(1, PauseMode.ABORT)


async def test_sleep_that_outlives_its_caller_comes_about() -> None:
    async with real_doors(SLOW, **MAY_SLEEP) as doors, asyncio.timeout(30):
        (reader,) = await running(doors, 1, 60)
        call = doors.admin.Sleep(pb.SleepRequest(level=1, mode=pb.PAUSE_MODE_WAIT))
        await until(lambda: not doors.fleet.ready, "the pause")
        call.cancel()
        assert (await reader.end()).token_ids == greedy([*PROMPT, 0], 60)
        await until(lambda: doors.fleet.rest.tags == ["weights", "kv_cache", "scheduling"], "it sleeps")
        await doors.admin.WakeUp(pb.WakeUpRequest())
        assert await doors.readiness(inference.SERVICE) == "SERVING"


async def test_scripted_model_has_no_weights_to_update() -> None:
    async with real_doors(SLOW, **MAY_SLEEP) as doors, asyncio.timeout(30):
        (reader,) = await running(doors, 1, 80)
        with pytest.raises(grpc.aio.AioRpcError, match="path='/nowhere': the scripted model has no weights") as caught:
            await doors.admin.UpdateWeights(pb.UpdateWeightsRequest(path="/nowhere"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (await reader.end()).token_ids == greedy([*PROMPT, 0], 80)  # went on by itself


async def test_pause_that_lets_requests_finish_fills_no_cache_that_is_about_to_sleep() -> None:
    async with real_doors(SLOW, **TWO_RANKS) as doors, asyncio.timeout(60):
        (reader,) = await running(doors, 1, 200)
        sleep = doors.admin.Sleep(pb.SleepRequest(level=1, mode=pb.PAUSE_MODE_KEEP))
        await until(lambda: counts(doors) == (0, 1), "its blocks were taken")
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_WAIT))
        await sleep
        assert doors.fleet.status().groups[0].engine.num_cached_blocks == 0  # type: ignore[union-attr]
        assert counts(doors) == (0, 1)
        await doors.admin.WakeUp(pb.WakeUpRequest())
        assert (await reader.end()).token_ids == greedy([*PROMPT, 0], 200)
        again = await Reader(doors.generate("again", [*PROMPT, 0], 20)).end()
        assert again.token_ids == greedy([*PROMPT, 0], 20)


async def test_nothing_is_sent_while_ranks_are_asked_for_something_after_a_step() -> None:
    async with real_doors(SLOW, **MAY_SLEEP) as doors, asyncio.timeout(30):
        readers = await running(doors, 2, LONG)
        engine = doors.running.groups[0].engines[0]
        await doors.admin.PauseGeneration(pb.PauseGenerationRequest(mode=pb.PAUSE_MODE_KEEP))
        async with engine.dormancy._undisturbed() as last_step:
            assert accepted(doors) == [last_step]
            readers[0].call.cancel()
            await until(lambda: counts(doors)[0] == 1, "cancelled")
            ended_at = engine.now()
            await until(lambda: engine.now() > ended_at + 3 * FLUSH_AFTER_S, "it would have been said")
            assert accepted(doors) == [last_step]
        await until(lambda: accepted(doors) == [last_step + 1], "it is said now")
        await doors.admin.ResumeGeneration(pb.ResumeGenerationRequest())
        readers[1].call.cancel()
        await doors.running.settled()


async def test_sleep_asked_for_during_an_update_of_weights_is_over_with_its_last_tag() -> None:
    async with real_doors(SLOW, **MAY_SLEEP) as doors, asyncio.timeout(30):
        dormancy, may_go_on = doors.running.groups[0].engines[0].dormancy, asyncio.Event()
        stage = dormancy.stage_weights

        async def stage_later(path: str) -> int:
            await may_go_on.wait()
            return await stage(path)

        dormancy.stage_weights = stage_later  # type: ignore[method-assign]
        update = asyncio.create_task(doors.fleet.rest.update_weights("/nowhere"))
        await until(lambda: not doors.fleet.ready, "the update")
        sleep = doors.admin.Sleep(pb.SleepRequest(level=1))
        await until(lambda: doors.fleet.pause_mode is PauseMode.ABORT, "the sleep")
        may_go_on.set()
        with pytest.raises(InvalidParameter):
            await update
        await sleep
        assert await tags(doors) == ["weights", "kv_cache", "scheduling"]
        await doors.admin.WakeUp(pb.WakeUpRequest(tags=["weights", "kv_cache"]))
        assert await tags(doors) == []
        assert doors.fleet.ready


async def test_command_line_puts_to_sleep_and_wakes(capsys: pytest.CaptureFixture[str]) -> None:
    async with real_doors(**MAY_SLEEP) as doors, asyncio.timeout(30):
        server = ["--server", doors.address]

        async def say(*words: str) -> str:
            assert await asyncio.to_thread(admin_command.run, [*words, *server]) == 0
            return capsys.readouterr().out

        said = await say("sleep", "--level", "1", "--mode", "keep")
        assert "Asleep: weights, kv_cache, scheduling." in said
        assert "Group 0, rank 0: gave back 0 MiB and takes 0 MiB." in said
        assert "Still asleep: kv_cache, scheduling." in await say("wake-up", "weights")
        assert "\nAwake.\n" in "\n" + await say("wake-up")
        assert await asyncio.to_thread(admin_command.run, ["update-weights", "/nowhere", *server]) == 1
        assert "the scripted model has no weights" in capsys.readouterr().err
