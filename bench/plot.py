"""Draw the pictures of bench/plots/ from result files.

  concurrency.svg   output tokens/s against requests at once, ours beside the peers
  steps.svg         what a steady step costs the control plane, against rows and against context
  latency.svg       distributions of time to first token and between tokens under the open loop, ours beside vLLM

A picture whose figures no file has is left as it is.

Examples:
  python bench/plot.py                                           # from the newest file of bench/results
  python bench/plot.py bench/results/2026-11-30-*.jsonl --out /tmp/plots
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from results import DIRECTORY, HERE, read

Lines = Mapping[str, Mapping[str, Any]]
NAMES = {
    "ours": "Maniple bf16",
    "ours-q4": "Maniple Q4_1",
    "ours-int8": "Maniple int8",
    "vllm": "vLLM bf16",
    "llama": "llama.cpp Q4_1",
}
COLOURS = {"ours": "#0b6e4f", "ours-q4": "#6fb98f", "ours-int8": "#6fb98f", "vllm": "#c1440e", "llama": "#3f4e8c"}


def concurrency(lines: Lines) -> Figure | None:
    """Return output tokens/s of every server against the number of requests at once."""
    points: dict[str, list[tuple[float, float]]] = {}
    for bench in ("concurrency", "concurrency-q4"):
        points |= lines.get(bench, {}).get("points", {})
    if not points:
        return None
    figure, axes = pyplot.subplots(figsize=(6.4, 4.0))
    for name, found in points.items():
        at = [one for one, _ in found]
        axes.plot(at, [tokens for _, tokens in found], marker="o", label=NAMES.get(name, name), color=COLOURS.get(name))
    axes.set_xscale("log", base=2)
    axes.set_xticks(at, [f"{one:g}" for one in at])
    axes.set_ylim(bottom=0)
    _named(axes, "requests at once", "output tokens/s", "SmolLM2-135M, 128 -> 64 tokens")
    return figure


def latency(lines: Lines) -> Figure | None:
    """Return the distributions of the open loop: the share of values that are no larger."""
    runs = _first(lines, "open-loop", "runs")
    if not runs:
        return None
    figure, both = pyplot.subplots(1, 2, figsize=(9.0, 3.8), sharey=True)
    for axes, kind, title in zip(both, ("ttft", "itl"), ("time to first token", "time between tokens"), strict=True):
        for side in (0, 1):
            for number, pair in enumerate(runs):
                values = pair[side]["quantiles_ms"][kind]
                name = pair[side]["server"]
                shares = [100 * (place + 1) / len(values) for place in range(len(values))]
                label = NAMES.get(name, name) if number == 0 else None
                axes.step(values, shares, where="post", color=COLOURS.get(name), alpha=0.8, label=label)
        axes.set_xscale("log")
        _number_plainly(axes.xaxis)
        _named(axes, f"{title}, ms", "% of values that are no larger" if kind == "ttft" else "", "")
    figure.suptitle("Poisson arrivals at 70 % of what vLLM can do; one line a run", fontsize=10)
    return figure


def steps(lines: Lines) -> Figure | None:
    """Return the cost of a steady step against rows (at the shortest context) and against context (of most rows)."""
    both = [case for one in _first(lines, "steps:", "measured") for case in one.get("beside_vllm", ())]
    alone = [case for one in _first(lines, "steps-long:", "measured") for case in one.get("cases", ())]
    points = [case for case in both if not case["waiting"]]
    if not points:
        return None
    figure, (by_rows, by_context) = pyplot.subplots(1, 2, figsize=(9.0, 3.8))
    shortest, most = min(case["context"] for case in points), max(case["rows"] for case in points)
    for name, key in (("ours", "ours_us"), ("vllm", "peer_us")):
        rows = [(case["rows"], case[key]) for case in points if case["context"] == shortest]
        contexts = [(case["context"], case[key]) for case in points if case["rows"] == most]
        if name == "ours":
            contexts += [
                (case["context"], case["host_us"]["mean"])
                for case in alone
                if case["rows"] == most and not case["waiting"] and case["context"] not in dict(contexts)
            ]
        for axes, costs in ((by_rows, rows), (by_context, contexts)):
            at, cost = zip(*sorted(costs), strict=True)
            axes.plot(at, cost, marker="o", label=NAMES[name].split()[0], color=COLOURS[name])
    _named(by_rows, f"decoding rows, context {shortest}", "host µs a step", "")
    _named(by_context, f"context in tokens, {most} rows", "", "")
    by_context.set_xscale("log")
    _number_plainly(by_context.xaxis)
    for axes in (by_rows, by_context):
        axes.set_yscale("log")
        _number_plainly(axes.yaxis)
    figure.suptitle("What a steady step costs the control plane", fontsize=10)
    return figure


def _first(lines: Lines, row: str, key: str) -> Any:
    """Return what the first line of a row has under a key: raw figures stand there once. Empty where there is none."""
    return next((line[key] for bench, line in lines.items() if bench.startswith(row) and key in line), [])


def _number_plainly(axis: Axis) -> None:
    """Have a logarithmic axis say 20 and 50, not 2 x 10^1 and 5 x 10^1."""
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _named(axes: Axes, x: str, y: str, title: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=9)


PICTURES: dict[str, Callable[[Lines], Figure | None]] = {"concurrency": concurrency, "steps": steps, "latency": latency}


def draw(lines: Lines, out: Path) -> list[Path]:
    """Write the pictures whose figures are there; return their files."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    # The same figures give the same bytes: no date, and ids from a fixed salt.
    with pyplot.rc_context({"svg.hashsalt": "maniple", "svg.fonttype": "none", "font.size": 9}):
        for name, picture in PICTURES.items():
            figure = picture(lines)
            if figure is not None:
                figure.tight_layout()
                path = out / f"{name}.svg"
                figure.savefig(path, metadata={"Date": None})
                pyplot.close(figure)
                written.append(path)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench/plot.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", type=Path, help="result files; the last line of a row counts")
    parser.add_argument("--out", type=Path, default=HERE / "plots", metavar="DIR", help="default bench/plots")
    arguments = parser.parse_args(argv)
    files = arguments.files or sorted(DIRECTORY.glob("*.jsonl"), key=lambda path: path.stat().st_mtime)[-1:]
    if not files:
        parser.error(f"{DIRECTORY} has no result file; `make bench` writes one")
    written = draw(read(files), arguments.out)
    for path in written:
        print(f"{path}, {path.stat().st_size // 1024} KiB")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main())
