"""What does one steady step cost, apart from the model?

Every decoding row yields one token a step; everything else in that step is ours: planning it (schedule), writing the
delta (build), writing it to the ring that child processes read (send), reading, checking and applying it on the worker
(apply), and reading the result, counting it and giving every request its token (result). None of it may grow with the
context, and what the wire carries is a few bytes for the rows that cross a block boundary.

And how does a step get to several child processes on this host? Through the shared-memory ring and over a stream on a
Unix socket each, in turns, to 1, 2, 4 and 8 readers: latency until the last one has it parsed, and CPU of both ends.

Cases are measured in turns, three rounds of all; a case's figures are those of its median round, and how many times one
costs as much as another is the median of the rounds' ratios.

There is no model and no text here: sampled ids are made up. Rows are staggered, so that in every step one in block_size
begins a block. Times are microseconds, means over the steps with the 90th percentile beside them; "host" is schedule +
build + send + result, what the control plane spends on a step.

With --peer VENV the same in vLLM, installed there (see bench/README.md): its Scheduler.schedule, its message queue's
enqueue to one reader process, its Scheduler.update_from_output; three rounds of both, in turns, the median counts. Both
without detokenizer, client sockets and the model; parsing the result counts for ours and not for vLLM's.

Examples:
  python bench/steps.py                    # 1, 16, 64, 256 rows at 128 and 4096 tokens; some with others waiting
  python bench/steps.py --rows 16,64,256 --peer /tmp/vllm --readers 0
  python bench/steps.py --rows 256 --contexts 128,32000 --readers 0     # needs 3 GB for what it does not look at
  python bench/steps.py --rows 256 --contexts 128 --steps 2000
  python bench/steps.py --rows 1024 --block-size 32 --no-send --readers 0
  python bench/steps.py --rows 0 --readers 2,8 --messages 3000        # ring against stream alone

Ends with one JSON object with the same figures, and with one line of JSON for each goal.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from rich.console import Console
from rich.table import Table

from arguments import at_least_one
from broadcast import HEAD, Load, RingTransport, compare, line
from control_plane.deltas import DeltaEncoder, row_payload, step_tokens
from control_plane.generation import SamplingChoice
from control_plane.scheduling.plan import StepPlan
from control_plane.scheduling.request import Request
from control_plane.scheduling.scheduler import Scheduler, SchedulerLimits
from maniple.v1 import worker_pb2
from maniple.v1.scheduler_delta_pb2 import StepResult
from service_chassis.ids import RequestId
from worker_service.batch_state import BatchLimits, BatchState

VOCAB = 32_000
WARM_UP_STEPS = 40
PHASES = ("schedule", "build", "send", "apply", "result")


class Sender:
    """The ring to one process that reads it."""

    def __init__(self) -> None:
        self._ring = RingTransport()

    async def open(self) -> None:
        self._readers = await self._ring.open(1)

    def send(self, delta: bytes) -> None:
        self._ring.send(worker_pb2.StepsRequest(epoch=1, delta=delta))

    async def close(self) -> None:
        await self._ring.close()
        for reader in self._readers:
            await reader.communicate()


class Case:
    """A scheduler and a worker's batch state with so many rows in decode, and others waiting."""

    def __init__(self, rows: int, context: int, waiting: int, steps: int, block_size: int) -> None:
        self.rows, self.context, self.waiting = rows, context, waiting
        longest = context + steps
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

    def step(self, send: Callable[[bytes], None] | None) -> tuple[dict[str, int], int]:
        """Run one step; return nanoseconds by phase and the bytes of the delta."""
        t0 = perf_counter_ns()
        plan = self._scheduler.schedule(0.0)
        t1 = perf_counter_ns()
        assert plan is not None
        delta = self._encoder.encode(plan)
        t2 = perf_counter_ns()
        if send is not None:
            send(delta)
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
        spent = {"schedule": t1 - t0, "build": t2 - t1, "send": t3 - t2, "apply": t4 - t3, "result": t6 - t5}
        return spent, len(delta)

    def _result(self, plan: StepPlan) -> bytes:
        ids = [self._random.randrange(VOCAB - 1) for _ in plan.rows]
        return StepResult(step=plan.step, token_ids=ids).SerializeToString()


async def measure(case: Case, steps: int, send: Callable[[bytes], None] | None) -> dict[str, Any]:
    async def some(count: int) -> list[tuple[dict[str, int], int]]:
        found = []
        for _ in range(count):
            found.append(case.step(send))
            await asyncio.sleep(0)  # the ring hears what its reader has read
        return found

    await some(WARM_UP_STEPS)
    gc.collect()
    gc.freeze()  # as the servers do once they are up
    taken = await some(steps)
    gc.unfreeze()
    microseconds = {phase: [spent[phase] / 1000 for spent, _ in taken] for phase in PHASES}
    microseconds["host"] = [
        sum(parts)
        for parts in zip(*(microseconds[phase] for phase in ("schedule", "build", "send", "result")), strict=True)
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
    parser.add_argument(
        "--waiting", type=numbers, default=[10, 1000], help="more cases with so many waiting, default 10,1000; 0: none"
    )
    parser.add_argument("--steps", type=int, default=400, help="measured steps of a case, default 400")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a KV block, default 16")
    parser.add_argument("--no-send", action="store_true", help="start no reader process, write to no ring")
    parser.add_argument("--peer", default="", metavar="VENV", help="compare with vLLM in this environment")
    parser.add_argument(
        "--pairs", type=at_least_one, default=3, help="rounds of all cases in turns, and of the peer, default 3"
    )
    broadcast = parser.add_argument_group("ring against stream")
    broadcast.add_argument(
        "--readers", type=numbers, default=[1, 2, 4, 8], help="reader processes, default 1,2,4,8; 0: do not compare"
    )
    broadcast.add_argument("--messages", type=int, default=1000, help="of a round, default 1000")
    broadcast.add_argument("--message-bytes", type=int, default=200, help="of a serialized delta, default 200")
    broadcast.add_argument("--interval-ms", type=float, default=2.0, help="between messages, default 2")
    broadcast.add_argument("--rounds", type=int, default=3, help="of each transport, in turns, default 3")
    return parser.parse_args()


async def ours(
    cases: list[tuple[int, int, int]], rounds: int, arguments: argparse.Namespace, sender: Sender | None
) -> list[dict[str, Any]]:
    """Measure the cases in turns, which cancels what the machine does meanwhile; return each one's median round."""
    total = rounds * (arguments.steps + WARM_UP_STEPS) + WARM_UP_STEPS
    made = [Case(*case, total, arguments.block_size) for case in cases]
    taken: list[list[dict[str, Any]]] = [[] for _ in made]
    for _ in range(rounds):
        for case, found in zip(made, taken, strict=True):
            print(f"{case.rows} rows at {case.context} tokens, {case.waiting} waiting", file=sys.stderr)
            found.append(await measure(case, arguments.steps, sender.send if sender else None))
    results = []
    for case, found in zip(made, taken, strict=True):
        middle = sorted(found, key=lambda one: float(one["host_us"]["mean"]))[len(found) // 2]
        hosts = [one["host_us"]["mean"] for one in found]
        results.append(
            {"rows": case.rows, "context": case.context, "waiting": case.waiting, "rounds_us": hosts, **middle}
        )
    return results


def times(many: dict[str, Any], few: dict[str, Any]) -> float:
    """Return how many times as much the one costs as the other: the median of the rounds."""
    return round(statistics.median(a / b for a, b in zip(many["rounds_us"], few["rounds_us"], strict=True)), 2)


def vllms(cases: list[tuple[int, int, int]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the same cases in vLLM, by the interpreter of its environment."""
    program = Path(__file__).with_name("vllm_steps.py")
    command = [str(Path(arguments.peer) / "bin" / "python"), str(program), json.dumps(cases)]
    options = ["--steps", str(arguments.steps), "--block-size", str(arguments.block_size)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench/steps.py: vLLM's scheduler did not run: {done.stderr[-2000:]}")
    return [json.loads(one) for one in done.stdout.splitlines() if one.startswith("{")]


async def beside_peer(
    cases: list[tuple[int, int, int]], arguments: argparse.Namespace, sender: Sender | None
) -> list[dict[str, Any]]:
    """Measure both in turns; return the medians of each case's rounds and of their ratios."""
    rounds = []
    for _ in range(arguments.pairs):
        own = await ours(cases, 1, arguments, sender)
        rounds.append(list(zip(own, await asyncio.to_thread(vllms, cases, arguments), strict=True)))
    pairs = []
    for place, (rows, context, waiting) in enumerate(cases):
        found = [one[place] for one in rounds]
        pairs.append(
            {
                "rows": rows,
                "context": context,
                "waiting": waiting,
                "ours_us": statistics.median(own["host_us"]["mean"] for own, _ in found),
                "peer_us": statistics.median(peer["host_us"]["mean"] for _, peer in found),
                "ratio": round(statistics.median(p["host_us"]["mean"] / o["host_us"]["mean"] for o, p in found), 1),
                "ours_bytes": found[0][0]["delta_bytes"]["mean"],
                "peer_bytes": found[0][1]["bytes"],
            }
        )
    return pairs


def goals(results: list[dict[str, Any]], pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a line for each goal that something was measured for; ratios say how many times cheaper ours is."""
    lines: list[dict[str, Any]] = []

    def add(bench: str, ours: object, goal: str | None, peer: object = None, ratio: object = None) -> None:
        lines.append({"bench": bench, "ours": ours, "peer": peer, "ratio": ratio, "goal": goal})

    for pair in pairs:
        name = f"host cost of a step, {pair['rows']} rows at {pair['context']}, {pair['waiting']} waiting, us"
        wanted = "ratio >= 4" if pair["rows"] >= 256 else None  # fewer rows leave less to save
        add(name, pair["ours_us"], wanted, pair["peer_us"], pair["ratio"])
    steady = [one for one in results if not one["waiting"]]
    if not steady:
        return lines
    most_rows = max(one["rows"] for one in steady)
    most = [one for one in steady if one["rows"] == most_rows]
    peer_bytes = {(pair["rows"], pair["context"]): pair["peer_bytes"] for pair in pairs}
    for one in most:
        size, peer = one["delta_bytes"]["max"], peer_bytes.get((one["rows"], one["context"]))
        ratio = round(peer / size, 1) if peer else None
        add(f"bytes of a delta, {one['rows']} rows at {one['context']}, largest", size, "ours <= 400", peer, ratio)
    if len(most) > 1:
        short, *_, long = sorted(most, key=lambda one: int(one["context"]))
        name = f"step at {long['context']} / step at {short['context']}, {most_rows} rows"
        add(name, times(long, short), "ours <= 1.2")
    queues = sorted((one for one in results if one["waiting"]), key=lambda one: int(one["waiting"]))
    if len(queues) > 1:
        few, *_, many = queues
        name = f"step with {many['waiting']} waiting / with {few['waiting']}, {most_rows} rows"
        add(name, times(many, few), "ours <= 1.1")
    return lines


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


async def measure_all(
    cases: list[tuple[int, int, int]], arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure every case, and beside the peer if there is one."""
    sender = Sender() if cases and not arguments.no_send else None
    if sender:
        await sender.open()
    try:
        results = await ours(cases, arguments.pairs, arguments, sender)
        pairs = await beside_peer(cases, arguments, sender) if arguments.peer else []
    finally:
        if sender:
            await sender.close()
    return results, pairs


def main() -> None:
    arguments = parse_arguments()
    cases = [(rows, context, 0) for rows in arguments.rows for context in arguments.contexts]
    if arguments.waiting and arguments.rows:
        cases += [(max(arguments.rows), min(arguments.contexts), waiting) for waiting in arguments.waiting]
    console = Console()
    results, pairs = asyncio.run(measure_all(cases, arguments))
    if results:
        console.print(table(results))
    for pair in pairs:
        print(
            f"{pair['rows']} rows at {pair['context']}, {pair['waiting']} waiting: ours {pair['ours_us']:.0f} us and "
            f"{pair['ours_bytes']} bytes, vLLM {pair['peer_us']:.0f} us and {pair['peer_bytes']} bytes"
        )
    rows = compare_transports(arguments) if arguments.readers else []
    broadcast = {"message_bytes": arguments.message_bytes, "interval_ms": arguments.interval_ms, "rows": rows}
    result = {"bench": "steps", "steps": arguments.steps, "block_size": arguments.block_size, "cases": results}
    print(json.dumps(result | {"broadcast": broadcast, "beside_vllm": pairs}))
    for goal in goals(results, pairs):
        print(json.dumps(goal))


if __name__ == "__main__":
    main()
