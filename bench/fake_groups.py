"""Groups whose one rank lives in this process, keeps the protocol and computes nothing: what is left is ours.

A rank answers each step after a fixed time, with the same id for every row. It keeps no batch state: every prompt is
computed in one step, nothing is preempted, forks or pools; then the rows that sample are those that are there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankExit, StepsConnection
from maniple.v1 import rank_health_pb2, worker_pb2
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta, StepResult
from service_chassis.ids import Rank

TOKEN = 7
VOCAB_SIZE = 260
MAX_LEN = 1 << 20
INCARNATION = "fake"


class FakeGroup(Executor):
    """One rank without a process. ``step_s`` is the time of a step; steps that wait are computed one by one."""

    world_size = 1

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.num_steps = 0
        self.accepted = 0
        self.state_digest = 0
        self._num_rows = 0
        self._waiting: deque[tuple[SchedulerDelta, float]] = deque()  # with when they came
        self._done_at = 0.0  # the step that is computed, or was last
        self._is_computing = False
        self._answers: asyncio.Queue[worker_pb2.StepsResponse | None] = asyncio.Queue()

    def take(self, message: worker_pb2.StepsRequest) -> None:
        """Hear what the owner says."""
        if message.HasField("hello"):
            welcome = worker_pb2.StepsResponse.Welcome(incarnation_id=INCARNATION)
            self._answers.put_nowait(worker_pb2.StepsResponse(welcome=welcome))
        elif message.HasField("delta"):
            delta = SchedulerDelta.FromString(message.delta)
            self.accepted, self.state_digest = delta.step, delta.state_digest
            self._waiting.append((delta, asyncio.get_running_loop().time()))
            if not self._is_computing:
                self._begin_next()
        elif message.HasField("heartbeat"):
            self._answers.put_nowait(worker_pb2.StepsResponse(report=self.report()))
        elif message.HasField("goodbye"):
            self._answers.put_nowait(None)

    def _begin_next(self) -> None:
        self._is_computing = bool(self._waiting)
        if self._is_computing:
            loop = asyncio.get_running_loop()
            # A step that waited begins when the one before it ends, not when the loop notices.
            self._done_at = max(self._done_at, self._waiting[0][1]) + self.step_s
            loop.call_at(self._done_at, self._complete)

    def _complete(self) -> None:
        delta, _ = self._waiting.popleft()
        self._num_rows += len(delta.new_requests) - len(delta.finished)
        self.num_steps += 1
        if delta.mode != SchedulerDelta.MODE_APPLY_ONLY:
            result = StepResult(step=delta.step, token_ids=[TOKEN] * self._num_rows)
            self._answers.put_nowait(worker_pb2.StepsResponse(result=result))
        else:
            self._answers.put_nowait(worker_pb2.StepsResponse(report=self.report()))
        self._begin_next()

    def report(self) -> rank_health_pb2.RankReport:
        return rank_health_pb2.RankReport(
            incarnation_id=INCARNATION, epoch=1, accepted=self.accepted, state_digest=self.state_digest
        )

    async def next_answer(self) -> worker_pb2.StepsResponse | None:
        return await self._answers.get()

    # What an executor is

    async def start(self, *, timeout_s: float) -> None:
        pass

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        model = worker_pb2.ModelDescription(
            source="fake",
            architecture="Fake",
            vocab_size=VOCAB_SIZE,
            max_position=MAX_LEN,
            num_kv_groups=1,
            block_bytes=1024,
        )
        replies: dict[str, Message] = {
            "Describe": worker_pb2.DescribeResponse(
                incarnation_id=INCARNATION, min_protocol_version=1, max_protocol_version=1
            ),
            "Join": worker_pb2.JoinResponse(epoch=1, incarnation_id=INCARNATION),
            "FormGroup": worker_pb2.FormGroupResponse(device="fake", backend="none"),
            "LoadModel": worker_pb2.LoadModelResponse(model=model),
            "ProfileMemory": worker_pb2.ProfileMemoryResponse(kv_bytes=1 << 40),
            "AllocateKvCache": worker_pb2.AllocateKvCacheResponse(kv_bytes=1 << 40),
            "WarmUp": worker_pb2.WarmUpResponse(),
            "Leave": worker_pb2.LeaveResponse(),
        }
        return replies[method]

    def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        raise AssertionError(f"fake ranks have no {method}")

    async def open_steps(self, rank: Rank) -> StepsConnection:
        return _Connection(self)

    async def watch_health(self, rank: Rank, epoch: int) -> AsyncIterator[rank_health_pb2.RankReport]:
        while True:
            yield self.report()
            await asyncio.sleep(0.1)

    def subscribe_exit(self, callback: Callable[[RankExit], None]) -> None:
        pass

    def describe_rank(self, rank: Rank) -> tuple[str, int]:
        return "fake", 0

    async def shutdown(self, *, grace_s: float) -> None:
        pass


class _Connection:
    """A ``StepsConnection`` to it."""

    def __init__(self, group: FakeGroup) -> None:
        self._group = group

    async def write(self, message: worker_pb2.StepsRequest) -> None:
        self._group.take(message)

    async def read(self) -> worker_pb2.StepsResponse | None:
        return await self._group.next_answer()

    async def close(self) -> None:
        pass
