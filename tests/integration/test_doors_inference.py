"""``maniple.v1.InferenceService`` over a real socket, before a fake engine."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from control_plane.text.tokenizer import Tokenizer
from maniple.v1 import errors_pb2, inference_pb2
from maniple.v1.inference_pb2 import ChatMessage, ChatPrompt, GenerateRequest, GenerateResponse, TokenIds
from maniple.v1.sampling_pb2 import SamplingParams
from service_chassis.errors import DuplicateRequest, GroupLost, GroupLostBeforeStart, QueueFull
from support.fake_engine import SCRIPTED_LIMITS, Doors, open_doors
from support.waiting import until

END = 256  # of the scripted model


async def ask(doors: Doors, request: GenerateRequest | None = None, **fields: object) -> list[GenerateResponse]:
    request = request or GenerateRequest(**{"text": "hi", **fields})  # type: ignore[arg-type]
    return [response async for response in doors.inference.Generate(request, timeout=10)]


async def first(call: Any) -> GenerateResponse:
    response = await call.read()
    assert isinstance(response, GenerateResponse)
    return response


async def rest(call: Any) -> list[GenerateResponse]:
    """Read a stream to its end."""
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


async def refused(call: Awaitable[Any]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def error_info(error: grpc.aio.AioRpcError) -> error_details_pb2.ErrorInfo:
    trailers = dict(error.trailing_metadata() or ())
    status = status_pb2.Status.FromString(trailers["grpc-status-details-bin"])
    info = error_details_pb2.ErrorInfo()
    assert status.details[0].Unpack(info)
    return info


async def test_generate_streams_started_chunks_finished_done_in_this_order() -> None:
    async with open_doors() as doors:
        doors.engine.output = [*b"hello", END]
        events = await ask(doors, request_id="r1")
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-2:] == ["finished", "done"]
    assert set(kinds[1:-2]) == {"chunk"}
    assert events[0].started.request_id == "r1"
    assert events[0].started.num_prompt_tokens == 2
    assert "".join(event.chunk.text for event in events) == "hello"
    assert [one for event in events for one in event.chunk.token_ids] == [*b"hello", END]
    finished = events[-2].finished
    assert (finished.reason, finished.num_output_tokens) == (inference_pb2.FINISH_REASON_STOP, 6)
    assert finished.WhichOneof("matched") is None  # end of text
    assert events[-1].done.num_output_tokens == 6


async def test_stop_token_id_is_named_as_what_matched() -> None:
    async with open_doors() as doors:
        doors.engine.output = [1, 7, 2]
        events = await ask(doors, sampling=SamplingParams(stop_token_ids=[7]))
    assert events[-2].finished.matched_token_id == 7
    assert events[-2].finished.reason == inference_pb2.FINISH_REASON_STOP


async def test_stop_string_is_named_as_what_matched() -> None:
    async with open_doors() as doors:
        doors.engine.output = b"Hello STOP tail"
        events = await ask(doors, sampling=SamplingParams(stop=["STOP"]))
    assert "".join(event.chunk.text for event in events) == "Hello "
    assert events[-2].finished.matched_stop == "STOP"


async def test_ignore_eos_goes_on_to_the_length() -> None:
    async with open_doors() as doors:
        doors.engine.output = [1, 2, END, 4, 5, 6, 7, 8, 9]
        events = await ask(doors, sampling=SamplingParams(ignore_eos=True, max_tokens=8))
    assert events[-2].finished.reason == inference_pb2.FINISH_REASON_LENGTH
    assert events[-2].finished.num_output_tokens == 8


async def test_only_final_sends_the_whole_output_of_each_sample_once() -> None:
    async with open_doors() as doors:
        doors.engine.output = [*b"whole", END]
        events = await ask(doors, only_final=True, sampling=SamplingParams(n=2))
    assert [event.WhichOneof("event") for event in events] == ["started", "finished", "finished", "done"]
    for index in range(2):
        finished = events[1 + index].finished
        assert (finished.index, finished.text, bytes(finished.token_ids[:-1])) == (index, "whole", b"whole")


async def test_skip_text_leaves_the_ids() -> None:
    async with open_doors() as doors:
        doors.engine.output = [*b"ids", END]
        events = await ask(doors, skip_text=True)
    assert "".join(event.chunk.text for event in events) == ""
    assert [one for event in events for one in event.chunk.token_ids] == [*b"ids", END]


async def test_chat_is_rendered_with_the_models_template() -> None:
    async with open_doors() as doors:
        chat = ChatPrompt(messages=[ChatMessage(role="user", content="hi")])
        await ask(doors, GenerateRequest(chat=chat, sampling=SamplingParams(max_tokens=1)))
        # <|user|> h i <|end|> <|assistant|>
        assert doors.engine.seen[0].prompt_token_ids == (257, *b"hi", 256, 258)


async def test_request_without_an_id_gets_one() -> None:
    async with open_doors() as doors:
        first, second = [(await ask(doors, sampling=SamplingParams(max_tokens=1)))[0] for _ in range(2)]
    assert first.started.request_id
    assert first.started.request_id != second.started.request_id


async def test_deadline_of_the_call_reaches_the_engine() -> None:
    async with open_doors() as doors:
        before = doors.engine.now()
        request = GenerateRequest(text="hi", sampling=SamplingParams(max_tokens=1))
        [_ async for _ in doors.inference.Generate(request, timeout=30)]
        deadline = doors.engine.seen[0].deadline
    assert deadline is not None
    assert deadline - before == pytest.approx(30, abs=2)  # grpc rounds on its way


async def test_call_without_a_deadline_has_none() -> None:
    async with open_doors() as doors:
        request = GenerateRequest(text="hi", sampling=SamplingParams(max_tokens=1))
        [_ async for _ in doors.inference.Generate(request)]
        assert doors.engine.seen[0].deadline is None


@pytest.mark.parametrize("started", [False, True], ids=["waiting", "running"])
async def test_cancelled_stream_frees_the_request(started: bool) -> None:
    async with open_doors() as doors:
        if not started:
            doors.engine.gate.clear()
        call = doors.inference.Generate(GenerateRequest(request_id="r", text="hi"))
        if started:
            assert (await first(call)).HasField("started")
        else:
            # The status flag is the engine's own: the request is in its queue.
            reading = asyncio.ensure_future(call.read())
            await until(lambda: doors.engine.seen, "the request")
            reading.cancel()
        call.cancel()
        await until(lambda: doors.engine.cancelled == ["r"], "the cancellation")


async def test_passed_deadline_frees_the_request() -> None:
    async with open_doors() as doors:
        doors.engine.gate.clear()
        error = await refused(doors.inference.Generate(GenerateRequest(request_id="r", text="hi"), timeout=0.2).read())
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: doors.engine.cancelled == ["r"], "the cancellation")


async def test_initial_metadata_waits_for_the_first_delta() -> None:
    async with open_doors() as doors:
        doors.engine.gate.clear()
        call = doors.inference.Generate(GenerateRequest(text="hi", sampling=SamplingParams(max_tokens=1)), timeout=10)
        metadata = asyncio.ensure_future(call.initial_metadata())
        await until(lambda: doors.engine.seen, "the request")
        assert not (await asyncio.wait({metadata}, timeout=0.1))[0]
        doors.engine.gate.set()
        await asyncio.wait_for(metadata, 5)
        await rest(call)


async def test_abort_ends_the_stream_with_reason_abort() -> None:
    async with open_doors() as doors:
        call = doors.inference.Generate(GenerateRequest(request_id="r", text="hi"), timeout=10)
        assert (await first(call)).HasField("started")
        assert (await doors.inference.Abort(inference_pb2.AbortRequest(request_id="r"))).was_running
        events = await rest(call)
        assert events[-2].finished.reason == inference_pb2.FINISH_REASON_ABORT
        again = await doors.inference.Abort(inference_pb2.AbortRequest(request_id="r"))
        assert not again.was_running
        assert doors.engine.cancelled == []


async def test_error_after_the_start_is_said_in_band_and_by_status() -> None:
    async with open_doors() as doors:
        doors.engine.error, doors.engine.error_after = GroupLost("the group was lost: rank 1 died"), 1
        call = doors.inference.Generate(GenerateRequest(text="hi"), timeout=10)
        events: list[GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # noqa: PT012 (what came before the error counts too)
            async for event in call:
                events.append(event)
    assert events[-1].error.reason == errors_pb2.ERROR_REASON_GROUP_LOST
    assert events[-1].error.message == "the group was lost: rank 1 died"
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert error_info(caught.value).reason == "GROUP_LOST"


async def test_error_before_the_start_is_said_by_status_alone() -> None:
    async with open_doors() as doors:
        doors.engine.error = GroupLostBeforeStart("the group was lost")
        error = await refused(doors.inference.Generate(GenerateRequest(text="hi"), timeout=10).read())
    assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_defect_reaches_the_client_as_an_incident_without_its_text() -> None:
    async with open_doors() as doors:
        doors.engine.refusal = RuntimeError("secret prompt")  # type: ignore[assignment]
        error = await refused(doors.inference.Generate(GenerateRequest(text="hi"), timeout=10).read())
    assert error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (error.details() or "")
    assert error_info(error).metadata["incident_id"] in (error.details() or "")


@pytest.mark.parametrize(
    ("refusal", "code"),
    [
        (DuplicateRequest("request_id='r': is running"), grpc.StatusCode.ALREADY_EXISTS),
        (QueueFull("the queue is full", retry_after_s=1.0), grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
    ids=["duplicate", "full"],
)
async def test_refusals_of_the_engine_keep_their_status(refusal: DuplicateRequest, code: grpc.StatusCode) -> None:
    async with open_doors() as doors:
        doors.engine.refusal = refusal
        assert (await refused(doors.inference.Generate(GenerateRequest(text="hi"), timeout=10).read())).code() is code


async def test_unready_server_refuses_and_says_why() -> None:
    async with open_doors() as doors:
        doors.fleet.leave("the group is formed anew")
        error = await refused(doors.inference.Generate(GenerateRequest(text="hi"), timeout=10).read())
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert "formed anew" in (error.details() or "")


INF, NAN = float("inf"), float("nan")
BAD_SAMPLING: list[tuple[dict[str, object], str]] = [
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": NAN}, "temperature"),
    ({"temperature": INF}, "temperature"),
    ({"top_p": 0.0}, "top_p"),
    ({"top_p": 1.5}, "top_p"),
    ({"top_p": NAN}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -0.5}, "min_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": 11.0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"n": 0}, "n"),
    ({"n": 65}, "n"),
    ({"stop": [""]}, "stop"),
    ({"stop": ["x" * 257]}, "stop"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids"),
    ({"logit_bias": {260: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: 101.0}}, "logit_bias"),
    ({"logit_bias": {1: NAN}}, "logit_bias"),
    ({"allowed_token_ids": [260]}, "allowed_token_ids"),
    ({"allowed_token_ids": [END], "min_tokens": 1}, "allowed_token_ids"),
    ({"allowed_token_ids": [97], "bad_words": ["a"]}, "allowed_token_ids"),
    ({"bad_words": [" "]}, "bad_words"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
    ({"logprobs": 21}, "logprobs"),
    ({"prompt_logprobs": 21}, "prompt_logprobs"),
    ({"logprobs_mode": 4}, "logprobs_mode"),
]
BAD_REQUESTS: list[tuple[GenerateRequest, str]] = [
    *((GenerateRequest(text="hi", sampling=SamplingParams(**bad)), field) for bad, field in BAD_SAMPLING),  # type: ignore[arg-type]
    (GenerateRequest(), "prompt"),
    (GenerateRequest(text=""), "text"),
    (GenerateRequest(token_ids=TokenIds()), "token_ids"),
    (GenerateRequest(token_ids=TokenIds(ids=[1, 260])), "token_ids"),
    (GenerateRequest(token_ids=TokenIds(ids=[2**32 - 1])), "token_ids"),
    (GenerateRequest(token_ids=TokenIds(ids=[1] * 64)), "prompt"),
    (GenerateRequest(chat=ChatPrompt()), "chat.messages"),
    (GenerateRequest(chat=ChatPrompt(messages=[ChatMessage(content="x")])), "chat.messages[0].role"),
    (GenerateRequest(chat=ChatPrompt(messages=[ChatMessage(role="poet")])), "chat"),
    (GenerateRequest(chat=ChatPrompt(messages=[ChatMessage(role="user")], tools_json="{")), "chat.tools_json"),
    (GenerateRequest(chat=ChatPrompt(messages=[ChatMessage(role="user")], chat_template="{% if %}")), "chat_template"),
    (GenerateRequest(text="hi", request_id="x" * 129), "request_id"),
    (GenerateRequest(text="hi", request_id="with space"), "request_id"),
    (GenerateRequest(text="hi", cache_salt="x" * 257), "cache_salt"),
    (GenerateRequest(text="hi", detach_grace_s=-1.0), "detach_grace_s"),
    (GenerateRequest(text="hi", detach_grace_s=3601.0), "detach_grace_s"),
]


async def test_bad_requests_are_invalid_argument_naming_the_field_and_the_server_lives_on() -> None:
    wrong: list[str] = []
    async with open_doors() as doors:
        for request, field in BAD_REQUESTS:
            try:
                await ask(doors, request)
                wrong.append(f"{field}: accepted {request}")
                continue
            except grpc.aio.AioRpcError as error:
                details = error.details() or ""
                if error.code() is not grpc.StatusCode.INVALID_ARGUMENT or not details.startswith(f"{field}="):
                    wrong.append(f"{field}: {error.code()} {details}")
        assert wrong == []
        doors.engine.output = [*b"fine", END]
        assert (await ask(doors))[-1].WhichOneof("event") == "done"


async def test_prompt_that_needs_more_blocks_than_exist_is_refused_and_the_next_works() -> None:
    limits = dataclasses.replace(SCRIPTED_LIMITS, num_blocks=4)  # three of four tokens, beside the null block
    async with open_doors(limits=limits) as doors:
        error = await refused(doors.inference.Generate(GenerateRequest(token_ids=TokenIds(ids=[1] * 13))).read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "3 blocks hold 12 tokens" in (error.details() or "")
        doors.engine.output = [1, 2, 3]
        for length, num_output_tokens in ((11, 2), (12, 1)):  # the last one is sampled and needs no place
            events = await ask(doors, GenerateRequest(token_ids=TokenIds(ids=[1] * length)))
            assert events[-2].finished.num_output_tokens == num_output_tokens


async def test_reserved_features_are_refused_and_named() -> None:
    async with open_doors() as doors:
        error = await refused(doors.inference.Generate(GenerateRequest(text="hi", lora="adapter"), timeout=10).read())
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "lora" in (error.details() or "")


async def test_unknown_model_is_not_found() -> None:
    async with open_doors() as doors:
        assert (await ask(doors, model="alias", sampling=SamplingParams(max_tokens=1)))[-1].HasField("done")
        error = await refused(doors.inference.Generate(GenerateRequest(text="hi", model="other")).read())
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert "'fake', 'alias'" in (error.details() or "")
        with pytest.raises(grpc.aio.AioRpcError, match="other"):
            await doors.inference.GetModel(inference_pb2.GetModelRequest(model="other"))


async def test_message_over_the_limit_names_the_limit_and_the_channel_lives() -> None:
    async with open_doors() as doors:
        request = GenerateRequest(token_ids=TokenIds(ids=[200] * (5 << 19)))  # two bytes each: 5 MiB
        error = await refused(doors.inference.Generate(request, timeout=20).read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(4 << 20) in (error.details() or "")
        assert (await ask(doors, sampling=SamplingParams(max_tokens=1)))[-1].HasField("done")


@pytest.mark.parametrize(
    ("method", "request_", "said"),
    [
        ("Generate", GenerateRequest(text="x" * 833), "text='833 characters': may have at most 832 characters"),
        (
            "Generate",
            GenerateRequest(
                chat=ChatPrompt(
                    messages=[ChatMessage(role="user", content="x" * 900)], chat_template="{{ messages[0].content }}"
                )
            ),
            "chat='900 characters': may have at most 832 characters",
        ),
        (
            "Tokenize",
            inference_pb2.TokenizeRequest(text="x" * (2**20 + 1)),
            "text='1048577 characters': may have at most",
        ),
        (
            "Detokenize",
            inference_pb2.DetokenizeRequest(token_ids=[1] * (64 * 64 + 1)),
            "token_ids='4097 entries': may have at most 4096",
        ),
    ],
)
async def test_what_is_much_too_long_is_refused_before_it_is_converted(
    method: str, request_: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def convert(*args: object, **options: object) -> None:
        raise AssertionError("it was converted")

    async with open_doors() as doors:
        monkeypatch.setattr(Tokenizer, "encode", convert)
        monkeypatch.setattr(Tokenizer, "decode", convert)
        call = getattr(doors.inference, method)(request_, timeout=10)
        error = await refused(call.read() if method == "Generate" else call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert said in (error.details() or "")


async def test_a_truncated_text_may_be_much_longer_than_the_context() -> None:
    async with open_doors() as doors:
        sampling = SamplingParams(truncate_prompt_tokens=3, max_tokens=2)
        call = doors.inference.Generate(GenerateRequest(text="x" * 5000, sampling=sampling), timeout=10)
        assert [response async for response in call]
        assert doors.engine.seen[0].prompt_token_ids == (*b"xxx",)


async def test_tokenize_and_detokenize_are_inverse() -> None:
    async with open_doors() as doors:
        tokenized = await doors.inference.Tokenize(inference_pb2.TokenizeRequest(text="héllo 🦩"))
        assert bytes(tokenized.token_ids) == "héllo 🦩".encode()
        assert tokenized.max_model_len == 64
        detokenized = await doors.inference.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=[*tokenized.token_ids, END])
        )
        assert detokenized.text == "héllo 🦩"
        shown = await doors.inference.Detokenize(
            inference_pb2.DetokenizeRequest(token_ids=[END], skip_special_tokens=False)
        )
        assert shown.text == "<|end|>"
        with pytest.raises(grpc.aio.AioRpcError, match="vocabulary"):
            await doors.inference.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[260]))


async def test_model_is_described() -> None:
    async with open_doors() as doors:
        model = await doors.inference.GetModel(inference_pb2.GetModelRequest())
    assert list(model.served_names) == ["fake", "alias"]
    assert (model.vocab_size, model.max_model_len, list(model.eos_token_ids)) == (260, 64, [END])
    assert model.has_chat_template


async def test_mutated_requests_never_cause_an_internal_error() -> None:
    seeds = [
        GenerateRequest(
            request_id="r",
            text="hello",
            sampling=SamplingParams(temperature=0.7, top_k=3, stop=["x"], logit_bias={1: 2.0}, max_tokens=3, n=2),
        ),
        GenerateRequest(
            chat=ChatPrompt(
                messages=[ChatMessage(role="user", content="hi", tool_calls_json="[]")],
                tools_json="[]",
                template_args_json="{}",
                chat_template="{{ messages[0].content }}",
            ),
            sampling=SamplingParams(max_tokens=2, bad_words=["a"], allowed_token_ids=[1, 2]),
        ),
        GenerateRequest(token_ids=TokenIds(ids=[1, 2, 3]), sampling=SamplingParams(max_tokens=2, stop_token_ids=[7])),
    ]
    rng = random.Random(11)
    codes: dict[object, int] = {}
    async with open_doors() as doors:
        doors.engine.output = [1, 2, 3, END]
        for _ in range(1500):
            raw = bytearray(rng.choice(seeds).SerializeToString())
            for _ in range(rng.randrange(1, 4)):
                place = rng.randrange(len(raw))
                match rng.randrange(3):
                    case 0:
                        raw[place] = rng.randrange(256)
                    case 1:
                        raw.insert(place, rng.randrange(256))
                    case _ if len(raw) > 1:
                        del raw[place]
            generate: Any = doors.channel.unary_stream("/maniple.v1.InferenceService/Generate")
            call = generate(bytes(raw), timeout=10)
            try:
                async for message in call:
                    GenerateResponse.FromString(message)
                code: object = grpc.StatusCode.OK
            except DecodeError:
                pytest.fail("the answer is not readable")
            except grpc.aio.AioRpcError as error:
                code = error.code()
            codes[code] = codes.get(code, 0) + 1
    allowed = {
        grpc.StatusCode.OK,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
    }
    assert set(codes) <= allowed, codes
    assert codes[grpc.StatusCode.OK] > 50  # mutations that still mean something
