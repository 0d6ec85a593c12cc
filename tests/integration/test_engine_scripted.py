"""The whole path below the doors, from admission to the last event, on the scripted model.

The scripted model reads its "KV cache" through the block table, so a wrong table, a block reused too early or a bad
prefix hit changes tokens. Solo runs on an engine of its own are the independent source of expected tokens.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from control_plane.engine import Engine
from control_plane.generation import Chunk, FinishReason, Generation
from control_plane.handover import HandoverSettings, NextOwner
from control_plane.scheduling.plan import SampleOutput
from service_chassis.errors import (
    Cancelled,
    DeadlineExceeded,
    DuplicateRequest,
    InternalError,
    InvalidParameter,
    QueueFull,
    TakenOver,
)
from service_chassis.ids import RequestId
from support.engine_harness import END, Collected, collect, generation, running_engine, scripted
from support.waiting import until

TINY = {"block_size": 4, "num_kv_blocks": 24, "max_num_seqs": 8, "max_num_batched_tokens": 24, "max_model_len": 64}


async def settled(engine: Engine) -> None:
    """Wait until nothing runs and every end was told to the workers."""

    def is_settled() -> bool:
        status = engine.status()
        free = status.num_free_blocks + status.num_cached_blocks
        return not status.num_running and not status.num_waiting and free == engine.limits.num_blocks - 1

    await until(is_settled, "no row and no block in use", timeout_s=2.0)


async def solo(requests: Sequence[Generation], **config: object) -> dict[str, Collected]:
    """Run each request alone, on an engine with plenty of blocks and one step in flight."""
    plenty = {**TINY, "num_kv_blocks": 400, "max_steps_in_flight": 1, "enable_prefix_caching": False, **config}
    async with running_engine(**plenty) as engine:
        return {one.request_id: await collect(await engine.generate(one)) for one in requests}


def mixed_requests(count: int, seed: int) -> list[Generation]:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(21)]
    requests = []
    for number in range(count):
        prompt = shared[: rng.choice([0, 0, 5, 8, 21])] + [rng.randrange(256) for _ in range(rng.randint(1, 19))]
        sampled = rng.random() < 0.4
        requests.append(
            generation(
                f"r{number}",
                prompt,
                max_tokens=rng.randint(1, 20),
                temperature=0.9 if sampled else 0.0,
                seed=rng.getrandbits(64),
                n=2 if rng.random() < 0.1 else 1,
                eos_ids=frozenset({END}) if rng.random() < 0.8 else frozenset(),
                stop_token_ids=frozenset({7, 77}) if rng.random() < 0.5 else frozenset(),
                min_tokens=rng.choice([0, 0, 1]),
                priority=rng.choice([0, 0, 0, 1]),
            )
        )
    return requests


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 4])
async def test_a_thousand_requests_get_their_solo_tokens_whatever_the_schedule(max_steps_in_flight: int) -> None:
    requests = mixed_requests(1000, seed=11)
    expected = await solo(requests)
    async with running_engine(**TINY, max_steps_in_flight=max_steps_in_flight, max_num_waiting=2000) as engine:
        streams = [await engine.generate(one) for one in requests]
        results = await asyncio.gather(*(collect(stream) for stream in streams))
        await settled(engine)
        status = engine.status()
        assert status.num_preemptions >= 10
        assert status.prefix_cache_hits > 0
    for one, got in zip(requests, results, strict=True):
        want = expected[one.request_id]
        assert got.token_ids == want.token_ids, one.request_id
        assert {i: f.reason for i, f in got.finished.items()} == {i: f.reason for i, f in want.finished.items()}
        assert got.done is not None
        assert got.done.num_output_tokens == sum(map(len, got.token_ids.values()))


@pytest.mark.parametrize("max_steps_in_flight", [1, 2, 4])
async def test_tokens_are_the_same_when_the_pool_is_so_small_that_rows_are_preempted(max_steps_in_flight: int) -> None:
    requests = [generation(f"r{i}", [i, i + 1, i + 2], max_tokens=40) for i in range(16)]  # E1
    expected = await solo(requests)
    async with running_engine(**TINY, max_steps_in_flight=max_steps_in_flight) as engine:
        results = await asyncio.gather(*[collect(await engine.generate(one)) for one in requests])
        assert engine.status().num_preemptions >= 10
    for one, got in zip(requests, results, strict=True):
        assert got.token_ids == expected[one.request_id].token_ids


@pytest.mark.parametrize("how", ["cancel", "abort"])
async def test_eight_streams_leave_no_row_and_no_block_when_they_are_ended(how: str) -> None:
    async with running_engine(scripted(step_time_s=0.002), max_num_seqs=8) as engine:  # C1
        streams = [await engine.generate(generation(f"r{i}", [i] * 20, max_tokens=500)) for i in range(8)]
        for stream in streams:
            while not isinstance(await anext(stream), Chunk):
                pass
        for stream in streams:
            if how == "cancel":
                stream.cancel()
                stream.cancel()
            else:
                assert engine.abort(stream.generation.request_id)
                assert not engine.abort(stream.generation.request_id)  # C7
        await settled(engine)
        for stream in streams:
            if how == "cancel":
                with pytest.raises(Cancelled):
                    await collect(stream)
            else:
                got = await collect(stream)
                assert got.finished[0].reason is FinishReason.ABORT
                assert got.done is not None
        assert (await collect(await engine.generate(generation("next", [1, 2])))).done is not None


async def test_every_sample_is_freed_when_a_request_of_four_is_aborted_after_its_first_token() -> None:
    async with running_engine(scripted(step_time_s=0.002)) as engine:  # C2
        stream = await engine.generate(generation("four", [3] * 33, n=4, max_tokens=500))
        while not isinstance(await anext(stream), Chunk):
            pass
        assert engine.status().num_running >= 1
        engine.abort(RequestId("four"))
        await settled(engine)
        got = await collect(stream)
        assert {finished.reason for finished in got.finished.values()} == {FinishReason.ABORT}
        assert set(got.finished) == {0, 1, 2, 3}


async def test_an_id_is_accepted_again_when_its_queued_request_was_aborted() -> None:
    async with running_engine(scripted(step_time_s=0.002), max_num_seqs=1, max_num_batched_tokens=64) as engine:  # C3
        first = await engine.generate(generation("first", [1], max_tokens=100))
        await engine.generate(generation("queued", [2], max_tokens=5))
        assert engine.status().num_waiting >= 1
        engine.abort(RequestId("queued"))
        again = await engine.generate(generation("queued", [9, 9], max_tokens=5))
        first.cancel()
        assert len((await collect(again)).token_ids[0]) == 5


async def test_a_request_gets_its_solo_tokens_when_its_id_was_aborted_in_the_same_step() -> None:
    second = generation("R", [40, 41, 42, 43, 44], max_tokens=12)  # C4
    expected = (await solo([second]))["R"].token_ids
    async with running_engine(scripted(step_time_s=0.002), **TINY) as engine:
        first = await engine.generate(generation("R", [7] * 9, max_tokens=50))
        while not isinstance(await anext(first), Chunk):
            pass
        engine.abort(RequestId("R"))
        assert (await collect(await engine.generate(second))).token_ids == expected


async def test_tokens_on_their_way_to_an_aborted_request_do_not_reach_the_next_of_its_id() -> None:
    second = generation("R", [40, 41, 42, 43, 44], max_tokens=12)
    expected = (await solo([second]))["R"].token_ids
    async with running_engine(scripted(step_time_s=0.002), **TINY) as engine:
        first = await engine.generate(generation("R", [7] * 9, max_tokens=50))
        while not isinstance(await anext(first), Chunk):
            pass
        request = next(one for one in engine._scheduler.requests() if one.request_id == "R")
        engine._outputs.append(SampleOutput(request, 0, (7,)))  # applied, and told after the next plan
        engine.abort(RequestId("R"))
        assert (await collect(await engine.generate(second))).token_ids == expected


async def test_client_is_told_to_go_on_elsewhere_when_the_handover_is_cut_short() -> None:
    async with running_engine(scripted(step_time_s=0.002), **TINY) as engine:
        stream = await engine.generate(replace(generation("R", [7] * 9, max_tokens=50), client_resumes=True))
        while not isinstance(await anext(stream), Chunk):
            pass
        has_gone = asyncio.Event()

        async def ask() -> str:
            has_gone.set()  # the goodbye was said
            await asyncio.Event().wait()
            return ""

        settings = HandoverSettings(step_timeout_s=5, resume_grace_s=5, drain_timeout_s=5)
        leaving = asyncio.create_task(engine.leave_to_next(NextOwner(ask, None, settings)))  # type: ignore[arg-type]
        await asyncio.wait_for(has_gone.wait(), 10)
        leaving.cancel()  # by a second signal
        await asyncio.gather(leaving, return_exceptions=True)
        engine.abort_all()
        with pytest.raises(TakenOver):
            await collect(stream)


async def test_the_first_is_unaffected_when_a_second_request_has_its_id() -> None:
    one = generation("same", [5, 6, 7], max_tokens=30)  # C6
    expected = (await solo([one]))["same"].token_ids
    async with running_engine(scripted(step_time_s=0.001), **TINY) as engine:
        stream = await engine.generate(one)
        with pytest.raises(DuplicateRequest, match="same"):
            await engine.generate(generation("same", [1]))
        assert (await collect(stream)).token_ids == expected
        with pytest.raises(DuplicateRequest):  # finished less than a minute ago
            await engine.generate(one)
        assert not engine.abort(RequestId("same"))  # C7, and it frees the id
        assert (await collect(await engine.generate(one))).token_ids == expected


async def test_the_second_gets_its_solo_tokens_when_its_twin_is_aborted_mid_prefill() -> None:
    prompt = list(range(60))  # E3: chunks of 16
    small = {**TINY, "num_kv_blocks": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 96}
    twin = generation("twin", prompt, max_tokens=9)
    expected = (await solo([twin], max_model_len=96))["twin"].token_ids
    async with running_engine(scripted(step_time_s=0.003), **small) as engine:
        first = await engine.generate(generation("first", prompt, max_tokens=9))
        second = await engine.generate(twin)
        await until(lambda: engine.status().step >= 2, "the second step")
        first.cancel()
        assert (await collect(second)).token_ids == expected


async def test_a_prompt_of_whole_blocks_hits_all_but_its_last_token_when_sent_twice() -> None:
    prompt = list(range(32))  # E4: 8 blocks of 4
    async with running_engine(**TINY) as engine:
        first = await collect(await engine.generate(generation("a", prompt)))
        second = await collect(await engine.generate(generation("b", prompt)))
        assert first.started is not None
        assert first.started.num_cached_tokens == 0
        assert second.started is not None
        assert second.started.num_cached_tokens == 28
        assert second.token_ids == first.token_ids
        third = await collect(await engine.generate(generation("c", prompt, cache_namespace=b"s" * 16)))
        assert third.started is not None
        assert third.started.num_cached_tokens == 0
        assert engine.reset_prefix_cache() > 0
        fourth = await collect(await engine.generate(generation("d", prompt)))
        assert fourth.started is not None
        assert fourth.started.num_cached_tokens == 0


async def test_a_request_that_can_never_run_is_refused_at_once_and_the_next_works() -> None:
    async with running_engine(**{**TINY, "num_kv_blocks": 8}) as engine:  # E7
        with pytest.raises(InvalidParameter, match="prompt"):
            await engine.generate(generation("long", [1] * 64))
        with pytest.raises(InvalidParameter, match="block"):
            await engine.generate(generation("large", [1] * 40))
        assert (await collect(await engine.generate(generation("next", [1, 2])))).done is not None


async def test_requests_are_refused_with_a_time_to_come_back_when_the_queue_is_full() -> None:
    async with running_engine(
        scripted(step_time_s=0.005), max_num_seqs=1, max_num_batched_tokens=64, max_num_waiting=2
    ) as engine:
        streams = [await engine.generate(generation(f"r{number}", [number], max_tokens=50)) for number in range(2)]
        with pytest.raises(QueueFull) as refused:
            await engine.generate(generation("third", [3], max_tokens=50))
        assert refused.value.retry_after_s
        for stream in streams:
            stream.cancel()
        await settled(engine)


async def test_a_request_ends_with_deadline_exceeded_when_its_deadline_passes_running_or_waiting() -> None:
    async with running_engine(scripted(step_time_s=0.002), max_num_seqs=1, max_num_batched_tokens=64) as engine:
        deadline = engine.now() + 0.1
        running = await engine.generate(generation("running", [1], max_tokens=1000, deadline=deadline))
        waiting = await engine.generate(generation("waiting", [2], max_tokens=10, deadline=deadline))
        for stream in (running, waiting):
            with pytest.raises(DeadlineExceeded):
                await collect(stream)
        assert engine.now() < deadline + 0.5
        await settled(engine)


async def test_unread_output_is_merged_and_delays_nobody_when_a_client_stops_reading() -> None:
    async with running_engine() as engine:
        stalled = await engine.generate(generation("stalled", [1], max_tokens=300))
        await collect(await engine.generate(generation("quick", [2], max_tokens=300)))
        await settled(engine)
        chunks = [event async for event in stalled if isinstance(event, Chunk)]
        assert len(chunks) == 1
        assert len(chunks[0].token_ids) == 300


async def test_a_request_that_cannot_be_written_for_the_workers_fails_alone() -> None:
    async with running_engine(**TINY) as engine:
        running = asyncio.create_task(collect(await engine.generate(generation("good", [1, 2], max_tokens=20))))
        for number, poison in enumerate(({"min_tokens": 2**32}, {"seed": -1}, {"stop_token_ids": frozenset({-5})})):
            with pytest.raises(InternalError):
                await engine.generate(generation(f"bad{number}", [1], **poison))
        with pytest.raises(InternalError):
            await engine.generate(generation("bad", [-1]))
        with pytest.raises(InvalidParameter, match="may have at most 2097152"):
            await engine.generate(generation("big", [1], stop_token_ids=frozenset(range(2**20))))
        assert len((await running).token_ids[0]) == 20
        after = await collect(await engine.generate(generation("bad", [1])))
        assert after.finished[0].num_output_tokens == 8
        engine.check_integrity()


async def test_what_is_left_is_aborted_when_a_drain_is_over_its_time() -> None:
    async with running_engine(scripted(step_time_s=0.002)) as engine:
        short = await engine.generate(generation("short", [1], max_tokens=5))
        long = await engine.generate(generation("long", [2], max_tokens=3000))
        engine.close("draining")
        assert not engine.ready
        with pytest.raises(Exception, match="draining"):
            await engine.generate(generation("late", [3]))
        assert await engine.drain(0.2) == 1
        assert (await collect(short)).finished[0].reason is FinishReason.LENGTH
        assert (await collect(long)).finished[0].reason is FinishReason.ABORT


async def test_what_needs_the_full_sampler_is_refused_when_there_is_none_and_the_next_works() -> None:
    async with running_engine(scripted(sampler="numpy")) as engine:
        with pytest.raises(InvalidParameter, match="top_k=5: the scripted model without torch serves greedy, seeded"):
            await engine.generate(generation("filtered", [1], temperature=1.0, top_k=5))
        seeded = generation("seeded", [1], temperature=1.0, seed=3)
        assert len((await collect(await engine.generate(seeded))).token_ids[0]) == 8
