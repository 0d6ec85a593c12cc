"""A stream that has nothing to say says so, for the sake of proxies that end what is silent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest

from maniple.v1 import inference_pb2
from maniple_client import AsyncClient, Chunk, Done
from service_chassis.errors import NotReady
from support.fake_engine import open_doors


def request(**fields: object) -> inference_pb2.GenerateRequest:
    asked = inference_pb2.GenerateRequest(text="hello", **fields)  # type: ignore[arg-type]
    asked.sampling.max_tokens = 2
    asked.sampling.ignore_eos = True
    return asked


def kinds(messages: Iterable[Any]) -> list[str | None]:
    return [message.WhichOneof("event") for message in messages]


async def test_request_that_waits_in_the_queue_says_so_until_it_starts() -> None:
    async with asyncio.timeout(30), open_doors(silent_within_s=0.1) as doors:
        doors.engine.gate.clear()
        call = doors.inference.Generate(request())
        waited = [await call.read() for _ in range(3)]
        assert kinds(waited) == ["waiting"] * 3
        doors.engine.gate.set()
        rest = [message async for message in _rest(call)]
        assert [kind for kind in kinds(rest) if kind not in ("waiting", "chunk")] == ["started", "finished", "done"]
        assert b"".join(bytes(message.chunk.token_ids) for message in rest) == b"ok"


async def test_output_that_is_kept_for_its_end_leaves_no_silence() -> None:
    """With `only_final` many tokens pass, and the client hears of none."""
    async with asyncio.timeout(30), open_doors(silent_within_s=0.1) as doors:
        doors.engine.output = b"o"  # then it thinks on
        asked = request(only_final=True)
        call = doors.inference.Generate(asked)
        heard = [await call.read() for _ in range(3)]
        assert kinds(heard) == ["started", "waiting", "waiting"]
        call.cancel()


async def test_stream_that_speaks_is_not_talked_over() -> None:
    async with asyncio.timeout(30), open_doors(silent_within_s=10.0) as doors:
        doors.engine.output = b"ok" * 20
        asked = request()
        asked.sampling.max_tokens = 40
        assert "waiting" not in kinds([message async for message in doors.inference.Generate(asked)])


async def test_error_after_a_wait_is_told_in_band_too() -> None:
    """Once anything was said, a transcoder has lost the trailers."""
    async with asyncio.timeout(30), open_doors(silent_within_s=0.1) as doors:
        doors.engine.gate.clear()
        doors.engine.error = NotReady("the group is gone")
        call = doors.inference.Generate(request())
        assert kinds([await call.read()]) == ["waiting"]
        doors.engine.gate.set()
        rest: list[inference_pb2.GenerateResponse] = []
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await _read_into(rest, call)
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert kinds(rest)[-1] == "error"
        assert rest[-1].error.message == ended.value.details()


async def test_client_skips_what_only_says_that_it_waits() -> None:
    async with asyncio.timeout(30), open_doors(silent_within_s=0.02) as doors:
        doors.engine.gate.clear()
        async with AsyncClient(doors.address) as client:
            stream = client.generate("hello", max_tokens=2, ignore_eos=True)
            reading = asyncio.create_task(_events(stream))
            await asyncio.sleep(0.3)  # some are said, and skipped
            doors.engine.gate.set()
            events = await reading
        assert "".join(event.text for event in events if isinstance(event, Chunk)) == "ok"
        assert isinstance(events[-1], Done)


async def _events(stream: object) -> list[object]:
    return [event async for event in stream]  # type: ignore[attr-defined]


async def _read_into(heard: list[inference_pb2.GenerateResponse], call: Any) -> None:
    async for message in _rest(call):
        heard.append(message)


async def _rest(call: Any) -> AsyncIterator[inference_pb2.GenerateResponse]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message
