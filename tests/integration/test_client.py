"""The Python client against a server on loopback that answers what each test says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2

import maniple_client
from maniple.v1 import admin_pb2, errors_pb2, inference_pb2
from maniple_client import AsyncClient, Chunk, Client, Done, FieldViolation, Finished, ManipleError, Started
from support.fake_server import FakeServer, Response, answer, rich_status, running


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with running() as fake:
        yield fake


def test_generate_streams_typed_events_in_order(server: FakeServer) -> None:
    with Client(server.address) as client:
        events = list(client.generate(prompt="Why?"))
    assert [type(event) for event in events] == [Started, Chunk, Chunk, Chunk, Chunk, Finished, Done]
    assert [event.text for event in events if isinstance(event, Chunk)] == ["The", " sky", " is", " blue."]
    assert isinstance(events[-2], Finished)
    assert (events[-2].reason, events[-2].matched_stop, events[-2].matched_token_id) == ("stop", None, None)


def test_text_reads_to_the_end_and_keeps_the_transcript(server: FakeServer) -> None:
    with Client(server.address) as client:
        stream = client.generate(prompt="Why?")
        assert stream.text() == "The sky is blue."
    assert stream.request_id == "r-1"
    assert stream.transcript.samples[0].token_ids == [0, 1, 2, 3]
    assert stream.transcript.done is not None
    assert stream.transcript.done.time_to_first_token_s == 0.125


def test_samples_are_kept_apart(server: FakeServer) -> None:
    def two(request: object, context: object) -> Iterator[Response]:
        yield from answer("yes indeed", index=1, done=False)
        yield from answer("no", index=0, started=False)

    server.generate = two
    with Client(server.address) as client:
        stream = client.generate(prompt="Is it?", n=2)
        assert stream.text(1) == "yes indeed"
        assert stream.text(0) == "no"
        assert stream.text(5) == ""


def test_transcript_says_where_a_resume_continues(server: FakeServer) -> None:
    server.generate = lambda request, context: answer("schön, oder", done=False)
    with Client(server.address) as client:
        stream = client.generate(prompt="x")
        stream.text()
    cursor = stream.transcript.cursors()[0]
    # "schön, oder": ö takes two bytes in UTF-8, so 12 bytes for 11 characters.
    assert (cursor.index, cursor.num_tokens, cursor.num_text_bytes) == (0, 2, 12)


def test_options_reach_the_server_and_unset_ones_stay_unset(server: FakeServer) -> None:
    with Client(server.address) as client:
        client.generate(
            token_ids=[1, 2], temperature=0.0, stop="END", logit_bias={7: -1.5}, priority=-2, cache_salt="s", seed=0
        ).text()
    request = server.requests[0]
    assert list(request.token_ids.ids) == [1, 2]
    assert request.sampling.HasField("temperature")
    assert request.sampling.temperature == 0.0
    assert request.sampling.HasField("seed")
    assert list(request.sampling.stop) == ["END"]
    assert dict(request.sampling.logit_bias) == {7: -1.5}
    assert (request.priority, request.cache_salt) == (-2, "s")
    assert not request.sampling.HasField("top_p")
    assert not request.sampling.HasField("n")


def test_empty_prompts_reach_the_server_as_what_they_are(server: FakeServer) -> None:
    with Client(server.address) as client:
        client.generate(prompt="").text()
        client.generate(token_ids=[]).text()
        client.generate(messages=[]).text()
    assert [request.WhichOneof("prompt") for request in server.requests] == ["text", "token_ids", "chat"]


def test_messages_become_a_conversation(server: FakeServer) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "42", "tool_call_id": "1"},
    ]
    with Client(server.address) as client:
        client.generate(messages=messages).text()
    sent = server.requests[0].chat.messages
    assert [(one.role, one.content, one.tool_call_id) for one in sent] == [
        ("system", "Be brief.", ""),
        ("assistant", "", ""),
        ("tool", "42", "1"),
    ]
    assert sent[1].tool_calls_json == '[{"id": "1"}]'


@pytest.mark.parametrize("prompts", [{}, {"prompt": "a", "token_ids": [1]}])
def test_generate_wants_exactly_one_prompt(prompts: dict[str, Any]) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(TypeError, match="exactly one of"):
        client.generate(**prompts)


def test_leaving_the_block_cancels_the_generation(server: FakeServer) -> None:
    server.generate = server.wait_for_cancel
    with Client(server.address) as client:
        with client.generate(prompt="x") as stream:
            assert isinstance(next(stream), Started)
            assert not server.cancelled.is_set()
        assert server.cancelled.wait(5), "the server never saw the cancel"
        with pytest.raises(maniple_client.Cancelled):
            list(stream)


def test_deadline_ends_a_silent_stream(server: FakeServer) -> None:
    server.generate = server.wait_for_cancel
    with Client(server.address) as client, pytest.raises(maniple_client.DeadlineExceeded):
        client.generate(prompt="x", timeout_s=0.3).text()
    assert server.cancelled.wait(5)


def _error_info(reason: str, **metadata: str) -> error_details_pb2.ErrorInfo:
    return error_details_pb2.ErrorInfo(reason=reason, domain="maniple.dev", metadata=metadata)


@pytest.mark.parametrize(
    ("code", "details", "kind", "facts"),
    [
        (
            grpc.StatusCode.INVALID_ARGUMENT,
            [
                _error_info("INVALID_PARAMETER"),
                error_details_pb2.BadRequest(
                    field_violations=[error_details_pb2.BadRequest.FieldViolation(field="n", description="too many")]
                ),
            ],
            maniple_client.InvalidArgument,
            {"reason": "INVALID_PARAMETER", "field_violations": (FieldViolation("n", "too many"),), "may_retry": False},
        ),
        (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            [
                _error_info("QUEUE_FULL"),
                error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=1, nanos=500_000_000)),
            ],
            maniple_client.Overloaded,
            {"reason": "QUEUE_FULL", "retry_after_s": 1.5, "may_retry": True},
        ),
        (grpc.StatusCode.UNAVAILABLE, [_error_info("NOT_READY")], maniple_client.Unavailable, {"may_retry": True}),
        (grpc.StatusCode.UNAVAILABLE, [], maniple_client.TransportLost, {"reason": "", "may_retry": False}),
        (
            grpc.StatusCode.INTERNAL,
            [_error_info("INTERNAL", incident_id="c0ffee")],
            maniple_client.InternalError,
            {"incident_id": "c0ffee"},
        ),
        # What a client behind a proxy sees of a killed server.
        (grpc.StatusCode.INTERNAL, [], maniple_client.TransportLost, {"may_retry": False}),
        (
            grpc.StatusCode.ABORTED,
            [_error_info("TAKEN_OVER", owner_address="b:1")],
            maniple_client.Aborted,
            {"metadata": {"owner_address": "b:1"}},
        ),
        (grpc.StatusCode.ALREADY_EXISTS, [_error_info("DUPLICATE_REQUEST")], maniple_client.AlreadyExists, {}),
        (grpc.StatusCode.NOT_FOUND, [_error_info("UNKNOWN_MODEL")], maniple_client.NotFound, {}),
        # Somebody else's reason is none of ours.
        (
            grpc.StatusCode.UNAVAILABLE,
            [error_details_pb2.ErrorInfo(reason="X", domain="proxy.example")],
            maniple_client.TransportLost,
            {"reason": ""},
        ),
    ],
)
def test_statuses_become_typed_exceptions(
    server: FakeServer, code: grpc.StatusCode, details: list[Any], kind: type[ManipleError], facts: dict[str, Any]
) -> None:
    def fail(request: object, context: Any) -> Iterator[Response]:
        context.set_trailing_metadata(rich_status(code, "no", *details))
        context.abort(code, "no")
        yield Response()

    server.generate = fail
    with Client(server.address) as client, pytest.raises(kind) as caught:
        client.generate(prompt="x").text()
    assert type(caught.value) is kind
    assert (caught.value.code, caught.value.message) == (code, "no")
    assert {name: getattr(caught.value, name) for name in facts} == facts


def _in_band() -> Response:
    return Response(
        error=errors_pb2.StreamError(code=10, reason=errors_pb2.ERROR_REASON_GROUP_LOST, message="rank 0 was killed")
    )


def test_in_band_error_is_raised_where_the_trailers_were_lost(server: FakeServer) -> None:
    server.generate = lambda request, context: iter([_in_band()])
    with Client(server.address) as client, pytest.raises(maniple_client.Aborted, match="rank 0 was killed") as caught:
        client.generate(prompt="x").text()
    assert caught.value.reason == "GROUP_LOST"


def test_status_with_the_same_reason_wins_over_the_in_band_error(server: FakeServer) -> None:
    def fail(request: object, context: Any) -> Iterator[Response]:
        yield _in_band()
        info = _error_info("GROUP_LOST", rank="0")
        context.set_trailing_metadata(rich_status(grpc.StatusCode.ABORTED, "rank 0 was killed", info))
        context.abort(grpc.StatusCode.ABORTED, "rank 0 was killed")

    server.generate = fail
    with Client(server.address) as client, pytest.raises(maniple_client.Aborted) as caught:
        client.generate(prompt="x").text()
    assert caught.value.metadata == {"rank": "0"}


def test_in_band_error_wins_over_a_proxys_status(server: FakeServer) -> None:
    def fail(request: object, context: Any) -> Iterator[Response]:
        yield _in_band()
        context.abort(grpc.StatusCode.UNAVAILABLE, "upstream connect error")

    server.generate = fail
    with Client(server.address) as client, pytest.raises(maniple_client.Aborted, match="rank 0 was killed"):
        client.generate(prompt="x").text()


def test_nobody_listening_is_transport_loss() -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(maniple_client.TransportLost):
        client.get_model()


def test_unary_calls(server: FakeServer) -> None:
    with Client(server.address) as client:
        assert client.abort("running") is True
        assert client.abort("gone") is False
        assert client.tokenize("Hi") == [72, 105]
        assert client.detokenize([72, 105]) == "Hi"
        assert client.get_model().served_names == ["fake"]
        with pytest.raises(maniple_client.NotFound):
            client.get_model("other")


def test_wait_until_ready_returns_when_the_server_is_and_raises_why_not(server: FakeServer) -> None:
    server.status = admin_pb2.GetStatusResponse(ready=False, not_ready_reason="loading")
    with Client(server.address) as client:
        with pytest.raises(ManipleError, match="loading"):
            client.wait_until_ready(timeout_s=0.2)
        server.status = admin_pb2.GetStatusResponse(ready=True, model="fake")
        assert client.wait_until_ready(timeout_s=5).model == "fake"


def test_newer_servers_events_are_passed_over(server: FakeServer) -> None:
    unknown = Response.FromString(bytes([15 << 3 | 2, 0]))  # field 15, length-delimited, empty

    def newer(request: object, context: object) -> Iterator[Response]:
        yield unknown
        yield from answer("fine")

    server.generate = newer
    with Client(server.address) as client:
        assert client.generate(prompt="x").text() == "fine"


async def test_async_client_streams_calls_and_cancels(server: FakeServer) -> None:
    async with AsyncClient(server.address) as client:
        assert await client.generate(messages=[{"role": "user", "content": "Why?"}]).text() == "The sky is blue."
        assert await client.tokenize("Hi") == [72, 105]
        assert await client.detokenize([72, 105]) == "Hi"
        assert await client.abort("running") is True
        assert (await client.get_model()).max_model_len == 64
        assert (await client.wait_until_ready(timeout_s=5)).ready
        server.generate = server.wait_for_cancel
        async with client.generate(prompt="x") as stream:
            assert isinstance(await anext(stream), Started)
        assert server.cancelled.wait(5)


async def test_async_client_raises_the_same_typed_exceptions(server: FakeServer) -> None:
    server.generate = lambda request, context: iter([_in_band()])
    async with AsyncClient(server.address) as client:
        with pytest.raises(maniple_client.Aborted, match="rank 0 was killed"):
            await client.generate(prompt="x").text()
        with pytest.raises(maniple_client.NotFound):
            await client.get_model("other")


def test_sampling_options_are_those_of_the_proto() -> None:
    """A field added to the proto is offered by the client."""
    from maniple.v1 import sampling_pb2
    from maniple_client.requests import Options, Sampling

    fields = {one.name for one in sampling_pb2.SamplingParams.DESCRIPTOR.fields}
    assert set(Sampling.__annotations__) == fields
    prompts = {"text", "token_ids", "chat", "sampling"}
    request_fields = {one.name for one in inference_pb2.GenerateRequest.DESCRIPTOR.fields} - prompts
    assert set(Options.__annotations__) - set(Sampling.__annotations__) == request_fields
