"""Linear layers with weights of 8 or 4 bits on the CPU: ``y = x W^T + b``.

32 inputs that follow each other form a group. Of each output a group's weights are codes with a scale s:

    8 bits:  w = s * c,      c in [-128, 127]
    4 bits:  w = s * c + m,  c in [0, 15], m the least weight of the group

Scales and least weights are float16. Activations are brought to 8 bits on the way in, by group of each row: with a the
largest magnitude of the group over 127, q = round(x / a). Products of codes then add up exactly, as integers:

    y = b + sum over groups of a * (s * sum(c * q) + m * sum(q))

Groups add up in float32, in order: a row has the same bits in any batch, on any number of threads, and on any CPU.
Source for the grouping: the blocks of llama.cpp's Q8_0 and Q4_1, which fit without a loss.

All linears of the demo model on two Zen 5 cores, in ms at 1 / 8 / 32 / 128 rows: 4 bits 3.0 / 4.7 / 12 / 27, 8 bits
3.6 / 5.5 / 12 / 28; bfloat16 packed by oneDNN 8.6 / 8.8 / 15.6 / 46.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from maniple_kernels.backend import has_cpu_kernels

GROUP = 32
_LANES = 16
_NO_BIAS = np.zeros(0, np.float32)


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """Weights as the kernel reads them: 16 outputs side by side, group by group; outputs that are missing are zeros."""

    codes: (
        Tensor  # [tiles, groups, 8 or 4, 16] int32: of 16 outputs four codes each, or eight (the lower nibbles first)
    )
    scales: Tensor  # [tiles, groups, 16] float16
    leasts: Tensor | None  # the same; None: 8 bits
    num_outputs: int

    @property
    def num_inputs(self) -> int:
        """Inputs of the layer."""
        return self.codes.shape[1] * GROUP

    @property
    def num_bytes(self) -> int:
        """Bytes that all of it takes."""
        return sum(t.numel() * t.element_size() for t in (self.codes, self.scales, self.leasts) if t is not None)


def can_quantize() -> bool:
    """Say whether the kernels can be used in this process."""
    return has_cpu_kernels()


def pack_bytes(codes: Tensor, scales: Tensor) -> GroupedWeights:
    """Lay out weights of 8 bits.

    Args:
        codes: [outputs, groups, 32] int8.
        scales: [outputs, groups] float16.
    """
    unsigned = codes.view(torch.uint8).bitwise_xor(0x80)  # code + 128, as the products of bytes want it
    return GroupedWeights(_tiles(unsigned.view(torch.int32)), _tiles(scales), None, len(codes))


def pack_nibbles(codes: Tensor, scales: Tensor, leasts: Tensor) -> GroupedWeights:
    """Lay out weights of 4 bits.

    Args:
        codes: [outputs, groups, 16] uint8: code i of a group in the lower half of byte i, code i + 16 in the upper.
        scales: [outputs, groups] float16.
        leasts: the same.
    """
    return GroupedWeights(_tiles(codes.view(torch.int32)), _tiles(scales), _tiles(leasts), len(codes))


def _tiles(values: Tensor) -> Tensor:
    """Bring [outputs, groups, ...] to [tiles, groups, ..., 16]."""
    padding = -len(values) % _LANES
    if padding:
        values = torch.cat([values, values.new_zeros((padding, *values.shape[1:]))])
    return values.view(-1, _LANES, *values.shape[1:]).movedim(1, -1).contiguous()


def dequantize(weights: GroupedWeights, outputs: Tensor | None = None) -> Tensor:
    """Return the weights as float32 [outputs, inputs], of all outputs or of those named."""
    chosen = torch.arange(weights.num_outputs) if outputs is None else outputs.long()
    tile, lane = chosen // _LANES, chosen % _LANES
    codes = weights.codes[tile, :, :, lane].contiguous().view(torch.uint8)  # [outputs, groups, 32 or 16]
    scales = weights.scales[tile, :, lane].float()[:, :, None]
    if weights.leasts is None:
        wide = codes.float() - 128.0
        return (scales * wide).flatten(1)
    wide = torch.cat([codes & 0x0F, codes >> 4], dim=-1).float()
    return (scales * wide + weights.leasts[tile, :, lane].float()[:, :, None]).flatten(1)


def quantize_activations(x: Tensor) -> Tensor:
    """Return ``x`` [num_rows, inputs] as float32 after the way through 8 bits."""
    groups = x.float().view(len(x), -1, GROUP)
    largest = groups.abs().amax(-1, keepdim=True)
    codes = torch.round(groups * (127.0 / largest.clamp_min(1e-36)))
    return torch.flatten(codes * (largest * (1 / 127)), -2)


def quantized_linear_reference(x: Tensor, weights: GroupedWeights, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As ``quantized_linear``."""
    y = quantize_activations(x) @ dequantize(weights).T
    return (y if bias is None else y + bias).to(dtype)


def quantized_linear(
    x: Tensor, weights: GroupedWeights, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Multiply.

    Args:
        x: [num_rows, inputs], contiguous, float32 or bfloat16.
        weights: of the layer.
        bias: [outputs] float32, a multiple of 16 of them.
        dtype: of the result.
        out: float32, where the result is written if it is float32 and outputs are a multiple of 16; of its shape,
            contiguous. None: into a new tensor.
    Returns:
        [num_rows, outputs].
    """
    from maniple_kernels.cpu.quantized_linear import multiply_rows
    from maniple_kernels.cpu.simd import flat
    from maniple_kernels.cpu.threads import use_threads

    num_rows, num_tiles = len(x), len(weights.codes)
    if out is None or out.shape[1] != num_tiles * _LANES:
        out = torch.empty((num_rows, num_tiles * _LANES))
    if num_rows == 0:
        return out[:, : weights.num_outputs].to(dtype)
    num_threads = use_threads(num_rows * weights.num_inputs * num_tiles * _LANES)
    multiply_rows(
        flat(x),
        num_rows,
        weights.num_inputs // GROUP,
        arrays_of(weights),
        _NO_BIAS if bias is None else flat(bias),
        num_tiles,
        flat(out),
        num_threads,
    )
    return out[:, : weights.num_outputs].to(dtype).contiguous()


def arrays_of(weights: GroupedWeights) -> tuple[Any, Any, Any]:
    """Return codes, scales and least weights as the kernels take them, sharing the tensors' memory; none are empty."""
    from maniple_kernels.cpu.simd import flat

    leasts = torch.empty(0, dtype=torch.float16) if weights.leasts is None else weights.leasts
    return flat(weights.codes), flat(weights.scales.view(torch.uint16)), flat(leasts.view(torch.uint16))
