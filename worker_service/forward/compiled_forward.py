"""Have torch compile a model's forward, as one graph per shape; attention stays what it is.

Attention and the writes to the cache are one operation that the compiler does not look into: caches are no arguments of
the graph, and nothing about them has to be copied or guarded. What the operation works on is set around each call.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from maniple_kernels.backend import cache_directory
from worker_service.attention.base import KvLayer, StepAttention
from worker_service.models.registry import Forward


class _Running(threading.local):
    """The step that this thread computes."""

    kv: Sequence[KvLayer] = ()
    attention: StepAttention | None = None


_running = _Running()


@torch.library.custom_op("maniple::store_and_attend", mutates_args=())
def _store_and_attend(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, layer: int, scale: float, window: int, soft_cap: float
) -> Tensor:
    attention, kv = _running.attention, _running.kv[layer]
    assert attention is not None
    attention.store(keys, values, slots, kv)
    return attention.attend(query, kv, scale, window, soft_cap)


@_store_and_attend.register_fake
def _(
    query: Tensor, keys: Tensor, values: Tensor, slots: Tensor, layer: int, scale: float, window: int, soft_cap: float
) -> Tensor:
    return query.new_empty(query.shape)


class _TracedAttention(StepAttention):
    """What the compiler sees: a layer's cache is its number."""

    def store(self, keys: Tensor, values: Tensor, slots: Tensor, kv: KvLayer) -> None:
        self._stored = keys, values, slots

    def attend(
        self,
        query: Tensor,
        kv: KvLayer,
        scale: float,
        window: int = 0,
        soft_cap: float = 0.0,
        out: Tensor | None = None,
    ) -> Tensor:
        attended: Tensor = torch.ops.maniple.store_and_attend(
            query, *self._stored, cast(int, kv), scale, window, float(soft_cap)
        )
        return attended


class CompiledForward:
    """A ``Forward``. Compiles when it is first called with one token, and with several."""

    def __init__(self, forward: Forward, num_layers: int, *, backend: str) -> None:
        """Take what is compiled, and torch's name of what compiles it."""
        keep_compiled_code()
        self._layers = cast("Sequence[KvLayer]", list(range(num_layers)))
        self._compiled = torch.compile(forward, fullgraph=True, backend=backend)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, slots: Tensor, kv: Sequence[KvLayer], attention: StepAttention
    ) -> Tensor:
        if len(input_ids) > 1:  # one graph for all numbers of tokens, but for a single one
            for tensor in (input_ids, positions, slots):
                torch._dynamo.mark_dynamic(tensor, 0)
        _running.kv, _running.attention = kv, attention
        try:
            return self._compiled(input_ids, positions, slots, self._layers, _TracedAttention())
        finally:
            _running.kv, _running.attention = (), None


def keep_compiled_code() -> None:
    """Keep what torch compiles over restarts, beside what else is compiled here, unless the environment says where."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_directory() / "inductor"))
