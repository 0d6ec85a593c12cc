"""Copies between host and device of which the host does not wait for the end."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def to_device(array: npt.NDArray[np.generic], device: torch.device) -> Tensor:
    """Return ``array`` on the device; on the CPU itself. The copy is on the current stream."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)  # torch frees the pinned memory once the copy is done


class Landing:
    """A tensor on its way to the host. Made on the device thread."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin the copy, on the current stream."""
        self._arrived: torch.cuda.Event | None = None
        if tensor.device.type != "cuda":
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._host.copy_(tensor, non_blocking=True)
        self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()

    def wait(self) -> None:
        """Wait until it is there. Any thread."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def take(self) -> npt.NDArray[np.generic]:
        """Return it, once it is there."""
        self.wait()
        array: npt.NDArray[np.generic] = self._host.numpy()
        return array
