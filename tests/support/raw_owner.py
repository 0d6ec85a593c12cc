"""An owner of a group in plain protocol messages: it forms the group, runs it, dies, and takes it over (PROTOCOL C4).

Not the control plane's code on purpose: what a takeover needs is shown with nothing but the worker protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

from maniple.v1 import worker_pb2
from maniple.v1.scheduler_delta_pb2 import SampleInput
from service_chassis.protocol.digest import MASK64, StateDigest, row_factor, token_term
from service_chassis.scripted import ScriptedOptions, scripted_model
from support.worker_process import (
    DEADLINE_S,
    DeltaMaker,
    Goodbye,
    RawSteps,
    Refusal,
    WorkerProcess,
    refusal_of,
    worker_process,
)

Part = worker_pb2.SnapshotResponse
BEAT_S = 0.05
LEASE_MS = 500
LIMITS = worker_pb2.GroupLimits(
    max_num_seqs=5, max_num_batched_tokens=64, max_model_len=200, block_size=4, num_blocks=99, max_steps_in_flight=3
)


@asynccontextmanager
async def worker_processes(directory: Path, world_size: int, *flags: str) -> AsyncIterator[list[WorkerProcess]]:
    """Start the ranks of a group."""
    async with AsyncExitStack() as stack:
        workers = []
        for rank in range(world_size):
            where = directory / str(rank)
            where.mkdir()
            size = ("--rank", str(rank), "--world-size", str(world_size))
            workers.append(await stack.enter_async_context(worker_process(where, *size, *flags)))
        yield workers


@dataclass
class Snapshot:
    """A snapshot, taken apart."""

    header: Part.Header
    rows: dict[int, Part.Row] = field(default_factory=dict)  # by req_index
    tombstones: list[Part.Tombstone] = field(default_factory=list)
    hashes: dict[int, bytes] = field(default_factory=dict)  # by block

    def tokens(self, req_index: int) -> list[int]:
        return list(self.rows[req_index].request.token_ids)

    def token_digest(self) -> int:
        """The token digest by its definition."""
        return (
            sum(
                token_term(row_factor(row.request.row_key), position, token)
                for row in self.rows.values()
                for position, token in enumerate(row.request.token_ids)
            )
            & MASK64
        )

    def delta_maker(self) -> DeltaMaker:
        """Return what makes the next delta: all that its owner has to know is in the snapshot."""
        digest = StateDigest()
        maker = DeltaMaker(self.header.limits.block_size, self.header.step, digest)
        used = set(self.hashes)
        for req_index, row in self.rows.items():
            table = list(row.request.blocks[0].replace.ids)
            digest.add(req_index, row.request.row_key)
            digest.put_blocks(req_index, 0, 0, table)
            digest.compute(req_index, row.num_computed_tokens)
            assert row.state == Part.ROW_STATE_DECODE
            digest.set_advance(req_index, 1)
            maker.computed[req_index] = row.num_computed_tokens
            maker.num_blocks[req_index] = len(table)
            used.update(table)
        assert digest.value == self.header.state_digest
        maker.next_block = max(used, default=0) + 1
        return maker


async def snapshot_of(worker: WorkerProcess, epoch: int) -> Snapshot:
    """Take a snapshot."""
    taken: Snapshot | None = None
    async for part in worker.stub.Snapshot(worker_pb2.SnapshotRequest(epoch=epoch), timeout=DEADLINE_S):
        which = part.WhichOneof("part")
        if which == "header":
            assert taken is None
            taken = Snapshot(part.header)
            continue
        assert taken is not None
        if which == "row":
            taken.rows[part.row.request.req_index] = part.row
        elif which == "tombstone":
            taken.tombstones.append(part.tombstone)
        else:
            names = part.block_hashes.hashes
            split = [names[start : start + 16] for start in range(0, len(names), 16)]
            taken.hashes |= dict(zip(part.block_hashes.block_ids, split, strict=True))
    assert taken is not None
    return taken


class RawOwner:
    """One owner, from its claim to its death."""

    def __init__(self, workers: Sequence[WorkerProcess], owner_id: str, epoch: int) -> None:
        self.workers = workers
        self.owner_id = owner_id
        self.epoch = epoch
        self.joined: list[worker_pb2.JoinResponse] = []
        self.streams: list[RawSteps] = []
        self.welcomes: list[worker_pb2.StepsResponse.Welcome] = []
        self._beating: asyncio.Task[None] | None = None
        self._silent = asyncio.Event()
        self._writing = asyncio.Lock()  # a stream takes one message at a time

    # A tenure from the beginning

    async def form(self, options: ScriptedOptions | None = None) -> None:
        """Claim, all six stages, streams."""
        await self.claim()
        await self.reach_ready(options)
        await self.open()

    async def join_when_lapsed(self, rank: int) -> None:
        """Ask one rank until it grants."""
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    await self.join(rank)
                    return
                except grpc.aio.AioRpcError as error:
                    if refusal_of(error).reason != "LEASE_HELD":
                        raise
                    await asyncio.sleep(0.02)

    async def join(self, rank: int) -> worker_pb2.JoinResponse:
        """Ask one rank."""
        return await self.workers[rank].join(
            self.epoch,
            self.owner_id,
            rank=rank,
            world_size=len(self.workers),
            lease_ms=LEASE_MS,
            owner_address=f"{self.owner_id}:1",
        )

    async def claim(self) -> list[worker_pb2.JoinResponse]:
        """Ask rank 0, and then the others."""
        self.joined = []
        for rank in range(len(self.workers)):
            self.joined.append(await self.join(rank))
        return self.joined

    async def claim_when_lapsed(self) -> None:
        """Claim as soon as the leases of the owner before have lapsed."""
        await self.join_when_lapsed(0)
        for rank in range(1, len(self.workers)):
            await self.join_when_lapsed(rank)
        await self.claim()  # asks again, which changes nothing

    async def call_all(self, method: str, **fields: Any) -> None:
        """Make one call on all ranks at once; each is told its rank where the call has one."""
        message = getattr(worker_pb2, f"{method}Request")
        ranked = {"rank"} & set(message.DESCRIPTOR.fields_by_name)
        calls = [
            getattr(worker.stub, method)(
                message(epoch=self.epoch, **fields, **dict.fromkeys(ranked, rank)), timeout=DEADLINE_S
            )
            for rank, worker in enumerate(self.workers)
        ]
        await asyncio.gather(*calls)

    async def form_group(self, formation_id: str = "f1") -> None:
        """Stage 1."""
        world_size = len(self.workers)
        rendezvous = f"127.0.0.1{self.joined[0].rendezvous}" if world_size > 1 else ""
        await self.call_all("FormGroup", formation_id=formation_id, world_size=world_size, rendezvous=rendezvous)

    async def load(self, options: ScriptedOptions | None = None) -> None:
        """Stage 2."""
        model = scripted_model(options or ScriptedOptions())
        await self.call_all("LoadModel", model=model, max_num_seqs=5, max_num_batched_tokens=64, block_size=4)

    async def reach_ready(self, options: ScriptedOptions | None = None, formation_id: str = "f1") -> None:
        """All stages."""
        await self.form_group(formation_id)
        await self.load(options)
        await self.call_all("ProfileMemory")
        await self.call_all("AllocateKvCache", limits=LIMITS)
        await self.call_all("WarmUp")

    async def open(self, last_result_step: int = 0) -> None:
        """Open the streams and keep the leases."""
        for worker in self.workers:
            stream, welcome = await worker.open(self.epoch, self.owner_id, last_result_step)
            self.streams.append(stream)
            self.welcomes.append(welcome)
        self._beating = asyncio.create_task(self._beat())

    async def _write(self, rank: int, **message: Any) -> None:
        async with self._writing:
            await self.streams[rank].send(**message)

    async def _beat(self) -> None:
        while not self._silent.is_set():
            for rank in range(len(self.streams)):
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # that stream has ended
                    await self._write(rank, heartbeat=worker_pb2.StepsRequest.Heartbeat())
            with suppress(TimeoutError):
                await asyncio.wait_for(self._silent.wait(), BEAT_S)

    # Steps

    async def send(self, delta: bytes, ranks: Sequence[int] | None = None) -> None:
        """Send one step to all ranks, or only to some."""
        for rank in range(len(self.workers)) if ranks is None else ranks:
            await self._write(rank, delta=delta)

    async def send_sample_input(self, sample_input: SampleInput) -> None:
        """Send masks to the output rank, where it is sampled."""
        await self._write(0, sample_input=sample_input)

    async def run(self, maker: DeltaMaker, steps: int, **first: Any) -> list[list[int]]:
        """Run steps one after another; return the ids of each."""
        token_ids = []
        for number in range(steps):
            await self.send(maker.make(**(first if number == 0 else {})))
            token_ids.append(list((await self.streams[0].result()).token_ids))
        return token_ids

    async def completed(self, step: int) -> None:
        """Wait until all ranks completed a step, with one state digest."""
        digests = set()
        for stream, welcome in zip(self.streams, self.welcomes, strict=True):
            if welcome.completed == step:
                digests.add(welcome.state_digest)
            else:
                report = await stream.report_where(lambda report: report.completed == step)
                digests.add(report.state_digest)
        assert len(digests) == 1

    # Its end

    async def fall_silent(self) -> None:
        """Be stopped: the connections stand, and nothing comes."""
        self._silent.set()  # and not cancelled: that would end the stream in the middle of a message
        if self._beating is not None:
            await self._beating

    async def die(self) -> None:
        """Be killed: the connections break."""
        await self.fall_silent()
        for stream in self.streams:
            stream.call.cancel()
        self.streams = []

    async def say_goodbye(self, kind: Any) -> list[Refusal | None]:
        """Leave on purpose; return how the streams ended."""
        await self.fall_silent()
        for rank in range(len(self.streams)):
            await self._write(rank, goodbye=Goodbye(kind=kind))
        return [await stream.end() for stream in self.streams]

    # A takeover

    async def level_up(self) -> int:
        """Fetch what the furthest rank accepted, and relay it to those that lack it; return the last step."""
        assert len({joined.formation_id for joined in self.joined}) == 1
        accepted = [joined.accepted for joined in self.joined]
        furthest = accepted.index(max(accepted))
        request = worker_pb2.FetchDeltasRequest(epoch=self.epoch, from_step=min(accepted) + 1)
        fetched = await self.workers[furthest].stub.FetchDeltas(request, timeout=DEADLINE_S)
        assert len(fetched.deltas) == max(accepted) - min(accepted)
        await self.open(last_result_step=max(accepted))
        for rank, have in enumerate(accepted):
            for raw in fetched.deltas[have - min(accepted) :]:
                await self.send(raw, [rank])
        return max(accepted)

    async def take_over(self) -> Snapshot:
        """Do it all: what comes next is the first own delta."""
        await self.claim_when_lapsed()
        last = await self.level_up()
        await self.completed(last)
        snapshots = [await snapshot_of(worker, self.epoch) for worker in self.workers]
        for snapshot in snapshots:
            assert snapshot.header.step == last
            assert snapshot.header.limits == LIMITS
            assert snapshot.token_digest() == snapshot.header.token_digest
            assert snapshot.rows.keys() == snapshots[0].rows.keys()
            assert all(snapshot.tokens(row) == snapshots[0].tokens(row) for row in snapshot.rows)
            assert snapshot.hashes == snapshots[0].hashes
        return snapshots[0]
