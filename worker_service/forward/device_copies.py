"""Copies between host and device of which the host does not wait for the end."""

from __future__ import annotations

import functools

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


@functools.cache
def _stream_home(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for copies to the host: the next step does not wait for them."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


class Landing:
    """A tensor on its way to the host. Made on the device thread."""

    def __init__(self, tensor: Tensor) -> None:
        """Begin the copy, once the current stream has come here; nobody writes to ``tensor`` any more."""
        self._arrived: torch.cuda.Event | None = None
        self._tensor = tensor  # its memory is not given to anybody else before it was read
        if tensor.device.type != "cuda":
            self._host = tensor
            return
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        # The thread that waits sleeps; else it would spin beside the one that launches.
        self._arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        home = _stream_home(tensor.device)
        home.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(home):
            self._host.copy_(tensor, non_blocking=True)
            self._arrived.record(home)

    def wait(self) -> None:
        """Wait until it is there. Any thread."""
        if self._arrived is not None:
            self._arrived.synchronize()

    def take(self) -> npt.NDArray[np.generic]:
        """Return it, once it is there."""
        self.wait()
        array: npt.NDArray[np.generic] = self._host.numpy()
        return array
