"""``vllm.grpc.engine.VllmEngine`` over a real socket, before a fake engine."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from typing import Any

import grpc
import pytest
import tokenizers
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import common_pb2

from support.fake_engine import Doors, open_doors
from support.waiting import until

END = 256


def request(*, stream: bool = True, ids: bytes = b"hi", **sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="r",
        tokenized=pb.TokenizedInput(input_ids=ids),
        sampling_params=pb.SamplingParams(**sampling),
        stream=stream,
    )


async def ask(doors: Doors, wanted: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    return [response async for response in doors.vllm.Generate(wanted, timeout=10)]


async def test_stream_carries_new_ids_only_then_one_complete() -> None:
    async with open_doors() as doors:
        doors.engine.output = [*b"hello", END]
        responses = await ask(doors, request())
    chunks = [response.chunk for response in responses[:-1]]
    assert [one for chunk in chunks for one in chunk.token_ids] == [*b"hello", END]
    assert chunks[-1].completion_tokens == 6
    assert {chunk.prompt_tokens for chunk in chunks} == {2}
    complete = responses[-1].complete
    assert list(complete.output_ids) == [*b"hello", END]
    assert (complete.finish_reason, complete.completion_tokens) == ("stop", 6)
    assert complete.WhichOneof("matched_stop") is None


async def test_without_stream_there_is_only_complete() -> None:
    async with open_doors() as doors:
        doors.engine.output = b"hello"
        responses = await ask(doors, request(stream=False, max_tokens=3))
    assert [response.WhichOneof("response") for response in responses] == ["complete"]
    assert bytes(responses[0].complete.output_ids) == b"hel"
    assert responses[0].complete.finish_reason == "length"


async def test_every_sample_has_its_own_complete() -> None:
    async with open_doors() as doors:
        responses = await ask(doors, request(stream=False, n=3, max_tokens=1))
    assert sorted(response.complete.index for response in responses) == [0, 1, 2]


@pytest.mark.parametrize(
    ("sampling", "matched"),
    [({"stop_token_ids": [ord("e")]}, ("matched_token_id", ord("e"))), ({"stop": ["el"]}, ("matched_stop_str", "el"))],
    ids=["id", "string"],
)
async def test_what_stopped_a_sample_is_named(sampling: dict[str, Any], matched: tuple[str, object]) -> None:
    async with open_doors() as doors:
        doors.engine.output = b"hello"
        complete = (await ask(doors, request(**sampling)))[-1].complete
    which = complete.WhichOneof("matched_stop")
    assert (which, getattr(complete, which)) == matched


async def test_unset_and_zero_mean_the_defaults() -> None:
    async with open_doors() as doors:
        await ask(doors, request(max_tokens=1))
        choice = doors.engine.seen[0].sampling
    assert (choice.temperature, choice.top_p, choice.top_k, choice.min_p) == (1.0, 1.0, 0, 0.0)
    assert (choice.repetition_penalty, choice.presence_penalty, choice.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (choice.n, choice.min_tokens) == (1, 0)


async def test_a_set_zero_temperature_is_greedy_and_max_tokens_default_to_the_context() -> None:
    async with open_doors() as doors:
        doors.engine.output = [END]
        await ask(doors, request(temperature=0.0, seed=-2))
        choice = doors.engine.seen[0].sampling
    assert (choice.temperature, choice.max_tokens, choice.seed) == (0.0, 62, 2**64 - 2)


async def test_seed_minus_one_is_none() -> None:
    async with open_doors() as doors:
        for _ in range(2):
            await ask(doors, request(max_tokens=1, seed=-1))
        first, second = (generation.sampling.seed for generation in doors.engine.seen)
    assert first != second


async def test_truncation_to_minus_one_keeps_what_the_model_takes() -> None:
    wanted = request(max_tokens=1, truncate_prompt_tokens=-1)
    wanted.tokenized.input_ids[:] = [*range(100)]
    async with open_doors() as doors:
        await ask(doors, wanted)
    assert doors.engine.seen[0].prompt_token_ids == tuple(range(37, 100))  # 63 of 64: one token still fits


async def test_special_tokens_are_separated_as_asked() -> None:
    async with open_doors() as doors:
        for asked in (False, True):
            await ask(doors, request(max_tokens=1, stop=["x"], spaces_between_special_tokens=asked))
    assert [one.text.spaces_between_special_tokens for one in doors.engine.seen] == [False, True]


@pytest.mark.parametrize(
    ("wanted", "code", "said"),
    [
        (request(top_p=2.0), grpc.StatusCode.INVALID_ARGUMENT, "top_p="),
        (request(top_k=2**31), grpc.StatusCode.INVALID_ARGUMENT, "top_k="),
        (request(logit_bias={-1: 1.0}), grpc.StatusCode.INVALID_ARGUMENT, "logit_bias="),
        (request(truncate_prompt_tokens=-2), grpc.StatusCode.INVALID_ARGUMENT, "truncate_prompt_tokens="),
        (request(ids=b""), grpc.StatusCode.INVALID_ARGUMENT, "token_ids="),
        (pb.GenerateRequest(request_id="r"), grpc.StatusCode.INVALID_ARGUMENT, "prompt="),
        (request(logprobs=-1), grpc.StatusCode.INVALID_ARGUMENT, "logprobs=-1"),
        (request(regex=""), grpc.StatusCode.INVALID_ARGUMENT, "sampling.structured_output.regex="),
        (request(json_object=False), grpc.StatusCode.INVALID_ARGUMENT, "sampling.structured_output.json_object="),
        (pb.GenerateRequest(mm_inputs=pb.MultimodalInputs()), grpc.StatusCode.UNIMPLEMENTED, "mm_inputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_bad_requests_have_their_status(wanted: pb.GenerateRequest, code: grpc.StatusCode, said: str) -> None:
    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(doors, wanted)
        assert caught.value.code() is code
        assert said in (caught.value.details() or "")


async def test_abort_ends_the_stream_with_reason_abort_and_unknown_ids_are_fine() -> None:
    async with open_doors() as doors:
        doors.engine.gate.clear()
        call = doors.vllm.Generate(request(), timeout=10)
        await until(lambda: doors.engine.seen, "the request")
        await doors.vllm.Abort(pb.AbortRequest(request_ids=["r", "nobody"]))
        responses = [response async for response in call]
    assert responses[-1].complete.finish_reason == "abort"


async def test_tokenizer_bundle_builds_the_same_tokenizer() -> None:
    async with open_doors() as doors:
        chunks = [chunk async for chunk in doors.vllm.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    assert all(not chunk.sha256 for chunk in chunks[:-1])
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        tokenizer = tokenizers.Tokenizer.from_str(archive.read("tokenizer.json").decode())
        config = json.loads(archive.read("tokenizer_config.json"))
    assert tokenizer.encode("<|user|>é").ids == [257, *"é".encode()]
    assert config["eos_token"] == "<|end|>"
    assert "message['role']" in config["chat_template"]


async def test_model_server_and_loads_are_described() -> None:
    async with open_doors() as doors:
        model = await doors.vllm.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.max_context_length, model.vocab_size) == ("fake", 64, 260)
        assert list(model.eos_token_ids) == [END]
        assert json.loads(model.default_sampling_params_json) == {}
        server = await doors.vllm.GetServerInfo(pb.GetServerInfoRequest())
        assert (server.server_type, server.block_size, server.data_parallel_size) == ("vllm-grpc", 4, 1)
        assert (server.is_paused, server.last_receive_timestamp) == (False, 0)
        loads = await doors.vllm.GetLoads(pb.GetLoadsRequest())
        # 100 blocks of 4 tokens, of which 60 are free and 15 hold prefixes that can go.
        assert loads.loads[0].token_usage == pytest.approx(0.25)
        assert (loads.loads[0].num_used_tokens, loads.loads[0].max_total_num_tokens) == (100, 400)
        assert loads.loads[0].cache_hit_rate == pytest.approx(0.25)
        assert loads.loads[0].num_waiting_uncached_tokens == 70
        assert not (await doors.vllm.GetLoads(pb.GetLoadsRequest(dp_rank=1))).loads


async def test_request_for_a_group_that_is_not_there_is_refused() -> None:
    async with open_doors() as doors:
        doors.engine.output = [END]
        wanted = request()
        for rank in (-1, 1):
            wanted.data_parallel_rank = rank
            with pytest.raises(grpc.aio.AioRpcError, match=f"data_parallel_rank={rank}: must be 0") as caught:
                await ask(doors, wanted)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        wanted.data_parallel_rank = 0
        assert await ask(doors, wanted)


async def test_cache_is_flushed_once_nothing_runs() -> None:
    async with open_doors() as doors:
        answer = await doors.vllm.FlushCache(common_pb2.FlushCacheRequest())
        assert (answer.success, answer.message) == (True, "15 cached blocks were forgotten")
        doors.engine.gate.clear()
        call = doors.vllm.Generate(request(max_tokens=1), timeout=10)
        await until(lambda: doors.engine.seen, "the request")
        answer = await doors.vllm.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.01))
        assert not answer.success
        assert "run or wait" in answer.message
        waiting = doors.vllm.FlushCache(common_pb2.FlushCacheRequest(timeout_s=10))
        doors.engine.gate.set()
        assert (await waiting).success
        assert [response async for response in call]
        with pytest.raises(grpc.aio.AioRpcError, match="timeout_s="):
            await doors.vllm.FlushCache(common_pb2.FlushCacheRequest(timeout_s=-1))


async def test_health_follows_readiness() -> None:
    async with open_doors() as doors:
        assert (await doors.vllm.HealthCheck(pb.HealthCheckRequest())).healthy
        doors.engine.set_ready(False, "draining")
        answer = await doors.vllm.HealthCheck(pb.HealthCheckRequest())
        assert (answer.healthy, answer.message) == (False, "draining")


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("StartProfile", common_pb2.StartProfileRequest()),
        ("StopProfile", common_pb2.StopProfileRequest()),
    ],
)
async def test_what_is_not_built_is_unimplemented(method: str, message: object) -> None:
    async with open_doors() as doors:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await getattr(doors.vllm, method)(message)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
