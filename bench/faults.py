"""What do clients and operators notice of a fault, and for how long? See bench/README.md.

Each case starts a server with eight running streams, hurts it, and measures from outside: by the clients' own clocks,
the health service, and the process table. Worst of all repetitions. Prints a table, and as its last line one JSON
object. Exit code 1 where a limit was missed or a stream did not end as it must.

Examples:
  python bench/faults.py                                           # the demo model on 3 ranks, 10 repetitions
  python bench/faults.py --quick                                   # scripted, one repetition, in a minute
  python bench/faults.py --cases rank-killed control-plane-killed --repetitions 3
  python bench/faults.py --peer /tmp/vllm                          # 2 ranks of a random model, 10 times; vLLM, 3 times
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from cycles import run_cycles
from fault_cases import CASES, HANG_S, Case, Measured, Settings
from processes import Surroundings, until

CYCLES = "cycles"
SLUGS = {case.name.replace(" ", "-"): case for case in CASES}
QUICK_MODEL = 'scripted:{"step_time_s": 0.02}'
# What the peer runs on: no more memory and threads than our ranks take beside each other.
PEER_ENVIRONMENT = ("VLLM_CPU_KVCACHE_SPACE=1", "VLLM_CPU_OMP_THREADS_BIND=nobind", "OMP_NUM_THREADS=1")
PEER_FLAGS = ("--enforce-eager", "--dtype", "float32", "--max-model-len", "2200")


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/faults.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="what is served, default demo, beside a peer a random one; faults inside a step: scripted"
    )
    parser.add_argument("--ranks", type=int, help="default 3, by which the demo model splits; beside a peer 2")
    parser.add_argument("--repetitions", type=int, default=10, help="of each case, default 10")
    parser.add_argument("--cases", nargs="+", choices=[*SLUGS, CYCLES], help="default: all")
    parser.add_argument("--num-cycles", type=int, default=50, help="starts and stops of the case cycles, default 50")
    parser.add_argument("--heartbeat-timeout-s", type=float, default=5.0, help="of the server, default 5")
    parser.add_argument("--step-timeout-s", type=float, default=10.0, help="of the server, default 10")
    parser.add_argument("--lease-s", type=float, default=3.0, help="of the server, default 3")
    parser.add_argument(
        "--peer", type=Path, metavar="VENV", help="vLLM's environment: do to it, too, what can be done to both"
    )
    parser.add_argument("--peer-repetitions", type=int, default=3, help="of each case, default 3")
    parser.add_argument("--vocab-size", type=int, default=0, help="ids of the model, default: the demo model's 49152")
    parser.add_argument("--quick", action="store_true", help="scripted, one repetition, short times, 4 cycles")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        short = {"heartbeat_timeout_s": 2.0, "step_timeout_s": 1.0, "lease_s": 2.0}
        parser.set_defaults(model=QUICK_MODEL, repetitions=1, num_cycles=4, **short)
        arguments = parser.parse_args(argv)
    if arguments.peer and not (arguments.peer / "bin" / "vllm").is_file():
        parser.error(f"--peer {arguments.peer}: has no bin/vllm; see bench/README.md")
    arguments.ranks = arguments.ranks or (2 if arguments.peer else 3)
    arguments.model = arguments.model or ("" if arguments.peer else "demo")
    return arguments


async def run_case(case: Case, settings: Settings, repetitions: int) -> dict[str, Any]:
    """Run one case so many times, each in surroundings of its own; return its figures."""
    taken: list[Measured] = []
    for repetition in range(repetitions):
        around = Surroundings()
        try:
            measured = await case.run(around, settings, repetition)
            # What is left of a peer that had to be killed, as one whose streams hang has to be, is not its own doing.
            measured.wrong += [] if settings.peer else await left_after(around)
        except (TimeoutError, RuntimeError, OSError) as error:
            measured = Measured(wrong=[f"{type(error).__name__}: {error}"])
        finally:
            around.remove()
        taken.append(measured)
        shown = ", ".join(f"{name} {shown_s(seconds)}" for name, seconds in measured.seconds.items())
        whose = "vllm" if settings.peer else "maniple"
        said = "; ".join([shown, *measured.wrong])
        print(f"{whose}: {case.name} {repetition + 1}/{repetitions}: {said}", file=sys.stderr)
    limits = case.limits(settings)
    names = dict.fromkeys([*limits, *(name for measured in taken for name in measured.seconds)])
    figures = []
    for name in names:
        values = [measured.seconds[name] for measured in taken if name in measured.seconds]
        figures.append(
            {
                "name": name,
                "worst_s": round(max(values), 4) if values and max(values) < inf else None,
                "over_s": HANG_S if inf in values else None,  # so long it was waited for, in vain
                "limit_s": limits.get(name),
                "values_s": [round(value, 4) if value < inf else None for value in values],
            }
        )
    wrong = sorted({sentence for measured in taken for sentence in measured.wrong})
    ends = Counter(end for measured in taken for end in measured.ends)
    return {
        "case": case.name,
        "repetitions": repetitions,
        "figures": figures,
        "wrong": wrong,
        "clients_were_told": ends,
    }


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


def table(results: Sequence[dict[str, Any]], peer: Sequence[dict[str, Any]] | None = None) -> str:
    """Return the figures for people, those of the peer beside ours."""
    head = f"{'fault':<24}{'measured':<26}{'worst':>10}{'limit':>10}{'vllm' if peer else '':>10}".rstrip()
    lines = [head, "-" * len(head)]
    of_peer = {(result["case"], figure["name"]): figure for result in peer or () for figure in result["figures"]}
    said_of_peer = {result["case"]: result["wrong"] for result in peer or ()}
    for result in results:
        for number, figure in enumerate(result["figures"]):
            unit = figure.get("unit", "s")
            limit = figure["limit_s"]
            shown = [worst_of(figure), "-" if limit is None else f"{limit:.3f} s" if unit == "s" else f"{limit} {unit}"]
            if peer:
                theirs = of_peer.get((result["case"], figure["name"]))
                shown.append(worst_of(theirs) if theirs else "-")
            name = result["case"] if number == 0 else ""
            lines.append(f"{name:<24}{figure['name']:<26}{''.join(f'{one:>10}' for one in shown)}")
        lines += [f"{'':<24}! {sentence}" for sentence in result["wrong"]]
        lines += [f"{'':<24}vllm: {sentence}" for sentence in said_of_peer.get(result["case"], ())]
    return "\n".join(lines)


def worst_of(figure: dict[str, Any]) -> str:
    """Return the worst value, as a table has it."""
    if figure.get("over_s"):
        return f"> {figure['over_s']:g} s"
    if figure["worst_s"] is None:
        return "-"
    unit = figure.get("unit", "s")
    return f"{figure['worst_s']:.3f} s" if unit == "s" else f"{figure['worst_s']} {unit}"


def shown_s(seconds: float) -> str:
    """Return seconds for people."""
    return f"{seconds:.3f} s" if seconds < inf else f"> {HANG_S:g} s"


async def bench(arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    scripted = model.startswith("scripted")
    settings = Settings(
        model=model,
        ranks=arguments.ranks,
        vocab_size=arguments.vocab_size or (256 if scripted else 49152),
        heartbeat_timeout_s=arguments.heartbeat_timeout_s,
        step_timeout_s=arguments.step_timeout_s,
        lease_s=arguments.lease_s,
    )
    wanted = arguments.cases or [*(slug for slug, case in SLUGS.items() if case.for_peer or not arguments.peer)]
    if arguments.cases is None and not arguments.peer:
        wanted.append(CYCLES)
    results = []
    for slug in wanted:
        if slug == CYCLES:
            results.append(await run_cycles(arguments.num_cycles, arguments.ranks))
        else:
            results.append(await run_case(SLUGS[slug], settings, arguments.repetitions))
    of_peer = []
    if arguments.peer:
        theirs = replace(settings, peer=peer_command(arguments.peer, model, arguments.ranks))
        for slug in wanted:
            if slug != CYCLES and SLUGS[slug].for_peer:
                of_peer.append(await run_case(SLUGS[slug], theirs, arguments.peer_repetitions))
    return {
        "bench": "faults",
        "server": "maniple",
        "model": arguments.model or "random",
        "ranks": arguments.ranks,
        "heartbeat_timeout_s": arguments.heartbeat_timeout_s,
        "step_timeout_s": arguments.step_timeout_s,
        "lease_s": arguments.lease_s,
        "cases": results,
        "peer": {"server": "vllm", "cases": of_peer} if arguments.peer else None,
    }


def peer_command(environment: Path, model: str, ranks: int) -> str:
    """Return the command that starts vLLM on as many CPU ranks."""
    words = [environment / "bin" / "vllm", "serve", model, *PEER_FLAGS, "--tensor-parallel-size", ranks]
    return shlex.join(["env", "-u", "PYTHONPATH", *PEER_ENVIRONMENT, *map(str, words)])


def main() -> int:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="faults-of-maniple-model-") as directory:
        model = arguments.model or f"{directory}/random"
        if not arguments.model:
            from random_checkpoint import write_random_checkpoint

            write_random_checkpoint(Path(model))
        result = asyncio.run(bench(arguments, model))
    print(table(result["cases"], result["peer"] and result["peer"]["cases"]))
    print(json.dumps(result))
    return 1 if any(map(is_missed, result["cases"])) else 0


if __name__ == "__main__":
    sys.exit(main())
