"""Owners of remote ranks in this process, which die without a word at a chosen point."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

from google.protobuf.message import Message

from control_plane.assembly import build_engine
from control_plane.config import ControlPlaneConfig, resolve_auto
from control_plane.engine import Engine
from control_plane.executors.base import StepsConnection
from control_plane.executors.remote import RemoteExecutor
from control_plane.fleet import Fleet
from control_plane.generation import Chunk, Cursor, Generation, SampleFinished, Started
from control_plane.generation_stream import GenerationStream
from control_plane.group.settings import GroupSettings
from control_plane.group.takeover import Adopted
from control_plane.group.worker_group import WorkerGroup
from control_plane.structured_output.compiler import GrammarCompiler
from control_plane.text.model_text import load_model_text
from maniple.v1 import worker_pb2
from service_chassis.errors import ManipleError
from service_chassis.ids import Rank, RequestId
from support.engine_harness import generation
from support.faults import WORKER
from support.scripted_reference import greedy
from support.waiting import until

LEASE_S = 0.6
MODEL = "scripted:" + json.dumps({"step_time_s": 0.005, "sampler": "numpy"})


class Point:
    """Where an owner stops for ever: after the nth event of a name, such as "Join 1" or "delta 0"."""

    def __init__(self, name: str = "") -> None:
        self.name = name
        self.reached = asyncio.Event()

    async def after(self, name: str) -> None:
        if name == self.name:
            self.reached.set()
            await asyncio.Event().wait()


class MortalExecutor(RemoteExecutor):
    """Remote ranks, behind an owner that stops at a point, or loses its voice towards one rank."""

    def __init__(self, addresses: Sequence[str], point: Point) -> None:
        super().__init__(addresses, world_size=len(addresses), settings=WORKER)
        self.point = point
        self.mute: set[Rank] = set()  # deltas to them get lost
        self.num_lost_deltas = 0
        self.loses_masks = False
        self.num_lost_masks = 0
        self.num_breaks_left = 0  # of streams, each in place of a mask
        self.calls: list[str] = []

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        reply = await super().call(rank, method, request, timeout_s=timeout_s)
        self.calls.append(f"{method} {rank}")
        await self.point.after(f"{method} {rank}")
        return reply

    async def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        async for part in super().stream(rank, method, request, timeout_s=timeout_s):
            yield part
        self.calls.append(f"{method} {rank}")
        await self.point.after(f"{method} {rank}")

    async def open_steps(self, rank: Rank) -> StepsConnection:
        return _MortalConnection(self, rank, await super().open_steps(rank))


class _MortalConnection:
    def __init__(self, executor: MortalExecutor, rank: Rank, inner: StepsConnection) -> None:
        self._executor, self._rank, self._inner = executor, rank, inner

    async def write(self, message: worker_pb2.StepsRequest) -> None:
        which = message.WhichOneof("message")
        if which == "delta" and self._rank in self._executor.mute:
            self._executor.num_lost_deltas += 1
            return
        if which == "sample_input" and self._executor.num_breaks_left:
            self._executor.num_breaks_left -= 1
            await self._inner.close()
            raise ConnectionError("broken on purpose")
        if which == "sample_input" and self._executor.loses_masks:
            self._executor.num_lost_masks += 1
            return
        await self._inner.write(message)
        if which in ("hello", "delta"):
            await self._executor.point.after(f"{which} {self._rank}")

    async def read(self) -> worker_pb2.StepsResponse | None:
        return await self._inner.read()

    async def close(self) -> None:
        await self._inner.close()


class Owner:
    """A control plane without doors."""

    def __init__(self, addresses: Sequence[str], *, dies_after: str = "", **settings: Any) -> None:
        self.point = Point(dies_after)
        self.executor = MortalExecutor(addresses, self.point)
        values: dict[str, Any] = {
            "model": MODEL,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "block_size": 4,
            "num_kv_blocks": 400,
            "report_interval_s": 0.05,
            "idle_report_interval_s": 0.1,
            "lease_s": LEASE_S,
            "startup_timeout_s": 30.0,
            "owner_address": f"owner-{id(self)}",
            **settings,
        }
        self.group = WorkerGroup(self.executor, GroupSettings(**values), owner_id=f"owner-{id(self)}")
        config = ControlPlaneConfig(model=str(values["model"]), executor="uni", device="cpu")
        self._config = resolve_auto(config, has_gpu=False, on_terminal=False)
        self.adopted: Adopted | None = None
        self._engine: Engine | None = None
        self._grammars: GrammarCompiler | None = None
        self._loop: asyncio.Task[None] | None = None
        self._starting: asyncio.Task[None] | None = None

    @property
    def engine(self) -> Engine:
        assert self._engine is not None
        return self._engine

    async def start(self) -> Owner:
        """Take the group and run, unless death comes first."""
        self._starting = asyncio.create_task(self._start())
        died = asyncio.create_task(self.point.reached.wait())
        await asyncio.wait({self._starting, died}, return_when=asyncio.FIRST_COMPLETED)
        died.cancel()
        if self._starting.done():
            self._starting.result()
        return self

    async def _start(self) -> None:
        self.adopted = await self.group.adopt()
        text = load_model_text(MODEL)  # a model of weights is asked for ids alone here
        self._grammars = GrammarCompiler(lambda: text)
        self._engine = build_engine(
            self._config,
            self.group,
            self.adopted.facts,
            text.tokenizer,
            adopted=self.adopted.snapshot,
            grammars=self._grammars,
        )
        self._loop = asyncio.create_task(self._engine.run())

    async def die(self) -> None:
        """Be gone without a word: connections break, tasks end, nobody is told."""
        self.group._has_parted = True  # else what is cancelled ends in good order
        for task in (self._starting, self._loop, self.group._forming):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self.group._tenure is not None:
            await self.group._tenure.end()
        await self.executor.shutdown(grace_s=0)
        if self._grammars is not None:
            await self._grammars.close()

    async def resume(
        self, request_id: RequestId, token: bytes, identity: str, cursors: Sequence[Cursor]
    ) -> GenerationStream:
        """As ``Fleet.resume``, for what runs here."""
        return self.engine.resume(request_id, token, identity, cursors)

    async def assert_works(self) -> None:
        """Everything that ran is free, and the next request works."""
        await until(lambda: self.engine.is_idle, "no request")
        status, limits = self.engine.status(), self.engine.limits
        assert status.num_free_blocks + status.num_cached_blocks == limits.num_blocks - 1
        prompt = [3, 1, 4, 1, 5]
        following = Reader("following", greedy(prompt, 6))
        await (await following.begin(self, following.wanted(prompt))).whole()

    async def leave(self) -> None:
        """End in good order."""
        if self._loop is not None:
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        self.engine.check_integrity()
        if self._grammars is not None:
            await self._grammars.close()
        await self.group.teardown("the test is over")


class Reader:
    """A client of one request, wherever it is at the moment. What it gets must be ``expected``, every token once."""

    def __init__(self, request_id: str, expected: list[int]) -> None:
        self.request_id = RequestId(request_id)
        self.expected = expected
        self.token_ids: list[int] = []
        self.finished: SampleFinished | None = None
        self.ends: list[ManipleError | None] = []  # of each stream
        self.token = b""  # to resume with
        self.is_exact = True  # False: where rounding may part two runs, only the count is known
        self._task: asyncio.Task[None] | None = None

    def wanted(self, prompt: list[int]) -> Generation:
        """Return the request for what is expected, greedily."""
        return generation(self.request_id, prompt, max_tokens=len(self.expected))

    async def begin(self, owner: Owner, generation: Generation) -> Reader:
        self._task = asyncio.create_task(self._read(await owner.engine.generate(generation)))
        return self

    async def resume(self, where: Owner | Fleet) -> Reader:
        """Leave the stream of before, if there is one, and go on elsewhere."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        cursor = Cursor(index=0, num_tokens=len(self.token_ids))
        stream = await where.resume(self.request_id, self.token, "", [cursor])
        self._task = asyncio.create_task(self._read(stream))
        return self

    async def _read(self, stream: GenerationStream) -> None:
        try:
            async for event in stream:
                match event:
                    case Started():
                        self.token = bytes.fromhex(event.resume_token)
                    case Chunk():
                        self.token_ids += event.token_ids
                        known = self.expected[: len(self.token_ids)]
                        assert not self.is_exact or self.token_ids == known, "missing, repeated or wrong"
                    case SampleFinished():
                        assert self.finished is None
                        self.finished = event
            self.ends.append(None)
        except ManipleError as error:
            self.ends.append(error)

    async def has(self, count: int) -> None:
        await until(lambda: len(self.token_ids) >= count or self.ends, f"{count} tokens of {self.request_id}")

    async def whole(self) -> None:
        assert self._task is not None
        await self._task
        assert self.ends[-1] is None, self.ends
        assert self.token_ids == self.expected
        assert self.finished is not None
