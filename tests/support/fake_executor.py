"""Ranks without processes: they keep the protocol of the Steps stream, compute nothing, and misbehave on request.

``FakeExecutor`` stands for any executor in tests of the group and of the engine. A rank accepts deltas in order,
answers each RUN step with what ``tokens`` says, keeps results for a resend, and answers a heartbeat with a report.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from google.protobuf.message import Message

from control_plane.executors.base import Executor, RankExit, StepsConnection
from maniple.v1 import rank_health_pb2, scheduler_delta_pb2, worker_pb2
from service_chassis.errors import Fenced, ManipleError, OutOfOrder
from service_chassis.ids import Rank

Delta = scheduler_delta_pb2.SchedulerDelta
Tokens = Callable[[Delta], list[int]]


class FakeRank:
    """One rank. Attributes are switches; change them at any time."""

    def __init__(self, rank: int, tokens: Tokens) -> None:
        self.rank = rank
        self.tokens = tokens
        self.incarnation_id = f"incarnation-{rank}"
        self.epoch = 0
        self.owner_id = self.owner_address = ""
        self.deltas: list[Delta] = []  # accepted, in order
        self.raw_deltas: list[bytes] = []  # every delta that arrived, resends and refused ones included
        self.calls: list[str] = []
        self.requests: dict[str, Message] = {}  # the last one of each method
        self.goodbyes: list[int] = []
        self.hellos: list[int] = []  # last_result_step of each
        self.sample_inputs: list[int] = []  # steps
        self.state_digest = self.token_digest = 0
        self.completed = 0
        self.results: dict[int, scheduler_delta_pb2.StepResult] = {}
        self.connection: FakeConnection | None = None
        # Switches
        self.mute_steps = False  # hear everything, say nothing on Steps
        self.mute_health = False
        self.hold = False  # accept steps and run the first for ever
        self.refuse_connections = False
        self.running_for_ms = 0
        self.busy: rank_health_pb2.RankReport.Busy | None = None
        self.failure: rank_health_pb2.RankReport.Failure | None = None
        self.refusal: ManipleError | None = None  # ends the next stream that writes a delta
        self.call_errors: dict[str, Exception] = {}
        self.hanging_calls: set[str] = set()

    @property
    def accepted(self) -> int:
        return self.deltas[-1].step if self.deltas else 0

    def report(self) -> rank_health_pb2.RankReport:
        running = self.completed + 1 if self.hold and self.accepted > self.completed else 0
        return rank_health_pb2.RankReport(
            incarnation_id=self.incarnation_id,
            epoch=self.epoch,
            accepted=self.accepted,
            completed=self.completed,
            running_step=running,
            running_for_ms=self.running_for_ms if running else 0,
            state_digest=self.state_digest,
            token_digest=self.token_digest,
            busy=self.busy,
            failure=self.failure,
        )

    def release(self) -> None:
        """Complete what was held."""
        self.hold = False
        self._complete()

    def say(self, **message: object) -> None:
        """Send one StepsResponse, if somebody listens."""
        if self.connection is not None and not self.mute_steps:
            self.connection.incoming.put_nowait(worker_pb2.StepsResponse(**message))  # type: ignore[arg-type]

    def break_stream(self) -> None:
        """Lose the transport. To lose answers with it, set ``mute_steps`` while they are due."""
        if self.connection is not None:
            self.connection.broken = True
            self.connection.incoming.put_nowait(ConnectionError("UNAVAILABLE: broken on purpose"))
            self.connection = None

    def hear(self, connection: FakeConnection, message: worker_pb2.StepsRequest) -> None:
        if message.epoch != self.epoch:
            raise Fenced(f"epoch {message.epoch} is stale")
        match message.WhichOneof("message"):
            case "hello":
                self.hellos.append(message.hello.last_result_step)
                self.connection = connection
                self.say(
                    welcome=worker_pb2.StepsResponse.Welcome(
                        incarnation_id=self.incarnation_id,
                        accepted=self.accepted,
                        completed=self.completed,
                        state_digest=self.state_digest,
                    )
                )
                for step in sorted(self.results):
                    if step > message.hello.last_result_step:
                        self.say(result=self.results[step])
            case "delta":
                self.raw_deltas.append(message.delta)
                self._accept(message.delta)
            case "heartbeat":
                self.say(report=self.report())
            case "sample_input":
                self.sample_inputs.append(message.sample_input.step)
            case "goodbye":
                self.goodbyes.append(message.goodbye.kind)
                connection.incoming.put_nowait(None)
                self.connection = None

    def _accept(self, raw: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        delta = Delta.FromString(raw)
        if delta.step != self.accepted + 1:
            raise OutOfOrder(f"step {delta.step} came, {self.accepted + 1} is due")
        self.deltas.append(delta)
        self.state_digest = delta.state_digest
        if not self.hold:
            self._complete()
        self.say(report=self.report())

    def _complete(self) -> None:
        while self.completed < self.accepted:
            delta = self.deltas[self.completed]
            self.completed = delta.step
            if delta.mode != Delta.MODE_APPLY_ONLY and self.rank == 0:
                result = scheduler_delta_pb2.StepResult(step=delta.step, token_ids=self.tokens(delta))
                self.results[delta.step] = result
                self.say(result=result)


class FakeConnection:
    def __init__(self, rank: FakeRank) -> None:
        self.rank = rank
        self.incoming: asyncio.Queue[worker_pb2.StepsResponse | Exception | None] = asyncio.Queue()
        self.broken = False

    async def write(self, message: worker_pb2.StepsRequest) -> None:
        if self.broken:
            raise ConnectionError("broken")
        try:
            self.rank.hear(self, message)
        except ManipleError as error:
            self.broken = True
            self.incoming.put_nowait(error)

    async def read(self) -> worker_pb2.StepsResponse | None:
        message = await self.incoming.get()
        if isinstance(message, Exception):
            self.incoming.put_nowait(message)  # a broken stream stays broken
            raise message
        return message

    async def close(self) -> None:
        self.broken = True
        self.incoming.put_nowait(ConnectionError("closed"))


class FakeExecutor(Executor):
    """An executor over ``FakeRank`` objects."""

    def __init__(self, world_size: int = 1, *, tokens: Tokens = lambda delta: []) -> None:
        self.world_size = world_size
        self.fakes = [FakeRank(rank, tokens) for rank in range(world_size)]
        self.num_shutdowns = 0
        self.report_interval_s = 0.02
        self._callbacks: list[Callable[[RankExit], None]] = []

    async def start(self, *, timeout_s: float) -> None:
        pass

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        fake = self.fakes[rank]
        fake.calls.append(method)
        fake.requests[method] = request
        if method in fake.hanging_calls:
            await asyncio.sleep(timeout_s)
            raise TimeoutError
        if method in fake.call_errors:
            raise fake.call_errors[method]
        if isinstance(request, worker_pb2.JoinRequest):
            fake.epoch, fake.owner_id = request.epoch, request.owner_id
        return self._reply(fake, method)

    def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        raise AssertionError(f"fake ranks have no {method}")

    def _reply(self, fake: FakeRank, method: str) -> Message:
        model = worker_pb2.ModelDescription(
            source="fake", architecture="Fake", vocab_size=260, max_position=4096, num_kv_groups=1, block_bytes=1024
        )
        replies: dict[str, Message] = {
            "Describe": worker_pb2.DescribeResponse(
                incarnation_id=fake.incarnation_id,
                epoch=fake.epoch,
                owner_address=fake.owner_address,
                min_protocol_version=1,
                max_protocol_version=1,
            ),
            "Join": worker_pb2.JoinResponse(epoch=fake.epoch, incarnation_id=fake.incarnation_id),
            "FormGroup": worker_pb2.FormGroupResponse(device="fake", backend="none"),
            "LoadModel": worker_pb2.LoadModelResponse(model=model),
            "ProfileMemory": worker_pb2.ProfileMemoryResponse(kv_bytes=1 << 20),
            "AllocateKvCache": worker_pb2.AllocateKvCacheResponse(kv_bytes=1 << 20),
            "WarmUp": worker_pb2.WarmUpResponse(),
            "Leave": worker_pb2.LeaveResponse(),
            "Sleep": worker_pb2.WorkerServiceSleepResponse(freed_bytes=1000, taken_bytes=10 + fake.rank),
            "WakeUp": worker_pb2.WorkerServiceWakeUpResponse(taken_bytes=1010 + fake.rank),
            "UpdateWeights": worker_pb2.WorkerServiceUpdateWeightsResponse(num_tensors=7),
        }
        return replies[method]

    async def open_steps(self, rank: Rank) -> StepsConnection:
        if self.fakes[rank].refuse_connections:
            raise ConnectionError("UNAVAILABLE: refused on purpose")
        return FakeConnection(self.fakes[rank])

    async def watch_health(self, rank: Rank, epoch: int) -> AsyncIterator[rank_health_pb2.RankReport]:
        while True:
            if not self.fakes[rank].mute_health:
                yield self.fakes[rank].report()
            await asyncio.sleep(self.report_interval_s)

    def subscribe_exit(self, callback: Callable[[RankExit], None]) -> None:
        self._callbacks.append(callback)

    def kill(self, rank: int, cause: str = "killed by SIGKILL") -> None:
        """Let a rank's process end."""
        self.fakes[rank].mute_steps = self.fakes[rank].mute_health = self.fakes[rank].refuse_connections = True
        self.fakes[rank].break_stream()
        for callback in self._callbacks:
            callback(RankExit(Rank(rank), cause))

    def describe_rank(self, rank: Rank) -> tuple[str, int]:
        return f"fake:{rank}", 0

    async def shutdown(self, *, grace_s: float) -> None:
        self.num_shutdowns += 1
