"""KServe's protocol over a real socket, before a fake engine, as the stock client speaks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc.aio as triton
from tritonclient.grpc import InferInput, InferRequestedOutput, InferResult, service_pb2, service_pb2_grpc
from tritonclient.utils import InferenceServerException

from service_chassis.errors import GroupLost, NotReady, QueueFull
from support.fake_engine import Doors, open_doors
from support.waiting import until

END = 256
MODEL = "fake"


def tensor(name: str, value: str | bool | bytes) -> InferInput:
    is_switch = isinstance(value, bool)
    made = InferInput(name, [1], "BOOL" if is_switch else "BYTES")
    content = value if is_switch or isinstance(value, bytes) else value.encode()
    made.set_data_from_numpy(np.array([content], dtype=bool if is_switch else object))
    return made


def inputs(text: str | bytes = "hi", sampling: dict[str, Any] | None = None, **switches: bool) -> list[InferInput]:
    tensors = [tensor("text_input", text), *(tensor(name, value) for name, value in switches.items())]
    return tensors if sampling is None else [*tensors, tensor("sampling_parameters", json.dumps(sampling))]


def texts(result: InferResult, name: str = "text_output") -> list[str]:
    return [one.decode() for one in result.as_numpy(name)]


def is_final(result: InferResult) -> bool:
    return bool(result.get_response().parameters["triton_final_response"].bool_param)


async def infer(doors: Doors, tensors: list[InferInput] | None = None, **options: Any) -> InferResult:
    async with triton.InferenceServerClient(doors.address) as client:
        return await client.infer(**{"model_name": MODEL, "inputs": tensors or inputs(), **options})


async def stream(doors: Doors, *requests: dict[str, Any]) -> list[tuple[InferResult | None, Exception | None]]:
    """Send requests over one stream, close it, and return all that comes."""

    async def asked() -> AsyncIterator[dict[str, Any]]:
        for request in requests:
            yield {"model_name": MODEL, "inputs": inputs(stream=True), **request}

    async with triton.InferenceServerClient(doors.address) as client:
        return [answer async for answer in client.stream_infer(asked())]


async def good(doors: Doors, *requests: dict[str, Any]) -> list[InferResult]:
    answers = await stream(doors, *requests)
    assert [error for _, error in answers if error is not None] == []
    return [result for result, _ in answers if result is not None]


async def test_unary_request_returns_prompt_and_output_reason_and_counts() -> None:
    async with open_doors() as doors:
        doors.engine.output = [*"grüße".encode(), END]
        result = await infer(doors, request_id="7")
    response = result.get_response()
    assert (response.model_name, response.model_version, response.id) == (MODEL, "1", "7")
    assert texts(result) == ["higrüße"]
    assert texts(result, "finish_reason") == ["stop"]
    assert result.as_numpy("num_input_tokens").tolist() == [2]
    assert result.as_numpy("num_output_tokens").tolist() == [8]
    assert is_final(result)


async def test_unary_request_leaves_the_prompt_out_when_told_to_and_has_a_text_a_sample() -> None:
    async with open_doors() as doors:
        result = await infer(doors, inputs(sampling={"n": 3, "max_tokens": 1}, exclude_input_in_output=True))
    assert texts(result) == ["o"] * 3
    assert texts(result, "finish_reason") == ["length"] * 3
    assert result.as_numpy("num_output_tokens").tolist() == [1, 1, 1]


async def test_stream_sends_new_text_only_and_marks_the_last_response() -> None:
    async with open_doors() as doors:
        doors.engine.output = [*b"hello", END]
        results = await good(doors, {"request_id": "a"})
    assert "".join(text for result in results for text in texts(result)) == "hello"
    assert len(results) > 2
    assert [is_final(result) for result in results] == [False] * (len(results) - 1) + [True]
    assert [texts(result, "finish_reason") for result in results[:-1]] == [["None"]] * (len(results) - 1)
    assert texts(results[-1], "finish_reason") == ["stop"]
    assert sum(int(result.as_numpy("num_output_tokens")[0]) for result in results) == 6
    assert {result.get_response().id for result in results} == {"a"}


async def test_stream_of_several_samples_has_an_element_for_each() -> None:
    async with open_doors() as doors:
        doors.engine.output = b"abc"
        results = await good(doors, {"inputs": inputs(sampling={"n": 2, "max_tokens": 3}, stream=True)})
    assert {len(texts(result)) for result in results} == {2}
    assert ["".join(parts) for parts in zip(*map(texts, results), strict=True)] == ["abc", "abc"]
    assert texts(results[-1], "finish_reason") == ["length", "length"]
    assert [is_final(result) for result in results].count(True) == 1


async def test_decoupled_request_without_stream_has_one_response() -> None:
    async with open_doors() as doors:
        (result,) = await good(doors, {"inputs": inputs(sampling={"max_tokens": 2})})
    assert (texts(result), is_final(result)) == (["hiok"], True)


async def test_requests_of_one_stream_are_answered_side_by_side_and_may_share_an_id() -> None:
    async with open_doors() as doors:
        doors.engine.output = b"abcd"
        wanted = {"inputs": inputs(sampling={"max_tokens": 4}, stream=True), "enable_empty_final_response": True}
        results = await good(doors, *({**wanted, "request_id": "same" if k < 2 else str(k)} for k in range(6)))
        ids = [seen.request_id for seen in doors.engine.seen]
    told: dict[str, str] = {}
    for result in results:
        told[result.get_response().id] = told.get(result.get_response().id, "") + texts(result)[0]
    assert sorted(told.pop("same")) == sorted("abcdabcd")
    assert told == {str(k): "abcd" for k in range(2, 6)}
    order = [result.get_response().id for result in results]
    assert order != sorted(order), "one after the other"
    assert [is_final(result) for result in results].count(True) == 6
    assert len(set(ids)) == 6
    assert all(one.startswith(("same-", "2-", "3-", "4-", "5-")) for one in ids)


async def test_request_that_fails_says_so_in_its_stream_and_the_others_go_on() -> None:
    async with open_doors() as doors:
        doors.engine.output = [*b"hello", END]
        bad = {"inputs": inputs(sampling={"tempreature": 1}, stream=True), "request_id": "bad"}
        answers = await stream(doors, {"request_id": "a"}, bad, {"request_id": "b"}, {"model_name": "other"})
        errors = [str(error) for _, error in answers if error is not None]
        assert len(errors) == 2
        assert any(
            "INVALID_ARGUMENT: sampling_parameters.tempreature=1: is no sampling parameter" in one for one in errors
        )
        assert any("NOT_FOUND: model='other'" in one for one in errors)
        results = [result for result, _ in answers if result is not None]
        assert {result.get_response().id for result in results if is_final(result)} == {"a", "b"}


async def test_error_carries_the_requests_id_and_is_its_last_response() -> None:
    async with open_doors() as doors:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(doors.channel)
        for error, sentence in (
            (QueueFull("too many wait", retry_after_s=1), "RESOURCE_EXHAUSTED: too many wait"),
            (NotReady("not accepting requests: draining"), "UNAVAILABLE: not accepting requests: draining"),
        ):
            doors.engine.refusal = error
            request = service_pb2.ModelInferRequest(model_name=MODEL, id="x")
            request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
            (answer,) = [one async for one in stub.ModelStreamInfer(iter([request]))]
            assert answer.error_message == sentence
            assert answer.infer_response.id == "x"
            assert answer.infer_response.parameters["triton_final_response"].bool_param
        doors.engine.refusal, doors.engine.error, doors.engine.error_after = None, GroupLost("rank 1 is gone"), 1
        answers = [one async for one in stub.ModelStreamInfer(iter([request]))]
        assert [one.error_message for one in answers] == ["ABORTED: rank 1 is gone"]
        with pytest.raises(grpc.aio.AioRpcError, match="rank 1 is gone") as caught:
            await stub.ModelInfer(request)
        assert caught.value.code() is grpc.StatusCode.ABORTED


async def test_cancelling_a_stream_frees_every_request_of_it() -> None:
    async with open_doors() as doors:
        doors.engine.output = b"x" * 3  # and then the model thinks on

        async def asked() -> AsyncIterator[dict[str, Any]]:
            for k in range(3):
                yield {"model_name": MODEL, "inputs": inputs(stream=True), "request_id": str(k)}
            await asyncio.Event().wait()

        async with triton.InferenceServerClient(doors.address) as client:
            answers = client.stream_infer(asked())
            for _ in range(3):
                await anext(answers)
            assert answers.cancel()
            await until(lambda: len(doors.engine.cancelled) == 3, "all three are freed")
            call = asyncio.create_task(client.infer(MODEL, inputs()))
            await until(lambda: len(doors.engine.seen) == 4, "it runs")
            call.cancel()
            await until(lambda: len(doors.engine.cancelled) == 4, "it is freed too")


async def test_sampling_parameters_take_vllms_names_and_numbers_as_text() -> None:
    sampling = {
        "temperature": "0.5",
        "top_p": 0.9,
        "top_k": "5",
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "max_tokens": "2",
        "min_tokens": 1,
        "stop": "end",
        "stop_token_ids": [7],
        "include_stop_str_in_output": True,
        "ignore_eos": "true",
        "seed": -1,
        "n": 1,
        "logit_bias": {"5": -1.5},
        "allowed_token_ids": [5, 7, 111],
        "bad_words": ["no"],
        "skip_special_tokens": False,
        "truncate_prompt_tokens": 1,
        "prompt_logprobs": None,
    }
    async with open_doors() as doors:
        await infer(doors, inputs("hi", sampling, stream=False), priority=3, parameters={})
        await infer(doors, inputs("hi"), parameters={"temperature": 0.0, "max_tokens": 1})
        first, second = doors.engine.seen
    choice = first.sampling
    assert (choice.temperature, choice.top_k, choice.max_tokens, choice.min_tokens, choice.n) == (0.5, 5, 2, 1, 1)
    assert (choice.top_p, choice.min_p, choice.repetition_penalty) == pytest.approx((0.9, 0.1, 1.1))
    assert (choice.presence_penalty, choice.frequency_penalty) == pytest.approx((0.2, 0.3))
    assert (choice.seed, choice.stop_token_ids, choice.eos_ids) == (2**64 - 1, {7}, frozenset())
    assert (choice.logit_bias, choice.allowed_token_ids) == (((5, -1.5),), (5, 7, 111))
    assert (first.text.stop, first.text.include_stop_str_in_output, first.text.skip_special_tokens) == (
        ("end",),
        True,
        False,
    )
    assert (first.priority, first.prompt_token_ids) == (3, (ord("i"),))
    assert (second.sampling.temperature, second.sampling.max_tokens) == (0.0, 1)


@pytest.mark.parametrize(
    ("tensors", "options", "sentence"),
    [
        ([tensor("stream", False)], {}, "must have text_input"),
        (inputs(""), {}, "text=''"),
        (inputs("x" * 100), {}, "prompt="),
        (inputs(b"\xff"), {}, "text_input='1 bytes': must be UTF-8"),
        ([*inputs(), tensor("image", "x")], {}, "inputs.name='image': is no input"),
        ([*inputs(), *inputs()], {}, "inputs.name='text_input': must be there once"),
        ([tensor("text_input", True)], {}, "text_input.datatype='BOOL': must be BYTES"),
        (inputs(stream=True), {}, "stream=True: must be false in ModelInfer"),
        ([*inputs(), tensor("sampling_parameters", "{")], {}, "sampling_parameters='{': must be a JSON object"),
        ([*inputs(), tensor("sampling_parameters", "[1]")], {}, "must be a JSON object"),
        (inputs(sampling={"temperature": -1}), {}, "temperature=-1"),
        (inputs(sampling={"temperature": "warm"}), {}, "sampling_parameters.temperature='warm': must be a number"),
        (inputs(sampling={"temperature": True}), {}, "sampling_parameters.temperature=True: must be a number"),
        (inputs(sampling={"temperature": 1e300}), {}, "must be a finite number"),
        (inputs(sampling={"max_tokens": 1.5}), {}, "sampling_parameters.max_tokens=1.5: must be a whole number"),
        (inputs(sampling={"max_tokens": 2**32}), {}, "must be a whole number in [0, 4294967295]"),
        (inputs(sampling={"stop_token_ids": 3}), {}, "sampling_parameters.stop_token_ids=3: must be a list"),
        (inputs(sampling={"stop": [3]}), {}, "sampling_parameters.stop=3: must be text"),
        (inputs(sampling={"ignore_eos": 1}), {}, "sampling_parameters.ignore_eos=1: must be true or false"),
        (inputs(sampling={"logit_bias": {"a": 1}}), {}, "sampling_parameters.logit_bias='a': must be a whole number"),
        (
            inputs(sampling={"guided_decoding": {"yaml": ""}}),
            {},
            "={'yaml': ''}: must be an object with one of",
        ),
        (inputs(sampling={"stop": ["\ud800"]}), {}, "must be a JSON object of Unicode text"),
        (inputs(sampling={"structured_outputs": {"json": {"const": "\udfff"}}}), {}, "object of Unicode text"),
        (inputs(sampling={"prompt_logprobs": 0}), {}, "prompt_logprobs=0: must be unset"),
        (inputs(), {"request_id": "x" * 1025}, "id='1025 characters': may have at most 1024"),
        (inputs(), {"parameters": {"beam_width": 4}}, "parameters.beam_width=4: is no sampling parameter"),
        (inputs(sampling={"n": 1}), {"parameters": {"n": 1}}, "parameters.n=1: must not be in sampling_parameters too"),
        (inputs(), {"sequence_id": 5}, "parameters.sequence_"),
        (inputs(), {"model_version": "2"}, "model_version='2': there is only version '1'"),
        (inputs(), {"outputs": [InferRequestedOutput("logits")]}, "outputs.name='logits': is no output"),
    ],
)
async def test_what_is_wrong_is_refused_by_name(
    tensors: list[InferInput], options: dict[str, Any], sentence: str
) -> None:
    async with open_doors() as doors:
        with pytest.raises(InferenceServerException) as caught:
            await infer(doors, tensors, **options)
        assert sentence in str(caught.value)
        assert caught.value.status() == (
            "StatusCode.NOT_FOUND" if "version" in sentence else "StatusCode.INVALID_ARGUMENT"
        )
        assert doors.engine.seen == []


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda r: r.inputs[0].shape.append(2), "text_input.shape=[1, 2]: must be [1]"),
        (lambda r: r.inputs[0].ClearField("shape"), "text_input.shape=[]"),
        (lambda r: r.inputs[0].contents.Clear(), "text_input.bytes_contents='0 elements'"),
        (lambda r: r.raw_input_contents.extend([b"", b""]), "raw_input_contents='2 entries': must be as many as the 1"),
        (lambda r: r.raw_input_contents.append(b"\x09\0\0\0hi"), "text_input='6 bytes': must be the length"),
        (lambda r: r.inputs[0].parameters["shared_memory_region"].SetInParent(), "text_input.shared_memory_region"),
        (
            lambda r: r.parameters["timeout"].MergeFrom(service_pb2.InferParameter(string_param="1")),
            "parameters.timeout",
        ),
        (
            lambda r: r.parameters["triton_enable_empty_final_response"].MergeFrom(
                service_pb2.InferParameter(int64_param=1)
            ),
            "parameters.triton_enable_empty_final_response=1: must be a bool_param",
        ),
        (lambda r: r.parameters["triton_other"].SetInParent(), "parameters.triton_other=None: is not supported"),
    ],
)
async def test_messages_that_no_stock_client_builds_are_refused_by_name(spoil: Any, sentence: str) -> None:
    request = service_pb2.ModelInferRequest(model_name=MODEL)
    request.inputs.add(name="text_input", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"hi")
    async with open_doors() as doors:
        doors.engine.output = [END]
        stub = service_pb2_grpc.GRPCInferenceServiceStub(doors.channel)
        assert (await stub.ModelInfer(request)).id == ""
        spoil(request)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ModelInfer(request)
        assert sentence in str(caught.value.details())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_outputs_are_those_asked_for() -> None:
    async with open_doors() as doors:
        doors.engine.output = [END]
        named = await infer(doors, outputs=[InferRequestedOutput("text_output")])
        switched = await infer(doors, inputs(return_finish_reason=False, return_num_input_tokens=True))
        summed = await infer(doors, inputs(return_cumulative_logprob=True))
    assert [one.name for one in named.get_response().outputs] == ["text_output"]
    names = [one.name for one in switched.get_response().outputs]
    assert names == ["text_output", "num_input_tokens", "num_output_tokens"]
    assert "cumulative_logprob" in [one.name for one in summed.get_response().outputs]
    assert [seen.sampling.num_logprobs for seen in doors.engine.seen] == [None, None, 0]


async def test_timeout_of_a_request_is_its_deadline() -> None:
    async with open_doors() as doors:
        doors.engine.output = [END]
        await infer(doors, timeout=5_000_000)
        await infer(doors)
        first, second = doors.engine.seen
    assert first.deadline is not None
    assert 0 < first.deadline - doors.engine.now() < 5
    assert second.deadline is None


async def test_server_and_model_tell_what_they_are() -> None:
    async with open_doors() as doors, triton.InferenceServerClient(doors.address) as client:
        assert await client.is_server_live()
        assert await client.is_server_ready()
        assert await client.is_model_ready(MODEL)
        assert not await client.is_model_ready("other")
        assert not await client.is_model_ready(MODEL, "2")
        server = await client.get_server_metadata()
        assert (server.name, server.version) == ("maniple", "0")
        model = await client.get_model_metadata(MODEL)
        assert (model.name, list(model.versions)) == (MODEL, ["1"])
        assert {one.name: one.datatype for one in model.inputs}["text_input"] == "BYTES"
        assert {one.name: one.datatype for one in model.outputs} == {
            "text_output": "BYTES",
            "finish_reason": "BYTES",
            "num_input_tokens": "UINT32",
            "num_output_tokens": "UINT32",
            "logprobs": "BYTES",
            "cumulative_logprob": "FP32",
        }
        config = (await client.get_model_config("alias")).config
        assert (config.name, config.max_batch_size) == ("alias", 0)
        assert config.model_transaction_policy.decoupled
        assert [one.name for one in config.input if not one.optional] == ["text_input"]
        with pytest.raises(InferenceServerException, match="'other': is not served here"):
            await client.get_model_metadata("other")
        (index, _) = (await client.get_model_repository_index()).models
        assert (index.name, index.state) == (MODEL, "READY")
        doors.engine.set_ready(False, "draining")
        assert await client.is_server_live()
        assert not await client.is_server_ready()
        assert not await client.is_model_ready(MODEL)
        assert (await client.get_model_repository_index()).models[0].reason == "draining"


async def test_statistics_count_what_became_of_requests() -> None:
    async with open_doors() as doors, triton.InferenceServerClient(doors.address) as client:
        await client.infer(MODEL, inputs(sampling={"max_tokens": 1}))
        with pytest.raises(InferenceServerException):
            await client.infer(MODEL, inputs(sampling={"max_tokens": 0}))
        (told,) = (await client.get_inference_statistics(MODEL)).model_stats
    assert (told.inference_count, told.inference_stats.success.count, told.inference_stats.fail.count) == (1, 1, 1)
    assert told.inference_stats.success.ns >= told.inference_stats.compute_infer.ns > 0


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.load_model("m"),
        lambda client: client.unload_model("m"),
        lambda client: client.get_system_shared_memory_status(),
        lambda client: client.register_system_shared_memory("a", "b", 1),
        lambda client: client.unregister_system_shared_memory(),
        lambda client: client.get_cuda_shared_memory_status(),
        lambda client: client.register_cuda_shared_memory("a", b"", 0, 1),
        lambda client: client.unregister_cuda_shared_memory(),
        lambda client: client.get_trace_settings(),
        lambda client: client.get_log_settings(),
    ],
)
async def test_what_does_not_fit_this_server_is_unimplemented_with_a_sentence(call: Any) -> None:
    async with open_doors() as doors, triton.InferenceServerClient(doors.address) as client:
        with pytest.raises(InferenceServerException) as caught:
            await call(client)
        assert caught.value.status() == "StatusCode.UNIMPLEMENTED"
        assert len(str(caught.value.message())) > 40
