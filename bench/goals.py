"""What a row of the table must reach, and whether its figures did: medians of pairs, ratios, verdicts, lines of JSON.

A ratio says how many times better ours is than the peer: ours / peer where more is better, peer / ours where less is.
It is the median of the ratios of pairs, each pair measured one right after the other, so that a machine that slows down
between two pairs favours nobody.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Better = Literal["more", "less"]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on the ratio, or on our own figure where no peer has the like."""

    of: Literal["ratio", "ours"]
    at: Literal["least", "most"]
    bound: float

    def text(self, unit: str) -> str:
        """Return the goal as a sentence that a program can read too, such as ``ratio >= 1.6`` or ``ours <= 5 s``."""
        sign = ">=" if self.at == "least" else "<="
        return f"{self.of} {sign} {self.bound:g}{f' {unit}' if unit and self.of == 'ours' else ''}"

    def is_met(self, value: float | None) -> bool:
        """Whether a value reaches it; None and NaN never do."""
        if value is None or math.isnan(value):
            return False
        return value >= self.bound if self.at == "least" else value <= self.bound


def read_goal(text: str) -> Goal:
    """Read what ``Goal.text`` writes. Raises ``ValueError``."""
    match = re.fullmatch(r"(ratio|ours) (<=|>=) (\S+)(?: .*)?", text)
    if match is None:
        raise ValueError(f"{text!r} is no goal: it must be like 'ratio >= 1.6' or 'ours <= 5 s'")
    of: Literal["ratio", "ours"] = "ratio" if match[1] == "ratio" else "ours"
    return Goal(of, "least" if match[2] == ">=" else "most", float(match[3]))


def at_least(ratio: float) -> Goal:
    """So many times better than the peer."""
    return Goal("ratio", "least", ratio)


def ours_at_most(bound: float) -> Goal:
    """Our own figure, whatever the peer has."""
    return Goal("ours", "most", bound)


def ours_at_least(bound: float) -> Goal:
    """Our own figure, whatever the peer has."""
    return Goal("ours", "least", bound)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number of a row: where it stands in what was measured, and what it must reach."""

    path: str  # keys into what was measured of one server, joined by "/"
    unit: str
    goal: Goal | None
    suffix: str = ""  # of the row's name, where a row has several figures
    better: Better = "more"
    scale: float = 1.0  # from what was measured to the unit

    def name(self, bench: str) -> str:
        """Return the name of its line."""
        return f"{bench} {self.suffix}".rstrip()

    def of(self, measured: Mapping[str, Any]) -> float | None:
        """Return the figure in what was measured; None where it has none."""
        found: Any = measured
        for key in self.path.split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        return found * self.scale if isinstance(found, int | float) and not isinstance(found, bool) else None


def ratio_of(ours: float | None, peer: float | None, better: Better) -> float | None:
    """Return how many times better ours is; None where that cannot be said."""
    over, under = (ours, peer) if better == "more" else (peer, ours)
    if over is None or under is None or not under or math.isnan(over) or math.isnan(under):
        return None
    return over / under


def median(values: Sequence[float | None]) -> float | None:
    """Return the median of those that are there; None of nothing."""
    there = [value for value in values if value is not None and not math.isnan(value)]
    return statistics.median(there) if there else None


def line_of(
    bench: str, figure: Figure, pairs: Sequence[tuple[float | None, float | None]], details: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the line of one figure: the medians of both sides, and the median of the pairs' ratios."""
    ours, peer = median([mine for mine, _ in pairs]), median([theirs for _, theirs in pairs])
    ratios = [ratio_of(mine, theirs, figure.better) for mine, theirs in pairs]
    # A pair that failed on one side is no pair: it must not vanish from a median that then looks good.
    ratio = None if None in ratios else median(ratios)
    goal = figure.goal
    value = ratio if goal and goal.of == "ratio" else ours
    return {
        "bench": figure.name(bench),
        "ours": rounded(ours),
        "peer": rounded(peer),
        "ratio": rounded(ratio),
        "goal": goal.text(figure.unit) if goal else None,
        "unit": figure.unit,
        "passed": goal.is_met(value) if goal else None,
        "pairs": [[rounded(mine), rounded(theirs)] for mine, theirs in pairs],
        **details,
    }


def failed_line(bench: str, unit: str, goal: Goal | None, error: str) -> dict[str, Any]:
    """Return the line of what could not be measured. It passes nothing."""
    text = goal.text(unit) if goal else None
    none = {"ours": None, "peer": None, "ratio": None}
    return {"bench": bench, **none, "goal": text, "unit": unit, "passed": False, "error": error}


def judged(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return a line that another program printed with the verdict that its own goal gives. Raises ``ValueError``."""
    goal = read_goal(line["goal"]) if line["goal"] else None
    passed = goal.is_met(line.get(goal.of)) if goal else None
    return {"peer": None, "ratio": None, "unit": "", **line, "passed": passed}


def rounded(value: float | None) -> float | None:
    """Return four significant digits: no more are known."""
    return None if value is None or math.isnan(value) else float(f"{value:.4g}")


def short(line: Mapping[str, Any]) -> str:
    """Return what a program reads at the end of a run: one line of JSON, without the raw pairs."""
    kept = ("bench", "ours", "peer", "ratio", "goal", "unit", "passed", "error")
    return json.dumps({key: line[key] for key in kept if key in line})


def shown(value: float | None, unit: str = "") -> str:
    """Return a number for people."""
    if value is None:
        return "-"
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f}{f' {unit}' if unit else ''}"


def verdict(line: Mapping[str, Any]) -> str:
    """Return one word on a line."""
    if "error" in line:
        return "ERROR"
    return {True: "pass", False: "FAIL", None: "-"}[line["passed"]]


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines as a table for people, and what failed under it."""
    width = max([len("what"), *(len(line["bench"]) for line in lines)])
    head = f"{'what':<{width}}{'ours':>11}{'peer':>11}  {'unit':<10}{'ratio':>7}  {'goal':<18}{'':<6}"
    out = [head.rstrip(), "-" * len(head)]
    for line in lines:
        ratio = f"{line['ratio']:.2f}" if line["ratio"] is not None else "-"
        out.append(
            f"{line['bench']:<{width}}{shown(line['ours']):>11}{shown(line['peer']):>11}  {line['unit']:<10}{ratio:>7}"
            f"  {line['goal'] or '-':<18}{verdict(line)}"
        )
        if "error" in line:
            out.append(f"    {line['error']}")
    judged = [line for line in lines if line["passed"] is not None]
    num_passed = sum(1 for line in judged if line["passed"])
    out.append(f"{num_passed} of {len(judged)} goals reached" + ("" if num_passed == len(judged) else ", the rest not"))
    return "\n".join(out)


def markdown(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return the lines as a table for a document."""
    out = ["| what | ours | peer | unit | ratio | goal | reached |", "|---|---|---|---|---|---|---|"]
    for line in lines:
        ratio = f"{line['ratio']:.2f}" if line["ratio"] is not None else ""
        cells = [line["bench"], shown(line["ours"]), shown(line["peer"]), line["unit"], ratio, line["goal"] or ""]
        reached = "**error**" if "error" in line else {True: "yes", False: "**no**", None: ""}[line["passed"]]
        out.append("| " + " | ".join("" if cell == "-" else cell for cell in [*cells, reached]) + " |")
    return "\n".join(out)
