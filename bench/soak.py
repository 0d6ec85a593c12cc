"""Random faults under constant random traffic: is every stream accounted for? See bench/README.md.

Two groups of two scripted ranks, two control planes over both (one of them a spare at times), eight clients that send
one random request after another: greedy and seeded, several samples, stops, short deadlines, cancelled, aborted.
Meanwhile ranks and control planes are killed, stopped, handed over and started again, and connections are dropped.

A stream must end once: with all of its tokens, each as the model's definition has it; or with a status that fits what
happened, after tokens that are the head of the right ones. In the end the faults stop, and everything must be free and
work. Prints a table, and as its last line one JSON object. Exit code 1 if a stream is not accounted for.

Examples:
  python bench/soak.py                       # ten minutes
  python bench/soak.py --duration-s 60 --seed 7
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from maniple_client import (
    Aborted,
    Cancelled,
    DataLoss,
    DeadlineExceeded,
    ManipleError,
    NotFound,
    TransportLost,
    Unavailable,
)
from soak_traffic import Request, Traffic
from soak_world import World

# How long a fault may explain a status: the client's 30 s of trying to resume, and what the fault itself takes.
_MEMORY_S = 45.0
_RANK = ("rank killed", "worker connections dropped", "rank stopped for a moment")
_CONTROL_PLANE = ("control plane killed", "control plane handed over", "control plane stopped")
_CLIENT = ("client connections dropped",)


def judge_by(world: World) -> Any:
    """Return what says whether a status fits a request and what happened; an empty string if it does."""

    def judge(request: Request, error: ManipleError, now: float) -> str:
        def needs(*faults: str) -> str:
            return "" if world.happened(_MEMORY_S, *faults) else f"none of {', '.join(faults)} happened"

        match error:
            case DeadlineExceeded():
                return "" if request.deadline_s is not None else "it had no deadline"
            case Unavailable():  # not ready, or lost before it started
                return needs(*_RANK, *_CONTROL_PLANE)
            case Aborted(reason="GROUP_LOST"):
                return needs("rank killed")
            case DataLoss():
                return needs("rank killed")
            case Aborted(reason="TAKEN_OVER"):
                return needs(*_CONTROL_PLANE)
            case TransportLost():  # before it started, so that nobody knows whether it ran
                return needs(*_CONTROL_PLANE, *_CLIENT)
            case Cancelled():  # its connection broke, and it was not to wait for another one
                return "it was to be kept for its client" if request.detach_grace_s else needs(*_CLIENT)
            case NotFound():  # the same, seen later; or it was known to a lost group alone
                return needs("rank killed", *(() if request.detach_grace_s else _CLIENT))
        return "no fault explains that"

    return judge


async def soak(duration_s: float, seed: int, num_clients: int, mean_pause_s: float) -> dict[str, Any]:
    source = random.Random(seed)
    world = World(source)
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    began = time.monotonic()
    traffic = None
    left: dict[str, list[str]] = {}
    try:
        client = await world.start()
        async with client:
            traffic = Traffic(client, judge_by(world), num_clients=num_clients, seed=seed + 1)
            began = time.monotonic()
            while (now := time.monotonic()) < began + duration_s:
                await asyncio.sleep(min(source.expovariate(1 / mean_pause_s), began + duration_s - now))
                counts[await world.one_fault()] += 1
            await traffic.end()
            if why := await world.is_empty():
                wrong.append(f"not empty after all streams ended: {why}")
            else:
                wrong += await traffic.all_finish(10)
                if why := await world.is_empty():
                    wrong.append(f"not empty in the end: {why}")
    finally:
        left = await world.close()
        failed = wrong or (traffic and traffic.wrong)
        if not failed:
            world.around.remove()
        else:
            print(f"logs: {world.around.directory}", file=sys.stderr)
    wrong += [f"{kind} left: {what}" for kind, what in left.items() if what]
    assert traffic is not None
    return {
        "bench": "soak",
        "seed": seed,
        "duration_s": round(time.monotonic() - began, 1),
        "faults": dict(counts.most_common()),
        "restarts": dict(world.restarts),
        "num_requests": traffic.num_started,
        "num_tokens": traffic.num_tokens,
        "outcomes": dict(traffic.outcomes.most_common()),
        "num_unaccounted": traffic.num_started - sum(traffic.outcomes.values()),
        "wrong": [*traffic.wrong, *wrong],
    }


def table(result: dict[str, Any]) -> str:
    """Return the figures for people."""
    lines = [
        f"{result['num_requests']} requests and {result['num_tokens']} tokens in {result['duration_s']:.0f} s, seed "
        f"{result['seed']}; {result['num_unaccounted']} streams not accounted for, {len(result['wrong'])} things wrong"
    ]
    for title, counts in (("fault", result["faults"]), ("how streams ended", result["outcomes"])):
        lines += [
            "",
            f"{title:<36}{'times':>8}",
            "-" * 44,
            *(f"{name:<36}{count:>8}" for name, count in counts.items()),
        ]
    return "\n".join([*lines, *(f"! {sentence}" for sentence in result["wrong"][:30])])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench/soak.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--duration-s", type=float, default=600.0, help="of faults, default 600")
    parser.add_argument("--seed", type=int, default=1, help="of requests and faults, default 1")
    parser.add_argument("--clients", type=int, default=8, help="default 8")
    parser.add_argument("--mean-pause-s", type=float, default=4.0, help="between faults, default 4")
    arguments = parser.parse_args()
    result = asyncio.run(soak(arguments.duration_s, arguments.seed, arguments.clients, arguments.mean_pause_s))
    print(table(result))
    print(json.dumps(result))
    return 1 if result["wrong"] or result["num_unaccounted"] else 0


if __name__ == "__main__":
    sys.exit(main())
