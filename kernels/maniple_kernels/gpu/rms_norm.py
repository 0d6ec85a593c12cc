"""Root mean square norm of rows, with the residual addition before it: one program a row. Maths in ``rms_norm.py``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from maniple_kernels.gpu.launch import architecture_of
from maniple_kernels.gpu.shapes import shape_of


@triton.jit
def normalize_row(
    x_ptr, residual_ptr, weight_ptr, out_ptr, size, eps, HAS_RESIDUAL: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < size
        x = tl.load(x_ptr + row * size + column, mask=is_column, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + row * size + column, mask=is_column, other=0.0)
            tl.store(residual_ptr + row * size + column, x, mask=is_column)
        squares += x * x
    factor = tl.rsqrt(tl.sum(squares, 0) / size + eps)
    for start in range(0, size, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        is_column = column < size
        if HAS_RESIDUAL:
            x = tl.load(residual_ptr + row * size + column, mask=is_column, other=0.0)
        else:
            x = tl.load(x_ptr + row * size + column, mask=is_column, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=is_column, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * size + column, (x * factor * weight).to(out_ptr.dtype.element_ty), mask=is_column)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """As ``maniple_kernels.rms_norm.rms_norm``."""
    rows, size = x.shape
    out = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    shape = shape_of("rms_norm", architecture_of(x.device))
    normalize_row[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        size,
        eps,
        HAS_RESIDUAL=residual is not None,
        COLUMNS=min(shape.columns, triton.next_power_of_2(size)),
        num_warps=shape.num_warps,
    )
    return out
