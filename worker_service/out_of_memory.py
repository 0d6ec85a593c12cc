"""Turn an allocator's complaint into a sentence for whoever has to act: what was wanted, who has it, what helps.

While a model is loaded, measured or given its cache it is a refusal, and the rank can be asked again. In a step it is
the end of the rank: what was half computed is not known.
"""

from __future__ import annotations

import errno
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from service_chassis.errors import InvalidParameter
from worker_service.platforms.base import MemoryReading, Platform
from worker_service.platforms.device_memory import gib

# torch says on a CPU how many bytes it wanted, on a device a size with its unit.
_WANTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|[KMGT]iB)?")
_HELP: Mapping[str, str] = {
    "load": "use more ranks (--tensor-parallel-size), a smaller or quantized model, or a narrower --dtype",
    "profile": "use a smaller --max-num-batched-tokens or --max-model-len, or more ranks (--tensor-parallel-size)",
    "allocate": "use a smaller --num-kv-blocks or --kv-cache-memory, or leave the size to the server",
    "capture": "use a smaller --gpu-memory-utilization or --max-num-seqs, or --enforce-eager",
    "step": "use a smaller --gpu-memory-utilization or --max-num-batched-tokens",
}


class DeviceOutOfMemory(Exception):
    """The device had no memory left in the middle of a step."""


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether ``error`` is about memory. A CPU's allocator has no class of its own for it."""
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM  # pages that the system does not give
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def sentence(doing: str, error: BaseException, reading: MemoryReading, sizes: Mapping[str, int]) -> str:
    """Say what happened.

    Args:
        doing: load, profile, allocate, capture or step.
        error: of the allocator.
        reading: of the memory, after it failed.
        sizes: bytes by what holds them, as far as known.
    """
    wanted = _WANTED.search(str(error))
    tried = f"{gib(int(wanted[1])) if wanted[2] == 'bytes' else ' '.join(wanted.groups(''))} more" if wanted else "more"
    parts = [f"{gib(size)} {what}" for what, size in sizes.items() if size]
    held = f" ({', '.join(parts)})" if parts else ""
    return (
        f"the device has no {tried}: of {gib(reading.total)} this rank holds {gib(reading.own)}{held}, others "
        f"{gib(reading.foreign)}, {gib(reading.available)} are free; {_HELP[doing]}"
    )


@contextmanager
def explaining_memory(
    doing: str, platform: Platform, sizes: Callable[[], Mapping[str, int]], refused: tuple[str, object] | None = None
) -> Iterator[None]:
    """Explain what fails of memory in the block, and let go of what that had allocated.

    Args:
        doing: as for ``sentence``.
        platform: the device.
        sizes: asked when something fails.
        refused: the parameter and its value that are refused then; None: nothing can be refused any more.

    Raises:
        InvalidParameter: memory ran out, and a parameter is to blame.
        DeviceOutOfMemory: memory ran out, and none is.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = sentence(doing, error, platform.memory(), sizes())
        traceback.clear_frames(error.__traceback__)  # else their tensors live as long as this exception
        if refused is None:
            raise DeviceOutOfMemory(said) from error
        raise InvalidParameter(*refused, f"must fit the memory there is: {said}") from error
