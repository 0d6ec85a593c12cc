"""Linear layers with weights laid out in panels: ``y = x W^T + b``, summed in float32, rounded once.

Panels are for CPUs with AVX-512, for bfloat16 with its products of pairs too; see ``cpu/panel_products``. All linears
of the demo model on two Zen 5 cores, in ms, panels / packed by oneDNN / plain: bfloat16 4.6 / 8.6 / 11.2 at 1 row,
6.1 / 8.8 / 12.9 at 8, 13.3 / 15.6 / 19.8 at 32, 147 / 161 / 164 at 512; float32 8 / 14 / 32, 11 / 16 / 38,
25 / 28 / 69, 293 / 321 / 746.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from maniple_kernels.backend import has_cpu_kernels

PANEL = 32  # outputs, as in cpu/panel_products
_NO_BIAS = np.zeros(0, np.float32)


def fits_panels(weight: Tensor) -> bool:
    """Say whether the weights [out_features, in_features] can be laid out in panels, and this CPU multiplies them."""
    out_features, in_features = weight.shape
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16) or not has_cpu_kernels():
        return False
    from maniple_kernels.cpu.panel_products import has_products

    is_bfloat16 = weight.dtype is torch.bfloat16
    return out_features % PANEL == 0 and in_features % 2 == 0 and has_products(bfloat16=is_bfloat16)


def pack_panels(weight: Tensor, empty: Callable[[tuple[int, ...], torch.dtype], Tensor] | None = None) -> Tensor:
    """Return the weights [out_features, in_features] as [out_features / 32, in_features / step, 32, step].

    ``step`` is 2 in bfloat16, 1 in float32. ``empty`` makes the result; it is contiguous.
    """
    out_features, in_features = weight.shape
    step = 2 if weight.dtype is torch.bfloat16 else 1
    shape = out_features // PANEL, in_features // step, PANEL, step
    panels = torch.empty(shape, dtype=weight.dtype) if empty is None else empty(shape, weight.dtype)
    return panels.copy_(weight.view(out_features // PANEL, PANEL, in_features // step, step).transpose(1, 2))


def multiply_panels(
    x: Tensor, panels: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    """Multiply.

    Args:
        x: [num_rows, in_features], contiguous, of the type of the weights.
        panels: of ``pack_panels``.
        bias: [out_features] float32 or bfloat16.
        dtype: of the result, float32 or bfloat16.
        out: where the result is written, of its shape and type, contiguous; None: into a new tensor.
    Returns:
        [num_rows, out_features]. A row has the same bits whatever the others.
    """
    from maniple_kernels.cpu.linear import multiply_rows
    from maniple_kernels.cpu.panel_products import multiply_panel_address
    from maniple_kernels.cpu.simd import flat
    from maniple_kernels.cpu.threads import use_threads

    num_rows, num_inputs = x.shape
    if out is None:
        out = torch.empty((num_rows, len(panels) * PANEL), dtype=dtype)
    if num_rows == 0:
        return out
    biases = _NO_BIAS if bias is None else flat(bias)
    weights = flat(panels)
    multiply = multiply_panel_address(weights.dtype)
    multiply_rows(flat(x), num_rows, num_inputs, weights, biases, flat(out), multiply, use_threads(panels.numel()))
    return out
