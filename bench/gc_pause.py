"""How long the garbage collector stops a process in the middle of its work, before and after its heap is frozen.

Each half of Maniple is loaded in a process of its own, then makes and drops requests' worth of objects until the
collector has walked everything some times; the longest walk of each generation is the figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROCESSES = ("control plane", "worker")


def load_control_plane() -> list[object]:
    from control_plane import server
    from control_plane.text.tokenizer import Tokenizer

    return [server, Tokenizer.for_scripted(None)]


def load_worker() -> list[object]:
    sys.path.insert(0, str(ROOT / "tests"))
    from support.runner_driver import RunnerDriver
    from support.tiny_checkpoints import tiny_config, write_checkpoint
    from worker_service import server

    with tempfile.TemporaryDirectory() as directory:
        driver = RunnerDriver(write_checkpoint(Path(directory) / "model", tiny_config("LlamaForCausalLM")))
    return [server, driver]


class Pauses:
    """Times of the collector's walks."""

    def __init__(self) -> None:
        self.by_generation: dict[int, list[float]] = {}
        self._began = 0.0

    def __call__(self, phase: str, facts: dict[str, int]) -> None:
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.by_generation.setdefault(facts["generation"], []).append(time.perf_counter() - self._began)


def pauses_under_work(num_rounds: int) -> dict[str, Any]:
    """Make and drop objects as a busy server does, and look how long each walk takes."""
    pauses = Pauses()
    gc.callbacks.append(pauses)
    try:
        for _ in range(num_rounds):
            kept = [{"tokens": [index], "row": (index,)} for index in range(20_000)]
            del kept
        for _ in range(5):
            gc.collect()
    finally:
        gc.callbacks.remove(pauses)
    return {
        f"generation_{generation}_ms": {
            "median": round(1000 * statistics.median(times), 2),
            "longest": round(1000 * max(times), 2),
        }
        for generation, times in sorted(pauses.by_generation.items())
    }


def measure(process: str, num_rounds: int) -> dict[str, Any]:
    from service_chassis.frozen_heap import freeze_heap

    loaded = load_control_plane() if process == "control plane" else load_worker()
    gc.collect()
    num_objects = len(gc.get_objects())
    before = pauses_under_work(num_rounds)
    began = time.perf_counter()
    num_frozen = freeze_heap()
    freezing_ms = round(1000 * (time.perf_counter() - began), 1)
    after = pauses_under_work(num_rounds)
    assert loaded
    return {
        "bench": f"gc pause, {process}",
        "objects": num_objects,
        "frozen": num_frozen,
        "freezing_ms": freezing_ms,
        "before": before,
        "after": after,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--process", choices=PROCESSES, help="measure in this very process; default: each in its own")
    parser.add_argument("--rounds", type=int, default=20, help="of 20 000 requests' objects (default 20)")
    options = parser.parse_args()
    if options.process:
        print(json.dumps(measure(options.process, options.rounds)))
        return
    for process in PROCESSES:
        words = [sys.executable, __file__, "--process", process, "--rounds", str(options.rounds)]
        subprocess.run(words, check=True, timeout=300)


if __name__ == "__main__":
    main()
