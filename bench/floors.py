"""What is the most that this machine allows? Floors for the rows of the table, by its bandwidth and its matrix rate.

A step must read every weight once, and the keys and values of all rows; it must do two operations for each weight and
token. Memory and arithmetic could overlap entirely, so a step takes at least the longer of the two. What is measured is
the best of several tries: reading memory on all cores, and products of matrices by oneDNN, which everybody uses here.

Prints a table and, as its last line, one JSON object. Nobody reaches a floor; a goal above it cannot be reached.

Examples:
  python bench/floors.py
  python bench/floors.py --model ~/.cache/maniple/models/demo --dtype float32
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_TRIES = 12
_READ_BYTES = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What it can do at best."""

    bytes_per_s: float
    flop_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a token costs."""

    weight_bytes: int  # read once a step, the projection to the vocabulary among them
    num_weights: int  # in linears: two operations each for a token
    num_vocab_weights: int  # the same, for tokens that sample alone
    kv_bytes_per_token: int
    attention_flop: int  # of one query and one key, over all layers and heads


def best_s(work: Callable[[], object]) -> float:
    """Return the least time of several tries."""
    work()
    times = []
    for _ in range(_TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(dtype: torch.dtype) -> Machine:
    """Measure reading and multiplying on all cores."""
    held = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    read_s = best_s(held.sum)
    rate = 0.0
    for rows, inner, outer in ((2048, 2048, 2048), (1024, 576, 1536), (4096, 1536, 576)):
        left, right = torch.randn(rows, inner).to(dtype), torch.randn(outer, inner).to(dtype)
        with torch.inference_mode():
            packed = torch.ops.mkldnn._reorder_linear_weight(right, rows)
            took_s = best_s(lambda x=left, w=packed: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], ""))
        rate = max(rate, 2 * rows * inner * outer / took_s)
    return Machine(bytes_per_s=_READ_BYTES / read_s, flop_per_s=rate)


def shape_of(model: Path, dtype: torch.dtype) -> Shape:
    """Read the sizes of a model of the Llama family from its config.json."""
    config = json.loads((model / "config.json").read_text())
    hidden, inner, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or hidden // heads
    linears = layers * (hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * inner)
    vocabulary = config["vocab_size"] * hidden
    size = dtype.itemsize
    return Shape(
        weight_bytes=(linears + vocabulary) * size,
        num_weights=linears,
        num_vocab_weights=vocabulary,
        kv_bytes_per_token=layers * kv_heads * head_dim * 2 * size,
        attention_flop=4 * layers * heads * head_dim,
    )


def prefill_s(machine: Machine, shape: Shape, num_requests: int, length: int) -> float:
    """Return the least time to compute prompts; half of all keys are seen on average."""
    flop = 2 * shape.num_weights * num_requests * length + shape.attention_flop * num_requests * length * length // 2
    return flop / machine.flop_per_s


def step_s(machine: Machine, shape: Shape, rows: int, context: int) -> float:
    """Return the least time of a step of decoding rows."""
    memory = (shape.weight_bytes + rows * context * shape.kv_bytes_per_token) / machine.bytes_per_s
    flop = rows * (2 * (shape.num_weights + shape.num_vocab_weights) + context * shape.attention_flop)
    return max(memory, flop / machine.flop_per_s)


def floors(machine: Machine, shape: Shape) -> dict[str, float]:
    """Return tokens per second at the floor for the rows of the table."""
    found = {}
    for rows in (1, 8, 32):
        steps = sum(step_s(machine, shape, rows, 128 + index) for index in range(128))
        found[f"decode-{rows}"] = rows * 128 / (prefill_s(machine, shape, rows, 128) + steps)
    spent = prefill_s(machine, shape, 8, 1024) + sum(step_s(machine, shape, 8, 1024 + index) for index in range(16))
    return {**found, "prefill-8x1024": 8 * 1024 / spent}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench/floors.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    home = Path("~/.cache/maniple/models/demo")
    parser.add_argument("--model", type=Path, default=home, help="directory with a config.json (default: the demo)")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    arguments = parser.parse_args()
    dtype = torch.bfloat16 if arguments.dtype == "bfloat16" else torch.float32
    machine = measure(dtype)
    found = floors(machine, shape_of(arguments.model.expanduser(), dtype))
    print(
        f"{torch.get_num_threads()} threads, {arguments.dtype}: {machine.bytes_per_s / 1e9:.1f} GB/s read, "
        f"{machine.flop_per_s / 1e9:.0f} GFLOP/s multiplied\n"
    )
    for name, rate in found.items():
        print(f"{name:<16}{rate:>8.0f} tokens/s at most")
    told = {"bench": "floors", "dtype": arguments.dtype, "gb_per_s": round(machine.bytes_per_s / 1e9, 1)}
    told |= {"gflop_per_s": round(machine.flop_per_s / 1e9), "tokens_per_s": {k: round(v, 1) for k, v in found.items()}}
    print(json.dumps(told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
