"""A control plane without a group answers through the one that has it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import InferInput

from control_plane.relay import RELAYED_KEY
from maniple.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from support.scripted_reference import greedy
from support.takeover import ControlPlane, Site, Stopping, all_free, prompt_of, site
from support.waiting import until

SERVICE = "maniple.v1.InferenceService"


def request(request_id: str, max_tokens: int = 20) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        request_id=request_id,
        token_ids=inference_pb2.TokenIds(ids=prompt_of(1)),
        sampling=sampling_pb2.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        skip_text=True,
    )


async def serving(channel: grpc.aio.Channel) -> bool:
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=5)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def running(control_plane: ControlPlane) -> int:
    return sum(group.num_running for group in (await control_plane.status()).groups)


async def owner_and_spare(one: Site) -> tuple[ControlPlane, ControlPlane, grpc.aio.Channel]:
    owner, spare = await one.owner_and_spare()
    return owner, spare, grpc.aio.insecure_channel(spare.address)


async def test_spare_is_serving_and_gives_the_owners_tokens_while_it_waits(tmp_path: Path) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        _, _, channel = await owner_and_spare(one)
        async with channel:
            assert await serving(channel)
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request("r"), timeout=20)
            events = [event async for event in call]
            token_ids = [token_id for event in events for token_id in event.chunk.token_ids]
            assert token_ids == greedy(prompt_of(1), 20)
            assert events[0].started.request_id == "r"
            assert events[-1].WhichOneof("event") == "done"
            described = await stub.GetModel(inference_pb2.GetModelRequest(), timeout=5)
            assert described.vocab_size == 260


async def test_the_owners_refusal_comes_through_with_its_details(tmp_path: Path) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        _, _, channel = await owner_and_spare(one)
        async with channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request("r", max_tokens=0), timeout=20)
            with pytest.raises(grpc.aio.AioRpcError, match="max_tokens") as refused:
                await anext(aiter(call))
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert any(key == "grpc-status-details-bin" for key, _ in refused.value.trailing_metadata())


async def test_the_owner_frees_the_request_when_the_client_of_a_relay_goes(tmp_path: Path) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        owner, _, channel = await owner_and_spare(one)
        async with channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request("r", max_tokens=2000), timeout=30)
            reader = aiter(call)
            while (await anext(reader)).WhichOneof("event") != "chunk":
                pass
            assert await running(owner) == 1
            call.cancel()
            await all_free(owner)


async def test_a_call_that_was_relayed_is_refused_with_the_owner_instead_of_relayed_again(tmp_path: Path) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        owner, _, channel = await owner_and_spare(one)
        async with channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = stub.Generate(request("r"), timeout=20, metadata=((RELAYED_KEY, "1"),))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await anext(aiter(call))
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert owner.address.encode() in dict(refused.value.trailing_metadata())["grpc-status-details-bin"]


async def test_spare_passes_on_streams_of_requests_and_says_itself_that_it_lives(tmp_path: Path) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        owner, spare, channel = await owner_and_spare(one)
        async with channel, triton.InferenceServerClient(spare.address) as client:
            assert await client.is_server_ready()

            async def asked() -> AsyncIterator[dict[str, object]]:
                for number in (1, 2):
                    prompt = InferInput("text_input", [1], "BYTES")
                    prompt.set_data_from_numpy(np.array([f"{number} ave"], dtype=object))
                    yield {"model_name": "", "inputs": [prompt], "request_id": str(number)}

            ends = {}
            async for result, error in client.stream_infer(asked()):
                assert error is None
                ends[result.get_response().id] = result.as_numpy("finish_reason")[0]
            assert ends.keys() == {"1", "2"}
            owner.process.kill()
            assert await client.is_server_live()


async def test_spare_serves_its_own_group_once_the_owner_is_gone(tmp_path: Path) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        owner, spare, channel = await owner_and_spare(one)
        async with channel:
            owner.process.kill()
            await until(lambda: spare.is_ready, "the spare to have the group", timeout_s=20)
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            events = [event async for event in stub.Generate(request("r"), timeout=20)]
            assert [i for event in events for i in event.chunk.token_ids] == greedy(prompt_of(1), 20)
            assert await serving(channel)


async def test_spare_that_is_told_to_end_waits_for_the_streams_that_it_passes_on(tmp_path: Path) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        owner, spare, channel = await owner_and_spare(one)
        async with channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = aiter(stub.Generate(request("r", max_tokens=400), timeout=40))
            events = [await anext(call), await anext(call)]
            spare.signal(signal.SIGTERM)
            await spare.heard(Stopping)
            with pytest.raises(grpc.aio.AioRpcError, match="not accepting"):
                await anext(aiter(stub.Generate(request("late"), timeout=20)))
            events += [event async for event in call]
            assert [token_id for event in events for token_id in event.chunk.token_ids] == greedy(prompt_of(1), 400)
            assert await spare.exit_code() == 0
        await all_free(owner)


@pytest.mark.parametrize("how", ["deadline", "second-signal"])
async def test_stream_that_a_spare_cannot_wait_for_ends_with_a_status_that_says_so(tmp_path: Path, how: str) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        timeout_s = "0.2" if how == "deadline" else "60"
        owner, spare = await one.owner_and_spare("--drain-timeout-s", timeout_s)
        async with grpc.aio.insecure_channel(spare.address) as channel:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = aiter(stub.Generate(request("r", max_tokens=3000), timeout=40))
            await anext(call)
            spare.signal(signal.SIGTERM)
            await spare.heard(Stopping)
            if how == "second-signal":
                spare.signal(signal.SIGTERM)
            with pytest.raises(grpc.aio.AioRpcError, match="the control plane that passed the call on") as ended:
                async for _ in call:
                    pass
            assert ended.value.code() is grpc.StatusCode.CANCELLED
            assert await spare.exit_code() == 0
        await all_free(owner)


async def test_request_of_a_killed_spare_goes_on_where_it_may_wait_for_its_client(tmp_path: Path) -> None:
    async with asyncio.timeout(60), site(tmp_path) as one:
        owner, spare, channel = await owner_and_spare(one)
        asked = request("r", max_tokens=150)
        asked.detach_grace_s = 20
        token_ids: list[int] = []
        async with channel, grpc.aio.insecure_channel(owner.address) as direct:
            stub: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(channel)
            call = aiter(stub.Generate(asked, timeout=40))
            token = (await anext(call)).started.resume_token
            token_ids += (await anext(call)).chunk.token_ids
            spare.process.kill()

            async def read_on() -> None:
                async for event in call:
                    token_ids.extend(event.chunk.token_ids)

            with pytest.raises(grpc.aio.AioRpcError):
                await read_on()
            cursor = inference_pb2.ResumeRequest.Cursor(num_tokens=len(token_ids))
            resume = inference_pb2.ResumeRequest(request_id="r", resume_token=token, cursors=[cursor])
            at_owner: inference_pb2_grpc.InferenceServiceAsyncStub = inference_pb2_grpc.InferenceServiceStub(direct)
            async for answer in at_owner.Resume(resume, timeout=40):
                token_ids += answer.response.chunk.token_ids
            assert token_ids == greedy(prompt_of(1), 150)
