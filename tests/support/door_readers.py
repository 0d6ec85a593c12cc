"""Streams of InferenceService against ``real_doors``, read as they come."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from support.real_doors import RealDoors
from support.waiting import until

PROMPT = [5, 250, 17, 0]


class Reader:
    """One stream, read as it comes."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.token_ids: list[int] = []
        self.num_cached_tokens = 0
        self.reason: int | None = None
        self.error: grpc.aio.AioRpcError | None = None
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for response in self.call:
                match response.WhichOneof("event"):
                    case "started":
                        self.num_cached_tokens = response.started.num_cached_tokens
                    case "chunk":
                        self.token_ids += response.chunk.token_ids
                    case "finished":
                        self.reason = response.finished.reason
        except grpc.aio.AioRpcError as error:
            self.error = error
        except asyncio.CancelledError:
            pass  # by the test itself

    async def end(self) -> Reader:
        await self.task
        return self


async def running(doors: RealDoors, count: int, max_tokens: int) -> list[Reader]:
    """Begin streams and wait until all of them bring tokens."""
    readers = [Reader(doors.generate(f"r{n}", [*PROMPT, n], max_tokens)) for n in range(count)]
    await until(lambda: all(reader.token_ids for reader in readers), "tokens for all")
    return readers


def counts(doors: RealDoors) -> tuple[int, int]:
    status = doors.fleet.status()
    return status.num_running, status.num_waiting


async def refused(doors: RealDoors, request_id: str) -> grpc.aio.AioRpcError:
    reader = await Reader(doors.generate(request_id, PROMPT, 3)).end()
    assert reader.error is not None
    assert not reader.token_ids
    return reader.error
