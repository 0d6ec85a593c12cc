"""Is the device ever kept waiting by the server in front of it?

A device that takes 5 ms for every step (`bench/fake_worker.py`, in a process of its own), 256 streams of
token ids that are read through the door over a Unix socket, and the same with text and 10 ms. That is 51 200 tokens a
second, and a write of one message costs more than 40 µs: whatever the server does, it cannot tell every client of every
token at once. What it must do is plan the next step first, and let tokens that wait go together.

The device is idle for what is left of the time after (steps done) x (time of a step). A step really takes some 0.1 ms
longer than it sleeps, which counts as idle here.

Some clients may stop reading after their first message, until the window is over: nobody else may notice.

The clients run in this process, by a client that takes little (`bench/frugal_client.py`) at a lower priority than the
server: elsewhere they would have machines of their own.

Examples:
  python bench/idle.py                                     # token ids with 5 ms, text with 10 ms, one client stalled
  python bench/idle.py --cases ids --streams 64 --step-ms 2 --in-flight 1
  python bench/idle.py --window-s 20 --stalled 16

Ends with one line of JSON for each case: the share of idle time, and its goal.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from rich.console import Console
from rich.table import Table

from frugal_client import FrugalClient
from maniple.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from processes import Started, Surroundings, cpu_s, until

MAX_LEN = 16384
PROMPT_TOKENS = 16
METHOD = "/maniple.v1.InferenceService/Generate"
GOAL = 0.10
# Little words, so that every token is text at once and none ends the output.
WORDS = tuple(f" {first}{second}" for first in "bcdfghklmnprstvw" for second in ("a", "e", "i", "o", "u", "ay", "oo"))


@dataclass(slots=True)
class Reader:
    """One client, and what it has got within the window."""

    num_tokens: int = 0
    num_messages: int = 0
    arrivals: list[float] = field(default_factory=list)

    def take(self, message: bytes) -> None:
        """Count what one message brings."""
        response = inference_pb2.GenerateResponse.FromString(message)
        if response.WhichOneof("event") == "chunk":
            self.num_messages += 1
            self.num_tokens += len(response.chunk.token_ids)
            self.arrivals.append(time.monotonic())


@dataclass(frozen=True, slots=True)
class Case:
    name: str  # "ids" or "text"
    step_ms: float
    streams: int
    in_flight: int
    stalled: int


def worker_command(socket: str) -> list[str]:
    program = str(Path(__file__).with_name("fake_worker.py"))
    return [sys.executable, program, "--listen", f"unix:{socket}", "--log-level", "warning"]


def command(case: Case, socket: str, worker: str) -> list[str]:
    options = {"step_time_s": case.step_ms / 1000, "max_position": MAX_LEN, "sampler": "numpy"}
    if case.name == "text":
        options["vocab"] = [*WORDS, "<end>"]  # type: ignore[assignment]
    flags = {
        "listen": f"unix:{socket}",
        "model": f"scripted:{json.dumps(options)}",
        "worker-addresses": f"unix:{worker}",
        "max-num-seqs": case.streams + case.stalled,
        "max-num-batched-tokens": max(2048, case.streams + case.stalled),
        "max-steps-in-flight": case.in_flight,
        "num-kv-blocks": (case.streams + case.stalled) * (MAX_LEN // 16 + 2),
        "log-level": "warning",
        "announce": "json",
    }
    flat = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "control_plane.cli.main", "control-plane", *flat]


def request_of(case: Case, number: int) -> bytes:
    prompt = random.Random(number).choices(range(len(WORDS) if case.name == "text" else 256), k=PROMPT_TOKENS)
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=prompt), skip_text=case.name == "ids")
    request.sampling.max_tokens = MAX_LEN - PROMPT_TOKENS
    request.sampling.ignore_eos = True
    request.sampling.seed = number + 1
    return request.SerializeToString()


async def read_late(call: Any, reader: Reader, resume: asyncio.Event) -> None:
    """Read the first tokens of a stream, and the others once the event is set."""
    while (message := await call.read()) is not grpc.aio.EOF:
        reader.take(message)
        if reader.num_messages == 1:
            await resume.wait()


async def steps_done(admin: Any) -> int:
    status = await admin.GetStatus(admin_pb2.GetStatusRequest())
    return int(status.groups[0].step)


async def measure(case: Case, window_s: float, surroundings: Surroundings) -> dict[str, Any]:
    socket, worker_socket = (str(surroundings.directory / f"{case.name}-{name}.sock") for name in ("door", "rank"))
    worker = surroundings.start(worker_command(worker_socket), f"{case.name}-worker")
    server = surroundings.start(command(case, socket, worker_socket), f"{case.name}-server")
    try:
        return await measure_started(case, window_s, server, worker, socket)
    except (Exception, asyncio.CancelledError):
        print(server.log_tail(), worker.log_tail(), sep="\n", file=sys.stderr)
        raise
    finally:
        await server.end()
        await worker.end()


async def measure_started(case: Case, window_s: float, server: Started, worker: Started, socket: str) -> dict[str, Any]:
    await until(lambda: server.events("ready"), 60, "readiness")
    # A window of a kilobyte: who does not read is felt by the server soon, instead of after thousands of tokens.
    small = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    channel = grpc.aio.insecure_channel(f"unix:{socket}")
    slow_channel = grpc.aio.insecure_channel(f"unix:{socket}", options=small)
    client = await FrugalClient.connect(socket)
    resume = asyncio.Event()
    readers, stalled = [Reader() for _ in range(case.streams)], [Reader() for _ in range(case.stalled)]
    tasks = []
    try:
        admin: Any = admin_pb2_grpc.AdminServiceStub(channel)
        for number, reader in enumerate(readers):
            client.call(METHOD, request_of(case, number), reader.take)
        for number, reader in enumerate(stalled, len(readers)):
            call = slow_channel.unary_stream(METHOD)(request_of(case, number))
            tasks.append(asyncio.create_task(read_late(call, reader, resume)))
        await until(lambda: all(one.num_messages for one in [*readers, *stalled]), 60, "a first token of every stream")
        await asyncio.sleep(1.0)
        pids = server.pid, worker.pid
        for one in readers:
            one.num_tokens = one.num_messages = 0
            one.arrivals.clear()
        cpu_before, steps_before, began = [cpu_s([pid]) for pid in pids], await steps_done(admin), time.monotonic()
        await asyncio.sleep(window_s)
        steps, wall_s = await steps_done(admin) - steps_before, time.monotonic() - began
        cores = [(cpu_s([pid]) - before) / wall_s for pid, before in zip(pids, cpu_before, strict=True)]
        gaps = sorted(b - a for one in readers for a, b in zip(one.arrivals, one.arrivals[1:], strict=False))
        num_tokens, num_messages = sum(r.num_tokens for r in readers), sum(r.num_messages for r in readers)
        assert not client.ended, "streams ended before their last token"
        assert not client.is_lost, "the connection was lost"
        late = [one.num_messages for one in stalled]
        told_late = [one.num_tokens for one in stalled]
        if stalled:
            resume.set()
            wanted = steps // 2
            await until(lambda: min(one.num_tokens for one in stalled) > wanted, 30, "what the stalled ones missed")
        return {
            "case": case.name,
            "step_ms": case.step_ms,
            "streams": case.streams,
            "steps_in_flight": case.in_flight,
            "stalled": case.stalled,
            "idle_share": round(1 - steps * case.step_ms / 1000 / wall_s, 4),
            "steps_per_s": round(steps / wall_s, 1),
            "tokens_per_s": round(num_tokens / wall_s),
            "messages_per_s": round(num_messages / wall_s),
            "tokens_per_message": round(num_tokens / max(num_messages, 1), 1),
            "fewest_and_most_tokens": [min(r.num_tokens for r in readers), max(r.num_tokens for r in readers)],
            "gap_ms": {
                "p50": round(statistics.median(gaps) * 1e3, 1),
                "p99": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1),
                "max": round(gaps[-1] * 1e3, 1),
            },
            "server_cores": round(cores[0], 2),
            "worker_cores": round(cores[1], 2),
            "stalled_messages": [max(late, default=0), max((r.num_messages for r in stalled), default=0)],
            "stalled_tokens": [max(told_late, default=0), max((r.num_tokens for r in stalled), default=0)],
        }
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        client.close()
        await channel.close()
        await slow_channel.close()


def table(results: list[dict[str, Any]]) -> Table:
    view = Table(title="one device behind one server", title_justify="left")
    for name in ("streams", "step", "idle", "tokens/s", "messages/s", "tokens each", "gap p50, p99, max", "CPU"):
        view.add_column(name, justify="right")
    for one in results:
        gap = one["gap_ms"]
        view.add_row(
            f"{one['streams']} of {one['case']}",
            f"{one['step_ms']:g} ms",
            f"{one['idle_share']:.1%}",
            f"{one['tokens_per_s']}",
            f"{one['messages_per_s']}",
            f"{one['tokens_per_message']}",
            f"{gap['p50']}, {gap['p99']}, {gap['max']} ms",
            f"server {one['server_cores']}, worker {one['worker_cores']}",
        )
    return view


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/idle.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", default="ids,text", help="of ids and text, default both")
    parser.add_argument("--streams", type=int, default=256, help="clients that read, default 256")
    parser.add_argument("--stalled", type=int, default=1, help="clients more that stop reading, default 1")
    parser.add_argument("--step-ms", type=float, default=0.0, help="time of a step, default 5 for ids and 10 for text")
    parser.add_argument("--in-flight", type=int, default=2, help="max_steps_in_flight, default 2")
    parser.add_argument("--window-s", type=float, default=10.0, help="how long to measure, default 10")
    return parser.parse_args()


async def main() -> None:
    arguments = parse_arguments()
    os.nice(10)
    results = []
    surroundings = Surroundings()
    try:
        for name in arguments.cases.split(","):
            step_ms = arguments.step_ms or (5.0 if name == "ids" else 10.0)
            case = Case(name, step_ms, arguments.streams, arguments.in_flight, arguments.stalled)
            results.append(await measure(case, arguments.window_s, surroundings))
    finally:
        surroundings.remove()
    Console().print(table(results))
    for one in results:
        bench = f"device idle, {one['streams']} streams of {one['case']}, steps of {one['step_ms']:g} ms"
        ours = one.pop("idle_share")
        print(
            json.dumps({"bench": bench, "ours": ours, "peer": None, "ratio": None, "goal": f"ours <= {GOAL:g}", **one})
        )


if __name__ == "__main__":
    asyncio.run(main())
