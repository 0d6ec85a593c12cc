"""The gated activation of the MLP, silu or gelu (by tanh), times the second half. Maths in ``silu_mul.py``.

``gelu(x) = x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x ** 3)))``, which is ``x * sigmoid`` of twice that argument.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of


@triton.jit
def gate_tile(x_ptr, out_ptr, size, IS_GELU: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < size
    gate = tl.load(x_ptr + row * 2 * size + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * size + size + column, mask=is_column, other=0.0).to(tl.float32)
    argument = gate
    if IS_GELU:
        argument = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    active = gate / (1 + tl.exp(-argument))
    tl.store(out_ptr + row * size + column, (active * up).to(out_ptr.dtype.element_ty), mask=is_column)


def gate_mul(gate_up: Tensor, *, activation: str = "silu") -> Tensor:
    """Return the activation of the first half of each row times the second half.

    Args:
        gate_up: [num_tokens, 2 * size], contiguous.
        activation: silu or gelu.
    Returns:
        [num_tokens, size], a new tensor.
    """
    assert activation in ("silu", "gelu")
    rows, width = gate_up.shape
    size = width // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    shape = shape_of("gate", architecture_of(gate_up.device))
    columns = min(shape.columns, triton.next_power_of_2(size))
    gate_tile[(rows, triton.cdiv(size, columns))](
        gate_up, out, size, IS_GELU=activation == "gelu", COLUMNS=columns, num_warps=shape.num_warps
    )
    return out
