"""Ranks without processes that another owner left behind: formed, with a batch, perhaps not at one step."""

from __future__ import annotations

from collections.abc import AsyncIterator

from google.protobuf.message import Message

from maniple.v1 import worker_pb2
from maniple.v1.scheduler_delta_pb2 import SchedulerDelta
from service_chassis.errors import Fenced, LeaseHeld
from service_chassis.ids import Rank
from support.fake_executor import FakeExecutor, FakeRank

Delta = SchedulerDelta


class FormedExecutor(FakeExecutor):
    """Ranks in formation ``f``, of an owner who fell silent."""

    outlives_owner = True

    def __init__(self, world_size: int = 2, *, formed: bool = True) -> None:
        super().__init__(world_size, tokens=lambda delta: [])
        self.formations = ["f" if formed else ""] * world_size
        self.stages = [worker_pb2.WORKER_STAGE_READY if formed else worker_pb2.WORKER_STAGE_UNSPECIFIED] * world_size
        self.owner_address = "other:1" if formed else ""
        self.silent_for_ms = 60_000
        self.model = "fake"
        self.refusals: dict[int, int] = {}  # rank -> how often its Join is still refused as held
        self.snapshots_of: list[int] = []
        self.snapshot_step: int | None = None  # None: the right one
        self.fetched: list[bytes] | None = None  # None: what the rank has
        for fake in self.fakes:
            fake.epoch = 1 if formed else 0
            fake.token_digest = 77

    def let_accept(self, rank: int, *deltas: SchedulerDelta) -> None:
        """Have a rank accept deltas of the dead owner."""
        fake = self.fakes[rank]
        for delta in deltas:
            fake.deltas.append(delta)
            fake.state_digest = delta.state_digest
        if not fake.hold:
            fake._complete()
        fake.results.clear()

    async def call(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> Message:
        fake = self.fakes[rank]
        if isinstance(request, worker_pb2.JoinRequest):
            fake.calls.append("Join")
            if self.refusals.get(rank, 0) > 0:
                self.refusals[rank] -= 1
                raise LeaseHeld("held", metadata={"owner_address": self.owner_address})
            if request.epoch <= fake.epoch:
                raise Fenced(f"epoch {fake.epoch} is granted")
            fake.epoch = request.epoch
            return worker_pb2.JoinResponse(
                epoch=fake.epoch,
                incarnation_id=fake.incarnation_id,
                formation_id=self.formations[rank],
                accepted=fake.accepted,
                completed=fake.completed,
                state_digest=fake.state_digest,
                stage=self.stages[rank],
            )
        if isinstance(request, worker_pb2.DescribeRequest):
            fake.calls.append("Describe")
            return self._description(fake)
        if isinstance(request, worker_pb2.FetchDeltasRequest):
            fake.calls.append("FetchDeltas")
            kept = [delta.SerializeToString() for delta in fake.deltas if delta.step >= request.from_step]
            return worker_pb2.FetchDeltasResponse(deltas=kept if self.fetched is None else self.fetched)
        return await super().call(rank, method, request, timeout_s=timeout_s)

    def _description(self, fake: FakeRank) -> worker_pb2.DescribeResponse:
        return worker_pb2.DescribeResponse(
            incarnation_id=fake.incarnation_id,
            epoch=fake.epoch,
            min_protocol_version=1,
            max_protocol_version=1,
            owner_address=self.owner_address,
            owner_silent_for_ms=self.silent_for_ms,
            stage=self.stages[fake.rank],
            model=worker_pb2.ModelDescription(source=self.model, vocab_size=260, max_position=4096),
            limits=worker_pb2.GroupLimits(
                max_num_seqs=3, max_num_batched_tokens=32, max_model_len=100, block_size=4, num_blocks=50
            ),
            step_us_per_token=2.5,
        )

    async def stream(self, rank: Rank, method: str, request: Message, *, timeout_s: float) -> AsyncIterator[Message]:
        fake = self.fakes[rank]
        self.snapshots_of.append(int(rank))
        step = fake.completed if self.snapshot_step is None else self.snapshot_step
        header = worker_pb2.SnapshotResponse.Header(
            step=step, state_digest=fake.state_digest, token_digest=fake.token_digest
        )
        yield worker_pb2.SnapshotResponse(header=header)
