"""What gives a device's memory back and takes it again: one small interface, whatever the device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from service_chassis.sleep_tags import KV_CACHE, MEMORY_TAGS, WEIGHTS

__all__ = ["KV_CACHE", "MEMORY_TAGS", "WEIGHTS", "Capabilities", "SleepBackend"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What lives on through a sleep. A worker does without what does not: see ``SleepingMemory``."""

    preserves_communicators: bool  # else a rank of several is never put to sleep
    preserves_graphs: bool  # addresses stay; else the rank warms up again, and captures, once all is awake
    durable: bool  # what is kept of the weights outlives the process


class SleepBackend(Protocol):
    """One way to do it. Used by the device thread alone, with no step under way."""

    name: str
    capabilities: Capabilities

    def region(self, tag: str) -> AbstractContextManager[object]:
        """Return a context in which whatever is allocated on the device may sleep as a part of ``tag``."""

    def sleep(self, tag: str, *, kept: Sequence[Tensor], dropped: Sequence[Tensor]) -> int:
        """Give the memory of these tensors back; return its bytes. Nobody reads them until ``wake_up``.

        Args:
            tag: that they were allocated under; awake.
            kept: have the same contents when they wake.
            dropped: read as zeros when they wake.

        Raises:
            WrongState: there is no place for what is to be kept; nothing was changed.
        """

    def wake_up(self, tag: str) -> None:
        """Take the memory again, for the same tensors. Idempotent."""

    def forget(self, tag: str) -> None:
        """Let go of what is kept of ``tag``: it will not wake, or its contents will be others. Idempotent."""

    def asleep_bytes(self, tag: str) -> int:
        """Return the bytes that ``wake_up`` will take; 0 for what is awake."""
