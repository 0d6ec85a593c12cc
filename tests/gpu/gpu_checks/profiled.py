"""What a profile of steady steps says: calls that wait, and how much of the time the device computes. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

# Calls of CUDA's runtime or driver in which the host waits for the device. cudaEventSynchronize is how the landing
# thread waits, which is what it is for; on the device thread nothing may wait.
WAITING = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cuStreamSynchronize",
    "cuCtxSynchronize",
    "cudaMemcpy",
    "cudaFree",
    "cudaMalloc",
    "cudaHostAlloc",
)
# How work comes to the device. What waits behind the last of it is the profiler's own doing.
LAUNCHES = ("cudaGraphLaunch", "cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")


@dataclass(frozen=True, slots=True)
class Span:
    """One thing in a profile; times in microseconds."""

    name: str
    start: float
    end: float
    on_device: bool


def hidden_waits(spans: Sequence[Span]) -> dict[str, int]:
    """Return calls of the host that wait while there is more to launch, with how often.

    Exactly these names, not those that begin so.
    """
    calls = [span for span in spans if not span.on_device]
    last_launch = max((span.start for span in calls if span.name in LAUNCHES), default=0.0)
    return dict(Counter(span.name for span in calls if span.name in WAITING and span.start < last_launch))


def busy_share(spans: Sequence[Span]) -> float:
    """Return the share of the time between the first and the last work of the device in which it had some."""
    work = sorted((span.start, span.end) for span in spans if span.on_device)
    if not work:
        return 0.0
    busy, until = 0.0, work[0][0]
    for start, end in work:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / max(until - work[0][0], 1e-9)
