"""Memory for weights that every step reads from end to end, in pages of 2 MiB where the system grants them.

With pages of 4 KiB the CPU spends its time on translating addresses and its prefetching ends at every page: all linears
of the demo model take 8.9 ms at one row, 9.4 at 8 and 16.0 at 32 from such, and 7.7, 8.8 and 14.9 from large ones (two
Zen 5 cores, bfloat16).
"""

from __future__ import annotations

import contextlib
import mmap

import torch
from torch import Tensor

_PAGE = 2 << 20
_CHUNK = 32 << 20


class WeightMemory:
    """Hands out memory from chunks; a chunk lives as long as a tensor in it. For one thread and the CPU."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)  # what is left of the present one

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor whose contents are undefined."""
        wanted = torch.Size(shape).numel() * dtype.itemsize
        if wanted > len(self._chunk):
            self._chunk = _pages(max(wanted, _CHUNK))
        taken, self._chunk = self._chunk[:wanted], self._chunk[-(-wanted // 64) * 64 :]  # in whole cache lines
        return taken.view(dtype).view(shape)


def _pages(size: int) -> Tensor:
    """Return fresh memory from the beginning of a large page on."""
    whole = -(-size // _PAGE) * _PAGE
    pages = mmap.mmap(-1, whole + _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(pages, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE
    return memory[start : start + whole]
