"""Bring an array to a fixed place on the device, without making the host wait.

host    pinned[turn]  ids ids ids  0   0        one of several, so that a copy under way is not written over
|
device             ids ids ids  0   0  - - -    always the same address: what a graph was recorded with
content     padding
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Copies of one array that may be under way: those of the steps in flight, and the one being written.
_TURNS = 4


class StagedArray:
    """An array on the device and the host memory that it is filled from. Device thread."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        """Allocate for the largest content there will be; nothing is filled in yet but zeros."""
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        is_cuda = device.type == "cuda"
        turns = _TURNS if is_cuda else 1
        size = math.prod(shape)
        self._pinned = [torch.zeros(size, dtype=dtype, pin_memory=is_cuda) for _ in range(turns)]
        self._copied: list[torch.cuda.Event] = []
        if is_cuda:
            self._copied = [torch.cuda.Event() for _ in range(turns)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def put(self, values: npt.NDArray[np.generic], *, num_padding: int = 0) -> Tensor:
        """Fill the leading part of each dimension with ``values``, and zeros behind along the first.

        Returns:
            That part of the array on the device, padding included. The copy is on the current stream.
        """
        self._turn = (self._turn + 1) % len(self._pinned)
        if self._copied and not self._copied[self._turn].query():  # type: ignore[no-untyped-call]
            self._copied[self._turn].synchronize()  # the host is that many steps ahead
        count = len(values) + num_padding
        staged = self._pinned[self._turn][: count * math.prod(values.shape[1:])].view(count, *values.shape[1:])
        content = staged.numpy()
        content[: len(values)] = values
        content[len(values) :] = 0
        part = self.tensor[:count]
        for dim, size in enumerate(values.shape[1:], start=1):
            part = part.narrow(dim, 0, size)
        part.copy_(staged, non_blocking=True)
        if self._copied:
            self._copied[self._turn].record()
        return self.tensor[:count]
