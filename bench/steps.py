"""What does one steady step cost, apart from the model?

Every decoding row yields one token a step; everything else in that step is ours: planning it (schedule), writing the
delta (build), handing it to gRPC (send), reading, checking and applying it on the worker (apply), and reading the
result, counting it and giving every request its token (result). None of it may grow with the context, and what the wire
carries is a few bytes for the rows that cross a block boundary.

And how does a step get to several child processes on this host? Through the shared-memory ring and over a stream on a
Unix socket each, in turns, to 1, 2, 4 and 8 readers: latency until the last one has it parsed, and CPU of both ends.

There is no model and no text here: sampled ids are made up. Rows are staggered, so that in every step one in block_size
begins a block. Times are microseconds, means over the steps with the 90th percentile beside them; "host" is schedule +
build + result, what the control plane spends on a step beside sending it.

Examples:
  python bench/steps.py                              # 1, 16, 64, 256 rows at 128 and 4096 tokens; 1000 waiting
  python bench/steps.py --rows 256 --contexts 128 --steps 2000
  python bench/steps.py --rows 1024 --block-size 32 --no-send --readers 0
  python bench/steps.py --rows 0 --readers 2,8 --messages 3000        # ring against stream alone

The last line is one JSON object with the same figures.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from time import perf_counter_ns
from typing import Any

import grpc
from rich.console import Console
from rich.table import Table

from broadcast import HEAD, Load, compare, line
from control_plane.deltas import DeltaEncoder, row_payload, step_tokens
from control_plane.generation import SamplingChoice
from control_plane.scheduling.plan import StepPlan
from control_plane.scheduling.request import Request
from control_plane.scheduling.scheduler import Scheduler, SchedulerLimits
from maniple.v1 import worker_pb2, worker_pb2_grpc
from maniple.v1.scheduler_delta_pb2 import StepResult
from service_chassis.ids import RequestId
from worker_service.batch_state import BatchLimits, BatchState

VOCAB = 32_000
WARM_UP_STEPS = 40
PHASES = ("schedule", "build", "send", "apply", "result")


async def swallow(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for _ in requests:
        pass
    yield b""


def serve_sink(address: str, ready: Any) -> None:
    """Be a worker that reads its Steps stream and does nothing, in a process of its own."""

    async def run() -> None:
        server = grpc.aio.server()
        steps: Any = grpc.stream_stream_rpc_method_handler(swallow)
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("maniple.v1.WorkerService", {"Steps": steps})]
        )
        server.add_insecure_port(address)
        await server.start()
        ready.set()
        await server.wait_for_termination()

    asyncio.run(run())


class Sender:
    """A Steps stream over a Unix socket, written from a loop of its own; its clock runs inside that loop."""

    def __init__(self, directory: str) -> None:
        address = f"unix:{Path(directory) / 'sink.sock'}"
        spawn = multiprocessing.get_context("spawn")
        ready = spawn.Event()
        self._process = spawn.Process(target=serve_sink, args=(address, ready), daemon=True)
        self._process.start()
        if not ready.wait(30):
            raise TimeoutError("the sink process did not start within 30 s")
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._call: Any = self._do(self._open(address))

    async def _open(self, address: str) -> Any:
        self._channel = grpc.aio.insecure_channel(address)
        return worker_pb2_grpc.WorkerServiceStub(self._channel).Steps()

    def _do(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(timeout=30)

    def send(self, delta: bytes) -> int:
        """Write one delta; return the nanoseconds until gRPC has taken it."""
        spent: int = self._do(self._write(delta))
        return spent

    async def _write(self, delta: bytes) -> int:
        started = perf_counter_ns()
        await self._call.write(worker_pb2.StepsRequest(epoch=1, delta=delta))
        return perf_counter_ns() - started

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._process.terminate()
        self._process.join(5)

    async def _end(self) -> None:
        await self._call.done_writing()
        await self._channel.close()


class Case:
    """A scheduler and a worker's batch state with so many rows in decode, and others waiting."""

    def __init__(self, rows: int, context: int, waiting: int, steps: int, block_size: int) -> None:
        longest = context + steps + 2 * WARM_UP_STEPS
        num_blocks = rows * (longest // block_size + 2) + 1
        limits = {
            "max_num_seqs": rows,
            "max_num_batched_tokens": max(rows * context, 2048),  # the prompts are no part of what is measured
            "max_model_len": longest + 2,
            "block_size": block_size,
            "num_blocks": num_blocks,
        }
        self._scheduler = Scheduler(SchedulerLimits(**limits, max_num_waiting=rows + waiting + 1))
        self._encoder = DeltaEncoder()
        self._state = BatchState(BatchLimits(**limits, vocab_size=VOCAB))
        self._random = random.Random(rows * context)
        self._output = longest - context
        for number in range(rows):
            self._add(f"row-{number}", context - number % block_size)
        for number in range(waiting):
            self._add(f"waiting-{number}", 64)

    def _add(self, name: str, length: int) -> None:
        prompt = tuple(self._random.choices(range(VOCAB), k=max(length, 1)))
        self._scheduler.add(
            Request(
                request_id=RequestId(name),
                prompt_token_ids=prompt,
                max_tokens=self._output,
                stop_ids=frozenset({VOCAB - 1}),
                arrival=float(name.startswith("waiting")),
                payload=row_payload(SamplingChoice(seed=1)),
            )
        )

    def step(self, send: Callable[[bytes], int] | None) -> tuple[dict[str, int], int]:
        """Run one step; return nanoseconds by phase and the bytes of the delta."""
        t0 = perf_counter_ns()
        plan = self._scheduler.schedule(0.0)
        t1 = perf_counter_ns()
        assert plan is not None
        delta = self._encoder.encode(plan)
        t2 = perf_counter_ns()
        sent = send(delta) if send is not None else 0
        t3 = perf_counter_ns()
        self._state.apply(delta)
        t4 = perf_counter_ns()
        raw = self._result(plan)
        t5 = perf_counter_ns()
        tokens = step_tokens(StepResult.FromString(raw), plan)
        self._encoder.take_tokens(plan, tokens)
        outputs = self._scheduler.apply(tokens)
        t6 = perf_counter_ns()
        assert len(outputs) == len(plan.rows)
        spent = {"schedule": t1 - t0, "build": t2 - t1, "send": sent, "apply": t4 - t3, "result": t6 - t5}
        return spent, len(delta)

    def _result(self, plan: StepPlan) -> bytes:
        ids = [self._random.randrange(VOCAB - 1) for _ in plan.rows]
        return StepResult(step=plan.step, token_ids=ids).SerializeToString()


def measure(case: Case, steps: int, send: Callable[[bytes], int] | None) -> dict[str, Any]:
    for _ in range(WARM_UP_STEPS):
        case.step(send)
    gc.collect()
    gc.freeze()  # as the servers do once they are up
    taken = [case.step(send) for _ in range(steps)]
    gc.unfreeze()
    microseconds = {phase: [spent[phase] / 1000 for spent, _ in taken] for phase in PHASES}
    microseconds["host"] = [
        sum(parts)
        for parts in zip(microseconds["schedule"], microseconds["build"], microseconds["result"], strict=True)
    ]
    sizes = [size for _, size in taken]
    return {
        **{
            f"{phase}_us": {
                "mean": round(statistics.fmean(values), 1),
                "p90": round(statistics.quantiles(values, n=10)[8], 1),
            }
            for phase, values in microseconds.items()
        },
        "delta_bytes": {"mean": round(statistics.fmean(sizes)), "max": max(sizes)},
    }


def table(results: list[dict[str, Any]]) -> Table:
    view = Table(title="one steady step, microseconds: mean (p90)", title_justify="left")
    for name in ("rows", "context", "waiting", *PHASES, "host", "bytes: mean (max)"):
        view.add_column(name, justify="right")
    for result in results:
        times = [result[f"{phase}_us"] for phase in (*PHASES, "host")]
        size = result["delta_bytes"]
        view.add_row(
            *(str(result[name]) for name in ("rows", "context", "waiting")),
            *(f"{time['mean']:.0f} ({time['p90']:.0f})" if time["mean"] else "-" for time in times),
            f"{size['mean']} ({size['max']})",
        )
    return view


def numbers(text: str) -> list[int]:
    values = [int(part) for part in text.split(",")]
    if values == [0]:
        return []
    if min(values) < 1:
        raise argparse.ArgumentTypeError("every number must be at least 1, or 0 stand alone for none")
    return values


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/steps.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=numbers, default=[1, 16, 64, 256], help="decoding rows, default 1,16,64,256; 0: no such case"
    )
    parser.add_argument("--contexts", type=numbers, default=[128, 4096], help="tokens of a row, default 128,4096")
    parser.add_argument("--waiting", type=int, default=1000, help="one more case with so many waiting; 0: none")
    parser.add_argument("--steps", type=int, default=400, help="measured steps of a case, default 400")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block, default 16")
    parser.add_argument("--no-send", action="store_true", help="start no sink process, write to no stream")
    broadcast = parser.add_argument_group("ring against stream")
    broadcast.add_argument(
        "--readers", type=numbers, default=[1, 2, 4, 8], help="reader processes, default 1,2,4,8; 0: do not compare"
    )
    broadcast.add_argument("--messages", type=int, default=1000, help="of a round, default 1000")
    broadcast.add_argument("--message-bytes", type=int, default=200, help="of a serialized delta, default 200")
    broadcast.add_argument("--interval-ms", type=float, default=2.0, help="between messages, default 2")
    broadcast.add_argument("--rounds", type=int, default=3, help="of each transport, in turns, default 3")
    return parser.parse_args()


def compare_transports(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure ring against stream, with a line for people as soon as there is one."""
    load = Load(
        messages=arguments.messages,
        message_bytes=arguments.message_bytes,
        interval_ms=arguments.interval_ms,
        rounds=arguments.rounds,
    )
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any]) -> None:
        rows.append(row)
        print(line(row), flush=True)

    print(f"\n{HEAD}\n{'-' * len(HEAD)}")
    asyncio.run(compare(arguments.readers, load, tell))
    return rows


def main() -> None:
    arguments = parse_arguments()
    cases = [(rows, context, 0) for rows in arguments.rows for context in arguments.contexts]
    if arguments.waiting and arguments.rows:
        cases.append((max(arguments.rows), min(arguments.contexts), arguments.waiting))
    console = Console()
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="maniple-steps-") as directory:
        sender = Sender(directory) if cases and not arguments.no_send else None
        try:
            for rows, context, waiting in cases:
                with console.status(f"{rows} rows at {context} tokens, {waiting} waiting"):
                    case = Case(rows, context, waiting, arguments.steps, arguments.block_size)
                    figures = measure(case, arguments.steps, sender.send if sender else None)
                results.append({"rows": rows, "context": context, "waiting": waiting, **figures})
        finally:
            if sender:
                sender.close()
    if results:
        console.print(table(results))
    rows = compare_transports(arguments) if arguments.readers else []
    broadcast = {"message_bytes": arguments.message_bytes, "interval_ms": arguments.interval_ms, "rows": rows}
    result = {"bench": "steps", "steps": arguments.steps, "block_size": arguments.block_size, "cases": results}
    print(json.dumps(result | {"broadcast": broadcast}))


if __name__ == "__main__":
    main()
