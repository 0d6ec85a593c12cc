"""The client goes on by itself when its server is lost or replaced: every token once, and the same end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

import maniple_client
from maniple.v1 import errors_pb2, inference_pb2
from maniple_client import AsyncClient, Client
from support.fake_server import Response, answer, rich_status, running

WORDS = "One two three four five."
ALL_IDS = [0, 1, 2, 3, 4]


def end_with(context: Any, code: grpc.StatusCode, reason: str, **metadata: str) -> None:
    info = error_details_pb2.ErrorInfo(reason=reason, domain="maniple.dev", metadata=metadata)
    context.set_trailing_metadata(rich_status(code, "ended", info))
    context.abort(code, "ended")


def events() -> list[Response]:
    return list(answer(WORDS))


def broken_after(num_events: int, code: grpc.StatusCode, reason: str = "", **metadata: str) -> Any:
    """A ``generate`` that says the first events and breaks."""

    def generate(request: object, context: Any) -> Iterator[Response]:
        yield from events()[:num_events]
        if reason:
            end_with(context, code, reason, **metadata)
        context.abort(code, "RST_STREAM")

    return generate


def going_on(request: inference_pb2.ResumeRequest, context: object) -> Iterator[Response]:
    """A ``resume`` as a real server answers it: started again, then what lies behind the cursor."""
    started, *chunks, finished, done = events()
    assert (request.request_id, request.resume_token) == ("r-1", "t")
    num_tokens = request.cursors[0].num_tokens if request.cursors else 0
    said = "".join(chunk.chunk.text for chunk in chunks[:num_tokens])
    assert not request.cursors or request.cursors[0].num_text_bytes == len(said.encode())
    yield started
    yield from chunks[num_tokens:]
    yield finished
    yield done


BREAKS = {
    "killed": (grpc.StatusCode.UNAVAILABLE, "", {}),
    "killed-behind-a-proxy": (grpc.StatusCode.INTERNAL, "", {}),
    "stopped": (grpc.StatusCode.CANCELLED, "", {}),
    "taken-over": (grpc.StatusCode.ABORTED, "TAKEN_OVER", {}),
}


@pytest.mark.parametrize("num_events", [1, 3, 6, 7], ids=lambda n: f"after-{n}")
@pytest.mark.parametrize("kind", BREAKS)
def test_stream_goes_on_at_the_next_server_with_every_token_once(kind: str, num_events: int) -> None:
    code, reason, metadata = BREAKS[kind]
    with running() as first, running() as second:
        first.generate = broken_after(num_events, code, reason, **metadata)
        second.resume = going_on
        with Client([first.address, second.address]) as client:
            seen = list(client.generate(prompt="x"))
        ids = [token for event in seen if isinstance(event, maniple_client.Chunk) for token in event.token_ids]
        assert ids == ALL_IDS
        kinds = [type(event).__name__ for event in seen]
        assert kinds == ["Started", *["Chunk"] * 5, "Finished", "Done"]
        assert [type(request).__name__ for request in second.requests] == ["ResumeRequest"]


def test_stream_follows_the_owner_that_a_spare_names_and_waits_while_nobody_knows() -> None:
    with running() as dead, running() as spare, running() as owner:
        dead.generate = broken_after(3, grpc.StatusCode.UNAVAILABLE)
        asked: list[int] = []

        def not_yet(request: object, context: Any) -> Iterator[Response]:
            asked.append(1)
            if len(asked) < 3:
                end_with(context, grpc.StatusCode.UNAVAILABLE, "NOT_READY")
            end_with(context, grpc.StatusCode.UNAVAILABLE, "NOT_READY", owner_address=owner.address)
            yield from ()

        spare.resume = not_yet
        dead.resume = lambda request, context: end_with(context, grpc.StatusCode.UNAVAILABLE, "NOT_READY")
        owner.resume = going_on
        with Client([dead.address, spare.address]) as client:
            stream = client.generate(prompt="x")
            assert stream.text() == WORDS
            assert client.abort("running")  # it stays with the owner
        assert owner.requests[-1] == inference_pb2.AbortRequest(request_id="running")


def test_new_request_goes_to_the_owner_where_it_provably_did_not_start() -> None:
    with running() as spare, running() as owner:

        def held(request: object, context: Any) -> Iterator[Response]:
            end_with(context, grpc.StatusCode.UNAVAILABLE, "NOT_READY", owner_address=owner.address)
            yield from ()

        spare.generate = held
        with Client(spare.address) as client:
            assert client.generate(prompt="x").text() == "The sky is blue."


def test_request_that_may_have_run_is_never_sent_twice() -> None:
    with running() as first, running() as second:
        first.generate = broken_after(0, grpc.StatusCode.UNAVAILABLE)
        with Client([first.address, second.address]) as client, pytest.raises(maniple_client.TransportLost):
            client.generate(prompt="x").text()
        assert second.requests == []


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_request_that_a_stopping_server_dropped_is_sent_to_the_next(is_async: bool) -> None:
    with running() as first, running() as second:
        first.generate = broken_after(0, grpc.StatusCode.CANCELLED)
        addresses = [first.address, second.address]
        if is_async:
            async with AsyncClient(addresses) as client:
                assert await client.generate(prompt="x").text() == "The sky is blue."
        else:
            with Client(addresses) as client:
                assert client.generate(prompt="x").text() == "The sky is blue."
        assert len(second.requests) == 1


def test_dead_address_is_passed_over_because_nothing_was_sent() -> None:
    with running() as second, Client(["127.0.0.1:1", second.address]) as client:
        assert client.generate(prompt="x").text() == "The sky is blue."


ENDS = {
    "SUPERSEDED": grpc.StatusCode.ABORTED,
    "GROUP_LOST": grpc.StatusCode.ABORTED,
    "UNKNOWN_REQUEST": grpc.StatusCode.NOT_FOUND,
    "RESUME_LOST": grpc.StatusCode.DATA_LOSS,
    "DEADLINE": grpc.StatusCode.DEADLINE_EXCEEDED,
}


@pytest.mark.parametrize("reason", ENDS)
def test_what_no_resume_can_help_is_the_callers(reason: str) -> None:
    with running() as first, running() as second:
        first.generate = broken_after(3, grpc.StatusCode.UNAVAILABLE)

        def refuse(request: object, context: Any) -> Iterator[Response]:
            end_with(context, ENDS[reason], reason)
            yield from ()

        second.resume = refuse
        with Client([first.address, second.address]) as client, pytest.raises(maniple_client.ManipleError) as caught:
            client.generate(prompt="x").text()
        assert caught.value.reason == reason
        assert len(second.requests) == 1


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
async def test_request_that_nobody_knows_and_that_said_nothing_is_sent_anew(is_async: bool) -> None:
    # Its owner was killed between the word that it began and the delta that no rank has seen.
    with running() as first, running() as second:
        first.generate = broken_after(1, grpc.StatusCode.UNAVAILABLE)

        def unknown(request: object, context: Any) -> Iterator[Response]:
            end_with(context, grpc.StatusCode.NOT_FOUND, "UNKNOWN_REQUEST")
            yield from ()

        second.resume = first.resume = unknown
        second.generate = lambda request, context: answer(WORDS)
        if is_async:
            async with AsyncClient([first.address, second.address]) as client:
                heard = [event async for event in client.generate(prompt="x")]
        else:
            with Client([first.address, second.address]) as client:
                heard = list(client.generate(prompt="x"))
        assert [type(event).__name__ for event in heard].count("Started") == 1
        assert "".join(event.text for event in heard if isinstance(event, maniple_client.Chunk)) == WORDS
        assert [request.request_id for request in (*first.requests, *second.requests)][1:] == ["r-1"] * (
            len(first.requests) + len(second.requests) - 1
        )


def test_stream_gives_up_after_its_time_with_the_last_error() -> None:
    with running() as only:
        only.generate = broken_after(3, grpc.StatusCode.UNAVAILABLE)
        only.resume = lambda request, context: end_with(context, grpc.StatusCode.UNAVAILABLE, "NOT_READY")  # type: ignore[return-value]
        with Client(only.address, resume_for_s=0.3) as client, pytest.raises(maniple_client.Unavailable):
            client.generate(prompt="x").text()
        assert 2 <= len([one for one in only.requests if isinstance(one, inference_pb2.ResumeRequest)]) <= 5


def test_closed_stream_is_not_resumed() -> None:
    with running() as first, running() as second:
        first.generate = first.wait_for_cancel
        with Client([first.address, second.address]) as client:
            with client.generate(prompt="x") as stream:
                next(stream)
            with pytest.raises(maniple_client.Cancelled):
                list(stream)
        assert first.cancelled.wait(5)
        assert second.requests == []


@pytest.mark.parametrize("kind", BREAKS)
async def test_async_stream_goes_on_at_the_next_server_with_every_token_once(kind: str) -> None:
    code, reason, metadata = BREAKS[kind]
    with running() as first, running() as second:
        first.generate = broken_after(4, code, reason, **metadata)
        second.resume = going_on
        async with AsyncClient([first.address, second.address]) as client:
            stream = client.generate(prompt="x")
            assert await stream.text() == WORDS
            assert stream.transcript.samples[0].token_ids == ALL_IDS


def test_in_band_error_that_lost_its_trailers_is_resumed_too() -> None:
    with running() as first, running() as second:

        def taken_over(request: object, context: object) -> Iterator[Response]:
            yield from events()[:3]
            error = errors_pb2.StreamError(code=10, reason=errors_pb2.ERROR_REASON_TAKEN_OVER, message="taken over")
            error.owner_address = second.address
            yield Response(error=error)

        first.generate = taken_over
        second.resume = going_on
        with Client(first.address) as client:
            assert client.generate(prompt="x").text() == WORDS


@pytest.mark.parametrize("kind", BREAKS)
def test_stream_that_cannot_be_resumed_ends_at_once_and_nothing_is_sent_again(kind: str) -> None:
    code, reason, metadata = BREAKS[kind]
    with running() as first, running() as second:

        def without_token(request: object, context: Any) -> Iterator[Response]:
            started, *more = events()
            started.started.resume_token = ""
            yield started
            yield from more[:2]
            end_with(context, code, reason, **metadata) if reason else context.abort(code, "RST_STREAM")

        first.generate = without_token
        with Client([first.address, second.address]) as client:
            stream = client.generate(prompt="x")
            with pytest.raises(maniple_client.ManipleError) as caught:
                list(stream)
        told = {grpc.StatusCode.ABORTED: maniple_client.Aborted, grpc.StatusCode.CANCELLED: maniple_client.Cancelled}
        assert type(caught.value) is told.get(code, maniple_client.TransportLost)
        assert len(stream.transcript.samples[0].token_ids) == 2
        assert second.requests == []
        assert len(first.requests) == 1


async def test_request_that_began_is_not_sent_again_even_where_another_server_is_named() -> None:
    with running() as first, running() as second:

        def held(request: object, context: Any) -> Iterator[Response]:
            started = events()[0]
            started.started.resume_token = ""
            yield started
            end_with(context, grpc.StatusCode.UNAVAILABLE, "NOT_READY", owner_address=second.address)

        first.generate = held
        async with AsyncClient(first.address) as client:
            with pytest.raises(maniple_client.Unavailable):
                await client.generate(prompt="x").text()
        assert second.requests == []
