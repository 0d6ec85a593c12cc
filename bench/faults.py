"""What do clients and operators notice of a fault, and for how long? See bench/README.md.

Each case starts a server with eight running streams, hurts it, and measures from outside: by the clients' own clocks,
the health service, and the process table. Worst of all repetitions. Prints a table, and as its last line one JSON
object. Exit code 1 where a limit was missed or a stream did not end as it must.

Examples:
  python bench/faults.py                                           # the demo model on 3 ranks, 10 repetitions
  python bench/faults.py --quick                                   # scripted, one repetition, in a minute
  python bench/faults.py --cases rank-killed control-plane-killed --repetitions 3
  python bench/faults.py --model ./split-by-2 --ranks 2 --peer "/tmp/vllm/bin/vllm serve ./split-by-2 -tp 2"
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from cycles import run_cycles
from fault_cases import CASES, Case, Measured, Settings
from processes import Surroundings, until

CYCLES = "cycles"
SLUGS = {case.name.replace(" ", "-"): case for case in CASES}
QUICK_MODEL = 'scripted:{"step_time_s": 0.02}'


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/faults.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo", help="what is served, default demo; faults inside a step: scripted")
    parser.add_argument("--ranks", type=int, default=3, help="default 3, by which the demo model splits")
    parser.add_argument("--repetitions", type=int, default=10, help="of each case, default 10")
    parser.add_argument("--cases", nargs="+", choices=[*SLUGS, CYCLES], help="default: all")
    parser.add_argument("--num-cycles", type=int, default=50, help="starts and stops of the case cycles, default 50")
    parser.add_argument("--heartbeat-timeout-s", type=float, default=5.0, help="of the server, default 5")
    parser.add_argument("--step-timeout-s", type=float, default=10.0, help="of the server, default 10")
    parser.add_argument("--lease-s", type=float, default=3.0, help="of the server, default 3")
    parser.add_argument("--peer", default="", metavar="COMMAND", help="start vLLM, and do to it what can be done")
    parser.add_argument("--vocab-size", type=int, default=0, help="ids of the model, default: the demo model's 49152")
    parser.add_argument("--quick", action="store_true", help="scripted, one repetition, short times, 4 cycles")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        short = {"heartbeat_timeout_s": 2.0, "step_timeout_s": 1.0, "lease_s": 2.0}
        parser.set_defaults(model=QUICK_MODEL, repetitions=1, num_cycles=4, **short)
        arguments = parser.parse_args(argv)
    return arguments


async def run_case(case: Case, settings: Settings, repetitions: int) -> dict[str, Any]:
    """Run one case so many times, each in surroundings of its own; return its figures."""
    taken: list[Measured] = []
    for repetition in range(repetitions):
        around = Surroundings()
        try:
            measured = await case.run(around, settings, repetition)
            measured.wrong += await left_after(around)
        except (TimeoutError, RuntimeError, OSError) as error:
            measured = Measured(wrong=[f"{type(error).__name__}: {error}"])
        finally:
            around.remove()
        taken.append(measured)
        shown = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in measured.seconds.items())
        print(f"{case.name} {repetition + 1}/{repetitions}: {'; '.join([shown, *measured.wrong])}", file=sys.stderr)
    limits = case.limits(settings)
    names = dict.fromkeys([*limits, *(name for measured in taken for name in measured.seconds)])
    figures = []
    for name in names:
        values = [measured.seconds[name] for measured in taken if name in measured.seconds]
        figures.append(
            {
                "name": name,
                "worst_s": round(max(values), 4) if values else None,
                "limit_s": limits.get(name),
                "values_s": [round(value, 4) for value in values],
            }
        )
    wrong = sorted({sentence for measured in taken for sentence in measured.wrong})
    return {"case": case.name, "repetitions": repetitions, "figures": figures, "wrong": wrong}


async def left_after(around: Surroundings) -> list[str]:
    """Say what is left of a server that has ended."""
    with suppress(TimeoutError):
        await until(lambda: not any(around.left().values()), 2.0, "nothing", every_s=0.05)
    return [f"{kind} left: {len(what)}, such as {what[0]}" for kind, what in around.left().items() if what]


def is_missed(result: dict[str, Any]) -> bool:
    """Whether a case took too long, or went otherwise than it must."""
    late = [
        figure
        for figure in result["figures"]
        if figure["limit_s"] is not None and (figure["worst_s"] is None or figure["worst_s"] > figure["limit_s"])
    ]
    return bool(late or result["wrong"])


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return the figures for people."""
    head = f"{'fault':<24}{'measured':<26}{'worst':>10}{'limit':>10}"
    lines = [head, "-" * len(head)]
    for result in results:
        for number, figure in enumerate(result["figures"]):
            unit = figure.get("unit", "s")
            worst, limit = (
                "-" if value is None else f"{value:.3f} {unit}" if unit == "s" else f"{value} {unit}"
                for value in (figure["worst_s"], figure["limit_s"])
            )
            lines.append(f"{result['case'] if number == 0 else '':<24}{figure['name']:<26}{worst:>10}{limit:>10}")
        lines += [f"{'':<24}! {sentence}" for sentence in result["wrong"]]
    return "\n".join(lines)


async def bench(arguments: argparse.Namespace) -> dict[str, Any]:
    scripted = arguments.model.startswith("scripted")
    settings = Settings(
        model=arguments.model,
        ranks=arguments.ranks,
        vocab_size=arguments.vocab_size or (256 if scripted else 49152),
        heartbeat_timeout_s=arguments.heartbeat_timeout_s,
        step_timeout_s=arguments.step_timeout_s,
        lease_s=arguments.lease_s,
        peer=arguments.peer,
    )
    wanted = arguments.cases or [*(slug for slug, case in SLUGS.items() if case.for_peer or not settings.peer)]
    if arguments.cases is None and not settings.peer:
        wanted.append(CYCLES)
    results = []
    for slug in wanted:
        if slug == CYCLES:
            results.append(await run_cycles(arguments.num_cycles, arguments.ranks))
        else:
            results.append(await run_case(SLUGS[slug], settings, arguments.repetitions))
    return {
        "bench": "faults",
        "server": "vllm" if settings.peer else "maniple",
        "model": arguments.model,
        "ranks": arguments.ranks,
        "heartbeat_timeout_s": arguments.heartbeat_timeout_s,
        "step_timeout_s": arguments.step_timeout_s,
        "lease_s": arguments.lease_s,
        "cases": results,
    }


def main() -> int:
    result = asyncio.run(bench(parse_arguments()))
    print(table(result["cases"]))
    print(json.dumps(result))
    return 1 if any(map(is_missed, result["cases"])) else 0


if __name__ == "__main__":
    sys.exit(main())
