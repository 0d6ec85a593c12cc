"""How fast is a server, and how fast is its peer? Latency and throughput under the same load, see bench/README.md.

Prints a table, and as its last line one JSON object. Exit code 1 if a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from arguments import at_least_one
from doors import KINDS, make_door
from load import Door, Length, make_prompts, run_closed, run_open
from report import compare, summarize, table
from servers import wait_until_ready

OURS, PEER = "ours", "peer"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    server = made.add_argument_group("servers")
    server.add_argument("--door", choices=KINDS, default="maniple", help="how to reach it")
    server.add_argument("--url", default="127.0.0.1:50051", help="where it listens")
    server.add_argument("--start", metavar="COMMAND", help="start the server with this command, and stop it at the end")
    server.add_argument("--peer", metavar="URL", help="measure this server too, in turns")
    server.add_argument("--peer-door", choices=KINDS, default="openai", help="how to reach it")
    server.add_argument("--start-peer", metavar="COMMAND", help="start the peer with this command")
    server.add_argument("--model", default="", help="model name for --door openai; empty: the first one served")
    server.add_argument("--vocab-size", type=int, default=49152, help="number of ids, where the server does not tell")
    server.add_argument("--ready-timeout-s", type=float, default=600.0, help="for a server to answer")
    load = made.add_argument_group("load")
    rhythm = load.add_mutually_exclusive_group()
    rhythm.add_argument("--concurrency", type=int, default=32, help="closed loop: requests at once")
    rhythm.add_argument("--rate", type=float, help="open loop: requests per second, Poisson")
    load.add_argument("--num-requests", type=int, default=64, help="per run")
    load.add_argument("--input-len", type=Length.read, default=Length(128, 128), help="tokens, N or LOW:HIGH")
    load.add_argument("--output-len", type=Length.read, default=Length(128, 128), help="tokens, N or LOW:HIGH")
    load.add_argument("--seed", type=int, default=0, help="of lengths, ids and arrivals")
    load.add_argument("--warmup", type=int, default=4, help="requests before the first run, not counted")
    load.add_argument("--runs", type=at_least_one, default=1, help="runs, or pairs of runs with a peer")
    return made


@contextmanager
def started(command: str | None, name: str) -> Iterator[subprocess.Popen[bytes] | None]:
    """Run ``command`` while the block lasts, in a process group of its own; what it prints goes to a log file."""
    if command is None:
        yield None
        return
    log = f"/tmp/bench-{name}-{os.getpid()}.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(shlex.split(command), stdout=out, stderr=out, start_new_session=True)
    print(f"started {name}: {command} (log: {log})", file=sys.stderr)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


async def measure(door: Door, name: str, arguments: argparse.Namespace, vocab_size: int, run: int) -> dict[str, Any]:
    """Send one run's load and return its figures. Each run has prompts of its own, the same for both servers."""
    prompts = make_prompts(
        arguments.num_requests,
        arguments.input_len,
        arguments.output_len,
        vocab_size,
        arguments.seed * 1000 + run,
        arguments.rate,
    )
    began = time.perf_counter()
    if arguments.rate:
        outcomes = await run_open(door, prompts)
    else:
        outcomes = await run_closed(door, prompts, arguments.concurrency)
    return summarize(name, outcomes, time.perf_counter() - began)


async def bench(arguments: argparse.Namespace, processes: Sequence[subprocess.Popen[bytes] | None]) -> dict[str, Any]:
    sides = [(f"{OURS} ({arguments.door})", arguments.door, arguments.url)]
    if arguments.peer:
        sides.append((f"{PEER} ({arguments.peer_door})", arguments.peer_door, arguments.peer))
    runs: list[dict[str, Any]] = []
    doors: list[tuple[str, Door, int]] = []
    try:
        for (name, kind, url), process in zip(sides, processes, strict=True):
            door = await make_door(kind, url, arguments.model, arguments.vocab_size).__aenter__()
            exit_code = process.poll if process else lambda: None
            vocab_size = await wait_until_ready(door, exit_code, arguments.ready_timeout_s)
            doors.append((name, door, vocab_size))
            if arguments.warmup:
                output_len = Length(8, 8)
                warm = make_prompts(arguments.warmup, arguments.input_len, output_len, vocab_size, -1, None)
                await run_closed(door, warm, arguments.warmup)
        for run in range(arguments.runs):
            # Whoever goes first goes second next time: a machine that warms up or throttles favours nobody.
            for name, door, vocab_size in doors if run % 2 == 0 else doors[::-1]:
                runs.append(await measure(door, name, arguments, vocab_size, run))
                print(f"run {run + 1}, {name}: {runs[-1]['output_tokens_per_s']:.1f} tokens/s", file=sys.stderr)
    finally:
        for _, door, _ in doors:
            await door.__aexit__(None, None, None)
    rhythm = f"rate={arguments.rate:g}/s" if arguments.rate else f"concurrency={arguments.concurrency}"
    result: dict[str, Any] = {
        "bench": "serve",
        "load": f"{rhythm} {arguments.num_requests} x {arguments.input_len}->{arguments.output_len}",
        "runs": runs,
    }
    if arguments.peer:
        result |= compare(runs, sides[0][0], sides[1][0])
    return result


def main() -> int:
    arguments = parser().parse_args()
    with started(arguments.start, OURS) as ours, started(arguments.start_peer, PEER) as peer:
        try:
            result = asyncio.run(bench(arguments, [ours, peer] if arguments.peer else [ours]))
        except RuntimeError as error:
            raise SystemExit(f"a server cannot be measured: {error}") from error
    print(result["load"])
    print(table(result["runs"]))
    if "median_ratio" in result:
        print(f"output tokens/s, ours over peer: {result['ratios']}, median {result['median_ratio']}")
    print(json.dumps(result))
    return 1 if any(run["num_failed"] for run in result["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
