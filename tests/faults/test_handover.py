"""SIGTERM of an owner with --handover: a rolling upgrade loses no request and waits for no lease."""

from __future__ import annotations

import asyncio
import operator
import signal
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc

from control_plane.control_blob import ResumeRight
from control_plane.executors.rpc_errors import error_of_call
from control_plane.fleet import Fleet
from control_plane.generation import Cursor, Event
from control_plane.handover import HandoverSettings, NextOwner
from service_chassis.errors import TakenOver
from service_chassis.ids import RequestId
from support.engine_harness import collect, generation
from support.owners import Owner
from support.remote_ranks import remote_ranks
from support.scripted_reference import greedy, seeded
from support.takeover import Reading, Ready, StageProgress, all_free, prompt_of, site
from support.waiting import until


async def test_handover_moves_running_requests_without_waiting_for_the_lease(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        lease_s = 15.0  # longer than a busy machine takes without waiting for it
        owner, spare = await here.owner_and_spare("--handover", "--lease-s", str(lease_s))
        async with here.client() as client, asyncio.timeout(60):
            readings = [
                Reading(client, "greedy", prompt_of(1), 120),
                Reading(client, "seeded", prompt_of(2), 120, seed=3),
                Reading(client, "stops", prompt_of(3), 120, stop_at=90),
            ]
            for reading in readings:
                await reading.has(10)
            asked_at = owner.signal(signal.SIGTERM)
            ready_at = await spare.heard(Ready)
            print(f"ready {ready_at - asked_at:.3f} s after SIGTERM")
            assert ready_at - asked_at < lease_s
            for reading in readings:
                await reading.whole()
            gaps = [max(b - a for a, b in zip(one.token_at, one.token_at[1:], strict=False)) for one in readings]
            print(f"longest pause between two tokens {max(gaps):.3f} s")
            assert await owner.exit_code() == 0
        await all_free(spare)
        assert not spare.times(StageProgress, "load")


async def test_drained_owner_leaves_the_prefix_cache_to_the_next(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare()
        async with here.client() as client, asyncio.timeout(60):
            before = await Reading(client, "before", prompt_of(1), 5).whole()
            running = Reading(client, "running", prompt_of(2), 60)
            await running.has(10)
            owner.signal(signal.SIGTERM)
            await running.whole()  # without --handover it is finished first
            assert await owner.exit_code() == 0
            await spare.heard(Ready)
            again = await Reading(client, "again", before.prompt, 5).whole()
            assert again.started is not None
            assert again.started.num_cached_tokens == 20
        await all_free(spare)


class GatewayReading:
    """A stock gateway's generation: its contract knows no resume."""

    def __init__(self, address: str, request_id: str, prompt: list[int], num_tokens: int, **options: Any) -> None:
        self.request_id, self.prompt, self.num_tokens = request_id, prompt, num_tokens
        self.chunks: dict[int, list[int]] = {}
        self.complete: dict[int, vllm_engine_pb2.GenerateComplete] = {}
        stream = options.pop("stream", True)
        self._request = vllm_engine_pb2.GenerateRequest(
            request_id=request_id,
            tokenized=vllm_engine_pb2.TokenizedInput(input_ids=prompt),
            sampling_params=vllm_engine_pb2.SamplingParams(
                **{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **options}
            ),
            stream=stream,
        )
        self.task = asyncio.create_task(self._read(address))

    async def _read(self, address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            async for response in stub.Generate(self._request, timeout=50):
                if response.WhichOneof("response") == "chunk":
                    self.chunks.setdefault(response.chunk.index, []).extend(response.chunk.token_ids)
                else:
                    assert response.complete.index not in self.complete, "ended twice"
                    self.complete[response.complete.index] = response.complete

    async def has(self, count: int) -> None:
        def is_so() -> bool:
            return self.task.done() or sum(map(len, self.chunks.values())) >= count

        await until(is_so, f"{count} tokens of {self.request_id}")

    async def whole(self, expected: dict[int, list[int]], reason: str) -> None:
        """Wait for the end, which must be the one of an undisturbed run."""
        await self.task
        assert {index: list(one.output_ids) for index, one in self.complete.items()} == expected
        assert {one.finish_reason for one in self.complete.values()} == {reason}
        assert {index: one.completion_tokens for index, one in self.complete.items()} == {
            index: len(ids) for index, ids in expected.items()
        }
        if self._request.stream:
            assert self.chunks == expected


async def test_handover_reads_on_for_gateways_that_cannot_resume(tmp_path: Path) -> None:
    stop_at = greedy(prompt_of(3), 120)[90]
    stopped = greedy(prompt_of(3), 120)
    stopped = stopped[: stopped.index(stop_at) + 1]
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare("--handover")
        async with here.client() as client, asyncio.timeout(60):
            at = owner.address
            plain = GatewayReading(at, "plain", prompt_of(1), 120)
            several = GatewayReading(at, "several", prompt_of(2), 120, temperature=1.0, seed=3, n=2)
            stops = GatewayReading(at, "stops", prompt_of(3), 120, stop_token_ids=[stop_at])
            unary = GatewayReading(at, "unary", prompt_of(4), 120, stream=False)
            ours = Reading(client, "ours", prompt_of(5), 120)
            for reading in (plain, several, stops, ours):
                await reading.has(10)
            owner.signal(signal.SIGTERM)
            await spare.heard(Ready)
            await ours.whole()
            await plain.whole({0: greedy(prompt_of(1), 120)}, "length")
            await several.whole({index: seeded(prompt_of(2), 120, 3, index, 1.0) for index in range(2)}, "length")
            await stops.whole({0: stopped}, "stop")
            await unary.whole({0: greedy(prompt_of(4), 120)}, "length")
            assert await owner.exit_code() == 0
        await all_free(spare)


async def test_abort_and_a_lost_client_reach_the_request_where_it_is_now(tmp_path: Path) -> None:
    async with site(tmp_path) as here, asyncio.timeout(60):
        owner, spare = await here.owner_and_spare("--handover")
        aborted = GatewayReading(owner.address, "aborted", prompt_of(1), 2000)
        dropped = GatewayReading(owner.address, "dropped", prompt_of(2), 2000)
        for reading in (aborted, dropped):
            await reading.has(5)
        owner.signal(signal.SIGTERM)
        await spare.heard(Ready)
        counts = [len(reading.chunks[0]) for reading in (aborted, dropped)]
        for reading, count in zip((aborted, dropped), counts, strict=True):
            await reading.has(count + 20)  # they are read on
        async with grpc.aio.insecure_channel(owner.address) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["aborted"]), timeout=5)
        await aborted.task
        assert aborted.complete[0].finish_reason == "abort"
        assert list(aborted.complete[0].output_ids) == greedy(prompt_of(1), len(aborted.chunks[0]))
        dropped.task.cancel()
        assert await owner.exit_code() == 0  # nobody is left to read to
        await all_free(spare)


async def test_old_owner_that_is_sent_to_itself_looks_further_and_its_client_notices_nothing(tmp_path: Path) -> None:
    with remote_ranks(1, directory=tmp_path) as ranks:
        async with asyncio.timeout(60):
            first = await Owner(ranks.addresses).start()
            fleet = Fleet()
            fleet.take(first.engine)
            reading = asyncio.create_task(collect(await fleet.generate(generation("r", prompt_of(1), max_tokens=80))))
            following = asyncio.create_task(Owner(ranks.addresses).start())
            said = ["first", "second"]  # a spare says until it has the group that the old owner has it
            asked: list[str] = []

            async def ask() -> str:
                return said.pop(0) if len(said) > 1 else said[0]

            async def resume_at(
                address: str, request_id: RequestId, right: ResumeRight, cursors: Sequence[Cursor]
            ) -> AsyncGenerator[Event, None]:
                asked.append(address)
                at = fleet if address == "first" else await following
                async for event in await at.resume(request_id, right.token, "", cursors):
                    yield event

            settings = HandoverSettings(step_timeout_s=5, resume_grace_s=20, drain_timeout_s=20)
            await until(lambda: first.engine.status().step > 5, "some tokens")
            assert await first.engine.leave_to_next(NextOwner(ask, resume_at, settings))
            got = await reading
            assert got.token_ids[0] == greedy(prompt_of(1), 80)
            assert got.done is not None
            assert asked == ["first", "second"]
            await first.leave()
            await (await following).leave()


async def test_requests_end_taken_over_when_no_owner_follows(tmp_path: Path) -> None:
    async with site(tmp_path) as here, asyncio.timeout(60):
        owner = here.control_plane("a", "--handover", "--resume-grace-s", "0.5")
        await owner.heard(Ready)
        reading = GatewayReading(owner.address, "r", prompt_of(1), 2000)
        await reading.has(5)
        owner.signal(signal.SIGTERM)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await reading.task
        assert ended.value.code() is grpc.StatusCode.ABORTED
        error = error_of_call(ended.value)
        assert isinstance(error, TakenOver)
        assert "nobody went on" in error.message
        assert await owner.exit_code() == 0


async def test_what_is_not_done_by_the_drain_timeout_is_aborted(tmp_path: Path) -> None:
    async with site(tmp_path) as here, asyncio.timeout(60):
        owner, spare = await here.owner_and_spare("--handover", "--drain-timeout-s", "1.5")
        reading = GatewayReading(owner.address, "r", prompt_of(1), 2000)
        await reading.has(5)
        owner.signal(signal.SIGTERM)
        await reading.task
        assert reading.complete[0].finish_reason == "abort"
        assert list(reading.complete[0].output_ids) == greedy(prompt_of(1), len(reading.chunks[0]))
        assert await owner.exit_code() == 0
        await all_free(spare)


async def test_rolling_upgrade_loses_no_request_of_a_client_that_knows_two_of_three(tmp_path: Path) -> None:
    async with site(tmp_path) as here:
        owner, spare = await here.owner_and_spare("--handover")
        async with here.client() as client, asyncio.timeout(90):
            is_over = asyncio.Event()
            num_whole = [0] * 6

            async def ask_again_and_again(number: int) -> None:
                while not is_over.is_set():
                    count = num_whole[number]
                    await Reading(client, f"r{number}-{count}", prompt_of(8 * number + count % 8), 12).whole()
                    num_whole[number] += 1

            async def each_got(more: int) -> None:
                wanted = [count + more for count in num_whole]

                def is_so() -> bool:
                    return any(task.done() for task in callers) or all(map(operator.ge, num_whole, wanted))

                await until(is_so, f"{more} more answers for each caller", timeout_s=30)

            callers = [asyncio.create_task(ask_again_and_again(number)) for number in range(6)]
            await each_got(1)
            owner.signal(signal.SIGTERM)
            await spare.heard(Ready)
            assert await owner.exit_code() == 0
            await each_got(1)
            last = here.control_plane("c")
            await last.heard(StageProgress, "wait")
            spare.signal(signal.SIGTERM)
            await last.heard(Ready)
            assert await spare.exit_code() == 0
            await each_got(2)
            is_over.set()
            await asyncio.gather(*callers)
        await all_free(last)
