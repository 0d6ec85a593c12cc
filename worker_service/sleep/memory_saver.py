"""Sleep on a CUDA device by torch-memory-saver: physical memory goes, addresses stay.

Its regions are memory pools of torch (``hook_mode = "torch"``), so nothing has to be preloaded into the process. It
takes away all that was allocated in a region; what is to be kept is copied to the host first, in pinned memory.
Source: the library's README (fzyzcjy/torch_memory_saver, MIT).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from service_chassis.errors import InvalidParameter
from worker_service.sleep.backend import Capabilities
from worker_service.sleep.tensors import memory_of


@dataclass(slots=True)
class _Asleep:
    kept: list[tuple[Tensor, Tensor]]  # (whole memory as bytes on the device, its copy on the host)
    dropped: list[Tensor]  # whole memories as bytes
    num_bytes: int


class MemorySaverBackend:
    """A ``SleepBackend`` for tensors that were allocated in its regions."""

    name = "torch-memory-saver"
    # NCCL allocates outside the regions, and captured graphs find everything where it was.
    capabilities = Capabilities(preserves_communicators=True, preserves_graphs=True, durable=False)

    def __init__(self) -> None:
        try:
            from torch_memory_saver import torch_memory_saver
        except ImportError:
            rule = "needs the library torch-memory-saver: install maniple[sleep]"
            raise InvalidParameter("sleep_backend", self.name, rule) from None
        torch_memory_saver.hook_mode = "torch"  # before its first region
        self._saver: Any = torch_memory_saver
        self._asleep: dict[str, _Asleep] = {}

    def region(self, tag: str) -> AbstractContextManager[object]:
        context: AbstractContextManager[object] = self._saver.region(tag=tag)
        return context

    def sleep(self, tag: str, *, kept: Sequence[Tensor], dropped: Sequence[Tensor]) -> int:
        assert tag not in self._asleep, f"{tag} sleeps already"
        memories = _whole_memories(kept)
        copies = [(memory, _on_host(memory)) for memory in memories]
        gone = _whole_memories(dropped)
        num_bytes = sum(memory.numel() for memory in (*memories, *gone))
        self._saver.pause(tag)
        self._asleep[tag] = _Asleep(copies, gone, num_bytes)
        return num_bytes

    def wake_up(self, tag: str) -> None:
        asleep = self._asleep.get(tag)
        if asleep is None:
            return
        self._saver.resume(tag)
        for memory, copy in asleep.kept:
            memory.copy_(copy, non_blocking=True)
        for memory in asleep.dropped:
            memory.zero_()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the copies' sources are let go of below
        del self._asleep[tag]

    def forget(self, tag: str) -> None:
        asleep = self._asleep.get(tag)
        if asleep is not None:
            asleep.dropped += [memory for memory, _ in asleep.kept]
            asleep.kept.clear()

    def asleep_bytes(self, tag: str) -> int:
        asleep = self._asleep.get(tag)
        return asleep.num_bytes if asleep is not None else 0


def _whole_memories(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the memory that tensors are views of, each once, as bytes."""
    found = {memory_of(tensor): tensor for tensor in tensors}
    return [
        torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        for tensor in found.values()
    ]


def _on_host(memory: Tensor) -> Tensor:
    copy = torch.empty(memory.shape, dtype=memory.dtype, pin_memory=memory.device.type == "cuda")
    return copy.copy_(memory)
