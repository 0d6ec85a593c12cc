"""The decoder layers of the Llama family on the CPU, one call each, in place on the residual stream r:

    h = norm(r);  q, k, v = qkv(h);  q, k = rotate(norm(q)), rotate(norm(k));  cache k and v
    r = r + output(attention(q, cache));  h = norm(r);  r = r + down(silu(gate(h)) * up(h))

One row of the demo model spends 5 of 13 ms on the way through Python if each operation is a call of its own. The
operations, and their references, are those of ``rms_norm``, ``linear``, ``rotary``, ``kv_store``, ``paged_attention``
and ``silu_mul``; norms of queries and keys are left out where there are no weights for them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maniple_kernels.backend import fits_cpu_kernels
from maniple_kernels.linear import PANEL
from maniple_kernels.paged_attention import LOG2_E, AttentionPlan
from maniple_kernels.quantized_linear import GroupedWeights, arrays_of

_NO_TOKENS = np.zeros(0, np.int64)
_FEW_TOKENS = 32  # of decoding requests, for which no thread waits

Arrays = tuple[Any, ...]
LinearWeights = tuple[Tensor | GroupedWeights, Tensor | None]
"""Weights and bias, if there is one: of the type of the norms with panels, else float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. All linears are panels (``linear.pack_panels``), or all are of 8 or 4 bits (``quantized_linear``)."""

    qkv: LinearWeights
    output: LinearWeights
    gate_up: LinearWeights  # all gates, then all ups
    down: LinearWeights
    attention_norm: Tensor
    mlp_norm: Tensor
    head_norms: tuple[Tensor, Tensor] | None  # of queries and keys
    window: int  # keys that a token sees, itself included; 0: all


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """What all layers have in common."""

    size: int  # of the residual stream
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float  # of the scores

    @property
    def fits(self) -> bool:
        """Whether the kernel walks these sizes, whatever the device."""
        half = self.head_dim // 2
        return self.head_dim % 2 == 0 and half % 16 == 0 and self.size % PANEL == 0 and self.inner_size % PANEL == 0


def _memory_of(array: Any) -> tuple[int, int]:
    return array.ctypes.data, array.size


class DecoderLayers:
    """All layers of one model, their weights as the kernel takes them. For one thread."""

    def __init__(self, layers: Sequence[LayerWeights], shape: LayerShape, cos_sin: Tensor) -> None:
        """Keep the weights; ``cos_sin`` is the table of ``rotary``."""
        from maniple_kernels.cpu.simd import flat

        assert shape.fits
        self._shape = shape
        self._dtype = layers[0].attention_norm.dtype
        self._cos_sin = flat(cos_sin)
        self._is_quantized = isinstance(layers[0].down[0], GroupedWeights)
        nothing = flat(torch.empty(0, dtype=self._dtype))
        no_bias = flat(torch.empty(0)) if self._is_quantized else nothing
        self._weights: list[tuple[Arrays, Arrays, Arrays]] = []
        for layer in layers:
            linears = (layer.qkv, layer.output, layer.gate_up, layer.down)
            products = [
                (
                    arrays_of(weights) if isinstance(weights, GroupedWeights) else flat(weights),
                    no_bias if bias is None else flat(bias),
                )
                for weights, bias in linears
            ]
            norms = (layer.attention_norm, layer.mlp_norm, *(layer.head_norms or ()))
            arrays = tuple(flat(norm) for norm in norms) + (nothing,) * (4 - len(norms))
            numbers = np.float32(shape.eps), np.float32(shape.scale * LOG2_E), layer.window
            self._weights.append((sum(products, ()), arrays, numbers))
        self._windows = np.array([layer.window for layer in layers], np.int64)
        # Address and number of elements of each layer's arrays: its weights as they follow, then keys and values.
        self._memory = np.zeros((len(layers), 14, 2), np.int64)
        if not self._is_quantized:
            for places, (weights, norms, _) in zip(self._memory, self._weights, strict=True):
                places[:12] = [_memory_of(array) for array in (*weights, *norms)]
        self._few_buffers: Arrays = ()
        self._num_few = 0  # tokens that they have room for
        self._buffers: Arrays = ()
        self._num_tokens = 0  # that the buffers have room for
        self._caches: list[Arrays] = []
        self._seen: weakref.ref[Tensor] | None = None

    def fits(self, kv: Sequence[tuple[Tensor, Tensor]]) -> bool:
        """Say whether the layers can run over this cache."""
        keys = kv[0][0]
        return fits_cpu_kernels(keys, keys.shape[3]) and keys.is_contiguous() and keys.dtype is self._dtype

    def run(
        self,
        residual: Tensor,
        positions: Tensor,
        slots: Tensor,
        kv: Sequence[tuple[Tensor, Tensor]],
        plan: AttentionPlan,
    ) -> None:
        """Run all layers.

        Args:
            residual: [num_tokens, size] float32, contiguous; becomes what leaves the last layer, in the rows that the
                plan wants.
            positions: [num_tokens] int64.
            slots: [num_tokens] int64, where each token's keys and values go.
            kv: key and value cache of each layer, as in ``paged_attention``; written.
            plan: of this step.
        """
        from maniple_kernels.cpu.decode_layers import decode_address, run_decode_layers
        from maniple_kernels.cpu.decoder_layer import run_layer
        from maniple_kernels.cpu.paged_attention import FEW_ROWS, attend_addresses
        from maniple_kernels.cpu.panel_products import multiply_panel_address
        from maniple_kernels.cpu.quantized_layer import run_quantized_layer
        from maniple_kernels.cpu.simd import flat
        from maniple_kernels.cpu.threads import use_threads

        shape = self._shape
        num_tokens, group = len(residual), shape.num_heads // shape.num_kv_heads
        width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self._look_at(kv)
        sizes = shape.num_kv_heads, group, shape.head_dim, kv[0][0].shape[3], width
        stream, tokens = flat(residual), (positions.numpy(), slots.numpy())
        num_threads = use_threads(num_tokens * shape.size * (width + 3 * shape.inner_size))
        own, wide = self._caches[0][0].dtype, stream.dtype
        ways = attend_addresses(wide, own, wide if self._is_quantized else own)
        is_few = num_tokens <= _FEW_TOKENS and group <= FEW_ROWS and not self._is_quantized
        if is_few and num_tokens == len(plan.tiles):
            self._make_room_for_few(num_tokens, width)
            run_decode_layers(
                stream,
                num_tokens,
                shape.size,
                self._memory,
                self._windows,
                self._few_buffers,
                self._cos_sin,
                tokens,
                plan.block_tables,
                plan.tiles,
                sizes,
                np.float32(shape.eps),
                np.float32(shape.scale * LOG2_E),
                ways,
                multiply_panel_address(own),
                decode_address(own),
                num_threads,
            )
            return
        self._make_room(num_tokens, width)
        for index, ((products, norms, numbers), cache) in enumerate(zip(self._weights, self._caches, strict=True)):
            given: list[Any] = [stream, num_tokens, shape.size, products, norms, self._buffers, self._cos_sin, tokens]
            given += cache, plan.block_tables
            if self._is_quantized:
                given += plan.tiles, sizes, numbers, ways, num_threads
                run_quantized_layer(*given)
            else:
                wants_all = plan.wanted is None or index + 1 < len(self._weights)
                tiles = plan.tiles if wants_all else plan.wanted_tiles()
                wanted = _NO_TOKENS if plan.wanted is None else plan.wanted
                given += tiles, wanted, wants_all, sizes, numbers, ways, multiply_panel_address(own), num_threads
                run_layer(*given)

    def _make_room_for_few(self, num_tokens: int, width: int) -> None:
        """Have buffers in which no place is used twice in a step."""
        if num_tokens <= self._num_few:
            return
        from maniple_kernels.cpu.simd import flat

        shape, num_layers = self._shape, len(self._weights)
        in_layers = num_layers * num_tokens
        attended_size = shape.num_heads * shape.head_dim
        self._few_buffers = (
            flat(torch.empty((num_layers + 1) * num_tokens * shape.size)),
            flat(torch.empty(in_layers * width)),
            flat(torch.empty(in_layers * shape.size)),
            flat(torch.empty(in_layers * attended_size, dtype=self._dtype)),
            flat(torch.empty(in_layers * shape.inner_size, dtype=self._dtype)),
        )
        self._num_few = num_tokens

    def _make_room(self, num_tokens: int, width: int) -> None:
        if num_tokens <= self._num_tokens:
            return
        from maniple_kernels.cpu.simd import flat

        shape = self._shape
        attended_size = shape.num_heads * shape.head_dim
        if self._is_quantized:
            sizes = [width, attended_size, 2 * shape.inner_size, shape.inner_size]
            types = [torch.float32] * 4
        else:
            sizes = [shape.size, width, attended_size, shape.inner_size]
            types = [self._dtype, torch.float32, self._dtype, self._dtype]
        self._buffers = tuple(
            flat(torch.empty(num_tokens * size, dtype=dtype)) for size, dtype in zip(sizes, types, strict=True)
        )
        self._num_tokens = num_tokens

    def _look_at(self, kv: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Keep the arrays of a cache as long as it lives: its memory must go when its owner lets it go."""
        first = kv[0][0]
        if self._seen is not None and self._seen() is first:
            return
        from maniple_kernels.cpu.simd import flat

        self._caches = [(flat(keys), flat(values)) for keys, values in kv]
        self._memory[:, 12:] = [[_memory_of(array) for array in cache] for cache in self._caches]
        caches = self._caches
        self._seen = weakref.ref(first, lambda _: caches.clear())
