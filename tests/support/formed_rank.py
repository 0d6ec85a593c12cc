"""A rank of the scripted model without a transport, brought to readiness as an owner does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from maniple.v1 import worker_pb2
from worker_service.config import WorkerConfig
from worker_service.rank import Rank

LIMITS = worker_pb2.GroupLimits(
    max_num_seqs=5, max_num_batched_tokens=64, max_model_len=200, block_size=4, num_blocks=99, max_steps_in_flight=2
)


@asynccontextmanager
async def started_rank(
    config: WorkerConfig | None = None, request_exit: Callable[[str], None] = lambda reason: None
) -> AsyncIterator[Rank]:
    rank = Rank(config or WorkerConfig(), request_exit=request_exit)
    await rank.start()
    yield rank
    await rank.close()


def request(method: str, **fields: Any) -> Any:
    defaults: dict[str, dict[str, Any]] = {
        "Join": {"owner_id": "A", "protocol_version": 1, "world_size": 1},
        "FormGroup": {"formation_id": "f1", "world_size": 1},
        "LoadModel": {"model": "scripted", "max_num_seqs": 5, "max_num_batched_tokens": 64, "block_size": 4},
        "AllocateKvCache": {"limits": LIMITS},
    }
    return getattr(worker_pb2, f"{method}Request")(**{"epoch": 1, **defaults.get(method, {}), **fields})


STAGES = ["FormGroup", "LoadModel", "ProfileMemory", "AllocateKvCache", "WarmUp"]


async def advance(rank: Rank, *methods: str, **fields: Any) -> None:
    for method in methods:
        await rank.call(method, request(method, **fields))


@asynccontextmanager
async def ready_rank(config: WorkerConfig | None = None) -> AsyncIterator[Rank]:
    """Start a rank and go through all stages, under epoch 1 of owner A."""
    async with started_rank(config) as rank:
        await advance(rank, "Join", *STAGES)
        yield rank


class Feed:
    """Requests of one stream in process."""

    def __init__(self, rank: Rank) -> None:
        self.requests: asyncio.Queue[worker_pb2.StepsRequest] = asyncio.Queue()
        self.responses = rank.steps(self._iterate())

    async def _iterate(self) -> AsyncIterator[worker_pb2.StepsRequest]:
        while True:
            yield await self.requests.get()

    def send(self, **message: Any) -> None:
        self.requests.put_nowait(worker_pb2.StepsRequest(epoch=1, **message))

    async def until(self, kind: str) -> Any:
        async with asyncio.timeout(5):
            async for response in self.responses:
                if response.WhichOneof("message") == kind:
                    return getattr(response, kind)
        raise AssertionError("the stream ended")
