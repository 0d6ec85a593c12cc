"""Whose memory is counted, what is refused, and what a step says that has no memory."""

from __future__ import annotations

import tempfile
from pathlib import Path
from unittest import mock

import torch

from gpu_checks.loaded import Loaded, shape_for
from gpu_checks.outcome import Report
from service_chassis.errors import InvalidParameter
from worker_service.out_of_memory import DeviceOutOfMemory

_GIB = 2**30


def run(device: str, report: Report) -> None:
    shape = shape_for(device)
    with tempfile.TemporaryDirectory() as directory:
        # On a device with the share that the server takes by default: what was planned must really be there.
        share = (
            {"num_blocks": 100}
            if device == "cpu"
            else {"utilization": 0.9, "max_num_seqs": 256, "max_model_len": 16_000}
        )
        loaded = Loaded(device, Path(directory), shape, **share)  # type: ignore[arg-type]
        facts, platform = loaded.memory, loaded.runner._platform
        report.facts["GiB"] = {
            "total": round(facts.total_bytes / _GIB, 2),
            "taken by others before": round(facts.foreign_bytes / _GIB, 2),
            "weights": round(facts.weight_bytes / _GIB, 3),
            "for a step": round(facts.activation_bytes / _GIB, 3),
            "KV cache": round(loaded.kv_bytes / _GIB, 2),
            "graphs": round(loaded.graph_bytes / _GIB, 3),
            "ours at the end": round(platform.memory().own / _GIB, 2),
        }
        if device != "cpu":
            now = platform.memory()
            assert now.own <= 0.93 * now.total, "the share of 0.9 was overdrawn"
            outside = now.own - torch.cuda.memory_allocated(0)
            report.facts["ours outside torch, MiB"] = round(outside / 2**20)
            check_dirty_card(loaded, report)
        try:
            loaded.runner.allocate_kv_cache(1 << 40)
        except InvalidParameter as error:
            report.facts["refusal of a cache"] = error.message
        else:
            raise AssertionError("a cache of petabytes was not refused")
        loaded.runner.allocate_kv_cache(100)
        loaded.num_blocks = 100
        check_step(loaded, device, report)


def check_dirty_card(loaded: Loaded, report: Report) -> None:
    """See a share refused that somebody else, in a process of his own, has taken."""
    import subprocess
    import sys

    loaded.runner._forget_graphs()
    loaded.runner._kv = None
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(0)
    taken = int(0.3 * total)
    program = (
        f"import torch; x = torch.empty({taken}, dtype=torch.uint8, device='cuda'); torch.cuda.synchronize(); "
        "print('taken', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == b"taken\n"
            from worker_service.platforms.cuda import CudaPlatform

            late = CudaPlatform(0)
            late.bind()
            rule = late.share_rule(0.9)
            assert "were taken before this worker came" in rule, f"not refused: {rule!r}"
            report.facts["refusal of a share"] = rule
        finally:
            other.kill()
    assert torch.cuda.mem_get_info(0)[0] > free - taken


def check_step(loaded: Loaded, device: str, report: Report) -> None:
    """Have a step ask for more than there is."""
    forward = loaded.runner._forward

    def greedy_for_memory(*arguments: object) -> torch.Tensor:
        return torch.empty(1 << 58, dtype=torch.uint8, device=loaded.runner._platform.device)

    stepper = loaded.stepper()
    with mock.patch.object(loaded.runner, "_forward", greedy_for_memory):
        stepper.submit({0: 3}, new=[stepper.enter(0, [1, 2, 3])])
        try:
            stepper.drain()
        except DeviceOutOfMemory as error:
            report.facts["a step without memory"] = str(error)
        else:
            raise AssertionError("a step without memory did not fail")
    stepper.close()
    assert loaded.runner._forward is forward
    # The device itself is none the worse.
    stepper = loaded.stepper()
    stepper.submit({0: 3}, new=[stepper.enter(0, [1, 2, 3])])
    stepper.drain()
    stepper.close()
