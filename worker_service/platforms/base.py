"""What the model runner needs of a device, whatever it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Bytes of the memory that weights and KV share, at one moment."""

    total: int  # of the device, or what this process may ever have of the machine
    available: int  # that could be taken now
    own: int  # taken by this process

    @property
    def foreign(self) -> int:
        """Bytes taken by others."""
        return max(0, self.total - self.available - self.own)


class Platform(Protocol):
    """One kind of device. Used by the device thread alone, except ``name``."""

    name: str  # cpu, cuda
    device: torch.device

    def share(self, num_ranks: int) -> None:
        """Leave their share to the other ranks of the group on the same host threads, ``num_ranks`` with this one."""

    def bind(self) -> None:
        """Make the device the calling thread's, with its share of host threads. Before anything is allocated."""

    def memory(self) -> MemoryReading:
        """Read the memory now."""

    def measure_peak(self) -> None:
        """Begin to measure the highest use of memory."""

    def peak(self) -> int:
        """Return the most bytes that this process had taken since ``measure_peak``."""

    def share_rule(self, utilization: float) -> str:
        """Return the rule that this share of the device breaks since others have taken too much of it, or nothing."""

    def free_for_kv(self, reading: MemoryReading, base_bytes: int) -> int:
        """Return the bytes that are there for KV blocks at the most, whatever is a good idea. See ``kv_budget``."""

    def kv_budget(self, reading: MemoryReading, base_bytes: int, utilization: float, needed_bytes: int) -> int:
        """Return the bytes that KV blocks may take.

        Args:
            reading: from before the profile's dummy step.
            base_bytes: what the process takes without KV.
            utilization: the share of the device that the worker may use.
            needed_bytes: what every row at its longest would take: more is of no use.
        """

    def synchronize(self) -> None:
        """Wait until the device has done what was asked of it."""
