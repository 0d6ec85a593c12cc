"""How much can one control-plane process feed, what breaks first, and do more of them feed more?

First one process alone: 1, 8 and 64 groups whose ranks live in it, answer a step after --step-ms and compute nothing
(`bench/fake_groups.py`), and 10 to 10 000 live requests over all groups, each read by a task, without sockets. It keeps
up as long as the groups make as many steps as their time allows. What it costs is processor time per token; what breaks
first shows in the figures beside: steps that come late, or readers that get their tokens late.

Then control planes as people run them, each in a process of its own, over the same worker processes
(`bench/fake_worker.py`): one that has all groups, and as many as there are groups, each of which claims one
(--max-groups 1), in turns. Clients read text over Unix sockets (`bench/frugal_client.py`) and have stop strings. All of
them share this machine, so on two cores two control planes cannot be twice as quick: workers and clients need a part.

Examples:
  python bench/scale.py
  python bench/scale.py --groups 1,8 --live 100,1000 --step-ms 5 --claimed-groups 0
  python bench/scale.py --groups "" --claimed-groups 2

Ends with one line of JSON for each case; those of several processes have a goal.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table

from arguments import at_least_one
from control_plane.assembly import build_engine
from control_plane.config import ControlPlaneConfig, resolve_auto
from control_plane.fleet import Fleet
from control_plane.generation import Chunk, Generation, SamplingChoice, TextChoice
from control_plane.group.settings import GroupSettings
from control_plane.group.worker_group import WorkerGroup
from control_plane.text.tokenizer import Tokenizer
from fake_groups import MAX_LEN, FakeGroup
from frugal_client import FrugalClient
from goals import Figure, at_least, line_of
from idle import WORDS
from maniple.v1 import inference_pb2
from processes import Started, Surroundings, cpu_s, until
from service_chassis.ids import RequestId

BLOCK_SIZE = 16
PROMPT_TOKENS = 8
ONE_IN = 8  # streams whose tokens are counted where clients share the machine; all of them get as many
KEEPS_UP = 0.95  # of the steps that the ranks' time allows


@dataclass(slots=True)
class Readers:
    """What all clients of a case have got."""

    num_tokens: int = 0
    num_messages: int = 0
    gaps: list[float] = field(default_factory=list)

    def note(self, num_tokens: int, gap_s: float) -> None:
        self.num_messages += 1
        self.num_tokens += num_tokens
        self.gaps.append(gap_s)


async def read(fleet: Fleet, number: int, with_text: bool, readers: Readers) -> None:
    generation = Generation(
        request_id=RequestId(f"r{number}"),
        prompt_token_ids=tuple((number * 31 + place) % 256 for place in range(PROMPT_TOKENS)),
        sampling=SamplingChoice(temperature=0.0, max_tokens=MAX_LEN - PROMPT_TOKENS - 1, seed=number),
        text=TextChoice(skip_text=not with_text),
    )
    last = time.monotonic()
    async for event in await fleet.generate(generation):
        if isinstance(event, Chunk):
            now = time.monotonic()
            readers.note(len(event.token_ids), now - last)
            last = now


async def run_here(num_groups: int, live: int, step_s: float, with_text: bool, window_s: float) -> dict[str, Any]:
    """Run one case in this process."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    tokenizer = Tokenizer.for_scripted()
    rows = -(-live // num_groups)
    num_blocks = rows * (2 + int((window_s + 30) / max(step_s, 0.001) / BLOCK_SIZE)) + 1
    asked = ControlPlaneConfig(
        model="scripted",
        executor="uni",
        max_num_seqs=max(rows, 1),
        max_num_batched_tokens=max(rows * (PROMPT_TOKENS + 1), 512),
        max_num_waiting=max(live, 1),
        num_kv_blocks=num_blocks,
        heartbeat_timeout_s=60.0,
        step_timeout_s=60.0,
    )
    config = resolve_auto(asked, has_gpu=False, on_terminal=False)
    settings = GroupSettings(
        model="fake",
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        block_size=BLOCK_SIZE,
        num_kv_blocks=num_blocks,
        heartbeat_timeout_s=60.0,
        step_timeout_s=60.0,
    )
    fleet, fakes, loops, groups = Fleet(), [FakeGroup(step_s) for _ in range(num_groups)], [], []
    fleet.expect([str(index) for index in range(num_groups)])
    for index, fake in enumerate(fakes):
        group = WorkerGroup(fake, settings, owner_id="bench")
        facts = await group.form()
        engine = build_engine(config, group, facts, tokenizer, fleet.ids)
        loops.append(asyncio.create_task(engine.run()))
        fleet.take(engine, str(index))
        groups.append(group)
    readers = Readers()
    tasks = [asyncio.create_task(read(fleet, number, with_text, readers)) for number in range(live)]
    await until(lambda: readers.num_tokens > 2 * live or any(task.done() for task in tasks), 120, "tokens")
    gc.collect()
    gc.freeze()
    await asyncio.sleep(1.0)
    readers.num_tokens = readers.num_messages = 0
    readers.gaps.clear()
    steps_before, cpu_before, began = sum(fake.num_steps for fake in fakes), time.process_time(), time.monotonic()
    await asyncio.sleep(window_s)
    wall_s, cpu_s = time.monotonic() - began, time.process_time() - cpu_before
    steps = sum(fake.num_steps for fake in fakes) - steps_before
    gaps = sorted(readers.gaps)
    failed = [task for task in tasks if task.done()]
    for task in (*tasks, *loops):
        task.cancel()
    await asyncio.gather(*tasks, *loops, return_exceptions=True)
    for group in groups:
        await group.teardown("the case is over")
    wanted = min(num_groups, live) * wall_s / step_s  # where nobody has a request nothing is computed
    return {
        "groups": num_groups,
        "live": live,
        "step_ms": step_s * 1e3,
        "tokens_per_s": round(readers.num_tokens / wall_s),
        "steps_share": round(steps / wanted, 3),
        "cores": round(cpu_s / wall_s, 2),
        "cpu_us_per_token": round(cpu_s * 1e6 / max(readers.num_tokens, 1), 1),
        "tokens_per_message": round(readers.num_tokens / max(readers.num_messages, 1), 1),
        "gap_p50_ms": round(gaps[len(gaps) // 2] * 1e3, 1) if gaps else None,
        "gap_p99_ms": round(gaps[int(len(gaps) * 0.99)] * 1e3, 1) if gaps else None,
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "failed": len(failed),
    }


def run_apart(arguments: argparse.Namespace, num_groups: int, live: int) -> dict[str, Any]:
    """Run one case in a process of its own, so that none inherits memory of another."""
    words = [
        str(num_groups),
        str(live),
        str(arguments.step_ms / 1e3),
        str(int(arguments.text)),
        str(arguments.window_s),
    ]
    done = subprocess.run([sys.executable, __file__, "--one", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bench/scale.py: {num_groups} groups, {live} live: {done.stderr[-2000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# Control planes that claim groups


async def run_claiming(num_planes: int, num_groups: int, rows: int, step_ms: float, window_s: float) -> dict[str, Any]:
    """Run some control planes over some groups of one rank each; return what their clients got together."""
    surroundings = Surroundings()
    started: list[Started] = []
    try:
        workers = [str(surroundings.directory / f"rank{index}.sock") for index in range(num_groups)]
        doors = [str(surroundings.directory / f"door{index}.sock") for index in range(num_planes)]
        program = str(Path(__file__).with_name("fake_worker.py"))
        for index, socket in enumerate(workers):
            words = [sys.executable, program, "--listen", f"unix:{socket}", "--log-level", "warning"]
            started.append(surroundings.start(words, f"rank{index}"))
        planes = [
            surroundings.start(_plane_words(door, workers, num_planes, rows, step_ms), f"plane{index}")
            for index, door in enumerate(doors)
        ]
        started = [*planes, *started]
        for plane in planes:
            await until(lambda plane=plane: plane.events("ready"), 60, "a group for every control plane")
        readers = Readers()
        clients = [await FrugalClient.connect(door) for door in doors]
        for client in clients:
            for number in range(rows * num_groups // num_planes):
                on_message = _counting(readers) if number % ONE_IN == 0 else _dropping(readers)
                client.call("/maniple.v1.InferenceService/Generate", _request(number), on_message)
        await until(lambda: readers.num_messages > rows * num_groups, 60, "tokens of every stream")
        await asyncio.sleep(1.5)
        readers.num_tokens = 0
        cpu_before, began = [cpu_s([plane.pid]) for plane in planes], time.monotonic()
        await asyncio.sleep(window_s)
        wall_s = time.monotonic() - began
        cores = [(cpu_s([plane.pid]) - before) / wall_s for plane, before in zip(planes, cpu_before, strict=True)]
        num_tokens = readers.num_tokens * ONE_IN
        assert not any(client.ended or client.is_lost for client in clients), "streams ended early"
        for client in clients:
            client.close()
        return {
            "planes": num_planes,
            "groups": num_groups,
            "live": rows * num_groups,
            "step_ms": step_ms,
            "tokens_per_s": round(num_tokens / wall_s),
            "tokens_share": round(num_tokens / wall_s / (rows * num_groups * 1e3 / step_ms), 3),
            "cores": [round(one, 2) for one in cores],
        }
    except (Exception, asyncio.CancelledError):
        for one in started:
            print(one.log_tail(5), file=sys.stderr)
        raise
    finally:
        for one in started:
            await one.end()
        surroundings.remove()


def _plane_words(door: str, workers: list[str], num_planes: int, rows: int, step_ms: float) -> list[str]:
    options = {"step_time_s": step_ms / 1e3, "max_position": 16384, "sampler": "numpy", "vocab": [*WORDS, "<end>"]}
    flags = {
        "listen": f"unix:{door}",
        "model": f"scripted:{json.dumps(options)}",
        "worker-addresses": ";".join(f"unix:{worker}" for worker in workers),
        "max-groups": len(workers) // num_planes,
        "max-num-seqs": rows,
        "max-num-batched-tokens": max(2048, rows),
        "num-kv-blocks": rows * (16384 // BLOCK_SIZE + 2),
        "log-level": "warning",
        "announce": "json",
    }
    flat = [text for name, value in flags.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "control_plane.cli.main", "control-plane", *flat]


def _request(number: int) -> bytes:
    ids = [(number * 31 + place) % len(WORDS) for place in range(PROMPT_TOKENS)]
    request = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=ids))
    request.sampling.max_tokens = 16000
    request.sampling.ignore_eos = True
    request.sampling.stop.extend(f"stop {number}" for number in range(4))  # as chats have; none of them comes
    return request.SerializeToString()


def _counting(readers: Readers) -> Any:
    def take(message: bytes) -> None:
        response = inference_pb2.GenerateResponse.FromString(message)
        readers.num_messages += 1
        readers.num_tokens += len(response.chunk.token_ids)

    return take


def _dropping(readers: Readers) -> Any:
    def take(message: bytes) -> None:
        readers.num_messages += 1

    return take


# For people


def table(results: list[dict[str, Any]]) -> Table:
    view = Table(title="one control-plane process", title_justify="left")
    for name in ("groups", "live", "tokens/s", "steps made", "cores", "us/token", "gap p50, p99 ms", "RSS MB"):
        view.add_column(name, justify="right")
    for one in results:
        view.add_row(
            str(one["groups"]),
            str(one["live"]),
            str(one["tokens_per_s"]),
            f"{one['steps_share']:.0%}",
            str(one["cores"]),
            str(one["cpu_us_per_token"]),
            f"{one['gap_p50_ms']}, {one['gap_p99_ms']}",
            str(one["rss_mb"]),
        )
    return view


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/scale.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=numbers, default=[1, 8, 64], help='default 1,8,64; "": none')
    parser.add_argument("--live", type=numbers, default=[10, 100, 1000, 10000], help="default 10,100,1000,10000")
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a step, default 20")
    parser.add_argument("--text", action="store_true", help="with text instead of ids alone")
    parser.add_argument("--window-s", type=float, default=3.0, help="how long to measure, default 3")
    parser.add_argument(
        "--claimed-groups",
        type=int,
        default=2,
        help="groups, and control planes that claim one each; default 2, 0: none",
    )
    parser.add_argument("--pairs", type=at_least_one, default=3, help="of one control plane and several, default 3")
    parser.add_argument("--claimed-rows", type=int, default=256, help="streams of each of those, default 256")
    parser.add_argument("--claimed-step-ms", type=float, default=5.0, help="time of their steps, default 5")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    return parser.parse_args()


def claiming_line(num_groups: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure one control plane and several in turns, and return the line of their pairs."""
    runs: dict[int, list[dict[str, Any]]] = {1: [], num_groups: []}
    for pair in range(arguments.pairs):
        for planes in (1, num_groups) if pair % 2 == 0 else (num_groups, 1):
            case = run_claiming(
                planes, num_groups, arguments.claimed_rows, arguments.claimed_step_ms, arguments.window_s
            )
            runs[planes].append(asyncio.run(case))
            one = runs[planes][-1]
            print(f"{num_groups} groups, {planes} control planes: {one['tokens_per_s']} tokens/s, cores {one['cores']}")
    pairs = [
        (float(apart["tokens_per_s"]), float(alone["tokens_per_s"]))
        for apart, alone in zip(runs[num_groups], runs[1], strict=True)
    ]
    bench = f"tokens/s of {num_groups} control planes that claim a group each / of one that has them all"
    figure = Figure(path="tokens_per_s", unit="tokens/s", goal=at_least(1.2))
    return line_of(bench, figure, pairs, {"alone": runs[1], "apart": runs[num_groups]})


def main() -> None:
    arguments = parse_arguments()
    if arguments.one:
        groups, live, step_s, with_text, window_s = arguments.one
        case = run_here(int(groups), int(live), float(step_s), with_text == "1", float(window_s))
        print(json.dumps(asyncio.run(case)))
        return
    results = []
    for num_groups in arguments.groups:
        for live in arguments.live:
            print(f"{num_groups} groups, {live} live", file=sys.stderr)
            results.append(run_apart(arguments, num_groups, live))
    if results:
        Console().print(table(results))
    lines = []
    for one in results:
        bench = f"control plane, {one['groups']} groups, {one['live']} live, steps of {one['step_ms']:g} ms: share made"
        lines.append({"bench": bench, "ours": one["steps_share"], "peer": None, "ratio": None, "goal": None, **one})
    if (num_groups := arguments.claimed_groups) > 1:
        lines.append(claiming_line(num_groups, arguments))
    for line in lines:
        print(json.dumps(line))


if __name__ == "__main__":
    main()
