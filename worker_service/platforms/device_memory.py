"""Work out whose the memory of an accelerator is. Pure: what was read is given.

The driver says how much is free and torch how much it holds. What is neither is the context of this process, NCCL's and
cuBLAS's buffers and loaded kernels, which count as ours, or belongs to others, which came before us as a rule. So what
was taken when this process came, and not by torch, is foreign, and what has grown since is ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker_service.platforms.base import GIB, MemoryReading

# The first reading needs a context, so our own is in it. They take 0.3 to 0.7 GiB.
_CONTEXT_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCounts:
    """What driver and torch say at one moment, in bytes."""

    total: int
    free: int
    reserved: int = 0  # by torch's allocator
    allocated: int = 0  # of these, in tensors
    peak_reserved: int = 0

    @property
    def outside_torch(self) -> int:
        """Taken, and not by torch."""
        return max(0, self.total - self.free - self.reserved)


def reading_of(now: DeviceCounts, first: DeviceCounts) -> MemoryReading:
    """Return the reading of a moment.

    Args:
        now: of that moment.
        first: of the moment at which this process came to the device.
    """
    # What torch keeps reserved and does not use is ours to give to KV.
    spare = now.reserved - now.allocated
    return MemoryReading(total=now.total, available=now.free + spare, own=now.allocated + _own_outside(now, first))


def peak_of(now: DeviceCounts, first: DeviceCounts) -> int:
    """Return the most bytes that this process had taken since torch's peak was reset; others' memory left out."""
    return max(now.peak_reserved, now.reserved) + _own_outside(now, first)


def _own_outside(now: DeviceCounts, first: DeviceCounts) -> int:
    return max(0, now.outside_torch - first.outside_torch)


def kv_bytes_left(reading: MemoryReading, base_bytes: int, utilization: float) -> int:
    """Return what is left of this process's share of the device, and really there."""
    there = reading.available - (base_bytes - reading.own)
    return max(0, min(there, int(reading.total * utilization) - base_bytes))


def share_rule(first: DeviceCounts, utilization: float) -> str:
    """Return the rule that ``utilization`` breaks since others have taken too much of the device, or nothing."""
    wanted = int(first.total * utilization)
    if first.free + _CONTEXT_BYTES >= wanted:
        return ""
    fits = int(100 * first.free / first.total) / 100
    smaller = f"use --gpu-memory-utilization {fits:g} or less, or " if fits > 0 else ""
    return (
        f"of the device's {gib(first.total)} is {gib(wanted)}, and {gib(first.outside_torch)} were taken before this "
        f"worker came, {gib(first.free)} were free: {smaller}end what else uses the device (nvidia-smi lists it)"
    )


def gib(num_bytes: int) -> str:
    """Return bytes as people read them."""
    return f"{num_bytes / GIB:.2f} GiB"
