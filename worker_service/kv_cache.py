"""Hold keys and values in blocks. How they lie in memory is the attention backend's choice."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from worker_service.attention.base import KvLayer, KvLayout
from worker_service.forward.device_copies import to_device


@dataclass(frozen=True, slots=True, kw_only=True)
class KvCacheSpec:
    """What one block takes."""

    num_layers: int
    num_kv_heads: int  # on this rank
    head_dim: int
    block_size: int
    dtype: torch.dtype
    layout: KvLayout = KvLayout.SLOTS_INNERMOST

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        elements = self.num_layers * self.num_kv_heads * self.head_dim * self.block_size
        return 2 * elements * self.dtype.itemsize


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous pages are zeros and come with the first write: blocks that were never used take no memory.
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class KvCache:
    """The blocks of all layers. Block 0 is the null block: padding writes there and nobody reads it as its own."""

    def __init__(self, spec: KvCacheSpec, num_blocks: int, device: torch.device) -> None:
        outer = (spec.num_layers, num_blocks, spec.num_kv_heads)
        if spec.layout is KvLayout.SLOTS_INNERMOST:
            self._keys = _zeros((*outer, spec.head_dim, spec.block_size), spec.dtype, device)
        else:
            self._keys = _zeros((*outer, spec.block_size, spec.head_dim), spec.dtype, device).transpose(3, 4)
        self._values = _zeros((*outer, spec.block_size, spec.head_dim), spec.dtype, device)
        self.layers: Sequence[KvLayer] = list(zip(self._keys, self._values, strict=True))
        self.num_bytes = num_blocks * spec.block_bytes

    def copy_blocks(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy (kv_group, source, destination) in all layers; all sources are read before anything is written."""
        sources, destinations = to_device(np.array(copies, np.int64)[:, 1:].T.copy(), self._keys.device)
        for cache in (self._keys, self._values):
            cache[:, destinations] = cache[:, sources]
