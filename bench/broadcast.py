"""Send steps to child processes, through the shared-memory ring and over gRPC on Unix sockets: a part of steps.py.

One paced message at a time, as steps are. Latency is from before the message is made until the *last* reader has it
parsed. CPU is per message, user and system, all threads of a process; the cost of the pacing itself is taken off the
writer's. Both transports in turns in the same run. Run as a program this is one reader.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import json
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc

from control_plane.executors.grpc_rank import channel_options
from maniple.v1 import worker_pb2, worker_pb2_grpc
from report import percentile
from service_chassis.protocol.broadcast_ring import BroadcastReader, BroadcastWriter, ReaderFds
from service_chassis.server import bind, make_server

_MAX_MESSAGE_BYTES = 64 << 20
_WARMUP = 50  # messages that count nowhere


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent."""

    messages: int  # per round
    message_bytes: int  # of the serialized delta
    interval_ms: float  # from one message to the next
    rounds: int  # of each transport and number of readers, in turns


# In a reader's process


class Arrivals:
    """When each message was there, parsed; and what that cost."""

    def __init__(self) -> None:
        self._times = array.array("Q")
        self._cpu_began = 0.0

    def take(self, message: worker_pb2.StepsRequest) -> None:
        """Note a message."""
        assert message.delta
        self._times.append(time.monotonic_ns())
        if len(self._times) == _WARMUP:
            self._cpu_began = time.process_time()

    def tell(self) -> None:
        """Print everything."""
        cpu_s = time.process_time() - self._cpu_began
        print(json.dumps({"cpu_us": cpu_s / (len(self._times) - _WARMUP) * 1e6, "times_ns": list(self._times)}))


async def read_ring(where: str) -> None:
    """Read a ring to its end."""
    index, fds = where.split(":")
    arrivals = Arrivals()
    reader = BroadcastReader(ReaderFds.parse(fds), int(index))
    print("ready", flush=True)
    async for message in reader:
        arrivals.take(worker_pb2.StepsRequest.FromString(message))
    arrivals.tell()


async def read_stream(where: str) -> None:
    """Serve ``Steps`` as a rank does, until the first stream ends."""
    arrivals, ended = Arrivals(), asyncio.Event()

    async def steps(requests: AsyncIterator[worker_pb2.StepsRequest], _: Any) -> AsyncIterator[Any]:
        yield worker_pb2.StepsResponse(welcome=worker_pb2.StepsResponse.Welcome())
        async for request in requests:
            arrivals.take(request)
        ended.set()

    server = make_server(_MAX_MESSAGE_BYTES)
    handler = grpc.stream_stream_rpc_method_handler(
        steps,
        request_deserializer=worker_pb2.StepsRequest.FromString,
        response_serializer=worker_pb2.StepsResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("maniple.v1.WorkerService", {"Steps": handler}),)
    )
    bind(server, f"unix:{where}")
    await server.start()
    print("ready", flush=True)
    await ended.wait()
    await server.stop(5)
    arrivals.tell()


# In the writer's process


class Transport(Protocol):
    """One way to N readers."""

    async def open(self, num_readers: int) -> list[Process]:
        """Start the readers and wait until each could read."""

    def send(self, message: worker_pb2.StepsRequest) -> None:
        """Send to all, without waiting."""

    async def close(self) -> None:
        """End the readers in order."""


async def _start(transport: str, where: str, *fds: int) -> Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, __file__, transport, where, stdout=PIPE, pass_fds=fds, limit=64 << 20
    )
    return process


async def _await_ready(processes: list[Process]) -> None:
    for process in processes:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"


class RingTransport:
    """Serialized once, written once."""

    async def open(self, num_readers: int) -> list[Process]:
        self._writer = BroadcastWriter(num_readers=num_readers)
        processes = []
        for index in range(num_readers):
            fds = self._writer.reader_fds(index)
            processes.append(await _start("ring", f"{index}:{fds}", *fds))
            self._writer.release_reader_fds(index)
        self._writer.begin(on_reader_lost=lambda _: None, on_room=lambda: None)
        await _await_ready(processes)
        return processes

    def send(self, message: worker_pb2.StepsRequest) -> None:
        assert self._writer.send(message.SerializeToString()), "the ring is full"

    async def close(self) -> None:
        self._writer.close()


class StreamTransport:
    """A stream and a writing task for each reader, as the executor for child processes has them."""

    async def open(self, num_readers: int) -> list[Process]:
        self._directory = tempfile.TemporaryDirectory(prefix="bench-")
        paths = [str(Path(self._directory.name) / f"{index}.sock") for index in range(num_readers)]
        processes = [await _start("stream", path) for path in paths]
        await _await_ready(processes)
        options = channel_options(_MAX_MESSAGE_BYTES)
        self._channels = [grpc.aio.insecure_channel(f"unix:{path}", options=options) for path in paths]
        self._calls = [worker_pb2_grpc.WorkerServiceStub(channel).Steps() for channel in self._channels]
        for call in self._calls:
            await call.read()  # the welcome
        self._queues: list[asyncio.Queue[worker_pb2.StepsRequest]] = [asyncio.Queue() for _ in paths]
        pairs = zip(self._calls, self._queues, strict=True)
        self._tasks = [asyncio.create_task(self._write(call, queue)) for call, queue in pairs]
        return processes

    @staticmethod
    async def _write(call: Any, queue: asyncio.Queue[worker_pb2.StepsRequest]) -> None:
        while True:
            await call.write(await queue.get())

    def send(self, message: worker_pb2.StepsRequest) -> None:
        for queue in self._queues:
            queue.put_nowait(message)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for call in self._calls:
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
        for channel in self._channels:
            await channel.close()
        self._directory.cleanup()


async def pace(send: Callable[[], None], load: Load) -> float:
    """Call ``send`` at the interval; return the CPU time per call, warm-up left out."""
    cpu_began = time.process_time()
    due = time.monotonic()
    for number in range(_WARMUP + load.messages):
        if number == _WARMUP:
            cpu_began = time.process_time()
        due = max(due + load.interval_ms / 1000, time.monotonic())
        await asyncio.sleep(due - time.monotonic())
        send()
    await asyncio.sleep(0.2)
    return (time.process_time() - cpu_began) / load.messages * 1e6


async def measure(transport: Transport, num_readers: int, load: Load) -> dict[str, Any]:
    """Run one round."""
    delta = bytes(range(256)) * (load.message_bytes // 256 + 1)
    sent_ns: list[int] = []

    def send() -> None:
        sent_ns.append(time.monotonic_ns())
        transport.send(worker_pb2.StepsRequest(epoch=1, delta=delta[: load.message_bytes]))

    processes = await transport.open(num_readers)
    try:
        writer_us = await pace(send, load)
        await transport.close()
        told = [json.loads((await process.communicate())[0]) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    arrivals = [one["times_ns"] for one in told]
    assert [len(times) for times in arrivals] == [len(sent_ns)] * num_readers, "a message is missing"
    last = [max(times) for times in zip(*arrivals, strict=True)]
    return {
        "latencies_us": [(there - sent) / 1000 for sent, there in zip(sent_ns, last, strict=True)][_WARMUP:],
        "writer_us": writer_us,
        "reader_us": statistics.mean(one["cpu_us"] for one in told),
    }


async def compare(readers: Sequence[int], load: Load, on_row: Callable[[dict[str, Any]], None]) -> None:
    """Run all rounds; tell a row for each transport and number of readers."""
    transports: dict[str, Callable[[], Transport]] = {"ring": RingTransport, "stream": StreamTransport}
    for num_readers in readers:
        rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in transports}
        pacing_us = []
        for _ in range(load.rounds):
            pacing_us.append(await pace(lambda: None, load))
            for name, make in transports.items():
                rounds[name].append(await measure(make(), num_readers, load))
        for name, of in rounds.items():
            latencies = [value for one in of for value in one["latencies_us"]]
            row: dict[str, Any] = {"transport": name, "num_readers": num_readers}
            row |= {f"p{percent}_us": round(percentile(latencies, percent), 1) for percent in (50, 99)}
            row["writer_cpu_us"] = round(statistics.median(one["writer_us"] for one in of) - min(pacing_us), 1)
            row["reader_cpu_us"] = round(statistics.median(one["reader_us"] for one in of), 1)
            on_row(row)


HEAD = f"{'transport':<10}{'readers':>8}{'p50 us':>12}{'p99 us':>12}{'writer CPU us':>16}{'reader CPU us':>16}"


def line(row: dict[str, Any]) -> str:
    """Return a row for people."""
    return (
        f"{row['transport']:<10}{row['num_readers']:>8}{row['p50_us']:>12.0f}{row['p99_us']:>12.0f}"
        f"{row['writer_cpu_us']:>16.0f}{row['reader_cpu_us']:>16.0f}"
    )


if __name__ == "__main__":
    kind, place = sys.argv[1:]
    asyncio.run({"ring": read_ring, "stream": read_stream}[kind](place))
