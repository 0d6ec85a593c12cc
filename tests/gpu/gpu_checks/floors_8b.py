"""Decode and prefill of an 8B shape against what the device can do, measured beside them; and the host's share."""

from __future__ import annotations

import itertools
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gpu_checks.hot_path import profile_steps
from gpu_checks.loaded import Loaded
from gpu_checks.outcome import Aim, Report
from gpu_checks.profiled import busy_share
from gpu_checks.random_model import SHAPE_8B, SHAPE_TINY
from support.stepper import Stepper

_CONTEXT = 1024
_DECODE_AIM, _PREFILL_AIM, _HOST_AIM = 0.80, 0.60, 0.05


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much is measured."""

    shape: dict[str, Any]
    rows: tuple[int, ...]
    aimed: tuple[int, ...]  # of ``rows``
    context: int
    prefill: int
    copied_bytes: int
    matrix: int
    steps: int


FULL = Size(
    shape=SHAPE_8B,
    rows=(1, 8, 64, 256),
    aimed=(1, 8, 64),
    context=_CONTEXT,
    prefill=8192,
    copied_bytes=4 << 30,
    matrix=8192,
    steps=60,
)
REHEARSAL = Size(
    shape=SHAPE_TINY,
    rows=(1, 3),
    aimed=(1,),
    context=40,
    prefill=128,
    copied_bytes=1 << 22,
    matrix=128,
    steps=6,
)


def best_time(work: Any, device: str, repeats: int = 5) -> float:
    """Return the shortest of some times that ``work`` takes, in seconds."""
    work()
    times = []
    for _ in range(repeats):
        if device == "cpu":
            began = time.perf_counter()
            work()
            times.append(time.perf_counter() - began)
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000)
    return min(times)


def copy_bandwidth(size: Size, device: str) -> float:
    """Return bytes per second, read and written, of a large copy."""
    source = torch.empty(size.copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size.copied_bytes / best_time(lambda: target.copy_(source), device)


def matrix_rate(size: Size, device: str) -> float:
    """Return operations per second of a large product in bfloat16."""
    a, b = torch.randn((2, size.matrix, size.matrix), dtype=torch.bfloat16, device=device)
    out = torch.empty_like(a)
    return 2 * size.matrix**3 / best_time(lambda: torch.mm(a, b, out=out), device)


def weights_read(loaded: Loaded) -> int:
    """Return bytes of weights that one step reads: all but the embedding, of which it takes some rows."""
    model: Any = loaded.runner._model
    embedding = model.embedding.weight
    return int(loaded.facts.weight_bytes - embedding.numel() * embedding.element_size())


def decode_floor_bytes(loaded: Loaded, rows: int, context: int) -> int:
    """Return the bytes that a decode step must read at least."""
    kv_bytes_per_token = loaded.facts.block_bytes // loaded.block_size
    return weights_read(loaded) + rows * context * kv_bytes_per_token


def prefill_operations(shape: dict[str, Any], num_tokens: int) -> int:
    """Return the operations of one prompt: products with weights, causal attention, and scores of the last token."""
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    query = shape["num_attention_heads"] * shape["head_dim"]
    kv = shape["num_key_value_heads"] * shape["head_dim"]
    weights = hidden * (query + 2 * kv) + query * hidden + 3 * hidden * inner
    attention = 2 * 2 * query * num_tokens * (num_tokens + 1) // 2
    return layers * (2 * weights * num_tokens + attention) + 2 * hidden * shape["vocab_size"]


def decode(loaded: Loaded, size: Size, rows: int, device: str, bandwidth: float, report: Report) -> None:
    stepper = loaded.stepper(ahead=3)
    cached = size.context - 1  # all but the last token count as found in the cache
    new = [stepper.enter(row, [(7 * row) % 100 + 1] * size.context, num_computed=cached) for row in range(rows)]
    stepper.submit(dict.fromkeys(range(rows), 1), new=new)
    stepper.decode(10)
    stepper.drain()
    first = len(stepper.completed)
    stepper.decode(size.steps)
    stepper.drain()
    ends = [done.completed_ns for done in stepper.completed[first - 1 :]]
    gaps = [(after - before) / 1e9 for before, after in itertools.pairwise(ends)]
    step_s = statistics.median(gaps)
    spans = profile_steps(stepper, size.steps // 2, device)
    host_share = 1 - busy_share(spans) if device != "cpu" else 0.0
    stepper.close()
    floor_s = decode_floor_bytes(loaded, rows, size.context + 10 + size.steps // 2) / bandwidth
    report.facts[f"decode, {rows} rows"] = {
        "ms a step": round(1000 * step_s, 3),
        "floor ms": round(1000 * floor_s, 3),
        "tokens/s": round(rows / step_s),
        "host's share": round(host_share, 4),
    }
    if rows in size.aimed:
        report.aims.append(Aim(name=f"decode of {rows} rows, of bandwidth", value=floor_s / step_s, limit=_DECODE_AIM))
    report.aims.append(Aim(name=f"host's share at {rows} rows", value=host_share, limit=_HOST_AIM, at_most=True))


def prefill(loaded: Loaded, size: Size, device: str, rate: float, report: Report) -> None:
    stepper: Stepper = loaded.stepper(ahead=1)
    times = []
    for turn in range(4):
        began = time.perf_counter()
        stepper.submit({0: size.prefill}, new=[stepper.enter(0, [turn + 1] * size.prefill)])
        stepper.drain()
        times.append(time.perf_counter() - began)
        stepper.finish_all()
    stepper.close()
    took_s = min(times[1:])
    floor_s = prefill_operations(size.shape, size.prefill) / rate
    report.facts[f"prefill of {size.prefill}"] = {
        "ms": round(1000 * took_s, 2),
        "floor ms": round(1000 * floor_s, 2),
        "tokens/s": round(size.prefill / took_s),
    }
    name = f"prefill of {size.prefill}, of the matrix rate"
    report.aims.append(Aim(name=name, value=floor_s / took_s, limit=_PREFILL_AIM))


def run(device: str, report: Report) -> None:
    size = REHEARSAL if device == "cpu" else FULL
    bandwidth, rate = copy_bandwidth(size, device), matrix_rate(size, device)
    if device != "cpu":
        torch.cuda.empty_cache()
    report.facts["copy bandwidth, GB/s"] = round(bandwidth / 1e9)
    report.facts["matrix rate, TFLOP/s"] = round(rate / 1e12, 2)
    longest = size.context + 4 * size.steps + 64
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        loaded = Loaded(
            device,
            Path(directory),
            size.shape,
            num_blocks=0 if device != "cpu" else 200,
            max_num_seqs=max(size.rows),
            max_num_batched_tokens=size.prefill,
            max_model_len=max(longest, size.prefill + 16),
            capture_sizes=size.rows,
            utilization=0.9,
        )
        report.facts["loaded, profiled and captured in s"] = round(time.perf_counter() - began, 1)
        report.facts["weights, GiB"] = round(loaded.facts.weight_bytes / 2**30, 2)
        report.facts["graphs, MiB"] = round(loaded.graph_bytes / 2**20)
        for rows in size.rows:
            decode(loaded, size, rows, device, bandwidth, report)
        prefill(loaded, size, device, rate, report)
