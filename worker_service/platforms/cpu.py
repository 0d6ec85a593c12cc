"""The CPU: memory is the machine's or the container's, threads are torch's."""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import psutil
import torch

from worker_service.platforms.base import GIB, MemoryReading

# A server on a CPU shares its machine: at most half of what is free, and no more than 4 GiB unless somebody asks.
_FREE_SHARE = 0.5
_DEFAULT_KV_BYTES = 4 * GIB


class CpuPlatform:
    """This machine's cores and memory."""

    name = "cpu"

    def __init__(self, num_threads: int, num_groups_sharing: int = 1) -> None:
        """Take the threads of one forward; 0 is all cores this process may use, or its share of them.

        Args:
            num_threads: of one forward.
            num_groups_sharing: groups on this machine, this rank's included.
        """
        self.device = torch.device("cpu")
        self._num_threads = num_threads
        self._num_groups = num_groups_sharing
        self._num_ranks = 1  # of the group, here

    @property
    def _num_sharing(self) -> int:
        return self._num_ranks * self._num_groups

    def share(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks

    def bind(self) -> None:
        torch.set_num_threads(self._num_threads or max(1, len(os.sched_getaffinity(0)) // self._num_sharing))

    def memory(self) -> MemoryReading:
        machine = psutil.virtual_memory()
        total, available = machine.total, machine.available
        for limit, used in _control_group_limits():
            total = min(total, limit)
            available = min(available, max(0, limit - used))
        return MemoryReading(total=total, available=available, own=psutil.Process().memory_info().rss)

    def measure_peak(self) -> None:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts again from the present size
        except OSError:
            return  # the peak then counts from the start of the process: too high, never too low

    def peak(self) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return int(psutil.Process().memory_info().rss)

    def share_rule(self, utilization: float) -> str:
        return ""  # what others take of the machine's memory may be gone in a moment

    def free_for_kv(self, reading: MemoryReading, base_bytes: int) -> int:
        # Not divided by groups: one that is formed anew finds what the others took gone from what is available.
        return max(0, reading.available - (base_bytes - reading.own)) // self._num_ranks

    def kv_budget(self, reading: MemoryReading, base_bytes: int, utilization: float, needed_bytes: int) -> int:
        free = min(reading.available - (base_bytes - reading.own), int(reading.total * utilization) - base_bytes)
        # Ranks on one machine measure the same memory, each before any of them takes its blocks; and groups are often
        # formed side by side.
        return max(0, min(min(int(free * _FREE_SHARE), _DEFAULT_KV_BYTES) // self._num_sharing, needed_bytes))

    def synchronize(self) -> None:
        pass


def _control_group_limits() -> list[tuple[int, int]]:
    """Return (limit, used) of the control groups that hold this process, page cache that can be dropped left out."""
    found: list[tuple[int, int]] = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2, or the unified part of a hybrid
            root, limit_file, used_file = Path("/sys/fs/cgroup"), "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root, limit_file = Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"
            used_file = "memory.usage_in_bytes"
        else:
            continue
        # A container often sees its own group as the root; every group above limits too.
        below = PurePosixPath(path.lstrip("/"))
        for folder in {root / part for part in (below, *below.parents)} | {root}:
            limit = _read_number(folder / limit_file)
            used = _read_number(folder / used_file)
            if limit is not None and used is not None:
                found.append((limit, max(0, used - _droppable(folder / "memory.stat"))))
    return found


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, or "max"
        return None


def _droppable(path: Path) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
