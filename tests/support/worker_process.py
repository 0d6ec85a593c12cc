"""A real worker process, and an owner who talks to it in plain protocol messages, made by hand."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.rpc import error_details_pb2, status_pb2

from maniple.v1 import (
    rank_health_pb2,
    rank_health_pb2_grpc,
    sampling_pb2,
    scheduler_delta_pb2,
    worker_pb2,
    worker_pb2_grpc,
)
from service_chassis.protocol.digest import StateDigest
from service_chassis.scripted import ScriptedOptions, scripted_model

DEADLINE_S = 10.0
Delta = scheduler_delta_pb2.SchedulerDelta
Hello = worker_pb2.StepsRequest.Hello
Goodbye = worker_pb2.StepsRequest.Goodbye


@dataclass(frozen=True)
class Refusal:
    """How a call or a stream ended badly."""

    code: grpc.StatusCode
    message: str
    reason: str
    metadata: dict[str, str]


def refusal_of(error: grpc.aio.AioRpcError) -> Refusal:
    """Read the status and its ErrorInfo."""
    info = error_details_pb2.ErrorInfo()
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            status_pb2.Status.FromString(value).details[0].Unpack(info)
    return Refusal(error.code(), error.details() or "", info.reason, dict(info.metadata))


class RawSteps:
    """One Steps stream."""

    def __init__(self, stub: Any, epoch: int) -> None:
        self.call = stub.Steps()
        self.epoch = epoch

    async def send(self, epoch: int | None = None, **message: Any) -> None:
        """Write one message; the oneof's field is named."""
        await self.call.write(worker_pb2.StepsRequest(epoch=self.epoch if epoch is None else epoch, **message))

    async def read(self) -> worker_pb2.StepsResponse:
        async with asyncio.timeout(DEADLINE_S):
            response = await self.call.read()
        assert response is not grpc.aio.EOF, "the rank ended the stream in order"
        return response

    async def welcome(self) -> worker_pb2.StepsResponse.Welcome:
        response = await self.read()
        assert response.WhichOneof("message") == "welcome"
        return response.welcome

    async def result(self) -> scheduler_delta_pb2.StepResult:
        """Read up to the next result."""
        while (response := await self.read()).WhichOneof("message") != "result":
            pass
        return response.result

    async def report_where(self, condition: Any) -> rank_health_pb2.RankReport:
        """Read up to a report that fulfils ``condition``."""
        while True:
            response = await self.read()
            if response.WhichOneof("message") == "report" and condition(response.report):
                return response.report

    async def end(self) -> Refusal | None:
        """Read to the end; None where the rank ended it in order."""
        try:
            async with asyncio.timeout(DEADLINE_S):
                while await self.call.read() is not grpc.aio.EOF:
                    pass
                if (code := await self.call.code()) is grpc.StatusCode.OK:
                    return None
                raise AssertionError(f"ended with {code} and no error")
        except grpc.aio.AioRpcError as error:
            return refusal_of(error)


@dataclass
class DeltaMaker:
    """Makes deltas by hand for rows that prefill in one step and decode, keeping only the digest."""

    block_size: int = 4
    step: int = 0
    digest: StateDigest = field(default_factory=StateDigest)
    computed: dict[int, int] = field(default_factory=dict)  # req_index -> tokens
    num_blocks: dict[int, int] = field(default_factory=dict)
    next_block: int = 1

    def make(
        self,
        *,
        new: dict[int, Sequence[int]] | None = None,
        finished: Sequence[int] = (),
        resumed: dict[int, int] | None = None,
        mode: Any = Delta.MODE_RUN,
        **fields: Any,
    ) -> bytes:
        """Return the next delta: rows in ``finished`` leave, rows in ``new`` enter with a prompt, the rest decodes.

        Rows in ``resumed`` lose their blocks and come back at once, with so many known tokens.
        """
        self.step += 1
        delta = Delta(step=self.step, mode=mode, **fields)
        for row in finished:
            delta.finished.add(req_index=row, reason=1, num_tokens=self.computed[row] + 1)
            self.digest.remove(row, self.computed.pop(row))
        for row in resumed or {}:
            delta.preempted.append(row)
            self.digest.clear(row, self.computed.pop(row))
        if mode == Delta.MODE_RUN:
            self.digest.advance_unmentioned()
            for row in self.computed:
                self._decode(delta, row)
        for row, num_known in (resumed or {}).items():
            self._resume(delta, row, num_known)
        for row, prompt in (new or {}).items():
            self._enter(delta, row, list(prompt))
        delta.state_digest = self.digest.value
        return delta.SerializeToString()

    def _decode(self, delta: Delta, row: int) -> None:
        self.computed[row] += 1
        if self.computed[row] > self.num_blocks[row] * self.block_size:
            change = delta.changes.add(req_index=row)
            change.blocks.add().append.ids.append(self.next_block)
            self.digest.put_blocks(row, 0, self.num_blocks[row], [self.next_block])
            self.num_blocks[row] += 1
            self.next_block += 1

    def _resume(self, delta: Delta, row: int, num_known: int) -> None:
        count = -(-num_known // self.block_size)
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        change = delta.changes.add(
            req_index=row, num_scheduled_tokens=num_known, num_prefill_tokens=num_known, num_computed_tokens=0
        )
        change.blocks.add().replace.ids.extend(blocks)
        self.digest.put_blocks(row, 0, 0, blocks)
        self.digest.compute(row, num_known)
        self.digest.set_advance(row, 1)
        self.computed[row] = num_known
        self.num_blocks[row] = count

    def _enter(self, delta: Delta, row: int, prompt: list[int]) -> None:
        count = -(-len(prompt) // self.block_size)
        blocks = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        key = 1000 * self.step + row
        new = delta.new_requests.add(
            req_index=row,
            row_key=key,
            request_id=f"request-{key}",
            n=1,
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            num_prefill_tokens=len(prompt),
            num_scheduled_tokens=len(prompt),
            sampling=sampling_pb2.RowSampling(top_p=1.0, repetition_penalty=1.0, seed=7),
            control_blob=f"blob of row {row}".encode(),
        )
        new.blocks.add().replace.ids.extend(blocks)
        self.digest.add(row, key)
        self.digest.put_blocks(row, 0, 0, blocks)
        self.digest.compute(row, len(prompt))
        self.digest.set_advance(row, 1)
        self.computed[row] = len(prompt)
        self.num_blocks[row] = count


class WorkerProcess:
    """The process, its calls, its logs."""

    def __init__(self, process: asyncio.subprocess.Process, directory: Path, parent_write_fd: int) -> None:
        self.process = process
        self.parent_write_fd = parent_write_fd
        # The socket appears a moment after the process; the default would try again after a second.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 20)]
        self._channel = grpc.aio.insecure_channel(f"unix:{directory}/w.sock", options=options)
        self._health_channel = grpc.aio.insecure_channel(f"unix:{directory}/h.sock", options=options)
        self.stub: Any = worker_pb2_grpc.WorkerServiceStub(self._channel)
        self._health: Any = rank_health_pb2_grpc.RankHealthServiceStub(self._health_channel)
        self.log: list[dict[str, Any]] = []
        self._reader = asyncio.create_task(self._read_log())

    async def _read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            try:
                self.log.append(json.loads(line))
            except ValueError:
                self.log.append({"event": line.decode()})

    async def close(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        await self._reader
        await asyncio.gather(self._channel.close(), self._health_channel.close())
        if self.parent_write_fd >= 0:
            os.close(self.parent_write_fd)

    def parent_dies(self) -> None:
        os.close(self.parent_write_fd)
        self.parent_write_fd = -1

    async def exit_code(self, within_s: float) -> int:
        async with asyncio.timeout(within_s):
            return await self.process.wait()

    async def join(self, epoch: int = 1, owner_id: str = "A", **fields: Any) -> worker_pb2.JoinResponse:
        request = worker_pb2.JoinRequest(
            epoch=epoch, owner_id=owner_id, **{"protocol_version": 1, "world_size": 1, **fields}
        )
        return await self.stub.Join(request, timeout=DEADLINE_S, wait_for_ready=True)

    async def describe(self) -> worker_pb2.DescribeResponse:
        return await self.stub.Describe(worker_pb2.DescribeRequest(), timeout=DEADLINE_S, wait_for_ready=True)

    async def load(self, epoch: int = 1, options: ScriptedOptions | None = None, **fields: Any) -> None:
        """Stages 1 and 2."""
        await self.stub.FormGroup(
            worker_pb2.FormGroupRequest(epoch=epoch, formation_id="f1", rank=0, world_size=1), timeout=DEADLINE_S
        )
        values = {"max_num_seqs": 5, "max_num_batched_tokens": 64, "block_size": 4, **fields}
        model = scripted_model(options or ScriptedOptions())
        await self.stub.LoadModel(worker_pb2.LoadModelRequest(epoch=epoch, model=model, **values), timeout=DEADLINE_S)

    async def make_ready(self, epoch: int = 1, options: ScriptedOptions | None = None) -> None:
        """Join and all six stages."""
        await self.join(epoch)
        await self.load(epoch, options)
        await self.stub.ProfileMemory(worker_pb2.ProfileMemoryRequest(epoch=epoch), timeout=DEADLINE_S)
        limits = worker_pb2.GroupLimits(
            max_num_seqs=5,
            max_num_batched_tokens=64,
            max_model_len=200,
            block_size=4,
            num_blocks=99,
            max_steps_in_flight=3,
        )
        request = worker_pb2.AllocateKvCacheRequest(epoch=epoch, limits=limits)
        await self.stub.AllocateKvCache(request, timeout=DEADLINE_S)
        await self.stub.WarmUp(worker_pb2.WarmUpRequest(epoch=epoch), timeout=DEADLINE_S)

    async def open(
        self, epoch: int = 1, owner_id: str = "A", last_result_step: int = 0
    ) -> tuple[RawSteps, worker_pb2.StepsResponse.Welcome]:
        """Open a stream and read its Welcome."""
        steps = RawSteps(self.stub, epoch)
        await steps.send(hello=Hello(owner_id=owner_id, last_result_step=last_result_step))
        return steps, await steps.welcome()

    async def reports(self, idle_interval_ms: int = 0) -> AsyncIterator[rank_health_pb2.RankReport]:
        """Watch the rank on its health connection."""
        request = rank_health_pb2.WatchRequest(idle_interval_ms=idle_interval_ms)
        call = self._health.Watch(request, wait_for_ready=True)
        try:
            async for response in call:
                yield response.report
        finally:
            call.cancel()

    async def report_where(self, condition: Any, *, idle_interval_ms: int = 20) -> rank_health_pb2.RankReport:
        async with asyncio.timeout(DEADLINE_S):
            async for report in self.reports(idle_interval_ms):
                if condition(report):
                    return report
        raise AssertionError("the health stream ended")


@asynccontextmanager
async def worker_process(directory: Path, *flags: str) -> AsyncIterator[WorkerProcess]:
    """Start a rank that dies with this process; end it by force afterwards."""
    read_fd, write_fd = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "worker_service", "--rank", "0", "--world-size", "1", "--log-level", "info"),
        *("--listen", f"unix:{directory}/w.sock", "--health-listen", f"unix:{directory}/h.sock"),
        *("--parent-fd", str(read_fd), *flags),
        stderr=asyncio.subprocess.PIPE,
        limit=1 << 24,  # bytes of a line; over it reading stops, and with it waiting for the process
        pass_fds=(read_fd,),
        start_new_session=True,
    )
    os.close(read_fd)
    worker = WorkerProcess(process, directory, write_fd)
    try:
        yield worker
    finally:
        await worker.close()
