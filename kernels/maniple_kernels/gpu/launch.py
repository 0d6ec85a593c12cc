"""What every launcher needs to know of its device."""

from __future__ import annotations

import functools

import torch
import triton

# What the interpreter, which has no device, takes its shapes from.
_ARCHITECTURE_WITHOUT_DEVICE = 80


@functools.cache
def _capability(index: int) -> int:
    major, _ = torch.cuda.get_device_capability(index)
    return 10 * major


def architecture_of(device: torch.device) -> int:
    """Return the compute capability of ``device``, major version times ten."""
    if device.type != "cuda":
        return _ARCHITECTURE_WITHOUT_DEVICE
    return _capability(torch.cuda.current_device() if device.index is None else device.index)


@functools.cache
def num_processors(device: torch.device) -> int:
    """Return how many programs ``device`` runs side by side, in units of multiprocessors."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def compiled_width(size: int) -> int:
    """Return the size of a tile that holds ``size`` elements: tiles are powers of two, and 16 at least for products."""
    return max(16, int(triton.next_power_of_2(size)))
