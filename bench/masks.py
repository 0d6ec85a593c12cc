"""What does a structured output cost, and what do its mates notice of it?

Two tables. The first is the thread that follows grammars: microseconds a row to take a token and to compute what may
come next, for a JSON schema and the demo model's vocabulary, by rows in the step. The second is a group of the scripted
model whose steps take a while, as a device's would: steps per second with all rows free, and with some of them
constrained. There is no peer here: rows without a constraint are what to compare with.

Examples:
  python bench/masks.py
  python bench/masks.py --rows 1,64 --tokens 500
  python bench/masks.py --rows "" --step-ms 20 --constrained 0,1,32

The last line is one JSON object with the same figures.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog
from rich.console import Console
from rich.table import Table

from control_plane.assembly import build_engine, build_group
from control_plane.config import ControlPlaneConfig, resolve_auto
from control_plane.generation import Generation, SamplingChoice, TextChoice
from control_plane.model_store import resolve_model
from control_plane.structured_output.compiler import GrammarCompiler
from control_plane.structured_output.constraint import Constraint, ConstraintKind
from control_plane.structured_output.mask_rules import mask_rules
from control_plane.structured_output.walk import Pace, Walk
from control_plane.text.model_text import ModelText, load_model_text
from service_chassis.ids import RequestId

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "number"},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}
CONSTRAINT = Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(SCHEMA))
NUM_ROWS = 32


@dataclass(frozen=True)
class Compiled:
    """Milliseconds."""

    first: float
    another: float
    again: float


async def compile_times(grammars: GrammarCompiler) -> Compiled:
    """Compile the first constraint, another one, and the first again."""
    times = []
    for constraint in (CONSTRAINT, Constraint(ConstraintKind.REGEX, "[a-z]+(-[0-9]+)*"), CONSTRAINT):
        began = time.perf_counter()
        await grammars.compile(constraint)
        times.append((time.perf_counter() - began) * 1e3)
    return Compiled(*times)


async def cost_of_rows(grammars: GrammarCompiler, text: ModelText, num_rows: int, num_tokens: int) -> float:
    """Return microseconds a row and token."""
    grammar = await grammars.compile(CONSTRAINT)
    vocab_size = text.tokenizer.vocab_size
    rules = mask_rules(SamplingChoice(eos_ids=frozenset(text.eos_token_ids)), vocab_size)

    def new() -> Walk:
        return Walk(grammar.matcher.deep_copy(), -(-vocab_size // 32), rules)

    pace, draw = Pace(), random.Random(1)
    walks = [new() for _ in range(num_rows)]
    pace.advance([(walk, []) for walk in walks])
    spent = 0.0
    for _ in range(num_tokens):
        steps = []
        for place, walk in enumerate(walks):
            allowed = np.flatnonzero(np.unpackbits(np.frombuffer(walk.mask or b"", np.uint8), bitorder="little"))
            token_id = int(draw.choice(allowed))
            if token_id in rules.eos_ids:
                walks[place] = walk = new()
                steps.append((walk, []))
            else:
                steps.append((walk, [token_id]))
        began = time.perf_counter()
        pace.advance(steps)
        spent += time.perf_counter() - began
    return spent / num_tokens / num_rows * 1e6


async def steps_per_second(executor: str, num_constrained: int, step_ms: float, num_tokens: int) -> float:
    """Run rows of the scripted model, some of them constrained."""
    model = f"scripted:{json.dumps({'step_time_s': step_ms / 1000})}"
    asked = ControlPlaneConfig(model=model, executor=executor, device="cpu", num_threads=1, max_num_seqs=NUM_ROWS)
    config = resolve_auto(asked, has_gpu=False, on_terminal=False)
    text = load_model_text(model)
    grammars = GrammarCompiler(lambda: text)
    group = build_group(config, model, "")
    engine = build_engine(config, group, await group.form(), text.tokenizer, grammars=grammars)
    loop = asyncio.create_task(engine.run())
    # As long as the others: nothing ends it before.
    constraint = Constraint(ConstraintKind.REGEX, f"([a-z]{{3}} ){{{num_tokens}}}")
    began = 0.0

    async def one(number: int) -> None:
        sampling = SamplingChoice(
            temperature=0.0,
            max_tokens=num_tokens,
            eos_ids=frozenset(text.eos_token_ids if number < num_constrained else ()),
            constraint=constraint if number < num_constrained else None,
        )
        generation = Generation(
            request_id=RequestId(f"r{number}"),
            prompt_token_ids=(number, 1, 2),
            sampling=sampling,
            text=TextChoice(skip_text=True),
        )
        stream = await engine.generate(generation)
        async for _ in stream:
            pass

    try:
        if num_constrained:
            await grammars.compile(constraint)
        began = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(NUM_ROWS)))
        return num_tokens / (time.perf_counter() - began)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
        await grammars.close()
        await group.teardown("the benchmark is over")


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print, and return all figures."""
    console = Console()
    figures: dict[str, Any] = {}
    if options.rows:
        text = load_model_text(resolve_model(options.model, lambda what, share, detail: None).path)
        grammars = GrammarCompiler(lambda: text)
        compiled = await compile_times(grammars)
        figures["compile_ms"] = {"first": compiled.first, "another": compiled.another, "again": compiled.again}
        table = Table(
            title=f"{text.tokenizer.vocab_size} ids; compiled in {compiled.another:.1f} ms", title_justify="left"
        )
        table.add_column("rows", justify="right")
        table.add_column("µs a row", justify="right")
        table.add_column("ms a step", justify="right")
        figures["us_per_row"] = {}
        for num_rows in options.rows:
            cost = await cost_of_rows(grammars, text, num_rows, options.tokens)
            figures["us_per_row"][num_rows] = cost
            table.add_row(str(num_rows), f"{cost:.0f}", f"{cost * num_rows / 1e3:.2f}")
        await grammars.close()
        console.print(table)
    if options.constrained:
        table = Table(title=f"{NUM_ROWS} rows, steps of {options.step_ms:g} ms", title_justify="left")
        table.add_column("constrained", justify="right")
        table.add_column("steps/s", justify="right")
        figures["steps_per_s"] = {}
        for num_constrained in options.constrained:
            rate = await steps_per_second(options.executor, num_constrained, options.step_ms, options.tokens)
            figures["steps_per_s"][num_constrained] = rate
            table.add_row(str(num_constrained), f"{rate:.1f}")
        console.print(table)
    return figures


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",") if word.strip()]


def main(arguments: list[str] | None = None) -> None:
    """Run the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="whose vocabulary (default: %(default)s)")
    parser.add_argument("--rows", type=_numbers, default=[1, 8, 32, 64], help="rows in a step; empty: skip that table")
    parser.add_argument(
        "--constrained", type=_numbers, default=[0, 1, 8, 32], help="of the rows; empty: skip that table"
    )
    parser.add_argument("--step-ms", type=float, default=10.0, help="what a step takes (default: %(default)s)")
    parser.add_argument("--executor", default="mp", help="mp: a child process; uni: this one (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=300, help="of each row (default: %(default)s)")
    options = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(run(options))))


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    main()
