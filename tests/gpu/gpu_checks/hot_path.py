"""Steady decode steps in a profile: no call in them that waits for the device."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from gpu_checks.loaded import Loaded, shape_for
from gpu_checks.outcome import Report
from gpu_checks.profiled import Span, busy_share, hidden_waits
from support.stepper import Stepper

_WARM, _PROFILED = 10, 24


def profile_steps(stepper: Stepper, num_steps: int, device: str) -> list[Span]:
    """Return what happens in so many steps, from when rows are steady."""
    stepper.decode(_WARM)
    stepper.drain()
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device != "cpu" else [])
    profiler = profile(activities=activities)
    # It follows the thread that starts it, which is to be the one that launches.
    stepper.loop.call(profiler.start).result(60)
    stepper.decode(num_steps)
    stepper.drain()
    stepper.loop.call(profiler.stop).result(60)
    return spans_of(profiler)


def spans_of(profiler: profile) -> list[Span]:
    """Return what a profile holds."""
    spans = []
    for event in profiler.events() or ():
        on_device = event.device_type == torch.autograd.DeviceType.CUDA
        spans.append(Span(event.name, event.time_range.start, event.time_range.end, on_device))
    return spans


def run(device: str, report: Report) -> None:
    with tempfile.TemporaryDirectory() as directory:
        loaded = Loaded(device, Path(directory), shape_for(device), num_blocks=300)
        stepper = loaded.stepper(ahead=3)
        rows = [stepper.enter(row, [1 + row] * 20) for row in range(8)]
        stepper.submit(dict.fromkeys(range(8), 20), new=rows)
        spans = profile_steps(stepper, _PROFILED, device)
        stepper.close()
    assert spans, "the profile is empty"
    report.facts["steps"] = _PROFILED
    report.facts["events"] = len(spans)
    if device == "cpu":
        report.not_run.append("calls that wait for the device: needs a device")
        return
    report.facts["device busy, of a model of 4 layers"] = f"{busy_share(spans):.1%}"
    waits = hidden_waits(spans)
    assert not waits, f"the host waits in steady steps: {waits}"
