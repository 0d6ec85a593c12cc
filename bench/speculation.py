"""What do tokens tried ahead (--num-speculative-tokens) gain, on text that repeats itself and on text that does not?

Two groups of one model are up at once and get the same requests, one after the other, in pairs whose order changes:
one with --steps-in-flight, and one that tries tokens ahead, which has one step in flight. Three kinds of
text: edits of a piece of code, which are mostly copied; summaries, which take phrases over; and stories sampled at
temperature 1, which repeat nothing. There is no peer here: the group without is what to compare with.

Examples:
  python bench/speculation.py
  python bench/speculation.py --steps-in-flight 2 --num-speculative-tokens 8
  python bench/speculation.py --kinds edit --rows 1 --num-speculative-tokens 3 --pairs 1

The last line is one JSON object with the same figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import statistics
import time
from dataclasses import dataclass
from typing import Any

import structlog
from rich.console import Console
from rich.table import Table

from arguments import at_least_one
from control_plane.assembly import build_engine, build_group
from control_plane.config import ControlPlaneConfig, resolve_auto
from control_plane.engine import Engine
from control_plane.generation import Generation, SamplingChoice, TextChoice
from control_plane.group.worker_group import WorkerGroup
from control_plane.model_store import resolve_model
from control_plane.text.model_text import ModelText, load_model_text
from service_chassis.ids import RequestId

CODE = """class {name}:
    def __init__(self, size):
        self.size = size
        self.items = []
        self.total = 0

    def add(self, item):
        if len(self.items) >= self.size:
            self.items.pop(0)
        self.items.append(item)
        self.total += item

    def mean(self):
        if not self.items:
            return 0
        return sum(self.items) / len(self.items)
"""
NOTICE = """The {name} of the town closes its north hall from Monday on, because the roof above the north hall must be
repaired. Visitors of the {name} enter through the south gate. The reading room of the {name} stays open until six in
the evening, and the south gate until half past six. Whoever has borrowed something may return it at the south gate. The
north hall of the {name} opens again in spring, when the roof is repaired."""
NAMES = ("Window", "Archive", "Library", "Museum", "Gallery", "Market", "Theatre", "Garden")
KINDS = {
    "edit": (f"Rename the class to New{{name}} and print the whole code again.\n\n{CODE}", 0.0),
    "summary": (f"Summarize this in a few sentences.\n\n{NOTICE}", 0.0),
    "story": ("Write a strange story about a {name} nobody has ever seen.", 1.0),
}


@dataclass(frozen=True)
class Side:
    """One group that is up."""

    engine: Engine
    group: WorkerGroup
    loop: asyncio.Task[None]
    text: ModelText


async def start(options: argparse.Namespace, model_path: str, **config: Any) -> Side:
    """Form a group and run its engine."""
    asked = ControlPlaneConfig(model=model_path, dtype=options.dtype, max_model_len=1024, log_level="error", **config)
    resolved = resolve_auto(asked, has_gpu=False, on_terminal=False)
    text = load_model_text(model_path)
    group = build_group(resolved, model_path, "")
    engine = build_engine(resolved, group, await group.form(), text.tokenizer)
    return Side(engine, group, asyncio.create_task(engine.run()), text)


async def stop(side: Side) -> None:
    """End a group."""
    side.loop.cancel()
    await asyncio.gather(side.loop, return_exceptions=True)
    await side.group.teardown("the benchmark is over")


def requests(text: ModelText, kind: str, num_rows: int, num_tokens: int, run: str) -> list[Generation]:
    """Return requests of one kind, each of other words; they go past the end of text."""
    wording, temperature = KINDS[kind]
    assert text.chat_template is not None, "the model has no chat template"
    made = []
    for number in range(num_rows):
        message = {"role": "user", "content": wording.format(name=NAMES[number % len(NAMES)])}
        rendered = text.chat_template.render([message], add_generation_prompt=True)
        made.append(
            Generation(
                request_id=RequestId(f"{run}-{number}"),
                prompt_token_ids=tuple(text.tokenizer.encode(rendered, add_special_tokens=False)),
                sampling=SamplingChoice(temperature=temperature, seed=number, max_tokens=num_tokens),
                text=TextChoice(skip_text=True),
            )
        )
    return made


async def tokens_per_second(side: Side, made: list[Generation], shown: list[str]) -> tuple[float, float]:
    """Return output tokens a second from the first token of each row on, and steps of the group."""
    step = side.engine.status().step
    first: list[float] = []
    num_tokens = 0

    async def one(generation: Generation) -> None:
        nonlocal num_tokens
        ids: list[int] = []
        async for event in await side.engine.generate(generation):
            if token_ids := getattr(event, "token_ids", ()):
                if not ids:
                    first.append(time.perf_counter())
                ids += token_ids
        num_tokens += len(ids) - 1
        shown.append(side.text.tokenizer.decode(ids))

    await asyncio.gather(*(one(generation) for generation in made))
    return num_tokens / (time.perf_counter() - max(first)), side.engine.status().step - step


async def compare(off: Side, on: Side, kind: str, num_rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of one kind of text and number of rows."""
    rates: dict[str, list[float]] = {"off": [], "on": []}
    steps: dict[str, float] = {}
    shown: list[str] = []
    for side in (off, on):  # what is compiled for these shapes, and the prefix cache, count for nobody
        await tokens_per_second(side, requests(side.text, kind, num_rows, 24, f"{kind}-{num_rows}-warm-up"), [])
    for pair in range(options.pairs):
        sides = [("off", off), ("on", on)]
        for name, side in sides if pair % 2 == 0 else reversed(sides):
            made = requests(side.text, kind, num_rows, options.tokens, f"{kind}-{num_rows}-{pair}-{name}")
            rate, steps[name] = await tokens_per_second(side, made, shown)
            rates[name].append(rate)
    if options.show:
        print(shown[0])
    return {
        "off": statistics.median(rates["off"]),
        "on": statistics.median(rates["on"]),
        "ratio": statistics.median(b / a for a, b in zip(rates["off"], rates["on"], strict=True)),
        "ratios": [round(b / a, 3) for a, b in zip(rates["off"], rates["on"], strict=True)],
        "steps_off": steps["off"],
        "steps_on": steps["on"],
    }


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return all figures."""
    path = resolve_model(options.model, lambda what, share, detail: None).path
    off = await start(options, path, max_steps_in_flight=options.steps_in_flight)
    on = await start(
        options,
        path,
        max_steps_in_flight=1,
        num_speculative_tokens=options.num_speculative_tokens,
        prompt_lookup_min=options.prompt_lookup_min,
        prompt_lookup_max=options.prompt_lookup_max,
    )
    title = (
        f"{options.num_speculative_tokens} tokens ahead, lookup {options.prompt_lookup_min} to "
        f"{options.prompt_lookup_max}; output tokens/s, median of {options.pairs}"
    )
    table = Table(title=title, title_justify="left")
    for column in ("text", "rows", "without", "with", "ratio", "steps without", "steps with"):
        table.add_column(column, justify="left" if column == "text" else "right")
    figures: dict[str, Any] = {}
    try:
        for kind in options.kinds:
            for num_rows in options.rows:
                found = figures[f"{kind}-{num_rows}"] = await compare(off, on, kind, num_rows, options)
                rates = f"{found['off']:.1f}", f"{found['on']:.1f}", f"{found['ratio']:.2f}"
                table.add_row(kind, str(num_rows), *rates, f"{found['steps_off']:.0f}", f"{found['steps_on']:.0f}")
    finally:
        await asyncio.gather(stop(off), stop(on))
    Console().print(table)
    return figures


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="with a chat template (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="as for serve (default: %(default)s)")
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help="edit,summary,story")
    parser.add_argument("--rows", type=_numbers, default=[1, 8], help="at once (default: 1,8)")
    parser.add_argument("--tokens", type=int, default=128, help="of each row (default: %(default)s)")
    parser.add_argument("--pairs", type=at_least_one, default=3, help="(default: %(default)s)")
    parser.add_argument("--steps-in-flight", type=int, default=1, help="of the group without (default: %(default)s)")
    parser.add_argument("--num-speculative-tokens", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--prompt-lookup-min", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--prompt-lookup-max", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--show", action="store_true", help="print one output of each kind")
    options = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(run(options))))


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    main()
