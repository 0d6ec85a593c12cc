"""Give memory back, take it again, and go on with the same tokens."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import psutil
import torch

from gpu_checks.loaded import Loaded, quietly, shape_for
from gpu_checks.outcome import NotRun, Report
from support.steady_traffic import serve
from worker_service.sleep.choose import SleepOptions
from worker_service.sleep.tensors import tensors_in

_MIB = 2**20


def taken(device: str) -> int:
    """Return the bytes that this process, or on a device everybody, has taken."""
    if device == "cpu":
        return int(psutil.Process().memory_info().rss)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def run(device: str, report: Report) -> None:
    if device != "cpu" and importlib.util.find_spec("torch_memory_saver") is None:
        raise NotRun("needs torch-memory-saver (pip install --target DIR torch-memory-saver)")
    with tempfile.TemporaryDirectory() as directory:
        blocks = 12_000 if device == "cpu" else 0
        loaded = Loaded(device, Path(directory), shape_for(device), num_blocks=blocks, sleep=SleepOptions())
        runner = loaded.runner
        stepper = loaded.stepper()
        before = serve(stepper)
        stepper.close()
        runner.reset()
        for part in tensors_in(runner._kv):
            part.zero_()  # on a CPU memory is taken when it is first written
        awake = taken(device)
        given_back = runner.sleep(1)
        asleep = taken(device)
        runner.wake_up(["weights"], quietly)
        half = taken(device)
        runner.wake_up(["kv_cache"], quietly)
        again = taken(device)
        stepper = loaded.stepper()
        after = serve(stepper)
        stepper.close()
    assert after == before, "other tokens after a sleep"
    report.facts["MiB"] = {
        "awake": awake // _MIB,
        "asleep": asleep // _MIB,
        "weights awake": half // _MIB,
        "awake again": again // _MIB,
        "weights and KV": (loaded.facts.weight_bytes + loaded.kv_bytes) // _MIB,
        "said to be given back": given_back // _MIB,
    }
    fraction = (awake - asleep) / (loaded.facts.weight_bytes + loaded.kv_bytes)
    assert fraction > 0.9, f"only {fraction:.0%} of weights and KV were given back"
    if device != "cpu":  # else what was dropped comes back with its first use
        assert abs(again - awake) < 0.02 * awake
        report.facts["graphs of before were replayed after"] = True
