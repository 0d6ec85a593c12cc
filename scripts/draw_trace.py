"""Draw a few steps of a trace (``maniple serve --trace``) as the picture of docs/tracing.md.

python scripts/draw_trace.py steps.json docs/images/trace.svg --first-step 40 --steps 4
"""

from __future__ import annotations

import argparse
import json
from html import escape
from pathlib import Path
from typing import Any

WIDTH, LEFT, BAR, GAP, TOP = 1000, 170, 22, 8, 34
COLOURS = {
    "schedule": "#4e79a7",
    "send": "#59a14f",
    "result": "#b07aa1",
    "publish": "#edc948",
    "queue": "#d0d0d0",
    "execute": "#e15759",
    "sample": "#f28e2b",
    "in flight": "#eeeeee",
}
Span = tuple[str, float, float, int]  # name, beginning, end in microseconds, step


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of a trace, also of one that was cut off."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        json.loads(line.removesuffix(",")) for line in lines if line.startswith("{") and line.rstrip(",")[-1] == "}"
    ]


def rows_of(events: list[dict[str, Any]]) -> dict[str, list[Span]]:
    """Return what each row of the picture shows."""
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows: dict[str, list[Span]] = {"steps in flight": [], "control plane": []}
    begun: dict[tuple[int, str], tuple[float, int]] = {}
    for event in events:
        args, process = event.get("args", {}), names.get(event["pid"], "")
        if event["ph"] == "X" and event["name"] in COLOURS:
            step = args["steps"][-1] if "steps" in args else args["step"]
            row = process if process == "control plane" else f"{process}: device"
            rows.setdefault(row, []).append((event["name"], event["ts"], event["ts"] + event["dur"], step))
        elif event["ph"] == "b":
            begun[event["pid"], event["id"]] = event["ts"], args["step"]
        elif event["ph"] == "e" and (event["pid"], event["id"]) in begun:
            began, step = begun.pop((event["pid"], event["id"]))
            is_queue = event["name"] == "queue"
            row = f"{process}: queue" if is_queue else "steps in flight"
            rows.setdefault(row, []).append(("queue" if is_queue else "in flight", began, event["ts"], step))
    order = [
        "steps in flight",
        "control plane",
        *sorted(set(rows) - {"steps in flight", "control plane"}, reverse=True),
    ]
    return {row: rows[row] for row in order}


def lanes_of(spans: list[Span]) -> list[list[Span]]:
    """Part spans that overlap into lanes below each other."""
    lanes: list[list[Span]] = []
    for span in sorted(spans, key=lambda one: one[1]):
        free = next((lane for lane in lanes if lane[-1][2] <= span[1] + 0.01), None)
        if free is None:
            lanes.append([span])
        else:
            free.append(span)
    return lanes


def draw(rows: dict[str, list[Span]], begin: float, end: float) -> str:
    """Return the picture of what happened between two moments."""
    scale, parts, y = (WIDTH - LEFT - 10) / (end - begin), [], TOP
    for row, spans in rows.items():
        shown = [span for span in spans if span[2] > begin and span[1] < end]
        parts.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{escape(row)}</text>')
        for lane in lanes_of(shown) or [[]]:
            for name, began, ended, step in lane:
                x, width = LEFT + (max(began, begin) - begin) * scale, (min(ended, end) - max(began, begin)) * scale
                parts.append(
                    f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0.6):.1f}" height="{BAR}" fill="{COLOURS[name]}"'
                    f' stroke="#fff" stroke-width="0.4"><title>{name}, step {step}: {ended - began:.0f} µs</title>'
                    "</rect>"
                )
                text = f"step {step}" if name in ("in flight", "execute", "queue") else name
                if width > 7 * len(text):
                    parts.append(f'<text x="{x + width / 2:.1f}" y="{y + 15}" text-anchor="middle">{text}</text>')
            y += BAR + 2
        y += GAP
    step_ms = next(ms for ms in (0.2, 0.5, 1, 2, 5, 10, 50, 100) if (end - begin) / 1000 / ms <= 12)
    for tick in range(int((end - begin) / 1000 / step_ms) + 1):
        x = LEFT + tick * step_ms * 1000 * scale
        parts.append(f'<line x1="{x:.1f}" y1="{TOP - 6}" x2="{x:.1f}" y2="{y}" stroke="#bbb" stroke-dasharray="2 3"/>')
        parts.append(f'<text x="{x:.1f}" y="{TOP - 10}" text-anchor="middle">{tick * step_ms:g} ms</text>')
    x = float(LEFT)
    for name, colour in COLOURS.items():
        parts.append(f'<rect x="{x:.1f}" y="{y + 6}" width="12" height="12" fill="{colour}" stroke="#999"/>')
        parts.append(f'<text x="{x + 17:.1f}" y="{y + 16}">{name}</text>')
        x += 36 + 7 * len(name)
    font = 'font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 30}" {font}>'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{y + 30}" fill="#fff"/>', *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--first-step", type=int, required=True)
    parser.add_argument("--steps", type=int, default=4, help="how many, default 4")
    arguments = parser.parse_args()
    rows = rows_of(read_events(arguments.trace))
    wanted = range(arguments.first_step, arguments.first_step + arguments.steps)
    spans = [span for row in rows.values() for span in row if span[3] in wanted]
    begin = min(span[1] for span in spans if span[0] == "schedule")
    arguments.picture.parent.mkdir(parents=True, exist_ok=True)
    arguments.picture.write_text(draw(rows, begin, max(span[2] for span in spans)), encoding="utf-8")


if __name__ == "__main__":
    main()
