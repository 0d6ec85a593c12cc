"""Resume within one control plane: through the door, with a real engine of the scripted model behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from control_plane.doors.inference import InferenceDoor
from control_plane.doors.served_model import ServedModel
from control_plane.engine import Engine
from control_plane.fleet import Fleet
from control_plane.group.loss import LossKind, LossReason
from control_plane.text.model_text import load_model_text
from maniple.v1 import inference_pb2, inference_pb2_grpc
from maniple_client.errors import from_rpc_error
from service_chassis.server import make_server
from support.engine_harness import running_engine, scripted
from support.scripted_reference import greedy
from support.waiting import until

PROMPT = [5, 7, 11]
MODEL = scripted(step_time_s=0.005, sampler="numpy")


class Door:
    def __init__(self, engine: Engine, fleet: Fleet, channel: grpc.aio.Channel) -> None:
        self.engine, self.fleet = engine, fleet
        self.stub = inference_pb2_grpc.InferenceServiceStub(channel)

    def generate(self, request_id: str, max_tokens: int, **fields: Any) -> Any:
        return self.stub.Generate(
            inference_pb2.GenerateRequest(
                request_id=request_id,
                token_ids=inference_pb2.TokenIds(ids=PROMPT),
                sampling={
                    "max_tokens": max_tokens,
                    "temperature": 0.0,
                    "ignore_eos": True,
                    **fields.pop("sampling", {}),
                },
                **fields,
            )
        )

    def resume(self, request_id: str, token: str, num_tokens: int = 0, num_bytes: int = 0, index: int = 0) -> Any:
        cursor = inference_pb2.ResumeRequest.Cursor(index=index, num_tokens=num_tokens, num_text_bytes=num_bytes)
        return self.stub.Resume(
            inference_pb2.ResumeRequest(request_id=request_id, resume_token=token, cursors=[cursor])
        )


@asynccontextmanager
async def door(**config: Any) -> AsyncIterator[Door]:
    fleet = Fleet()
    async with running_engine(MODEL, ids=fleet.ids, block_size=4, num_kv_blocks=400, **config) as engine:
        engine.outlived_by_workers = True  # so that every request may be resumed
        fleet.take(engine)
        server = make_server(1 << 20)
        served = ServedModel(names=("scripted",), source=MODEL, text=load_model_text(MODEL))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(InferenceDoor(fleet, served), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield Door(engine, fleet, channel)
        await server.stop(0)


class Got:
    """What a stream brought."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.token = ""
        self.finished: inference_pb2.GenerateResponse.Finished | None = None
        self.done: inference_pb2.GenerateResponse.Done | None = None
        self.error: grpc.aio.AioRpcError | None = None

    async def read(self, call: Any, until_tokens: int | None = None) -> Got:
        try:
            async for message in call:
                response = message.response if isinstance(message, inference_pb2.ResumeResponse) else message
                match response.WhichOneof("event"):
                    case "started":
                        self.token = response.started.resume_token
                    case "chunk":
                        self.token_ids += response.chunk.token_ids
                        self.text += response.chunk.text
                    case "finished":
                        self.finished = response.finished
                    case "done":
                        self.done = response.done
                if until_tokens is not None and len(self.token_ids) >= until_tokens:
                    return self
        except grpc.aio.AioRpcError as error:
            self.error = error
        return self


def reason_of(error: grpc.aio.AioRpcError | None) -> str:
    assert error is not None
    return from_rpc_error(error).reason


async def whole(here: Door) -> Got:
    """The same request, undisturbed."""
    return await Got().read(here.generate("undisturbed", 80))


async def test_broken_stream_goes_on_after_the_cursor_when_the_request_asked_for_grace() -> None:
    async with door() as here, asyncio.timeout(30):
        expected = await whole(here)
        assert expected.token_ids == greedy(PROMPT, 80)
        call = here.generate("r", 80, detach_grace_s=5.0)
        first = await Got().read(call, until_tokens=20)
        call.cancel()
        await asyncio.sleep(0.05)  # it goes on without anybody
        assert here.engine.status().num_running == 1
        rest = await Got().read(here.resume("r", first.token, len(first.token_ids), len(first.text.encode())))
        assert first.token_ids + rest.token_ids == expected.token_ids
        assert first.text + rest.text == expected.text
        assert rest.finished is not None
        assert rest.finished.num_output_tokens == 80
        assert rest.done is not None


async def test_broken_stream_ends_the_request_without_grace_and_after_it() -> None:
    async with door() as here, asyncio.timeout(30):
        for grace_s in (0.0, 0.1):
            call = here.generate(f"r{grace_s}", 2000, detach_grace_s=grace_s)
            got = await Got().read(call, until_tokens=5)
            call.cancel()
            await until(lambda: here.engine.status().num_running == 0, "its end", timeout_s=2.0)
            # It ended, and that is what whoever comes late is told; its id is not free for another run.
            late = await Got().read(here.resume(f"r{grace_s}", got.token))
            assert late.token_ids[:5] == got.token_ids[:5]
            if grace_s:
                assert late.finished is not None
                assert late.finished.reason == inference_pb2.FINISH_REASON_ABORT
            again = await Got().read(here.generate(f"r{grace_s}", 5))
            assert again.error is not None
            assert again.error.code() is grpc.StatusCode.ALREADY_EXISTS


async def test_newer_stream_supersedes_the_older_and_cancelling_that_aborts_nothing() -> None:
    async with door() as here, asyncio.timeout(30):
        old_call = here.generate("r", 150)
        old = await Got().read(old_call, until_tokens=10)
        new_call = here.resume("r", old.token)
        new = await Got().read(new_call, until_tokens=15)
        await old.read(old_call)
        assert old.error is not None
        assert old.error.code() is grpc.StatusCode.ABORTED
        assert "newer stream" in (old.error.details() or "")
        third_call = here.resume("r", old.token)
        third = await Got().read(third_call, until_tokens=1)
        old_call.cancel()
        new_call.cancel()  # superseded: the door's own stream is cancelled too, and that means nothing
        await third.read(third_call)
        assert third.token_ids == greedy(PROMPT, 150)
        assert third.finished is not None
        assert third.finished.reason == inference_pb2.FINISH_REASON_LENGTH
        assert new.token_ids == greedy(PROMPT, 150)[: len(new.token_ids)]


async def test_finished_request_is_told_again_to_who_may_ask() -> None:
    async with door() as here, asyncio.timeout(30):
        got = await Got().read(here.generate("r", 20, only_final=True))
        again = await Got().read(here.resume("r", got.token))
        assert again.finished == got.finished
        assert list(again.finished.token_ids) == greedy(PROMPT, 20)  # type: ignore[union-attr]
        wrong = await Got().read(here.resume("r", "00" * 16))
        assert wrong.error is not None
        assert wrong.error.code() is grpc.StatusCode.PERMISSION_DENIED
        assert "00" * 16 not in (wrong.error.details() or "")


@pytest.mark.parametrize(
    ("cursor", "code"),
    [
        ({"num_tokens": 21}, grpc.StatusCode.DATA_LOSS),
        ({"num_bytes": 10_000}, grpc.StatusCode.DATA_LOSS),
        ({"index": 1}, grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_cursor_that_fits_nothing_is_refused_and_never_regenerated(
    cursor: dict[str, int], code: grpc.StatusCode
) -> None:
    async with door() as here, asyncio.timeout(30):
        got = await Got().read(here.generate("r", 20))
        error = (await Got().read(here.resume("r", got.token, **cursor))).error
        assert error is not None
        assert error.code() is code
        assert here.engine.status().num_running == 0


async def test_unknown_request_is_not_found_only_with_a_ranks_proof() -> None:
    async with door() as here, asyncio.timeout(30):
        error = (await Got().read(here.resume("never", "00" * 16))).error
        assert error is not None
        assert error.code() is grpc.StatusCode.NOT_FOUND

        async def unproven() -> bool:
            return False

        here.engine.proves_ownership = unproven  # type: ignore[method-assign]
        error = (await Got().read(here.resume("never", "00" * 16))).error
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        here.fleet.hold("held by other:1", "1", "other:1")  # another group, whose owner may know
        error = (await Got().read(here.resume("never", "00" * 16))).error
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE


async def test_request_left_in_doubt_is_lost_once_it_is_proven_that_nobody_knows_it() -> None:
    """No rank could say whether another owner goes on with it; then the group was formed anew."""
    async with door() as here, asyncio.timeout(30):
        got = Got()
        reading = asyncio.create_task(got.read(here.generate("r", 3000)))
        await until(lambda: len(got.token_ids) > 3, "it runs")
        here.engine.fail(LossReason(None, "all ranks were silent", LossKind.UNPROVEN))
        assert reason_of((await reading).error) == "TAKEN_OVER"
        async with running_engine(MODEL, ids=here.fleet.ids, block_size=4, num_kv_blocks=400) as anew:
            anew.outlived_by_workers = True
            here.fleet.take(anew)
            assert reason_of((await Got().read(here.resume("r", got.token))).error) == "GROUP_LOST"
            assert reason_of((await Got().read(here.resume("r", "00" * 16))).error) == "PERMISSION_DENIED"
            # Sent again it is a request like any other, and what it says is what counts.
            again = await Got().read(here.generate("r", 20))
            told = await Got().read(here.resume("r", again.token))
            assert (told.error, told.token_ids) == (None, again.token_ids)


async def test_resume_token_is_bound_to_one_request() -> None:
    async with door() as here, asyncio.timeout(30):
        one = await Got().read(here.generate("one", 5))
        await Got().read(here.generate("two", 5))
        error = (await Got().read(here.resume("two", one.token))).error
        assert error is not None
        assert error.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("detach_grace_s", [0.0, 5.0])
async def test_request_that_ends_with_its_stream_comes_without_a_token(detach_grace_s: float) -> None:
    async with door() as here, asyncio.timeout(30):
        here.engine.outlived_by_workers = False
        got = await Got().read(here.generate("r", 5, detach_grace_s=detach_grace_s))
        assert got.token_ids == greedy(PROMPT, 5)
        assert bool(got.token) == (detach_grace_s > 0)
